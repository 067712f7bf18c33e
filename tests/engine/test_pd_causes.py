"""Prefill and decode that cannot share: every response names the cause, strict mode refuses, and nothing waits.

One prefill server that only saves, a decode server that only loads, and three that are each wrong in one way. Their
answers are right all the same: decode computes what it did not get.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtally.processes import free_ports
from kvtally.testing.deployment import Answer, Refused, body, post
from kvtally.testing.engines import Server
from kvtally.testing.models import DENSE, Model, Recipe
from tests.engine.store import StoreProcess
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.engine

CAUSES = {
    "another store": "recomputed:foreign_store",
    "other weights": "recomputed:foreign_namespace",
    "no connector": "missing",
}
NOTHING = "nothing wrong"
# What a receipt says is tested, not when it comes on busy processors; where none can come, no wait would bring it.
RECEIPT_WAIT_MS = {"no connector": 1_000}


class Node:
    """Servers and stores, by what is wrong with them; `router` starts one in front of prefill and one of them."""

    def __init__(self, prefill: Server, decode: dict[str, Server], stores: dict[str, str], logs: Path) -> None:
        self._prefill = prefill
        self._decode = decode
        self._stores = stores
        self._logs = logs

    @contextmanager
    def router(self, cause: str, *flags: str) -> Iterator[str]:
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        prefill = f"{address(self._prefill)},store={self._stores['prefill']}"
        decode = f"{address(self._decode[cause])},store={self._stores[cause]}"
        command = [sys.executable, "-m", "kvtally", "route", "--listen", url.removeprefix("http://")]
        command += ["--flavour", "kvtally", "--prefill", prefill, "--decode", decode, *flags]
        command += ["--receipt-wait", str(RECEIPT_WAIT_MS.get(cause, 60_000))]
        with (self._logs / "router.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            eventually(lambda: answers(f"{url}/health"), f"{url} answered")
            yield url
        finally:
            process.terminate()
            process.wait(30)

    def alone(self, cause: str, prompt: list[int]) -> Answer:
        salted = body(prompt, cache_salt=f"alone-{time.monotonic_ns()}")
        return post(f"{address(self._decode[cause])}/v1/completions", salted)


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def node(
    tiny_model: Callable[[Recipe, int], Model], tmp_path_factory: pytest.TempPathFactory, patient: None
) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("causes")
    with ExitStack() as stack:
        stores = {}
        for name in ("one", "two"):
            (directory / name).mkdir()
            store = StoreProcess(directory / name)
            stack.callback(store.stop)
            stores[name] = store

        def server(name: str, store: StoreProcess | None, weights: int = 0, role: str = "kv_both") -> Server:
            arguments: dict[str, Any] = dict(tiny_model(DENSE, weights).settings)
            if store is not None:
                arguments["kv_transfer_config"] = {
                    **store.connector(wait_ms=int(HANG_S * 1e3)).kv_transfer_config,
                    "kv_role": role,
                }
            return stack.enter_context(Starting(arguments, directory / f"{name}.log"))

        prefill = server("prefill", stores["one"], role="kv_producer")
        decode = {
            NOTHING: server("consumer", stores["one"], role="kv_consumer"),
            "another store": server("another-store", stores["two"]),
            "other weights": server("other-weights", stores["one"], weights=1),
            "no connector": server("no-connector", None),
        }
        for started in (prefill, *decode.values()):
            started.wait_ready()
        sockets = dict.fromkeys(("prefill", NOTHING, *CAUSES), stores["one"].socket)
        sockets["another store"] = stores["two"].socket
        yield Node(prefill, decode, sockets, directory)


class Starting(Server):
    """A server that the context does not wait for: several start at once."""

    def __enter__(self) -> Starting:
        return self


def prompt(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(10, 900) for _ in range(length)]


def test_a_producer_hands_over_to_a_consumer(node: Node) -> None:
    with node.router(NOTHING, "--strict") as url:
        tokens = prompt(600, 70)
        answer = post(f"{url}/v1/completions", body(tokens))
        assert (answer.told["verdict"], answer.told["computed-tokens"]) == ("proved", "1")
        assert answer.tokens == node.alone(NOTHING, tokens).tokens


@pytest.mark.parametrize("cause", CAUSES)
def test_the_verdict_names_the_cause(node: Node, cause: str) -> None:
    with node.router(cause) as url:
        for seed, stream in enumerate((False, True)):
            tokens = prompt(600, seed)
            answer = post(f"{url}/v1/completions", body(tokens, stream=stream))
            assert answer.told["verdict"] == CAUSES[cause]
            assert answer.tokens == node.alone(cause, tokens).tokens


@pytest.mark.parametrize("cause", CAUSES)
def test_strict_mode_refuses_to_pretend(node: Node, cause: str) -> None:
    with node.router(cause, "--strict") as url:
        with pytest.raises(Refused) as refused:
            post(f"{url}/v1/completions", body(prompt(600, 7)))
        assert refused.value.status == 502
        assert refused.value.told["verdict"] == CAUSES[cause]
        assert "not proved" in refused.value.text


def test_a_short_prompt_says_that_it_was_not_worth_moving(node: Node) -> None:
    with node.router("another store") as url:
        answer = post(f"{url}/v1/completions", body(prompt(30, 8)))
        assert answer.told["prefill"] == "skipped:short"
        assert answer.told["computed-tokens"] == "30"
