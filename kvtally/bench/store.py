"""`kvtally bench store`: what a real store does on this machine, each figure beside a limit taken in the same run.

    put, get       one copy for each of 64 × 2 MiB            │ memcpy of the same bytes
    from disk      after kill -9 and a restart, verified      │ preadv / pwritev of the same bytes, same cache condition
    1..8 clients   checksummed puts and verified gets         │ as many memcpy processes
    lookups        16,384 tokens, 4 groups, 256 objects       │ an empty round trip; the same in a small index

Owns the plan: which sample follows which. Samples of a limit and of ours alternate, so that a noisy neighbour hits
both. Stores and measuring workers are processes of their own (`processes`, `tasks`); judging is `report`'s.
The store without a lower tier is the one that is measured, except where the disk is: write-behind would compete for
the cores with whatever is being timed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvtally import __version__
from kvtally.bench.command import leaving, place
from kvtally.bench.processes import Daemon, Worker, ask_all, drop_pages
from kvtally.bench.report import Figures, judge, page
from kvtally.bench.samples import Samples
from kvtally.bench.tasks import (
    CHUNK_TOKENS,
    OBJECT_BYTES,
    PROMPT_TOKENS,
    SMALL_BYTES,
    Allocate,
    Connect,
    Copy,
    CopyWhole,
    Disconnect,
    Fill,
    Get,
    Look,
    Part,
    Ping,
    Put,
    PutThrough,
    RawRead,
    RawWrite,
    Shape,
    Task,
    Window,
)
from kvtally.config.sizes import available_memory_bytes
from kvtally.config.units import human_size, parse_size
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB, SECOND_NS

BOUNDARIES = PROMPT_TOKENS // CHUNK_TOKENS
HIT_TOKENS = PROMPT_TOKENS - CHUNK_TOKENS  # a hit leaves at least one token to compute
HALF_TOKENS = PROMPT_TOKENS // 2
PROMPTS = 8  # looked up in turn, so that no answer can come from having just been asked
HALVES, STRANGERS = 1_000_000_000, 2_000_000_000  # where the seeds of half-saved and of unknown prompts begin
SPARE_BYTES = 64 * MIB
FILL_STEP_PROMPTS = 256
FILLED_PER_S = 20_000

# Names of samples: of the time that passed, and of the part of it in which the measuring process had a processor.
MEMCPY, PUT, FIRST_TOUCH, PUT_CHECKSUMMED, GET, GET_VERIFIED = (
    (name, f"{name}, processor")
    for name in ("memcpy", "put", "put_first_touch", "put_checksummed", "get", "get_verified")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    objects: int = 64  # of 2 MiB, in one set
    memory_bytes: int = 2048 * MIB
    rounds: int = 30
    lookup_blocks: int = 40  # short ones: the quietest of them is what the store takes, not its neighbours
    lookups_per_block: int = 16
    windows: int = 3
    window_s: float = 0.5
    clients: tuple[int, ...] = (1, 2, 4, 8)
    client_objects: int = 16
    disk_sets_warm: int = 5
    disk_sets_cold: int = 3
    index_objects: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    dense_objects: int = 100_000
    disk_objects: int = 50_000
    idle_s: float = 5.0

    @property
    def set_bytes(self) -> int:
        return self.objects * OBJECT_BYTES

    @property
    def seconds(self) -> float:
        """What a run takes, roughly: the sum of all phases' weights."""
        filled = sum(self.index_objects) + self.dense_objects + self.disk_objects
        return 56 + self.idle_s + filled / FILLED_PER_S


QUICK = Scale(
    objects=16,
    memory_bytes=256 * MIB,
    rounds=3,
    lookup_blocks=3,
    lookups_per_block=16,
    windows=1,
    window_s=0.2,
    clients=(1, 2),
    client_objects=4,
    disk_sets_warm=2,
    disk_sets_cold=1,
    index_objects=(8_192, 16_384),
    dense_objects=8_192,
    disk_objects=4_096,
    idle_s=0.5,
)


