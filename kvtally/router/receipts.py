"""Reading receipts from stores: one connection to each store, with many questions at once, none of which can hang.

Owns reconnecting and the questions in flight; `dialling` connects. `client.StoreClient` does the same for engines, but
it waits in the caller's thread; here hundreds of requests wait together in the event loop. While a store cannot be
reached, every question is answered at once with the reason.

On a unix socket the store's greeting carries descriptors for its arena. This reader does not ask for them, so the
kernel drops them: a router never maps an arena. Neighbours: `proxy` (asks), `judging` (what a receipt proves), `wire`
(the protocol).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import NamedTuple

from kvtally.core.receipts import Receipt
from kvtally.dialling import Session, dial
from kvtally.endpoint import Endpoint, answer_greeting
from kvtally.errors import IncompatibleError, KVTallyError
from kvtally.wire.frames import encode
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Greeting,
    Hello,
    ReceiptGet,
    Receipts,
    Refused,
    Reply,
)

logger = logging.getLogger(__name__)

HANDSHAKE_S = 2.0
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
        self.greeting: Greeting | None = None  # what the store has told about itself, when it was last connected
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
        remedy = "Run the router as the store's user, or reach the store over TCP."
        session = await dial(self.endpoint, lambda: _Session(self.endpoint), within_s=HANDSHAKE_S, owner_remedy=remedy)
        try:
            logger.info("receipts are read from the store at %s", self.endpoint.address)
            self._session, self.problem, self._pause_s = session, "", FIRST_PAUSE_S
            self.greeting = session.greeting
            self.tried.set()
            await session.ended
        finally:
            self._session = None
            session.fail("store_unreachable")
            session.transport.close()

    def _lost(self, error: KVTallyError | OSError) -> None:
        problem = "store_refused" if isinstance(error, IncompatibleError) else "store_unreachable"
        if problem != self.problem or not self.tried.is_set():  # log it once, not at every attempt
            why = str(error) or "no answer in time"
            logger.warning("no receipts from the store at %s: %s", self.endpoint.address, why)
        self.problem = problem
        self.tried.set()


class _Session(Session):
    """One connection, and the questions that wait for their answers on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._loop = asyncio.get_running_loop()
        self._questions: dict[int, tuple[asyncio.Future[Answer], asyncio.TimerHandle]] = {}
        self._frames: list[bytes] = []  # questions of this iteration of the loop, sent together
        self._last_id = 1  # the Hello
        self.greeting: Greeting | None = None

    @property
    def is_busy(self) -> bool:
        return (
            len(self._questions) >= MOST_QUESTIONS
            or self.transport.get_write_buffer_size() > UNSENT_BYTES
            or self.transport.is_closing()
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
        self.transport.write(b"".join(frames))

    def fail(self, reason: str) -> None:
        for number in list(self._questions):
            self._settle(number, Answer(None, reason))

    def hello(self, greeting: Greeting) -> Hello:
        self.greeting = greeting
        remedy = "Give the router the token that the store was started with: --token-file FILE."
        answer = answer_greeting(self._endpoint, greeting, token_remedy=remedy)
        return Hello(1, PROTOCOL_VERSION, f"router, process {os.getpid()}", proof=answer)

    def took(self, reply: Reply) -> None:
        if isinstance(reply, Receipts) and reply.id in self._questions:
            self._settle(reply.id, Answer(reply.receipts[0] if reply.receipts else None))
        elif isinstance(reply, Refused) and reply.id in self._questions:
            self._settle(reply.id, Answer(None, "store_refused"))
        # Anything else answers a question that nobody waits for any more.

    def _settle(self, number: int, answer: Answer) -> None:
        future, deadline = self._questions.pop(number)
        deadline.cancel()
        if not future.done():  # otherwise its request is gone
            future.set_result(answer)


_LATE = Answer(None, "store_unreachable")
