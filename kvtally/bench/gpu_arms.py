"""One engine of `kvtally bench gpu`: started, warmed up, asked for prompts cold and again, watched under load, ended.

Owns what an engine is asked and in which order: the same for each connector. It yields after every step, so that
engines can be asked in turn: if the machine's speed varies, it varies for all of them. Engines (`engine`) and stores
(`daemon`) are processes of their own; nothing here needs a GPU. Neighbours: `gpu` (left: which engines, and what
becomes of the figures), `gpu_report` (right: what they mean). Threading: none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtally.bench.daemon import Daemon, Ledger, drop_pages
from kvtally.bench.engine import Answer, Ask, EngineProcess, Settle, Source, Watch, Watched
from kvtally.bench.gpu_copies import GIB, Case, direct_reads
from kvtally.bench.gpu_report import Arm, Busy, BusyArm, DiskArm, Figures, Repeat, latency
from kvtally.bench.gpu_shapes import ENVIRONMENT, SHAPES, start_of
from kvtally.bench.repeat_report import view
from kvtally.config.sizes import disk_usable_bytes
from kvtally.config.units import human_size
from kvtally.core.receipts import Half
from kvtally.errors import TransportError
from kvtally.processes import own_environment

REMEDY = "See what its log says; --part runs parts one by one."
START_S = 420.0  # kernels are compiled the first time
ASK_S = 120.0
WATCH_S = 240.0
RECEIPT_S = 10.0
SETTLE_TURNS = 4  # of a minute each: a disk may be slow
WARM_UP_SEEDS = (1, 2)
FILL_SEED = 1_000
MORE_SEED = 4_000
BUSY_SEED = 5_000
DECODE_SEED = 9_000
DECODES = 4


class Scale(NamedTuple):
    """How much is measured. `fills` and `repeats` are at most what the shape says. Repeats go over several `rounds`,
    because one host thread makes single figures unsteady."""

    sample_bytes: int = GIB
    samples: int = 9
    fills: int = 1_000
    repeats: int = 9
    rounds: int = 5
    cold_row: int = 5  # prompts in a row, before the next engine's turn
    more_cold: int = 1_000  # as `fills`
    busy_rounds: int = 5


QUICK = Scale(sample_bytes=GIB // 4, samples=3, fills=3, repeats=2, rounds=1, more_cold=0, busy_rounds=1)


class Job(NamedTuple):
    """One step of the plan, which runs in a process of its own."""

    part: str  # limits, copies, engine
    case: Case | None = None
    shape: str = ""
    engine: str = ""
    repeat: bool = False
    busy: bool = False

    @property
    def name(self) -> str:
        if self.case is not None:
            return f"copies, {self.case.name}"
        return f"{self.shape}, {self.engine}" if self.engine else self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the jobs of one run share. `disk` is a directory on the disk that is measured."""

    scale: Scale
    figures: Figures
    directory: Path
    disk: Path
    logs: Path
    reads_disk: bool | None  # after a restart; None: as the shape says
    tell: Callable[[str], None]
    publish: Callable[[], None]

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace(', ', '-')}.log"

    def start(
        self, job: Job, name: str, store: str, stack: ExitStack, *, always_load: bool = False
    ) -> tuple[EngineProcess, float]:
        """An engine, ready, and the seconds that this took."""
        begun = time.monotonic()
        start = start_of(
            job.shape,
            job.engine,
            self.directory / "models",
            store,
            always_load=always_load,
            most_requests=32 if job.busy else 8,
            gpu_share=min(0.9, SHAPES[job.shape].gpu_bytes / (self.figures.machine.gpu_memory_bytes or 1)),
            graphs=self.figures.graphs,
        )
        environment = {**own_environment(), **ENVIRONMENT}
        engine = EngineProcess(start, self.log(name), environment, remedy=REMEDY, timeout_s=START_S)
        stack.enter_context(engine)
        self.figures.machine = msgspec.structs.replace(self.figures.machine, vllm=engine.ready.engine)
        return engine, time.monotonic() - begun

    def disk_of(self, shape: str) -> Path | None:
        """The directory of the store's disk tier, for reads after a restart; None if these are not measured."""
        wanted = SHAPES[shape].reads_disk if self.reads_disk is None else self.reads_disk
        if not wanted:
            return None
        needed_bytes = SHAPES[shape].host_bytes
        if disk_usable_bytes(self.disk) < needed_bytes:
            self.tell(f"{shape}: {self.disk} has no room for {human_size(needed_bytes)}: not read from disk")
            return None
        return self.disk / shape

    def store(self, shape: str, name: str, disk: Path | None) -> Daemon:
        memory_bytes = SHAPES[shape].host_bytes
        return Daemon(self.directory, name, memory_bytes=memory_bytes, disk=disk, logs=self.logs)


