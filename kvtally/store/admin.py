"""Admin HTTP: health, metrics and everything there is to see, on loopback only, inside the store's own event loop.

    GET  /health               for probes: 200 as long as the store answers; degraded tiers are named
    GET  /metrics              Prometheus text (`metrics`)
    GET  /inspect              the whole stats tree; /inspect/namespaces a part of it
    POST /reset?namespace=HEX  forget a namespace; needs `Authorization: Bearer TOKEN`

Owns the routes, who may use them, and how many connections there are. Plain HTTP without TLS, hence never off this
machine; a browser on this machine is kept out by the Host check (a page elsewhere cannot make its own name resolve to
us) and by the token. Neighbours: `connections.Hub` (what is asked), `server` (starts and stops it).
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvtally.config.units import is_loopback, split_address
from kvtally.errors import ConfigError
from kvtally.store.connections import Hub
from kvtally.store.metrics import render

MOST_CONNECTIONS = 128  # enough for a client that is slow to ask not to be taken for idle
_IDLE_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 1.0

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


def check_admin(address: str) -> None:
    """Raise ConfigError KV-102 for an admin address beyond this machine (empty: no admin server). Touches nothing."""
    if not address:
        return
    try:
        host = split_address(address).host
    except ValueError as error:
        raise _wrong_address(address, str(error)) from error
    if not is_loopback(host):
        raise _wrong_address(address, "that is not a loopback address, and there is no TLS")


async def start_admin(hub: Hub, listener: socket.socket, *, token: str) -> Callable[[], Awaitable[None]]:
    """Serve on a listening socket; returns how to stop it."""
    runner = web.ServerRunner(AdminServer(Admin(hub, token)), shutdown_timeout=_STOP_TIMEOUT_S)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner.cleanup


class Admin:
    """Answers requests."""

    def __init__(self, hub: Hub, token: str) -> None:
        self._hub = hub
        self._token = token
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/inspect"): self._inspect,
            ("GET", "/inspect/namespaces"): self._namespaces,
            ("POST", "/reset"): self._reset,
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        # Only requests that were addressed to this machine by a name of its own: against DNS rebinding.
        if not is_loopback(_host_name(request.headers.get("Host", ""))):
            remedy = "Use http://127.0.0.1:PORT, http://localhost:PORT or http://[::1]:PORT."
            return _refused(403, "KV-205", "the Host header does not name this machine", remedy)
        method = "GET" if request.method == "HEAD" else request.method  # a HEAD's body is not sent
        handler = self._handlers.get((method, request.path))
        if handler is not None:
            return await handler(request)
        paths = [path for _, path in self._handlers]
        if request.path in paths:
            return web.Response(status=405, text=f"not with {request.method[:16]}\n")
        return web.Response(status=404, text=f"this store answers {', '.join(paths)}\n")

    async def _health(self, request: web.BaseRequest) -> web.Response:
        health = self._hub.health()
        status = "ok" if all(state == "ok" for state in health.tiers.values()) else "degraded"
        populated = self._hub.arena.populated_bytes / self._hub.arena.size_bytes
        return _json({"status": status, "uptime_s": health.uptime_s, "populated": populated, "tiers": health.tiers})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=render(self._hub.stats), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _inspect(self, request: web.BaseRequest) -> web.Response:
        return _json(self._hub.stats())

    async def _namespaces(self, request: web.BaseRequest) -> web.Response:
        return _json(self._hub.stats().namespaces)

    async def _reset(self, request: web.BaseRequest) -> web.Response:
        refusal = _unauthorised(request, self._token)
        if refusal is not None:
            return refusal
        text = request.query.get("namespace", "")
        known = [item.digest for item in self._hub.stats().namespaces]
        if text not in known:
            remedy = "Give the whole digest as /inspect/namespaces shows it: /reset?namespace=HEX."
            return _refused(404, "KV-206", f"no namespace {text[:64]!r} here", remedy)
        end = await self._hub.reset(bytes.fromhex(text))
        return _refused(503, end.code, end.message, end.remedy) if end.code else _json({"objects": end.objects})


class AdminServer(web.Server):
    """aiohttp's server with a bound on connections that shuts nobody out: one more ends the one that has been idle for
    longest. So a few that say nothing, or send a request byte by byte, cost whoever keeps them open, and nobody else.
    """

    def __init__(self, admin: Admin) -> None:
        super().__init__(
            self._answer, access_log=None, keepalive_timeout=_IDLE_TIMEOUT_S, lingering_time=0, auto_decompress=False
        )
        self._admin = admin
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}  # without a whole request, longest first
        self._answering: dict[web.RequestHandler, asyncio.Transport] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._idle) + len(self._answering) >= MOST_CONNECTIONS:
            oldest, connection = next(iter((self._idle or self._answering).items()))
            self._forget(oldest)
            connection.abort()
        self._idle[handler] = transport

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._forget(handler)

    def _forget(self, handler: web.RequestHandler) -> None:
        self._idle.pop(handler, None)
        self._answering.pop(handler, None)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        handler = request.protocol
        transport = self._idle.pop(handler, None)
        if transport is not None:
            self._answering[handler] = transport
        try:
            response = await self._admin.handle(request)
        finally:
            transport = self._answering.pop(handler, None)
            if transport is not None:
                self._idle[handler] = transport
        response.headers["Server"] = "kvtally"
        return response


def _unauthorised(request: web.BaseRequest, token: str) -> web.Response | None:
    if not token:
        remedy = "Start the store with a token (token_file) to allow calls that change something."
        return _refused(403, "KV-205", "this store has no token, so nothing can be changed over HTTP", remedy)
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        remedy = "Send `Authorization: Bearer TOKEN` with the store's token."
        return _refused(401, "KV-205", "the token is missing or wrong", remedy)
    return None


def _host_name(header: str) -> str:
    """The name in `name`, `name:port`, `[v6]` or `[v6]:port`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _json(tree: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(tree), status=status, content_type="application/json")


def _refused(status: int, code: str, message: str, remedy: str) -> web.Response:
    return _json({"code": code, "message": message, "remedy": remedy}, status)


def _wrong_address(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"admin cannot be served on {address!r}: {why}",
        remedy="Use 127.0.0.1:PORT; to reach it from elsewhere, use SSH or an authenticated proxy.",
        code="KV-102",
    )
