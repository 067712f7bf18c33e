"""The processes of `kvtally bench route` beside the router: an engine, a pass-through, and the load.

    python -m kvtally.bench.route_parts engine SOCKET       answers at once; files receipts as a connector would
    python -m kvtally.bench.route_parts passthrough URL     the least that a proxy in Python with aiohttp can do
    python -m kvtally.bench.route_parts load                carries out one task after another

All three are workers (`kvtally.processes`); the first two reply once, with the port they listen on. Engine and load
speak just enough HTTP for one another, on bare sockets: they must not be what is measured. `bench.route` imports this
for the messages. Threading: one event loop each.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from kvtally.core.receipts import Half, Role
from kvtally.processes import Wire, serve
from kvtally.wire.frames import encode
from kvtally.wire.messages import PROTOCOL_VERSION, Hello, ReceiptFile

PROMPT = "a prompt of ordinary length, " * 40
PROMPT_TOKENS = 290
TOKENS = 4  # of each answer, unless streams are held
ANSWER_S = 30.0  # every answer ends within this, or is an error

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PERIOD = re.compile(rb"x-bench-period-ms: *(\d+)", re.IGNORECASE)
_EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# ---- the engine


class _Own(msgspec.Struct):
    ticket: str
    role: str
    saved_tokens: int = 0


class _Params(msgspec.Struct):
    kvtally: _Own | None = None


class _Body(msgspec.Struct):
    max_tokens: int = TOKENS
    stream: bool = False
    kv_transfer_params: _Params | None = None


_IDS = list(range(PROMPT_TOKENS))


class _Store(asyncio.Protocol):
    """The engine's connection to the store. It files receipts and ignores the replies."""

    def __init__(self) -> None:
        self.is_ready = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.is_ready:  # the greeting; everything after it is a reply
            self._transport.write(encode(Hello(1, PROTOCOL_VERSION, "bench engine")))
            self.is_ready = True

    def file(self, ticket: str, half: Half) -> None:
        self._transport.write(encode(ReceiptFile(2, ticket, half)))


