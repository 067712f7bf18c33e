"""`kvtally bench repeat`: fill an engine with prompts, then repeat them; the time to the first token, wherever KV is.

    engine without a connector   cold · repeat, computed again · repeat, prefix still in the engine
    engine with kvtally          cold · repeat, from the arena · repeat, prefix still in the engine
      … store and engine anew    repeat, from disk

Each prompt goes through both engines in turn, so that a noisy neighbour hits both. Before a repeat the engine's own
prefix cache is emptied, which is what enough other prompts would do to it. Every answer is compared with that of the
engine without a connector, and the store's receipts say where each repeat's tokens came from.

Owns the plan. Engines (`bench.repeat_engine`) and stores (`bench.processes`) are processes of their own: one engine
computes at a time, every wait has a deadline, all of them end when this one does. `bench.repeat_report` judges.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtally import __version__
from kvtally.bench.child import Child
from kvtally.bench.command import engine_arguments, engine_options, measure
from kvtally.bench.processes import Daemon, drop_pages
from kvtally.bench.repeat_engine import Answer, Ask, Ready, Start
from kvtally.bench.repeat_report import Figures, Outputs, are_equal, difference, judge, own_difference, page, view
from kvtally.cli.render import read_stats
from kvtally.client import Call, Miss, StoreClient
from kvtally.config.sizes import available_memory_bytes
from kvtally.config.units import parse_size
from kvtally.core.receipts import Half, Receipt
from kvtally.errors import ConfigError, TransportError
from kvtally.wire.limits import MIB

START_S = 900.0  # a large model's weights take their time
ASK_S = 300.0
STOP_S = 30.0
SETTLE_S = 60.0
WARM_UP_SEEDS = (1, 2)
FIRST_SEED = 1_000
CHECKED_PROMPTS = 3  # of which more is compared than the first token
CHECKED_TOKENS = 16
LOG_LINES = 8

T = TypeVar("T")


# ---- the processes


class Engine(Child):
    """An engine in a process of its own, ready."""

    program = "kvtally.bench.repeat_engine"

    def __init__(self, python: str, start: msgspec.Struct, log: Path) -> None:
        remedy = (
            "It needs a Python with vLLM, given by --python, and a model that vLLM serves with --engine's settings."
        )
        super().__init__(self.program, log, python=python, what="an engine", remedy=remedy)
        is_ready = False
        try:
            self.ready = self.ask(start, Ready, START_S)
            is_ready = True
        finally:
            if not is_ready:
                self.close()

    def generate(self, ask: Ask) -> Answer:
        answer = self.ask(ask, Answer, ASK_S)
        if answer.error:
            raise self.broken(answer.error)
        return answer


class Ledger:
    """The store as seen by a tool: what requests are said to have reused, and whether it has work left."""

    def __init__(self, daemon: Daemon) -> None:
        self._client = StoreClient(daemon.socket, name="bench repeat")
        self._seen = {receipt.ticket for receipt in self._last()}

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def next_half(self, prompt_tokens: int = 0, *, timeout_s: float = SETTLE_S) -> Half:
        """The account of the request that has just ended; with other requests about, of the one with so many tokens."""
        for _ in _until(timeout_s, "a receipt"):
            for receipt in self._last():
                decode = receipt.decode
                if receipt.ticket in self._seen or decode is None:
                    continue
                if not prompt_tokens or decode.prompt_tokens == prompt_tokens:
                    self._seen.add(receipt.ticket)
                    return decode
        raise AssertionError  # `_until` ends with an error

    def wait_saved(self) -> int:
        """Wait until everything is saved, on disk too; the bytes saved since the start."""
        for _ in _until(SETTLE_S, "everything to be saved"):
            stats = read_stats(self._answer(self._client.stats()).stats)
            is_writing = any(client.puts for client in stats.clients)
            if is_writing or any(tier.queued_bytes or tier.postponed for tier in stats.tiers):
                continue
            for tier in stats.tiers:
                if tier.objects < stats.arena.objects:
                    what = f"tier {tier.name} has {tier.objects} of {stats.arena.objects} objects, and no more to do"
                    raise TransportError(what, remedy="See `kvtally stat`: what does it say of this tier?")
            return stats.puts.bytes
        raise AssertionError

    def _last(self) -> Sequence[Receipt]:
        return self._answer(self._client.receipts(last=4)).receipts

    @staticmethod
    def _answer(call: Call[T]) -> T:
        result = call.wait()
        if isinstance(result, Miss):
            raise TransportError(f"the store does not answer: {result.reason}", remedy="Try a quieter machine.")
        return result


def _until(timeout_s: float, what: str) -> Iterator[None]:
    """Turns of a wait; ends with an error when the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield
        time.sleep(0.005)
    raise TransportError(f"{what} did not come about in {timeout_s:g} s", remedy="Try again on a quieter machine.")


