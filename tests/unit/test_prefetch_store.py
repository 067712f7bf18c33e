"""Prefetch at the store: who is staged first, what is given back, what is not worth loading, what is counted.

Message by message against the store without I/O; and a thousand requests, half of them aborted, against a real one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvtally.client import Miss
from kvtally.core.keys import ROOT_CHAIN, chain_value
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.prefetch import Planner
from kvtally.store.jobs import Outcome, ReadJob
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo
from kvtally.store.tiers.base import ObjectRecord
from kvtally.testing.copying import CopyingClient
from kvtally.vllm.boundaries import Boundaries, Extras
from kvtally.vllm.counters import Counters
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.lookup_thread import LookupThread
from kvtally.vllm.tracked_request import TrackedRequest
from kvtally.wire.limits import MIB, SECOND_NS, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    MissReason,
    PutObject,
    PutStatus,
    Release,
    SlotsGet,
    Staged,
    Wanted,
)
from tests.unit.shell import Bench, Running
from tests.waiting import HOUR_S, eventually

GRANULE = 4096
CHUNK = 64
PLAIN = Namespace(
    model="plain",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=CHUNK, page_bytes=((GRANULE,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)


def chains(prompt: int, count: int) -> list[bytes]:
    found = [ROOT_CHAIN]
    for number in range(count):
        found.append(chain_value(found[-1], (1000 * prompt + number).to_bytes(4, "little") * CHUNK))
    return found[1:]


class Node:
    """A store whose lower tiers hold some prompts, one client, a clock. Reads end when the test says so."""

    def __init__(self, prompts: dict[int, tuple[int, int]], *, granules: int = 32, staging: int = 8) -> None:
        tiers = [TierInfo(name=name, capacity_bytes=1 << 30) for name in ("disk", "slow")]
        limits = Limits(staging_bytes=staging * GRANULE)
        self.store = Store(name="n", version="0", arena_bytes=granules * GRANULE, limits=limits, tiers=tiers)
        self.now_ns = 1
        self.prompts = {prompt: chains(prompt, count) for prompt, (_, count) in prompts.items()}
        for prompt, (tier, _) in prompts.items():
            for index, chain in enumerate(self.prompts[prompt]):
                self.store.recover(tier, self._record(prompt, index, chain))
        self.session = self.store.connect(shared_memory=True, now_ns=1)
        self.jobs: list[ReadJob] = []
        self.ask(Hello(1, PROTOCOL_VERSION, "test", canonical(PLAIN)))

    def _record(self, prompt: int, index: int, chain: bytes) -> ObjectRecord:
        return ObjectRecord(
            namespace=PLAIN,
            chain=chain,
            parent=self.prompts[prompt][index - 1] if index else ROOT_CHAIN,
            start_tokens=index * CHUNK,
            end_tokens=(index + 1) * CHUNK,
            group=0,
            rank=0,
            length_bytes=GRANULE,
            checksum=1,
        )

    def ask(self, request: Any) -> list[Any]:
        self.store.handle(self.session, request, self.now_ns)
        return self.effects()

    def effects(self) -> list[Any]:
        self.store.check()
        self.jobs += [job for job in self.store.take_jobs() if isinstance(job, ReadJob)]
        return [message for _, message in self.store.take_outbox()]

    def lookup(self, prompt: int, **options: Any) -> Found:
        path = self.prompts[prompt]
        ends = [(index + 1) * CHUNK for index in range(len(path))]
        (found, *_) = self.ask(Lookup(2, b"".join(path), ends, ends[-1], hold=True, **options))
        assert isinstance(found, Found)
        return found

    def land(self, count: int = 1, *, after_s: float = 0.001) -> list[Any]:
        """Let the next reads end, one after the other."""
        messages = []
        for _ in range(count):
            self.now_ns += int(after_s * 1e9)
            self.store.job_done(self.jobs.pop(0), Outcome(), self.now_ns)
            messages += self.effects()
        return messages

    def reading(self) -> list[int]:
        """Which prompts the reads in flight are for."""
        owner = {chain: prompt for prompt, path in self.prompts.items() for chain in path}
        return [owner[job.record.chain] for job in self.jobs]

    def tier(self, number: int = 0) -> dict[str, Any]:
        return msgspec.to_builtins(self.store.stats(self.now_ns).tiers[number])  # type: ignore[no-any-return]


def test_the_queue_and_priority_decide_who_is_read_first() -> None:
    node = Node(dict.fromkeys(range(1, 6), (1, 2)), granules=64, staging=2)
    node.lookup(1, early=True)  # takes the tier at once
    node.lookup(2, early=True, ahead=9)
    node.lookup(3, early=True, ahead=1)
    node.lookup(4, early=True, ahead=9, priority=-1)
    node.lookup(5)
    order = []
    while node.jobs:
        order += node.reading()[:1]
        node.land()
    assert order == [1, 5, 5, 4, 4, 1, 3, 3, 2, 2]


def test_a_request_that_the_engine_comes_to_overtakes_those_that_are_early() -> None:
    node = Node(dict.fromkeys(range(1, 4), (1, 2)), granules=64, staging=1)
    leases = {prompt: node.lookup(prompt, early=True, ahead=prompt).lease for prompt in (1, 2, 3)}
    node.ask(Wanted(3, leases[3]))
    order = []
    while node.jobs:
        order += node.reading()
        node.land()
    assert order == [1, 3, 3, 1, 2, 2]


def test_leases_wait_for_room_and_hold_nothing_until_then() -> None:
    """The arena has 32 granules: a lane of three has 8, of which those that are early may have 6."""
    node = Node(dict.fromkeys(range(1, 5), (1, 4)))
    leases = [node.lookup(prompt, early=True).lease for prompt in range(1, 5)]
    assert node.reading() == [1] * 4
    assert node.land(4)[0].end_tokens == 4 * CHUNK
    assert node.jobs == []
    stats: Any = msgspec.to_builtins(node.store.stats(node.now_ns))
    assert (stats["leases"]["waiting"], stats["arena"]["held_bytes"]) == (3, 4 * GRANULE)
    node.ask(Wanted(3, leases[2]))  # who is wanted may have the rest
    assert node.reading() == [3] * 4
    node.land(4)
    node.ask(Release(4, [leases[0], leases[2]]))
    assert node.reading() == [2] * 4


def test_a_slow_tier_does_not_stop_the_others() -> None:
    node = Node({1: (2, 4), 2: (2, 4), 3: (2, 4), 4: (1, 4)})
    for prompt in (1, 2, 3):
        node.lookup(prompt)
    node.lookup(4, early=True, ahead=100)
    assert [prompt for prompt in node.reading() if prompt == 4] == [4] * 4


def test_a_tier_that_hangs_is_asked_for_nothing_more_until_something_comes() -> None:
    node = Node({1: (1, 1), 2: (1, 2), 3: (2, 2)})
    node.lookup(1)
    node.land(after_s=1e-6)  # its speed is known now
    assert node.lookup(2).end_tokens == 2 * CHUNK
    assert node.tier()["state"] == "ok"
    node.now_ns += 3_000_000_000  # nothing comes
    assert node.tier()["state"] == "stuck"
    missed = node.lookup(2)
    assert (missed.end_tokens, missed.reason) == (0, MissReason.STAGING_FAILED)
    assert node.lookup(1).end_tokens == CHUNK  # it is in memory
    assert node.lookup(3).end_tokens == 2 * CHUNK  # the other tier is as good as before
    node.land()
    assert node.tier()["state"] == "ok"
    assert node.lookup(2).end_tokens == 2 * CHUNK


def test_a_new_tier_is_given_more_time() -> None:
    node = Node({1: (1, 2)})
    node.lookup(1)
    node.now_ns += 5_000_000_000
    assert node.lookup(1).end_tokens == 2 * CHUNK
    node.now_ns += 6_000_000_000
    assert node.lookup(1).end_tokens == 0


def test_what_is_cancelled_is_given_back_at_once() -> None:
    node = Node({1: (1, 4), 2: (1, 4)}, staging=1)
    first, second = node.lookup(1, early=True), node.lookup(2, early=True)
    node.ask(Release(3, [first.lease, second.lease]))
    stats: Any = msgspec.to_builtins(node.store.stats(node.now_ns))
    assert stats["arena"]["held_bytes"] == 0
    assert stats["leases"] == {"open": 0, "waiting": 0, "expired": 0}
    assert node.land() == []  # the one read that had begun
    assert node.jobs == []
    assert node.tier()["prefetched"]["cancelled"] == 2


def test_a_lease_that_never_gets_room_expires() -> None:
    node = Node({1: (1, 8), 2: (1, 8)})
    node.lookup(1, early=True)
    node.lookup(2, early=True, lease_ms=1000)
    node.now_ns += 2 * SECOND_NS
    node.store.tick(node.now_ns)
    (staged,) = node.effects()
    assert (staged.end_tokens, staged.reason) == (0, MissReason.LEASE_EXPIRED)


def test_what_everybody_needs_is_held_and_read_once() -> None:
    node = Node({1: (1, 5)}, staging=16)
    leases = [node.lookup(1, early=True).lease for _ in range(20)]
    assert len(node.jobs) == 5
    assert sorted(staged.lease for staged in node.land(5)) == leases
    assert node.store.stats(node.now_ns).arena.held_bytes == 5 * GRANULE


def measured(node: Node, prompt: int, *, after_s: float) -> None:
    """Let the store see how fast its tier is."""
    found = node.lookup(prompt)
    while node.jobs:
        node.land(after_s=after_s)
    node.ask(Release(9, [found.lease]))


def test_what_takes_longer_to_load_than_to_compute_is_left() -> None:
    node = Node({1: (1, 4), 2: (1, 4)})
    measured(node, 1, after_s=1.0)
    found = node.lookup(2, prefill_tokens_s=1000)
    assert found.staging
    assert node.store.take_outbox() == []
    assert node.tier()["prefetched"]["skipped"] == 1
    assert node.reading() == []


def test_the_estimates_are_told_and_what_is_fast_enough_is_loaded() -> None:
    node = Node({1: (1, 4), 2: (1, 4)})
    measured(node, 1, after_s=0.001)
    node.lookup(2, prefill_tokens_s=1000)
    staged = node.land(4)[0]
    assert isinstance(staged, Staged)
    assert (staged.end_tokens, staged.left_tokens, staged.reason) == (256, 0, "")
    assert (round(staged.load_ms), round(staged.compute_ms)) == (4, 256)


def test_what_waits_is_walked_over_once_for_each_tier_and_weighing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each boundary that could be promised: with thousands of objects waiting the loop stood still."""
    node = Node({1: (1, 20), 2: (1, 20)}, granules=256)
    walks: list[tuple[int, int]] = []
    backlog_bytes = Planner.backlog_bytes

    def counted(planner: Planner[Any], tier: int, wish: int) -> int:
        walks.append((tier, wish))
        return backlog_bytes(planner, tier, wish)

    monkeypatch.setattr(Planner, "backlog_bytes", counted)
    node.lookup(1)
    node.land()  # the tier's speed is known now
    found = node.lookup(2, prefill_tokens_s=1)
    assert walks == [(1, found.lease)]


