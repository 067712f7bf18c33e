"""A client's link to stores that keep silent, lie, refuse, die and come back, over every kind of socket."""

from __future__ import annotations

import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtally.client import Miss
from kvtally.client import link as link_module
from kvtally.client import store_client as client_module
from kvtally.config import load
from kvtally.core.keys import CHAIN_BYTES
from kvtally.endpoint import endpoint
from kvtally.errors import ConfigError
from kvtally.processes import free_ports
from kvtally.testing.copying import CopyingClient
from kvtally.vllm.autostart import ensure_store
from kvtally.wire.auth import proof
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Found,
    Greeting,
    Hello,
    Lookup,
    MissReason,
    Ping,
    PutBegin,
    PutEnd,
    PutEnded,
    PutSlot,
    PutSlots,
    PutStatus,
    Refused,
    Release,
    Staged,
    Stats,
    StatsGet,
    Welcome,
)
from tests.unit.fake_store import (
    ARENA_BYTES,
    QUESTION,
    TOKEN,
    Action,
    FakeStore,
    World,
    held,
    missed,
    objects,
    puts_of,
    until,
)
from tests.waiting import HANG_S, HOUR_S, Clock


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


# ---- silence


def test_silence_costs_the_deadline_and_no_more(world: World) -> None:
    store = world.store()
    client = world.client()
    client.connect()
    store.on[Ping] = lambda _: []
    begun, begun_processor = time.monotonic(), time.thread_time()
    missed(client.ping(timeout_s=0.1).wait(), MissReason.DEADLINE)
    took_s, took_processor_s = time.monotonic() - begun, time.thread_time() - begun_processor
    assert 0.1 <= took_s < HANG_S  # the deadline of calls that name none
    assert took_processor_s < took_s / 4  # awake only at first
    assert isinstance(client.stats().wait(), Stats)  # the connection is as good as before
    assert client.misses == {MissReason.DEADLINE: 1}


@pytest.mark.parametrize("greets", [False, True])
def test_a_handshake_that_hangs_costs_the_deadline(world: World, greets: bool) -> None:
    store = world.store()
    store.greets = greets
    store.on[Hello] = lambda _: []
    client = world.client()
    begun = time.monotonic()
    call = client.ping(timeout_s=0.1)
    assert call.result is None  # nothing waited for anything
    missed(call.wait(), MissReason.DEADLINE)
    missed(client.connect(0.1), MissReason.STORE_UNREACHABLE)
    assert 0.2 <= time.monotonic() - begun < HANG_S


def test_a_handshake_that_hangs_is_given_up_and_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_NS", 50_000_000)
    store = world.store()
    store.greets = False
    client = world.client()
    assert "handshake" in missed(client.ping().wait(), MissReason.STORE_UNREACHABLE)
    monkeypatch.setattr(link_module, "HANDSHAKE_NS", int(HANG_S * 1e9))
    store.greets = True
    assert isinstance(client.connect(), link_module.Session)


def test_a_store_stopped_in_the_middle_of_a_message(world: World) -> None:
    """What SIGSTOP looks like from here: half a reply, then nothing."""
    store = world.store()
    client = world.client()
    client.connect()
    peer = store.peers.get(timeout=HANG_S)

    def stop_half_way(request: Ping) -> list[Action]:
        peer.sendall(encode(Stats(request.id, {"a": "b" * 999}))[:500])
        return []

    store.on[Ping] = stop_half_way
    begun = time.monotonic()
    missed(client.ping(timeout_s=0.1).wait(), MissReason.DEADLINE)
    missed(client.ping(timeout_s=0.1).wait(), MissReason.DEADLINE)
    assert 0.2 <= time.monotonic() - begun < HANG_S


def _silenced(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStore, CopyingClient]:
    """A store that left a lookup without an answer for longer than it may."""
    monkeypatch.setattr(link_module, "SILENCE_NS", 50_000_000)
    monkeypatch.setattr(link_module, "SILENT_NS", int(HOUR_S * 1e9))
    store = world.store()
    client = world.client()
    client.connect()
    store.on[Lookup] = store.on[PutBegin] = lambda _: []
    missed(client.lookup(QUESTION, timeout_s=0.1).wait(), MissReason.DEADLINE)
    return store, client


def test_a_silent_store_is_asked_for_nothing_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store, client = _silenced(world, monkeypatch)
    store.take(Lookup)
    for _ in range(5):
        missed(client.hold(QUESTION, timeout_s=HOUR_S).wait(), MissReason.DEADLINE)
        missed(client.put_begin([objects(1)[0][0]], timeout_s=HOUR_S).wait(), MissReason.DEADLINE)
    assert not store.saw(Lookup)
    assert not store.saw(PutBegin)
    assert client.misses == {MissReason.DEADLINE: 11}


