"""Reading receipts from stores: one connection to each store, with many questions at once, none of which can hang.

Owns the connection (handshake, reconnecting) and the questions in flight. `client.StoreClient` does the same for
engines, but it waits in the caller's thread; here hundreds of requests wait together in the event loop. While a store
cannot be reached, every question is answered at once with the reason.

On a unix socket the store's greeting carries descriptors for its arena. This reader does not ask for them, so the
kernel drops them: a router never maps an arena. Neighbours: `proxy` (asks), `judging` (what a receipt proves), `wire`
(the protocol).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from typing import NamedTuple, cast

from kvtally.core.receipts import Receipt
from kvtally.endpoint import Endpoint, Targets, answer_greeting, check_owner
from kvtally.errors import IncompatibleError, KVTallyError, TransportError
from kvtally.wire.frames import encode, reply_reader
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Greeting,
    Hello,
    ReceiptGet,
    Receipts,
    Refused,
    Reply,
    Welcome,
)

logger = logging.getLogger(__name__)

HANDSHAKE_S = 2.0
RESOLVE_S = 0.5  # of that time, for looking up the name
FIRST_PAUSE_S, LONGEST_PAUSE_S, REFUSED_PAUSE_S = 0.05, 2.0, 10.0
MOST_QUESTIONS = 8_192
UNSENT_BYTES = 1 << 20  # with more unsent, the store does not read, and is asked nothing more
ANSWER_SLACK_S = 2.0  # an answer may take this much longer than the store was asked to wait


class Answer(NamedTuple):
    """A store's answer: a receipt or none, and a reason if the store could not be asked."""

    receipt: Receipt | None
    reason: str = ""


class ReceiptReader:
    """Asks one store. `run` keeps the connection up; until it does, every answer is `store_unreachable`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.problem = "store_unreachable"  # empty while connected
        self.tried = asyncio.Event()  # set once the first attempt has succeeded or failed
        self._session: _Session | None = None
        self._pause_s = FIRST_PAUSE_S
        self._jitter = random.Random()

    def ask(self, ticket: str, wait_ms: int) -> asyncio.Future[Answer]:
        """Ask for decode's half. The store may wait for it as long as this. The future always ends by itself."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.is_busy:
            future: asyncio.Future[Answer] = loop.create_future()
            future.set_result(Answer(None, self.problem or "limit"))
            return future
        return self._session.ask(ticket, wait_ms)

    async def run(self) -> None:
        """Connect, and reconnect whenever the connection is lost, until cancelled."""
        while True:
            try:
                await self._talk()
            except (KVTallyError, OSError) as error:  # a TimeoutError is an OSError
                self._lost(error)
            pause_s = REFUSED_PAUSE_S if self.problem == "store_refused" else self._pause_s
            await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _talk(self) -> None:
        """One connection, from its handshake to its end. Always ends by raising OSError or KVTallyError."""
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                transport, session = await self._connect()
                await session.welcomed
            logger.info("receipts are read from the store at %s", self.endpoint.address)
            self._session, self.problem, self._pause_s = session, "", FIRST_PAUSE_S
            self.tried.set()
            await session.ended
        finally:
            if self._session is not None:
                self._session.fail("store_unreachable")
                self._session = None
            if transport is not None:
                transport.close()

    def _lost(self, error: KVTallyError | OSError) -> None:
        problem = "store_refused" if isinstance(error, IncompatibleError) else "store_unreachable"
        if problem != self.problem or not self.tried.is_set():  # log it once, not at every attempt
            why = str(error) or "no answer in time"
            logger.warning("no receipts from the store at %s: %s", self.endpoint.address, why)
        self.problem = problem
        self.tried.set()

    async def _connect(self) -> tuple[asyncio.BaseTransport, _Session]:
        """Connect to the first of the store's addresses that answers. Each gets its share of the time."""
        targets = await self._targets()
        *others, last = targets
        for target in others:
            with contextlib.suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout((HANDSHAKE_S - RESOLVE_S) / len(targets)):
                    return await self._connect_to(*target)
        return await self._connect_to(*last)

    async def _targets(self) -> Targets:
        """The store's addresses now: a store that moved to another machine keeps its name, not its address."""
        known = self.endpoint
        if known.host:
            try:
                async with asyncio.timeout(RESOLVE_S):
                    loop = asyncio.get_running_loop()
                    found = await loop.getaddrinfo(known.host, known.port, type=socket.SOCK_STREAM)
                    return tuple((family, target) for family, _, _, _, target in found)
            except OSError:  # a TimeoutError is one; the store may still be where it was
                if not known.targets:
                    raise
        return known.targets

    async def _connect_to(
        self, family: socket.AddressFamily, target: str | tuple[object, ...]
    ) -> tuple[asyncio.BaseTransport, _Session]:
        loop = asyncio.get_running_loop()
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            await loop.sock_connect(connection, target)
            if family == socket.AF_UNIX:
                remedy = "Run the router as the store's user, or reach the store over TCP."
                check_owner(connection, self.endpoint.address, remedy=remedy)
            session = _Session(self.endpoint)
            stack.callback(session.abort)  # if cancelled half-way, when the transport already holds the socket
            made = await loop.create_connection(
                lambda: session,
                sock=connection,
                ssl=self.endpoint.tls,
                server_hostname=self.endpoint.host if self.endpoint.tls else None,
            )
            stack.pop_all()
            return made


