"""A router among hostile clients: its other clients get their answers, soon, and its memory comes back.

Each attack was worth seconds of everybody's time, or gigabytes, before there was a bound against it. `WORK_S` is
processor time of the router's own, so that no verdict depends on how fast or how busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hostile.router_rig import PATH, Rig, a_router
from tests.waiting import HANG_S, comes_about

MIB = 1 << 20
WORK_S = 0.1  # the most that the router may work while somebody waits for `/health`
BODY_BYTES = 32 * MIB
SLACK_BYTES = 2 * BODY_BYTES  # what an allocator may keep of what it was given back
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with a_router(tmp_path_factory.mktemp("hostile")) as made:
        asyncio.run(warm(made))
        yield made


async def warm(rig: Rig) -> None:
    """One honest request of every kind that the attacks imitate, so that later differences are the attacks'."""
    assert await rig.post(json.dumps({"prompt": "x" * (8 * MIB)}).encode()) == 200
    assert await rig.post(json.dumps({"prompt": list(range(100_000))}).encode()) == 200
    assert await rig.post(b"{}") == 200


def run(test: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * HANG_S):
            await test()  # type: ignore[operator]

    asyncio.run(bounded())


async def is_back(rig: Rig, before_bytes: int) -> None:
    await comes_about(lambda: rig.memory_bytes() - before_bytes <= SLACK_BYTES, "the memory is back where it was")


def filled(before: bytes, element: bytes, after: bytes) -> bytes:
    """A body just within the limit, with as many elements as fit."""
    count = (BODY_BYTES - len(before) - len(after)) // (len(element) + 1)
    return before + b",".join([element] * count) + after


def members() -> bytes:
    return b",".join(b'"%x":1' % number for number in range(2_900_000))


