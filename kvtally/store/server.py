"""The daemon: everything a running store consists of, started in order and stopped in the reverse one.

    lock the socket ▸ bind TCP, bulk, admin ▸ arena (pre-faulted in the background) ▸ tiers, recovered ▸ mover ▸ listen

What can be refused is refused before anything is touched, and nobody can connect before the lower tiers are recovered.
Owns start, stop, accepting and the process's own settings (signals, garbage collector, descriptors). `connections`
handles requests, `store` decides.

Threading: one event loop; the arena's and the mover's threads talk to it only by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvtally import __version__
from kvtally.config import StoreConfig, check_network
from kvtally.config.peers import SCHEME, PeerList, is_wildcard
from kvtally.config.units import human_size, split_address
from kvtally.core.space import Piece
from kvtally.dialling import watch
from kvtally.errors import CapacityError, ConfigError, IncompatibleError, IntegrityError, KVTallyError, TierError
from kvtally.shm import peer_uid
from kvtally.store.admin import check_admin, start_admin
from kvtally.store.arena import Arena, check_fits
from kvtally.store.bulk import BulkListener
from kvtally.store.connections import HELLO_TIMEOUT_S, UNGREETED_LIMIT, Connection, Hub
from kvtally.store.dial import Dialer, PeerNames
from kvtally.store.listen import (
    Acceptor,
    UnixEndpoint,
    bind_tcp,
    check_certificate,
    check_socket_path,
    peers_context,
    refuse,
    send_greeting,
    start_listening,
    tls_context,
)
from kvtally.store.mover import Batch, Mover
from kvtally.store.store import Store, TierInfo
from kvtally.store.tier_state import TierKind
from kvtally.store.tiers.base import PeerSource, Tier
from kvtally.store.tiers.files import open_disk
from kvtally.store.tiers.limited import LimitedTier
from kvtally.store.tiers.nixl import Nixl
from kvtally.store.tiers.peer import PeerTier
from kvtally.wire.auth import NONCE_BYTES
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop

    new_event_loop = uvloop.new_event_loop
except ImportError:  # it is not available everywhere; asyncio's own loop is slower
    new_event_loop = asyncio.new_event_loop

logger = logging.getLogger("kvtally.store")

DRAIN_TIMEOUT_S = 5.0  # for objects on their way to lower tiers, when the store stops
_MOVER_STOP_TIMEOUT_S = 1.0
_DESCRIPTORS = 16_384


def run(config: StoreConfig, *, limits: Limits | None = None, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises ConfigError where the store cannot start."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(config, limits=limits, on_ready=on_ready))
    return 0


async def serve(
    config: StoreConfig, *, limits: Limits | None = None, on_ready: Callable[[], None] | None = None
) -> None:
    """`run`, inside an event loop of this process's main thread."""
    server = StoreServer(config, limits=limits)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    _raise_descriptor_limit()
    gc.disable()  # recovery makes a million objects and no garbage
    try:
        async with server:
            _settle_collector()
            if on_ready is not None:
                on_ready()
            await server.stopping.wait()
            logger.info("stopping")
    finally:
        gc.enable()
    if server.failure is not None:
        raise server.failure
    logger.info("stopped")


def open_tiers(config: StoreConfig) -> list[Tier]:
    """The lower tiers that are configured, nearest first. Raises ConfigError or IncompatibleError."""
    if not config.disk:
        return []
    disk = open_disk(Path(config.disk), config.disk_bytes)
    return [LimitedTier(disk, config.disk_read_bytes_s) if config.disk_read_bytes_s else disk]