class _Session(asyncio.Protocol):
    """One connection. Anything that does not belong to the protocol ends it."""

    def __init__(self, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._endpoint = endpoint
        self._loop = loop
        self._reader = reply_reader(Limits().frame_bytes)
        self._is_made = False
        self._transport: asyncio.Transport
        self._questions: dict[int, tuple[asyncio.Future[Answer], asyncio.TimerHandle]] = {}
        self._frames: list[bytes] = []  # questions of this iteration of the loop, sent together
        self._last_id = 1  # the Hello

    @property
    def is_busy(self) -> bool:
        return (
            len(self._questions) >= MOST_QUESTIONS
            or self._transport.get_write_buffer_size() > UNSENT_BYTES
            or self._transport.is_closing()
        )

    def ask(self, ticket: str, wait_ms: int) -> asyncio.Future[Answer]:
        self._last_id += 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        deadline = self._loop.call_later(wait_ms / 1e3 + ANSWER_SLACK_S, self._settle, self._last_id, _LATE)
        self._questions[self._last_id] = future, deadline
        if not self._frames:
            self._loop.call_soon(self._send)
        self._frames.append(encode(ReceiptGet(self._last_id, ticket, wait_ms)))
        return future

    def _send(self) -> None:
        frames, self._frames = self._frames, []
        self._transport.write(b"".join(frames))

    def fail(self, reason: str) -> None:
        for number in list(self._questions):
            self._settle(number, Answer(None, reason))

    def abort(self) -> None:
        if self._is_made:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._is_made = True
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but inheritance

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except KVTallyError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or TransportError("the store closed the connection", remedy="It comes back.", code="KV-502"))

    def _take(self, message: Reply) -> None:
        if isinstance(message, Receipts) and message.id in self._questions:
            self._settle(message.id, Answer(message.receipts[0] if message.receipts else None))
        elif isinstance(message, Refused):
            if message.id in self._questions:
                self._settle(message.id, Answer(None, "store_refused"))
            else:
                raise IncompatibleError(message.message, remedy=message.remedy, code=message.code)
        elif isinstance(message, Greeting):
            self._transport.write(encode(self._hello(message)))
        elif isinstance(message, Welcome) and not self.welcomed.done():
            self.welcomed.set_result(None)
        # Anything else answers a question that nobody waits for any more.

    def _hello(self, greeting: Greeting) -> Hello:
        remedy = "Give the router the token that the store was started with: --token-file FILE."
        answer = answer_greeting(self._endpoint, greeting, token_remedy=remedy)
        return Hello(1, PROTOCOL_VERSION, f"router, process {os.getpid()}", proof=answer)

    def _settle(self, number: int, answer: Answer) -> None:
        future, deadline = self._questions.pop(number)
        deadline.cancel()
        if not future.done():  # otherwise its request is gone
            future.set_result(answer)

    def _end(self, error: Exception) -> None:
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # perhaps nobody waits for it: then asyncio must not complain
        self._transport.close()


_LATE = Answer(None, "store_unreachable")
