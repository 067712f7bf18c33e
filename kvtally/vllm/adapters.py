"""Which adapter is this? LoRA adapters are known by the bytes of their files, wherever these lie and since when.

    scheduler half ──adapter(request)──▶ Adapter, without an identity at first
                                            ▲
             this module's thread: looks at the files, and hashes those that it does not know

A prompt's chain values have the adapter's identity in them, so nothing of the request can be looked up or saved before
it is known. No step of the engine waits for that: files may lie on a slow disk, or on one that hangs.

vLLM reads an adapter's files when it loads the adapter, and again after it has evicted it. So the files are looked at
for every request (that takes microseconds), and once their bytes have changed, nobody can tell which ones an engine
computes with: from then on this adapter has no identity in this engine.

Imports no vLLM. Neighbours: `weights` (digests of files, remembered on this machine), `boundaries` (chain values).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtally.errors import IncompatibleError
from kvtally.vllm.weights import Version, digest_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

log = logging.getLogger("kvtally.vllm")

# The files that vLLM reads from an adapter's folder.
CONFIGURATION = "adapter_config.json"
FILES = (CONFIGURATION, *(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt", "tensors")))
MOST_ADAPTERS = 4096  # remembered at once; far more than an engine keeps loaded


@dataclass(slots=True, eq=False)
class Adapter:
    """A request's adapter. `identity` is set once: empty if the adapter has none."""

    identity: str | None = None

    @property
    def name(self) -> str:
        """The identity, for a chain value. Raises IncompatibleError where there is none."""
        if not self.identity:
            raise IncompatibleError(
                "the request's adapter has no identity",
                remedy="This is a mistake in kvtally: report it.",
                code="KV-208",
            )
        return self.identity


class Label(NamedTuple):
    """What vLLM calls an adapter. Its own prefix cache goes by name and path."""

    name: str
    path: str
    is_3d: bool  # how the weights of experts are laid out: vLLM believes what the request says


class Known(NamedTuple):
    """What is remembered of an adapter. An empty `identity`: its bytes have changed under this engine."""

    versions: Sequence[Version]
    identity: str


class Adapters:
    """The adapters of one engine. The scheduler's thread calls `adapter` and `used`, which return at once."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Label | None] = queue.SimpleQueue()
        self._asked: dict[Label, Adapter] = {}  # the thread has not come to these yet
        self._used: set[Label] = set()  # a request was computed with these
        self._known: dict[Label, Known] = {}  # the thread's own
        self._failures: dict[Label, str] = {}  # what was logged last; the thread's own
        self._thread: threading.Thread | None = None

    def adapter(self, lora: LoRARequest | None) -> Adapter | None:
        """The adapter of a request that has just arrived. Requests that arrive before the thread has come to the files
        share what it finds."""
        if lora is None:
            return None
        label = _label(lora)
        asked = self._asked.get(label)
        if asked is not None:
            return asked
        if len(self._asked) >= MOST_ADAPTERS:
            return Adapter("")
        adapter = self._asked[label] = Adapter()
        self._questions.put(label)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtally-adapters", daemon=True)
            self._thread.start()
        return adapter

    def used(self, lora: LoRARequest | None) -> None:
        """A request was computed with this adapter, so vLLM has loaded it."""
        if lora is not None and len(self._used) < MOST_ADAPTERS:
            self._used.add(_label(lora))

    def stop(self, timeout_s: float = 2.0) -> None:
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        while (label := self._questions.get()) is not None:
            adapter = self._asked.pop(label)
            identity = ""
            try:
                identity = self._identify(label)
            except Exception as error:  # the supervisor's edge: an adapter that cannot be named costs its own requests
                self._say(label, str(error))
            finally:
                adapter.identity = identity

    def _identify(self, label: Label) -> str:
        """The adapter's identity; empty if it has none. Raises what stands in the way of knowing it."""
        files = _files(self._folder(label))
        begun_ns = time.time_ns()
        versions = [Version.of(file) for file in files]
        known = self._known.get(label)
        if known is not None and (not known.identity or known.versions == versions):
            identity = known.identity
        else:
            identity = f"adapter:{digest_of(files)}{':3d' if label.is_3d else ''}"
            if known is not None and known.identity != identity:
                identity = ""
                self._say(
                    label, "its files have changed since this engine first saw them; load them under another name"
                )
        is_settled = all(version.is_settled(begun_ns) for version in versions)
        self._known.pop(label, None)  # to come last: the oldest are forgotten first
        self._known[label] = Known(versions if is_settled else (), identity)
        if len(self._known) > MOST_ADAPTERS:
            del self._known[next(iter(self._known))]
        return identity

    def _folder(self, label: Label) -> Path:
        """Where vLLM reads it from, by vLLM's own rules."""
        path = label.path
        if os.path.isabs(path) or path.startswith("~") or os.path.exists(path):
            return Path(os.path.abspath(os.path.expanduser(path)))
        # A name on the hub. vLLM may download a newer version of it when it loads it: until then nobody knows which.
        if label not in self._used:
            raise _unknown(f"{path} is a name on the hub, and not loaded yet")
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("", "0", "false"):
            raise _unknown(f"{path} comes from ModelScope")
        from huggingface_hub import try_to_load_from_cache

        configuration = try_to_load_from_cache(path, CONFIGURATION)
        if not isinstance(configuration, str):
            raise _unknown(f"{path} is neither a folder nor in the local hub cache")
        return Path(configuration).parent

    def _say(self, label: Label, why: str) -> None:
        """Once, and again when something else is wrong."""
        if self._failures.get(label) == why:
            return
        if len(self._failures) >= MOST_ADAPTERS:
            self._failures.clear()
        self._failures[label] = why
        log.warning("kvtally: requests with the LoRA adapter %s are neither saved nor reused: %s", label.name, why)


def _label(lora: LoRARequest) -> Label:
    return Label(lora.lora_name, lora.lora_path, lora.is_3d_lora_weight)


def _files(folder: Path) -> list[Path]:
    files = [file for file in (folder / name for name in FILES) if file.is_file()]
    if not any(file.name != CONFIGURATION for file in files):
        raise _unknown(f"no weight files in {folder}")
    return files


def _unknown(why: str) -> IncompatibleError:
    return IncompatibleError(
        f"the adapter cannot be identified: {why}", remedy="Give the adapter as a local folder.", code="KV-208"
    )
