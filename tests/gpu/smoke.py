"""The connector on a real GPU: output equality and both controls, on a hybrid and a dense model. Run by hand:

    python tests/gpu/smoke.py {hybrid|dense} [--blind] [--graphs]

Needs vLLM with CUDA. Starts its own store. Weights are random but sensitive, so a wrong byte of restored KV changes the
output. Prompts are handed over from a prefill request to a decode request, and what decode says must be vLLM's own
continuation: the same arithmetic, so the same logprobs. With `--blind` the store is told not to verify: then scribbling
into the arena must change the output (or this test could not see anything); without it, it must be noticed and computed
again. With `--graphs` the engine captures and replays CUDA graphs.
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
from typing import Any, NamedTuple

from kvtally.bench.gpu_shapes import ENVIRONMENT

os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="WARNING")

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
        str(work / "model"), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        enforce_eager="--graphs" not in sys.argv,
        additional_config={"gdn_prefill_backend": "triton"}, max_model_len=8192, max_num_batched_tokens=4096,
        max_num_seqs=8, enable_prefix_caching=True, kv_cache_memory_bytes=2 << 30, disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVTallyConnector", "kv_connector_module_path": "kvtally.vllm.connector",
            "kv_role": "kv_both", "kv_connector_extra_config": {"store": socket, "autostart": False},
        },
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    make_sensitive(core.model_executor.driver_worker.worker.model_runner.get_model(), is_hybrid=kind == "hybrid")
    layout = core.scheduler.connector._scheduler._layout

    def run(tokens: list[int], *, told: Any = None, salt: str = "", length: int = 16) -> Outcome:
        sampling = SamplingParams(
            temperature=0, max_tokens=length, detokenize=False, ignore_eos=True, logprobs=1,
            extra_args={"kv_transfer_params": {"kvtally": told}} if told else None,
        )  # fmt: skip
        request = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
        begun = time.perf_counter()
        out = llm.generate([request], sampling, use_tqdm=False)[0]
        logprobs = [next(iter(step.values())).logprob for step in out.outputs[0].logprobs]
        seconds = time.perf_counter() - begun
        answer = (out.kv_transfer_params or {}).get("kvtally") or {}
        return Outcome(list(out.outputs[0].token_ids), logprobs, out.num_cached_tokens, seconds, answer)

    def prompt(length: int, seed: int) -> list[int]:
        pick = random.Random(seed)
        return [pick.randrange(10, 31000) for _ in range(length)]

    client = StoreClient(socket)
    client.connect(5)
    failed = 0
    prompts = []
    run(prompt(500, 1))
    for length in (30, 300, 1000, 3000, 6000):
        alone = run(prompt(length - 1, length), salt=f"alone {length}", length=17)
        tokens = [*prompt(length - 1, length), alone.tokens[0]]
        prompts.append(tokens)
        cold = run(tokens, salt=f"cold {length}")
        prefill = run(tokens, told={"ticket": f"t{length}", "role": "prefill"})
        forget(llm)
        decode = run(tokens, told={**prefill.answer, "role": "decode"})
        half = receipt(client, tokens)
        forget(llm)
        again = run(tokens)  # a plain repeat
        forget(llm)
        other = run([*tokens[:-20], tokens[-20] ^ 1, *tokens[-19:]], salt=f"other {length}")
        after = Outcome(alone.tokens[1:], alone.logprobs[1:])
        deviation = max(decode.deviation(after), again.deviation(after))
        good = decode.tokens == again.tokens == after.tokens and deviation <= 1e-3
        good &= prefill.answer.get("saved_tokens") == decode.cached == again.cached == length - 1
        good &= half.computed_tokens == 1 and half.moved_bytes > 0 and half.verified is not blind
        good &= other.deviation(cold) > 0
        failed += not good
        same = decode.tokens == again.tokens == after.tokens
        print(
            f"{kind} {length} tokens: handed over {decode.cached}, moved {half.moved_bytes} bytes; as vLLM's "
            f"continuation: tokens {same}, deviation {deviation:.2g} (of one prefill {cold.deviation(after):.2g}, of a "
            f"changed token {other.deviation(cold):.2g}); cold {cold.seconds:.3f} s, decode {decode.seconds:.3f} s, "
            f"repeat {again.seconds:.3f} s: {'ok' if good else 'FAILED'}",
            flush=True,
        )
    forget(llm)
    flipped = scribble(socket, layout.namespace)
    reference = run(prompts[3])
    reason = receipt(client, prompts[3]).reason
    print(f"{kind} after scribbling over {flipped} pages: reused {reference.cached}, reason {reason!r}")
    return failed + judge(blind, reference, reason, run(prompts[3], salt="right"))


class Outcome(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    cached: int = 0
    seconds: float = 0.0
    answer: Any = None

    def deviation(self, other: Outcome) -> float:
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def receipt(client: Any, tokens: list[int]) -> Any:
    """Decode's half of the last request with this prompt's length, as the store has it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        newest = client.receipts(last=1).wait().receipts
        if newest and newest[0].decode.prompt_tokens == len(tokens):
            return newest[0].decode
        time.sleep(0.05)
    raise TimeoutError("no receipt")


def judge(blind: bool, scribbled: Outcome, reason: str, right: Outcome) -> int:
    same = scribbled.tokens == right.tokens and scribbled.deviation(right) < 0.1
    good = (not same) if blind else (same and reason == "checksum")
    print(f"  output {'equal' if same else 'changed'}: {'ok' if good else 'FAILED'}", flush=True)
    return 0 if good else 1


def forget(llm: Any) -> None:
    """Empty the engine's own prefix cache, after steps in which blocks held for saves are let go."""
    from vllm import SamplingParams

    deadline = time.monotonic() + 20
    brief = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    while True:
        llm.generate([{"prompt_token_ids": [5]}], brief, use_tqdm=False)  # too short to be saved itself
        if llm.reset_prefix_cache():
            return
        if time.monotonic() > deadline:
            raise TimeoutError("blocks are still held for saves")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
