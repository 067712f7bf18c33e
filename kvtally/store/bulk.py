"""The port that other stores pull bytes from: objects go out of the arena on connections of their own.

    Pull ──▶ connection's thread ──pulled──▶ Store.pull ─▶ SendJob ──deliver──▶ connection's thread ─▶ header and bytes
                                                    or, for a puller that reads by NIXL: pieces ─▶ it reads ─▶ Pulled
    Store.sent ◀──sent── how it ended, exactly once for each job, whatever becomes of the connection

Owns bulk connections: who may open one, the proof of the token both ways, their number, and the sending. Decides
nothing about objects. Neighbours: `connections` (brings pulls to the store and jobs back), `stream` (moves the bytes).

Threading: one thread for each connection, because a blocking `sendmsg` from the arena costs no copy and no turn of the
event loop. Everything but `_Connection.run`, and what it calls, belongs to the event loop's thread, which also opens
and closes sockets: a number that one thread still uses is never somebody else's socket by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtally.dialling import watch
from kvtally.errors import CapacityError, IncompatibleError, KVTallyError, TransportError
from kvtally.store.arena import Arena
from kvtally.store.jobs import Outcome, SendJob
from kvtally.store.listen import Acceptor, refuse
from kvtally.store.stream import Stream
from kvtally.wire.auth import NONCE_BYTES, proof, store_proof
from kvtally.wire.bulk import Header, PullStatus, pack_pieces
from kvtally.wire.frames import encode, request_reader
from kvtally.wire.limits import KIB
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Pull, Pulled, Refused, Request, Welcome

logger = logging.getLogger("kvtally.store")

MOST_CONNECTIONS = 256
MOST_STRANGERS = 64  # of them, those that have not said hello
HELLO_S = 5.0
IDLE_S = 5.0  # a connection on which nothing is asked for this long is closed
STALL_S = 2.0  # a puller that takes no byte for this long is cut off
READ_S = 5.0  # the longest that an object stays where it is for a puller that reads it there
JOB_S = 5.0  # the longest that the store takes to answer a pull; it does at once
JOIN_S = 2.0
STACK_BYTES = 256 * KIB
FRAME_BYTES = 64 * KIB  # a Hello or a Pull has a fraction of this


class BulkHost(Protocol):
    """What brings pulls to the store and says how sends ended."""

    def greet_bulk(self, nonce: bytes) -> Greeting: ...

    def may_come(self, host: str) -> bool: ...

    def pulled(self, connection: int, pull: Pull) -> None: ...

    def sent(self, job: SendJob, outcome: Outcome) -> None: ...

    def bulk_ended(self, code: str) -> None:
        """A connection was refused or cut off."""


class BulkListener(Acceptor):
    """Accepts on the bulk port. `deliver` takes the jobs that the store decided on. `card` is for pullers that read by
    NIXL."""

    def __init__(
        self,
        host: BulkHost,
        listener: socket.socket,
        arena: Arena,
        *,
        token: str,
        tls: ssl.SSLContext | None = None,
        card: bytes = b"",
    ) -> None:
        super().__init__(listener)
        self.port = listener.getsockname()[1]
        self.arena = arena
        self.token = token
        self.card = card
        self.post = self._loop.call_soon_threadsafe
        self.host = host
        self._tls = tls
        self._connections: dict[int, _Connection] = {}  # in the order of arrival
        self._last = 0

    @property
    def connections(self) -> int:
        return len(self._connections)

    def deliver(self, job: SendJob) -> None:
        connection = self._connections.get(job.connection)
        if connection is None:  # it ended before the job came
            self._loop.call_soon(self.host.sent, job, Outcome(code="KV-502"))
        else:
            connection.jobs.put(job)

    async def close(self) -> None:
        """End every connection and its thread. Jobs that were not carried out are reported as failed."""
        self.stop_accepting()
        connections = list(self._connections.values())
        for connection in connections:
            connection.end()
        await asyncio.to_thread(_join, connections)
        await asyncio.sleep(0)  # what the threads said last is heard now

    def _take(self, peer: socket.socket) -> None:
        host = peer.getpeername()[0]
        try:
            self._check(host)
        except KVTallyError as error:
            self.host.bulk_ended(error.code)
            refuse(peer, error, has_tls=self._tls is not None)
            return
        watch(peer)
        peer.setblocking(True)
        if self._tls is not None:  # the handshake is the thread's
            peer = self._tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
        self._last += 1
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = _Connection(self, self._last, peer, self.host.greet_bulk(nonce))
        try:
            connection.start()
        except RuntimeError:  # the system has no more threads
            self.host.bulk_ended("KV-301")
            connection.stream.close()
            return
        self._connections[connection.id] = connection

    def _check(self, host: str) -> None:
        if not self.host.may_come(host):
            raise not_a_peer(host)
        if len(self._connections) >= MOST_CONNECTIONS:
            raise CapacityError(
                f"{MOST_CONNECTIONS} connections already pull bytes from this store",
                remedy="Nothing is wrong; what cannot be pulled is computed.",
                code="KV-301",
            )
        strangers = [each for each in self._connections.values() if not each.is_known]
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].end()  # it has had time to say hello
            self.host.bulk_ended("KV-301")

    def ended(self, connection: _Connection, code: str) -> None:
        """A connection's thread is about to end. Everything that it had to say was heard before."""
        del self._connections[connection.id]
        connection.stream.close()
        if code:
            self.host.bulk_ended(code)
        with contextlib.suppress(Empty):
            while True:
                job = connection.jobs.get_nowait()
                if job is not None:
                    self.host.sent(job, Outcome(code="KV-502"))


