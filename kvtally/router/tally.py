"""The tally: matching the halves of a receipt, and what is known of requests afterwards.

    prefill's answer ─▶ half ─┐
    decode's store ──▶ half ─┴▶ match ─▶ Matched ─▶ headers of the response; strict: refuse
                                              └────▶ Tally: counters, the last receipts, one log line

Owns the verdict's words, the counters and the bounded book of the last requests. Nothing here waits.
Neighbours: `proxy` (left), `metrics` and `app` (read).
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from kvtally.core.receipts import PLACES, Half, Receipt, Verdict

BOOK_RECEIPTS = 10_000
MOST_REASONS = 64  # distinct ones that are counted by name
LONGEST_TEXT = 256  # of anything that clients or engines say, in the book and in the log

_NOT_A_WORD = re.compile(r"[^a-z0-9_.-]+")


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """What a receipt proves."""

    receipt: Receipt
    verdict: Verdict
    reason: str = ""  # one word: why less than everything was proved

    @property
    def words(self) -> str:
        """As headers and counters have it: `proved`, `short`, `missing`, `local`, `recomputed:<reason>`."""
        return f"{self.verdict}:{self.reason}" if self.verdict is Verdict.RECOMPUTED else str(self.verdict)


def match(receipt: Receipt, *, note: str = "", why_missing: str = "") -> Matched:
    """Judge a receipt. `note` says why prefill's half is not there though it was wanted, `why_missing` why decode's
    is not; either is nearer to the cause than what an engine can say."""
    verdict = receipt.verdict
    if verdict is Verdict.PROVED or (verdict is Verdict.LOCAL and receipt.prefill is None):
        return Matched(receipt=receipt, verdict=verdict)
    if verdict is Verdict.MISSING:
        return Matched(receipt=receipt, verdict=verdict, reason=word(why_missing or "not_filed"))
    return Matched(receipt=receipt, verdict=verdict, reason=word(note or receipt.reason))


def word(text: str) -> str:
    """Fit for a header and a label, whatever an engine says."""
    return _NOT_A_WORD.sub("_", text.lower())[:48].strip("_") or "unknown"


def source_of(half: Half | None) -> str:
    """Where reused tokens came from: `gpu:20,host:79`."""
    if half is None:
        return "unknown"
    return ",".join(f"{place}:{tokens}" for place, tokens in half.sources.items()) or "none"


def clipped(text: str) -> str:
    """Fit to be kept and logged, whatever bytes somebody sent: short, and UTF-8."""
    return text[:LONGEST_TEXT] if text.isascii() else text[:LONGEST_TEXT].encode("utf-8", "replace").decode()


class Record(msgspec.Struct, kw_only=True):
    """One request, as the log line and /receipts tell it."""

    ticket: str
    at_s: float
    path: str
    status: int = 0
    stream: bool = False
    verdict: str = ""
    reason: str = ""
    source: str = ""
    prefill: str = ""  # instance, or why none
    decode: str = ""
    retries: int = 0
    prefill_ms: float = 0.0
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    client_request: str = ""  # the client's own X-Request-Id
    error: str = ""
    receipt: Receipt | None = None

    def line(self) -> bytes:
        """One line of JSON, for the log."""
        tree: dict[str, object] = {
            "time": _utc(self.at_s),
            "request": self.ticket,
            "path": self.path,
            "status": self.status,
            "stream": self.stream,
            "verdict": self.verdict,
            "reason": self.reason,
            "prefill": self.prefill,
            "decode": self.decode,
            "retries": self.retries,
            "prefill_ms": round(self.prefill_ms, 3),
            "first_byte_ms": round(self.first_byte_ms, 3),
            "total_ms": round(self.total_ms, 3),
            "client_request": self.client_request,
            "error": self.error,
        }
        half = self.receipt.decode if self.receipt else None
        if half is not None:
            tree["prompt_tokens"] = half.prompt_tokens
            tree["reused_tokens"] = half.reused_tokens
            tree["computed_tokens"] = half.computed_tokens
            tree["source"] = self.source
            tree["moved_bytes"] = half.moved_bytes
            tree["wait_ms"] = half.wait_ms
            tree["load_ms"] = half.load_ms
        return msgspec.json.encode(tree) + b"\n"

    def tree(self) -> dict[str, object]:
        """For /receipts: both halves, the way `kvtally receipts --json` shows them, and what the router knows."""
        halves = (
            {"prefill": None, "decode": None}
            if self.receipt is None
            else {
                "prefill": _half_tree(self.receipt.prefill),
                "decode": _half_tree(self.receipt.decode),
            }
        )
        return {
            "ticket": self.ticket,
            "verdict": self.verdict,
            "reason": self.reason,
            **halves,
            "route": {
                "time": _utc(self.at_s),
                "path": self.path,
                "status": self.status,
                "stream": self.stream,
                "prefill": self.prefill,
                "decode": self.decode,
                "retries": self.retries,
                "prefill_ms": self.prefill_ms,
                "first_byte_ms": self.first_byte_ms,
                "total_ms": self.total_ms,
                "error": self.error,
            },
        }


class Tally:
    """Counters and the last records. `log` gets each request's line."""

    def __init__(self, log: Callable[[bytes], None]) -> None:
        self.verdicts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.skipped: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()  # by leg
        self.dropped: Counter[str] = Counter()  # fields and headers that clients may not set
        self.tokens: Counter[str] = Counter()  # prompt tokens, by where they came from; `computed` too
        self.moved_bytes = 0
        self.cut = 0  # answers that broke off after their first byte
        self._log = log
        self._book: OrderedDict[str, Record] = OrderedDict()

    def judged(self, matched: Matched) -> None:
        """A response was judged: count it."""
        words = matched.words
        if words not in self.verdicts and len(self.verdicts) >= MOST_REASONS:
            words = f"{matched.verdict}:other"
        self.verdicts[words] += 1
        half = matched.receipt.decode
        if half is not None:
            sources = half.sources
            for place in PLACES:
                self.tokens[place] += sources.get(place, 0)
            self.tokens["computed"] += half.computed_tokens
            self.moved_bytes += half.moved_bytes

    def keep(self, record: Record) -> None:
        """From now on it can be asked for; what is still to come is filled in."""
        record.error = clipped(record.error)
        self._book[record.ticket] = record
        while len(self._book) > BOOK_RECEIPTS:
            self._book.popitem(last=False)

    def finished(self, record: Record) -> None:
        """A request is over, one way or another."""
        self.statuses[record.status] += 1
        record.error = clipped(record.error)
        self._log(record.line())

    def find(self, ticket: str) -> Record | None:
        return self._book.get(ticket)

    def last(self, count: int) -> Iterator[Record]:
        """Newest first."""
        return (record for _, record in zip(range(count), reversed(self._book.values()), strict=False))


def _half_tree(half: Half | None) -> dict[str, object] | None:
    return None if half is None else {**msgspec.structs.asdict(half), "chain": half.chain.hex()}


def _utc(at_s: float) -> str:
    return f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z"


@lru_cache(maxsize=8)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
