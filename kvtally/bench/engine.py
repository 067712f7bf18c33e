"""The vLLM process of the benches that need one, from both ends: asked for prompts, and timed from inside.

    bench ──Start, then Ask, Burst, Watch, Settle──▶ stdin   ┌ python -m kvtally.bench.engine: vllm.LLM, ┐
          ◀──Ready, Answer, Bursted, Watched───────  stdout  └ scheduler and worker in this process      ┘

`EngineProcess` and `Served` are the bench's end, which needs no vLLM; `Engine` is the process's. It runs in whichever
Python has vLLM. Owns how requests are timed; what is asked, in which order, and what it means, is up to the benches.
Threading: the engine runs in the main thread and only works while it is stepped.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kvtally.errors import ConfigError, TransportError
from kvtally.processes import Worker, own_environment, serve
from kvtally.testing.engines import OFFLINE, Output
from kvtally.testing.models import GDN, tiny_models
from kvtally.testing.runner import drain, forget, output_of

START_S = 900.0  # a large model's weights take their time
ASK_S = 300.0
SETTLE_S = 60.0
BURST_S = 240.0
WATCH_S = 180.0
BRIEF_PAUSE_S = 0.2
ROOM_TOKENS = 64  # of the longest request, beyond the prompt
FILLER_PROMPT_TOKENS = 32
DECODE_PROMPT_TOKENS = 64
BUS_PIECE_BYTES = 64 << 20
REMEDY = "It needs a Python with vLLM, given by --python, and a model that vLLM serves with --engine's settings."
# On a CPU every engine gets what vLLM itself would give the kernels, and one core is left for everything else.
CPU_ENVIRONMENT = {
    **OFFLINE,
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: with two cores, more of them would measure the kernel
    "VLLM_LOGGING_LEVEL": "WARNING",
}


# ---- what an engine is asked


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """How to start. `arguments` are for `vllm.LLM`. `tiny` is a directory: the model is the tiny hybrid, made in there
    unless it is there already."""

    arguments: dict[str, Any]
    tiny: str = ""
    token_ids: tuple[int, int] = (100, 1000)  # prompts are made of these: every vocabulary has them, none is special
    logprobs: int | None = 2  # of each token, to compare answers by; None: the engine computes none
    briefs: int = 0  # requests of one token when settling, for a connector that only works while the engine steps
    has_experts: bool = True  # False: a Qwen3-Next without any


class Ask(msgspec.Struct, frozen=True, tag="ask", kw_only=True):
    """One request: the prompt that grows from `seed`. `forget`: first empty the engine's own prefix cache. `drain`:
    afterwards, out of the timed part, step on until nothing is left to do."""

    seed: int
    tokens: int
    answer_tokens: int = 1
    forget: bool = False
    drain: bool = True


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Let the connector finish what it has begun."""


class Burst(msgspec.Struct, frozen=True, tag="burst", kw_only=True):
    """Let `fillers` (seeds of short prompts) generate `filler_tokens` each; once all of them run, add the prompts that
    grow from `seeds`. The engine's own prefix cache is emptied first."""

    seeds: list[int]
    tokens: int
    fillers: list[int] = []
    filler_tokens: int = 0


class Source(StrEnum):
    """Where requests that arrive find their KV."""

    ALONE = "alone"  # nothing arrives
    OWN = "own"  # in the engine's own prefix cache
    BUS = "bus"  # the same, while as many bytes as a load would bring are copied beside it
    REPEATS = "repeats"  # in a connector's store


class Watch(msgspec.Struct, frozen=True, tag="watch", kw_only=True):
    """Decode, and after `lead_tokens` let requests arrive. The gaps between the next `window_tokens` are measured."""

    source: Source
    seeds: list[int]  # of the prompts that arrive
    tokens: int
    decode_seeds: list[int]
    bus_bytes: int = 0  # plain copies to the GPU, begun when the requests arrive, if that is the source
    lead_tokens: int = 32
    window_tokens: int = 64
    more_tokens: int = 32


