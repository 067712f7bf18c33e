"""The router's HTTP server: which path does what, how it starts, and how it stops.

    POST /v1/completions, /v1/chat/completions     prefill, decode, receipt (`proxy`)
    GET  /health, /metrics, /instances             what the router knows
    GET  /receipts/{id}, /receipts?last=N          what was reused, for one request or the last ones
    POST /drain?instance=NAME, /undrain?...        take an instance out, or back in; needs the token
    any other                                      passed on to a decode instance, except engines' control calls

On the first signal the router takes no new connections and lets streams end for a while before it cuts them. A second
signal cuts them at once. Neighbours: `cli.route` (left), `proxy` (right). Threading: one event loop (uvloop).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from kvtally.config import RouterConfig
from kvtally.config.units import is_loopback, split_address
from kvtally.core.routing import PrefixMap
from kvtally.endpoint import endpoint
from kvtally.errors import ConfigError, RouteError
from kvtally.router.book import Book
from kvtally.router.flavours import FLAVOURS
from kvtally.router.fleet import Fleet
from kvtally.router.intake import Handler, Intake, Server
from kvtally.router.metrics import Known, render
from kvtally.router.prefill import Prefill
from kvtally.router.proxy import Proxy, error_response
from kvtally.router.receipts import ReceiptReader
from kvtally.router.requestlog import RequestLog
from kvtally.router.stores import Stores
from kvtally.router.tenants import Tenants, load_secret

logger = logging.getLogger(__name__)

STOP_S = 30.0
SAME_SIGNAL_S = 0.5  # a service manager and `kvtally up` may both send the first one
FIRST_TRY_S = 1.0  # how long the start waits for the stores to answer
BACKLOG = 1_024
KEEP_ALIVE_S = 75.0
OPEN_FILES = 65_536  # a stream takes two: one for the client, one for the engine
GARBAGE = (20_000, 20, 20)  # for `gc.set_threshold`
MOST_RECEIPTS, DEFAULT_RECEIPTS = 1_000, 100
PREFIXES, PREFIX_LIFETIME_NS = 65_536, 900 * 1_000_000_000  # what the router remembers of prompts

# Calls that change an engine, or tell about its other users. They are not for a router's clients. vLLM 0.32 serves most
# of them only in its developer mode.
_CONTROL = frozenset(
    {
        *("abort_requests", "collective_rpc", "fault_tolerance", "finish_weight_update", "get_world_size"),
        *("inference", "init_weight_transfer_engine", "is_paused", "is_scaling_elastic_ep", "is_sleeping"),
        *("kv_event_sources", "load", "pause", "release_kv_cache_memory", "reset_encoder_cache", "reset_mm_cache"),
        *("reset_prefix_cache",),
        *("resume", "scale_elastic_ep", "server_info", "shutdown_weight_transfer_engine", "sleep", "start_profile"),
        *("start_draft_weight_update", "start_weight_update", "stop_profile", "update_weight_version"),
        *("update_weights", "wake_up", "weight_checker", "weight_info"),
        *("v1/load_lora_adapter", "v1/unload_lora_adapter"),
    }
)


class Router:
    """A running router."""

    def __init__(self, config: RouterConfig, proxy: Proxy, known: Known, intake: Intake) -> None:
        self.port = 0  # set when it listens
        self.stopping = asyncio.Event()
        self.intake = intake
        self._config = config
        self._proxy = proxy
        self.known = known
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): proxy.complete,
            ("POST", "/v1/chat/completions"): proxy.complete,
            ("GET", "/health"): self._health,
            ("HEAD", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/instances"): self._instances,
            ("GET", "/receipts"): self._receipts,
            ("POST", "/drain"): partial(self._drain, is_draining=True),
            ("POST", "/undrain"): partial(self._drain, is_draining=False),
        }
        self.server = Server(
            self.handle,
            intake,
            handler_cancellation=True,
            access_log=None,
            logger=_http_logger(),
            keepalive_timeout=KEEP_ALIVE_S,
            auto_decompress=False,  # aiohttp would unpack even what the intake has refused
        )

    def cut(self) -> None:
        """Drop every connection. Requests in progress end as if their clients had left, and are logged."""
        for connection in self.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. A table is enough: aiohttp's own routing takes a tenth of a request's time."""
        handler = self._handlers.get((request.method, request.path.rstrip("/")))
        if handler is not None:
            return await handler(request)
        if request.method == "GET" and request.path.startswith("/receipts/"):
            return self._receipt(request.path.removeprefix("/receipts/"))
        parts = [part for part in request.path.split("/") if part]
        first = parts[0] if parts else ""
        # vLLM serves its metrics on every path that begins with `/metrics`.
        is_control = {first, "/".join(parts[:2])} & _CONTROL or first.startswith("metrics")
        if is_control or {".", ".."} & set(parts) or not request.path.startswith("/"):
            return _refused(404, "no such path here", "Ask the engine itself.")
        return await self._proxy.forward(request)

    async def _health(self, request: web.BaseRequest) -> web.Response:
        """Status 200 while requests can be answered at all; `degraded` while some instance is down."""
        members = self.known.fleet.members.values()
        status = "ok" if all(member.is_up for member in members) else "degraded"
        if not any(member.is_up and not member.is_draining for member in self.known.fleet.decode.members):
            status = "down"
        if self.stopping.is_set():
            status = "stopping"
        tree = {"status": status, "instances": {member.name: member.state for member in members}}
        return _json(tree, 200 if status in ("ok", "degraded") else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=render(self.known), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _instances(self, request: web.BaseRequest) -> web.Response:
        fleet = self.known.fleet
        rows = [
            {
                "instance": member.name,
                "roles": [
                    role for role, of in (("prefill", fleet.prefill), ("decode", fleet.decode)) if member in of.members
                ],
                "state": member.state,
                "problem": member.problem,
                "requests": member.legs,
                "prefill_bytes_s": round(member.work.bytes_s),
                "store": member.instance.store,
            }
            for member in fleet.members.values()
        ]
        return _json({"instances": rows, "stores": self.known.stores.tree(), "flavour": self._config.flavour})

    def _receipt(self, ticket: str) -> web.Response:
        record = self.known.book.find(ticket)
        if record is None:
            return _refused(404, "no receipt by this id", "Old ones are forgotten.")
        return _json(record.tree())

    async def _receipts(self, request: web.BaseRequest) -> web.Response:
        """The last receipts of all clients. Needs the token; without one, the client must be on this machine."""
        if self._config.token or not is_loopback(request.remote or ""):
            refusal = self._refusal(request, "this router has no token, so it lists receipts only on its own machine")
            if refusal is not None:
                return refusal
        text = request.query.get("last", "")[:9]  # nine digits are more than the router keeps
        count = int(text) if text.isascii() and text.isdecimal() else DEFAULT_RECEIPTS
        return _json([record.tree() for record in self.known.book.last(min(count, MOST_RECEIPTS))])

    async def _drain(self, request: web.BaseRequest, *, is_draining: bool) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        member = self.known.fleet.find(request.query.get("instance", ""))
        if member is None:
            names = ", ".join(self.known.fleet.members)
            return _refused(404, "no such instance", f"One of: {names}.")
        member.is_draining = is_draining
        logger.info("instance %s is %s", member.name, member.state)
        return _json({"instance": member.name, "state": member.state, "requests": member.legs})

    def _refusal(
        self,
        request: web.BaseRequest,
        without_token: str = "this router has no token, so nothing can be changed over HTTP",
    ) -> web.Response | None:
        """None if the request carries the token."""
        if not self._config.token:
            return _refused(403, without_token, "Start it with --token-file FILE.")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, f"Bearer {self._config.token}".encode()):
            return None
        return _refused(401, "the token is missing or wrong", "Send `Authorization: Bearer TOKEN`.")