BODIES = {
    "messages": lambda: filled(b'{"messages":[', b"1", b"]}"),
    "texts": lambda: filled(b'{"prompt":[', b'""', b"]}"),
    "ids": lambda: filled(b'{"prompt":[', b"1", b"]}"),
    "xargs": lambda: b'{"prompt":"p","vllm_xargs":{%b}}' % members(),
    "members": lambda: b"{%b}" % members(),
    "lists": lambda: filled(b'{"prompt":"p","x":[', b"[]", b"]}"),
    "nested": lambda: b'{"prompt":"p","x":' + b"[" * (BODY_BYTES - 100) + b"}",
    "escapes": lambda: b'{"prompt":"%b"}' % (b'\\"\\\\' * (BODY_BYTES // 4 - 10)),
    "commas": lambda: b'{"prompt":"%b"}' % (b"," * (BODY_BYTES - 20)),
}


class TestBodies:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", BODIES)
    def test_no_body_stops_the_router_or_takes_more_than_four_times_its_size(self, rig: Rig, name: str) -> None:
        async def test() -> None:
            data = BODIES[name]()
            before_bytes = rig.memory_bytes()
            most_bytes = 0

            async def measure() -> None:
                nonlocal most_bytes
                while True:
                    most_bytes = max(most_bytes, rig.memory_bytes())
                    await asyncio.sleep(0.001)

            async with rig.watched() as others:
                measuring = asyncio.create_task(measure())
                status = await rig.post(data)
                measuring.cancel()
            assert status == (200 if name in ("escapes", "commas") else 400 if name == "nested" else 413)
            assert others.statuses == {200}
            assert others.work_s <= WORK_S
            assert most_bytes - before_bytes <= 4 * BODY_BYTES
            await is_back(rig, before_bytes)

        run(test)

    def test_a_million_ids_pass(self, rig: Rig) -> None:
        async def test() -> None:
            data = b'{"prompt":[%b]}' % b",".join(b"%d" % (7919 * number % 150_000) for number in range(1_000_000))
            async with rig.watched() as others:
                assert await rig.post(data) == 200
            assert (others.statuses, others.work_s <= WORK_S) == ({200}, True)

        run(test)

    @pytest.mark.parametrize(
        "sent",
        [b"Content-Length: 33554432\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
        ids=["announced", "chunked"],
    )
    def test_bodies_that_do_not_come_shut_nobody_out(self, rig: Rig, sent: bytes) -> None:
        """And honest clients whose bodies come in two parts are none of those."""

        async def in_parts(may_go_on: asyncio.Event) -> AsyncIterator[bytes]:
            data = json.dumps({"prompt": "x" * 370}).encode()
            yield data[:200]
            await may_go_on.wait()
            yield data[200:]

        async def test() -> None:
            async with rig.connections([HEAD + sent] * 200), rig.watched() as others:
                may_go_on = asyncio.Event()
                honest = [asyncio.create_task(rig.post(in_parts(may_go_on))) for _ in range(40)]
                asyncio.get_running_loop().call_later(0.5, may_go_on.set)
                assert {await task for task in honest} == {200}
            assert (others.statuses, others.work_s <= WORK_S) == ({200}, True)

        run(test)

    def test_a_bomb_is_not_unpacked(self, rig: Rig) -> None:
        """2 GiB in 2 MiB. Unpacking all of it takes seconds of a processor, whoever waits for it."""

        async def test() -> None:
            part = gzip.compress(b" " * (256 * MIB), 9)
            bomb = gzip.compress(b"", 9)[:10] + b"".join([_deflated(part)] * 8)
            before_bytes, begun_s = rig.memory_bytes(), rig.work_s
            async with rig.watched() as others:
                head = HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
                async with rig.connections([head + bomb]) as [(reader, _)]:
                    assert b" 413 " in await reader.readline()
                    await reader.read()  # until the router has closed it: it has done what it will do
                asked = others.answers
            assert (others.statuses, others.work_s <= WORK_S) == ({200}, True)
            assert rig.work_s - begun_s < 1.0 + asked * 0.01
            await is_back(rig, before_bytes)

        run(test)


class TestFloods:
    def test_requests_that_are_none_are_answered_and_forgotten(self, rig: Rig) -> None:
        async def test() -> None:
            before_bytes = rig.memory_bytes()
            wrong = [
                b"\r\n\r\n\r\n",
                b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n",
                b"\x16\x03\x01" + b"\0" * 200,
                HEAD + b"\r\n\r\n",
            ]
            async with rig.watched() as others:
                for _ in range(10):
                    async with rig.connections(wrong * 25):
                        pass
            assert (others.statuses, others.work_s <= WORK_S) == ({200}, True)
            await is_back(rig, before_bytes)

        run(test)

    def test_header_names_are_not_kept(self, tmp_path: Path) -> None:
        """With --strict the refusal names what the client must not send, and the book keeps the refusal."""

        async def test() -> None:
            names = b"".join(b"x-kvtally-%d-%b: x\r\n" % (number, b"n" * 4000) for number in range(100))
            request = HEAD + names + b"Content-Length: 2\r\n\r\n{}"
            with a_router(tmp_path, "--strict") as rig:
                before_bytes = 0
                async with rig.connections([b""]) as [(reader, writer)]:
                    for number in range(300):
                        if number == 20:  # buffers have grown to what they need
                            before_bytes = rig.memory_bytes()
                        writer.write(request)
                        head = await reader.readuntil(b"\r\n\r\n")
                        assert b" 400 " in head
                        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                        await reader.readexactly(length)
                await is_back(rig, before_bytes)

        run(test)

    def test_connections_without_a_request_shut_nobody_out(self, tmp_path: Path) -> None:
        """A router with 1,024 open files, and 1,200 connections that say nothing, or half of a head. They come in
        groups smaller than the number that may wait; without gaps for honest clients it would be another attack, on
        the kernel's queue."""

        async def test() -> None:
            with a_router(tmp_path, open_files=1_024) as rig:
                async with rig.watched() as others, contextlib.AsyncExitStack() as stack:
                    for _ in range(12):
                        await stack.enter_async_context(rig.connections([b"", b"GET /hea", HEAD, b""] * 25))
                        seen = others.answers
                        await comes_about(lambda seen=seen: others.answers > seen)
                assert (others.statuses, others.work_s <= WORK_S) == ({200}, True)
                assert rig.open_files < 512

        run(test)


def _deflated(packed: bytes) -> bytes:
    """What is between a gzip member's head and its end: as if it went on."""
    return packed[10:-8]
