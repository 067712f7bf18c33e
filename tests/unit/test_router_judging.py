"""The router's judging: what a promise and a receipt make of a request, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvtally.core.receipts import Half, Receipt, Role, Verdict
from kvtally.core.routing import Skip
from kvtally.router.judging import LEAST_TOKENS, NO_PROMISE, WRONG_BY, Judge, Matched, Promise

FROM_TOKENS = 64
JUDGE = Judge(prefill_from_tokens=FROM_TOKENS)
SAVED = Half(role=Role.PREFILL, prompt_tokens=1_000, saved_tokens=999)
UNSAVED = Half(role=Role.PREFILL, prompt_tokens=1_000, reason="arena_full")
LOADED = Half(role=Role.DECODE, prompt_tokens=1_000, tokens_host=999, computed_tokens=1, verified=True)
HELD = Half(role=Role.DECODE, prompt_tokens=1_000, tokens_gpu=999, computed_tokens=1)
NEXT_TO_NOTHING = Half(role=Role.DECODE, prompt_tokens=1_000, tokens_gpu=16, computed_tokens=984)
NOTHING = Half(role=Role.DECODE, prompt_tokens=1_000, computed_tokens=1_000, reason="absent")
ONE_TOKEN = Half(role=Role.DECODE, prompt_tokens=1, computed_tokens=1)

KEPT = Promise(half=SAVED)
FAILED = Promise(note="prefill_down")
BELIEVED = Promise(skip=Skip.HELD)
SHORT = Promise(skip=Skip.SHORT)


def judged(promise: Promise, half: Half | None, *, judge: Judge = JUDGE, why_missing: str = "") -> Matched:
    return judge.match(Receipt(ticket="t", prefill=promise.half, decode=half), promise, why_missing=why_missing)


@pytest.mark.parametrize(
    ("promise", "half", "words", "reason", "is_refused"),
    [
        (KEPT, LOADED, "proved", "", False),
        (KEPT, HELD, "proved", "", False),
        (KEPT, structs.replace(LOADED, verified=False), "short", "unknown", True),
        (KEPT, structs.replace(LOADED, tokens_host=500, reason="evicted"), "short", "evicted", True),
        (KEPT, NOTHING, "recomputed:absent", "absent", True),
        (KEPT, None, "missing", "not_filed", True),
        # prefill took part and saved nothing: fine as long as decode held the prompt itself
        (Promise(half=UNSAVED), HELD, "local", "arena_full", False),
        (Promise(half=UNSAVED), NEXT_TO_NOTHING, "local", "arena_full", True),
        (Promise(half=UNSAVED), NOTHING, "recomputed:arena_full", "arena_full", True),
        # prefill was asked and failed
        (FAILED, HELD, "local", "", False),
        (FAILED, NEXT_TO_NOTHING, "local", "prefill_down", True),
        (FAILED, NOTHING, "recomputed:prefill_down", "prefill_down", True),
        (FAILED, ONE_TOKEN, "recomputed:prefill_down", "prefill_down", False),
        # the router itself believed that decode held the prompt
        (BELIEVED, HELD, "local", "", False),
        (BELIEVED, NEXT_TO_NOTHING, "local", "not_held", True),
        (BELIEVED, NOTHING, "recomputed:absent", "absent", True),
        # nobody promised anything
        (SHORT, NOTHING, "recomputed:absent", "absent", False),
        (SHORT, NEXT_TO_NOTHING, "local", "", False),
        (NO_PROMISE, NOTHING, "recomputed:absent", "absent", False),
        (NO_PROMISE, None, "missing", "not_filed", True),
    ],
)
def test_verdict_reason_and_what_strict_mode_makes_of_it(
    promise: Promise, half: Half | None, words: str, reason: str, is_refused: bool
) -> None:
    matched = judged(promise, half)
    assert (matched.words, matched.reason) == (words, reason)
    assert JUDGE.is_refused(matched, promise, is_batch=False) is is_refused


def test_a_batch_is_never_refused_for_what_cannot_be_known() -> None:
    matched = judged(Promise(skip=Skip.BATCH), None, why_missing="batch")
    assert matched.reason == "batch"
    assert not JUDGE.is_refused(matched, Promise(skip=Skip.BATCH), is_batch=True)


@pytest.mark.parametrize(
    ("promise", "half", "whole", "beginnings", "doubted"),
    [
        (KEPT, LOADED, True, True, False),
        (KEPT, structs.replace(LOADED, holds_beginnings=False), True, False, False),
        (KEPT, structs.replace(LOADED, tokens_host=500), False, False, False),
        (KEPT, NOTHING, False, False, False),
        (KEPT, None, False, False, False),
        (BELIEVED, HELD, True, True, False),
        (BELIEVED, NEXT_TO_NOTHING, False, False, True),
        (BELIEVED, NOTHING, False, False, True),
        (BELIEVED, None, False, False, True),
        (SHORT, NEXT_TO_NOTHING, True, True, False),  # from now on it holds the prompt: it computed the rest
    ],
)
def test_what_is_learned(promise: Promise, half: Half | None, whole: bool, beginnings: bool, doubted: bool) -> None:
    assert JUDGE.lesson(judged(promise, half), promise) == (whole, beginnings, doubted)


@given(st.integers(0, 10_000), st.integers(0, 100_000))
def test_decode_may_compute_some_times_the_estimate_and_no_more(from_tokens: int, computed: int) -> None:
    judge = Judge(prefill_from_tokens=from_tokens)
    half = Half(role=Role.DECODE, prompt_tokens=computed + 1, tokens_gpu=1, computed_tokens=computed)
    is_broken = judged(BELIEVED, half, judge=judge).reason == "not_held"
    assert is_broken == (computed > WRONG_BY * max(from_tokens, LEAST_TOKENS))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_sources_add_up_to_what_was_reused(gpu: int, host: int, disk: int, remote: int) -> None:
    half = Half(role=Role.DECODE, tokens_gpu=gpu, tokens_host=host, tokens_disk=disk, tokens_remote=remote)
    assert sum(half.sources.values()) == half.reused_tokens
    assert all(half.sources.values())
    assert (judged(NO_PROMISE, half).verdict is Verdict.RECOMPUTED) == (not half.sources)
