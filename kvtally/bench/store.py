"""`kvtally bench store`: what a real store does on this machine, each figure beside a limit taken in the same run.

    put, get       one copy for each of 64 × 2 MiB            │ memcpy of the same bytes
    from disk      after kill -9 and a restart, verified      │ preadv / pwritev of the same bytes, same cache condition
    1..8 clients   checksummed puts and verified gets         │ as many memcpy processes
    lookups        16,384 tokens, 4 groups, 256 objects       │ an empty round trip; the same in a small index

Owns the plan: which sample follows which. Samples of a limit and of ours alternate, so that a noisy neighbour disturbs
both. Stores (`daemon`) and measuring workers (`tasks`) are processes of their own; `store_report` says what the figures
mean. Only the disk is measured with a store that has a disk tier: elsewhere write-behind would compete for the cores
with what is being timed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvtally.bench.command import Meter, command_line, disk_directory, measure, size_of
from kvtally.bench.daemon import Daemon, drop_pages
from kvtally.bench.report import median, p99
from kvtally.bench.store_report import Figures, Latency, page, rows
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
    TaskWorker,
    Window,
    run_all,
)
from kvtally.config.sizes import available_memory_bytes
from kvtally.config.units import human_size
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB, SECOND_NS

BOUNDARIES = PROMPT_TOKENS // CHUNK_TOKENS
HIT_TOKENS = PROMPT_TOKENS - CHUNK_TOKENS  # a hit leaves at least one token to compute
HALF_TOKENS = PROMPT_TOKENS // 2
PROMPTS = 8  # looked up in turn, so that no lookup is helped by the one before
HALVES, STRANGERS = 1_000_000_000, 2_000_000_000  # where the seeds of half-saved and of unknown prompts begin
SPARE_BYTES = 64 * MIB
FILL_STEP_PROMPTS = 256
FILLED_PER_S = 20_000

# Names of samples: the time that passed, and the part of it in which the measuring process had a processor.
MEMCPY, PUT, FIRST_TOUCH, PUT_CHECKSUMMED, GET, GET_VERIFIED = (
    (name, f"{name}, processor")
    for name in ("memcpy", "put", "put_first_touch", "put_checksummed", "get", "get_verified")
)
WHOLE, UNMAPPED = "memcpy_whole", "put_first_touch_unmapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    objects: int = 64  # of 2 MiB, in one set
    memory_bytes: int = 2048 * MIB
    rounds: int = 30
    lookup_blocks: int = 40  # short, so that some are free of noise; the quietest is the store's own time
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
        """Roughly how long a run takes: the sum of all phases' weights."""
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