# ---- the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of the engines."""

    python: str
    model: str
    prompt_tokens: int
    fills: int
    memory_bytes: int
    arguments: dict[str, Any]


class Meter:
    """The progress bar."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total)

    def begin(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def advance(self) -> None:
        self._progress.advance(self._task)


class Experiment:
    """One run. `steps` is how many times it advances the meter."""

    def __init__(self, scale: Scale, directory: Path, meter: Meter) -> None:
        self._scale = scale
        self._directory = directory
        self._meter = meter
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._halves: defaultdict[str, list[Half]] = defaultdict(list)
        self._first_tokens: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._outputs: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._seeds = range(FIRST_SEED, FIRST_SEED + scale.fills)
        self._checked = self._seeds[:CHECKED_PROMPTS]
        self._hit_tokens: list[int] = []
        self._saved_bytes = 0
        self._ready = Ready(engine="", model="")

    @staticmethod
    def steps(fills: int) -> int:
        return 3 + 3 * fills

    def run(self) -> Figures:
        with (
            self._daemon("first") as daemon,
            Ledger(daemon) as ledger,
            self._engine("plain", "") as plain,
            self._engine("kvtally", daemon.socket) as ours,
        ):
            self._ready = ours.ready
            self._warm_up(plain, ours, ledger)
            self._fill(plain, ours, ledger)
            self._repeat(plain, ours, ledger)
            ledger.wait_saved()
        drop_pages(self._directory / "disk")
        with (
            self._daemon("second") as daemon,
            Ledger(daemon) as ledger,
            self._engine("restarted", daemon.socket) as ours,
        ):
            self._repeat_from_disk(ours, ledger)
        return self._figures()

    @contextlib.contextmanager
    def _daemon(self, name: str) -> Iterator[Daemon]:
        disk = self._directory / "disk"
        with Daemon(self._directory, name, memory_bytes=self._scale.memory_bytes, disk=disk) as daemon:
            daemon.wait_populated()  # or the store would do it while something is timed
            yield daemon

    def _engine(self, name: str, store: str) -> Engine:
        self._meter.begin(f"starting an engine ({name})")
        start = Start(
            model=self._scale.model,
            scratch=str(self._directory / "models"),
            store=store,
            prompt_tokens=self._scale.prompt_tokens,
            arguments=self._scale.arguments,
        )
        engine = Engine(self._scale.python, start, self._directory / f"{name}.log")
        self._meter.advance()
        return engine

    def _warm_up(self, plain: Engine, ours: Engine, ledger: Ledger) -> None:
        """Every way once that will be timed: what is slow only the first time is nobody's figure."""
        for seed in WARM_UP_SEEDS:
            for forget in (False, True, False):
                plain.generate(self._ask(seed, forget=forget))
                ours.generate(self._ask(seed, forget=forget))
                ledger.next_half()
                ledger.wait_saved()

    def _fill(self, plain: Engine, ours: Engine, ledger: Ledger) -> None:
        self._meter.begin("filling")
        before_bytes = ledger.wait_saved()
        for number, seed in enumerate(self._seeds):
            for is_ours in _in_turn(number):
                if is_ours:
                    self._take("cold", ours, seed, ledger)
                    self._saved_bytes = ledger.wait_saved() - before_bytes  # before the other engine is timed
                else:
                    self._take("cold_no_connector", plain, seed)
            self._meter.advance()

    def _repeat(self, plain: Engine, ours: Engine, ledger: Ledger) -> None:
        self._meter.begin("repeating")
        for number, seed in enumerate(self._seeds):
            for is_ours in _in_turn(number):
                if is_ours:
                    self._take("repeat_arena", ours, seed, ledger, forget=True)
                    self._take("gpu_hit_with_connector", ours, seed, ledger)
                    if seed in self._checked:
                        self._outputs[seed].restored.append(self._check(ours, seed, ledger))
                    ledger.wait_saved()
                else:
                    self._take("no_connector_repeat", plain, seed, forget=True)
                    self._hit_tokens.append(self._take("gpu_hit", plain, seed).cached_tokens)
                    if seed in self._checked:
                        own_hit, computed = self._check(plain, seed), self._check(plain, seed, forget=True)
                        self._outputs[seed].references += [computed, own_hit]
            self._meter.advance()

    def _repeat_from_disk(self, ours: Engine, ledger: Ledger) -> None:
        self._meter.begin("repeating from disk")
        for seed in WARM_UP_SEEDS:
            ours.generate(self._ask(seed))
            ledger.next_half()
        for seed in self._seeds:
            self._take("repeat_disk", ours, seed, ledger)
            if seed in self._checked:
                self._outputs[seed].restored.append(self._check(ours, seed, ledger))
            self._meter.advance()

    def _ask(self, seed: int, *, forget: bool = False, answer_tokens: int = 1) -> Ask:
        return Ask(seed=seed, tokens=self._scale.prompt_tokens, answer_tokens=answer_tokens, forget=forget)

    def _take(
        self, arm: str, engine: Engine, seed: int, ledger: Ledger | None = None, *, forget: bool = False
    ) -> Answer:
        answer = engine.generate(self._ask(seed, forget=forget))
        self._seconds[arm].append(answer.seconds)
        first = self._first_tokens[seed]
        (first.references if ledger is None else first.restored).append(answer)
        if ledger is not None:
            self._halves[arm].append(ledger.next_half())
        return answer

    def _check(self, engine: Engine, seed: int, ledger: Ledger | None = None, *, forget: bool = False) -> Answer:
        """More tokens than one, untimed: with kvtally they come from blocks that were restored just before."""
        answer = engine.generate(self._ask(seed, forget=forget, answer_tokens=CHECKED_TOKENS))
        if ledger is not None:
            ledger.next_half()
        return answer

    def _figures(self) -> Figures:
        median = {arm: statistics.median(seconds) for arm, seconds in self._seconds.items()}
        outputs = [*self._first_tokens.values(), *self._outputs.values()]
        arena = view(self._halves["repeat_arena"])
        figures = Figures(
            version=__version__,
            engine=self._ready.engine,
            model=self._scale.model or f"tiny {Path(self._ready.model).name}",
            fills=self._scale.fills,
            prompt_tokens=self._scale.prompt_tokens,
            reused_tokens=arena.tokens_host + arena.tokens_disk + arena.tokens_gpu,
            gpu_hit_tokens=min(self._hit_tokens),
            cold_s=median["cold"],
            cold_no_connector_s=median["cold_no_connector"],
            repeat_arena_s=median["repeat_arena"],
            repeat_disk_s=median["repeat_disk"],
            gpu_hit_s=median["gpu_hit"],
            gpu_hit_with_connector_s=median["gpu_hit_with_connector"],
            no_connector_repeat_s=median["no_connector_repeat"],
            repeat_over_gpu_hit=median["repeat_arena"] / median["gpu_hit"],
            cold_over_no_connector=median["cold"] / median["cold_no_connector"],
            no_connector_over_repeat=median["no_connector_repeat"] / median["repeat_arena"],
            outputs_equal=are_equal(outputs),
            logprob_difference=max(map(difference, outputs)),
            logprob_difference_own=max(map(own_difference, outputs)),
            saved_bytes=self._saved_bytes // self._scale.fills,
            receipts={"arena": arena, "disk": view(self._halves["repeat_disk"])},
            samples=dict(self._seconds),
        )
        figures.targets = judge(figures)
        return figures


