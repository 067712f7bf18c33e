"""Virtual time for the simulator: one heap of events, one source of chance, one log. One seed is one run."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable


class Clock:
    """What every part of a simulated cluster shares: the time, what happens next, chance, and what has happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 1
        self.log: list[str] = []
        self.is_verbose = False  # whether every message between stores is noted
        self.seen: Counter[str] = Counter()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (self.now_ns + max(0, delay_ns), self._sequence, action))

    def soon(self) -> int:
        """A delay: mostly microseconds, sometimes long enough to cross a deadline."""
        exponent = self.random.random() ** 3
        return int(10_000 * (3_000_000 ** (exponent * 0.5)))

    def strikes(self, per_mille: int) -> bool:
        return per_mille > 0 and self.random.randrange(1000) < per_mille

    def note(self, what: str) -> None:
        self.log.append(f"{self.now_ns / 1e9:10.6f} {what}")

    def step(self) -> bool:
        """Let the next event happen. False if there is none."""
        if not self._events:
            return False
        self.now_ns, _, action = heapq.heappop(self._events)
        action()
        return True

    def run_for(self, span_ns: int) -> None:
        """Let everything happen that happens within this time."""
        until_ns = self.now_ns + span_ns
        while self._events and self._events[0][0] <= until_ns:
            self.step()
        self.now_ns = until_ns
