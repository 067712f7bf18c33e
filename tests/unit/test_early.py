"""Early prefetch, rule by rule: when a request is asked about, how often, and what is given back.

Against a real store; requests are fakes and vLLM is not needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtally.client import StoreClient
from kvtally.core.handoff import Handoff
from kvtally.core.receipts import Role
from kvtally.vllm import lookup_policy
from kvtally.vllm.boundaries import Boundaries, Extras
from kvtally.vllm.counters import Counters
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.lookup_thread import LookupAnswer, LookupThread, PromptLookup
from kvtally.vllm.tracked_request import TrackedRequest
from kvtally.wire.messages import MissReason
from tests.unit.early_kit import CHUNK, DENSE, PROMPT, Asked, lookups, request, save, store
from tests.unit.shell import Bench, Running
from tests.waiting import HANG_S, HOUR_S, Clock, eventually

__all__ = ["lookups", "store"]  # fixtures

HOUR_MS = int(HOUR_S * 1e3)


@pytest.fixture
def policy(lookups: Asked, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LookupPolicy]:
    monkeypatch.setattr(lookup_policy, "REFRESH_NS", HOUR_MS * 1_000_000)

    def make(*, wait_ms: int = HOUR_MS, **settings: Any) -> LookupPolicy:
        return LookupPolicy(lookups, Counters(), wait_ms=wait_ms, **settings)

    return make


def question(name: str = "r", tokens: list[int] = PROMPT, **changes: Any) -> TrackedRequest:
    return TrackedRequest(request(name, tokens, **changes), Boundaries(CHUNK, Extras()), may_save=True)


def matched(policy: LookupPolicy, asked: TrackedRequest) -> int:
    """As the scheduler does it: ask in every step until there is an answer."""
    eventually(lambda: policy.answer(asked) is not None)
    assert asked.attempt.answer is not None
    return asked.attempt.answer.end_tokens


def test_called_before_scheduling(policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench) -> None:
    """The lookup is answered before the scheduler has asked for anything, and without its help."""
    save(bench)
    policy().arrived(question())
    eventually(lambda: lookups.asked[0].answer is not None)
    assert lookups.asked[0].is_early
    assert lookups.asked[0].answer is not None
    assert lookups.asked[0].answer.end_tokens == 192


def test_skipped_for_incomplete_prompts(policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench) -> None:
    """A streaming input is asked about when it is scheduled, not before its tokens are there."""
    save(bench)
    scheduler = policy()
    streaming = question(tokens=PROMPT[:10], resumable=True)
    scheduler.arrived(streaming)
    assert lookups.asked == []
    streaming.request.prompt_token_ids = PROMPT
    assert matched(scheduler, streaming) == 192
    assert [lookup.is_early for lookup in lookups.asked] == [False]


def test_idempotent(policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench) -> None:
    """One lookup for one request, whatever the order and number of calls."""
    save(bench)
    scheduler = policy()
    for name in ("first", "second"):
        asked = question(name)
        scheduler.arrived(asked)
        assert matched(scheduler, asked) == 192
        assert matched(scheduler, asked) == 192
        scheduler.answer(asked)
    assert len(lookups.asked) == 2


def test_off_switch(policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench, store: Running) -> None:
    """With `prefetch: off` nothing happens until the scheduler asks; then the same is found."""
    save(bench)
    scheduler = policy(prefetch=False)
    asked = question()
    before = store.stats("lookups", "total")
    scheduler.arrived(asked)
    assert lookups.asked == []
    assert store.stats("lookups", "total") == before
    assert matched(scheduler, asked) == 192
    assert [lookup.is_early for lookup in lookups.asked] == [False]


def test_the_deadline_counts_from_when_the_scheduler_comes(policy: Callable[..., LookupPolicy], lookups: Asked) -> None:
    scheduler = policy(wait_ms=2000)
    asked = question()
    scheduler.arrived(asked)
    (lookup,) = lookups.asked
    assert lookup.deadline_ns - lookup.asked_ns > 10_000_000_000  # a queue may be long
    lookup.is_wanted, lookup.answer = False, None
    scheduler.answer(asked)
    assert lookup.answer is not None or lookup.deadline_ns - time.monotonic_ns() <= 2_000_000_000


def test_what_was_saved_while_a_request_queued_is_found(
    policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = policy()
    monkeypatch.setattr(lookup_policy, "REFRESH_NS", 0)
    asked = question()
    scheduler.arrived(asked)
    eventually(lambda: lookups.asked[0].answer is not None)
    save(bench)
    assert matched(scheduler, asked) == 192
    assert len(lookups.asked) == 2


def test_an_aborted_request_gives_back_what_it_holds(
    policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench, store: Running
) -> None:
    save(bench)
    scheduler = policy()
    for name, is_matched in (("early", False), ("late", True)):
        asked = question(name)
        scheduler.arrived(asked)
        if is_matched:
            matched(scheduler, asked)
            assert asked.attempt.answer is not None
            assert asked.attempt.answer.lease is not None
            lookups.release(asked.attempt.answer.lease)
        scheduler.ended(asked)
    eventually(lambda: lookups.asked[0].answer is not None)
    eventually(lambda: store.stats("leases", "open") == 0)
    assert store.stats("arena", "held_bytes") == 0


def test_place_and_priority_reach_the_store(policy: Callable[..., LookupPolicy], lookups: Asked) -> None:
    scheduler = policy()
    first = question("r0")
    scheduler.arrived(first)
    for number in (1, 2):
        scheduler.arrived(question(f"r{number}", priority=-number))
    scheduler.ended(first)
    scheduler.arrived(question("r3"))
    assert [(lookup.ahead, lookup.priority) for lookup in lookups.asked] == [(0, 0), (1, -1), (2, -2), (2, 0)]


def test_loading_is_weighed_only_when_the_rate_is_known_and_not_when_told_to_load_always(
    policy: Callable[..., LookupPolicy], lookups: Asked, clock: Clock
) -> None:
    clock.stop()
    for always_load in (False, True):
        scheduler = policy(always_load=always_load)
        scheduler.arrived(question())
        scheduler.step_launched(500)
        clock.forward(0.01)
        scheduler.step_done()
        scheduler.arrived(question())
    unknown, known, _, never = (lookup.prefill_tokens_s for lookup in lookups.asked)
    assert (unknown, known, never) == (0, 50_000, 0)


def rate(scheduler: LookupPolicy, clock: Clock, happened: list[tuple[int, int | None]]) -> float:
    """Steps by the millisecond: so many tokens are launched, or the oldest is done (None)."""
    clock.stop()
    now_ms = 0
    for at_ms, tokens in happened:
        clock.forward((at_ms - now_ms) / 1e3)
        now_ms = at_ms
        if tokens is None:
            scheduler.step_done()
        else:
            scheduler.step_launched(tokens)
    return scheduler._rate.tokens_s


def test_empty_steps_do_not_end_others(policy: Callable[..., LookupPolicy], clock: Clock) -> None:
    """An engine that has waited for a load launches the rest of the prompt before it hears that the empty step is done:
    2,000 tokens in 96 ms, not in 4."""
    happened: list[tuple[int, int | None]] = []
    for begun in range(1000, 2000, 200):
        happened += [(begun, 0), (begun, 2000), (begun + 4, None), (begun + 100, None)]
    assert rate(policy(), clock, happened) == pytest.approx(2000 / 0.096, rel=0.01)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_whose_end_is_never_heard_of_shifts_nothing(
    policy: Callable[..., LookupPolicy], clock: Clock, in_flight: int
) -> None:
    """Steps of a prompt and of one token take turns. Taken for one another, they would make the engine ten times as
    fast."""
    happened: list[tuple[int, int | None]] = [(0, 1)]  # this one
    launched = 1000
    for number in range(40):
        happened.append((launched, 1000 if number % 2 else 1))
        if number >= in_flight - 1:
            launched += 100 if (number - in_flight + 1) % 2 else 10
            happened.append((launched, None))
    measured = rate(policy(steps_in_flight=in_flight), clock, happened)
    assert measured == pytest.approx(10_000, rel=0.05)


# ---- an engine that computes nothing


def test_an_idle_engine_waits_for_the_answer_instead_of_asking_again(
    policy: Callable[..., LookupPolicy], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_policy, "IDLE_WAIT_S", HANG_S)
    save(bench)
    scheduler = policy()
    asked = question()
    scheduler.arrived(asked)
    answer = scheduler.answer(asked)
    assert answer is not None
    assert answer.end_tokens == 192


class Nobody(Asked):
    """Answers nothing, and counts how often somebody waited."""

    def __init__(self) -> None:
        super().__init__(lambda: StoreClient("nowhere"))  # not started
        self.waits = 0

    def wait(self, lookup: PromptLookup, timeout_s: float) -> None:
        self.waits += 1


def test_it_does_not_wait_where_others_wait_for_it() -> None:
    nobody = Nobody()
    scheduler = LookupPolicy(nobody, Counters(), wait_ms=HOUR_MS, is_alone=False)
    asked = question()
    scheduler.arrived(asked)
    assert scheduler.answer(asked) is None
    assert nobody.waits == 0


def test_it_waits_once_in_a_step_and_not_while_anything_runs() -> None:
    nobody = Nobody()
    scheduler = LookupPolicy(nobody, Counters(), wait_ms=HOUR_MS)

    def waits(asked: TrackedRequest) -> bool:
        before = nobody.waits
        assert scheduler.answer(asked) is None
        return nobody.waits > before

    first, second, running = question("first"), question("second"), question("running")
    for asked in (first, second, running):
        scheduler.arrived(asked)
    assert waits(first)
    assert not waits(second)
    scheduler.step_launched(0)
    assert waits(second)
    scheduler.began(running)
    scheduler.step_launched(1)
    assert not waits(first)
    scheduler.ended(running)
    scheduler.step_launched(0)
    assert waits(first)


# ---- what is not worth asking for


def test_a_trifle_is_computed(policy: Callable[..., LookupPolicy], clock: Clock) -> None:
    scheduler = policy()
    asked = question()
    assert not scheduler.is_trifle(asked, 1)  # how fast this engine is, is not known yet
    clock.stop()
    scheduler.step_launched(1_000)
    clock.forward(1.0)
    scheduler.step_done()
    assert scheduler.is_trifle(asked, 4)
    assert not scheduler.is_trifle(asked, 6)
    handed_over = TrackedRequest(request(), Boundaries(CHUNK, Extras()), Handoff(ticket="t", role=Role.DECODE))
    assert not scheduler.is_trifle(handed_over, 4)


def test_always_load_loads_trifles_too(policy: Callable[..., LookupPolicy]) -> None:
    scheduler = policy(always_load=True)
    scheduler.step_launched(1_000_000_000)
    scheduler.step_done()
    assert not scheduler.is_trifle(question(), 1)


def test_what_was_asked_for_a_trifle_is_given_back(bench: Bench, store: Running) -> None:
    save(bench)
    late = Asked(lambda: StoreClient(str(bench.path), namespace=DENSE))
    scheduler = LookupPolicy(late, Counters(), wait_ms=HOUR_MS)
    asked = question()
    scheduler.arrived(asked)
    assert scheduler.leave(asked)
    assert scheduler.answer(asked) == LookupAnswer(reason=MissReason.NO_GAIN)
    scheduler.ended(asked)
    late.start()
    eventually(lambda: late.asked[0].answer is not None)
    eventually(lambda: store.stats("leases", "open") == 0)
    late.stop()


def test_an_engine_first_looks_at_its_own_cache(policy: Callable[..., LookupPolicy], lookups: Asked) -> None:
    """What that covers, the store never hears of."""
    scheduler = policy(may_leave=True)
    for name in ("first", "second"):
        asked = question(name)
        scheduler.arrived(asked)
        assert scheduler.leave(asked)
        scheduler.began(asked)
        scheduler.step_launched(1)
    assert lookups.asked == []


@pytest.mark.parametrize(("is_saved", "is_opaque"), [(True, False), (False, False), (True, True)])
def test_the_path_of_what_nobody_is_asked_about_is_walked_elsewhere(
    policy: Callable[..., LookupPolicy],
    lookups: Asked,
    monkeypatch: pytest.MonkeyPatch,
    is_saved: bool,
    is_opaque: bool,
) -> None:
    """Chains of a long prompt take milliseconds, which are not the scheduler's."""
    walkers: list[str] = []
    whole = PromptLookup.walk

    def walk(self: PromptLookup) -> None:
        walkers.append(threading.current_thread().name)
        whole(self)

    monkeypatch.setattr(PromptLookup, "walk", walk)
    scheduler, asked = policy(may_leave=True), question()
    asked.is_opaque, asked.may_save = is_opaque, is_saved and not is_opaque
    scheduler.arrived(asked)
    assert scheduler.leave(asked)
    if is_saved and not is_opaque:
        eventually(lambda: asked.attempt.lookup is not None and asked.attempt.lookup.is_walked)
        assert asked.boundaries.end_tokens == 192
    lookups.stop()
    assert walkers == ["kvtally-lookup"] * (is_saved and not is_opaque)
    assert lookups.asked == []


