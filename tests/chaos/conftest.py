"""One daemon for all tests that leave it as they found it: starting a process takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.processes import StoreProcess
from tests.chaos.single import NAMESPACE


@pytest.fixture(scope="package")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    directory = tmp_path_factory.mktemp("daemon")
    store = StoreProcess(directory, "--memory", "16MiB", "--disk-size", "16MiB", namespace=NAMESPACE)
    yield store
    store.close()
