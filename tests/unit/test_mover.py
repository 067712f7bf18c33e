"""The mover: jobs in, verified bytes and outcomes out, whatever a tier does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, Queue

import msgspec
import pytest

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.space import Piece
from kvtally.store.arena import Arena
from kvtally.store.jobs import FindJob, Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.mover import Batch, Mover
from kvtally.store.tiers.base import READERS, Boundary, Holding, NoRoomError, ObjectRecord
from kvtally.testing.tiers import MemoryTier, sample_record
from kvtally.wire.limits import MIB
from tests.waiting import HANG_S, HOUR_S, eventually

TIER = 1  # the arena is 0


class WatchedTier:
    """A tier in memory. `before` is called in the tier's thread before each operation, and may wait or raise."""

    name = "watched"
    capacity_bytes: int | None = None
    readers = READERS

    def __init__(self) -> None:
        self.inner = MemoryTier()
        self.changes: list[tuple[str, bytes]] = []
        self.before: Callable[[str], None] = lambda operation: None

    def recover(self) -> Iterator[ObjectRecord]:
        return self.inner.recover()

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        self.before("write")
        self.inner.write(record, source)
        self.changes.append(("write", record.chain))

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        self.before("read")
        self.inner.read(record, target, landed)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        self.before("remove")
        self.inner.remove(keys)
        self.changes += [("remove", key.chain) for key in keys]

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        self.before("find")
        return self.inner.find(keys)

    def ask(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> Sequence[Holding | None]:
        self.before("ask")
        return self.inner.ask(namespace, boundaries)

    def close(self) -> None:
        self.inner.close()


class Loop:
    """What an event loop does for the mover: runs posted functions in the test's own thread."""

    def __init__(self) -> None:
        self.posted: Queue[Callable[[], None]] = Queue()
        self.batches: list[Batch] = []

    def outcomes(self, count: int) -> dict[int, Outcome]:
        """Wait for so many jobs; outcomes by job id."""
        done: dict[int, Outcome] = {}
        while len(done) < count:
            try:
                self.posted.get(timeout=HANG_S)()
            except Empty:
                raise AssertionError(f"only {len(done)} of {count} jobs ended") from None
            done |= {job.id: outcome for job, outcome in self.batches[-1]}
        return done


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MIB)
    yield arena
    arena.close()


@pytest.fixture
def tier() -> WatchedTier:
    return WatchedTier()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def mover(arena: Arena, tier: WatchedTier, loop: Loop) -> Iterator[Mover]:
    mover = Mover([tier], arena)
    mover.start(post=loop.posted.put, deliver=loop.batches.append)
    yield mover
    assert mover.stop(HANG_S)


