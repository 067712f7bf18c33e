"""Which weights are these? Two fine-tunes of one model can have the same name, shapes and dtypes, but different KV.

A model's identity is the hub commit where it came from a hub snapshot, else a digest of its files, every byte of them
(`weights`). The configuration and the code beside the weights say how they are used, unless the user overrides that
(`override_digest`).

Neighbours: `layout` puts both into the namespace; `adapters` does the same for LoRA adapters. Imports no vLLM.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from blake3 import blake3

from kvtally.errors import IncompatibleError
from kvtally.vllm.weights import digest_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files of trainers: they have such names, but vLLM does not load them.
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
# The other files of a model's folder that decide KV: the configuration (it has two names), how images become pixels,
# how weights are quantised, the index of the weight files, and the model's own code.
CONFIGURATION = (
    "config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*quant*config*.json",
    "quantize_config.json",
    "*.index.json",
    "*.py",
)
COMMIT = re.compile("[0-9a-f]{40}")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def model_identity(model: str, revision: str | None) -> str:
    """A string that is equal for equal weights and differs for others."""
    directory = Path(model)
    if directory.is_file():
        return f"file:{digest_of([directory])}"
    if not directory.is_dir():
        directory = _snapshot(model, revision)
    if _is_hub_entry(directory):
        return f"hub:{directory.parent.parent.name}@{directory.name}"
    files = {path for path in directory.iterdir() if _has_weights(path)}
    if not files:
        raise _unknown(f"no weight files in {directory}")
    files |= {path for pattern in CONFIGURATION for path in directory.glob(pattern) if path.is_file()}
    return f"files:{digest_of(sorted(files))}"


def _has_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS and not NO_WEIGHTS.fullmatch(path.name) and path.is_file()


def _is_hub_entry(directory: Path) -> bool:
    """Whether a folder is an entry of the hub's cache, named by its commit. Trainers also have "snapshots" folders."""
    *_, repository, snapshots, commit = ("", "", "", *directory.parts)
    return repository.startswith("models--") and snapshots == "snapshots" and COMMIT.fullmatch(commit) is not None


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        raise _unknown(f"{model} is neither a folder nor in the local hub cache")
    return Path(config).parent


def override_digest(overrides: object, config_path: str | None) -> str:
    """A digest of what the user overrides in the model's configuration; empty if nothing.

    The effective configuration would not do: some models complete theirs while they are loaded, which happens only in
    the workers.
    """
    if not overrides and not config_path:
        return ""
    told = config_path
    if config_path:
        file = Path(os.path.expanduser(config_path))
        file = file / "config.json" if file.is_dir() else file
        told = blake3(file.read_bytes()).hexdigest() if file.is_file() else config_path
    return blake3(json.dumps([plain(overrides), told], sort_keys=True).encode()).hexdigest(length=16)


def plain(value: object) -> object:
    """The value in JSON's types. Other types become their `repr` without the memory address."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if isinstance(value, FunctionType):  # its code, because all lambdas have the same name
        code, cells = value.__code__, [cell.cell_contents for cell in value.__closure__ or ()]
        return [
            code.co_code.hex(),
            plain(code.co_consts),
            plain(code.co_names),
            plain(cells),
            plain(value.__defaults__),
        ]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return ADDRESS.sub("", repr(value))


def is_length_decisive(config: Mapping[str, Any]) -> bool:
    """Whether the model computes something else with another `max_model_len`. LongRoPE chooses its factors by it, and
    Llama 4 whether to scale attention."""
    if config.get("rope_type", config.get("type")) in ("longrope", "su") or "attn_temperature_tuning" in config:
        return True
    return any(is_length_decisive(value) for value in config.values() if isinstance(value, Mapping))


def _unknown(why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the model's weights cannot be identified: {why}",
        remedy='Give the model as a folder, or name it with "model_identity" in kv_connector_extra_config.',
        code="KV-208",
    )
