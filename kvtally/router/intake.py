"""Requests on their way in: connections, bodies, and the room that both may take.

    connect ─▶ waiting ─▶ head ─▶ body, part by part ─▶ whole: a request ─▶ let_go: decode has begun to answer
                  └──── too many: the oldest is closed ────┘

Owns every limit on what clients send before it is a request. Nothing is reserved in advance: a body counts for the
bytes that have come, so a client that only announces one takes nothing from others. When the room is full, the largest
body that is still arriving makes way, and not the one that came last. Neighbours: `app` (connections), `proxy`
(requests), `body` (takes bodies apart). Threading: the event loop, and one thread for large bodies.
"""

from __future__ import annotations

import asyncio
import resource
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router.body import Understood

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MOST_REQUESTS = 10_000  # whole ones, at once
MOST_BODIES_BYTES = 1 << 30  # of requests that decode has not begun to answer, and of bodies still arriving
MOST_WAITING = 8_192  # connections without a whole request
LARGE_BYTES = 256 * 1024  # bodies above this are taken apart in a thread
BODY_S = 10.0  # the longest pause in a body
SLOWEST_BYTES_S = 16 * 1024  # the lowest rate at which a body may come, once BODY_S are over
PIECE_BYTES = 1 << 20  # unpacked at a time


