"""The process of `kvtally bench gpu` that measures copies: the machine's limits, then `kvtally.device.cuda`.

Samples of a limit and of ours alternate, so that whatever disturbs one disturbs the other. What was copied, and every
other byte of the KV buffer, is compared outside the timed part: a wrong byte is an error, not a figure.

A worker (`kvtally.processes`), asked by `gpu` (left); measures `device.cuda` (right). torch is imported when something
is measured: the messages and `direct_reads` are for any machine. Threading: the main thread does everything but
reading the disk.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtally.bench.daemon import drop_pages
from kvtally.bench.gpu_report import CopyFigure, Machine, Rate
from kvtally.core.geometry import GroupLayout, LayerView, object_length
from kvtally.core.namespace import GroupKind, GroupSpec
from kvtally.device import Checksums, Move, Steps, finish
from kvtally.errors import IntegrityError, TransportError
from kvtally.processes import serve
from kvtally.shm import Mapping, map_arena

GIB = 1 << 30
PIN_S = 60.0
SLOT_ALIGNMENT_BYTES = 4096
SMALL_BYTES = 64 << 10
DISK_STEP_BYTES = 16 << 20
BUFFER_SHARE = 4  # the KV buffer is this many times as large as what one sample moves


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of page. Attention objects are chunks of blocks, a recurrent one is a single block."""

    name: str
    page_bytes: int
    layers: int
    blocks_per_object: int = 1
    stride_bytes: int = 0  # from block to block; 0: pages lie side by side
    is_state: bool = False


