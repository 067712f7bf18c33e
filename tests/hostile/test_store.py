"""A store among hostile clients: others get their answers, soon, and what the attack took comes back.

`Watch` asks on while an attack runs, each time as a new client: `/health` over HTTP, a ping and a lookup over the unix
socket. The verdict is the store's own processor time between question and answer, and not the clock's: it says how long
others waited for the store's work, however busy the machine is.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtally.client import Miss, StoreClient
from kvtally.core.namespace import Namespace, canonical
from kvtally.processes import free_ports
from kvtally.wire.frames import encode
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Lookup,
    Ping,
    PutBegin,
    PutObject,
    ReceiptGet,
    Request,
    Reset,
    StatsGet,
)
from tests.chaos.processes import StoreProcess
from tests.unit.shell import NAMESPACE, Peer
from tests.waiting import HANG_S, eventually
from tests.work import occupied_s

MIB = 1 << 20
WORK_S = 0.1  # the most that the store may work while somebody waits for `/health`
SLACK_BYTES = 48 * MIB  # what an allocator may keep of what it was given back
ROUNDS = 10  # of questions, at the least, while an attack goes on


class Victim:
    """A store process that is attacked."""

    def __init__(self, directory: Path) -> None:
        (self.port,) = free_ports(1)
        self.store = StoreProcess(directory, "--memory", "64MiB", "--admin", f"127.0.0.1:{self.port}")
        eventually(lambda: self.store.stats("server", "populated_bytes") == 64 * MIB)
        self.pid = self.store.process.pid

    @property
    def work_s(self) -> float:
        """The processor time of the store so far, all threads together: see clock_getcpuclockid(3)."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def peer(self, namespace: Namespace | None = NAMESPACE) -> Peer:
        """A client as raw as it gets, welcomed."""
        peer = self.stranger()
        peer.greet()
        peer.hello(namespace)
        return peer

    def stranger(self) -> Peer:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.store.socket))
        return Peer(connection)

    def admin(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)


