"""For tests of bytes between stores: a bulk port over an arena, and a peer that does whatever a test wants of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from kvtally.core.space import Piece
from kvtally.endpoint import Endpoint
from kvtally.store.arena import Arena
from kvtally.store.bulk import BulkListener
from kvtally.store.jobs import Outcome, PeerPlace, SendJob
from kvtally.store.listen import bind_tcp, start_listening
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.tiers.peer import PeerTier
from kvtally.testing.tiers import sample_record
from kvtally.wire.auth import NONCE_BYTES, proof, store_proof
from kvtally.wire.bulk import HEADER_BYTES, Header, PullStatus
from kvtally.wire.frames import FrameReader, encode, reply_reader, request_reader
from kvtally.wire.limits import MIB, Limits
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Pull, Reply, Request, Welcome
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, eventually

HOST = "127.0.0.2"
LEASE = 7
T = TypeVar("T")


def greeting(nonce: bytes = b"n" * NONCE_BYTES, *, protocol: int = PROTOCOL_VERSION) -> Greeting:
    return Greeting(protocol, "1", "store-a", MIB, True, Limits(), nonce, "tcp://a:1")


def tls_pair(files: tuple[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Both sides of TLS with this certificate and key."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*files)
    server.num_tickets = 0
    return server, ssl.create_default_context(cafile=files[0])


class Node:
    """A store of which only the bulk port is there, in an event loop of its own thread. Every object that was laid into
    its arena is held by LEASE, at the boundary of its number."""

    def __init__(self, size_bytes: int = 4 * MIB, *, tls: ssl.SSLContext | None = None, host: str = HOST) -> None:
        self.status = PullStatus.SENT
        self.decides = True  # whether a pull is answered at once; else by `decide`
        self.welcomes_hosts = True
        self.pulls: list[tuple[int, Pull]] = []
        self.jobs: list[SendJob] = []
        self.outcomes: list[tuple[SendJob, Outcome]] = []
        self.ended: list[str] = []
        self.arena = Arena(size_bytes)
        self._objects: dict[int, tuple[tuple[Piece, ...], int]] = {}
        self._free = 0
        self._pullers: list[Puller] = []
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listener = bind_tcp(f"{host}:0", "bulk")
        start_listening(listener, "bulk")
        self.port = listener.getsockname()[1]

        async def listen() -> BulkListener:
            return BulkListener(self, listener, self.arena, token=TOKEN, tls=tls)

        self.listener = asyncio.run_coroutine_threadsafe(listen(), self._loop).result(HANG_S)

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the loop's thread."""

        async def run() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(HANG_S)

    def stop(self) -> None:
        """As a store stops. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.listener.close(), self._loop).result(HANG_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        self._loop.close()
        self.arena.close()

    def close(self) -> None:
        """Stop, and close what has connected."""
        self.stop()
        for puller in self._pullers:
            puller.socket.close()

    def puller(self, tls: ssl.SSLContext | None = None) -> Puller:
        """One that has only connected."""
        puller = Puller(self.port, tls)
        self._pullers.append(puller)
        return puller

    def lay(self, number: int, data: bytes, cuts: Sequence[int] = ()) -> ObjectRecord:
        """Lay an object into the arena, cut into pieces with gaps between them."""
        pieces = []
        for start, end in itertools.pairwise([0, *cuts, len(data)]):
            piece = Piece(self._free, end - start)
            (view,) = self.arena.views([piece])
            view[:] = data[start:end]
            pieces.append(piece)
            self._free += end - start + 64
        self._objects[number] = tuple(pieces), len(data)
        return sample_record(number, data)

    @property
    def connections(self) -> int:
        return self.call(lambda: self.listener.connections)

    def settled(self, sends: int) -> list[str]:
        """The codes of so many sends, once all of them have ended."""
        eventually(lambda: len(self.outcomes) >= sends)
        assert sorted(job.id for job, _ in self.outcomes) == sorted({job.id for job in self.jobs})
        return [outcome.code for _, outcome in self.outcomes]

    # ---- what a hub does

    def greet_bulk(self, nonce: bytes) -> Greeting:
        return greeting(nonce)

    def may_come(self, host: str) -> bool:
        return self.welcomes_hosts

    def pulled(self, connection: int, pull: Pull) -> None:
        self.pulls.append((connection, pull))
        if self.decides:
            self.decide(connection, pull)

    def decide(self, connection: int, pull: Pull) -> None:
        pieces, length = self._objects.get(pull.index, ((), 0))
        status = self.status if pieces and pull.lease == LEASE else PullStatus.GONE
        job = SendJob(id=next(self._numbers), connection=connection, pull=pull.id, status=status)
        if status is PullStatus.SENT:
            job = SendJob(
                id=job.id,
                connection=connection,
                pull=pull.id,
                status=status,
                pieces=pieces,
                length_bytes=length,
            )
        self.jobs.append(job)
        self.listener.deliver(job)

    def sent(self, job: SendJob, outcome: Outcome) -> None:
        self.outcomes.append((job, outcome))

    def bulk_ended(self, code: str) -> None:
        self.ended.append(code)


def endpoint_of(port: int, *, token: str = TOKEN, tls: ssl.SSLContext | None = None, host: str = HOST) -> Endpoint:
    where = ((socket.AF_INET, (host, port)),)
    return Endpoint(address=f"tcp://{host}:1", targets=where, token=token, tls=tls, host=host, port=port)


def source(endpoint: Endpoint | None) -> PeerTier:
    """A tier that knows one store."""
    return PeerTier(lambda address: endpoint)


def target_for(record: ObjectRecord, cuts: Sequence[int] = ()) -> list[memoryview]:
    whole = memoryview(bytearray(record.length_bytes))
    return [whole[start:end] for start, end in itertools.pairwise([0, *cuts, record.length_bytes])]


def pull(tier: PeerTier, record: ObjectRecord, cuts: Sequence[int] = ()) -> bytes:
    """Pull an object that a `Node` has laid out, and check what the tier says has landed."""
    target = target_for(record, cuts)
    landed: list[memoryview] = []
    place = PeerPlace(f"tcp://{HOST}:1", LEASE, int.from_bytes(record.chain, "big"))
    tier.pull(place, record, target, landed.append)
    data = b"".join(target)
    assert b"".join(landed) == data
    return data


def content(size_bytes: int, seed: int = 0) -> bytes:
    part = Random(seed or size_bytes).randbytes(min(size_bytes, MIB + 1))
    return (part * (size_bytes // len(part) + 1))[:size_bytes]


class Puller:
    """A puller as raw as it gets."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.settimeout(HANG_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._reader: FrameReader[Reply] = reply_reader(MIB)
        self._replies: list[Reply] = []

    def receive(self) -> Reply:
        while not self._replies:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._replies += self._reader.feed(data)
        return self._replies.pop(0)

    def send(self, request: Request) -> None:
        self.socket.sendall(encode(request))

    def hello(self, token: str = TOKEN) -> Reply:
        greeting = self.receive()
        assert isinstance(greeting, Greeting)
        nonce = os.urandom(NONCE_BYTES)
        self.send(Hello(1, PROTOCOL_VERSION, "b", proof=proof(token, greeting.nonce), peer=True, nonce=nonce))
        reply = self.receive()
        if isinstance(reply, Welcome):
            assert reply.proof == store_proof(TOKEN, nonce)
        return reply

    def raw(self, count: int) -> bytes:
        data = memoryview(bytearray(count))
        left = data
        while left:
            received = self.socket.recv_into(left)
            if not received:
                raise EOFError
            left = left[received:]
        return bytes(data)

    def header(self) -> Header:
        return Header.unpack(self.raw(HEADER_BYTES))

    def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(65536):
                pass
        return True


