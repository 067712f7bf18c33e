"""One request in progress: what the client sent, what the router knows about it, and what became of it.

An exchange lives from the request's arrival to its log line. Owns that state and the headers in which the router speaks
for itself. Neighbours: `proxy` and `prefill`, which carry it through its legs; `book`, which keeps its record.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from aiohttp import web
from multidict import CIMultiDict

from kvtally.core.receipts import Half, Receipt
from kvtally.core.routing import Held, Print
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Fields, Kind, Understood
from kvtally.router.book import Record, clipped
from kvtally.router.intake import Body
from kvtally.router.judging import Judge, Matched, Promise, source_of

# Media types in which no engine looks for JSON. Exactly these: FastAPI reads anything that ends with `+json` as JSON.
NOT_JSON = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})


class Exchange:
    """The state of one request."""

    __slots__ = (
        *("_begun_s", "body", "fields", "held", "kind", "matched", "path", "prints", "prompt_bytes", "record"),
        *("request", "salt"),
    )

    def __init__(self, request: web.BaseRequest, body: Body, *, salt: str) -> None:
        self.request = request
        self.body = body  # its share of the intake's room
        self.path = request.path.rstrip("/")  # an engine would redirect the client, to an address of its own
        self.salt = salt  # the tenant's
        self.fields: Fields = {}
        self.kind = Kind.OTHER
        self.prints: Sequence[Print] = ()
        self.prompt_bytes = 0
        self.held: dict[str, Held] = {}  # how much of the prompt each instance has seen
        self.matched: Matched | None = None
        self.record = Record(
            ticket=new_ticket(),
            at_s=time.time(),
            path=clipped(self.path),
            client_request=clipped(request.headers.get("X-Request-Id", "")),
        )
        self._begun_s = time.perf_counter()

    @property
    def ticket(self) -> str:
        return self.record.ticket

    def renew(self) -> None:
        """Take a new ticket for another attempt, so that nobody confuses its receipt with the first attempt's."""
        self.record.ticket = new_ticket()

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._begun_s) * 1e3

    @property
    def is_json(self) -> bool:
        """Whether an engine may read the body as JSON."""
        media_type, _, _ = self.request.headers.get("Content-Type", "").partition(";")
        return media_type.strip().lower() not in NOT_JSON

    def adopt(self, understood: Understood) -> None:
        """Keep what the body says."""
        self.fields, self.kind, self.prints = understood.fields, understood.kind, understood.prints
        self.record.stream = bodies.is_streamed(self.fields)
        self.prompt_bytes = self.prints[-1].end_bytes if self.prints else 0

    def forget_body(self) -> None:
        self.fields, self.prints = {}, ()

    def settle(self, judge: Judge, promise: Promise, half: Half | None, *, why_missing: str) -> Matched:
        """Match the halves of the receipt and write the verdict into the record."""
        receipt = Receipt(ticket=self.ticket, prefill=promise.half, decode=half)
        matched = self.matched = judge.match(receipt, promise, why_missing=why_missing)
        record = self.record
        record.receipt, record.verdict, record.reason = receipt, matched.words, matched.reason
        record.source = source_of(half)
        return matched

    def engine_headers(self, tenant_header: str) -> CIMultiDict[str]:
        """The headers that an engine gets."""
        return header.for_engine(self.request.headers, ticket=self.ticket, tenant_header=tenant_header)

    def own_headers(self) -> dict[str, str]:
        """The headers in which the router tells the client about this request."""
        record, matched = self.record, self.matched
        told = {"x-kvtally-request": record.ticket}
        if record.prefill:
            told["x-kvtally-prefill"] = record.prefill
        if record.decode:
            told["x-kvtally-decode"] = record.decode
        if matched is not None:
            half = matched.receipt.decode
            told["x-kvtally-reused-tokens"] = str(half.reused_tokens) if half else "unknown"
            told["x-kvtally-computed-tokens"] = str(half.computed_tokens) if half else "unknown"
            told["x-kvtally-source"] = record.source
            told["x-kvtally-verdict"] = matched.words
            if matched.reason:
                told["x-kvtally-reason"] = matched.reason
        return told


def new_ticket() -> str:
    """A name that nobody can guess, because anyone who knows a ticket may read its receipt."""
    return secrets.token_hex(16)
