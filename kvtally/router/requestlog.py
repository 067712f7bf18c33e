"""The request log: one line of JSON for each request, on standard output.

Standard output may block, so the event loop gathers lines for a moment and a thread writes them. A reader that is too
slow loses lines, which are counted; it never delays requests. Threading: `write` in the event loop; the thread takes
whole batches from a bounded queue.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading

GATHER_S = 0.1
MOST_LINES = 20_000  # waiting in the event loop
MOST_BATCHES = 16  # waiting for the thread
LAST_WORDS_S = 1.0


class RequestLog:
    """A context manager, entered in the event loop."""

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._batches: queue.Queue[list[bytes] | None] = queue.Queue(MOST_BATCHES)
        self._timer: asyncio.TimerHandle | None = None
        # A daemon thread: a reader that never reads must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)

    def __enter__(self) -> RequestLog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._batches.put(self._lines, timeout=LAST_WORDS_S)
            self._batches.put(None, timeout=LAST_WORDS_S)
        except queue.Full:
            return
        self._thread.join(LAST_WORDS_S)

    def write(self, line: bytes) -> None:
        if len(self._lines) >= MOST_LINES:
            self.lost += 1
            return
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        self._timer = None
        try:
            self._batches.put_nowait(self._lines)
        except queue.Full:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)
        else:
            self._lines = []

    def _run(self) -> None:
        while (lines := self._batches.get()) is not None:
            data = memoryview(b"".join(lines))
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody reads it any more
                self.lost += len(lines)
