"""The daemon's edge: who gets in, what ends a connection, what passes through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtally import __version__
from kvtally.store import connections
from kvtally.store.server import StoreServer, new_event_loop
from kvtally.wire.auth import proof
from kvtally.wire.frames import encode
from kvtally.wire.limits import MIB, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Found,
    Greeting,
    Hello,
    Lookup,
    Ping,
    PutBegin,
    PutSlots,
    Refused,
    Request,
    SlotsGet,
    Stats,
    StatsGet,
    Welcome,
)
from tests.unit.shell import CHAIN, LOOKUP, OBJECT_BYTES, PUT, TOKEN, Bench, LoopFactory, Running, pieces_of, put
from tests.waiting import HANG_S, HOUR_S, Clock, eventually

ROOT = Path(__file__).parents[2]
LOOPS = [new_event_loop, asyncio.new_event_loop]


# ---- what passes through


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_bytes_written_through_the_mapping_are_the_arenas(bench: Bench, loop_factory: LoopFactory) -> None:
    running = bench.start(loop_factory=loop_factory)
    peer = bench.client()
    assert peer.greeting is not None
    assert (peer.greeting.version, peer.greeting.arena_bytes, len(peer.fds)) == (__version__, 4 * MIB, 2)
    mapping, data = peer.map(), os.urandom(OBJECT_BYTES)
    put(peer, mapping, data)

    reader = bench.client()
    found = reader.ask(LOOKUP)
    assert isinstance(found, Found)
    assert (found.end_tokens, found.staging) == (256, 0)
    slots = reader.ask(SlotsGet(8, found.lease))
    pieces = pieces_of(slots.slots[0].pieces)  # type: ignore[union-attr]
    assert b"".join(bytes(view) for view in running.server.arena.views(pieces)) == data
    mapping.close()


def test_pipelined_requests_are_all_answered_in_order(bench: Bench) -> None:
    bench.start()
    peer = bench.client()
    peer.socket.sendall(b"".join(encode(Ping(number)) for number in range(1000)))
    assert [peer.receive().id for _ in range(1000)] == list(range(1000))  # type: ignore[union-attr]


def test_a_frame_may_come_byte_by_byte(bench: Bench) -> None:
    bench.start()
    peer = bench.client()
    for byte in encode(Ping(5)):
        peer.socket.sendall(bytes([byte]))
    assert peer.receive() == Done(5)


def test_a_waiting_lookup_is_answered_at_its_deadline_without_traffic(bench: Bench) -> None:
    bench.start()
    writer, reader = bench.client(), bench.client()
    assert isinstance(writer.ask(PutBegin(2, [PUT])), PutSlots)
    begun = time.monotonic()
    found = reader.ask(Lookup(3, CHAIN, [256], 256, wait_ms=100))
    assert isinstance(found, Found)
    assert (found.end_tokens, found.reason) == (0, "pending")
    assert time.monotonic() - begun > 0.09


def test_stats_over_the_wire_show_the_shell_too(bench: Bench) -> None:
    running = bench.start()
    eventually(lambda: running.server.arena.populated_bytes == 4 * MIB)
    reply = bench.client(namespace=None).ask(StatsGet(4))
    assert isinstance(reply, Stats)
    assert reply.stats["server"]["populated_bytes"] == 4 * MIB  # type: ignore[index]
    assert len(reply.stats["clients"]) == 1  # type: ignore[arg-type]


# ---- who gets in


def test_another_user_is_refused_before_it_gets_anything(bench: Bench) -> None:
    running = bench.start(StoreServer(bench.config(), allowed_uids=frozenset({os.geteuid() + 1})))
    peer = bench.connect()
    refused = peer.receive()
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code, peer.fds) == (0, "KV-205", [])
    assert peer.is_closed()
    assert running.stats("server", "ended") == {"KV-205": 1}


def test_the_socket_is_its_owners_alone(bench: Bench) -> None:
    bench.start()
    path = Path(bench.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_one_client_too_many_is_refused(bench: Bench) -> None:
    running = bench.start(StoreServer(bench.config(), limits=Limits(clients=2)))
    first, _ = bench.client(), bench.client()
    third = bench.connect()
    third.greet()
    refused = third.hello()
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (0, "KV-301")
    assert third.is_closed()
    first.close()
    eventually(lambda: len(running.stats("clients")) == 1)  # type: ignore[arg-type]
    bench.client()


def test_strangers_do_not_crowd_out_clients(bench: Bench) -> None:
    running = bench.start()
    strangers = [bench.connect() for _ in range(64)]
    for stranger in strangers:
        stranger.greet()
    bench.client()  # the one that has not said hello for longest makes way
    refused = strangers[0].receive()
    assert isinstance(refused, Refused)
    assert (refused.code, strangers[0].is_closed()) == ("KV-301", True)
    assert len(running.strangers()) == 63
    assert isinstance(strangers[1].hello(), Welcome)


def test_a_client_that_leaks_old_connections_is_stopped(bench: Bench) -> None:
    """Pipes outlive sockets, so they have a bound of their own."""
    running = bench.start(StoreServer(bench.config(), limits=Limits(clients=1)))
    for _ in range(2 + 64):
        peer = bench.connect()
        peer.greet()
        peer.socket.close()
        eventually(lambda: not running.strangers())
    refused = bench.connect().receive()
    assert isinstance(refused, Refused)
    assert refused.code == "KV-301"
    peer.close()
    eventually(lambda: isinstance(bench.connect().receive(), Greeting))


def test_without_a_hello_the_connection_ends(bench: Bench) -> None:
    bench.start(StoreServer(bench.config(), hello_timeout_s=0.1))
    peer = bench.connect()
    peer.greet()
    refused = peer.receive()
    assert isinstance(refused, Refused)
    assert refused.code == "KV-501"
    assert peer.is_closed()


def test_a_refused_hello_does_not_stop_the_clock(bench: Bench, clock: Clock) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop)
    peer = bench.connect()
    peer.greet()
    refused = peer.ask(Hello(1, PROTOCOL_VERSION + 1, "from the future"))
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (1, "KV-201")
    an_hour_passes(running, clock)
    assert peer.is_closed()


def test_a_welcomed_client_may_be_silent(bench: Bench, clock: Clock) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop)
    peer, stranger = bench.client(), bench.connect()
    stranger.greet()
    an_hour_passes(running, clock)
    assert stranger.is_closed()  # time did pass
    assert peer.ask(Ping(2)) == Done(2)


def an_hour_passes(running: Running, clock: Clock) -> None:
    eventually(lambda: all(stranger._deadline is not None for stranger in running.strangers()))
    clock.forward(HOUR_S)
    running.call(lambda: None)  # it looks at its timers


# ---- malformed input

BAD_FRAMES = [
    b"\xff\xff\xff\xff",  # announces 4 GiB
    b"\x01\x00\x00\x00\xc1",  # a byte msgpack never uses
    b"\x00\x00\x00\x00",  # an empty message
    b"\x0b\x00\x00\x00\x92\xa7unknown\x00\x00",
    encode(Done(1)),  # a reply is no request
    (Limits().frame_bytes + 1).to_bytes(4, "little") + b"x" * 1000,
]


@pytest.mark.parametrize("frame", BAD_FRAMES)
@pytest.mark.parametrize("greeted", [True, False])
def test_a_malformed_frame_ends_that_connection_and_no_other(bench: Bench, frame: bytes, greeted: bool) -> None:
    running = bench.start()
    bystander = bench.client()
    peer = bench.client() if greeted else bench.connect()
    if not greeted:
        peer.greet()
    peer.socket.sendall(frame)
    refused = peer.receive()
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (0, "KV-503")
    assert peer.is_closed()
    assert bystander.ask(Ping(2)) == Done(2)
    assert running.stats("server", "ended") == {"KV-503": 1}


def test_the_first_message_must_be_hello(bench: Bench) -> None:
    bench.start()
    peer = bench.connect()
    peer.greet()
    refused = peer.ask(Ping(1))
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (0, "KV-503")
    assert peer.is_closed()


@pytest.mark.parametrize("limit", ["bytes", "time"])
def test_a_client_that_does_not_read_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    unsent_bytes = 16 * 1024 if limit == "bytes" else 1 << 30
    monkeypatch.setattr(connections, "UNREAD_TIMEOUT_S", HOUR_S if limit == "bytes" else 0.1)
    running = bench.start(StoreServer(bench.config(), limits=Limits(unsent_bytes_per_client=unsent_bytes)))
    bystander, peer = bench.client(), bench.client()
    request = encode(StatsGet(1)) * 100
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(200):
            peer.socket.sendall(request)
    eventually(lambda: running.server.hub.ended["KV-300"] == 1)
    assert peer.is_closed()
    assert bystander.ask(Ping(2)) == Done(2)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_nothing_is_done_for_a_client_that_does_not_read_until_it_reads_on(
    bench: Bench, loop_factory: LoopFactory
) -> None:
    running = bench.start(loop_factory=loop_factory)
    peer = bench.client()
    peer.socket.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:  # its socket's buffer fills up: the store reads no more
            peer.socket.sendall(encode(StatsGet(count)))
            count += 1
    running.call(lambda: None)
    (connection,) = running.server.hub._connections.values()
    assert connection._transport.get_write_buffer_size() < 1 * MIB
    peer.socket.settimeout(HANG_S)
    assert [peer.receive().id for _ in range(count)] == list(range(count))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_bug_in_the_store_ends_one_connection_only(
    bench: Bench, loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = bench.start(loop_factory=loop_factory)
    bystander, peer = bench.client(), bench.client()
    handle = running.server.hub.store.handle

    def stumble(session: int, request: Request, now_ns: int) -> None:
        if request.id == 666:
            raise ZeroDivisionError("a bug")
        handle(session, request, now_ns)

    monkeypatch.setattr(running.server.hub.store, "handle", stumble)
    peer.socket.sendall(encode(Ping(666)))
    assert peer.is_closed()
    assert bystander.ask(Ping(2)) == Done(2)
    eventually(lambda: len(running.stats("clients")) == 1)  # type: ignore[arg-type]


# ---- writers that die


def limbo(running: Running) -> object:
    return running.stats("arena", "limbo_bytes")


def test_slots_of_a_disconnected_writer_wait_for_its_pipe(bench: Bench) -> None:
    running = bench.start()
    peer = bench.client()
    assert isinstance(peer.ask(PutBegin(2, [PUT])), PutSlots)
    peer.socket.close()
    eventually(lambda: running.stats("clients") == [])
    assert limbo(running) == 8192
    peer.close_pipe()
    eventually(lambda: limbo(running) == 0)
    assert running.stats("arena", "used_bytes") == 0


def test_a_killed_writer_leaves_nothing_behind(bench: Bench) -> None:
    running = bench.start()
    script = (
        "import socket, sys, time; from tests.unit import shell\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); peer = shell.Peer(s); peer.greet(); peer.hello()\n"
        "peer.ask(shell.PutBegin(2, [shell.PUT])); print('begun', flush=True); time.sleep(3600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, bench.path], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    assert running.stats("arena", "used_bytes") == 8192
    child.send_signal(signal.SIGKILL)
    child.wait(HANG_S)
    child.stdout.close()
    eventually(lambda: running.stats("arena", "used_bytes") == 0)
    assert (running.stats("clients"), limbo(running)) == ([], 0)


def test_a_tool_that_gives_its_descriptors_back_may_ask_but_not_write(bench: Bench) -> None:
    running = bench.start()
    peer = bench.connect()
    peer.greet()
    peer.close_pipe()
    eventually(lambda: [stranger.has_arena for stranger in running.strangers()] == [False])
    assert isinstance(peer.hello(), Welcome)
    assert peer.ask(Ping(2)) == Done(2)
    refused = peer.ask(PutBegin(3, [PUT]))
    assert isinstance(refused, Refused)
    assert refused.code == "KV-204"


def test_what_a_client_writes_into_its_pipe_means_nothing(bench: Bench) -> None:
    bench.start()
    peer = bench.client()
    os.write(peer.fds[1], b"x" * 10_000)
    assert peer.ask(Ping(2)) == Done(2)


# ---- TCP


def test_tcp_with_the_right_token(bench: Bench) -> None:
    running = bench.start(tcp="127.0.0.1:0", token=TOKEN)
    first, second = bench.connect_tcp(running), bench.connect_tcp(running)
    assert first.greet().nonce != second.greet().nonce
    assert first.greeting is not None
    assert len(first.greeting.nonce) == 32
    assert isinstance(first.hello(proof=proof(TOKEN, first.greeting.nonce)), Welcome)
    assert first.ask(Ping(2)) == Done(2)
    refused = first.ask(PutBegin(3, [PUT]))
    assert isinstance(refused, Refused)
    assert refused.code == "KV-204"


@pytest.mark.parametrize("wrong", ["missing", "other token", "other nonce"])
def test_tcp_without_the_right_token(bench: Bench, wrong: str) -> None:
    running = bench.start(tcp="127.0.0.1:0", token=TOKEN)
    peer = bench.connect_tcp(running)
    nonce = peer.greet().nonce
    answers = {"missing": b"", "other token": proof("guess", nonce), "other nonce": proof(TOKEN, bytes(32))}
    refused = peer.hello(proof=answers[wrong])
    assert isinstance(refused, Refused)
    assert (refused.id, refused.code) == (0, "KV-205")
    assert peer.is_closed()
    assert running.stats("clients") == []


def test_silent_tcp_strangers_are_closed_and_do_not_block_the_unix_socket(bench: Bench, clock: Clock) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop, tcp="127.0.0.1:0", token=TOKEN)
    strangers = [bench.connect_tcp(running) for _ in range(64)]
    for stranger in strangers:
        stranger.greet()
    assert isinstance(bench.connect_tcp(running).receive(), Greeting)
    assert strangers[0].is_closed()  # it has not said hello for longest
    bench.client()
    an_hour_passes(running, clock)
    assert all(stranger.is_closed() for stranger in strangers)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=HANG_S)
    return cert, key


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_silent_strangers_are_counted_before_tls_has_shaken_hands(
    bench: Bench, certificate: tuple[Path, Path], loop_factory: LoopFactory
) -> None:
    """They were not, so that whoever said nothing at all could take every descriptor."""
    cert, key = certificate
    config = bench.config(tcp="127.0.0.1:0", token=TOKEN, tls_cert=str(cert), tls_key=str(key))
    running = bench.start(StoreServer(config, hello_timeout_s=HOUR_S), loop_factory=loop_factory)
    strangers = [bench.connect_tcp(running) for _ in range(64)]
    eventually(lambda: len(running.strangers()) == 64)
    bench.client()
    peer = bench.connect_tls(running, ssl.create_default_context(cafile=str(cert)))
    assert isinstance(peer.hello(proof=proof(TOKEN, peer.greet().nonce)), Welcome)
    assert strangers[0].is_closed()  # it made way, without a word that is not TLS
    assert len(running.strangers()) == 63
    assert running.stats("server", "ended") == {"KV-301": 1}


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_silent_strangers_are_closed_before_tls_has_shaken_hands(
    bench: Bench, certificate: tuple[Path, Path], loop_factory: LoopFactory
) -> None:
    cert, key = certificate
    config = bench.config(tcp="127.0.0.1:0", token=TOKEN, tls_cert=str(cert), tls_key=str(key))
    running = bench.start(StoreServer(config, hello_timeout_s=0.2), loop_factory=loop_factory)
    strangers = [bench.connect_tcp(running) for _ in range(3)]
    assert all(stranger.is_closed() for stranger in strangers)
    eventually(lambda: running.strangers() == [])


def test_stopping_does_not_wait_for_a_handshake(bench: Bench, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    config = bench.config(tcp="127.0.0.1:0", token=TOKEN, tls_cert=str(cert), tls_key=str(key))
    running = bench.start(StoreServer(config, hello_timeout_s=HOUR_S))
    bench.connect_tcp(running)
    eventually(lambda: len(running.strangers()) == 1)
    running.stop()


def test_tcp_with_tls(bench: Bench, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    running = bench.start(tcp="127.0.0.1:0", token=TOKEN, tls_cert=str(cert), tls_key=str(key))
    peer = bench.connect_tls(running, ssl.create_default_context(cafile=str(cert)))
    assert isinstance(peer.hello(proof=proof(TOKEN, peer.greet().nonce)), Welcome)
    assert peer.ask(Ping(2)) == Done(2)
    plain = bench.connect_tcp(running)
    plain.socket.sendall(encode(Ping(1)))
    with contextlib.suppress(ConnectionResetError):
        assert not plain.socket.recv(100).startswith(b"\x00")  # an alert at most, never a frame
