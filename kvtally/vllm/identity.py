"""Which weights are these? Two fine-tunes of one model have the same name, shapes and dtypes, and different KV cache.

A model's identity is the hub commit where it came from a hub snapshot, else a digest of the weight files: names,
sizes, safetensors headers and sampled contents. Reading a few hundred kilobytes of each file takes milliseconds;
hashing all of it would take minutes for a large model and delay every start. How the weights are used is said by the
configuration that lies with them, unless the user says something else (`override_digest`).

An adapter's identity is its name, its path and what its files were when this process first heard of it (`Adapters`).

Neighbours: `layout` puts the first two into the namespace, `path` the third into chain values. Imports no vLLM.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blake3 import blake3

from kvtally.errors import IncompatibleError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 64 * 1024
SAMPLES = 16
COMMIT = re.compile("[0-9a-f]{40}")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST_ADAPTERS = 4096  # that are remembered; far more than an engine keeps loaded

K = TypeVar("K")
V = TypeVar("V")


def model_identity(model: str, revision: str | None) -> str:
    """A string that is equal for equal weights and differs for others, as far as sampling can tell."""
    directory = Path(model)
    if directory.is_file():
        return f"file:{_digest([directory])}"
    if not directory.is_dir():
        directory = _snapshot(model, revision)
    if _is_hub_entry(directory):
        return f"hub:{directory.parent.parent.name}@{directory.name}"
    files = sorted(path for path in directory.iterdir() if path.suffix in WEIGHTS and path.is_file())
    if not files:
        raise _unknown(f"no weight files in {directory}")
    return f"files:{_digest([*files, *sorted(directory.glob('config.json'))])}"


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
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            step = max(SAMPLE_BYTES, size // SAMPLES)
            for offset in range(0, size, step):
                state.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return state.hexdigest(length=16)


def override_digest(overrides: object, config_path: str | None) -> str:
    """What a user says of the model's configuration beyond what lies with the weights; empty: nothing.

    Not of the configuration itself: some models complete theirs while they are loaded, in the workers' processes only.
    """
    if not overrides and not config_path:
        return ""
    file = Path(config_path or "").expanduser()
    file = file / "config.json" if file.is_dir() else file
    told = blake3(file.read_bytes()).hexdigest() if file.is_file() else config_path
    return blake3(json.dumps([_plain(overrides), told], sort_keys=True).encode()).hexdigest(length=16)


def _plain(value: object) -> object:
    """As JSON knows it. Of anything else, what it says of itself, without where it lies in memory."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
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
    """The adapters of one engine, by what their files were when each was loaded.

    vLLM reads an adapter's files once, unless a request says `load_inplace`: what is on disk later is not what it
    computes with.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], str] = {}  # identities
        self._only: dict[tuple[str, str], str] = {}  # by name and path; empty where there were several

    def adapter(self, lora: LoRARequest | None) -> Adapter:
        """A request's. Takes microseconds if it is known; else its folder is listed."""
        if lora is None:
            return Adapter("", is_mixed=False)
        name = lora.lora_name, lora.lora_path
        identity = self._known.get((lora.lora_int_id, *name))
        if identity is None or lora.load_inplace:
            identity = "\0".join((*name, _state_of_files(lora.lora_path)))
            is_only = self._only.get(name, identity) == identity
            _remember(self._only, name, identity if is_only else "")
        _remember(self._known, (lora.lora_int_id, *name), identity)
        return Adapter(identity, is_mixed=self._only.get(name, identity) != identity)


def _remember(memory: dict[K, V], key: K, value: V) -> None:
    """As the youngest; the oldest is forgotten where there are too many."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MOST_ADAPTERS:
        del memory[next(iter(memory))]


def _state_of_files(path: str) -> str:
    """A digest of what a folder says of its files; empty for an adapter from a hub."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return ""
    states = ((file.relative_to(directory), file.stat()) for file in directory.rglob("*") if file.is_file())
    lines = sorted(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n" for name, state in states)
    return blake3("".join(lines).encode(errors="surrogateescape")).hexdigest(length=16)


def _unknown(why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the model's weights cannot be identified: {why}",
        remedy='Give the model as a folder, or name it with "model_identity" in kv_connector_extra_config.',
        code="KV-208",
    )
