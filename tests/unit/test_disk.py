"""The disk tier's own promises: what survives which damage, what it refuses, what it costs."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvtally
from kvtally.core.checksum import object_checksum
from kvtally.core.namespace import canonical
from kvtally.core.space import GRANULE_BYTES, Piece, rebuild, round_up
from kvtally.errors import ConfigError, IncompatibleError, IntegrityError, KVTallyError, TierError
from kvtally.store.tiers import disk
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.disk import DiskTier, Dropped, open_disk
from kvtally.testing.tiers import MemoryDevice, Operation, sample_namespace, sample_record

CAPACITY_BYTES = 256 * GRANULE_BYTES
OBJECTS_COUNT = 100_000


def body(number: int) -> bytes:
    """The bytes of the object `number`: up to four granules."""
    return Random(number).randbytes(1 + number * 7919 % (4 * GRANULE_BYTES))


def put(tier: DiskTier, number: int, data: bytes | None = None) -> ObjectRecord:
    data = body(number) if data is None else data
    record = sample_record(number, data)
    tier.write(record, [memoryview(data)])
    return record


def get(tier: DiskTier, record: ObjectRecord) -> bytes:
    target = bytearray(record.length_bytes)
    tier.read(record, [memoryview(target)])
    return bytes(target)


def verifies(tier: DiskTier, record: ObjectRecord) -> bool:
    """As the mover checks what comes up."""
    return object_checksum(record.key, record.length_bytes, [memoryview(get(tier, record))]) == record.checksum


def numbers(tier: DiskTier) -> list[int]:
    return [int.from_bytes(record.chain, "big") for record in tier.recover()]


def code_of(call: Callable[[], object], kind: type[KVTallyError] = TierError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value.code


def on_memory(device: MemoryDevice, capacity_bytes: int = CAPACITY_BYTES) -> DiskTier:
    device.reopen()
    tier = DiskTier(device, capacity_bytes)
    tier.check()
    return tier


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file with its inode, time and content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        stat = path.stat()
        found[str(path.relative_to(directory))] = (
            stat.st_ino,
            stat.st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
    return found


# ---------------------------------------------------------------- what is refused, and left as it was


def test_a_second_store_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    record = put(tier, 1)
    before = snapshot(tmp_path)
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-104"
    assert snapshot(tmp_path) == before
    put(tier, 2)
    assert verifies(tier, record)
    tier.close()
    again = open_disk(tmp_path, CAPACITY_BYTES)
    assert numbers(again) == [1, 2]
    again.close()


@pytest.mark.parametrize(
    ("name", "content", "kind", "code"),
    [
        ("thesis.tex", b"years of work", ConfigError, "KV-103"),
        ("data", b"not ours", ConfigError, "KV-103"),
        ("format.json", b"{}", ConfigError, "KV-103"),
        ("format.json", b"\xff\x00 not json", ConfigError, "KV-103"),
        ("format.json", b'{"kvtally_disk":1,"granule_bytes":4096,"id":-5}', ConfigError, "KV-103"),
        ("format.json", b'{"kvtally_disk":2,"granule_bytes":4096,"id":5}', IncompatibleError, "KV-203"),
        ("format.json", b'{"kvtally_disk":99,"something":"else"}', IncompatibleError, "KV-203"),
        ("format.json", b'{"kvtally_disk":1,"granule_bytes":8192,"id":5}', IncompatibleError, "KV-203"),
    ],
)
def test_a_directory_that_is_not_ours(
    tmp_path: Path, name: str, content: bytes, kind: type[KVTallyError], code: str
) -> None:
    (tmp_path / name).write_bytes(content)
    before = snapshot(tmp_path)
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), kind) == code
    assert snapshot(tmp_path) == before


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert code_of(lambda: open_disk(tmp_path / "file", CAPACITY_BYTES), ConfigError) == "KV-103"
    assert code_of(lambda: open_disk(tmp_path / "file" / "below", CAPACITY_BYTES), ConfigError) == "KV-103"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-103"
        assert code_of(lambda: open_disk(tmp_path / "below", CAPACITY_BYTES), ConfigError) == "KV-103"
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("capacity_bytes", [-1, 0, GRANULE_BYTES - 1, 1 << 62])
def test_an_impossible_capacity(tmp_path: Path, capacity_bytes: int) -> None:
    assert code_of(lambda: open_disk(tmp_path / "new", capacity_bytes), ConfigError) == "KV-102"
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    open_disk(tmp_path / "a" / "b", CAPACITY_BYTES).close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "a" / "b").iterdir()}
    assert modes.keys() == {"format.json", "lock", "data", "journal"}
    assert modes["data"] == modes["journal"] == 0


def test_a_directory_left_while_it_was_set_up_or_a_new_volume(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"")
    (tmp_path / "format.json.new").write_bytes(b"half of")
    (tmp_path / "lost+found").mkdir()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    put(tier, 1)
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "format.json", "journal", "lock", "lost+found"]


def test_a_journal_that_cannot_be_read_at_start(tmp_path: Path) -> None:
    open_disk(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "journal").unlink()
    (tmp_path / "journal").mkdir()
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-103"
    (tmp_path / "journal").rmdir()
    open_disk(tmp_path, CAPACITY_BYTES).close()  # the refusal left no lock behind


# ---------------------------------------------------------------- crashes


def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_disk import open_disk, put
tier = open_disk(Path({str(tmp_path)!r}), 1 << 30)
for number in range(1_000_000):
    record = put(tier, number)
    if number % 5 == 4:
        tier.remove([record.key])
    print(number, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvtally.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        last = 0
        for line in child.stdout:
            last = int(line)
            if last >= 400:
                child.send_signal(signal.SIGKILL)
                break
        last = max([last, *map(int, child.stdout.read().split())])  # what it reported until the signal came
    tier = open_disk(tmp_path, 1 << 30)
    tier.check()
    recovered = list(tier.recover())
    found = {int.from_bytes(record.chain, "big") for record in recovered}
    reported = {number for number in range(last + 1) if number % 5 != 4}
    assert found >= reported
    assert found <= reported | {last + 1}  # written, but killed before it could say so
    assert all(verifies(tier, record) for record in recovered)
    tier.close()


def test_a_copy_taken_between_any_two_calls_is_a_store(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "live", CAPACITY_BYTES)
    expected: list[int] = []
    for number in range(12):
        record = put(tier, number)
        expected.append(number)
        if number % 3 == 2:
            tier.remove([record.key])
            expected.pop()
        copy = tmp_path / f"copy {number}"
        shutil.copytree(tmp_path / "live", copy)
        restarted = open_disk(copy, CAPACITY_BYTES)
        assert [int.from_bytes(record.chain, "big") for record in restarted.recover()] == expected
        assert all(verifies(restarted, record) for record in restarted.recover())
        restarted.close()
    tier.close()


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
    journal, data = bytes(device.journal), bytes(device.data)
    for position in range(len(journal)):
        device.journal[:], device.data[:] = journal, data
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
@example(disk.seal(disk.PUT, b"short", 1), 0, 0)
@example(disk.seal(disk.DELETE, b"", 1), 0, 0)
@example(disk.seal(disk.NAMESPACE, b"{}", 1), 0, 0)
@example(disk.seal(77, b"future", 1), 0, 0)
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


@pytest.mark.parametrize("on_files", [False, True])
def test_a_truncated_data_file_costs_what_lay_behind_the_cut(tmp_path: Path, on_files: bool) -> None:
    device = MemoryDevice()
    tier = open_disk(tmp_path, CAPACITY_BYTES) if on_files else on_memory(device)
    records = [put(tier, number, bytes([number]) * GRANULE_BYTES) for number in range(4)]
    tier.close()
    if on_files:
        os.truncate(tmp_path / "data", 2 * GRANULE_BYTES + 10)
    else:
        del device.data[2 * GRANULE_BYTES + 10 :]
    tier = open_disk(tmp_path, CAPACITY_BYTES) if on_files else on_memory(device)
    assert [verifies(tier, record) for record in records[:2]] == [True, True]
    for record in records[2:]:
        assert code_of(lambda record=record: get(tier, record), IntegrityError) == "KV-402"  # type: ignore[misc]
    tier.remove([record.key for record in records[2:]])
    assert verifies(tier, put(tier, 9))
    tier.close()


def test_a_missing_data_file_is_a_shorter_one(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    record = put(tier, 1)
    tier.close()
    (tmp_path / "data").unlink()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert code_of(lambda: get(tier, record), IntegrityError) == "KV-402"
    tier.close()


def test_a_flipped_bit_in_the_data_fails_the_checksum() -> None:
    device = MemoryDevice(seed=3)
    tier = on_memory(device)
    record = put(tier, 1, bytes(GRANULE_BYTES))
    device.flip_bit(device.data)
    assert not verifies(tier, record)


def faulty_step(
    tier: DiskTier, device: MemoryDevice, random: Random, held: dict[int, ObjectRecord]
) -> tuple[int, bool]:
    """One write or removal, perhaps on a failing device; returns the object's number and whether it came through."""
    number = random.randrange(12)
    if random.random() < 0.2:
        device.fail(random.choice(list(Operation)), random.choice([errno.ENOSPC, errno.EIO, errno.EROFS]))
    try:
        if number in held and random.random() < 0.4:
            tier.remove([held[number].key])
            del held[number]
        else:
            held[number] = put(tier, number, random.randbytes(random.randrange(1, 6 * GRANULE_BYTES)))
    except TierError:
        return number, False
    finally:
        device.heal()
    return number, True


