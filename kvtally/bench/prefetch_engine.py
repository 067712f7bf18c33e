"""The engine's process of `kvtally bench prefetch`: bursts of requests behind a full running queue, timed one by one.

    bench.prefetch ──Start, then Burst after Burst──▶ stdin   ┌ testing.runner.Runner: vllm.LLM, stepped here ┐
                   ◀──Ready, Bursted────────────────  stdout  └ its log is stderr                             ┘

Runs in whichever Python has vLLM. Configured and ended like `bench.repeat_engine`, whose parts it uses. Threading: the
engine runs in the main thread; one more reads stdin.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from kvtally.bench.child import wire
from kvtally.bench.repeat_engine import (
    ENVIRONMENT,
    TOKENS,
    Answer,
    Ready,
    Start,
    arguments_of,
    engine_name,
)
from kvtally.testing.engines import Reset, Settings
from kvtally.testing.runner import Runner

BURST_S = 240.0


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Let `fillers` (seeds of short prompts) generate `filler_tokens` each; when all of them run, add the prompts that
    grow from `seeds`. `forget`: first empty the engine's own prefix cache."""

    seeds: list[int]
    tokens: int
    fillers: list[int] = []
    filler_tokens: int = 0
    forget: bool = True


class Bursted(msgspec.Struct, frozen=True, kw_only=True):
    """For each seed its first token and the time to it. `filler_s`: what the fillers took; `queue_s`: for how long of
    it the seeds' requests were queued behind them."""

    answers: list[Answer] = []
    filler_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float = 0.0  # processor time of the engine's process, its connector included
    connector_cpu_s: float = 0.0  # of it, that of the connector's own threads
    error: str = ""


def connector_cpu_s() -> float:
    """Processor time that kvtally's threads in this process have used so far."""
    spent_ns = 0
    for thread in threading.enumerate():
        if thread.name.startswith("kvtally-"):
            spent_ns += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return spent_ns / 1e9


class Engine:
    """vLLM, stepped by hand."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._number = 0

    def run(self, burst: Burst) -> Bursted:
        if burst.forget:
            error = self._runner.carry_out(Reset()).error
            if error:
                return Bursted(error=error)
        begun, begun_cpu, begun_connector = time.perf_counter(), time.process_time(), connector_cpu_s()
        fillers = {self._add(seed, 32, burst.filler_tokens) for seed in burst.fillers}
        waiting = set(fillers)
        deadline = time.monotonic() + BURST_S
        while waiting and time.monotonic() < deadline:  # until every one of them runs
            waiting -= {output.request_id for output in self._step() if output.outputs[0].token_ids}
        arrival = time.perf_counter()
        added: dict[str, tuple[int, float]] = {}
        for index, seed in enumerate(burst.seeds):
            at = time.perf_counter()
            added[self._add(seed, burst.tokens, 1)] = (index, at)
        answers: dict[int, Answer] = {}
        ended = arrival
        while (len(answers) < len(added) or fillers) and time.monotonic() < deadline:
            for output in self._step():
                if output.request_id in fillers and output.finished:
                    fillers.discard(output.request_id)
                    ended = time.perf_counter()
                elif output.request_id in added and output.outputs[0].token_ids:
                    index, at = added[output.request_id]
                    answers[index] = self._answer(output, time.perf_counter() - at)
        if len(answers) < len(added):
            return Bursted(error=f"{len(added) - len(answers)} requests had no answer within {BURST_S:g} s")
        self._runner.settle()  # what is being saved is saved before anything else is measured
        return Bursted(
            answers=[answers[index] for index in sorted(answers)],
            filler_s=ended - begun,
            queue_s=ended - arrival,
            cpu_s=time.process_time() - begun_cpu,
            connector_cpu_s=connector_cpu_s() - begun_connector,
        )

    def _add(self, seed: int, tokens: int, answer_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._number += 1
        prompt = TokensPrompt(prompt_token_ids=random.Random(seed).choices(TOKENS, k=tokens))
        sampling = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, logprobs=2, detokenize=False
        )
        name = f"burst-{self._number}"
        internal = self._runner.engine.add_request(name, prompt, sampling)
        return internal if isinstance(internal, str) and not internal.startswith(name) else name

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._runner.engine.step()
        return outputs

    @staticmethod
    def _answer(output: Any, seconds: float) -> Answer:
        completion = output.outputs[0]
        tops = [{token: entry.logprob for token, entry in top.items()} for top in completion.logprobs]
        tokens = list(completion.token_ids)
        logprobs = [top[token] for token, top in zip(tokens, tops, strict=True)]
        cached = output.num_cached_tokens or 0
        return Answer(seconds=seconds, tokens=tokens, logprobs=logprobs, cached_tokens=cached)


def main() -> int:
    take, answer = wire()
    start = msgspec.json.decode(take(), type=Start)
    arguments = arguments_of(start)
    runner = Runner(Settings(arguments))
    engine = Engine(runner)
    answer(Ready(engine=engine_name(), model=arguments["model"]))
    while line := take():
        answer(engine.run(msgspec.json.decode(line, type=Burst)))
    runner.stop()
    return 0


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.exit(main())
