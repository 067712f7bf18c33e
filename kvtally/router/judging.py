"""Judging: what a receipt proves, whether a strict router may answer, and what the router learns from it.

    Promise (before decode runs) ─┐
    decode's half of the receipt ─┴▶ Judge.match ─▶ Matched ─▶ is_refused: strict mode's answer
                                                         └───▶ lesson: what decode is believed to hold from now on

A promise is anything that made the router count on reuse: a prefill that says it saved the prompt, a prefill that was
asked and failed, or the router's own belief that decode holds the prompt. Pure: the proxy carries out what is decided
here. Neighbours: `core.receipts` (the verdict rule), `proxy` (left), `book` (counts verdicts).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from kvtally.core.receipts import Half, Receipt, Verdict
from kvtally.core.routing import Skip

# The router estimates tokens as a quarter of the bytes. Decode may compute this many times the estimate before the
# router calls its own belief wrong.
WRONG_BY = 4
LEAST_TOKENS = 16  # the smallest estimate, for routers that skip prefill for no prompt, however short

_NOT_A_WORD = re.compile(r"[^a-z0-9_.-]+")


class Promise(NamedTuple):
    """What the router may expect of decode."""

    half: Half | None = None  # prefill's half of the receipt
    note: str = ""  # why there is no such half, although prefill was asked
    skip: Skip | None = None  # why prefill was not asked

    @property
    def counts_on_reuse(self) -> bool:
        return self.half is not None or bool(self.note) or self.skip is Skip.HELD


NO_PROMISE = Promise()


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt and what it proves."""

    receipt: Receipt
    verdict: Verdict
    reason: str = ""  # one word: why less than everything was proved

    @property
    def words(self) -> str:
        """The verdict as headers and counters show it: `proved`, `short`, `missing`, `local`, `recomputed:<reason>`."""
        return f"{self.verdict}:{self.reason}" if self.verdict is Verdict.RECOMPUTED else str(self.verdict)


class Lesson(NamedTuple):
    """What a request taught about its decode instance."""

    holds_whole: bool  # the instance was proved to hold the whole prompt
    holds_beginnings: bool  # and every beginning of it, too
    is_doubted: bool  # the router believed that it holds the prompt, and it does not


class Judge:
    """The rules, with this router's threshold: prompts of fewer tokens than `prefill_from_tokens` skip prefill."""

    def __init__(self, *, prefill_from_tokens: int) -> None:
        self._most_tokens = WRONG_BY * max(prefill_from_tokens, LEAST_TOKENS)

    def match(self, receipt: Receipt, promise: Promise, *, why_missing: str) -> Matched:
        """Match the halves. Where a promise was broken, the reason says why."""
        matched = match(receipt, note=promise.note, why_missing=why_missing)
        if matched.verdict is Verdict.LOCAL and self._is_broken(matched, promise):
            return msgspec.structs.replace(matched, reason=promise.note or matched.reason or "not_held")
        return matched

    def is_refused(self, matched: Matched, promise: Promise, *, is_batch: bool) -> bool:
        """Whether a strict router refuses to pass the answer on."""
        if matched.verdict in (Verdict.MISSING, Verdict.SHORT):
            return not is_batch  # nobody promised anything for a batch, and nothing can be known about it
        return self._is_broken(matched, promise)

    def lesson(self, matched: Matched, promise: Promise) -> Lesson:
        half = matched.receipt.decode
        is_proved = half is not None and matched.verdict in (Verdict.PROVED, Verdict.LOCAL)
        if half is not None and promise.skip is Skip.HELD:
            is_proved &= not self._is_too_much(half)
        return Lesson(
            holds_whole=is_proved,
            holds_beginnings=is_proved and half is not None and half.holds_beginnings,
            is_doubted=promise.skip is Skip.HELD and not is_proved,
        )

    def _is_broken(self, matched: Matched, promise: Promise) -> bool:
        """Whether the router counted on reuse, and decode says that there was none, or next to none."""
        half = matched.receipt.decode
        if half is None or not promise.counts_on_reuse:
            return False
        if matched.verdict is Verdict.RECOMPUTED:
            return half.prompt_tokens > 1  # a prompt of one token has nothing to reuse
        return matched.verdict is Verdict.LOCAL and self._is_too_much(half)

    def _is_too_much(self, half: Half) -> bool:
        """Whether decode computed more than even a wrong estimate of the prompt's tokens explains."""
        return half.computed_tokens > self._most_tokens


def match(receipt: Receipt, *, note: str = "", why_missing: str = "") -> Matched:
    """Judge a receipt by itself.

    `note` says why prefill's half is not there although it was wanted, `why_missing` why decode's is not. Both come
    from the router, which is nearer to the cause than an engine.
    """
    verdict = receipt.verdict
    if verdict is Verdict.PROVED or (verdict is Verdict.LOCAL and receipt.prefill is None):
        return Matched(receipt=receipt, verdict=verdict)
    if verdict is Verdict.MISSING:
        return Matched(receipt=receipt, verdict=verdict, reason=word(why_missing or "not_filed"))
    return Matched(receipt=receipt, verdict=verdict, reason=word(note or receipt.reason))


def word(text: str) -> str:
    """Make whatever an engine says fit for a header and a label."""
    return _NOT_A_WORD.sub("_", text.lower())[:48].strip("_") or "unknown"


def source_of(half: Half | None) -> str:
    """Where reused tokens came from, as the header shows it: `gpu:20,host:79`."""
    if half is None:
        return "unknown"
    return ",".join(f"{place}:{tokens}" for place, tokens in half.sources.items()) or "none"
