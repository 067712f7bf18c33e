"""From an engine to a client: bytes as they come, at the speed at which the client reads them.

Owns how an answer is framed and how it ends: complete, or visibly cut. A stream that breaks off gets an error event.
Then the connection is closed without HTTP's end of a body, so no client can mistake the answer for a complete one.

Head and body are written straight to aiohttp's connection, the head together with the first bytes. For the median
request, aiohttp's own streamed response takes longer than everything that the router decides.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from http import HTTPStatus

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvtally.router.legs import Started

UNTAKEN_BYTES = 8 * 1024  # with less than this in the buffer a write never waits, and needs no deadline
LAST_WORDS_S = 1.0
CLIENT_LEFT = "the client left"


class Outgoing(web.StreamResponse):
    """An answer on its way to the client. It is complete by the time aiohttp gets it, which then does nothing."""

    def __init__(self, request: web.BaseRequest, status: int, headers: CIMultiDict[str]) -> None:
        super().__init__(status=status)
        self._request = request
        self._has_body = request.method != "HEAD" and status not in (204, 304)
        has_length = "Content-Length" in headers or not self._has_body
        self._is_chunked = not has_length and request.version >= (1, 1)
        self._is_kept = request.keep_alive and (has_length or self._is_chunked)
        framing = "Transfer-Encoding: chunked\r\n" if self._is_chunked else ""
        if not self._is_kept:
            framing += "Connection: close\r\n"
        elif request.version < (1, 1):
            framing += "Connection: keep-alive\r\n"  # otherwise an HTTP/1.0 client waits for the connection to close
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        text = f"HTTP/1.1 {status} {_phrase(status)}\r\n{lines}{framing}\r\n"
        self._head = text.encode("utf-8", "surrogateescape")

    @property
    def keep_alive(self) -> bool | None:
        return self._is_kept

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None

    async def send(self, part: bytes, timeout_s: float, *, is_last: bool) -> bool:
        """Write a part, together with the head if it is the first, and with the end if it is the last: each packet
        costs. False if the client reads nothing for too long."""
        if self._is_chunked:
            end = b"0\r\n\r\n" if is_last else b""
            part = b"%x\r\n%b\r\n%b" % (len(part), part, end) if part else end
        if self._head:
            part, self._head = self._head + part, b""
        transport = self._request.transport
        if transport is None or transport.get_write_buffer_size() + len(part) < UNTAKEN_BYTES:
            await self._request.writer.write(part)  # does not wait
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._request.writer.write(part)
        except TimeoutError:
            return False
        return True

    def cut(self, *, at_once: bool) -> None:
        """Close the connection without ending the answer. `at_once` drops what the client has not read yet. An answer
        that ends when its connection closes can only be cut this way."""
        if self._request.transport is None:
            return
        if at_once or not self._is_chunked:
            self._request.transport.abort()
        else:
            self._request.transport.close()


async def relay(
    request: web.BaseRequest, started: Started, headers: CIMultiDict[str], timeout_s: float
) -> tuple[Outgoing, str]:
    """Pass an answer on. The second value says why it was cut; it is empty if the answer is complete."""
    response, part = started.response, started.first
    out = Outgoing(request, response.status, headers)
    try:
        while True:
            is_last = response.is_complete
            if not await out.send(part, timeout_s, is_last=is_last):
                out.cut(at_once=True)
                return out, f"the client took nothing for {timeout_s:g} s"
            if is_last:
                return out, ""
            is_whole_event = part.endswith(b"\n\n")
            try:
                part = await response.read()
            except OSError as error:
                problem = f"the engine broke off its answer: {error}"
                if headers.get("Content-Type", "").startswith("text/event-stream"):
                    await out.send(_error_event(problem, is_whole_event=is_whole_event), LAST_WORDS_S, is_last=False)
                out.cut(at_once=False)
                return out, problem
    except OSError:
        return out, CLIENT_LEFT


def _error_event(problem: str, *, is_whole_event: bool) -> bytes:
    error = {"message": f"{problem} [KV-702]", "type": "upstream_error", "param": None, "code": 502}
    return (b"" if is_whole_event else b"\n\n") + b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


@lru_cache(maxsize=64)
def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