class StoreServer:
    """One running store: `async with StoreServer(config) as server`. `stopping` asks its owner to leave the block."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        limits: Limits | None = None,
        open_tiers: Callable[[StoreConfig], Sequence[Tier]] = open_tiers,
        allowed_uids: frozenset[int] | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.config = config
        self.limits = limits or Limits()
        self.stopping = asyncio.Event()
        self.failure: ConfigError | None = None  # why it stopped by itself
        self.hub: Hub
        self.arena: Arena
        self.address = ""  # by which peers reach it
        self.tcp_port = 0  # the port that was bound: a configured port of 0 takes any free one
        self.bulk_port = 0
        self.admin_port = 0
        self._open_tiers = open_tiers
        self._allowed_uids = allowed_uids or frozenset({os.geteuid(), 0})
        self._hello_timeout_s = hello_timeout_s
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> StoreServer:
        check(self.config)
        async with contextlib.AsyncExitStack() as stack:  # undoes a start that fails halfway
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Each stage registers how to undo it, so stopping is the same list backwards."""
        config, loop = self.config, asyncio.get_running_loop()
        endpoint = UnixEndpoint(config.socket)
        stack.callback(endpoint.close)
        tcp = self._bind(stack, config.tcp, "tcp")
        bulk = self._bind(stack, config.bulk, "bulk")
        admin = self._bind(stack, config.admin, "admin")
        started_ns = time.monotonic_ns()
        name = secrets.token_hex(8)
        if bulk is not None and tcp is not None:
            self.address = _advertised(config.advertise, tcp)
        peers = PeerList(config.peers, own=self.address)

        self.arena = Arena(config.memory_bytes)
        stack.callback(self.arena.close)
        dialer = self._dialer(name, tcp) if peers and tcp is not None else None
        nixl = await self._open_nixl(stack, name) if dialer is not None and config.transport != "tcp" else None
        tiers: list[Tier | PeerSource] = [*self._open_tiers(config)]  # the last that may refuse: memory comes after it
        if dialer is not None:
            tiers.append(PeerTier(dialer.bulk_endpoint, nixl))
        self.arena.populate(lambda failure: loop.call_soon_threadsafe(self._populated, started_ns, failure))
        huge_pages = "huge pages" if self.arena.huge_pages else "4 KiB pages"
        logger.info("arena of %s, %s, pre-faulting in the background", human_size(self.arena.size_bytes), huge_pages)

        mover = Mover(tiers, self.arena)
        stack.push_async_callback(self._stop_tiers, mover, tiers)
        store = Store(
            name=name,
            version=__version__,
            arena_bytes=self.arena.size_bytes,
            limits=self.limits,
            tiers=[_info(tier) for tier in tiers],
            address=self.address,
            may_ask=peers.may_ask,
            verify_reads=config.verify_reads,
            started_ns=started_ns,
        )
        _recover(store, tiers)
        store.probe(time.monotonic_ns())

        hosts = PeerNames(peers) if peers else None
        self.hub = Hub(store, mover, self.arena, self.limits, token=config.token, peer_hosts=hosts)
        self.hub.dialer = dialer
        written = asyncio.Event()
        mover.start(post=loop.call_soon_threadsafe, deliver=lambda batch: self._jobs_done(mover, written, batch))
        stack.push_async_callback(_finish_writes, mover, written)
        self.hub.flush()
        stack.push_async_callback(self.hub.close)
        if dialer is not None and hosts is not None and bulk is not None:
            stack.push_async_callback(dialer.close)
            await self._listen_bulk(stack, hosts, bulk, nixl.card if nixl is not None else b"")
        if admin is not None:
            start_listening(admin, "admin")
            self.admin_port = admin.getsockname()[1]
            stack.push_async_callback(await start_admin(self.hub, admin, token=config.token))
            logger.info("admin HTTP on port %s", self.admin_port)
        if tcp is not None:
            self._listen_tcp(stack, tcp)
        front = UnixFront(self.hub, endpoint, self._allowed_uids, self._hello_timeout_s)
        stack.push_async_callback(front.close)
        logger.info("serving on %s", config.socket)

    def _bind(self, stack: contextlib.AsyncExitStack, address: str, setting: str) -> socket.socket | None:
        if not address:
            return None
        listener = bind_tcp(address, setting)
        stack.callback(listener.close)
        return listener

    def _listen_tcp(self, stack: contextlib.AsyncExitStack, listener: socket.socket) -> None:
        tls = tls_context(self.config.tls_cert, self.config.tls_key)
        start_listening(listener, "tcp")
        front = TcpFront(self.hub, listener, self._hello_timeout_s, tls)
        stack.push_async_callback(front.close)
        self.tcp_port = listener.getsockname()[1]
        logger.info("serving on TCP port %s, %s", self.tcp_port, "TLS" if tls is not None else "without TLS")

    def _dialer(self, name: str, tcp: socket.socket) -> Dialer:
        """What it hears goes to the hub, which does not exist yet."""
        config, tls = self.config, peers_context(self.config.peers_ca)
        host = tcp.getsockname()[0]
        return Dialer(
            store=name,
            address=self.address,
            token=config.token,
            source="" if is_wildcard(host) else host,
            describe=lambda digest: self.hub.store.description(digest),
            said=lambda link, reply: self.hub.peer_said(link, reply),
            lost=lambda link, code: self.hub.peer_lost(link, code),
            tls=tls,
            bulk_tls=tls if config.bulk_tls else None,
        )

    async def _open_nixl(self, stack: contextlib.AsyncExitStack, name: str) -> Nixl:
        """Registering takes all memory of the arena, and so some time, before anybody can connect."""
        (arena,) = self.arena.views([Piece(0, self.arena.size_bytes)])
        nixl = await asyncio.to_thread(Nixl, name, arena, may_use_tcp=self.config.transport == "nixl-tcp")
        stack.callback(nixl.close)
        logger.info("peers read this arena by NIXL%s", ", which may use TCP" if nixl.may_use_tcp else "")
        return nixl

    async def _listen_bulk(
        self, stack: contextlib.AsyncExitStack, hosts: PeerNames, listener: socket.socket, card: bytes
    ) -> None:
        """Serve bytes to peers, once it is known who they are."""
        config = self.config
        await hosts.look_up()
        task = asyncio.create_task(hosts.run())
        stack.callback(task.cancel)
        tls = tls_context(config.tls_cert, config.tls_key) if config.bulk_tls else None
        if tls is not None:
            tls.num_tickets = (
                0  # pullers keep their connections, and what they have not asked for would look like an end
            )
        start_listening(listener, "bulk")
        self.hub.bulk = BulkListener(self.hub, listener, self.arena, token=config.token, tls=tls, card=card)
        stack.push_async_callback(self.hub.bulk.close)
        self.bulk_port = self.hub.bulk.port
        logger.info("peers reach this store at %s, and its bytes on port %s", self.address, self.bulk_port)

    def _populated(self, started_ns: int, failure: ConfigError | None) -> None:
        if failure is None:
            seconds = (time.monotonic_ns() - started_ns) / 1e9
            logger.info("arena of %s pre-faulted in %.1f s", human_size(self.arena.size_bytes), seconds)
            return
        # Continuing would be worse: a client that touches a page without memory behind it is killed by SIGBUS.
        logger.error("%s", failure)
        self.failure = failure
        self.stopping.set()

    def _jobs_done(self, mover: Mover, written: asyncio.Event, batch: Batch) -> None:
        self.hub.jobs_done(batch)
        if mover.unwritten == 0:
            written.set()

    async def _stop_tiers(self, mover: Mover, tiers: Sequence[Tier | PeerSource]) -> None:
        for tier in tiers:
            if isinstance(tier, PeerSource):
                tier.close()  # ends what is being pulled
        if not await asyncio.to_thread(mover.stop, _MOVER_STOP_TIMEOUT_S):
            logger.warning("a tier does not return from the device; leaving without closing it (it is restart-safe)")
            return
        for tier in tiers:
            try:
                tier.close()
            except TierError as error:  # only the last sync of a cache: what it lost is a miss after the next start
                logger.warning("tier %s was not closed in order: %s", tier.name, error)


