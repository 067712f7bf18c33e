"""Test support: objects on a disk tier, on files or in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvtally.core.space import GRANULE_BYTES
from kvtally.errors import KVTallyError, TierError
from kvtally.store.mover import read_verified
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.tiers import MemoryDevice, sample_record

CAPACITY_BYTES = 256 * GRANULE_BYTES


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
    tier.read(record, [memoryview(target)], lambda part: None)
    return bytes(target)


def verifies(tier: DiskTier, record: ObjectRecord) -> bool:
    """As the mover checks what comes up."""
    return read_verified(tier, record, [memoryview(bytearray(record.length_bytes))])


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
