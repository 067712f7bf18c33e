"""Receipts: the two halves that prove reuse, and the verdict that matching them gives.

Prefill files one half (what it saved), decode the other (what it really loaded and computed). Owns the records, the
verdict rule and `ReceiptBook`, the bounded ledger in which the store keeps halves by ticket. No clock: time is an
argument.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Loaded(NamedTuple):
    """Tokens that an engine loads from its store, by where the store had them."""

    host: int = 0  # in its memory
    disk: int = 0
    peer: int = 0  # in another store
    pool: int = 0

    @property
    def tokens(self) -> int:
        return sum(self)

    def last(self, tokens: int) -> Loaded:
        """The part of it that is the last `tokens` of the prompt. Nobody knows which token came from where: what had to
        be fetched counts before what was in memory, and what came from further away first."""
        pool = min(self.pool, tokens)
        peer = min(self.peer, tokens - pool)
        disk = min(self.disk, tokens - pool - peer)
        return Loaded(tokens - pool - peer - disk, disk, peer, pool)


NOTHING = Loaded()

# Where reused tokens come from. `gpu` is the engine's own cache. `remote` is another system's, which does not say more.
PLACES = ("gpu", *Loaded._fields, "remote")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Verdict(StrEnum):
    PROVED = "proved"  # decode loaded or held everything prefill promised, verified
    SHORT = "short"  # some was reused, less than promised
    LOCAL = "local"  # no prefill took part, or it saved nothing: decode held the prefix itself
    RECOMPUTED = "recomputed"  # nothing promised was reused; `reason` says why
    MISSING = "missing"  # decode's half never came


class Half(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One party's account of one request, in tokens and bytes as it counted them itself.

    For prefill `saved_tokens` is the boundary it promises and `chain` names it. For decode the `tokens_*` fields say
    where each reused prompt token came from and `computed_tokens` what it had to compute.

    Stores and engines of a cluster are upgraded one by one, so fields that a version does not know are ignored, and
    those that are zero are not sent.
    """

    role: Role
    request: str = ""
    prompt_tokens: int = 0
    saved_tokens: int = 0
    chain: bytes = b""
    tokens_gpu: int = 0
    tokens_host: int = 0
    tokens_disk: int = 0
    tokens_remote: int = 0
    tokens_peer: int = 0
    tokens_pool: int = 0
    computed_tokens: int = 0
    moved_bytes: int = 0
    wait_ms: float = 0.0
    load_ms: float = 0.0
    verified: bool = False
    reason: str = ""
    exposed_ms: float = 0.0  # the part of `wait_ms` after the engine had come to the request
    left_tokens: int = 0  # found in the store, but computing them was faster than loading them
    load_estimate_ms: float = 0.0  # the two estimates behind that decision; 0 if there was none to make
    compute_estimate_ms: float = 0.0
    # Whether an instance that holds a prompt also holds each of its beginnings. Not so with recurrent states, which are
    # kept at the end and at some places before it.
    holds_beginnings: bool = True

    @property
    def reused_tokens(self) -> int:
        return sum(self._counts)

    @property
    def sources(self) -> dict[str, int]:
        """Reused tokens by place; places without any are left out."""
        return {place: tokens for place, tokens in zip(PLACES, self._counts, strict=True) if tokens}

    @property
    def loaded_tokens(self) -> int:
        """Reused tokens that were not in the engine's own cache."""
        return self.reused_tokens - self.tokens_gpu

    @property
    def _counts(self) -> tuple[int, ...]:
        """Reused tokens, one count for each of `PLACES`."""
        return (
            self.tokens_gpu,
            self.tokens_host,
            self.tokens_disk,
            self.tokens_peer,
            self.tokens_pool,
            self.tokens_remote,
        )


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Both halves of one ticket, as far as they have been filed."""

    ticket: str
    prefill: Half | None = None
    decode: Half | None = None

    @property
    def verdict(self) -> Verdict:
        if self.decode is None:
            return Verdict.MISSING
        if self.decode.reused_tokens == 0:
            return Verdict.RECOMPUTED
        if self.prefill is None or self.prefill.saved_tokens == 0:
            return Verdict.LOCAL
        is_right = self.decode.verified or not self.decode.loaded_tokens
        if self.decode.reused_tokens >= self.prefill.saved_tokens and is_right:
            return Verdict.PROVED
        return Verdict.SHORT

    @property
    def reason(self) -> str:
        """Why less than everything was reused. If prefill saved nothing, prefill knows why; otherwise decode does.
        Empty if neither says."""
        if self.prefill is not None and self.prefill.saved_tokens == 0 and self.prefill.reason:
            return self.prefill.reason
        return self.decode.reason if self.decode is not None else ""


class ReceiptBook:
    """Receipts by ticket. Keeps at most `capacity`, each for `lifetime_ns` after its last half was filed."""

    def __init__(self, *, capacity: int, lifetime_ns: int) -> None:
        self._capacity = capacity
        self._lifetime_ns = lifetime_ns
        self._entries: OrderedDict[str, tuple[int, Receipt]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def file(self, ticket: str, half: Half, now_ns: int) -> Receipt:
        """Add one half. If the same half is filed again, the new one replaces it: a retried request reports again."""
        self._expire(now_ns)
        _, known = self._entries.pop(ticket, (0, Receipt(ticket=ticket)))
        if half.role is Role.PREFILL:
            receipt = Receipt(ticket=ticket, prefill=half, decode=known.decode)
        else:
            receipt = Receipt(ticket=ticket, prefill=known.prefill, decode=half)
        self._entries[ticket] = (now_ns, receipt)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return receipt

    def find(self, ticket: str, now_ns: int) -> Receipt | None:
        self._expire(now_ns)
        entry = self._entries.get(ticket)
        return entry[1] if entry else None

    def last(self, count: int, now_ns: int) -> list[Receipt]:
        """The most recently filed receipts, newest first."""
        self._expire(now_ns)
        newest = [receipt for _, (_, receipt) in zip(range(count), reversed(self._entries.items()), strict=False)]
        return [receipt for _, receipt in newest]

    def _expire(self, now_ns: int) -> None:
        while self._entries:
            ticket = next(iter(self._entries))
            if now_ns - self._entries[ticket][0] <= self._lifetime_ns:
                return
            del self._entries[ticket]
