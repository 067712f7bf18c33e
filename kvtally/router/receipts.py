"""Reading receipts from stores: one connection for each store, many questions on it at once, none of which can hang.

Owns the connection's life (handshake, reconnecting) and the questions in flight. `client.StoreClient` does the same for
engines, but waits in a thread of its own; here hundreds of requests wait together, in the event loop. A store that
cannot be reached answers every question at once with why.

The greeting of a unix socket brings descriptors for the arena. They are not asked for when reading, so the kernel drops
them: a router never maps the arena. Neighbours: `tally` (what a receipt is worth), `wire` (the protocol).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from typing import NamedTuple, cast

from kvtally.connection import Endpoint, Targets, answer_greeting, check_owner
from kvtally.core.receipts import Receipt
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
RESOLVE_S = 0.5  # of that, for where a name leads now
FIRST_PAUSE_S, LONGEST_PAUSE_S, REFUSED_PAUSE_S = 0.05, 2.0, 10.0
MOST_QUESTIONS = 8_192
UNSENT_BYTES = 1 << 20  # a store that does not read is asked nothing more
ANSWER_SLACK_S = 2.0  # beyond the wait that the store was asked for


class Answer(NamedTuple):
    """What a store said: a receipt, or none and, where the store could not be asked, why."""

    receipt: Receipt | None
    reason: str = ""


class ReceiptReader:
    """Asks one store. `run` keeps the connection; without it every answer is `store_unreachable`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.problem = "store_unreachable"  # why questions are not asked; empty while connected
        self.tried = asyncio.Event()  # whether the store answers at all is known
        self._session: _Session | None = None
        self._pause_s = FIRST_PAUSE_S
        self._jitter = random.Random()

    def ask(self, ticket: str, wait_ms: int) -> asyncio.Future[Answer]:
        """Decode's half of a ticket, which the store may wait for so long. The future always ends by itself."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.is_busy:
            future: asyncio.Future[Answer] = loop.create_future()
            future.set_result(Answer(None, self.problem or "limit"))
            return future
        return self._session.ask(ticket, wait_ms)

    async def run(self) -> None:
        """Connect, and again whenever the connection is lost, until cancelled."""
        while True:
            try:
                await self._talk()
            except (KVTallyError, OSError) as error:  # a TimeoutError is an OSError
                self._lost(error)
            pause_s = REFUSED_PAUSE_S if self.problem == "store_refused" else self._pause_s
            await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _talk(self) -> None:
        """One connection, from its handshake to its end, which raises OSError or KVTallyError."""
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
        if problem != self.problem or not self.tried.is_set():  # once, not with every attempt
            why = str(error) or "no answer in time"
            logger.warning("no receipts from the store at %s: %s", self.endpoint.address, why)
        self.problem = problem
        self.tried.set()

    async def _connect(self) -> tuple[asyncio.BaseTransport, _Session]:
        """To the first of its addresses that answers; each has its share of the time."""
        targets = await self._targets()
        *others, last = targets
        for target in others:
            with contextlib.suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout((HANDSHAKE_S - RESOLVE_S) / len(targets)):
                    return await self._connect_to(*target)
        return await self._connect_to(*last)

    async def _targets(self) -> Targets:
        """Where the store is: one that comes back on another machine has the same name, and another address."""
        known = self.endpoint
        if known.host:
            try:
                async with asyncio.timeout(RESOLVE_S):
                    loop = asyncio.get_running_loop()
                    found = await loop.getaddrinfo(known.host, known.port, type=socket.SOCK_STREAM)
                    return tuple((family, target) for family, _, _, _, target in found)
            except OSError:  # a TimeoutError is one; then it is looked for where it was
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
            stack.callback(session.abort)  # cancelled half-way: by then the transport may hold the socket open
            made = await loop.create_connection(
                lambda: session,
                sock=connection,
                ssl=self.endpoint.tls,
                server_hostname=self.endpoint.host if self.endpoint.tls else None,
            )
            stack.pop_all()
            return made


class _Session(asyncio.Protocol):
    """One connection. Ends on anything that does not belong to the protocol."""

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
        self._frames: list[bytes] = []  # asked in this turn of the loop; sent together
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
        # Anything else answers a question whose time is over.

    def _hello(self, greeting: Greeting) -> Hello:
        remedy = "Give the router the token that the store was started with: --token-file FILE."
        answer = answer_greeting(self._endpoint, greeting, token_remedy=remedy)
        return Hello(1, PROTOCOL_VERSION, f"router, process {os.getpid()}", proof=answer)

    def _settle(self, number: int, answer: Answer) -> None:
        future, deadline = self._questions.pop(number)
        deadline.cancel()
        if not future.done():  # else its request is gone
            future.set_result(answer)

    def _end(self, error: Exception) -> None:
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits for it gets it; nobody need
        self._transport.close()


_LATE = Answer(None, "store_unreachable")