class _Connection:
    """One puller's connection, and the thread that serves it."""

    def __init__(self, listener: BulkListener, number: int, peer: socket.socket, greeting: Greeting) -> None:
        self.id = number
        self.stream = Stream(peer)
        self.jobs: SimpleQueue[SendJob | None] = SimpleQueue()  # None: it is to end
        self.is_known = False  # has proved that it knows the token
        self._greeting = greeting
        self._listener = listener
        self._reader = request_reader(FRAME_BYTES)
        self._buffer = memoryview(bytearray(4 * KIB))
        self._thread = threading.Thread(target=self.run, name=f"bulk-{number}", daemon=True)

    def start(self) -> None:
        """Start its thread. Raises RuntimeError if the system has no more."""
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual_bytes)

    def end(self) -> None:
        """Have the thread end, whatever it is in."""
        self.jobs.put(None)
        self.stream.interrupt()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- in the connection's own thread

    def run(self) -> None:
        code = ""
        try:
            self._shake_hands()
            while (request := self._next(IDLE_S)) is not None:
                if not isinstance(request, Pull):
                    raise _out_of_turn(request)
                if not self._answer(request):
                    break
        except KVTallyError as error:
            logger.info("a bulk connection was closed: %s", error)
            code = error.code
        except OSError as error:  # it left, or does not speak TLS; a puller that asks for nothing more is one, too
            logger.debug("a bulk connection ended: %s", error)
        finally:
            self._listener.post(self._listener.ended, self, code)

    def _shake_hands(self) -> None:
        """Have the puller prove the token, and prove it. Raises OSError or KVTallyError."""
        if isinstance(self.stream.socket, ssl.SSLSocket):
            self.stream.socket.settimeout(HELLO_S)
            self.stream.socket.do_handshake()
        self.stream.send([encode(self._greeting)], STALL_S)
        hello = self._next(HELLO_S)
        if hello is None:
            return
        try:
            if not isinstance(hello, Hello):
                raise _out_of_turn(hello)
            check_peer_hello(hello, self._greeting.nonce, self._listener.token)
        except KVTallyError as error:
            refused = Refused(0, error.code, error.message, error.remedy)
            self.stream.send([encode(refused)], STALL_S)
            raise
        self.is_known = True
        listener = self._listener
        welcome = Welcome(hello.id, self.id, proof=store_proof(listener.token, hello.nonce), card=listener.card)
        self.stream.send([encode(welcome)], STALL_S)

    def _next(self, within_s: float) -> Request | None:
        """The next request; None if the puller has closed. Raises TimeoutError if it is not whole by then."""
        deadline_s = time.monotonic() + within_s
        while not (requests := self._reader.take(1)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"nothing was asked for within {within_s:g} s")
            count = self.stream.receive(self._buffer, left_s)
            if not count:
                return None
            self._reader.push(self._buffer[:count])
        return requests[0]

    def _answer(self, pull: Pull) -> bool:
        """Have the store decide, and send. False if this connection is to end."""
        self._listener.post(self._listener.host.pulled, self.id, pull)
        try:
            job = self.jobs.get(timeout=JOB_S)
        except Empty:
            raise TransportError(
                f"the store did not answer a pull within {JOB_S:g} s", remedy="It is overloaded.", code="KV-501"
            ) from None
        if job is None:
            return False
        begun_s, code = time.perf_counter(), ""
        try:
            self._send(job, pull)
        except TimeoutError as error:
            code = "KV-501"
            raise CapacityError(str(error), remedy="The store that pulls does not read.", code="KV-300") from error
        except OSError:
            code = "KV-502"
            raise
        finally:
            outcome = Outcome(code=code, seconds=time.perf_counter() - begun_s)
            self._listener.post(self._listener.host.sent, job, outcome)
        return True

    def _send(self, job: SendJob, pull: Pull) -> None:
        if job.status is not PullStatus.SENT:
            self.stream.send([Header(0, job.pull, job.status).pack()], STALL_S)
            return
        if pull.in_place and self._listener.card:
            self._place(job)
            return
        header = Header(job.length_bytes, job.pull, job.status)
        self.stream.send([header.pack(), *self._listener.arena.views(job.pieces)], STALL_S)

    def _place(self, job: SendJob) -> None:
        """Have the puller read the object where it lies. Its answer comes when it has: until then the job holds it."""
        pieces = pack_pieces(job.pieces)
        self.stream.send([Header(len(pieces), job.pull, PullStatus.PLACED).pack(), pieces], STALL_S)
        said = self._next(READ_S)
        if said is None:
            raise ConnectionResetError("the puller has left")
        if said != Pulled(job.pull):
            raise _out_of_turn(said)
        self.stream.send([Header(0, job.pull, PullStatus.SENT).pack()], STALL_S)


