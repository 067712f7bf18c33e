"""Copies between GPU memory and arena slots, the plain way: see the package for the contract.

    GPU pages ──copies on the GPU──▶ GPU buffer ──one copy──▶ pinned buffer ──memcpy──▶ slot         save
    slot ──memcpy──▶ pinned buffer ──one copy──▶ GPU buffer ──copies on the GPU──▶ GPU pages         load

One copy over the bus for each object, on a stream of its own. What crosses the bus is checked on the host: a save
hashes what landed in the slot, a load what it took from there. Owns its staging buffers and stream. Threading: `fence`
is for the engine's thread, the rest for the worker half's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvtally.core.checksum import checksum
from kvtally.core.geometry import Runs


class CudaCopies:
    """Copies for one GPU. `memory` is the engine's whole KV buffer as uint8."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._gpu = torch.empty(0, dtype=torch.uint8)

    def fence(self) -> Callable[[], None]:
        """The engine's step may still be running when its thread goes on: wait for it before its memory is touched."""
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream(self._device))
        return lambda: queued.synchronize()

    def save(self, memory: torch.Tensor, runs: Runs, pieces: Sequence[memoryview], seed: int | None) -> int | None:
        """Write an object into its slot."""
        total = sum(piece.nbytes for piece in pieces)
        self._reserve(total)
        with torch.cuda.stream(self._stream):
            for run in runs:
                source = memory[run.engine_offset : run.engine_offset + run.length]
                self._gpu[run.object_offset : run.object_offset + run.length].copy_(source)
            self._host[:total].copy_(self._gpu[:total], non_blocking=True)
        self._stream.synchronize()
        staged = self._host[:total].numpy()
        position = 0
        for piece in pieces:
            np.frombuffer(piece, dtype=np.uint8)[:] = staged[position : position + piece.nbytes]
            position += piece.nbytes
        return checksum(pieces, seed) if seed is not None else None

    def load(self, pieces: Sequence[memoryview], memory: torch.Tensor, runs: Runs, seed: int | None) -> int | None:
        """Bring an object, or the part of it that the runs name, into GPU memory; complete on return."""
        total = sum(piece.nbytes for piece in pieces)
        self._reserve(total)
        staged = self._host[:total].numpy()
        position = 0
        for piece in pieces:
            staged[position : position + piece.nbytes] = np.frombuffer(piece, dtype=np.uint8)
            position += piece.nbytes
        # What is hashed is the staged copy, not the slot: nobody but us can change it any more.
        value = checksum([memoryview(staged)], seed) if seed is not None else None
        with torch.cuda.stream(self._stream):
            self._gpu[:total].copy_(self._host[:total], non_blocking=True)
            for run in runs:
                target = memory[run.engine_offset : run.engine_offset + run.length]
                target.copy_(self._gpu[run.object_offset : run.object_offset + run.length])
        self._stream.synchronize()
        return value

    def _reserve(self, length_bytes: int) -> None:
        if self._host.numel() < length_bytes:
            self._host = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
            self._gpu = torch.empty(length_bytes, dtype=torch.uint8, device=self._device)
