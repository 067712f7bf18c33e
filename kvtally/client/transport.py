"""One connection to a store: bytes out, replies in, and the arena that a unix socket brings with it. Never blocks.

Owns the socket, TLS, unsent bytes, descriptors in transit, and the liveness pipe: its write end is open exactly as long
as the arena is mapped here, because its closing is what tells the store that nobody writes to this client's slots any
more. Neighbours: `link` (left: when to connect and what to say), `shm` (right: the mapping).

Fork: a child inherits descriptors but not the mapping (`shm`). At once after the fork its copies of liveness pipes are
closed, and the Python objects of dead mappings are kept for ever: freeing one would unmap whatever lies there by then.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import select
import socket
import ssl
import weakref

from kvtally.endpoint import Endpoint, check_owner
from kvtally.errors import TransportError
from kvtally.shm import Mapping, map_arena
from kvtally.wire.frames import reply_reader
from kvtally.wire.limits import Limits
from kvtally.wire.messages import Reply

READ_BYTES = 256 * 1024
READS_PER_EXCHANGE = 32  # so that a store that never stops talking does not hold up an engine's step
LARGEST_FRAME_BYTES = 64 * 1024 * 1024  # whatever a greeting says
ARENA_DESCRIPTORS = 2

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# Every arena that is mapped or viewed in this process, and what closes its liveness pipe.
_arenas: weakref.WeakKeyDictionary[mmap.mmap, weakref.finalize[..., mmap.mmap]] = weakref.WeakKeyDictionary()


class Connection:
    """A connection, which begins when it is made; raises OSError if that fails at once. After any error, close it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.descriptors: list[int] = []  # received, but nobody owns them yet
        self.unsent = bytearray()
        self._endpoint = endpoint
        self._wants_descriptors = endpoint.shares_memory
        self._is_open = False
        self._wants_write = True
        self._reader = reply_reader(Limits().frame_bytes)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._socket = _connect(endpoint)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to wait for (see `select.poll`)."""
        return select.POLLIN | select.POLLOUT if self.unsent or self._wants_write else select.POLLIN

    def send(self, frame: bytes) -> None:
        """Send a frame, and keep for later what cannot be sent now."""
        sent = 0 if self.unsent else self._send(frame)
        if sent < len(frame):
            self.unsent += memoryview(frame)[sent:]

    def exchange(self) -> list[Reply]:
        """Send what was kept, and receive. Raises OSError or TransportError when the connection is over."""
        if not (self._is_open or self._open()):
            return []
        if self.unsent:
            self._flush()
        return self._receive()

    def greeted(self, frame_bytes: int) -> None:
        """The greeting was received: the store's limit applies, and no more descriptors are expected."""
        self._wants_descriptors = False
        self._reader = reply_reader(min(frame_bytes, LARGEST_FRAME_BYTES))

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def _open(self) -> bool:
        """True once the connection stands, the store is our own user's, and TLS is negotiated."""
        if self._endpoint.shares_memory:
            check_owner(
                self._socket,
                self._endpoint.address,
                remedy="Use a socket path in a directory that only you can write to.",
            )
        else:
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if self._endpoint.tls is not None and not self._agree(self._endpoint.tls):
                return False
        self._wants_write = False
        self._is_open = True
        return True

    def _agree(self, context: ssl.SSLContext) -> bool:
        if not isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.getpeername()
            except OSError as error:
                if error.errno != errno.ENOTCONN:
                    raise
                return False  # still connecting
            self._socket = context.wrap_socket(
                self._socket, server_hostname=self._endpoint.host, do_handshake_on_connect=False
            )
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._wants_write = False
            return False
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return False
        return True

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except OSError:
            # Either this would block, or the store is gone. Receiving finds that out, after the store's last words,
            # which may say why it refuses us.
            return 0

    def _flush(self) -> None:
        sent = 1
        while self.unsent and sent:
            with memoryview(self.unsent) as view, view[:READ_BYTES] as part:
                sent = self._send(part)
            del self.unsent[:sent]

    def _receive(self) -> list[Reply]:
        messages: list[Reply] = []
        for _ in range(READS_PER_EXCHANGE):
            try:
                data = self._read()
            except _WOULD_BLOCK:
                break
            except OSError:
                if messages:
                    break  # these messages count; the next call finds the end again
                raise
            if not data:
                if messages:
                    break
                raise TransportError(
                    "the store closed the connection",
                    remedy="It was stopped or restarted; the client reconnects by itself.",
                    code="KV-502",
                )
            messages += self._reader.feed(data)
            if len(data) < READ_BYTES:
                break
        return messages

    def _read(self) -> bytes | memoryview:
        if not self._wants_descriptors:
            return self._buffer[: self._socket.recv_into(self._buffer)]
        data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, ARENA_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self.descriptors += descriptors
        return data


def _connect(endpoint: Endpoint) -> socket.socket:
    """A socket that is connected, or connecting, to the first target that does not refuse at once."""
    code = 0
    # In random order: one of several addresses may be dead, which shows only later, so the next try must differ.
    for family, target in random.sample(endpoint.targets, len(endpoint.targets)):
        candidate = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = candidate.connect_ex(target)
        if code in (0, errno.EINPROGRESS):
            return candidate
        candidate.close()
    raise OSError(code, os.strerror(code))


def hold_arena(connection: Connection, size_bytes: int) -> Mapping:
    """Map the arena that came with the greeting. From now on, the liveness pipe lives as long as the mapping: it is
    closed when the last view of the memory is gone. Raises OSError or TransportError."""
    if len(connection.descriptors) != ARENA_DESCRIPTORS:
        raise TransportError(
            f"the greeting came with {len(connection.descriptors)} descriptors instead of {ARENA_DESCRIPTORS}",
            remedy="Client and store must be of the same version; also check this process's limit of open files.",
            code="KV-503",
        )
    arena, liveness = connection.descriptors
    mapping = map_arena(arena, size_bytes, writable=True)
    os.close(arena)
    connection.descriptors.clear()
    memory = mapping.view(0, 0).obj
    assert isinstance(memory, mmap.mmap)
    closer = weakref.finalize(memory, os.close, liveness)
    closer.atexit = False  # the kernel closes it when the process is really gone
    _arenas[memory] = closer
    return mapping


def _abandon_arenas() -> None:
    """In a forked child: close the parent's pipes, and keep the objects of mappings that do not exist here."""
    for memory, closer in list(_arenas.items()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        closer()
    _arenas.clear()


os.register_at_fork(after_in_child=_abandon_arenas)
