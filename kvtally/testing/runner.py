"""The process in which a test's engine lives, forked by `testing.nursery`.

`engine` builds `vllm.LLM` and answers commands from stdin; `server` is vLLM's OpenAI server with the flags that follow;
`guard` only runs another command and ends it, to test all this without vLLM. The messages, and the other end of the
pipes, are in `testing.engines`. Outside `kvtally.vllm`, only this module and `bench.engine` import vllm.

The sabotage that negative controls need is done here, in the engine's memory, after a connector has loaded a block. So
it works on any connector, and no checksum of the connector's own can notice. Threading: the engine runs in the main
thread; one more watches stdin.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvtally.core.answers import margin
from kvtally.core.namespace import GroupKind
from kvtally.errors import TransportError
from kvtally.processes import Wire, watch_stdin
from kvtally.testing.engines import (
    Command,
    Done,
    Generate,
    GetCounters,
    Output,
    Reset,
    Sabotage,
    Settings,
    sums,
)

SERVER = "vllm.entrypoints.openai.api_server"
SETTLE_S = 10.0
POLL_S = 0.01
NULL_BLOCK = 0


def main(arguments: list[str]) -> int:
    role, grace_s, *command = arguments
    if role == "guard":
        return _guard(command, float(grace_s))
    if role == "server":
        return _serve(command, float(grace_s))
    wire = Wire(float(grace_s))
    runner: Runner | None = None
    for line in wire:
        asked: Command = msgspec.json.decode(line, type=Command)
        if isinstance(asked, Settings):
            runner = Runner(asked)
            wire.answer(Done(kinds=runner.kinds))
        else:
            assert runner is not None
            try:
                wire.answer(runner.carry_out(asked))
            except TransportError as error:
                wire.fail(error)
        runner.settle()
    if runner is not None:
        runner.stop()
    return 0


def _guard(command: list[str], grace_s: float) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    watch_stdin(grace_s, child.terminate)
    return child.wait()


def _serve(flags: list[str], grace_s: float) -> int:
    """Do what `python -m` would do with vLLM's server."""
    os.dup2(2, 1)
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    watch_stdin(grace_s, stop)
    sys.argv = [SERVER, *flags]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about the nursery having imported it
        runpy.run_module(SERVER, run_name="__main__")
    return 0


class Runner:
    """One engine, and the commands it carries out."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        self._llm = LLM(**settings.arguments)
        self._is_in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        self._saboteur: Saboteur | None = None

    @property
    def kinds(self) -> list[GroupKind]:
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups if self._is_in_process else []
        return sorted({_kind(group) for group in groups})

    def carry_out(self, command: Command) -> Done:
        if isinstance(command, Generate):
            return Done(outputs=self._generate(command))
        if isinstance(command, Reset):
            forget(self._llm, self.settle, SETTLE_S)
            return Done()
        if isinstance(command, Sabotage):
            if not self._is_in_process:
                raise TransportError("sabotage needs an in-process engine", remedy="Start it with in_process=True.")
            count = self._saboteur.end() if self._saboteur is not None else 0
            self._saboteur = Saboteur(self._core, command.kind) if command.kind is not None else None
            return Done(count=count)
        assert isinstance(command, GetCounters)
        return self._counters()

    def _counters(self) -> Done:
        from vllm.v1.metrics.reader import Counter, Gauge

        metrics = [metric for metric in self._llm.get_metrics() if isinstance(metric, Counter | Gauge)]
        return Done(counters=sums((metric.name, metric.labels, metric.value) for metric in metrics))

    def stop(self) -> None:
        self.settle()
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    def settle(self) -> None:
        if self._is_in_process:
            drain(self._llm, SETTLE_S)

    def _generate(self, command: Generate) -> list[Output]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=prompt.tokens) for prompt in command.prompts]
        for asked, prompt in zip(command.prompts, prompts, strict=True):
            if asked.salt:
                prompt["cache_salt"] = asked.salt
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=prompt.max_tokens,
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
                extra_args={"kv_transfer_params": prompt.transfer} if prompt.transfer else None,
            )
            for prompt in command.prompts
        ]
        return [output_of(answer) for answer in self._llm.generate(prompts, sampling, use_tqdm=False)]


# ---- what the engines of tests and of benches (`bench.engine`) have in common


def drain(llm: Any, timeout_s: float) -> bool:
    """Step an in-process engine until nothing is left to do, saves included; engines in processes of their own do that
    by themselves. False if time is up."""
    deadline = time.monotonic() + timeout_s
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        if time.monotonic() >= deadline:
            return False
        llm.llm_engine.step()
    return True


def forget(llm: Any, settle: Callable[[], object], timeout_s: float) -> None:
    """Empty an engine's own prefix cache. vLLM refuses while blocks are in use, and a connector may hold some until
    they are saved: then `settle`, and try again."""
    deadline = time.monotonic() + timeout_s
    while not llm.reset_prefix_cache():
        if time.monotonic() >= deadline:
            raise TransportError(
                f"the prefix cache could not be reset within {timeout_s:g} s: blocks are still in use",
                remedy="See what the connector holds.",
            )
        settle()
        time.sleep(POLL_S)


def output_of(answer: Any) -> Output:
    """vLLM's answer to a request, as far as it was asked for logprobs."""
    completion = answer.outputs[0]
    tokens, tops = list(completion.token_ids), completion.logprobs or []
    tops = [{token: entry.logprob for token, entry in top.items()} for top in tops]
    return Output(
        tokens=tokens,
        logprobs=[top[token] for token, top in zip(tokens, tops, strict=bool(tops))],
        margins=[margin(top.values()) for top in tops],
        cached_tokens=answer.num_cached_tokens or 0,
        transfer=answer.kv_transfer_params or {},
    )


