"""The disk tier on a device that fails: nothing is lost but what the failure hit, and nothing wrong verifies."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvtally.core.space import GRANULE_BYTES
from kvtally.errors import IntegrityError, TierError
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.disk import READ_STEP_BYTES, DiskTier
from kvtally.store.tiers.files import open_disk
from kvtally.testing.tiers import MemoryDevice, Operation
from tests.unit.disk_kit import CAPACITY_BYTES, code_of, get, on_memory, put, verifies


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


@pytest.mark.parametrize("is_damaged", [False, True])
def test_recovery_takes_what_opening_has_read(is_damaged: bool) -> None:
    """A second read that failed left an index without an object above a tier that was full."""
    device = MemoryDevice()
    tier = on_memory(device)
    records = [put(tier, number) for number in range(20)]
    before_bytes = len(device.journal)
    device.journal[before_bytes // 2] ^= is_damaged
    device.reopen()
    tier = DiskTier(device, CAPACITY_BYTES)
    assert (len(device.journal) < before_bytes) is is_damaged  # rewritten: everything lies elsewhere in it
    device.fail(Operation.READ_JOURNAL, errno.EIO, times=None)
    found = list(tier.recover())
    assert len(found) == 20 - is_damaged
    assert all(record in records for record in found)
    device.heal()
    assert list(tier.recover()) == found
    added = put(tier, 40)
    assert list(tier.recover()) == [*found, added]


def test_a_closed_tier_is_a_failing_one(tmp_path: Path) -> None:
    for tier in (open_disk(tmp_path, CAPACITY_BYTES), on_memory(MemoryDevice())):
        record = put(tier, 1)
        tier.close()
        assert code_of(lambda tier=tier: put(tier, 2)) == "KV-602"  # type: ignore[misc]
        assert code_of(lambda tier=tier, record=record: get(tier, record)) == "KV-602"  # type: ignore[misc]


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


def test_a_flipped_bit_in_the_data_fails_the_checksum() -> None:
    device = MemoryDevice(seed=3)
    tier = on_memory(device)
    record = put(tier, 1, bytes(GRANULE_BYTES))
    device.flip_bit(device.data)
    assert not verifies(tier, record)


class WatchedDevice(MemoryDevice):
    """Notes every read of data."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def preadv(self, target: Sequence[memoryview], offset: int) -> int:
        self.events.append(("read", sum(map(len, target))))
        return super().preadv(target, offset)


def test_each_step_of_a_read_is_reported_before_the_next_one_begins() -> None:
    device = WatchedDevice()
    tier = on_memory(device, 8 * READ_STEP_BYTES)
    data = Random(1).randbytes(2 * READ_STEP_BYTES + 10)
    record = put(tier, 1, data)
    target = memoryview(bytearray(len(data)))
    steps = [READ_STEP_BYTES, READ_STEP_BYTES, 10]
    tier.read(record, [target], lambda part: device.events.append(("landed", len(part))))
    assert device.events == [(what, step) for step in steps for what in ("read", "landed")]
    assert target == data

    device.events.clear()
    del device.data[READ_STEP_BYTES + 5 :]
    with pytest.raises(IntegrityError):
        tier.read(record, [target], lambda part: device.events.append(("landed", len(part))))
    assert device.events == [("read", READ_STEP_BYTES), ("landed", READ_STEP_BYTES), ("read", READ_STEP_BYTES)]
