"""Copies between GPU memory and arena slots: see the package for the contract.

    load   slot ──bus: one copy──▶ stage ──pages: kernel──▶ engine's pages ──pages: kernel──▶ digests of what landed
    save   engine's pages ──pages: kernel──▶ stage ──pages: kernel──▶ digests ──bus: one copy──▶ slot

A *stage* is a buffer on the GPU that holds whole objects in the order of their bytes. What crosses the bus is large and
contiguous whatever the size of a page, the copy engines do it, and the GPU's cores are busy only for the moment that
moving and hashing take inside its own memory. Each direction has its own two streams and stages, so that both ways of
the bus, and the next stage's copy and this one's kernels, overlap. Nothing here waits for the GPU: a generator looks
whether it is done, and several of them share the stages in turns.

Without Triton, and for objects that cannot be cut into units (`units`), pages are copied one by one and hashed on the
host, which is slower. Owns streams, stages and the pinned arena. Threading: `fence` is for the engine's thread, the
rest for the worker half's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvtally.core.checksum import LEAF_BYTES, checksum, leaf_count, root
from kvtally.core.geometry import Runs
from kvtally.device import Checksums, Move, Steps
from kvtally.device.pinning import PinnedArena
from kvtally.device.units import LEAF_COLUMNS, SHORTEST_BYTES, Table, leaf_rows, unit_addresses, unit_bytes
from kvtally.shm import Mapping

log = logging.getLogger("kvtally.device")

# The thread that queues copies shares its interpreter with the engine's. It must not keep the bus waiting when its turn
# comes late, so several stages are filled ahead (loads are waited for, saves are not); and it must seldom ask for its
# turn, so stages are large, and a batch is few calls: each lets go of the interpreter and has to win it back.
STAGE_BYTES = 80 << 20  # 1.5 ms of bus
LOAD_STAGES = 3
SAVE_STAGES = 2
# Between two looks at what was queued: while all stages are under way, while others have some too, and at the end.
FULL_PAUSE_S = 0.0008
SHARED_PAUSE_S = 0.0004
END_PAUSE_S = 0.0001

try:
    from kvtally.device import kernels
except ImportError:  # no Triton
    kernels = None  # type: ignore[assignment]


class Tables(NamedTuple):
    """What kernels read of a batch, one behind the other in one tensor: its units' addresses, those of what is hashed,
    and its leaves."""

    numbers: torch.Tensor
    units: int
    leaves_at: int
    leaves: int


class Twins:
    """Numbers in pinned memory (`here`, and as `numbers`) and as many on the GPU (`there`)."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # beginnings, made once: a view is a call too
        self.reserve(count)

    def reserve(self, count: int) -> None:
        """Room for so many; what was there is lost where that takes new memory."""
        if self._parts and count <= len(self.numbers):
            return
        size = _power_of_two(count)
        self.here = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.there = torch.empty(size, dtype=torch.int64, device=self._device)
        self.numbers: Table = self.here.numpy()
        self._parts = {size: (self.here, self.there)}

    def upload(self, count: int) -> None:
        """The first ones, and a few more."""
        size = _power_of_two(count)
        if size not in self._parts:
            self._parts[size] = self.here[:size], self.there[:size]
        here, there = self._parts[size]
        there.copy_(here, non_blocking=True)


