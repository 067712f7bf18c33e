"""Links to other stores: one connection for each store and namespace, made when the store has something to say on it.

    Store.take_peer_messages ──send──▶ Dialer ──frames──▶ the other store's TCP port
    Store.peer_said ◀──said── Dialer ◀──replies──      Store.peer_lost ◀──lost── it failed, refused or ended

Owns connecting, the queue while that lasts, closing what is idle, and where bulk ports are. `dialling` shakes hands.
Decides nothing: whom to ask, how long to wait and when to try again is the store's, which hears of every loss once.

Threading: the event loop's thread owns everything; only `bulk_endpoint` may be called from others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace

from kvtally.config.peers import SCHEME, PeerList, plain_host
from kvtally.config.units import LAST_PORT, split_address
from kvtally.dialling import Session, dial, resolve
from kvtally.endpoint import Endpoint, answer_greeting
from kvtally.errors import IncompatibleError, KVTallyError, TransportError
from kvtally.log import Seldom
from kvtally.store.jobs import PeerLink
from kvtally.wire.auth import NONCE_BYTES
from kvtally.wire.frames import encode
from kvtally.wire.limits import MIB
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Reply, Request

logger = logging.getLogger("kvtally.store")

HANDSHAKE_S = 2.0
IDLE_S = 60.0  # longer than a lease at a peer can last
SWEEP_S = 15.0
MOST_LINKS = 256
MOST_WAITING_BYTES = 16 * MIB  # on one link, unsent
FREE_AFTER_S = 10.0  # a link that was quiet for this long, and so holds no lease, makes way for another one
NAMES_S = 30.0  # how often the names of peers are looked up
_LOOK_UP_S = 1.0


class Dialer:
    """The links of one store. `said` and `lost` take what came, and may call `send` again."""

    def __init__(
        self,
        *,
        store: str,
        address: str,
        token: str,
        describe: Callable[[bytes], bytes],
        said: Callable[[PeerLink, Reply], None],
        lost: Callable[[PeerLink, str], None],
        source: str = "",
        tls: ssl.SSLContext | None = None,
        bulk_tls: ssl.SSLContext | None = None,
    ) -> None:
        """`store` and `address` are this store's own, and `source` is where its connections come from; `describe` gives
        the canonical description of a namespace."""
        self.store = store
        self.client = f"store at {address}"
        self.describe = describe
        self.said = said
        self._lost = lost
        self._token = token
        self._source = source
        self._tls = tls
        self._bulk_tls = bulk_tls
        self._links: dict[PeerLink, _Link] = {}  # the one opened last comes last
        self._bulk: dict[str, Endpoint] = {}  # by address, of links that were welcomed
        self._told = Seldom()
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    def send(self, to: PeerLink, request: Request) -> None:
        """Send it when the link stands. If it cannot, the link is lost, and the store hears of it later."""
        if self._is_closed:
            return
        link = self._links.get(to) or self._open(to)
        if link is None or not link.send(request):
            if link is not None:
                self._close(link)
            self._loop.call_soon(self._lost, to, "KV-300")

    def bulk_endpoint(self, address: str) -> Endpoint | None:
        """Where to pull bytes from. Known while a link to this store stands. Any thread may ask."""
        return self._bulk.get(address)

    @property
    def links(self) -> list[PeerLink]:
        return list(self._links)

    async def close(self) -> None:
        """End every link, and make no more. Nobody is told."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = [link.task for link in self._links.values() if link.task is not None]
        self._links.clear()
        self._bulk.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---- one link

    def _open(self, to: PeerLink) -> _Link | None:
        """A link that is being made; None if there are too many."""
        if len(self._links) >= MOST_LINKS:
            self._close_idle(FREE_AFTER_S, most=1)
        if len(self._links) >= MOST_LINKS:
            return None
        link = self._links[to] = _Link(self, to)
        link.task = self._loop.create_task(self._run(link))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        return link

    async def _run(self, link: _Link) -> None:
        """From connecting to the end. The link is in the dictionary until its end is known."""
        try:
            endpoint = self._endpoint(link.to.address)
            session = await dial(endpoint, lambda: _Session(endpoint, link), within_s=HANDSHAKE_S)
            try:
                self._welcomed(link, endpoint, session)
                await session.ended
            finally:
                session.abort()
        except (KVTallyError, OSError) as error:  # a TimeoutError is an OSError
            self._end(link, error)

    def _endpoint(self, address: str) -> Endpoint:
        try:
            host, port = split_address(address.removeprefix(SCHEME))
        except ValueError as error:  # the store asks none such
            raise TransportError(f"{address!r}: {error}", remedy="Name tcp://host:port.", code="KV-500") from error
        return Endpoint(
            address=address,
            targets=(),
            token=self._token,
            tls=self._tls,
            host=host,
            port=port,
            source=self._source,
        )

    def _welcomed(self, link: _Link, endpoint: Endpoint, session: _Session) -> None:
        """The link stands, and says where the other store's bytes are."""
        port, where = session.welcomed.result().bulk_port, session.transport.get_extra_info("peername")
        if where is None:
            raise ConnectionResetError("it closed the connection")
        if not 0 < port <= LAST_PORT:
            raise TransportError(
                f"its port for KV bytes is {port}", remedy="Install the same version on both machines.", code="KV-503"
            )
        # By its number: nothing is looked up for a pull.
        found = socket.getaddrinfo(where[0], port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        bulk = replace(endpoint, targets=((found[0][0], found[0][4]),), tls=self._bulk_tls, port=port)
        if bulk != self._bulk.get(link.to.address):
            self._bulk[link.to.address] = bulk
        logger.info("connected to the store at %s", link.to.address)
        link.stand(session)

    def _end(self, link: _Link, error: KVTallyError | OSError) -> None:
        if self._links.get(link.to) is not link:
            return  # it was closed because it was idle
        self._forget(link)
        code, text = _explain(error, is_standing=link.session is not None)
        if self._told.is_due((link.to.address, code)):
            logger.warning("no KV from the store at %s: %s", link.to.address, text)
        self._lost(link.to, code)

    def _forget(self, link: _Link) -> None:
        del self._links[link.to]
        if not any(other.address == link.to.address for other in self._links):
            self._bulk.pop(link.to.address, None)

    # ---- links that nobody needs

    def _sweep(self) -> None:
        self._sweeper = None
        self._close_idle(IDLE_S)
        if self._links:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _close_idle(self, after_s: float, most: int = MOST_LINKS) -> None:
        """Close links on which nothing is asked and nothing has happened for so long, the quietest first."""
        now_s = time.monotonic()
        idle = [link for link in self._links.values() if not link.open and now_s - link.used_s >= after_s]
        for link in sorted(idle, key=lambda link: link.used_s)[:most]:
            self._close(link)

    def _close(self, link: _Link) -> None:
        self._forget(link)
        if link.task is not None:
            link.task.cancel()


class _Link:
    """One link: what waits for it, what was asked on it, and its session once it stands."""

    def __init__(self, dialer: Dialer, to: PeerLink) -> None:
        self.to = to
        self.dialer = dialer
        self.description = dialer.describe(to.namespace)
        self.task: asyncio.Task[None] | None = None
        self.session: _Session | None = None
        self.open: set[int] = set()  # requests without an answer
        self.used_s = time.monotonic()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def send(self, request: Request) -> bool:
        """False if too much waits already: the other store does not read."""
        self.open.add(request.id)
        self.used_s = time.monotonic()
        frame = encode(request)
        if self.session is not None:
            self.session.transport.write(frame)
            return self.session.transport.get_write_buffer_size() <= MOST_WAITING_BYTES
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        return self._waiting_bytes <= MOST_WAITING_BYTES

    def stand(self, session: _Session) -> None:
        self.session = session
        session.transport.write(b"".join(self._waiting))
        self._waiting.clear()

    def took(self, reply: Reply) -> None:
        self.used_s = time.monotonic()
        if not isinstance(reply, Greeting):
            self.open.discard(reply.id)
        self.dialer.said(self.to, reply)


class _Session(Session):
    """A link's connection."""

    def __init__(self, endpoint: Endpoint, link: _Link) -> None:
        super().__init__(endpoint)
        self._link = link

    def hello(self, greeting: Greeting) -> Hello:
        dialer = self._link.dialer
        if greeting.store == dialer.store:
            raise IncompatibleError(
                f"{self._endpoint.address} is this store's own address",
                remedy="Name another store as the source, or give each store an address of its own.",
                code="KV-200",
            )
        answer = answer_greeting(self._endpoint, greeting, token_remedy="Give both stores the same token file.")
        return Hello(
            1,
            PROTOCOL_VERSION,
            dialer.client,
            self._link.description,
            proof=answer,
            peer=True,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )

    def took(self, reply: Reply) -> None:
        self._link.took(reply)


class PeerNames:
    """Who may connect as a peer: hosts in the list's networks, and those behind its names, which are looked up again
    and again because machines move."""

    def __init__(self, peers: PeerList) -> None:
        self._peers = peers
        self._behind: dict[str, frozenset[str]] = {}  # name -> numeric addresses

    def may_come(self, host: str) -> bool:
        """Whether the peer of a connection, by its numeric address, is one of them."""
        return self._peers.has(host) or any(plain_host(host) in hosts for hosts in self._behind.values())

    async def run(self) -> None:
        """Look the names up, until cancelled."""
        while self._peers.names:
            await self.look_up()
            await asyncio.sleep(NAMES_S)

    async def look_up(self) -> None:
        """Once, within a second. A name that cannot be looked up now keeps what it meant before."""
        await asyncio.gather(*map(self._look_up, self._peers.names))

    async def _look_up(self, name: str) -> None:
        try:
            targets = await resolve(name, 0, within_s=_LOOK_UP_S)
        except OSError as error:  # a TimeoutError is one
            logger.info("the peer %s cannot be looked up now: %s", name, error)
            return
        self._behind[name] = frozenset(plain_host(str(target[0])) for _, target in targets)


def _explain(error: KVTallyError | OSError, *, is_standing: bool) -> tuple[str, str]:
    """The code of a lost link, and a line about it."""
    if isinstance(error, ssl.SSLError):
        error = IncompatibleError(
            f"no TLS with it: {error}",
            remedy="Let all stores use TLS or none; peers_ca must be the authority of its certificate, and the "
            "certificate must be for its address.",
            code="KV-200",
        )
    if isinstance(error, KVTallyError):
        return error.code, str(error)
    code = "KV-502" if is_standing else "KV-501" if isinstance(error, TimeoutError) else "KV-500"
    why = str(error) or f"no answer within {HANDSHAKE_S:g} s"
    return code, f"{why} [{code}]. Look at that store and at the network between the two; it is asked again later."