def test_it_is_still_told_what_is_over_and_used_again_after_a_word(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client = _silenced(world, monkeypatch)
    assert isinstance(client.ping().wait(), Done)  # it says something
    call = client.lookup(QUESTION)
    store.take(Lookup)
    until(client, lambda: store.saw(Lookup))
    call.cancel()


def test_somebody_tries_again_after_a_while(world: World, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    store, client = _silenced(world, monkeypatch)
    store.take(Lookup)
    clock.forward(HOUR_S)
    missed(client.lookup(QUESTION, timeout_s=0.01).wait(), MissReason.DEADLINE)
    until(client, lambda: store.saw(Lookup))


@pytest.mark.parametrize("given", [{"wait_ms": int(HOUR_S * 1e3)}, {"source": "tcp://10.0.0.7:7400"}])
def test_a_store_that_may_wait_for_others_is_not_silent_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(client_module, "ELSEWHERE_NS", int(HOUR_S * 1e9))
    monkeypatch.setattr(link_module, "SILENCE_NS", 0)
    store = world.store()
    client = world.client()
    client.connect()
    store.on[Lookup] = lambda _: []
    missed(client.hold(structs.replace(QUESTION, **given), timeout_s=0.01).wait(), MissReason.DEADLINE)
    del store.on[Lookup]
    assert isinstance(client.lookup(QUESTION).wait(), Found)
    store.on[Lookup] = lambda _: []
    missed(client.hold(QUESTION, timeout_s=0.01).wait(), MissReason.DEADLINE)  # this one had no reason to wait
    missed(client.lookup(QUESTION, timeout_s=HOUR_S).wait(), MissReason.DEADLINE)


def test_what_comes_too_late_is_given_back(world: World) -> None:
    store = world.store()
    client = world.client()
    client.put(objects(1))
    store.on[Lookup] = store.on[PutBegin] = lambda _: []
    expired = client.hold(QUESTION, timeout_s=0.0)
    missed(expired.wait(), MissReason.DEADLINE)
    cancelled = client.put_begin([objects(2)[1][0]])
    cancelled.cancel()
    missed(cancelled.result, MissReason.DEADLINE)
    peer = store.peers.get(timeout=HANG_S)
    peer.sendall(encode(Found(expired.id, 256, 77)))
    peer.sendall(encode(PutSlots(cancelled.id, [PutSlot(PutStatus.PRESENT), PutSlot(PutStatus.WRITE, 88, [0, 1])])))
    until(client, lambda: store.saw(Release) and store.requests.queue[-1].id > cancelled.id + 1)
    release, aborted = store.take(Release), store.take(PutEnd)
    assert (release.leases, aborted.abort, aborted.commit) == ([77], [88], [])


def test_a_call_that_expired_before_the_handshake_is_never_sent(world: World) -> None:
    store = world.store()
    store.on[Hello] = lambda _: []
    client = world.client()
    missed(client.ping(timeout_s=0.05).wait(), MissReason.DEADLINE)
    cancelled = client.ping()
    cancelled.cancel()
    stats = client.stats()
    hello = store.take(Hello)
    store.peers.get(timeout=HANG_S).sendall(encode(Welcome(hello.id, 1)))
    assert isinstance(stats.wait(), Stats)
    assert not store.saw(Ping)


def test_late_answers_to_other_calls_are_dropped(world: World) -> None:
    store = world.store()
    client = world.client()
    client.connect()
    peer = store.peers.get(timeout=HANG_S)
    peer.sendall(encode(Done(999)) + encode(Staged(0, 55, 256)) + encode(Refused(999, "KV-302", "late", "none")))
    assert isinstance(client.ping().wait(), Done)
    assert client.generation == 1


# ---- stores that die, lie or refuse


def test_without_a_store_calls_fail_at_once(world: World) -> None:
    client = world.client()
    for _ in range(100):
        assert "No such file" in missed(client.ping().result, MissReason.STORE_UNREACHABLE)
    assert client.misses == {MissReason.STORE_UNREACHABLE: 100}
    assert client.refusal is None


def test_a_store_that_comes_up_later_is_found(world: World) -> None:
    client = world.client()
    missed(client.connect(0.05), MissReason.STORE_UNREACHABLE)
    world.store()
    assert isinstance(client.connect(), link_module.Session)
    assert isinstance(client.ping().wait(), Done)


class Counting(random.Random):
    """Counts the pauses, and makes each as long as it may be."""

    attempts = 0

    def uniform(self, a: float, b: float) -> float:
        self.attempts += 1
        return b


def test_attempts_become_rarer(world: World, clock: Clock) -> None:
    jitter = Counting()
    client = world.client(jitter=jitter)
    clock.stop()
    attempted_ms = []
    for now_ms in range(2_000):
        attempts = jitter.attempts
        client.poll()
        attempted_ms += [now_ms] * (jitter.attempts - attempts)
        clock.forward(0.001)
    assert attempted_ms == [0, 50, 150, 350, 750, 1250, 1750]


def test_after_a_success_attempts_are_frequent_again(world: World, clock: Clock) -> None:
    client = world.client(jitter=Counting())
    clock.stop()
    for _ in range(10):
        client.poll()
        clock.forward(link_module.LONGEST_PAUSE_S)
    store = world.store()
    until(client, lambda: client.session is not None)
    store.peers.get(timeout=HANG_S).shutdown(socket.SHUT_RDWR)
    until(client, lambda: client.session is None)
    client.poll()
    assert client._link._connection is None
    clock.forward(link_module.FIRST_PAUSE_S)
    until(client, lambda: client.session is not None)


def test_descriptors_do_not_leak(world: World) -> None:
    store = world.store()
    store.on[Hello] = lambda request: [Refused(request.id, "KV-503", "no", "None.")]
    opened = len(os.listdir("/proc/self/fd"))
    for protocol, count in ((PROTOCOL_VERSION, 2), (PROTOCOL_VERSION + 1, 2), (PROTOCOL_VERSION, 1)):
        store.protocol, store.descriptors_count = protocol, count
        with CopyingClient(world.path) as client:
            assert isinstance(client.ping().wait(), Miss)
        store.peers.get(timeout=HANG_S)
        os.close(store.liveness.get(timeout=HANG_S))
    # Of the three connections only the store's own ends may still be open.
    assert len(os.listdir("/proc/self/fd")) <= opened + 3


@pytest.mark.parametrize(
    "answer",
    [
        encode(Done(2))[:-1],  # killed in the middle of a reply
        b"",
        b"\xff\xff\xff\xff",  # a frame of 4 GiB
        b"\x05\x00\x00\x00hello",
        random.Random(1).randbytes(5_000),
        encode(Found(2, 256)),  # a reply, but not to this
        encode(Welcome(2, 1)),
        encode(Greeting(PROTOCOL_VERSION, "0", "x", ARENA_BYTES, True, Limits())),
        encode(Refused(0, "KV-503", "you are malformed", "Mend yourself.")),
    ],
)
def test_a_broken_reply_is_a_miss_and_a_new_connection(world: World, answer: bytes) -> None:
    store = world.store()
    client, bystander = world.client(), world.client()
    bystander.connect()
    client.connect()
    session, other = client.session, client.stats
    store.on[Ping] = lambda _: [answer]
    waiting = [client.ping(), other()]
    for call in waiting:
        missed(call.wait(), MissReason.STORE_UNREACHABLE)
    del store.on[Ping]
    assert client.connect() is not session
    assert client.generation == 2
    assert isinstance(client.ping().wait(), Done)
    assert bystander.generation == 1
    assert isinstance(bystander.ping().wait(), Done)


@pytest.mark.parametrize("greeting", [b"\x00\x00\x00\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n", encode(Done(1))])
def test_who_is_no_store_is_not_believed(world: World, greeting: bytes) -> None:
    store = world.store()
    store.greets = False
    client = world.client()
    call = client.ping()
    store.peers.get(timeout=HANG_S).sendall(greeting)
    missed(call.wait(), MissReason.STORE_UNREACHABLE)


@pytest.mark.parametrize("count", [0, 1])
def test_a_greeting_without_its_descriptors_is_not_believed(world: World, count: int) -> None:
    store = world.store()
    store.descriptors_count = count
    assert "descriptors" in missed(world.client().ping().wait(), MissReason.STORE_UNREACHABLE)


def test_an_arena_smaller_than_announced_is_not_mapped(world: World) -> None:
    store = world.store()
    os.ftruncate(store.arena, 4096)
    assert "4096" in missed(world.client().ping().wait(), MissReason.STORE_UNREACHABLE)


def test_an_engine_starts_at_once_beside_a_store_of_another_version(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = world.store()
    store.protocol = PROTOCOL_VERSION + 1
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("another store was started"))
    settings = load(extra={"store": str(world.path)}, environ={}).connector()
    assert ensure_store(settings) == settings.store
    assert "KV-201" in caplog.text
    assert "Install the same version" in caplog.text


def test_of_several_addresses_the_one_that_lives_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FIRST_PAUSE_S", 0.001)
    store = world.store(address=("127.0.0.1", 0))
    [dead] = free_ports(1)  # nobody listens there
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in (dead, store.port)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not isinstance(world.client(f"tcp://two.example:{store.port}").connect(HANG_S), Miss)


def test_another_protocol_is_refused_with_a_remedy(world: World, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(link_module, "FIRST_PAUSE_S", 0.001)
    store = world.store()
    store.protocol = PROTOCOL_VERSION + 1
    client = world.client()
    assert "KV-201" in missed(client.ping().wait(), MissReason.REFUSED)
    assert client.refusal is not None
    assert client.refusal.code == "KV-201"
    missed(client.ping().wait(), MissReason.REFUSED)
    missed(client.connect(), MissReason.REFUSED)
    clock.stop()
    for _ in range(40):  # in all less than the shortest pause
        clock.forward(link_module.REFUSED_PAUSE_S / 100)
        client.poll()
    assert store.peers.qsize() <= 1  # a refusal is not hammered at


def test_a_refused_hello_is_kept_and_later_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REFUSED_PAUSE_S", 0.05)
    store = world.store()
    store.on[Hello] = lambda request: [Refused(request.id, "KV-202", "too many groups", "Use fewer.")]
    client = world.client()
    assert missed(client.ping().wait(), MissReason.REFUSED) == "too many groups [KV-202]. Use fewer."
    del store.on[Hello]
    until(client, lambda: client.session is not None)
    assert client.refusal is None
    assert isinstance(client.ping().wait(), Done)


@pytest.mark.parametrize(
    ("code", "reason"), [("KV-302", MissReason.LIMIT), ("KV-206", MissReason.REFUSED), ("KV-503", MissReason.REFUSED)]
)
def test_a_refused_request_is_a_miss_and_nothing_more(world: World, code: str, reason: MissReason) -> None:
    store = world.store()
    client = world.client()
    store.on[Lookup] = lambda request: [Refused(request.id, code, "no", "None.")]
    assert missed(client.hold(QUESTION).wait(), reason) == f"no [{code}]. None."
    assert isinstance(client.ping().wait(), Done)
    assert (client.generation, client.refusal) == (1, None)


# ---- bounds


def test_calls_in_flight_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_CALLS", 10)
    store = world.store()
    store.on[Ping] = lambda _: []
    client = world.client()
    calls = [client.ping() for _ in range(12)]
    assert [call.result is None for call in calls] == [True] * 10 + [False] * 2
    missed(calls[10].result, MissReason.LIMIT)
    calls[0].cancel()
    assert client.ping().result is None


def test_what_is_given_back_is_said_however_many_calls_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a miss like any other: the store kept leases until they expired, and slots for as long as we lived."""
    store = world.store()
    client = world.client()
    (put,) = puts_of(client)
    client.put(objects())
    lease = held(client)
    store.on[Lookup] = lambda _: []
    monkeypatch.setattr(link_module, "MOST_CALLS", 10)
    calls = [client.lookup(QUESTION) for _ in range(11)]
    missed(calls[10].result, MissReason.LIMIT)
    assert isinstance(client.release([lease]).wait(), Done)
    assert isinstance(client.put_end(abort=[put]).wait(), PutEnded)


def test_unsent_bytes_are_bounded_and_submitting_never_blocks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_UNSENT_BYTES", 4 << 20)
    store = world.store()
    client = world.client()
    client.connect()
    peer = store.peers.get(timeout=HANG_S)
    blocked = threading.Event()

    def answer_later(_: Ping) -> list[Action]:
        blocked.wait(HANG_S)
        return []

    store.on[Ping] = answer_later
    client.ping()
    store.take(Ping)  # from now on nobody reads
    large = Lookup(0, bytes(CHAIN_BYTES * 30_000), list(range(1, 30_001)), 30_000)
    calls = [client.lookup(large) for _ in range(20)]  # would hang if it waited for somebody who reads
    missed(calls[-1].result, MissReason.LIMIT)
    assert [call.result for call in calls[:1]] == [None]
    blocked.set()
    until(client, lambda: all(call.result is not None for call in calls))
    assert isinstance(calls[0].result, Found)  # and what was taken was sent, in whole
    assert peer.fileno() >= 0


def test_messages_over_the_stores_limit_are_not_sent(world: World) -> None:
    store = world.store()
    store.limits = Limits(frame_bytes=1_000)
    client = world.client()
    early = client.lookup(Lookup(0, bytes(CHAIN_BYTES * 50), list(range(1, 51)), 50))  # before the limit is known
    missed(early.wait(), MissReason.LIMIT)
    missed(client.lookup(Lookup(0, bytes(CHAIN_BYTES * 50), list(range(1, 51)), 50)).wait(), MissReason.LIMIT)
    assert isinstance(client.ping().wait(), Done)
    assert not store.saw(Lookup)
    assert client.generation == 1


def test_a_reply_over_the_stores_own_limit_ends_the_connection(world: World) -> None:
    store = world.store()
    store.limits = Limits(frame_bytes=1_000)
    client = world.client()
    store.on[StatsGet] = lambda request: [Stats(request.id, {"x": "y" * 2_000})]
    assert "over the limit" in missed(client.stats().wait(), MissReason.STORE_UNREACHABLE)


def test_a_large_reply_arrives_whole(world: World) -> None:
    store = world.store()
    client = world.client()
    tree: dict[str, object] = {str(n): "x" * 1_000 for n in range(2_500)}
    store.on[StatsGet] = lambda request: [Stats(request.id, tree)]
    stats = client.stats().wait()
    assert isinstance(stats, Stats)
    assert stats.stats == tree


# ---- TCP


def test_tcp_proves_the_token_and_maps_nothing(world: World) -> None:
    store = world.store(address=("127.0.0.1", 0))
    store.nonce = b"n" * 32
    client = world.client(f"tcp://localhost:{store.port}", token=TOKEN)
    assert isinstance(client.ping().wait(), Done)
    hello = store.take(Hello)
    assert hello.proof == proof(TOKEN, b"n" * 32)
    assert client.arena is None
    assert TOKEN not in repr(endpoint("tcp://127.0.0.1:1", token=TOKEN))


def test_tcp_without_a_token_is_refused_before_anything_is_said(world: World) -> None:
    store = world.store(address=("127.0.0.1", 0))
    store.nonce = b"n" * 32
    client = world.client(f"tcp://127.0.0.1:{store.port}")
    assert "KV-205" in missed(client.ping().wait(), MissReason.REFUSED)
    assert not store.saw(Hello)


def test_tcp_port_that_nobody_listens_on(world: World) -> None:
    store = world.store(address=("127.0.0.1", 0))
    store.stop()
    missed(world.client(f"tcp://127.0.0.1:{store.port}").ping().wait(), MissReason.STORE_UNREACHABLE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-out", cert, "-keyout", key]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=60)
    return cert, key


def test_tls(world: World, certificate: tuple[str, str]) -> None:
    store = world.store(address=("127.0.0.1", 0))
    store.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    store.tls.load_cert_chain(*certificate)
    client = world.client(f"tcp://localhost:{store.port}", ca_file=certificate[0])
    assert isinstance(client.ping().wait(), Done)
    tree: dict[str, object] = {str(n): "x" * 1_000 for n in range(1_000)}
    store.on[StatsGet] = lambda request: [Stats(request.id, tree)]
    stats = client.stats().wait()
    assert isinstance(stats, Stats)
    assert stats.stats == tree
    large = Lookup(0, bytes(CHAIN_BYTES * 30_000), list(range(1, 30_001)), 30_000)
    assert isinstance(client.lookup(large).wait(), Found)


def test_tls_to_a_stranger_is_unreachable(world: World, certificate: tuple[str, str]) -> None:
    store = world.store(address=("127.0.0.1", 0))
    store.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    store.tls.load_cert_chain(*certificate)
    client = world.client(f"tcp://127.0.0.1:{store.port}", ca_file=certificate[0])  # the certificate says localhost
    assert "certificate" in missed(client.ping().wait(), MissReason.STORE_UNREACHABLE)


# ---- addresses


@pytest.mark.parametrize(
    "address",
    ["", "unix:", "http://localhost:1", "tcp://", "tcp://:7", "tcp://host", "tcp://127.0.0.1:66000", "/" + "x" * 108],
)
def test_addresses_that_cannot_work(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CopyingClient(address)
    assert caught.value.code == "KV-102"


def test_an_authority_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CopyingClient("tcp://127.0.0.1:7", ca_file=str(tmp_path / "ca.pem"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_store_of_another_user_is_not_believed(world: World, tmp_path: Path) -> None:
    impostor = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(65534)
listener.listen()
print("ready", flush=True)
listener.accept()[0].recv(1)
"""
    command = [sys.executable, "-c", impostor, world.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            client = world.client()
            assert "user 65534" in missed(client.ping().wait(), MissReason.REFUSED)
            assert client.refusal is not None
            assert client.refusal.code == "KV-205"
        finally:
            process.kill()