class _Engine(asyncio.Protocol):
    """One connection to the engine. Requests come one at a time and have a length."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size_bytes = int(length[1]) if length else 0
        if not blank or len(rest) < size_bytes:
            return
        self._buffer = rest[size_bytes:]
        if not size_bytes:  # a health check
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self._answer(head, msgspec.json.decode(rest[:size_bytes], type=_Body))

    def _answer(self, head: bytes, body: _Body) -> None:
        own = body.kv_transfer_params.kvtally if body.kv_transfer_params else None
        if own is not None and own.role == "prefill":
            self._transport.write(_prefilled(own.ticket))
            return
        if own is not None:
            self._store.file(own.ticket, _half(own))
        period = _PERIOD.search(head)
        if period is None:
            self._transport.write(_STREAM_HEAD + _chunk(_EVENT))
            self._transport.write(_chunk(_EVENT) * (body.max_tokens - 1) + _chunk(_DONE) + _END)
        else:
            self._transport.write(_STREAM_HEAD)
            self._drip(body.max_tokens, int(period[1]) / 1e3)

    def _drip(self, left: int, period_s: float) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(_chunk(_DONE) + _END)
            return
        self._transport.write(_chunk(_EVENT))
        asyncio.get_running_loop().call_later(period_s, self._drip, left - 1, period_s)


def _half(own: _Own) -> Half:
    reused = own.saved_tokens or PROMPT_TOKENS - 1
    return Half(
        role=Role.DECODE,
        prompt_tokens=PROMPT_TOKENS,
        tokens_host=reused,
        computed_tokens=PROMPT_TOKENS - reused,
        moved_bytes=reused * 1000,
        verified=True,
    )


def _prefilled(ticket: str) -> bytes:
    told = {
        "ticket": ticket,
        "role": "prefill",
        "store": "bench",
        "namespace": "00" * 32,
        "saved_tokens": PROMPT_TOKENS - 1,
        "prompt_tokens": PROMPT_TOKENS,
        "chain": "00" * 32,
        "state": "ready",
        "reason": "",
    }
    choice = {"index": 0, "text": " word", "finish_reason": "length", "prompt_token_ids": _IDS}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1}
    body = msgspec.json.encode({"choices": [choice], "usage": usage, "kv_transfer_params": {"kvtally": told}})
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def engine(socket: str) -> None:
    loop = asyncio.get_running_loop()
    _, store = await loop.create_unix_connection(_Store, socket)
    server = await loop.create_server(lambda: _Engine(store), "127.0.0.1", 0, backlog=1024)
    await _listen(server.sockets[0].getsockname()[1])


# ---- the pass-through


async def passthrough(url: str) -> None:
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    )

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.post(url + request.path_qs, data=body, headers=headers) as upstream:
            response = web.StreamResponse(
                status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for part in upstream.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    await _listen(runner.addresses[0][1])


# ---- the load


class Task(msgspec.Struct, frozen=True):
    """Ask a port: `count` requests on each of `clients` connections, or as many as fit into `seconds`.

    `legs` is how many requests one answer takes: with two, the client runs prefill's and decode's leg itself. With
    `period_ms`, answers are streams of `tokens` words that come this far apart.
    """

    port: int
    clients: int = 1
    count: int = 0
    seconds: float = 0.0
    legs: int = 1
    tokens: int = TOKENS
    period_ms: int = 0


class Outcome(msgspec.Struct, frozen=True):
    first_byte_ms: list[float]
    answers: int
    errors: int
    elapsed_s: float
    words: int  # events of all answers


class _Client(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer."""

    def __init__(self, task: Task, until_s: float) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_byte_ms: list[float] = []
        self.answers = self.errors = self.words = 0
        self._task = task
        self._until_s = until_s
        self._requests = [_request(task, prefill=number < task.legs - 1) for number in range(task.legs)]
        self._leg = 0
        self._tail = b""
        self._begun_s = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: {")
        if events and self._begun_s:
            self.first_byte_ms.append((time.perf_counter() - self._begun_s) * 1e3)
            self._begun_s = 0.0
        self.words += events
        is_leg = self._leg < self._task.legs - 1
        self._tail = data if is_leg else (self._tail + data)[-len(_END) :]
        if is_leg and data.endswith(b"}"):  # prefill's answer comes in one piece
            self._leg += 1
            self._transport.write(self._requests[self._leg])
        elif not is_leg and self._tail == _END:
            self.answers += 1
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.errors += 1
            self.over.set_result(None)

    def _ask(self) -> None:
        self._leg, self._tail = 0, b""
        self._begun_s = time.perf_counter()
        self._transport.write(self._requests[0])

    def _next(self) -> None:
        if (self._task.count and self.answers >= self._task.count) or time.perf_counter() >= self._until_s:
            self.over.set_result(None)
            self._transport.close()
        else:
            self._ask()


def _request(task: Task, *, prefill: bool) -> bytes:
    tree: dict[str, object] = {"model": "m", "prompt": PROMPT, "max_tokens": task.tokens, "stream": True}
    if prefill:
        tree |= {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"kvtally": {"ticket": "t", "role": "prefill"}},
        }
    body = msgspec.json.encode(tree)
    period = b"x-bench-period-ms: %d\r\n" % task.period_ms if task.period_ms else b""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n" + period
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def _carry_out(task: Task) -> Outcome:
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    until_s = begun + task.seconds if task.seconds else float("inf")
    clients = []
    for _ in range(task.clients):
        _, client = await loop.create_connection(lambda: _Client(task, until_s), "127.0.0.1", task.port)
        clients.append(client)
    limit_s = task.seconds + task.tokens * task.period_ms / 1e3 + ANSWER_S
    _, late = await asyncio.wait([client.over for client in clients], timeout=limit_s)
    return Outcome(
        first_byte_ms=[value for client in clients for value in client.first_byte_ms],
        answers=sum(client.answers for client in clients),
        errors=sum(client.errors for client in clients) + len(late),
        elapsed_s=time.perf_counter() - begun,
        words=sum(client.words for client in clients),
    )


def load() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serve(lambda line: runner.run(_carry_out(msgspec.json.decode(line, type=Task))))


async def _listen(port: int) -> None:
    """Say the port, and serve until stdin ends."""
    wire = Wire()
    wire.answer(port)
    await asyncio.get_running_loop().run_in_executor(None, list, wire)


if __name__ == "__main__":
    _part, *_rest = sys.argv[1:]
    if _part == "load":
        load()
    else:
        uvloop.run({"engine": engine, "passthrough": passthrough}[_part](*_rest))
