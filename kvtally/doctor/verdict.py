"""What a live examination proves. Pure: counters, answers and experiments in; a verdict, its causes and next steps out.

The witness is the engines' own counters, before and after each prompt: how many tokens decode computed, and how many
came from outside. `usage.cached_tokens` is not a witness, since decode reports prefill's there. What was counted while
an engine served others is attributed to nothing. Neighbours: `live` (what was observed), `cli.doctor` (prints it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from kvtally.core.answers import Comparison

ENOUGH = 0.5  # of a long prompt; what does not fill a chunk or block is never reused
MARGIN = 3.0  # times the engine's own deviation
# What engines report about themselves and must be the same in prefill and decode.
ALIKE = ("version", "model", "block_size", "cache_dtype", "prefix_caching_hash_algo", "mamba_cache_mode")
LEAST_TOLERANCE = 0.02  # of a logprob: decode computes what is left in other pieces than prefill would


class Outcome(StrEnum):
    REAL = "real"
    PARTIAL = "partial"
    NONE = "none"
    WRONG = "wrong"
    BUSY = "busy"
    CANNOT_TEST = "cannot test"

    @property
    def exit_code(self) -> int:
        return {Outcome.REAL: 0, Outcome.BUSY: 2, Outcome.CANNOT_TEST: 2}.get(self, 1)


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What engines counted: prompt tokens by source, and what their connectors report."""

    computed_tokens: int = 0
    local_tokens: int = 0  # from an engine's own prefix cache
    external_tokens: int = 0  # from a connector
    asked_tokens: int = 0  # that a connector was asked for
    moved_bytes: int = 0  # by NIXL
    failed_transfers: int = 0  # of NIXL
    expired: int = 0  # prompts that prefill dropped before decode fetched them

    @property
    def total_tokens(self) -> int:
        return self.computed_tokens + self.local_tokens + self.external_tokens

    def since(self, before: Counters) -> Counters:
        return Counters(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})

    def plus(self, other: Counters) -> Counters:
        return Counters(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Engine(msgspec.Struct, kw_only=True):
    """One engine, as it describes itself. `problem`: why it cannot be a witness."""

    url: str
    role: str
    version: str = ""
    model: str = ""
    settings: dict[str, str] = {}  # what vLLM says of its cache: block_size, cache_dtype, ...
    has_sources: bool = True  # whether it counts tokens by source; older versions count hits only
    problem: str = ""


class Seen(msgspec.Struct, kw_only=True):
    """One prompt, never asked before, through the router."""

    case: str
    prompt_tokens: int
    is_long: bool = False  # long enough for any cache to reuse some of it
    failure: str = ""
    busy: str = ""  # why what was counted cannot be attributed
    is_elsewhere: bool = False  # none of the named decode engines counted any of it
    prefill: Counters = Counters()
    decode: Counters = Counters()
    comparison: Comparison = Comparison()
    is_compared: bool = False  # there was an answer to compare with that reused nothing
    first_token_s: float | None = None
    alone_first_token_s: float | None = None  # of decode's engine, which computed the prompt itself

    @property
    def reused_tokens(self) -> int:
        return self.decode.external_tokens + self.decode.local_tokens

    @property
    def is_witnessed(self) -> bool:
        return not (self.failure or self.busy or self.is_elsewhere)


class Handover(msgspec.Struct, kw_only=True):
    """An experiment without the router: prefill and then decode, asked by doctor itself."""

    by_parameters: bool  # with what prefill answered; else through whatever cache they share
    prompt_tokens: int
    reused_tokens: int = 0
    failed_transfers: int = 0
    failure: str = ""


class Cause(msgspec.Struct, kw_only=True):
    """Why, how we know, and what to look at next."""

    what: str
    evidence: str
    next_step: str


class Diagnosis(msgspec.Struct, kw_only=True):
    outcome: Outcome
    summary: str
    causes: list[Cause] = []
    notes: list[str] = []
    engines: list[Engine] = []
    seen: list[Seen] = []
    handovers: list[Handover] = []
    requests: int = 0
    tokens: int = 0


def tolerance(own_deviation: float) -> float:
    """By how much logprobs may differ from those of an engine that computed everything at once."""
    return max(LEAST_TOLERANCE, MARGIN * own_deviation)


def cannot_test(why: str, next_step: str, engines: Sequence[Engine] = ()) -> Diagnosis:
    cause = Cause(what=why, evidence="nothing else could be asked", next_step=next_step)
    summary = f"Nothing could be tested: {why}."
    return Diagnosis(outcome=Outcome.CANNOT_TEST, summary=summary, causes=[cause], engines=list(engines))


def conclude(seen: Sequence[Seen], engines: Sequence[Engine], handovers: Sequence[Handover]) -> Diagnosis:
    """The verdict on an examination."""
    long = [each for each in seen if each.is_long]
    outcome = _outcome(long, seen)
    diagnosis = Diagnosis(
        outcome=outcome, summary="", engines=list(engines), seen=list(seen), handovers=list(handovers)
    )
    diagnosis.causes = list(_causes(outcome, long, seen, engines, handovers))
    diagnosis.notes = list(_notes(outcome, seen, engines))
    diagnosis.summary = _summary(outcome, long, seen, diagnosis.causes)
    return diagnosis


def needs_experiment(seen: Sequence[Seen]) -> bool:
    """Whether it is worth handing a prompt over without the router: prefill did its part, and nothing came of it."""
    return any(each.is_long and each.prefill.total_tokens and not _is_handed_over(each) for each in seen)


def _outcome(long: Sequence[Seen], seen: Sequence[Seen]) -> Outcome:
    if any(each.is_compared and each.comparison.problem and each.reused_tokens for each in seen):
        return Outcome.WRONG
    witnessed = [each for each in long if each.is_witnessed]
    if not witnessed:
        if any(each.failure for each in long):
            return Outcome.NONE
        if long and all(each.is_elsewhere for each in long):
            return Outcome.CANNOT_TEST
        return Outcome.BUSY if long else Outcome.CANNOT_TEST
    good = [each for each in witnessed if _is_handed_over(each)]
    if len(good) == len(witnessed) and not any(each.failure for each in seen):
        return Outcome.REAL
    return Outcome.PARTIAL if good else Outcome.NONE


def _is_handed_over(each: Seen) -> bool:
    if each.decode.failed_transfers:
        return False  # hits are counted when they are promised, not when they arrive
    return each.reused_tokens >= ENOUGH * each.prompt_tokens


# ---- words


def _summary(outcome: Outcome, long: Sequence[Seen], seen: Sequence[Seen], causes: Sequence[Cause]) -> str:
    witnessed = [each for each in seen if each.is_witnessed]
    asked = sum(each.prompt_tokens for each in witnessed)
    reused = sum(each.reused_tokens for each in witnessed)
    share = f"{reused:,} of {asked:,} prompt tokens ({reused / asked:.1%})" if asked else "nothing"
    why = f": {causes[0].what}" if causes else ""
    return {
        Outcome.REAL: f"Reuse is real: decode took over {share} instead of computing them again.",
        Outcome.PARTIAL: f"Reuse works only sometimes: decode took over {share}{why}.",
        Outcome.NONE: f"Nothing useful is reused: decode took over {share}{why}.",
        Outcome.WRONG: "Reuse changes answers: what decode took over is not what it would have computed.",
        Outcome.BUSY: "Busy, cannot attribute: the engines served others while they were asked.",
        Outcome.CANNOT_TEST: f"Nothing could be tested: {causes[0].what if causes else 'nothing was asked'}.",
    }[outcome]


def _notes(outcome: Outcome, seen: Sequence[Seen], engines: Sequence[Engine]) -> Iterator[str]:
    lost = [each for each in seen if each.is_witnessed and not each.is_long and not each.reused_tokens]
    if outcome is Outcome.REAL and lost:
        longest = max(each.prompt_tokens for each in lost)
        yield f"prompts of up to {longest} tokens are computed again: too short for the cache, or not worth moving"
    if any(each.busy for each in seen) and outcome is not Outcome.BUSY:
        yield "some prompts were not counted: the engines served others meanwhile"
    for engine in engines:
        if engine.problem:
            yield f"{engine.role} {engine.url}: {engine.problem}"
        elif not engine.has_sources:
            yield f"{engine.url} is an older vLLM: it counts hits, which also rise when a transfer fails"
    compared = [each for each in seen if each.is_compared]
    if seen and not compared and outcome in (Outcome.REAL, Outcome.PARTIAL):
        yield "no answer could be compared with one that was computed from nothing: amounts are proved, bytes are not"


# ---- causes, the likeliest first


def _causes(
    outcome: Outcome,
    long: Sequence[Seen],
    seen: Sequence[Seen],
    engines: Sequence[Engine],
    handovers: Sequence[Handover],
) -> Iterator[Cause]:
    if outcome is Outcome.WRONG:
        yield _wrong(seen)
    if outcome in (Outcome.NONE, Outcome.PARTIAL):
        bad = [each for each in long if each.is_witnessed and not _is_handed_over(each)]
        if failed := [each for each in seen if each.failure]:
            yield _failing(failed)
        if bad and not any(engine.role == "prefill" and not engine.problem for engine in engines):
            yield _prefill_not_seen(engines)
        elif bad and all(not each.prefill.total_tokens for each in bad):
            yield _prefill_not_asked(bad)
        elif bad:
            yield from _lost_on_the_way(bad, handovers)
    if outcome in (Outcome.NONE, Outcome.PARTIAL, Outcome.WRONG):
        yield from _differences(engines)
    if outcome is Outcome.CANNOT_TEST:
        yield _untestable(long)
    if outcome is Outcome.BUSY:
        yield Cause(
            what="other requests are being served",
            evidence="; ".join(sorted({each.busy for each in seen if each.busy})),
            next_step="Ask again when it is quiet, or take one prefill and one decode engine out of service for it.",
        )


def _untestable(long: Sequence[Seen]) -> Cause:
    if long:
        return Cause(
            what="the router decodes with engines that were not named",
            evidence=f"the decode engines that were named counted no token of {len(long)} prompts",
            next_step="Name every decode engine of this router: --decode URL, as often as needed.",
        )
    return Cause(
        what="no prompt that is long enough fits into the model's context or the budget",
        evidence="every cache may leave short prompts alone",
        next_step="Raise max_model_len, or --max-tokens.",
    )


def _wrong(seen: Sequence[Seen]) -> Cause:
    bad = [each for each in seen if each.is_compared and each.comparison.problem and each.reused_tokens]
    return Cause(
        what="the KV that decode loads is not that of this prompt and these weights",
        evidence="; ".join(f"{each.case}: {each.comparison.problem}" for each in bad[:3]),
        next_step="Turn reuse off. Compare the engines' weights (--revision, --quantization), --dtype, "
        "--kv-cache-dtype, attention backend and versions; for hybrid models behind LMCache add "
        "--separate-object-groups.",
    )


def _failing(failed: Sequence[Seen]) -> Cause:
    return Cause(
        what="requests fail",
        evidence=f"{len(failed)} of them, the first with: {failed[0].failure}",
        next_step="Look at the router's log, and at decode's for the same request.",
    )


def _prefill_not_seen(engines: Sequence[Engine]) -> Cause:
    return Cause(
        what="prefill cannot be watched, so nobody can say where the KV is lost",
        evidence="; ".join(engine.problem for engine in engines if engine.role == "prefill") or "none was named",
        next_step="Give prefill addresses that can be reached from here.",
    )


def _prefill_not_asked(bad: Sequence[Seen]) -> Cause:
    return Cause(
        what="the router never asked prefill",
        evidence=f"prefill counted no token of {len(bad)} prompts, decode computed all of them",
        next_step="Check that the router knows these engines as prefill (labels, addresses, roles), that it is set to "
        "disaggregate, and from which length on it does.",
    )


def _lost_on_the_way(bad: Sequence[Seen], handovers: Sequence[Handover]) -> Iterator[Cause]:
    """Prefill computed the prompts, decode computed them again."""
    failed = sum(each.decode.failed_transfers for each in bad) + sum(each.failed_transfers for each in handovers)
    expired = sum(each.prefill.expired for each in bad)
    by_parameters = next((each for each in handovers if each.by_parameters), None)
    by_cache = next((each for each in handovers if not each.by_parameters), None)
    first = bad[0]
    told = f"prefill computed {first.prefill.total_tokens} tokens, decode computed {first.decode.computed_tokens} again"
    if by_parameters and by_parameters.reused_tokens and not by_parameters.failed_transfers:
        yield Cause(
            what="the router drops kv_transfer_params",
            evidence=f"{told}; when doctor itself handed over what prefill answered, decode took over "
            f"{by_parameters.reused_tokens} of {by_parameters.prompt_tokens} tokens",
            next_step="Set the router's connector to the engines' (Kthena: kvConnector nixl; llm-d: nixlv2; "
            "production-stack: disaggregated_prefill_orchestrated), or use `kvtally route --flavour nixl`.",
        )
        return
    if by_cache and by_cache.reused_tokens:
        yield Cause(
            what="the engines share a cache, and the router keeps them from using it",
            evidence=f"{told}; asked one after the other by doctor, decode took over {by_cache.reused_tokens} of "
            f"{by_cache.prompt_tokens} tokens",
            next_step="Check that the router waits for prefill before it asks decode, and sends both the same prompt, "
            "model name and cache_salt.",
        )
        return
    if failed or (by_parameters and (by_parameters.failure or not by_parameters.reused_tokens)):
        said = f"; {failed} transfers failed" if failed else ""
        more = f"; {by_parameters.failure}" if by_parameters and by_parameters.failure else ""
        yield Cause(
            what="decode cannot fetch what prefill offers",
            evidence=f"{told}{said}{more}",
            next_step="Look for NIXL in decode's log. Check VLLM_NIXL_SIDE_CHANNEL_HOST (prefill's own address, not "
            "localhost or 0.0.0.0), its port, UCX_TLS, and that both run the same version.",
        )
    if expired:
        yield Cause(
            what="prefill dropped the KV before decode fetched it",
            evidence=f"{expired} requests expired at prefill",
            next_step="Raise kv_lease_duration, or find what keeps requests waiting in front of decode.",
        )
    if all(not each.decode.asked_tokens for each in bad):
        yield Cause(
            what="decode has no connector that looks anything up",
            evidence=f"{told}; its connector was asked for no token",
            next_step="Give decode the same --kv-transfer-config as prefill, kv_role kv_consumer or kv_both. Some "
            "connectors, such as MooncakeConnector, look up only what the router's request names.",
        )
    elif not failed:
        asked = sum(each.decode.asked_tokens for each in bad)
        yield Cause(
            what="decode looked and found nothing: the engines share no cache, or name the same tokens differently",
            evidence=f"{told}; its connector was asked for {asked} tokens and found "
            f"{sum(each.decode.external_tokens for each in bad)}",
            next_step="`kvtally doctor FILE…` on the manifests: a backend that both reach (LMCACHE_REMOTE_URL), the "
            "same PYTHONHASHSEED, chunk size, block size and tensor parallel size.",
        )


def _differences(engines: Sequence[Engine]) -> Iterator[Cause]:
    """Between prefill and decode, as they describe themselves."""
    prefills, decodes = ([each for each in engines if each.role == role] for role in ("prefill", "decode"))
    for one in prefills[:1]:
        for two in decodes[:1]:
            values = [{**each.settings, "version": each.version, "model": each.model} for each in (one, two)]
            differing = [name for name in ALIKE if values[0].get(name) != values[1].get(name)]
            if differing:
                said = ", ".join(f"{name} {values[0].get(name)} and {values[1].get(name)}" for name in differing)
                yield Cause(
                    what="prefill and decode are not alike",
                    evidence=said,
                    next_step="Start both with the same model, version and cache settings.",
                )
