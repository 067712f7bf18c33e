"""`kvtally bench route`: what the router costs, beside the engine alone and beside a proxy that does nothing.

    added TTFT   one request at a time: router │ the engine asked directly (for P/D: both legs by the client itself)
    requests/s   32 clients: router │ a minimal aiohttp pass-through
    streams      500 at once, held for a minute: errors, and the router's memory

Everything is a process of its own: a real store, a fake engine that files receipts into it, routers, the pass-through,
and the load. Samples of what is compared alternate, so that a noisy neighbour disturbs both; latency is the median of
the quietest block, throughput that of the best window. Owns the plan and the figures; the parts are `route_parts`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import RenderableType

from kvtally.bench import report
from kvtally.bench.command import command_line, measure
from kvtally.bench.daemon import Daemon
from kvtally.bench.report import Row, Run, rows_table
from kvtally.bench.route_parts import Outcome, Task
from kvtally.processes import Child, Process, Worker, free_ports
from kvtally.up.host import direct
from kvtally.wire.limits import MIB

START_S = 30.0
TASK_S = 300.0
PERIOD_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    blocks: int = 24
    requests_per_block: int = 40
    windows: int = 12
    window_s: float = 1.0
    clients: int = 32
    streams: int = 500
    hold_s: float = 60.0


QUICK = Scale(blocks=3, requests_per_block=20, windows=2, window_s=0.5, clients=8, streams=50, hold_s=2.0)


class Target(report.Target, frozen=True, kw_only=True):
    """Here keys are also the names that people read, and JSON calls them so."""

    key: str = msgspec.field(name="name")


class Figures(Run, kw_only=True):
    """What --json prints."""

    quick: bool
    cpus: int
    ttft_ms_p50: dict[str, float] = {}  # by what was asked: the median of the quietest block
    ttft_ms_p50_all: dict[str, float] = {}  # the median of all blocks
    added_ttft_ms_p50: float = 0.0  # the larger of the next two
    added_ttft_plain_ms_p50: float = 0.0  # one leg: the engine computes alone, and files its receipt
    added_ttft_pd_ms_p50: float = 0.0  # prefill, hand-off, decode, both halves matched
    added_ttft_passthrough_ms_p50: float = 0.0
    rps: float = 0.0  # of the best window
    rps_passthrough: float = 0.0
    rps_pd: float = 0.0  # two legs for each request
    rps_ratio: float = 0.0
    rps_ratio_p50: float = 0.0  # the median of windows next to each other
    cpu_us_per_request: dict[str, float] = {}
    streams_held: int = 0
    streams_asked: int = 0
    held_s: float = 0.0
    memory_bytes_begin: int = 0  # of the router, when all streams are there
    memory_bytes_end: int = 0
    errors: int = 0
    verdicts: dict[str, int] = {}  # what the routers proved meanwhile
    targets: list[Target] = []


class Listening(NamedTuple):
    """A process, and the port it listens on."""

    process: Process
    port: int


class Bench:
    """All processes of one run, and the samples taken from them."""

    def __init__(self, stack: ExitStack, directory: Path, scale: Scale, figures: Figures) -> None:
        self._stack, self._directory, self._scale, self._figures = stack, directory, scale, figures
        store = stack.enter_context(Daemon(directory, "store", memory_bytes=64 * MIB))
        self._engine = self._listening("engine", store.socket)
        other = self._listening("engine", store.socket)
        self._passthrough = self._listening("passthrough", f"http://127.0.0.1:{self._engine.port}")
        decode = ("--decode", f"http://127.0.0.1:{self._engine.port},store={store.socket}")
        prefill = ("--prefill", f"http://127.0.0.1:{other.port},store={store.socket}", "--prefill-from", "0")
        self._router = self._routing("router", *decode)
        self._pd = self._routing("router-pd", *decode, *prefill)
        self._load = self._part("load")

    def _part(self, *words: str) -> Worker:
        log = self._directory / "parts.log"
        return self._stack.enter_context(Worker("kvtally.bench.route_parts", *words, log=log, name=f"the {words[0]}"))

    def _listening(self, *words: str) -> Listening:
        """An engine or a pass-through; its first reply is its port."""
        part = self._part(*words)
        return Listening(part, part.receive(int, START_S))

    def _routing(self, name: str, *flags: str) -> Listening:
        """A router that has found its engines."""
        [port] = free_ports(1)
        salt = str(self._directory / "salt")
        command = [sys.executable, "-m", "kvtally", "route", "--listen", f"127.0.0.1:{port}", "--salt-file", salt]
        log = self._directory / f"{name}.log"
        router = self._stack.enter_context(Child([*command, *flags], log, name="a router"))
        router.wait_for(lambda: _has_engines(port), "a router did not start", START_S, every_s=0.05)
        return Listening(router, port)

    def _ask(self, task: Task) -> Outcome:
        return self._load.ask(task, Outcome, TASK_S)

    def run(self) -> None:
        for part in (self._router, self._pd, self._passthrough):
            self._ask(Task(part.port, clients=4, count=50))  # warm up
        self._first_bytes()
        self._throughput()
        self._streams()
        for router in (self._router, self._pd):
            for name, count in _verdicts(router.port).items():
                self._figures.verdicts[name] = self._figures.verdicts.get(name, 0) + count

    def _first_bytes(self) -> None:
        cases = {
            "direct": Task(self._engine.port),
            "router": Task(self._router.port),
            "passthrough": Task(self._passthrough.port),
            "direct, both legs": Task(self._engine.port, legs=2),
            "router, P/D": Task(self._pd.port),
        }
        medians: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(self._scale.blocks):
            for name, task in cases.items():
                asked = msgspec.structs.replace(task, count=self._scale.requests_per_block)
                outcome = self._count(self._ask(asked))
                medians[name].append(statistics.median(outcome.first_byte_ms))
        quiet = {name: min(values) for name, values in medians.items()}
        figures = self._figures
        figures.ttft_ms_p50 = quiet
        figures.ttft_ms_p50_all = {name: statistics.median(values) for name, values in medians.items()}
        figures.added_ttft_plain_ms_p50 = quiet["router"] - quiet["direct"]
        figures.added_ttft_pd_ms_p50 = quiet["router, P/D"] - quiet["direct, both legs"]
        figures.added_ttft_passthrough_ms_p50 = quiet["passthrough"] - quiet["direct"]
        figures.added_ttft_ms_p50 = max(figures.added_ttft_plain_ms_p50, figures.added_ttft_pd_ms_p50)

    def _throughput(self) -> None:
        parts = {"passthrough": self._passthrough, "router": self._router, "router, P/D": self._pd}
        rates: dict[str, list[float]] = {name: [] for name in parts}
        costs: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(self._scale.windows):
            for name, part in parts.items():
                begun_s = part.process.cpu_s
                task = Task(part.port, clients=self._scale.clients, seconds=self._scale.window_s)
                outcome = self._count(self._ask(task))
                rates[name].append(outcome.answers / outcome.elapsed_s)
                costs[name].append((part.process.cpu_s - begun_s) / max(outcome.answers, 1) * 1e6)
        figures = self._figures
        figures.rps, figures.rps_passthrough = max(rates["router"]), max(rates["passthrough"])
        figures.rps_pd = max(rates["router, P/D"])
        figures.rps_ratio = figures.rps / figures.rps_passthrough
        pairs = zip(rates["router"], rates["passthrough"], strict=True)
        figures.rps_ratio_p50 = statistics.median(ours / theirs for ours, theirs in pairs)
        figures.cpu_us_per_request = {name: statistics.median(values) for name, values in costs.items()}

    def _streams(self) -> None:
        scale, figures = self._scale, self._figures
        tokens = max(int(scale.hold_s * 1e3 / PERIOD_MS), 1)
        task = Task(self._router.port, clients=scale.streams, count=1, tokens=tokens, period_ms=PERIOD_MS)
        self._load.send(task)
        time.sleep(scale.hold_s / 6)  # all of them are there by then
        figures.memory_bytes_begin = self._router.process.memory_bytes()
        time.sleep(scale.hold_s * 4 / 6)
        figures.memory_bytes_end = self._router.process.memory_bytes()
        outcome = self._count(self._load.receive(Outcome, TASK_S))
        figures.streams_asked, figures.held_s = scale.streams, outcome.elapsed_s
        figures.streams_held = outcome.answers
        if outcome.words != outcome.answers * tokens:
            figures.errors += 1

    def _count(self, outcome: Outcome) -> Outcome:
        self._figures.errors += outcome.errors
        return outcome


def _has_engines(port: int) -> bool:
    try:
        with direct.open(f"http://127.0.0.1:{port}/instances", timeout=1.0) as response:
            return b"unreachable" not in response.read()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _verdicts(port: int) -> dict[str, int]:
    with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as response:
        lines = response.read().decode().splitlines()
    prefix = 'kvtally_router_verdicts_total{verdict="'
    rows = [line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix)]
    return {verdict: int(float(count)) for verdict, count in rows}


def rows(figures: Figures) -> list[Row]:
    """Everything with a target."""
    grown = figures.memory_bytes_end / figures.memory_bytes_begin if figures.memory_bytes_begin else 0.0
    asked, held = figures.streams_asked, figures.streams_held
    # A router that does not wait for receipts is fast. On a busy machine a few of them may come late.
    missing = figures.verdicts.get("missing", 0) / max(1, sum(figures.verdicts.values()))
    without = Row(key="requests without a receipt", value=missing)
    return [
        Row(key="added TTFT, median (ms)", value=figures.added_ttft_ms_p50).at_most(1.0),
        Row(key="requests/s beside the pass-through", value=figures.rps_ratio, unit="×").at_least(0.7),
        Row(key="streams held", value=held).judged(f"= {asked}", held == asked),
        Row(key="memory while held", value=grown, unit="×").at_most(1.05),
        Row(key="errors", value=figures.errors).judged("= 0", figures.errors == 0),
        without.at_most(0.01) if figures.verdicts else without.judged("≤ 0.01", False),
    ]


def page(figures: Figures) -> RenderableType:
    rates = {"router": figures.rps, "pass-through": figures.rps_passthrough, "router, P/D": figures.rps_pd}
    others = [
        *(Row(key=f"first byte, {name}", value=value, unit="ms") for name, value in figures.ttft_ms_p50.items()),
        *(Row(key=f"requests/s, {name}", value=value) for name, value in rates.items()),
        Row(key="router's memory", value=figures.memory_bytes_end / MIB, unit="MiB"),
    ]
    return report.page(figures, [f"{figures.cpus} cores"], rows_table([*rows(figures), *others]))


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether everything could be measured, not whether targets were met."""
    options = _parser().parse_args(arguments)

    def run(directory: Path) -> Figures:
        figures = Figures(quick=options.quick, cpus=len(os.sched_getaffinity(0)))
        with ExitStack() as stack:
            Bench(stack, directory, QUICK if options.quick else Scale(), figures).run()
        figures.targets = Target.of(rows(figures))
        return figures

    measure(options, run, page)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "route",
        "Measure what the router adds to a request and how many it serves, beside an engine that is asked "
        "directly and beside a proxy that does nothing else. Engines are fakes that answer at once. Needs no vLLM. "
        "Takes about three minutes; nothing else should run meanwhile.",
    )
    parser.add_argument("--quick", action="store_true", help="a rough look that takes seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
