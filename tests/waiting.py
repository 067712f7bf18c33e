"""How tests wait: for a condition, never for a time.

HANG_S bounds every wait. It is far longer than the slowest honest machine needs, so a test that meets it has found a
hang; no verdict depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG_S = 120.0


def eventually(condition: Callable[[], object], what: str = "the condition held") -> None:
    """Waits until the condition holds; `what` says so in words, for the message if it never does."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"within {HANG_S:g} s it did not come about that {what}"
        time.sleep(0.005)


async def comes_about(condition: Callable[[], object], what: str = "the condition held") -> None:
    """The same for a test that runs in an event loop."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 (what other threads and processes do is no event)
            await asyncio.sleep(0.002)
