"""Pulls by NIXL: the other store says where an object lies and keeps it there until it was read, and not for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvtally.core.space import Piece
from kvtally.errors import TierError
from kvtally.store import bulk
from kvtally.store.arena import Arena
from kvtally.store.jobs import PeerPlace
from kvtally.store.tiers.nixl import Nixl
from kvtally.store.tiers.peer import PeerTier
from kvtally.wire.bulk import Header, PullStatus, pack_pieces, unpack_pieces
from kvtally.wire.frames import encode
from kvtally.wire.limits import MIB
from kvtally.wire.messages import Hello, Pull, Pulled, Welcome
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
    store_proof,
    wait_for_end,
)
from tests.unit.nixl_kit import FakeAgent, Script, install
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, eventually

DATA = content(300_000)


class Pair:
    """A node whose bulk port offers NIXL, and a tier that reads by it into an arena of its own."""

    def __init__(self) -> None:
        self.node = Node()
        (there,) = self.node.arena.views([(0, 4 * MIB)])
        self.there = Nixl("a", there)
        self.node.listener.card = self.there.card
        self.arena = Arena(4 * MIB)
        (here,) = self.arena.views([(0, 4 * MIB)])
        self.here = Nixl("b", here)
        self.agent: FakeAgent = self.here._agent
        self.tier = self.tier_at(self.node.port)
        self.record = self.node.lay(1, DATA, [5, 100_000])

    def tier_at(self, port: int) -> PeerTier:
        endpoint = endpoint_of(port)
        return PeerTier(lambda address: endpoint, self.here)

    def pull(self, tier: PeerTier | None = None, pieces: tuple[int, ...] = (1000, 299_000)) -> bytes:
        """Pull the object into pieces of these lengths. What the tier says has landed."""
        target = self.arena.views([Piece(at * MIB, length) for at, length in enumerate(pieces)])
        for view in target:
            view[:] = bytes(len(view))
        landed: list[memoryview] = []
        (tier or self.tier).pull(PeerPlace(f"tcp://{HOST}:1", LEASE, 1), self.record, target, landed.append)
        assert landed == target
        return b"".join(target)

    def close(self) -> None:
        self.tier.close()
        self.here.close()
        self.there.close()
        self.node.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    install(monkeypatch)
    pair = Pair()
    yield pair
    pair.close()


class Pulling(threading.Thread):
    """A pull in a thread of its own, and how it ended."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(daemon=True)
        self.pair = pair
        self.ended: str | bytes = ""
        self.start()

    def run(self) -> None:
        try:
            self.ended = self.pair.pull()
        except TierError as error:
            self.ended = f"{error.code} {error.message}"

    def how(self) -> str | bytes:
        self.join(HANG_S)
        return self.ended


def lost(pair: Pair, tier: PeerTier | None = None) -> str:
    with pytest.raises(TierError) as raised:
        pair.pull(tier)
    return f"{raised.value.code} {raised.value.message}"


def test_objects_are_read_where_they_lie(pair: Pair) -> None:
    for cuts in ((300_000,), (1, 299_999), (100_000, 100_000, 100_000)):
        assert pair.pull(pieces=cuts) == DATA
    assert pair.node.settled(3) == [""] * 3
    assert pair.node.connections == 1
    assert [request.in_place for _, request in pair.node.pulls] == [True] * 3
    assert len(pair.agent.posted) == 3


def test_another_byte_there_is_another_byte_here(pair: Pair) -> None:
    """The negative control: nothing but the arena is read."""
    (piece, *_) = pair.node._objects[1][0]
    pair.node.arena.views([piece])[0][3] ^= 1
    got = pair.pull()
    assert [at for at, (one, other) in enumerate(zip(got, DATA, strict=True)) if one != other] == [3]


def test_the_object_is_held_until_it_was_read(pair: Pair) -> None:
    script = pair.agent.states[0] = Script()
    pulling = Pulling(pair)
    eventually(lambda: pair.agent.polls >= 50, "it was asked about often")
    assert (pair.node.outcomes, pulling.is_alive()) == ([], True)
    script.state = "DONE"
    assert pulling.how() == DATA
    assert pair.node.settled(1) == [""]


def test_bytes_that_came_after_the_other_store_let_go_do_not_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "READ_S", 0.01)
    script = pair.agent.states[0] = Script()
    pulling = Pulling(pair)
    assert pair.node.settled(1) == ["KV-501"]
    assert pulling.is_alive()  # and holds its memory: the READ has not ended
    script.state = "DONE"
    ended = pulling.how()
    assert isinstance(ended, str)
    assert ended.startswith("KV-604")
    eventually(lambda: pair.node.ended == ["KV-300"], "the connection was cut off")


def test_a_read_that_fails_frees_the_object_at_once(pair: Pair) -> None:
    pair.agent.states[0] = Script("ERR")
    assert lost(pair).endswith("a READ failed (ERR)")
    assert pair.node.settled(1) == ["KV-502"]
    assert lost(pair).endswith("it failed a moment ago")


def test_a_store_that_stops_in_the_middle(pair: Pair) -> None:
    script = pair.agent.states[0] = Script()
    pulling = Pulling(pair)
    eventually(lambda: pair.agent.polls > 0, "it has begun")
    pair.node.stop()
    polls = pair.agent.polls
    eventually(lambda: pair.agent.polls >= polls + 50, "it was asked about often")
    assert pulling.is_alive()
    script.state = "raises"
    assert str(pulling.how()).startswith("KV-604")