def test_where_many_arrive_before_a_step_the_first_are_asked_about_meanwhile(
    policy: Callable[..., LookupPolicy], lookups: Asked, clock: Clock
) -> None:
    scheduler = policy(may_leave=True)
    clock.stop()
    first, second = question("first"), question("second")
    scheduler.arrived(first)
    clock.forward(1.0)
    scheduler.arrived(second)
    assert lookups.asked == [first.attempt.lookup]
    scheduler.step_launched(0)
    assert lookups.asked == [first.attempt.lookup, second.attempt.lookup]


@pytest.fixture
def arrived(policy: Callable[..., LookupPolicy], bench: Bench) -> tuple[LookupPolicy, TrackedRequest]:
    """A request that the store has, and that the scheduler has not come to yet."""
    save(bench)
    scheduler, asked = policy(may_leave=True), question()
    scheduler.arrived(asked)
    return scheduler, asked


def test_whom_the_scheduler_does_not_come_to_is_asked_about_after_its_step(
    arrived: tuple[LookupPolicy, TrackedRequest], lookups: Asked
) -> None:
    scheduler, asked = arrived
    scheduler.step_launched(0)
    scheduler.step_launched(0)
    assert [lookup.is_early for lookup in lookups.asked] == [True]
    assert matched(scheduler, asked) == 192
    assert len(lookups.asked) == 1