@contextlib.asynccontextmanager
async def running(config: RouterConfig, *, log_descriptor: int = 1, stop_s: float = STOP_S) -> AsyncIterator[Router]:
    """A router that listens until the context is left."""
    fleet = Fleet(config.prefill, config.decode, timeout_s=config.timeout_s)
    flavour = FLAVOURS[config.flavour]
    addresses = sorted({member.instance.store for member in fleet.members.values()}) if flavour.has_receipts else []
    readers = {
        # A name that does not resolve yet is looked up again later: the router works without its stores, too.
        address: ReceiptReader(endpoint(address, token=config.token, ca_file=config.store_ca, must_resolve=False))
        for address in addresses
    }
    stores = Stores(fleet, readers)
    seen = PrefixMap(capacity=PREFIXES, lifetime_ns=PREFIX_LIFETIME_NS)
    tenants = Tenants(load_secret(Path(config.salt_file)), header=config.tenant_header)
    listener = _listen(config.listen)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        log = stack.enter_context(RequestLog(log_descriptor))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        book = Book(log.write)
        large = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="large bodies"))
        intake = Intake(max_body_bytes=config.max_body_bytes, large=large)
        proxy = Proxy(
            config,
            flavour=flavour,
            fleet=fleet,
            stores=stores,
            seen=seen,
            book=book,
            tenants=tenants,
            prefill=Prefill(config, flavour, fleet, stores, seen, book, session),
            intake=intake,
        )
        router = Router(config, proxy, Known(book, fleet, stores, lambda: log.lost), intake)
        watching = asyncio.create_task(_watch(fleet, readers, session, proxy))
        watching.add_done_callback(lambda _: router.stopping.set())  # a router that watches nothing must not go on
        stack.push_async_callback(_end, watching, fleet)
        runner = web.ServerRunner(router.server, shutdown_timeout=stop_s)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        with contextlib.suppress(TimeoutError):  # otherwise the first responses could not say what was reused
            async with asyncio.timeout(FIRST_TRY_S):
                await asyncio.gather(*(reader.tried.wait() for reader in readers.values()))
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        router.port = listener.getsockname()[1]
        yield router