class Stage:
    """A buffer on the GPU, with tables and digests on both sides; belongs to one batch at a time."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.crossed = torch.cuda.Event()  # between the two streams
        self.done = torch.cuda.Event()
        self.is_taken = False
        self._table = Twins(device, 4096)
        self._digests = Twins(device, max(64, size_bytes // LEAF_BYTES))

    def tables(self, units: Table, hashed: Table, leaves: Table, *, upload: bool) -> Tables:
        """These where kernels read them: in pinned memory, or uploaded in the order of the current stream."""
        numbers = np.concatenate([units, hashed, leaves.ravel()])
        self._table.reserve(len(numbers))
        self._table.numbers[: len(numbers)] = numbers
        if upload:
            self._table.upload(len(numbers))
        place = self._table.there if upload else self._table.here
        return Tables(place, len(units), len(units) + len(hashed), len(leaves))

    def digests(self, count: int) -> torch.Tensor:
        self._digests.reserve(count)
        return self._digests.there

    def download(self) -> None:
        self._digests.here.copy_(self._digests.there, non_blocking=True)

    def digest_bytes(self, first: int, count: int) -> bytes:
        """Of leaves, once `done`."""
        return self._digests.numbers[first : first + count].tobytes()


class Lane:
    """One direction: its streams, and the stages that all its transfers share."""

    def __init__(self, device: torch.device, stages: int, stage_bytes: int) -> None:
        self.bus = torch.cuda.Stream(device)
        self.pages = torch.cuda.Stream(device)
        self.stages = [Stage(device, stage_bytes) for _ in range(stages)]

    @property
    def taken(self) -> int:
        return sum(stage.is_taken for stage in self.stages)

    def take(self) -> Stage | None:
        for stage in self.stages:
            if not stage.is_taken:
                stage.is_taken = True
                return stage
        return None


@dataclass(slots=True)
class Batch:
    """Whole objects that share a stage and a unit. Unit 0: their pages are copied one by one."""

    unit: int
    indices: list[int] = field(default_factory=list)  # among all moves of the transfer
    moves: list[tuple[Move, int]] = field(default_factory=list)  # with where each begins in the stage
    size_bytes: int = 0
    stage: Stage | None = None

    @property
    def last(self) -> int:
        return self.indices[-1]

    @property
    def is_done(self) -> bool:
        return self.stage is not None and self.stage.done.query()

    def give_back(self) -> None:
        """The stage is free as soon as the GPU has done what it was told."""
        if self.stage is not None:
            self.stage.done.synchronize()
            self.stage.is_taken = False
            self.stage = None


Queue = Callable[[Lane, Stage, torch.Tensor, Batch], None]


class CudaCopies:
    """Copies for one GPU. `memory` is the engine's whole KV buffer as uint8. `largest_bytes`: no object is larger."""

    def __init__(self, device: torch.device, *, largest_bytes: int = STAGE_BYTES, use_kernels: bool = True) -> None:
        self._device = device
        self._arena: PinnedArena | None = None
        self._stage_bytes = max(STAGE_BYTES, largest_bytes)
        self._uses_kernels = use_kernels and kernels is not None
        if not self._uses_kernels:
            log.warning("kvtally: no Triton: pages are copied one by one and hashed on the host, which is slower")
        with torch.cuda.device(device):
            self._in = Lane(device, LOAD_STAGES, self._stage_bytes)
            self._out = Lane(device, SAVE_STAGES, self._stage_bytes)
            self._constants = kernels.constants(device) if self._uses_kernels else torch.empty(0)

    @property
    def way(self) -> str:
        return "triton" if self._uses_kernels else "torch"

    def prepare(self, page_bytes: Sequence[int]) -> None:
        """Compile what pages of these sizes need, now rather than under the first request."""
        if not self._uses_kernels:
            return
        stage = self._out.stages[0]
        for unit in sorted({unit for size in page_bytes if (unit := min(size & -size, 64 * 1024)) >= SHORTEST_BYTES}):
            with torch.cuda.device(self._device), torch.cuda.stream(self._out.pages):
                address = np.full(1, stage.buffer.data_ptr() + stage.buffer.numel() // 2, dtype=np.int64)
                tables = stage.tables(address, address, leaf_rows(unit, 0, None, 0), upload=True)
                for into_buffer in (True, False):
                    self._copy_units(tables, stage.buffer, unit, into_buffer=into_buffer)
                self._hash(stage, tables)
            self._out.pages.synchronize()

    # ---- the arena

    def pin(self, mapping: Mapping | None) -> None:
        """The arena whose slots are copied from now on; None: it is gone. A no-op if it is the same."""
        if self._arena is not None and self._arena.mapping is not mapping:
            for lane in (self._in, self._out):
                lane.bus.synchronize()
            self._arena.close()
            self._arena = None
        if mapping is not None and self._arena is None:
            self._arena = PinnedArena(mapping, self._device)

    def wait_pinned(self, timeout_s: float) -> bool:
        return self._arena is not None and self._arena.wait(timeout_s)

    def close(self) -> None:
        self.pin(None)

    def _host(self, pieces: Sequence[memoryview], *, writable: bool) -> list[torch.Tensor]:
        """A slot's bytes as tensors, each of which may be copied at once."""
        found: list[torch.Tensor] = []
        for piece in pieces:
            array = np.frombuffer(piece, dtype=np.uint8)
            offset = array.__array_interface__["data"][0] - (self._arena.mapping.address if self._arena else 0)
            if self._arena is not None and offset >= 0 and offset + array.size <= self._arena.mapping.size_bytes:
                found += [self._arena.bytes[at : at + length] for at, length in self._arena.pieces(offset, array.size)]
            else:  # not this arena's: bytes of a store that is gone, or of a test
                found.append(torch.from_numpy(array if writable else array.copy()))
        return found

    # ---- transfers

    def fence(self) -> torch.cuda.Event:
        """The engine's step may still be running when its thread goes on: its memory is touched only after it."""
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream(self._device))
        return queued

    def save(self, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event) -> Steps:
        return (yield from self._transfer(self._out, memory, moves, after, self._queue_save))

    def load(self, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event) -> Steps:
        return (yield from self._transfer(self._in, memory, moves, after, self._queue_load))

    def _transfer(
        self, lane: Lane, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event, queue: Queue
    ) -> Steps:
        checksums: Checksums = []
        queued: deque[Batch] = deque()
        try:
            for batch in self._batches(memory, moves, is_whole=lane is self._out):
                checksums += [None] * (batch.last + 1 - len(checksums))
                while (stage := lane.take()) is None:
                    if queued and queued[0].is_done:
                        self._collect(queued.popleft(), checksums)
                    else:  # waits for our own oldest, or for somebody else's
                        yield FULL_PAUSE_S
                batch.stage = stage
                queued.append(batch)
                with torch.cuda.device(self._device):
                    if batch.indices[0] == 0:  # not before: what others have queued by then need not wait for it
                        lane.pages.wait_event(after)
                    queue(lane, stage, memory, batch)
                yield 0.0
            while queued:
                while not queued[0].is_done:
                    yield END_PAUSE_S if lane.taken == len(queued) <= 2 else SHARED_PAUSE_S
                self._collect(queued.popleft(), checksums)
        finally:  # an error, or nobody wants this any more: what the GPU was told to do, it does
            for batch in queued:
                batch.give_back()
        return checksums

    def _batches(self, memory: torch.Tensor, moves: Iterable[Move], *, is_whole: bool) -> Iterator[Batch]:
        """Objects of one unit together, as many as a stage holds. Moves are taken one by one: while the first is on its
        way, alone, the next are still being worked out."""
        base = memory.data_ptr()
        open_batches: dict[int, Batch] = {}
        for index, move in enumerate(moves):
            _check(move, memory.numel(), is_whole=is_whole)
            length = _length(move)
            if length > self._stage_bytes:
                raise ValueError(f"an object of {length} bytes does not fit a stage of {self._stage_bytes}")
            unit = unit_bytes(move.runs, length, base) if self._uses_kernels else 0
            batch = open_batches.get(unit)
            if batch is not None and batch.size_bytes + length > self._stage_bytes:
                yield open_batches.pop(unit)
                batch = None
            if batch is None:
                batch = open_batches[unit] = Batch(unit)
            batch.indices.append(index)
            batch.moves.append((move, batch.size_bytes))
            batch.size_bytes += -(-length // SHORTEST_BYTES) * SHORTEST_BYTES
            if index == 0:
                yield open_batches.pop(unit)
        yield from open_batches.values()

    def _queue_load(self, lane: Lane, stage: Stage, memory: torch.Tensor, batch: Batch) -> None:
        with torch.cuda.stream(lane.bus):
            for move, start in batch.moves:
                for part in self._host(move.pieces, writable=False):
                    stage.buffer[start : start + part.numel()].copy_(part, non_blocking=True)
                    start += part.numel()
            # Worked out while the bus is busy, and on its stream: on another they would wait for what it carries next.
            tables = self._tables(stage, memory, batch, in_stage=False) if batch.unit else None
            stage.crossed.record()
        with torch.cuda.stream(lane.pages):
            lane.pages.wait_event(stage.crossed)
            self._move_pages(stage, memory, batch, tables, into_stage=False)
            stage.done.record()

    def _queue_save(self, lane: Lane, stage: Stage, memory: torch.Tensor, batch: Batch) -> None:
        with torch.cuda.stream(lane.pages):
            tables = self._tables(stage, memory, batch, in_stage=True) if batch.unit else None
            self._move_pages(stage, memory, batch, tables, into_stage=True)
            stage.crossed.record()
        with torch.cuda.stream(lane.bus):
            lane.bus.wait_event(stage.crossed)
            for move, start in batch.moves:
                for part in self._host(move.pieces, writable=True):
                    part.copy_(stage.buffer[start : start + part.numel()], non_blocking=True)
                    start += part.numel()
            stage.done.record()

    def _tables(self, stage: Stage, memory: torch.Tensor, batch: Batch, *, in_stage: bool) -> Tables:
        """For kernels: where units lie, where what is hashed lies, and its leaves. Those of a save are read once for
        each unit and leaf, straight from the host's memory; those of a load for each stripe, so they are uploaded."""
        base = memory.data_ptr()
        table = np.concatenate([unit_addresses(move.runs, _length(move), base, batch.unit) for move, _ in batch.moves])
        hashed, leaves = self._leaves(stage, batch, table, in_stage=in_stage)
        return stage.tables(table, hashed, leaves, upload=not in_stage)

    def _move_pages(
        self, stage: Stage, memory: torch.Tensor, batch: Batch, tables: Tables | None, *, into_stage: bool
    ) -> None:
        """On the current stream: pages to the stage or back, and digests of what was saved or has landed."""
        if tables is not None:
            self._copy_units(tables, stage.buffer, batch.unit, into_buffer=into_stage)
            if tables.leaves:
                self._hash(stage, tables)
            return
        for move, start in batch.moves:
            for run in move.runs:
                page = memory[run.engine_offset : run.engine_offset + run.length]
                place = stage.buffer[start + run.object_offset : start + run.object_offset + run.length]
                place.copy_(page) if into_stage else page.copy_(place)

    def _leaves(self, stage: Stage, batch: Batch, table: Table, *, in_stage: bool) -> tuple[Table, Table]:
        """Addresses of what is hashed, and the leaves: what left is hashed in the stage, because it is this that is
        saved; what came back where it landed, and in the stage what the engine did not want of it."""
        base = stage.buffer.data_ptr()
        if in_stage:
            hashed = np.array([base + start for _, start in batch.moves], dtype=np.int64)
        else:
            hashed = np.where(table == 0, base + np.arange(len(table)) * batch.unit, table)
        rows, digest = [], 0
        for number, (move, start) in enumerate(batch.moves):
            if move.seed is None:
                continue
            length = _length(move)
            first, unit = (number, None) if in_stage else (start // batch.unit, batch.unit)
            rows.append(leaf_rows(length, first, unit, digest))
            digest += leaf_count(length)
        return hashed, np.concatenate(rows) if rows else np.empty((0, LEAF_COLUMNS), dtype=np.int64)

    def _copy_units(self, tables: Tables, buffer: torch.Tensor, unit: int, *, into_buffer: bool) -> None:
        part = min(unit, kernels.PART_BYTES)
        grid = tables.units, unit // part
        kernels.copy_units[grid](tables.numbers, buffer, unit, PART=part, INTO_BUFFER=into_buffer)

    def _hash(self, stage: Stage, tables: Tables) -> None:
        numbers, hashed_at, leaves_at, count = tables
        digests = stage.digests(count)
        kernels.leaf_digests[(count,)](numbers, hashed_at, leaves_at, self._constants, digests, num_warps=1)
        stage.download()

    def _collect(self, batch: Batch, checksums: Checksums) -> None:
        """A batch is done: its objects' checksums, and its stage is free again."""
        assert batch.stage is not None
        digest = 0
        for index, (move, _) in zip(batch.indices, batch.moves, strict=True):
            if move.seed is None:
                continue
            if batch.unit:
                count = leaf_count(_length(move))
                checksums[index] = root(batch.stage.digest_bytes(digest, count), move.seed)
                digest += count
            else:
                checksums[index] = checksum(move.pieces, move.seed)
        batch.give_back()


def _power_of_two(count: int) -> int:
    """The smallest that is not less, and not less than 64."""
    return 1 << max(6, (count - 1).bit_length())


def _length(move: Move) -> int:
    return sum(piece.nbytes for piece in move.pieces)


def _check(move: Move, memory_bytes: int, *, is_whole: bool) -> None:
    """Runs lie inside their memory and slot: kernels do not look."""
    runs: Runs = move.runs
    length = _length(move)
    ends = runs.object_offsets + runs.lengths
    fits = len(runs) > 0 and runs.lengths.min() > 0
    fits = fits and runs.engine_offsets.min() >= 0 and (runs.engine_offsets + runs.lengths).max() <= memory_bytes
    fits = fits and runs.object_offsets[0] >= 0 and bool((runs.object_offsets[1:] >= ends[:-1]).all())
    if not fits or ends[-1] > length or (is_whole and int(runs.lengths.sum()) != length):
        raise ValueError(f"{len(runs)} runs do not fit a memory of {memory_bytes} bytes and a slot of {length}")
