"""The prefill side of a request: whether prefill is asked, which instance, and what comes of it.

    skip? ─▶ pick an instance ─▶ prefill leg ─▶ the flavour checks the hand-off ─▶ Plan for decode
                 ▲                   │ failed: up to two other instances
                 └───────────────────┘

Owns what prefill instances have seen. A prefill that fails costs time, never the answer: decode then computes the
prompt, and the verdict says why. Neighbours: `proxy` (left), `flavours`, `legs`, `fleet`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
import msgspec

from kvtally.config import RouterConfig
from kvtally.core.routing import Held, PrefixMap, Skip, skip_prefill
from kvtally.router import body as bodies
from kvtally.router.book import Book
from kvtally.router.exchange import Exchange
from kvtally.router.flavours.base import Flavour, PrefillAnswer, ResponseUsage
from kvtally.router.fleet import Fleet, Member
from kvtally.router.judging import Promise
from kvtally.router.legs import RETRIED_STATUSES, Failure, Leg, Whole, ask
from kvtally.router.stores import Stores

PREFILL_ATTEMPTS = 3
PREFIXES, PREFIX_LIFETIME_NS = 65_536, 900 * 1_000_000_000
BOOTSTRAP_BYTES = 1 << 20
BOOTSTRAP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Plan(NamedTuple):
    """What decode is sent beyond the client's request, and what the router expects of it."""

    overlay: dict[str, object]
    promise: Promise


class Way(NamedTuple):
    """Where a prompt goes, and who has seen how much of it."""

    decode: Member
    decode_holds: Mapping[str, Held]
    prefill_holds: Mapping[str, Held]


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
        book: Book,
        session: aiohttp.ClientSession,
    ) -> None:
        self._config = config
        self._flavour = flavour
        self._fleet = fleet
        self._stores = stores
        self._book = book
        self._session = session  # for a flavour's questions, which are rare
        self._seen = PrefixMap(capacity=PREFIXES, lifetime_ns=PREFIX_LIFETIME_NS)

    def restarted(self, instance: str) -> None:
        """An instance was down: what it held may be gone."""
        self._seen.forget(instance)

    async def plan(self, exchange: Exchange, decode: Member, held: Mapping[str, Held]) -> Plan | Whole:
        """Have the prompt computed and saved by a prefill instance, unless decode had better compute it.

        `held` is what decode instances have of the prompt. A Whole is an answer that the client gets as it is."""
        record = exchange.record
        proved_bytes = held[decode.name].proved_bytes if decode.name in held else 0
        seen = self._seen.holders(exchange.prints, time.monotonic_ns())
        way = Way(decode, held, seen)
        if not self._fleet.prefill.members:
            record.prefill = "none"
            return self._alone(exchange, way, Promise())
        skip = self._skip(exchange, proved_bytes)
        if skip is not None:
            record.prefill = f"skipped:{skip}"
            self._book.skipped[skip] += 1
            return self._alone(exchange, way, Promise(skip=skip))
        answer = await self._try_instances(exchange, way)
        if not isinstance(answer, Failure):
            return answer
        record.prefill = f"failed:{answer.reason}"
        return self._alone(exchange, way, Promise(note=f"prefill_{answer.reason}"))

    def _skip(self, exchange: Exchange, proved_bytes: int) -> Skip | None:
        return bodies.skip_of(
            exchange.kind, exchange.fields, has_one_reader=self._flavour.has_one_reader
        ) or skip_prefill(
            exchange.prompt_bytes,
            proved_bytes if self._flavour.has_receipts else 0,
            from_tokens=self._config.prefill_from_tokens,
        )

    async def _try_instances(self, exchange: Exchange, way: Way) -> Plan | Whole | Failure:
        held = way.prefill_holds
        silent = [member for member in self._fleet.prefill.members if member.pace.is_left_alone]
        failure = Failure("silent" if silent else "down", "no prefill instance is up")
        tried: list[Member] = []
        while len(tried) < PREFILL_ATTEMPTS:
            member = self._fleet.prefill.pick(held, besides=[*tried, *silent])
            if member is None:
                break
            if tried:
                exchange.renew()
                exchange.record.retries += 1
                self._book.retries["prefill"] += 1
            tried.append(member)
            seen_bytes = held[member.name].seen_bytes if member.name in held else 0
            answer = await self._ask(exchange, member, way, exchange.prompt_bytes - seen_bytes)
            if not isinstance(answer, Failure):
                return answer
            failure = answer
            exchange.record.error = failure.message
            if failure.is_final:
                break
        return failure

    async def _ask(self, exchange: Exchange, member: Member, way: Way, compute_bytes: int) -> Plan | Whole | Failure:
        """One attempt with one instance, which has to compute so many bytes of the prompt."""
        record = exchange.record
        begun_ms = exchange.elapsed_ms
        member.legs += 1
        try:
            opening = await self._flavour.open(exchange.ticket, member.instance, self._ask_json)
            overlay = {**bodies.prefill_overlay(exchange.fields), **opening.fields, "cache_salt": exchange.salt}
            headers = exchange.engine_headers(self._config.tenant_header)
            headers.update(opening.headers)
            params = self._flavour.aimed(
                opening.params,
                source=self._stores.source(member, way.decode_holds, way.prefill_holds),
                deliver=self._stores.beside(member, way.decode),
            )
            body = bodies.encode(exchange.fields, {**overlay, "kv_transfer_params": params})
            answer = await self._ask_in_time(member, Leg(exchange.path, headers, body), compute_bytes)
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
            return self._alone(exchange, way, Promise(note="bad_answer"))
        self._seen.learn(exchange.prints, member.name, time.monotonic_ns(), proved=False)
        choice = told.choices[0] if told.choices else _Choice()
        handoff = self._flavour.close(
            exchange.ticket,
            opening,
            PrefillAnswer(told.usage.prompt_tokens, choice.finish_reason or "", told.kv_transfer_params),
        )
        if isinstance(handoff, str):
            return self._alone(exchange, way, Promise(note=handoff))
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

    def _alone(self, exchange: Exchange, way: Way, promise: Promise) -> Plan:
        """Decode computes whatever it does not hold, and cannot pull."""
        source = self._stores.source(way.decode, way.decode_holds, way.prefill_holds)
        params = self._flavour.aimed(self._flavour.alone(exchange.ticket), source=source)
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
