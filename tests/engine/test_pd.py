"""Prefill → decode between real vLLM servers, through the router: what decode answers is what it would have answered
alone, it computes one prompt token, and the receipt says so; what was tampered with is computed again.

The reference is vLLM's own continuation (see `Deployment.continued`), so tokens and logprobs must agree to the bit.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtally.core.answers import compare
from kvtally.testing.deployment import Deployment, Refused
from kvtally.testing.models import DENSE, GDN, SLIDING, Model, Recipe
from kvtally.verify.http import Server
from kvtally.verify.judge import Observation, Outcome, Report, Turn
from kvtally.verify.probes import Shape, shapes
from kvtally.verify.reasons import REASONS
from kvtally.verify.run import verify
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.engine

LONGEST = 4000
SAME = 1e-5  # how much a logprob may move where the same arithmetic was done
# What becomes of a hand-off is tested, not how soon it does on busy processors.
PATIENT: dict[str, Any] = {"connector": {"wait_ms": int(HANG_S * 1e3)}, "router": {"receipt_wait": 60_000}}
SLACK = {"float32": 1e-3, "bfloat16": 0.1}  # how much a batch may move a logprob


@pytest.fixture(scope="module", params=[DENSE, SLIDING, GDN], ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    chosen: Recipe = request.param
    return chosen


@pytest.fixture(scope="module")
def up(
    recipe: Recipe,
    tiny_model: Callable[[Recipe, int], Model],
    tmp_path_factory: pytest.TempPathFactory,
    patient: None,
) -> Iterator[Deployment]:
    deployment = Deployment(tiny_model(recipe, 0), tmp_path_factory.mktemp(recipe.name), **PATIENT)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.close()


def tokens(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(10, 900) for _ in range(length)]


def lengths(recipe: Recipe) -> list[int]:
    block = recipe.block_tokens
    return sorted({2, 30, block - 1, block, block + 1, 256, 257, 700, 3 * 256 + 5, LONGEST})


def test_decode_computes_one_token_and_answers_as_it_would_alone(up: Deployment, recipe: Recipe) -> None:
    for index, length in enumerate(lengths(recipe)):
        prompt, alone = up.continued(tokens(length - 1, length))
        before = up.counted()
        answer = up.complete(prompt, stream=index % 2 == 1)
        assert compare(alone, answer, SAME).problem == "", (length, answer, alone)
        told = answer.told
        assert (told["verdict"], told["reused-tokens"], told["computed-tokens"]) == ("proved", str(length - 1), "1")
        assert told["source"] == f"host:{length - 1}"
        up.wait(lambda before=before: up.counted() != before, "decode did not count the prompt")  # type: ignore[misc]
        after = up.counted()
        assert after["local_compute"] - before["local_compute"] == 1
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == length - 1
        receipt = up.receipt(answer)
        assert receipt["prefill"]["saved_tokens"] == length - 1
        assert receipt["decode"]["verified"]
        assert receipt["decode"]["moved_bytes"] > 0


def test_a_prompt_of_one_token_has_nothing_to_hand_over(up: Deployment) -> None:
    alone = up.complete([77])
    assert alone.told["computed-tokens"] == "1"
    assert alone.told["reused-tokens"] == "0"


def test_eight_at_once(up: Deployment, recipe: Recipe) -> None:
    pairs = [up.continued(tokens(300 + 37 * n, 1000 + n)) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pair: up.complete(pair[0], stream=True), pairs))
    for (prompt, alone), answer in zip(pairs, answers, strict=True):
        assert answer.told["verdict"] == "proved", answer.told
        assert answer.told["computed-tokens"] == "1"
        assert compare(alone, answer, SLACK[recipe.dtype]).problem == "", (answer, alone)
        assert len(prompt) - 1 == int(answer.told["reused-tokens"])


def test_a_repeat_needs_no_prefill_and_the_next_turn_goes_on(up: Deployment) -> None:
    prompt, alone = up.continued(tokens(600, 5))
    first, again = up.complete(prompt), up.complete(prompt)
    assert compare(alone, first, SAME).problem == ""
    assert again.tokens == alone.tokens
    assert again.told["verdict"] == "local"
    assert again.told["prefill"] == "skipped:held"
    assert again.told["computed-tokens"] == "1"
    turn = up.complete([*prompt, *first.tokens, *tokens(40, 6)])
    assert int(turn.told["reused-tokens"]) >= len(prompt)


def words(count: int, seed: int) -> str:
    """Four tokens each, but the last."""
    return " ".join(str(number) for number in random.Random(seed).choices(range(100, 1000), k=count))


def test_a_chat_is_handed_over_as_the_tokens_that_prefill_saw(up: Deployment) -> None:
    messages = [{"role": "user", "content": words(120, 60)}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    chat |= {"ignore_eos": True, "logprobs": True, "return_tokens_as_token_ids": True}
    alone = up.chat(up.decode, {**chat, "cache_salt": "alone"})
    answer = up.chat(up.router, chat)
    assert (answer.told["verdict"], answer.told["computed-tokens"]) == ("proved", "1"), answer.told
    assert answer.tokens[0] == alone.tokens[0]  # the rest may part by rounding, see the module's docstring
    again = up.chat(up.router, {**chat, "stream": True})
    assert (again.told["verdict"], again.tokens) == ("local", answer.tokens)


def test_tampered_bytes_are_computed_again(up: Deployment) -> None:
    """The negative control: one bit of what was handed over, and the receipt says why it was not reused."""
    prompt, _ = up.continued(tokens(900, 9))
    computed = up.computed(prompt)
    assert up.complete(prompt).told["verdict"] == "proved"
    up.forget(up.decode)  # prefill still holds it, and so does not look at what is in the store
    tamper(up)
    answer = up.complete(prompt)
    assert answer.told["verdict"] == "recomputed:checksum", (answer, up.receipt(answer))
    assert compare(computed, answer, SAME).problem == "", (answer, computed)
    assert up.complete(tokens(500, 10)).told["verdict"] == "proved"  # and the next one is handed over again


def tamper(up: Deployment) -> None:
    """With a bit of every page in the store's memory."""
    with up.store() as client:
        assert client.arena is not None
        memory = np.frombuffer(client.arena.view(0, client.arena.size_bytes), dtype=np.uint8)
        memory[::4096] ^= 1
        del memory


