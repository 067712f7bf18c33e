"""Resets of the sans-I/O store: forgotten at once, dropped a slice at a time, and never back after a restart."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from kvtally.core.keys import ROOT_CHAIN, ObjectKey
from kvtally.core.residency import each_bit
from kvtally.errors import KVTallyError, TierError
from kvtally.store import resets
from kvtally.store.jobs import Job, Outcome, RemoveJob, WriteJob
from kvtally.store.tier_state import TierInfo
from kvtally.store.tiers.base import NoRoomError
from kvtally.store.tiers.disk import DiskTier
from kvtally.store.tiers.journal import compact_key
from kvtally.testing.tiers import MemoryDevice
from kvtally.wire.messages import (
    Found,
    Lookup,
    MissReason,
    PutBegin,
    PutEnd,
    PutObject,
    PutSlots,
    PutStatus,
    Refused,
    Release,
    Reset,
    ResetDone,
    Slots,
    SlotsGet,
)
from tests.unit.test_store import CHAINS, CHUNK, DISK, HYBRID, Node, tier_of
from tests.unit.test_store_tiers import first_record, on_disk

MANY = [number.to_bytes(32, "big") for number in range(1, 41)]


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets, "SLICE_OBJECTS", 9)  # three boundaries of two objects each


def lookup(node: Node, chain: bytes) -> Found:
    found = node.ask(Lookup(4, chain, [CHUNK], limit_tokens=CHUNK))
    assert isinstance(found, Found)
    return found


def sweep(node: Node) -> int:
    """Let time pass until nothing is left to be dropped; how many slices that took."""
    slices = 0
    while tier_of(node)["objects"]:
        assert node.advance(0.02) is None
        slices += 1
    return slices


@pytest.mark.usefixtures("short_slices")
def test_a_large_reset_forgets_at_once_and_drops_in_slices() -> None:
    """A million objects stopped the store for seconds."""
    node = Node(tiers=(DISK,))
    on_disk(node, *MANY)
    assert node.ask(Reset(8)) is None
    assert tier_of(node)["objects"] == 80 - 6
    assert {lookup(node, chain).end_tokens for chain in MANY} == {0}
    assert node.store.stats(0).namespaces[0].objects == 0
    assert sweep(node) == 13
    assert {key for job in node.jobs for key in job.keys} == {  # type: ignore[union-attr]
        first_record(chain, group).key for chain in MANY for group in range(2)
    }
    *others, last = node.jobs
    for job in others:
        node.store.job_done(job, Outcome(), node.now_ns)
        assert node.reply() is None
    node.store.job_done(last, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(8, 80)


@pytest.mark.usefixtures("short_slices")
def test_what_is_saved_meanwhile_is_written_after_the_last_removal() -> None:
    node = Node(tiers=(DISK,))
    on_disk(node, *MANY, CHAINS[0])
    node.ask(Reset(8))
    node.save(0, 0)
    assert lookup(node, CHAINS[0]).presence == [b"\x01", b"\x00"]
    assert tier_of(node)["postponed"] == 1
    sweep(node)
    *removals, write = node.jobs
    assert {type(job) for job in removals} == {RemoveJob}
    assert isinstance(write, WriteJob)
    node.finish()
    assert node.reply() == ResetDone(8, 82)
    assert (tier_of(node)["objects"], tier_of(node)["postponed"]) == (1, 0)


@pytest.mark.usefixtures("short_slices")
def test_a_reset_that_takes_too_long_is_reported_and_goes_on_and_the_next_one_waits_for_it() -> None:
    node = Node(tiers=(DISK,))
    on_disk(node, *MANY)
    node.ask(Reset(8))
    answer = node.advance(1.6)
    assert isinstance(answer, Refused)
    assert (answer.id, answer.code) == (8, "KV-600")
    assert node.ask(Reset(9)) is None
    sweep(node)
    assert node.advance(0.02) is None
    node.finish()
    assert node.reply() == ResetDone(9, 0)


@pytest.mark.usefixtures("short_slices")
def test_without_lower_tiers_a_reset_is_over_at_once() -> None:
    node = Node()
    for chain in MANY:
        item = PutObject(chain, ROOT_CHAIN, 0, CHUNK, 0, 0, 4096)
        node.ask(PutEnd(3, [(node.ask(PutBegin(2, [item])).slots[0].put, 7)]))
    assert node.ask(Reset(8)) == ResetDone(8, 40)
    for _ in range(20):
        node.advance(0.02)
    assert node.store.stats(0).arena.used_bytes == 0


@pytest.mark.usefixtures("short_slices")
def test_a_lease_of_what_was_reset_is_over_and_its_bytes_stay_until_it_is_released() -> None:
    """Asked where its objects lie, the store spoke of a checksum."""
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    node.save(0, 1)
    node.finish()
    on_disk(node, *MANY)
    held = node.lookup(hold=True)
    node.ask(Reset(8))
    assert node.ask(SlotsGet(5, held.lease)) == Slots(5, [], MissReason.LEASE_EXPIRED)
    sweep(node)
    assert node.store.stats(0).arena.used_bytes > 0
    node.ask(Release(9, [held.lease]))
    assert node.store.stats(0).arena.used_bytes == 0


@pytest.mark.parametrize("code", ["", "KV-401"])
def test_what_was_reset_on_its_way_up_is_absent(code: str) -> None:
    """Where it arrived all the same, the hit was shorter for no reason."""
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    assert node.lookup(hold=True, limit_tokens=CHUNK).staging == 2
    first, second = node.jobs
    node.ask(Reset(8))
    node.store.job_done(first, Outcome(code=code), node.now_ns)
    node.store.job_done(second, Outcome(code=code), node.now_ns)
    staged = node.reply()
    assert (staged.end_tokens, staged.reason) == (0, MissReason.ABSENT)
    stats = msgspec.to_builtins(node.store.stats(0))
    assert stats["lookups"]["misses"] == {MissReason.ABSENT: 1}
    assert (stats["arena"]["used_bytes"], stats["quarantined"]["count"]) == (0, {})


class World:
    """A store above a real disk tier, whose jobs are carried out when the test says so, and fail now and then."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.disk = DiskTier(MemoryDevice(), random.choice((64, 400)) * 4096)
        tier = TierInfo(name="disk", capacity_bytes=self.disk.capacity_bytes)
        self.node = Node(tiers=(tier,), arena_bytes=random.choice((40, 200)) * 4096)
        self.failing = random.choice((0.0, 0.1, 0.3))
        self.jobs: list[Job] = []
        self.step = 0
        self.saved: dict[bytes, int] = {}  # when last, by compact key
        self.resets: dict[int, int] = {}  # when each began
        self.leases: list[int] = []
        self.done = 0

    def act(self) -> None:
        self.step += 1
        chain, chance = bytes([self.random.randrange(1, 13)]) * 32, self.random.random()
        if chance < 0.4:
            self.save(chain, self.random.randrange(2))
        elif chance < 0.46:
            self.resets[100 + self.step] = self.step
            self.ask(Reset(100 + self.step))
        elif chance < 0.55:
            self.ask(Lookup(4, chain, [CHUNK], CHUNK, hold=True))
        elif chance < 0.6:
            self.ask(Release(5, [self.leases.pop()] if self.leases else []))
        elif chance < 0.75:
            self.wait(self.random.choice((0.0, 0.01, 0.02, 0.02, 1.0)))
        else:
            for _ in range(self.random.randrange(1, 6)):
                self.work()

    def save(self, chain: bytes, group: int) -> None:
        item = PutObject(chain, ROOT_CHAIN, 0, CHUNK, group, 0, HYBRID.object_bytes(group, 0, CHUNK))
        (slots,) = (reply for reply in self.ask(PutBegin(2, [item])) if isinstance(reply, PutSlots))
        if slots.slots[0].status == PutStatus.WRITE:
            self.saved[compact_key(ObjectKey(HYBRID.digest, chain, group, 0))] = self.step
            self.ask(PutEnd(3, [(slots.slots[0].put, self.random.choice((7, 8)))]))

    def ask(self, request):  # type: ignore[no-untyped-def]
        self.node.store.handle(self.node.session, request, self.node.now_ns)
        return self.effects()

    def wait(self, seconds: float) -> None:
        self.node.now_ns += int(seconds * 1e9)
        self.node.store.tick(self.node.now_ns)
        self.effects()

    def work(self) -> None:
        """Writes and removals in their order; reads, which all succeed, at once."""
        if not self.jobs:
            return
        job, outcome = self.jobs.pop(0), Outcome()
        try:
            if isinstance(job, WriteJob | RemoveJob) and self.random.random() < self.failing:
                raise TierError("it fails", remedy="None.", code="KV-602")
            if isinstance(job, WriteJob):
                self.disk.write(job.record, [memoryview(bytes(job.record.length_bytes))])
            elif isinstance(job, RemoveJob):
                self.disk.remove(job.keys)
        except KVTallyError as error:
            outcome = Outcome(code=error.code, is_crowded=isinstance(error, NoRoomError))
        self.node.store.job_done(job, outcome, self.node.now_ns)
        self.effects()

    def effects(self):  # type: ignore[no-untyped-def]
        store = self.node.store
        store.check()
        self.jobs += store.take_jobs()
        replies = [reply for _, reply in store.take_outbox()]
        for reply in replies:
            if isinstance(reply, Found) and reply.lease:
                self.leases.append(reply.lease)
            if isinstance(reply, ResetDone):
                self.done += 1
                kept = [key for key in self.held() if self.saved[key] < self.resets[reply.id]]
                assert not kept, "a restart would bring back what was reset"
        return replies

    def held(self) -> set[bytes]:
        return {compact_key(record.key) for record in self.disk.recover()}

    def check_quiet(self) -> None:
        """When all is done the index and the disk say the same."""
        self.failing = 0.0
        for _ in range(200):
            self.wait(61.0)
            while self.jobs:
                self.work()
        residency = self.node.store._residency
        family = residency.families[HYBRID.digest]
        nodes = family.nodes.values()
        known = {compact_key(family.key(node, bit)) for node in nodes for bit in each_bit(residency.tier_mask(node, 1))}
        unremoved = self.node.store._context.tiers[0].unremoved
        assert known <= self.held() <= known | set(map(compact_key, unremoved))
        assert not residency.forgotten
        self.disk.check()

    def check_last_reset(self) -> None:
        """With a disk that does not fail any more."""
        done, self.resets[1] = self.done, self.step + 1
        self.ask(Reset(1))
        for _ in range(60):
            self.wait(0.02)
            while self.jobs:
                self.work()
        assert (self.done, self.held()) == (done + 1, set())