def _in_turn(number: int) -> tuple[bool, bool]:
    """Which engine comes first, ours or the other: each as often, so that being second is nobody's burden."""
    return (True, False) if number % 2 else (False, True)


# ---- the command


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    scale = _scale(options)

    def run(directory: Path) -> Figures:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
            return Experiment(scale, directory, Meter(bar, Experiment.steps(scale.fills))).run()

    return measure(options, run, page)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtally bench repeat",
        description="Fill vLLM with prompts, repeat them, and time the first token: cold, from the arena, from disk, "
        "from the engine's own prefix cache, and without a connector.",
    )
    engine_options(parser)
    parser.add_argument("--fills", metavar="N", type=int, default=10, help="how many prompts (10)")
    parser.add_argument("--memory", metavar="SIZE", help="arena of the store (default: 1GiB, or more for --model)")
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    if options.prompt_tokens < 2 or options.fills < 1:
        raise ConfigError(
            "there must be a prompt, of two tokens or more",
            remedy="Give --prompt-tokens 2 and more, --fills 1 and more.",
        )
    try:
        memory_bytes = parse_size(options.memory) if options.memory else _default_memory_bytes(options.model)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}", remedy="Write it like 2GiB.", code="KV-102") from error
    return Scale(
        python=options.python,
        model=options.model,
        prompt_tokens=options.prompt_tokens,
        fills=options.fills,
        memory_bytes=memory_bytes,
        arguments=engine_arguments(options),
    )


def _default_memory_bytes(model: str) -> int:
    return max(1024 * MIB, available_memory_bytes() // 4) if model else 1024 * MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
