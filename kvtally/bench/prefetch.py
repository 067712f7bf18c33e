"""`kvtally bench prefetch`: what early prefetch is worth when the running queue is full and KV lies on a slow disk.

    fillers fill the running queue ─▶ a burst of prompts arrives ─▶ … ─▶ the fillers end ─▶ time to each first token
      on        looked up and staged on arrival            off       looked up when the scheduler comes
      arena     everything is in host memory already       no store  computed by an engine without a connector

Before each burst from disk the store is started anew, so that nothing is in its arena, and the engine's own prefix
cache is emptied. The disk is throttled by the store (`--disk-read-limit`) to a speed at which loading one prompt takes
as long as computing two, to four times that, and not at all. `on` and `off` load always; apart from them, one request
at a time, loading is weighed against computing with a disk of 1 MB/s or less and with a fast one. Bursts of which the
store has nothing show what prefetch costs where it is good for nothing.

Owns the plan; engines are `bench.prefetch_engine`, stores `bench.processes`; `bench.prefetch_report` judges. One engine
computes at a time, arms alternate within each round, every wait has a deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtally import __version__
from kvtally.bench.command import engine_arguments, engine_options, measure
from kvtally.bench.prefetch_engine import Burst, Bursted
from kvtally.bench.prefetch_report import Figures, Speed, Times, judge, page, same_queue_ratio, times
from kvtally.bench.processes import Daemon, drop_pages
from kvtally.bench.repeat import Engine, Ledger
from kvtally.bench.repeat_engine import Answer, Start
from kvtally.bench.repeat_report import Outputs, are_equal
from kvtally.config.units import human_size
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB

BURST_S = 300.0
FIRST_SEED = 5_000
PARTS = ("bursts", "nothing", "weighing")
WARM_UP_SEED = 1
WARM_UP_TOKENS = 300
ARENA_BYTES = 512 * MIB
SLOW_BYTES_S = 1_000_000  # or slower, where computing is so slow that this would be worth loading from
SLOW_LOADS = 4.0  # loading from a slow disk takes so much longer than computing
COMPUTES_PER_LOAD = 2.0  # computing this many prompts takes as long as loading one
SPARE = 1.15  # the queue is full for so much longer than all loads take
PROBED_TOKENS = 40


class BurstEngine(Engine):
    """An engine that is asked in bursts."""

    program = "kvtally.bench.prefetch_engine"

    def run(self, burst: Burst) -> Bursted:
        found = self.ask(burst, Bursted, BURST_S)
        if found.error:
            raise self.broken(found.error)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of the engines."""

    python: str
    model: str
    prompt_tokens: int
    requests: int
    fillers: int
    rounds: int
    parts: frozenset[str]
    arguments: dict[str, Any]