def test_while_nobody_waits_even_a_slow_tier_is_worth_reading() -> None:
    """Early, everything is staged; when the engine comes, only what is there by then is kept."""
    node = Node({1: (1, 4), 2: (1, 4)}, staging=1)
    measured(node, 1, after_s=1.0)
    found = node.lookup(2, early=True)
    node.land(2)
    done, staged = node.ask(Wanted(3, found.lease, 1000))
    assert (staged.end_tokens, staged.left_tokens, staged.reason) == (128, 128, MissReason.SLOW_TIER)
    assert staged.load_ms > staged.compute_ms > 0
    assert done.id == 3


def test_what_cannot_be_read_any_more_is_not_called_slow() -> None:
    """The disk hangs, and the engine comes to its request: it is told at once, but why?"""
    node = Node({1: (1, 4), 2: (1, 4)}, staging=1)
    measured(node, 1, after_s=0.00001)
    found = node.lookup(2, early=True)
    node.land(after_s=0.00001)
    node.now_ns += 5 * SECOND_NS
    assert node.tier()["state"] == "stuck"
    _, staged = node.ask(Wanted(3, found.lease, 1000))
    assert (staged.end_tokens, staged.left_tokens, staged.reason) == (64, 0, MissReason.STAGING_FAILED)


def test_always_load_never_weighs() -> None:
    node = Node({1: (1, 4), 2: (1, 4)})
    measured(node, 1, after_s=1.0)
    node.lookup(2, prefill_tokens_s=0)
    assert node.land(4)[0].end_tokens == 256


