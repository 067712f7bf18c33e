"""`kvtally doctor URL` on real vLLM servers: two engines that share a store, healthy and broken.

What doctor says of a healthy deployment must be what the engines did, and of a broken one its first cause the true one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from kvtally.doctor.live import Limits, examine
from kvtally.doctor.verdict import Diagnosis, Outcome
from kvtally.testing.deployment import Deployment
from kvtally.testing.models import DENSE, Model, Recipe
from kvtally.verify.http import Server
from tests.waiting import HANG_S

pytestmark = pytest.mark.engine

REQUEST_S = 300.0


@pytest.fixture(scope="module")
def up(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[Recipe, int], Model],
    tmp_path_factory: pytest.TempPathFactory,
    patient: None,
) -> Iterator[Deployment]:
    """The parameter is how long engines wait for the store, and answers for their receipts, in milliseconds."""
    wait_ms = getattr(request, "param", int(HANG_S * 1e3))
    connector, router = {"wait_ms": wait_ms}, {"receipt_wait": min(wait_ms, 60_000)}
    directory = tmp_path_factory.mktemp("doctor")
    deployment = Deployment(tiny_model(DENSE, 0), directory, connector=connector, router=router)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(autouse=True)
def _engines_count_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtally.doctor.live.COUNTERS_S", HANG_S)
    monkeypatch.setattr("kvtally.doctor.live.QUIET_S", HANG_S)


def connect(url: str) -> Server:
    return Server(url, timeout_s=REQUEST_S)


def examined(router: str, up: Deployment, *, named: bool = True, requests: int = 60) -> Diagnosis:
    engines = ([connect(up.prefill)], [connect(up.decode)]) if named else ([], [])
    limits = Limits(requests=requests)
    return examine(connect(router), *engines, seed=os.getpid(), limits=limits, connect=connect)


def test_a_healthy_deployment_is_real(up: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtally.doctor.live.SETTLED_S", HANG_S)  # each prompt is new, so prefill counts it
    found = examined(up.router, up)
    assert found.outcome is Outcome.REAL, found
    assert all(seen.reused_tokens == seen.prompt_tokens - 1 for seen in found.seen), found.seen
    assert all(seen.is_compared and not seen.comparison.problem for seen in found.seen), found.seen
    assert 0 < found.requests <= 60


def test_a_kvtally_router_names_its_engines(up: Deployment) -> None:
    found = examined(up.router, up, named=False)
    assert found.outcome is Outcome.REAL, found
    assert [engine.role for engine in found.engines] == ["prefill", "decode"]


def test_a_router_that_never_asks_prefill(up: Deployment) -> None:
    """Decode itself stands for one."""
    found = examined(up.decode, up)
    assert found.outcome is Outcome.NONE, found
    assert found.causes[0].what == "the router never asked prefill"


@pytest.mark.parametrize("up", [1_000], indirect=True)
def test_a_cache_that_does_not_answer(up: Deployment) -> None:
    """Whether the router still asks prefill then is its own decision; that nothing is reused is ours to see. Two long
    prompts are enough, since each waits for the store, for as long as these engines do."""
    store = up.pid_of("store")
    os.kill(store, signal.SIGSTOP)
    try:
        found = examined(up.router, up, requests=10)
    finally:
        os.kill(store, signal.SIGCONT)
    assert found.outcome is Outcome.NONE, found
    assert [(seen.is_long, seen.reused_tokens) for seen in found.seen] == [(True, 0), (True, 0)]
    assert found.causes, found
