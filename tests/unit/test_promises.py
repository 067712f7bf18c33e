"""What a lookup asks of its store, message by message, while it waits for what prefill promised or for the name of its
adapter: the test is the store, and gives every answer by hand.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtally.core.handoff import Handoff
from kvtally.core.receipts import Loaded, Role
from kvtally.vllm.adapters import Adapter
from kvtally.vllm.boundaries import Boundaries, Extras
from kvtally.vllm.lookup_thread import LONGEST_WAIT_MS, LookupAnswer, LookupThread, PromptLookup
from kvtally.wire.frames import encode
from kvtally.wire.messages import Done, Found, Lookup, MissReason, ReceiptGet, Release, Reply, Staged
from tests.unit.fake_store import NAMESPACE, Action, FakeStore, World
from tests.waiting import HANG_S, HOUR_S, Clock, eventually

CHUNK = NAMESPACE.chunk_tokens
PROMPT = list(range(600))
END = len(PROMPT) - 1
HERE, THERE, ELSEWHERE = "tcp://10.0.0.7:7400", "tcp://10.0.0.8:7400", "tcp://10.0.0.9:7400"


def boundaries(adapter: Adapter | None = None) -> Boundaries:
    return Boundaries(CHUNK, Extras(adapter))


PROMISE = Handoff(
    ticket="t",
    role=Role.DECODE,
    store="store-1",
    namespace=NAMESPACE.digest.hex(),
    saved_tokens=END,
    prompt_tokens=len(PROMPT),
    chain=boundaries().tail(PROMPT, END).chain.hex(),
)


class Desk:
    """A store that answers no lookup by itself, and an engine's lookup thread that is connected to it."""

    def __init__(self, store: FakeStore, client: Any) -> None:
        self.store = store
        store.on[Lookup] = lambda _: []
        self.lookups = LookupThread(lambda: client, NAMESPACE)
        self.lookups.start()
        eventually(lambda: self.lookups.store)  # else it would not know yet where it is
        self._peer: socket.socket = store.peers.get(timeout=HANG_S)

    def question(self) -> Lookup:
        """The next one that comes."""
        return self.store.take(Lookup)

    def say(self, *replies: Reply) -> None:
        for reply in replies:
            self._peer.sendall(encode(reply))

    def turns(self) -> None:
        """Until the lookup thread has looked at everything that was said."""
        for _ in range(3):
            came_to_it = threading.Event()
            self.lookups._commands.put(lambda client, done=came_to_it: done.set())  # type: ignore[misc]
            assert came_to_it.wait(HANG_S)

    def ask(
        self,
        told: Handoff | None = PROMISE,
        *,
        within_s: float = HOUR_S,
        adapter: Adapter | None = None,
        **changes: Any,
    ) -> PromptLookup:
        """It may wait for an hour: what is answered in a test did not wait for its deadline."""
        now_ns = time.monotonic_ns()
        lookup = PromptLookup(PROMPT, boundaries(adapter), now_ns + int(within_s * 1e9), now_ns, told, **changes)
        self.lookups.ask(lookup)
        return lookup


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def desk(world: World) -> Iterator[Desk]:
    store = world.store()
    store.address = HERE
    desk = Desk(store, world.client())
    yield desk
    desk.lookups.stop()


def answer(lookup: PromptLookup) -> LookupAnswer:
    eventually(lambda: lookup.answer is not None)
    assert lookup.answer is not None
    return lookup.answer


# ---- one question


@pytest.mark.parametrize("is_early", [False, True])
def test_one_question_waits_in_the_store(desk: Desk, is_early: bool) -> None:
    lookup = desk.ask(is_early=is_early, is_wanted=not is_early)
    question = desk.question()
    assert (question.until_tokens, question.ticket, question.wait_ms) == (END, "t", LONGEST_WAIT_MS)
    assert (question.hold, question.early, question.source, question.deliver) == (True, is_early, "", "")
    desk.turns()
    assert not desk.store.saw(Lookup)  # nor does it ask what became of prefill's promise
    assert not desk.store.saw(ReceiptGet)
    desk.say(Found(question.id, END, 9))
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (END, "")


def test_a_second_try_waits_for_the_first_ones_prefill(desk: Desk) -> None:
    desk.ask(structs.replace(PROMISE, ticket="second", promise="first"))
    assert desk.question().ticket == "first"


