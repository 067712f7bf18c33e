"""The sans-I/O store, message by message."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from kvtally.core.keys import ROOT_CHAIN, chain_values, chunk_ends, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.receipts import Half, Role
from kvtally.store.jobs import FindJob, Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.lower import MOST_FAILURES
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.store.tiers.base import Holding
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    MissReason,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlots,
    PutStatus,
    ReceiptFile,
    ReceiptGet,
    Receipts,
    Refused,
    Release,
    Reset,
    ResetDone,
    Slots,
    SlotsGet,
    Staged,
    Stats,
    Welcome,
)

CHUNK = 256
FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((256,),))
STATE = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=256, page_bytes=((5000,),))
HYBRID = Namespace(model="hybrid", groups=(FULL, STATE), chunk_tokens=CHUNK, alignment_tokens=16)
TOKENS = token_bytes(range(1024))
ENDS = chunk_ends(1024, CHUNK)
CHAINS = chain_values(TOKENS, ENDS)


class Node:
    """A store with one talkative client and a clock."""

    def __init__(
        self, *, tiers: tuple[TierInfo, ...] = (), arena_bytes: int = 1 << 20, limits: Limits | None = None
    ) -> None:
        self.now_ns = 1
        self.store = Store(name="s", version="0", arena_bytes=arena_bytes, limits=limits or Limits(), tiers=tiers)
        self.jobs: list[Job] = []
        self.session = self.join()

    def join(self, namespace: Namespace = HYBRID, *, shared_memory: bool = True) -> int:
        session = self.store.connect(shared_memory=shared_memory, now_ns=self.now_ns)
        reply = self.ask(Hello(1, PROTOCOL_VERSION, "test", canonical(namespace)), session)
        assert isinstance(reply, Welcome)
        return session

    def ask(self, request, session: int | None = None):  # type: ignore[no-untyped-def]
        self.store.handle(session or self.session, request, self.now_ns)
        return self.reply()

    def reply(self):  # type: ignore[no-untyped-def]
        self.store.check()
        self.jobs += self.store.take_jobs()
        messages = [message for _, message in self.store.take_outbox()]
        assert len(messages) <= 1
        return messages[0] if messages else None

    def advance(self, seconds: float):  # type: ignore[no-untyped-def]
        self.now_ns += int(seconds * 1e9)
        self.store.tick(self.now_ns)
        return self.reply()

    def begin(self, index: int, group: int, session: int | None = None) -> PutSlots:
        parent = CHAINS[index - 1] if index else ROOT_CHAIN
        start = ENDS[index - 1] if index else 0
        length = HYBRID.object_bytes(group, 0, CHUNK)
        item = PutObject(CHAINS[index], parent, start, ENDS[index], group, 0, length)
        reply = self.ask(PutBegin(2, [item]), session)
        assert isinstance(reply, PutSlots)
        return reply

    def save(self, index: int, group: int) -> None:
        slot = self.begin(index, group).slots[0]
        assert slot.status == PutStatus.WRITE
        reply = self.ask(PutEnd(3, [(slot.put, 7)]))
        assert reply == PutEnded(3, 1)

    def lookup(self, session: int | None = None, **options) -> Found:  # type: ignore[no-untyped-def]
        settings = {"limit_tokens": 1023} | options
        reply = self.ask(Lookup(4, b"".join(CHAINS), ENDS, **settings), session)
        return reply  # type: ignore[no-any-return]

    def finish(self, code: str = "") -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self.store.job_done(job, Outcome(code=code), self.now_ns)


def test_hit_needs_every_group() -> None:
    node = Node()
    node.save(0, 0)
    assert node.lookup().end_tokens == 0
    node.save(0, 1)
    node.save(1, 0)
    found = node.lookup()
    assert (found.end_tokens, found.reason) == (256, MissReason.STATE_ABSENT)
    assert found.presence == [b"\x03", b"\x01"]
    node.save(1, 1)
    assert node.lookup().end_tokens == 512
    assert node.lookup(limit_tokens=511).end_tokens == 256


@pytest.mark.parametrize(("frame_bytes", "count"), [(120, 4), (60, 0)])
def test_slots_that_fit_no_frame_are_a_miss(frame_bytes: int, count: int) -> None:
    """Their client would end the connection, and with it all that it holds."""
    node = Node(limits=Limits(frame_bytes=frame_bytes))
    for index in range(4):
        node.save(index, 0)
    node.save(3, 1)
    found = node.lookup(hold=True, limit_tokens=1024, have=[0, 1024])
    slots = node.ask(SlotsGet(5, found.lease))
    assert (len(slots.slots), slots.reason) == (count, "" if count else MissReason.LIMIT)
    assert len(encode(slots)) <= frame_bytes + 4


def test_attention_on_the_engine_needs_only_the_state() -> None:
    node = Node()
    node.save(2, 1)
    assert node.lookup().end_tokens == 0
    found = node.lookup(have=[768, 0], hold=True)
    assert found.end_tokens == 768
    slots = node.ask(SlotsGet(5, found.lease))
    assert isinstance(slots, Slots)
    assert [(slot.index, slot.group) for slot in slots.slots] == [(2, 1)]


def test_an_answer_says_where_things_lie_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    for group in range(2):
        node.save(0, group)
    found = node.lookup(hold=True, slots=True)
    assert len(found.slots) == 2
    assert node.ask(SlotsGet(5, found.lease)) == Slots(5, found.slots)
    assert not node.lookup(hold=True).slots
    assert not node.lookup(slots=True).slots  # nothing is held, so nothing stays where it is
    monkeypatch.setattr("kvtally.store.lookups.MOST_SLOTS", 1)
    assert not node.lookup(hold=True, slots=True).slots


def test_nothing_is_visible_before_its_commit() -> None:
    node = Node()
    slot = node.begin(0, 0).slots[0]
    node.save(0, 1)
    found = node.lookup()
    assert (found.end_tokens, found.pending_tokens, found.reason) == (0, 256, MissReason.PENDING)
    other = node.join()
    assert node.begin(0, 0, other).slots[0].status == PutStatus.PENDING
    node.ask(PutEnd(3, abort=[slot.put]))
    assert node.lookup().pending_tokens == 0
    assert node.begin(0, 0, other).slots[0].status == PutStatus.WRITE


def test_lookup_waits_for_a_pending_object_and_no_longer_than_asked() -> None:
    node = Node()
    slot = node.begin(0, 0).slots[0]
    node.save(0, 1)
    other = node.join()
    assert node.lookup(other, wait_ms=500) is None
    node.store.handle(node.session, PutEnd(3, [(slot.put, 7)]), node.now_ns)
    messages = dict(node.store.take_outbox())
    assert isinstance(messages[other], Found)
    assert messages[other].end_tokens == 256
    slot = node.begin(1, 0).slots[0]
    node.save(1, 1)
    assert node.lookup(other, wait_ms=500) is None
    late = node.advance(0.6)
    assert isinstance(late, Found)
    assert (late.end_tokens, late.reason) == (256, MissReason.PENDING)


def test_dead_writer_publishes_nothing_and_its_slot_waits_for_its_process() -> None:
    node = Node()
    writer = node.join()
    node.begin(0, 0, writer)
    used = node.store.stats(0).arena.used_bytes
    node.store.disconnect(writer, node.now_ns)
    arena = node.store.stats(0).arena
    assert (arena.used_bytes, arena.limbo_bytes) == (used, used)
    assert node.begin(0, 0).slots[0].status == PutStatus.WRITE
    node.store.writer_gone(writer, node.now_ns)
    assert node.store.stats(0).arena.limbo_bytes == 0
    node.store.check()


def test_expired_put_is_rejected_and_freed_by_its_own_late_end() -> None:
    node = Node()
    slot = node.begin(0, 0).slots[0]
    node.advance(61)
    assert node.store.stats(0).arena.limbo_bytes > 0
    assert node.ask(PutEnd(3, [(slot.put, 7)])) == PutEnded(3, 0, [slot.put])
    assert node.store.stats(0).arena.used_bytes == 0


def test_slots_in_limbo_are_part_of_a_clients_half() -> None:
    """A client that lets its writes expire again and again took the whole arena, half by half."""
    node = Node(arena_bytes=16 * 4096)
    other = node.join()

    def begin(first: int, session: int | None = None) -> PutSlots:
        items = [PutObject(bytes([1 + first + n]) * 32, ROOT_CHAIN, 0, 256, 0, 0, 4096) for n in range(16)]
        return node.ask(PutBegin(2, items), session)  # type: ignore[no-any-return]

    slots = begin(0).slots
    assert [slot.status for slot in slots] == [PutStatus.WRITE] * 8 + [PutStatus.FULL] * 8
    node.advance(61)
    assert node.store.stats(0).arena.limbo_bytes == 8 * 4096
    assert {slot.status for slot in begin(16).slots} == {PutStatus.FULL}
    assert [slot.status for slot in begin(32, other).slots].count(PutStatus.WRITE) == 8
    node.ask(PutEnd(3, abort=[slot.put for slot in slots[:3]]))  # three of them are done after all
    assert [slot.status for slot in begin(48).slots].count(PutStatus.WRITE) == 3


def test_lease_pins_and_expires() -> None:
    node = Node(arena_bytes=8 * 4096)
    node.save(0, 0)
    node.save(0, 1)  # 1 + 2 granules
    found = node.lookup(hold=True, lease_ms=1000)
    for index in (1, 2):
        node.save(index, 1)
    assert node.begin(3, 1).slots[0].status == PutStatus.WRITE  # evicts a tail, not the leased node
    assert node.lookup().end_tokens == 256
    node.advance(2)
    reply = node.ask(SlotsGet(5, found.lease))
    assert isinstance(reply, Slots)
    assert reply.reason == MissReason.LEASE_EXPIRED


def test_eviction_takes_tails_first() -> None:
    node = Node(arena_bytes=12 * 4096)
    for index in range(4):
        node.save(index, 0)
        node.save(index, 1)  # 12 granules: full
    other = Namespace(model="other", groups=(FULL,), chunk_tokens=CHUNK, alignment_tokens=16)
    stranger = node.join(other)
    item = PutObject(CHAINS[0], ROOT_CHAIN, 0, 256, 0, 0, 4096)
    assert node.ask(PutBegin(2, [item]), stranger).slots[0].status == PutStatus.WRITE
    assert node.lookup().end_tokens == 768


DISK = TierInfo(name="disk", capacity_bytes=1 << 20)


def test_write_behind_then_stage_from_disk() -> None:
    node = Node(tiers=(DISK,), arena_bytes=3 * 4096, limits=Limits(staging_bytes=1 << 20))
    for group in range(2):
        node.save(0, group)
        assert [type(job) for job in node.jobs] == [WriteJob]
        node.finish()
    node.save(1, 1)  # evicts the first node from the arena
    node.finish()
    found = node.lookup(hold=True, slots=True)
    assert (found.end_tokens, found.staging, found.slots) == (256, 2, [])
    assert node.ask(SlotsGet(5, found.lease)) == Slots(5, [], MissReason.PENDING)
    first, second = node.jobs
    node.store.job_done(first, Outcome(), node.now_ns)
    assert node.reply() is None
    node.store.job_done(second, Outcome(), node.now_ns)
    staged = node.reply()
    assert isinstance(staged, Staged)
    assert (staged.end_tokens, staged.disk_tokens, staged.reason) == (256, 256, "")
    assert len(node.ask(SlotsGet(5, found.lease)).slots) == 2


@pytest.mark.parametrize(("code", "reason", "left"), [("KV-401", "checksum", 0), ("KV-602", "staging_failed", 1)])
def test_failed_staging_is_a_counted_miss(code: str, reason: str, left: int) -> None:
    node = Node(tiers=(DISK,), arena_bytes=3 * 4096, limits=Limits(staging_bytes=1 << 20))
    for index, group in ((0, 0), (0, 1), (1, 1)):
        node.save(index, group)
        node.finish()
    node.lookup(hold=True)
    first, second = node.jobs
    node.store.job_done(first, Outcome(), node.now_ns)
    node.store.job_done(second, Outcome(code=code), node.now_ns)
    staged = node.reply()
    assert (staged.end_tokens, staged.reason) == (0, reason)
    stats = msgspec.to_builtins(node.store.stats(node.now_ns))
    assert stats["lookups"]["misses"] == {reason: 1}
    assert stats["tiers"][0]["errors"] == {code: 1}
    assert sum(stats["quarantined"]["count"].values()) == 1 - left
    assert stats["leases"]["open"] == 0


def test_after_a_failure_a_lower_boundary_is_staged_instead() -> None:
    node = Node(tiers=(DISK,), arena_bytes=6 * 4096, limits=Limits(staging_bytes=1 << 20))
    for index, group in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1)):
        node.save(index, group)
        node.finish()
    for lost in range(3):  # push everything of the first two boundaries out of the arena
        item = PutObject(bytes([1 + lost]) * 32, ROOT_CHAIN, 0, 256, 1, 0, 5000)
        node.ask(PutEnd(3, [(node.ask(PutBegin(2, [item])).slots[0].put, 7)]))
        node.finish()
    found = node.lookup(hold=True)
    assert (found.end_tokens, found.staging) == (512, 3)  # two of attention, the state at 512
    for job in list(node.jobs):
        is_state = job.record.group == 1
        node.jobs.remove(job)
        node.store.job_done(job, Outcome(code="KV-401" if is_state else ""), node.now_ns)
    assert node.reply() is None  # not 0: the state at 256 is still on disk
    (job,) = (job for job in node.jobs if isinstance(job, ReadJob))
    node.store.job_done(job, Outcome(), node.now_ns)
    staged = node.reply()
    assert (staged.end_tokens, staged.reason) == (256, "checksum")


def tier_of(node: Node) -> dict[str, object]:
    return msgspec.to_builtins(node.store.stats(node.now_ns).tiers[0])  # type: ignore[no-any-return]


def test_a_slow_disk_takes_later_what_was_too_much_for_it() -> None:
    node = Node(tiers=(DISK,), limits=Limits(write_behind_bytes=8192))
    for index in range(4):
        node.save(index, 0)
    assert (len(node.jobs), tier_of(node)["postponed"], tier_of(node)["dropped"]) == (2, 2, 0)
    node.finish()
    assert node.reply() is None
    assert (len(node.jobs), tier_of(node)["postponed"]) == (2, 0)
    node.finish()
    assert (tier_of(node)["objects"], tier_of(node)["dropped"]) == (4, 0)


def test_what_left_the_arena_before_a_slow_disk_came_to_it_is_counted() -> None:
    node = Node(tiers=(DISK,), arena_bytes=4 * 4096, limits=Limits(write_behind_bytes=4096))
    for index in range(4):
        node.save(index, 0)
    assert tier_of(node)["postponed"] == 3
    other = PutObject(bytes([1]) * 32, ROOT_CHAIN, 0, 256, 1, 0, 5000)  # two granules: the last two boundaries go
    node.ask(PutEnd(3, [(node.ask(PutBegin(2, [other])).slots[0].put, 7)]))
    for _ in range(4):
        node.finish()
        assert node.reply() is None
    tier = tier_of(node)
    assert (tier["postponed"], tier["objects"], tier["dropped"]) == (0, 3, 2)


def test_an_object_larger_than_the_queue_is_written_all_the_same() -> None:
    node = Node(tiers=(DISK,), limits=Limits(write_behind_bytes=4096))
    node.save(0, 1)
    assert (len(node.jobs), tier_of(node)["postponed"]) == (1, 0)


def test_a_failing_disk_is_left_alone() -> None:
    node = Node(tiers=(DISK,), limits=Limits(write_behind_bytes=8192))
    for index in range(3):
        node.save(index, 0)
    node.finish(code="KV-602")
    assert node.reply() is None
    node.save(3, 0)
    tier = tier_of(node)
    assert (tier["state"], tier["dropped"], tier["postponed"], len(node.jobs)) == ("not-writing", 0, 4, 0)
    node.advance(1.1)  # what waits is tried by itself: perhaps nobody saves anything more
    assert [job.record.end_tokens for job in node.jobs if isinstance(job, WriteJob)] == [768, 256]
    node.save(3, 1)
    assert (len(node.jobs), tier_of(node)["postponed"]) == (2, 3)
    for _ in range(3):
        node.finish()
        assert node.reply() is None
    tier = tier_of(node)
    assert (tier["state"], tier["objects"], tier["dropped"], tier["postponed"]) == ("ok", 5, 0, 0)


def test_what_was_saved_while_the_disk_failed_is_written_when_it_is_back() -> None:
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    for index, pause_s in enumerate((1, 2, 4), 1):
        node.finish(code="KV-602")
        node.save(index, 0)  # not tried now
        assert node.jobs == []
        node.advance(pause_s + 0.1)
    assert tier_of(node)["errors"]["KV-602"] == 1 + 2 + 3  # type: ignore[index]
    node.finish()
    tier = tier_of(node)
    assert (tier["state"], tier["objects"], tier["dropped"], tier["postponed"]) == ("ok", 4, 0, 0)


def test_an_object_that_can_never_be_written_does_not_stop_the_tier_for_ever() -> None:
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    for failures in range(1, MOST_FAILURES + 1):
        (job,) = node.jobs
        assert isinstance(job, WriteJob)
        node.finish(code="KV-600")
        node.advance(100)
        assert tier_of(node)["dropped"] == (failures == MOST_FAILURES)
    assert (node.jobs, tier_of(node)["postponed"]) == ([], 0)
    node.save(1, 0)
    node.finish()
    assert tier_of(node)["objects"] == 1


def test_disk_is_bounded() -> None:
    node = Node(tiers=(TierInfo(name="disk", capacity_bytes=3 * 4096),))
    for index in range(4):
        node.save(index, 0)
        node.finish()
    assert node.store.stats(0).tiers[0].used_bytes <= 3 * 4096


def test_what_could_not_be_removed_is_removed_later() -> None:
    node = Node(tiers=(TierInfo(name="disk", capacity_bytes=2 * 4096),))
    for index in range(3):
        node.save(index, 0)
        node.finish(code="KV-601" if index == 2 else "")  # the third evicts one, and removing it fails
    assert node.store.stats(0).tiers[0].unremoved == 1
    node.advance(5)  # the third is tried again
    assert [type(job) for job in node.jobs] == [RemoveJob, WriteJob]
    assert node.store.stats(0).tiers[0].unremoved == 0


POOL = TierInfo(name="redis", capacity_bytes=None, kind=TierKind.POOL)


def test_a_pool_is_asked_and_believed_for_a_while() -> None:
    node = Node(tiers=(POOL,))
    assert node.lookup(hold=True) is None
    job = node.jobs.pop()
    assert isinstance(job, FindJob)
    assert [boundary.end_tokens for boundary in job.boundaries] == ENDS
    rows = Holding(((0, 1), (1, 1)), tails=(32,))
    node.store.job_done(job, Outcome(found=(rows, None, None, None)), node.now_ns)
    answer = node.reply()
    assert (answer.end_tokens, answer.staging, answer.tails) == (256, 2, [32])
    assert all(isinstance(job, ReadJob) for job in node.jobs)
    node.finish()
    staged = node.reply()
    assert (staged.end_tokens, staged.pool_tokens, staged.disk_tokens) == (256, 256, 0)
    assert not node.jobs  # what came from the pool is not written there again
    assert node.store.stats(0).beliefs == 1
    node.advance(6)
    assert node.store.stats(0).beliefs == 0


def test_bad_bytes_are_quarantined_and_not_served_again() -> None:
    node = Node()
    node.save(0, 0)
    node.save(0, 1)
    first, second = node.lookup(hold=True), node.lookup(hold=True)
    node.ask(Release(5, [first.lease], [(first.lease, 0, 1, 0)]))
    assert node.lookup().end_tokens == 0
    assert node.ask(SlotsGet(6, second.lease)).reason == MissReason.CHECKSUM
    assert node.begin(0, 1).slots[0].status == PutStatus.WRITE
    node.ask(Release(7, [second.lease]))
    assert node.store.stats(0).quarantined.count == {"arena": 1}


def test_tails_are_named_beneath_the_hit() -> None:
    node = Node()
    node.save(0, 0)
    node.save(0, 1)
    tail = PutObject(b"t" * 32, CHAINS[0], 256, 288, 0, 0, 512)
    slot = node.ask(PutBegin(2, [tail])).slots[0]
    assert node.lookup().tails == []
    node.ask(PutEnd(3, [(slot.put, 9)]))
    assert node.lookup().tails == [32]


def test_tails_are_named_beyond_the_hit_where_only_a_state_is_missing() -> None:
    node = Node()
    node.save(0, 0)
    node.save(0, 1)
    node.save(1, 0)  # attention, no state
    tail = PutObject(b"t" * 32, CHAINS[1], 512, 544, 0, 0, 512)
    slot = node.ask(PutBegin(2, [tail])).slots[0]
    node.ask(PutEnd(3, [(slot.put, 9)]))
    found = node.lookup()
    assert (found.end_tokens, found.tails) == (256, [256 + 32])


def test_reset_forgets_but_leases_stay_readable() -> None:
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    node.save(0, 1)
    node.finish()
    held = node.lookup(hold=True)
    assert node.ask(Reset(8)) is None  # not before the disk has removed them
    assert node.lookup().end_tokens == 0
    node.finish()
    assert node.reply() == ResetDone(8, 2)
    assert node.store.stats(0).arena.used_bytes > 0
    node.ask(Release(9, [held.lease]))
    assert node.store.stats(0).arena.used_bytes == 0


def test_receipt_halves_meet() -> None:
    node = Node()
    node.ask(ReceiptFile(1, "t1", Half(role=Role.PREFILL, saved_tokens=255)))
    router = node.join()
    assert node.ask(ReceiptGet(2, "t1", wait_ms=1000), router) is None
    node.store.handle(node.session, ReceiptFile(3, "t1", Half(role=Role.DECODE, tokens_host=255, verified=True)), 5)
    messages = dict(node.store.take_outbox())
    assert isinstance(messages[router], Receipts)
    assert messages[router].receipts[0].verdict == "proved"
    assert node.ask(ReceiptGet(4, "nobody", wait_ms=10), router) is None
    assert node.advance(1) == Receipts(4, [])


def test_hello_refusals_say_what_differs() -> None:
    node = Node()
    other = Namespace(model="hybrid", groups=(FULL, STATE), chunk_tokens=512, alignment_tokens=16)
    session = node.store.connect(shared_memory=True, now_ns=0)
    reply = node.ask(Hello(1, PROTOCOL_VERSION, "x", canonical(other), HYBRID.digest), session)
    assert isinstance(reply, Refused)
    assert "chunk_tokens: 512 here, 256 there" in reply.message
    assert node.ask(Hello(1, 99, "x"), session).code == "KV-201"
    assert node.ask(Hello(1, PROTOCOL_VERSION, "x", b"{}"), session).code == "KV-202"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"chunk_tokens":256', f'"chunk_tokens":{2**70}'),
        ('"alignment_tokens":16', f'"alignment_tokens":{2**32}'),
        ('"tensor_parallel":1', f'"tensor_parallel":{2**64}'),
        ('"format_version":1', f'"format_version":{-(2**70)}'),
        ('"block_tokens":16', f'"block_tokens":{2**64}'),
        ('"page_bytes":[[256]]', f'"page_bytes":[[{2**64}]]'),
        ('"window_tokens":0', f'"window_tokens":{-(2**70)}'),
        ('"chunk_tokens":256', f'"chunk_tokens":{"9" * 5000}'),
    ],
)
def test_numbers_that_no_reply_can_hold_are_refused(old: str, new: str) -> None:
    """One such namespace, and nobody got the store's stats any more."""
    node = Node()
    description = canonical(HYBRID).decode()
    assert old in description
    session = node.store.connect(shared_memory=True, now_ns=0)
    reply = node.ask(Hello(1, PROTOCOL_VERSION, "x", description.replace(old, new, 1).encode()), session)
    assert isinstance(reply, Refused)
    assert reply.code == "KV-202"
    encode(Stats(1, msgspec.to_builtins(node.store.stats(0))))


