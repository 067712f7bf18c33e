"""The disk tier's journal: what it still says after which damage, how long it gets, what reading it costs."""

from __future__ import annotations

import errno
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtally.core.namespace import canonical
from kvtally.core.space import GRANULE_BYTES, Piece, rebuild, round_up
from kvtally.store.tiers import disk, journal
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.disk import DiskTier
from kvtally.store.tiers.files import open_disk
from kvtally.store.tiers.journal import Dropped
from kvtally.testing.tiers import MemoryDevice, Operation, sample_namespace, sample_record
from tests.unit.disk_kit import CAPACITY_BYTES, body, get, numbers, on_memory, put, verifies
from tests.work import opcodes

OBJECTS_COUNT = 100_000

# ---------------------------------------------------------------- damage


def test_a_tail_torn_at_every_byte() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    for number in range(3):
        put(tier, number)
    start = tier.counters.journal_bytes
    put(tier, 3)
    whole = bytes(device.journal)
    for end in range(start, len(whole)):
        device.journal[:] = whole[:end]
        torn = on_memory(device)
        assert numbers(torn) == [0, 1, 2]
        assert torn.counters.dropped_at_recovery == ({Dropped.TORN: 1} if end > start else {})
        put(torn, 4)
        put(torn, 5)
        after = on_memory(device)
        assert numbers(after) == [0, 1, 2, 4, 5]
        assert after.counters.dropped_at_recovery == {}


def test_a_flipped_bit_anywhere_in_the_journal_costs_one_object_at_most() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    other = sample_namespace("other")
    for number in range(5):
        put(tier, number)
        tier.write(sample_record(number, body(number), namespace=other), [memoryview(body(number))])
    put(tier, 2, b"replaced")
    tier.remove([sample_record(4, b"").key])
    alive = {record.key for record in tier.recover()}
    removed = sample_record(4, b"").key
    whole, data = bytes(device.journal), bytes(device.data)
    for position in range(len(whole)):
        device.journal[:], device.data[:] = whole, data
        device.journal[position] ^= 1 << (position % 8)
        damaged = on_memory(device)
        records = list(damaged.recover())
        found = {record.key for record in records}
        assert len(alive - found) <= 1, position
        assert found - alive <= {removed}, position
        assert sum(damaged.counters.dropped_at_recovery.values()) >= 1
        assert all(verifies(damaged, record) for record in records)
        assert on_memory(device).counters.dropped_at_recovery.keys() <= {Dropped.TORN}  # the damage was repaired


@given(st.binary(max_size=600), st.integers(0, 2000), st.integers(0, 600))
@example(journal.seal(journal.PUT, b"short", 1), 0, 0)
@example(journal.seal(journal.DELETE, b"", 1), 0, 0)
@example(journal.seal(journal.NAMESPACE, b"{}", 1), 0, 0)
@example(journal.seal(77, b"future", 1), 0, 0)
def test_any_bytes_are_a_journal(noise: bytes, position: int, length: int) -> None:
    """Also with noise over a part of a good one."""
    device = MemoryDevice()
    device.identity = 1
    tier = on_memory(device)
    for number in range(6):
        put(tier, number)
    device.journal[position : position + length] = noise
    survivor = on_memory(device)
    for record in survivor.recover():
        assert verifies(survivor, record)
    put(survivor, 7)
    assert 7 in numbers(on_memory(device))


def test_records_of_another_directory_do_not_verify() -> None:
    device = MemoryDevice()
    put(on_memory(device), 1)
    device.identity = 12345
    assert numbers(on_memory(device)) == []


def test_of_two_objects_in_one_place_the_newer_stays() -> None:
    """A delete record that was lost brings back an object whose place has been given away."""
    device = MemoryDevice()
    tier = on_memory(device)
    old = put(tier, 1, b"a" * 3 * GRANULE_BYTES)
    other = put(tier, 2)
    start = tier.counters.journal_bytes
    tier.remove([old.key])
    end = tier.counters.journal_bytes
    new = put(tier, 3, b"b" * GRANULE_BYTES)
    del device.journal[start:end]
    damaged = on_memory(device)
    assert list(damaged.recover()) == [other, new]
    assert damaged.counters.dropped_at_recovery == {Dropped.OVERLAP: 1}
    assert verifies(damaged, new)
    assert list(on_memory(device).recover()) == [other, new]


def test_a_replacement_whose_delete_record_is_lost() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    put(tier, 1, b"old")
    other = put(tier, 2)
    start = tier.counters.journal_bytes
    new = put(tier, 1, b"new")
    del device.journal[start : start + journal.KEY_END]
    damaged = on_memory(device)
    assert list(damaged.recover()) == [other, new]
    assert get(damaged, new) == b"new"


def test_objects_without_their_namespace_are_dropped() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    put(tier, 1)
    lost = sample_namespace("lost")
    start = tier.counters.journal_bytes
    tier.write(sample_record(1, b"x", namespace=lost), [memoryview(b"x")])
    for copy in range(2):
        device.journal[start + copy * len(journal.seal(journal.NAMESPACE, canonical(lost), 0)) + 30] ^= 1
    damaged = on_memory(device)
    assert [record.namespace for record in damaged.recover()] == [sample_namespace()]
    assert damaged.counters.dropped_at_recovery == {Dropped.DAMAGED: 2, Dropped.NAMESPACE: 1}


granules = st.integers(0, 12)


