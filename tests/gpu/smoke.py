"""The connector on a real GPU: output equality and both controls, on a hybrid and a dense model. Run by hand:

    python tests/gpu/smoke.py {hybrid|dense} [--blind]

Needs vLLM with CUDA. Starts its own store. Weights are random but sensitive, so a wrong byte of restored KV changes the
output. With `--blind` the store is told not to verify: then scribbling into the arena must
change the output (or this test could not see anything); without it, it must be noticed and computed again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6}
COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def make_sensitive(model: Any, *, is_hybrid: bool) -> None:
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:
                weight.normal_(0, 1)
            elif name.endswith("A_log"):
                weight.fill_(-5)  # slow decay: the state remembers
            elif name.endswith("dt_bias"):
                weight.zero_()
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(2.0)  # sharp attention: single tokens matter
            elif weight.dim() >= 2:
                weight.normal_(0, 0.03)
            elif "norm" in name and not is_hybrid:
                weight.fill_(1.0)  # vLLM's dummy weights would mute every layer; Qwen3-Next adds 1 itself


def scribble(socket: str, namespace_of: Any) -> int:
    """Flip a byte of every object in the arena; how many."""
    from kvtally.client import StoreClient

    layout = namespace_of
    flipped = 0
    with StoreClient(socket, namespace=layout) as client:
        client.connect(5)
        stats = client.stats().wait().stats
        arena = client.arena
        used = stats["arena"]["used_bytes"]
        for offset in range(0, used, 4096):
            view = arena.view(offset, 64)
            view[7] ^= 0x40
            flipped += 1
    return flipped


def main() -> int:
    kind, blind = sys.argv[1], "--blind" in sys.argv
    work = Path(tempfile.mkdtemp(prefix="kvtally-gpu-"))
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(COMMON | (HYBRID if kind == "hybrid" else DENSE)))
    socket = str(work / "store.sock")
    command = [sys.executable, "-m", "kvtally", "store", "--socket", socket, "--memory", "4GiB"]
    store = subprocess.Popen([*command, *(["--no-verify-reads"] if blind else [])])
    try:
        return check(kind, blind, work, socket)
    finally:
        store.terminate()
        store.wait(20)


def check(kind: str, blind: bool, work: Path, socket: str) -> int:
    from vllm import LLM, SamplingParams

    from kvtally.client import StoreClient

    if kind == "hybrid":
        from vllm.model_executor.models import qwen3_next

        qwen3_next.Qwen3NextForCausalLM.set_moe_parameters = lambda self: None
    llm = LLM(
        str(work / "model"), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        additional_config={"gdn_prefill_backend": "triton"}, max_model_len=8192, max_num_batched_tokens=4096,
        max_num_seqs=8, enable_prefix_caching=True, kv_cache_memory_bytes=2 << 30, disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVTallyConnector", "kv_connector_module_path": "kvtally.vllm.connector",
            "kv_role": "kv_both", "kv_connector_extra_config": {"store": socket, "autostart": False},
        },
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    make_sensitive(core.model_executor.driver_worker.worker.model_runner.get_model(), is_hybrid=kind == "hybrid")
    half = core.scheduler.connector._scheduler
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True, logprobs=1)

    def run(tokens: list[int]) -> tuple[list[int], list[float], int, float]:
        begun = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
        logprobs = [next(iter(step.values())).logprob for step in out.outputs[0].logprobs]
        return list(out.outputs[0].token_ids), logprobs, out.num_cached_tokens, time.perf_counter() - begun

    def prompt(length: int, seed: int) -> list[int]:
        pick = random.Random(seed)
        return [pick.randrange(10, 31000) for _ in range(length)]

    client = StoreClient(socket)
    client.connect(5)
    failed = 0
    prompts = [prompt(length, length) for length in (300, 1000, 3000, 6000)]
    run(prompt(500, 1))
    for tokens in prompts:
        cold = run(tokens)
        time.sleep(0.5)
        forget(llm)
        warm = run(tokens)
        moved = receipt(client, tokens).moved_bytes
        local = run(tokens)  # vLLM's own prefix cache: what deviation is normal?
        other = run([*tokens[:-40], tokens[-40] ^ 1, *tokens[-39:]])
        deviation = max(abs(a - b) for a, b in zip(local[1], warm[1], strict=True))
        normal = max(abs(a - b) for a, b in zip(cold[1], local[1], strict=True))
        change = max(abs(a - b) for a, b in zip(local[1], other[1], strict=True))
        good = warm[0] == local[0] and deviation <= 1e-3 and warm[2] > 0 and moved > 0 and change > 0
        failed += not good
        print(
            f"{kind} {len(tokens)} tokens: reused {warm[2]}, moved {moved}, tokens as by vLLM's own prefix cache "
            f"{warm[0] == local[0]}, deviation from it {deviation:.2g} (its own from cold {normal:.2g}), "
            f"one token changed {change:.2g}, cold {cold[3]:.3f}s warm {warm[3]:.3f}s {'ok' if good else 'FAILED'}",
            flush=True,
        )
        forget(llm)
    flipped = scribble(socket, half._layout.namespace)
    reference = run(prompts[2])
    reason = receipt(client, prompts[2]).reason
    print(f"{kind} after scribbling over {flipped} pages: reused {reference[2]}, reason {reason!r}")
    return failed + judge(blind, reference, reason, run, llm, prompts[2])


def receipt(client: Any, tokens: list[int]) -> Any:
    """Decode's half of the last request with this prompt's length, as the store has it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        newest = client.receipts(last=1).wait().receipts
        if newest and newest[0].decode.prompt_tokens == len(tokens):
            return newest[0].decode
        time.sleep(0.05)
    raise TimeoutError("no receipt")


def judge(blind: bool, scribbled: Any, reason: str, run: Any, llm: Any, tokens: list[int]) -> int:
    right = run_without_reuse(run, llm, tokens)
    same = scribbled[0] == right[0] and max(abs(a - b) for a, b in zip(scribbled[1], right[1], strict=True)) < 0.1
    good = (not same) if blind else (same and reason == "checksum")
    print(f"  output {'equal' if same else 'changed'}: {'ok' if good else 'FAILED'}", flush=True)
    return 0 if good else 1


def run_without_reuse(run: Any, llm: Any, tokens: list[int]) -> Any:
    """The same prompt computed: no reuse by the engine (reset) nor from the store (its half answers 0)."""
    half = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    half.matched_tokens = lambda request, computed: (0, False)
    forget(llm)
    return run(tokens)


def forget(llm: Any) -> None:
    """Empty the engine's own prefix cache, after steps in which blocks held for saves are let go."""
    from vllm import SamplingParams

    deadline = time.monotonic() + 20
    brief = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    while True:
        llm.generate([{"prompt_token_ids": [5] * 5}], brief, use_tqdm=False)  # too short to be saved itself
        if llm.reset_prefix_cache():
            return
        if time.monotonic() > deadline:
            raise TimeoutError("blocks are still held for saves")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