class Impostor:
    """Listens where a bulk port might be, and plays a script for each connection, in threads."""

    def __init__(self, *scripts: Callable[[Impostor, socket.socket], None]) -> None:
        self.accepted = 0
        self.failures: list[BaseException] = []
        self._scripts = scripts
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
        self._listener.close()
        assert self.failures == []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                script = self._scripts[min(self.accepted, len(self._scripts) - 1)]
                self.accepted += 1
                thread = threading.Thread(target=self._play, args=(script, peer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _play(self, script: Callable[[Impostor, socket.socket], None], peer: socket.socket) -> None:
        with peer:
            peer.settimeout(HANG_S)
            try:
                script(self, peer)
            except OSError:
                pass  # the puller has had enough
            except BaseException as error:
                self.failures.append(error)
                raise


def request_from(peer: socket.socket) -> Request:
    """The next request; OSError if the other end has closed."""
    reader = request_reader(MIB)
    while not (requests := reader.take(1)):
        data = peer.recv(1)  # no byte of the next one
        if not data:
            raise ConnectionResetError
        reader.push(data)
    return requests[0]


def welcome(peer: socket.socket, *, token: str = TOKEN) -> None:
    """The handshake as an honest store does it."""
    nonce = os.urandom(NONCE_BYTES)
    peer.sendall(encode(greeting(nonce)))
    hello = request_from(peer)
    assert isinstance(hello, Hello)
    assert hello.proof == proof(TOKEN, nonce)
    peer.sendall(encode(Welcome(hello.id, 1, proof=store_proof(token, hello.nonce))))


def wait_for_end(peer: socket.socket) -> None:
    while peer.recv(65536):
        pass
