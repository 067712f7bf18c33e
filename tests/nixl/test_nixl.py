"""Two real processes with the real library: one reads objects out of the other one's arena.

There is no RDMA device where tests run, so UCX is told to use TCP, on the loopback interface. That proves that bytes
are right and whose the memory is, and says nothing about speed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from kvtally.core.space import GRANULE_BYTES, MAX_PIECES, Piece, round_up
from kvtally.errors import TransportError
from kvtally.processes import Worker, own_environment
from kvtally.store.tiers.nixl import WHEELS
from kvtally.wire.limits import MIB
from tests.nixl.node import ARENA_BYTES, Look, Request
from tests.waiting import HANG_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(find_spec(wheel) for wheel in WHEELS),
        reason="NIXL is not installed; `scripts/install-nixl PYTHON` does that",
    ),
]

LENGTH = 3 * MIB + 5
SOME = [Piece(0, LENGTH)]
POLLS = 100  # a READ that NIXL was asked about so often has begun, and was not given up


class Node(Worker):
    """A process that runs `tests.nixl.node`, and the card of the node that it reads from."""

    def __init__(self, log: Path, *, may_use_tcp: bool = True) -> None:
        local = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}
        super().__init__("tests.nixl.node", log=log, environment={**own_environment(), **local})
        self.log = log
        self.card = self.other = ""
        self._may_use_tcp = may_use_tcp

    def open(self) -> None:
        self.card = self.ask(Request(do="open", may_use_tcp=self._may_use_tcp), str, HANG_S)

    def put(self, number: int, pieces: list[Piece], length_bytes: int = LENGTH) -> None:
        self._do(Request(do="put", object=number, length_bytes=length_bytes, pieces=pieces))

    def flip(self, offset: int) -> None:
        self._do(Request(do="flip", pieces=[Piece(offset, 1)]))

    def close_nixl(self) -> None:
        self._do(Request(do="close"))

    def begin(
        self, number: int, there: list[Piece], here: list[Piece], *, length_bytes: int = LENGTH, read: int = 0
    ) -> None:
        request = Request(do="begin", object=number, length_bytes=length_bytes, there=there, pieces=here, read=read)
        request.card = self.other
        self._do(request)

    def look(self, read: int = 0) -> Look:
        return self.ask(Request(do="look", read=read), Look, HANG_S)

    def outcome(self, read: int = 0) -> Look:
        eventually(lambda: self.look(read).is_over, f"read {read} has ended")
        return self.look(read)

    def read(self, number: int, there: list[Piece], here: list[Piece], length_bytes: int = LENGTH) -> Look:
        self.begin(number, there, here, length_bytes=length_bytes)
        return self.outcome()

    def waits(self, *reads: int) -> None:
        """Returns when NIXL was asked often about these reads, and none of them has ended."""
        begun = self.look(reads[0]).polls
        eventually(lambda: self.look(reads[0]).polls >= begun + POLLS * len(reads), "NIXL was asked often")
        assert not any(self.look(read).is_over for read in reads)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _do(self, request: Request) -> None:
        self.ask(request, object, HANG_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    with started(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def nodes(pair: tuple[Node, Node]) -> Iterator[tuple[Node, Node]]:
    """A has what B reads. All tests that leave them alive share them."""
    a, b = pair
    b.other = a.card
    yield pair
    a.signal(signal.SIGCONT)


@contextmanager
def started(directory: Path) -> Iterator[tuple[Node, Node]]:
    with Node(directory / "a.log") as a, Node(directory / "b.log") as b:
        a.open()
        b.open()
        b.other = a.card
        yield a, b


def scattered(random: Random, length_bytes: int) -> list[Piece]:
    """Where an object of this length may lie: pieces of whole granules in any order, with gaps between them."""
    granules = round_up(length_bytes) // GRANULE_BYTES
    count = random.randint(1, min(MAX_PIECES, granules))
    cuts = [0, *sorted(random.sample(range(1, granules), count - 1)), granules]
    sizes = [(end - start) * GRANULE_BYTES for start, end in pairwise(cuts)]
    sizes[-1] -= granules * GRANULE_BYTES - length_bytes
    free = ARENA_BYTES // GRANULE_BYTES - granules
    gaps = sorted(random.randint(0, free) for _ in sizes)
    starts, at = {}, 0
    for part, gap in zip(random.sample(range(count), count), gaps, strict=True):
        starts[part] = (at + gap) * GRANULE_BYTES
        at += round_up(sizes[part]) // GRANULE_BYTES
    return [Piece(starts[part], size) for part, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(3))
def test_objects_of_all_sizes_in_all_pieces_arrive(nodes: tuple[Node, Node], seed: int) -> None:
    a, b = nodes
    random = Random(seed)
    lengths = [1, 4095, 4096, 4097, 64 * 1024, MIB, 2 * MIB + 3, 16 * MIB, random.randint(1, 8 * MIB)]
    for number, length in enumerate(lengths):
        there, here = scattered(random, length), scattered(random, length)
        a.put(number, there, length)
        look = b.read(number, there, here, length)
        assert look.is_right, (length, there, here, look)


def test_one_wrong_byte_is_seen(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.put(1, SOME)
    a.flip(LENGTH - 1)
    look = b.read(1, SOME, SOME)
    assert (look.is_right, look.error) == (False, "")
    a.flip(LENGTH - 1)
    assert b.read(1, SOME, SOME).is_right


def test_a_node_that_is_stopped_holds_its_readers_until_it_goes_on(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.put(1, SOME)
    assert b.read(1, SOME, SOME).is_right
    a.signal(signal.SIGSTOP)
    b.begin(1, SOME, SOME, read=1)
    b.begin(1, SOME, [Piece(8 * MIB, LENGTH)], read=2)
    b.waits(1, 2)
    a.signal(signal.SIGCONT)
    assert b.outcome(1).is_right
    assert b.outcome(2).is_right


def test_a_node_that_was_stopped_before_anybody_connected(tmp_path: Path) -> None:
    with started(tmp_path) as (a, b):
        a.put(1, SOME)
        a.signal(signal.SIGSTOP)
        b.begin(1, SOME, SOME)
        b.waits(0)
        a.signal(signal.SIGCONT)
        assert b.outcome().is_right


def test_all_reads_of_a_killed_node_end_and_its_successor_serves(tmp_path: Path) -> None:
    with started(tmp_path) as (a, b):
        a.put(1, SOME)
        assert b.read(1, SOME, SOME).is_right
        a.signal(signal.SIGSTOP)
        reads = range(1, 5)
        for read in reads:
            b.begin(1, SOME, [Piece(read * 4 * MIB, LENGTH)], read=read)
        b.waits(*reads)
        a.kill()
        assert ["a READ failed" in b.outcome(read).error for read in reads] == [True] * 4
        assert b.read(1, SOME, SOME).error  # nobody is there
        with Node(tmp_path / "c.log") as c:
            c.open()
            c.put(2, SOME)
            b.other = c.card
            assert b.read(2, SOME, SOME).is_right


@pytest.mark.parametrize(
    "there", [[Piece(ARENA_BYTES - MIB, LENGTH)], [Piece(0, LENGTH - 1)], [Piece(0, LENGTH), Piece(0, 0)], []]
)
def test_pieces_that_cannot_be_do_no_harm(nodes: tuple[Node, Node], there: list[Piece]) -> None:
    a, b = nodes
    a.put(1, SOME)
    assert b.read(1, there, SOME).error
    assert b.read(1, SOME, SOME).is_right


@pytest.mark.parametrize("card", ["", "AAAAAAAAAAA=", "AAAAAAAAAABnYXJiYWdl", "A" * 4000])
def test_a_card_that_is_none(nodes: tuple[Node, Node], card: str) -> None:
    a, b = nodes
    a.put(1, SOME)
    b.other = card
    assert b.read(1, SOME, SOME).error.startswith("NIXL cannot connect")
    b.other = a.card
    assert b.read(1, SOME, SOME).is_right


def test_without_rdma_it_is_refused_although_the_environment_names_tcp(tmp_path: Path) -> None:
    with Node(tmp_path / "log", may_use_tcp=False) as node:
        with pytest.raises(TransportError, match="NIXL cannot be used here: UCX finds no RDMA device"):
            node.open()
        assert node.log.read_text().count("UCX_TLS=tcp is not used") == 1


def test_it_closes(tmp_path: Path) -> None:
    with started(tmp_path) as (a, b):
        a.put(1, SOME)
        assert b.read(1, SOME, SOME).is_right
        b.close_nixl()
        assert b.read(1, SOME, SOME).error == "this store is stopping"
        b.close_nixl()
        a.close_nixl()


def test_it_closes_around_a_read_that_does_not_end(tmp_path: Path) -> None:
    with started(tmp_path) as (a, b):
        a.put(1, SOME)
        a.signal(signal.SIGSTOP)
        b.begin(1, SOME, SOME)
        b.waits(0)
        b.close_nixl()
        b.waits(0)
        a.signal(signal.SIGCONT)
        assert b.outcome().is_right  # the memory was still registered
