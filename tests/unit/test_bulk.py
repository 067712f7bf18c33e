"""The port that other stores pull from: right bytes to those who may have them, and every send ends exactly once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvtally.store import bulk, stream
from kvtally.store.jobs import SendJob
from kvtally.wire.auth import NONCE_BYTES, proof
from kvtally.wire.bulk import Header, PullStatus
from kvtally.wire.frames import encode
from kvtally.wire.limits import MIB
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Ping, Pull, Refused, Welcome
from tests.unit.bulk_kit import LEASE, Node, Puller, content, endpoint_of, pull, source, tls_pair
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, eventually

PULL = Pull(5, LEASE, 1, 0, 0)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()
    assert no_threads_left()


def no_threads_left() -> bool:
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("bulk-")])
    return True


def welcomed(node: Node) -> Puller:
    puller = node.puller()
    assert isinstance(puller.hello(), Welcome)
    return puller


# ---- bytes


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
def test_bytes_of_every_size_arrive_as_they_are(has_tls: bool, request: pytest.FixtureRequest) -> None:
    server, client = tls_pair(request.getfixturevalue("tls_files")) if has_tls else (None, None)
    node = Node(80 * MIB, tls=server)
    tier = source(endpoint_of(node.port, tls=client))
    sizes = [1, 2, 4095, 4096, 4097, stream.PART_BYTES, stream.PART_BYTES + 1, 3 * MIB + 7, 64 * MIB]
    for number, size in enumerate(sizes, 1):
        node._free = 0
        data = content(size)
        assert pull(tier, node.lay(number, data)) == data
    assert node.settled(len(sizes)) == [""] * len(sizes)
    assert node.connections == 1
    tier.close()
    eventually(lambda: node.connections == 0)
    node.close()
    assert (node.ended, no_threads_left()) == ([], True)


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
def test_pieces_may_be_cut_differently_on_both_sides(has_tls: bool, request: pytest.FixtureRequest) -> None:
    server, client = tls_pair(request.getfixturevalue("tls_files")) if has_tls else (None, None)
    node = Node(tls=server)
    tier = source(endpoint_of(node.port, tls=client))
    data = content(MIB + 5)
    record = node.lay(1, data, [1, 4096, 4097, 300_000, 300_000, MIB])
    assert pull(tier, record) == data
    assert pull(tier, record, [5, 5, 70_000, 700_001]) == data
    many = node.lay(2, content(16_000), range(1000, 16_000, 1000))
    assert pull(tier, many, range(7, 16_000, 1111)) == content(16_000)
    tier.close()
    node.close()


def test_other_bytes_in_the_arena_are_other_bytes_here(node: Node) -> None:
    """The negative control: nothing but the arena is sent."""
    tier = source(endpoint_of(node.port))
    data = content(100_000)
    record = node.lay(1, data)
    (piece,) = node._objects[1][0]
    node.arena.views([piece])[0][70_000] ^= 1
    got = pull(tier, record)
    assert [at for at, (one, other) in enumerate(zip(got, data, strict=True)) if one != other] == [70_000]
    tier.close()


def test_what_is_gone_or_too_much_is_said_and_the_connection_stays(node: Node) -> None:
    puller = welcomed(node)
    puller.send(Pull(5, LEASE, 99, 0, 0))
    assert puller.header() == Header(0, 5, PullStatus.GONE)
    node.lay(1, b"data")
    puller.send(Pull(6, LEASE + 1, 1, 0, 0))
    assert puller.header() == Header(0, 6, PullStatus.GONE)
    node.status = PullStatus.BUSY
    puller.send(Pull(7, LEASE, 1, 0, 0))
    assert puller.header() == Header(0, 7, PullStatus.BUSY)
    node.status = PullStatus.SENT
    puller.send(Pull(2**33 + 8, LEASE, 1, 0, 0))
    assert (puller.header(), puller.raw(4)) == (Header(4, 8, PullStatus.SENT), b"data")
    assert node.settled(4) == [""] * 4


def test_pulls_that_come_at_once_are_answered_in_their_order(node: Node) -> None:
    puller = welcomed(node)
    for number in range(1, 6):
        node.lay(number, bytes([number]) * number * 1000)
    puller.socket.sendall(b"".join(encode(Pull(number, LEASE, number, 0, 0)) for number in range(1, 6)))
    for number in range(1, 6):
        assert puller.header() == Header(number * 1000, number, PullStatus.SENT)
        assert puller.raw(number * 1000) == bytes([number]) * number * 1000


# ---- who is let in


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"proof": b""}, "KV-205"),
        ({"proof": proof("guess", bytes(NONCE_BYTES))}, "KV-205"),
        ({"protocol": PROTOCOL_VERSION + 1}, "KV-201"),
        ({"peer": False}, "KV-503"),
        ({"nonce": b""}, "KV-503"),
        ({"nonce": b"x" * 100}, "KV-503"),
    ],
)
def test_who_does_not_say_hello_as_a_peer_gets_nothing(node: Node, fields: dict[str, object], code: str) -> None:
    node.lay(1, b"secret")
    puller = node.puller()
    greeting = puller.receive()
    assert isinstance(greeting, Greeting)
    right = {"proof": proof(TOKEN, greeting.nonce), "peer": True, "nonce": os.urandom(NONCE_BYTES)}
    hello = Hello(**{"id": 1, "protocol": PROTOCOL_VERSION, "client": "b", **right, **fields})  # type: ignore[arg-type]
    puller.socket.sendall(encode(hello) + encode(PULL))
    refused = puller.receive()
    assert isinstance(refused, Refused)
    assert (refused.code, bool(refused.remedy)) == (code, True)
    assert puller.is_closed()
    eventually(lambda: node.ended == [code])
    assert node.pulls == []


def test_a_pull_before_hello_is_no_hello(node: Node) -> None:
    puller = node.puller()
    puller.receive()
    puller.send(PULL)
    refused = puller.receive()
    assert isinstance(refused, Refused)
    assert (refused.code, puller.is_closed(), node.pulls) == ("KV-503", True, [])


def test_a_host_that_is_no_peer_is_not_even_greeted(node: Node) -> None:
    node.welcomes_hosts = False
    puller = node.puller()
    refused = puller.receive()
    assert isinstance(refused, Refused)
    assert (refused.code, "127.0.0.1" in refused.message) == ("KV-210", True)
    assert (puller.is_closed(), node.ended, node.connections) == (True, ["KV-210"], 0)


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00junk", encode(Ping(1))])
def test_what_is_no_pull_ends_that_connection_and_no_other(node: Node, junk: bytes) -> None:
    node.lay(1, b"data")
    puller, other = welcomed(node), welcomed(node)
    puller.socket.sendall(junk)
    assert puller.is_closed()
    eventually(lambda: node.ended == ["KV-503"])
    other.send(PULL)
    assert (other.header().status, other.raw(4)) == (PullStatus.SENT, b"data")


def test_strangers_make_way_for_those_who_come_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_STRANGERS", 3)
    known = welcomed(node)
    strangers = [node.puller() for _ in range(3)]
    for stranger in strangers:
        stranger.receive()
    later = welcomed(node)
    assert strangers[0].is_closed()
    node.lay(1, b"data")
    for puller in (known, later):
        puller.send(PULL)
        assert puller.header().status == PullStatus.SENT
    assert node.ended == ["KV-301"]


def test_one_connection_too_many_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_CONNECTIONS", 2)
    first, _second = welcomed(node), welcomed(node)
    refused = node.puller().receive()
    assert isinstance(refused, Refused)
    assert (refused.code, node.ended) == ("KV-301", ["KV-301"])
    first.socket.close()
    eventually(lambda: node.connections == 1)
    welcomed(node)


@pytest.mark.parametrize("says", ["nothing", "hello"])
def test_a_connection_on_which_nothing_is_asked_is_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setattr(bulk, "IDLE_S" if says == "hello" else "HELLO_S", 0.05)
    puller = node.puller()
    if says == "hello":
        puller.hello()
    assert puller.is_closed()
    eventually(lambda: node.connections == 0)
    assert node.ended == []


def test_a_frame_that_never_ends_does_not_keep_a_connection(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "IDLE_S", 0.2)
    monkeypatch.setattr(bulk, "FRAME_BYTES", MIB)
    puller = welcomed(node)
    puller.socket.sendall((MIB).to_bytes(4, "little"))
    eventually(lambda: is_gone(puller, b"x"))  # a byte now and then, for ever
    assert puller.is_closed()


def is_gone(puller: Puller, byte: bytes) -> bool:
    try:
        puller.socket.sendall(byte)
    except OSError:
        return True
    return False


# ---- sends that fail


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
def test_a_puller_that_stops_reading_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, has_tls: bool, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(bulk, "STALL_S", 0.3)
    server, client = tls_pair(request.getfixturevalue("tls_files")) if has_tls else (None, None)
    node = Node(80 * MIB, tls=server)
    node.lay(1, content(64 * MIB))
    puller = node.puller(client)
    assert isinstance(puller.hello(), Welcome)
    puller.send(PULL)
    assert puller.header().length_bytes == 64 * MIB
    assert node.settled(1) == ["KV-501"]
    eventually(lambda: node.ended == ["KV-300"])
    node.close()
    assert no_threads_left()


def test_a_puller_that_reads_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer in all than the stall that is allowed, but never stalls: the negative control."""
    monkeypatch.setattr(bulk, "STALL_S", HANG_S)
    monkeypatch.setattr(stream, "_TICK_S", 0.001)  # so that the kernel's waits end again and again
    node = Node(70 * MIB)
    data = content(64 * MIB)
    node.lay(1, data)
    puller = node.puller()
    puller.hello()
    puller.send(PULL)
    assert puller.header().length_bytes == len(data)
    parts = []
    for _ in range(20):
        parts.append(puller.raw(100_000))
        time.sleep(0.01)
    parts.append(puller.raw(len(data) - 2_000_000))
    assert b"".join(parts) == data
    assert node.settled(1) == [""]
    node.close()


