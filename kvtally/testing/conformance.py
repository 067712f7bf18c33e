"""Judge a vLLM KV connector: does a request that reuses KV get the answer it would have got without?

    reference     no connector, nothing reused: what every output is compared with
    baseline      no connector, vLLM's own prefix cache: how far reuse alone moves a logprob, and how much is reused
    cold          connector, the engine's own cache reset before every request: what is reused was saved a moment ago
    warm          the same again: everything is in the store
    new engine    the engine restarted; its own cache grows beside the store's, so hits are mixed
    new store     engine and store restarted: from the store's disk

Each arm runs its requests one at a time, then eight others at once. An output conforms if its tokens are those of the
reference and their logprobs are within the tolerance: 1e-3, or the baseline's own deviation if that is larger. The one
exception is a tie: two tokens so close that within the tolerance either may win.

A prompt may also continue where an answer ended. The engine computed that answer's KV token by token, and rounds
differently in one prefill. So an output that reuses all but the last token is compared with the engine's own
continuation, within 1e-3. An output that reuses less may differ by as much as prefill and decode differ in the engine
itself.

A verdict counts only if the test can fail. So the model must notice one changed token; vLLM must say that tokens came
from the connector, and the store must agree; and with one restored block of each kind zeroed, the outputs must differ.

Nothing here knows kvtally's own connector: `ConnectorUnderTest` is all there is to say about one. No threads.
Neighbours: `testing.cases` (what is asked, and what is right), `testing.models`, `testing.engines`. To run it from the
command line: `python -m kvtally.testing.conformance`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvtally.core.answers import TOLERANCE, Comparison, compare
from kvtally.core.namespace import GroupKind
from kvtally.errors import TransportError
from kvtally.testing.cases import (
    DIED,
    Case,
    cases,
    conforms,
    crowd,
    going_on,
    next_turn,
)
from kvtally.testing.engines import Engine, Output, Prompt, Runs
from kvtally.testing.models import RECIPES, VOCABULARY, Model, tiny_models

CHANGED_AT = 3  # the token that is changed to see whether the model notices
SHUFFLES = 3
CUTS = 8  # of an answer, to see by how much prefill and decode differ
MOST_DEATHS = 6  # of engines, before giving up
EXTERNAL = "vllm:external_prefix_cache_hits"

Counters = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorUnderTest:
    """A connector and its backing store. The caller starts and stops the store; the harness only restarts it.

    `counters`: what the store has counted, with at least "saved" and "loaded", in any unit. `restart`: stop the store
    once everything is on disk, and start it from there. `hit_share`: the share of the tokens reused by vLLM's own
    prefix cache that the connector must reuse. `engine`: arguments of `vllm.LLM` that the connector needs.
    """

    name: str
    kv_transfer_config: Mapping[str, Any]
    chunk_tokens: int = 256
    counters: Callable[[], Counters] | None = None
    restart: Callable[[], None] | None = None
    hit_share: float = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


# ---- the report


@dataclass(frozen=True, slots=True)
class Mode:
    """Requests that run one at a time, or all at once, with what they are compared with."""

    name: str
    cases: list[Case]
    reference: list[Output]
    baseline_cached: list[int]
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One arm in one mode. `external_tokens`: vLLM's own count of tokens that came through the connector."""

    arm: str
    mode: str
    outputs: list[Output]
    comparisons: list[Comparison]
    external_tokens: int
    store: dict[str, float]  # by how much the store's counters moved
    problems: list[str]

    @property
    def cached_tokens(self) -> int:
        return sum(output.cached_tokens for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Control:
    """Something was spoilt on purpose. `problem` is set if nobody noticed."""

    name: str
    deviation: float
    problem: str


@dataclass(slots=True)
class Report:
    connector: str
    model: str
    modes: list[Mode] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # engines that ended, arms that could not be run

    @property
    def problems(self) -> list[str]:
        found = [f"{result.arm}, {result.mode}: {text}" for result in self.results for text in result.problems]
        found += [f"{control.name}: {control.problem}" for control in self.controls if control.problem]
        return found + self.errors

    def result(self, arm: str, mode: str) -> Result:
        return next(result for result in self.results if (result.arm, result.mode) == (arm, mode))

    def table(self) -> str:
        """For people."""
        lines = [f"{self.connector} with {self.model}: {'CONFORMS' if not self.problems else 'DOES NOT CONFORM'}"]
        tolerances = ", ".join(f"{mode.name} {mode.tolerance:.2g}" for mode in self.modes)
        if slack := max((case.slack for mode in self.modes for case in mode.cases), default=0.0):
            tolerances += f", after a part of an answer {slack:.2g}"
        lines += [f"tolerance of a logprob: {tolerances}", ""]
        row = "{:<12} {:<9} {:>8} {:>10} {:>5} {:>10} {:>8} {:>9}  {}".format
        lines.append(row("arm", "mode", "requests", "tokens =", "ties", "deviation", "cached", "external", "verdict"))
        for result in self.results:
            done = result.comparisons
            tokens, ties = sum(one.compared_tokens for one in done), sum(one.is_tie for one in done)
            deviation = f"{max((one.deviation for one in done), default=0.0):.1e}"
            verdict = "ok" if not result.problems else f"{len(result.problems)} problems"
            numbers = (len(done), tokens, ties, deviation, result.cached_tokens, result.external_tokens)
            lines.append(row(result.arm, result.mode, *numbers, verdict))
        for control in self.controls:
            verdict = "unnoticed" if control.problem else "noticed"
            lines.append(f"control: {control.name}: {verdict}, deviation {control.deviation:.1e}")
        return "\n".join([*lines, *(f"- {problem}" for problem in self.problems)])


# ---- the run


def judge(
    connector: ConnectorUnderTest,
    model: Model,
    directory: Path,
    *,
    restarted: Callable[..., Runs] = Engine,
) -> Report:
    """Put a connector through every arm with one model. Engines log into `directory`; one lives at a time.

    `restarted` makes the engine of the arm "new engine": a `Server`, or an `Engine` of several processes. In the other
    arms, scheduler and worker share a process.
    """
    return _Trial(connector, model, directory, restarted).run()


class _Seat:
    """An engine and its replacements: if a request kills it, another one serves the remaining requests."""

    def __init__(self, start: Callable[[], Runs], died: Callable[[TransportError], None]) -> None:
        self._start, self._died = start, died
        self.engine = start()
        self._external_tokens = 0  # counted by those that died

    def close(self) -> None:
        self.engine.close()

    def generate(self, cases: Sequence[Case]) -> list[Output]:
        before = self.external_tokens
        try:
            return self.engine.generate([case.prompt() for case in cases])
        except TransportError as error:
            self._died(error)
            self._external_tokens = before
            self.engine.close()
            self.engine = self._start()
            self.engine.wait_ready()
            return [DIED] * len(cases)

    @property
    def external_tokens(self) -> int:
        """vLLM's own count of tokens that came through the connector."""
        return self._external_tokens + int(self.engine.counters().get(EXTERNAL, 0))


class _Trial:
    def __init__(
        self,
        connector: ConnectorUnderTest,
        model: Model,
        directory: Path,
        restarted: Callable[..., Runs],
    ) -> None:
        self._connector, self._model, self._directory, self._restarted = connector, model, directory, restarted
        self._draw = random.Random(f"{model.recipe.name} {model.seed}")
        self._deaths = 0
        self.report = Report(connector.name, model.recipe.name)

    def run(self) -> Report:
        """Starting an engine takes as long as an arm, so the next one starts while this one runs."""
        with ExitStack() as seats:
            reference = self._seat(seats, "reference", connected=False)
            first = self._seat(seats, "cold and warm")
            self._use(reference, "reference", self._measure)
            if len(self.report.modes) < 2:
                return self.report
            second = self._seat(seats, "new engine", make=self._restarted, nursery=1)
            self._use(first, "cold and warm", partial(self._arms, ["cold", "warm"]))
            self._use(second, "new engine", partial(self._arms, ["new engine"]))
            if self._connector.restart is not None:
                self._connector.restart()
            third = self._seat(seats, "new store", nursery=1)
            self._use(third, "new store", self._from_disk)
        return self.report

    def _seat(
        self,
        seats: ExitStack,
        name: str,
        *,
        connected: bool = True,
        make: Callable[..., Runs] = Engine,
        nursery: int = 0,
    ) -> _Seat:
        """`nursery`: an engine that is restarted must not owe its hits to a hash seed shared with the one before."""
        arguments: dict[str, Any] = {**self._model.settings, **self._connector.engine}
        if connected:
            arguments["kv_transfer_config"] = dict(self._connector.kv_transfer_config)
        log = self._directory / f"{self._model.recipe.name} {name}.log"
        start = partial(make, arguments, log, environment=self._connector.environment, nursery=nursery)
        return seats.enter_context(closing(_Seat(start, partial(self._died, name))))

    def _use(self, seat: _Seat, name: str, run: Callable[[_Seat], None]) -> None:
        """Wait until the engine is ready, and use it. If it cannot go on, note that and begin with the next arm."""
        try:
            seat.engine.wait_ready()
            run(seat)
        except TransportError as error:
            self.report.errors.append(f"{name}: {_brief(error)}")
        finally:
            seat.close()

    def _arms(self, names: Sequence[str], seat: _Seat) -> None:
        for name in names:
            self._arm(name, seat, resets=name != "new engine")

    def _from_disk(self, seat: _Seat) -> None:
        if self._connector.restart is not None:
            self._arm("new store", seat, resets=True)
        assert isinstance(seat.engine, Engine)
        for kind in seat.engine.kinds:  # last: what a spoilt request saves is spoilt
            self._control(seat.engine, kind)

    def _died(self, name: str, error: TransportError) -> None:
        self._deaths += 1
        if self._deaths > MOST_DEATHS:
            raise error
        self.report.errors.append(f"{name}: {_brief(error)}")

    def _measure(self, seat: _Seat) -> None:
        """Get reference and baseline from one engine: a request with its own salt reuses nothing."""
        engine = seat.engine
        chunk = self._connector.chunk_tokens
        alone = cases(self._model.recipe, chunk, self._draw)
        reference = self._unshared(engine, alone)
        alone += self._following(engine, alone[-1])
        reference += self._unshared(engine, alone[-2:])
        self._add_mode("alone", seat, alone, reference)
        together = crowd(self._model.recipe, chunk, self._draw)
        reference = engine.generate([case.prompt(f"{case.name} together") for case in together])
        self._add_mode("together", seat, together, reference)
        self._check_sensitivity(engine)

    def _following(self, engine: Runs, first: Case) -> list[Case]:
        """A prompt that continues where the first turn's answer ends, and the next turn."""
        longer = replace(first, name="turn 1 and more", max_tokens=first.max_tokens + 8)
        answer = self._unshared(engine, [longer])[0]
        cuts = [going_on(first, answer, count * first.max_tokens // CUTS) for count in range(1, CUTS + 1)]
        computed = [engine.generate([case.prompt(salt=f"cut {i}")])[0] for i, case in enumerate(cuts)]
        pairs = zip(computed, (case.continuation or DIED for case in cuts), strict=True)
        own = max(compare(*pair, float("inf")).deviation for pair in pairs)
        return [replace(case, slack=own) for case in (cuts[-1], next_turn(first, answer, self._draw))]

    @staticmethod
    def _unshared(engine: Runs, asked: Sequence[Case]) -> list[Output]:
        return [engine.generate([case.prompt(salt=case.name)])[0] for case in asked]

    def _add_mode(self, name: str, seat: _Seat, asked: list[Case], reference: list[Output]) -> None:
        if any(output.cached_tokens for output in reference):
            self.report.errors.append(f"reference, {name}: vLLM reused something, so it cannot be the reference")
        seat.engine.reset()
        passes = [_generate(seat, name, asked, resets=False) for _ in range(2)]
        cached = [output.cached_tokens for output in passes[1]]
        if name == "together":
            passes += [self._shuffled(seat, asked) for _ in range(SHUFFLES)]
        deviations = [
            compare(wanted, got, float("inf")).deviation
            for outputs in passes
            for wanted, got in zip(reference, outputs, strict=True)
        ]
        floor = max([TOLERANCE, *(mode.tolerance for mode in self.report.modes)])
        self.report.modes.append(Mode(name, asked, reference, cached, max(floor, *deviations)))

    def _shuffled(self, seat: _Seat, asked: list[Case]) -> list[Output]:
        """The requests in another order, some a little later. Where prefills are cut, and what else is in a batch,
        moves logprobs too; a connector that loads while others compute changes both."""
        seat.engine.reset()
        order = self._draw.sample(range(len(asked)), len(asked))
        cut = self._draw.randrange(1, len(asked))
        outputs = [*seat.generate([asked[i] for i in order[:cut]]), *seat.generate([asked[i] for i in order[cut:]])]
        return [outputs[order.index(i)] for i in range(len(asked))]

    def _check_sensitivity(self, engine: Runs) -> None:
        alone = self.report.modes[0]
        for case, reference in zip(alone.cases, alone.reference, strict=True):
            if case.name not in ("30", "long"):
                continue
            tokens = list(case.tokens)
            tokens[CHANGED_AT] = (tokens[CHANGED_AT] + 1) % (VOCABULARY - 2)
            changed = engine.generate([Prompt(tokens, case.max_tokens, salt=f"{case.name} changed")])[0]
            self._expect_change(f"token {CHANGED_AT} of {case.name!r} changed", reference, changed)

    def _arm(self, arm: str, seat: _Seat, *, resets: bool) -> None:
        for mode in self.report.modes:
            tokens_before, store_before = seat.external_tokens, self._store_counters()
            if mode.name == "together":
                seat.engine.reset()
            outputs = _generate(seat, mode.name, mode.cases, resets=resets)
            tokens_after, store_after = seat.external_tokens, self._store_counters()
            result = Result(
                arm=arm,
                mode=mode.name,
                outputs=outputs,
                comparisons=[
                    conforms(*each, mode.tolerance) for each in zip(mode.cases, mode.reference, outputs, strict=True)
                ],
                external_tokens=tokens_after - tokens_before,
                store={name: store_after[name] - store_before.get(name, 0) for name in store_after},
                problems=[],
            )
            result.problems.extend(self._problems(result, mode))
            self.report.results.append(result)

    def _problems(self, result: Result, mode: Mode) -> Iterator[str]:
        for case, comparison in zip(mode.cases, result.comparisons, strict=True):
            if comparison.problem:
                yield f"{case.name!r}: {comparison.problem}"
        if result.arm == "cold":
            if result.store and not result.store["saved"] > 0:
                yield "the store says that nothing was saved"
            if self._connector.hit_share and mode.name == "alone" and not result.external_tokens:
                yield "nothing was reused, neither from prompts with the same beginning nor from the turn before"
            return
        if not result.external_tokens:
            yield "vLLM says that nothing came from the connector: this arm proves nothing"
        if result.store and not result.store["loaded"] > 0:
            yield "the store says that nothing was loaded"
        for case, output, most in zip(mode.cases, result.outputs, mode.baseline_cached, strict=True):
            if output.cached_tokens < most * self._connector.hit_share:
                yield f"{case.name!r}: {output.cached_tokens} tokens reused; vLLM's own prefix cache reuses {most}"

    def _store_counters(self) -> Counters:
        return dict(self._connector.counters()) if self._connector.counters is not None else {}

    def _control(self, engine: Engine, kind: GroupKind) -> None:
        """Zero one restored block of this kind: the output must differ. Stop doing so: it must be right again."""
        alone = self.report.modes[0]
        index = next(index for index, case in enumerate(alone.cases) if case.name == "long")
        prompt, reference = alone.cases[index].prompt(), alone.reference[index]
        engine.reset()
        engine.sabotage(kind)
        spoilt = engine.generate([prompt])[0]
        count = engine.sabotage(None)
        name = f"one restored block zeroed, {kind} group"
        if not count:
            self.report.controls.append(Control(name, 0.0, "no block was restored that could be zeroed"))
            return
        self._expect_change(name, reference, spoilt)
        engine.reset()
        healthy = compare(reference, engine.generate([prompt])[0], alone.tolerance)
        if healthy.problem:
            self.report.errors.append(f"after the control of the {kind} group: {healthy.problem}")

    def _expect_change(self, name: str, reference: Output, output: Output) -> None:
        noticed = compare(reference, output, self.report.modes[0].tolerance)
        problem = "" if noticed.problem else "the output did not change: the test is blind"
        self.report.controls.append(Control(name, compare(reference, output, float("inf")).deviation, problem))


def _generate(seat: _Seat, mode: str, asked: Sequence[Case], *, resets: bool) -> list[Output]:
    if mode == "together":
        return seat.generate(asked)
    outputs = []
    for case in asked:
        if resets:
            seat.engine.reset()
        outputs += seat.generate([case])
    return outputs


def _brief(error: TransportError) -> str:
    """The first line, and the last that names an exception."""
    first, *rest = error.message.splitlines()
    last = [line for line in rest if "Error" in line]
    return f"{first}: {last[-1].strip()}" if last else first


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtally.testing.conformance", description="Judge a KV connector.")
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument("kv_transfer_config", help="as vLLM takes it, in JSON")
    parser.add_argument("--engine", default="{}", help="more arguments of vllm.LLM, in JSON")
    parser.add_argument("--directory", type=Path, required=True, help="for models and logs")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = msgspec.json.decode(options.kv_transfer_config)
    engine: dict[str, Any] = msgspec.json.decode(options.engine)
    connector = ConnectorUnderTest(name=config["kv_connector"], kv_transfer_config=config, engine=engine)
    [model] = tiny_models(options.directory / "models", [(RECIPES[options.model], 0)])
    report = judge(connector, model, options.directory)
    sys.stdout.write(report.table() + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
