"""The disk tier's directory: a `Device` on real files, and how a directory is taken into use.

    DIRECTORY/format.json   format version, granule, and a random id that seeds the journal's checksums
              lock          flock'ed by the store that uses the directory
              data          the objects' bytes, in pieces that `disk` hands out
              journal       the records of `journal`

Owns all file access, the directory's lock and format, and the refusal of what cannot be used. Does not know what the
bytes mean: that is `disk`, which runs on it, and `journal`. Its caller is `server`, by way of `open_disk`.

Threading: as `disk.Device` says.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from kvtally.core.space import GRANULE_BYTES
from kvtally.errors import ConfigError, IncompatibleError, KVTallyError, TierError
from kvtally.shm import address_of
from kvtally.store.tiers.disk import READ_STEP_BYTES, DiskTier, impossible_size

FORMAT_VERSION = 1  # of the directory, the data file and the journal
IOVEC_MAX = 1024
CLOSED = -1  # a file descriptor that the kernel itself refuses (EBADF)
FILES = frozenset({"lock", "format.json", "format.json.new", "data", "journal", "journal.new"})
PAGE_BYTES = 4096  # of the page cache; direct reads must be multiples of it, and no device needs more
HUGE_PAGE_BYTES = 2 * 1024 * 1024


def open_disk(directory: Path, capacity_bytes: int) -> DiskTier:
    """The disk tier in `directory`, which is made if absent. Refusing it (KV-1xx, KV-2xx) leaves it untouched."""
    try:
        volume = os.statvfs(next(path for path in (directory, *directory.absolute().parents) if path.exists()))
        volume_bytes = volume.f_blocks * volume.f_frsize  # 0 if the file system does not say
        if not GRANULE_BYTES <= capacity_bytes <= (volume_bytes or capacity_bytes):
            raise impossible_size(
                capacity_bytes, f"Choose from {GRANULE_BYTES} to {volume_bytes}, all of {directory}'s volume."
            )
        device = FileDevice(directory, capacity_bytes)
    except OSError as error:
        raise _unusable(directory, str(error)) from error
    try:
        return DiskTier(device, capacity_bytes)
    except TierError as error:
        device.close()
        raise _unusable(directory, error.message) from error


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """`format.json`. The version is all that another version is expected to share."""

    kvtally_disk: int
    granule_bytes: int = 0
    id: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_format(directory: Path) -> Format | None:
    """The format of a directory; None if it is absent, empty, or its setup was never finished. Changes nothing.

    After a power loss, a format.json that was never synced may be blank. The rest of such a directory is lost with its
    id: under a new one, no record of the journal verifies.
    """
    names = set(os.listdir(directory)) if directory.exists() else set()
    if "format.json" not in names:
        if names - {"lock", "format.json.new", "lost+found"}:  # an empty volume has a lost+found
            raise _unusable(directory, "it holds files that are not a store's")
        return None
    content = (directory / "format.json").read_bytes()
    if not content.strip(b"\0") and "lock" in names and names <= FILES | {"lost+found"}:
        return None
    try:
        found = msgspec.json.decode(content, type=Format)
    except msgspec.DecodeError as error:
        raise _unusable(directory, f"its format.json cannot be read: {error}") from error
    if (found.kvtally_disk, found.granule_bytes) != (FORMAT_VERSION, GRANULE_BYTES):
        theirs, ours = f"{found.kvtally_disk}/{found.granule_bytes}", f"{FORMAT_VERSION}/{GRANULE_BYTES}"
        what = f"the disk directory {directory} has format {theirs}, this store reads {ours}"
        raise IncompatibleError(what, remedy="Empty it (it holds only cached data), or use another.", code="KV-203")
    return found


class Bounce(threading.local):
    """Each reader's own memory for direct reads. In one huge page, if there are any: a device fills that in a few
    pieces, and the arena's small pages in hundreds."""

    def __init__(self) -> None:
        self.page = bytearray(PAGE_BYTES)
        memory = mmap.mmap(-1, READ_STEP_BYTES + HUGE_PAGE_BYTES)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -address_of(memory) % HUGE_PAGE_BYTES
        self.bytes: Any = np.frombuffer(memory, dtype=np.uint8)[start : start + READ_STEP_BYTES]