@pytest.mark.parametrize("seed", range(16))
def test_nothing_comes_back_and_nothing_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, resets and failing removals in any order: a reset that reports success has removed what it forgot."""
    random = Random(seed)
    monkeypatch.setattr(resets, "SLICE_OBJECTS", random.choice((1, 2, 5, 100)))
    world = World(random)
    for _ in range(500):
        world.act()
    world.check_quiet()
    world.check_last_reset()


def test_a_burst_of_resets_is_bounded() -> None:
    """For each client, and for all of them. Nothing of what was refused is kept, and all of it is over in the end."""
    node = Node(tiers=(DISK,))
    on_disk(node, *MANY)
    others = [node.join() for _ in range(resets.MOST_RESETS // resets.MOST_OF_CLIENT)]
    for session in others:
        for number in range(resets.MOST_OF_CLIENT):
            node.store.handle(session, Reset(number), node.now_ns)
        node.store.handle(session, Reset(99), node.now_ns)
    told = [message for _, message in node.store.take_outbox()]
    assert [(message.id, message.code) for message in told if isinstance(message, Refused)] == [(99, "KV-302")] * len(
        others
    )
    assert len(told) == len(others)
    refused = node.ask(Reset(8))
    assert isinstance(refused, Refused)
    assert (refused.code, "under way" in refused.message) == ("KV-302", True)
    assert len(node.store._resets._under_way) == resets.MOST_RESETS
    node.jobs += node.store.take_jobs()
    node.finish()
    told = [message for _, message in node.store.take_outbox()]
    assert Counter(map(type, told)) == {ResetDone: resets.MOST_RESETS}
    assert not node.store._resets._under_way
    assert node.ask(Reset(9)) is not None


@pytest.mark.parametrize("tiers", [(), (DISK,)])
def test_resets_of_nothing_leave_nothing_behind(tiers: tuple[TierInfo, ...]) -> None:
    node = Node(tiers=tiers)
    for number in range(1000):
        assert node.ask(Reset(number)) == ResetDone(number, 0)
    assert (len(node.store._resets._sweeping), len(node.store._residency.forgotten)) == (0, 0)