def test_who_was_promised_nothing_waits_for_nothing(desk: Desk) -> None:
    lookup = desk.ask(Handoff(ticket="t", role=Role.DECODE))
    question = desk.question()
    assert (question.until_tokens, question.wait_ms) == (0, 0)
    desk.say(Found(question.id, 0, reason=MissReason.ABSENT))
    assert answer(lookup).reason == MissReason.ABSENT


def test_what_the_store_waited_for_in_vain_is_asked_for_again_at_once(desk: Desk, clock: Clock) -> None:
    clock.stop()
    lookup = desk.ask()
    for lease in (1, 2, 3):
        question = desk.question()
        clock.forward(LONGEST_WAIT_MS / 1e3)
        desk.say(Found(question.id, CHUNK, lease, reason=MissReason.ABSENT))
    question = desk.question()
    assert lookup.answer is None
    clock.forward(2 * HOUR_S)
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (0, MissReason.DEADLINE)  # the lease ended long ago


def test_at_the_deadline_the_last_answer_is_used(desk: Desk) -> None:
    lookup = desk.ask()
    desk.say(Found(desk.question().id, CHUNK, 1, reason=MissReason.ABSENT))
    desk.question()
    lookup.deadline_ns = time.monotonic_ns()
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (CHUNK, MissReason.DEADLINE)


def test_a_store_that_does_not_wait_is_not_asked_without_a_pause(desk: Desk, clock: Clock) -> None:
    """One of an older version, which does not know what was promised."""
    desk.store.on[Lookup] = lambda request: [Found(request.id, 0, reason=MissReason.ABSENT)]
    clock.stop()
    lookup = desk.ask()
    asked_ms: list[int] = []
    for now_ms in range(50):
        desk.turns()
        eventually(lambda: lookup.call is None)  # it was answered, and the next one is not due yet
        while desk.store.saw(Lookup):
            desk.question()
            asked_ms.append(now_ms)
        clock.forward(0.001)
    assert asked_ms == [0, 10, 20, 30, 40]


def test_shortly_before_the_deadline_it_does_not_ask_without_end(desk: Desk, clock: Clock) -> None:
    """The store may wait for half of what is left, each time: a millisecond at least."""
    clock.stop()
    lookup = desk.ask(within_s=0.5)
    waits = []
    while lookup.answer is None:
        eventually(lambda: desk.store.saw(Lookup) or lookup.answer is not None)
        if lookup.answer is None:
            question = desk.question()
            waits.append(question.wait_ms)
            clock.forward(question.wait_ms / 1e3)
            desk.say(Found(question.id, 0, reason=MissReason.ABSENT))
    assert waits == [250, 125, 62, 31, 16, 8, 4, 2, 1, 1]


# ---- what ends the wait


@pytest.mark.parametrize("end", [0, CHUNK])
def test_a_withdrawn_promise_ends_the_wait(desk: Desk, end: int) -> None:
    lookup = desk.ask()
    question = desk.question()
    desk.say(Found(question.id, end, 9 if end else 0, reason=MissReason.ABSENT, withdrawn=MissReason.ARENA_FULL))
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (end, MissReason.ARENA_FULL)


FOREIGN = structs.replace(PROMISE, store="store-of-another-node", address=THERE)


@pytest.mark.parametrize("reason", [MissReason.PEER_LOST, MissReason.FOREIGN_STORE])
@pytest.mark.parametrize("end", [0, CHUNK])
def test_a_store_that_cannot_be_asked_ends_the_wait(desk: Desk, reason: MissReason, end: int) -> None:
    lookup = desk.ask(FOREIGN)
    question = desk.question()
    assert (question.source, question.until_tokens, question.ticket) == (THERE, END, "t")
    desk.say(Found(question.id, end, 9 if end else 0, reason=reason))
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (end, reason)


def test_a_store_that_goes_away_while_it_is_read_leaves_what_has_landed(desk: Desk) -> None:
    lookup = desk.ask(FOREIGN)
    question = desk.question()
    desk.say(Found(question.id, END, 9, staging=3))
    desk.turns()
    assert lookup.answer is None
    desk.say(Staged(0, 9, 2 * CHUNK, MissReason.PEER_LOST, peer_tokens=CHUNK + 1))
    found = answer(lookup)
    assert (found.end_tokens, found.reason) == (2 * CHUNK, MissReason.PEER_LOST)
    assert found.sources == Loaded(host=CHUNK - 1, peer=CHUNK + 1)