def test_a_puller_that_is_closed_still_waits_for_its_read(pair: Pair) -> None:
    script = pair.agent.states[0] = Script()
    pulling = Pulling(pair)
    eventually(lambda: pair.agent.polls > 0, "it has begun")
    pair.tier.close()
    polls = pair.agent.polls
    eventually(lambda: pair.agent.polls >= polls + 50, "it was asked about often")
    assert pulling.is_alive()
    script.state = "DONE"
    assert str(pulling.how()).startswith("KV-604")


@pytest.mark.parametrize(("status", "code"), [(PullStatus.GONE, "KV-603"), (PullStatus.BUSY, "KV-605")])
def test_a_store_may_say_no(pair: Pair, status: PullStatus, code: str) -> None:
    pair.node.status = status
    assert lost(pair).startswith(code)
    pair.node.status = PullStatus.SENT
    assert pair.pull() == DATA


def test_a_store_without_nixl_is_not_pulled_from_in_another_way(pair: Pair) -> None:
    pair.node.listener.card = b""
    assert "it does not offer NIXL [KV-200]. Set transport: nixl for that store, too." in lost(pair)
    assert pair.node.pulls == []


def test_a_puller_without_nixl_gets_the_bytes_sent(pair: Pair) -> None:
    tier = source(endpoint_of(pair.node.port))
    assert pull(tier, pair.record) == DATA
    assert pair.agent.posted == []
    tier.close()


# ---- what a puller may do wrong


def test_pieces_are_those_of_the_arena_and_released_when_the_puller_says_so(pair: Pair) -> None:
    puller = pair.node.puller()
    welcome = puller.hello()
    assert isinstance(welcome, Welcome)
    assert welcome.card == pair.there.card
    puller.send(Pull(5, LEASE, 1, 0, 0, True))
    header = puller.header()
    assert (header.pull, header.status) == (5, PullStatus.PLACED)
    pieces = unpack_pieces(puller.raw(header.length_bytes))
    assert b"".join(pair.node.arena.views(pieces)) == DATA
    assert pair.node.outcomes == []
    puller.send(Pulled(5))
    assert puller.header() == Header(0, 5, PullStatus.SENT)
    assert pair.node.settled(1) == [""]


@pytest.mark.parametrize("said", [Pulled(6), Pull(6, LEASE, 1, 0, 0)])
def test_something_else_than_pulled_ends_the_connection_and_the_hold(pair: Pair, said: Pulled | Pull) -> None:
    puller = pair.node.puller()
    puller.hello()
    puller.send(Pull(5, LEASE, 1, 0, 0, True))
    puller.raw(puller.header().length_bytes)
    puller.send(said)
    assert puller.is_closed()
    assert len(pair.node.settled(1)) == 1
    eventually(lambda: pair.node.ended == ["KV-503"], "it was refused")


def test_pulled_out_of_turn(pair: Pair) -> None:
    puller = pair.node.puller()
    puller.hello()
    puller.send(Pulled(5))
    assert puller.is_closed()
    assert pair.node.jobs == []


# ---- what a store may do wrong


def placing(pair: Pair, answer: Callable[[Pull], bytes]) -> Impostor:
    """A store that answers each pull with this."""

    def script(impostor: Impostor, peer: socket.socket) -> None:
        nonce = bytes(32)
        peer.sendall(encode(greeting(nonce)))
        hello = request_from(peer)
        assert isinstance(hello, Hello)
        card = pair.there.card
        peer.sendall(encode(Welcome(hello.id, 1, proof=store_proof(TOKEN, hello.nonce), card=card)))
        request = request_from(peer)
        assert isinstance(request, Pull)
        peer.sendall(answer(request))
        wait_for_end(peer)

    return Impostor(script)


@pytest.mark.parametrize(
    "answer",
    [
        lambda pull: Header(300_000, pull.id, PullStatus.SENT).pack(),  # bytes that nobody asked for
        lambda pull: Header(16, pull.id + 1, PullStatus.PLACED).pack() + pack_pieces([Piece(0, 300_000)]),
        lambda pull: Header(0, pull.id, PullStatus.PLACED).pack(),
        lambda pull: Header(15, pull.id, PullStatus.PLACED).pack() + bytes(15),
        lambda pull: Header(16 * 17, pull.id, PullStatus.PLACED).pack(),  # more pieces than an object has
        lambda pull: Header(1 << 60, pull.id, PullStatus.PLACED).pack(),
        lambda pull: Header(16, pull.id, PullStatus.PLACED).pack() + pack_pieces([Piece(0, 299_999)]),
        lambda pull: Header(16, pull.id, PullStatus.PLACED).pack() + bytes(16),
        lambda pull: Header(16, pull.id, 9).pack() + pack_pieces([Piece(0, 300_000)]),
    ],
)
def test_answers_that_do_not_fit(pair: Pair, answer: Callable[[Pull], bytes]) -> None:
    impostor = placing(pair, answer)
    tier = pair.tier_at(impostor.port)
    assert lost(pair, tier).startswith("KV-604")
    assert pair.agent.posted == []
    tier.close()
    impostor.stop()


@pytest.mark.parametrize("last", [Header(0, 1, PullStatus.GONE), Header(0, 2, PullStatus.SENT), Header(5, 1, 0)])
def test_a_store_that_does_not_confirm(pair: Pair, last: Header) -> None:
    pieces = pack_pieces([Piece(0, 300_000)])
    answer = Header(16, 1, PullStatus.PLACED).pack() + pieces + last.pack()
    impostor = placing(pair, lambda pull: answer)
    tier = pair.tier_at(impostor.port)
    assert "did not keep an object" in lost(pair, tier)
    assert len(pair.agent.posted) == 1
    tier.close()
    impostor.stop()
