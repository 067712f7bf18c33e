"""A vLLM server that computes nothing: for speed, and for faults that a real one cannot be made to have on demand.

Answers /v1/completions, /v1/chat/completions, /v1/messages (streamed and not), /v1/models, /health and whatever else it
is told to.
Knows the hand-offs of every flavour as far as a router sees them. With a store it does what our connector does: prefill
answers with a hand-off, decode files its half of the receipt before its first token. A token is a byte of the prompt.

By hand: python -m tests.unit.fake_vllm 9001 [SOCKET]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from kvtally.client import StoreClient
from kvtally.core.receipts import Half, Role

WORDS = 4  # of an answer that asks for no number
STORE_NAME = "store-of-the-fakes"
CHAIN = "ab" * 32


@dataclass
class Seen:
    """One request that arrived."""

    path: str
    headers: CIMultiDict[str]
    body: dict[str, Any]
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    @property
    def params(self) -> dict[str, Any]:
        params = self.body.get("kv_transfer_params")
        return params if isinstance(params, dict) else {}


class FakeVLLM:
    """One server, in the event loop of whoever enters it. What it does is changed by setting its attributes."""

    def __init__(self, store: str = "", *, store_name: str = STORE_NAME, address: str = "") -> None:
        self.port = 0
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()  # set by every request, to be cleared by who waits
        self.health = 200
        self.is_hung = False  # as a stopped process: nothing is answered, not even a health check
        self.bootstrap_status = 200
        self.statuses: list[int] = []  # of the next requests, instead of an answer
        self.drops = 0  # so many next requests find the connection closed
        self.drops_filed = 0  # the same, after their half is filed
        self.dies_after: int | None = None  # words, then the connection is reset
        self.pause = asyncio.Event()  # an answer waits for this before its first byte, and between words
        self.pause.set()
        self.pauses_after = 0  # words that are not held back by `pause`; -1: none of a stream, but its head
        self.words = [f" w{number}" for number in range(WORDS)]
        self.handoff: Callable[[Seen, dict[str, Any]], dict[str, Any] | None] = lambda _, answer: answer
        self.half: Callable[[Seen, Half], Half | None] = lambda _, half: half
        self.files = asyncio.Event()  # halves are filed once this is set; answers do not wait for it
        self.files.set()
        self.filed = asyncio.Event()  # one has been
        self.extra: dict[str, web.Response] = {}  # by path
        self.prefill_half: Callable[[Seen], Half] | None = None  # what prefill files in its store
        self._store_name, self._address = store_name, address
        self._held: set[tuple[str, str]] = set()  # salt and prompt
        self._client = StoreClient(store, name="fake vLLM") if store else None
        # The only thread that uses the client. What its request has given up goes on there: it must end before `close`.
        self._filing = ThreadPoolExecutor(1)
        self._later: set[asyncio.Future[None]] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeVLLM:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._runner is not None
        self.pause.set()
        self.files.set()
        await self._runner.cleanup()
        client, self._client = self._client, None  # what comes late is not filed
        await asyncio.to_thread(self._filing.shutdown)
        if client is not None:
            client.close()

    # ---- what it answers

    async def _health(self, request: web.Request) -> web.Response:
        if self.is_hung:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        is_json = data.lstrip().startswith(b"{")
        self.seen.append(Seen(request.path, CIMultiDict(request.headers), json.loads(data) if is_json else {}))
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})
        if request.path == "/query":
            engines = {"0": {"engine_id": f"engine-{self.port}", "worker_addr": {}}}
            return await _in_pieces(request, json.dumps(engines).encode(), self.bootstrap_status)
        if request.path in self.extra:
            told = self.extra[request.path]
            return web.Response(status=told.status, body=told.body, headers=told.headers)
        return web.json_response({"path": request.path, "query": request.rel_url.raw_query_string, "bytes": len(data)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, CIMultiDict(request.headers), await request.json())
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self._answer(request, seen)
        except (asyncio.CancelledError, ConnectionResetError):  # whichever notices first that nobody listens
            seen.was_cancelled = True
            raise
        finally:
            seen.is_over.set()

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if self.drops:
            self.drops -= 1
            return _hang_up(request)
        if self.statuses:
            status = self.statuses.pop(0)
            return web.json_response({"error": {"message": f"fault {status}", "code": status}}, status=status)
        if self.is_hung:
            await asyncio.Event().wait()
        if self.pauses_after == 0:
            await self.pause.wait()
        tokens = _tokens(seen.body)
        params = self._prefilled(seen, tokens)
        if params is not None and self.prefill_half is not None:
            await self._send(seen.params["kvtally"]["ticket"], self.prefill_half(seen))
        if params is None:
            await self._file(seen, tokens)
            if self.drops_filed:
                self.drops_filed -= 1
                return _hang_up(request)
        words = self.words[: seen.body.get("max_tokens") or len(self.words)]
        if seen.body.get("stream"):
            return await self._stream(request, seen, words)
        return web.json_response(self._whole(seen, tokens, words, params))

    def _whole(self, seen: Seen, tokens: list[int], words: list[str], params: dict[str, Any] | None) -> dict[str, Any]:
        is_chat = "messages" in seen.body
        ids = tokens if seen.body.get("return_token_ids") else None
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if not is_chat:
            choice["prompt_token_ids"] = ids
        answer = {"id": seen.headers.get("X-Request-Id"), "choices": [choice], "kv_transfer_params": params}
        if is_chat:
            answer["prompt_token_ids"] = ids
        if "cached_token_stats" in seen.params:
            stats = {"num_vllm_cached_tokens": 2, "num_lmcache_cached_tokens": 8, "num_lmcache_extra_cached_tokens": 6}
            answer["kv_transfer_params"] = {"cached_token_stats": stats}
        return {**answer, "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(words)}}

    async def _stream(self, request: web.Request, seen: Seen, words: list[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, word in enumerate(words):
            if number >= self.pauses_after:
                await self.pause.wait()
            if number == self.dies_after:
                return _hang_up(request)
            await response.write(event({"choices": [{"index": 0, "text": word}]}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # ---- what a connector does

    def _prefilled(self, seen: Seen, tokens: list[int]) -> dict[str, Any] | None:
        """What the connector of a prefill instance answers; None for any other request."""
        params = seen.params
        own = params.get("kvtally", {})
        if own.get("role") == "prefill":
            answer = {
                "ticket": own["ticket"],
                "role": "prefill",
                "store": self._store_name,
                "namespace": "cd" * 32,
                "saved_tokens": len(tokens) - 1,
                "computed_tokens": len(tokens) - 1,
                "prompt_tokens": len(tokens),
                "chain": CHAIN,
                "state": "ready",
                "reason": "",
                "address": self._address,
            }
            return self.handoff(seen, {"kvtally": answer})
        if params.get("do_remote_decode") and "transfer_id" not in params:
            return self.handoff(seen, nixl_answer(seen, len(tokens)))
        return None

    async def _file(self, seen: Seen, tokens: list[int]) -> None:
        """Decode's half, as if this were a real engine with a connector."""
        own = seen.params.get("kvtally", {})
        key = (seen.body.get("cache_salt", ""), repr(tokens))
        is_held, _ = key in self._held, self._held.add(key)
        if self._client is None or "ticket" not in own:
            return
        # What lies in another store is pulled from there, if somebody says where that is.
        is_near, is_far = own.get("store") == self._store_name, bool(own.get("address"))
        saved = own.get("saved_tokens", 0) if is_near or is_far else 0
        reason = "" if saved or is_held else "foreign_store" if "store" in own else "absent"
        if is_held:
            counts = {"tokens_gpu": len(tokens) - 1, "computed_tokens": 1}
        else:
            place = "tokens_host" if is_near else "tokens_peer"
            counts = {place: saved, "computed_tokens": len(tokens) - saved, "moved_bytes": saved * 100}
        half = self.half(
            seen, Half(role=Role.DECODE, prompt_tokens=len(tokens), verified=bool(saved), reason=reason, **counts)
        )
        if half is None:
            return
        sending = asyncio.ensure_future(self._send(own["ticket"], half))
        if self.files.is_set():
            await sending
        else:
            self._later.add(sending)
            sending.add_done_callback(self._later.discard)

    async def _send(self, ticket: str, half: Half) -> None:
        await self.files.wait()
        client = self._client
        if client is not None:
            loop = asyncio.get_running_loop()
            # A Miss costs the receipt only.
            await loop.run_in_executor(self._filing, lambda: client.file_receipt(ticket, half).wait())
            self.filed.set()


def nixl_answer(seen: Seen, prompt_tokens: int, mode: str = "pull") -> dict[str, Any]:
    """What a NIXL prefill instance answers (vLLM 0.32, `nixl/pull_scheduler.py`)."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-a",
        "remote_request_id": seen.headers.get("X-Request-Id"),
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": mode,
    }


def event(tree: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(tree).encode() + b"\n\n"


def _tokens(body: dict[str, Any]) -> list[int]:
    """As a real engine would: the prompt's, unless prefill's own are forwarded."""
    forwarded = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if forwarded is not None:
        return list(forwarded)
    if "messages" in body:
        return list(json.dumps(body["messages"]).encode())
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


async def _in_pieces(request: web.Request, data: bytes, status: int) -> web.StreamResponse:
    """As a network may deliver it."""
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for part in (data[:7], data[7:]):
        await response.write(part)
        await asyncio.sleep(0.01)
    await response.write_eof()
    return response


def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@contextlib.asynccontextmanager
async def engines(count: int, store: str = "") -> AsyncIterator[list[FakeVLLM]]:
    """So many of them."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeVLLM(store)) for _ in range(count)]


async def _main(port: int, store: str) -> None:
    engine = FakeVLLM(store)
    engine.port = port
    async with engine:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
