"""For the router's tests: a store, fake engines and a router in one event loop, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import uvloop
from yarl import URL

from kvtally.config import RouterConfig
from kvtally.config.instances import Instance
from kvtally.router.app import Router, running
from tests.unit.fake_vllm import STORE_NAME, FakeVLLM
from tests.unit.shell import Bench
from tests.waiting import HANG_S, comes_about

LONGEST_WAIT_MS = 60_000
LONG = "a long prompt that is worth moving, " * 20
PATH = "/v1/completions"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def verdict(self) -> str:
        return self.headers.get("x-kvtally-verdict", "")

    @property
    def prefill(self) -> str:
        return self.headers.get("x-kvtally-prefill", "")


@dataclass
class Kit:
    """Everything one test talks to."""

    router: Router
    session: aiohttp.ClientSession
    prefill: list[FakeVLLM]
    decode: list[FakeVLLM]
    log: Path
    config: RouterConfig
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    async def ask(self, prompt: str = LONG, *, path: str = PATH, key: str = "", **fields: Any) -> Reply:
        """One request, answered to its end."""
        body = {"model": "m", "prompt": prompt, **fields}
        headers = {**self.headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        return await self.send("POST", path, json=body, headers=headers)

    async def send(self, method: str, path: str | URL, **options: Any) -> Reply:
        url = self.url + path if isinstance(path, str) else path
        async with self.session.request(method, url, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.read())

    def find(self, name: str) -> FakeVLLM:
        """The engine by the name that headers give it."""
        (engine,) = (each for each in (*self.prefill, *self.decode) if each.name == name)
        return engine

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """The request log, once it has so many lines."""
        await comes_about(lambda: len(self.log.read_text().splitlines()) >= count)  # a thread writes them
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for_receipts(self, wait_ms: int) -> None:
        """From now on the router waits so long for a receipt."""
        proxy = self.router._proxy
        proxy._config = msgspec.structs.replace(proxy._config, receipt_wait_ms=wait_ms)


class Home(NamedTuple):
    """The store of an engine."""

    path: str  # by which the engine reaches it
    name: str = STORE_NAME
    told: str = ""  # what it tells others to reach it by
    address: str = ""  # by which the router reaches it, unless that is the path


@contextlib.asynccontextmanager
async def kit(
    tmp_path: Path,
    *,
    prefill: int | Sequence[Home] = 1,
    decode: int | Sequence[Home] = 1,
    store: str = "",
    stop_s: float = 0.2,
    **settings: Any,
) -> AsyncIterator[Kit]:
    """A router with so many fake engines. With `store`, engines file receipts there, and the router reads them; unless
    a test says otherwise, it waits for them as long as tests wait for anything. Engines with stores of their own are
    given by those."""
    settings.setdefault("receipt_wait_ms", LONGEST_WAIT_MS)
    async with contextlib.AsyncExitStack() as stack:
        address = settings.pop("address", store or str(tmp_path / "no-store.sock"))

        def homes(of: int | Sequence[Home]) -> Sequence[Home]:
            return [Home(store, address=address)] * of if isinstance(of, int) else of

        async def start(of: Sequence[Home]) -> list[FakeVLLM]:
            made = [FakeVLLM(home.path, store_name=home.name, address=home.told) for home in of]
            return [await stack.enter_async_context(engine) for engine in made]

        def instances(engines: list[FakeVLLM], of: Sequence[Home]) -> tuple[Instance, ...]:
            pairs = zip(engines, of, strict=True)
            return tuple(instance_of(engine, home.address or home.path) for engine, home in pairs)

        at_prefill, at_decode = homes(prefill), homes(decode)
        prefills, decodes = await start(at_prefill), await start(at_decode)
        flavour = settings.pop("flavour", "kvtally" if prefill else "plain")
        config = RouterConfig(
            listen="127.0.0.1:0",
            prefill=instances(prefills, at_prefill),
            decode=instances(decodes, at_decode),
            flavour=flavour,
            salt_file=str(tmp_path / "salt"),
            **settings,
        )
        log = tmp_path / "requests.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        stack.callback(os.close, descriptor)
        router = await stack.enter_async_context(running(config, log_descriptor=descriptor, stop_s=stop_s))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Kit(router, session, prefills, decodes, log, config)
        told = {home.address or home.path for home in (*at_prefill, *at_decode) if home.told}
        if store or told:
            await stores_connected(made, told)
        yield made


def instance_of(engine: FakeVLLM, store: str) -> Instance:
    return Instance(url=engine.url, store=store, bootstrap=engine.url)


async def stores_connected(made: Kit, which: Collection[str] = ()) -> None:
    """All of them, or those at these addresses."""
    await until(lambda: _are_connected(made, which))


async def _are_connected(made: Kit, which: Collection[str]) -> bool:
    stores = (await made.send("GET", "/instances")).json()["stores"]
    return all(stores[address]["receipts"] == "ok" for address in which or stores)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await condition():  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine, with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(3 * HANG_S):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the router runs
        runner.run(bounded())


@contextlib.contextmanager
def a_store(tmp_path: Path, **settings: Any) -> Any:
    bench = Bench(tmp_path)
    try:
        yield bench.start(**settings), bench.path
    finally:
        bench.close()
