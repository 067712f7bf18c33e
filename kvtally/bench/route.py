"""`kvtally bench route`: what the router costs, beside the engine alone and beside a proxy that does nothing.

    added TTFT   one request at a time: router │ the engine asked directly (for P/D: both legs by the client itself)
    requests/s   32 clients: router │ a minimal aiohttp pass-through
    streams      500 at once, held for a minute: errors, and the router's memory

Everything is a process of its own: a real store, a fake engine that files receipts into it, routers, the pass-through,
and whoever asks. Samples of what is compared alternate, so that a noisy neighbour hits both; latency is the median of
the quietest block, throughput that of the best window. Owns the plan and the figures; the parts are `route_parts`.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from rich.console import Console
from rich.table import Table

from kvtally import __version__
from kvtally.bench.command import leaving, place
from kvtally.bench.processes import Daemon
from kvtally.bench.route_parts import Outcome, Task
from kvtally.config.units import human_size
from kvtally.errors import TransportError
from kvtally.machine import ending_with_us, free_ports, own_environment
from kvtally.up.machine import direct
from kvtally.wire.limits import MIB

START_S = 30.0
STOP_S = 10.0
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


class Target(msgspec.Struct, frozen=True):
    """What was to be reached, and whether it was."""

    name: str
    value: float
    target: str
    ok: bool


class Figures(msgspec.Struct, kw_only=True):
    """What --json prints."""

    version: str
    quick: bool
    cpus: int
    elapsed_s: float = 0.0
    ttft_ms_p50: dict[str, float] = {}  # by who was asked: the median of the quietest block
    ttft_ms_p50_all: dict[str, float] = {}  # the median of all blocks
    added_ttft_ms_p50: float = 0.0  # the larger of the next two
    added_ttft_plain_ms_p50: float = 0.0  # one leg: the engine computes alone, and files its receipt
    added_ttft_pd_ms_p50: float = 0.0  # prefill, hand-off, decode, both halves matched
    added_ttft_passthrough_ms_p50: float = 0.0
    rps: float = 0.0  # of the best window
    rps_passthrough: float = 0.0
    rps_pd: float = 0.0  # two legs for each request
    rps_ratio: float = 0.0
    rps_ratio_p50: float = 0.0  # the median of windows that followed one another
    cpu_us_per_request: dict[str, float] = {}
    streams_held: int = 0
    streams_asked: int = 0
    held_s: float = 0.0
    memory_bytes_begin: int = 0  # of the router, when all streams are there
    memory_bytes_end: int = 0
    errors: int = 0
    verdicts: dict[str, int] = {}  # what the routers proved meanwhile
    targets: list[Target] = []


class Part:
    """A process that says its port on its first line; its other words go to a file."""

    def __init__(self, directory: Path, *command: str) -> None:
        with (directory / "parts.log").open("ab") as log:
            self.process = subprocess.Popen(
                ending_with_us([sys.executable, "-m", *command]),
                env=own_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        self.port = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def line(self, limit_s: float) -> bytes:
        """The next line it prints."""
        assert self.process.stdout is not None
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        line, deadline = b"", time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise _broken(f"no answer within {limit_s:g} s")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise _broken("a process ended")
            line += part
        return line

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: see proc(5)

    @property
    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


class Load(Part):
    """Whoever asks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "kvtally.bench.route_parts", "load")

    def ask(self, task: Task) -> Outcome:
        self.send(task)
        return self.receive()

    def send(self, task: Task) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(task) + b"\n")

    def receive(self) -> Outcome:
        return msgspec.json.decode(self.line(TASK_S), type=Outcome)


class Bench:
    """All processes of one run, and the samples taken from them."""

    def __init__(self, stack: ExitStack, directory: Path, scale: Scale, figures: Figures) -> None:
        self._scale, self._figures = scale, figures
        store = stack.enter_context(Daemon(directory, "store", memory_bytes=64 * MIB))
        self._engine = self._listening(stack, directory, "engine", store.socket)
        url = f"http://127.0.0.1:{self._engine.port},store={store.socket}"
        other = self._listening(stack, directory, "engine", store.socket)
        self._passthrough = self._listening(stack, directory, "passthrough", f"http://127.0.0.1:{self._engine.port}")
        self._router = _router(stack, directory, "--decode", url)
        pd = ("--prefill", f"http://127.0.0.1:{other.port},store={store.socket}", "--prefill-from", "0")
        self._pd = _router(stack, directory, "--decode", url, *pd)
        self._load = stack.enter_context(Load(directory))

    def run(self) -> None:
        for part in (self._router, self._pd, self._passthrough):
            self._load.ask(Task(part.port, clients=4, count=50))  # warm
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
                outcome = self._count(self._load.ask(asked))
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
                begun_s = part.cpu_s
                task = Task(part.port, clients=self._scale.clients, seconds=self._scale.window_s)
                outcome = self._count(self._load.ask(task))
                rates[name].append(outcome.answers / outcome.elapsed_s)
                costs[name].append((part.cpu_s - begun_s) / max(outcome.answers, 1) * 1e6)
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
        figures.memory_bytes_begin = self._router.memory_bytes
        time.sleep(scale.hold_s * 4 / 6)
        figures.memory_bytes_end = self._router.memory_bytes
        outcome = self._count(self._load.receive())
        figures.streams_asked, figures.held_s = scale.streams, outcome.elapsed_s
        figures.streams_held = outcome.answers
        if outcome.words != outcome.answers * tokens:
            figures.errors += 1

    def _count(self, outcome: Outcome) -> Outcome:
        self._figures.errors += outcome.errors
        return outcome

    def _listening(self, stack: ExitStack, directory: Path, *words: str) -> Part:
        part = stack.enter_context(Part(directory, "kvtally.bench.route_parts", *words))
        part.port = int(part.line(START_S))
        return part


