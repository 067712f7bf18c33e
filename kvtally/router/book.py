"""The book: one record for each request, the last of them kept, and the counters behind `/metrics`.

Owns the records and the counters, and bounds both: whatever clients and engines say is cut before it is kept. Nothing
here waits. Neighbours: `proxy` (writes), `metrics` and `app` (read), `judging` (the verdicts that are counted).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from kvtally.core.receipts import PLACES, Half, Receipt
from kvtally.router.judging import Matched

BOOK_RECEIPTS = 10_000
MOST_REASONS = 64  # verdicts counted by name; the others are counted together
LONGEST_TEXT = 256  # characters of anything that a client or an engine said


def clipped(text: str) -> str:
    """Make a text fit to be kept and logged, whatever bytes it was made of: short, and valid UTF-8."""
    return text[:LONGEST_TEXT] if text.isascii() else text[:LONGEST_TEXT].encode("utf-8", "replace").decode()


class Record(msgspec.Struct, kw_only=True):
    """One request, as its log line and `/receipts` show it."""

    ticket: str
    at_s: float
    path: str
    status: int = 0
    stream: bool = False
    verdict: str = ""
    reason: str = ""
    source: str = ""
    prefill: str = ""  # the instance, or why there is none
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
        """For `/receipts`: both halves, as `kvtally receipts --json` shows them, and the request's route."""
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


class Book:
    """Counters and the last records. `log` gets a line for each request."""

    def __init__(self, log: Callable[[bytes], None]) -> None:
        self.verdicts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.skipped: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()  # by leg
        self.dropped: Counter[str] = Counter()  # fields and headers that clients may not set
        self.tokens: Counter[str] = Counter()  # prompt tokens by source; `computed` is one
        self.moved_bytes = 0
        self.cut = 0  # answers that broke off after their first byte
        self._log = log
        self._records: OrderedDict[str, Record] = OrderedDict()

    def judged(self, matched: Matched) -> None:
        """Count a response's verdict and its tokens."""
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
        """From now on `/receipts` can find this record; the rest of it is filled in as it becomes known."""
        record.error = clipped(record.error)
        self._records[record.ticket] = record
        while len(self._records) > BOOK_RECEIPTS:
            self._records.popitem(last=False)

    def finished(self, record: Record) -> None:
        """A request is over, however it ended."""
        self.statuses[record.status] += 1
        record.error = clipped(record.error)
        self._log(record.line())

    def find(self, ticket: str) -> Record | None:
        return self._records.get(ticket)

    def last(self, count: int) -> Iterator[Record]:
        """Newest first."""
        return (record for _, record in zip(range(count), reversed(self._records.values()), strict=False))


def _half_tree(half: Half | None) -> dict[str, object] | None:
    return None if half is None else {**msgspec.structs.asdict(half), "chain": half.chain.hex()}


def _utc(at_s: float) -> str:
    return f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z"


@lru_cache(maxsize=8)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
