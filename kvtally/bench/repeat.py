"""`kvtally bench repeat`: fill an engine with prompts, then repeat them; the time to the first token, wherever KV is.

    engine without a connector   cold · repeat, computed again · repeat, prefix still in the engine
    engine with kvtally          cold · repeat, from the arena · repeat, prefix still in the engine
      … store and engine anew    repeat, from disk

Each prompt goes through both engines in turn, so that a noisy neighbour disturbs both. Before a repeat the engine's own
prefix cache is emptied, as enough other prompts would do. Every answer is compared with that of the engine without a
connector, and the store's receipts say where each repeat's tokens came from.

Owns the plan. Engines (`engine`) and stores (`daemon`) are processes of their own; one engine computes at a time.
`repeat_report` says what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtally.bench.command import Meter, command_line, in_turn, measure, size_of
from kvtally.bench.daemon import Daemon, Ledger, drop_pages
from kvtally.bench.engine import Answer, Ask, EngineProcess, Ready, Served
from kvtally.bench.repeat_report import Figures, Outputs, agreement, judge, page, view
from kvtally.bench.report import median
from kvtally.config.sizes import available_memory_bytes
from kvtally.core.receipts import Half
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB

WARM_UP_SEEDS = (1, 2)
FIRST_SEED = 1_000
CHECKED_PROMPTS = 3  # of these, more than the first token is compared
CHECKED_TOKENS = 16


class Experiment:
    """One run."""

    def __init__(self, served: Served, fills: int, memory_bytes: int, directory: Path) -> None:
        self._served, self._fills, self._memory_bytes, self._directory = served, fills, memory_bytes, directory
        self._meter = Meter(total=3 + 3 * fills)  # three engines are started, each prompt is asked for three times
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._halves: defaultdict[str, list[Half]] = defaultdict(list)
        self._first_tokens: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._outputs: defaultdict[int, Outputs] = defaultdict(Outputs)
        self._seeds = range(FIRST_SEED, FIRST_SEED + fills)
        self._checked = self._seeds[:CHECKED_PROMPTS]
        self._hit_tokens: list[int] = []
        self._saved_bytes = 0
        self._load_at_start = os.getloadavg()[0]

    def run(self) -> Figures:
        with self._meter:
            ready = self._fill_and_repeat()
            drop_pages(self._directory / "disk")
            self._restart_and_repeat()
        return self._figures(ready)

    def _fill_and_repeat(self) -> Ready:
        with (
            self._daemon("first") as daemon,
            Ledger(daemon) as ledger,
            self._engine("plain", "") as plain,
            self._engine("kvtally", daemon.socket) as ours,
        ):
            self._warm_up(plain, ours, ledger)
            self._fill(plain, ours, ledger)
            self._repeat(plain, ours, ledger)
            ledger.wait_saved()
            return ours.ready

    def _restart_and_repeat(self) -> None:
        with (
            self._daemon("second") as daemon,
            Ledger(daemon) as ledger,
            self._engine("restarted", daemon.socket) as ours,
        ):
            self._repeat_from_disk(ours, ledger)

    @contextlib.contextmanager
    def _daemon(self, name: str) -> Iterator[Daemon]:
        disk = self._directory / "disk"
        with Daemon(self._directory, name, memory_bytes=self._memory_bytes, disk=disk) as daemon:
            daemon.wait_populated()
            yield daemon

    def _engine(self, name: str, store: str) -> EngineProcess:
        with self._meter.phase(f"starting an engine ({name})", 1):
            return self._served.start(self._directory, name, store)

    def _warm_up(self, plain: EngineProcess, ours: EngineProcess, ledger: Ledger) -> None:
        """Do everything once before it is timed: the first time is slow, and that is not what is measured."""
        for seed in WARM_UP_SEEDS:
            for forget in (False, True, False):
                plain.generate(self._ask(seed, forget=forget))
                ours.generate(self._ask(seed, forget=forget))
                ledger.next_half()
                ledger.wait_saved()

    def _fill(self, plain: EngineProcess, ours: EngineProcess, ledger: Ledger) -> None:
        before_bytes = ledger.wait_saved()
        for number, seed in enumerate(self._seeds):
            with self._meter.phase("filling", 1):
                for is_ours in in_turn(number, (False, True)):
                    if is_ours:
                        self._take("cold", ours, seed, ledger)
                        self._saved_bytes = ledger.wait_saved() - before_bytes  # before the other engine is timed
                    else:
                        self._take("cold_no_connector", plain, seed)

    def _repeat(self, plain: EngineProcess, ours: EngineProcess, ledger: Ledger) -> None:
        for number, seed in enumerate(self._seeds):
            with self._meter.phase("repeating", 1):
                for is_ours in in_turn(number, (False, True)):
                    if is_ours:
                        self._repeat_ours(ours, seed, ledger)
                    else:
                        self._repeat_plain(plain, seed)

    def _repeat_ours(self, ours: EngineProcess, seed: int, ledger: Ledger) -> None:
        self._take("repeat_arena", ours, seed, ledger, forget=True)
        self._take("gpu_hit_with_connector", ours, seed, ledger)
        if seed in self._checked:
            self._outputs[seed].restored.append(self._check(ours, seed, ledger))
        ledger.wait_saved()

    def _repeat_plain(self, plain: EngineProcess, seed: int) -> None:
        self._take("no_connector_repeat", plain, seed, forget=True)
        self._hit_tokens.append(self._take("gpu_hit", plain, seed).cached_tokens)
        if seed in self._checked:
            own_hit, computed = self._check(plain, seed), self._check(plain, seed, forget=True)
            self._outputs[seed].references += [computed, own_hit]

    def _repeat_from_disk(self, ours: EngineProcess, ledger: Ledger) -> None:
        for seed in WARM_UP_SEEDS:
            ours.generate(self._ask(seed))
            ledger.next_half()
        for seed in self._seeds:
            with self._meter.phase("repeating from disk", 1):
                self._take("repeat_disk", ours, seed, ledger)
                if seed in self._checked:
                    self._outputs[seed].restored.append(self._check(ours, seed, ledger))

    def _ask(self, seed: int, *, forget: bool = False, answer_tokens: int = 1) -> Ask:
        return Ask(seed=seed, tokens=self._served.prompt_tokens, answer_tokens=answer_tokens, forget=forget)

    def _take(
        self, arm: str, engine: EngineProcess, seed: int, ledger: Ledger | None = None, *, forget: bool = False
    ) -> Answer:
        answer = engine.generate(self._ask(seed, forget=forget))
        self._seconds[arm].append(answer.seconds)
        first = self._first_tokens[seed]
        (first.references if ledger is None else first.restored).append(answer)
        if ledger is not None:
            self._halves[arm].append(ledger.next_half())
        return answer

    def _check(self, engine: EngineProcess, seed: int, ledger: Ledger | None = None, *, forget: bool = False) -> Answer:
        """More tokens than one, untimed. With kvtally, they are computed from blocks that were just restored."""
        answer = engine.generate(self._ask(seed, forget=forget, answer_tokens=CHECKED_TOKENS))
        if ledger is not None:
            ledger.next_half()
        return answer

    def _figures(self, ready: Ready) -> Figures:
        found = agreement([*self._first_tokens.values(), *self._outputs.values()])
        arena = view(self._halves["repeat_arena"])
        figures = Figures(
            engine=ready.engine,
            model=self._served.model_name(ready),
            cpus=len(os.sched_getaffinity(0)),
            load_at_start=self._load_at_start,
            fills=self._fills,
            prompt_tokens=self._served.prompt_tokens,
            reused_tokens=int(median([half.reused_tokens for half in self._halves["repeat_arena"]])),
            gpu_hit_tokens=min(self._hit_tokens),
            outputs_equal=found.is_equal,
            logprob_difference=found.difference,
            logprob_difference_own=found.own_difference,
            saved_bytes=self._saved_bytes // self._fills,
            receipts={"arena": arena, "disk": view(self._halves["repeat_disk"])},
            samples=dict(self._seconds),
        )
        for arm, seconds in self._seconds.items():
            setattr(figures, f"{arm}_s", median(seconds))
        figures.repeat_over_gpu_hit = figures.repeat_arena_s / figures.gpu_hit_s
        figures.cold_over_no_connector = figures.cold_s / figures.cold_no_connector_s
        figures.no_connector_over_repeat = figures.no_connector_repeat_s / figures.repeat_arena_s
        figures.targets = judge(figures)
        return figures


# ---- the command


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether outputs were equal, not whether targets were met."""
    options = _parser().parse_args(arguments)
    served = Served.of(options)
    if options.fills < 1:
        raise ConfigError("there must be a prompt", remedy="Give --fills 1 or more.")
    memory_bytes = size_of(options.memory) if options.memory else _default_memory_bytes(served.model)
    figures = measure(options, lambda directory: Experiment(served, options.fills, memory_bytes, directory).run(), page)
    return 0 if figures.outputs_equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "repeat",
        "Fill vLLM with prompts and repeat them. Times the first token: cold, from the arena, from disk, "
        "from the engine's own prefix cache, and in an engine without a connector. Every answer is compared with that "
        "engine's. Needs vLLM; takes about three minutes on a CPU.",
    )
    Served.add_options(parser)
    parser.add_argument("--fills", metavar="N", type=int, default=10, help="how many prompts (default: 10)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="arena of the store (default: 1GiB, or a quarter of RAM with --model)"
    )
    return parser


def _default_memory_bytes(model: str) -> int:
    return max(1024 * MIB, available_memory_bytes() // 4) if model else 1024 * MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
