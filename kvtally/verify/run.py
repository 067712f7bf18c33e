"""Sends requests to a router and its engines, and hands the observations to `judge`.

    for each probe:   engine, each time with another salt ─▶ the reference, and how far the engine itself deviates
                      router, twice                       ─▶ answer, receipt, and the decode engine's counters

Owns the order of the requests. Nothing it asks for is in any cache: prompts are random, and references use a salt of
their own. Blocking; every request has a deadline. Neighbours: `probes` (what to ask), `http`, `reading`, `judge`.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvtally.core.answers import TOLERANCE, compare
from kvtally.core.namespace import chunk_tokens
from kvtally.core.receipts import PLACES, Verdict
from kvtally.errors import KVTallyError, TransportError
from kvtally.verify.http import Response, Server
from kvtally.verify.judge import (
    Answer,
    Counted,
    Observation,
    Outcome,
    Report,
    Setting,
    Told,
    Turn,
    cannot_test,
    judge,
    tolerance,
)
from kvtally.verify.links import Look, broken_links, errors_now, not_looked_at
from kvtally.verify.probes import MAX_TOKENS, TURN_TOKENS, Shape, shapes, words
from kvtally.verify.reading import Instances, Models, Tokenized, decode, failure, read_answer, samples

COUNTERS_S = 2.0  # vLLM counts a prompt a moment after it has answered
RECEIPT_S = 1.0  # the router keeps a receipt when the response has ended
AGAIN_S = 0.02
DEFAULT_LIMIT_TOKENS = 4096
PREFIX = "x-kvtally-"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_CONFIG = "vllm:cache_config_info"


class Probe(NamedTuple):
    """A prompt, and the answer of an engine that reuses nothing."""

    shape: Shape
    tokens: list[int]
    reference: Answer
    own_deviation: float  # of that engine, for the same tokens computed in other pieces
    is_whole: bool  # no earlier prompt is a beginning of it


def verify(
    router: Server,
    direct: Server | None,
    *,
    connect: Callable[[str], Server],
    seed: int,
    look: Look = not_looked_at,
    seen: Callable[[Observation], None] = lambda observation: None,
) -> Report:
    """Test a router. `direct` is the engine to compare with; by default the first decode instance of the router.

    `look` asks a store about itself: what it meets at other stores. `seen` is called with each observation as it is
    made.
    """
    try:
        run = _Run(router, direct, connect, random.Random(seed))
        before = errors_now(run.stores, look)
        report = run.report(seen)
        if report.outcome is not Outcome.NOT_PROVED:
            return report
        links = broken_links(report.observations, run.stores, functools.cache(look), before, run.reached_by)
        return msgspec.structs.replace(report, findings=[*links, *report.findings])
    except KVTallyError as error:
        return cannot_test(error.message, error.remedy)


class _Run:
    def __init__(
        self, router: Server, direct: Server | None, connect: Callable[[str], Server], dice: random.Random
    ) -> None:
        self._router = router
        self._dice = dice
        instances = decode(router, router.call("/instances"), Instances)
        self.stores = {row.instance: row.store for row in instances.instances}
        self.reached_by = instances.reached_by
        self._prefills = [connect(url) for url in instances.having("prefill")]
        self._engines = {_name(url): connect(url) for url in instances.having("decode")}
        if direct is not None:
            self._engines[_name(direct.url)] = direct
        self._direct = direct or next(iter(self._engines.values()))
        self._model = decode(router, router.call("/v1/models"), Models).data[0]
        self._block_tokens = self._read_block_tokens()

    def report(self, seen: Callable[[Observation], None]) -> Report:
        probes = self._probes()
        own_deviation = max((probe.own_deviation for probe in probes), default=0.0)
        whole = [probe for probe in probes if probe.is_whole]
        is_alike = bool(whole) and self._is_computed_alike(whole[-1])
        observations = []
        for probe in probes:
            was_same = False
            for turn in Turn:
                observations.append(self._observe(probe, turn, own_deviation, is_alike, was_same))
                was_same = observations[-1].is_same_arithmetic
                seen(observations[-1])
        setting = Setting(
            has_prefill=bool(self._prefills),
            chunk_tokens=chunk_tokens(self._block_tokens),
            own_deviation=own_deviation,
        )
        return judge(observations, setting)

    # ---- references: straight to an engine

    def _probes(self) -> list[Probe]:
        probes = [
            self._probe(shape, self._tokens(shape.tokens))
            for shape in shapes(self._block_tokens, self._model.max_model_len or DEFAULT_LIMIT_TOKENS)
        ]
        if probes:
            longest = probes[-1]
            more = self._tokens(TURN_TOKENS - MAX_TOKENS)
            tokens = [*longest.tokens, *longest.reference.tokens, *more]
            probes.append(self._probe(Shape("next turn", len(tokens)), tokens, is_whole=False))
        return probes

    def _probe(self, shape: Shape, tokens: list[int], *, is_whole: bool = True) -> Probe:
        """Make a prompt whose last token is the one that the engine itself would have said next.

        The engine's continuation is then the reference: it has computed all of the prompt but the last token, then that
        token, which is exactly the arithmetic of a prompt that was handed over. Computed in other pieces, the same
        tokens have slightly different logprobs (other kernels, other rounding). To learn by how much, tokens that the
        engine said one by one are computed at once and compared.
        """
        longer = self._ask(self._direct, tokens[:-1], 1 + 2 * MAX_TOKENS)
        prompt = [*tokens[:-1], longer.tokens[0]]
        reference, further = longer.part(1, MAX_TOKENS), longer.part(1 + MAX_TOKENS, MAX_TOKENS)
        deviation = 0.0
        for known, said in ((prompt, reference), ([*prompt, *reference.tokens], further)):
            at_once = self._ask(self._direct, known, MAX_TOKENS)
            deviation = max(deviation, compare(said, at_once, float("inf")).deviation)
        return Probe(shape, prompt, reference, deviation, is_whole)

    def _is_computed_alike(self, probe: Probe) -> bool:
        """Whether every prefill and decode engine gives the reference. Then a hand-off must change nothing at all."""
        for engine in (*self._prefills, *self._engines.values()):
            try:
                answer = self._ask(engine, probe.tokens[:-1], 1 + MAX_TOKENS)
            except TransportError:  # only the router can reach it
                return False
            if compare(probe.reference, answer.part(1, MAX_TOKENS), TOLERANCE).problem:
                return False
        return bool(self._prefills)

    def _ask(self, engine: Server, tokens: Sequence[int], max_tokens: int) -> Answer:
        salt = f"kvtally-verify-{self._dice.getrandbits(128):032x}"
        body = self._body(tokens, cache_salt=salt, max_tokens=max_tokens)
        return read_answer(engine, engine.call("/v1/completions", body))

    def _tokens(self, count: int) -> list[int]:
        body = {"model": self._model.id, "prompt": words(self._dice, count), "add_special_tokens": True}
        response = self._direct.call("/tokenize", body)
        tokens = decode(self._direct, response, Tokenized).tokens
        return tokens[:count]

    def _body(self, tokens: Sequence[int], **more: object) -> dict[str, object]:
        return {
            "model": self._model.id,
            "prompt": tokens,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            **more,
        }

    # ---- observations: through the router

    def _observe(self, probe: Probe, turn: Turn, own_deviation: float, is_alike: bool, was_same: bool) -> Observation:
        """`was_same`: what this prompt can reuse was computed exactly as the reference."""
        before = self._count_all()
        body = self._body(probe.tokens, **({"stream": True} if probe.shape.is_streamed else {}))
        seen = Observation(
            case=probe.shape.name, turn=turn, prompt_tokens=len(probe.tokens), is_streamed=probe.shape.is_streamed
        )
        try:
            response = self._router.call("/v1/completions", body)
            told = _told(response)
            if response.status != 200:
                return msgspec.structs.replace(
                    seen, told=told, failure=failure(response), failure_reason=told.reason if told else ""
                )
            answer = read_answer(self._router, response)
        except TransportError as error:
            return msgspec.structs.replace(seen, failure=error.message)
        counted, uncounted = self._counted(told, before, len(probe.tokens))
        told = self._completed(told) if told is not None else None
        is_same = False
        # In a batch with other requests an engine rounds differently; its counters tell that there was none.
        if told is not None and told.computed_tokens == 1 and counted is not None:
            is_same = was_same or (is_alike and probe.is_whole and told.verdict == Verdict.PROVED)
        allowed = tolerance(own_deviation, is_same_arithmetic=is_same)
        return msgspec.structs.replace(
            seen,
            comparison=compare(probe.reference, answer, allowed),
            is_same_arithmetic=is_same,
            told=told,
            counted=counted,
            uncounted=uncounted,
        )

    def _completed(self, told: Told) -> Told:
        """Add what the headers do not say: what prefill promised, and a half that came too late for them."""
        deadline_s = time.monotonic() + RECEIPT_S
        while (response := self._router.call(f"/receipts/{told.request}")).status != 200:
            if time.monotonic() >= deadline_s:
                return told
            time.sleep(AGAIN_S)
        kept = decode(self._router, response, _Kept)
        if kept.prefill is not None:
            told = msgspec.structs.replace(told, promised_tokens=kept.prefill.saved_tokens)
        if told.verdict != Verdict.MISSING or kept.decode is None:
            return told
        verdict, _, reason = kept.verdict.partition(":")
        counts = {place: _count(kept.decode, f"tokens_{place}") for place in PLACES}
        sources = {place: tokens for place, tokens in counts.items() if tokens}
        return msgspec.structs.replace(
            told,
            verdict=verdict,
            reason=reason,
            is_late=True,
            reused_tokens=sum(sources.values()),
            computed_tokens=_count(kept.decode, "computed_tokens"),
            sources=sources,
        )

    def _counted(self, told: Told | None, before: dict[str, Counted], prompt_tokens: int) -> tuple[Counted | None, str]:
        """What the decoding engine counted for this request, or why that is unknown."""
        if told is None or told.decode not in before:
            return None, "the engine that decoded cannot be reached from here"
        deadline_s = time.monotonic() + COUNTERS_S
        while True:
            now = self._count(self._engines[told.decode])
            delta = _delta(before[told.decode], now or before[told.decode])
            if delta.total_tokens == prompt_tokens:
                return delta, ""
            if delta.total_tokens > prompt_tokens:
                return None, "the engine served others meanwhile"
            if time.monotonic() >= deadline_s:
                return None, "the engine did not count the request"
            time.sleep(AGAIN_S)

    def _count_all(self) -> dict[str, Counted]:
        counts = {name: self._count(engine) for name, engine in self._engines.items()}
        return {name: counted for name, counted in counts.items() if counted is not None}

    def _count(self, engine: Server) -> Counted | None:
        """The engine's totals since it started; None if they cannot be read."""
        sums = dict.fromkeys(SOURCES, 0)
        try:
            for name, labels, value in samples(engine):
                if name == BY_SOURCE and labels.get("source") in sums:
                    sums[labels["source"]] += int(value)
        except TransportError:
            return None
        computed, local, external = sums.values()
        return Counted(computed_tokens=computed, local_tokens=local, external_tokens=external)

    def _read_block_tokens(self) -> int:
        for name, labels, _ in samples(self._direct):
            if name == CACHE_CONFIG and labels.get("block_size", "").isdecimal():
                return int(labels["block_size"])
        raise TransportError(
            f"{self._direct.url}/metrics does not tell the engine's block size",
            remedy="Give the address of a vLLM engine of this router: --direct URL.",
        )


