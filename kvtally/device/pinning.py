"""Pinned memory: registers the arena with CUDA, so that its bytes cross the bus without an intermediate copy.

A thread registers the arena piece by piece, because pinning 8 GiB takes a third of a second. Memory that is not pinned
yet, or cannot be (there may be a limit on locked memory), is still copied correctly, only slower. Owns the
registration: call `close` before unmapping an arena, or the driver keeps a registration of memory that is gone.

Threading: one instance per arena; `close` waits for the thread's current piece. Neighbours: `shm`, `cuda`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import torch

from kvtally.shm import Mapping, address_of

log = logging.getLogger("kvtally.device")

PIECE_BYTES = 1 << 30
TELL_EVERY_S = 5.0


class Place(NamedTuple):
    """Bytes of the arena within one registration."""

    offset: int
    length: int
    is_pinned: bool


class PinnedArena:
    """`mapping`, pinned piece by piece. Holding this keeps the arena mapped."""

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.mapping = mapping
        self.bytes = torch.frombuffer(mapping.view(0, mapping.size_bytes), dtype=torch.uint8)
        self._device = device
        self._pinned_bytes = 0
        self._is_closing = threading.Event()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._pin, name="kvtally-pin", daemon=True)
        self._thread.start()

    def offset(self, piece: memoryview) -> int | None:
        """Where the piece begins in the arena; None if it is not in the arena."""
        offset = address_of(piece) - self.mapping.address
        return offset if 0 <= offset <= self.mapping.size_bytes - piece.nbytes else None

    def places(self, piece: memoryview) -> list[Place]:
        """The piece, cut into parts that can each be copied at once: no copy may cross from one registration into the
        next, or into unregistered memory. Empty if the piece is not in the arena."""
        start, length = self.offset(piece), piece.nbytes
        if start is None:
            return []
        found = []
        while length:
            part = min(length, PIECE_BYTES - start % PIECE_BYTES)
            found.append(Place(start, part, is_pinned=start + part <= self._pinned_bytes))
            start, length = start + part, length - part
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread is done; whether all of the arena is pinned."""
        return self._is_done.wait(timeout_s) and self._pinned_bytes == self.mapping.size_bytes

    def close(self) -> None:
        """Unregister the memory. No copy may be under way."""
        self._is_closing.set()
        self._thread.join()
        runtime = torch.cuda.cudart()
        for start in range(0, self._pinned_bytes, PIECE_BYTES):
            runtime.cudaHostUnregister(self.mapping.address + start)
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()
        begun = told = time.monotonic()
        size = self.mapping.size_bytes
        for start in range(0, size, PIECE_BYTES):
            if self._is_closing.is_set():
                break
            length = min(PIECE_BYTES, size - start)
            error = int(runtime.cudaHostRegister(self.mapping.address + start, length, 0))
            if error:
                log.warning(
                    "kvtally: only %d of %d MiB of the arena could be pinned (CUDA error %d); copies of the rest are "
                    "slower. Raise the limit on locked memory (ulimit -l) and restart the engine.",
                    start >> 20, size >> 20, error,
                )  # fmt: skip
                break
            self._pinned_bytes = start + length
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                log.warning("kvtally: %d of %d MiB of the arena are pinned", self._pinned_bytes >> 20, size >> 20)
        else:
            log.info("kvtally: the arena of %d MiB was pinned in %.1f s", size >> 20, time.monotonic() - begun)
        self._is_done.set()
