"""A limit on reading holds for all readers together, and for nothing else."""

from __future__ import annotations

import threading
import time

from kvtally.store.tiers.limited import LimitedTier
from kvtally.testing.tiers import MemoryTier, sample_record

LIMIT_BYTES_S = 1_000_000
SIZE_BYTES = 20_000


def test_all_readers_together_keep_to_the_limit() -> None:
    tier = LimitedTier(MemoryTier(), LIMIT_BYTES_S)
    data = bytes(SIZE_BYTES)
    records = [sample_record(number, data) for number in range(6)]
    begun = time.monotonic()
    for record in records:
        tier.write(record, [memoryview(data)])
    written_s = time.monotonic() - begun
    landed: list[int] = []

    def read(part: int) -> None:
        for record in records[part::3]:
            tier.read(record, [memoryview(bytearray(SIZE_BYTES))], lambda view: landed.append(len(view)))

    begun = time.monotonic()
    threads = [threading.Thread(target=read, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    seconds = time.monotonic() - begun
    assert landed == [SIZE_BYTES] * 6
    assert seconds >= 6 * SIZE_BYTES / LIMIT_BYTES_S * 0.99
    assert written_s < seconds / 2
