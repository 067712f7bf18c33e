"""Two real stores with nothing in common but the network: one saves, the other one serves it, verified."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtally.config import StoreConfig
from kvtally.core.space import Piece
from kvtally.errors import ConfigError
from kvtally.shm import Mapping
from kvtally.store import peers
from kvtally.store.server import StoreServer, new_event_loop
from kvtally.wire.auth import NONCE_BYTES, proof, store_proof
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    Pull,
    Refused,
    Slots,
    SlotsGet,
    Staged,
    Welcome,
)
from tests.unit.bulk_kit import Puller
from tests.unit.shell import CHAIN, OBJECT_BYTES, TOKEN, Bench, LoopFactory, Peer, Running, pieces_of, put
from tests.waiting import HANG_S, eventually

A, B = "127.0.0.2", "127.0.0.3"
LOOPS = [new_event_loop, asyncio.new_event_loop]


@pytest.fixture(autouse=True)
def _patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ASK_NS", int(HANG_S * 1e9))


class Nodes:
    """Stores, each with a directory and an address of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()

    def start(self, host: str, *, loop_factory: LoopFactory = new_event_loop, **settings: object) -> Node:
        directory = self._directory / f"{host}-{len(list(self._directory.iterdir()))}"
        directory.mkdir()
        bench = Bench(directory)
        self._stack.callback(bench.close)
        network = {"tcp": f"{host}:0", "token": TOKEN, "peers": (A, B), **settings}
        return Node(bench, bench.start(loop_factory=loop_factory, **network))

    def close(self) -> None:
        self._stack.close()


class Node:
    def __init__(self, bench: Bench, running: Running) -> None:
        self.bench = bench
        self.running = running
        self.server = running.server

    @property
    def address(self) -> str:
        return self.server.address

    def save(self, data: bytes) -> Mapping:
        peer = self.bench.client()
        mapping = peer.map()
        put(peer, mapping, data)
        return mapping

    def ask(self, source: str, peer: Peer | None = None) -> tuple[Found, Staged | None]:
        peer = peer or self.bench.client()
        found = peer.ask(Lookup(7, CHAIN, [256], 256, hold=True, source=source))
        assert isinstance(found, Found)
        staged = peer.receive() if found.staging else None
        assert staged is None or isinstance(staged, Staged)
        return found, staged

    def pieces(self) -> list[Piece]:
        """Of the one object that lies in its arena."""
        peer = self.bench.client()
        found = peer.ask(Lookup(7, CHAIN, [256], 256, hold=True))
        assert isinstance(found, Found)
        slots = peer.ask(SlotsGet(8, found.lease))
        assert isinstance(slots, Slots)
        peer.close()
        return pieces_of(slots.slots[0].pieces)

    def bytes(self) -> bytes:
        return b"".join(bytes(view) for view in self.server.arena.views(self.pieces()))

    def ended(self) -> object:
        return self.running.stats("server", "ended")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


DATA = os.urandom(OBJECT_BYTES)


@pytest.fixture(params=["plain", "TLS", "TLS without bytes"])
def security(request: pytest.FixtureRequest) -> dict[str, object]:
    if request.param == "plain":
        return {}
    cert, key = request.getfixturevalue("tls_files")
    return {"tls_cert": cert, "tls_key": key, "peers_ca": cert, "bulk_tls": request.param == "TLS"}


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_what_one_store_saved_the_other_one_serves(
    nodes: Nodes, security: dict[str, object], loop_factory: LoopFactory
) -> None:
    first = nodes.start(A, loop_factory=loop_factory, **security)
    second = nodes.start(B, loop_factory=loop_factory, **security)
    mapping = first.save(DATA)
    assert second.ask("")[0].end_tokens == 0  # nobody has named a source
    found, staged = second.ask(first.address)
    assert (found.end_tokens, found.reason) == (256, "")
    assert staged is not None
    assert (staged.end_tokens, staged.peer_tokens, staged.reason) == (256, 256, "")
    assert second.bytes() == DATA
    found, staged = second.ask(first.address)
    assert (found.end_tokens, found.arena_tokens, staged) == (256, 256, None)  # it is here now
    assert (first.ended(), second.ended()) == ({}, {})
    mapping.close()


def test_a_byte_that_flipped_over_there_is_never_served(nodes: Nodes) -> None:
    """The negative control."""
    first, second = nodes.start(A), nodes.start(B)
    mapping = first.save(DATA)
    first.server.arena.views(first.pieces())[0][4321] ^= 1
    found, staged = second.ask(first.address)
    assert found.end_tokens == 256
    assert staged is not None
    assert (staged.end_tokens, staged.reason, staged.peer_tokens) == (0, "checksum", 0)
    mapping.close()