@given(st.lists(st.lists(st.tuples(granules, st.integers(0, 3)), min_size=1, max_size=3), max_size=12))
def test_what_remains_of_overlapping_objects_fits(layout: list[list[tuple[int, int]]]) -> None:
    capacity_bytes = 12 * GRANULE_BYTES
    objects = {
        bytes([age]): journal.PLACE.pack(0)
        + b"".join(journal.PIECE.pack(offset * GRANULE_BYTES, length * GRANULE_BYTES) for offset, length in pieces)
        for age, pieces in enumerate(layout)
    }
    dropped = journal.impossible_places(objects, capacity_bytes)
    remaining = {key: place for key, place in objects.items() if key not in dropped}
    rebuild(capacity_bytes, journal.all_pieces(remaining))  # raises if anything overlaps or lies outside
    for key in dropped:
        own = journal.pieces_of(objects[key])
        impossible = any(piece.length == 0 or piece.offset + piece.length > capacity_bytes for piece in own)
        shared = [
            other for other in objects if other >= key and touches(own, journal.pieces_of(objects[other]), other == key)
        ]
        assert impossible or shared  # an object goes for a reason: itself, or one that is newer


def touches(left: Sequence[Piece], right: Sequence[Piece], is_same: bool) -> bool:
    pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if not (is_same and i == j)]
    return any(a.offset < b.offset + round_up(b.length) and b.offset < a.offset + round_up(a.length) for a, b in pairs)


# ---------------------------------------------------------------- its length


@pytest.mark.parametrize("on_files", [False, True])
def test_the_journal_stays_short(tmp_path: Path, on_files: bool) -> None:
    device = MemoryDevice()
    tier = open_disk(tmp_path, CAPACITY_BYTES) if on_files else on_memory(device)
    gone = sample_namespace("gone")
    tier.write(sample_record(1, b"x", namespace=gone), [memoryview(b"x")])
    tier.remove([sample_record(1, b"x", namespace=gone).key])
    steady = [put(tier, number) for number in range(5)]
    longest_bytes = 0
    for turn in range(2 * disk.COMPACTION_SLACK):
        record = put(tier, 100, bytes([turn % 256]))
        longest_bytes = max(longest_bytes, tier.counters.journal_bytes)
    expected = [*steady, record]
    assert longest_bytes < (disk.COMPACTION_SLACK + 100) * 150
    assert tier.find([record.key for record in expected]) == expected
    tier.check()
    tier.close()
    tier = open_disk(tmp_path, CAPACITY_BYTES) if on_files else on_memory(device)
    assert list(tier.recover()) == expected
    assert all(verifies(tier, record) for record in expected)
    tier._compact()
    assert tier.counters.journal_bytes < 3000
    assert list(tier.recover()) == expected
    assert tier.find([record.key for record in expected]) == expected
    put(tier, 200)
    tier.close()
    tier = open_disk(tmp_path, CAPACITY_BYTES) if on_files else on_memory(device)
    assert numbers(tier) == [0, 1, 2, 3, 4, 100, 200]
    assert tier.counters.dropped_at_recovery == {}
    tier.close()
    assert not (tmp_path / "journal.new").exists()


def test_a_compaction_that_fails_costs_nothing() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    steady = put(tier, 1)
    device.fail(Operation.REPLACE_JOURNAL, errno.ENOSPC, times=None)
    for turn in range(disk.COMPACTION_SLACK // 2 + 10):
        last = put(tier, 2, bytes([turn % 256]))
    assert list(on_memory(device).recover()) == [steady, last]  # also at start
    assert tier.counters.journal_bytes > disk.COMPACTION_SLACK * 60


def test_a_long_journal_is_compacted_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "COMPACTION_SLACK", 1 << 40)
        for turn in range(6000):
            last = put(tier, 2, bytes([turn % 256]))
        assert tier.counters.journal_bytes > 6000 * 100
    tier = on_memory(device)
    assert tier.counters.journal_bytes < 3000
    assert list(tier.recover()) == [last]
    assert tier.find([last.key]) == [last]


# ---------------------------------------------------------------- what it costs


class NoData(MemoryDevice):
    """Keeps the journal only: 100,000 objects are 400 MB of granules."""

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        pass


@pytest.fixture(scope="module")
def large() -> NoData:
    device = NoData()
    tier = DiskTier(device, OBJECTS_COUNT * GRANULE_BYTES)
    data = b"x" * 100
    template = sample_record(0, data)
    source = [memoryview(data)]
    for number in range(OBJECTS_COUNT):
        tier.write(
            ObjectRecord(
                namespace=template.namespace,
                chain=number.to_bytes(32, "big"),
                parent=template.parent,
                start_tokens=0,
                end_tokens=256,
                group=0,
                rank=0,
                length_bytes=len(data),
                checksum=template.checksum,
            ),
            source,
        )
    return device


def test_recovery_of_100_000_objects(large: NoData) -> None:
    """Work grows with the number of objects, and no faster."""
    tier = DiskTier(large, OBJECTS_COUNT * GRANULE_BYTES)
    assert Counter(record.length_bytes for record in tier.recover()) == {100: OBJECTS_COUNT}

    def work(part: float) -> int:
        device = NoData()
        device.journal = large.journal[: int(len(large.journal) * part)]
        return opcodes(lambda: deque(DiskTier(device, OBJECTS_COUNT * GRANULE_BYTES).recover(), maxlen=0))

    assert work(0.04) < 2.5 * work(0.02)


def test_memory_for_each_object(large: NoData) -> None:
    device = NoData()
    device.journal = large.journal[: len(large.journal) // 4]  # tracing is slow
    tracemalloc.start()
    try:
        tier = DiskTier(device, OBJECTS_COUNT * GRANULE_BYTES)
        for _ in tier.recover():  # after which the journal's bytes are let go
            pass
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    objects_count = tier.counters.objects
    print(f"\n{held_bytes / objects_count:.0f} bytes for each of {objects_count} objects")
    assert objects_count > OBJECTS_COUNT // 5
    assert held_bytes <= 250 * objects_count
