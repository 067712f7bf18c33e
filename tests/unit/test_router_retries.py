"""The router when a leg fails half-way, or what was counted on is not there: no receipt is taken for another's."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvtally.config.instances import Instance
from kvtally.core.receipts import Half, Role
from kvtally.endpoint import Endpoint, endpoint
from kvtally.router import intake, proxy
from kvtally.router.fleet import Member, check
from kvtally.router.receipts import ReceiptReader
from tests.unit.fake_vllm import Seen
from tests.unit.router_kit import LONG, Kit, a_store, kit, run
from tests.waiting import HANG_S, comes_about


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with a_store(tmp_path) as (_, path):
        yield path


def legs(it: Kit) -> list[Seen]:
    return [seen for engine in it.decode for seen in engine.seen]


def saved_nothing(_: Seen, answer: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {"kvtally": {**answer["kvtally"], "saved_tokens": 0, "reason": "arena_full"}}


class TestDecodeAgain:
    def test_a_receipt_of_the_engine_that_died_proves_nothing(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, decode=2, store=store) as it:

                def half_of(seen: Seen, half: Half) -> Half:
                    """The first loads what prefill saved, and dies; the second loads nothing."""
                    if len(legs(it)) == 1:
                        return half
                    for engine in it.decode:
                        engine.drops_filed = 0
                    tokens = half.prompt_tokens
                    return Half(role=Role.DECODE, prompt_tokens=tokens, computed_tokens=tokens, reason="checksum")

                for engine in it.decode:
                    engine.half, engine.drops_filed = half_of, 1
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "recomputed:checksum")
                assert reply.headers["x-kvtally-reused-tokens"] == "0"
                assert (await it.ask()).prefill == it.prefill[0].name  # nobody is believed to hold it

        run(test)

    def test_the_second_is_told_of_the_promise_under_its_own_ticket(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, decode=1, store=store) as it:
                it.decode[0].drops_filed = 1
                reply = await it.ask()
                first, second = (seen.params["kvtally"] for seen in legs(it))
                assert second["promise"] == first["ticket"] != second["ticket"]
                kept = {name: value for name, value in second.items() if name not in ("promise", "ticket")}
                assert kept == {name: value for name, value in first.items() if name != "ticket"}
                assert reply.headers["x-kvtally-request"] == second["ticket"]
                assert legs(it)[1].headers["X-Request-Id"] == second["ticket"]
                assert len(it.prefill[0].seen) == 1

        run(test)

    def test_chat_keeps_the_tokens_of_prefill(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].drops_filed = 1
                body = {"messages": [{"role": "user", "content": LONG}]}
                await it.send("POST", "/v1/chat/completions", json=body)
                first, second = legs(it)
                assert first.params["prompt_token_ids"] == second.params["prompt_token_ids"]

        run(test)

    @pytest.mark.parametrize("flavour", ["nixl", "nixl-push", "mooncake"])
    def test_what_is_read_once_is_not_handed_over_twice(self, tmp_path: Path, flavour: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour=flavour) as it:
                if flavour == "nixl-push":
                    it.prefill[0].handoff = lambda _, answer: {**answer, "transfer_mode": "push"}
                it.decode[0].drops = 1
                reply = await it.ask()
                first, second = legs(it)
                assert reply.status == 200
                assert first.params["do_remote_prefill"]
                assert "do_remote_prefill" not in second.params
                told = (await it.send("GET", f"/receipts/{reply.headers['x-kvtally-request']}")).json()
                assert told["prefill"] is None

        run(test)

    @pytest.mark.parametrize("status", [502, 503, 504])
    def test_other_paths_are_tried_once_more_too(self, tmp_path: Path, status: int) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0, decode=2) as it:
                it.decode[0].statuses = [status]
                for _ in range(2):  # they take turns
                    assert (await it.ask(path="/v1/messages")).status == 200
                assert len(legs(it)) == 3
                it.decode[0].statuses, it.decode[1].statuses = [status], [status]
                reply = await it.ask(path="/v1/messages")
                assert (reply.status, reply.json()["error"]["message"]) == (status, f"fault {status}")

        run(test)

    def test_one_that_never_had_it_spends_nothing(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="nixl", decode=2) as it:
                await it.decode[0].__aexit__()  # nobody listens there any more
                for number in range(2):  # one of them is sent there first
                    assert (await it.ask(LONG + str(number))).status == 200
                assert all(seen.params["do_remote_prefill"] for seen in it.decode[1].seen)
                assert len(it.decode[1].seen) == 2

        run(test)


class TestInstances:
    def test_one_that_cannot_be_connected_to_goes_on_with_what_it_has(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                engine = it.decode[0]
                engine.pause.clear()
                asked = [asyncio.create_task(it.ask(LONG + str(number))) for number in range(3)]
                while len(engine.seen) < 3:
                    engine.arrived.clear()
                    await engine.arrived.wait()
                member = it.router.known.fleet.find(engine.name)
                assert member is not None
                member.avoid("a name server was asleep")
                engine.pause.set()
                assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 3

        run(test)

    @pytest.mark.parametrize(("number", "is_up"), [(errno.EMFILE, True), (errno.ECONNREFUSED, False)])
    def test_a_router_without_descriptors_blames_nobody(self, number: int, is_up: bool) -> None:
        def make_socket(_: object) -> socket.socket:
            raise OSError(number, os.strerror(number))

        async def test() -> None:
            member = Member(Instance(url="http://127.0.0.1:1", store="", bootstrap=""))
            connector = aiohttp.TCPConnector(socket_factory=make_socket)
            async with aiohttp.ClientSession(connector=connector) as session:
                await check(member, session, lambda _: None)
            assert member.is_up is is_up

        run(test)

    def test_a_request_is_not_sent_to_one_that_is_drained_while_it_is_prefilled(
        self, tmp_path: Path, store: str
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, decode=2, store=store) as it:
                prefill, members = it.prefill[0], it.router.known.fleet.decode.members
                for number, drained in enumerate(members):  # they take turns: one of these was chosen
                    prefill.pause.clear()
                    prefill.arrived.clear()
                    asked = asyncio.create_task(it.ask(f"{number} {LONG}"))
                    await prefill.arrived.wait()
                    drained.is_draining = True
                    prefill.pause.set()
                    assert (await asked).headers["x-kvtally-decode"] != drained.name
                    drained.is_draining = False

        run(test)

    def test_draining_with_a_slash_drains(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, decode=2, store=store, token="a token of enough characters") as it:
                headers = {"Authorization": "Bearer a token of enough characters"}
                for path in ("/drain", "/drain/"):
                    name = it.decode[0].name
                    told = (await it.send("POST", f"{path}?instance={name}", headers=headers)).json()
                    assert told["state"] == "draining"

        run(test)


class TestSilence:
    """A prefill whose process is stopped answers nobody, and takes connections all the same."""

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtally.core.routing.LEAST_SILENCE_S", 0.05)
        monkeypatch.setattr("kvtally.router.fleet.SWEEP_S", 0.02)
        monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.02)
        monkeypatch.setattr("kvtally.router.fleet.MOST_UNANSWERED", 1_000_000)  # it is never found down

    def test_decode_computes_what_a_silent_prefill_does_not(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, timeout_s=3_600) as it:
                assert (await it.ask(f"first {LONG}")).verdict == "proved"
                it.prefill[0].pause.clear()
                reply = await it.ask(f"second {LONG}")
                assert (reply.status, reply.prefill) == (200, "failed:silent")
                assert reply.verdict == "recomputed:prefill_silent"
                async with asyncio.timeout(HANG_S):
                    await it.prefill[0].seen[1].is_over.wait()  # and prefill is told that nobody waits
                it.prefill[0].pause.set()
                await is_tried_again(it)
                assert (await it.ask(f"third {LONG}")).verdict == "proved"
                assert (await it.ask(f"fourth {LONG}")).verdict == "proved"

        run(test)

    def test_only_one_request_at_a_time_tries_a_prefill_that_fell_silent(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, timeout_s=3_600) as it:
                engine = it.prefill[0]
                await it.ask(f"first {LONG}")
                engine.pause.clear()
                await it.ask(f"second {LONG}")
                await is_tried_again(it)
                monkeypatch.setattr("kvtally.core.routing.LEAST_SILENCE_S", 10 * HANG_S)  # who tries now waits
                engine.arrived.clear()
                trying = asyncio.create_task(it.ask(f"third {LONG}"))
                async with asyncio.timeout(HANG_S):
                    await engine.arrived.wait()
                others = await asyncio.gather(*(it.ask(f"{number} {LONG}") for number in range(5)))
                assert {reply.verdict for reply in others} == {"recomputed:prefill_silent"}
                assert len(engine.seen) == 3
                engine.pause.set()
                assert (await trying).verdict == "proved"

        run(test)

    def test_nobody_tries_one_that_answers_no_health_check(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, timeout_s=3_600) as it:
                await it.ask(f"first {LONG}")
                it.prefill[0].is_hung = True
                replies = [await it.ask(f"{number} {LONG}") for number in range(5)]
                assert {reply.verdict for reply in replies} == {"recomputed:prefill_silent"}
                assert len(it.prefill[0].seen) == 2

        run(test)

    def test_a_strict_router_waits_for_the_proof(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                await it.ask(f"first {LONG}")
                it.prefill[0].pause.clear()
                it.prefill[0].arrived.clear()
                asked = asyncio.create_task(it.ask(f"second {LONG}"))
                async with asyncio.timeout(HANG_S):
                    await it.prefill[0].arrived.wait()
                pool = it.router.known.fleet
                await comes_about(lambda begun_s=pool.awake_s: pool.awake_s > begun_s + 1.0)
                it.prefill[0].pause.set()
                assert (await asked).verdict == "proved"

        run(test)


async def is_tried_again(it: Kit) -> None:
    """A health check has succeeded since prefill fell silent."""
    member = it.router.known.fleet.prefill.members[0]
    await comes_about(lambda: not member.pace.is_left_alone)


class TestStrict:
    @pytest.mark.parametrize("cause", ["held", "prefill", "unsaved"])
    def test_next_to_nothing_is_not_what_was_counted_on(self, tmp_path: Path, store: str, cause: str) -> None:
        def evicted(seen: Seen, half: Half) -> Half:
            return Half(
                role=Role.DECODE, prompt_tokens=half.prompt_tokens, tokens_gpu=1, computed_tokens=half.prompt_tokens - 1
            )

        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True, prefill_from_tokens=8) as it:
                reason = {"held": "not_held", "prefill": "prefill_status_500", "unsaved": "arena_full"}[cause]
                if cause == "held":
                    assert (await it.ask()).verdict == "proved"
                elif cause == "prefill":
                    it.prefill[0].statuses = [500]
                else:
                    it.prefill[0].handoff = saved_nothing
                it.decode[0].half = evicted
                reply = await it.ask()
                assert reply.status == 502
                assert reply.verdict == "local"
                assert reply.headers["x-kvtally-reason"] == reason

        run(test)

    def test_what_decode_holds_is_answered_and_says_that_nothing_was_saved(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True, prefill_from_tokens=0) as it:
                assert (await it.ask()).verdict == "proved"
                it.prefill[0].handoff = saved_nothing
                reply = await it.ask()
                assert (reply.status, reply.verdict, reply.prefill) == (200, "local", it.prefill[0].name)
                assert reply.headers["x-kvtally-reason"] == "arena_full"

        run(test)

    def test_a_token_more_than_decode_held_is_not_much(self, tmp_path: Path, store: str) -> None:
        """Also where prefill is asked for every prompt, and fails."""

        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True, prefill_from_tokens=0) as it:
                assert (await it.ask()).verdict == "proved"
                it.prefill[0].statuses = [500]
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "local")

        run(test)

    def test_a_batch_is_answered(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                reply = await it.send("POST", "/v1/completions", json={"prompt": [LONG, LONG]})
                assert (reply.status, reply.verdict) == (200, "missing")

        run(test)

    def test_a_store_that_lets_nobody_wait_is_asked_again(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As one does that has too many waiting, of requests that were refused and never file."""
        real = ReceiptReader.ask
        monkeypatch.setattr(ReceiptReader, "ask", lambda reader, ticket, wait_ms: real(reader, ticket, 0))

        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                it.decode[0].files.clear()
                asked = asyncio.ensure_future(it.ask())
                async with asyncio.timeout(HANG_S):
                    await it.decode[0].arrived.wait()
                it.decode[0].files.set()
                assert (await asked).verdict == "proved"

        run(test)


