"""The engine's process of `kvtally bench gpu`: one vLLM engine, asked and timed from inside.

Owns the shapes of models (random weights: only sizes matter), how engines are configured, with each connector alike,
and the loop that watches running decodes while requests arrive. What is asked, in which order, and what it means, is
`bench.gpu`'s. Scheduler and worker run in this process, in the main thread: nothing works on when no step is made.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kvtally.bench.child import serve
from kvtally.bench.gpu_copies import Bus
from kvtally.errors import TransportError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # vLLM's CUDA graphs that need no compiler; nothing changes without graphs
}
GRAPH_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]  # steps with more of them run as without graphs
SETTLE_S = 60.0
RUN_S = 180.0
BRIEFS = 2  # requests of one token that give a connector the steps it needs to end its work
BRIEF_PAUSE_S = 0.2
TOKENS = range(10, 31_000)
DECODE_PROMPT_TOKENS = 64
GIB = 1 << 30
PIECE_BYTES = 64 << 20  # of a plain copy

_COMMON = {
    "vocab_size": 32_000,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}
_HYBRID_27B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_DENSE_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model and what is asked of it. `gpu_bytes`: what an engine takes of the GPU's memory, `host_bytes`: what each
    connector may use of the host's."""

    config: dict[str, Any]
    arguments: dict[str, Any]
    prompt_tokens: int
    fills: int  # prompts; some of them are repeated
    host_bytes: int
    gpu_bytes: int
    reads_disk: bool  # by default, after a restart
    more_cold: int = 0  # prompts that are asked for only once: what saving costs is little beside how times vary
    busy_requests: int = 16
    busy_prompt_tokens: int = 3_000
    token_bytes: int  # of KV, all layers of attention together
    state_bytes: int = 0  # of one recurrent state, all layers together

    @property
    def busy_bytes(self) -> int:
        """What loading one prompt of `busy_prompt_tokens` brings to the GPU."""
        return self.busy_prompt_tokens * self.token_bytes + self.state_bytes


SHAPES = {
    "hybrid-27b": Shape(
        config=_COMMON | _HYBRID_27B,
        arguments={
            "additional_config": {"gdn_prefill_backend": "triton"},  # the other one needs flashinfer
            "kv_cache_memory_bytes": 6 * GIB,
        },
        prompt_tokens=11_000,
        fills=14,
        host_bytes=40 * GIB,
        gpu_bytes=60 * GIB,
        reads_disk=False,
        token_bytes=16 * 4_096,
        state_bytes=48 * 1_634_304,
    ),
    "dense-8b": Shape(
        config=_COMMON | _DENSE_8B,
        arguments={
            "block_size": 16,
            "kv_cache_memory_bytes": 12 * GIB,  # what arrives at once must fit, or it could not hit the GPU's own cache
        },
        prompt_tokens=8_000,
        fills=10,
        more_cold=20,
        host_bytes=24 * GIB,
        gpu_bytes=40 * GIB,
        reads_disk=True,
        token_bytes=36 * 4_096,
    ),
}


class Source(StrEnum):
    """Where requests that arrive find their KV: nothing arrives, the engine's own prefix cache, the same with as many
    bytes as a load would bring beside it, a connector's."""

    ALONE = "alone"
    OWN = "own"
    BUS = "bus"
    REPEATS = "repeats"


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """`connector`: none, offload or kvtally, whose store's socket is `store`. `directory` is for the model's files.
    `always_load`: also from a disk that is slower than computing."""

    shape: str
    connector: str
    directory: str
    store: str = ""
    always_load: bool = False
    most_requests: int = 8
    gpu_share: float = 0.9  # of the GPU's memory, which must be free
    graphs: bool = False  # CUDA graphs; without them one host thread bounds short steps


