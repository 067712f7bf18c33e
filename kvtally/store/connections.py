"""Connections: turn bytes from sockets into calls of the sans-I/O store, and its replies into bytes.

    data_received ─▶ frames ─▶ Hub.received ─▶ Store.handle ─┐
    liveness pipe EOF ───────▶ Hub.writer_gone ──────────────┤
    mover ───────────────────▶ Hub.jobs_done ────────────────┼─▶ Hub.flush ─▶ outbox: one write per client
    dialer ──────────────────▶ Hub.peer_said, peer_lost ─────┤               jobs: to the mover; timer: re-armed
    bulk ────────────────────▶ Hub.pulled, sent ─────────────┤               questions to other stores: to the dialer
    timer ───────────────────────────────────────────────────┘               sends to other stores: to bulk

Owns what a peer must do before the store hears of it (a Hello in time, and over TCP the proof of the token), what ends
a connection, and the turns that connections take. Decides nothing about objects. Neighbours: `server` (accepts
sockets), `dial` and `bulk` (other stores), `store` (left to right above).
Threading: everything here runs in the event loop's thread; nothing polls.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections import Counter
from typing import Protocol, cast

import msgspec
from msgspec import structs

from kvtally.errors import CapacityError, IncompatibleError, KVTallyError, TransportError
from kvtally.store.arena import Arena
from kvtally.store.bulk import BulkListener, check_peer_hello, not_a_peer
from kvtally.store.dial import Dialer
from kvtally.store.jobs import Outcome, PeerLink, SendJob
from kvtally.store.mover import Batch, Mover
from kvtally.store.resets import ResetEnd
from kvtally.store.store import Health, Store
from kvtally.wire.auth import proof, store_proof
from kvtally.wire.frames import encode, request_reader
from kvtally.wire.limits import MIB, SECOND_NS, Limits
from kvtally.wire.messages import Greeting, Hello, Pull, Pulled, Refused, Reply, Request, Stats, StatsGet, Welcome
from kvtally.wire.stats import ServerStats, StoreStats

logger = logging.getLogger("kvtally.store")

HELLO_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0  # for a refused peer to read why
UNGREETED_LIMIT = 64  # connections that have not said hello, for TCP and the unix socket each
# How much is done for one connection before others have their turn. A single request may take longer.
REQUESTS_PER_TURN = 16
TURN_NS = 2_000_000
UNREAD_TIMEOUT_S = 20.0  # a peer that leaves replies unread for this long is cut off
STRANGERS_FRAME_BYTES = 1 * MIB  # a Hello with the largest namespace has a fraction of this
_TIMER_SLACK_S = 0.001  # loops round timers to milliseconds, and a timer that fires early would have to be set again


class Hub:
    """Drives one `Store` for all its connections."""

    def __init__(
        self,
        store: Store,
        mover: Mover,
        arena: Arena,
        limits: Limits,
        *,
        token: str = "",
        peer_hosts: PeerHosts | None = None,
    ) -> None:
        """`peer_hosts`: which other stores may come. None: no other store is a peer of this one."""
        self.store = store
        self.limits = limits
        self.ungreeted: dict[Connection, None] = {}  # strangers: no valid Hello yet; in the order of arrival
        self.ended: Counter[str] = Counter()  # connections that the store ended, by error code
        self.arena = arena
        self.dialer: Dialer | None = None  # with peers, before the first flush
        self.bulk: BulkListener | None = None
        self._peer_hosts = peer_hosts
        self._mover = mover
        self._token = token
        self._connections: dict[int, Connection] = {}  # by session
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    # ---- events

    def received(self, connection: Connection, request: Request) -> None:
        now_ns = time.monotonic_ns()
        if connection.session is None:
            self._admit(connection, request, now_ns)
        if connection.is_ended or connection.session is None:
            return
        if isinstance(request, StatsGet):
            connection.send(encode(Stats(request.id, msgspec.to_builtins(self.stats()))))
        elif isinstance(request, Pull | Pulled):
            connection.refuse(_pull_here())
        else:
            self.store.handle(connection.session, request, now_ns)
        self.flush()

    def lost(self, connection: Connection) -> None:
        """The socket is closed. Slots that the client might still be writing to wait for its liveness pipe."""
        self.ungreeted.pop(connection, None)
        if connection.session is None:
            return
        del self._connections[connection.session]
        now_ns = time.monotonic_ns()
        self.store.disconnect(connection.session, now_ns)
        if not connection.has_arena:
            self.store.writer_gone(connection.session, now_ns)
        self.flush()

    def writer_gone(self, connection: Connection) -> None:
        """The liveness pipe reported EOF: the process has unmapped the arena. Called once for each unix connection."""
        if connection.session is None:
            connection.has_arena = False  # a tool that only asks questions: its session has no shared memory
            return
        self.store.writer_gone(connection.session, time.monotonic_ns())
        self.flush()

    def jobs_done(self, batch: Batch) -> None:
        now_ns = time.monotonic_ns()
        for job, outcome in batch:
            self.store.job_done(job, outcome, now_ns)
        self.flush()

    # ---- other stores

    def peer_said(self, link: PeerLink, reply: Reply) -> None:
        self.store.peer_said(link, reply, time.monotonic_ns())
        self.flush()

    def peer_lost(self, link: PeerLink, code: str) -> None:
        self.store.peer_lost(link, code, time.monotonic_ns())
        self.flush()

    def may_come(self, host: str) -> bool:
        return self._peer_hosts is not None and self._peer_hosts.may_come(host)

    def greet_bulk(self, nonce: bytes) -> Greeting:
        return self.store.greeting(nonce=nonce)

    def pulled(self, connection: int, pull: Pull) -> None:
        self.store.pull(connection, pull, time.monotonic_ns())
        self.flush()

    def sent(self, job: SendJob, outcome: Outcome) -> None:
        self.store.sent(job, outcome, time.monotonic_ns())
        self.flush()

    def bulk_ended(self, code: str) -> None:
        self.ended[code] += 1

    # ---- tools

    async def reset(self, digest: bytes) -> ResetEnd:
        ended: asyncio.Future[ResetEnd] = self._loop.create_future()
        # The caller may have left, and cancelled its wait.
        self.store.reset(digest, time.monotonic_ns(), lambda end: None if ended.done() else ended.set_result(end))
        self.flush()
        return await ended

    def health(self) -> Health:
        return self.store.health(time.monotonic_ns())

    def stats(self) -> StoreStats:
        """The store's statistics, with those of the daemon around it."""
        server = ServerStats(
            pid=os.getpid(),
            populated_bytes=self.arena.populated_bytes,
            huge_pages=self.arena.huge_pages,
            unwritten_jobs=self._mover.unwritten,
            strangers=len(self.ungreeted),
            ended=self.ended,
        )
        return structs.replace(self.store.stats(time.monotonic_ns()), server=server)

    def expect_hello(self, connection: Connection) -> None:
        """Take in a new connection. If too many strangers came the same way, the first of them makes way: it has had
        time to say hello."""
        strangers = [stranger for stranger in self.ungreeted if bool(stranger.nonce) is bool(connection.nonce)]
        self.ungreeted[connection] = None
        if len(strangers) >= UNGREETED_LIMIT:
            del self.ungreeted[strangers[0]]
            strangers[0].give_way()

    async def close(self) -> None:
        """End every connection now."""
        connections = [*self.ungreeted, *self._connections.values()]
        for connection in connections:
            connection.abort()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=CLOSE_TIMEOUT_S)
        if self._timer is not None:
            self._timer.cancel()

    # ---- effects

    def flush(self) -> None:
        """Carry out what the store decided: replies, jobs, and the next time to wake up."""
        now_ns = time.monotonic_ns()
        deadline_ns = self.store.tick(now_ns)
        outbox = self.store.take_outbox()
        if outbox:
            self._send(outbox)
        jobs = self.store.take_jobs()
        if jobs:
            self._mover.submit(jobs)
        if self.dialer is not None:
            for link, request in self.store.take_peer_messages():
                self.dialer.send(link, request)
        if self.bulk is not None:
            for job in self.store.take_sends():
                self.bulk.deliver(job)
        if deadline_ns is not None and (self._timer is None or deadline_ns < self._timer_ns):
            self._arm(deadline_ns, now_ns)

    def _send(self, outbox: list[tuple[int, Reply]]) -> None:
        frames: dict[int, list[bytes]] = {}
        for session, reply in outbox:
            if isinstance(reply, Welcome) and session in self._connections:
                reply = self._welcome(self._connections[session], reply)
            frames.setdefault(session, []).append(encode(reply))
        for session, parts in frames.items():
            connection = self._connections.get(session)
            if connection is not None:
                connection.send(b"".join(parts))

    def _welcome(self, connection: Connection, welcome: Welcome) -> Welcome:
        """To a peer, it also proves that this store knows the token, and says where bytes are."""
        connection.welcome()
        if not connection.peer_nonce or self.bulk is None:
            return welcome
        answer = store_proof(self._token, connection.peer_nonce)
        return structs.replace(welcome, proof=answer, bulk_port=self.bulk.port)

    def _arm(self, deadline_ns: int, now_ns: int) -> None:
        """Set the timer, only ever to an earlier time. A deadline that moves back costs one idle wake-up."""
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (deadline_ns - now_ns) / SECOND_NS) + _TIMER_SLACK_S
        self._timer = self._loop.call_later(delay_s, self._wake)
        self._timer_ns = deadline_ns

    def _wake(self) -> None:
        self._timer = None
        self.flush()

    def _admit(self, connection: Connection, request: Request, now_ns: int) -> None:
        """Tell the store of a connection that has said hello and, over TCP, has proved that it knows the token."""
        if not isinstance(request, Hello):
            connection.refuse(_not_hello(request))
            return
        if connection.nonce and not hmac.compare_digest(request.proof, proof(self._token, connection.nonce)):
            connection.refuse(_wrong_token())
            return
        try:
            if request.peer:
                self._check_peer(connection, request)
            connection.session = self.store.connect(
                shared_memory=connection.has_arena, now_ns=now_ns, is_peer=request.peer
            )
        except KVTallyError as error:
            connection.refuse(error)
            return
        self.ungreeted.pop(connection, None)
        self._connections[connection.session] = connection
        connection.admitted()

    def _check_peer(self, connection: Connection, hello: Hello) -> None:
        """Raise KVTallyError unless another store says hello from a host of the list, over TCP."""
        if self._peer_hosts is None or not connection.nonce:
            raise IncompatibleError(
                "this store shares nothing with other stores",
                remedy="Name the others in its store.peers, and connect to its TCP port.",
                code="KV-210",
            )
        if not self.may_come(connection.host):
            raise not_a_peer(connection.host)
        check_peer_hello(hello, connection.nonce, self._token)
        connection.peer_nonce = hello.nonce