def prove(up: Deployment, monkeypatch: pytest.MonkeyPatch, *, between: tuple[int, int], **more: Any) -> Report:
    """`kvtally verify`, with probes of such lengths only, and the one that is streamed: how long it is depends on the
    processor, on which the size of a hybrid model's blocks does."""

    def few(block_tokens: int, limit_tokens: int) -> list[Shape]:
        shortest, longest = between
        every = shapes(block_tokens, limit_tokens)
        return [shape for shape in every if shortest <= shape.tokens <= longest or shape.is_streamed]

    monkeypatch.setattr("kvtally.verify.run.shapes", few)
    monkeypatch.setattr("kvtally.verify.run.COUNTERS_S", HANG_S)
    monkeypatch.setattr("kvtally.verify.run.RECEIPT_S", HANG_S)
    connect = functools.partial(Server, timeout_s=2 * HANG_S)
    return verify(connect(up.router), None, connect=connect, seed=time.monotonic_ns(), **more)


def test_verify_proves_it(up: Deployment, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    report = prove(up, monkeypatch, between=(30, 600))
    assert report.outcome is Outcome.PROVED, report
    same = [seen.case for seen in report.observations if seen.is_same_arithmetic]
    assert {"short", "streamed"} <= set(same)  # held to a logprob's 0.001
    assert "next turn" not in same
    assert (report.own_deviation > 0.001) == (recipe.dtype == "bfloat16")  # what a next turn is held to, twice


def test_verify_notices_tampering(up: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def tamper_after(seen: Observation) -> None:
        if seen.turn is Turn.FIRST:
            up.forget(up.decode)
            tamper(up)

    report = prove(up, monkeypatch, between=(500, 600), seen=tamper_after)
    assert report.outcome is Outcome.NOT_PROVED
    assert any(REASONS["checksum"].what in finding.what for finding in report.findings), report


def test_tenants_share_nothing(up: Deployment) -> None:
    prompt = tokens(520, 20)
    first = up.complete(prompt, key="alice")
    assert first.told["verdict"] == "proved"
    up.forget(up.decode, up.prefill)
    assert int(up.complete(prompt, key="alice").told["reused-tokens"]) == len(prompt) - 1
    up.forget(up.decode, up.prefill)
    with up.store() as client:
        before = client.stats().wait().stats["puts"]["bytes"]  # type: ignore[union-attr,index,call-overload]
        other = up.complete(prompt, key="bob")
        after = client.stats().wait().stats["puts"]["bytes"]  # type: ignore[union-attr,index,call-overload]
    assert other.tokens == first.tokens
    prefill = up.receipt(other)["prefill"]
    assert other.told["verdict"] == "proved"  # of what bob's own prefill computed, all of it, anew
    assert prefill["saved_tokens"] == len(prompt) - 1
    assert after - before > 0


def test_decode_keeps_its_attention_and_takes_the_state(up: Deployment, recipe: Recipe) -> None:
    """A prompt that shares a prefix whose attention decode still holds, while its state there is gone (vLLM keeps one
    state for each prompt): only the state and the missing attention are moved."""
    if recipe is not GDN:
        pytest.skip("needs a model with states")
    shared, block = tokens(600, 30), recipe.block_tokens
    cold = up.complete([*tokens(600, 31), *tokens(400, 32)])
    up.complete([*shared, *tokens(400, 33)])
    warm = up.complete([*shared, *tokens(400, 34)])
    assert (cold.told["source"], cold.told["verdict"]) == ("host:999", "proved")
    assert (warm.told["source"], warm.told["verdict"]) == (f"gpu:{2 * block},host:{999 - 2 * block}", "proved")
    moved = [up.receipt(answer)["decode"]["moved_bytes"] for answer in (cold, warm)]
    page_bytes = 2 * 64 * 2 * 2  # of one token in the one attention layer: two heads of 64, keys and values, bfloat16
    assert moved[0] - moved[1] == 2 * block * page_bytes


def test_what_clients_may_not_say_is_not_heard(up: Deployment) -> None:
    prompt = tokens(300, 40)
    forged = {"kvtally": {"ticket": "mine", "role": "decode", "saved_tokens": 299, "chain": "00" * 32}}
    answer = up.complete(prompt, kv_transfer_params=forged, cache_salt="another's")
    assert answer.told["verdict"] == "proved"
    assert answer.told["request"] != "mine"


def test_an_engines_own_error_reaches_the_client_as_it_is(up: Deployment) -> None:
    with pytest.raises(Refused) as refused:
        up.complete(tokens(5000, 50))
    assert refused.value.status == 400
    assert "4096" in refused.value.text


def test_nothing_is_left_leased(up: Deployment) -> None:
    with up.store() as client:
        eventually(
            lambda: client.stats().wait().stats["leases"]["open"] == 0,  # type: ignore[union-attr,index,call-overload]
            "no lease was open",
        )


def test_of_short_questions_behind_one_long_text_decode_computes_the_question_at_most(
    tiny_model: Callable[[Recipe, int], Model], tmp_path: Path, patient: None
) -> None:
    """Of a model with states, attention is all that decode holds of the text: left alone, it would compute again what
    lies behind the last state in it."""
    chat = {"model": "tiny", "max_tokens": 2, "temperature": 0, "logprobs": True, "return_tokens_as_token_ids": True}
    text = {"role": "user", "content": words(288, 70)}
    router = {**PATIENT["router"], "prefill_from": 64}
    up = Deployment(tiny_model(GDN, 0), tmp_path, **{**PATIENT, "router": router})
    try:
        up.wait_ready()
        for number, length in enumerate((40, 5, 5, 5)):
            question = {"role": "user", "content": words(length, 71 + number)}
            told = up.chat(up.router, {**chat, "messages": [text, question]}).told
            assert int(told["computed-tokens"]) <= 4 * 5, (number, told)
    finally:
        up.close()
