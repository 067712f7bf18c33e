"""Alarms: deadlines, and what is to be done when they pass. No clock: the time is an argument.

They are kept in buckets of 10 ms, so that cancelling one costs nothing and a released lease leaves nothing behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

BUCKET_NS = 10_000_000
MOST_ACTIONS = 256  # at one time; others come first, then the rest


@dataclass(frozen=True, slots=True)
class Alarm:
    bucket: int
    number: int


class Alarms:
    """Deadlines and what to do when they pass. Rounded up to buckets, so never early."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Callable[[int], None]]] = {}
        self._order: list[int] = []
        self._number = 0

    def set(self, deadline_ns: int, action: Callable[[int], None]) -> Alarm:
        bucket = -(-deadline_ns // BUCKET_NS)
        if bucket not in self._buckets:
            self._buckets[bucket] = {}
            heapq.heappush(self._order, bucket)
        self._number += 1
        self._buckets[bucket][self._number] = action
        return Alarm(bucket, self._number)

    def cancel(self, alarm: Alarm) -> None:
        self._buckets.get(alarm.bucket, {}).pop(alarm.number, None)

    def run(self, now_ns: int) -> int | None:
        """Do what is due, as much of it as may be done at once; the next deadline, or None."""
        left = MOST_ACTIONS
        while self._order:
            bucket = self._order[0]
            actions = self._buckets[bucket]
            if actions and bucket * BUCKET_NS > now_ns:
                return bucket * BUCKET_NS
            while actions:
                if not left:
                    return now_ns  # others first: thousands may be due together
                left -= 1
                actions.pop(next(iter(actions)))(now_ns)
            if self._order[0] == bucket:  # else an action has set an earlier one
                heapq.heappop(self._order)
                del self._buckets[bucket]
        return None

    def next_ns(self) -> int | None:
        """The next deadline, or None."""
        while self._order and not self._buckets[self._order[0]]:
            del self._buckets[heapq.heappop(self._order)]
        return self._order[0] * BUCKET_NS if self._order else None

    def __len__(self) -> int:
        return sum(len(actions) for actions in self._buckets.values())