def test_what_is_still_to_come_elsewhere_is_waited_for(desk: Desk, clock: Clock) -> None:
    clock.stop()
    lookup = desk.ask(FOREIGN)
    question = desk.question()
    clock.forward(LONGEST_WAIT_MS / 1e3)
    desk.say(Found(question.id, 0, reason=MissReason.PENDING))
    question = desk.question()
    assert (question.source, question.until_tokens) == (THERE, END)
    desk.say(Found(question.id, END, 9, staging=1), Staged(0, 9, END, peer_tokens=END))
    found = answer(lookup)
    assert (found.end_tokens, found.reason, found.sources) == (END, "", Loaded(peer=END))


# ---- which store


@pytest.mark.parametrize(
    ("changes", "source", "until_tokens"),
    [
        ({}, "", END),
        ({"address": HERE}, "", END),
        ({"address": HERE, "source": THERE}, THERE, END),
        ({"source": HERE}, "", END),
        ({"source": THERE}, THERE, END),
        ({"store": "another", "address": THERE}, THERE, END),
        ({"store": "another", "address": THERE, "source": ELSEWHERE}, THERE, END),
        # without an address nobody can ask it; and what our own store held before it was started again is gone
        ({"store": "another"}, "", 0),
        ({"store": "another", "address": HERE}, "", 0),
        # its bytes are of no use here, but somebody else's may be
        ({"store": "another", "address": THERE, "namespace": "00" * 32}, "", 0),
        ({"store": "another", "address": THERE, "namespace": "00" * 32, "source": ELSEWHERE}, ELSEWHERE, 0),
        ({"store": "another", "address": THERE, "chain": "00" * 32}, "", 0),
    ],
)
def test_the_question_names_the_store_that_has_the_bytes(
    desk: Desk, changes: dict[str, Any], source: str, until_tokens: int
) -> None:
    desk.ask(structs.replace(PROMISE, **changes))
    question = desk.question()
    assert (question.source, question.until_tokens) == (source, until_tokens)


def test_tails_are_looked_for_where_the_rest_is(desk: Desk) -> None:
    """They are lengths that the other store has told, too."""
    lookup = desk.ask(Handoff(ticket="t", role=Role.DECODE, source=THERE))
    question = desk.question()
    desk.say(Found(question.id, CHUNK, 9, tails=[40], reason=MissReason.ABSENT))
    question = desk.question()
    assert (question.ends, question.source, question.wait_ms) == ([CHUNK, CHUNK + 40], THERE, 0)
    desk.say(Found(question.id, CHUNK + 40, 10))
    assert answer(lookup).end_tokens == CHUNK + 40


@pytest.mark.parametrize("end", [0, CHUNK])
def test_a_tail_that_does_not_help_changes_no_reason(desk: Desk, end: int) -> None:
    """Its question ends elsewhere than the promise, which does not mean that prefill saw other tokens."""
    lookup = desk.ask(FOREIGN)
    question = desk.question()
    desk.say(Found(question.id, end, 9 if end else 0, tails=[40, 41], reason=MissReason.PEER_LOST))
    for tail in (41, 40):
        question = desk.question()
        assert question.ends[-1] == end + tail
        desk.say(Found(question.id, end, 10 if end else 0, reason=MissReason.ABSENT))
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (end, MissReason.PEER_LOST)


def test_a_tail_that_helps_has_its_own_reason(desk: Desk) -> None:
    lookup = desk.ask(FOREIGN)
    question = desk.question()
    desk.say(Found(question.id, CHUNK, 9, tails=[40], reason=MissReason.PEER_LOST))
    question = desk.question()
    desk.say(Found(question.id, CHUNK + 40, 10, reason=MissReason.STATE_ABSENT))
    assert (answer(lookup).end_tokens, answer(lookup).reason) == (CHUNK + 40, MissReason.STATE_ABSENT)


# ---- prefill's side

PREFILL = Handoff(ticket="t", role=Role.PREFILL, source=ELSEWHERE, deliver=THERE)