def run(config: RouterConfig, *, on_ready: Callable[[], None]) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    # A request makes hundreds of objects and no reference cycles, so collecting often would find nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, on_ready))
    return 0


async def _serve(config: RouterConfig, on_ready: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    told_s = 0.0
    async with running(config) as router:

        def stop() -> None:
            nonlocal told_s
            if not router.stopping.is_set():
                told_s = loop.time()
                router.stopping.set()
            elif loop.time() - told_s >= SAME_SIGNAL_S:
                router.cut()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        on_ready()
        await router.stopping.wait()
        logger.info("stopping: streams may end within %g s; a second signal cuts them", STOP_S)


async def _watch(fleet: Fleet, readers: dict[str, ReceiptReader], session: aiohttp.ClientSession, proxy: Proxy) -> None:
    """Run everything that goes on besides requests, until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.sweep())
        for reader in readers.values():
            group.create_task(reader.run())
        for member in fleet.members.values():
            group.create_task(fleet.watch(member, session, proxy.restarted))


async def _end(watching: asyncio.Task[None], fleet: Fleet) -> None:
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    for member in fleet.members.values():
        member.client.close()


def _http_logger() -> logging.Logger:
    """The logger for aiohttp, which would write a traceback for every client that does not speak HTTP."""
    http_logger = logging.getLogger(f"{__name__}.http")
    http_logger.addFilter(_is_ours)
    return http_logger


def _is_ours(record: logging.LogRecord) -> bool:
    return not record.exc_info or not isinstance(record.exc_info[1], HttpProcessingError)


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        raise ConfigError(
            f"the router cannot listen on {address}: {error}",
            remedy="Choose another address with --listen HOST:PORT.",
            code="KV-102",
        ) from error
    return listener


def _refused(status: int, message: str, remedy: str) -> web.Response:
    return error_response(RouteError(message, remedy=remedy, status=status, code="KV-706"), {})


def _json(tree: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(tree), content_type="application/json")
