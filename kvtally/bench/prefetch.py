"""`kvtally bench prefetch`: what early prefetch is worth when the running queue is full and KV lies on a slow disk.

    fillers fill the running queue ─▶ a burst of prompts arrives ─▶ … ─▶ the fillers end ─▶ time to each first token
      on        looked up and staged on arrival            off       looked up when the scheduler comes
      arena     everything is in host memory already       no store  computed by an engine without a connector

Before each burst from disk the store is restarted, so that its arena is empty, and so is the engine's own prefix cache.
The store throttles its disk (`--disk-read-limit`) to a speed at which loading one prompt takes as long as computing
two, then to four times that speed, then not at all. `on` and `off` always load. Apart from them, one request at a time,
an engine weighs loading against computing, with a disk of 1 MB/s or less and with a fast one. Bursts of prompts that
the store does not have show what prefetch costs where it cannot help.

Owns the plan. Engines are `engine`, stores `daemon`; `prefetch_report` says what the figures mean. One engine computes
at a time, and arms alternate within each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from kvtally.bench.command import command_line, in_turn, measure
from kvtally.bench.daemon import Daemon, Ledger, drop_pages
from kvtally.bench.engine import Answer, Burst, Bursted, EngineProcess, Served
from kvtally.bench.prefetch_report import Figures, Speed, Times, judge, page, same_queue_ratio, times
from kvtally.bench.repeat_report import Outputs, agreement
from kvtally.config.units import human_size
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB

FIRST_SEED = 5_000
PARTS = ("bursts", "nothing", "weighing")
WARM_UP_SEED = 1
WARM_UP_TOKENS = 300
ARENA_BYTES = 512 * MIB
SLOW_BYTES_S = 1_000_000  # or slower, where computing is so slow that loading at this speed would pay
SLOW_LOADS = 4.0  # loading from a slow disk takes this much longer than computing
COMPUTES_PER_LOAD = 2.0  # computing this many prompts takes as long as loading one
SPARE = 1.15  # the queue is full for this much longer than all loads take
PROBED_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of the engines."""

    served: Served
    requests: int
    fillers: int
    rounds: int
    parts: frozenset[str]


class Samples:
    """What the bursts of one part took, by arm."""

    def __init__(self) -> None:
        self._bursts: defaultdict[str, list[Bursted]] = defaultdict(list)

    def take(self, arm: str, engine: EngineProcess, burst: Burst) -> Bursted:
        found = engine.burst(burst)
        self._bursts[arm].append(found)
        return found

    def times(self) -> dict[str, Times]:
        return {
            arm: times(
                [answer.seconds for burst in bursts for answer in burst.answers],
                [burst.queue_s for burst in bursts],
                [burst.cpu_s for burst in bursts],
                [burst.connector_cpu_s for burst in bursts],
            )
            for arm, bursts in self._bursts.items()
        }