def test_a_puller_that_leaves_in_the_middle_ends_the_send(node: Node) -> None:
    big = Node(80 * MIB)
    big.lay(1, content(64 * MIB))
    puller = welcomed(big)
    puller.send(PULL)
    puller.header()
    puller.socket.close()
    assert big.settled(1) == ["KV-502"]
    eventually(lambda: big.connections == 0)
    big.close()
    assert big.ended == []


def test_a_job_whose_connection_is_gone_fails_at_once(node: Node) -> None:
    node.decides = False
    node.lay(1, b"data")
    puller = welcomed(node)
    puller.send(PULL)
    eventually(lambda: node.pulls)
    puller.socket.close()
    node.call(node.listener._connections[1].end)  # its thread waits for the job, not for the socket
    eventually(lambda: node.connections == 0)
    node.call(node.decide, *node.pulls[0])
    assert node.settled(1) == ["KV-502"]


def test_a_job_that_comes_too_late_for_its_thread_is_reported_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "JOB_S", 0.05)
    node.decides = False
    node.lay(1, b"data")
    puller = welcomed(node)
    puller.send(PULL)
    assert puller.is_closed()
    eventually(lambda: node.ended == ["KV-501"])
    node.call(node.decide, *node.pulls[0])
    assert node.settled(1) == ["KV-502"]


