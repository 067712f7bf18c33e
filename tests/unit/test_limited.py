"""A limit on reading holds for all readers together, and for nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from kvtally.store.tiers.limited import LimitedTier
from kvtally.testing.tiers import MemoryTier, sample_record
from tests.waiting import HANG_S, Clock

LIMIT_BYTES_S = 1_000_000
SIZE_BYTES = 20_000


def test_all_readers_together_keep_to_the_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    clock.stop()
    monkeypatch.setattr(time, "sleep", slept_s.append)
    tier = LimitedTier(MemoryTier(), LIMIT_BYTES_S)
    data = bytes(SIZE_BYTES)
    records = [sample_record(number, data) for number in range(6)]
    for record in records:
        tier.write(record, [memoryview(data)])
    assert slept_s == []
    landed: list[int] = []

    def read(part: int) -> None:
        for record in records[part::3]:
            tier.read(record, [memoryview(bytearray(SIZE_BYTES))], lambda view: landed.append(len(view)))

    threads = [threading.Thread(target=read, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert landed == [SIZE_BYTES] * 6
    # Each in turn, all within one second's worth of bytes: no time passes here while they sleep.
    assert sorted(slept_s) == pytest.approx([number * SIZE_BYTES / LIMIT_BYTES_S for number in range(1, 7)])