class FileDevice:
    """A `Device` in a directory. Opening it takes the directory's lock."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._directory = directory
        self._lock_fd = self._data_fd = self._direct_fd = self._journal_fd = CLOSED
        self._bounce = Bounce()
        read_format(directory)  # refuses what is not ours before anything is made in it
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._take_lock()
            self.identity = (read_format(directory) or self._write_format()).id
            (directory / "journal.new").unlink(missing_ok=True)
            self._data_fd = self._open("data")
            with suppress(OSError):  # a file system without direct reads
                self._direct_fd = os.open(directory / "data", os.O_RDONLY | os.O_DIRECT)
                os.posix_fadvise(self._data_fd, 0, 0, os.POSIX_FADV_RANDOM)  # so that `_is_cached` reads nothing else
            if os.fstat(self._data_fd).st_size > capacity_bytes:
                os.ftruncate(self._data_fd, capacity_bytes)
            self._journal_fd = self._open("journal")
            self._journal_bytes = os.fstat(self._journal_fd).st_size
            self._opened = {"data": os.fstat(self._data_fd), "journal": os.fstat(self._journal_fd)}
        except (OSError, KVTallyError):
            self.close()
            raise

    def read_journal(self, offset: int, length_bytes: int | None) -> bytes:
        missing = self._journal_bytes - offset if length_bytes is None else length_bytes
        parts = []
        while missing > 0 and (part := os.pread(self._journal_fd, missing, offset)):
            parts.append(part)
            offset += len(part)
            missing -= len(part)
        return b"".join(parts)

    def write_journal(self, offset: int, data: bytes) -> None:
        self._require_present()
        if self._journal_bytes > offset:
            os.ftruncate(self._journal_fd, offset)
        self._journal_bytes = offset + len(data)  # before writing: what fails half-way is cut off by the next write
        _write_all(self._journal_fd, [memoryview(data)], offset)

    def replace_journal(self, parts: Iterable[bytes]) -> None:
        self._require_present()
        temporary = self._directory / "journal.new"
        fd = self._open("journal.new", os.O_TRUNC)
        try:
            with open(fd, "wb", buffering=1 << 20, closefd=False) as stream:
                stream.writelines(parts)
            os.fdatasync(fd)  # rare, and without it a power loss could leave an empty journal
            temporary.rename(self._directory / "journal")
            os.dup2(fd, self._journal_fd, inheritable=False)  # not close and reopen: the number stays valid for readers
            self._opened["journal"] = os.fstat(fd)
            self._journal_bytes = self._opened["journal"].st_size
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def preadv(self, target: Sequence[memoryview], offset: int) -> int:
        """Read from the page cache what it has, and the rest past it. The arena is the cache: a second one takes memory
        and time, and its read-ahead is too short for a fast disk."""
        views = list(target)
        done = 0
        if self._direct_fd != CLOSED and not self._is_cached(offset, sum(map(len, views))):
            done = _transfer(self._read_direct, self._direct_fd, views, offset)
        return done + _transfer(os.preadv, self._data_fd, views, offset + done)

    def _is_cached(self, offset: int, length: int) -> bool:
        """Whether the first and the last page of these bytes are in the page cache."""
        try:
            return all(
                os.preadv(self._data_fd, [self._bounce.page], at // PAGE_BYTES * PAGE_BYTES, os.RWF_NOWAIT)
                for at in (offset, offset + length - 1)
            )
        except OSError:  # it is not, or this file system cannot say
            return False

    def _read_direct(self, fd: int, views: list[memoryview], offset: int) -> int:
        """Fill as much of the first view as one direct read can; 0 if direct reads do not work here."""
        bounce, size = self._bounce.bytes, min(len(views[0]), READ_STEP_BYTES)
        if offset % PAGE_BYTES:
            return 0
        try:
            count = os.preadv(fd, [bounce[: -(-size // PAGE_BYTES) * PAGE_BYTES]], offset)
        except OSError:  # the next, ordinary read will say what is wrong
            return 0
        count = min(count, size)
        np.copyto(np.frombuffer(views[0], dtype=np.uint8)[:count], bounce[:count])
        return count

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        _write_all(self._data_fd, source, offset)

    def close(self) -> None:
        journal_fd = self._journal_fd
        fds = journal_fd, self._data_fd, self._direct_fd, self._lock_fd
        self._journal_fd = self._data_fd = self._direct_fd = self._lock_fd = CLOSED
        try:
            if journal_fd != CLOSED:
                os.fdatasync(journal_fd)
        finally:
            for fd in fds:
                with suppress(OSError):  # CLOSED, or a device that fails to the last
                    os.close(fd)

    def _take_lock(self) -> None:
        self._lock_fd = self._open("lock")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another store uses the disk directory {self._directory}"
            raise ConfigError(what, remedy="Stop it, or give this one a directory of its own.", code="KV-104") from None

    def _write_format(self) -> Format:
        made = Format(kvtally_disk=FORMAT_VERSION, granule_bytes=GRANULE_BYTES, id=secrets.randbits(63))
        fd = self._open("format.json.new", os.O_TRUNC)
        try:
            _write_all(fd, [memoryview(msgspec.json.encode(made) + b"\n")], 0)
            os.fsync(fd)  # once in a directory's life; without it a power loss could leave an empty file in its place
        finally:
            os.close(fd)
        (self._directory / "format.json.new").rename(self._directory / "format.json")
        with suppress(OSError):  # a file system that does not sync directories
            _sync_directory(self._directory)
        return made

    def _open(self, name: str, flags: int = 0) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | flags, 0o600)

    def _require_present(self) -> None:
        """Raise OSError if a file was deleted or replaced: what is written to it would be gone after a restart."""
        for name, opened in self._opened.items():
            if not os.path.samestat(os.stat(os.path.join(self._directory, name)), opened):
                raise FileNotFoundError(errno.ENOENT, "replaced by another file", name)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    if _transfer(os.pwritev, fd, list(views), offset) < sum(map(len, views)):
        raise OSError(errno.EIO, "the device takes no more bytes")


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, views: list[memoryview], offset: int) -> int:
    """Repeat preadv or pwritev until `views` (consumed) are done or it moves nothing; returns the bytes moved."""
    done = 0
    while views and (count := call(fd, views[:IOVEC_MAX], offset + done)):
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return done


def _unusable(directory: Path, why: str) -> ConfigError:
    what = f"the disk directory {directory} cannot be used: {why}"
    return ConfigError(what, remedy="Give it a writable directory that is empty or a store's own.", code="KV-103")