class EngineBench:
    """One engine of one shape: cold, repeats and hits, then requests that arrive while it decodes."""

    def __init__(self, bench: Bench, job: Job) -> None:
        self._bench = bench
        self._job = job
        self._shape = SHAPES[job.shape]
        fills = min(self._shape.fills, bench.scale.fills)
        self._seeds = range(FILL_SEED, FILL_SEED + fills)
        self._repeated = list(self._seeds[: bench.scale.repeats])
        self._arm = Arm()
        self._daemon: Daemon | None = None

    def run(self) -> Iterator[None]:
        job, bench = self._job, self._bench
        bench.tell(job.name)
        disk = bench.disk_of(job.shape) if job.engine == "kvtally" and job.repeat else None
        with ExitStack() as stack:
            if job.engine == "kvtally":
                self._daemon = stack.enter_context(bench.store(job.shape, f"{job.shape}-store", disk))
            store = self._daemon.socket if self._daemon is not None else ""
            child, start_s = bench.start(job, job.name, store, stack)
            bench.tell(f"  started in {start_s:.0f} s")
            if self._daemon is not None:
                self._daemon.wait_populated()
            self._warm_up(child)
            yield
            if job.repeat:
                self._arm.start_s = start_s
                yield from self._repeat(child)
            if job.busy:
                yield from self._busy(child)
            if disk is not None:
                self._settle(child)
        if disk is not None:
            self._from_disk(disk)

    # ---- one request at a time

    def _warm_up(self, child: EngineProcess) -> None:
        """Do everything once before it is timed: kernels get compiled, memory gets pinned."""
        for seed in WARM_UP_SEEDS:
            self._ask(child, seed)
            self._settle(child)
            self._ask(child, seed, forget=True)
            self._ask(child, seed)

    def _repeat(self, child: EngineProcess) -> Iterator[None]:
        figures, arm = self._bench.figures, self._arm
        shape = figures.repeat.setdefault(self._job.shape, Repeat())
        shape.prompt_tokens, shape.fills = self._shape.prompt_tokens, len(self._seeds)
        shape.place(self._job.engine, arm)
        yield from self._cold(child, self._seeds)
        halves: dict[str, list[Half]] = {"repeat": [], "gpu_hit": []}
        with ExitStack() as stack:
            book = stack.enter_context(Ledger(self._daemon)) if self._daemon is not None else None
            for seed in self._repeated * self._bench.scale.rounds:
                for way in halves:
                    self._note(way, seed, self._ask(child, seed, forget=way == "repeat"))
                    if book is not None:
                        halves[way].append(book.next_half(self._shape.prompt_tokens, timeout_s=RECEIPT_S))
                yield
        arm.receipts = {way: view(each) for way, each in halves.items() if each}
        more = min(self._shape.more_cold, self._bench.scale.more_cold)
        yield from self._cold(child, range(MORE_SEED, MORE_SEED + more))
        self._bench.publish()
        self._bench.tell(
            f"{self._job.name}: cold {arm.cold_s * 1e3:.1f} ms, repeat {arm.repeat_s * 1e3:.1f} ms "
            f"({arm.repeat_cached_tokens:,} cached), GPU hit {arm.gpu_hit_s * 1e3:.1f} ms"
        )

    def _cold(self, child: EngineProcess, seeds: Sequence[int]) -> Iterator[None]:
        row = self._bench.scale.cold_row
        for first in range(0, len(seeds), row):
            for seed in seeds[first : first + row]:
                self._note("cold", seed, self._ask(child, seed, drain=False))  # saves go on in the next, as under load
            self._arm.saved_bytes = self._settle(child)
            self._bench.publish()
            yield

    def _from_disk(self, disk: Path) -> None:
        """Store and engine anew: the first repeats come from disk."""
        job, bench = self._job, self._bench
        bench.tell(f"{job.shape}, {job.engine}, after a restart, from disk")
        drop_pages(disk)
        halves, answers, limits = [], [], []
        with ExitStack() as stack:
            self._daemon = stack.enter_context(bench.store(job.shape, f"{job.shape}-restarted", disk))
            # A fast GPU computes a prompt sooner than this disk reads it; the connector would rightly leave it there.
            child, _ = bench.start(job, f"{job.name}, restarted", self._daemon.socket, stack, always_load=True)
            self._daemon.wait_populated()
            self._ask(child, FILL_SEED - 1)
            self._settle(child)
            self._ask(child, FILL_SEED - 1, forget=True)
            with Ledger(self._daemon) as book, direct_reads(disk.parent) as read:
                for seed in self._repeated:
                    limits.append(read())
                    answers.append(self._ask(child, seed))
                    halves.append(book.next_half(self._shape.prompt_tokens, timeout_s=RECEIPT_S))
        bench.figures.repeat[job.shape].disk = disk_arm([answer.seconds for answer in answers], halves, limits)

    def _ask(self, child: EngineProcess, seed: int, *, forget: bool = False, drain: bool = True) -> Answer:
        ask = Ask(seed=seed, tokens=self._shape.prompt_tokens, forget=forget, drain=drain)
        return child.ask(ask, Answer, ASK_S)

    def _note(self, way: str, seed: int, answer: Answer) -> None:
        self._arm.samples.setdefault(way, []).append(answer.seconds)
        self._arm.cached_tokens.setdefault(way, []).append(answer.cached_tokens)
        self._arm.first_tokens.setdefault(str(seed), []).append(answer.tokens[0])

    def _settle(self, child: EngineProcess) -> int:
        """Wait until everything is saved. The bytes that the store has taken so far."""
        for turn in range(SETTLE_TURNS):
            child.ask(Settle(), Answer, ASK_S)
            if self._daemon is None:
                return 0
            try:
                with Ledger(self._daemon) as book:
                    return book.wait_saved()
            except TransportError:
                if turn == SETTLE_TURNS - 1:
                    raise
        raise AssertionError

    # ---- requests that arrive while others decode

    def _busy(self, child: EngineProcess) -> Iterator[None]:
        shape, figures = self._shape, self._bench.figures
        busy = figures.busy.setdefault(self._job.shape, Busy())
        busy.requests, busy.prompt_tokens, busy.decodes = shape.busy_requests, shape.busy_prompt_tokens, DECODES
        seeds = list(range(BUSY_SEED, BUSY_SEED + shape.busy_requests))
        for seed in seeds:
            child.ask(Ask(seed=seed, tokens=shape.busy_prompt_tokens, drain=False), Answer, ASK_S)
        self._settle(child)
        arm = BusyArm()
        busy.place(self._job.engine, arm)
        found: dict[Source, list[Watched]] = {source: [] for source in Source}
        for number in range(self._bench.scale.busy_rounds + 1):
            for place, source in enumerate(Source):
                first = DECODE_SEED + DECODES * (number * len(Source) + place)  # new ones: nobody has their KV
                watch = Watch(
                    source=source,
                    seeds=seeds,
                    tokens=shape.busy_prompt_tokens,
                    decode_seeds=list(range(first, first + DECODES)),
                    bus_bytes=shape.busy_bytes * len(seeds),
                )
                watched = child.ask(watch, Watched, WATCH_S)
                self._settle(child)
                if number:  # the first round warms up
                    found[source].append(watched)
                yield
        for source, rounds in found.items():
            arm.itl[source] = latency([gap for each in rounds for gap in each.gaps_s])
            arm.itl_rounds_ms[source] = [statistics.fmean(each.gaps_s) * 1e3 for each in rounds]
            if source is not Source.ALONE:
                arm.ttft[source] = latency([first for each in rounds for first in each.firsts_s])
                arm.cached_tokens[source] = min(count for each in rounds for count in each.cached_tokens)
        self._bench.publish()


def disk_arm(seconds: Sequence[float], halves: Sequence[Half], limits_gbps: Sequence[float]) -> DiskArm:
    """What came from disk, over the time it took, beside what that disk could do in between."""
    seen = view(halves)
    repeat_s = statistics.median(seconds)
    gbps = seen.moved_bytes / repeat_s / 1e9
    staged_gbps = seen.moved_bytes / seen.wait_ms / 1e6 if seen.wait_ms > 0 else 0.0
    limit_gbps = statistics.median(limits_gbps)
    return DiskArm(
        repeat_s=repeat_s,
        cached_tokens=int(statistics.median([half.reused_tokens for half in halves])),
        moved_bytes=seen.moved_bytes,
        gbps=gbps,
        staged_gbps=staged_gbps,
        limit_gbps=limit_gbps,
        ratio=gbps / limit_gbps,
        staged_ratio=staged_gbps / limit_gbps,
        receipt=seen,
        samples=list(seconds),
        limit_samples=list(limits_gbps),
    )