def _router(stack: ExitStack, directory: Path, *flags: str) -> Part:
    """A router, ready. Its request log is read by nobody: it must not wait for that."""
    [port] = free_ports(1)
    words = ("route", "--listen", f"127.0.0.1:{port}", "--salt-file", str(directory / "salt"), *flags)
    part = stack.enter_context(Part(directory, "kvtally", *words))
    part.port = port
    deadline = time.monotonic() + START_S
    while True:
        try:
            with direct.open(f"http://127.0.0.1:{port}/instances", timeout=1.0) as response:
                if b"unreachable" not in response.read():
                    return part
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if time.monotonic() >= deadline or part.process.poll() is not None:
            raise _broken("a router did not start")
        time.sleep(0.05)


def _verdicts(port: int) -> dict[str, int]:
    with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as response:
        lines = response.read().decode().splitlines()
    prefix = 'kvtally_router_verdicts_total{verdict="'
    rows = [line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix)]
    return {verdict: int(float(count)) for verdict, count in rows}


def _broken(what: str) -> TransportError:
    return TransportError(f"{what} in the measurement", remedy="Try again on a quieter machine.")


def judge(figures: Figures) -> list[Target]:
    grown = figures.memory_bytes_end / figures.memory_bytes_begin if figures.memory_bytes_begin else 0.0
    added_ms = figures.added_ttft_ms_p50
    # Who does not wait for receipts is fast: a few may come late on a busy machine, none is another router.
    missing = figures.verdicts.get("missing", 0) / max(1, sum(figures.verdicts.values()))
    return [
        Target("added TTFT, median (ms)", added_ms, "≤ 1", added_ms <= 1.0),
        Target("requests/s beside the pass-through", figures.rps_ratio, "≥ 0.7 ×", figures.rps_ratio >= 0.7),
        Target(
            "streams held",
            figures.streams_held,
            f"= {figures.streams_asked}",
            figures.streams_held == figures.streams_asked,
        ),
        Target("memory while held", grown, "≤ 1.05 ×", grown <= 1.05),
        Target("errors", figures.errors, "= 0", figures.errors == 0),
        Target("requests without a receipt", missing, "≤ 0.01", bool(figures.verdicts) and missing <= 0.01),
    ]


def page(figures: Figures) -> Table:
    table = Table(
        "what", "value", "target", "", box=None, pad_edge=False, title=f"kvtally {__version__} · {figures.cpus} cores"
    )
    for row in figures.targets:
        table.add_row(row.name, f"{row.value:,.3g}", row.target, "ok" if row.ok else "miss")
    for name, value in figures.ttft_ms_p50.items():
        table.add_row(f"first byte, {name}", f"{value:.3f} ms", "", "")
    for name, value in (
        ("router", figures.rps),
        ("pass-through", figures.rps_passthrough),
        ("router, P/D", figures.rps_pd),
    ):
        table.add_row(f"requests/s, {name}", f"{value:,.0f}", "", "")
    table.add_row("router's memory", human_size(figures.memory_bytes_end), "", "")
    return table


def main(arguments: Sequence[str]) -> int:
    """`kvtally bench route`. The exit code says whether it could be measured, not whether targets were met."""
    parser = argparse.ArgumentParser(prog="kvtally bench route", description="Measure what the router costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--quick", action="store_true", help="a look in seconds; figures are rough")
    options = parser.parse_args(arguments)
    figures = Figures(version=__version__, quick=options.quick, cpus=len(os.sched_getaffinity(0)))
    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(leaving())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtally-", dir=place())))
        Bench(stack, directory, QUICK if options.quick else Scale(), figures).run()
    figures.elapsed_s = time.monotonic() - begun
    figures.targets = judge(figures)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n")
    else:
        Console(highlight=False).print(page(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