def test_a_slow_tier_is_measured_again_after_a_while() -> None:
    node = Node({1: (1, 4), 2: (1, 4)})
    measured(node, 1, after_s=1.0)
    node.now_ns += 20 * SECOND_NS
    node.lookup(2, prefill_tokens_s=1000)
    assert node.reading() == [2] * 3  # a few objects that nobody waits for
    node.land(3, after_s=0.00001)
    assert node.store.stats(node.now_ns).arena.objects == 4


def test_one_starved_read_does_not_make_a_fast_tier_slow() -> None:
    node = Node({1: (1, 4), 2: (1, 1), 3: (1, 4)})
    measured(node, 1, after_s=0.001)
    node.lookup(2)
    node.land(after_s=3.0)  # the thread that reads had to wait for a processor
    node.lookup(3, prefill_tokens_s=1000)
    staged = node.land(4)[0]
    assert (staged.end_tokens, staged.left_tokens, staged.reason) == (256, 0, "")


def test_a_tier_that_was_starved_at_the_start_is_used_again_within_seconds() -> None:
    node = Node({1: (1, 4), 2: (1, 4), 3: (1, 4)})
    node.store.probe(node.now_ns)
    node.effects()
    node.land(3, after_s=1.0)
    node.now_ns += 10 * SECOND_NS
    node.lookup(2, prefill_tokens_s=1000)
    assert node.tier()["prefetched"]["skipped"] == 1
    node.land(3)  # probes
    node.lookup(3, prefill_tokens_s=1000)
    assert node.land(4)[0].end_tokens == 256