class Front(Acceptor):
    """Accepts clients. A peer counts as a stranger from here on, even before TLS is negotiated."""

    def __init__(
        self, hub: Hub, listener: socket.socket, hello_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(listener)
        self._hub = hub
        self._hello_timeout_s = hello_timeout_s
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self.stop_accepting()
        for task in self._tasks:
            task.cancel()  # do not wait for a peer that does not finish its handshake
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, peer: socket.socket) -> None:
        try:
            self._hand_over(peer, self._admit(peer))
        except KVTallyError as error:
            self._refuse(peer, error)

    @abstractmethod
    def _admit(self, peer: socket.socket) -> Connection:
        """The connection for this peer. Raises KVTallyError to refuse it."""

    def _refuse(self, peer: socket.socket, error: KVTallyError) -> None:
        self._hub.ended[error.code] += 1
        refuse(peer, error, has_tls=self._tls is not None)

    def _hand_over(self, peer: socket.socket, connection: Connection) -> None:
        """Hand the socket over to the loop."""
        task = connection.handover = self._loop.create_task(self._take_over(peer, connection))
        self._tasks.add(task)
        task.add_done_callback(partial(self._taken_over, peer, connection))

    async def _take_over(self, peer: socket.socket, connection: Connection) -> None:
        timeout_s = self._hello_timeout_s if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, peer, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # it left, or does not speak TLS
            self._let_go(peer, connection)

    def _taken_over(self, peer: socket.socket, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # the store stops, or the connection made way
            self._let_go(peer, connection)

    def _let_go(self, peer: socket.socket, connection: Connection) -> None:
        """Close a socket that the loop never took over."""
        self._hub.ungreeted.pop(connection, None)
        peer.close()


class TcpFront(Front):
    """Accepts everybody on the TCP port, and asks for the token's proof."""

    def _admit(self, peer: socket.socket) -> Connection:
        watch(peer)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = Connection(self._hub, has_arena=False, nonce=nonce, hello_timeout_s=self._hello_timeout_s)
        self._hub.expect_hello(connection)
        return connection


class UnixFront(Front):
    """Accepts on the unix socket: checks the user, hands out the arena, and watches the process through a pipe."""

    def __init__(self, hub: Hub, endpoint: UnixEndpoint, allowed_uids: frozenset[int], hello_timeout_s: float) -> None:
        self._endpoint = endpoint
        self._allowed_uids = allowed_uids
        self._pipes: dict[int, Connection] = {}  # read ends of liveness pipes; they may outlive their connections
        super().__init__(hub, endpoint.listen(), hello_timeout_s)

    async def close(self) -> None:
        await super().close()
        self._endpoint.stop_listening()
        for pipe in self._pipes:
            self._loop.remove_reader(pipe)
            os.close(pipe)

    def _admit(self, peer: socket.socket) -> Connection:
        """Greet the peer. The loop cannot send descriptors, so this happens before it takes the socket over."""
        uid = peer_uid(peer)
        if uid not in self._allowed_uids:
            raise IncompatibleError(
                f"this store serves its own user; the peer is user {uid}",
                remedy="Run the engine and the store as the same user, or start a store for that user.",
                code="KV-205",
            )
        if len(self._pipes) >= 2 * self._hub.limits.clients + UNGREETED_LIMIT:
            raise CapacityError(
                f"{len(self._pipes)} connections, old ones included, still hold the arena",
                remedy="Close what is left of old connections: end the processes that leak them.",
                code="KV-301",
            )
        connection = Connection(self._hub, has_arena=True, hello_timeout_s=self._hello_timeout_s)
        self._hub.expect_hello(connection)
        try:
            pipe = send_greeting(peer, encode(self._hub.store.greeting()), self._hub.arena.fd)
        except OSError:
            self._hub.ungreeted.pop(connection, None)
            raise
        self._pipes[pipe] = connection
        self._loop.add_reader(pipe, self._pipe_readable, pipe)
        return connection

    def _pipe_readable(self, pipe: int) -> None:
        try:
            if os.read(pipe, 4096):
                return  # nobody should write there; ignore it
        except BlockingIOError:
            return
        self._loop.remove_reader(pipe)
        os.close(pipe)
        self._hub.writer_gone(self._pipes.pop(pipe))


def check(config: StoreConfig) -> None:
    """Raise ConfigError for what can never work. Touches nothing."""
    check_socket_path(config.socket)
    check_fits(config.memory_bytes)
    check_network(config)
    server, client = tls_context(config.tls_cert, config.tls_key), peers_context(config.peers_ca)
    if server is not None and client is not None:
        check_certificate(server, client, split_address(config.advertise).host)
    check_admin(config.admin)
    if config.remote:
        raise ConfigError(
            "store.remote: stores of this version do not use a pool yet",
            remedy="Leave it out. `kvtally pool check URL` examines a pool all the same.",
            code="KV-102",
        )


def _advertised(address: str, tcp: socket.socket) -> str:
    """The address of peers' connections. A port of 0 stands for the one that was bound."""
    host, _, port = address.rpartition(":")
    return f"{SCHEME}{host}:{int(port) or tcp.getsockname()[1]}"


def _info(tier: Tier | PeerSource) -> TierInfo:
    kind = TierKind.PEERS if isinstance(tier, PeerSource) else TierKind.OWNED
    return TierInfo(name=tier.name, capacity_bytes=tier.capacity_bytes, kind=kind)


def _recover(store: Store, tiers: Sequence[Tier | PeerSource]) -> None:
    for number, tier in enumerate(tiers, 1):  # the store numbers the arena 0
        if isinstance(tier, PeerSource):
            continue  # what others hold is theirs
        begun = time.monotonic()
        objects = 0
        try:
            for record in tier.recover():
                store.recover(number, record)
                objects += 1
        except (TierError, IntegrityError) as error:  # what was not recovered is a miss; the store serves the rest
            logger.error("tier %s: recovery ended early: %s", tier.name, error)
        logger.info("tier %s: %d objects recovered in %.2f s", tier.name, objects, time.monotonic() - begun)


async def _finish_writes(mover: Mover, written: asyncio.Event) -> None:
    """Wait, for a while, until what was committed has reached the lower tiers."""
    written.clear()
    if mover.unwritten == 0:
        return
    logger.info("writing %d more objects to lower tiers", mover.unwritten)
    try:
        await asyncio.wait_for(written.wait(), DRAIN_TIMEOUT_S)
    except TimeoutError:
        logger.warning("%d objects did not reach their tier within %g s", mover.unwritten, DRAIN_TIMEOUT_S)


def _settle_collector() -> None:
    """Keep the garbage collector away from the index: millions of long-lived objects without cycles. A full collection
    walks over all of them, and would stop the store for as long as a thousand requests take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000)
    gc.enable()


def _raise_descriptor_limit() -> None:
    """Each client takes two descriptors; the usual soft limit of 1,024 is close to what 256 clients need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