def test_an_address_that_is_on_no_list_is_not_connected_to(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.4", 0)) as elsewhere:
        elsewhere.settimeout(0)
        second = nodes.start(B)
        for address in (
            f"tcp://127.0.0.4:{elsewhere.getsockname()[1]}",
            "unix:/etc/passwd",
            "tcp://169.254.169.254:80",
        ):
            found, _ = second.ask(address)
            assert found.end_tokens == 0
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def is_lost(found: Found) -> bool:
    return (found.end_tokens, found.reason) == (0, "peer_lost")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"token": "another token altogether"}, "KV-205"),
        ({"peers": ("127.0.0.9",)}, "KV-210"),
        ({"peers": ()}, "KV-210"),
    ],
    ids=["token", "another's peer", "nobody's peer"],
)
def test_a_store_that_does_not_take_us_for_a_peer(nodes: Nodes, settings: dict[str, object], code: str) -> None:
    first, second = nodes.start(A, **settings), nodes.start(B)
    mapping = first.save(DATA)
    found, _ = second.ask(f"tcp://{A}:{first.server.tcp_port}")
    assert is_lost(found)
    assert first.ended() == {code: 1}
    mapping.close()


def test_a_store_that_is_gone_is_a_miss_at_once_and_comes_back(nodes: Nodes) -> None:
    first, second = nodes.start(A), nodes.start(B)
    mapping = first.save(DATA)
    peer = second.bench.client()
    assert second.ask(first.address, peer)[0].end_tokens == 256
    port = first.server.tcp_port
    first.running.stop()
    mapping.close()
    eventually(lambda: not second.running.call(lambda: second.server.hub.dialer.links))  # type: ignore[union-attr]
    again = nodes.start(A, tcp=f"{A}:{port}")
    assert again.address == first.address
    again.save(DATA).close()
    third = nodes.start("127.0.0.3")  # which has nothing in its arena yet
    assert third.ask(again.address)[0].end_tokens == 256


def test_a_store_in_the_middle_of_a_pull_that_stops_is_lost(nodes: Nodes) -> None:
    first, second = nodes.start(A), nodes.start(B)
    mapping = first.save(DATA)
    assert second.ask(first.address)[0].end_tokens == 256
    first.running.stop()
    mapping.close()
    other = second.bench.client()
    found = other.ask(Lookup(9, CHAIN, [256], 256, hold=True, source=first.address))
    assert isinstance(found, Found)
    assert found.end_tokens == 256  # it is here


# ---- what a peer may do


class RawPeer(Peer):
    """A peer's control connection."""

    def hello_as_peer(self, token: str = TOKEN, **fields: object) -> object:
        greeting = self.greet()
        nonce = os.urandom(NONCE_BYTES)
        values = {"proof": proof(token, greeting.nonce), "peer": True, "nonce": nonce, **fields}
        reply = self.ask(Hello(1, PROTOCOL_VERSION, "raw", **values))  # type: ignore[arg-type]
        if isinstance(reply, Welcome) and values["peer"]:
            assert reply.proof == store_proof(TOKEN, nonce)
        return reply


@pytest.fixture
def raw(nodes: Nodes) -> Iterator[Callable[[Node], RawPeer]]:
    with contextlib.ExitStack() as stack:

        def connect(node: Node, source: str = B) -> RawPeer:
            connection = socket.create_connection((A, node.server.tcp_port), source_address=(source, 0))
            peer = RawPeer(connection)
            stack.callback(peer.close)
            return peer

        yield connect


def test_a_peer_is_told_the_address_and_the_port_for_bytes(nodes: Nodes, raw: Callable[[Node], RawPeer]) -> None:
    first = nodes.start(A)
    peer = raw(first)
    welcome = peer.hello_as_peer()
    assert isinstance(welcome, Welcome)
    assert welcome.bulk_port == first.server.bulk_port
    assert peer.greeting is not None
    assert peer.greeting.address == first.address == f"tcp://{A}:{first.server.tcp_port}"


def test_a_client_that_is_no_peer_gets_neither(nodes: Nodes, raw: Callable[[Node], RawPeer]) -> None:
    first = nodes.start(A)
    welcome = raw(first).hello_as_peer(peer=False)
    assert welcome == Welcome(1, welcome.session)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"nonce": b""}, "KV-503"), ({"nonce": b"short"}, "KV-503"), ({"proof": b""}, "KV-205")],
)
def test_a_peer_s_hello_must_be_whole(
    nodes: Nodes, raw: Callable[[Node], RawPeer], fields: dict[str, object], code: str
) -> None:
    first = nodes.start(A)
    refused = raw(first).hello_as_peer(**fields)
    assert isinstance(refused, Refused)
    assert refused.code == code


def test_a_peer_comes_from_an_address_on_the_list(nodes: Nodes, raw: Callable[..., RawPeer]) -> None:
    first = nodes.start(A)
    refused = raw(first, source="127.0.0.9").hello_as_peer()
    assert isinstance(refused, Refused)
    assert (refused.code, "127.0.0.9" in refused.message) == ("KV-210", True)
    puller = Puller(first.server.bulk_port)  # from 127.0.0.1
    refused = puller.receive()
    assert isinstance(refused, Refused)
    assert refused.code == "KV-210"
    puller.socket.close()