class Watch:
    """What others noticed."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self.statuses: set[int] = set()
        self.work_s = 0.0
        self.rounds = 0

    def ask(self) -> None:
        begun_s = self._work_s()
        connection = http.client.HTTPConnection("127.0.0.1", self._victim.port, timeout=HANG_S)
        try:
            connection.request("GET", "/health")
            self.statuses.add(connection.getresponse().status)
        finally:
            connection.close()
        self.work_s = max(self.work_s, self._work_s() - begun_s)
        with StoreClient(str(self._victim.store.socket), namespace=NAMESPACE, timeout_s=HANG_S) as client:
            assert not isinstance(client.connect(), Miss)
            begun_s = self._work_s()
            assert not isinstance(client.ping().wait(), Miss)
            assert not isinstance(client.lookup(Lookup(0, bytes(32), [256], 256)).wait(), Miss)
            self.work_s = max(self.work_s, self._work_s() - begun_s)
        self.rounds += 1

    def _work_s(self) -> float:
        """What the store has worked, without what it may have worked while we did not wait for it."""
        return self._victim.work_s - occupied_s()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(tmp_path_factory.mktemp("hostile"))
    Watch(victim).ask()
    yield victim
    victim.store.close()


Attack = Callable[[Victim, contextlib.ExitStack], Iterator[None]]


@contextlib.contextmanager
def under(attack: Attack, victim: Victim) -> Iterator[Callable[[], int]]:
    """The attack goes on in another thread; gives how many steps it has taken."""
    steps_taken, is_over, failure = 0, threading.Event(), list[BaseException]()

    def run() -> None:
        nonlocal steps_taken
        try:
            with contextlib.ExitStack() as stack:
                for _ in attack(victim, stack):
                    steps_taken += 1
                    if is_over.is_set():
                        return
                is_over.wait(HANG_S)  # it keeps what it has
        except BaseException as error:
            failure.append(error)

    def taken() -> int:
        assert not failure, failure
        return steps_taken

    attacker = threading.Thread(target=run)
    attacker.start()
    try:
        yield taken
    finally:
        is_over.set()
        attacker.join(HANG_S)
    taken()


def endure(victim: Victim, attack: Attack, steps: int) -> None:
    """Others ask on until the attack has taken so many steps."""
    store = victim.store
    eventually(lambda: len(store.stats("clients")) == 1, "nobody but the probe is there")
    files = store.process.descriptors()
    memory_bytes = store.process.anonymous_bytes()
    watch = Watch(victim)
    with under(attack, victim) as taken:
        while watch.rounds < ROUNDS or taken() < steps:
            watch.ask()
    assert watch.statuses == {200}
    print(f"the store worked {1e3 * watch.work_s:.1f} ms at most while others waited")
    assert watch.work_s < WORK_S
    eventually(lambda: len(store.stats("clients")) == 1, "the attackers' sessions are gone")
    eventually(lambda: store.process.descriptors() <= files, "their descriptors are closed")
    eventually(lambda: store.process.anonymous_bytes() < memory_bytes + SLACK_BYTES, "their memory came back")
    assert store.stats("arena", "limbo_bytes") == 0
    assert store.process.child.poll() is None


# ---- connections


def idle_strangers(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """Connections that never say hello."""
    while True:
        peer = victim.stranger()
        stack.callback(peer.close)
        yield
        if len(os.listdir("/proc/self/fd")) > 800:
            stack.pop_all().close()


def idle_requests(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """HTTP connections that say nothing, half a request, or announce a body that never comes."""
    said = (b"", b"GET /hea", b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n")
    for words in itertools.cycle(said):
        connection = stack.enter_context(victim.admin())
        with contextlib.suppress(OSError):  # it had to make way
            connection.sendall(words)
        yield
        if len(os.listdir("/proc/self/fd")) > 800:
            stack.pop_all().close()


def churn(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """Clients that come and go."""
    while True:
        victim.peer().close()
        victim.admin().close()
        yield


def half_frames(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """Frames of 4 MiB of which the last byte never comes."""
    frame = (4 * MIB).to_bytes(4, "little") + bytes(4 * MIB - 1)
    for _ in range(32):
        peer = victim.peer()
        stack.callback(peer.close)
        peer.socket.sendall(frame)
        yield


def drips(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """A frame a byte at a time."""
    peer = victim.peer()
    stack.callback(peer.close)
    for byte in itertools.cycle(encode(Lookup(2, bytes(32 * 8), list(range(256, 2304, 256)), 2048))):
        peer.socket.sendall(bytes([byte]))
        yield


# ---- floods


def flood(*requests: Request) -> Attack:
    """As many of these as fit, from eight connections. Replies are read by nobody."""

    def attack(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
        frames = b"".join(map(encode, requests))
        frames *= max(1, 65_536 // len(frames))
        while True:
            peers = [victim.peer() for _ in range(8)]
            for peer in peers:
                stack.callback(peer.close)
                peer.socket.setblocking(False)
            for _ in range(100):
                for peer in peers:
                    with contextlib.suppress(OSError):  # its buffer is full, or it was cut off
                        peer.socket.send(frames)
                time.sleep(0.002)
                yield
            stack.pop_all().close()

    return attack


def late_fetches(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """Thousands of fetches of one receipt that time out together."""
    frames = b"".join(encode(ReceiptGet(number, "nobody files this", wait_ms=300)) for number in range(1_024))
    peers = [victim.peer(None) for _ in range(16)]
    for peer in peers:
        stack.callback(peer.close)
    while True:
        for peer in peers:
            peer.socket.sendall(frames)
        for peer in peers:
            for _ in range(1_024):
                peer.receive()
        yield


def open_puts(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    """As many saves begun as there may be, none of them ended."""
    numbers = itertools.count(1)
    while True:
        peer = victim.peer()
        stack.callback(peer.close)
        for _ in range(4):
            objects = [
                PutObject(next(numbers).to_bytes(32, "big"), bytes(32), 0, 256, 0, 0, 5_000) for _ in range(4_096)
            ]
            peer.ask(PutBegin(2, objects))
            yield
        peer.close()


def many_namespaces(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
    for number in itertools.count():
        peer = victim.stranger()
        peer.greet()
        peer.ask(
            Hello(1, PROTOCOL_VERSION, "x" * 9_999, canonical(msgspec.structs.replace(NAMESPACE, model=f"{number}")))
        )
        peer.close()
        yield


# ---- counts and bombs


def raw(tag: str, *fields: bytes) -> bytes:
    """A frame as nobody's encoder makes it."""
    payload = bytes([0x90 + 1 + len(fields)]) + msgspec.msgpack.encode(tag) + b"".join(fields)
    return len(payload).to_bytes(4, "little") + payload