# ---- what kvtally's router adds


class _Saved(msgspec.Struct):
    saved_tokens: int = 0


class _Kept(msgspec.Struct):
    """The part of /receipts/{id} that is read: the halves."""

    verdict: str
    prefill: _Saved | None = None
    decode: dict[str, object] | None = None  # the fields of a `Half`


def _count(half: dict[str, object], name: str) -> int:
    count = half.get(name, 0)
    return count if isinstance(count, int) else 0


def _delta(before: Counted, now: Counted) -> Counted:
    return Counted(
        computed_tokens=now.computed_tokens - before.computed_tokens,
        local_tokens=now.local_tokens - before.local_tokens,
        external_tokens=now.external_tokens - before.external_tokens,
    )


def _told(response: Response) -> Told | None:
    """Read the router's headers; None if there are none."""
    said = {name.removeprefix(PREFIX): value for name, value in response.headers.items() if name.startswith(PREFIX)}
    verdict, _, reason = said.get("verdict", "").partition(":")
    if verdict not in set(Verdict):
        return None
    prefill, _, why = said.get("prefill", "").partition(":")
    if prefill == "failed":
        reason = reason or f"prefill_{why}"
    took_part = prefill not in ("", "none", "skipped", "failed")
    sources = dict(item.split(":") for item in said.get("source", "").split(",") if ":" in item)
    return Told(
        request=said.get("request", ""),
        verdict=verdict,
        reason=said.get("reason", reason),
        prefill=said["prefill"] if took_part else "",
        skipped=why if prefill == "skipped" else "",
        decode=said.get("decode", ""),
        reused_tokens=_number(said.get("reused-tokens", "")),
        computed_tokens=_number(said.get("computed-tokens", "")),
        sources={place: _number(tokens) for place, tokens in sources.items()},
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _name(url: str) -> str:
    """An instance's name, as the router's headers have it."""
    return url.partition("://")[2]