def test_a_long_name_is_cut_in_stats() -> None:
    node = Node()
    node.join(structs.replace(HYBRID, model="m" * 5_000_000))
    assert len(encode(Stats(1, msgspec.to_builtins(node.store.stats(0))))) < 10_000


@pytest.mark.parametrize(
    "request_",
    [
        Lookup(1, b"x", [256], 100),
        Lookup(1, b"".join(CHAINS[:2]), [256, 256], 100),
        Lookup(1, b"", [], 0, 0),
        PutBegin(1, [PutObject(b"x", ROOT_CHAIN, 0, 1, 0, 0, 1)]),
        PutBegin(1, [PutObject(CHAINS[0], ROOT_CHAIN, 0, 256, 9, 0, 1)]),
        PutBegin(1, [PutObject(CHAINS[0], ROOT_CHAIN, 5, 256, 0, 0, 1)]),
        PutBegin(1, [PutObject(CHAINS[0], CHAINS[0], 5, 256, 0, 0, 1)]),
        Reset(1, b"unknown"),
    ],
)
def test_malformed_requests_are_refused_and_change_nothing(request_) -> None:  # type: ignore[no-untyped-def]
    node = Node()
    assert isinstance(node.ask(request_), Refused)
    assert node.store.stats(0).arena.used_bytes == 0
    assert node.store.stats(0).namespaces[0].boundaries == 0


def test_without_shared_memory_only_questions() -> None:
    node = Node()
    remote = node.join(shared_memory=False)
    assert isinstance(node.lookup(remote), Found)
    assert node.lookup(remote, hold=True).code == "KV-204"  # type: ignore[attr-defined]
    assert node.ask(SlotsGet(1, 1), remote).code == "KV-204"