Command = Start | Ask | Settle | Burst | Watch


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    model: str


class Answer(Output, frozen=True, kw_only=True):
    """`seconds` until the engine returned. With one token to answer, this is the time to the first token."""

    seconds: float = 0.0


class Bursted(msgspec.Struct, frozen=True, kw_only=True):
    """`answers`: for each seed its first token and the time to it. `filler_s`: what the fillers took; `queue_s`: for
    how long of that the seeds' requests were queued behind them."""

    answers: list[Answer]
    filler_s: float
    queue_s: float
    cpu_s: float  # processor time of the engine's process, its connector included
    connector_cpu_s: float  # of that, the connector's own threads


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    gaps_s: list[float]  # between tokens of the decodes, after the arrival
    firsts_s: list[float]  # from the arrival to each request's first token
    cached_tokens: list[int]


# ---- the bench's end


class EngineProcess(Worker):
    """An engine in a process of its own, ready when this returns."""

    def __init__(
        self,
        start: Start,
        log: Path,
        environment: Mapping[str, str],
        *,
        python: str = sys.executable,
        remedy: str = REMEDY,
        timeout_s: float = START_S,
    ) -> None:
        module = "kvtally.bench.engine"
        super().__init__(module, log=log, name="an engine", remedy=remedy, python=python, environment=environment)
        with ExitStack() as undo:
            undo.callback(self.close)
            self.ready = self.ask(start, Ready, timeout_s)
            undo.pop_all()

    def generate(self, ask: Ask) -> Answer:
        return self.ask(ask, Answer, ASK_S)

    def burst(self, burst: Burst) -> Bursted:
        return self.ask(burst, Bursted, ASK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The engines that the options of a command ask for: one model, with a connector or without."""

    python: str
    model: str  # empty: the tiny hybrid
    prompt_tokens: int
    arguments: dict[str, Any]

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        option = parser.add_argument
        option("--model", metavar="DIR", default="", help="model to serve (default: a tiny hybrid, made on the spot)")
        option("--prompt-tokens", metavar="N", type=int, default=2000, help="length of a prompt (default: 2000)")
        option(
            "--python", metavar="PYTHON", default=sys.executable, help="the Python that has vLLM (default: this one)"
        )
        option("--engine", metavar="JSON", default="{}", help='more arguments for vllm.LLM, like {"block_size": 256}')

    @classmethod
    def of(cls, options: argparse.Namespace) -> Served:
        if options.prompt_tokens < 2:
            raise ConfigError("a prompt has two tokens or more", remedy="Give --prompt-tokens 2 or more.")
        try:
            arguments = msgspec.json.decode(options.engine, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--engine: {error}", remedy="Write it like '{\"block_size\": 256}'.") from error
        prompt_tokens = options.prompt_tokens
        return cls(python=options.python, model=options.model, prompt_tokens=prompt_tokens, arguments=arguments)

    def start(
        self, directory: Path, name: str, store: str = "", settings: Mapping[str, Any] | None = None, **arguments: Any
    ) -> EngineProcess:
        """An engine; with a connector if there is the socket of a `store`. `settings` are the connector's."""
        start = Start(
            arguments={
                **({"model": self.model} if self.model else {"max_num_batched_tokens": 2048}),
                "skip_tokenizer_init": True,
                "enable_prefix_caching": True,
                "disable_log_stats": False,
                "max_model_len": self.prompt_tokens + ROOM_TOKENS,
                "max_num_seqs": 8,
                "gpu_memory_utilization": 0.4,  # two engines live at once, so that their samples can alternate
                **(connector(store, **(settings or {})) if store else {}),
                **arguments,
                **self.arguments,
            },
            tiny="" if self.model else str(directory / "models"),
        )
        environment = {**CPU_ENVIRONMENT, **own_environment()}
        return EngineProcess(start, directory / f"{name}.log", environment, python=self.python)

    def model_name(self, ready: Ready) -> str:
        return self.model or f"tiny {Path(ready.model).name}"


def connector(store: str, **settings: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for our connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KVTallyConnector",
            "kv_connector_module_path": "kvtally.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store, "autostart": False, **settings},
        }
    }