class Meter:
    """The progress bar. Phases are as long as their weights say, roughly seconds."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=total)

    @contextmanager
    def phase(self, name: str, weight: float) -> Iterator[None]:
        self._progress.update(self._task, description=name)
        yield
        self._progress.advance(self._task, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    scale: Scale
    meter: Meter
    directory: Path  # sockets and logs
    disk: Path  # on the device that is measured
    figures: Figures

    def run(self) -> None:
        with Worker() as worker:
            worker.ask(Allocate(self.scale.objects))
            with Daemon(self.directory, "memory", memory_bytes=self.scale.memory_bytes) as daemon:
                self._memory(daemon, worker)
            self._disk(worker)
        with Worker() as worker:
            self._index(worker)
            self._dense(worker)

    # ---- bytes through shared memory

    def _memory(self, daemon: Daemon, worker: Worker) -> None:
        with self.meter.phase("pre-faulting", 3):
            worker.ask(Connect("mapped", daemon.socket, Shape.BULK, prefault=True))
            worker.ask(Connect("unmapped", daemon.socket, Shape.BULK))
            worker.ask(Connect("hybrid", daemon.socket, Shape.HYBRID))
            daemon.wait_populated()
        state = daemon.state
        self.figures.arena_bytes, self.figures.huge_pages = state.arena.capacity_bytes, state.server.huge_pages
        samples = Samples(worker)
        with self.meter.phase("first touch", 2):
            used = self._first_touch(samples)
        with self.meter.phase("put and get", 5):
            self._put_and_get(samples, used)
        with self.meter.phase("lookups", 4):
            self._lookups(samples)
        with self.meter.phase("idle store", self.scale.idle_s):
            begun_s, begun = daemon.cpu_s, time.monotonic()
            time.sleep(self.scale.idle_s)
            self.figures.idle_cpu_percent = (daemon.cpu_s - begun_s) / (time.monotonic() - begun) * 100
        worker.ask(Disconnect())
        with self.meter.phase("several clients", 16):
            self._clients(daemon)

    def _first_touch(self, samples: Samples) -> int:
        """Puts into slots that nobody used before; how many sets that took."""
        sets = min(2 * self.scale.rounds, self.scale.memory_bytes // self.scale.set_bytes - 1)
        for number in range(0, sets - 1, 2):
            samples.take_each(MEMCPY, Copy())
            samples.take_each(FIRST_TOUCH, Put("mapped", number, checksummed=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(("put_first_touch_unmapped", ""), Put("unmapped", number + 1, checksummed=False))
        return sets

    def _put_and_get(self, samples: Samples, used: int) -> None:
        """The arena is full by now, or soon: puts evict."""
        for number in range(used, used + 2 * self.scale.rounds, 2):
            samples.take_each(MEMCPY, Copy())
            samples.take_each(PUT, Put("mapped", number, checksummed=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(("", *GET), Get("mapped", number, verify=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(PUT_CHECKSUMMED, Put("mapped", number + 1, checksummed=True))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(("", *GET_VERIFIED), Get("mapped", number + 1, verify=True))
            samples.take_each(("memcpy_whole", ""), CopyWhole())
        figures, size_bytes = self.figures, self.scale.set_bytes
        figures.memcpy_gbps = samples.gbps("memcpy", size_bytes)
        figures.memcpy_median_gbps = samples.median_gbps("memcpy", size_bytes)
        figures.memcpy_whole_gbps = samples.gbps("memcpy_whole", size_bytes)
        figures.put_gbps = samples.gbps("put", size_bytes)
        figures.put_first_touch_gbps = samples.gbps("put_first_touch", size_bytes)
        figures.put_first_touch_unmapped_gbps = samples.gbps("put_first_touch_unmapped", size_bytes)
        figures.put_checksummed_gbps = samples.gbps("put_checksummed", size_bytes)
        figures.get_gbps = samples.gbps("get", size_bytes)
        figures.get_verified_gbps = samples.gbps("get_verified", size_bytes)
        limit = samples.gbps(MEMCPY[1], size_bytes)
        for name, on_processor in (PUT, FIRST_TOUCH, PUT_CHECKSUMMED, GET, GET_VERIFIED):
            figures.cpu_ratios[f"{name}_gbps"] = samples.gbps(on_processor, size_bytes) / limit

    def _lookups(self, samples: Samples) -> None:
        samples.worker.ask(Fill("hybrid", 0, PROMPTS))
        samples.worker.ask(Fill("hybrid", HALVES, PROMPTS, BOUNDARIES // 2))
        times = self.scale.lookups_per_block
        hits = _seeds(0, PROMPTS, times)
        cases: dict[str, Task] = {
            "hit": Look("hybrid", hits, HIT_TOKENS),
            "half": Look("hybrid", _seeds(HALVES, PROMPTS, times), HALF_TOKENS),
            "miss": Look("hybrid", _seeds(STRANGERS, PROMPTS, times), 0),
            "hold": Look("hybrid", hits, HIT_TOKENS, Part.HOLD),
            "round_trip": Look("hybrid", hits, HIT_TOKENS, Part.ROUND_TRIP),
            "hashing": Look("hybrid", hits, HIT_TOKENS, Part.HASH),
            "packing": Look("hybrid", hits, HIT_TOKENS, Part.PACK),
        }
        for _ in range(self.scale.lookup_blocks):
            for name, task in cases.items():
                samples.take(name, task)
            samples.take("ping", Ping("hybrid", times))
        figures = self.figures
        figures.lookup_16k = {name: samples.latency(name) for name in cases}
        figures.lookup_16k_ms = max(figures.lookup_16k[name].quiet_ms for name in ("hit", "half", "miss"))
        figures.rtt = samples.latency("ping")
        figures.rtt_ms = figures.rtt.quiet_ms

    def _clients(self, daemon: Daemon) -> None:
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker()) for _ in range(max(self.scale.clients))]
            ask_all(workers, [Allocate(self.scale.client_objects) for _ in workers])
            ask_all(workers, [Connect("own", daemon.socket, Shape.BULK, prefault=True) for _ in workers])
            for count in self.scale.clients:
                limit = ours = 0.0
                for window in range(self.scale.windows):
                    limit = max(limit, self._together(workers[:count], "", window))
                    ours = max(ours, self._together(workers[:count], "own", window))
                self.figures.clients_memcpy_gbps[str(count)] = limit
                self.figures.clients_gbps[str(count)] = ours

    def _together(self, workers: Sequence[Worker], client: str, window: int) -> float:
        """All of them at once; their throughput together."""
        start_ns = time.monotonic_ns() + SECOND_NS // 50
        tasks = [
            Window(
                start_ns, self.scale.window_s, client, HALVES + ((len(workers) * 100 + window) * 100 + number) * 10_000
            )
            for number in range(len(workers))
        ]
        return sum(rate for (rate,) in ask_all(workers, tasks)) / 1e9

    # ---- bytes from and to disk

    def _disk(self, worker: Worker) -> None:
        """Save sets and let them reach the disk; kill -9; start again; read them back."""
        scale, figures, size_bytes = self.scale, self.figures, self.scale.set_bytes
        samples = Samples(worker)
        sets = scale.disk_sets_warm + scale.disk_sets_cold
        data = self.disk / "sets" / "data"
        with (
            self.meter.phase("put to disk", 10),
            Daemon(self.directory, "disk", memory_bytes=scale.memory_bytes, disk=data.parent) as daemon,
        ):
            worker.ask(Connect("disk", daemon.socket, Shape.BULK, prefault=True))
            daemon.wait_populated()
            for number in range(sets):
                _refresh_free_memory(size_bytes)
                samples.take("raw_put", RawWrite(str(self.disk / "raw")))
                _refresh_free_memory(size_bytes)
                samples.take("put", PutThrough("disk", number))
                _sync(data)
            worker.ask(Disconnect())
            daemon.kill()
        with (
            self.meter.phase("restart, get from disk", 10),
            Daemon(self.directory, "restarted", memory_bytes=scale.memory_bytes, disk=data.parent) as daemon,
        ):
            worker.ask(Connect("disk", daemon.socket, Shape.BULK, prefault=True))
            daemon.wait_populated()
            for number in range(sets):
                is_cold = number >= scale.disk_sets_warm
                self._read_back(samples, data, number, "cold" if is_cold else "warm")
            worker.ask(Disconnect())
        figures.disk_raw_put_gbps, figures.disk_put_gbps = (samples.gbps(n, size_bytes) for n in ("raw_put", "put"))
        figures.disk_raw_warm_gbps, figures.disk_get_warm_gbps = (
            samples.gbps(name, size_bytes) for name in ("raw warm", "staged warm")
        )
        figures.disk_raw_cold_gbps, figures.disk_get_cold_gbps = (
            samples.gbps(name, size_bytes) for name in ("raw cold", "staged cold")
        )
        figures.disk_get_copied_gbps = samples.gbps("copied warm", size_bytes)
        pairs = [
            (figures.disk_get_warm_gbps, figures.disk_raw_warm_gbps),
            (figures.disk_get_cold_gbps, figures.disk_raw_cold_gbps),
        ]
        figures.disk_get_gbps, figures.disk_raw_gbps = min(pairs, key=lambda pair: pair[0] / pair[1])

    def _read_back(self, samples: Samples, data: Path, number: int, cache: str) -> None:
        """One set, by `preadv` and by the store; with a cold cache the file's pages are dropped before either."""
        for is_ours in (False, True):
            if cache == "cold":
                drop_pages(data)
            if is_ours:
                samples.take_each((f"staged {cache}", f"copied {cache}", ""), Get("disk", number, verify=True))
            else:
                samples.take(f"raw {cache}", RawRead(str(data), number * self.scale.set_bytes))

    # ---- many objects

    def _index(self, worker: Worker) -> None:
        """The same lookups in stores that hold more and more; all stores are there at once, and asked in turn."""
        samples, figures = Samples(worker), self.figures
        with ExitStack() as stack:
            prompts: dict[str, int] = {}
            for objects in self.scale.index_objects:
                memory_bytes = objects * SMALL_BYTES + SPARE_BYTES
                if memory_bytes > available_memory_bytes() // 2:
                    figures.skipped.append(f"lookups among {objects:,} objects, which take {human_size(memory_bytes)}")
                    continue
                name = str(objects)
                daemon = stack.enter_context(Daemon(self.directory, f"index-{name}", memory_bytes=memory_bytes))
                grown_bytes = self._fill(worker, daemon, name, Shape.HYBRID, objects)
                figures.resident_bytes_per_object["hybrid"] = grown_bytes
                prompts[name] = objects // (4 * BOUNDARIES)
            for block in range(self.scale.lookup_blocks):
                with self.meter.phase("lookups in indexes of several sizes", 0):
                    for name, known in prompts.items():
                        seeds = random.Random(block).choices(range(known), k=self.scale.lookups_per_block)
                        samples.take(name, Look(name, seeds, HIT_TOKENS))
            worker.ask(Disconnect())
        figures.lookup_by_objects = {name: samples.latency(name) for name in prompts}
        figures.lookup_ms_by_objects = {name: found.quiet_ms for name, found in figures.lookup_by_objects.items()}

    def _dense(self, worker: Worker) -> None:
        """What an object costs where nothing is shared: one group, so a boundary for each object."""
        cases = [
            ("dense", self.scale.dense_objects, None),
            ("dense + disk", self.scale.disk_objects, self.disk / "small"),
        ]
        for name, objects, disk in cases:
            memory_bytes = objects * SMALL_BYTES + SPARE_BYTES
            with Daemon(self.directory, name.replace(" + ", "-"), memory_bytes=memory_bytes, disk=disk) as daemon:
                self.figures.resident_bytes_per_object[name] = self._fill(worker, daemon, name, Shape.DENSE, objects)
                worker.ask(Disconnect())

    def _fill(self, worker: Worker, daemon: Daemon, name: str, shape: Shape, objects: int) -> float:
        """Put so many objects into a store's index; the bytes that its process grew by for each of them."""
        worker.ask(Connect(name, daemon.socket, shape))
        prompts = -(-objects // (BOUNDARIES * (4 if shape is Shape.HYBRID else 1)))
        warm_up = min(FILL_STEP_PROMPTS, prompts // 4)
        worker.ask(Fill(name, 0, warm_up))  # what puts under way take, for a while, is not what an object takes
        before_bytes, before_objects = daemon.anonymous_bytes, daemon.state.arena.objects
        for first in range(warm_up, prompts, FILL_STEP_PROMPTS):
            step = min(FILL_STEP_PROMPTS, prompts - first)
            with self.meter.phase(f"an index of {objects:,} objects", objects * step / prompts / FILLED_PER_S):
                worker.ask(Fill(name, first, step))
        return (daemon.anonymous_bytes - before_bytes) / (daemon.state.arena.objects - before_objects)


def _seeds(first: int, prompts: int, times: int) -> list[int]:
    return [first + number % prompts for number in range(times)]


def _sync(path: Path) -> None:
    """Let the device finish, so that one sample does not pay for the one before."""
    with path.open("rb+") as file:
        os.fdatasync(file.fileno())


def _refresh_free_memory(size_bytes: int) -> None:
    """Have so much free memory that was in use a moment ago. A virtual machine gets memory it has not used for a while
    from its host, at a tenth of the speed of a disk's cache: whoever writes to that cache first would pay for it."""
    with mmap.mmap(-1, 2 * size_bytes) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)


def main(arguments: Sequence[str]) -> int:
    """`kvtally bench store`. The exit code says whether it could be measured, not whether targets were met."""
    options = _parser().parse_args(arguments)
    scale = _scale(options)
    console = Console(stderr=True, highlight=False)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    figures = Figures(version=__version__, quick=options.quick, cpus=len(os.sched_getaffinity(0)))
    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(leaving())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtally-", dir=place())))
        disk = Path(stack.enter_context(_disk_directory(options.dir))).resolve()
        stack.enter_context(bar)
        Plan(scale=scale, meter=Meter(bar, scale.seconds), directory=directory, disk=disk, figures=figures).run()
    figures.elapsed_s = time.monotonic() - begun
    figures.targets = judge(figures)
    if figures.quick:  # what fits into the caches, for a moment, reaches and misses targets by chance
        figures.targets = [msgspec.structs.replace(row, ok=None) for row in figures.targets]
    figures.ratios = {row.key: row.ratio for row in figures.targets if row.ratio is not None}
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n")
    else:
        Console(highlight=False).print(page(figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtally bench store",
        description="Measure a store on this machine: puts, gets, lookups and the disk tier, each beside its limit.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--quick", action="store_true", help="a look in seconds; figures are rough")
    parser.add_argument(
        "--memory", metavar="SIZE", help="arena of the measured store (default: 2GiB or a quarter of RAM)"
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="where the disk tier is measured (default: the temporary directory)"
    )
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else Scale()
    smallest_bytes = 5 * scale.set_bytes  # the disk has twice that, and must hold eight sets
    memory_bytes = max(min(scale.memory_bytes, available_memory_bytes() // 4), smallest_bytes)
    if options.memory is not None:
        try:
            memory_bytes = parse_size(options.memory)
        except ValueError as error:
            raise ConfigError(f"--memory: {error}", remedy="Write it like 2GiB.", code="KV-102") from error
        if memory_bytes < smallest_bytes:
            raise ConfigError(
                f"--memory {options.memory} is too small to measure with",
                remedy=f"Give at least {human_size(smallest_bytes)}.",
                code="KV-102",
            )
    return replace(scale, memory_bytes=memory_bytes)


def _disk_directory(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="kvtally-bench-", dir=parent)
    except OSError as error:
        what = f"--dir {parent} cannot be used: {error}"
        raise ConfigError(what, remedy="Give a directory that you can write to.", code="KV-103") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