def test_a_job_that_is_in_the_queue_when_its_thread_ends_is_reported_once(node: Node) -> None:
    """The thread was told to end, and a job came at the same moment."""
    node.decides = False
    node.lay(1, b"data")
    puller = welcomed(node)
    puller.send(PULL)
    eventually(lambda: node.pulls)

    def end_and_deliver() -> None:
        node.listener._connections[1].end()
        node.decide(*node.pulls[0])

    node.call(end_and_deliver)
    assert node.settled(1) == ["KV-502"]


def test_a_store_that_stops_ends_its_sends(node: Node) -> None:
    big = Node(80 * MIB)
    big.lay(1, content(64 * MIB))
    idle, sending = welcomed(big), welcomed(big)
    sending.send(PULL)
    sending.header()
    big.stop()
    assert big.settled(1) == ["KV-502"]
    assert (idle.is_closed(), sending.is_closed(), no_threads_left()) == (True, True, True)
    big.close()


def test_a_thread_that_cannot_be_had_costs_one_connection(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        puller = node.puller()
        assert puller.is_closed()
    assert (node.ended, node.connections) == (["KV-301"], 0)
    welcomed(node)


def test_threads_have_small_stacks_and_others_their_own() -> None:
    before = threading.stack_size()
    node = Node()
    welcomed(node)
    assert threading.stack_size() == before
    node.close()


def test_a_job_is_named_by_its_connection(node: Node) -> None:
    """A job for a connection that never was is as one whose connection is gone."""
    node.jobs.append(SendJob(id=77, connection=12345, pull=1, status=PullStatus.GONE))
    node.call(node.listener.deliver, node.jobs[0])
    assert node.settled(1) == ["KV-502"]