@pytest.mark.parametrize("seed", range(150))
def test_crashes_and_faults_from_a_seed(seed: int) -> None:
    """No sequence of failures loses more than the write it hit, serves wrong bytes that verify, or leaks space."""
    device = MemoryDevice(seed)
    random = Random(seed)
    tier = on_memory(device, 64 * GRANULE_BYTES)
    held: dict[int, ObjectRecord] = {}
    doubtful: set[int] = set()  # what the last write that came through, and those that failed since, were about
    for _ in range(60):
        number, came_through = faulty_step(tier, device, random, held)
        doubtful = {number} if came_through else doubtful | {number}
        tier.check()
        if random.random() < 0.2:
            device.crash()
            tier = DiskTier(device, 64 * GRANULE_BYTES)
            found = {int.from_bytes(record.chain, "big"): record for record in tier.recover()}
            for number in (held.keys() | found.keys()) - doubtful:
                assert found.get(number) == held.get(number)
            held = found
        for record in held.values():
            assert verifies(tier, record)


# ---------------------------------------------------------------- a device that fails


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.WRITE_JOURNAL])
@pytest.mark.parametrize(
    ("error_number", "code"),
    [
        (errno.ENOSPC, "KV-601"),
        (errno.EDQUOT, "KV-601"),
        (errno.EROFS, "KV-602"),
        (errno.EIO, "KV-602"),
        (errno.ENOENT, "KV-602"),
        (errno.EACCES, "KV-602"),
        (errno.ESTALE, "KV-602"),
    ],
)
def test_a_failed_write_changes_nothing(operation: Operation, error_number: int, code: str) -> None:
    device = MemoryDevice(seed=error_number)
    tier = on_memory(device)
    kept = [put(tier, number) for number in range(4)]
    before = tier.counters
    device.fail(operation, error_number, times=3)
    assert code_of(lambda: put(tier, 9)) == code
    assert code_of(lambda: put(tier, 1, b"in place of another")) == code
    tier.check()
    assert tier.counters == before
    device.fail(Operation.WRITE_JOURNAL, error_number)
    assert code_of(lambda: tier.remove([kept[0].key, kept[1].key])) == code
    assert tier.counters == before
    device.heal()
    assert all(verifies(tier, record) for record in kept)
    kept.append(put(tier, 9))
    restarted = on_memory(device)
    assert list(restarted.recover()) == kept
    assert all(verifies(restarted, record) for record in kept)
    assert restarted.counters.dropped_at_recovery == {}


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Makes the kernel take a write to a real file in part, up to this size, and then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_append_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    kept = put(tier, 0)
    for _ in range(100):
        record = put(tier, 1, b"the journal grows, the data do not")
    with file_size_limit(tier.counters.journal_bytes + 100):
        assert code_of(lambda: put(tier, 2, b"never")) == "KV-602"
    assert (tmp_path / "journal").stat().st_size == tier.counters.journal_bytes + 100
    tier.remove([record.key])  # its record is shorter than what the failed one left behind
    assert (tmp_path / "journal").stat().st_size == tier.counters.journal_bytes
    tier.check()
    tier.close()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert list(tier.recover()) == [kept]
    assert tier.counters.dropped_at_recovery == {}
    tier.close()