def test_what_was_left_is_asked_about_when_it_is_evicted(
    arrived: tuple[LookupPolicy, TrackedRequest], lookups: Asked
) -> None:
    """It waited for room, and others took what the engine's own cache had of it."""
    scheduler, asked = arrived
    assert scheduler.leave(asked)
    assert scheduler.come_back(asked)
    assert matched(scheduler, asked) == 192
    assert not scheduler.come_back(asked)  # that answer stays
    assert matched(scheduler, asked) == 192
    assert len(lookups.asked) == 1
    assert asked.boundaries.end_tokens == 192
    assert (scheduler._waiting, scheduler._running) == (1, 0)


def test_the_early_answer_that_was_left_is_given_back_before_it_is_asked_for_again(
    policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench, store: Running
) -> None:
    save(bench)
    scheduler = policy()
    asked = question()
    scheduler.arrived(asked)
    if scheduler.leave(asked):  # else the store was quicker
        assert scheduler.come_back(asked)
        assert len(lookups.asked) == 1
    assert matched(scheduler, asked) == 192
    scheduler.ended(asked)
    assert asked.attempt.answer is not None
    assert asked.attempt.answer.lease is not None
    lookups.release(asked.attempt.answer.lease)
    eventually(lambda: store.stats("leases", "open") == 0)