class Saboteur:
    """Zeroes one block of one group after each load, by stepping between vLLM and the two halves of its connector.

    A load is over when an asynchronous connector reports the request, or, for a synchronous one, when the load has been
    started and again when a layer has been waited for.
    """

    def __init__(self, core: Any, kind: GroupKind) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._config = core.scheduler.kv_cache_config
        self._group = next(g for g, group in enumerate(self._config.kv_cache_groups) if _kind(group) is kind)
        self._takes_last = kind is not GroupKind.FULL  # the newest block of a window, the only one of a state
        self._memory = _memory(core.vllm_config, self._config)
        self._matches: dict[str, tuple[int, bool]] = {}  # request -> tokens it has without the load, asynchronous
        self._targets: dict[str, int] = {}
        self._hit: set[int] = set()
        self._scheduler, self._worker = core.scheduler.connector, get_kv_transfer_group()
        self._match, self._alloc = self._scheduler.get_num_new_matched_tokens, self._scheduler.update_state_after_alloc
        self._results, self._load = self._worker.get_transfer_results, self._worker.start_load_kv
        self._wait = self._worker.wait_for_layer_load
        self._scheduler.get_num_new_matched_tokens = self._matched
        self._scheduler.update_state_after_alloc = self._allocated
        self._worker.get_transfer_results = self._collected
        self._worker.start_load_kv = self._load_started
        self._worker.wait_for_layer_load = self._layer_loaded

    def end(self) -> int:
        """Stop. How many blocks that held something were zeroed."""
        self._scheduler.get_num_new_matched_tokens, self._scheduler.update_state_after_alloc = self._match, self._alloc
        self._worker.get_transfer_results, self._worker.start_load_kv = self._results, self._load
        self._worker.wait_for_layer_load = self._wait
        return len(self._hit)

    def _matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = self._match(request, computed_tokens)
        self._matches[request.request_id] = (computed_tokens, is_async)
        return tokens, is_async

    def _allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        self._alloc(request, blocks, external_tokens)
        if external_tokens:
            size = self._config.kv_cache_groups[self._group].kv_cache_spec.block_size
            start, _ = self._matches[request.request_id]
            table = blocks.get_block_ids()[self._group][start // size : -(-(start + external_tokens) // size)]
            loaded = [block for block in table if block != NULL_BLOCK]
            self._targets[request.request_id] = loaded[-1 if self._takes_last else len(loaded) // 2]

    def _collected(self, finished: set[str]) -> Any:
        results = self._results(finished)
        for request in (results.finished_recving or set()) - (results.failed_recving or set()):
            if request in self._targets:
                self._zero(self._targets.pop(request))
        for request in self._synchronous():
            del self._targets[request]  # its step is over
        return results

    def _load_started(self, *arguments: Any, **more: Any) -> None:
        self._load(*arguments, **more)
        self._zero_synchronous()

    def _layer_loaded(self, layer: str) -> None:
        self._wait(layer)
        self._zero_synchronous()

    def _zero_synchronous(self) -> None:
        for request in self._synchronous():
            self._zero(self._targets[request])

    def _synchronous(self) -> list[str]:
        return [request for request in self._targets if not self._matches[request][1]]

    def _zero(self, block: int) -> None:
        group = self._config.kv_cache_groups[self._group]
        for name in group.layer_names:
            placed = next(tensor for tensor in self._config.kv_cache_tensors if name in tensor.layers)
            start = placed.offset + placed.layers.index(name) * placed.layer_stride + block * placed.block_stride
            page = self._memory[start : start + _layer_spec(group.kv_cache_spec, name).real_page_size_bytes]
            if page.any():
                self._hit.add(block)
                page.zero_()


def _memory(vllm_config: Any, cache_config: Any) -> Any:
    """All KV cache of this worker, as bytes: every layer is a view of one buffer."""
    import torch

    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in cache_config.kv_cache_groups for name in group.layer_names]
    views = (layers[name].kv_cache for name in names)
    view = next(view for view in views if isinstance(view, torch.Tensor))
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def _layer_spec(spec: Any, name: str) -> Any:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind(group: Any) -> GroupKind:
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    spec = _layer_spec(group.kv_cache_spec, group.layer_names[0])
    if isinstance(spec, MambaSpec):
        return GroupKind.RECURRENT
    return GroupKind.SLIDING if isinstance(spec, SlidingWindowSpec) else GroupKind.FULL