def test_prefill_has_its_prompt_offered_to_decodes_store_up_to_its_end(desk: Desk) -> None:
    """The end is the boundary that it hands over. It cannot use it itself: one token is always computed."""
    lookup = desk.ask(PREFILL, deliver=THERE)
    question = desk.question()
    assert (question.deliver, question.source, question.until_tokens, question.wait_ms) == (THERE, ELSEWHERE, 0, 0)
    assert question.ends == [CHUNK, 2 * CHUNK, len(PROMPT)]
    assert question.limit_tokens == END
    desk.say(Found(question.id, CHUNK, 9, tails=[40], reason=MissReason.ABSENT))
    assert desk.question().deliver == ""  # once is enough
    lookup.is_cancelled = True


@pytest.mark.parametrize(("deliver", "asked"), [(THERE, True), ("", False)])
def test_a_prompt_that_nobody_is_asked_about_is_offered_all_the_same(desk: Desk, deliver: str, asked: bool) -> None:
    now_ns = time.monotonic_ns()
    lookup = PromptLookup(PROMPT, boundaries(), now_ns + int(HOUR_S * 1e9), now_ns, PREFILL, deliver)
    desk.lookups.walk(lookup)
    eventually(lambda: lookup.is_walked)
    desk.turns()
    if asked:
        question = desk.question()
        assert (question.deliver, question.hold) == (THERE, False)
    assert not desk.store.saw(Lookup)
    assert answer(lookup) == LookupAnswer(reason=MissReason.REFUSED)


def test_ones_own_store_is_offered_nothing(desk: Desk) -> None:
    desk.ask(PREFILL, deliver=HERE)
    assert desk.question().deliver == ""


def test_leases_of_answers_that_are_superseded_are_given_back(desk: Desk, clock: Clock) -> None:
    released: list[int] = []

    def release(request: Release) -> list[Action]:
        released.extend(request.leases)
        return [Done(request.id)]

    desk.store.on[Release] = release
    clock.stop()
    desk.ask()
    for lease in (1, 2, 3):
        question = desk.question()
        clock.forward(LONGEST_WAIT_MS / 1e3)
        desk.say(Found(question.id, CHUNK, lease, reason=MissReason.ABSENT))
    desk.question()
    eventually(lambda: len(released) == 2)
    assert released == [1, 2]


# ---- adapters


def test_a_prompt_is_asked_about_when_its_adapter_has_a_name(desk: Desk) -> None:
    adapter = Adapter()
    lookup = desk.ask(None, adapter=adapter)
    desk.turns()
    assert not desk.store.saw(Lookup)
    assert not lookup.is_walked
    adapter.identity = "adapter:1"
    question = desk.question()
    named = boundaries(Adapter("adapter:1"))
    named.extend(PROMPT, END)
    assert question.chains.startswith(b"".join(named.chains))
    desk.say(Found(question.id, CHUNK, 9))
    assert answer(lookup).end_tokens == CHUNK


def test_others_do_not_wait_for_an_adapters_name(desk: Desk) -> None:
    first, second = desk.ask(None, adapter=Adapter()), desk.ask(None)
    question = desk.question()
    desk.say(Found(question.id, CHUNK, 9))
    assert answer(second).end_tokens == CHUNK
    assert first.answer is None


def test_an_adapter_without_a_name_is_a_miss_by_that_name(desk: Desk) -> None:
    assert answer(desk.ask(adapter=Adapter(""))) == LookupAnswer(reason=MissReason.UNKNOWN_ADAPTER)
    late = desk.ask(adapter=Adapter())
    desk.turns()
    late.deadline_ns = time.monotonic_ns()
    assert (answer(late).end_tokens, answer(late).reason) == (0, MissReason.UNKNOWN_ADAPTER)
    assert not late.is_walked
    desk.turns()
    assert not desk.store.saw(Lookup)


@pytest.mark.parametrize("identity", ["adapter:1", ""])
def test_boundaries_that_are_only_saved_wait_for_the_name_too(desk: Desk, identity: str) -> None:
    adapter, now_ns = Adapter(), time.monotonic_ns()
    lookup = PromptLookup(PROMPT, boundaries(adapter), now_ns + int(HOUR_S * 1e9), now_ns)
    desk.lookups.walk(lookup)
    desk.turns()
    assert not lookup.is_walked
    adapter.identity = identity
    eventually(lambda: not desk.lookups._active)
    assert lookup.is_walked is bool(identity)
    assert not desk.store.saw(Lookup)