def test_an_engine_that_does_not_read_leaves_what_is_evicted(
    policy: Callable[..., LookupPolicy], lookups: Asked
) -> None:
    scheduler = policy(may_leave=True, reads=False)
    asked = question()
    assert scheduler.leave(asked)
    walked = asked.attempt.lookup
    assert not scheduler.come_back(asked)
    assert asked.attempt.lookup is walked  # until its path is there, nobody else may walk it
    assert lookups.asked == []


def test_nobody_asks_about_an_aborted_request(policy: Callable[..., LookupPolicy], lookups: Asked) -> None:
    scheduler = policy(may_leave=True)
    asked = question()
    scheduler.arrived(asked)
    scheduler.ended(asked)
    scheduler.step_launched(0)
    assert lookups.asked == []


def test_an_answer_that_is_there_is_taken(policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench) -> None:
    save(bench)
    scheduler = policy()
    asked = question()
    scheduler.arrived(asked)
    eventually(lambda: lookups.asked[0].answer is not None)
    assert not scheduler.leave(asked)
    assert matched(scheduler, asked) == 192


def test_a_failed_turn_leaves_what_is_answered_as_it_is(
    policy: Callable[..., LookupPolicy], lookups: Asked, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(bench)
    whole = LookupThread._advance

    def fail(self: LookupThread, client: StoreClient, lookup: PromptLookup) -> bool:
        is_over = whole(self, client, lookup)
        if is_over:
            lookup.is_cancelled = True  # its lease would be given back
            raise ValueError("for a test")
        return is_over

    monkeypatch.setattr(LookupThread, "_advance", fail)
    policy().arrived(question())
    eventually(lambda: bool(lookups.asked) and lookups.asked[0].answer is not None and not lookups._active)
    answer = lookups.asked[0].answer
    assert answer is not None
    assert answer.lease is not None
