"""A tier that is read no faster than a limit: for disks that the store shares with others, and for measurements.

Wraps any `Tier`. Reads of all threads together keep to the limit, part by part as they land; everything else passes
through. A pause never holds a lock, so removing and finding do not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvtally.core.keys import ObjectKey
from kvtally.store.tiers.base import ObjectRecord, Tier


class LimitedTier:
    """`tier`, with at most `read_bytes_s` bytes read in a second."""

    def __init__(self, tier: Tier, read_bytes_s: int) -> None:
        self._tier = tier
        self._read_bytes_s = read_bytes_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0  # when the bytes granted so far have had their time
        self.name = tier.name
        self.capacity_bytes = tier.capacity_bytes
        self.readers = tier.readers

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        def landed_in_time(part: memoryview) -> None:
            with self._lock:
                self._free_at_s = max(self._free_at_s, time.monotonic()) + len(part) / self._read_bytes_s
                until_s = self._free_at_s
            time.sleep(max(0.0, until_s - time.monotonic()))
            landed(part)

        self._tier.read(record, target, landed_in_time)

    def recover(self) -> Iterator[ObjectRecord]:
        return self._tier.recover()

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        self._tier.write(record, source)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        self._tier.remove(keys)

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        return self._tier.find(keys)

    def close(self) -> None:
        self._tier.close()