class Ask(msgspec.Struct, frozen=True, tag="ask", kw_only=True):
    """One request for one token. `forget`: first empty the engine's own prefix cache. `drain`: afterwards step on, out
    of the timed part, until nothing is left to do."""

    seed: int
    tokens: int
    forget: bool = False
    drain: bool = True


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Let the connector end what it has begun."""


class Watch(msgspec.Struct, frozen=True, tag="watch", kw_only=True):
    """Decode, and after `lead_tokens` let requests arrive; gaps between the next `window_tokens` are what is wanted."""

    source: Source
    seeds: list[int]  # of the prompts that arrive
    tokens: int
    decode_seeds: list[int]
    bus_bytes: int = 0  # plain copies to the GPU, begun when the requests arrive, if that is the source
    lead_tokens: int = 32
    window_tokens: int = 64
    more_tokens: int = 32


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    engine: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 0.0
    first_token: int = -1
    cached_tokens: int = 0


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    gaps_s: list[float]  # between tokens of the decodes, after the arrival
    firsts_s: list[float]  # from the arrival to each request's first token
    cached_tokens: list[int]


Command = Start | Ask | Settle | Watch


class Process:
    """The engine, once `Start` has come, and what it is asked."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def handle(self, line: bytes) -> msgspec.Struct:
        command: Command = msgspec.json.decode(line, type=Command)
        if isinstance(command, Start):
            self._engine = Engine(command)
            return Ready(engine=_version())
        if self._engine is None:
            raise ValueError("an engine is started before it is asked")
        if isinstance(command, Ask):
            return self._engine.ask(command)
        if isinstance(command, Watch):
            return self._engine.watch(command)
        self._engine.settle()
        return Answer()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class Engine:
    """`vllm.LLM`, scheduler and worker in this process."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM
        from vllm.model_executor.models import qwen3_next

        # The dense variant has no expert layers to find.
        qwen3_next.Qwen3NextForCausalLM.set_moe_parameters = lambda self: None
        self._llm = LLM(**engine_arguments(start))
        self._count = 0

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, ask: Ask) -> Answer:
        if ask.forget:
            self._forget()
        request = _request(ask.seed, ask.tokens)
        begun = time.perf_counter()
        (output,) = self._llm.generate([request], self._sampling(1), use_tqdm=False)
        seconds = time.perf_counter() - begun
        if ask.drain:
            self._drain()
        token = int(output.outputs[0].token_ids[0])
        return Answer(seconds=seconds, first_token=token, cached_tokens=output.num_cached_tokens or 0)

    def settle(self) -> None:
        """A connector that saves in the steps that follow a request needs steps."""
        self._drain()
        for _ in range(BRIEFS):
            self._llm.generate([{"prompt_token_ids": [5]}], self._sampling(1), use_tqdm=False)
            self._drain()
            time.sleep(BRIEF_PAUSE_S)

    def watch(self, watch: Watch) -> Watched:
        if watch.source is Source.REPEATS:
            self._forget()
        elif watch.source in (Source.OWN, Source.BUS):
            prompts = [_request(seed, watch.tokens) for seed in watch.seeds]
            self._llm.generate(prompts, self._sampling(1), use_tqdm=False)
            self._drain()
        decode_tokens = watch.lead_tokens + watch.window_tokens + watch.more_tokens
        decodes = self._add(watch.decode_seeds, DECODE_PROMPT_TOKENS, decode_tokens)
        arriving = [_request(seed, watch.tokens) for seed in watch.seeds] if watch.source is not Source.ALONE else []
        bus = Bus(PIECE_BYTES) if watch.source is Source.BUS else None
        times: dict[str, list[float]] = {name: [] for name in decodes}
        firsts: dict[str, float] = {}
        cached: dict[str, int] = {}
        arrived_s: float | None = None
        deadline = time.monotonic() + RUN_S
        while len(firsts) < len(arriving) or any(len(each) < decode_tokens for each in times.values()):
            if time.monotonic() >= deadline:
                raise _late(f"{len(firsts)} of {len(arriving)} requests were answered")
            outputs = self._llm.llm_engine.step()
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
                    bus.up_aside(watch.bus_bytes // PIECE_BYTES)
                self._add_all(arriving, 1)
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

    def _add(self, seeds: Sequence[int], tokens: int, answer_tokens: int) -> list[str]:
        return self._add_all([_request(seed, tokens) for seed in seeds], answer_tokens)

    def _add_all(self, requests: Sequence[dict[str, list[int]]], answer_tokens: int) -> list[str]:
        names = []
        for request in requests:
            self._count += 1
            names.append(f"bench-{self._count}")
            self._llm.llm_engine.add_request(names[-1], request, self._sampling(answer_tokens))
        return names

    def _sampling(self, answer_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=answer_tokens, detokenize=False, ignore_eos=True)

    def _drain(self) -> None:
        """Step on until nothing is left to do, as an engine in a process of its own does by itself."""
        deadline = time.monotonic() + SETTLE_S
        while self._scheduler.has_requests():
            self._llm.llm_engine.step()
            if time.monotonic() >= deadline:
                raise _late("the engine still has work")

    def _forget(self) -> None:
        """vLLM refuses while blocks are in use, and a connector may hold some until they are saved."""
        deadline = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() >= deadline:
                raise _late("blocks of the prefix cache are still in use")
            self.settle()


def engine_arguments(start: Start) -> dict[str, Any]:
    """For `vllm.LLM`; the model's only file is made here."""
    shape = SHAPES[start.shape]
    model = Path(start.directory) / start.shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_bytes(msgspec.json.encode(shape.config))
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": not start.graphs,
        "dtype": "bfloat16",
        "max_model_len": 16_384,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": start.most_requests,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": start.gpu_share,
        "disable_log_stats": False,
        **shape.arguments,
    }
    if start.graphs:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": GRAPH_TOKENS}
    if start.connector == "offload":
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": shape.host_bytes},
        }
    elif start.connector == "kvtally":
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTallyConnector",
            "kv_connector_module_path": "kvtally.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": start.store,
                "autostart": False,
                "always_load": start.always_load,
            },
        }
    return arguments


def gaps_after(times_s: Sequence[float], arrived_s: float, count: int) -> list[float]:
    """The first `count` gaps between tokens that end after the arrival; times are those of one decode's tokens."""
    found = [later - earlier for earlier, later in pairwise(times_s) if later > arrived_s]
    return found[:count]


def _request(seed: int, tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": random.Random(seed).choices(TOKENS, k=tokens)}


def _version() -> str:
    from kvtally.vllm.compat import require_supported

    return f"vLLM {require_supported(allow_untested=True)}"


def _late(what: str) -> TransportError:
    return TransportError(f"too late: {what}", remedy="See the engine's log.")


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    process = Process()
    serve(process.handle)
    process.close()
    sys.exit(0)