def array(count: int, item: bytes, times: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * times


MANY = 4 * MIB - 100
BOMBS = {
    "millions of boundaries": raw("lookup", b"\x01", b"\xc4\x00", array(MANY, b"\x01", MANY), b"\x01"),
    "millions of leases": raw("release", b"\x01", array(MANY, b"\x01", MANY)),
    "bad objects": raw("release", b"\x01", b"\x90", array(MANY // 5, b"\x94\x01\x01\x01\x01", MANY // 5)),
    "commits": raw("put_end", b"\x01", array(MANY // 3, b"\x92\x01\x01", MANY // 3)),
    "a list that is longer than its frame": raw("release", b"\x01", array(0xFFFFFFFF, b"\x01", 9)),
    "depth": raw("ping", b"\x91" * MANY),
    "a long name": raw("hello", b"\x01", b"\x01", b"\xdb" + MANY.to_bytes(4, "big") + b"x" * MANY),
    "a lookup of all there may be": encode(Lookup(2, bytes(32 * 65_536), list(range(1, 65_537)), 65_536)),
}


def bombs(frame: bytes) -> Attack:
    def attack(victim: Victim, stack: contextlib.ExitStack) -> Iterator[None]:
        while True:
            with contextlib.closing(victim.peer()) as peer, contextlib.suppress(OSError, EOFError):
                peer.socket.sendall(frame)
                peer.receive()
            yield

    return attack


# With the steps after which an attack has done what it can do.
ATTACKS: dict[str, tuple[Attack, int]] = {
    "idle strangers": (idle_strangers, 200),
    "idle requests": (idle_requests, 200),
    "coming and going": (churn, 100),
    "half frames": (half_frames, 32),
    "byte by byte": (drips, 1_000),
    "pings": (flood(Ping(2)), 250),
    "stats": (flood(StatsGet(2)), 250),
    "resets": (flood(Reset(2), PutBegin(3, [PutObject(b"c" * 32, bytes(32), 0, 256, 0, 0, 5_000)])), 250),
    "lookups that wait": (flood(Lookup(2, b"c" * 32, [256], 256, wait_ms=60_000, hold=True)), 250),
    "late fetches": (late_fetches, 3),
    "open puts": (open_puts, 8),
    "namespaces": (many_namespaces, 1_100),
    **{name: (bombs(frame), 5) for name, frame in BOMBS.items()},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_served_and_what_was_taken_comes_back(victim: Victim, name: str) -> None:
    endure(victim, *ATTACKS[name])


def test_work_for_others_is_noticed(victim: Victim) -> None:
    """The suite's own control: what the store does for one client shows in what others measure."""
    idle, busy = Watch(victim), Watch(victim)
    for _ in range(ROUNDS):
        idle.ask()

    def is_noticed() -> bool:
        busy.ask()
        return busy.work_s > 2 * idle.work_s

    with under(bombs(BOMBS["a lookup of all there may be"]), victim):
        eventually(is_noticed, "a long lookup shows")