class TestRequests:
    @pytest.mark.parametrize(
        "name", ["reasoning_effort", "response_format", "suffix", "tool_choice", "truncate_prompt_tokens"]
    )
    def test_what_changes_a_prompt_s_beginning_is_another_prompt(self, tmp_path: Path, store: str, name: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                for value in ("low", "high"):
                    body = {"messages": [{"role": "user", "content": LONG}], name: value}
                    reply = await it.send("POST", "/v1/chat/completions", json=body)
                    assert reply.prefill == it.prefill[0].name

        run(test)

    def test_a_path_that_ends_with_a_slash_is_the_same(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.ask(path="/v1/completions/")
                assert (reply.status, reply.verdict) == (200, "proved")
                assert {seen.path for seen in [*legs(it), *it.prefill[0].seen]} == {"/v1/completions"}
                assert (await it.send("HEAD", "/health")).status == 200

        run(test)

    @pytest.mark.parametrize("flavour", ["nixl", "lmcache"])
    def test_a_long_answer_is_no_error(self, tmp_path: Path, flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proxy, "EVIDENCE_BYTES", 1 << 16)

        async def test() -> None:
            async with kit(tmp_path, flavour=flavour) as it:
                it.decode[0].words = ["x" * 1000] * 300
                reply = await it.ask()
                assert reply.status == 200
                assert len(reply.json()["choices"][0]["text"]) == 300_000

        run(test)

    def test_a_compressed_body_counts_for_what_it_becomes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 3 << 19)

        async def test() -> None:
            async with kit(tmp_path, prefill=0, max_body_bytes=2 << 20) as it:
                it.decode[0].pause.clear()
                body = gzip.compress(json.dumps({"prompt": "x" * (1 << 20)}).encode())
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                first = asyncio.create_task(it.send("POST", "/v1/completions", data=body, headers=headers))
                await it.decode[0].arrived.wait()
                second = await it.send("POST", "/v1/completions", data=body, headers=headers)
                it.decode[0].pause.set()
                assert (second.status, (await first).status) == (503, 200)

        run(test)

    def test_a_client_that_leaves_with_its_whole_answer_was_answered(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proxy, "UNFILED", 0)  # nobody waits for the receipt before the answer, only after it
        monkeypatch.setattr(ReceiptReader, "ask", lambda *_: asyncio.get_running_loop().create_future())

        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0) as it:
                assert (await it.ask(stream=True)).body.endswith(b"data: [DONE]\n\n")
                await it.session.close()
                (line,) = await it.lines(1)
                assert (line["status"], line["error"]) == (200, "")

        run(test)

    def test_a_body_in_chunks_takes_the_room_it_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 3 << 20)

        async def chunks() -> AsyncIterator[bytes]:
            yield b'{"prompt": "short"}'

        async def test() -> None:
            async with kit(tmp_path, prefill=0, max_body_bytes=2 << 20) as it:
                it.decode[0].pause.clear()
                asked = []
                for _ in range(4):
                    asked.append(asyncio.create_task(it.send("POST", "/v1/completions", data=chunks())))
                    await it.decode[0].arrived.wait()
                    it.decode[0].arrived.clear()
                it.decode[0].pause.set()
                assert [(await reply).status for reply in asked] == [200] * 4

        run(test)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
    def test_a_body_is_let_go_when_the_answer_begins(
        self, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(intake, "MOST_BODIES_BYTES", 10_000)

        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                it.decode[0].pauses_after = 1
                it.decode[0].pause.clear()
                body = {"prompt": "x" * 9_000, "stream": True}
                async with it.session.post(it.url + path, json=body) as first:
                    await first.content.readany()
                    assert (await it.ask("y" * 9_000, path="/v1/embeddings")).status == 200
                    assert not it.decode[0].seen[0].is_over.is_set()

        run(test)


def test_every_address_of_a_store_is_tried(tmp_path: Path, store: str) -> None:
    async def test() -> None:
        there = endpoint(store)
        nowhere = endpoint(str(tmp_path / "nobody.sock"))
        reader = ReceiptReader(Endpoint(address="two", targets=(*nowhere.targets, *there.targets)))
        task = asyncio.create_task(reader.run())
        async with asyncio.timeout(HANG_S):
            await reader.tried.wait()
        assert reader.problem == ""
        task.cancel()

    run(test)
