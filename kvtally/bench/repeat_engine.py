"""The engine's process of `kvtally bench repeat`: one vLLM engine, asked for one prompt at a time, timed from inside.

    bench.repeat ──Start, then Ask after Ask──▶ stdin   ┌ testing.runner.Runner: vllm.LLM ┐
                 ◀──Ready, Answer──────────────  stdout └ its log is stderr                ┘

Runs in whichever Python has vLLM. Owns how the engine is configured; what is asked, and what it means, is
`bench.repeat`'s. Ends when its standard input ends, with every process that vLLM has started, by force if need be.
Threading: the engine runs in the main thread; one more reads stdin.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from kvtally.bench.child import wire
from kvtally.testing.engines import Done, Generate, Prompt, Reset, Settings
from kvtally.testing.models import GDN, tiny_models
from kvtally.testing.runner import Runner

ROOM_TOKENS = 64  # of the longest request, beyond the prompt
TOKENS = range(100, 1000)  # ids that every vocabulary has, and none gives a special meaning
# Both arms get what vLLM itself would set apart beside the kernels: a core for everything else.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: with two cores, more of them would measure the kernel
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How to start. Without `model` the tiny hybrid is used, made in `scratch` if it is not there yet. `store` is the
    socket of the store that the connector uses; empty: no connector. `arguments` are for `vllm.LLM` and win."""

    model: str
    scratch: str
    store: str
    prompt_tokens: int
    arguments: dict[str, Any] = {}
    settings: dict[str, Any] = {}  # of the connector


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    model: str


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the prompt that grows from `seed`. `forget`: first empty the engine's own prefix cache."""

    seed: int
    tokens: int
    answer_tokens: int = 1
    forget: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` from the call until the engine has returned; with one token to answer this is the time to it."""

    seconds: float = 0.0
    tokens: list[int] = []
    logprobs: list[float] = []
    cached_tokens: int = 0
    error: str = ""


def main() -> int:
    take, answer = wire()
    start = msgspec.json.decode(take(), type=Start)
    arguments = arguments_of(start)
    runner = Runner(Settings(arguments))
    answer(Ready(engine=engine_name(), model=arguments["model"]))
    while line := take():
        answer(_serve(runner, msgspec.json.decode(line, type=Ask)))
    runner.stop()
    return 0


def _serve(runner: Runner, ask: Ask) -> Answer:
    if ask.forget:
        error = runner.carry_out(Reset()).error
        if error:
            return Answer(error=error)
    prompt = Prompt(random.Random(ask.seed).choices(TOKENS, k=ask.tokens), ask.answer_tokens)
    begun = time.perf_counter()
    done: Done = runner.carry_out(Generate([prompt]))
    seconds = time.perf_counter() - begun
    runner.settle()  # what is being saved is saved before anything else is measured
    (output,) = done.outputs
    return Answer(seconds=seconds, tokens=output.tokens, logprobs=output.logprobs, cached_tokens=output.cached_tokens)


def arguments_of(start: Start) -> dict[str, Any]:
    """For `vllm.LLM`. Two engines live at once, so that their samples can alternate: each gets a part of the device."""
    arguments: dict[str, Any] = {
        "model": start.model,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_model_len": start.prompt_tokens + ROOM_TOKENS,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.4,
    }
    if not start.model:
        tiny = tiny_models(Path(start.scratch), [(GDN, 0)])[0]
        arguments |= {**tiny.settings, "max_model_len": start.prompt_tokens + ROOM_TOKENS}
        arguments |= {"max_num_batched_tokens": 2048}
    if start.store:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTallyConnector",
            "kv_connector_module_path": "kvtally.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": start.store, "autostart": False, **start.settings},
        }
    return arguments | start.arguments


def engine_name() -> str:
    from kvtally.vllm.compat import require_supported

    return f"vLLM {require_supported(allow_untested=True)}"


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.exit(main())
