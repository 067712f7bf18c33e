"""What clients send before it is a request: connections, bodies, and how many elements they may have."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router import elements, intake
from kvtally.router.body import Kind
from kvtally.router.book import LONGEST_TEXT
from tests.unit.router_kit import LONG, PATH, Kit, Reply, a_store, kit, run, until
from tests.waiting import HANG_S

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with a_store(tmp_path) as (_, path):
        yield path


json_values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,:[]{}"\\\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\:,', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def understood(data: bytes, *, path: str = PATH) -> bodies.Understood:
    return bodies.understand(data, path=path, salt="s", is_generating=True)


def peak_bytes(data: bytes, *, path: str = PATH) -> int:
    """What taking this body apart needs at once, beside the body."""
    tracemalloc.start()
    try:
        with contextlib.suppress(RouteError):
            understood(data, path=path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(element: bytes, size_bytes: int) -> bytes:
    return b",".join([element] * (size_bytes // (len(element) + 1)))


def members(count: int) -> bytes:
    return b"{%b}" % b",".join(b'"%x":1' % number for number in range(count))


class TestElements:
    @pytest.mark.parametrize(
        ("data", "path"),
        [
            (b'{"messages":[%b]}' % many(b"1", 6 * MIB), bodies.CHAT_PATH),
            (b'{"prompt":[%b]}' % many(b'""', 8 * MIB), PATH),
            (b'{"prompt":[%b]}' % many(b"1", 6 * MIB), PATH),
            (b'{"prompt":"p","vllm_xargs":%b}' % members(400_000), PATH),
            (members(400_000), PATH),
            (members(elements.MOST_MEMBERS + 2), PATH),
            (b'{"a" :[%b]}' % many(b"[]", 2 * MIB), PATH),
        ],
        ids=["messages", "texts", "ids", "xargs", "members", "members, small", "lists"],
    )
    def test_too_many_are_refused_before_they_are_built(self, data: bytes, path: str) -> None:
        with pytest.raises(RouteError) as caught:
            understood(data, path=path)
        assert (caught.value.code, caught.value.status) == ("KV-705", 413)
        assert peak_bytes(data, path=path) < max(len(data), 2 * MIB)

    @pytest.mark.parametrize(
        ("data", "path", "kind"),
        [
            (b'{"prompt":[%b]}' % b",".join(b"%d" % (7919 * n % 150_000) for n in range(1_000_000)), PATH, Kind.TOKENS),
            (b'{"prompt":[%b]}' % many(b"1", 2 * MIB), PATH, Kind.TOKENS),
            (b'{"prompt":[%b]}' % many(b'"",1', MIB), PATH, Kind.BATCH),
            (b'{"messages":[%b]}' % many(b"1", 2 * MIB), bodies.CHAT_PATH, Kind.MESSAGES),
            (b'{"vllm_xargs":{%b},"prompt":"p"}' % many(b'"a":1', MIB // 2), PATH, Kind.TEXT),
            (b'{"prompt":"%b"}' % (b"One, two, three.\\n" * (MIB // 4)), PATH, Kind.TEXT),
            (b'{"prompt":"%b"}' % (b'{\\"a\\":[1,\\\\\\"2\\\\\\"]},' * (MIB // 8)), PATH, Kind.TEXT),
        ],
        ids=["a million ids", "ids", "texts and ids", "messages", "xargs", "text", "JSON in text"],
    )
    def test_what_somebody_may_need_passes_within_four_times_its_size(self, data: bytes, path: str, kind: Kind) -> None:
        assert understood(data, path=path).kind is kind
        assert peak_bytes(data, path=path) < 4 * len(data)

    @given(st.dictionaries(st.text('a"\\:,', max_size=4), json_values, max_size=8), st.integers(1, 40))
    def test_strings_are_told_from_elements(self, tree: dict[str, object], block_bytes: int) -> None:
        """Exact, wherever a block happens to end: one member more than allowed is refused, and none fewer."""
        data = msgspec.json.encode(tree)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elements, "FEW", -1)
            patch.setattr(elements, "BLOCK_BYTES", block_bytes)
            patch.setattr(elements, "MOST_MEMBERS", len(tree))
            elements.check(data)
            patch.setattr(elements, "MOST_MEMBERS", len(tree) - 1)
            with pytest.raises(RouteError):
                elements.check(data)

    def test_many_messages_are_one_part_and_fewer_are_not(self) -> None:
        one = b'{"role":"user","content":"a"}'
        for count in (elements.FEW, bodies.MOST_PARTS, bodies.MOST_PARTS + 1):
            fields = bodies.read_fields(b'{"messages":[%b]}' % b",".join([one] * count))
            _, parts = bodies.prompt_of(fields, is_chat=True)
            assert len(parts) == (count if count <= bodies.MOST_PARTS else 1)

    @pytest.mark.parametrize("count", [0, 1, 40_000, 100_001])
    def test_ids_read_piece_by_piece_are_all_there(self, count: int) -> None:
        fields = bodies.read_fields(json.dumps({"prompt": list(range(count))}).encode())
        kind, (part,) = bodies.prompt_of(fields, is_chat=False)
        assert kind is Kind.TOKENS
        assert list(part.cast("I")) == list(range(count))

    def test_reserved_names_among_many_are_found(self) -> None:
        xargs = b",".join([*(b'"%x":1' % n for n in range(900)), b'"kv\\u005ftransfer_params":{}'])
        fields = bodies.read_fields(b'{"vllm_xargs":{%b}}' % xargs)
        assert bodies.scrub(fields) == ["vllm_xargs.kv_transfer_params"]
        assert len(json.loads(bytes(fields["vllm_xargs"]))) == 900

    def test_the_engine_s_own_choice_between_messages_and_prompt_is_followed(self) -> None:
        both = b'{"prompt":"p","messages":[{"role":"user"}]}'
        assert understood(both).kind is Kind.TEXT
        assert understood(both, path=bodies.CHAT_PATH).kind is Kind.MESSAGES
        assert understood(both).prints != understood(b'{"prompt":"q","messages":[{"role":"user"}]}').prints


class TestBodies:
    def test_announced_bytes_take_nothing_from_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each announces a third of the room, or does not say how much will come."""
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 3 * MIB)

        async def test() -> None:
            async with kit(tmp_path, prefill=0, max_body_bytes=MIB) as it:
                heads = [b"Content-Length: %d\r\n\r\n" % MIB, b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
                async with connections(
                    it, [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + heads[n % 2] for n in range(40)]
                ):
                    assert (await it.ask()).status == 200

        run(test)

    def test_a_body_in_two_parts_is_as_good_as_any(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 40 * 1000)
        may_go_on = asyncio.Event()

        async def halves() -> AsyncIterator[bytes]:
            data = json.dumps({"prompt": "x" * 300}).encode()
            yield data[:100]
            await may_go_on.wait()
            yield data[100:]

        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                asked = [asyncio.create_task(it.send("POST", PATH, data=halves())) for _ in range(40)]
                await intake_has(it, 40)
                may_go_on.set()
                assert {reply.status for reply in await asyncio.gather(*asked)} == {200}

        run(test)

    def test_a_body_that_trickles_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its bytes come often enough, and too few of them."""
        monkeypatch.setattr(intake, "BODY_S", 0.2)

        async def drops() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.02)

        async def test() -> None:
            async with kit(tmp_path, prefill=0, timeout_s=300) as it:
                reply = await it.send("POST", PATH, data=drops())
                assert (reply.status, "KV-705" in reply.json()["error"]["message"]) == (408, True)

        run(test)

    def test_the_largest_of_those_still_arriving_makes_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 3 * MIB)

        async def hog(size: int) -> AsyncIterator[bytes]:
            yield b" " * size
            await asyncio.sleep(3 * HANG_S)

        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                hogs = [asyncio.create_task(it.send("POST", PATH, data=hog(n * MIB // 4))) for n in (5, 6)]
                await intake_has(it, 2, 11 * MIB // 4)
                assert (await it.ask("x" * (MIB // 2))).status == 200
                done, _ = await asyncio.wait(hogs, return_when=asyncio.FIRST_COMPLETED)
                assert {task.result().status for task in done} == {503}
                assert done == {hogs[1]}
                hogs[0].cancel()

        run(test)

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "bare"])
    def test_packed_bodies_are_unpacked(self, tmp_path: Path, encoding: str) -> None:
        async def test() -> None:
            data = json.dumps({"prompt": "p" * 100_000}).encode()
            async with kit(tmp_path, prefill=0) as it:
                reply = await send_packed(it, pack(data, encoding), encoding)
                assert reply.status == 200
                assert it.decode[0].seen[0].body["prompt"] == "p" * 100_000
                for broken in (pack(data, encoding)[:-10], pack(data, encoding) + b"more", b"\x08 nonsense"):
                    assert (await send_packed(it, broken, encoding)).status == 400
                assert (await send_packed(it, data, "br")).status == 415

        run(test)

    def test_what_is_refused_is_not_unpacked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        unpacked_bytes = 0
        real = intake._Packed.unpack

        def counted(packed: intake._Packed, part: bytes) -> Iterator[bytes]:
            nonlocal unpacked_bytes
            for piece in real(packed, part):
                unpacked_bytes += len(piece)
                yield piece

        monkeypatch.setattr(intake._Packed, "unpack", counted)

        async def test() -> None:
            bomb = pack(b" " * (64 * MIB), "gzip")
            async with kit(tmp_path, prefill=0, max_body_bytes=4 * MIB) as it:
                assert (await send_packed(it, bomb, "gzip")).status == 413
                assert (await it.ask()).status == 200
            assert unpacked_bytes < 6 * MIB

        run(test)


class TestConnections:
    def test_the_oldest_of_too_many_that_wait_is_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(intake, "MOST_WAITING", 8)

        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                assert (await it.ask()).status == 200
                async with connections(it, [b"", b"GET /heal", b"POST /v1/completions HTTP/1.1\r\n"] * 10) as opened:
                    async with asyncio.timeout(HANG_S):
                        for reader, _ in opened[:22]:
                            assert await reader.read() == b""
                    assert not any(reader.at_eof() for reader, _ in opened[22:])
                    assert (await it.ask()).status == 200
                    assert (await it.send("GET", "/health")).status == 200

        run(test)

    def test_a_connection_that_is_being_answered_is_never_closed(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                it.decode[0].pause.clear()
                asked = [asyncio.create_task(it.ask(LONG + str(number))) for number in range(6)]
                async with asyncio.timeout(HANG_S):
                    while len(it.decode[0].seen) < 6:
                        it.decode[0].arrived.clear()
                        await it.decode[0].arrived.wait()
                it.router.intake._most_waiting = 2
                async with connections(it, [b""] * 10) as opened:
                    async with asyncio.timeout(HANG_S):
                        assert await opened[7][0].read() == b""  # closed for those that came after it
                    it.decode[0].pause.set()
                    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}

        run(test)


class TestWhatIsKept:
    def test_names_of_headers_are_kept_short(self, tmp_path: Path, store: str) -> None:
        """A hundred names of 4 kB each in every request."""

        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                headers = {f"x-kvtally-{number}-{'n' * 4000}": "" for number in range(100)}
                reply = await it.send("POST", PATH, json={"prompt": LONG}, headers=headers)
                assert reply.status == 400
                assert "92 more" in reply.json()["error"]["message"]
                assert len(reply.body) < 2_000
                kept = await it.send("GET", f"/receipts/{reply.headers['x-kvtally-request']}")
                assert len(kept.body) < 2_000
                (line,) = await it.lines(1)
                assert len(line["error"]) <= LONGEST_TEXT

        run(test)

    def test_whatever_is_said_is_kept_short(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                headers = {"X-Request-Id": "i" * 8000}
                await it.send("GET", "/v1/" + "p" * 7000, headers=headers)
                await it.send("POST", PATH, data=b'{"%b": 1' % (b"n" * 7000))
                lines = await it.lines(2)
                assert [line["status"] for line in lines] == [200, 400]
                for line in lines:
                    assert all(len(value) <= LONGEST_TEXT for value in line.values() if isinstance(value, str))

        run(test)

    def test_who_does_not_speak_http_gets_no_traceback(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                async with connections(it, [b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n"] * 3) as opened:
                    for reader, _ in opened:
                        assert b" 400 " in await reader.readline()
                assert (await it.ask()).status == 200

        run(test)
        assert "Traceback" not in caplog.text
        assert "BadHttpMessage" not in caplog.text


class TestPaths:
    @pytest.mark.parametrize("path", ["/metricsx", "/metrics/x", "//metrics/", "/%6detrics/x", "/metrics"])
    @pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
    def test_the_engine_s_metrics_are_not_for_clients(self, tmp_path: Path, path: str, method: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                reply = await it.send(method, URL(f"{it.url}{path}", encoded=True))
                assert it.decode[0].seen == []
                assert reply.status == (200 if (method, path) == ("GET", "/metrics") else 404)

        run(test)

    @pytest.mark.parametrize(
        ("media_type", "is_read"),
        [
            ("application/x-www-form-urlencoded+json", True),
            ("multipart/form-data+json", True),
            ("multipart/mixed", True),
            ("application/json; charset=utf-8", True),
            ("", True),
            ("Application/X-WWW-Form-Urlencoded ; charset=utf-8", False),
            ("multipart/form-data; boundary=b", False),
        ],
    )
    def test_only_exact_media_types_pass_unread(self, tmp_path: Path, media_type: str, is_read: bool) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                body = b'{"input": "x", "cache_salt": "mine"}'
                await it.send("POST", "/v1/embeddings", data=body, headers={"Content-Type": media_type})
                (seen,) = it.decode[0].seen
                assert (seen.body["cache_salt"] != "mine") == is_read

        run(test)

    def test_messages_beside_a_prompt_do_not_mislead(self, tmp_path: Path, store: str) -> None:
        """The engine reads the prompt, so the router must not believe that it holds it because of the messages."""

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                same = [{"role": "user", "content": LONG}]
                assert (await it.ask(LONG, messages=same)).verdict == "proved"
                assert (await it.ask(f"another {LONG}", messages=same)).prefill == it.prefill[0].name

        run(test)


@contextlib.asynccontextmanager
async def connections(
    it: Kit, sent: list[bytes]
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many connections, on each of which this was sent."""
    opened = []
    for data in sent:
        opened.append(await asyncio.open_connection("127.0.0.1", it.router.port))
        opened[-1][1].write(data)
        await opened[-1][1].drain()
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def intake_has(it: Kit, count: int, size_bytes: int = 0) -> None:
    """Wait until so many requests, with so many bytes, are on their way in."""
    taken = it.router.intake

    async def is_there() -> bool:
        return taken.requests >= count and taken._bodies_bytes >= size_bytes

    await until(is_there)


def pack(data: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.compress(data, 1)
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS if encoding == "bare" else zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


async def send_packed(it: Kit, data: bytes, encoding: str) -> Reply:
    headers = {"Content-Encoding": "deflate" if encoding == "bare" else encoding, "Content-Type": "application/json"}
    return await it.send("POST", PATH, data=data, headers=headers)
