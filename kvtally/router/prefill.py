"""The prefill side of a request: whether prefill is asked, which instance, and what comes of it.

    skip? ─▶ pick an instance ─▶ prefill leg ─▶ the flavour checks the hand-off ─▶ Plan for decode
                 ▲                   │ failed: up to two other instances
                 └───────────────────┘

A prefill that fails costs time, never the answer: decode then computes the prompt, and the verdict says why.
Neighbours: `proxy` (left), `flavours`, `legs`, `fleet`, `stores` (where a prompt could be pulled from).
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import NamedTuple

import aiohttp
import msgspec

from kvtally.config import RouterConfig
from kvtally.core.routing import Candidate, Held, PrefixMap, Skip, skip_prefill
from kvtally.router import body as bodies
from kvtally.router.book import Book
from kvtally.router.exchange import Exchange
from kvtally.router.flavours.base import Flavour, PrefillAnswer, ResponseUsage
from kvtally.router.fleet import Fleet, Member
from kvtally.router.judging import Promise
from kvtally.router.legs import RETRIED_STATUSES, Failure, Leg, Whole, ask
from kvtally.router.stores import Stores, computed_bytes

PREFILL_ATTEMPTS = 3
BOOTSTRAP_BYTES = 1 << 20
BOOTSTRAP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Plan(NamedTuple):
    """What decode is sent beyond the client's request, and what the router expects of it."""

    overlay: dict[str, object]
    promise: Promise


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Prefilled(msgspec.Struct):
    """The part of a prefill instance's response that the router reads."""

    choices: list[_Choice] = []
    usage: ResponseUsage = ResponseUsage()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: dict[str, object] | None = None


