"""One request's way through the router.

    body ─▶ scrub, salt ─▶ choose decode ─▶ prefill leg ─▶ hand-off ─▶ decode leg ─▶ first byte ─┐
                              (skipped where decode holds the prompt, or it is short)             ▼
    client ◀── bytes, as they come ◀── headers with the verdict ◀── halves matched ◀── decode's store

Owns the order of things, retries and deadlines. What is retried is safe: generating has no effects, and nothing has
reached the client yet. After the first byte nothing is retried (`relay`). When the client leaves, aiohttp cancels the
handler, and with it whichever leg is under way. A prefill that fails costs latency, not the answer: decode computes the
prompt itself then, and the verdict says why. Neighbours: `app` (left), `trip`, `flavours`, `pool`, `stores`, `tally`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from typing import NamedTuple, cast

import aiohttp
import msgspec
from aiohttp import web

from kvtally.config import RouterConfig
from kvtally.core.receipts import Half, Receipt, Verdict
from kvtally.core.routing import Held, PrefixMap, Skip, skip_prefill
from kvtally.errors import RouteError
from kvtally.router import body as bodies
from kvtally.router import headers as header
from kvtally.router.body import Kind
from kvtally.router.engines import RETRIED_STATUSES, UNSENT, Failure, Leg, Started, Whole, ask, read_on, start
from kvtally.router.flavours import FLAVOURS
from kvtally.router.flavours.base import Params, PrefillAnswer, ResponseUsage
from kvtally.router.intake import Intake
from kvtally.router.pool import Member, Pool
from kvtally.router.relay import CLIENT_LEFT, relay
from kvtally.router.stores import Answer, StoreReader
from kvtally.router.tally import Matched, Tally, match, source_of
from kvtally.router.tenants import Tenants
from kvtally.router.trip import Trip

LEFT_STATUS = 499  # what others log for a client that left
PREFILL_ATTEMPTS = 3
DECODE_ATTEMPTS = 2
WRONG_BY = 4  # so many times more than was thought may decode have to compute; a token is not always four bytes
LEAST_TOKENS = 16  # of which that is said, where a router asks prefill for every prompt
UNFILED = 3  # receipts that an instance may fail to file before nobody waits for them any more
STRICT_PATIENCE = 2  # times as long is a receipt waited for where its absence is an error
STORE_WAIT_MS = 60_000  # the longest a store waits; a later first byte asks again
EVIDENCE_BYTES = 32 << 20
PREFIXES, PREFIX_LIFETIME_NS = 65_536, 900 * 1_000_000_000
SHORTEST_PAUSE_S = 0.005  # between two questions for a receipt that the store answers at once; twice as long each time
BOOTSTRAP_BYTES = 1 << 20
BOOTSTRAP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Plan(NamedTuple):
    """What decode is sent beyond the client's request, and what may be expected of it."""

    overlay: dict[str, object]
    half: Half | None = None  # what prefill says it has done
    note: str = ""  # why there is no half though one was wanted
    skip: Skip | None = None

    @property
    def was_promised(self) -> bool:
        """Whether somebody, prefill or the router itself, counts on reuse."""
        return self.half is not None or bool(self.note) or self.skip is Skip.HELD


NO_PLAN = Plan({})


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Prefilled(msgspec.Struct):
    """What is read of a prefill instance's response."""

    choices: list[_Choice] = []
    usage: ResponseUsage = ResponseUsage()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: dict[str, object] | None = None


