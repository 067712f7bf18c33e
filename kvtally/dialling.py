"""Connecting to a store from an event loop: its addresses in turn, the handshake, and the connection's end.

    dial ─▶ resolve ─▶ connect ─▶ Greeting ─▶ Session.hello ─▶ Welcome, its proof checked ─▶ Session.took for the rest

Written once for both who do this: `router.receipts` reads receipts, `store.dial` asks other stores. `client` does the
same for engines, without a loop. Knows nothing of what is asked. Everything runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar, cast

from kvtally.config.units import is_loopback
from kvtally.endpoint import Endpoint, Targets, check_owner
from kvtally.errors import IncompatibleError, KVTallyError, TransportError
from kvtally.wire.auth import store_proof
from kvtally.wire.frames import encode, reply_reader
from kvtally.wire.limits import Limits
from kvtally.wire.messages import Greeting, Hello, Refused, Reply, Welcome

RESOLVE_SHARE = 0.25  # of the time for connecting: what looking up the name may take
# A connection whose other end is silent is over after this long, whatever the network does.
USER_TIMEOUT_MS = 5_000
IP_BIND_ADDRESS_NO_PORT = 24  # missing from the socket module; see ip(7)
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 3, 1, 2


class Session(asyncio.Protocol):
    """One connection. Anything that does not belong to the protocol ends it."""

    def __init__(self, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[Welcome] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()  # always with an exception that says why
        self.transport: asyncio.Transport
        self._endpoint = endpoint
        self._reader = reply_reader(Limits().frame_bytes)
        self._hello: Hello | None = None
        self._is_made = False

    @abstractmethod
    def hello(self, greeting: Greeting) -> Hello:
        """What to answer this greeting with. Raises KVTallyError if it cannot be answered."""

    @abstractmethod
    def took(self, reply: Reply) -> None:
        """Anything that comes after the welcome."""

    def abort(self) -> None:
        if self._is_made:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._is_made = True
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but inheritance

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except KVTallyError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        closed = TransportError("the store closed the connection", remedy="It comes back.", code="KV-502")
        self._end(exc if isinstance(exc, OSError) else closed)

    def _take(self, message: Reply) -> None:
        if isinstance(message, Refused) and (message.id == 0 or not self.welcomed.done()):
            raise IncompatibleError(message.message, remedy=message.remedy, code=message.code)
        if self.welcomed.done() and not isinstance(message, Greeting | Welcome):
            self.took(message)
        elif isinstance(message, Greeting) and self._hello is None:
            self._hello = self.hello(message)
            self.transport.write(encode(self._hello))
        elif isinstance(message, Welcome) and self._hello is not None and not self.welcomed.done():
            check_proof(self._endpoint, self._hello, message)
            self.welcomed.set_result(message)
        else:
            raise TransportError(
                f"{type(message).__name__} came out of turn in the handshake",
                remedy="What answers there is no store: check the address.",
                code="KV-503",
            )

    def _end(self, error: KVTallyError | OSError) -> None:
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # perhaps nobody waits for it: then asyncio must not complain
        self.transport.close()


S = TypeVar("S", bound=Session)


async def dial(endpoint: Endpoint, session: Callable[[], S], *, within_s: float, owner_remedy: str = "") -> S:
    """A session that was welcomed. Raises OSError (a TimeoutError is one) or KVTallyError; then nothing is left over.

    `owner_remedy` is what to do about a unix socket that belongs to somebody else.
    """
    async with asyncio.timeout(within_s):
        made = await _connect(endpoint, session, within_s, owner_remedy)
        with contextlib.ExitStack() as stack:
            stack.callback(made.abort)
            await made.welcomed
            stack.pop_all()
        return made


def check_proof(endpoint: Endpoint, hello: Hello, welcome: Welcome) -> None:
    """If the Hello asked for it, the store must prove that it knows the token. Raises IncompatibleError KV-205."""
    if hello.nonce and not hmac.compare_digest(welcome.proof, store_proof(endpoint.token, hello.nonce)):
        raise IncompatibleError(
            f"the store at {endpoint.address} did not prove that it knows the token: it is of an older version, or its "
            "token is another one",
            remedy="Install the same version on both machines, and give both stores the same token file.",
            code="KV-205",
        )


def prepare(connection: socket.socket, source: str, target: tuple[object, ...]) -> None:
    """Before a TCP connection to `target` is made: watch it, and let it come from `source` where that can work.

    A store's list of peers names the addresses that peers listen on; theirs must be the ones they connect from."""
    watch(connection)
    if source and is_loopback(source) == is_loopback(str(target[0])) and (":" in source) == (":" in str(target[0])):
        connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)  # the port is chosen with the target
        connection.bind((source, 0))


def watch(connection: socket.socket) -> None:
    """Have the kernel send small messages at once, and end a TCP connection whose other end is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def resolve(host: str, port: int, *, within_s: float) -> Targets:
    """The addresses of a host. Raises OSError. A numeric one costs nothing; a name is looked up in another thread."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        async with asyncio.timeout(within_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple((family, target) for family, _, _, _, target in found)


async def _connect(endpoint: Endpoint, session: Callable[[], S], within_s: float, owner_remedy: str) -> S:
    """Connect to the first of the store's addresses that answers. Each gets its share of the time."""
    targets = await _targets(endpoint, RESOLVE_SHARE * within_s)
    *others, last = targets
    for target in others:
        with contextlib.suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout((1 - RESOLVE_SHARE) * within_s / len(targets)):
                return await _connect_to(endpoint, session, *target, owner_remedy)
    return await _connect_to(endpoint, session, *last, owner_remedy)


async def _targets(known: Endpoint, within_s: float) -> Targets:
    """The store's addresses now: a store that moved to another machine keeps its name, not its address."""
    if known.host:
        try:
            return await resolve(known.host, known.port, within_s=within_s)
        except OSError:  # a TimeoutError is one; the store may still be where it was
            if not known.targets:
                raise
    return known.targets


async def _connect_to(
    endpoint: Endpoint,
    session: Callable[[], S],
    family: socket.AddressFamily,
    target: str | tuple[object, ...],
    owner_remedy: str,
) -> S:
    loop = asyncio.get_running_loop()
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        if isinstance(target, tuple):
            prepare(connection, endpoint.source, target)
        await loop.sock_connect(connection, target)
        if family == socket.AF_UNIX:
            check_owner(connection, endpoint.address, remedy=owner_remedy)
        made = session()
        stack.callback(made.abort)  # if cancelled half-way, when the transport already holds the socket
        await loop.create_connection(
            lambda: made,
            sock=connection,
            ssl=endpoint.tls,
            server_hostname=endpoint.host if endpoint.tls else None,
        )
        stack.pop_all()
        return made
