"""Early prefetch in the scheduler half as vLLM calls it; the rules themselves are in tests/unit/test_early.py.

Requests are fakes; no engine is started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.early_kit import DENSE, Asked, lookups, request, save, scheduler_half, step, store
from tests.unit.shell import Bench
from tests.waiting import eventually

__all__ = ["lookups", "store"]  # fixtures
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def half(lookups: Asked) -> Callable[..., Any]:
    from kvtally.vllm.layout import EngineLayout

    layout = EngineLayout(namespace=DENSE, group_ids=(0,), layer_names=(("l",),), block_tokens=16)
    return lambda **settings: scheduler_half(layout, lookups, **settings)


def matched(half: Any, asked: Any) -> int:
    found: list[int] = []

    def is_known() -> bool:
        count, _ = half.matched_tokens(asked, 0)
        found.extend([] if count is None else [count])
        return count is not None

    eventually(is_known)
    return found[0]


def test_called_before_scheduling(half: Callable[..., Any], lookups: Asked, bench: Bench) -> None:
    """The lookup is answered before the scheduler has asked for anything, and without its help."""
    save(bench)
    scheduler = half()
    scheduler.on_new_request(request())
    scheduler.build_step(step({"another": 1}))  # a step in which the scheduler does not come to it
    eventually(lambda: lookups.asked[0].answer is not None)
    assert lookups.asked[0].is_early
    assert lookups.asked[0].answer is not None
    assert lookups.asked[0].answer.end_tokens == 192


def test_idempotent(half: Callable[..., Any], lookups: Asked, bench: Bench) -> None:
    """One lookup for one request, whatever the order and number of calls."""
    save(bench)
    scheduler = half()
    for name in ("first", "second"):
        asked = request(name)
        scheduler.on_new_request(asked)
        scheduler.on_new_request(asked)
        assert matched(scheduler, asked) == 192
        assert matched(scheduler, asked) == 192
        scheduler.on_new_request(asked)
        scheduler.matched_tokens(asked, 64)
    assert len(lookups.asked) == 2


def test_where_the_engine_holds_nearly_all_nobody_waits_for_the_store(half: Callable[..., Any], bench: Bench) -> None:
    """PROMPT has 200 tokens: with 192 in the engine's cache the store could add 7, and this engine computes
    that sooner than anything is loaded."""
    save(bench)
    fast = half()
    fast.policy.step_launched(100_000)
    fast.policy.step_done()
    hit = request("hit")
    fast.on_new_request(hit)
    assert fast.matched_tokens(hit, 192) == (0, False)
    track = fast._requests["hit"]
    assert not fast.policy.is_trifle(track, 1_000_000_000)
    eventually(lambda: track.are_boundaries_free)  # what is saved of it waits for its path
    assert len(track.boundaries.chains) == 3
    slow, cold = half(), request("cold")
    slow.on_new_request(cold)
    assert matched(slow, cold) == 192
    assert slow.matched_tokens(cold, 64) == (128, True)


class Private(list[int]):
    """Tokens that the engine's thread must leave alone: there may be a hundred thousand of them."""

    def _refuse(self, *_: object) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "the engine's thread looks at tokens"

    def __getitem__(self, index: Any) -> Any:
        self._refuse()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self._refuse()
        return super().__iter__()


def test_arrival_costs_the_engine_the_same_for_any_prompt(half: Callable[..., Any], lookups: Asked) -> None:
    """Its own thread looks at no token: chains are computed by the lookup thread."""
    scheduler = half()
    asked = request(tokens=Private(range(16_000)))
    scheduler.on_new_request(asked)
    scheduler.build_step(step({"another": 1}))
    eventually(lambda: lookups.asked[0].is_walked)
    assert len(lookups.asked[0].chains) == 250
    with pytest.raises(AssertionError, match="looks at tokens"):
        asked.all_token_ids[0]
