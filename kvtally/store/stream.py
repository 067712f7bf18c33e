"""A blocking connection on which no wait lasts: bytes go out of the arena and into it without a copy in Python.

Used at both ends of a bulk connection: `bulk` sends, `tiers.peer` receives. A wait ends when not one byte has moved for
a given time, however long the whole transfer takes. One thread uses a stream at a time; any thread may `interrupt` it.

The kernel waits, not Python: `settimeout` would poll before each call, and makes MSG_WAITALL useless. With TLS there is
no other way, because OpenSSL's calls go on by themselves after a timeout of the kernel's.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

from kvtally.wire.limits import KIB

PART_BYTES = 256 * KIB
_TICK_S = 0.05  # how often a wait in the kernel is looked after
_TIMEVAL = struct.Struct("@ll")


class Stream:
    """Takes the socket over. Every method but `interrupt` and `close` raises OSError when the connection is over, and
    TimeoutError, which is one, when nothing has moved for `stall_s` seconds; after that, close it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self._timeout_s: float | None = None
        if self._tls is None:
            connection.settimeout(None)
            tick = _TIMEVAL.pack(0, int(_TICK_S * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def send(self, data: Sequence[bytes | memoryview], stall_s: float) -> None:
        """Send all of it. When it returns or raises, the memory may be used again."""
        if self._tls is not None:
            self._wait_at_most(self._tls, stall_s)
            for view in data:
                for part in parts_of(memoryview(view)):
                    self._tls.sendall(part)
            return
        rest = [memoryview(view) for view in data]
        moved_s = time.monotonic()
        while rest:
            try:
                sent = self.socket.sendmsg(rest)
            except BlockingIOError:
                self._check(moved_s, stall_s)
                continue
            moved_s = time.monotonic()
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def receive(self, buffer: memoryview, stall_s: float, flags: int = 0) -> int:
        """Wait for some bytes; how many there are. 0: the other end has closed."""
        if self._tls is not None:
            self._wait_at_most(self._tls, stall_s)
            return self._tls.recv_into(buffer)
        begun_s = time.monotonic()
        while True:
            try:
                return self.socket.recv_into(buffer, 0, flags)
            except BlockingIOError:
                self._check(begun_s, stall_s)

    def fill(self, target: memoryview, stall_s: float) -> None:
        """Receive exactly as many bytes as fit. When it returns or raises, nothing writes to the memory any more."""
        while target:
            count = self.receive(target, stall_s, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the connection was closed in the middle of an object")
            target = target[count:]

    def is_quiet(self) -> bool:
        """Whether it is open and nothing has come on it."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def interrupt(self) -> None:
        """End what another thread does with it; that thread closes it."""
        with contextlib.suppress(OSError):  # it is over already
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # an SSLSocket's own would take TLS away under it

    def close(self) -> None:
        self.socket.close()

    def _wait_at_most(self, connection: ssl.SSLSocket, seconds: float) -> None:
        if seconds != self._timeout_s:
            connection.settimeout(seconds)
            self._timeout_s = seconds

    def _check(self, moved_s: float, stall_s: float) -> None:
        if time.monotonic() - moved_s >= stall_s:
            raise TimeoutError(f"not one byte moved for {stall_s:g} s")


def parts_of(view: memoryview) -> Iterator[memoryview]:
    """The view in parts that fit the processor's cache."""
    for start in range(0, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]
