"""The router, whole: fake engines, a real store, a real client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from kvtally.core.receipts import Half
from kvtally.router.metrics import METRICS
from tests.unit.fake_vllm import FakeVLLM, Seen, event, nixl_answer
from tests.unit.router_kit import LONG, LONGEST_WAIT_MS, Kit, Reply, a_store, kit, run, until
from tests.unit.shell import TOKEN
from tests.waiting import HANG_S, HOUR_S

WORDS = b"".join(event({"choices": [{"index": 0, "text": f" w{number}"}]}) for number in range(4))
STREAM = WORDS + b"data: [DONE]\n\n"
PROMPT_TOKENS = len(LONG)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with a_store(tmp_path) as (_, path):
        yield path


class TestHandOff:
    def test_prefill_then_decode_and_both_halves_match(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.ask(max_tokens=3, min_tokens=2, temperature=0.5, seed=7)
                assert reply.status == 200
                assert reply.json()["choices"][0]["text"] == " w0 w1 w2"
                asked, told = it.prefill[0].seen[0], it.decode[0].seen[0]
                ticket = reply.headers["x-kvtally-request"]
                assert asked.params == {"kvtally": {"ticket": ticket, "role": "prefill"}}
                assert asked.body["max_tokens"] == 1
                assert asked.body["stream"] is False
                assert "min_tokens" not in asked.body
                assert {asked.body["seed"], told.body["seed"]} == {7}
                assert (told.body["max_tokens"], told.body["min_tokens"]) == (3, 2)
                assert told.params["kvtally"]["role"] == "decode"
                assert told.params["kvtally"]["saved_tokens"] == PROMPT_TOKENS - 1
                assert "computed_tokens" not in told.params["kvtally"]  # prefill's account is none of decode's business
                assert told.body["prompt"] == list(LONG.encode())  # the tokens that prefill saw
                assert reply.headers["x-kvtally-prefill"] == it.prefill[0].name
                assert reply.headers["x-kvtally-decode"] == it.decode[0].name
                assert reply.headers["x-kvtally-reused-tokens"] == str(PROMPT_TOKENS - 1)
                assert reply.headers["x-kvtally-computed-tokens"] == "1"
                assert reply.headers["x-kvtally-source"] == f"host:{PROMPT_TOKENS - 1}"
                assert reply.verdict == "proved"
                assert {asked.headers["X-Request-Id"], told.headers["X-Request-Id"]} == {ticket}

        run(test)

    def test_a_stream_passes_byte_for_byte(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.ask(stream=True, stream_options={"include_usage": True})
                assert reply.body == STREAM
                assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
                assert reply.verdict == "proved"
                assert "stream_options" not in it.prefill[0].seen[0].body
                assert it.decode[0].seen[0].body["stream_options"] == {"include_usage": True}

        run(test)

    def test_the_first_word_arrives_before_the_second_is_made(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].pauses_after = 1
                it.decode[0].pause.clear()
                body = {"prompt": LONG, "stream": True}
                async with it.session.post(f"{it.url}/v1/completions", json=body) as response:
                    assert response.headers["x-kvtally-verdict"] == "proved"
                    ticket = response.headers["x-kvtally-request"]
                    assert (await it.send("GET", f"/receipts/{ticket}")).json()["verdict"] == "proved"  # already
                    async with asyncio.timeout(HANG_S):
                        assert await response.content.readany() == STREAM[: STREAM.index(b"data: ", 1)]
                        it.decode[0].pause.set()
                        assert await response.content.read() == STREAM[STREAM.index(b"data: ", 1) :]

        run(test)

    def test_chat_gives_decode_the_tokens_of_prefill_where_vllm_looks_for_them(
        self, tmp_path: Path, store: str
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                messages = [{"role": "user", "content": LONG}]
                body = {"messages": messages, "max_completion_tokens": 5, "tools": [{"type": "function"}]}
                reply = await it.send("POST", "/v1/chat/completions", json=body)
                asked, told = it.prefill[0].seen[0], it.decode[0].seen[0]
                assert asked.body["max_completion_tokens"] == asked.body["max_tokens"] == 1
                assert asked.body["tools"] == [{"type": "function"}]
                assert told.body["messages"] == messages
                assert "max_tokens" not in told.body
                assert told.params["prompt_token_ids"] == list(json.dumps(messages).encode())
                assert reply.verdict == "proved"

        run(test)

    def test_an_echo_keeps_the_text(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                await it.ask(echo=True)
                assert it.decode[0].seen[0].body["prompt"] == LONG
                assert "echo" not in it.prefill[0].seen[0].body

        run(test)

    @pytest.mark.parametrize("fields", [{"suffix": "and what follows"}, {"return_prompt_text": True}])
    def test_who_needs_the_text_gets_it(self, tmp_path: Path, store: str, fields: dict[str, object]) -> None:
        """vLLM refuses a suffix beside token ids, and cannot tell their text."""

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.ask(**fields)
                assert reply.verdict == "proved"
                for leg in (it.prefill[0].seen[0], it.decode[0].seen[0]):
                    assert {**leg.body, "prompt": LONG, **fields} == leg.body
                chat = {"messages": [{"role": "user", "content": LONG}], **fields}
                await it.send("POST", "/v1/chat/completions", json=chat)
                assert "prompt_token_ids" not in it.decode[0].seen[1].params

        run(test)

    @pytest.mark.parametrize("prompt", [[LONG], [list(LONG.encode())]])
    def test_one_prompt_in_a_list_is_no_batch(self, tmp_path: Path, store: str, prompt: list[object]) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.send("POST", "/v1/completions", json={"prompt": prompt})
                assert (reply.prefill, reply.verdict) == (it.prefill[0].name, "proved")

        run(test)

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"prompt": "short"}, "short"),
            ({"prompt": LONG, "prompt_embeds": "AAAA"}, "batch"),
            ({"prompt": [LONG, LONG]}, "batch"),
            ({"prompt": [[1, 2], [3]]}, "batch"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ],
    )
    def test_what_prefill_cannot_help_with_skips_it_and_says_so(
        self, tmp_path: Path, store: str, fields: dict[str, object], why: str
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                reply = await it.send("POST", "/v1/completions", json={"prompt": LONG, **fields})
                assert reply.prefill == f"skipped:{why}"
                assert it.prefill[0].seen == []
                assert it.decode[0].seen[0].params["kvtally"]["role"] == "decode"
                assert "saved_tokens" not in it.decode[0].seen[0].params["kvtally"]
                # Of a batch nothing can be known: its prompts file under one ticket.
                assert reply.verdict == ("missing" if why == "batch" else "recomputed:absent")
                assert reply.headers["x-kvtally-reason"] == ("batch" if why == "batch" else "absent")

        run(test)

    def test_what_decode_was_proved_to_hold_skips_prefill(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                assert (await it.ask()).verdict == "proved"
                again = await it.ask()
                assert (again.prefill, again.verdict) == ("skipped:held", "local")
                longer = await it.ask(LONG + "something else " * 40)
                assert (longer.prefill, longer.verdict) == (it.prefill[0].name, "proved")
                assert (await it.ask(key="somebody else")).prefill == it.prefill[0].name  # not theirs to use

        run(test)

    @pytest.mark.parametrize("has_states", [False, True])
    def test_who_holds_a_prompt_with_states_does_not_hold_its_beginning(
        self, tmp_path: Path, store: str, has_states: bool
    ) -> None:
        """Many short questions behind one long text: with recurrent states decode would compute all of it again. The
        next turn of a conversation goes on from where the last one ended."""

        def told(_: Seen, half: Half) -> Half:
            return structs.replace(half, holds_beginnings=not has_states)

        def asked(*words: str) -> dict[str, object]:
            return {"messages": [{"role": "user", "content": word} for word in (LONG, *words)]}

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].half = told
                skipped = [
                    (await it.send("POST", "/v1/chat/completions", json=asked(*words))).prefill == "skipped:held"
                    for words in (("one?",), ("two?",), ("one?",), ("one?", "and then?"))
                ]
                assert skipped == [False, not has_states, True, True]

        run(test)

    def test_a_belief_that_was_wrong_is_given_up(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                await it.ask()
                it.decode[0].half = lambda _, half: structs.replace(
                    half, tokens_gpu=0, computed_tokens=PROMPT_TOKENS, reason="absent"
                )
                wrong = await it.ask()
                assert (wrong.prefill, wrong.verdict) == ("skipped:held", "recomputed:absent")
                it.decode[0].half = lambda _, half: half
                assert (await it.ask()).prefill == it.prefill[0].name

        run(test)

    def test_the_next_turn_of_a_conversation_goes_where_the_last_was(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0, decode=3) as it:
                turns: list[dict[str, str]] = []
                served = []
                for number in range(4):
                    turns.append({"role": "user", "content": f"question {number}"})
                    reply = await it.send("POST", "/v1/chat/completions", json={"messages": turns})
                    turns.append({"role": "assistant", "content": "an answer"})
                    served.append(reply.headers["x-kvtally-decode"])
                assert len(set(served)) == 1
                others = {(await it.ask(f"{number} " + LONG)).headers["x-kvtally-decode"] for number in range(6)}
                assert len(others) == 3  # strangers take turns

        run(test)


class TestVerdicts:
    def test_less_than_promised_is_short(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].half = lambda _, half: structs.replace(half, tokens_host=100, reason="arena_full")
                reply = await it.ask()
                assert (reply.verdict, reply.headers["x-kvtally-reason"]) == ("short", "arena_full")

        run(test)

    def test_a_prefill_that_saved_nothing_names_the_cause(self, tmp_path: Path, store: str) -> None:
        def nothing(_: Seen, answer: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
            return {"kvtally": {**answer["kvtally"], "saved_tokens": 0, "reason": "store_unreachable"}}

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.prefill[0].handoff = nothing
                assert (await it.ask()).verdict == "recomputed:store_unreachable"

        run(test)

    def test_another_store_behind_prefill_is_named(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with FakeVLLM(store, store_name="elsewhere") as far, kit(tmp_path, store=store) as it:
                it.prefill[0].handoff = lambda _, answer: {"kvtally": {**answer["kvtally"], "store": "elsewhere"}}
                assert (await it.ask()).verdict == "recomputed:foreign_store"
                assert far.seen == []

        run(test)

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (None, "no_handoff"),
            ({"something": "else"}, "no_handoff"),
            ({"kvtally": {"ticket": "another"}}, "bad_handoff"),
            ({"kvtally": {"saved_tokens": -1}}, "bad_handoff"),
            ({"kvtally": {"saved_tokens": 10**6}}, "bad_handoff"),
            ({"kvtally": {"chain": "zz"}}, "bad_handoff"),
            ({"kvtally": {"role": "both"}}, "bad_handoff"),
            ({"kvtally": {"store": ""}}, "store_unreachable"),  # the engine was never connected
        ],
    )
    def test_a_hand_off_that_cannot_be_used_is_not_passed_on(
        self, tmp_path: Path, store: str, answer: dict[str, dict[str, object]] | None, reason: str
    ) -> None:
        def wrong(_: Seen, right: dict[str, dict[str, object]]) -> dict[str, dict[str, object]] | None:
            if answer is None or "kvtally" not in answer:
                return answer
            return {"kvtally": {**right["kvtally"], **answer["kvtally"]}}

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.prefill[0].handoff = wrong
                reply = await it.ask()
                assert reply.status == 200
                assert reply.verdict == f"recomputed:{reason}"
                assert set(it.decode[0].seen[0].params["kvtally"]) == {"ticket", "role"}

        run(test)

    def test_an_engine_without_the_connector_is_missing(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, receipt_wait_ms=50) as it:
                it.decode[0].half = lambda _, half: None
                reply = await it.ask()
                assert (reply.verdict, reply.headers["x-kvtally-reason"]) == ("missing", "not_filed")
                assert reply.headers["x-kvtally-reused-tokens"] == "unknown"

        run(test)

    def test_no_store_is_missing_and_costs_no_time(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path) as it:
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "missing")
                assert reply.headers["x-kvtally-reason"] == "store_unreachable"

        run(test)

    def test_nobody_waits_for_ever_for_receipts_that_never_come(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0, receipt_wait_ms=50) as it:
                it.decode[0].half = lambda _, half: None
                for number in range(3):
                    assert (await it.ask(f"{number}")).verdict == "missing"
                # The loop's clock has milliseconds: its timers may be up to one early.
                assert [line["first_byte_ms"] >= 49 for line in await it.lines(3)] == [True] * 3
                it.wait_for_receipts(int(HOUR_S * 1e3))
                for number in range(2):
                    assert (await it.ask(f"{number}, for which it does not wait")).verdict == "missing"
                it.decode[0].half = lambda _, half: half
                await it.ask("noticed, perhaps a little late")
                assert (await it.ask("and waited for from now on")).verdict == "recomputed:absent"

        run(test)

    def test_a_half_that_comes_a_little_late_is_waited_for(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].files.clear()
                asked = asyncio.ensure_future(it.ask(stream=True))
                async with asyncio.timeout(HANG_S):
                    await it.decode[0].arrived.wait()
                await asyncio.sleep(0.1)  # as if it were late
                it.decode[0].files.set()
                assert (await asked).verdict == "proved"

        run(test)

    def test_a_half_that_comes_too_late_is_in_the_receipt(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, receipt_wait_ms=20) as it:
                it.decode[0].files.clear()
                it.decode[0].pauses_after = 1
                it.decode[0].pause.clear()
                body = {"prompt": LONG, "stream": True}
                async with it.session.post(f"{it.url}/v1/completions", json=body) as response:
                    assert response.headers["x-kvtally-verdict"] == "missing"
                    it.wait_for_receipts(LONGEST_WAIT_MS)
                    it.decode[0].files.set()
                    async with asyncio.timeout(HANG_S):
                        await it.decode[0].filed.wait()
                    it.decode[0].pause.set()
                    await response.read()
                (line,) = await it.lines(1)
                assert (line["verdict"], line["reason"]) == ("proved", "late")

        run(test)


class TestStrict:
    def test_a_proved_request_is_answered(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                assert (await it.ask(stream=True)).body == STREAM

        run(test)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_recomputed_request_is_refused_with_the_reason(self, tmp_path: Path, store: str, streamed: bool) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                it.prefill[0].handoff = lambda _, answer: {"kvtally": {**answer["kvtally"], "store": "elsewhere"}}
                it.decode[0].pauses_after = 1
                reply = await it.ask(stream=streamed)
                assert reply.status == 502
                error = reply.json()["error"]
                assert "recomputed:foreign_store" in error["message"]
                assert error["code"] == 502
                assert reply.verdict == "recomputed:foreign_store"
                assert "KV-703" in error["message"]

        run(test)

    def test_decode_is_told_to_stop_what_is_refused(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                it.decode[0].half = lambda _, half: structs.replace(half, tokens_host=1)
                it.decode[0].pauses_after = 1
                it.decode[0].pause.clear()
                assert (await it.ask(stream=True)).status == 502
                async with asyncio.timeout(HANG_S):
                    await it.decode[0].seen[0].is_over.wait()
                assert it.decode[0].seen[0].was_cancelled

        run(test)

    def test_a_missing_half_is_refused_and_a_failed_prefill_too(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                it.prefill[0].statuses = [500]
                reply = await it.ask("one " + LONG)
                assert (reply.status, reply.verdict) == (502, "recomputed:prefill_status_500")
                it.wait_for_receipts(20)
                it.decode[0].half = lambda _, half: None
                assert (await it.ask("two " + LONG)).status == 502

        run(test)

    def test_what_nobody_promised_is_not_refused(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                reply = await it.ask("short")
                assert (reply.status, reply.verdict) == (200, "recomputed:absent")

        run(test)

    @pytest.mark.parametrize(
        ("fields", "headers"),
        [
            ({"kv_transfer_params": {"do_remote_prefill": True}}, {}),
            ({"cache_salt": "mine"}, {}),
            ({"bootstrap_host": "10.0.0.1"}, {}),
            ({"vllm_xargs": {"kv_transfer_params": "crash"}}, {}),
            ({}, {"X-data-parallel-rank": "3"}),
            ({}, {"x-prefiller-host-port": "10.0.0.1:80"}),
        ],
    )
    def test_reserved_fields_are_refused_in_strict_mode_and_dropped_else(
        self, tmp_path: Path, store: str, fields: dict[str, object], headers: dict[str, str]
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, strict=True) as it:
                it.headers = headers
                reply = await it.ask(**fields)
                assert reply.status == 400
                assert "KV-704" in reply.json()["error"]["message"]
                assert it.prefill[0].seen == it.decode[0].seen == []
            async with kit(tmp_path, store=store) as it:
                it.headers = headers
                reply = await it.ask(**fields)
                assert (reply.status, reply.verdict) == (200, "proved")
                for seen in (it.prefill[0].seen[0], it.decode[0].seen[0]):
                    assert set(seen.params) == {"kvtally"}
                    assert seen.body["cache_salt"] != "mine"
                    assert "bootstrap_host" not in seen.body
                    assert not seen.body.get("vllm_xargs")
                    assert not {name.lower() for name in seen.headers} & {name.lower() for name in headers}

        run(test)


class TestTenants:
    def test_two_keys_get_two_salts_and_never_share(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0) as it:
                first, again, other, nobody = [
                    await it.ask(key=key) for key in ("alice-key", "alice-key", "bob-key", "")
                ]
                assert [reply.verdict for reply in (first, again, other, nobody)] == [
                    "recomputed:absent",
                    "local",
                    "recomputed:absent",
                    "recomputed:absent",
                ]
                salts = [seen.body["cache_salt"] for seen in it.decode[0].seen]
                assert salts[0] == salts[1]
                assert len(set(salts)) == 3
                assert not any("alice" in salt for salt in salts)
                assert it.decode[0].seen[0].headers["Authorization"] == "Bearer alice-key"  # engines check it

        run(test)

    def test_both_legs_carry_the_salt_and_another_router_with_the_file_agrees(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            salts = set()
            for _ in range(2):
                async with kit(tmp_path, store=store) as it:
                    await it.ask(key="alice-key")
                    salts |= {it.prefill[0].seen[0].body["cache_salt"], it.decode[0].seen[0].body["cache_salt"]}
            assert len(salts) == 1
            assert (tmp_path / "salt").stat().st_mode & 0o777 == 0o600

        run(test)

    def test_a_trusted_header_names_the_tenant_and_goes_no_further(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0, tenant_header="X-Tenant") as it:
                for tenant, key in (("a", "1"), ("a", "2"), ("b", "1")):
                    it.headers = {"x-tenant": tenant}
                    await it.ask(key=key)
                one, same, other = [seen.body["cache_salt"] for seen in it.decode[0].seen]
                assert one == same != other
                assert "X-Tenant" not in it.decode[0].seen[0].headers

        run(test)

    def test_other_paths_are_salted_and_scrubbed_too(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                body = {"input": "x", "cache_salt": "mine", "kv_transfer_params": {}}
                await it.send("POST", "/v1/responses", json=body)
                seen = it.decode[0].seen[0]
                assert seen.body["input"] == "x"
                assert seen.body["cache_salt"] not in ("", "mine")
                assert "kv_transfer_params" not in seen.body

        run(test)


class TestFaults:
    def test_another_prefill_is_tried(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=3) as it:
                for engine in it.prefill:
                    engine.statuses = [503]
                it.prefill[2].statuses = []
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "proved")
                tickets = [seen.params["kvtally"]["ticket"] for engine in it.prefill for seen in engine.seen]
                assert len(tickets) == len(set(tickets))  # nothing of one attempt can be taken for another's

        run(test)

    def test_no_prefill_at_all_costs_time_not_the_answer(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                await it.prefill[0].__aexit__()
                reply = await it.ask()
                assert (reply.status, reply.prefill) == (200, "failed:connect")
                assert reply.verdict == "recomputed:prefill_connect"
                assert (await it.ask("other " + LONG)).prefill == "failed:down"
                await it.prefill[0].__aenter__()

        run(test)

    @pytest.mark.parametrize("status", [400, 404, 422, 429])
    def test_the_client_s_mistakes_are_told_in_the_engine_s_words(
        self, tmp_path: Path, store: str, status: int
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=2, decode=2) as it:
                for engine in it.prefill:
                    engine.statuses = [status]
                reply = await it.ask()
                assert (reply.status, reply.json()["error"]["message"]) == (status, f"fault {status}")
                assert sum(len(engine.seen) for engine in it.prefill) == 1
                assert (reply.verdict, reply.headers["x-kvtally-reason"]) == ("missing", f"status_{status}")
                for engine in it.decode:
                    engine.statuses = [status]
                reply = await it.ask("short")
                assert (reply.status, reply.json()["error"]["message"]) == (status, f"fault {status}")
                assert sum(len(engine.seen) for engine in it.decode) == 1
                assert reply.headers["x-kvtally-reason"] == f"status_{status}"

        run(test)

    @pytest.mark.parametrize("fault", ["drop", "status", "dead"])
    def test_decode_is_tried_once_more_before_the_first_byte(self, tmp_path: Path, store: str, fault: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, decode=2) as it:
                for engine in it.decode:
                    engine.drops = 1 if fault == "drop" else 0
                    engine.statuses = [502] if fault == "status" else []
                if fault == "dead":
                    await it.decode[0].__aexit__()
                    await it.ask("short, to try either")
                    await it.ask("short, to try the other")
                else:
                    it.decode[1].drops, it.decode[1].statuses = 0, []
                    await it.ask("short one")  # whoever comes first: one of the two was at fault, or is next
                reply = await it.ask()
                assert (reply.status, reply.verdict) == (200, "proved")
                if fault == "dead":
                    await it.decode[0].__aenter__()

        run(test)

    def test_twice_is_enough(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, decode=3) as it:
                for engine in it.decode:
                    engine.drops = 9
                reply = await it.ask()
                assert reply.status == 502
                assert "KV-702" in reply.json()["error"]["message"]
                assert sum(len(engine.seen) for engine in it.decode) == 2
                for engine in it.decode:
                    engine.drops, engine.statuses = 0, [503] * 9
                assert (await it.ask("other " + LONG)).json()["error"]["message"] == "fault 503"

        run(test)

    def test_a_stream_that_breaks_off_is_visibly_cut(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, decode=2) as it:
                for engine in it.decode:
                    engine.dies_after = 2
                parts: list[bytes] = []
                async with it.session.post(f"{it.url}/v1/completions", json={"prompt": LONG, "stream": True}) as reply:
                    assert reply.status == 200
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await drain(reply, parts)
                received = b"".join(parts)
                words = received[: received.index(b'data: {"error"')]
                assert words == WORDS[: len(words)]
                error = json.loads(received[len(words) + len(b"data: ") :])["error"]
                assert error["code"] == 502
                assert b"[DONE]" not in received
                assert sum(len(engine.seen) for engine in it.decode) == 1  # never again after the first byte
                (line,) = await it.lines(1)
                assert "broke off" in line["error"]

        run(test)

    def test_a_client_that_leaves_cancels_prefill(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.prefill[0].pause.clear()
                await leave(it, it.prefill[0], {"prompt": LONG})
                assert it.prefill[0].seen[0].was_cancelled
                assert it.decode[0].seen == []
                (line,) = await it.lines(1)
                assert line["status"] == 499

        run(test)

    @pytest.mark.parametrize("words", [0, 1])
    def test_a_client_that_leaves_cancels_decode(self, tmp_path: Path, store: str, words: int) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].pauses_after = words
                it.decode[0].pause.clear()
                await leave(it, it.decode[0], {"prompt": LONG, "stream": True})
                assert it.decode[0].seen[0].was_cancelled
                await until(lambda: _is_idle(it))

        run(test)

    def test_an_engine_that_stops_answering_ends_the_wait(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, timeout_s=1) as it:
                it.decode[0].pause.clear()
                reply = await it.ask()
                assert reply.status == 504
                (seen,) = it.decode[0].seen
                async with asyncio.timeout(HANG_S):
                    await seen.is_over.wait()
                assert seen.was_cancelled

        run(test)

    def test_a_client_that_does_not_read_makes_the_engine_wait_and_is_cut_off(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0, timeout_s=1) as it:
                it.decode[0].words = ["x" * 65_536] * 400
                reader, writer = await _raw(it, {"prompt": "p", "stream": True}, read_bytes=4096)
                assert (await reader.read(4096)).startswith(b"HTTP/1.1 200")
                (line,) = await it.lines(1)
                assert "took nothing" in line["error"]
                writer.close()

        run(test)


class TestFlavours:
    def test_nixl_hands_prefill_s_words_to_decode(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="nixl") as it:
                reply = await it.ask()
                asked, told = it.prefill[0].seen[0], it.decode[0].seen[0]
                assert asked.params["do_remote_decode"] is True
                assert asked.params["remote_block_ids"] is None
                assert told.params == nixl_answer(asked, PROMPT_TOKENS)
                assert told.headers["X-Request-Id"] == asked.headers["X-Request-Id"]
                assert (reply.verdict, reply.headers["x-kvtally-reason"]) == ("missing", "no_receipts")
                assert (await it.ask()).prefill == it.prefill[0].name  # without proof nothing counts as held

        run(test)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"remote_block_ids": None},
            {"remote_block_ids": []},
            {"remote_host": None},
            {"remote_port": "5600"},
            {"tp_size": None},
            {"do_remote_prefill": False},
            {"remote_engine_id": ""},
            {"transfer_mode": "push"},
        ],
    )
    def test_nixl_parameters_that_would_crash_or_hang_decode_do_not_reach_it(
        self, tmp_path: Path, wrong: dict[str, object]
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="nixl") as it:
                it.prefill[0].handoff = lambda _, answer: {**answer, **wrong}
                assert (await it.ask()).status == 200
                assert it.decode[0].seen[0].params == {}

        run(test)

    def test_nixl_push_tells_decode_where_prefill_is_without_blocks(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="nixl-push") as it:
                it.prefill[0].handoff = lambda seen, _: nixl_answer(seen, PROMPT_TOKENS, "push")
                await it.ask()
                asked, told = it.prefill[0].seen[0], it.decode[0].seen[0]
                assert told.params["remote_host"] == "10.0.0.7"
                assert told.params["remote_request_id"] == asked.headers["X-Request-Id"]
                assert "remote_block_ids" not in told.params
                assert told.headers["X-Request-Id"] == asked.headers["X-Request-Id"]

        run(test)

    def test_several_answers_are_not_handed_to_one_reader(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="nixl") as it:
                assert (await it.ask(n=2)).prefill == "skipped:several"
                assert (await it.ask(n=1)).prefill == it.prefill[0].name

        run(test)

    def test_mooncake_asks_who_prefill_is_and_invents_a_transfer(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="mooncake") as it:
                await it.ask(stop=["x"])
                query, asked = it.prefill[0].seen
                told = it.decode[0].seen[0]
                assert query.path == "/query"
                assert asked.params["transfer_id"] == told.params["transfer_id"]
                assert asked.headers["X-data-parallel-rank"] == "0"
                assert "X-data-parallel-rank" not in told.headers
                assert told.params["remote_engine_id"] == f"engine-{it.prefill[0].port}"
                assert told.params["remote_bootstrap_addr"] == it.prefill[0].url
                assert asked.body["ignore_eos"] is True
                assert "stop" not in asked.body
                assert told.body["stop"] == ["x"]

        run(test)

    def test_mooncake_without_a_bootstrap_server_recomputes(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="mooncake") as it:
                it.prefill[0].bootstrap_status = 500
                reply = await it.ask()
                assert (reply.status, reply.prefill) == (200, "failed:bootstrap")

        run(test)

    def test_lmcache_sends_the_same_twice_and_reads_what_decode_found(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, flavour="lmcache") as it:
                reply = await it.ask()
                assert it.prefill[0].seen[0].params == {}
                assert it.decode[0].seen[0].params == {"cached_token_stats": True}
                assert reply.verdict == "short"
                assert reply.headers["x-kvtally-source"] == "gpu:2,remote:6"
                streamed = await it.ask(stream=True)
                assert (streamed.body, streamed.verdict) == (STREAM, "missing")

        run(test)

    def test_plain_instances_need_no_prefill(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0, decode=2) as it:
                first, again = await it.ask(), await it.ask()
                assert (first.prefill, first.verdict) == ("none", "recomputed:absent")
                assert (again.verdict, again.headers["x-kvtally-source"]) == ("local", f"gpu:{PROMPT_TOKENS - 1}")
                assert first.headers["x-kvtally-decode"] == again.headers["x-kvtally-decode"]

        run(test)


class TestServer:
    def test_other_paths_are_passed_on(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path) as it:
                assert (await it.send("GET", "/v1/models")).json()["data"][0]["id"] == "fake"
                reply = await it.send("GET", "/version?x=a%26b")
                assert reply.json() == {"path": "/version", "query": "x=a%26b", "bytes": 0}
                assert reply.headers["x-kvtally-decode"] == it.decode[0].name
                form = aiohttp.FormData({"file": "sound" * 100}, default_to_multipart=True)
                assert (await it.send("POST", "/v1/audio/transcriptions", data=form)).json()["bytes"] > 500
                it.decode[0].extra["/v1/odd"] = web.Response(status=204)
                assert (await it.send("DELETE", "/v1/odd")).status == 204
                assert (await it.send("HEAD", "/version")).status == 200
                assert it.prefill[0].seen == []

        run(test)

    @pytest.mark.parametrize(
        "path", ["/sleep", "/%73leep", "//sleep", "/sleep/", "/v1/load_lora_adapter", "/reset_prefix_cache?x=1"]
    )
    def test_engines_control_calls_are_not_passed_on(self, tmp_path: Path, path: str) -> None:
        async def test() -> None:
            async with kit(tmp_path) as it:
                assert b" 404 " in await _exchange(it, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0")
                assert it.decode[0].seen == []

        run(test)

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b'{"a":1}x', b"\xff\xfe{\x00}\x00", b"[" * 5000])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
    def test_what_is_not_a_json_object_is_refused(self, tmp_path: Path, body: bytes, path: str) -> None:
        async def test() -> None:
            async with kit(tmp_path) as it:
                reply = await it.send("POST", path, data=body, headers={"Content-Type": "application/json"})
                if path == "/v1/responses" and not body:
                    assert reply.status == 200
                else:
                    assert (reply.status, it.decode[0].seen) == (400, [])
                    assert "KV-705" in reply.json()["error"]["message"]

        run(test)

    def test_bodies_are_bounded(self, tmp_path: Path, store: str) -> None:
        async def chunks() -> object:
            for _ in range(100):
                yield b" " * 1000

        async def test() -> None:
            async with kit(tmp_path, store=store, max_body_bytes=10_000) as it:
                assert (await it.ask("x" * 10_000)).status == 413
                url = f"{it.url}/v1/completions"
                with contextlib.suppress(aiohttp.ClientError):
                    async with it.session.post(url, data=chunks()) as reply:
                        assert reply.status == 413
                assert (await it.ask("x" * 9_000)).status == 200

        run(test)

    def test_too_many_at_once_are_told_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtally.router.intake.MOST_BODIES_BYTES", 10_000)

        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                it.decode[0].pause.clear()
                first = asyncio.ensure_future(it.ask("x" * 9_000))
                async with asyncio.timeout(HANG_S):
                    await it.decode[0].arrived.wait()
                refused = await it.ask("y" * 2_000)
                assert (refused.status, "KV-707" in refused.json()["error"]["message"]) == (503, True)
                it.decode[0].pause.set()
                assert (await first).status == 200
                assert (await it.ask("y" * 2_000)).status == 200

        run(test)

    def test_hop_by_hop_headers_end_here(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                it.decode[0].extra["/v1/odd"] = web.Response(
                    headers={"X-Kept": "1", "X-Private": "2", "Connection": "X-Private", "x-kvtally-verdict": "proved"}
                )
                sent = {"X-Kept": "1", "X-Gone": "2", "Connection": "x-gone, close", "TE": "trailers", "Upgrade": "h2c"}
                reply = await it.send("GET", "/v1/odd", headers=sent)
                names = {name.lower() for name in it.decode[0].seen[0].headers}
                assert "x-kept" in names
                assert not names & {"x-gone", "te", "upgrade"}
                assert reply.headers["x-kept"] == "1"
                assert "x-private" not in reply.headers
                assert "x-kvtally-verdict" not in reply.headers

        run(test)

    def test_http_1_0_clients_get_no_chunks(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                body = json.dumps({"prompt": LONG, "stream": True})
                head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
                reply = await _exchange(it, head[:-4], body.encode())
                assert reply.endswith(b"\r\n\r\n" + STREAM)
                assert b"chunked" not in reply

        run(test)

    def test_http_1_0_clients_that_want_to_keep_the_connection_may(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                reader, writer = await asyncio.open_connection("127.0.0.1", it.router.port)
                async with asyncio.timeout(HANG_S):
                    for _ in range(2):
                        writer.write(b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                        head = (await reader.readuntil(b"\r\n\r\n")).lower()
                        assert b"\r\nconnection: keep-alive\r\n" in head
                        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                writer.close()

        run(test)

    def test_clients_that_expect_to_be_asked_are_asked(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                reply = await it.send("POST", "/v1/completions", json={"prompt": "p"}, expect100=True)
                assert reply.status == 200

        run(test)

    def test_what_became_of_requests_is_told(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                first = await it.ask()
                await it.ask("short", key="k")
                ticket = first.headers["x-kvtally-request"]
                receipt = (await it.send("GET", f"/receipts/{ticket}")).json()
                assert (receipt["verdict"], receipt["prefill"]["saved_tokens"]) == ("proved", PROMPT_TOKENS - 1)
                assert receipt["prefill"]["computed_tokens"] == PROMPT_TOKENS - 1
                assert receipt["decode"]["tokens_host"] == PROMPT_TOKENS - 1
                assert receipt["route"]["decode"] == it.decode[0].name
                newest = (await it.send("GET", "/receipts?last=1")).json()
                assert (await it.send("GET", f"/receipts?last={'9' * 5000}")).json()[0] == newest[0]
                assert [item["verdict"] for item in newest] == ["recomputed:absent"]
                assert (await it.send("GET", "/receipts/unknown")).status == 404
                lines = await it.lines(2)
                assert [line["verdict"] for line in lines] == ["proved", "recomputed:absent"]
                assert (lines[0]["request"], lines[0]["reused_tokens"]) == (ticket, PROMPT_TOKENS - 1)
                text = (await it.send("GET", "/metrics")).body.decode()
                families = {family.name: family for family in text_string_to_metric_families(text)}
                assert set(families) == {entry.name for entry in METRICS}
                counted = {s.labels["verdict"]: s.value for s in families["kvtally_router_verdicts"].samples}
                assert counted == {"proved": 1, "recomputed:absent": 1}
                assert families["kvtally_router_prefill_skipped"].samples[0].labels == {"reason": "short"}

        run(test)

    def test_the_client_s_own_id_is_kept_in_the_log_only(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                it.headers = {"X-Request-Id": "___prefill_addr_10.0.0.1:80___mine"}
                await it.ask()
                assert (await it.lines(1))[0]["client_request"] == it.headers["X-Request-Id"]
                assert it.decode[0].seen[0].headers["X-Request-Id"] != it.headers["X-Request-Id"]

        run(test)

    def test_odd_bytes_from_clients_reach_neither_log_nor_metrics(self, tmp_path: Path) -> None:
        async def test() -> None:
            async with kit(tmp_path, prefill=0) as it:
                body = b'{"prompt":"p"}'
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX-Request-Id: \xff\xfe\r\n"
                more = b"".join(b"X-KVTally-%d: x\r\n" % number for number in range(50))
                reply = await _exchange(it, head % len(body) + more[:-2], body)
                assert reply.startswith(b"HTTP/1.1 200")
                assert (await it.lines(1))[0]["client_request"]
                metrics = (await it.send("GET", "/metrics")).body.decode()
                assert 'kvtally_router_dropped_total{name="x-kvtally-*"} 50.0' in metrics
                assert "x-kvtally-1" not in metrics

        run(test)

    def test_without_a_token_receipts_are_listed_on_this_machine_only(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                ticket = (await it.ask(LONG)).headers["x-kvtally-request"]
                assert (await it.send("GET", "/receipts?last=1")).status == 200
                monkeypatch.setattr(web.BaseRequest, "remote", "192.0.2.7")
                assert (await it.send("GET", "/receipts?last=1")).status == 403
                assert (await it.send("GET", "/receipts")).status == 403
                assert (await it.send("GET", f"/receipts/{ticket}")).status == 200  # for whoever knows the id

        run(test)

    def test_draining_needs_the_token_and_takes_an_instance_out(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with kit(tmp_path, store=store, decode=2, token=TOKEN) as it:
                name = it.decode[0].name
                assert (await it.send("POST", f"/drain?instance={name}")).status == 401
                assert (await it.send("GET", "/receipts")).status == 401
                secret = {"Authorization": f"Bearer {TOKEN}"}
                assert (await it.send("GET", "/receipts", headers=secret)).status == 200
                assert (await it.send("POST", "/drain?instance=nobody", headers=secret)).status == 404
                drained = await it.send("POST", f"/drain?instance={it.decode[0].url}", headers=secret)
                assert drained.json() == {"instance": name, "state": "draining", "requests": 0}
                used = {(await it.ask(f"{number} {LONG}")).headers["x-kvtally-decode"] for number in range(4)}
                assert used == {it.decode[1].name}
                await it.send("POST", f"/undrain?instance={name}", headers=secret)
                used = {(await it.ask(f"{number} again {LONG}")).headers["x-kvtally-decode"] for number in range(4)}
                assert used == {it.decode[0].name, it.decode[1].name}
            async with kit(tmp_path, store=store) as it:
                assert (await it.send("POST", f"/drain?instance={it.decode[0].name}")).status == 403

        run(test)

    def test_health_says_who_is_down_and_sees_it_come_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.05)

        async def test() -> None:
            async with kit(tmp_path) as it:
                assert (await it.send("GET", "/health")).json()["status"] == "ok"
                it.prefill[0].health = 503
                await until(lambda: _health_is(it, "degraded", 200))
                it.decode[0].health = 500
                await until(lambda: _health_is(it, "down", 503))
                refused = await it.ask()
                assert (refused.status, "KV-701" in refused.json()["error"]["message"]) == (503, True)
                it.prefill[0].health = it.decode[0].health = 200
                await until(lambda: _health_is(it, "ok", 200))

        run(test)

    def test_an_instance_that_goes_down_ends_the_waits_for_it(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.05)

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.prefill[0].pause.clear()
                asked = asyncio.ensure_future(it.ask())
                async with asyncio.timeout(HANG_S):
                    await it.prefill[0].arrived.wait()
                    it.prefill[0].health = 500
                    reply = await asked
                assert (reply.status, reply.prefill) == (200, "failed:down")

        run(test)

    def test_a_stream_that_has_only_its_head_goes_elsewhere_when_decode_goes_down(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM sends the head before it has computed anything."""
        monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.05)

        async def test() -> None:
            async with kit(tmp_path, store=store, prefill=0, decode=2) as it:
                for engine in it.decode:
                    engine.pauses_after = -1
                    engine.pause.clear()
                asked = asyncio.ensure_future(it.ask(stream=True))
                async with asyncio.timeout(HANG_S):
                    arrivals = [asyncio.ensure_future(engine.arrived.wait()) for engine in it.decode]
                    await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
                    first, second = sorted(it.decode, key=lambda engine: not engine.seen)
                    second.pause.set()
                    first.health = 500
                    reply = await asked
                assert (reply.status, reply.body, reply.headers["x-kvtally-decode"]) == (200, STREAM, second.name)

        run(test)

    def test_the_only_decode_that_goes_down_is_an_error_at_once(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtally.router.fleet.CHECK_S", 0.05)

        async def test() -> None:
            async with kit(tmp_path, store=store) as it:
                it.decode[0].pause.clear()
                asked = asyncio.ensure_future(it.ask())
                async with asyncio.timeout(HANG_S):
                    await it.decode[0].arrived.wait()
                    it.decode[0].health = 500
                    reply = await asked
                assert (reply.status, len(it.decode[0].seen)) == (502, 1)

        run(test)

    def test_streams_under_way_may_end_when_the_router_stops(self, tmp_path: Path, store: str) -> None:
        async def test() -> None:
            async with contextlib.AsyncExitStack() as stack:
                it = await stack.enter_async_context(kit(tmp_path, store=store, stop_s=HANG_S))
                it.decode[0].pauses_after = 1
                it.decode[0].pause.clear()
                body = {"prompt": LONG, "stream": True}
                async with aiohttp.ClientSession() as session:
                    response = await session.post(f"{it.url}/v1/completions", json=body)
                    stopping = asyncio.ensure_future(stack.aclose())
                    await until(lambda: _listens_no_more(it))
                    it.decode[0].pause.set()
                    assert await response.read() == STREAM
                    await stopping

        run(test)


async def drain(response: aiohttp.ClientResponse, parts: list[bytes]) -> None:
    """Read to the end; what came before an error stays in `parts`."""
    while part := await response.content.readany():
        parts.append(part)


async def leave(it: Kit, engine: FakeVLLM, body: dict[str, object]) -> None:
    """Ask, wait until the engine has the request, and hang up."""
    _, writer = await _raw(it, body)
    async with asyncio.timeout(HANG_S):
        await engine.arrived.wait()
        writer.close()
        await engine.seen[0].is_over.wait()


async def _raw(
    it: Kit, body: dict[str, object], *, read_bytes: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    if read_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", it.router.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=read_bytes or 65_536)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    await writer.drain()
    return reader, writer


async def _exchange(it: Kit, head: str | bytes, body: bytes = b"") -> bytes:
    """What comes back on a connection that is closed after one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.router.port)
    writer.write((head.encode() if isinstance(head, str) else head) + b"\r\nConnection: close\r\n\r\n" + body)
    async with asyncio.timeout(HANG_S):
        reply = await reader.read()
    writer.close()
    return reply


async def _listens_no_more(it: Kit) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", it.router.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def _is_idle(it: Kit) -> bool:
    told = (await it.send("GET", "/instances")).json()
    return all(item["requests"] == 0 for item in told["instances"])


async def _health_is(it: Kit, status: str, code: int) -> bool:
    reply: Reply = await it.send("GET", "/health")
    return (reply.json()["status"], reply.status) == (status, code)
