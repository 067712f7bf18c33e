"""HTTP/1.1 to one engine: connections that are kept, one request at a time on each, bytes passed on as they come.

Implements only what a proxy needs of a client. aiohttp's client takes 170 µs of processor time for each request, this
one 20 µs; for the median request that was most of what the router added (docs/decisions/0012). It connects to engines
that the operator named, never to addresses that clients choose. Anything that is not plainly HTTP/1.1 ends the
connection.

    request ─▶ head ─▶ Response ─▶ read, read, ... b"" ─▶ close: kept if complete and both sides allow it, else aborted

`EngineClient.sweep`, called twice a second, enforces deadlines: a timer for each read would cost more than the read.
Cancelling a wait, or closing a response that is not complete, ends the request at the engine. Threading: the event
loop.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from enum import Enum, auto
from typing import cast
from urllib.parse import urlsplit

from multidict import CIMultiDict

CONNECT_S = 5.0
KEEP_ALIVE_S = 4.0  # vLLM's server closes idle connections after 5
MOST_IDLE = 1_024
HEAD_BYTES = 64 * 1024
LINE_BYTES = 4 * 1024  # the longest line with a chunk's size, or with trailers
HIGH_WATER_BYTES = 256 * 1024  # with more than this unread, the router stops reading and the engine has to wait

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\r\n\0]")  # the next reader of the header could take the rest of it for another header
_END = b"\r\n\r\n"


class _State(Enum):
    IDLE = auto()
    HEAD = auto()
    CHUNKS = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()
    COMPLETE = auto()
    BROKEN = auto()


class Response:
    """An answer whose head has come. It must be closed, whether or not it was read to its end."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: _Connection, status: int, headers: CIMultiDict[str]) -> None:
        self._connection: _Connection | None = connection
        self.status = status
        self.headers = headers

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has been read."""
        return self._connection is None or self._connection.is_complete

    async def read(self) -> bytes:
        """The next bytes, or b"" at the end. Raises OSError if the answer breaks off or nothing comes in time."""
        connection = self._connection
        return b"" if connection is None else await connection.read()

    def close(self) -> None:
        """Give the connection back, or cut it if the answer is not complete. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish()