def test_what_is_in_the_arena_need_not_wait_for_room_once_it_is_wanted() -> None:
    node = Node(dict.fromkeys((1, 2, 3), (1, 4)))
    for prompt in (1, 2, 3):
        measured(node, prompt, after_s=0.001)
    leases = [node.lookup(prompt, early=True) for prompt in (1, 2, 3)]
    assert [found.staging for found in leases] == [0, 1, 1]
    for found in leases[1:]:
        done, staged = node.ask(Wanted(3, found.lease))
        assert (done.id, staged.lease, staged.end_tokens) == (3, found.lease, 256)
    assert node.jobs == []


@pytest.mark.parametrize(
    ("wanted", "read", "outcome"),
    [("before", True, "late"), ("after", True, "in_time"), ("never", True, "in_time"), ("never", False, "wasted")],
)
def test_what_became_of_it_is_counted_with_its_bytes_and_times(wanted: str, read: bool, outcome: str) -> None:
    node = Node({1: (1, 4)})
    found = node.lookup(1, early=True)
    node.now_ns += SECOND_NS
    if wanted == "before":
        node.ask(Wanted(3, found.lease))
    node.land(4, after_s=0.5)
    if wanted == "after":
        node.ask(Wanted(3, found.lease))
    if read:
        node.ask(SlotsGet(4, found.lease))
    node.ask(Release(5, [found.lease]))
    tier = node.tier()
    assert {name for name, count in tier["prefetched"].items() if count} == {outcome}
    assert tier["prefetched_bytes"][outcome] == 4 * GRANULE
    late = wanted == "before"
    assert (tier["hidden_seconds"], tier["exposed_seconds"]) == pytest.approx((1, 2) if late else (3, 0))


