"""What the store does around NIXL, with faults that a real network shows too rarely. `tests/nixl` has the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.space import MAX_PIECES, Piece
from kvtally.errors import ConfigError
from kvtally.shm import address_of
from kvtally.store.tiers import nixl
from kvtally.store.tiers.nixl import MOST_IDLE, WHEELS, Nixl, runs_of
from tests.unit.nixl_kit import VARIABLES, FakeAgent, Script, install
from tests.waiting import HANG_S, eventually

DATA = bytes(range(256)) * 64
WHOLE = [Piece(0, len(DATA))]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Pair:
    """A holds DATA, B reads it."""

    def __init__(self) -> None:
        self.there, self.here = bytearray(DATA), bytearray(len(DATA))
        self.a = Nixl("a", memoryview(self.there))
        self.b = Nixl("b", memoryview(self.here))
        self.agent: FakeAgent = self.b._agent

    def read(self) -> None:
        """Read all of it."""
        self.b.read(self.a.card, WHOLE, [memoryview(self.here)])

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair(library: None) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


class Reading(threading.Thread):
    """A read in a thread of its own, and how it ended."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(daemon=True)
        self.pair = pair
        self.ended = ""
        self.start()

    def run(self) -> None:
        try:
            self.pair.read()
            self.ended = "done"
        except ConnectionError as error:
            self.ended = str(error)

    def how(self) -> str:
        self.join(HANG_S)
        return self.ended


def error_of(pair: Pair) -> str:
    with pytest.raises(ConnectionError) as raised:
        pair.read()
    return str(raised.value)


# ---- one READ


def test_what_was_read_is_there(pair: Pair) -> None:
    pair.read()
    assert pair.here == DATA
    assert pair.agent.released == {0}


def test_a_late_read_is_neither_given_up_nor_released(pair: Pair) -> None:
    script = pair.agent.states[0] = Script()
    reading = Reading(pair)
    eventually(lambda: pair.agent.polls >= 50, "it was asked about often")
    assert (reading.is_alive(), pair.agent.released) == (True, set())
    script.state = "DONE"
    assert reading.how() == "done"
    assert pair.agent.released == {0}


@pytest.mark.parametrize("end", ["ERR", "raises"])
def test_a_read_that_fails_closes_its_endpoint(pair: Pair, end: str) -> None:
    pair.agent.states[0] = Script(end)
    assert error_of(pair).startswith("a READ failed")
    assert (pair.agent.connected, pair.agent.released) == ([], {0})
    pair.read()
    assert pair.agent.connected == [b"a"]


def test_a_failed_read_returns_only_when_those_beside_it_have_ended(pair: Pair) -> None:
    """Only then is the endpoint closed, and before that something might still land."""
    first, second = Script(), Script()
    pair.agent.states |= {0: first, 1: second}
    readings = [Reading(pair)]
    eventually(lambda: len(pair.agent.posted) == 1, "the first READ has begun")
    readings.append(Reading(pair))
    eventually(lambda: len(pair.agent.posted) == 2, "the second READ has begun")
    first.state = "ERR"
    eventually(lambda: pair.agent.released == {0}, "the first READ has ended")
    asked = pair.agent.polls
    eventually(lambda: pair.agent.polls >= asked + 50, "the second was asked about often")
    assert readings[0].is_alive()
    assert pair.agent.connected == [b"a"]  # still
    assert error_of(pair) == "another READ failed, and not all have ended"  # and nobody begins one
    second.state = "DONE"
    assert [reading.how() for reading in readings] == ["a READ failed (ERR)", "done"]
    assert pair.agent.connected == []


# ---- other agents


def test_an_agent_that_cannot_be_connected(pair: Pair) -> None:
    FakeAgent.refuses = "add_remote_agent"
    assert error_of(pair) == "NIXL cannot connect (add_remote_agent)"
    FakeAgent.refuses = ""
    pair.read()
    assert pair.here == DATA


def test_endpoints_that_nobody_uses_any_more_are_closed(pair: Pair) -> None:
    """A store that is restarted has a new card."""
    script = pair.agent.states[0] = Script()
    reading = Reading(pair)
    eventually(lambda: len(pair.agent.posted) == 1, "a READ from the oldest has begun")
    lives = [Nixl(f"life-{number}", memoryview(pair.there)) for number in range(MOST_IDLE + 5)]
    for life in lives:
        pair.b.read(life.card, WHOLE, [memoryview(pair.here)])
        life.close()
    assert pair.agent.connected == [b"a", *(f"life-{number}".encode() for number in range(5, MOST_IDLE + 5))]
    script.state = "DONE"
    assert reading.how() == "done"