def check_peer_hello(hello: Hello, nonce: bytes, token: str) -> None:
    """Raise KVTallyError unless this is another store of our version that knows the token and asks for our proof."""
    if hello.protocol != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"the peer speaks protocol {hello.protocol}, this store {PROTOCOL_VERSION}",
            remedy="Install the same version on both sides, and restart the older one.",
            code="KV-201",
        )
    if not hmac.compare_digest(hello.proof, proof(token, nonce)):
        raise IncompatibleError(
            "the proof of the store's token is missing or wrong",
            remedy="Give both stores the same token file.",
            code="KV-205",
        )
    if not hello.peer or len(hello.nonce) != NONCE_BYTES:
        raise TransportError(
            f"a peer's hello has a nonce of {NONCE_BYTES} bytes",
            remedy="Only stores connect to this port.",
            code="KV-503",
        )


def not_a_peer(host: str) -> IncompatibleError:
    return IncompatibleError(
        f"{host} is not on this store's list of peers",
        remedy="Name that host or its network in store.peers here, and this one there.",
        code="KV-210",
    )


def _out_of_turn(request: Request) -> TransportError:
    return TransportError(
        f"{type(request).__name__} on a bulk connection",
        remedy="Say hello, then pull. Everything else goes to the TCP port.",
        code="KV-503",
    )


def _join(connections: list[_Connection]) -> None:
    deadline_s = time.monotonic() + JOIN_S
    for connection in connections:
        connection.join(max(0.0, deadline_s - time.monotonic()))
