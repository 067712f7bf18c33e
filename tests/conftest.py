"""For all tests: nothing of the machine that runs them reaches them, neither its settings nor its speed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtally.client import StoreClient
from kvtally.store.server import StoreServer
from tests.patient.patience import PATIENCE
from tests.unit.shell import Bench
from tests.waiting import HANG_S, Clock

# No deadline for an example, and none for making one: how long that takes is the machine's business.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# About what fits under the time limit that pytest sets for one test: KVTALLY_HYPOTHESIS=thorough looks longer.
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1_000)
settings.load_profile(os.environ.get("KVTALLY_HYPOTHESIS", "default"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("KVTALLY_") and variable != "KVTALLY_HYPOTHESIS":
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test names no deadline, clients, stores and routers of this process wait for one another as tests do."""
    for module, constants in PATIENCE.items():
        for name, value in constants.items():
            monkeypatch.setattr(f"{module}.{name}", value)
    monkeypatch.setitem(StoreClient.__init__.__kwdefaults__, "timeout_s", HANG_S)
    monkeypatch.setitem(StoreServer.__init__.__kwdefaults__, "hello_timeout_s", HANG_S)


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for this machine's addresses, which is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:127.0.0.2,IP:127.0.0.3"]
    subprocess.run(
        [*command.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=HANG_S
    )
    return cert, key


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()