class PeerHosts(Protocol):
    def may_come(self, host: str) -> bool: ...


class Connection(asyncio.Protocol):
    """One client's socket. Ended on a malformed frame, without a valid Hello in time, and when it does not read."""

    def __init__(
        self, hub: Hub, *, has_arena: bool, nonce: bytes = b"", hello_timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        self.session: int | None = None  # set by the hub after a valid Hello
        self.has_arena = has_arena  # may have the arena mapped: came over the unix socket and holds its liveness pipe
        self.nonce = nonce  # to be answered with the token's proof; empty if the kernel vouched for the user
        self.peer_nonce = b""  # of another store: to be answered with our own proof
        self.is_ended = False
        self._has_more = False  # requests may wait for the next turn; nothing more is read until they are done
        self._is_next = False  # the next turn is lined up
        self._unread: asyncio.TimerHandle | None = None  # set while the peer leaves replies unread: when to cut it off
        self._hub = hub
        self._hello_timeout_s = hello_timeout_s
        self.handover: asyncio.Task[None] | None = None  # the loop takes the socket over, and negotiates TLS
        self._reader = request_reader(min(STRANGERS_FRAME_BYTES, hub.limits.frame_bytes))
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self._deadline = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._hello_overdue)
        if self.nonce:  # on the unix socket, the greeting was sent before the loop had it
            self._transport.write(encode(self._hub.store.greeting(nonce=self.nonce)))

    @property
    def host(self) -> str:
        """Where a TCP peer connects from, as a number."""
        return str((self._transport.get_extra_info("peername") or ("",))[0])

    def data_received(self, data: bytes) -> None:
        if self.is_ended:
            return
        self._reader.push(data)
        if not self._has_more:
            self._take_turn()

    def _take_turn(self) -> None:
        """Carry out as many waiting requests as one turn allows. If there may be more, other connections have their
        turn first, and nothing is read until then. Nothing is done for a peer that does not read its replies."""
        self._is_next = False
        ends_ns = time.monotonic_ns() + TURN_NS
        for _ in range(REQUESTS_PER_TURN):
            if self.is_ended:
                return
            if self._unread is not None:
                break
            try:
                requests = self._reader.take(1)
            except TransportError as error:
                self.refuse(error)
                return
            if not requests:
                if self._has_more:
                    self._has_more = False
                    self._transport.resume_reading()
                return
            self._hub.received(self, requests[0])
            if time.monotonic_ns() >= ends_ns:
                break
        if self._transport.is_closing():
            return
        if not self._has_more:
            self._has_more = True
            self._transport.pause_reading()
        if self._unread is None:
            self._line_up()

    def _line_up(self) -> None:
        if not self._is_next:
            self._is_next = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def pause_writing(self) -> None:
        """The peer leaves replies unread."""
        self._unread = asyncio.get_running_loop().call_later(UNREAD_TIMEOUT_S, self._cut_off)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self._has_more:
            self._line_up()

    def _cut_off(self) -> None:
        logger.warning("session %s does not read its replies and was cut off [KV-300]", self.session)
        self._hub.ended["KV-300"] += 1
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_ended = True
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._hub.lost(self)
        self.closed.set_result(None)

    def admitted(self) -> None:
        """The store knows of it: from now on, the limits for clients apply."""
        self._reader.limit_bytes = self._hub.limits.frame_bytes

    def give_way(self) -> None:
        """End it in favour of a newer connection: it has not said hello."""
        error = CapacityError(
            f"{UNGREETED_LIMIT} connections that have not said hello are the most this store takes",
            remedy="Say hello at once after the greeting; connect again.",
            code="KV-301",
        )
        if self.handover is not None and not self.handover.done():
            self._hub.ended[error.code] += 1
            self.is_ended = True
            self.handover.cancel()
        else:
            self.refuse(error)

    def welcome(self) -> None:
        """The store accepted the Hello."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send(self, frames: bytes) -> None:
        if self.is_ended:
            return
        self._transport.write(frames)
        if self._transport.get_write_buffer_size() > self._hub.limits.unsent_bytes_per_client:
            self._cut_off()

    def refuse(self, error: KVTallyError) -> None:
        """Say why, then close."""
        self._hub.ended[error.code] += 1
        logger.info("connection refused: %s", error)
        self.is_ended = True
        self._transport.write(encode(Refused(0, error.code, error.message, error.remedy)))
        self._transport.close()  # once the refusal was sent, or ...
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        self.is_ended = True
        self._transport.abort()

    def _hello_overdue(self) -> None:
        self._deadline = None
        self.refuse(
            TransportError(
                f"no valid hello within {self._hello_timeout_s:g} s",
                remedy="Say hello at once after the greeting; connect again.",
                code="KV-501",
            )
        )


def _not_hello(request: Request) -> TransportError:
    return TransportError(
        f"the first message was {type(request).__name__}, not Hello",
        remedy="Answer the store's greeting with Hello.",
        code="KV-503",
    )


def _pull_here() -> TransportError:
    return TransportError(
        "bytes are not pulled on a control connection",
        remedy="Pull on a connection to the port that Welcome names.",
        code="KV-503",
    )


def _wrong_token() -> IncompatibleError:
    return IncompatibleError(
        "the proof of the store's token is missing or wrong",
        remedy="Give the client the token that the store was started with.",
        code="KV-205",
    )
