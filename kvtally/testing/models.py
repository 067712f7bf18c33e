"""Tiny models whose output depends on every byte of KV cache, made on the spot: no download, a few megabytes each.

With the random weights that engines usually make for tests, output is nearly constant: wrong KV goes unnoticed, and a
test proves nothing. These weights are drawn so that every layer matters and recurrent state forgets slowly. The
conformance harness still checks that a model is sensitive before it trusts the result.

Owns the recipes, one for each kind of KV-cache group, and the settings with which vLLM serves them on a CPU. Making one
needs torch and transformers and happens in a process of its own (`python -m kvtally.testing.models`), so that a test
process stays small. Neighbours: `testing.engines` runs them, `testing.conformance` judges connectors by them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from kvtally.core.namespace import GroupKind
from kvtally.errors import TierError

MAKE_S = 240.0
VOCABULARY = 1000
WEIGHT_STD = 0.06
# For each token a state decays by exp(-exp(A_log) * softplus(dt + dt_bias)). With this it remembers a thousand.
A_LOG = -5.0
# Attention over random keys is nearly even, so a wrong block among many would not show. Larger queries sharpen it.
SHARPNESS = 3.0

Setting = str | int | float | bool
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A shape: what transformers builds, and how vLLM serves it here.

    `block_tokens`: what hits are aligned to. `kinds`: its KV-cache groups, for the controls.
    """

    name: str
    model_type: str  # as transformers calls it
    config: Json
    dtype: str
    block_tokens: int
    kinds: tuple[GroupKind, ...]
    window_tokens: int = 0
    engine: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """A recipe's weights on disk."""

    recipe: Recipe
    path: Path
    seed: int

    @property
    def settings(self) -> dict[str, Setting]:
        """Arguments for `vllm.LLM`; as flags they suit its OpenAI server too."""
        return {
            "model": str(self.path),
            "dtype": self.recipe.dtype,
            "block_size": self.recipe.block_tokens,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "enforce_eager": True,
            **self.recipe.engine,
        }


_COMMON: Json = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 1,
}
_ATTENTION: Json = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

DENSE = Recipe(
    name="dense",
    model_type="qwen3",
    config={**_COMMON, **_ATTENTION, "num_hidden_layers": 6},
    dtype="float32",
    block_tokens=32,
    kinds=(GroupKind.FULL,),
    engine={"max_num_batched_tokens": 512},
)
SLIDING = Recipe(
    name="sliding",
    model_type="gemma3_text",
    config={
        **_COMMON,
        **_ATTENTION,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "sliding_window": 512,
        "query_pre_attn_scalar": 64,
    },
    dtype="float32",
    block_tokens=64,
    kinds=(GroupKind.FULL, GroupKind.SLIDING),
    window_tokens=512,
    engine={"max_num_batched_tokens": 512},
)
GDN = Recipe(
    name="gdn",
    model_type="qwen3_next",
    config={
        **_COMMON,
        **_ATTENTION,
        "num_hidden_layers": 4,  # three GDN layers and one of attention; with more, rounding to bfloat16 hides too much
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 4,
        "num_experts_per_tok": 4,  # all of them: otherwise rounding could change the choice, and so the answer
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "head_dtype": "float32",  # logits in bfloat16 have few values, and many ties
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    dtype="bfloat16",  # the only type that its CPU kernels support
    block_tokens=256,  # set here, or a multi-process engine resets it after its start and never hits
    kinds=(GroupKind.FULL, GroupKind.RECURRENT),
    engine={"max_num_batched_tokens": 512},
)
MAMBA = Recipe(
    name="mamba",
    model_type="granitemoehybrid",
    config={
        **_COMMON,
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_head": 64,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "attention_multiplier": SHARPNESS / 8,  # 8 is the root of the head size
    },
    dtype="float32",
    block_tokens=256,
    kinds=(GroupKind.FULL, GroupKind.RECURRENT),
    engine={"max_num_batched_tokens": 256},  # must be one block: vLLM's CPU kernel exports no state inside a chunk
)
# A block must be as long as a state is large. These are small enough for two blocks to a chunk.
SMALL_STATES = replace(
    GDN,
    name="small-states",
    config={**GDN.config, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    block_tokens=128,
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (DENSE, SLIDING, GDN, MAMBA)}
_MADE = {**RECIPES, SMALL_STATES.name: SMALL_STATES}


def tiny_models(directory: Path, wanted: Iterable[tuple[Recipe, int]]) -> list[Model]:
    """Each recipe with its seed, made in `directory` unless it is there already. Another seed means other weights."""
    models = [Model(recipe, directory / _key(recipe, seed) / recipe.name, seed) for recipe, seed in wanted]
    missing = [model for model in models if not model.path.exists()]
    if missing:
        orders = [Order(model.recipe.name, model.seed, str(model.path)) for model in missing]
        made = subprocess.run(
            [sys.executable, "-m", __spec__.name, msgspec.json.encode(orders).decode()],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            check=False,
        )
        if made.returncode:
            raise TierError(
                f"the test models could not be made: {made.stderr.strip()[-2000:]}",
                remedy="Making them needs torch and transformers; see what it says.",
            )
    return models


def _key(recipe: Recipe, seed: int) -> str:
    """What decides the weights: the recipe, the seed, this file and the libraries."""
    source = Path(__file__).read_bytes()
    libraries = f"{version('torch')} {version('transformers')}"
    return blake3(b"\0".join([source, recipe.name.encode(), b"%d" % seed, libraries.encode()])).hexdigest(length=8)


class Order(msgspec.Struct, frozen=True, array_like=True):
    recipe: str
    seed: int
    path: str


def main(arguments: list[str]) -> None:
    """The process that makes models."""
    for order in msgspec.json.decode(arguments[0], type=list[Order]):
        path = Path(order.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch, "model")
            _make(_MADE[order.recipe], order.seed, made)
            if not path.exists():
                made.rename(path)  # all or nothing


def _make(recipe: Recipe, seed: int, path: Path) -> None:
    import torch
    import transformers  # type: ignore[import-not-found,import-untyped,unused-ignore]

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(recipe.model_type, **recipe.config)
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(A_LOG)
            elif name.endswith("dt_bias"):
                weight.zero_()
            elif name.endswith("embed_tokens.weight"):
                weight.normal_()
            elif name.endswith("q_norm.weight"):
                weight.add_(SHARPNESS - 1)  # of 1, or of 0 where the model itself adds 1
            elif weight.ndim > 1:
                weight.normal_(std=WEIGHT_STD)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG))


_END = "<|end|>"
_TOKENIZER_CONFIG: Json = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin|>",
    "eos_token": _END,
    "pad_token": _END,
    "chat_template": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
}


def _tokenizer() -> Json:
    """Every byte is a token, so any text can be sent to a server. The rest of the vocabulary is meaningless words."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    words = [*characters, *(f"w{index}" for index in range(256, VOCABULARY - 2)), "<|begin|>", _END]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": words[index], **special} for index in (VOCABULARY - 2, VOCABULARY - 1)
        ],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: index for index, word in enumerate(words)},
            "merges": [],
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
