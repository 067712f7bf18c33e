"""For the client's tests: a store that does whatever a test wants of it, and what is saved and asked for there."""

from __future__ import annotations

import array
import contextlib
import os
import queue
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtally.client import Lease, Miss, Put, ReadSlot, question
from kvtally.core.keys import CHAIN_BYTES, ROOT_CHAIN
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Receipt
from kvtally.testing.copying import CopyingClient
from kvtally.wire.frames import encode, request_reader
from kvtally.wire.limits import Limits
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
    PutStatus,
    ReceiptGet,
    Receipts,
    Reply,
    Request,
    Reset,
    ResetDone,
    Slot,
    Slots,
    SlotsGet,
    Stats,
    StatsGet,
    Welcome,
)
from tests.waiting import HANG_S, eventually

ARENA_BYTES = 1 << 20
OBJECT_BYTES = 10_000
TOKEN = "a token of enough characters"
NAMESPACE = Namespace(
    model="m",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((OBJECT_BYTES // 16,),)),),
    chunk_tokens=256,
    alignment_tokens=16,
)
QUESTION = question(NAMESPACE, range(600))  # two whole chunks

Q = TypeVar("Q", bound=Request)
Action = Reply | bytes  # raw bytes are sent as they are, and the connection is closed after them


class FakeStore:
    """Speaks the protocol in threads. `on[type]` replaces the answer to a kind of request."""

    def __init__(self, address: str | tuple[str, int], name: str = "store-1") -> None:
        self.name = name
        self.protocol = PROTOCOL_VERSION
        self.limits = Limits()
        self.nonce = b""
        self.address = ""
        self.greets = True
        self.verify_reads = True
        self.tls: ssl.SSLContext | None = None
        self.descriptors_count = 2
        self.on: dict[type[Request], Callable[..., list[Action]]] = {}
        self.requests: queue.Queue[Request] = queue.Queue()
        self.peers: queue.Queue[socket.socket] = queue.Queue()
        self.liveness: queue.Queue[int] = queue.Queue()
        self.arena = os.memfd_create("arena")
        os.ftruncate(self.arena, ARENA_BYTES)
        self._objects: dict[bytes, tuple[int, int, int]] = {}  # chain -> offset, length, checksum
        self._open: dict[int, tuple[bytes, int, int]] = {}
        self._lookups: dict[int, Lookup] = {}
        self._next = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._listener.bind(address)
        self._listener.listen()
        self.port = 0 if isinstance(address, str) else self._listener.getsockname()[1]
        self._run(self._accept)

    def stop(self) -> None:
        """Like a kill: the kernel closes everything, nobody says goodbye. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._shut([self._listener])
        self._threads[0].join(HANG_S)  # nobody is accepted after this
        self._shut(self._sockets)
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
        for each in (self._listener, *self._sockets):
            each.close()
        os.close(self.arena)
        while not self.liveness.empty():
            os.close(self.liveness.get())

    @staticmethod
    def _shut(sockets: list[socket.socket]) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def take(self, kind: type[Q]) -> Q:
        """The next request of this kind."""
        while True:
            request = self.requests.get(timeout=HANG_S)
            if isinstance(request, kind):
                return request

    def saw(self, kind: type[Request]) -> bool:
        return any(isinstance(request, kind) for request in list(self.requests.queue))

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(peer)
            self._run(lambda peer=peer: self._serve(peer))  # type: ignore[misc]

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self.tls is not None:
                peer = self.tls.wrap_socket(peer, server_side=True)
                self._sockets.append(peer)
            if self.greets:
                self._greet(peer)
            self.peers.put(peer)
            reader = request_reader(1 << 24)
            while data := peer.recv(1 << 16):
                for request in reader.feed(data):
                    self.requests.put(request)
                    for action in self.on.get(type(request), self.answer)(request):
                        if isinstance(action, bytes):
                            peer.sendall(action)
                            peer.shutdown(socket.SHUT_RDWR)
                            return
                        peer.sendall(encode(action))

    def _greet(self, peer: socket.socket) -> None:
        greeting = Greeting(
            self.protocol, "0", self.name, ARENA_BYTES, self.verify_reads, self.limits, self.nonce, self.address
        )
        if peer.family != socket.AF_UNIX:
            peer.sendall(encode(greeting))
            return
        read_end, write_end = os.pipe()
        fds = [self.arena, write_end][: self.descriptors_count]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        peer.sendmsg([encode(greeting)], rights)
        os.close(write_end)
        self.liveness.put(read_end)

    def answer(self, request: Request) -> list[Action]:
        match request:
            case Hello():
                return [Welcome(request.id, 1, b"")]
            case Lookup():
                return [self._found(request)]
            case SlotsGet():
                return [self._slots(request)]
            case PutBegin():
                return [PutSlots(request.id, [self._begin(item) for item in request.objects])]
            case PutEnd():
                for number, checksum in request.commit:
                    chain, offset, length = self._open.pop(number)
                    self._objects[chain] = (offset, length, checksum)
                return [PutEnded(request.id, len(request.commit))]
            case ReceiptGet():
                return [Receipts(request.id, [Receipt(ticket=request.ticket)])]
            case StatsGet():
                return [Stats(request.id, {"store": self.name})]
            case Reset():
                return [ResetDone(request.id, 7)]
            case _:
                return [Done(request.id)]

    def _found(self, request: Lookup) -> Found:
        count = 0
        while count < len(request.ends) and chain_at(request, count) in self._objects:
            count += 1
        end = request.ends[count - 1] if count else 0
        if not (request.hold and end):
            return Found(request.id, end, reason="" if end else MissReason.ABSENT)
        self._next += 1
        self._lookups[self._next] = request
        slots = self._slots(SlotsGet(0, self._next)).slots if request.slots else []
        return Found(request.id, end, self._next, slots=slots)

    def _slots(self, request: SlotsGet) -> Slots:
        lookup = self._lookups.get(request.lease)
        if lookup is None:
            return Slots(request.id, [], MissReason.LEASE_EXPIRED)
        slots = []
        for index in range(len(lookup.ends)):
            if chain_at(lookup, index) in self._objects:
                offset, length, checksum = self._objects[chain_at(lookup, index)]
                half = length // 2
                slots.append(Slot(index, 0, length, checksum, [offset, half, offset + half, length - half]))
        return Slots(request.id, slots)

    def _begin(self, item: PutObject) -> PutSlot:
        if item.chain in self._objects:
            return PutSlot(PutStatus.PRESENT)
        self._next += 1
        offset = self._next * 16_384
        half = item.length_bytes // 2
        self._open[self._next] = (item.chain, offset, item.length_bytes)
        return PutSlot(PutStatus.WRITE, self._next, [offset, half, offset + half, item.length_bytes - half])


def chain_at(lookup: Lookup, index: int) -> bytes:
    return lookup.chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES]


class World:
    """Stores and clients of one test, all ended with it."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "s")
        self._stack = contextlib.ExitStack()

    def store(self, name: str = "store-1", address: str | tuple[str, int] = "") -> FakeStore:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        store = FakeStore(address or self.path, name)
        self._stack.callback(store.stop)
        return store

    def client(
        self,
        address: str = "",
        *,
        name: str = "client",
        expect: bytes = b"",
        token: str = "",
        ca_file: str = "",
        jitter: random.Random | None = None,
    ) -> CopyingClient:
        client = CopyingClient(
            address or self.path,
            namespace=NAMESPACE,
            expect=expect,
            name=name,
            token=token,
            ca_file=ca_file,
            timeout_s=HANG_S,
            jitter=jitter,
        )
        return self._stack.enter_context(client)

    def close(self) -> None:
        self._stack.close()


def objects(count: int = 2) -> list[tuple[PutObject, bytes]]:
    """The chunks of QUESTION, and bytes for them."""
    made = []
    for index in range(count):
        parent = chain_at(QUESTION, index - 1) if index else ROOT_CHAIN
        start = QUESTION.ends[index - 1] if index else 0
        item = PutObject(chain_at(QUESTION, index), parent, start, QUESTION.ends[index], 0, 0, OBJECT_BYTES)
        made.append((item, random.Random(index).randbytes(OBJECT_BYTES)))
    return made


def missed(result: object, reason: MissReason) -> str:
    """Assert that this is a miss for that reason; what it says."""
    assert isinstance(result, Miss), result
    assert result.reason is reason, result
    return result.detail


def until(client: CopyingClient, condition: Callable[[], bool]) -> None:
    """Poll until something has come about."""

    def polled() -> bool:
        client.poll()
        return condition()

    eventually(polled)


def held(client: CopyingClient, wanted: Lookup = QUESTION) -> Lease:
    lease = client.hold(wanted).wait()
    assert isinstance(lease, Lease)
    return lease


def slots_of(client: CopyingClient, lease: Lease) -> list[ReadSlot]:
    slots = client.slots(lease).wait()
    assert isinstance(slots, list)
    return slots


def puts_of(client: CopyingClient, count: int = 1) -> list[Put]:
    puts = client.put_begin([item for item, _ in objects(count)]).wait()
    assert isinstance(puts, list)
    return puts


def got(client: CopyingClient) -> list[bytes]:
    """The objects of QUESTION, as far as they are there, in their order."""
    found = client.get(QUESTION)
    return [] if isinstance(found, Miss) else [bytes(found[key]) for key in sorted(found)]


def is_closed(read_end: int, timeout_s: float = 0.0) -> bool:
    """Whether the last write end of a liveness pipe is gone."""
    return bool(select.select([read_end], [], [], timeout_s)[0]) and os.read(read_end, 1) == b""


def offset_of(store: FakeStore, slot: ReadSlot) -> int:
    return store._objects[slot.key.chain][0]