class Experiment:
    """One run. Each arm's seconds are kept under its name."""

    def __init__(self, scale: Scale, directory: Path, tell: Console) -> None:
        self._scale = scale
        self._directory = directory
        self._tell = tell
        self._figures = Figures(
            version=__version__,
            rounds=scale.rounds,
            requests=scale.requests,
            fillers=scale.fillers,
            prompt_tokens=scale.prompt_tokens,
        )
        self._seeds = list(range(FIRST_SEED, FIRST_SEED + scale.requests))
        self._next_seed = 100_000
        self._filler_tokens = 0
        self._outputs: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._stack = contextlib.ExitStack()
        self._daemon: Daemon | None = None

    def run(self) -> Figures:
        with self._stack, contextlib.ExitStack() as engines:
            self._restart(0)
            plain = engines.enter_context(self._engine("plain", store=False))
            self._figures.engine = plain.ready.engine
            self._figures.model = self._scale.model or f"tiny {Path(plain.ready.model).name}"
            with (
                self._engine("on", always_load=True) as on,
                self._engine("off", always_load=True, prefetch=False) as off,
            ):
                self._calibrate(plain, on)
                full = self._figures.prompt_bytes / self._figures.compute_s / COMPUTES_PER_LOAD
                if "bursts" in self._scale.parts:
                    for name, disk_bytes_s in (
                        ("load = 2 × compute", full),
                        ("load = ½ × compute", 4 * full),
                        ("fast", 0),
                    ):
                        self._figures.speeds.append(self._bursts(name, int(disk_bytes_s), plain, on, off))
                if "nothing" in self._scale.parts:
                    self._nothing(on, off)
            if "weighing" in self._scale.parts:
                with self._engine("weighing") as weighing:
                    self._weigh(plain, weighing)
        self._conclude()
        return self._figures

    # ---- parts

    def _engine(self, name: str, *, store: bool = True, **settings: bool) -> BurstEngine:
        self._say(f"starting an engine ({name})")
        start = Start(
            model=self._scale.model,
            scratch=str(self._directory / "models"),
            store=self._socket if store else "",
            prompt_tokens=self._scale.prompt_tokens,
            arguments={"max_num_seqs": self._scale.fillers, **self._scale.arguments},
            settings={"wait_ms": 60_000, **settings} if settings else {},
        )
        return BurstEngine(self._scale.python, start, self._directory / f"{name}.log")

    @property
    def _socket(self) -> str:
        assert self._daemon is not None
        return self._daemon.socket

    def _restart(self, disk_bytes_s: int) -> None:
        """Another store on the same disk: nothing is in its arena."""
        self._stack.close()
        disk = self._directory / "disk"
        if disk.exists():
            drop_pages(disk)
        self._daemon = self._stack.enter_context(
            Daemon(
                self._directory,
                "store",
                memory_bytes=ARENA_BYTES,
                disk=disk,
                disk_read_bytes_s=disk_bytes_s or None,
            )
        )
        self._daemon.wait_populated()

    def _warm(self, engine: BurstEngine) -> None:
        """Let it find the store; what is slow only the first time is nobody's figure."""
        for _ in range(2):
            engine.run(Burst(seeds=[WARM_UP_SEED], tokens=min(WARM_UP_TOKENS, self._scale.prompt_tokens)))

    def _calibrate(self, plain: BurstEngine, on: BurstEngine) -> None:
        """How long a prompt takes to compute, how large it is, and how long fillers must run."""
        self._say("calibrating")
        assert self._daemon is not None
        with Ledger(self._daemon) as ledger:
            for engine in (plain, on):
                self._warm(engine)
            before_bytes = ledger.wait_saved()
            on.run(Burst(seeds=self._seeds, tokens=self._scale.prompt_tokens))
            self._figures.prompt_bytes = (ledger.wait_saved() - before_bytes) // self._scale.requests
            self._check_room()
        alone = [self._alone(plain, seed).seconds for seed in self._fresh(5)]
        self._figures.compute_s = statistics.median(alone)
        step_s = plain.run(self._burst([], PROBED_TOKENS)).filler_s / PROBED_TOKENS
        needed_s = SPARE * COMPUTES_PER_LOAD * self._scale.requests * self._figures.compute_s
        self._filler_tokens = max(PROBED_TOKENS, int(needed_s / step_s))
        told = f"{self._figures.compute_s:.2f} s for {self._figures.prompt_bytes:,} bytes"
        self._say(f"a prompt takes {told}; fillers of {self._filler_tokens} tokens for {needed_s:.1f} s")

    def _fresh(self, count: int) -> list[int]:
        self._next_seed += count
        return list(range(self._next_seed - count, self._next_seed))

    def _burst(self, seeds: Sequence[int], filler_tokens: int) -> Burst:
        return Burst(
            seeds=list(seeds),
            tokens=self._scale.prompt_tokens,
            fillers=self._fresh(self._scale.fillers),
            filler_tokens=filler_tokens,
        )

    def _alone(self, engine: BurstEngine, seed: int) -> Answer:
        return engine.run(Burst(seeds=[seed], tokens=self._scale.prompt_tokens)).answers[0]

    def _bursts(self, name: str, disk_bytes_s: int, plain: BurstEngine, on: BurstEngine, off: BurstEngine) -> Speed:
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        queues_s: defaultdict[str, list[float]] = defaultdict(list)

        def take(arm: str, engine: BurstEngine) -> None:
            found = engine.run(self._burst(self._seeds, self._filler_tokens))
            seconds[arm] += [answer.seconds for answer in found.answers]
            queues_s[arm].append(found.queue_s)
            mean_s = statistics.mean(answer.seconds for answer in found.answers)
            self._say(f"{name}: {arm} {mean_s:.2f} s, the queue was full for {found.queue_s:.2f} s")
            for seed, answer in zip(self._seeds, found.answers, strict=True):
                outputs = self._outputs[seed]
                (outputs.references if engine is plain else outputs.restored).append(answer)
            self._figures.queue_s = found.queue_s

        for number in range(self._scale.rounds):
            for arm, engine in (("on", on), ("off", off)) if number % 2 else (("off", off), ("on", on)):
                self._restart(disk_bytes_s)
                self._warm(engine)
                take(arm, engine)
                if arm == "on":
                    take("arena", on)
            take("no_store", plain)
        order = ("on", "off", "arena", "no_store")
        return Speed(
            name=name, disk_bytes_s=disk_bytes_s, arms={arm: times(seconds[arm], queues_s[arm]) for arm in order}
        )

    def _nothing(self, on: BurstEngine, off: BurstEngine) -> None:
        """Prompts that nobody has saved."""
        cpu_s: defaultdict[str, list[float]] = defaultdict(list)
        connector_s: defaultdict[str, list[float]] = defaultdict(list)
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        queues_s: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(2 * self._scale.rounds):
            for arm, engine in (("on", on), ("off", off)) if number % 2 else (("off", off), ("on", on)):
                self._say(f"nothing saved: {arm}")
                found = engine.run(self._burst(self._fresh(self._scale.requests), self._filler_tokens // 4))
                seconds[arm] += [answer.seconds for answer in found.answers]
                queues_s[arm].append(found.queue_s)
                cpu_s[arm].append(found.cpu_s)
                connector_s[arm].append(found.connector_cpu_s)
        self._figures.nothing = {
            arm: times(found, queues_s[arm], cpu_s[arm], connector_s[arm]) for arm, found in seconds.items()
        }

    def _weigh(self, plain: BurstEngine, weighing: BurstEngine) -> None:
        """One request at a time, as an engine with nothing else to do sees it."""
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for arm, disk_bytes_s in (("slow disk", self._slow_bytes_s()), ("fast disk", 0)):
            self._restart(disk_bytes_s)
            self._warm(weighing)
            weighing.run(Burst(seeds=self._fresh(3), tokens=self._scale.prompt_tokens))  # it learns its own speed
            assert self._daemon is not None
            with Ledger(self._daemon) as ledger:
                for seed in self._seeds:
                    self._say(f"one at a time: {arm}")
                    computed = self._alone(plain, seed)
                    seconds["no_store"].append(computed.seconds)
                    self._outputs[seed].references.append(computed)
                    answer = self._alone(weighing, seed)
                    seconds[arm].append(answer.seconds)
                    self._outputs[seed].restored.append(answer)
                    half = ledger.next_half()
                    if disk_bytes_s:
                        self._figures.slow_tier_left_tokens = half.left_tokens
                    else:
                        self._figures.fast_tier_disk_tokens = half.tokens_disk
        self._figures.single = {arm: times(found) for arm, found in seconds.items()}

    def _slow_bytes_s(self) -> int:
        worthless = int(self._figures.prompt_bytes / self._figures.compute_s / SLOW_LOADS)
        self._figures.slow_tier_bytes_s = min(SLOW_BYTES_S, worthless)
        return self._figures.slow_tier_bytes_s

    def _conclude(self) -> None:
        figures = self._figures
        if figures.speeds:
            main = figures.speeds[0]
            figures.mean_ttft_on_s = main.arms["on"].mean_s
            figures.mean_ttft_off_s = main.arms["off"].mean_s
            figures.mean_ttft_arena_s = main.arms["arena"].mean_s
            figures.mean_ttft_no_store_s = main.arms["no_store"].mean_s
            figures.gain, figures.on_over_arena = 1 - main.ratio("on", "off"), main.ratio("on", "arena")
            figures.gain_as_measured = 1 - figures.mean_ttft_on_s / figures.mean_ttft_off_s
        if figures.nothing:
            on, off = figures.nothing["on"], figures.nothing["off"]
            figures.nothing_on_over_off = statistics.median(on.cpu_s) / statistics.median(off.cpu_s)
            more_s = statistics.median(on.connector_cpu_s) - statistics.median(off.connector_cpu_s)
            figures.nothing_added_cpu = more_s / statistics.median(off.cpu_s)
            figures.nothing_ttft_on_over_off = same_queue_ratio(figures.nothing, "on", "off")
        if figures.single:
            figures.slow_tier_over_no_store = _ratio(figures.single["slow disk"], figures.single["no_store"])
        figures.outputs_equal = not self._outputs or are_equal(list(self._outputs.values()))
        figures.targets = judge(figures)

    def _check_room(self) -> None:
        """What has left the arena before it is asked for is not what is measured."""
        needed = self._figures.prompt_bytes * self._scale.requests
        if needed > ARENA_BYTES * 3 // 4:
            raise ConfigError(
                f"the prompts have {human_size(needed)} of KV, the arena has {human_size(ARENA_BYTES)}",
                remedy="Give fewer --requests or --prompt-tokens, or a smaller model.",
            )

    def _say(self, what: str) -> None:
        self._tell.print(what, style="dim")


def _ratio(one: Times, other: Times) -> float:
    """Of medians: a neighbour's noise in one request is no cost of ours."""
    return one.p50_s / other.p50_s


# ---- the command


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    scale, console = _scale(options), Console(stderr=True, highlight=False)
    return measure(options, lambda directory: Experiment(scale, directory, console).run(), page)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtally bench prefetch",
        description="Time the first token of prompts whose KV lies on a slow disk, while vLLM's running queue is full: "
        "prefetch on, off, everything in the arena, and without a store.",
    )
    engine_options(parser)
    parser.add_argument("--requests", metavar="N", type=int, default=6, help="prompts in a burst (6)")
    parser.add_argument("--fillers", metavar="N", type=int, default=4, help="requests that fill the running queue (4)")
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="bursts of each arm and speed (3)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    if options.prompt_tokens < 2 or min(options.requests, options.fillers, options.rounds) < 1:
        raise ConfigError(
            "there must be a prompt, of two tokens or more, and one of everything else",
            remedy="Give --prompt-tokens 2 and more, --requests, --fillers and --rounds 1 and more.",
        )
    return Scale(
        python=options.python,
        model=options.model,
        prompt_tokens=options.prompt_tokens,
        requests=options.requests,
        fillers=options.fillers,
        rounds=options.rounds,
        parts=frozenset(options.part or PARTS),
        arguments=engine_arguments(options),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
