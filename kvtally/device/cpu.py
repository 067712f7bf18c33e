"""Copies between engine memory and arena slots on the CPU: see the package for the contract.

    memory  ··│run│····│ run │····│run│··        bytes of one rank's buffer, cut by `core.geometry`
               │        │          │
    object  ──▶│run│ run │run│                   one stream of bytes, hashed in this order
               │           │
    slot    │ piece 0 │ │ piece 1 │              where the arena had room

The bytes that were written are hashed, in steps of 256 KiB, so that they are still in the cache; a whole object would
not be. Many short runs of one length (pages) are moved as rows of a grid, many with one numpy call: a Python step for
each would cost more than its copy. Threading: no state; any thread may call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtally.core.checksum import RunningChecksum
from kvtally.core.geometry import Runs
from kvtally.device import Checksums, Move, Steps
from kvtally.shm import Mapping

STEP_BYTES = 256 * 1024
ROW_BYTES = 32 * 1024  # runs shorter than this are faster when moved together
FEWEST_ROWS = 4

Bytes = NDArray[np.uint8]
Memory = bytes | bytearray | memoryview | Bytes  # C-contiguous; `load` needs it writable


def pin(mapping: Mapping | None) -> None:
    """Nothing to do: a CPU reads any memory."""


def fence() -> None:
    """Nothing to mark: on the CPU, whatever the engine has called is done."""


def save(memory: Memory, moves: Iterable[Move], after: None) -> Steps:
    """Copy objects into their slots, one per step."""
    checksums: Checksums = []
    for move in moves:
        checksums.append(save_object(memory, move.runs, move.pieces, move.seed))
        yield 0.0
    return checksums


def load(memory: Memory, moves: Iterable[Move], after: None) -> Steps:
    """Copy objects into engine memory, one per step."""
    checksums: Checksums = []
    for move in moves:
        checksums.append(load_object(move.pieces, memory, move.runs, move.seed))
        yield 0.0
    return checksums


def save_object(memory: Memory, runs: Runs | None, pieces: Sequence[memoryview], seed: int | None) -> int | None:
    """Write an object into its slot. The runs must be the whole object, because a slot is published as a whole."""
    source = np.frombuffer(memory, dtype=np.uint8)
    if runs is None:
        return _whole(source, pieces, seed, into_slot=True)
    total = sum(piece.nbytes for piece in pieces)
    _check(runs, source.size, total)
    if int(runs.lengths.sum()) != total:
        raise ValueError(f"runs of {int(runs.lengths.sum())} bytes cannot fill a slot of {total}")
    state = RunningChecksum(seed, total) if seed is not None else None
    for slot, engine in _parts(source, runs, pieces):
        if isinstance(engine, Rows):
            engine.gather(slot)
            _hash(slot, state)
        elif engine is not None:  # a whole object has no gaps
            _copy(engine, slot, state)
    return state.intdigest() if state is not None else None


def load_object(pieces: Sequence[memoryview], memory: Memory, runs: Runs | None, seed: int | None) -> int | None:
    """Copy an object, or the part of it that the runs name, into engine memory.

    The checksum covers the whole object: copied bytes are read back from the engine, skipped ones from the slot.
    """
    target = np.frombuffer(memory, dtype=np.uint8)
    if runs is None:
        return _whole(target, pieces, seed, into_slot=False)
    total = sum(piece.nbytes for piece in pieces)
    _check(runs, target.size, total)
    state = RunningChecksum(seed, total) if seed is not None else None
    for slot, engine in _parts(target, runs, pieces):
        if isinstance(engine, Rows):
            engine.scatter(slot)
            if state is not None:
                _hash(engine.gathered(), state)
        elif engine is not None:
            _copy(slot, engine, state)
        else:
            _hash(slot, state)
    return state.intdigest() if state is not None else None


def _whole(engine: Bytes, pieces: Sequence[memoryview], seed: int | None, *, into_slot: bool) -> int | None:
    """Copy an object that lies at the start of its memory. This case has its own code because a copy of 2 MiB evicts
    the interpreter from the cache: each further Python call then costs as much as copying several KiB."""
    state = RunningChecksum(seed, sum(map(len, pieces))) if seed is not None else None
    start = 0
    for piece in pieces:
        slot = np.frombuffer(piece, dtype=np.uint8)
        own = engine[start : start + slot.size]
        if into_slot:
            _copy(own, slot, state)  # raises ValueError where `own` is short
        else:
            _copy(slot, own, state)
        start += slot.size
    return state.intdigest() if state is not None else None


def move_all(objects: Sequence[tuple[Memory, Sequence[memoryview]]], *, into_slots: bool) -> None:
    """Copy whole objects, each between the start of its memory and its slot's pieces, hashing nothing.

    Objects that are adjacent on both sides become one copy: above some 20 MiB the C library writes around the cache,
    which is 1.5 times as fast.
    """
    copies: list[list[int]] = []  # address in the engine, address in the slot, length
    for memory, pieces in objects:
        engine, engine_bytes, engine_writable = _place(memory)
        for piece in pieces:
            slot, length, slot_writable = _place(piece)
            if length > engine_bytes or not (slot_writable if into_slots else engine_writable):
                raise ValueError(f"a piece of {length} bytes cannot be copied: {engine_bytes} left, or read-only")
            if copies and copies[-1][0] + copies[-1][2] == engine and copies[-1][1] + copies[-1][2] == slot:
                copies[-1][2] += length
            else:
                copies.append([engine, slot, length])
            engine, engine_bytes = engine + length, engine_bytes - length
    for engine, slot, length in copies:  # memmove releases the interpreter; `objects` keeps both sides alive
        ctypes.memmove(slot, engine, length) if into_slots else ctypes.memmove(engine, slot, length)


def _place(memory: Memory) -> tuple[int, int, bool]:
    array = np.frombuffer(memory, dtype=np.uint8)
    return array.__array_interface__["data"][0], array.size, array.flags.writeable


def size_bytes(memory: Memory) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).size)


def _copy(source: Bytes, target: Bytes, state: RunningChecksum | None) -> None:
    if state is None:
        target[:] = source
        return
    for start in range(0, target.size, STEP_BYTES):
        landing = target[start : start + STEP_BYTES]
        landing[:] = source[start : start + STEP_BYTES]
        state.update(landing.data)


def _hash(data: Bytes, state: RunningChecksum | None) -> None:
    if state is not None:
        state.update(data.data)


class Rows(NamedTuple):
    """Some rows of a grid laid over engine memory: runs of one length, at distances that are multiples of one pitch."""

    grid: Bytes
    indices: NDArray[np.int64]

    def gather(self, slot: Bytes) -> None:
        rows = slot.reshape(len(self.indices), -1)
        if self.grid.flags.c_contiguous:
            # "clip", because "raise" buffers the output; `_check` has checked the bounds.
            np.take(self.grid, self.indices, axis=0, out=rows, mode="clip")
        else:  # take() would copy the whole grid first
            rows[:] = self.grid[self.indices]

    def scatter(self, slot: Bytes) -> None:
        self.grid[self.indices] = slot.reshape(len(self.indices), -1)

    def gathered(self) -> Bytes:
        return self.grid[self.indices]


class _Cursor:
    """A position in the concatenation of a slot's pieces."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces if piece.nbytes]
        self._index = 0
        self._offset = 0
        self.position = 0  # in the object

    @property
    def left(self) -> int:
        """Bytes up to the end of the current piece."""
        return self._pieces[self._index].size - self._offset

    def take(self, length: int) -> Bytes:
        """The next `length` bytes, which the current piece must still have."""
        piece = self._pieces[self._index]
        start, end = self._offset, self._offset + length
        self.position += length
        if end < piece.size:
            self._offset = end
        else:
            self._index, self._offset = self._index + 1, 0
        return piece[start:end]


