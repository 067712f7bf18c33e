"""The sans-I/O store above lower tiers that are full, scattered, failing or slow."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from kvtally.core.keys import ROOT_CHAIN
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import KVTallyError
from kvtally.store.jobs import Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.lower import MOST_ATTEMPTS
from kvtally.store.tier_state import TierInfo
from kvtally.store.tiers.base import NoRoomError, ObjectRecord
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.tiers import MemoryDevice
from kvtally.wire.limits import Limits
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
    Reset,
    ResetDone,
    Staged,
)
from tests.unit.test_store import CHAINS, CHUNK, DISK, HYBRID, Node, tier_of

KIB = 1024
CROWDED = Outcome(code="KV-601", is_crowded=True)


# ---- a tier without room in few enough pieces


class EmptyDevice(MemoryDevice):
    """A device that keeps no data: what counts here is where the data would lie."""

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        pass


def carry_out(node: Node, disk: DiskTier, zeros: memoryview) -> int:
    """Do what the store wants done on a real disk tier, as the mover does; how often there was no room."""
    crowded = 0
    while jobs := node.store.take_jobs():
        for job in jobs:
            outcome = Outcome()
            try:
                if isinstance(job, WriteJob):
                    disk.write(job.record, [zeros[: job.record.length_bytes]])
                elif isinstance(job, RemoveJob):
                    disk.remove(job.keys)
            except KVTallyError as error:
                outcome = Outcome(code=error.code, is_crowded=isinstance(error, NoRoomError))
                crowded += outcome.is_crowded
            node.store.job_done(job, outcome, node.now_ns)
    return crowded


def save_prompts(node: Node, disk: DiskTier, namespace: Namespace, count: int) -> int:
    """Prompts of a few chunks and a tail, as engines save them; how often the tier had no room."""
    random, zeros = Random(1), memoryview(bytes(KIB * KIB))
    session = node.join(namespace)
    crowded = 0
    for _ in range(count):
        previous, start, items = ROOT_CHAIN, 0, []
        for length in [CHUNK] * random.choice((0, 1, 2, 4)) + [16 * random.randrange(1, 16)]:
            chain = random.randbytes(32)
            for group in range(len(namespace.groups)):
                size = namespace.object_bytes(group, 0, length)
                items.append(PutObject(chain, previous, start, start + length, group, 0, size))
            previous, start = chain, start + length
        node.store.handle(session, PutBegin(2, items), node.now_ns)
        ((_, answer),) = node.store.take_outbox()
        assert isinstance(answer, PutSlots)
        commit = [(slot.put, 7) for slot in answer.slots if slot.status == PutStatus.WRITE]
        node.store.handle(session, PutEnd(3, commit), node.now_ns)
        node.store.take_outbox()
        crowded += carry_out(node, disk, zeros)
    disk.check()
    return crowded


MIXED = Namespace(
    model="mixed",
    groups=(
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((4 * KIB,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((1024 * KIB,),)),
    ),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)
FILE_BYTES = 128 * KIB * KIB


def test_a_full_disk_takes_every_save() -> None:
    disk = DiskTier(EmptyDevice(), FILE_BYTES)
    node = Node(tiers=(TierInfo(name="disk", capacity_bytes=disk.capacity_bytes),), arena_bytes=FILE_BYTES // 2)
    save_prompts(node, disk, MIXED, 400)
    tier = tier_of(node)
    assert (tier["state"], tier["dropped"], tier["errors"]) == ("ok", 0, {})
    assert tier["evicted"] > 400  # type: ignore[operator]


def test_where_the_free_bytes_are_scattered_more_is_evicted() -> None:
    """The same without the spare room: writes fail, and each comes through after all."""
    disk = DiskTier(EmptyDevice(), FILE_BYTES)
    node = Node(tiers=(TierInfo(name="disk", capacity_bytes=FILE_BYTES),), arena_bytes=FILE_BYTES // 2)
    assert save_prompts(node, disk, MIXED, 400) > 10
    tier = tier_of(node)
    assert (tier["state"], tier["dropped"], tier["errors"]) == ("ok", 0, {})


def full_of_four(node: Node) -> WriteJob:
    """Four boundaries are in the tier, one granule each, and a fifth is on its way."""
    for index in range(4):
        node.save(index, 0)
        node.finish()
    item = PutObject(bytes([1]) * 32, ROOT_CHAIN, 0, 256, 0, 0, 4096)
    node.ask(PutEnd(3, [(node.ask(PutBegin(2, [item])).slots[0].put, 7)]))
    (job,) = node.jobs
    assert isinstance(job, WriteJob)
    return job


def answered(node: Node, job: Job, outcome: Outcome) -> list[Job]:
    """What the store wants done after a job ended so."""
    node.jobs = []
    node.store.job_done(job, outcome, node.now_ns)
    assert node.reply() is None
    return node.jobs


def test_a_tier_without_room_is_not_a_failing_one() -> None:
    node = Node(tiers=(DISK,))
    removal, again = answered(node, full_of_four(node), CROWDED)
    assert isinstance(removal, RemoveJob)
    assert isinstance(again, WriteJob)
    assert (len(removal.keys), again.attempt) == (1, 1)
    removal, again = answered(node, again, CROWDED)
    assert isinstance(removal, RemoveJob)
    assert len(removal.keys) == 2  # twice as much
    assert answered(node, again, Outcome()) == []
    tier = tier_of(node)
    assert (tier["state"], tier["dropped"], tier["errors"], tier["objects"]) == ("ok", 0, {}, 2)


def test_what_never_finds_room_is_dropped_after_a_few_attempts() -> None:
    node = Node(tiers=(DISK,), arena_bytes=1 << 21)
    for number in range(100):
        item = PutObject(bytes([2, number]) * 16, ROOT_CHAIN, 0, 256, 0, 0, 4096)
        node.ask(PutEnd(3, [(node.ask(PutBegin(2, [item])).slots[0].put, 7)]))
        node.finish()
    job: Job = full_of_four(node)
    for _ in range(MOST_ATTEMPTS - 1):
        _, job = answered(node, job, CROWDED)
    assert answered(node, job, CROWDED) == []
    tier = tier_of(node)
    assert (tier["state"], tier["dropped"], tier["evicted"], tier["queued_bytes"]) == ("ok", 1, 1 + 2 + 4 + 8, 0)


def test_a_tier_that_cannot_take_anything_out_is_a_failing_one() -> None:
    """A volume without a free byte: its journal cannot say what is removed. To evict more would only forget more."""
    node = Node(tiers=(DISK,))
    removal, again = answered(node, full_of_four(node), CROWDED)
    assert answered(node, removal, Outcome(code="KV-601")) == []
    assert answered(node, again, CROWDED) == []
    tier = tier_of(node)
    assert (tier["state"], tier["postponed"], tier["evicted"]) == ("not-writing", 1, 1)


def test_nothing_is_evicted_for_what_can_never_fit() -> None:
    """Every such save emptied the disk, and was dropped all the same."""
    node = Node(tiers=(TierInfo(name="disk", capacity_bytes=4 * 4096),))
    on_disk(node, CHAINS[0])
    large = PutObject(bytes([1]) * 32, ROOT_CHAIN, 0, 256, 0, 0, 5 * 4096)
    node.ask(PutEnd(3, [(node.ask(PutBegin(2, [large])).slots[0].put, 7)]))
    tier = tier_of(node)
    assert (tier["objects"], tier["evicted"], tier["dropped"], node.jobs) == (2, 0, 1, [])


def test_what_the_index_cannot_take_in_at_a_start_is_removed_from_the_disk() -> None:
    """It took room there for ever, of which the index knew nothing."""
    node = Node(tiers=(DISK,), limits=Limits(namespaces=1))
    other = msgspec.structs.replace(HYBRID, model="other")
    foreign = msgspec.structs.replace(first_record(CHAINS[0], 0), namespace=other)
    longer = msgspec.structs.replace(first_record(CHAINS[0], 1), end_tokens=CHUNK + 1)  # than its chain value names
    for record in (first_record(CHAINS[0], 0), foreign, longer):
        node.store.recover(1, record)
    assert (tier_of(node)["objects"], tier_of(node)["unremoved"]) == (1, 2)
    node.save(1, 0)
    removal, write = node.jobs
    assert isinstance(removal, RemoveJob)
    assert isinstance(write, WriteJob)
    assert removal.keys == (foreign.key, longer.key)


# ---- objects that cannot be read


def on_disk(node: Node, *chains: bytes) -> None:
    """The first boundary of a prompt for each of these, in the lower tier alone, as after a restart."""
    for chain in chains:
        for group in range(2):
            node.store.recover(1, first_record(chain, group))


def first_record(chain: bytes, group: int) -> ObjectRecord:
    length = HYBRID.object_bytes(group, 0, CHUNK)
    return ObjectRecord(
        namespace=HYBRID, chain=chain, parent=ROOT_CHAIN, start_tokens=0, end_tokens=CHUNK, group=group, rank=0,
        length_bytes=length, checksum=7,
    )  # fmt: skip


def stage(node: Node, chain: bytes, codes: tuple[str, str]) -> Staged | Found:
    """Look a prompt up and have its two objects, attention and state, read with these outcomes."""
    node.jobs = []
    found = node.ask(Lookup(4, chain, [CHUNK], limit_tokens=CHUNK, hold=True))
    assert isinstance(found, Found)
    if not found.staging:
        return found
    for job in node.jobs:
        assert isinstance(job, ReadJob)
        node.store.job_done(job, Outcome(code=codes[job.record.group]), node.now_ns)
    staged = node.reply()
    assert isinstance(staged, Staged)
    return staged


GOOD, BAD = ("", ""), ("KV-602", "")


def test_an_object_that_cannot_be_read_costs_only_itself() -> None:
    node = Node(tiers=(DISK,))
    first, second = bytes([1]) * 32, bytes([2]) * 32
    on_disk(node, first, second)
    staged = stage(node, first, BAD)
    assert (staged.end_tokens, staged.reason) == (0, MissReason.STAGING_FAILED)
    assert [(type(job), job.keys) for job in node.jobs if isinstance(job, RemoveJob)] == [
        (RemoveJob, (first_record(first, 0).key,))
    ]
    tier = tier_of(node)
    assert (tier["state"], tier["objects"], tier["errors"]) == ("ok", 3, {"KV-602": 1})
    assert stage(node, second, GOOD).end_tokens == CHUNK
    item = PutObject(first, ROOT_CHAIN, 0, CHUNK, 0, 0, HYBRID.object_bytes(0, 0, CHUNK))
    assert node.ask(PutBegin(2, [item])).slots[0].status == PutStatus.WRITE  # saved anew


def test_a_device_on_which_nothing_can_be_read_is_left_alone_and_its_objects_stay() -> None:
    node = Node(tiers=(DISK,))
    chains = [bytes([number]) * 32 for number in range(1, 5)]
    on_disk(node, *chains)
    for chain in chains[:2]:
        node.store.handle(node.session, Lookup(4, chain, [CHUNK], limit_tokens=CHUNK, hold=True), node.now_ns)
    reads = node.store.take_jobs()
    for job in reads:  # the second in a row is one too many; two more were on their way with it
        node.store.job_done(job, Outcome(code="KV-602"), node.now_ns)
    node.store.take_outbox()
    assert (len(reads), tier_of(node)["state"], tier_of(node)["objects"]) == (4, "failing", 8 - 2)
    found = stage(node, chains[2], GOOD)
    assert (found.end_tokens, found.reason) == (0, MissReason.STAGING_FAILED)
    node.advance(1.1)
    stage(node, chains[2], ("KV-602", "KV-602"))
    node.advance(1.1)
    assert (tier_of(node)["state"], tier_of(node)["objects"]) == ("failing", 8 - 3)  # for two seconds now
    node.advance(1.1)
    assert stage(node, chains[3], GOOD).end_tokens == CHUNK
    on_disk(node, chains[0])
    stage(node, chains[0], BAD)
    assert tier_of(node)["state"] == "ok"  # what was read in between speaks for the device


def test_beneath_an_object_that_cannot_be_read_a_lower_boundary_is_staged() -> None:
    node = Node(tiers=(DISK,))
    for index in (0, 1):
        for group in range(2):
            record = msgspec.structs.replace(
                first_record(CHAINS[index], group),
                parent=CHAINS[0] if index else ROOT_CHAIN,
                start_tokens=CHUNK * index,
                end_tokens=CHUNK * (index + 1),
            )
            node.store.recover(1, record)
    found = node.lookup(hold=True)
    assert (found.end_tokens, found.staging) == (512, 3)
    while jobs := [job for job in node.jobs if isinstance(job, ReadJob)]:
        node.jobs = []
        for job in jobs:
            is_bad = (job.record.end_tokens, job.record.group) == (512, 1)
            node.store.job_done(job, Outcome(code="KV-602" if is_bad else ""), node.now_ns)
        staged = node.reply()
    assert (staged.end_tokens, staged.reason) == (256, MissReason.STAGING_FAILED)


def test_a_partial_hit_has_its_reason_wherever_it_lies() -> None:
    """As one that is in the arena already: not longer, because nobody saved more."""
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    found = node.lookup(hold=True)
    assert (found.end_tokens, found.staging, found.reason) == (256, 2, MissReason.ABSENT)
    for job in node.jobs:
        node.store.job_done(job, Outcome(), node.now_ns)
    assert node.reply().end_tokens == 256
    assert node.store.stats(0).lookups.misses == {MissReason.ABSENT: 1}
    node.lookup(hold=True, limit_tokens=256)  # which wished for no more
    assert node.store.stats(0).lookups.misses == {MissReason.ABSENT: 1}


# ---- a tier whose writes do not end


def test_a_disk_that_hangs_does_not_hold_a_small_arena() -> None:
    node = Node(tiers=(DISK,), arena_bytes=16 * 4096)
    for number in range(1, 41):
        item = PutObject(bytes([number]) * 32, ROOT_CHAIN, 0, 256, 0, 0, 4096)
        slot = node.ask(PutBegin(2, [item])).slots[0]
        assert slot.status == PutStatus.WRITE
        node.ask(PutEnd(3, [(slot.put, 7)]))
    assert tier_of(node)["queued_bytes"] == 4 * 4096


def test_writes_that_do_not_end_are_shown() -> None:
    node = Node(tiers=(DISK,))
    for index in range(3):
        node.save(index, 0)
    first, second, third = node.jobs
    node.advance(9)
    assert tier_of(node)["state"] == "ok"
    node.store.job_done(first, Outcome(), node.now_ns)
    node.advance(9)  # each has its own time
    node.store.job_done(second, Outcome(), node.now_ns)
    node.advance(10**6)
    assert tier_of(node)["state"] == "not-writing"
    node.store.job_done(third, Outcome(), node.now_ns)
    node.advance(10**6)  # nothing to do
    assert tier_of(node)["state"] == "ok"


# ---- what is reset stays away


def removals(node: Node) -> list[RemoveJob]:
    jobs, node.jobs = node.jobs, []
    return [job for job in jobs if isinstance(job, RemoveJob)]


def test_a_reset_that_a_restart_would_undo_says_so_and_can_be_repeated() -> None:
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    for _ in range(2):  # the second finds nothing to forget, and still something to remove
        assert node.ask(Reset(8)) is None
        (job,) = removals(node)
        assert len(job.keys) == 2
        node.store.job_done(job, Outcome(code="KV-601"), node.now_ns)
        answer = node.reply()
        assert isinstance(answer, Refused)
        assert (answer.id, answer.code) == (8, "KV-601")
        assert "a restart of the store would bring them back" in answer.message
        assert node.lookup().end_tokens == 0
    assert node.ask(Reset(9)) is None
    (job,) = removals(node)
    node.store.job_done(job, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(9, 0)
    assert tier_of(node)["unremoved"] == 0
    assert node.ask(Reset(10)) == ResetDone(10, 0)


def test_a_reset_does_not_wait_for_a_disk_that_hangs() -> None:
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    assert node.ask(Reset(8)) is None
    (job,) = removals(node)
    answer = node.advance(1.6)
    assert isinstance(answer, Refused)
    assert (answer.id, answer.code) == (8, "KV-600")
    node.store.job_done(job, Outcome(), node.now_ns)
    assert node.reply() is None
    assert node.ask(Reset(9)) == ResetDone(9, 0)


@pytest.mark.parametrize("code", ["", "KV-602"])
def test_a_reset_that_is_repeated_waits_for_the_removal_of_the_first(code: str) -> None:
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    assert node.ask(Reset(8)) is None
    node.advance(1.6)  # too late for the first
    assert node.ask(Reset(9)) is None
    first, second = removals(node)
    node.store.job_done(first, Outcome(code=code), node.now_ns)
    assert node.reply() is None
    node.store.job_done(second, Outcome(), node.now_ns)
    answer = node.reply()
    assert isinstance(answer, Refused if code else ResetDone)
    assert answer.id == 9


def test_a_reset_removes_what_is_just_being_written() -> None:
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    (write,) = node.jobs
    assert isinstance(write, WriteJob)
    assert node.ask(Reset(8)) is None
    (job,) = removals(node)
    assert job.keys == (write.record.key,)
    node.store.job_done(write, Outcome(), node.now_ns)
    node.store.job_done(job, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(8, 1)
    assert tier_of(node)["objects"] == 0


def test_what_is_saved_again_after_a_reset_is_not_believed_to_be_on_disk_too_early() -> None:
    node = Node(tiers=(DISK,))
    node.save(0, 0)
    node.ask(Reset(8))
    node.save(0, 0)  # the same bytes
    first, removal, second = node.jobs
    assert isinstance(removal, RemoveJob)
    node.store.job_done(first, Outcome(), node.now_ns)
    assert tier_of(node)["objects"] == 0  # the removal comes next
    node.store.job_done(removal, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(8, 1)
    node.store.job_done(second, Outcome(), node.now_ns)
    assert tier_of(node)["objects"] == 1


def test_what_could_not_be_removed_is_still_to_be_removed_when_a_newer_copy_failed() -> None:
    """It was taken for replaced as soon as the newer one was queued: a reset called it gone, a restart had it."""
    node = Node(tiers=(DISK,))
    on_disk(node, CHAINS[0])
    node.ask(Reset(8))
    (removal,) = removals(node)
    node.store.job_done(removal, Outcome(code="KV-601"), node.now_ns)
    assert isinstance(node.reply(), Refused)
    node.save(0, 0)
    assert [type(job) for job in node.jobs] == [RemoveJob, WriteJob]  # the removal is tried again
    node.finish("KV-602")
    assert node.ask(Reset(9)) is None
    (removal,) = removals(node)
    assert set(removal.keys) == {first_record(CHAINS[0], group).key for group in range(2)}
    node.store.job_done(removal, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(9, 1)
    assert tier_of(node)["unremoved"] == 0


def test_what_is_saved_again_is_not_removed_by_a_removal_that_is_tried_again() -> None:
    """The index believed it to be on disk, where it was removed right after it had been written."""
    node = Node(tiers=(DISK,))
    other = msgspec.structs.replace(HYBRID, model="other")
    on_disk(node, CHAINS[0])
    node.store.recover(1, msgspec.structs.replace(first_record(CHAINS[0], 0), namespace=other))
    node.ask(Reset(8))
    node.save(0, 0)
    removal, write = node.jobs
    node.store.job_done(removal, Outcome(code="KV-602"), node.now_ns)
    node.reply()
    node.ask(Reset(9, other.digest))
    again = node.jobs[-1]
    assert isinstance(again, RemoveJob)
    assert isinstance(write, WriteJob)
    assert write.record.key not in again.keys
    node.store.job_done(write, Outcome(), node.now_ns)
    node.store.job_done(again, Outcome(), node.now_ns)
    assert node.reply() == ResetDone(9, 1)
    assert (tier_of(node)["objects"], tier_of(node)["unremoved"]) == (1, 0)


def test_everything_that_could_not_be_removed_is_remembered() -> None:
    """What was beyond a bound was back after a restart."""
    node = Node(tiers=(DISK,))
    on_disk(node, *[number.to_bytes(32, "big") for number in range(1, 40_001)])
    node.store.handle(node.session, Reset(8), node.now_ns)
    while jobs := node.store.take_jobs():
        for job in jobs:
            node.store.job_done(job, Outcome(code="KV-601"), node.now_ns)
        node.now_ns += 20_000_000
        node.store.tick(node.now_ns)
    assert (tier_of(node)["unremoved"], tier_of(node)["objects"]) == (80_000, 0)
