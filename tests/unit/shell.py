"""Test support: a store in a thread of its own, and a client as raw as it gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtally.config import StoreConfig
from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_value, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.space import Piece
from kvtally.shm import Mapping, map_arena
from kvtally.store.connections import Connection
from kvtally.store.server import StoreServer, new_event_loop
from kvtally.wire.frames import FrameReader, encode, reply_reader
from kvtally.wire.limits import MIB
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Greeting,
    Hello,
    Lookup,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlots,
    PutStatus,
    Reply,
    Request,
    Welcome,
)
from tests.waiting import HANG_S

TOKEN = "a token of enough characters"
OBJECT_BYTES = 5000
NAMESPACE = Namespace(
    model="m",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((OBJECT_BYTES // 16,),)),),
    chunk_tokens=256,
    alignment_tokens=16,
)
CHAIN = chain_value(ROOT_CHAIN, token_bytes(range(256)))
PUT = PutObject(CHAIN, ROOT_CHAIN, 0, 256, 0, 0, OBJECT_BYTES)
LOOKUP = Lookup(7, CHAIN, [256], 256, hold=True)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
T = TypeVar("T")


class Running:
    """A store in a thread of its own."""

    def __init__(self, server: StoreServer, loop_factory: LoopFactory = new_event_loop) -> None:
        self.server = server
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(loop_factory,), daemon=True)
        self._thread.start()
        try:
            self._loop = self._ready.result(HANG_S)
        except BaseException:
            self._thread.join(HANG_S)
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the store's thread."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(HANG_S)

    def stats(self, *path: str) -> object:
        tree: object = msgspec.to_builtins(self.call(self.server.hub.stats))
        for step in path:
            assert isinstance(tree, dict)
            tree = tree[step]
        return tree

    def strangers(self) -> list[Connection]:
        return self.call(lambda: list(self.server.hub.ungreeted))

    def stop(self) -> None:
        if self._thread.is_alive():
            self.call(self.server.hub.store.check)
            self._loop.call_soon_threadsafe(self.server.stopping.set)
            self._thread.join(HANG_S)
            assert not self._thread.is_alive()

    def _run(self, loop_factory: LoopFactory) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        async with self.server:
            self._ready.set_result(asyncio.get_running_loop())
            await self.server.stopping.wait()


class Peer:
    """A client as raw as it gets. Reads with a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(HANG_S)
        self.socket = connection
        self.fds: list[int] = []
        self.greeting: Greeting | None = None
        self._reader: FrameReader[Reply] = reply_reader(64 * MIB)
        self._replies: list[Reply] = []

    def receive(self) -> Reply:
        while not self._replies:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
            self.fds += fds
            if not data:
                raise EOFError
            self._replies += self._reader.feed(data)
        return self._replies.pop(0)

    def greet(self) -> Greeting:
        greeting = self.receive()
        assert isinstance(greeting, Greeting)
        self.greeting = greeting
        return greeting

    def ask(self, request: Request) -> Reply:
        self.socket.sendall(encode(request))
        return self.receive()

    def hello(self, namespace: Namespace | None = NAMESPACE, proof: bytes = b"") -> Reply:
        description = canonical(namespace) if namespace is not None else b""
        return self.ask(Hello(1, PROTOCOL_VERSION, "test", description, proof=proof))

    def map(self) -> Mapping:
        assert self.greeting is not None
        return map_arena(self.fds[0], self.greeting.arena_bytes, writable=True)

    def is_closed(self) -> bool:
        """Whether the store closed the connection, within the deadline; whatever else it says is dropped."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionResetError):
            return True

    def close_pipe(self) -> None:
        os.close(self.fds.pop(1))

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())


class TLSPeer(Peer):
    def receive(self) -> Reply:  # descriptors do not travel over TLS
        while not self._replies:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._replies += self._reader.feed(data)
        return self._replies.pop(0)


class Bench:
    """Starts stores and peers, and ends them all."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "s" / "store.sock")
        self._stack = contextlib.ExitStack()

    def config(self, **settings: object) -> StoreConfig:
        return StoreConfig(**{"socket": self.path, "memory_bytes": 4 * MIB, **settings})  # type: ignore[arg-type]

    def start(
        self,
        server: StoreServer | None = None,
        *,
        loop_factory: LoopFactory = new_event_loop,
        **settings: object,
    ) -> Running:
        running = Running(server or StoreServer(self.config(**settings)), loop_factory)
        self._stack.callback(running.stop)
        return running

    def connect(self) -> Peer:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return self._keep(Peer(connection))

    def connect_tcp(self, running: Running) -> Peer:
        return self._keep(Peer(socket.create_connection(("127.0.0.1", running.server.tcp_port))))

    def connect_tls(self, running: Running, context: ssl.SSLContext) -> Peer:
        connection = socket.create_connection(("127.0.0.1", running.server.tcp_port))
        return self._keep(TLSPeer(context.wrap_socket(connection, server_hostname="localhost")))

    def client(self, namespace: Namespace | None = NAMESPACE) -> Peer:
        peer = self.connect()
        peer.greet()
        assert isinstance(peer.hello(namespace), Welcome)
        return peer

    def _keep(self, peer: Peer) -> Peer:
        self._stack.callback(peer.close)
        return peer

    def close(self) -> None:
        self._stack.close()


def put(peer: Peer, mapping: Mapping, data: bytes) -> None:
    """One object, begun, written through the mapping and committed."""
    begun = peer.ask(PutBegin(2, [PUT]))
    assert isinstance(begun, PutSlots)
    assert begun.slots[0].status == PutStatus.WRITE
    write(mapping, begun.slots[0].pieces, data)
    key = ObjectKey(NAMESPACE.digest, CHAIN, 0, 0)
    ended = peer.ask(PutEnd(3, [(begun.slots[0].put, object_checksum(key, len(data), [memoryview(data)]))]))
    assert ended == PutEnded(3, 1)


def pieces_of(flat: list[int]) -> list[Piece]:
    return [Piece(offset, length) for offset, length in zip(flat[::2], flat[1::2], strict=True)]


def write(mapping: Mapping, flat: list[int], data: bytes) -> None:
    for offset, length in pieces_of(flat):
        mapping.view(offset, length)[:] = data[:length]
        data = data[length:]