def _parts(memory: Bytes, runs: Runs, pieces: Sequence[memoryview]) -> Iterator[tuple[Bytes, Bytes | Rows | None]]:
    """The object from start to end, cut so that each part is contiguous in the slot: (slot, engine) views of equal
    size. The engine side is None in the gaps between runs."""
    cursor = _Cursor(pieces)
    for first, last in _batches(runs):
        start, length = int(runs.object_offsets[first]), int(runs.lengths[first])
        yield from _gap(cursor, start)
        offsets = runs.engine_offsets[first:last]
        rows = _rows(memory, offsets, length) if last - first >= FEWEST_ROWS and length < ROW_BYTES else None
        if rows is None:
            for offset in offsets.tolist():
                yield from _run(memory, offset, length, cursor)
        else:
            yield from _row_parts(memory, offsets, rows, cursor)
    yield from _gap(cursor, sum(piece.nbytes for piece in pieces))


def _gap(cursor: _Cursor, end: int) -> Iterator[tuple[Bytes, None]]:
    while cursor.position < end:
        yield cursor.take(min(end - cursor.position, cursor.left)), None


def _run(memory: Bytes, offset: int, length: int, cursor: _Cursor) -> Iterator[tuple[Bytes, Bytes]]:
    end = offset + length
    while offset < end:
        taken = min(end - offset, cursor.left)
        yield cursor.take(taken), memory[offset : offset + taken]
        offset += taken


