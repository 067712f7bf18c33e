"""The models of `kvtally bench gpu`, by their shapes, and how vLLM serves them with each connector.

Weights are random: only sizes matter. Engines of one shape differ in their connector and in nothing else. Pure, except
that a model's only file, its config.json, is written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvtally.bench.engine import Start, connector
from kvtally.testing.engines import OFFLINE

ENVIRONMENT = {
    **OFFLINE,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # the kind of CUDA graphs that needs no compiler
}
GRAPH_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]  # longer steps run without graphs
BRIEFS = 2
TOKEN_IDS = (10, 31_000)
GIB = 1 << 30

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
    """A model and what is asked of it. An engine takes `gpu_bytes` of the GPU's memory; each connector may use
    `host_bytes` of the host's."""

    config: dict[str, Any]
    arguments: dict[str, Any]
    prompt_tokens: int
    fills: int  # prompts; some of them are repeated
    host_bytes: int
    gpu_bytes: int
    reads_disk: bool  # by default, after a restart
    more_cold: int = 0  # more prompts that are asked for once: saving costs little, and times vary more than that
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
            "kv_cache_memory_bytes": 12
            * GIB,  # what arrives at once must fit, or it could not hit in the GPU's own cache
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


def start_of(
    name: str,
    engine: str,
    directory: Path,
    store: str = "",
    *,
    always_load: bool = False,
    most_requests: int = 8,
    gpu_share: float = 0.9,
    graphs: bool = False,
) -> Start:
    """How to start an engine of this shape: with no connector (`none`), with vLLM's own (`offload`), or with kvtally's,
    which uses the store at `store`. `always_load`: even from a disk that is slower than computing. `gpu_share`: of the
    GPU's memory. Without CUDA `graphs`, one host thread bounds short steps."""
    shape = SHAPES[name]
    model = directory / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_bytes(msgspec.json.encode(shape.config))
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": not graphs,
        "dtype": "bfloat16",
        "max_model_len": 16_384,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": most_requests,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": gpu_share,
        "disable_log_stats": False,
        **shape.arguments,
    }
    if graphs:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": GRAPH_TOKENS}
    if engine == "offload":
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": shape.host_bytes},
        }
    elif engine == "kvtally":
        arguments |= connector(store, always_load=always_load)
    return Start(arguments=arguments, token_ids=TOKEN_IDS, logprobs=None, briefs=BRIEFS, has_experts=False)