# ---- start and end


def test_closing_lets_go_of_the_arena(pair: Pair) -> None:
    pair.read()
    pair.close()
    assert (pair.agent.connected, pair.agent.is_registered) == ([], False)
    assert error_of(pair) == "this store is stopping"


def test_closing_leaves_alone_what_a_read_still_uses(pair: Pair) -> None:
    script = pair.agent.states[0] = Script()
    reading = Reading(pair)
    eventually(lambda: pair.agent.polls > 0, "it has begun")
    pair.close()
    assert (pair.agent.connected, pair.agent.is_registered) == ([b"a"], True)
    script.state = "DONE"
    assert reading.how() == "done"


def refusal(**arguments: bool) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        Nixl("a", memoryview(bytearray(4096)), **arguments)
    return raised.value


@pytest.mark.parametrize(
    ("refuses", "may_use_tcp", "message", "remedy"),
    [
        ("create_backend", False, "UCX finds no RDMA device", "transport: nixl-tcp"),
        ("create_backend", True, "UCX finds no network", "transport: tcp"),
        ("register_memory", False, "the arena of 4KiB cannot be registered", "ulimit -l"),
    ],
)
def test_what_cannot_work_is_refused(library: None, refuses: str, may_use_tcp: bool, message: str, remedy: str) -> None:
    FakeAgent.refuses = refuses
    error = refusal(may_use_tcp=may_use_tcp)
    assert error.code == "KV-106"
    assert message in error.message
    assert remedy in error.remedy


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in WHEELS:
        monkeypatch.setitem(sys.modules, wheel, None)  # an import of it fails now
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")
    error = refusal()
    assert error.code == "KV-106"
    assert "pip install 'kvtally[nixl]'" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("given", ["tcp", "all", "^sm", "rc,tcp", "rc"])
def test_ucx_may_use_rdma_only_whatever_its_environment_says(
    library: None, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("UCX_TLS", given)
    Nixl("a", memoryview(bytearray(4096)), may_use_tcp=True).close()
    assert os.environ["UCX_TLS"] == given
    Nixl("a", memoryview(bytearray(4096))).close()
    assert os.environ["UCX_TLS"] == nixl.RDMA


def test_nobody_imports_the_library_who_was_not_told_to() -> None:
    program = (
        "import sys, kvtally.store.server, kvtally.store.tiers.nixl\n"
        "assert not [name for name in sys.modules if name.startswith('nixl')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


# ---- runs


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Piece], list[int]]:
    """Pieces there, and the sizes of views here, of one object."""
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=MAX_PIECES)
    there, here = draw(sizes), draw(sizes)
    while sum(there) != sum(here):  # the shorter one gets what is missing
        shorter, longer = sorted((there, here), key=sum)
        shorter[-1] += sum(longer) - sum(shorter)
    offsets = draw(st.permutations(range(len(there))))
    return [Piece(1000 * (offsets[number] + 1), size) for number, size in enumerate(there)], here


@given(layouts())
def test_runs_are_the_object_byte_by_byte(layout: tuple[list[Piece], list[int]]) -> None:
    there, here = layout
    views = [memoryview(bytearray(size)) for size in here]
    runs = runs_of(there, views)
    offsets = [offset + at for offset, size in there for at in range(size)]
    addresses = [address_of(view) + at for view in views for at in range(len(view))]
    assert [run.offset + at for run in runs for at in range(run.length_bytes)] == offsets
    assert [run.address + at for run in runs for at in range(run.length_bytes)] == addresses
    assert len(runs) < len(there) + len(here)


@pytest.mark.parametrize(
    "pieces", [[], [Piece(0, 9)], [Piece(0, 11)], [Piece(0, 10), Piece(20, 0)], [Piece(0, 11), Piece(20, -1)]]
)
def test_pieces_of_another_length(pieces: list[Piece]) -> None:
    with pytest.raises(ConnectionError, match="pieces"):
        runs_of(pieces, [memoryview(bytearray(10))])