class EngineClient:
    """The connections to one engine."""

    def __init__(self, url: str) -> None:
        self.timeout_s = 300.0  # the longest wait for the next byte of an answer
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path
        self._host_header = parts.netloc
        self._idle: deque[_Connection] = deque()
        self._waiting: set[_Connection] = set()

    async def request(
        self, method: str, path: str, headers: CIMultiDict[str], body: bytes | None, *, may_repeat: bool = True
    ) -> Response:
        """Send a request and wait for the head of its answer. Raises OSError.

        The engine may close a kept connection just as the request is sent. If no byte of an answer has come, and the
        request `may_repeat`, it is sent again on a new connection. The engine may have begun with the first one.
        """
        data = self._encode(method, path, headers, body)
        kept = self._take_idle()
        if kept is not None:
            try:
                return await kept.exchange(data, has_body=method != "HEAD")
            except ConnectionError:
                if kept.has_answered or not may_repeat:
                    raise
        connection = await self._connect()
        return await connection.exchange(data, has_body=method != "HEAD")

    def sweep(self) -> None:
        """End the waits that have lasted too long."""
        oldest_s = asyncio.get_running_loop().time() - self.timeout_s
        for connection in [item for item in self._waiting if item.waiting_since_s < oldest_s]:
            connection.expire(f"it sent nothing for {self.timeout_s:g} s")

    def give_up(self, problem: str) -> None:
        """End the waits for answers whose body has not begun. A head does not count: vLLM sends a stream's at once."""
        for connection in [item for item in self._waiting if not item.has_begun]:
            connection.expire(problem)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _encode(self, method: str, path: str, headers: CIMultiDict[str], body: bytes | None) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host_header}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}\r\n")
        lines.append("\r\n")
        head = "".join(lines).encode("utf-8", "surrogateescape")
        return head + body if body else head

    def _take_idle(self) -> _Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the one used last, so that surplus ones grow old and are closed
            if connection.is_usable and now_s - connection.idle_since_s < KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._idle, self._waiting), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectionAbortedError(f"no connection within {CONNECT_S:g} s") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with the parser of its answers and the bytes that nobody has read yet."""

    def __init__(self, idle: deque[_Connection], waiting: set[_Connection]) -> None:
        self.idle_since_s = 0.0
        self.waiting_since_s = 0.0
        self.has_answered = False  # a byte of the present answer has come
        self.has_begun = False  # a byte of its body has been read
        self._idle = idle
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._state = _State.IDLE
        self._head = b""
        self._has_body = True
        self._keep = True
        self._response: Response | None = None
        self._problem: OSError = ConnectionResetError()
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._left_bytes = 0  # still to come, of this chunk or of the body
        self._rest = b""  # the beginning of a line that is not complete
        self._wants_line_end = False
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    # ---- for EngineClient and Response

    @property
    def is_usable(self) -> bool:
        return self._state is _State.IDLE and not self._transport.is_closing()

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE and not self._parts

    async def exchange(self, data: bytes, *, has_body: bool) -> Response:
        self._state, self._has_body = _State.HEAD, has_body
        self.has_answered = self.has_begun = False
        self._head, self._rest, self._response = b"", b"", None
        self._transport.write(data)
        response: Response | None = None
        try:
            while response is None:
                await self._wait()
                response = self._response
            return response
        finally:
            if response is None:  # perhaps cancelled: the engine must not go on with the request
                self.abort()

    async def read(self) -> bytes:
        while not self._parts:
            if self._state is _State.COMPLETE:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._unread_bytes = 0
        self.has_begun = True
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def finish(self) -> None:
        if self._state is _State.COMPLETE and self._keep and not self._parts and len(self._idle) < MOST_IDLE:
            self._state = _State.IDLE
            self.idle_since_s = self._loop.time()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def expire(self, problem: str) -> None:
        self._break(TimeoutError(problem))
        self._wake()

    async def _wait(self) -> None:
        """Wait for the next bytes or the end of the connection. Raises OSError if nothing more will come."""
        if self._state is not _State.BROKEN:
            self._waiter = self._loop.create_future()
            self.waiting_since_s = self._loop.time()
            self._waiting.add(self)
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._waiting.discard(self)
        if self._state is _State.BROKEN and not self._parts:
            raise self._problem

    # ---- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but inheritance

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        try:
            if self._state is _State.HEAD:
                data = self._take_head(data)
            if data:
                self._take_body(data)
        except ValueError as error:
            self._break(ConnectionResetError(f"the engine's answer is not HTTP: {error}"))
        self._wake()
        if self._unread_bytes > HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state is _State.UNTIL_CLOSE and exc is None:
            self._state, self._keep = _State.COMPLETE, False
        elif self._state is _State.IDLE:
            self._state = _State.BROKEN
        elif self._state is not _State.COMPLETE:
            why = f": {exc}" if exc else ""
            self._break(ConnectionResetError(f"the engine closed the connection{why}"))
        self._keep = False
        self._wake()

    def _break(self, problem: OSError) -> None:
        if self._state is not _State.BROKEN:
            self._state, self._problem = _State.BROKEN, problem
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the parser

    def _take_head(self, data: bytes) -> bytes:
        """Parse heads up to the final one. Returns the bytes that follow it."""
        self._head += data
        while True:
            head, end, rest = self._head.partition(_END)
            if len(head) > HEAD_BYTES:
                raise ValueError("its head is too long")
            if not end:
                return b""
            self._head = rest
            status, headers = self._parse_head(head)
            if status >= 200:
                self._head = b""
                self._response = Response(self, status, headers)
                return rest

    def _parse_head(self, head: bytes) -> tuple[int, CIMultiDict[str]]:
        first, *lines = head.split(b"\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise ValueError(f"{first[:80]!r}")
        headers: CIMultiDict[str] = CIMultiDict()
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
                raise ValueError(f"{line[:80]!r}")
            headers.add(name.decode("ascii"), value.strip(b" \t").decode("utf-8", "surrogateescape"))
        status = int(match[2])
        if status >= 200:
            self._frame(status, headers, is_old=match[1] == b"0")
        return status, headers

    def _frame(self, status: int, headers: CIMultiDict[str], *, is_old: bool) -> None:
        """Find out where the body ends (RFC 9112, 6.3), and whether the connection may be used again."""
        connection = headers.get("Connection", "").lower()
        self._keep = "close" not in connection and (not is_old or "keep-alive" in connection)
        encoding = headers.get("Transfer-Encoding")
        lengths = set(headers.getall("Content-Length", ()))
        if not self._has_body or status in (204, 304):
            self._state = _State.COMPLETE
        elif encoding is not None:
            if encoding.lower() != "chunked" or lengths or is_old:
                raise ValueError("its transfer encoding is not chunked alone")
            self._state, self._left_bytes, self._wants_line_end = _State.CHUNKS, 0, False
        elif lengths:
            (length,) = lengths if len(lengths) == 1 else ("",)
            if not length.isascii() or not length.isdecimal():
                raise ValueError("its length is not a number")
            self._left_bytes = int(length)
            self._state = _State.LENGTH if self._left_bytes else _State.COMPLETE
        else:
            self._state = _State.UNTIL_CLOSE

    def _take_body(self, data: bytes) -> None:
        if self._state is _State.CHUNKS:
            self._take_chunks(data)
        elif self._state is _State.LENGTH:
            if len(data) > self._left_bytes:
                raise ValueError("it is longer than it says")
            self._add(data)
            self._left_bytes -= len(data)
            if not self._left_bytes:
                self._state = _State.COMPLETE
        elif self._state is _State.UNTIL_CLOSE:
            self._add(data)
        elif self._state is not _State.BROKEN:
            raise ValueError("it goes on after its end")

    def _take_chunks(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        position, length = 0, len(buffer)
        while True:
            if self._left_bytes:
                part = buffer[position : position + self._left_bytes]
                self._add(part)
                position += len(part)
                self._left_bytes -= len(part)
                if self._left_bytes:
                    break
                self._wants_line_end = True
            if self._wants_line_end:
                if length - position < 2:
                    break
                if buffer[position : position + 2] != b"\r\n":
                    raise ValueError("a chunk is longer than it says")
                position += 2
                self._wants_line_end = False
            end = buffer.find(b"\r\n", position)
            if end < 0:
                break
            size = _SIZE.fullmatch(buffer, position, end)
            if size is None:
                raise ValueError("a chunk has no size")
            if int(size[1], 16) == 0:
                if self._take_trailers(buffer, end):
                    return
                break  # parse this size again when more has come
            self._left_bytes = int(size[1], 16)
            position = end + 2
        self._rest = buffer[position:]
        if len(self._rest) > LINE_BYTES:
            raise ValueError("a line is too long")

    def _take_trailers(self, buffer: bytes, end: int) -> bool:
        """Whether the end of the body has come: an empty line, perhaps after trailers, which are dropped."""
        last = buffer.find(_END, end)
        if last < 0:
            return False
        if last + len(_END) < len(buffer):
            raise ValueError("it goes on after its end")
        self._state, self._rest = _State.COMPLETE, b""
        return True

    def _add(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._unread_bytes += len(data)