class Samples:
    """Seconds by name, in the blocks in which a worker measured them."""

    def __init__(self, worker: TaskWorker) -> None:
        self.worker = worker
        self._blocks: dict[str, list[list[float]]] = defaultdict(list)

    def take(self, name: str, task: Task) -> None:
        self._blocks[name].append(self.worker.run(task))

    def take_each(self, names: Sequence[str], task: Task) -> None:
        """A task that measures several times, each under a name of its own."""
        for name, seconds in zip(names, self.worker.run(task), strict=True):
            self._blocks[name].append([seconds])

    def gbps(self, name: str, size_bytes: int) -> float:
        return size_bytes / min(self._all(name)) / 1e9

    def median_gbps(self, name: str, size_bytes: int) -> float:
        return size_bytes / median(self._all(name)) / 1e9

    def latency(self, name: str) -> Latency:
        samples = self._all(name)
        quiet_s = min(map(median, self._blocks[name]))
        return Latency(quiet_ms=quiet_s * 1e3, median_ms=median(samples) * 1e3, p99_ms=p99(samples) * 1e3)

    def _all(self, name: str) -> list[float]:
        return [seconds for block in self._blocks[name] for seconds in block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    scale: Scale
    meter: Meter
    directory: Path  # sockets and logs
    disk: Path  # on the device that is measured
    figures: Figures

    def run(self) -> None:
        with self._worker("bulk") as worker:
            worker.run(Allocate(self.scale.objects))
            with Daemon(self.directory, "memory", memory_bytes=self.scale.memory_bytes) as daemon:
                self._memory(daemon, worker)
            self._disk(worker)
        with self._worker("index") as worker:
            self._index(worker)
            self._dense(worker)

    def _worker(self, name: str) -> TaskWorker:
        return TaskWorker(self.directory / f"worker-{name}.log")

    # ---- bytes through shared memory

    def _memory(self, daemon: Daemon, worker: TaskWorker) -> None:
        with self.meter.phase("pre-faulting", 3):
            worker.run(Connect("mapped", daemon.socket, Shape.BULK, prefault=True))
            worker.run(Connect("unmapped", daemon.socket, Shape.BULK))
            worker.run(Connect("hybrid", daemon.socket, Shape.HYBRID))
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
        worker.run(Disconnect())
        with self.meter.phase("several clients", 16):
            self._clients(daemon)

    def _first_touch(self, samples: Samples) -> int:
        """Put into slots that nobody has used before. How many sets were put."""
        sets = min(2 * self.scale.rounds, self.scale.memory_bytes // self.scale.set_bytes - 1)
        for number in range(0, sets - 1, 2):
            samples.take_each(MEMCPY, Copy())
            samples.take_each(FIRST_TOUCH, Put("mapped", number, checksummed=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each((UNMAPPED, ""), Put("unmapped", number + 1, checksummed=False))
        return sets

    def _put_and_get(self, samples: Samples, used: int) -> None:
        """The arena is full by now, or soon will be, so puts evict."""
        for number in range(used, used + 2 * self.scale.rounds, 2):
            samples.take_each(MEMCPY, Copy())
            samples.take_each(PUT, Put("mapped", number, checksummed=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(("", *GET), Get("mapped", number, verify=False))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(PUT_CHECKSUMMED, Put("mapped", number + 1, checksummed=True))
            samples.take_each(MEMCPY, Copy())
            samples.take_each(("", *GET_VERIFIED), Get("mapped", number + 1, verify=True))
            samples.take_each((WHOLE, ""), CopyWhole())
        figures, size_bytes = self.figures, self.scale.set_bytes
        ours = (PUT, FIRST_TOUCH, PUT_CHECKSUMMED, GET, GET_VERIFIED)
        for name in (MEMCPY[0], WHOLE, UNMAPPED, *(name for name, _ in ours)):
            setattr(figures, f"{name}_gbps", samples.gbps(name, size_bytes))
        figures.memcpy_median_gbps = samples.median_gbps(MEMCPY[0], size_bytes)
        limit = samples.gbps(MEMCPY[1], size_bytes)
        for name, on_processor in ours:
            figures.cpu_ratios[f"{name}_gbps"] = samples.gbps(on_processor, size_bytes) / limit

    def _lookups(self, samples: Samples) -> None:
        samples.worker.run(Fill("hybrid", 0, PROMPTS))
        samples.worker.run(Fill("hybrid", HALVES, PROMPTS, BOUNDARIES // 2))
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
            workers = [stack.enter_context(self._worker(str(number))) for number in range(max(self.scale.clients))]
            run_all(workers, [Allocate(self.scale.client_objects) for _ in workers])
            run_all(workers, [Connect("own", daemon.socket, Shape.BULK, prefault=True) for _ in workers])
            for count in self.scale.clients:
                limit = ours = 0.0
                for window in range(self.scale.windows):
                    limit = max(limit, self._together(workers[:count], "", window))
                    ours = max(ours, self._together(workers[:count], "own", window))
                self.figures.clients_memcpy_gbps[str(count)] = limit
                self.figures.clients_gbps[str(count)] = ours

    def _together(self, workers: Sequence[TaskWorker], client: str, window: int) -> float:
        """Run all of them at once. Their total throughput."""
        start_ns = time.monotonic_ns() + SECOND_NS // 50
        tasks = [
            Window(
                start_ns, self.scale.window_s, client, HALVES + ((len(workers) * 100 + window) * 100 + number) * 10_000
            )
            for number in range(len(workers))
        ]
        return sum(rate for (rate,) in run_all(workers, tasks)) / 1e9

    # ---- bytes from and to disk

    def _disk(self, worker: TaskWorker) -> None:
        """Save sets and let them reach the disk; kill -9; start again; read them back."""
        scale, figures, size_bytes = self.scale, self.figures, self.scale.set_bytes
        samples = Samples(worker)
        sets = scale.disk_sets_warm + scale.disk_sets_cold
        data = self.disk / "sets" / "data"
        with (
            self.meter.phase("put to disk", 10),
            Daemon(self.directory, "disk", memory_bytes=scale.memory_bytes, disk=data.parent) as daemon,
        ):
            worker.run(Connect("disk", daemon.socket, Shape.BULK, prefault=True))
            daemon.wait_populated()
            for number in range(sets):
                _refresh_free_memory(size_bytes)
                samples.take("disk_raw_put", RawWrite(str(self.disk / "raw")))
                _refresh_free_memory(size_bytes)
                samples.take("disk_put", PutThrough("disk", number))
                _sync(data)
            worker.run(Disconnect())
            daemon.kill()
        with (
            self.meter.phase("restart, get from disk", 10),
            Daemon(self.directory, "restarted", memory_bytes=scale.memory_bytes, disk=data.parent) as daemon,
        ):
            worker.run(Connect("disk", daemon.socket, Shape.BULK, prefault=True))
            daemon.wait_populated()
            for number in range(sets):
                is_cold = number >= scale.disk_sets_warm
                self._read_back(samples, data, number, "cold" if is_cold else "warm")
            worker.run(Disconnect())
        for name in ("raw_put", "put", "raw_warm", "get_warm", "raw_cold", "get_cold", "get_copied"):
            setattr(figures, f"disk_{name}_gbps", samples.gbps(f"disk_{name}", size_bytes))
        pairs = [
            (figures.disk_get_warm_gbps, figures.disk_raw_warm_gbps),
            (figures.disk_get_cold_gbps, figures.disk_raw_cold_gbps),
        ]
        figures.disk_get_gbps, figures.disk_raw_gbps = min(pairs, key=lambda pair: pair[0] / pair[1])

    def _read_back(self, samples: Samples, data: Path, number: int, cache: str) -> None:
        """Read one set with `preadv` and from the store. For a cold cache, the file's pages are dropped before each."""
        for is_ours in (False, True):
            if cache == "cold":
                drop_pages(data)
            if is_ours:
                copied = "disk_get_copied" if cache == "warm" else ""
                samples.take_each((f"disk_get_{cache}", copied, ""), Get("disk", number, verify=True))
            else:
                samples.take(f"disk_raw_{cache}", RawRead(str(data), number * self.scale.set_bytes))

    # ---- many objects

    def _index(self, worker: TaskWorker) -> None:
        """Make the same lookups in stores with more and more objects. All stores run at once and are asked in turn."""
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
            worker.run(Disconnect())
        figures.lookup_by_objects = {name: samples.latency(name) for name in prompts}
        figures.lookup_ms_by_objects = {name: found.quiet_ms for name, found in figures.lookup_by_objects.items()}

    def _dense(self, worker: TaskWorker) -> None:
        """Find what an object costs if nothing is shared: with one group, each object has a boundary of its own."""
        cases = [
            ("dense", self.scale.dense_objects, None),
            ("dense + disk", self.scale.disk_objects, self.disk / "small"),
        ]
        for name, objects, disk in cases:
            memory_bytes = objects * SMALL_BYTES + SPARE_BYTES
            with Daemon(self.directory, name.replace(" + ", "-"), memory_bytes=memory_bytes, disk=disk) as daemon:
                self.figures.resident_bytes_per_object[name] = self._fill(worker, daemon, name, Shape.DENSE, objects)
                worker.run(Disconnect())

    def _fill(self, worker: TaskWorker, daemon: Daemon, name: str, shape: Shape, objects: int) -> float:
        """Put this many objects into a store's index. By how many bytes its process grew for each."""
        worker.run(Connect(name, daemon.socket, shape))
        prompts = -(-objects // (BOUNDARIES * (4 if shape is Shape.HYBRID else 1)))
        warm_up = min(FILL_STEP_PROMPTS, prompts // 4)
        worker.run(Fill(name, 0, warm_up))  # puts under way take memory for a while; that is not counted
        before_bytes, before_objects = daemon.memory_bytes("RssAnon"), daemon.state.arena.objects
        for first in range(warm_up, prompts, FILL_STEP_PROMPTS):
            step = min(FILL_STEP_PROMPTS, prompts - first)
            with self.meter.phase(f"an index of {objects:,} objects", objects * step / prompts / FILLED_PER_S):
                worker.run(Fill(name, first, step))
        return (daemon.memory_bytes("RssAnon") - before_bytes) / (daemon.state.arena.objects - before_objects)


def _seeds(first: int, prompts: int, times: int) -> list[int]:
    return [first + number % prompts for number in range(times)]


def _sync(path: Path) -> None:
    """Let the device finish, so that one sample does not pay for the one before."""
    with path.open("rb+") as file:
        os.fdatasync(file.fileno())


def _refresh_free_memory(size_bytes: int) -> None:
    """Make sure that this much free memory was in use a moment ago. A virtual machine has to get memory that it has not
    used for a while from its host, ten times slower than a disk's cache; the first sample would pay for that."""
    with mmap.mmap(-1, 2 * size_bytes) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether everything could be measured, not whether targets were met."""
    options = _parser().parse_args(arguments)
    scale = _scale(options)

    def run(directory: Path) -> Figures:
        figures = Figures(quick=options.quick, cpus=len(os.sched_getaffinity(0)))
        with disk_directory(options.dir) as disk, Meter(scale.seconds) as meter:
            place = Path(disk).resolve()
            Plan(scale=scale, meter=meter, directory=directory, disk=place, figures=figures).run()
        figures.targets = rows(figures)
        if figures.quick:  # sets so small fit into caches, and meet or miss targets by chance
            figures.targets = [msgspec.structs.replace(row, ok=None) for row in figures.targets]
        figures.ratios = {row.key: row.ratio for row in figures.targets if row.ratio is not None}
        return figures

    measure(options, run, page)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "store",
        "Measure a store on this machine: puts, gets, lookups and the disk tier. Each figure stands beside "
        "its limit, taken in the same run: memcpy, or plain reads and writes of the same bytes. Needs no vLLM. Takes "
        "about two minutes; nothing else should run meanwhile.",
    )
    parser.add_argument("--quick", action="store_true", help="a rough look that takes seconds")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="arena of the measured store (default: 2GiB, or a quarter of RAM if that is less)",
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="a directory on the disk to measure (default: the temporary directory)"
    )
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else Scale()
    smallest_bytes = 5 * scale.set_bytes  # the disk tier has twice as much, and must hold eight sets
    memory_bytes = max(min(scale.memory_bytes, available_memory_bytes() // 4), smallest_bytes)
    if options.memory is not None:
        memory_bytes = size_of(options.memory)
        if memory_bytes < smallest_bytes:
            raise ConfigError(
                f"--memory {options.memory} is too small to measure with",
                remedy=f"Give at least {human_size(smallest_bytes)}.",
                code="KV-102",
            )
    return replace(scale, memory_bytes=memory_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
