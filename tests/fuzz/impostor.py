"""A store that lies: it speaks the protocol over a real unix socket, and answers with whatever comes to its mind.

Everything runs in the caller's thread (`pump`), so that one seed is one conversation.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

from kvtally.core.receipts import Half, Receipt, Role
from kvtally.errors import TransportError
from kvtally.wire.frames import FrameReader, encode, request_reader
from kvtally.wire.limits import MIB, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Found,
    Greeting,
    Hello,
    Lookup,
    MissReason,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlot,
    PutSlots,
    ReceiptGet,
    Receipts,
    Refused,
    Reply,
    Request,
    Reset,
    ResetDone,
    Slot,
    Slots,
    SlotsGet,
    Staged,
    Stats,
    StatsGet,
    Welcome,
)
from tests.fuzz.hostile import EDGES, WORDS, damaged, noise

ARENA_BYTES = 1 * MIB
REASONS = ("", *MissReason, "a reason that nobody knows")


class Impostor:
    """Listens on `path`. Lies with probability `lie` in each field, and in each frame."""

    def __init__(self, path: Path, random: Random, lie: float) -> None:
        self.random = random
        self.lie = lie
        self.replies = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._arena = os.memfd_create("impostor")
        os.ftruncate(self._arena, ARENA_BYTES)
        self._peers: dict[socket.socket, FrameReader[Request]] = {}
        self._pipes: list[int] = []

    def close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._listener.close()
        os.close(self._arena)

    def pump(self) -> None:
        """Accept who came, read what they ask, answer."""
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            self._greet(peer)
        for peer, reader in list(self._peers.items()):
            try:
                data = peer.recv(1 << 20)
                requests = reader.feed(data) if data else None
            except BlockingIOError:
                continue
            except (OSError, TransportError):
                requests = None
            if requests is None or (self._lies() and self.random.random() < 0.2):
                self._drop(peer)
                continue
            self._send(peer, b"".join(self._frame(self._reply(request)) for request in requests))

    # ---- frames

    def _greet(self, peer: socket.socket) -> None:
        number = self.number
        limits = Limits(
            frame_bytes=number(4 * MIB),
            lease_ns=number(10**10),
            wait_ns=number(10**10),
            object_bytes=number(MIB),
        )
        size = number(ARENA_BYTES)
        greeting = Greeting(number(PROTOCOL_VERSION), "0", "impostor", size, self.random.random() < 0.5, limits)
        frame = self._frame(greeting)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        descriptors = [self._arena, write_end]
        if self._lies():
            descriptors = self.random.choice(([], [write_end], [write_end, self._arena], [write_end] * 3))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with contextlib.suppress(OSError):
            peer.sendmsg([frame or b"\0"], rights)
        os.close(read_end)
        os.close(write_end)
        self._peers[peer] = request_reader(4 * MIB)

    def _frame(self, reply: Reply) -> bytes:
        self.replies += 1
        frame = encode(reply)
        if not self._lies():
            return frame
        match self.random.randrange(6):
            case 0:
                return b""  # no answer at all
            case 1:
                return frame + frame
            case 2:
                return noise(self.random)
            case 3:
                return frame + encode(self._staged())
            case _:
                return damaged(self.random, frame)

    def _send(self, peer: socket.socket, data: bytes) -> None:
        try:
            peer.send(data)
        except OSError:
            self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        del self._peers[peer]
        peer.close()

    # ---- replies

    def _reply(self, request: Request) -> Reply:
        random, number = self.random, self.number
        makers: dict[type[Request], Callable[[int], Reply]] = {
            Hello: lambda n: Welcome(n, number(5)),
            Lookup: self._found,
            SlotsGet: lambda n: Slots(n, [self._slot() for _ in range(random.randrange(4))], self._reason()),
            PutBegin: lambda n: PutSlots(n, [self._put_slot(item.length_bytes) for item in _objects(request)]),
            PutEnd: lambda n: PutEnded(n, number(1), [number(1)] if self._lies() else []),
            ReceiptGet: lambda n: Receipts(n, [Receipt(ticket="t", decode=Half(role=Role.DECODE))]),
            StatsGet: lambda n: Stats(n, {"a": number(1)}),
            Reset: lambda n: ResetDone(n, number(1)),
        }
        if self._lies():
            refused = Refused(number(request.id), random.choice(("KV-301", "KV-202", "")), "m", random.choice(WORDS))
            kind = random.choice(list(makers))
            return random.choice((refused, makers[kind](request.id) if kind is not PutBegin else refused))
        return makers.get(type(request), Done)(number(request.id))

    def _found(self, request: int) -> Found:
        number = self.number
        staging = self.random.choice((0, 0, 2))
        return Found(request, number(64), number(9), number(staging), number(64), [b"\1"], [number(16)], self._reason())

    def _staged(self) -> Staged:
        return Staged(self.number(0), self.number(9), self.number(64), self._reason())

    def _slot(self) -> Slot:
        number = self.number
        length = number(self.random.choice((1, 100, 5000)))
        return Slot(number(0), number(0), length, number(77), self._pieces(length))

    def _put_slot(self, length_bytes: int) -> PutSlot:
        return PutSlot(self.number(self.random.randrange(4)), self.number(3), self._pieces(length_bytes))

    def _pieces(self, length: int) -> list[int]:
        number = self.number
        pieces = [number(4096), number(length)]
        if self._lies():
            pieces += [number(8192), number(1), number(1)][: self.random.randrange(4)]
        return pieces

    def _reason(self) -> str:
        return self.random.choice(REASONS) if self._lies() else ""

    def number(self, right: int) -> int:
        return self.random.choice(EDGES) if self._lies() else right

    def _lies(self) -> bool:
        return self.random.random() < self.lie


def _objects(request: Request) -> list[PutObject]:
    return request.objects if isinstance(request, PutBegin) else []
