"""How tests wait: for a condition, never for a time. No verdict depends on how fast the machine is.

HANG_S bounds every wait. It is far longer than the slowest honest machine needs, so a test that meets it has found a
hang. Where something must *not* be waited for, its deadline is HOUR_S: whoever waited for it after all would hang, too.
Where time must pass, a test puts the clock forward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from time import monotonic, sleep  # the real ones, whatever a test makes of the clock

import pytest

from tests.patient.patience import HANG_S

HOUR_S = 3600.0


def eventually(condition: Callable[[], object], what: str = "the condition held") -> None:
    """Waits until the condition holds; `what` says so in words, for the message if it never does."""
    deadline = monotonic() + HANG_S
    while not condition():
        assert monotonic() < deadline, f"within {HANG_S:g} s it did not come about that {what}"
        sleep(0.005)


class Clock:
    """The monotonic clock, for all of this process. A test puts it forward, or stops it.

    asyncio's own loops follow it and look at their timers when they are woken next; uvloop's have a clock of their own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = time.monotonic_ns
        self._ahead_ns = 0
        self._stopped_ns: int | None = None
        monkeypatch.setattr(time, "monotonic_ns", self.now_ns)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_ns() / 1e9)

    def now_ns(self) -> int:
        return self._ahead_ns + (self._real() if self._stopped_ns is None else self._stopped_ns)

    def forward(self, seconds: float) -> None:
        self._ahead_ns += int(seconds * 1e9)

    def stop(self) -> None:
        """From now on only `forward` moves it. Nothing may wait by this clock any more."""
        self._stopped_ns = self._real()


async def comes_about(condition: Callable[[], object], what: str = "the condition held") -> None:
    """The same for a test that runs in an event loop."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 (what other threads and processes do is no event)
            await asyncio.sleep(0.002)
