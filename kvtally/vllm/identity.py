"""Which weights are these? Two fine-tunes of one model have the same name, shapes and dtypes, and different KV cache.

The identity is the hub commit where the model came from a hub snapshot, else a digest of the weight files: names,
sizes, safetensors headers and sampled contents. Reading a few hundred kilobytes of each file takes milliseconds;
hashing all of it would take minutes for a large model and delay every start.
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from kvtally.errors import IncompatibleError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 64 * 1024
SAMPLES = 16


def model_identity(model: str, revision: str | None) -> str:
    """A string that is equal for equal weights and differs for others, as far as sampling can tell."""
    directory = Path(model)
    if directory.is_file():
        return f"file:{_digest([directory])}"
    if not directory.is_dir():
        directory = _snapshot(model, revision)
    if directory.parent.name == "snapshots":  # a hub cache: the folder's name is the commit
        return f"hub:{directory.parent.parent.name}@{directory.name}"
    files = sorted(path for path in directory.iterdir() if path.suffix in WEIGHTS and path.is_file())
    if not files:
        raise _unknown(f"no weight files in {directory}")
    return f"files:{_digest([*files, *sorted(directory.glob('config.json'))])}"


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


def _unknown(why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the model's weights cannot be identified: {why}",
        remedy='Give the model as a folder, or name it with "model_identity" in kv_connector_extra_config.',
        code="KV-208",
    )
