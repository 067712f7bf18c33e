"""Receipts: the verdict for every combination of halves, and a book that stays bounded and forgets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.receipts import PLACES, Half, Loaded, Receipt, ReceiptBook, Role, Verdict

GPU = Half(role=Role.DECODE, tokens_gpu=100, computed_tokens=1)
LOADED = Half(role=Role.DECODE, tokens_host=60, tokens_disk=30, tokens_remote=10, computed_tokens=1, verified=True)
UNVERIFIED = Half(role=Role.DECODE, tokens_host=100, computed_tokens=1)
PARTLY = Half(role=Role.DECODE, tokens_gpu=20, tokens_host=30, computed_tokens=51, verified=True)
NOTHING = Half(role=Role.DECODE, computed_tokens=101, verified=True, reason="absent")
PROMISE = Half(role=Role.PREFILL, saved_tokens=100)
NO_PROMISE = Half(role=Role.PREFILL, saved_tokens=0)


@pytest.mark.parametrize(
    ("prefill", "decode", "verdict"),
    [
        (None, None, Verdict.MISSING),
        (PROMISE, None, Verdict.MISSING),
        (None, GPU, Verdict.LOCAL),
        (None, LOADED, Verdict.LOCAL),
        (None, NOTHING, Verdict.RECOMPUTED),
        (PROMISE, GPU, Verdict.PROVED),  # held it already: nothing was moved, so nothing had to be verified
        (PROMISE, LOADED, Verdict.PROVED),
        (PROMISE, UNVERIFIED, Verdict.SHORT),  # reuse that nobody verified proves nothing
        (PROMISE, PARTLY, Verdict.SHORT),
        (PROMISE, NOTHING, Verdict.RECOMPUTED),
        (NO_PROMISE, GPU, Verdict.LOCAL),  # all of nothing proves nothing
        (NO_PROMISE, LOADED, Verdict.LOCAL),
        (NO_PROMISE, NOTHING, Verdict.RECOMPUTED),
    ],
)
def test_verdicts(prefill: Half | None, decode: Half | None, verdict: Verdict) -> None:
    assert Receipt(ticket="t", prefill=prefill, decode=decode).verdict is verdict


tokens = st.integers(0, 5)
decodes = st.builds(
    Half,
    role=st.just(Role.DECODE),
    tokens_gpu=tokens,
    tokens_host=tokens,
    tokens_disk=tokens,
    tokens_peer=tokens,
    tokens_pool=tokens,
    tokens_remote=tokens,
    verified=st.booleans(),
)
prefills = st.builds(Half, role=st.just(Role.PREFILL), saved_tokens=st.integers(0, 15))


@given(prefills, decodes)
def test_proved_needs_every_promised_token_and_proof_of_what_moved(prefill: Half, decode: Half) -> None:
    verdict = Receipt(ticket="t", prefill=prefill, decode=decode).verdict
    moved = sum(tokens for place, tokens in decode.sources.items() if place != "gpu")
    reused = decode.tokens_gpu + moved
    if verdict is Verdict.PROVED:
        assert reused >= prefill.saved_tokens > 0
        assert decode.verified or not moved
    elif verdict is Verdict.SHORT:
        assert reused
        assert reused < prefill.saved_tokens or (moved and not decode.verified)
    elif verdict is Verdict.LOCAL:
        assert reused
        assert prefill.saved_tokens == 0
    else:
        assert verdict is Verdict.RECOMPUTED
        assert reused == 0


CAPACITY, LIFETIME_NS = 3, 10
filings = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(list(Role)), st.integers(0, 8)), max_size=30)


@given(filings)
def test_the_book_against_a_plain_list(steps: list[tuple[str, Role, int]]) -> None:
    """The model keeps every filing ever made and works out from that list alone what the book should still know."""
    book = ReceiptBook(capacity=CAPACITY, lifetime_ns=LIFETIME_NS)
    log: list[tuple[int, str, Half]] = []
    now = 0
    for number, (ticket, role, later) in enumerate(steps):
        now += later
        half = Half(role=role, request=str(number))
        filed = book.file(ticket, half, now)
        log.append((now, ticket, half))
        expected = remembered(log, now)
        assert filed == expected[0]
        assert len(book) == len(expected) <= CAPACITY
        assert book.last(CAPACITY + 5, now) == expected
        assert book.last(2, now) == expected[:2]
        for name in "abcde":
            assert book.find(name, now) == next((receipt for receipt in expected if receipt.ticket == name), None)
    assert book.last(CAPACITY, now + LIFETIME_NS + 1) == []
    assert len(book) == 0


def remembered(log: list[tuple[int, str, Half]], now: int) -> list[Receipt]:
    """Newest first. A ticket whose last filing is too old, or that was pushed out, starts again from nothing."""
    halves: dict[str, dict[Role, Half]] = {}
    filed_at: dict[str, int] = {}
    order: list[str] = []  # oldest filing first
    for when, ticket, half in log:
        for old in [name for name in order if when - filed_at[name] > LIFETIME_NS]:
            order.remove(old)
        if ticket not in order:
            halves[ticket] = {}
        else:
            order.remove(ticket)
        order.append(ticket)
        halves[ticket][half.role] = half
        filed_at[ticket] = when
        order = order[-CAPACITY:]
    alive = [name for name in reversed(order) if now - filed_at[name] <= LIFETIME_NS]
    return [
        Receipt(ticket=name, prefill=halves[name].get(Role.PREFILL), decode=halves[name].get(Role.DECODE))
        for name in alive
    ]


def test_a_receipt_lives_from_its_last_filing_on() -> None:
    book = ReceiptBook(capacity=4, lifetime_ns=LIFETIME_NS)
    book.file("t", PROMISE, 0)
    book.file("t", GPU, LIFETIME_NS)
    assert book.find("t", 2 * LIFETIME_NS) == Receipt(ticket="t", prefill=PROMISE, decode=GPU)
    assert book.find("t", 2 * LIFETIME_NS + 1) is None


counts_of_loads = st.builds(Loaded, *[st.integers(0, 9)] * len(Loaded._fields))


@given(counts_of_loads, st.integers(0, 50))
def test_of_what_was_loaded_the_last_tokens_are_accounted_for_to_the_last(all_of_it: Loaded, tokens: int) -> None:
    part = all_of_it.last(tokens)
    assert part.tokens == tokens
    assert min(part) >= 0
    fetched = dict(all_of_it._asdict(), host=tokens)  # what was in memory takes the rest
    assert all(count <= fetched[place] for place, count in part._asdict().items())
    # nothing counts as nearer while something further away is left
    for nearer, further in pairwise(Loaded._fields):
        assert not getattr(part, nearer) or getattr(part, further) == getattr(all_of_it, further)


@given(st.lists(st.integers(0, 1 << 20), min_size=len(PLACES), max_size=len(PLACES)))
def test_a_halfs_sources_are_its_reused_tokens_by_place(counts: list[int]) -> None:
    half = Half(role=Role.DECODE, **{f"tokens_{place}": count for place, count in zip(PLACES, counts, strict=True)})  # type: ignore[arg-type]
    assert sum(half.sources.values()) == half.reused_tokens == sum(counts)
    assert [half.sources.get(place, 0) for place in PLACES] == counts
    assert 0 not in half.sources.values()
