"""An attacker process: `python -m tests.fuzz.attack SOCKET PORT SEED FRAMES` sends a store so many frames, all wrong.

Each connection lives a life of its own kind; some are kept and fed a byte now and then. Prints how many frames it sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from kvtally.errors import TransportError
from kvtally.wire.frames import encode, reply_reader
from kvtally.wire.limits import MIB
from kvtally.wire.messages import Done, Ping, Reply, StatsGet
from tests.fuzz.hostile import Dice, Hostile, frame_of, noise
from tests.waiting import HANG_S

KEPT = 24  # connections that are left half-way; below what strangers may take up, so that clients still get in
FRAMES_PER_LIFE = 40


class Attacker:
    def __init__(self, path: str, port: int, seed: int, frames: int) -> None:
        self.random = Dice(seed)
        self.left = frames
        self._path = path
        self._port = port  # of the store's TCP, where nobody here knows the token
        self._kept: list[tuple[socket.socket, bytes]] = []  # and what it is fed from
        self._descriptors: list[int] = []
        self._lives: list[Callable[[socket.socket], None]] = [
            self._noise,
            self._wrong_order,
            self._hostile,
            self._hostile,
            self._hostile,
            self._truncated,
            self._giant,
            self._loris,
        ]

    def run(self) -> None:
        self._never_reads()
        while self.left > 0:
            with contextlib.suppress(OSError), self._connect() as connection:
                self.random.choice(self._lives)(connection)
            self._feed_kept()
            if len(self._descriptors) > 40:
                self._close_descriptors()

    def _connect(self) -> socket.socket:
        if self.random.random() < 0.1:
            return socket.create_connection(("127.0.0.1", self._port), timeout=HANG_S)
        return self._connect_unix()

    def _connect_unix(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        connection.settimeout(HANG_S)
        return connection

    def _greet(self, connection: socket.socket) -> None:
        """Take the greeting; its descriptors are dropped by the kernel, closed, or kept long after the connection."""
        if self.random.random() < 0.3 or connection.family != socket.AF_UNIX:
            connection.recv(65536)
            return
        _, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
        self._descriptors += descriptors
        if self.random.random() < 0.5:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _send(self, connection: socket.socket, data: bytes, frames: int = 1) -> None:
        self.left -= frames
        connection.sendall(data)

    # ---- lives

    def _noise(self, connection: socket.socket) -> None:
        for _ in range(self.random.randrange(8)):
            self._send(connection, noise(self.random))

    def _wrong_order(self, connection: socket.socket) -> None:
        """Requests before hello, hello twice, replies instead of requests."""
        hostile = Hostile(self.random)
        first = self.random.choice((Ping(1), StatsGet(2), hostile.request(), Done(3)))
        frames = [first, hostile.hello(), hostile.hello(), Done(1)][self.random.randrange(2) :]
        self._send(connection, b"".join(map(encode, frames)), len(frames))
        connection.recv(65536)

    def _hostile(self, connection: socket.socket) -> None:
        """A client of the store, and what comes to its mind, until it is cut off."""
        self._greet(connection)
        hostile = Hostile(self.random)
        self._send(connection, encode(hostile.hello()))
        is_honest = self.random.random() < 0.5  # as to frames; never as to what they say
        connection.settimeout(0.05)
        reader = reply_reader(4 * MIB)
        for _ in range(self.random.randrange(FRAMES_PER_LIFE)):
            self._send(connection, encode(hostile.request()) if is_honest else frame_of(hostile))
            if self.random.random() < 0.3:
                with contextlib.suppress(TimeoutError, TransportError):
                    replies: list[Reply] = reader.feed(connection.recv(65536))
                    for reply in replies:
                        hostile.saw(reply)
        if self.random.random() < 0.2:
            connection.shutdown(socket.SHUT_WR)  # half open: it would still listen

    def _truncated(self, connection: socket.socket) -> None:
        self._greet(connection)
        hostile = Hostile(self.random)
        frame = encode(hostile.hello()) + encode(hostile.request())
        self._send(connection, frame[: self.random.randrange(len(frame))])

    def _giant(self, connection: socket.socket) -> None:
        length = self.random.choice((4 * MIB, 4 * MIB + 1, 1 << 31, (1 << 32) - 1))
        self._send(connection, length.to_bytes(4, "little") + bytes(self.random.randrange(100_000)))

    def _loris(self, connection: socket.socket) -> None:
        """Kept open, and fed byte by byte."""
        if len(self._kept) < KEPT:
            hostile = Hostile(self.random)
            frames = encode(hostile.hello()) + b"".join(encode(hostile.request()) for _ in range(5))
            self._kept.append((connection.dup(), frames))
            self.left -= 6

    def _feed_kept(self) -> None:
        for entry in self.random.sample(self._kept, min(4, len(self._kept))):
            connection, frames = entry
            self._kept.remove(entry)
            try:
                connection.sendall(frames[:1])
            except OSError:
                connection.close()
                continue
            if len(frames) > 1:
                self._kept.append((connection, frames[1:]))
            else:
                connection.close()

    def _never_reads(self) -> None:
        """More questions than the store keeps answers for. It must cut this one off, not run out of memory."""
        with contextlib.suppress(OSError), self._connect_unix() as connection:
            self._send(connection, encode(Hostile(self.random).hello()))
            for _ in range(1000):
                self._send(connection, encode(StatsGet(1)) * 50, 0)  # sound frames, so they do not count
            raise AssertionError("nobody cut it off")


if __name__ == "__main__":
    attacker = Attacker(sys.argv[1], *map(int, sys.argv[2:]))
    attacker.run()
    print(int(sys.argv[4]) - attacker.left)
