"""For all tests: no setting of the machine that runs them reaches them, and a bench for those that start stores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.shell import Bench


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("KVTALLY_") and variable != "KVTALLY_HYPOTHESIS":
            monkeypatch.delenv(variable)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()
