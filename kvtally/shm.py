"""Shared memory: how the arena's file descriptor becomes bytes, for the store that made it and for every client.

Owns the mapping, its page-fault and fork behaviour, and the views into it. Does not know what lies where (`core.space`)
nor how the descriptor travelled (`store.listen`, `client`). Neighbours: `store.arena` and `client`.

Threading: `populate` may run in its own thread; it holds no interpreter lock while the kernel works. Everything else is
plain reads of immutable fields.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct

import numpy as np

# Missing from the mmap module; see madvise(2). Linux 5.14 and later.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: see unix(7)

# mmap.madvise() keeps the interpreter lock for the whole call, seconds when pre-faulting. ctypes lets go of it.
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Where its bytes begin, in this process."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a unix socket, as the kernel knows it. It decides who may map the arena."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


class Mapping:
    """The arena as this process sees it."""

    def __init__(self, memory: mmap.mmap, *, writable: bool) -> None:
        self.size_bytes = len(memory)
        self.writable = writable
        self._memory = memory
        self._view = memoryview(memory)
        self.address = address_of(self._view)

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes `[offset, offset + length)`. The caller has checked offsets that come from a peer."""
        return self._view[offset : offset + length]

    def populate(self, offset: int, length: int) -> None:
        """Fault these pages in now, instead of at first touch. Changes no contents, so others may write there while it
        runs. Raises OSError (ENOMEM, EFAULT) if there is no memory."""
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        while _madvise(self.address + offset, length, advice):
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14
                return self._touch(offset, length)
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def advise_huge_pages(self) -> bool:
        """Ask for huge pages. False if the kernel was built without them."""
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return True

    def close(self) -> bool:
        """Unmap. False, and nothing changes, while views are still alive: the memory is still reachable. A client keeps
        its liveness pipe open until this returns True."""
        self._view.release()
        try:
            self._memory.close()
        except BufferError:
            self._view = memoryview(self._memory)
            return False
        return True

    def _touch(self, offset: int, length: int) -> None:
        """Read one byte of each page. Reading is enough: either kind of fault allocates a shared page and maps it
        writable. Writing would race with others who already use the memory."""
        np.frombuffer(self._view[offset : offset + length], dtype=np.uint8)[:: mmap.PAGESIZE].max()


def map_arena(fd: int, size_bytes: int, *, writable: bool) -> Mapping:
    """Map the first `size_bytes` of an arena. The descriptor may be closed afterwards. Raises OSError."""
    held_bytes = os.fstat(fd).st_size
    if not 0 < size_bytes <= held_bytes:
        raise OSError(errno.EINVAL, f"an arena of {size_bytes} bytes was announced, the descriptor holds {held_bytes}")
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
    # A forked child must not keep the arena alive or write to it; a core dump must not be as large as the arena.
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_DONTDUMP)
    return Mapping(memory, writable=writable)