class Body:
    """One request's share of the room."""

    __slots__ = ("deadline", "is_displaced", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        self.deadline: asyncio.Timeout | None = None  # while it is arriving
        self.is_displaced = False


class Intake:
    """The room that all connections and bodies share."""

    def __init__(self, *, max_body_bytes: int, large: Executor) -> None:
        self.requests = 0
        self._large = large  # a single thread
        self._max_body_bytes = max_body_bytes
        self._bodies_bytes = 0
        self._arriving: set[Body] = set()
        # Each connection takes a descriptor, and its request another one towards an engine.
        self._most_waiting = min(MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._waiting: OrderedDict[RequestHandler, None] = OrderedDict()

    # ---- connections

    def waits(self, connection: RequestHandler) -> None:
        """This connection has no whole request now. If too many have none, the one that waits longest is closed."""
        if connection.transport is None:
            return
        self._waiting[connection] = None
        while len(self._waiting) > self._most_waiting:
            oldest, _ = self._waiting.popitem(last=False)
            oldest.force_close()

    def gone(self, connection: RequestHandler) -> None:
        self._waiting.pop(connection, None)

    # ---- requests

    def enter(self) -> Body:
        """A request's head is here. `leave` follows, whatever becomes of it."""
        self.requests += 1
        return Body()

    async def take(self, request: web.BaseRequest, body: Body) -> bytes | None:
        """Read the whole body. None if the request has none.

        Raises RouteError if the body is too large, too slow or damaged, or if there is no room for it."""
        data = await self._read(request, body) if request.body_exists else None
        self.gone(request.protocol)
        if self.requests - len(self._arriving) > MOST_REQUESTS:
            raise self._full()
        return data

    async def understand(self, data: bytes, *, path: str, salt: str, is_generating: bool) -> Understood:
        """Take a body apart. Raises RouteError for a bad one.

        Large bodies are parsed in a thread, one after the other. Parsing 32 MiB holds Python's lock for up to 150 ms,
        in steps of a few ms. In one thread the event loop gets its turn after each step; several threads would make it
        wait for all of them."""
        if len(data) <= LARGE_BYTES:
            return bodies.understand(data, path=path, salt=salt, is_generating=is_generating)
        work = partial(bodies.understand, data, path=path, salt=salt, is_generating=is_generating)
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    def let_go(self, body: Body) -> None:
        """Nobody needs the body any more."""
        self._resize(body, 0)

    def leave(self, request: web.BaseRequest, body: Body) -> None:
        """The request is over."""
        self.requests -= 1
        self._resize(body, 0)
        self.waits(request.protocol)

    async def _read(self, request: web.BaseRequest, body: Body) -> bytes:
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        encoding = request.headers.get("Content-Encoding")
        try:
            if encoding is None and request.content.is_eof():  # all of it is here, as most bodies are
                data = await request.content.readany()
                self._grow(body, len(data))
                return data
            packed = _Packed(encoding or "identity")
            self._arriving.add(body)
            if "Expect" in request.headers and request.version >= (1, 1):
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(BODY_S) as body.deadline:
                return await self._collect(request, body, packed)
        except TimeoutError as error:
            if body.is_displaced:
                raise self._full() from error
            message = f"the body came too slowly: {body.size_bytes} bytes so far"
            raise RouteError(message, remedy="Send it without pauses.", status=408, code="KV-705") from error
        except (web.RequestPayloadError, zlib.error) as error:
            message = f"the body cannot be read: {error}"
            raise RouteError(message, remedy="Send a whole one.", status=400, code="KV-705") from error
        finally:
            body.deadline = None
            self._arriving.discard(body)

    async def _collect(self, request: web.BaseRequest, body: Body, packed: _Packed) -> bytes:
        """Not `request.read`, which would keep the body for as long as the answer takes."""
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        first, data = b"", bytearray()
        while part := await request.content.readany():
            for piece in packed.unpack(part):
                self._grow(body, len(piece))
                if not first:
                    first = piece  # most bodies are one piece, and need no copy
                else:
                    data += piece
                if not packed.is_plain:
                    await asyncio.sleep(0)  # a few bytes may become many pieces: others have their turn
            if body.deadline is not None and not body.is_displaced:
                slowest_s = begun_s + BODY_S + body.size_bytes / SLOWEST_BYTES_S
                body.deadline.reschedule(min(now_s() + BODY_S, slowest_s))
        packed.end()
        return first + data if data else first

    def _grow(self, body: Body, size_bytes: int) -> None:
        """Count bytes that have come. Raises RouteError if the body is too large now, or if there is no room for it."""
        self._resize(body, body.size_bytes + size_bytes)
        if body.size_bytes > self._max_body_bytes:
            raise self._too_large()
        if self._bodies_bytes > MOST_BODIES_BYTES:
            self._make_room(body)

    def _make_room(self, body: Body) -> None:
        """Make the largest body that is still arriving give way. Raises RouteError KV-707 if that is this one."""
        largest = max(self._arriving, key=lambda other: other.size_bytes, default=body)
        if largest.size_bytes <= body.size_bytes or largest.deadline is None:
            raise self._full()
        largest.is_displaced = True
        largest.deadline.reschedule(asyncio.get_running_loop().time())
        self._arriving.discard(largest)
        self._resize(largest, 0)

    def _resize(self, body: Body, size_bytes: int) -> None:
        self._bodies_bytes += size_bytes - body.size_bytes
        body.size_bytes = size_bytes

    def _too_large(self) -> RouteError:
        return RouteError(
            f"the body has more than {self._max_body_bytes} bytes",
            remedy="Send less; the limit is router.max_body.",
            status=413,
            code="KV-705",
        )

    def _full(self) -> RouteError:
        message = f"the router is full: {self.requests} requests, with {self._bodies_bytes} bytes of bodies"
        return RouteError(message, remedy="Try again soon.", status=503, code="KV-707")


class _Packed:
    """Unpacks a body that may be compressed, a piece at a time, so that nothing is unpacked beyond the limit."""

    def __init__(self, encoding: str) -> None:
        encoding = encoding.strip().lower()
        self.is_plain = encoding in ("", "identity")
        self._encoding = encoding
        self._inflate: zlib._Decompress | None = None
        if not self.is_plain and encoding not in ("gzip", "x-gzip", "deflate"):
            raise RouteError(
                "the body is compressed in a way that this router does not read",
                remedy="Send it plain, or as gzip or deflate.",
                status=415,
                code="KV-705",
            )

    def unpack(self, part: bytes) -> Iterator[bytes]:
        """Raises zlib.error for bytes that are not compressed data."""
        if self.is_plain:
            yield part
            return
        if self._inflate is None:
            # Some clients send bare deflate, others wrap it as zlib does: then the first byte's low four bits are 8.
            bare = self._encoding == "deflate" and part[0] & 0xF != 8
            gzip = self._encoding != "deflate"
            self._inflate = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | (16 if gzip else 0))
        piece = b""
        while part or len(piece) == PIECE_BYTES:
            if self._inflate.eof:
                raise zlib.error("it goes on after the end of its compressed data")
            piece = self._inflate.decompress(part, PIECE_BYTES)
            part = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                yield piece

    def end(self) -> None:
        """Raises zlib.error if the compressed data is not complete."""
        if self._inflate is not None and not self._inflate.eof:
            raise zlib.error("its compressed data breaks off")


class Server(web.Server):
    """aiohttp's server, which tells the intake of its connections."""

    def __init__(self, handler: Handler, intake: Intake, **options: Any) -> None:
        super().__init__(handler, **options)
        self._intake = intake

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._intake.waits(handler)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._intake.gone(handler)
