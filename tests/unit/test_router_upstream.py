"""The HTTP client to engines: any way in which an answer is cut into packets gives the same answer, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvtally.config.instances import Instance
from kvtally.router.fleet import Member
from kvtally.router.legs import Failure, Leg, ask
from kvtally.router.upstream import HIGH_WATER_BYTES, EngineClient, Response, _Connection
from tests.unit.router_kit import run
from tests.waiting import HANG_S

HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n"


class Wire:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def parse(packets: list[bytes], *, closes: bool = False) -> tuple[int, bytes]:
    """What becomes of an answer that arrives in these packets."""
    connection = _Connection(deque(), set())
    connection.connection_made(Wire())  # type: ignore[arg-type]
    asked = asyncio.ensure_future(connection.exchange(b"", has_body=True))
    await asyncio.sleep(0)
    for packet in packets:
        connection.data_received(packet)
    if closes:
        connection.connection_lost(None)
    response = await asked
    body = b""
    while part := await response.read():
        body += part
    return response.status, body


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


cuts = st.lists(st.integers(0, 200), max_size=8)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place for place in places if place < len(data)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends) if end > start]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), cuts)
def test_chunks_may_be_cut_anywhere(parts: list[bytes], places: list[int]) -> None:
    packets = cut(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(parts), places)
    assert asyncio.run(parse(packets)) == (200, b"".join(parts))


@given(st.binary(max_size=60), cuts)
def test_a_length_may_be_cut_anywhere(body: bytes, places: list[int]) -> None:
    packets = cut(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, places)
    assert asyncio.run(parse(packets)) == (200, body)


@given(st.binary(max_size=60), cuts)
def test_without_either_the_answer_ends_with_the_connection(body: bytes, places: list[int]) -> None:
    assert asyncio.run(parse(cut(HEAD + b"\r\n" + body, places), closes=True)) == (200, body)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_an_answer_or_an_error(packets: list[bytes]) -> None:
    with contextlib.suppress(ConnectionResetError):
        status, _ = asyncio.run(parse([HEAD[:15], *packets], closes=True))
        assert 200 <= status < 600


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\n\r\nxx",
        HEAD + b"Content-Length: 3\r\n\r\nxx",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nmore",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"",
    ],
)
def test_what_is_not_http_or_is_cut_off_is_an_error(answer: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        asyncio.run(parse([answer] if answer else [], closes=True))


def test_trailers_and_informational_answers_are_dropped() -> None:
    body = b"1\r\nx\r\n0\r\nTrailer: y\r\n\r\n"
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: z\r\n\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body
    for place in range(1, len(answer)):
        assert asyncio.run(parse([answer[:place], answer[place:]])) == (200, b"x")


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[EngineClient]:
    tasks = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        client.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def get(client: EngineClient) -> tuple[int, bytes]:
    response = await client.request("GET", "/x", CIMultiDict(), None)
    try:
        return response.status, await all_of(response)
    finally:
        response.close()


async def all_of(response: Response) -> bytes:
    body = b""
    while part := await response.read():
        body += part
    return body


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_connection_is_used_again_and_a_stale_one_replaced() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):  # the third request on a connection finds it closed
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)

    async def test() -> None:
        async with serving(answer) as client:
            for _ in range(5):
                assert await get(client) == (200, b"ok")
            assert connections == 3

    run(test)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_connection_that_ends_is_not_kept(head: bytes) -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(head + b"Content-Length: 2\r\n\r\nok")

    async def test() -> None:
        async with serving(answer) as client:
            for _ in range(2):
                assert await get(client) == (200, b"ok")
            assert connections == 2

    run(test)


def test_an_engine_that_refuses_is_an_os_error() -> None:
    async def test() -> None:
        client = EngineClient("http://127.0.0.1:1")
        with pytest.raises(ConnectionRefusedError):
            await client.request("GET", "/", CIMultiDict(), None)

    run(test)


def test_waits_end_by_deadline_or_when_the_engine_is_given_up() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.Event().wait()

    async def test() -> None:
        async with serving(answer) as client:
            for end in (client.sweep, lambda: client.give_up("it went down")):
                asked = asyncio.ensure_future(get(client))
                async with asyncio.timeout(HANG_S):
                    while not client._waiting:  # noqa: ASYNC110 - nothing says so
                        await asyncio.sleep(0.001)
                client.timeout_s = -1.0  # whatever the clock says
                end()
                with pytest.raises(TimeoutError):
                    await asked
                client.timeout_s = 300.0

    run(test)


@pytest.mark.parametrize(("is_up", "failure"), [(True, ("timeout", True)), (False, ("down", False))])
def test_half_an_answer_is_waited_for_once(is_up: bool, failure: tuple[str, bool]) -> None:
    """Who stops half-way has had its time: another instance is not asked to take as long again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        await asyncio.Event().wait()

    async def test() -> None:
        async with serving(answer) as client:
            member = Member(Instance(url="http://127.0.0.1:1", store="", bootstrap=""))
            member.client, member.is_up = client, is_up
            asked = asyncio.ensure_future(ask(member, Leg("/", CIMultiDict(), None, "GET")))
            async with asyncio.timeout(HANG_S):
                while not any(waiting.has_begun for waiting in client._waiting):  # noqa: ASYNC110 - nothing says so
                    await asyncio.sleep(0.001)
            client.timeout_s = -1.0  # whatever the clock says
            client.sweep()
            told = await asked
            assert isinstance(told, Failure)
            assert (told.reason, told.is_final) == failure

    run(test)


def test_an_engine_waits_for_a_reader_that_does_not_read() -> None:
    wire = Wire()

    async def test() -> None:
        connection = _Connection(deque(), set())
        connection.connection_made(wire)  # type: ignore[arg-type]
        asked = asyncio.ensure_future(connection.exchange(b"", has_body=True))
        await asyncio.sleep(0)
        connection.data_received(HEAD + b"Content-Length: 10000000\r\n\r\n")
        response = await asked
        connection.data_received(b"x" * (HIGH_WATER_BYTES + 1))
        assert wire.is_paused
        await response.read()
        assert not wire.is_paused
        response.close()
        assert wire.is_aborted  # it was not complete

    run(test)
