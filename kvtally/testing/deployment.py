"""Prefill, decode, stores and router as users run them: `kvtally up` on a file, driven over HTTP.

    Deployment ──YAML──▶ kvtally up ──▶ store, prefill, decode, router
        │   TwoNodes: kvtally up --node a ──▶ store, prefill, router; kvtally up --node b ──▶ store, decode
        │             (Hosts say where the nodes are: on loopback addresses, or where a test puts them)
        └──completions──▶ router, or straight to decode for what it answers alone

For the demo and for tests. Owns the file, the process, and how answers are read. Blocking; every wait has a deadline
and fails with a TransportError that shows the end of the log. Neighbours: `up` (runs), `models` (served).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvtally.client import Miss, StoreClient
from kvtally.core.answers import margin
from kvtally.errors import TransportError
from kvtally.processes import Child, free_ports
from kvtally.testing.engines import ENVIRONMENT
from kvtally.testing.models import Model
from kvtally.up.host import direct
from kvtally.wire.stats import StoreStats

START_S = 400.0
REQUEST_S = 120.0
STOP_S = 60.0
# A request waits this long for the store, and its answer for the receipt: on a busy machine either may take seconds.
WAIT_MS, RECEIPT_WAIT_MS = 15_000, 5_000
T = TypeVar("T")


class Answer(NamedTuple):
    """What a client got. `told`: the router's headers, without their prefix. `margins`: by how much each token's
    logprob leads the runner-up's."""

    tokens: list[int]
    logprobs: list[float]
    told: dict[str, str]
    margins: list[float] = []


class Refused(TransportError):
    """The server answered with an error status."""

    def __init__(self, status: int, text: str, told: dict[str, str]) -> None:
        super().__init__(f"status {status}: {text}", remedy="See the status and what the server says.")
        self.status = status
        self.text = text
        self.told = told


def body(tokens: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        **more,
    }


def post(url: str, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """Ask for one completion. Raises Refused for an error status, OSError if the connection broke."""
    data = json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with direct.open(request, timeout=REQUEST_S) as response:
            return answer_of(response.read(), response.headers)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, error.read().decode(), told_by(dict(error.headers))) from None


def answer_of(content: bytes, headers: Mapping[str, str]) -> Answer:
    """Read a whole answer, or a stream. A stream without its final [DONE] is an error, not an answer."""
    if headers["Content-Type"].startswith("text/event-stream"):
        events = [line[6:] for line in content.splitlines() if line.startswith(b"data: ")]
        if not events or events.pop() != b"[DONE]":
            raise OSError("the stream broke off")
        parts = [json.loads(event) for event in events]
    else:
        parts = [json.loads(content)]
    if any("error" in part for part in parts):
        raise OSError(f"the stream ended with an error: {parts[-1]}")
    found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice["logprobs"]]
    if any("content" in logprobs for logprobs in found):  # of a chat
        said = [(one["token"], one["logprob"]) for logprobs in found for one in logprobs["content"] or []]
    else:
        said = [pair for lp in found for pair in zip(lp["tokens"], lp["token_logprobs"], strict=True)]
    tokens = [int(token.removeprefix("token_id:")) for token, _ in said]
    margins = [margin(top.values()) for lp in found for top in lp.get("top_logprobs") or []]
    return Answer(tokens, [value for _, value in said], told_by(headers), margins)


def told_by(headers: Mapping[str, str]) -> dict[str, str]:
    named = ((name.lower(), value) for name, value in headers.items())
    return {name.removeprefix("x-kvtally-"): value for name, value in named if name.startswith("x-kvtally-")}


class Up(Child):
    """`kvtally up` on a file: its processes are its children, and it restarts those that die."""

    def __init__(self, file: Path, *arguments: str, log: str = "up.log") -> None:
        directory = file.parent
        super().__init__(
            [sys.executable, "-m", "kvtally", "up", str(file), *arguments],
            directory / log,
            name=" ".join(["kvtally up", *arguments]),
            remedy=f"The logs are in {directory}.",
            directory=directory,  # the caller's own kvtally.yaml is not read there
            tie=signal.SIGTERM,  # on this it stops its own children in order
            grace_s=STOP_S,
        )

    def log(self) -> str:
        return self._log.read_text()

    def pid_of(self, name: str) -> int:
        """The process that was started last under this name: store, prefill-0, decode-0 or router."""
        return int(re.findall(rf"^{name}: starting, pid (\d+)", self.log(), re.MULTILINE)[-1])