# ---- a thousand requests


PROMPTS = 60
CHUNKS = 4
BYTES = 64 * 1024
LARGE = Namespace(
    model="large",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=CHUNK, page_bytes=((BYTES,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)


def tokens(prompt: int) -> list[int]:
    return [prompt * 7 + position for position in range(CHUNKS * CHUNK + 1)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Running]:
    """4 MiB of arena; 15 MiB of prompts on disk, which is read at 100 MB/s."""
    bench = Bench(tmp_path)
    settings = {"disk": str(tmp_path / "disk"), "disk_bytes": 64 * MIB, "disk_read_bytes_s": 100_000_000}
    running = bench.start(**settings)
    with CopyingClient(bench.path, namespace=LARGE) as client:
        assert not isinstance(client.connect(), Miss)
        for prompt in range(PROMPTS):
            path = Boundaries(CHUNK, Extras())
            path.extend(tokens(prompt), CHUNKS * CHUNK)
            objects = [(PutObject(*path.chunk(index), 0, 0, BYTES), bytes(BYTES)) for index in range(CHUNKS)]
            assert client.put(objects) == [PutStatus.WRITE] * CHUNKS
            eventually(lambda: running.stats("tiers")[0]["queued_bytes"] == 0)  # type: ignore[index]
    yield running
    bench.close()


def test_a_thousand_requests_half_of_them_aborted(store: Running) -> None:
    """No lease, slot or lookup is left. The store asserts its budgets itself, in every step; a failed one ends it."""
    pick = random.Random(5)
    lookups = LookupThread(lambda: CopyingClient(store.server.config.socket, namespace=LARGE), LARGE)
    lookups.start()
    policy = LookupPolicy(lookups, Counters(), wait_ms=int(HOUR_S * 1e3))
    live: list[TrackedRequest] = []
    hits = aborted = 0
    most_reading = most_held = 0
    for number in range(1000):
        request: Any = SimpleNamespace(
            prompt_token_ids=tokens(pick.randrange(PROMPTS)),
            num_output_tokens=0,
            skip_reading_prefix_cache=False,
            resumable=False,
            priority=pick.choice((0, 0, -1, 1)),
        )
        question = TrackedRequest(request, Boundaries(CHUNK, Extras()))
        policy.arrived(question)
        live.append(question)
        if number % 10 == 0:
            arena: Any = store.stats("arena")
            most_reading, most_held = max(most_reading, arena["staging_bytes"]), max(most_held, arena["held_bytes"])
        if number % 2:  # one of those that wait is aborted
            policy.ended(live.pop(pick.randrange(len(live))))
            aborted += 1
        while len(live) > 20:  # the scheduler gets to the first ones
            question = live.pop(0)
            eventually(lambda question=question: policy.answer(question) is not None)  # type: ignore[misc]
            policy.began(question)
            answer = question.attempt.answer
            assert answer is not None
            hits += answer.end_tokens > 0
            if answer.lease is not None:
                lookups.release(answer.lease)
            policy.ended(question)
    for question in live:
        policy.ended(question)
    eventually(lambda: store.stats("leases", "open") == 0)
    eventually(lambda: store.stats("arena", "staging_bytes") == 0)
    stats: Any = store.stats()
    assert (stats["leases"]["waiting"], stats["lookups"]["waiting"], stats["arena"]["held_bytes"]) == (0, 0, 0)
    assert stats["arena"]["limbo_bytes"] == 0
    store.call(store.server.hub.store.check)
    assert not any(
        node.pins for family in store.server.hub.store._residency.families.values() for node in family.nodes.values()
    )
    assert aborted == 500
    assert hits > 200
    assert 0 < most_reading <= MIB
    assert 0 < most_held <= 3 * MIB
    lookups.stop()