class Prefill:
    """Asks prefill instances, for all requests."""

    def __init__(
        self,
        config: RouterConfig,
        flavour: Flavour,
        fleet: Fleet,
        stores: Stores,
        seen: PrefixMap,
        book: Book,
        session: aiohttp.ClientSession,
    ) -> None:
        self._config = config
        self._flavour = flavour
        self._fleet = fleet
        self._stores = stores
        self._seen = seen
        self._book = book
        self._session = session  # for a flavour's questions, which are rare

    async def plan(self, exchange: Exchange, decode: Member) -> Plan | Whole:
        """Have the prompt computed and saved by a prefill instance, unless this decode instance had better compute it.

        A Whole is an answer that the client gets as it is."""
        record = exchange.record
        proved_bytes = exchange.held[decode.name].proved_bytes if decode.name in exchange.held else 0
        if not self._fleet.prefill.members:
            record.prefill = "none"
            return self._alone(exchange, Promise())
        skip = self._skip(exchange, proved_bytes)
        if skip is not None:
            record.prefill = f"skipped:{skip}"
            self._book.skipped[skip] += 1
            return self._alone(exchange, Promise(skip=skip))
        answer = await self._try_instances(exchange, decode)
        if not isinstance(answer, Failure):
            return answer
        record.prefill = f"failed:{answer.reason}"
        return self._alone(exchange, Promise(note=f"prefill_{answer.reason}"))

    def _skip(self, exchange: Exchange, proved_bytes: int) -> Skip | None:
        return bodies.skip_of(
            exchange.kind, exchange.fields, has_one_reader=self._flavour.has_one_reader
        ) or skip_prefill(
            exchange.prompt_bytes,
            proved_bytes if self._flavour.has_receipts else 0,
            from_tokens=self._config.prefill_from_tokens,
        )

    async def _try_instances(self, exchange: Exchange, decode: Member) -> Plan | Whole | Failure:
        held, prompt_bytes = exchange.held, exchange.prompt_bytes
        silent = [member for member in self._fleet.prefill.members if member.pace.is_left_alone]
        failure = Failure("silent" if silent else "down", "no prefill instance is up")
        tried: list[Member] = []
        while len(tried) < PREFILL_ATTEMPTS:
            now_ns = time.monotonic_ns()
            weighed = partial(self._stores.candidate, held=held, prompt_bytes=prompt_bytes, now_ns=now_ns)
            member = self._fleet.prefill.pick(held, besides=[*tried, *silent], weighed=weighed)
            if member is None:
                break
            if tried:
                exchange.renew()
                exchange.record.retries += 1
                self._book.retries["prefill"] += 1
            tried.append(member)
            # A single instance has nothing to be compared with.
            chosen = weighed(member) if len(self._fleet.prefill.members) > 1 else Candidate(member.name, member.legs)
            leg, half = object(), None
            member.work.began(leg, prompt_bytes - chosen.had_bytes(chosen.compute_bytes_s), now_ns)
            try:
                answer = await self._ask(exchange, member, chosen, decode)
                half = answer.promise.half if isinstance(answer, Plan) else None
            finally:
                member.work.ended(leg, computed_bytes(prompt_bytes, half), time.monotonic_ns())
            if not isinstance(answer, Failure):
                return answer
            failure = answer
            exchange.record.error = failure.message
            if failure.is_final:
                break
        return failure

    async def _ask(
        self, exchange: Exchange, member: Member, chosen: Candidate, decode: Member
    ) -> Plan | Whole | Failure:
        """One attempt with one instance, of which this was known when it was chosen."""
        record, held = exchange.record, exchange.held
        seen = held.get(member.name, Held(0, 0))
        source = self._stores.source(held, member.instance, exchange.prompt_bytes)
        deliver = self._stores.deliver(member.instance, decode.instance)
        begun_ms = exchange.elapsed_ms
        member.legs += 1
        try:
            opening = await self._flavour.open(exchange.ticket, member.instance, self._ask_json)
            overlay = {**bodies.prefill_overlay(exchange.fields), **opening.fields, "cache_salt": exchange.salt}
            headers = exchange.engine_headers(self._config.tenant_header)
            headers.update(opening.headers)
            params = self._flavour.aimed(opening.params, source=source, deliver=deliver)
            body = bodies.encode(exchange.fields, {**overlay, "kv_transfer_params": params})
            leg = Leg(exchange.path, headers, body)
            answer = await self._ask_in_time(member, leg, exchange.prompt_bytes - seen.seen_bytes)
        except (OSError, ValueError) as error:  # from `open`
            return Failure("bootstrap", f"{member.instance.bootstrap} cannot be asked: {error}")
        finally:
            member.legs -= 1
            record.prefill_ms = exchange.elapsed_ms - begun_ms
        if isinstance(answer, Failure):
            return answer
        record.prefill = member.name
        if 400 <= answer.status < 500:
            return answer
        if answer.status != 200:
            is_final = answer.status not in RETRIED_STATUSES
            return Failure(f"status_{answer.status}", f"{member.name} answered {answer.status}", is_final)
        try:
            told = msgspec.json.decode(answer.body, type=_Prefilled)
        except (msgspec.DecodeError, RecursionError):
            return self._alone(exchange, Promise(note="bad_answer"))
        self._seen.learn(exchange.prints, member.name, time.monotonic_ns(), proved=False)
        others = {name: known for name, known in held.items() if name != member.name}
        exchange.held = {member.name: Held(exchange.prompt_bytes, seen.proved_bytes), **others}
        choice = told.choices[0] if told.choices else _Choice()
        handoff = self._flavour.close(
            exchange.ticket,
            opening,
            PrefillAnswer(told.usage.prompt_tokens, choice.finish_reason or "", told.kv_transfer_params),
        )
        if isinstance(handoff, str):
            return self._alone(exchange, Promise(note=handoff))
        self._stores.prefilled(source, handoff.half, exchange.prompt_bytes, chosen, member.instance)
        found = [ids for ids in (told.prompt_token_ids, choice.prompt_token_ids) if bytes(ids).startswith(b"[")]
        ids = found[0] if found else None
        params = self._flavour.trusted(handoff.params, self._stores.is_known)
        overlay = bodies.handoff_overlay(exchange.kind, exchange.fields, ids, params)
        return Plan({**overlay, "cache_salt": exchange.salt}, Promise(half=handoff.half))

    async def _ask_in_time(self, member: Member, leg: Leg, compute_bytes: int) -> Whole | Failure:
        """Ask, and give up if the instance falls silent. A strict router waits: it would refuse decode's answer."""
        if self._config.strict:
            return await ask(member, leg)
        begun_s, took_s = time.monotonic(), None
        limit = asyncio.timeout(None)  # `Member.sweep` brings it forward
        member.pace.began(limit, compute_bytes, self._fleet.awake_s)
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

    def _alone(self, exchange: Exchange, promise: Promise) -> Plan:
        """Decode computes whatever it does not hold."""
        params = self._flavour.alone(exchange.ticket)
        return Plan({"kv_transfer_params": params, "cache_salt": exchange.salt}, promise)

    async def _ask_json(self, url: str) -> object:
        """GET a URL that a flavour needs. Raises OSError or ValueError."""
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
