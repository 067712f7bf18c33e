"""Admin HTTP: health, metrics and everything there is to see, on loopback only, inside the store's own event loop.

    GET  /health               for probes: 200 as long as the store answers; degraded tiers are named
    GET  /metrics              Prometheus text (`metrics`)
    GET  /inspect              the whole stats tree; /inspect/namespaces a part of it
    POST /reset?namespace=HEX  forget a namespace; needs `Authorization: Bearer TOKEN`

Owns the routes and who may use them. Plain HTTP without TLS, hence never off this machine; a browser on this machine is
kept out by the Host check (a page elsewhere cannot make its own name resolve to us) and by the token.
Neighbours: `connections.Hub` (what is asked), `server` (starts and stops it).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtally.errors import ConfigError
from kvtally.store.connections import Hub
from kvtally.store.listen import is_loopback
from kvtally.store.metrics import render
from kvtally.units import split_address

_CONCURRENT_REQUESTS = 32
_STOP_TIMEOUT_S = 1


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
    server = _Server(create_app(hub, token=token))
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))

    async def stop() -> None:
        server.stopping.set()
        await task

    return stop


def create_app(hub: Hub, *, token: str) -> Starlette:
    async def health(request: Request) -> Response:
        stats = hub.stats()
        tiers = {tier["name"]: tier["state"] for tier in stats["tiers"]}  # type: ignore[attr-defined]
        populated = hub.arena.populated_bytes / hub.arena.size_bytes
        status = "ok" if all(state == "ok" for state in tiers.values()) else "degraded"
        return _json({"status": status, "uptime_s": stats["uptime_s"], "populated": populated, "tiers": tiers})

    async def metrics(request: Request) -> Response:
        return Response(render(hub.stats), media_type=CONTENT_TYPE_LATEST)

    async def inspect(request: Request) -> Response:
        return _json(hub.stats())

    async def namespaces(request: Request) -> Response:
        return _json(hub.stats()["namespaces"])

    async def reset(request: Request) -> Response:
        refusal = _unauthorised(request, token)
        if refusal is not None:
            return refusal
        text = request.query_params.get("namespace", "")
        known = [item["digest"] for item in hub.stats()["namespaces"]]  # type: ignore[attr-defined]
        if text not in known:
            remedy = "Give the whole digest as /inspect/namespaces shows it: /reset?namespace=HEX."
            return _refused(404, "KV-206", f"no namespace {text[:64]!r} here", remedy)
        end = await hub.reset(bytes.fromhex(text))
        return _refused(503, end.code, end.message, end.remedy) if end.code else _json({"objects": end.objects})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/inspect", inspect),
            Route("/inspect/namespaces", namespaces),
            Route("/reset", reset, methods=["POST"]),
        ],
        middleware=[Middleware(LoopbackHost)],
    )


class LoopbackHost:
    """Answers only requests that were addressed to this machine by a name of its own (against DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and not is_loopback(_host_name(Headers(scope=scope).get("host", ""))):
            remedy = "Use http://127.0.0.1:PORT, http://localhost:PORT or http://[::1]:PORT."
            answer = _refused(403, "KV-205", "the Host header does not name this machine", remedy)
        await answer(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn as a guest: no signal handlers of its own, no waking up ten times a second to see if it should end."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # logging is the process's
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=_CONCURRENT_REQUESTS,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()


def _unauthorised(request: Request, token: str) -> Response | None:
    if not token:
        remedy = "Start the store with a token (token_file) to allow calls that change something."
        return _refused(403, "KV-205", "this store has no token, so nothing can be changed over HTTP", remedy)
    given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        remedy = "Send `Authorization: Bearer TOKEN` with the store's token."
        return _refused(401, "KV-205", "the token is missing or wrong", remedy)
    return None


def _host_name(header: str) -> str:
    """The name in `name`, `name:port`, `[v6]` or `[v6]:port`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _json(tree: object) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")


def _refused(status: int, code: str, message: str, remedy: str) -> Response:
    content = msgspec.json.encode({"code": code, "message": message, "remedy": remedy})
    return Response(content, status_code=status, media_type="application/json")


def _wrong_address(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"admin cannot be served on {address!r}: {why}",
        remedy="Use 127.0.0.1:PORT; to reach it from elsewhere, use SSH or an authenticated proxy.",
        code="KV-102",
    )
