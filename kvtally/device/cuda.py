"""Copies between GPU memory and arena slots: see the package for the contract.

    load   slot ──bus: one copy──▶ stage ──pages: kernel──▶ engine's pages, and digests of the bytes written
    save   engine's pages ──pages: kernel──▶ stage, and digests of the bytes written ──bus: one copy──▶ slot

A *stage* is a buffer on the GPU that holds whole objects, their bytes in order. So copies over the bus are large and
contiguous whatever the size of a page, and the copy engines make them; the GPU's cores are busy only while kernels move
and hash bytes inside GPU memory. Each direction has its own two streams and its own stages. So both directions of the
bus overlap, and one stage's kernels overlap the next stage's copy. Nothing here waits for the GPU: a generator checks
whether its stage is done, and several generators share the stages in turns.

Without Triton, and for objects that cannot be cut into units (`units`), pages are copied one by one and hashed on the
host, which is slower. Owns streams, stages and the pinned arena. Threading: the engine's thread calls `fence`, the
worker half's thread everything else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvtally.core.checksum import LEAF_BYTES, checksum, leaf_count, root
from kvtally.core.geometry import check_blocks, object_length
from kvtally.device import Checksums, Move, Steps
from kvtally.device.driver import POINTER_BYTES, Driver, Kernel
from kvtally.device.pinning import PinnedArena
from kvtally.device.units import (
    LEAF_COLUMNS,
    LENGTH_COLUMN,
    MOST_BLOCKS,
    SHORTEST_BYTES,
    Table,
    leaf_rows,
    unit_addresses,
    unit_bytes,
    unit_of,
)
from kvtally.shm import Mapping

log = logging.getLogger("kvtally.device")

# The thread that queues copies shares its interpreter with the engine's thread. The bus must not idle when this thread
# gets the interpreter late, so several stages are filled ahead. And the thread must not ask for the interpreter often,
# so stages are large, and all calls that queue work keep the interpreter (`driver`).
STAGE_BYTES = 80 << 20  # 1.5 ms of bus
LOAD_STAGES = 3  # no more: a short load waits for everything queued before it, and so may the engine's own copies
# A prefill's saves are queued while the GPU still computes and the engine's thread waits for it. So there are many
# stages for saves. They share two buffers: the GPU itself waits until a buffer is empty before it fills it again.
SAVE_STAGES = 16
SAVE_BUFFERS = 2
# Pauses between two checks of what was queued: while all stages are in use (for each stage but the oldest), while other
# transfers have stages too, and at the end of a transfer.
FULL_PAUSE_S = 0.0006
SHARED_PAUSE_S = 0.0008
END_PAUSE_S = 0.0001

SUMS_BYTES = 8 * 8 * MOST_BLOCKS  # per leaf: eight numbers for each block
NUMBER_BYTES = 4  # size of an integer among a kernel's arguments
NO_LEAVES: Table = np.empty((0, LEAF_COLUMNS), dtype=np.int64)

try:
    from kvtally.device import kernels
except ImportError:  # no Triton
    kernels = None  # type: ignore[assignment]


class Shape(NamedTuple):
    """What decides the leaves of a batch. There are few different shapes, so tables of leaves are reused."""

    unit: int
    is_hashed: bool
    lengths: tuple[int, ...]


class Tables(NamedTuple):
    """The size of the table that kernels read for a batch: addresses of units, then rows for leaves."""

    units: int
    leaves: int
    longest_bytes: int  # of the longest leaf


class Twins:
    """A table of numbers in pinned memory (`here`, or as numpy sees it `numbers`) and its copy on the GPU (`there`)."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self.numbers: Table = np.empty(0, dtype=np.int64)
        self.reserve(count)

    def reserve(self, count: int) -> None:
        """Make room for `count` numbers. If that takes new memory, the old contents are lost."""
        if count <= len(self.numbers):
            return
        size = 1 << (count - 1).bit_length()
        self.here = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.there = torch.empty(size, dtype=torch.int64, device=self._device)
        self.numbers = self.here.numpy()
        self.here_at, self.there_at = self.here.data_ptr(), self.there.data_ptr()
        torch.cuda.synchronize(self._device)  # kernels of the engine may still use the memory that we were given


