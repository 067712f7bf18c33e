"""Reading receipts: many questions at once on one connection, and none that hangs, whatever the store does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtally.client import StoreClient
from kvtally.core.receipts import Half, Role
from kvtally.endpoint import Endpoint, check_owner, endpoint
from kvtally.errors import ConfigError, IncompatibleError
from kvtally.router.receipts import Answer, ReceiptReader
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Refused
from tests.unit.router_kit import a_store, run
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, comes_about

HALF = Half(role=Role.DECODE, prompt_tokens=9, tokens_gpu=8, computed_tokens=1)


@contextlib.asynccontextmanager
async def reading(address: str | Endpoint, token: str = "") -> AsyncIterator[ReceiptReader]:
    reader = ReceiptReader(address if isinstance(address, Endpoint) else endpoint(address, token=token))
    task = asyncio.create_task(reader.run())
    try:
        yield reader
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def connected(reader: ReceiptReader) -> None:
    await comes_about(lambda: not reader.problem)


def file(address: str, ticket: str, half: Half = HALF) -> None:
    with StoreClient(address) as client:
        client.file_receipt(ticket, half).wait()


def test_a_half_is_found_whether_it_comes_before_or_after_the_question(tmp_path: Path) -> None:
    async def test() -> None:
        with a_store(tmp_path) as (_, path):
            async with reading(path) as reader:
                await connected(reader)
                await asyncio.to_thread(file, path, "early")
                early = await reader.ask("early", 5_000)
                assert early.receipt is not None
                assert early.receipt.decode == HALF
                asked = reader.ask("late", 5_000)
                await asyncio.to_thread(file, path, "late")
                late = await asked
                assert late.receipt is not None
                assert late.receipt.decode == HALF
                assert await reader.ask("never", 10) == Answer(None)

    run(test)


@pytest.mark.parametrize("is_there", [True, False])
def test_whether_a_store_answers_is_known_after_the_first_try(tmp_path: Path, is_there: bool) -> None:
    async def test() -> None:
        with a_store(tmp_path) as (_, path):
            async with reading(path if is_there else str(tmp_path / "nobody")) as reader:
                assert not reader.tried.is_set()
                async with asyncio.timeout(HANG_S):
                    await reader.tried.wait()
                assert (reader.problem == "") == is_there

    run(test)


def test_a_thousand_wait_at_once_and_those_beyond_the_store_s_limit_are_told_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        with a_store(tmp_path) as (_, path):
            async with reading(path) as reader:
                await connected(reader)
                limit = Limits().waiting_per_client
                asked = [reader.ask(f"t{number}", 30_000) for number in range(limit + 50)]
                async with asyncio.timeout(HANG_S):
                    assert await asyncio.gather(*asked[limit:]) == [Answer(None)] * 50
                assert not any(future.done() for future in asked[:limit])
                await asyncio.to_thread(file, path, "t7")
                async with asyncio.timeout(HANG_S):
                    assert (await asked[7]).receipt is not None

    run(test)


def test_without_a_store_questions_are_answered_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with reading(str(tmp_path / "nothing.sock")) as reader:
            await asyncio.sleep(0)
            assert reader.ask("t", 60_000).result() == Answer(None, "store_unreachable")

    run(test)


def test_a_store_that_goes_ends_the_waits_and_is_found_again(tmp_path: Path) -> None:
    async def test() -> None:
        with a_store(tmp_path) as (running, path):
            async with reading(path) as reader:
                await connected(reader)
                asked = reader.ask("t", 60_000)
                await asyncio.to_thread(running.stop)
                async with asyncio.timeout(HANG_S):
                    assert await asked == Answer(None, "store_unreachable")
                with a_store(tmp_path):
                    await connected(reader)

    run(test)


def test_the_arena_s_descriptors_are_not_kept(tmp_path: Path) -> None:
    async def test() -> None:
        with a_store(tmp_path) as (_, path):
            before = arenas()
            async with reading(path) as reader:
                await connected(reader)
                assert arenas() == before

    run(test)


def arenas() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd" in link for link in links)


@pytest.mark.parametrize(
    ("token", "problem"), [(TOKEN, ""), ("another token altogether", "store_refused"), ("", "store_refused")]
)
def test_over_tcp_the_token_is_proved(tmp_path: Path, token: str, problem: str) -> None:
    async def test() -> None:
        with a_store(tmp_path, tcp="127.0.0.1:0", token=TOKEN) as (running, _):
            async with reading(f"tcp://127.0.0.1:{running.server.tcp_port}", token) as reader:
                if not problem:
                    await connected(reader)
                    assert await reader.ask("t", 10) == Answer(None)
                    return
                await comes_about(lambda: reader.problem == problem)
                assert reader.ask("t", 10).result() == Answer(None, problem)

    run(test)


@pytest.mark.parametrize("host", ["localhost", "no.such.name.invalid"])
def test_a_store_that_moved_is_found_by_its_name(tmp_path: Path, host: str) -> None:
    """And one whose name cannot be resolved any more where it was."""

    async def test() -> None:
        with a_store(tmp_path, tcp="127.0.0.1:0", token=TOKEN) as (running, _):
            where = ("127.0.0.2" if host == "localhost" else "127.0.0.1", running.server.tcp_port)
            port = running.server.tcp_port
            known = Endpoint(address="it", targets=((socket.AF_INET, where),), token=TOKEN, host=host, port=port)
            async with reading(known) as reader:
                await connected(reader)

    run(test)


def test_a_store_whose_name_leads_nowhere_yet_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router starts all the same: it is there for its clients, with receipts or without."""

    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def test() -> None:
        with a_store(tmp_path, tcp="127.0.0.1:0", token=TOKEN) as (running, _):
            port = running.server.tcp_port
            with monkeypatch.context() as patched:
                patched.setattr(socket, "getaddrinfo", nowhere)
                with pytest.raises(ConfigError, match="Name or service not known"):
                    endpoint(f"tcp://localhost:{port}", token=TOKEN)
                known, lost = (
                    endpoint(f"tcp://{host}:{port}", token=TOKEN, must_resolve=False)
                    for host in ("localhost", "no.such.name.invalid")
                )
            assert known.targets == lost.targets == ()
            assert not known.shares_memory
            async with reading(known) as reader:
                await connected(reader)
            async with reading(lost) as reader, asyncio.timeout(HANG_S):
                await reader.tried.wait()
                assert reader.problem == "store_unreachable"

    run(test)


