"""Pulling from other stores: right bytes, or one clear reason within a moment, whatever the other end does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtally.core.space import Piece
from kvtally.errors import TierError
from kvtally.store.arena import Arena
from kvtally.store.jobs import Job, Outcome, PeerPlace, ReadJob
from kvtally.store.mover import Batch, Mover
from kvtally.store.stream import PART_BYTES
from kvtally.store.tiers import peer
from kvtally.store.tiers.base import ObjectRecord, PeerSource, Tier
from kvtally.store.tiers.peer import PeerTier
from kvtally.testing.tiers import MemoryTier, sample_record
from kvtally.wire.auth import proof, store_proof
from kvtally.wire.bulk import Header, PullStatus
from kvtally.wire.frames import encode
from kvtally.wire.limits import MIB
from kvtally.wire.messages import PROTOCOL_VERSION, Done, Hello, Pull, Refused, Welcome
from tests.unit.bulk_kit import (
    HOST,
    LEASE,
    Impostor,
    Node,
    content,
    endpoint_of,
    greeting,
    pull,
    request_from,
    source,
    target_for,
    tls_pair,
    wait_for_end,
    welcome,
)
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, Clock, eventually

ROOT = Path(__file__).parents[2]
RECORD = sample_record(1, b"12345")
PLACE = PeerPlace(f"tcp://{HOST}:1", LEASE, 1)

Script = Callable[[Impostor, socket.socket], None]


@contextlib.contextmanager
def against(*scripts: Script) -> Iterator[tuple[PeerTier, Impostor]]:
    """A tier that knows one store, which plays a script for each connection; the last one for all later ones."""
    impostor = Impostor(*scripts)
    tier = source(endpoint_of(impostor.port))
    try:
        yield tier, impostor
    finally:
        tier.close()
        impostor.stop()


def failure(tier: PeerTier, record: ObjectRecord = RECORD) -> TierError:
    with pytest.raises(TierError) as caught:
        pull(tier, record)
    assert caught.value.remedy
    return caught.value


def answering(*answers: bytes) -> Script:
    """An honest handshake, and then these bytes for one pull after another, until the puller closes."""

    def script(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        for answer in answers:
            assert isinstance(request_from(peer), Pull)
            peer.sendall(answer)
        wait_for_end(peer)

    return script


def sent(data: bytes, number: int = 1) -> bytes:
    return Header(len(data), number, PullStatus.SENT).pack() + data


# ---- what a store answers


def test_one_connection_serves_pull_after_pull() -> None:
    with against(answering(*(sent(b"12345", number) for number in range(1, 6)))) as (tier, impostor):
        assert [pull(tier, RECORD) for _ in range(5)] == [b"12345"] * 5
        assert impostor.accepted == 1


@pytest.mark.parametrize(("status", "code"), [(PullStatus.GONE, "KV-603"), (PullStatus.BUSY, "KV-605")])
def test_a_store_that_says_no_is_not_lost(status: PullStatus, code: str) -> None:
    with against(answering(Header(0, 1, status).pack(), sent(b"12345", 2))) as (tier, impostor):
        assert failure(tier).code == code
        assert pull(tier, RECORD) == b"12345"
        assert impostor.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        sent(b"1234"),
        sent(b"123456"),
        sent(b"12345", 2),
        Header(5, 1, 3).pack() + b"12345",
        Header(5, 1, PullStatus.GONE).pack(),
        Header(2**63, 1, PullStatus.SENT).pack(),
        os.urandom(16),
        bytes(16),
    ],
    ids=["too little", "too much", "another pull's", "no status", "gone with bytes", "absurd", "junk", "zeros"],
)
def test_an_answer_that_does_not_fit_is_a_lost_store(answer: bytes) -> None:
    with against(answering(answer)) as (tier, _):
        error = failure(tier)
        assert (error.code, "does not fit" in error.message) == ("KV-604", True)
        eventually(lambda: not tier._used and not tier._idle)


@pytest.mark.parametrize("part", [b"", sent(b"12345")[:3], sent(b"12345")[:16], sent(b"12345")[:-1]])
def test_a_store_that_closes_in_the_middle_is_lost_at_once(part: bytes) -> None:
    def script(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(part)

    with against(script) as (tier, impostor):  # STALL_S is far away: whoever waited for it would hang
        assert failure(tier).code == "KV-604"
        assert impostor.accepted == 1  # a fresh connection is not tried twice


@pytest.mark.parametrize("part", [b"", sent(b"12345")[:16], sent(b"12345")[:-1]])
def test_a_store_that_stalls_is_lost(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(peer, "STALL_S", 0.1)
    with against(answering(part)) as (tier, _):
        error = failure(tier)
        assert (error.code, "not one byte" in error.message) == ("KV-604", True)


def test_a_store_that_is_slow_but_never_stalls_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: parts come with pauses, all of them shorter than a stall."""
    data = content(40_000)

    def script(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(Header(len(data), 1, PullStatus.SENT).pack())
        for start in range(0, len(data), 1000):
            peer.sendall(data[start : start + 1000])
            threading.Event().wait(0.01)
        wait_for_end(peer)

    monkeypatch.setattr("kvtally.store.stream._TICK_S", 0.002)  # the kernel's waits end in the middle of parts
    with against(script) as (tier, _):
        assert pull(tier, sample_record(1, data)) == data


def test_nothing_is_written_after_a_pull_has_ended() -> None:
    """What comes late must not land in space that is somebody else's by then."""
    released = threading.Event()

    def script(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(sent(bytes([1]) * MIB)[: 16 + PART_BYTES])
        released.wait(HANG_S)
        peer.sendall(bytes([1]) * MIB)

    record = sample_record(1, bytes([1]) * MIB)
    target = target_for(record)
    with against(script) as (tier, _):
        landed: list[memoryview] = []

        def stop_at_the_first(part: memoryview) -> None:
            landed.append(part)
            tier.close()  # another thread would: the store stops

        with pytest.raises(TierError) as caught:
            tier.pull(PLACE, record, target, stop_at_the_first)
        assert (caught.value.code, len(landed)) == ("KV-604", 1)
        target[0][:] = bytes(MIB)  # somebody else's
        released.set()
    assert bytes(target[0]) == bytes(MIB)


# ---- who a store is


def impostor_without_proof(impostor: Impostor, peer: socket.socket) -> None:
    """As a store of the version before this one answers: it ignores what it does not know."""
    peer.sendall(encode(greeting()))
    hello = request_from(peer)
    assert isinstance(hello, Hello)
    peer.sendall(encode(Welcome(hello.id, 1)))
    wait_for_end(peer)


def impostor_with_a_guess(impostor: Impostor, peer: socket.socket) -> None:
    peer.sendall(encode(greeting()))
    hello = request_from(peer)
    assert isinstance(hello, Hello)
    peer.sendall(encode(Welcome(hello.id, 1, proof=store_proof("guess", hello.nonce))))
    wait_for_end(peer)


def impostor_that_repeats_the_peers_own_proof(impostor: Impostor, peer: socket.socket) -> None:
    """It would greet with the peer's nonce of another connection, and repeat the answer: here is what it would get."""
    peer.sendall(encode(greeting()))
    hello = request_from(peer)
    assert isinstance(hello, Hello)
    peer.sendall(encode(Welcome(hello.id, 1, proof=proof(TOKEN, hello.nonce))))
    wait_for_end(peer)


@pytest.mark.parametrize(
    "script", [impostor_without_proof, impostor_with_a_guess, impostor_that_repeats_the_peers_own_proof]
)
def test_a_store_that_does_not_prove_the_token_is_asked_for_nothing(script: Script) -> None:
    with against(script) as (tier, _):
        error = failure(tier)
        assert (error.code, "KV-205" in error.message, "older version" in error.message) == ("KV-604", True, True)


@pytest.mark.parametrize(
    "says",
    [
        b"\xff\xff\xff\xff",
        b"\x04\x00\x00\x00junk",
        encode(greeting(protocol=PROTOCOL_VERSION + 1)),
        encode(Refused(0, "KV-210", "no peer", "Name it.")),
        encode(Done(1)),
        encode(greeting(b"")),  # it asks for no token, so it can have none
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_what_is_no_store_is_lost(says: bytes) -> None:
    def script(impostor: Impostor, peer: socket.socket) -> None:
        peer.sendall(says)
        with contextlib.suppress(OSError):
            hello = request_from(peer)
            peer.sendall(encode(Welcome(hello.id, 1)))
        wait_for_end(peer)

    with against(script) as (tier, _):
        assert failure(tier).code == "KV-604"


def test_a_peer_with_the_wrong_token_is_told_so() -> None:
    node = Node()
    tier = source(endpoint_of(node.port, token="another token altogether"))
    node.lay(1, b"12345")
    error = failure(tier)
    assert (error.code, "KV-205" in error.message) == ("KV-604", True)
    eventually(lambda: node.ended == ["KV-205"])
    tier.close()
    node.close()


def test_a_store_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "STALL_S", 0.05)
    with against(lambda impostor, peer: wait_for_end(peer)) as (tier, _):
        assert failure(tier).code == "KV-604"


@pytest.mark.parametrize("server_has_it", [True, False])
def test_tls_on_one_side_only_is_a_lost_store(
    server_has_it: bool, tls_files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "CONNECT_S", 0.5)
    monkeypatch.setattr(peer, "STALL_S", 0.5)  # a server that waits for TLS says nothing
    server, client = tls_pair(tls_files)
    node = Node(tls=server if server_has_it else None)
    node.lay(1, b"12345")
    tier = source(endpoint_of(node.port, tls=None if server_has_it else client))
    assert failure(tier).code == "KV-604"
    tier.close()
    node.close()
    assert node.jobs == []


def test_a_certificate_for_another_host_is_refused(tls_files: tuple[str, str]) -> None:
    server, client = tls_pair(tls_files)
    node = Node(tls=server, host="127.0.0.4")
    tier = source(endpoint_of(node.port, tls=client, host="127.0.0.4"))
    error = failure(tier)
    assert (error.code, "certificate" in error.message) == ("KV-604", True)
    tier.close()
    node.close()


# ---- stores that come and go


def test_without_a_link_there_is_nothing_to_connect_to() -> None:
    assert failure(source(None)).code == "KV-604"


def test_a_port_that_nobody_listens_on() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    tier = source(endpoint_of(port))
    assert failure(tier).code == "KV-604"
    tier.close()


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    def closes(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(sent(b"12345"))

    with against(closes) as (tier, impostor):
        assert [pull(tier, RECORD) for _ in range(3)] == [b"12345"] * 3
        assert impostor.accepted == 3


def test_a_kept_connection_that_is_closed_at_the_very_moment_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was still open when it was looked at, and the pull met its end."""
    monkeypatch.setattr("kvtally.store.stream.Stream.is_quiet", lambda stream: True)

    def closes(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(sent(b"12345"))

    with against(closes) as (tier, impostor):
        assert [pull(tier, RECORD) for _ in range(3)] == [b"12345"] * 3
        assert impostor.accepted == 3


def test_a_kept_connection_on_which_something_came_unasked_is_not_used() -> None:
    def talks(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        peer.sendall(sent(b"12345") + b"more")
        wait_for_end(peer)

    with against(talks) as (tier, impostor):
        assert [pull(tier, RECORD) for _ in range(2)] == [b"12345"] * 2
        assert impostor.accepted == 2


def test_a_lost_store_costs_one_timeout_not_one_for_each_object(clock: Clock) -> None:
    """What waits in the mover's queue fails at once, without a connection."""

    def closes(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)

    with against(closes, closes, answering(sent(b"12345"))) as (tier, impostor):
        clock.stop()
        assert failure(tier).code == "KV-604"
        for _ in range(20):
            assert "a moment ago" in failure(tier).message
        assert impostor.accepted == 1
        clock.forward(peer.PAUSE_S)
        assert "a moment ago" not in failure(tier).message
        clock.forward(peer.PAUSE_S)
        assert pull(tier, RECORD) == b"12345"
        assert impostor.accepted == 3


def test_a_store_that_was_lost_and_came_back_is_asked_at_once(clock: Clock) -> None:
    def closes(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)

    impostor = Impostor(closes, answering(sent(b"12345")))
    known = [endpoint_of(impostor.port)]
    tier = PeerTier(lambda address: known[0])
    clock.stop()
    assert failure(tier).code == "KV-604"
    known[0] = endpoint_of(impostor.port)  # there is a new link
    assert pull(tier, RECORD) == b"12345"
    tier.close()
    impostor.stop()


def test_connections_of_a_store_that_is_gone_are_let_go() -> None:
    first, second = Node(), Node()
    first.lay(1, b"12345")
    second.lay(1, b"12345")
    known = {"tcp://a:1": endpoint_of(first.port), "tcp://b:1": endpoint_of(second.port)}
    known = {address: _at(endpoint, address) for address, endpoint in known.items()}
    tier = PeerTier(known.get)
    for address in list(known):
        tier.pull(PeerPlace(address, LEASE, 1), RECORD, target_for(RECORD), lambda part: None)
    assert (first.connections, second.connections) == (1, 1)
    del known["tcp://a:1"]
    tier.pull(PeerPlace("tcp://b:1", LEASE, 1), RECORD, target_for(RECORD), lambda part: None)
    eventually(lambda: first.connections == 0)
    assert second.connections == 1
    tier.close()
    first.close()
    second.close()


def _at(endpoint: peer.Endpoint, address: str) -> peer.Endpoint:
    return peer.Endpoint(address=address, targets=endpoint.targets, token=TOKEN, host=HOST, port=endpoint.port)


def test_kept_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MOST_IDLE", 2)
    node = Node()
    node.lay(1, b"12345")
    known = {f"tcp://{n}:1": _at(endpoint_of(node.port), f"tcp://{n}:1") for n in range(5)}
    tier = PeerTier(known.get)
    for address in known:
        tier.pull(PeerPlace(address, LEASE, 1), RECORD, target_for(RECORD), lambda part: None)
    eventually(lambda: node.connections == 2)
    tier.close()
    eventually(lambda: node.connections == 0)
    node.close()


def test_closing_ends_pulls_that_are_under_way() -> None:
    begun = threading.Event()

    def stalls(impostor: Impostor, peer: socket.socket) -> None:
        welcome(peer)
        request_from(peer)
        begun.set()
        wait_for_end(peer)

    with against(stalls) as (tier, _):
        codes: list[str] = []
        thread = threading.Thread(target=lambda: codes.append(failure(tier).code))
        thread.start()
        assert begun.wait(HANG_S)
        tier.close()
        thread.join(HANG_S)
        assert codes == ["KV-604"]
        assert "stopping" in failure(source_closed(tier)).message


def source_closed(tier: PeerTier) -> PeerTier:
    tier._lost.clear()
    return tier


# ---- processes that are stopped or killed


CHILD = """
import sys
from tests.unit.bulk_kit import Node, content
node = Node(80 << 20)
node.lay(1, content(64 << 20))
print(node.port, flush=True)
sys.stdin.read()
node.close()
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_store_that_is_killed_or_stopped_in_the_middle(blow: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    if blow is signal.SIGSTOP:
        monkeypatch.setattr(peer, "STALL_S", 0.3)  # else whoever waited for it would hang
    data = content(64 * MIB)
    record = sample_record(1, data)
    target = target_for(record)
    landed: list[memoryview] = []
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        tier = source(endpoint_of(int(child.stdout.readline())))

        def strike(part: memoryview) -> None:
            landed.append(part)
            if len(landed) == 3:
                child.send_signal(blow)

        with pytest.raises(TierError) as caught:
            tier.pull(PLACE, record, target, strike)
        assert caught.value.code == "KV-604"
        assert 3 <= len(landed) < len(data) // PART_BYTES
        assert b"".join(landed) == data[: len(landed) * PART_BYTES]
        assert not tier._used
        assert not tier._idle
        tier.close()
    finally:
        child.kill()
        child.communicate(timeout=HANG_S)


# ---- in the mover


class Delivered:
    """Collects outcomes."""

    def __init__(self) -> None:
        self.batch: Batch = []

    def __call__(self, batch: Batch) -> None:
        self.batch += batch


@contextlib.contextmanager
def moving(*tiers: Tier | PeerSource) -> Iterator[Callable[[Job], Outcome]]:
    arena = Arena(4 * MIB)
    mover, delivered = Mover(tiers, arena), Delivered()
    mover.start(post=lambda function: function(), deliver=delivered)

    def run(job: Job) -> Outcome:
        before = len(delivered.batch)
        mover.submit([job])
        eventually(lambda: len(delivered.batch) > before)
        return delivered.batch[-1][1]

    yield run
    assert mover.stop(HANG_S)
    arena.close()


def test_the_mover_pulls_and_verifies() -> None:
    node = Node()
    data = content(100_000)
    right = node.lay(1, data)
    (piece,) = node._objects[1][0]
    tier = source(endpoint_of(node.port))
    with moving(MemoryTier(), tier) as run:
        assert movers("peers") == [f"peers-read-{number}" for number in range(4)]  # nobody writes to other stores
        job = ReadJob(id=1, tier=2, record=right, pieces=(Piece(0, 100_000),), place=PLACE)
        assert run(job).code == ""
        node.arena.views([piece])[0][50_000] ^= 1
        assert run(job).code == "KV-401"
        gone = PeerPlace(PLACE.address, LEASE + 1, 1)
        assert run(ReadJob(id=2, tier=2, record=right, pieces=(Piece(0, 100_000),), place=gone)).code == "KV-603"
        node.close()
        assert run(job).code == "KV-604"
    tier.close()


def test_a_tier_says_how_many_threads_read_from_it() -> None:
    tier = MemoryTier()
    tier.readers = 2
    with moving(tier):
        assert movers("memory") == ["memory-find", "memory-read-0", "memory-read-1", "memory-write"]
    assert movers("memory") == []


def movers(tier: str) -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(f"{tier}-"))


def test_what_is_not_a_pull_is_nothing_for_a_peer(caplog: pytest.LogCaptureFixture) -> None:
    with moving(source(None)) as run:
        job = ReadJob(id=1, tier=1, record=RECORD, pieces=(Piece(0, 5),))
        assert run(job).code == "KV-600"


def test_the_two_contracts_are_not_mistaken_for_one_another() -> None:
    assert isinstance(source(None), PeerSource)
    assert not isinstance(MemoryTier(), PeerSource)
