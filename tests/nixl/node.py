"""A process with an arena and a NIXL agent, as one store of two: `python -m tests.nixl.node`.

It does what it is asked, line by line: `put` writes an object's bytes into its arena, `begin` reads one out of another
node's arena in a thread of its own, `look` says what has become of that. Whoever unpickles anything here ends the node.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from kvtally.core.checksum import object_checksum
from kvtally.core.space import Piece
from kvtally.processes import serve
from kvtally.store.arena import Arena
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.nixl import WHEELS, Nixl
from kvtally.testing.tiers import sample_record
from kvtally.wire.limits import MIB

ARENA_BYTES = 64 * MIB


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    do: str
    object: int = 0
    length_bytes: int = 0
    pieces: list[Piece] = []  # here
    there: list[Piece] = []  # at the other node
    card: str = ""
    read: int = 0
    may_use_tcp: bool = True


class Look(msgspec.Struct, kw_only=True):
    """What has become of a read."""

    is_over: bool
    is_right: bool
    error: str
    polls: int  # how often NIXL was asked about any read so far


def content(number: int, length_bytes: int) -> bytes:
    return Random(number).randbytes(length_bytes)


class Read(threading.Thread):
    """One object, read and verified."""

    def __init__(
        self, nixl: Nixl, card: bytes, there: Sequence[Piece], record: ObjectRecord, target: Sequence[memoryview]
    ) -> None:
        super().__init__(daemon=True)
        self.is_right = False
        self.error = ""
        self._nixl, self._card, self._there, self._record, self._target = nixl, card, there, record, target
        self.start()

    def run(self) -> None:
        record = self._record
        try:
            self._nixl.read(self._card, self._there, self._target)
            self.is_right = object_checksum(record.key, record.length_bytes, self._target) == record.checksum
        except ConnectionError as error:
            self.error = str(error)


class Node:
    def __init__(self) -> None:
        self.arena = Arena(ARENA_BYTES)
        self.nixl: Any = None
        self.reads: dict[int, Read] = {}
        self.polls = 0

    def handle(self, line: bytes) -> object:
        request = msgspec.json.decode(line, type=Request)
        return getattr(self, request.do)(request)

    def open(self, request: Request) -> str:
        """The answer is the node's card."""
        (arena,) = self.arena.views([(0, ARENA_BYTES)])
        self.nixl = Nixl(f"node-{time.time_ns()}", arena, may_use_tcp=request.may_use_tcp)
        for wheel in WHEELS:
            if wheel in sys.modules:
                importlib.import_module(f"{wheel}._api").pickle = None  # type: ignore[attr-defined]
        check = self.nixl._agent.check_xfer_state

        def counted(transfer: object) -> object:
            self.polls += 1
            return check(transfer)

        self.nixl._agent.check_xfer_state = counted
        return b64encode(self.nixl.card).decode()

    def put(self, request: Request) -> None:
        data = memoryview(content(request.object, request.length_bytes))
        for view in self.arena.views(request.pieces):
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def flip(self, request: Request) -> None:
        (view,) = self.arena.views([(request.pieces[0].offset, 1)])
        view[0] ^= 1

    def begin(self, request: Request) -> None:
        record = sample_record(request.object, content(request.object, request.length_bytes))
        target = self.arena.views(request.pieces)
        for view in target:
            view[:] = bytes(len(view))
        self.reads[request.read] = Read(self.nixl, b64decode(request.card), request.there, record, target)

    def look(self, request: Request) -> Look:
        read = self.reads[request.read]
        return Look(is_over=not read.is_alive(), is_right=read.is_right, error=read.error, polls=self.polls)

    def close(self, request: Request) -> None:
        self.nixl.close()


if __name__ == "__main__":
    serve(Node().handle)