def test_a_compaction_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    records = [put(tier, number, bytes([number])) for number in range(30)]
    before = tier.counters
    with file_size_limit(1000):
        tier._compact()
    assert not (tmp_path / "journal.new").exists()
    assert tier.counters == before
    assert list(tier.recover()) == tier.find([record.key for record in records]) == records
    tier.close()


def test_failing_and_short_reads() -> None:
    device = MemoryDevice()
    tier = on_memory(device)
    record = put(tier, 1)
    device.fail(Operation.READ, errno.EIO)
    assert code_of(lambda: get(tier, record)) == "KV-602"
    device.shorten_reads()
    assert code_of(lambda: get(tier, record), IntegrityError) == "KV-402"
    device.fail(Operation.READ_JOURNAL, errno.EIO, times=None)
    assert code_of(lambda: tier.find([record.key])) == "KV-602"
    assert code_of(lambda: list(tier.recover())) == "KV-602"
    assert code_of(lambda: on_memory(device)) == "KV-602"
    device.heal()
    assert verifies(tier, record)
    device.journal[-1] ^= 1
    assert tier.find([record.key]) == [None]
    del device.journal[-1]
    assert code_of(lambda: list(tier.recover()), IntegrityError) == "KV-402"


def test_a_vanished_directory(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk", CAPACITY_BYTES)
    record = put(tier, 1)
    shutil.rmtree(tmp_path / "disk")
    assert code_of(lambda: put(tier, 2)) == "KV-602"
    assert code_of(lambda: tier.remove([record.key])) == "KV-602"
    assert verifies(tier, record)
    tier.check()
    successor = open_disk(tmp_path / "disk", CAPACITY_BYTES)
    third = put(successor, 3)
    before = snapshot(tmp_path)
    assert code_of(lambda: put(tier, 4)) == "KV-602"
    tier._compact()  # not even then does it write into its successor's files
    assert snapshot(tmp_path) == before
    tier.close()
    assert verifies(successor, third)
    successor.close()


def test_a_closed_tier_is_a_failing_one(tmp_path: Path) -> None:
    for tier in (open_disk(tmp_path, CAPACITY_BYTES), on_memory(MemoryDevice())):
        record = put(tier, 1)
        tier.close()
        assert code_of(lambda tier=tier: put(tier, 2)) == "KV-602"  # type: ignore[misc]
        assert code_of(lambda tier=tier, record=record: get(tier, record)) == "KV-602"  # type: ignore[misc]


# ---------------------------------------------------------------- space and the journal's length


def test_a_lowered_capacity_drops_what_lies_beyond(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 8 * GRANULE_BYTES)
    records = [put(tier, number, bytes([number]) * 2 * GRANULE_BYTES) for number in range(4)]
    tier.close()
    tier = open_disk(tmp_path, 5 * GRANULE_BYTES)
    tier.check()
    assert list(tier.recover()) == records[:2]
    assert tier.counters.dropped_at_recovery == {Dropped.MISPLACED: 2}
    assert (tmp_path / "data").stat().st_size <= 5 * GRANULE_BYTES
    tier.close()
    tier = open_disk(tmp_path, 8 * GRANULE_BYTES)
    assert (list(tier.recover()), tier.counters.dropped_at_recovery) == (records[:2], {})
    tier.close()


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
    del device.journal[start : start + disk.KEY_END]
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
        device.journal[start + copy * len(disk.seal(disk.NAMESPACE, canonical(lost), 0)) + 30] ^= 1
    damaged = on_memory(device)
    assert [record.namespace for record in damaged.recover()] == [sample_namespace()]
    assert damaged.counters.dropped_at_recovery == {Dropped.DAMAGED: 2, Dropped.NAMESPACE: 1}


granules = st.integers(0, 12)


@given(st.lists(st.lists(st.tuples(granules, st.integers(0, 3)), min_size=1, max_size=3), max_size=12))
def test_what_remains_of_overlapping_objects_fits(layout: list[list[tuple[int, int]]]) -> None:
    capacity_bytes = 12 * GRANULE_BYTES
    objects = {
        bytes([age]): disk.PLACE.pack(0)
        + b"".join(disk.PIECE.pack(offset * GRANULE_BYTES, length * GRANULE_BYTES) for offset, length in pieces)
        for age, pieces in enumerate(layout)
    }
    dropped = disk.impossible_places(objects, capacity_bytes)
    remaining = {key: place for key, place in objects.items() if key not in dropped}
    rebuild(capacity_bytes, disk.all_pieces(remaining))  # raises if anything overlaps or lies outside
    for key in dropped:
        own = disk.pieces_of(objects[key])
        impossible = any(piece.length == 0 or piece.offset + piece.length > capacity_bytes for piece in own)
        shared = [
            other for other in objects if other >= key and touches(own, disk.pieces_of(objects[other]), other == key)
        ]
        assert impossible or shared  # an object goes for a reason: itself, or one that is newer


def touches(left: Sequence[Piece], right: Sequence[Piece], is_same: bool) -> bool:
    pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if not (is_same and i == j)]
    return any(a.offset < b.offset + round_up(b.length) and b.offset < a.offset + round_up(a.length) for a, b in pairs)


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


def test_recovery_of_100_000_objects_is_quick(large: NoData) -> None:
    start = time.perf_counter()
    tier = DiskTier(large, OBJECTS_COUNT * GRANULE_BYTES)
    replayed = time.perf_counter()
    count = Counter(record.length_bytes for record in tier.recover())
    end = time.perf_counter()
    print(f"\nreplay {replayed - start:.2f} s, records {end - replayed:.2f} s for {OBJECTS_COUNT} objects")
    assert count == {100: OBJECTS_COUNT}
    assert end - start < 5


def test_memory_for_each_object(large: NoData) -> None:
    device = NoData()
    device.journal = large.journal[: len(large.journal) // 4]  # tracing is slow
    tracemalloc.start()
    try:
        tier = DiskTier(device, OBJECTS_COUNT * GRANULE_BYTES)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    objects_count = tier.counters.objects
    print(f"\n{held_bytes / objects_count:.0f} bytes for each of {objects_count} objects")
    assert objects_count > OBJECTS_COUNT // 5
    assert held_bytes <= 250 * objects_count
