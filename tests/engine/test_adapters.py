"""Real engines with LoRA adapters: what one computed with an adapter, another reuses with a copy of it that lies
elsewhere, has other times and another name; with one byte changed, or without an adapter, nothing is reused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtally.testing.models import DENSE, VOCABULARY, Model, Recipe
from tests.engine.offline import run_offline
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

TOKENS = random.Random(21).choices(range(VOCABULARY - 2), k=700)
RANK = 8

PROGRAM = """
from vllm.lora.request import LoRARequest
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
result = {}
for number, (name, path) in enumerate(given["adapters"].items(), 1):
    adapter = LoRARequest(name, number, path) if path else None
    prompt = TokensPrompt(prompt_token_ids=given["tokens"])
    output = llm.generate(prompt, sampling, use_tqdm=False, lora_request=adapter)[0]
    result[name] = [output.num_cached_tokens, list(output.outputs[0].token_ids)]
settle()
"""


def make(folder: Path, config: dict[str, Any]) -> Path:
    """An adapter that changes what every layer's keys and values are."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 64,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    size, kv_size = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    torch.manual_seed(5)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target in described["target_modules"]:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, size) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(kv_size, RANK) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def copied(folder: Path, to: Path, *, change: bool = False) -> Path:
    shutil.copytree(folder, to)
    file = to / "adapter_model.safetensors"
    if change:
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
    os.utime(file, (1_000_000_000, 1_000_000_000))
    return to


def test_a_copy_of_an_adapter_is_the_same_adapter(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path
) -> None:
    model, store = tiny_model(DENSE, 0), store_in(tmp_path)
    adapter = make(tmp_path / "here", json.loads((model.path / "config.json").read_text()))
    elsewhere = copied(adapter, tmp_path / "elsewhere")
    other = copied(adapter, tmp_path / "other", change=True)
    config = {"kv_transfer_config": dict(store.connector().kv_transfer_config)}
    arguments = {**model.settings, **config, "enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}

    def run(log: str, **adapters: str) -> dict[str, Any]:
        given = {"tokens": TOKENS, "adapters": adapters}
        told: dict[str, Any] = run_offline(PROGRAM, arguments, given, tmp_path / log)
        return told

    first = run("first.log", sql=str(adapter), bare="")
    assert [cached for cached, _ in first.values()] == [0, 0]
    assert first["sql"][1] != first["bare"][1]  # or it would not matter whose KV is reused
    second = run("second.log", changed=str(other), copy=str(elsewhere), bare="")
    assert second["changed"][0] == 0
    assert second["copy"] == [len(TOKENS) - 1, first["sql"][1]]
    assert second["bare"] == [len(TOKENS) - 1, first["bare"][1]]
