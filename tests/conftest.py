"""For all tests: nothing of the machine that runs them reaches them, neither its settings nor its speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtally.client import StoreClient, link
from kvtally.router import app, intake, receipts, upstream
from kvtally.store.server import StoreServer
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
    monkeypatch.setattr(link, "HANDSHAKE_NS", int(HANG_S * 1e9))
    monkeypatch.setitem(StoreClient.__init__.__kwdefaults__, "timeout_s", HANG_S)
    monkeypatch.setitem(StoreServer.__init__.__kwdefaults__, "hello_timeout_s", HANG_S)
    monkeypatch.setattr(receipts, "HANDSHAKE_S", HANG_S)
    monkeypatch.setattr(receipts, "ANSWER_SLACK_S", HANG_S)
    monkeypatch.setattr(upstream, "CONNECT_S", HANG_S)
    monkeypatch.setattr(app, "FIRST_TRY_S", HANG_S)
    monkeypatch.setattr(intake, "BODY_S", HANG_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()