def _row_parts(
    memory: Bytes, offsets: NDArray[np.int64], rows: Rows, cursor: _Cursor
) -> Iterator[tuple[Bytes, Bytes | Rows]]:
    length = rows.grid.shape[1]
    done = 0
    while done < len(offsets):
        count = min(len(offsets) - done, min(cursor.left, STEP_BYTES) // length)
        if count:
            yield cursor.take(count * length), Rows(rows.grid, rows.indices[done : done + count])
        else:  # the end of a piece cuts this row in two
            count = 1
            yield from _run(memory, int(offsets[done]), length, cursor)
        done += count


def _batches(runs: Runs) -> list[tuple[int, int]]:
    """Half-open ranges of runs that have the same length and no gap between them in the object."""
    count = len(runs)
    if count < FEWEST_ROWS:
        return [(index, index + 1) for index in range(count)]
    lengths, starts = runs.lengths, runs.object_offsets
    broken = (lengths[1:] != lengths[:-1]) | (starts[1:] != starts[:-1] + lengths[:-1])
    cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), count]
    return list(pairwise(cuts))


def _rows(memory: Bytes, offsets: NDArray[np.int64], length: int) -> Rows | None:
    """The grid on which these runs are rows. Its pitch divides all their distances; it is usually a page's stride. Rows
    may overlap on the grid, because only the named ones are touched. None: all runs begin at the same place."""
    lowest = int(offsets.min())
    distances = offsets - lowest
    pitch = int(np.gcd.reduce(distances))
    if pitch == 0 or length == 0:
        return None
    shape = (int(distances.max()) // pitch + 1, length)
    return Rows(np.ndarray(shape, np.uint8, memory, lowest, (pitch, 1)), distances // pitch)


def _check(runs: Runs, memory_bytes: int, slot_bytes: int) -> None:
    """Check that runs lie inside their memory, and in ascending order inside their slot. Slicing would hide errors."""
    if len(runs) < FEWEST_ROWS:  # for small objects numpy's fixed cost would dominate
        position = 0
        fits = True
        for run in runs:
            fits &= run.length >= 0 and run.object_offset >= position
            fits &= 0 <= run.engine_offset <= memory_bytes - run.length
            position = run.object_offset + run.length
    else:
        lengths, offsets, ends = runs.lengths, runs.engine_offsets, runs.object_offsets + runs.lengths
        fits = bool(lengths.min() >= 0 and offsets.min() >= 0 and (offsets + lengths).max() <= memory_bytes)
        fits &= bool(runs.object_offsets[0] >= 0 and (runs.object_offsets[1:] >= ends[:-1]).all())
        position = int(ends[-1])
    if not fits or position > slot_bytes:
        raise ValueError(f"{len(runs)} runs do not fit a memory of {memory_bytes} bytes and a slot of {slot_bytes}")
