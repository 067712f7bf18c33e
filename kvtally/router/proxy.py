"""One request's way through the router.

    intake ─▶ scrub, salt ─▶ choose decode ─▶ prefill: Plan ─▶ decode leg ─▶ first byte ─┐
                                                                                         ▼
    client ◀── bytes as they come ◀── headers with the verdict ◀── judging ◀── decode's half of the receipt

Owns the order of these steps, and decode's retries. Retrying is safe, because generating
has no effects and nothing has reached the client yet; after the first byte nothing is retried (`relay`). When a client
leaves, aiohttp cancels the handler, and with it the leg that is under way. Neighbours: `app` (left); `intake`,
`prefill`, `legs`, `receipts`, `judging`, `relay` (right), in the order in which a request meets them.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from aiohttp import web
from msgspec.json import encode

from kvtally.config import RouterConfig
from kvtally.core.receipts import Half
from kvtally.core.routing import Held, PrefixMap
from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Kind
from kvtally.router.book import Book
from kvtally.router.exchange import Exchange
from kvtally.router.flavours.base import Flavour, Params
from kvtally.router.fleet import Fleet, Member
from kvtally.router.intake import Intake
from kvtally.router.judging import NO_PROMISE, Judge, Promise
from kvtally.router.legs import UNSENT, Failure, Leg, Started, Whole, read_on, start
from kvtally.router.prefill import Plan, Prefill
from kvtally.router.receipts import Answer, ReceiptReader
from kvtally.router.relay import CLIENT_LEFT, relay
from kvtally.router.stores import Stores
from kvtally.router.tenants import Tenants

LEFT_STATUS = 499  # the status that others, too, log for a client that left
DECODE_ATTEMPTS = 2
UNFILED = 3  # an instance that failed to file this many receipts in a row is not waited for
STRICT_PATIENCE = 2  # a strict router waits this many times as long for a receipt
STORE_WAIT_MS = 60_000  # the longest that a store waits for a receipt; after that the router asks again
EVIDENCE_BYTES = 32 << 20
SHORTEST_PAUSE_S = 0.005  # before the second question for a receipt that is not there; twice as long before each next
MOST_NAMES, LONGEST_NAME = 8, 64  # fields and headers that a refusal names


class Proxy:
    """Carries requests through the router. Everything here is shared by all of them."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        flavour: Flavour,
        fleet: Fleet,
        stores: Stores,
        seen: PrefixMap,
        book: Book,
        tenants: Tenants,
        prefill: Prefill,
        intake: Intake,
    ) -> None:
        self._config = config
        self._flavour = flavour
        self._fleet = fleet
        self._stores = stores
        self._seen = seen
        self._book = book
        self._tenants = tenants
        self._prefill = prefill
        self._intake = intake
        self._judge = Judge(prefill_from_tokens=config.prefill_from_tokens)

    def restarted(self, instance: str) -> None:
        """An instance was down: what it held may be gone."""
        self._seen.forget(instance)

    # ---- requests

    async def complete(self, request: web.BaseRequest) -> web.StreamResponse:
        """/v1/completions and /v1/chat/completions."""
        return await self._carry(request, is_generating=True)

    async def forward(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any other path: to a decode instance, as it is."""
        return await self._carry(request, is_generating=False)

    async def _carry(self, request: web.BaseRequest, *, is_generating: bool) -> web.StreamResponse:
        """From arrival to log line, whatever happens in between."""
        exchange = Exchange(request, self._intake.enter(), salt=self._tenants.salt(request.headers))
        record = exchange.record
        try:
            response = await (self._complete(exchange) if is_generating else self._forward(exchange))
            record.status = record.status or response.status
            return response
        except RouteError as error:
            record.status, record.error = error.status, error.message
            if is_generating and exchange.matched is None:
                self._settle(exchange, NO_PROMISE, None, f"status_{error.status}")
            return error_response(error, exchange.own_headers())
        except asyncio.CancelledError:
            if not record.status:  # otherwise the client had its whole answer before it left
                record.status, record.error = LEFT_STATUS, CLIENT_LEFT
            raise
        finally:
            self._let_go(exchange)
            self._intake.leave(request, exchange.body)
            record.total_ms = exchange.elapsed_ms
            self._book.finished(record)

    async def _complete(self, exchange: Exchange) -> web.StreamResponse:
        data = await self._intake.take(exchange.request, exchange.body)
        await self._understand(exchange, data or b"", is_generating=True)
        del data
        exchange.held = self._seen.holders(exchange.prints, time.monotonic_ns())
        decode = self._pick_decode(exchange.held)
        plan = await self._prefill.plan(exchange, decode)
        if isinstance(plan, Whole):  # the client's own mistake, in the engine's words
            self._settle(exchange, NO_PROMISE, None, f"status_{plan.status}")
            headers = header.for_client(plan.headers)
            headers.update(exchange.own_headers())
            return web.Response(status=plan.status, body=plan.body, headers=headers)
        return await self._decode(exchange, decode, plan)

    async def _forward(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        data = await self._intake.take(request, exchange.body)
        if data and exchange.is_json:
            await self._understand(exchange, data, is_generating=False)
            data = bodies.encode(exchange.fields, {"cache_salt": exchange.salt})
        tried: list[Member] = []
        while True:
            member = self._pick_decode({}, besides=tried)
            tried.append(member)
            exchange.record.decode = member.name
            is_last = len(tried) == DECODE_ATTEMPTS
            member.legs += 1
            try:
                headers = exchange.engine_headers(self._config.tenant_header)
                leg = Leg(request.rel_url.raw_path_qs, headers, data, request.method)
                started = await start(member, leg, is_last=is_last)
                if isinstance(started, Started):
                    del leg, data  # the answer may take long
                    self._let_go(exchange)
                    return await self._pass_on(exchange, started)
            finally:
                member.legs -= 1
            self._count_retry(exchange, started, is_last=is_last)

    async def _understand(self, exchange: Exchange, data: bytes, *, is_generating: bool) -> None:
        """Take the body apart. What clients may not set is dropped, and a strict router refuses it."""
        understood = await self._intake.understand(
            data, path=exchange.path, salt=exchange.salt, is_generating=is_generating
        )
        exchange.adopt(understood)
        found = [*understood.reserved, *header.choosing(exchange.request.headers)]
        if not found:
            return
        self._book.dropped.update(
            f"{header.PREFIX}*" if name.lower().startswith(header.PREFIX) else name.lower() for name in found
        )
        if self._config.strict:
            raise RouteError(
                f"{_some(found)}: only the router may set this",
                remedy="Leave it out of the request.",
                status=400,
                code="KV-704",
            )

    # ---- decode

    async def _decode(self, exchange: Exchange, decode: Member, plan: Plan) -> web.StreamResponse:
        """Send the request to decode. If that fails before the first byte, try once more, on another instance."""
        if decode.is_draining or not decode.is_up:  # it was chosen before prefill, which may have taken long
            decode = self._fleet.decode.pick({}) or decode
        tried: list[Member] = []
        while True:
            tried.append(decode)
            exchange.record.decode = decode.name
            is_last = len(tried) == DECODE_ATTEMPTS
            decode.legs += 1
            try:
                outcome = await self._try_decode(exchange, decode, plan, is_last=is_last)
            finally:
                decode.legs -= 1
            if isinstance(outcome, web.StreamResponse):
                return outcome
            other = self._fleet.decode.pick({}, besides=tried) or (decode if decode.is_up else None)
            self._count_retry(exchange, outcome, is_last=is_last or other is None)
            if outcome.reason != UNSENT:
                plan = self._plan_again(exchange, plan)
            decode = other or decode

    def _plan_again(self, exchange: Exchange, plan: Plan) -> Plan:
        """The plan for a second instance. The first may have filed a receipt, and may have read what prefill kept."""
        exchange.renew()
        told = cast("Params | None", plan.overlay.get("kv_transfer_params"))
        params = self._flavour.again(exchange.ticket, told)
        if told is not None and bodies.IDS in told:
            params = {**(params or {}), bodies.IDS: told[bodies.IDS]}
        is_spent = plan.promise.half is not None and self._flavour.has_one_reader
        promise = Promise(note="handoff_spent") if is_spent else plan.promise
        return Plan({**plan.overlay, "kv_transfer_params": params}, promise)

    async def _try_decode(
        self, exchange: Exchange, decode: Member, plan: Plan, *, is_last: bool
    ) -> web.StreamResponse | Failure:
        reader = self._stores.readers.get(decode.instance.store)
        if exchange.kind is Kind.BATCH:
            reader = None  # all prompts of a batch file under one ticket, so no receipt speaks for all of them
        asked = reader.ask(exchange.ticket, STORE_WAIT_MS) if reader is not None else None
        source = self._stores.source(exchange.held, decode.instance, exchange.prompt_bytes)
        told = self._flavour.aimed(cast("Params | None", plan.overlay.get("kv_transfer_params")), source=source)
        body = bodies.encode(exchange.fields, {**plan.overlay, "kv_transfer_params": told})
        leg = Leg(exchange.path, exchange.engine_headers(self._config.tenant_header), body, may_repeat=False)
        started = await start(decode, leg, is_last=is_last)
        del body, leg, told  # the answer may take long
        if isinstance(started, Failure):
            return started
        status = started.response.status
        try:
            if status == 200:
                started = await self._judge_answer(exchange, decode, plan.promise, started, asked, source)
            else:
                self._settle(exchange, plan.promise, None, f"status_{status}")
            plan.overlay.clear()
            self._let_go(exchange)
            response = await self._pass_on(exchange, started)
        finally:
            started.response.close()
        if exchange.record.reason == "not_filed" and reader is not None:
            await self._look_again(exchange, decode, plan.promise, reader)
        return response

    # ---- the verdict

    async def _judge_answer(
        self,
        exchange: Exchange,
        decode: Member,
        promise: Promise,
        started: Started,
        asked: asyncio.Future[Answer] | None,
        source: str,
    ) -> Started:
        """Match the halves before the client gets the first byte. Raises RouteError where strict mode refuses."""
        half, why = None, "batch" if exchange.kind is Kind.BATCH else "no_receipts"
        if asked is not None:
            answer = await self._receipt(exchange, decode, asked)
            half, why = (answer.receipt.decode if answer.receipt else None), answer.reason
        elif self._flavour.has_evidence and not exchange.record.stream:
            started, half = await self._evidence(started)
        self._settle(exchange, promise, half, why)
        matched = exchange.matched
        assert matched is not None
        self._book.judged(matched)
        if half is not None:
            # After a hand-off, a wait for prefill's last chunks would be taken for a slow pull.
            prefill = self._fleet.find(exchange.record.prefill)
            if not source and prefill is not None and prefill.instance.store != decode.instance.store:
                source = prefill.instance.store  # the router has lost it meanwhile
            self._stores.pulled(source, half, exchange.prompt_bytes, is_timed=promise.half is None)
        lesson = self._judge.lesson(matched, promise)
        now_ns = time.monotonic_ns()
        self._seen.learn(exchange.prints[:-1], decode.name, now_ns, proved=lesson.holds_beginnings)
        self._seen.learn(exchange.prints[-1:], decode.name, now_ns, proved=lesson.holds_whole)
        if lesson.is_doubted:
            self._seen.doubt(exchange.prints, decode.name)
        is_batch = exchange.kind is Kind.BATCH
        if self._config.strict and self._judge.is_refused(matched, promise, is_batch=is_batch):
            raise RouteError(
                f"reuse was not proved: {matched.words}" + (f" ({matched.reason})" if matched.reason else ""),
                remedy=f"See /receipts/{exchange.ticket}; without --strict the request is answered all the same.",
                status=502,
                code="KV-703",
            )
        return started

    def _settle(self, exchange: Exchange, promise: Promise, half: Half | None, why_missing: str) -> None:
        exchange.settle(self._judge, promise, half, why_missing=why_missing)
        self._book.keep(exchange.record)

    async def _receipt(self, exchange: Exchange, decode: Member, asked: asyncio.Future[Answer]) -> Answer:
        """Decode's half, for which the first byte waits a little. The store was asked when decode was."""
        if asked.done() and (asked.result().reason or _has_decode(asked.result())):
            decode.unfiled = 0
            return asked.result()
        # A strict router would refuse an answer whose receipt is a moment late.
        wait_ms = self._config.receipt_wait_ms * (STRICT_PATIENCE if self._config.strict else 1)
        if decode.unfiled >= UNFILED and not self._config.strict:
            return Answer(None)  # it runs without the connector; `_look_again` notices if that changes
        answer = Answer(None)
        try:
            async with asyncio.timeout(wait_ms / 1e3):
                answer, pause_s = await asked, SHORTEST_PAUSE_S
                while not answer.reason and not _has_decode(answer):
                    # The store has waited as long as it does, or too many wait there and it answers at once.
                    answer = await self._stores.readers[decode.instance.store].ask(exchange.ticket, wait_ms)
                    await asyncio.sleep(0 if _has_decode(answer) else pause_s)
                    pause_s *= 2
        except TimeoutError:
            pass
        decode.unfiled = 0 if answer.reason or _has_decode(answer) else decode.unfiled + 1
        return answer

    async def _look_again(self, exchange: Exchange, decode: Member, promise: Promise, reader: ReceiptReader) -> None:
        """Decode's half was too late for the headers. The record should have it all the same."""
        try:
            async with asyncio.timeout(self._config.receipt_wait_ms / 1e3):
                answer = await reader.ask(exchange.ticket, 0)
        except TimeoutError:
            return
        if answer.receipt is not None and answer.receipt.decode is not None:
            decode.unfiled = 0
            self._settle(exchange, promise, answer.receipt.decode, "")
            exchange.record.reason = exchange.record.reason or "late"

    async def _evidence(self, started: Started) -> tuple[Started, Half | None]:
        """For flavours without receipts: what the response itself says about reuse."""
        try:
            started = await read_on(started, EVIDENCE_BYTES)
        except OSError as error:
            raise RouteError(
                f"decode broke off its answer: {error}", remedy="Ask again.", status=502, code="KV-702"
            ) from error
        return started, self._flavour.evidence(started.first) if started.response.is_complete else None

    # ---- common to all

    def _let_go(self, exchange: Exchange) -> None:
        """Decode has begun to answer, or never will: nobody needs the body any more."""
        self._intake.let_go(exchange.body)
        exchange.forget_body()

    def _pick_decode(self, held: dict[str, Held], besides: list[Member] = []) -> Member:  # noqa: B006 - only read
        member = self._fleet.decode.pick(held, besides=besides)
        if member is None and besides:
            member = self._fleet.decode.pick(held)  # the same one again is better than none
        if member is None:
            raise RouteError("no decode instance is up", remedy="Try again soon.", status=503, code="KV-701")
        return member

    def _count_retry(self, exchange: Exchange, failure: Failure, *, is_last: bool) -> None:
        """Raises RouteError where there is no further attempt."""
        exchange.record.error = failure.message
        if is_last or failure.is_final:
            raise RouteError(
                failure.message,
                remedy="Try again; the engine's log says more.",
                status=504 if failure.reason == "timeout" else 502,
                code="KV-702",
            )
        exchange.record.retries += 1
        self._book.retries["decode"] += 1

    async def _pass_on(self, exchange: Exchange, started: Started) -> web.StreamResponse:
        """The answer, from its first bytes to its end."""
        record = exchange.record
        headers = header.for_client(started.response.headers)
        headers.update(exchange.own_headers())
        record.first_byte_ms = exchange.elapsed_ms
        try:
            response, problem = await relay(exchange.request, started, headers, self._config.timeout_s)
        finally:
            started.response.close()
        record.status = LEFT_STATUS if problem == CLIENT_LEFT else response.status
        if problem:
            record.error = problem
            self._book.cut += problem != CLIENT_LEFT
        return response


def _has_decode(answer: Answer) -> bool:
    return answer.receipt is not None and answer.receipt.decode is not None


def _some(names: list[str]) -> str:
    """The first few of these names: a client may send any number of any length."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(name[:LONGEST_NAME] for name in names[:MOST_NAMES]) + more


def error_response(error: RouteError, headers: dict[str, str]) -> web.Response:
    """An error in the shape of OpenAI's, with our code and remedy."""
    tree = {
        "message": f"{error.message} [{error.code}]. {error.remedy}",
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": None,
        "code": error.status,
    }
    return web.Response(
        status=error.status,
        body=encode({"error": tree}),
        content_type="application/json",
        headers=headers,
    )
