"""Digests of whole files, each computed once on a machine.

Weights are told apart by every byte: one edited layer, one row of an embedding, one merged adapter is another model.
Reading them all takes a while, so a digest is remembered under what the file system says of the file: device, inode,
size, and the times of its last change. The kernel sets one of those times (ctime) on every write, and no user can set
it back: whatever changes a file makes us read it again.

The memory is a file in the user's cache directory. Ranks of one engine ask for the same digests at the same moment: the
first one computes them, under a lock, the others wait. Imports no vLLM.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvtally.config.directories import cache_directory
from kvtally.errors import IncompatibleError

log = logging.getLogger("kvtally.vllm")

SEGMENT_BYTES = 1 << 30  # hashed by one thread; part of what a digest is, so never change it
READ_BYTES = 4 << 20
MOST_THREADS = 8  # other engines of the machine may be serving
MOST_KNOWN = 4096  # files; the oldest are forgotten
LOCK_S = 600.0  # how long others may take; then we read the files ourselves
# A file that changed this recently may change again within the resolution of its times, unnoticed.
SETTLED_NS = 2_000_000_000
WORTH_SAYING_BYTES = 4 << 30
DIGEST = re.compile("[0-9a-f]{64}")


class Version(NamedTuple):
    """One state of one file."""

    device: int
    inode: int
    size_bytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Version:
        state = path.stat()
        return cls(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)

    @property
    def key(self) -> str:
        return "-".join(map(str, self))

    def is_settled(self, now_ns: int) -> bool:
        """Whether the next change cannot look like this one."""
        return max(self.written_ns, self.changed_ns) < now_ns - SETTLED_NS


def digest_of(files: Sequence[Path]) -> str:
    """One digest of several files: of their names and every byte."""
    state = blake3()
    for path, digest in zip(files, file_digests(files), strict=True):
        state.update(f"{path.name}\0{digest}\0".encode())
    return state.hexdigest(length=16)


def file_digests(files: Sequence[Path], directory: Path | None = None) -> list[str]:
    """The digest of each file's bytes. They are remembered in `directory`, or where XDG wants caches."""
    directory = cache_directory(os.environ) if directory is None else directory
    versions = [Version.of(path) for path in files]
    known = _load(directory)
    if any(version.key not in known for version in versions):
        with _locked(directory):
            known = _load(directory)
            _learn(known, files, versions, directory)
    return [known[version.key] for version in versions]


def _learn(known: dict[str, str], files: Sequence[Path], versions: Sequence[Version], directory: Path) -> None:
    """Hash what is not known."""
    missing = {version.key: (path, version) for path, version in zip(files, versions, strict=True)}
    missing = {key: file for key, file in missing.items() if key not in known}
    total_bytes = sum(version.size_bytes for _, version in missing.values())
    if total_bytes >= WORTH_SAYING_BYTES:
        log.warning("kvtally: hashing %.0f GB of weights, once on this machine", total_bytes / 1e9)
    begun_ns = time.time_ns()
    digests = _hash([path for path, _ in missing.values()])
    for (key, (path, version)), digest in zip(missing.items(), digests, strict=True):
        if Version.of(path) != version:
            raise IncompatibleError(
                f"weights cannot be identified: {path.name} changed while it was read",
                remedy="Start the engine when its files are complete.",
                code="KV-208",
            )
        known[key] = digest
    settled = {key for key, (_, version) in missing.items() if version.is_settled(begun_ns)}
    if settled:
        _keep({key: digest for key, digest in known.items() if key not in missing or key in settled}, directory)


def _hash(files: Sequence[Path]) -> list[str]:
    segments = [(path, start) for path in files for start in range(0, max(1, path.stat().st_size), SEGMENT_BYTES)]
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), len(segments)))
    states = {path: blake3() for path in files}
    with ThreadPoolExecutor(threads) as pool:
        for (path, _), digest in zip(
            segments, pool.map(lambda segment: _hash_segment(*segment), segments), strict=True
        ):
            states[path].update(digest)
    return [states[path].hexdigest() for path in files]


def _hash_segment(path: Path, start: int) -> bytes:
    state, buffer = blake3(), memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = SEGMENT_BYTES
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            state.update(buffer[:count])
            left -= count
    return state.digest()


# ---- what is remembered


def _load(directory: Path) -> dict[str, str]:
    try:
        known = json.loads((directory / "weights.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: digest for key, digest in known.items() if isinstance(digest, str) and DIGEST.fullmatch(digest)}


def _keep(known: dict[str, str], directory: Path) -> None:
    """What cannot be kept is computed again at the next start."""
    youngest = dict(list(known.items())[-MOST_KNOWN:])
    try:
        beside = directory / f"weights.json.{os.getpid()}"
        beside.write_text(json.dumps(youngest))
        beside.replace(directory / "weights.json")
    except OSError as error:
        log.warning("kvtally: the digests of the weights are not remembered, every start reads them: %s", error)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time, as far as that can be had: without, the same digests are computed twice."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield
    finally:
        os.close(lock)