# ---- the process's end


class Engine:
    """`vllm.LLM`, with scheduler and worker in this process."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM

        if not start.has_experts:
            from vllm.model_executor.models import qwen3_next

            qwen3_next.Qwen3NextForCausalLM.set_moe_parameters = lambda self: None  # it looks for expert layers
        arguments = start.arguments
        if start.tiny:
            (tiny,) = tiny_models(Path(start.tiny), [(GDN, 0)])
            arguments = {**tiny.settings, **arguments}
        self.model = str(arguments["model"])
        self._start = start
        self._llm = LLM(**arguments)
        self._count = 0

    def ask(self, ask: Ask) -> Answer:
        if ask.forget:
            self._forget()
        prompt, sampling = self._prompt(ask.seed, ask.tokens), self._sampling(ask.answer_tokens)
        begun = time.perf_counter()
        (output,) = self._llm.generate([prompt], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        if ask.drain:
            self._drain()
        return _answer(output, seconds)

    def settle(self) -> None:
        self._drain()
        for _ in range(self._start.briefs):
            self._llm.generate([{"prompt_token_ids": [5]}], self._sampling(1), use_tqdm=False)
            self._drain()
            time.sleep(BRIEF_PAUSE_S)

    def burst(self, burst: Burst) -> Bursted:
        self._forget()
        prompts = self._prompts(burst.seeds, burst.tokens)
        begun, begun_cpu, begun_connector = time.perf_counter(), time.process_time(), _connector_cpu_s()
        fillers = set(self._add(self._prompts(burst.fillers, FILLER_PROMPT_TOKENS), burst.filler_tokens))
        waiting = set(fillers)
        deadline = time.monotonic() + BURST_S
        while waiting:  # until every one of them runs
            waiting -= {output.request_id for output in self._step(deadline) if output.outputs[0].token_ids}
        arrival = ended = time.perf_counter()
        added_s: dict[str, float] = {}
        for prompt in prompts:
            at = time.perf_counter()
            (name,) = self._add([prompt], 1)
            added_s[name] = at
        answers: dict[str, Answer] = {}
        while len(answers) < len(added_s) or fillers:
            for output in self._step(deadline):
                name = output.request_id
                if name in fillers and output.finished:
                    fillers.discard(name)
                    ended = time.perf_counter()
                elif name in added_s and output.outputs[0].token_ids:
                    answers[name] = _answer(output, time.perf_counter() - added_s[name])
        self._drain()  # saves end before anything else is measured
        return Bursted(
            answers=[answers[name] for name in added_s],
            filler_s=ended - begun,
            queue_s=ended - arrival,
            cpu_s=time.process_time() - begun_cpu,
            connector_cpu_s=_connector_cpu_s() - begun_connector,
        )

    def watch(self, watch: Watch) -> Watched:
        if watch.source is Source.REPEATS:
            self._forget()
        elif watch.source in (Source.OWN, Source.BUS):
            self._llm.generate(self._prompts(watch.seeds, watch.tokens), self._sampling(1), use_tqdm=False)
            self._drain()
        decode_tokens = watch.lead_tokens + watch.window_tokens + watch.more_tokens
        decodes = self._add(self._prompts(watch.decode_seeds, DECODE_PROMPT_TOKENS), decode_tokens)
        arriving = self._prompts(watch.seeds, watch.tokens) if watch.source is not Source.ALONE else []
        bus = _bus() if watch.source is Source.BUS else None
        times: dict[str, list[float]] = {name: [] for name in decodes}
        firsts: dict[str, float] = {}
        cached: dict[str, int] = {}
        arrived_s: float | None = None
        deadline = time.monotonic() + WATCH_S
        while len(firsts) < len(arriving) or any(len(each) < decode_tokens for each in times.values()):
            outputs = self._step(deadline)
            now_s = time.perf_counter()
            for output in outputs:
                name, count = output.request_id, len(output.outputs[0].token_ids)
                if name in times:
                    times[name] += [now_s] * (count - len(times[name]))
                elif count and name not in firsts:
                    firsts[name], cached[name] = now_s, output.num_cached_tokens or 0
            if arrived_s is None and all(len(each) >= watch.lead_tokens for each in times.values()):
                arrived_s = time.perf_counter()
                if bus is not None:
                    bus.up_aside(watch.bus_bytes // BUS_PIECE_BYTES)
                self._add(arriving, 1)
        self._drain()
        if arrived_s is None:
            raise _late("decodes ended before anything arrived")
        return Watched(
            gaps_s=[gap for each in times.values() for gap in gaps_after(each, arrived_s, watch.window_tokens)],
            firsts_s=[first - arrived_s for first in firsts.values()],
            cached_tokens=list(cached.values()),
        )

    def close(self) -> None:
        self._drain()
        self._llm.llm_engine.engine_core.shutdown()

    def _prompt(self, seed: int, tokens: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": random.Random(seed).choices(range(*self._start.token_ids), k=tokens)}

    def _prompts(self, seeds: Sequence[int], tokens: int) -> list[dict[str, list[int]]]:
        return [self._prompt(seed, tokens) for seed in seeds]

    def _add(self, prompts: Sequence[dict[str, list[int]]], answer_tokens: int) -> list[str]:
        names = []
        for prompt in prompts:
            self._count += 1
            names.append(f"bench-{self._count}")
            self._llm.llm_engine.add_request(names[-1], prompt, self._sampling(answer_tokens))
        return names

    def _sampling(self, answer_tokens: int) -> Any:
        from vllm import SamplingParams

        logprobs = self._start.logprobs
        return SamplingParams(
            temperature=0, max_tokens=answer_tokens, detokenize=False, ignore_eos=True, logprobs=logprobs
        )

    def _step(self, deadline: float) -> list[Any]:
        if time.monotonic() >= deadline:
            raise _late("not every request was answered")
        outputs: list[Any] = self._llm.llm_engine.step()
        return outputs

    def _drain(self) -> None:
        if not drain(self._llm, SETTLE_S):
            raise _late("the engine still has work")

    def _forget(self) -> None:
        forget(self._llm, self.settle, SETTLE_S)


def gaps_after(times_s: Sequence[float], arrived_s: float, count: int) -> list[float]:
    """The first `count` gaps between one decode's tokens that end after the arrival."""
    found = [later - earlier for earlier, later in pairwise(times_s) if later > arrived_s]
    return found[:count]


