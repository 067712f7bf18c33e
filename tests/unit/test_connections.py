"""Connections take turns: whoever sends much at once does not keep the loop from the others. Counted, not timed."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtally.store import connections
from kvtally.store.connections import REQUESTS_PER_TURN, Connection, Hub
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import Ping, Refused, Request


@pytest.fixture(autouse=True)
def turns_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURN_NS", 1 << 60)


class Wire(asyncio.Transport):
    """A transport that notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading = True
        self.written = b""
        self._closing = False

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True


class Scene:
    """Connections of one hub, which notes whose requests it gets in which order."""

    def __init__(self) -> None:
        self.order: list[tuple[Connection, int]] = []
        self.hub = SimpleNamespace(limits=Limits(), received=self._received, ended=Counter[str]())

    def _received(self, connection: Connection, request: Request) -> None:
        self.order.append((connection, request.id))

    def connection(self) -> tuple[Connection, Wire]:
        connection, wire = Connection(cast("Hub", self.hub), has_arena=False), Wire()
        connection.connection_made(wire)
        return connection, wire


def pings(count: int) -> bytes:
    return b"".join(encode(Ping(number)) for number in range(count))


async def settle() -> None:
    for _ in range(2000):
        await asyncio.sleep(0)


def test_a_flood_is_carried_out_in_turns_and_nothing_more_is_read_meanwhile() -> None:
    async def run() -> None:
        scene = Scene()
        flooding, wire = scene.connection()
        other, _ = scene.connection()
        flooding.data_received(pings(10_000))
        assert (len(scene.order), wire.is_reading) == (REQUESTS_PER_TURN, False)
        other.data_received(pings(1))  # it does not wait for the other 9,984
        assert scene.order[-1] == (other, 0)
        await settle()
        assert wire.is_reading
        assert [number for connection, number in scene.order if connection is flooding] == list(range(10_000))
        flooding.data_received(pings(1))
        assert scene.order[-1] == (flooding, 0)

    asyncio.run(run())


def test_two_floods_take_turns() -> None:
    async def run() -> None:
        scene = Scene()
        first, _ = scene.connection()
        second, _ = scene.connection()
        first.data_received(pings(10 * REQUESTS_PER_TURN))
        second.data_received(pings(10 * REQUESTS_PER_TURN))
        await settle()
        turns = [connection for connection, _ in scene.order[::REQUESTS_PER_TURN]]
        assert turns == [first, second] * 10

    asyncio.run(run())


def test_what_follows_a_broken_frame_is_not_carried_out() -> None:
    async def run() -> None:
        scene = Scene()
        connection, wire = scene.connection()
        connection.data_received(pings(3 * REQUESTS_PER_TURN) + b"\xff\xff\xff\xff" + pings(5))
        await settle()
        assert len(scene.order) == 3 * REQUESTS_PER_TURN
        assert encode(Refused(0, "KV-503", "", ""))[4:12] in wire.written
        assert (wire.is_closing(), scene.hub.ended) == (True, {"KV-503": 1})

    asyncio.run(run())


def test_a_connection_that_is_lost_between_two_turns_asks_for_nothing_more() -> None:
    async def run() -> None:
        scene = Scene()
        scene.hub.lost = lambda connection: None
        connection, _ = scene.connection()
        connection.data_received(pings(10 * REQUESTS_PER_TURN))
        connection.connection_lost(None)
        await settle()
        assert len(scene.order) == REQUESTS_PER_TURN

    asyncio.run(run())


def test_a_turn_ends_with_the_request_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(connections, "TURN_NS", 0)
        scene = Scene()
        first, _ = scene.connection()
        second, _ = scene.connection()
        first.data_received(pings(5))
        second.data_received(pings(5))
        await settle()
        assert [connection for connection, _ in scene.order] == [first, second] * 5

    asyncio.run(run())