def test_on_the_unix_socket_nobody_is_a_peer(nodes: Nodes) -> None:
    first = nodes.start(A)
    peer = first.bench.connect()
    peer.greet()
    refused = peer.ask(Hello(1, PROTOCOL_VERSION, "x", peer=True, nonce=bytes(NONCE_BYTES)))
    assert isinstance(refused, Refused)
    assert refused.code == "KV-210"


def test_bytes_are_not_pulled_on_a_control_connection(nodes: Nodes, raw: Callable[[Node], RawPeer]) -> None:
    first = nodes.start(A)
    peer = raw(first)
    peer.hello_as_peer()
    refused = peer.ask(Pull(2, 1, 0, 0, 0))
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code, peer.is_closed()) == (0, "KV-503", True)


# ---- starting and stopping


def refusal(config: StoreConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Running(StoreServer(config))
    assert caught.value.remedy
    return caught.value


def test_a_bulk_port_in_use_is_refused_and_nothing_is_left(bench: Bench) -> None:
    with socket.create_server((A, 0)) as taken:
        config = bench.config(tcp=f"{A}:0", token=TOKEN, peers=(B,), bulk=f"{A}:{taken.getsockname()[1]}")
        error = refusal(config)
        assert (error.code, "bulk" in error.message) == ("KV-104", True)
        assert not Path(bench.path).exists()
    bench.start(StoreServer(config))


@pytest.mark.parametrize(
    "settings",
    [
        {"peers": ("10.0.0.0/24",)},
        {"tcp": "127.0.0.1:0", "peers": ("10.0.0.0/24",)},
        {"tcp": "0.0.0.0:0", "token": TOKEN, "peers": ("10.0.0.0/24",)},
        {"tcp": "127.0.0.1:0", "token": TOKEN, "bulk": "127.0.0.1:0"},
        {"tcp": "127.0.0.1:0", "token": TOKEN, "peers": ("10.0.0.0/24",), "transport": "nixl"},
        {"tcp": "127.0.0.1:0", "token": TOKEN, "peers": ("10.0.0.0/24",), "bulk": "192.0.2.1:0"},
    ],
    ids=["no tcp", "no token", "wildcard", "no peers", "transport", "not of this machine"],
)
def test_what_cannot_work_is_refused_at_start(bench: Bench, settings: dict[str, object]) -> None:
    refusal(bench.config(**settings))
    assert not Path(bench.path).exists()


def test_a_certificate_that_peers_would_not_accept_is_refused_at_start(
    bench: Bench, tls_files: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = tls_files
    network = {"token": TOKEN, "peers": (B,), "tls_cert": cert, "tls_key": key, "peers_ca": cert}
    error = refusal(bench.config(tcp="127.0.0.4:0", **network))
    assert ("127.0.0.4" in error.message, "store.advertise" in error.remedy) == (True, True)
    junk = tmp_path / "junk.pem"
    junk.write_text("junk", encoding="utf-8")
    assert "peers_ca" in refusal(bench.config(tcp=f"{A}:0", **network | {"peers_ca": str(junk)})).remedy
    assert "tls_key" in refusal(bench.config(tcp=f"{A}:0", **network | {"tls_key": cert})).remedy
    bench.start(tcp=f"{A}:0", **network)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_stores_that_have_stopped_have_let_go_of_everything(
    nodes: Nodes, security: dict[str, object], loop_factory: LoopFactory
) -> None:
    before, threads = open_descriptors(), threading.active_count()
    first = nodes.start(A, loop_factory=loop_factory, **security)
    second = nodes.start(B, loop_factory=loop_factory, **security)
    mapping = first.save(DATA)
    assert second.ask(first.address)[0].end_tokens == 256
    mapping.close()
    nodes.close()
    eventually(lambda: open_descriptors() == before)
    eventually(lambda: threading.active_count() == threads)


def test_a_store_with_peers_stops_while_they_hold_connections(nodes: Nodes, raw: Callable[[Node], RawPeer]) -> None:
    first = nodes.start(A)
    peer = raw(first)
    peer.hello_as_peer()
    puller = PullerFrom(first.server.bulk_port)
    assert isinstance(puller.hello(), Welcome)
    first.running.stop()
    assert peer.is_closed()
    assert puller.is_closed()
    puller.socket.close()


class PullerFrom(Puller):
    """A puller at B's address."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.socket.close()
        self.socket = socket.create_connection((A, port), source_address=(B, 0))
        self.socket.settimeout(HANG_S)


def test_kvtally_stat_knows_of_peers(nodes: Nodes) -> None:
    first, second = nodes.start(A), nodes.start(B)
    first.save(DATA).close()
    second.ask(first.address)
    tiers = second.running.stats("tiers")
    assert [(tier["name"], tier["reads"]) for tier in tiers] == [("peers", 1)]  # type: ignore[index, union-attr, attr-defined]
    names = [client["client"] for client in first.running.stats("clients")]  # type: ignore[index, union-attr, attr-defined]
    assert f"store at {second.address}" in names