class Deployment(Up):
    """Prefill, decode, a store and a router on this machine, from one file."""

    def __init__(self, model: Model, directory: Path, **changes: Any) -> None:
        self.router, self.prefill, self.decode = (f"http://127.0.0.1:{port}" for port in free_ports(3))
        self.socket = str(directory / "s.sock")
        changes["store"] = {"socket": self.socket, **changes.pop("store", {})}
        engines = {"prefill": {"port": port_of(self.prefill)}, "decode": {"port": port_of(self.decode)}}
        super().__init__(self._written(model, directory, {**engines, **changes}))

    def _written(self, model: Model, directory: Path, changes: dict[str, Any]) -> Path:
        """The file to run, with what every deployment of a test has in common."""
        settings = {name: value for name, value in model.settings.items() if name != "model"}
        tree = {
            "model": str(model.path),
            "args": {**settings, "served_model_name": "tiny", "enable_prefix_caching": True, **changes.pop("args", {})},
            "env": dict(ENVIRONMENT),
            "store": {"memory": "512MiB", **changes.pop("store", {})},
            "router": {
                "port": port_of(self.router),
                "prefill_from": 1,
                "receipt_wait": RECEIPT_WAIT_MS,
                **changes.pop("router", {}),
            },
            "connector": {"wait_ms": WAIT_MS, **changes.pop("connector", {})},
            "logs": str(directory / "logs"),
            **changes,
        }
        file = directory / "up.yaml"
        file.write_text(json.dumps(tree))  # JSON is YAML
        return file

    @property
    def sockets(self) -> list[str]:
        """Of all its stores."""
        return [self.socket]

    def wait_ready(self, timeout_s: float = START_S, *, on_line: Callable[[str], object] = str) -> None:
        """Wait until everything is up. Meanwhile `on_line` gets the last line that `kvtally up` printed."""

        def is_ready() -> bool:
            lines = self.log().strip().splitlines()
            on_line(lines[-1] if lines else "kvtally up")
            return self.is_ready()

        self.wait(is_ready, "it did not come up", timeout_s)

    def is_ready(self) -> bool:
        """Whether engines, router and stores are up. Each is asked: the router serves without a store, and what it
        knows about an engine may be out of date."""
        for address in self.sockets:
            with StoreClient(address, name="test") as client:
                if isinstance(client.connect(0.5), Miss):
                    return False
        try:
            for engine in (self.prefill, self.decode):
                direct.open(f"{engine}/health", timeout=5).close()
            with direct.open(f"{self.router}/health", timeout=5) as response:
                return bool(json.load(response)["status"] == "ok")
        except OSError:
            return False

    def wait(self, is_done: Callable[[], bool], problem: str, timeout_s: float = REQUEST_S) -> None:
        self.wait_for(is_done, problem, timeout_s, every_s=0.1)

    # ---- requests

    def complete(self, tokens: Sequence[int], max_tokens: int = 8, *, key: str = "", **more: Any) -> Answer:
        """Ask the router for a completion."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return post(f"{self.router}/v1/completions", body(tokens, max_tokens, **more), headers)

    @staticmethod
    def chat(url: str, content: Mapping[str, Any]) -> Answer:
        """A chat completion, through the router or straight from an engine."""
        return post(f"{url}/v1/chat/completions", content)

    def continued(self, tokens: Sequence[int], max_tokens: int = 8) -> tuple[list[int], Answer]:
        """A prompt with one token more, and what decode's engine answers if it continues from the rest without reusing
        anything. The arithmetic is that of a prompt that was handed over, to the bit."""
        alone = self.computed(tokens, max_tokens + 1)
        return [*tokens, alone.tokens[0]], Answer(alone.tokens[1:], alone.logprobs[1:], {}, alone.margins[1:])

    def computed(self, tokens: Sequence[int], max_tokens: int = 8) -> Answer:
        """What decode's engine answers if it computes the whole prompt at once, without reusing anything. A prompt that
        is computed again has this arithmetic; `continued` rounds differently."""
        salted = body(tokens, max_tokens, cache_salt=f"alone-{time.monotonic_ns()}")
        return post(f"{self.decode}/v1/completions", salted)

    def forget(self, *engines: str) -> None:
        """Reset engines' own prefix caches; they refuse while blocks are in use."""

        def is_reset() -> bool:
            request = urllib.request.Request(f"{engine}/reset_prefix_cache", b"{}")
            try:
                with direct.open(request, timeout=10) as response:
                    return bool(json.load(response)["success"])
            except OSError:
                return False

        for engine in engines:
            self.wait(is_reset, f"{engine} does not reset its cache")

    def counted(self, engine: str = "") -> dict[str, float]:
        """How many prompt tokens an engine, decode's unless another is named, got from each source, as vLLM counts
        them."""
        with direct.open(f"{engine or self.decode}/metrics", timeout=REQUEST_S) as response:
            text = response.read().decode()
        found = re.findall(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {source: float(value) for source, value in found}

    def requests_at(self, engine: str) -> int:
        """How many requests the router has sent there that are not answered yet."""
        with direct.open(f"{self.router}/instances", timeout=REQUEST_S) as response:
            rows = json.load(response)["instances"]
        return sum(row["requests"] for row in rows if engine.endswith(row["instance"]))

    @contextmanager
    def store(self, socket: str = "") -> Iterator[StoreClient]:
        """A client of the store, or of the one with this socket."""
        with StoreClient(socket or self.socket, name="test") as client:
            if isinstance(client.connect(REQUEST_S), Miss):
                raise self.broken("the store does not answer")
            yield client

    def stats(self, socket: str = "") -> StoreStats:
        """What the store, or the one with this socket, tells about itself."""
        with self.store(socket) as client:
            told = client.stats().wait()
            if isinstance(told, Miss):
                raise self.broken(f"the store does not answer: {told}")
            return msgspec.convert(told.stats, StoreStats)

    def receipt(self, answer: Answer) -> dict[str, Any]:
        """Both halves of a receipt. The router has them a moment after the answer."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            try:
                with direct.open(f"{self.router}/receipts/{answer.told['request']}", timeout=10) as response:
                    found.update(json.load(response))
            except OSError:
                return False
            return True

        self.wait(is_there, "the router does not keep the receipt")
        return found


class Hosts:
    """Where the nodes of a deployment are. Here: on this machine, each with a loopback address of its own."""

    addresses: Mapping[str, str] = {"a": "127.0.0.2", "b": "127.0.0.3"}  # on Linux all of 127.0.0.0/8 is this machine's
    router = "a"  # the router's node; it may be one without engines

    @contextmanager
    def on(self, node: str) -> Iterator[None]:
        """What this thread starts or connects meanwhile, it does on that node."""
        yield


LOOPBACK = Hosts()


class TwoNodes(Deployment):
    """Two machines, in all but the network between them: prefill and the router on node a, decode on node b, each node
    with a store of its own. Nothing is shared but the loopback interface, on which each has its own address. Other
    `hosts` put the nodes elsewhere, and perhaps the router on a third one.

    This is `kvtally up --node a`; `b` is the other one. `socket` is of decode's store, `prefill_socket` of prefill's;
    `stores` are the addresses of a's and b's.
    """

    def __init__(self, model: Model, directory: Path, hosts: Hosts = LOOPBACK, **changes: Any) -> None:
        ports = free_ports(7)
        a, b = hosts.addresses["a"], hosts.addresses["b"]
        self.router = f"http://127.0.0.1:{ports[0]}"
        self.prefill, self.decode = f"http://{a}:{ports[1]}", f"http://{b}:{ports[2]}"
        self.prefill_socket, self.socket = str(directory / "a.sock"), str(directory / "b.sock")
        self.stores = f"tcp://{a}:{ports[3]}", f"tcp://{b}:{ports[5]}"
        self.token = directory / "token"
        self.token.write_text(secrets.token_hex(16))
        self.token.chmod(0o600)
        changes["store"] = {"token_file": str(self.token), **changes.pop("store", {})}
        changes["router"] = {"node": hosts.router, **changes.pop("router", {})}
        nodes: dict[str, dict[str, object]] = {node: {"address": where} for node, where in hosts.addresses.items()}
        nodes["a"] |= {"prefill": {"port": ports[1]}, "store": _at(self.prefill_socket, a, *ports[3:5])}
        nodes["b"] |= {"decode": {"port": ports[2]}, "store": _at(self.socket, b, *ports[5:7])}
        # On a busy machine a tiny model computes a prompt sooner than it is pulled, and the store would choose that.
        changes["connector"] = {"always_load": True, **changes.pop("connector", {})}
        file = self._written(model, directory, {"nodes": nodes, **changes})
        with hosts.on("a"):
            Up.__init__(self, file, "--node", "a", log="up-a.log")
        self._others: dict[str, Up] = {}
        for node in nodes.keys() - {"a"}:
            with hosts.on(node):
                self._others[node] = Up(file, "--node", node, log=f"up-{node}.log")
        self.b = self._others["b"]

    @property
    def sockets(self) -> list[str]:
        return [self.prefill_socket, self.socket]

    def is_ready(self) -> bool:
        for other in self._others.values():
            if other.has_ended():
                raise other.broken(f"{other.name} ended")
        return super().is_ready()

    def is_linked(self) -> bool:
        """Whether decode's store asks prefill's: one that did not answer in time is left alone for a while."""
        return all(peer.state == "ok" for peer in self.stats().peers)

    @property
    def decode_engine(self) -> list[int]:
        """Its processes, but for its API server: the router asks that one whether the engine is well."""
        return family(self.b.pid_of("decode-0"))[1:]

    @contextmanager
    def stopped(self, processes: Sequence[int]) -> Iterator[None]:
        """Stop processes for a while."""
        try:
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)

    def meanwhile(self, ask: Callable[[], T], happens: Callable[[], None]) -> T:
        """Ask, and let something happen after prefill has answered and before decode's store has pulled anything.
        Decode's engine and its store are stopped until then."""
        with ThreadPoolExecutor(1) as pool:
            with self.stopped([self.b.pid_of("store"), *self.decode_engine]):
                asked = pool.submit(ask)
                self.wait(lambda: asked.done() or self.requests_at(self.decode) > 0, "prefill does not answer")
                happens()
            return asked.result()

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        super().close()


def _at(socket: str, address: str, port: int, bulk_port: int) -> dict[str, object]:
    return {"socket": socket, "port": port, "bulk": f"{address}:{bulk_port}"}


def family(pid: int) -> list[int]:
    """A process and all its descendants, itself first."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [pid]
    for process in found:
        found += parents.get(process, [])
    return found


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