def _answer(output: Any, seconds: float) -> Answer:
    return Answer(seconds=seconds, **msgspec.structs.asdict(output_of(output)))


def _connector_cpu_s() -> float:
    """Processor time that kvtally's threads in this process have used so far."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("kvtally-")]
    spent_ns = [Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0] for thread in threads]
    return sum(map(int, spent_ns)) / 1e9


def _bus() -> Any:
    from kvtally.bench.gpu_copies import Bus

    return Bus(BUS_PIECE_BYTES)


def _late(what: str) -> TransportError:
    return TransportError(f"too late: {what}", remedy="See the engine's log.")


def main() -> None:
    engine: Engine | None = None

    def handle(line: bytes) -> msgspec.Struct:
        nonlocal engine
        command: Command = msgspec.json.decode(line, type=Command)
        if isinstance(command, Start):
            from kvtally.vllm.compat import require_supported

            engine = Engine(command)
            return Ready(engine=f"vLLM {require_supported(allow_untested=True)}", model=engine.model)
        if engine is None:
            raise TransportError("an engine is started before it is asked", remedy="Send Start first.")
        if isinstance(command, Ask):
            return engine.ask(command)
        if isinstance(command, Burst):
            return engine.burst(command)
        if isinstance(command, Watch):
            return engine.watch(command)
        engine.settle()
        return Answer()

    serve(handle)
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