class Experiment:
    """One run."""

    def __init__(self, scale: Scale, directory: Path, tell: Console) -> None:
        self._scale = scale
        self._directory = directory
        self._tell = tell
        self._figures = Figures(
            cpus=len(os.sched_getaffinity(0)),
            load_at_start=os.getloadavg()[0],
            rounds=scale.rounds,
            requests=scale.requests,
            fillers=scale.fillers,
            prompt_tokens=scale.served.prompt_tokens,
        )
        self._seeds = list(range(FIRST_SEED, FIRST_SEED + scale.requests))
        self._next_seed = 100_000
        self._filler_tokens = 0
        self._outputs: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._stack = ExitStack()
        self._daemon: Daemon

    def run(self) -> Figures:
        with self._stack, ExitStack() as engines:
            self._restart(0)
            plain = engines.enter_context(self._engine("plain", ""))
            self._figures.engine = plain.ready.engine
            self._figures.model = self._scale.served.model_name(plain.ready)
            with (
                self._engine("on", self._daemon.socket, always_load=True) as on,
                self._engine("off", self._daemon.socket, always_load=True, prefetch=False) as off,
            ):
                self._calibrate(plain, on)
                full = self._figures.prompt_bytes / self._figures.compute_s / COMPUTES_PER_LOAD
                if "bursts" in self._scale.parts:
                    speeds = {"load = 2 × compute": full, "load = ½ × compute": 4 * full, "fast": 0}
                    for name, disk_bytes_s in speeds.items():
                        self._figures.speeds.append(self._bursts(name, int(disk_bytes_s), plain, on, off))
                if "nothing" in self._scale.parts:
                    self._nothing(on, off)
            if "weighing" in self._scale.parts:
                with self._engine("weighing", self._daemon.socket) as weighing:
                    self._weigh(plain, weighing)
        self._conclude()
        return self._figures

    # ---- parts

    def _engine(self, name: str, store: str, **settings: bool) -> EngineProcess:
        self._say(f"starting an engine ({name})")
        patient = {"wait_ms": 60_000, **settings} if settings else {}
        return self._scale.served.start(self._directory, name, store, patient, max_num_seqs=self._scale.fillers)

    def _restart(self, disk_bytes_s: int) -> None:
        """Another store on the same disk: nothing is in its arena."""
        self._stack.close()
        disk = self._directory / "disk"
        if disk.exists():
            drop_pages(disk)
        limit = disk_bytes_s or None
        daemon = Daemon(self._directory, "store", memory_bytes=ARENA_BYTES, disk=disk, disk_read_bytes_s=limit)
        self._daemon = self._stack.enter_context(daemon)
        daemon.wait_populated()

    def _warm(self, engine: EngineProcess) -> None:
        """Let it find the store, and do everything once before it is timed."""
        tokens = min(WARM_UP_TOKENS, self._scale.served.prompt_tokens)
        for _ in range(2):
            engine.burst(Burst(seeds=[WARM_UP_SEED], tokens=tokens))

    def _calibrate(self, plain: EngineProcess, on: EngineProcess) -> None:
        """Find how long a prompt takes to compute, how large it is, and how long fillers must run."""
        self._say("calibrating")
        with Ledger(self._daemon) as ledger:
            for engine in (plain, on):
                self._warm(engine)
            before_bytes = ledger.wait_saved()
            on.burst(self._prompts(self._seeds))
            self._figures.prompt_bytes = (ledger.wait_saved() - before_bytes) // self._scale.requests
            self._check_room()
        alone = [plain.burst(self._prompts([seed])).answers[0].seconds for seed in self._fresh(5)]
        self._figures.compute_s = statistics.median(alone)
        step_s = plain.burst(self._queued([], PROBED_TOKENS)).filler_s / PROBED_TOKENS
        needed_s = SPARE * COMPUTES_PER_LOAD * self._scale.requests * self._figures.compute_s
        self._filler_tokens = max(PROBED_TOKENS, int(needed_s / step_s))
        told = f"{self._figures.compute_s:.2f} s for {self._figures.prompt_bytes:,} bytes"
        self._say(f"a prompt takes {told}; fillers of {self._filler_tokens} tokens for {needed_s:.1f} s")

    def _fresh(self, count: int) -> list[int]:
        """Seeds that nobody has used."""
        self._next_seed += count
        return list(range(self._next_seed - count, self._next_seed))

    def _prompts(self, seeds: Sequence[int]) -> Burst:
        return Burst(seeds=list(seeds), tokens=self._scale.served.prompt_tokens)

    def _queued(self, seeds: Sequence[int], filler_tokens: int) -> Burst:
        """Prompts that arrive when the running queue is full."""
        fillers = self._fresh(self._scale.fillers)
        return replace(self._prompts(seeds), fillers=fillers, filler_tokens=filler_tokens)

    def _bursts(
        self, name: str, disk_bytes_s: int, plain: EngineProcess, on: EngineProcess, off: EngineProcess
    ) -> Speed:
        samples = Samples()

        def take(arm: str, engine: EngineProcess) -> None:
            found = samples.take(arm, engine, self._queued(self._seeds, self._filler_tokens))
            mean_s = statistics.mean(answer.seconds for answer in found.answers)
            self._say(f"{name}: {arm} {mean_s:.2f} s, the queue was full for {found.queue_s:.2f} s")
            for seed, answer in zip(self._seeds, found.answers, strict=True):
                self._compare(seed, answer, is_reference=engine is plain)
            self._figures.queue_s = found.queue_s

        for number in range(self._scale.rounds):
            for arm, engine in in_turn(number, [("off", off), ("on", on)]):
                self._restart(disk_bytes_s)
                self._warm(engine)
                take(arm, engine)
                if arm == "on":
                    take("arena", on)
            take("no_store", plain)
        found = samples.times()
        arms = {arm: found[arm] for arm in ("on", "off", "arena", "no_store")}
        return Speed(name=name, disk_bytes_s=disk_bytes_s, arms=arms)

    def _nothing(self, on: EngineProcess, off: EngineProcess) -> None:
        """Prompts that nobody has saved."""
        samples = Samples()
        for number in range(2 * self._scale.rounds):
            for arm, engine in in_turn(number, [("off", off), ("on", on)]):
                self._say(f"nothing saved: {arm}")
                samples.take(arm, engine, self._queued(self._fresh(self._scale.requests), self._filler_tokens // 4))
        self._figures.nothing = samples.times()

    def _weigh(self, plain: EngineProcess, weighing: EngineProcess) -> None:
        """One request at a time, as in an engine that has nothing else to do."""
        samples = Samples()
        for arm, disk_bytes_s in (("slow disk", self._slow_bytes_s()), ("fast disk", 0)):
            self._restart(disk_bytes_s)
            self._warm(weighing)
            weighing.burst(self._prompts(self._fresh(3)))  # it learns its own speed
            with Ledger(self._daemon) as ledger:
                for seed in self._seeds:
                    self._say(f"one at a time: {arm}")
                    (computed,) = samples.take("no_store", plain, self._prompts([seed])).answers
                    self._compare(seed, computed, is_reference=True)
                    (answer,) = samples.take(arm, weighing, self._prompts([seed])).answers
                    self._compare(seed, answer, is_reference=False)
                    half = ledger.next_half()
                    if disk_bytes_s:
                        self._figures.slow_tier_left_tokens = half.left_tokens
                    else:
                        self._figures.fast_tier_disk_tokens = half.tokens_disk
        self._figures.single = samples.times()

    def _compare(self, seed: int, answer: Answer, *, is_reference: bool) -> None:
        outputs = self._outputs[seed]
        (outputs.references if is_reference else outputs.restored).append(answer)

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
            slow, computed = figures.single["slow disk"], figures.single["no_store"]
            figures.slow_tier_over_no_store = slow.p50_s / computed.p50_s
        figures.outputs_equal = not self._outputs or agreement(list(self._outputs.values())).is_equal
        figures.targets = judge(figures)

    def _check_room(self) -> None:
        """Nothing may be evicted from the arena before it is asked for."""
        needed = self._figures.prompt_bytes * self._scale.requests
        if needed > ARENA_BYTES * 3 // 4:
            raise ConfigError(
                f"the prompts have {human_size(needed)} of KV, the arena has {human_size(ARENA_BYTES)}",
                remedy="Give fewer --requests or --prompt-tokens, or a smaller model.",
            )

    def _say(self, what: str) -> None:
        self._tell.print(what, style="dim")


# ---- the command


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether outputs were equal, not whether targets were met."""
    options = _parser().parse_args(arguments)
    scale, console = _scale(options), Console(stderr=True, highlight=False)
    figures = measure(options, lambda directory: Experiment(scale, directory, console).run(), page)
    return 0 if figures.outputs_equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "prefetch",
        "Measure what early prefetch is worth: a burst of prompts whose KV lies on a slow disk arrives "
        "while vLLM's running queue is full. Times the first tokens with prefetch on, with it off, with all KV in the "
        "arena, and without a store. Needs vLLM; takes about half an hour on a CPU.",
    )
    Served.add_options(parser)
    parser.add_argument("--requests", metavar="N", type=int, default=6, help="prompts in a burst (default: 6)")
    parser.add_argument(
        "--fillers", metavar="N", type=int, default=4, help="requests that fill the running queue (default: 4)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="bursts of each arm and speed (default: 3)")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this part; may be repeated")
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    if min(options.requests, options.fillers, options.rounds) < 1:
        raise ConfigError(
            "there must be at least one request, one filler and one round",
            remedy="Give --requests, --fillers and --rounds 1 or more.",
        )
    return Scale(
        served=Served.of(options),
        requests=options.requests,
        fillers=options.fillers,
        rounds=options.rounds,
        parts=frozenset(options.part or PARTS),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