GREETING = Greeting(PROTOCOL_VERSION, "x", "s", 1 << 20, True, Limits())


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (b"", "store_unreachable"),  # accepts, and is silent
        (b"\xff\xff\xff\xff", "store_unreachable"),
        (encode(Greeting(99, "x", "s", 1 << 20, True, Limits())), "store_refused"),
        (encode(Refused(0, "KV-301", "too many clients", "Wait.")), "store_refused"),
        (encode(GREETING) + b"\x04\x00\x00\x00junk", "store_unreachable"),
    ],
)
def test_a_store_that_misbehaves_is_no_store(
    tmp_path: Path, says: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem == "store_unreachable":  # which it is, too, when it says nothing
        monkeypatch.setattr("kvtally.router.receipts.HANDSHAKE_S", 0.1)
    path = str(tmp_path / "s.sock")
    talks: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(writer)
        writer.write(says)

    async def test() -> None:
        server = await asyncio.start_unix_server(talk, path)
        async with server:
            async with reading(path) as reader:
                reader.problem = "not known yet"
                await comes_about(lambda: reader.problem == problem)
                assert reader.ask("t", 60_000).result() == Answer(None, problem)
            for writer in talks:
                writer.close()

    run(test)


def test_a_store_that_stops_answering_does_not_hold_questions_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtally.router.receipts.ANSWER_SLACK_S", 0.05)

    async def test() -> None:
        with a_store(tmp_path) as (running, path):
            async with reading(path) as reader:
                await connected(reader)
                stuck, release = asyncio.Event(), threading.Event()
                loop = asyncio.get_running_loop()
                blocked = loop.run_in_executor(
                    None, lambda: running.call(lambda: (loop.call_soon_threadsafe(stuck.set), release.wait(HANG_S)))
                )
                await stuck.wait()
                async with asyncio.timeout(HANG_S):
                    assert await reader.ask("t", 10) == Answer(None, "store_unreachable")
                release.set()
                await blocked

    run(test)


class Foreign:
    """A socket of a process of another user."""

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", 1, 12_345, 0)


def test_a_socket_of_somebody_else_is_not_believed() -> None:
    with pytest.raises(IncompatibleError, match="belongs to user 12345"):
        check_owner(Foreign(), "/s.sock", remedy="Be its user.")  # type: ignore[arg-type]