def test_bytes_go_down_and_come_up_verified(arena: Arena, tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    data = os.urandom(6000)
    record = sample_record(1, data)
    below, above = (Piece(8192, 4096), Piece(0, 1904)), (Piece(65536, 6000),)
    for view, part in zip(arena.views(below), (data[:4096], data[4096:]), strict=True):
        view[:] = part
    mover.submit([WriteJob(id=1, tier=TIER, record=record, pieces=below)])
    assert mover.unwritten == 1
    assert loop.outcomes(1)[1].code == ""
    assert mover.unwritten == 0
    assert tier.inner.objects[record.key][1] == data

    mover.submit([ReadJob(id=2, tier=TIER, record=record, pieces=above)])
    outcome = loop.outcomes(1)[2]
    assert (outcome.code, bytes(arena.views(above)[0])) == ("", data)
    assert outcome.seconds > 0


def test_wrong_bytes_are_never_called_right(arena: Arena, tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    data = os.urandom(5000)
    record = sample_record(1, data)
    damaged = bytearray(data)
    damaged[4999] ^= 1
    tier.inner.objects[record.key] = (record, bytes(damaged))
    other = sample_record(2, data)  # the right bytes of another object
    tier.inner.objects[other.key] = (record, data)
    mover.submit(
        ReadJob(id=number, tier=TIER, record=wanted, pieces=(Piece(number * 8192, 5000),))
        for number, wanted in enumerate([record, msgspec.structs.replace(other, checksum=record.checksum)])
    )
    assert {outcome.code for outcome in loop.outcomes(2).values()} == {"KV-401"}


class SilentTier(MemoryTier):
    """Reports all but the last part of what it brings up."""

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        parts: list[memoryview] = []
        super().read(record, target, parts.append)
        for part in parts[:-1]:
            landed(part)


def test_bytes_that_were_not_reported_are_not_verified(arena: Arena, loop: Loop) -> None:
    data = os.urandom(8192)
    record = sample_record(1, data)
    tier = SilentTier()
    tier.write(record, [memoryview(data)])
    mover = Mover([tier], arena)
    mover.start(post=loop.posted.put, deliver=loop.batches.append)
    mover.submit([ReadJob(id=1, tier=TIER, record=record, pieces=(Piece(0, 4096), Piece(8192, 4096)))])
    assert loop.outcomes(1)[1].code == "KV-401"
    assert mover.stop(HANG_S)


def test_an_error_of_the_tier_becomes_its_code(tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    mover.submit([ReadJob(id=1, tier=TIER, record=sample_record(1, b"x"), pieces=(Piece(0, 1),))])
    assert loop.outcomes(1)[1].code == "KV-603"


def test_an_unexpected_error_is_logged_once_and_kills_no_thread(
    tier: WatchedTier, loop: Loop, mover: Mover, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(operation: str) -> None:
        raise ZeroDivisionError("a bug in a tier")

    record = sample_record(1, b"x")
    tier.before = explode
    with caplog.at_level(logging.ERROR, logger="kvtally.store"):
        mover.submit([WriteJob(id=1, tier=TIER, record=record, pieces=(Piece(0, 1),))])
        assert loop.outcomes(1)[1].code == "KV-600"
    assert [bool(line.exc_info) for line in caplog.records] == [True]
    tier.before = lambda operation: None
    mover.submit([WriteJob(id=2, tier=TIER, record=record, pieces=(Piece(0, 1),))])
    assert loop.outcomes(1)[2].code == ""


def test_a_question_is_answered_for_each_boundary(tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    held, absent = sample_record(1, b"x"), sample_record(2, b"y")
    tier.inner.objects[held.key] = (held, b"x")
    boundaries = tuple(Boundary(r.chain, r.parent, r.start_tokens, r.end_tokens) for r in (absent, held))
    mover.submit([FindJob(id=1, tier=TIER, namespace=held.namespace, boundaries=boundaries)])
    assert loop.outcomes(1)[1].found == (None, Holding(((0, held.checksum),)))


def test_writes_and_removes_keep_their_order(tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    records = [sample_record(number, b"x") for number in range(50)]
    jobs: list[Job] = []
    for record in records:
        jobs.append(WriteJob(id=len(jobs), tier=TIER, record=record, pieces=(Piece(0, 1),)))
        jobs.append(RemoveJob(id=len(jobs), tier=TIER, keys=(record.key,)))
    mover.submit(jobs)
    loop.outcomes(100)
    assert tier.changes == [(verb, record.chain) for record in records for verb in ("write", "remove")]


def test_reads_pass_a_slow_write(tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    release = threading.Event()
    record = sample_record(1, b"x")
    tier.inner.objects[record.key] = (record, b"x")

    def hold_writes(operation: str) -> None:
        if operation == "write":
            assert release.wait(HANG_S)

    tier.before = hold_writes
    mover.submit(
        [
            WriteJob(id=1, tier=TIER, record=sample_record(2, b"y"), pieces=(Piece(0, 1),)),
            ReadJob(id=2, tier=TIER, record=record, pieces=(Piece(4096, 1),)),
        ]
    )
    assert set(loop.outcomes(1)) == {2}
    release.set()
    assert set(loop.outcomes(1)) == {1}


def test_outcomes_that_pile_up_are_delivered_together(tier: WatchedTier, loop: Loop, mover: Mover) -> None:
    """The loop is busy: one wake-up is posted for all that ends meanwhile."""
    for number in range(10):
        mover.submit([RemoveJob(id=number, tier=TIER, keys=(sample_record(number, b"").key,))])
    eventually(lambda: len(tier.changes) == 10)
    assert loop.posted.qsize() == 1
    assert set(loop.outcomes(10)) == set(range(10))


def test_stop_drops_what_is_queued_and_reports_a_hung_device(arena: Arena) -> None:
    tier, loop = WatchedTier(), Loop()
    entered, release = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        entered.set()
        release.wait(HOUR_S)

    tier.before = hang
    mover = Mover([tier], arena)
    mover.start(post=loop.posted.put, deliver=loop.batches.append)
    mover.submit(
        WriteJob(id=number, tier=TIER, record=sample_record(number, b"x"), pieces=(Piece(0, 1),)) for number in range(3)
    )
    assert entered.wait(HANG_S)
    assert not mover.stop(0.05)
    release.set()
    assert mover.stop(HANG_S)
    assert len(tier.inner.objects) == 1


def test_a_tier_without_room_says_so_and_nothing_is_logged(
    tier: WatchedTier, loop: Loop, mover: Mover, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(operation: str) -> None:
        raise NoRoomError("no room", remedy="Evict first.")

    tier.before = no_room
    mover.submit([WriteJob(id=1, tier=TIER, record=sample_record(1, bytes(9)), pieces=(Piece(0, 9),))])
    outcome = loop.outcomes(1)[1]
    assert (outcome.code, outcome.is_crowded, caplog.records) == ("KV-601", True, [])