class Proxy:
    """Everything that one request's way needs, shared by all of them."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        pool: Pool,
        readers: dict[str, StoreReader],
        tally: Tally,
        tenants: Tenants,
        session: aiohttp.ClientSession,
        intake: Intake,
        large: Executor,
    ) -> None:
        self._config = config
        self._flavour = FLAVOURS[config.flavour]
        self._pool = pool
        self._readers = readers
        self._tally = tally
        self._tenants = tenants
        self._session = session
        self._intake = intake
        self._large = large
        self._prefill_seen = PrefixMap(capacity=PREFIXES, lifetime_ns=PREFIX_LIFETIME_NS)
        self._decode_seen = PrefixMap(capacity=PREFIXES, lifetime_ns=PREFIX_LIFETIME_NS)

    def restarted(self, instance: str) -> None:
        """It was down: what it held may be gone."""
        self._prefill_seen.forget(instance)
        self._decode_seen.forget(instance)

    # ---- requests

    async def complete(self, request: web.BaseRequest) -> web.StreamResponse:
        """/v1/completions and /v1/chat/completions."""
        return await self._travel(Trip(request, self._intake.enter()), is_generating=True)

    async def forward(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any other path: to a decode instance, as it is."""
        return await self._travel(Trip(request, self._intake.enter()), is_generating=False)

    async def _travel(self, trip: Trip, *, is_generating: bool) -> web.StreamResponse:
        record = trip.record
        try:
            response = await (self._complete(trip) if is_generating else self._forward(trip))
            record.status = record.status or response.status
            return response
        except RouteError as error:
            record.status, record.error = error.status, error.message
            if is_generating and trip.matched is None:
                self._settle(trip, NO_PLAN, None, f"status_{error.status}")
            return error_response(error, trip.own_headers())
        except asyncio.CancelledError:
            if not record.status:  # else it had its answer before it left
                record.status, record.error = LEFT_STATUS, CLIENT_LEFT
            raise
        finally:
            self._let_go(trip)
            self._intake.leave(trip.request, trip.body)
            record.total_ms = trip.elapsed_ms
            self._tally.finished(record)

    async def _complete(self, trip: Trip) -> web.StreamResponse:
        data = await self._intake.take(trip.request, trip.body) or b""
        await self._understand(trip, data, is_generating=True)
        del data
        held = self._decode_seen.holders(trip.prints, time.monotonic_ns())
        decode = self._pick_decode(held)
        proved_bytes = held[decode.name].proved_bytes if decode.name in held else 0
        plan = await self._prefill(trip, proved_bytes)
        if isinstance(plan, Whole):  # the client's own mistake, in the engine's words
            self._settle(trip, NO_PLAN, None, f"status_{plan.status}")
            headers = header.for_client(plan.headers)
            headers.update(trip.own_headers())
            return web.Response(status=plan.status, body=plan.body, headers=headers)
        return await self._decode(trip, decode, plan)

    async def _forward(self, trip: Trip) -> web.StreamResponse:
        request = trip.request
        data = await self._intake.take(request, trip.body)
        if data and trip.is_json:
            await self._understand(trip, data, is_generating=False)
            data = bodies.encode(trip.fields, {"cache_salt": trip.salt})
        tried: list[Member] = []
        while True:
            member = self._pick_decode({}, besides=tried)
            tried.append(member)
            trip.record.decode = member.name
            member.legs += 1
            try:
                path, headers = request.rel_url.raw_path_qs, trip.engine_headers(self._config)
                leg = Leg(path, headers, data, request.method)
                started = await start(member, leg, is_last=len(tried) == DECODE_ATTEMPTS)
                if isinstance(started, Started):
                    del leg, data  # the answer may take long
                    self._let_go(trip)
                    return await self._pass_on(trip, started)
            finally:
                member.legs -= 1
            self._give_up_or_retry(trip, "decode", started, is_last=len(tried) == DECODE_ATTEMPTS)

    # ---- prefill

    async def _prefill(self, trip: Trip, proved_bytes: int) -> Plan | Whole:
        """Have the prompt computed and kept by a prefill instance, unless decode had better do it alone."""
        record = trip.record
        if not self._pool.prefill.members:
            record.prefill = "none"
            return self._alone(trip)
        skip = bodies.skip_of(trip.kind, trip.fields, has_one_reader=self._flavour.has_one_reader) or skip_prefill(
            trip.prompt_bytes,
            proved_bytes if self._flavour.has_receipts else 0,
            from_tokens=self._config.prefill_from_tokens,
        )
        if skip is not None:
            record.prefill = f"skipped:{skip}"
            self._tally.skipped[skip] += 1
            return self._alone(trip, skip=skip)
        held = self._prefill_seen.holders(trip.prints, time.monotonic_ns())
        # One that fell silent gets one request at a time, until it answers.
        silent = [member for member in self._pool.prefill.members if member.pace.is_silent and member.legs]
        tried: list[Member] = []
        reason = "silent" if silent else "down"
        while len(tried) < PREFILL_ATTEMPTS:
            member = self._pool.prefill.pick(held, besides=[*tried, *silent])
            if member is None:
                break
            if tried:
                trip.renew()
                trip.record.retries += 1
                self._tally.retries["prefill"] += 1
            tried.append(member)
            seen_bytes = held[member.name].seen_bytes if member.name in held else 0
            answer = await self._ask_prefill(trip, member, trip.prompt_bytes - seen_bytes)
            if not isinstance(answer, Failure):
                return answer
            reason = answer.reason
            record.error = answer.message
            if answer.is_final:
                break
        record.prefill = f"failed:{reason}"
        return self._alone(trip, note=f"prefill_{reason}")

    async def _ask_prefill(self, trip: Trip, member: Member, compute_bytes: int) -> Plan | Whole | Failure:
        """One attempt. A Whole is an answer that the client gets as it is."""
        begun_ms = trip.elapsed_ms
        member.legs += 1
        try:
            opening = await self._flavour.open(trip.ticket, member.instance, self._ask_json)
            overlay = {**bodies.prefill_overlay(trip.fields), **opening.fields, **self._salt(trip)}
            headers = trip.engine_headers(self._config)
            headers.update(opening.headers)
            body = bodies.encode(trip.fields, {**overlay, "kv_transfer_params": opening.params})
            answer = await self._ask_in_time(member, Leg(trip.path, headers, body), compute_bytes)
        except (OSError, ValueError) as error:  # of `open`
            return Failure("bootstrap", f"{member.instance.bootstrap} cannot be asked: {error}")
        finally:
            member.legs -= 1
            trip.record.prefill_ms = trip.elapsed_ms - begun_ms
        if isinstance(answer, Failure):
            return answer
        trip.record.prefill = member.name
        if 400 <= answer.status < 500:
            return answer
        if answer.status != 200:
            is_final = answer.status not in RETRIED_STATUSES
            return Failure(f"status_{answer.status}", f"{member.name} answered {answer.status}", is_final)
        try:
            told = msgspec.json.decode(answer.body, type=_Prefilled)
        except (msgspec.DecodeError, RecursionError):
            return self._alone(trip, note="bad_answer")
        self._prefill_seen.learn(trip.prints, member.name, time.monotonic_ns(), proved=False)
        choice = told.choices[0] if told.choices else _Choice()
        handoff = self._flavour.close(
            trip.ticket,
            opening,
            PrefillAnswer(told.usage.prompt_tokens, choice.finish_reason or "", told.kv_transfer_params),
        )
        if isinstance(handoff, str):
            return self._alone(trip, note=handoff)
        found = [ids for ids in (told.prompt_token_ids, choice.prompt_token_ids) if bytes(ids).startswith(b"[")]
        overlay = bodies.handoff_overlay(trip.kind, trip.fields, found[0] if found else None, handoff.params)
        return Plan({**overlay, **self._salt(trip)}, handoff.half)

    async def _ask_in_time(self, member: Member, leg: Leg, compute_bytes: int) -> Whole | Failure:
        """Ask prefill, and give up where it falls silent. A strict router waits: it would refuse decode's answer."""
        if self._config.strict:
            return await ask(member, leg)
        begun_s, took_s = time.monotonic(), None
        limit = asyncio.timeout(None)
        member.pace.began(limit, compute_bytes, self._pool.awake_s)
        try:
            async with limit:
                answer = await ask(member, leg)
            if isinstance(answer, Whole) and answer.status == 200:
                took_s = time.monotonic() - begun_s
            return answer
        except TimeoutError:
            message = f"{member.name} has answered nobody for much longer than such a prompt takes"
            return Failure("silent", message, is_final=True)
        finally:
            member.pace.ended(limit, took_s)

    def _alone(self, trip: Trip, *, note: str = "", skip: Skip | None = None) -> Plan:
        """Decode computes what it does not hold."""
        overlay: dict[str, object] = {"kv_transfer_params": self._flavour.alone(trip.ticket), **self._salt(trip)}
        return Plan(overlay, note=note, skip=skip)

    # ---- decode

    async def _decode(self, trip: Trip, decode: Member, plan: Plan) -> web.StreamResponse:
        """Send the request to decode, once more to another one where that fails before the first byte."""
        if decode.is_draining or not decode.is_up:  # since it was chosen: prefill may have taken long
            decode = self._pool.decode.pick({}) or decode
        tried: list[Member] = []
        while True:
            tried.append(decode)
            trip.record.decode = decode.name
            is_last = len(tried) == DECODE_ATTEMPTS
            decode.legs += 1
            try:
                outcome = await self._try_decode(trip, decode, plan, is_last=is_last)
            finally:
                decode.legs -= 1
            if isinstance(outcome, web.StreamResponse):
                return outcome
            other = self._pool.decode.pick({}, besides=tried) or (decode if decode.is_up else None)
            self._give_up_or_retry(trip, "decode", outcome, is_last=is_last or other is None)
            if outcome.reason != UNSENT:
                plan = self._again(trip, plan)
            decode = other or decode

    def _again(self, trip: Trip, plan: Plan) -> Plan:
        """For another instance. The one that failed may have filed a receipt, and have read what was handed over."""
        trip.renew()
        told = cast("Params | None", plan.overlay.get("kv_transfer_params"))
        params = self._flavour.again(trip.ticket, told)
        if told is not None and bodies.IDS in told:
            params = {**(params or {}), bodies.IDS: told[bodies.IDS]}
        plan = plan._replace(overlay={**plan.overlay, "kv_transfer_params": params})
        if plan.half is not None and self._flavour.has_one_reader:
            plan = plan._replace(half=None, note="handoff_spent")
        return plan

    async def _try_decode(
        self, trip: Trip, decode: Member, plan: Plan, *, is_last: bool
    ) -> web.StreamResponse | Failure:
        reader = self._readers.get(decode.instance.store) if self._flavour.has_receipts else None
        if trip.kind is Kind.BATCH:
            reader = None  # each of its prompts files under the one ticket: none speaks for all
        asked = reader.ask(trip.ticket, STORE_WAIT_MS) if reader is not None else None
        body = bodies.encode(trip.fields, plan.overlay)
        leg = Leg(trip.path, trip.engine_headers(self._config), body, may_repeat=False)
        started = await start(decode, leg, is_last=is_last)
        del body, leg  # the answer may take long
        if isinstance(started, Failure):
            return started
        status = started.response.status
        try:
            if status == 200:
                started = await self._judge(trip, decode, plan, started, asked)
            else:
                self._settle(trip, plan, None, f"status_{status}")
            plan.overlay.clear()
            self._let_go(trip)
            response = await self._pass_on(trip, started)
        finally:
            started.response.close()
        if trip.record.reason == "not_filed" and reader is not None:
            await self._look_again(trip, decode, plan, reader)
        return response

    async def _judge(
        self, trip: Trip, decode: Member, plan: Plan, started: Started, asked: asyncio.Future[Answer] | None
    ) -> Started:
        """Match the halves. Raises RouteError where strict mode refuses what they prove."""
        half, why = None, "batch" if trip.kind is Kind.BATCH else "no_receipts"
        if asked is not None:
            answer = await self._receipt(trip, decode, asked)
            half, why = (answer.receipt.decode if answer.receipt else None), answer.reason
        elif self._flavour.has_evidence and not trip.record.stream:
            started, half = await self._evidence(started)
        self._settle(trip, plan, half, why)
        matched = trip.matched
        assert matched is not None
        self._tally.judged(matched)
        self._learn(trip, decode, plan, matched)
        if self._config.strict and self._is_refused(trip, plan, matched):
            raise RouteError(
                f"reuse was not proved: {matched.words}" + (f" ({matched.reason})" if matched.reason else ""),
                remedy=f"See /receipts/{trip.ticket}; without --strict the request is answered all the same.",
                status=502,
                code="KV-703",
            )
        return started

    def _settle(self, trip: Trip, plan: Plan, half: Half | None, why_missing: str) -> None:
        receipt = Receipt(ticket=trip.ticket, prefill=plan.half, decode=half)
        trip.matched = match(receipt, note=plan.note, why_missing=why_missing)
        if self._is_broken(plan, trip.matched) and trip.matched.verdict is Verdict.LOCAL:
            reason = plan.note or trip.matched.reason or "not_held"
            trip.matched = msgspec.structs.replace(trip.matched, reason=reason)
        record = trip.record
        record.receipt, record.verdict, record.reason = receipt, trip.matched.words, trip.matched.reason
        record.source = source_of(half)
        self._tally.keep(record)

    async def _receipt(self, trip: Trip, decode: Member, asked: asyncio.Future[Answer]) -> Answer:
        """Decode's half, for which the first byte waits a little. It was asked for when decode was."""
        if asked.done() and (asked.result().reason or _has_decode(asked.result())):
            decode.unfiled = 0
            return asked.result()
        # A strict router would refuse an answer whose receipt is a moment late.
        wait_ms = self._config.receipt_wait_ms * (STRICT_PATIENCE if self._config.strict else 1)
        if decode.unfiled >= UNFILED and not self._config.strict:
            return Answer(None)  # it runs without the connector; `_look_again` notices when that changes
        answer = Answer(None)
        try:
            async with asyncio.timeout(wait_ms / 1e3):
                answer, pause_s = await asked, SHORTEST_PAUSE_S
                while not answer.reason and not _has_decode(answer):
                    # The store waited as long as it does, or has too many waiting: then it answers at once.
                    answer = await self._readers[decode.instance.store].ask(trip.ticket, wait_ms)
                    await asyncio.sleep(0 if _has_decode(answer) else pause_s)
                    pause_s *= 2
        except TimeoutError:
            pass
        decode.unfiled = 0 if answer.reason or _has_decode(answer) else decode.unfiled + 1
        return answer

    async def _look_again(self, trip: Trip, decode: Member, plan: Plan, reader: StoreReader) -> None:
        """The half came too late for the headers; the receipt that is kept should have it all the same."""
        try:
            async with asyncio.timeout(self._config.receipt_wait_ms / 1e3):
                answer = await reader.ask(trip.ticket, 0)
        except TimeoutError:
            return
        if answer.receipt is not None and answer.receipt.decode is not None:
            decode.unfiled = 0
            self._settle(trip, plan, answer.receipt.decode, "")
            trip.record.reason = trip.record.reason or "late"

    async def _evidence(self, started: Started) -> tuple[Started, Half | None]:
        """For flavours without receipts: what the response itself says."""
        try:
            started = await read_on(started, EVIDENCE_BYTES)
        except OSError as error:
            raise RouteError(
                f"decode broke off its answer: {error}", remedy="Ask again.", status=502, code="KV-702"
            ) from error
        return started, self._flavour.evidence(started.first) if started.response.is_complete else None

    def _is_refused(self, trip: Trip, plan: Plan, matched: Matched) -> bool:
        if matched.verdict in (Verdict.MISSING, Verdict.SHORT):
            return trip.kind is not Kind.BATCH  # of which nothing was promised, and nothing can be known
        return self._is_broken(plan, matched)

    def _is_broken(self, plan: Plan, matched: Matched) -> bool:
        """Whether reuse was counted on, and decode says that there was none, or next to none."""
        half = matched.receipt.decode
        if half is None or not plan.was_promised:
            return False
        if matched.verdict is Verdict.RECOMPUTED:
            return half.prompt_tokens > 1  # of one token nothing can be reused
        return matched.verdict is Verdict.LOCAL and self._is_too_much(half)

    def _is_too_much(self, half: Half) -> bool:
        """Whether decode computed more than was counted on, with all allowance for what is a token."""
        return half.computed_tokens > WRONG_BY * max(self._config.prefill_from_tokens, LEAST_TOKENS)

    def _learn(self, trip: Trip, decode: Member, plan: Plan, matched: Matched) -> None:
        """Remember where this prompt went, and what of it is certain to be there: all of its beginnings, or, with
        recurrent states, the whole."""
        half = matched.receipt.decode
        is_proved = half is not None and matched.verdict in (Verdict.PROVED, Verdict.LOCAL)
        if half is not None and plan.skip is Skip.HELD:
            is_proved &= not self._is_too_much(half)
        now_ns = time.monotonic_ns()
        is_divisible = half is not None and half.holds_beginnings
        self._decode_seen.learn(trip.prints[:-1], decode.name, now_ns, proved=is_proved and is_divisible)
        self._decode_seen.learn(trip.prints[-1:], decode.name, now_ns, proved=is_proved)
        if plan.skip is Skip.HELD and not is_proved:
            self._decode_seen.doubt(trip.prints, decode.name)

    # ---- common to all

    async def _understand(self, trip: Trip, data: bytes, *, is_generating: bool) -> None:
        await trip.understand(data, self._config, self._tenants, self._tally, self._large, is_generating=is_generating)

    def _let_go(self, trip: Trip) -> None:
        """Decode has begun to answer, or nobody will: what was asked is not needed any more."""
        self._intake.let_go(trip.body)
        trip.fields, trip.prints = {}, ()

    def _pick_decode(self, held: dict[str, Held], besides: list[Member] = []) -> Member:  # noqa: B006 - only read
        member = self._pool.decode.pick(held, besides=besides)
        if member is None and besides:
            member = self._pool.decode.pick(held)  # better the same one again than none
        if member is None:
            raise RouteError("no decode instance is up", remedy="Try again soon.", status=503, code="KV-701")
        return member

    def _give_up_or_retry(self, trip: Trip, leg: str, failure: Failure, *, is_last: bool) -> None:
        trip.record.error = failure.message
        if is_last or failure.is_final:
            raise RouteError(
                failure.message,
                remedy="Try again; the engine's log says more.",
                status=504 if failure.reason == "timeout" else 502,
                code="KV-702",
            )
        trip.record.retries += 1
        self._tally.retries[leg] += 1

    async def _pass_on(self, trip: Trip, started: Started) -> web.StreamResponse:
        headers = header.for_client(started.response.headers)
        headers.update(trip.own_headers())
        trip.record.first_byte_ms = trip.elapsed_ms
        try:
            response, problem = await relay(trip.request, started, headers, self._config.timeout_s)
        finally:
            started.response.close()
        trip.record.status = LEFT_STATUS if problem == CLIENT_LEFT else response.status
        if problem:
            trip.record.error = problem
            self._tally.cut += problem != CLIENT_LEFT
        return response

    def _salt(self, trip: Trip) -> dict[str, object]:
        return {"cache_salt": trip.salt}

    async def _ask_json(self, url: str) -> object:
        try:
            async with self._session.get(url, timeout=BOOTSTRAP_TIMEOUT, allow_redirects=False) as response:
                if response.status != 200:
                    raise ValueError(f"status {response.status}")
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > BOOTSTRAP_BYTES:
                        raise ValueError(f"its answer is longer than {BOOTSTRAP_BYTES} bytes")
                return msgspec.json.decode(data)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error


def _has_decode(answer: Answer) -> bool:
    return answer.receipt is not None and answer.receipt.decode is not None


def error_response(error: RouteError, headers: dict[str, str]) -> web.Response:
    """In the shape of OpenAI's errors, with our code and remedy."""
    tree = {
        "message": f"{error.message} [{error.code}]. {error.remedy}",
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": None,
        "code": error.status,
    }
    return web.Response(
        status=error.status,
        body=msgspec.json.encode({"error": tree}),
        content_type="application/json",
        headers=headers,
    )
