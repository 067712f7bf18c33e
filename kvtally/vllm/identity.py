"""Which weights are these? Two fine-tunes of one model have the same name, shapes and dtypes, and different KV cache.

A model's identity is the hub commit where it came from a hub snapshot, else a digest of its files, every byte of them
(`weights`). How the weights are used is said by the configuration and the code that lie with them, unless the user says
something else (`override_digest`).

An adapter's identity is its name, its path and the state of its files (`Adapters`).

Neighbours: `layout` puts the first two into the namespace, `path` the third into chain values. Imports no vLLM.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from kvtally.errors import IncompatibleError
from kvtally.vllm.weights import file_digests

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What has such a name and holds none: what trainers leave, and vLLM does not load.
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
# What else of a model's folder decides KV: the configuration, by its two names, how images become pixels, how weights
# are quantised, which files they are in, and code of its own.
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
# What vLLM reads of an adapter's folder.
ADAPTER_FILES = (
    "adapter_config.json",
    *(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt", "tensors")),
)
MOST_ADAPTERS = 4096  # that are remembered; far more than an engine keeps loaded


def model_identity(model: str, revision: str | None) -> str:
    """A string that is equal for equal weights and differs for others."""
    directory = Path(model)
    if directory.is_file():
        return f"file:{_digest([directory])}"
    if not directory.is_dir():
        directory = _snapshot(model, revision)
    if _is_hub_entry(directory):
        return f"hub:{directory.parent.parent.name}@{directory.name}"
    files = {path for path in directory.iterdir() if _has_weights(path)}
    if not files:
        raise _unknown(f"no weight files in {directory}")
    files |= {path for pattern in CONFIGURATION for path in directory.glob(pattern) if path.is_file()}
    return f"files:{_digest(sorted(files))}"


def _has_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS and not NO_WEIGHTS.fullmatch(path.name) and path.is_file()


def _is_hub_entry(directory: Path) -> bool:
    """Whether a folder is one of the hub's cache: its name is the commit. Any trainer may call a folder "snapshots"."""
    *_, repository, snapshots, commit = ("", "", "", *directory.parts)
    return repository.startswith("models--") and snapshots == "snapshots" and COMMIT.fullmatch(commit) is not None


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        raise _unknown(f"{model} is neither a folder nor in the local hub cache")
    return Path(config).parent


def _digest(files: list[Path]) -> str:
    state = blake3()
    for path, digest in zip(files, file_digests(files), strict=True):
        state.update(f"{path.name}\0{digest}\0".encode())
    return state.hexdigest(length=16)


def override_digest(overrides: object, config_path: str | None) -> str:
    """What a user says of the model's configuration beyond what lies with the weights; empty: nothing.

    Not of the configuration itself: some models complete theirs while they are loaded, in the workers' processes only.
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
    """As JSON knows it. Of anything else, what it says of itself, without where it lies in memory."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if isinstance(value, FunctionType):  # by what it does: two lambdas have one name
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
    """Whether what the model computes depends on the longest context the engine serves: LongRoPE chooses its factors by
    that, and Llama 4 whether attention is tempered."""
    if config.get("rope_type", config.get("type")) in ("longrope", "su") or "attn_temperature_tuning" in config:
        return True
    return any(is_length_decisive(value) for value in config.values() if isinstance(value, Mapping))


class Adapter(NamedTuple):
    """A LoRA adapter. `is_mixed`: this engine has had others by its name and path, and its own cache, which goes by
    those, may still hold their KV."""

    identity: str
    is_mixed: bool


class Adapters:
    """The adapters of one engine, by name, path and what their files are.

    vLLM reads those files when it loads an adapter, and again whenever it had let go of it: which state of them it
    computes with is not known once they have changed. From then on the adapter is a mixture.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}  # identities; empty where there were several

    def adapter(self, lora: LoRARequest | None) -> Adapter:
        """A request's. Takes microseconds: its files are looked at, not read."""
        if lora is None:
            return Adapter("", is_mixed=False)
        name = lora.lora_name, lora.lora_path
        identity = "\0".join((*name, _state_of_files(lora.lora_path)))
        known = self._known.pop(name, identity)
        self._known[name] = known if known == identity else ""  # as the youngest
        if len(self._known) > MOST_ADAPTERS:
            del self._known[next(iter(self._known))]
        return Adapter(identity, is_mixed=known != identity)


def _state_of_files(path: str) -> str:
    """Sizes and times of an adapter's files; empty where there are none, as for an adapter from a hub."""
    directory, states = os.path.expanduser(path), []
    for name in ADAPTER_FILES:
        with suppress(OSError, ValueError):  # not there, or no path at all
            state = os.stat(os.path.join(directory, name))
            states.append(f"{name} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(states)


def _unknown(why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the model's weights cannot be identified: {why}",
        remedy='Give the model as a folder, or name it with "model_identity" in kv_connector_extra_config.',
        code="KV-208",
    )
