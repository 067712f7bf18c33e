"""The arena: anonymous shared memory that the store owns and engines map.

Owns the memfd, its pre-faulting and its sizing against what the machine has. Does not know what lies where
(`core.space`, by way of `Store`). Neighbours: `shm` (the mapping itself), `mover` (reads and writes its views),
`server` (hands its descriptor to clients).

A memfd has no name in any file system: when the last process that maps it is gone, so is the memory, whatever crashed.

Threading: pre-faulting runs in one background thread, which only reads `_closing` and writes `populated_bytes`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtally.config.sizes import available_memory_bytes
from kvtally.config.units import human_size
from kvtally.core.space import Piece
from kvtally.errors import ConfigError
from kvtally.shm import map_arena
from kvtally.wire.limits import MIB

_POPULATE_STEP_BYTES = 64 * MIB  # one madvise call: long enough to be cheap, short enough to stop between two
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Arena:
    """`size_bytes` of shared memory behind `fd`. Raises ConfigError KV-102 where the machine cannot give that much."""

    def __init__(self, size_bytes: int) -> None:
        check_fits(size_bytes)
        self.size_bytes = size_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.populated_bytes = 0
        self.fd = os.memfd_create("kvtally-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            # A client holds the same descriptor. Were it to shrink the file, everybody's next access would be a SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapping = map_arena(self.fd, self.size_bytes, writable=True)
        except OSError as error:
            os.close(self.fd)
            raise _too_large(size_bytes, str(error)) from error
        self.huge_pages = _huge_pages_allowed() and self._mapping.advise_huge_pages()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def views(self, pieces: Iterable[Piece]) -> list[memoryview]:
        view = self._mapping.view
        return [view(offset, length) for offset, length in pieces]

    def populate(self, done: Callable[[ConfigError | None], object] | None = None) -> None:
        """Pre-fault in the background, from the front (where the first objects go). `populated_bytes` is the progress;
        `done` is called in that thread at the end, with the error if memory ran out, and not at all after `close`."""
        self._thread = threading.Thread(target=self._populate, args=(done,), name="kvtally-populate", daemon=True)
        self._thread.start()

    def wait_populated(self, timeout_s: float) -> bool:
        """Whether the whole arena is pre-faulted, waiting so long for the background thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.populated_bytes == self.size_bytes

    def close(self) -> None:
        """Unmap (at the latest when the last view is gone) and close. Clients that map it keep it alive. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self.fd)
        self._mapping.close()

    def _populate(self, done: Callable[[ConfigError | None], object] | None) -> None:
        failure = None
        while self.populated_bytes < self.size_bytes:
            if self._closing.is_set():
                return
            step = min(_POPULATE_STEP_BYTES, self.size_bytes - self.populated_bytes)
            try:
                self._mapping.populate(self.populated_bytes, step)
            except OSError as error:
                failure = _too_large(
                    self.size_bytes, f"memory ran out after {human_size(self.populated_bytes)}: {error}"
                )
                break
            self.populated_bytes += step
        if done is not None:
            done(failure)


def check_fits(size_bytes: int) -> None:
    """Raise ConfigError KV-102 for a size that this machine can never give. Touches nothing."""
    if size_bytes < mmap.PAGESIZE:
        raise ConfigError(
            f"an arena of {size_bytes} bytes is smaller than one page ({mmap.PAGESIZE} bytes)",
            remedy="Set the store's memory to at least as much as a few objects take, for example 1GiB.",
            code="KV-102",
        )
    available = available_memory_bytes()
    if size_bytes > available:
        raise _too_large(size_bytes, f"this machine, or its control group, has {human_size(available)} in all")


def _huge_pages_allowed() -> bool:
    try:
        setting = _SHMEM_HUGE_PAGES.read_text()
    except OSError:
        return False
    return any(f"[{mode}]" in setting for mode in ("always", "within_size", "advise", "force"))


def _too_large(size_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"an arena of {human_size(size_bytes)} cannot be had: {why}",
        remedy="Give the store less memory (--memory), or raise the limit of its control group or container.",
        code="KV-102",
    )
