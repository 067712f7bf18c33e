"""One request: what came from the client, what is known of it, and what became of it.

Owns reading the body within its bounds and taking out what clients may not set. Neighbour: `proxy`, which sends it on
its way.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from aiohttp import web
from multidict import CIMultiDict

from kvtally.config import RouterConfig
from kvtally.core.routing import Print, prints_of
from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Fields, Kind
from kvtally.router.tally import Matched, Record, Tally
from kvtally.router.tenants import Tenants

NOT_JSON = ("multipart/", "application/x-www-form-urlencoded")  # passed on as they are: no engine reads JSON in them
LONGEST_TEXT = 256  # of what a client says, in the log


class Trip:
    """One request's state, from its arrival to its log line."""

    __slots__ = (
        *("_begun_s", "fields", "kind", "matched", "path", "prints", "prompt_bytes", "record", "request"),
        *("reserved_bytes", "salt"),
    )

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.path = request.path.rstrip("/")  # an engine would redirect, to itself
        self.fields: Fields = {}
        self.kind = Kind.OTHER
        self.prints: list[Print] = []
        self.prompt_bytes = 0
        self.salt = ""
        self.matched: Matched | None = None
        self.reserved_bytes = 0  # of the room for bodies
        self.record = Record(
            ticket=new_ticket(),
            at_s=time.time(),
            path=_printable(self.path),
            client_request=_printable(request.headers.get("X-Request-Id", "")),
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

    async def read(self, config: RouterConfig) -> bytes:
        """The body. Raises RouteError where it is too large, or does not come."""
        limit_bytes = config.max_body_bytes
        if (self.request.content_length or 0) > limit_bytes:
            raise _too_large(limit_bytes)
        try:
            if "Expect" in self.request.headers and self.request.version >= (1, 1):
                await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self.request.content.is_eof():
                return await self._take(limit_bytes)  # it is here
            async with asyncio.timeout(config.timeout_s):
                return await self._take(limit_bytes)
        except TimeoutError as error:
            message = f"the body did not come within {config.timeout_s} s"
            raise RouteError(message, remedy="Send it at once.", status=408) from error
        except web.RequestPayloadError as error:
            message = f"the body cannot be read: {error}"
            raise RouteError(message, remedy="Send a whole one.", status=400, code="KV-705") from error

    async def _take(self, limit_bytes: int) -> bytes:
        """Not `request.read`, which would keep the body for as long as the answer takes."""
        parts, size_bytes = [], 0
        while part := await self.request.content.readany():
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > limit_bytes:
                raise _too_large(limit_bytes)
        return b"".join(parts)

    def understand(self, data: bytes, config: RouterConfig, tenants: Tenants, tally: Tally) -> None:
        """Take the body apart; drop, or refuse, what clients may not set; make it the tenant's."""
        self.fields = bodies.read_fields(data)
        self.refuse_reserved([*bodies.scrub(self.fields), *header.choosing(self.request.headers)], config, tally)
        self.salt = tenants.salt(self.request.headers)

    def refuse_reserved(self, found: list[str], config: RouterConfig, tally: Tally) -> None:
        if not found:
            return
        tally.dropped.update(
            f"{header.PREFIX}*" if name.lower().startswith(header.PREFIX) else name.lower() for name in found
        )
        if config.strict:
            raise RouteError(
                f"{', '.join(found)}: only the router may set this",
                remedy="Leave it out of the request.",
                status=400,
                code="KV-704",
            )

    def look_at_prompt(self) -> None:
        """Know the prompt by its digests."""
        self.record.stream = bodies.is_streamed(self.fields)
        self.kind, parts = bodies.prompt_of(self.fields)
        self.prints = prints_of(bodies.root_of(self.path, self.salt, self.fields), parts)
        self.prompt_bytes = self.prints[-1].end_bytes if self.prints else 0

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


def _printable(text: str) -> str:
    """Whatever bytes a client sends, the log is UTF-8."""
    return text[:LONGEST_TEXT] if text.isascii() else text[:LONGEST_TEXT].encode("utf-8", "replace").decode()


def _too_large(limit_bytes: int) -> RouteError:
    return RouteError(
        f"the body has more than {limit_bytes} bytes",
        remedy="Send less; the limit is router.max_body.",
        status=413,
        code="KV-705",
    )