CASES = (
    Case(name="dense, 16-token pages", page_bytes=64 << 10, layers=32, blocks_per_object=16),
    Case(name="dense, 64-token pages", page_bytes=256 << 10, layers=32, blocks_per_object=4),
    Case(name="hybrid, 400-token pages", page_bytes=1_638_400, layers=16),
    Case(name="hybrid, GDN states", page_bytes=1_634_304, layers=16, stride_bytes=1_638_400, is_state=True),
)


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Which machine is this?"""


class MeasureLimits(msgspec.Struct, frozen=True, tag="limits", kw_only=True):
    """`directory`: on the disk that is to be read."""

    directory: str
    sample_bytes: int = GIB
    samples: int = 7


class MeasureCopies(msgspec.Struct, frozen=True, tag="copies", kw_only=True):
    case: Case
    sample_bytes: int = GIB
    samples: int = 9


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    limits: dict[str, Rate] = {}
    copies: list[CopyFigure] = []


Command = Probe | MeasureLimits | MeasureCopies


def handle(line: bytes) -> msgspec.Struct:
    command: Command = msgspec.json.decode(line, type=Command)
    if isinstance(command, Probe):
        return probe()
    if isinstance(command, MeasureLimits):
        return Measured(limits=measure_limits(command))
    return Measured(copies=measure_copies(command))


def probe() -> Machine:
    import torch

    machine = Machine(torch=str(torch.__version__), cpus=len(os.sched_getaffinity(0)))
    if not torch.cuda.is_available():
        return machine
    driver = Path("/proc/driver/nvidia/version")
    first = driver.read_text().splitlines()[0] if driver.exists() else ""
    version = next((word for word in first.split() if word[0].isdigit()), "")
    return msgspec.structs.replace(
        machine,
        gpu=torch.cuda.get_device_name(0),
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        driver=version,
        cuda=torch.version.cuda or "",
    )


# ---- limits


def measure_limits(command: MeasureLimits) -> dict[str, Rate]:
    import torch

    size = command.sample_bytes
    bus = Bus(size)
    with ExitStack() as stack:
        arena = _arena(stack, 2 * size)
        if int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.size_bytes, 0)):
            raise TransportError("cudaHostRegister refused an arena", remedy="See the limit of locked memory.")
        stack.callback(torch.cuda.cudart().cudaHostUnregister, arena.address)
        up, down = (torch.frombuffer(arena.view(start, size), dtype=torch.uint8) for start in (0, size))
        registered = Bus(size, host=(up, down), device=bus.device)
        small = min(size, GIB // 4)
        memory = bytearray(size), bytearray(size)
        first, second = (np.frombuffer(part, dtype=np.uint8) for part in memory)
        first[:], second[:] = 1, 2  # fault them in
        rates = _interleaved(
            command.samples,
            {
                "h2d": (size, bus.up),
                "d2h": (size, bus.down),
                "both": (2 * size, bus.both),
                "h2d_arena": (size, registered.up),
                "d2h_arena": (size, registered.down),
                "both_arena": (2 * size, registered.both),
                "h2d_64k_one_by_one": (small, partial(bus.one_by_one, small, up=True)),
                "d2h_64k_one_by_one": (small, partial(bus.one_by_one, small, up=False)),
                "memcpy_one_thread": (size, partial(np.copyto, first, second)),
            },
        )
        del up, down, registered
    with direct_reads(Path(command.directory), size) as read:
        gbps = [read() for _ in range(3)]
    rates["disk_read"] = Rate(gbps=max(gbps), median_gbps=statistics.median(gbps))
    return rates


class Bus:
    """Plain copies between pinned memory and the GPU. Nothing that uses the bus can be faster."""

    def __init__(self, size_bytes: int, *, host: Any = None, device: Any = None) -> None:
        import torch

        self._host = host or [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.device = device or [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()

    def up(self) -> None:
        self.device[0].copy_(self._host[0], non_blocking=True)

    def down(self) -> None:
        self._host[1].copy_(self.device[1], non_blocking=True)

    def both(self) -> None:
        import torch

        with torch.cuda.stream(self._streams[0]):
            self.up()
        with torch.cuda.stream(self._streams[1]):
            self.down()

    def up_aside(self, times: int) -> None:
        """Queue that many at once on a stream of their own: the GPU carries them out beside everything else."""
        import torch

        with torch.cuda.stream(self._streams[0]):
            for _ in range(times):
                self.up()

    def one_by_one(self, size_bytes: int, *, up: bool) -> None:
        """Copy small blocks, each with a call of its own; the other side has them in a different order."""
        blocks = size_bytes // SMALL_BYTES
        host, device = (part[:size_bytes].view(blocks, SMALL_BYTES) for part in (self._host[0], self.device[0]))
        order = random.Random(0).sample(range(blocks), blocks)
        for block, other in enumerate(order):
            if up:
                device[other].copy_(host[block], non_blocking=True)
            else:
                host[block].copy_(device[other], non_blocking=True)


@contextmanager
def direct_reads(directory: Path, size_bytes: int = GIB) -> Iterator[Callable[[], float]]:
    """Make a file there. Each call reads it past the page cache, with one thread and with four, and returns the GB/s of
    the faster."""
    path = directory / "kvtally-disk-limit"
    block = os.urandom(DISK_STEP_BYTES)
    try:
        with path.open("wb") as file:
            for _ in range(size_bytes // DISK_STEP_BYTES):
                file.write(block)
        yield lambda: size_bytes / min(_read_direct(path, size_bytes, threads) for threads in (1, 4)) / 1e9
    finally:
        path.unlink(missing_ok=True)


def _read_direct(path: Path, size_bytes: int, threads: int) -> float:
    drop_pages(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without it; the pages were dropped
        descriptor = os.open(path, os.O_RDONLY)

    def read(first: int) -> None:
        with mmap.mmap(-1, DISK_STEP_BYTES) as target:
            for offset in range(first * DISK_STEP_BYTES, size_bytes, threads * DISK_STEP_BYTES):
                if os.preadv(descriptor, [target], offset) != DISK_STEP_BYTES:
                    raise TransportError("a file was read in part only", remedy="Try another --dir.")

    try:
        with ThreadPoolExecutor(threads) as pool:
            begun = time.perf_counter()
            list(pool.map(read, range(threads)))
            return time.perf_counter() - begun
    finally:
        os.close(descriptor)


# ---- copies


@dataclass(frozen=True, slots=True)
class Bed:
    """What is copied: pages of some blocks into slots, and from those slots into pages of other blocks."""

    case: Case
    layout: GroupLayout
    saved: list[list[int]]  # block ids by object
    loaded: list[list[int]]
    slots: list[memoryview]
    spare: list[memoryview]  # for saves while `slots` are being loaded

    @classmethod
    def make(cls, case: Case, sample_bytes: int) -> Bed:
        stride = case.stride_bytes or case.page_bytes
        objects = max(1, sample_bytes // (case.page_bytes * case.layers * case.blocks_per_object))
        blocks = 1 + BUFFER_SHARE * objects * case.blocks_per_object
        spec = GroupSpec(
            kind=GroupKind.RECURRENT if case.is_state else GroupKind.FULL,
            block_tokens=16,
            page_bytes=((case.page_bytes,) * case.layers,),
        )
        layers = tuple(LayerView(layer * blocks * stride, stride, case.page_bytes) for layer in range(case.layers))
        layout = GroupLayout(spec, layers, blocks, blocks * stride * case.layers)
        ids = random.Random(blocks).sample(range(1, blocks), 2 * objects * case.blocks_per_object)
        groups = [ids[i : i + case.blocks_per_object] for i in range(0, len(ids), case.blocks_per_object)]
        return cls(case, layout, groups[:objects], groups[objects:], [], [])

    @property
    def object_bytes(self) -> int:
        return object_length(self.layout, self.case.blocks_per_object)

    @property
    def moved_bytes(self) -> int:
        return len(self.saved) * self.object_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.object_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    def place(self, arena: Mapping) -> None:
        for number in range(2 * len(self.saved)):
            slot = arena.view(number * self.slot_bytes, self.object_bytes)
            (self.slots if number < len(self.saved) else self.spare).append(slot)

    def moves(self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview], *, verified: bool) -> list[Move]:
        return [
            Move(self.layout, ids, [slot], number if verified else None)
            for number, (ids, slot) in enumerate(zip(blocks, slots, strict=True))
        ]

    def pages(self, memory: Any) -> Any:
        """The buffer as layers × blocks × page bytes."""
        stride = self.layout.layers[0].stride_bytes
        return memory.view(self.case.layers, self.layout.blocks_count, stride)[:, :, : self.case.page_bytes]


def measure_copies(command: MeasureCopies) -> list[CopyFigure]:
    import torch

    from kvtally.device.cuda import CudaCopies

    bed = Bed.make(command.case, command.sample_bytes)
    copies = CudaCopies(torch.device("cuda:0"), largest_bytes=bed.object_bytes)
    with ExitStack() as stack:
        arena = _arena(stack, 2 * len(bed.saved) * bed.slot_bytes)
        stack.callback(copies.close)
        copies.pin(arena)
        if not copies.wait_pinned(PIN_S):
            raise TransportError(
                f"an arena was not pinned within {PIN_S:g} s", remedy="See the limit of locked memory."
            )
        bed.place(arena)
        bench = CopyBench(bed, copies)
        bench.check()
        rates = _interleaved(command.samples, bench.actions(Bus(bed.moved_bytes)))
        bench.check()
        way = copies.way
    return _copy_figures(bed, way, rates)


class CopyBench:
    """Saves and loads of one bed, timed or checked."""

    def __init__(self, bed: Bed, copies: Any) -> None:
        import torch

        self._bed = bed
        self._copies = copies
        self._memory = torch.randint(0, 256, (bed.layout.buffer_bytes,), dtype=torch.uint8, device="cuda")
        self._saves = {verified: bed.moves(bed.saved, bed.slots, verified=verified) for verified in (False, True)}
        self._loads = {verified: bed.moves(bed.loaded, bed.slots, verified=verified) for verified in (False, True)}
        self._spares = {verified: bed.moves(bed.saved, bed.spare, verified=verified) for verified in (False, True)}

    def actions(self, bus: Bus) -> dict[str, tuple[int, Callable[[], object]]]:
        size = self._bed.moved_bytes
        return {
            "limit load": (size, bus.up),
            "load": (size, partial(self._load, verified=False)),
            "load verified": (size, partial(self._load, verified=True)),
            "limit save": (size, bus.down),
            "save": (size, partial(self._save, verified=False)),
            "save verified": (size, partial(self._save, verified=True)),
            "limit both": (2 * size, bus.both),
            "both": (2 * size, partial(self._both, verified=False)),
            "both verified": (2 * size, partial(self._both, verified=True)),
        }

    def check(self) -> None:
        """Save, look at the slots, load elsewhere, look at the whole buffer; with checksums and without."""
        import torch

        for verified in (False, True):
            bed, pages = self._bed, self._bed.pages(self._memory)
            for slot in bed.slots:
                np.frombuffer(slot, dtype=np.uint8)[:] = 0
            saved = self._save(verified=verified)
            for ids, slot in zip(bed.saved, bed.slots, strict=True):
                landed = torch.frombuffer(slot, dtype=torch.uint8).cuda()
                if not torch.equal(landed, pages[:, ids].reshape(-1)):
                    raise _wrong("a save", bed.case)
            expected = self._memory.clone()
            for target, source in zip(bed.loaded, bed.saved, strict=True):
                bed.pages(expected)[:, target] = pages[:, source]
                pages[:, target] = 0
            loaded = self._load(verified=verified)
            if not torch.equal(self._memory, expected):
                raise _wrong("a load", bed.case)
            if saved != loaded or any((value is None) is verified for value in saved):
                raise _wrong("the checksums of a save and its load", bed.case)

    def _save(self, *, verified: bool) -> Checksums:
        return finish(self._copies.save(self._memory, self._saves[verified], self._copies.fence()))

    def _load(self, *, verified: bool) -> Checksums:
        return finish(self._copies.load(self._memory, self._loads[verified], self._copies.fence()))

    def _both(self, *, verified: bool) -> None:
        fence = self._copies.fence()
        _together(
            self._copies.load(self._memory, self._loads[verified], fence),
            self._copies.save(self._memory, self._spares[verified], fence),
        )


def _together(*works: Steps) -> None:
    """Step each in turn, as a worker with several transfers does."""
    going = list(works)
    while going:
        pauses_s = []
        for work in list(going):
            try:
                pauses_s.append(next(work))
            except StopIteration:
                going.remove(work)
                pauses_s.append(0.0)
        if (pause_s := min(pauses_s)) > 0:
            time.sleep(pause_s)


def _copy_figures(bed: Bed, way: str, rates: dict[str, Rate]) -> list[CopyFigure]:
    return [
        CopyFigure(
            case=bed.case.name,
            page_bytes=bed.case.page_bytes,
            object_bytes=bed.object_bytes,
            direction=direction,
            verified=verified,
            gbps=(ours := rates[direction + (" verified" if verified else "")]).gbps,
            median_gbps=ours.median_gbps,
            limit_gbps=(limit := rates[f"limit {direction}"]).gbps,
            limit_median_gbps=limit.median_gbps,
            ratio=ours.gbps / limit.gbps,
            verify_cost=1 - ours.gbps / rates[direction].gbps if verified else None,
            way=way,
        )
        for direction in ("load", "save", "both")
        for verified in (False, True)
    ]


# ---- both


def _interleaved(samples: int, actions: dict[str, tuple[int, Callable[[], object]]]) -> dict[str, Rate]:
    """Run each action once to warm up, then all of them in turn, again and again."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(samples + 1):
        for name, (_, action) in actions.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            action()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begun)
    return {name: _rate(size, seconds[name][1:]) for name, (size, _) in actions.items()}


def _rate(size_bytes: int, seconds: Sequence[float]) -> Rate:
    return Rate(gbps=size_bytes / min(seconds) / 1e9, median_gbps=size_bytes / statistics.median(seconds) / 1e9)


def _arena(stack: ExitStack, size_bytes: int) -> Mapping:
    """Shared memory like a store's, faulted in."""
    descriptor = os.memfd_create("kvtally-bench")
    try:
        os.ftruncate(descriptor, size_bytes)
        arena = map_arena(descriptor, size_bytes, writable=True)
    finally:
        os.close(descriptor)
    stack.callback(arena.close)
    arena.populate(0, size_bytes)
    return arena


def _wrong(what: str, case: Case) -> IntegrityError:
    return IntegrityError(f"wrong bytes: {what} ({case.name})", remedy="This is a bug of the copies: report it.")


if __name__ == "__main__":
    serve(handle)
