"""One request: what came from the client, what is known of it, and what became of it.

Owns what the router keeps of a request, and refusing what clients may not set. Neighbours: `proxy`, which sends the
request on its way; `body`, which reads it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from aiohttp import web
from multidict import CIMultiDict

from kvtally.config import RouterConfig
from kvtally.core.routing import Print
from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Fields, Kind
from kvtally.router.intake import Body
from kvtally.router.tally import Matched, Record, Tally, clipped
from kvtally.router.tenants import Tenants

# Media types in which no engine looks for JSON. Exactly these: FastAPI takes anything that ends with `+json` for JSON.
NOT_JSON = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})
MOST_NAMES, LONGEST_NAME = 8, 64  # of the fields and headers that a refusal names
LARGE_BYTES = 256 * 1024  # a body of more is taken apart in a thread, so that nobody else waits for it


class Trip:
    """One request's state, from its arrival to its log line."""

    __slots__ = (
        *("_begun_s", "body", "fields", "kind", "matched", "path", "prints", "prompt_bytes", "record", "request"),
        *("salt",),
    )

    def __init__(self, request: web.BaseRequest, body: Body) -> None:
        self.request = request
        self.body = body
        self.path = request.path.rstrip("/")  # an engine would redirect, to itself
        self.fields: Fields = {}
        self.kind = Kind.OTHER
        self.prints: Sequence[Print] = ()
        self.prompt_bytes = 0
        self.salt = ""
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
        """A leg is tried again: nothing of the first attempt must be taken for the second's."""
        self.record.ticket = new_ticket()

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._begun_s) * 1e3

    @property
    def is_json(self) -> bool:
        """Whether an engine may take the body for JSON."""
        media_type, _, _ = self.request.headers.get("Content-Type", "").partition(";")
        return media_type.strip().lower() not in NOT_JSON

    async def understand(
        self, data: bytes, config: RouterConfig, tenants: Tenants, tally: Tally, large: Executor, *, is_generating: bool
    ) -> None:
        """Take the body apart; drop, or refuse, what clients may not set; make it the tenant's.

        Large bodies go to `large`, which takes one after the other: parsing 32 MiB holds Python's lock for tens of
        milliseconds, in pieces of a few, and several at once would starve the event loop."""
        self.salt = tenants.salt(self.request.headers)
        work = partial(bodies.understand, data, path=self.path, salt=self.salt, is_generating=is_generating)
        is_large = len(data) > LARGE_BYTES
        understood = await asyncio.get_running_loop().run_in_executor(large, work) if is_large else work()
        self.fields = understood.fields
        self.refuse_reserved([*understood.reserved, *header.choosing(self.request.headers)], config, tally)
        self.record.stream = bodies.is_streamed(self.fields)
        self.kind, self.prints = understood.kind, understood.prints
        self.prompt_bytes = self.prints[-1].end_bytes if self.prints else 0

    def refuse_reserved(self, found: list[str], config: RouterConfig, tally: Tally) -> None:
        if not found:
            return
        tally.dropped.update(
            f"{header.PREFIX}*" if name.lower().startswith(header.PREFIX) else name.lower() for name in found
        )
        if config.strict:
            raise RouteError(
                f"{_some(found)}: only the router may set this",
                remedy="Leave it out of the request.",
                status=400,
                code="KV-704",
            )

    def engine_headers(self, config: RouterConfig) -> CIMultiDict[str]:
        return header.for_engine(self.request.headers, ticket=self.ticket, tenant_header=config.tenant_header)

    def own_headers(self) -> dict[str, str]:
        """What the router says about this request."""
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
    """Unguessable: whoever knows one may read its receipt."""
    return secrets.token_hex(16)


def _some(names: list[str]) -> str:
    """The first of these names, so that a message stays short whatever a client sends."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(name[:LONGEST_NAME] for name in names[:MOST_NAMES]) + more