class Stage:
    """A buffer on the GPU, with its tables and digests on both sides. It belongs to one batch at a time. Several stages
    may share a buffer."""

    def __init__(self, device: torch.device, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.crossed = torch.cuda.Event()  # between the two streams
        self.done = torch.cuda.Event()
        for event in (self.crossed, self.done):
            event.record(torch.cuda.current_stream(device))  # it has no handle before
        self.is_taken = False
        self.table = Twins(device, 4096)
        self.shape: Shape | None = None  # the shape whose leaves are in the table now, on both sides
        self.tables = Tables(0, 0, 0)  # the sizes for that shape
        self.most_leaves = buffer.numel() // LEAF_BYTES + 1
        self.digests = Twins(device, self.most_leaves)

    def digest_bytes(self, first: int, count: int) -> bytes:
        """The digests of `count` leaves, valid once `done` has been reached."""
        return self.digests.numbers[first : first + count].tobytes()


class Lane:
    """One direction: its streams, and the stages that all its transfers share."""

    def __init__(self, device: torch.device, stages: int, buffers: int, stage_bytes: int) -> None:
        self.bus = torch.cuda.Stream(device)
        self.pages = torch.cuda.Stream(device)
        made = [torch.empty(stage_bytes, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self.stages = [Stage(device, made[number % buffers]) for number in range(stages)]
        # Results that one kernel leaves for the next. Kernels of a stream run in order, so all batches share them.
        self.sums = torch.empty(self.stages[0].most_leaves * SUMS_BYTES, dtype=torch.uint8, device=device)
        # For each buffer, the event that marks when it is empty again.
        self.emptied = {stage.address: stage.done for stage in self.stages}

    @property
    def taken(self) -> int:
        return sum(stage.is_taken for stage in self.stages)

    def take(self) -> Stage | None:
        for stage in self.stages:
            if not stage.is_taken:
                stage.is_taken = True
                return stage
        return None


class Part(NamedTuple):
    """One object of a batch: its number among all moves of the transfer, where it lies in the stage, and the index of
    its first leaf in the stage."""

    number: int
    move: Move
    start: int
    length: int
    leaf: int


@dataclass(slots=True)
class Batch:
    """Whole objects that share a stage and a unit. Unit 0: their pages are copied one by one."""

    unit: int
    stage: Stage
    parts: list[Part] = field(default_factory=list)
    size_bytes: int = 0
    leaves: int = 0

    def takes(self, unit: int, length: int) -> bool:
        has_room = self.size_bytes + length <= self.stage.buffer.numel()
        return unit == self.unit and has_room and self.leaves + leaf_count(length) <= self.stage.most_leaves

    @property
    def shape(self) -> Shape:
        is_hashed = any(part.move.seed is not None for part in self.parts)
        return Shape(self.unit, is_hashed, tuple(part.length for part in self.parts))

    def add(self, number: int, move: Move, length: int) -> Part:
        part = Part(number, move, self.size_bytes, length, self.leaves)
        self.parts.append(part)
        self.size_bytes += -(-length // SHORTEST_BYTES) * SHORTEST_BYTES
        self.leaves += leaf_count(length)
        return part


class CudaCopies:
    """Copies for one GPU. `memory` is the engine's whole KV buffer as uint8. `largest_bytes`: of the largest object."""

    def __init__(self, device: torch.device, *, largest_bytes: int = STAGE_BYTES, use_kernels: bool = True) -> None:
        self._device = device
        self._arena: PinnedArena | None = None
        self._stage_bytes = max(STAGE_BYTES, largest_bytes)
        self._uses_kernels = use_kernels and kernels is not None
        if not self._uses_kernels:
            log.warning("kvtally: no Triton here: pages are copied one by one and hashed on the host, which is slower")
        with torch.cuda.device(device):
            self._in = Lane(device, LOAD_STAGES, LOAD_STAGES, self._stage_bytes)
            self._out = Lane(device, SAVE_STAGES, SAVE_BUFFERS, self._stage_bytes)
            self._constants = kernels.constants(device) if self._uses_kernels else torch.empty(0)
            self._driver = Driver()
            self._kernels: dict[tuple[object, ...], Kernel | None] = {}
            torch.cuda.synchronize(device)  # kernels of the engine may still use the memory that we were given

    @property
    def way(self) -> str:
        return "triton" if self._uses_kernels else "torch"

    def prepare(self, sizes_bytes: Sequence[int]) -> None:
        """Compile the kernels for pages of these sizes, now rather than during the first request."""
        if not self._uses_kernels:
            return
        stage = self._out.stages[0]
        address = np.full(1, stage.address + stage.buffer.numel() // 2, dtype=np.int64)
        self._driver.enter()
        for unit in sorted(set(map(unit_of, sizes_bytes)) - {0}):
            for leaves in (NO_LEAVES, leaf_rows(unit, 0, 0)):
                tables = _fill(stage, [address], leaves)
                self._upload(self._out, stage, len(address) + leaves.size)
                for into_stage in (True, False):
                    self._launch(self._out, stage, unit, tables, into_stage=into_stage)
            self._out.pages.synchronize()

    # ---- the arena

    def pin(self, mapping: Mapping | None) -> None:
        """Slots lie in this arena from now on. None: the arena is gone. Does nothing if the arena is the same."""
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

    # ---- transfers

    def fence(self) -> torch.cuda.Event:
        """Marks the engine's current step, which the GPU may still be running: memory is touched only after it."""
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream(self._device))
        return queued

    def save(self, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event) -> Steps:
        return (yield from self._transfer(self._out, memory, moves, after))

    def load(self, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event) -> Steps:
        return (yield from self._transfer(self._in, memory, moves, after))

    def _transfer(self, lane: Lane, memory: torch.Tensor, moves: Iterable[Move], after: torch.cuda.Event) -> Steps:
        """Moves are taken one by one. A load's bytes get on the bus at once, while the next moves are being worked out.
        Everything else is queued for a whole stage at a time."""
        checksums: Checksums = []
        queued: deque[Batch] = deque()
        batch: Batch | None = None  # the one that is being filled; the last of `queued`
        torch.cuda.set_device(self._device)  # otherwise torch makes a context on the first GPU as well
        try:
            for index, move in enumerate(moves):
                length = self._checked_length(move, memory, is_whole=lane is self._out)
                unit = unit_bytes(move.layout, memory.data_ptr()) if self._uses_kernels else 0
                checksums.append(None)
                if batch is not None and not batch.takes(unit, length):
                    self._queue(lane, memory, batch)
                    batch = None
                    yield 0.0
                if batch is None:
                    while (stage := lane.take()) is None:
                        if queued and self._is_done(queued[0]):
                            self._collect(queued.popleft(), checksums)
                        else:  # our own oldest batch, or another transfer's, is still under way
                            yield FULL_PAUSE_S * (len(lane.stages) - 1)
                    batch = Batch(unit, stage)
                    queued.append(batch)
                if index == 0:  # no earlier, so that batches of other transfers need not wait for it
                    lane.pages.wait_event(after)
                part = batch.add(index, move, length)
                if lane is self._in:
                    self._cross(lane, batch.stage, part)
            if batch is not None:
                self._queue(lane, memory, batch)
                yield 0.0
            while queued:
                while not self._is_done(queued[0]):
                    yield END_PAUSE_S if lane.taken == len(queued) <= 2 else SHARED_PAUSE_S * max(1, len(queued) - 1)
                self._collect(queued.popleft(), checksums)
        finally:  # after an error, or if the transfer is given up: the GPU still does what was queued
            if queued:
                lane.bus.synchronize()  # copies of a load whose batch was not queued yet
            for unfinished in queued:
                unfinished.stage.done.synchronize()
                unfinished.stage.is_taken = False
        return checksums

    def _checked_length(self, move: Move, memory: torch.Tensor, *, is_whole: bool) -> int:
        """The object's length. Checks that blocks lie inside memory and fit the slot, because kernels do not check."""
        layout, blocks = move.layout, move.skip_blocks + len(move.block_ids)
        length = sum(piece.nbytes for piece in move.pieces)
        check_blocks(layout, move.block_ids, move.skip_blocks)
        if layout.buffer_bytes > memory.numel():
            raise ValueError(f"a layout of {layout.buffer_bytes} bytes does not fit a memory of {memory.numel()}")
        if is_whole and move.skip_blocks:
            raise ValueError(f"{move.skip_blocks} blocks of an object to be saved are missing")
        if not 0 < length <= self._stage_bytes or length != object_length(layout, blocks):
            raise ValueError(f"{blocks} blocks do not fit a slot of {length} bytes, or the slot fits no stage")
        return length

    def _cross(self, lane: Lane, stage: Stage, part: Part) -> None:
        """Copy an object between its slot and the stage, over the bus. Memory that is not pinned is left to torch,
        which waits for the copy, but releases the interpreter meanwhile."""
        self._driver.enter()
        is_load, at, arena = lane is self._in, part.start, self._arena
        for piece in part.move.pieces:
            places = arena.places(piece) if arena is not None else []
            for offset, length, is_pinned in places:
                assert arena is not None
                if is_pinned:
                    here, there = arena.mapping.address + offset, stage.address + at
                    target, source = (there, here) if is_load else (here, there)
                    self._driver.copy(target, source, length, lane.bus.cuda_stream)
                else:
                    self._cross_slowly(lane, stage.buffer[at : at + length], arena.bytes[offset : offset + length])
                at += length
            if not places:  # the slot of a store that is gone, or of a test
                array = np.frombuffer(piece, dtype=np.uint8)
                slot = torch.from_numpy(array.copy() if is_load else array)
                self._cross_slowly(lane, stage.buffer[at : at + piece.nbytes], slot)
                at += piece.nbytes

    def _cross_slowly(self, lane: Lane, place: torch.Tensor, slot: torch.Tensor) -> None:
        with torch.cuda.stream(lane.bus):
            place.copy_(slot, non_blocking=True) if lane is self._in else slot.copy_(place, non_blocking=True)

    def _queue(self, lane: Lane, memory: torch.Tensor, batch: Batch) -> None:
        """Queue everything that is left to do for a batch."""
        stage, is_load, driver = batch.stage, lane is self._in, self._driver
        bus, pages = lane.bus.cuda_stream, lane.pages.cuda_stream
        crossed, done = stage.crossed.cuda_event, stage.done.cuda_event
        driver.enter()
        tables = self._place_tables(lane, memory, batch) if batch.unit else None
        if is_load:
            driver.record(crossed, bus)
            driver.wait(pages, crossed)
        else:
            driver.wait(pages, lane.emptied[stage.address].cuda_event)
        if tables is not None:
            self._launch(lane, stage, batch.unit, tables, into_stage=not is_load)
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(lane.pages):
                _copy_runs(memory, batch, into_stage=not is_load)
        if tables is not None and tables.leaves:
            driver.copy(stage.digests.here_at, stage.digests.there_at, 8 * tables.leaves, pages)
        if not is_load:
            driver.record(crossed, pages)
            driver.wait(bus, crossed)
            for part in batch.parts:
                self._cross(lane, stage, part)
            lane.emptied[stage.address] = stage.done
        driver.record(done, pages if is_load else bus)

    def _place_tables(self, lane: Lane, memory: torch.Tensor, batch: Batch) -> Tables:
        """Upload the batch's tables, in stream order. Rows of leaves only if the stage's last batch had other ones."""
        stage, shape, base = batch.stage, batch.shape, memory.data_ptr()
        units = [
            unit_addresses(part.move.layout, part.move.block_ids, part.move.skip_blocks, base, shape.unit)
            for part in batch.parts
        ]
        if shape == stage.shape:
            np.concatenate(units, out=stage.table.numbers[: stage.tables.units])
            self._upload(lane, stage, stage.tables.units)
            return stage.tables
        leaves = NO_LEAVES
        if shape.is_hashed:
            rows = [leaf_rows(part.length, part.start // shape.unit, part.leaf) for part in batch.parts]
            leaves = np.concatenate(rows)
        stage.tables = _fill(stage, units, leaves)
        self._upload(lane, stage, stage.tables.units + leaves.size)
        stage.shape = shape
        return stage.tables

    def _upload(self, lane: Lane, stage: Stage, count: int) -> None:
        """Upload the first `count` numbers of a stage's table. For a load they go over the bus, right behind the loaded
        bytes. For a save they would have to wait there for all queued loads, so the GPU fetches them itself."""
        table = stage.table
        if lane is self._in:
            self._driver.copy(table.there_at, table.here_at, 8 * count, lane.bus.cuda_stream)
        else:
            grid = (-(-count // kernels.FETCHED), 1)
            self._run("fetch", grid, lane.pages, (table.here, table.there, count), WORDS=kernels.FETCHED)

    def _launch(self, lane: Lane, stage: Stage, unit: int, tables: Tables, *, into_stage: bool) -> None:
        """Copy pages to the stage or back, with digests if there are leaves. Hashes the copied bytes: the engine may
        still write to a page that is being saved, beyond the tokens that are saved."""
        there, buffer = stage.table.there, stage.buffer
        if not tables.leaves:
            part = min(unit, kernels.PART_BYTES)
            grid = (tables.units, unit // part)
            self._run("copy_units", grid, lane.pages, (there, buffer), UNIT=unit, PART=part, INTO_BUFFER=into_stage)
            return
        known = (there, tables.units, self._constants, lane.sums, buffer)
        grid = (tables.leaves, -(-tables.longest_bytes // kernels.HASHED_BYTES))
        self._run("copy_summed", grid, lane.pages, known, UNIT=unit, INTO_BUFFER=into_stage)
        grid = (-(-tables.leaves // kernels.DIGESTS), 1)
        digests = (stage.digests.there, tables.leaves)
        self._run("leaf_digests", grid, lane.pages, (*known, *digests), UNIT=unit, num_warps=1)

    def _run(
        self,
        name: str,
        grid: tuple[int, int],
        stream: torch.cuda.Stream,
        arguments: Sequence[torch.Tensor | int],
        **options: int,
    ) -> None:
        """Run a kernel: the first time through Triton, which compiles it, then through the driver if possible."""
        key = (name, *options.values())
        kernel = self._kernels.get(key)
        if kernel is not None:
            numbers = [value if isinstance(value, int) else value.data_ptr() for value in arguments]
            kernel.launch(grid, stream.cuda_stream, numbers)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            compiled = getattr(kernels, name)[grid](*arguments, **options)
        if key not in self._kernels:
            sizes = [NUMBER_BYTES if isinstance(value, int) else POINTER_BYTES for value in arguments]
            self._kernels[key] = self._driver.kernel(compiled, sizes)

    def _is_done(self, batch: Batch) -> bool:
        self._driver.enter()
        return self._driver.is_done(batch.stage.done.cuda_event)

    def _collect(self, batch: Batch, checksums: Checksums) -> None:
        """A batch is done: note its objects' checksums, and free its stage."""
        for number, move, _, length, leaf in batch.parts:
            if move.seed is not None and batch.unit:
                checksums[number] = root(batch.stage.digest_bytes(leaf, leaf_count(length)), move.seed)
            elif move.seed is not None:
                checksums[number] = checksum(move.pieces, move.seed)
        batch.stage.is_taken = False


def _fill(stage: Stage, units: Sequence[Table], leaves: Table) -> Tables:
    """Put the tables one after the other into pinned memory, ready to be uploaded."""
    stage.shape = None
    count = sum(map(len, units))
    stage.table.reserve(count + leaves.size)
    np.concatenate([*units, leaves.ravel()], out=stage.table.numbers[: count + leaves.size])
    return Tables(count, len(leaves), int(leaves[:, LENGTH_COLUMN].max(initial=0)))


def _copy_runs(memory: torch.Tensor, batch: Batch, *, into_stage: bool) -> None:
    """Copy page by page, on the current stream."""
    for part in batch.parts:
        for run in part.move.runs:
            page = memory[run.engine_offset : run.engine_offset + run.length]
            start = part.start + run.object_offset
            place = batch.stage.buffer[start : start + run.length]
            place.copy_(page) if into_stage else page.copy_(place)
