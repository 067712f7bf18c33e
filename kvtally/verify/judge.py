"""What the observations prove. Pure: answers, receipts and counters in; an outcome, its words and remedies out.

Three witnesses must agree: the answer (equal to that of an engine that reused nothing), the receipt (what the router
says was reused) and the engine's own counters (what it says it computed). Reuse is real if none of them objects.
Neighbours: `run` (observes), `reasons` (words for reasons), `cli.verify` (prints the report).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from kvtally.core.answers import TOLERANCE, Comparison
from kvtally.core.receipts import Verdict
from kvtally.core.routing import Skip
from kvtally.verify.reasons import Explained, explain
from kvtally.wire.messages import MissReason

_LEFT_OUT = frozenset(Skip) - {Skip.HELD}
MARGIN = 2.0  # times the engine's own deviation: tokens computed in other pieces are rounded differently
LOOSE = 1.0  # if an engine deviates from itself by more, nearly any answer would pass for its own


class Outcome(StrEnum):
    """In the order of the command's exit codes."""

    PROVED = "proved"
    NOT_PROVED = "not proved"
    CANNOT_TEST = "cannot test"


class Turn(StrEnum):
    FIRST = "first"  # a prompt that is new to everybody
    AGAIN = "again"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine generated. `margins`: by how much each token's logprob leads the runner-up's."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    text: str = ""

    def part(self, first: int, count: int) -> Answer:
        """A slice of its tokens."""
        wanted = slice(first, first + count)
        return Answer(tokens=self.tokens[wanted], logprobs=self.logprobs[wanted], margins=self.margins[wanted])


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the router says about one request: its headers, and the receipt's halves if they can be read."""

    request: str
    verdict: str  # a Verdict
    reason: str = ""  # why no more was reused
    prefill: str = ""  # the instance; empty if none took part
    skipped: str = ""  # why none took part
    decode: str = ""
    reused_tokens: int = 0
    computed_tokens: int = 0
    promised_tokens: int | None = None
    is_late: bool = False  # decode's half arrived after the headers were sent
    sources: dict[str, int] = {}  # tokens by where they came from


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What the decoding engine counted for this one request."""

    computed_tokens: int
    local_tokens: int  # from its own prefix cache
    external_tokens: int  # from a connector

    @property
    def total_tokens(self) -> int:
        return self.computed_tokens + self.local_tokens + self.external_tokens


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One request through the router, and what its witnesses say."""

    case: str
    turn: Turn
    prompt_tokens: int
    is_streamed: bool = False
    comparison: Comparison = Comparison()
    is_same_arithmetic: bool = False  # every token was computed exactly as in the reference
    told: Told | None = None  # None: no receipt at all
    counted: Counted | None = None
    uncounted: str = ""  # why the engine's counters cannot be used
    failure: str = ""  # how the request failed; the rest is then unknown
    failure_reason: str = ""  # why a strict router refused


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What about the deployment decides what must hold."""

    has_prefill: bool
    chunk_tokens: int
    own_deviation: float = 0.0  # how far the engine differs from itself, computing tokens at once or in pieces


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem or a note, with all the requests that show it."""

    what: str
    remedy: str
    requests: list[str]
    is_problem: bool = True


class Report(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    summary: str
    findings: list[Finding] = []
    prompt_tokens: int = 0  # of requests that should reuse something
    reused_tokens: int = 0  # of the same requests
    sources: dict[str, int] = {}
    observations: list[Observation] = []
    own_deviation: float = 0.0  # as in the setting


def tolerance(own_deviation: float, *, is_same_arithmetic: bool) -> float:
    """How far logprobs may differ."""
    return TOLERANCE if is_same_arithmetic else max(TOLERANCE, MARGIN * own_deviation)


def cannot_test(why: str, remedy: str) -> Report:
    finding = Finding(what=why, remedy=remedy, requests=[])
    return Report(outcome=Outcome.CANNOT_TEST, summary=f"Nothing could be tested: {why}.", findings=[finding])


def judge(observations: Sequence[Observation], setting: Setting) -> Report:
    """Judge a whole run."""
    if not observations:
        return cannot_test("no probe fits into the model's context", "Start the engines with a larger max_model_len.")
    if all(seen.told is None and not seen.failure for seen in observations):
        return cannot_test(
            "responses carry no receipt, so this is no kvtally router",
            "Give a router's address: `kvtally route` and `kvtally up` print it.",
        )
    problems = _gather(observations, lambda seen: _problem(seen, setting), is_problem=True)
    notes = _gather(observations, lambda seen: _note(seen, setting), is_problem=False)
    notes += _gather(observations, lambda seen: _weakness(seen, setting), is_problem=False)
    expected = [seen for seen in observations if seen.told is not None and _is_expected(seen, setting)]
    real = [seen.told for seen in expected if seen.told is not None and not _problem(seen, setting)]
    reused = [told for told in real if told.reused_tokens]
    if not problems and not _has_proof(reused, setting):
        problems.append(_nothing_reused(setting))
    sources: dict[str, int] = {}
    for told in reused:
        for place, tokens in told.sources.items():
            sources[place] = sources.get(place, 0) + tokens
    report = Report(
        outcome=Outcome.NOT_PROVED if problems else Outcome.PROVED,
        summary="",
        findings=[*problems, *notes],
        prompt_tokens=sum(seen.prompt_tokens for seen in expected),
        reused_tokens=sum(told.reused_tokens for told in reused),
        sources=sources,
        observations=list(observations),
        own_deviation=setting.own_deviation,
    )
    return msgspec.structs.replace(report, summary=_summary(report, setting))


# ---- one request


def _is_expected(seen: Observation, setting: Setting) -> bool:
    """Whether this request should have reused something.

    With prefill: always, unless the router skipped prefill for this kind of request. Without: if the prompt is repeated
    and long enough for any model (a hybrid one keeps states only at the ends of blocks).
    """
    if seen.told is None:
        return False
    if setting.has_prefill:
        return seen.told.skipped not in _LEFT_OUT
    return seen.turn is Turn.AGAIN and seen.prompt_tokens >= 2 * setting.chunk_tokens


def _problem(seen: Observation, setting: Setting) -> Explained | None:
    """The worst problem that this request shows, if any."""
    if seen.failure:
        if seen.failure_reason:
            return explain(Verdict.RECOMPUTED, seen.failure_reason, refused=True)
        return Explained(
            f"the request failed: {seen.failure}", "See the router's log, and `/health` for engines that are down."
        )
    if seen.comparison.problem:
        return Explained(
            "the answer is not the one of an engine that reuses nothing: " + seen.comparison.problem,
            "Do not trust this deployment's cache: `kvtally reset`, compare the engines' versions and arguments, and "
            "report it, with this output.",
        )
    if seen.told is None:
        return Explained("the response carries no receipt", "Look at the router's log for this request.")
    if seen.told.verdict == Verdict.MISSING:
        return explain(Verdict.MISSING, seen.told.reason)
    if contradiction := _contradiction(seen):
        return contradiction
    if not _is_expected(seen, setting) or seen.told.reason == MissReason.SLOW_TIER:  # that was a choice, see `_note`
        return None
    if seen.told.verdict == Verdict.SHORT or not seen.told.reused_tokens:
        return explain(Verdict(seen.told.verdict), seen.told.reason)
    is_held = seen.told.skipped == Skip.HELD and not seen.told.reason
    if setting.has_prefill and seen.told.verdict == Verdict.LOCAL and not is_held:
        return explain(Verdict.LOCAL, seen.told.reason)
    return None


def _contradiction(seen: Observation) -> Explained | None:
    """Compare the receipt with the engine's own counters."""
    told, counted = seen.told, seen.counted
    if told is None or counted is None:
        return None
    by_engine = counted.local_tokens + counted.external_tokens
    if (told.reused_tokens, told.computed_tokens) == (by_engine, counted.computed_tokens):
        return None
    return Explained(
        f"the receipt says {told.reused_tokens} tokens reused and {told.computed_tokens} computed, the engine counted "
        f"{by_engine} and {counted.computed_tokens}",
        "One of them is wrong: report it, with this output and the engine's version.",
    )


def _note(seen: Observation, setting: Setting) -> Explained | None:
    """Something worth knowing that proves nothing."""
    told = seen.told
    if told is None or seen.failure:
        return None
    if setting.has_prefill and told.skipped in _LEFT_OUT:
        return Explained(
            f"prefill took no part ({told.skipped}): decode computed the prompt itself",
            "Short prompts are cheaper to compute than to move; router.prefill_from sets the limit.",
        )
    if told.reason == MissReason.SLOW_TIER:
        return explain(Verdict(told.verdict), told.reason)
    if told.is_late:
        return Explained(
            "decode's half of the receipt came too late for the response's headers, which say `missing`",
            "Raise router.receipt_wait; `/receipts/ID` has the whole receipt.",
        )
    if told.promised_tokens is not None and told.promised_tokens < seen.prompt_tokens - 1:
        return Explained(
            f"prefill promised only {told.promised_tokens} of {seen.prompt_tokens} tokens",
            "Its half of the receipt says why: `kvtally receipts`.",
        )
    if seen.counted is None:
        return Explained(
            f"the engine's own counters are no witness: {seen.uncounted or 'they could not be read'}",
            "Verify a quiet deployment, from where its engines can be reached.",
        )
    return None


# ---- all of them


def _has_proof(reused: Sequence[Told], setting: Setting) -> bool:
    wanted = {Verdict.PROVED} if setting.has_prefill else {Verdict.PROVED, Verdict.LOCAL}
    return any(told.verdict in wanted for told in reused)


def _nothing_reused(setting: Setting) -> Finding:
    if setting.has_prefill:
        what, remedy = "no prompt was handed from prefill to decode", "Lower router.prefill_from, or probe longer."
    else:
        what, remedy = "no prompt was reused when it came again", "Look at `kvtally receipts` for the reasons."
    return Finding(what=what, remedy=remedy, requests=[])


def _weakness(seen: Observation, setting: Setting) -> Explained | None:
    """Why this answer proves little even if it is equal."""
    if seen.is_same_arithmetic or setting.own_deviation <= LOOSE:
        return None
    return Explained(
        f"the engine's own logprobs differ by {setting.own_deviation:.2g} between tokens computed at once and in "
        "pieces, so equal answers prove little; receipts and counters still count",
        "Check that this engine answers well without reuse; with --dtype float32 it should agree with itself.",
    )


def _gather(
    observations: Sequence[Observation], look: Callable[[Observation], Explained | None], *, is_problem: bool
) -> list[Finding]:
    """Each finding once, with the requests that show it."""
    found: dict[Explained, list[str]] = {}
    for seen in observations:
        if explained := look(seen):
            found.setdefault(explained, []).append(f"{seen.case}, {seen.turn}")
    return [
        Finding(what=what, remedy=remedy, requests=requests, is_problem=is_problem)
        for (what, remedy), requests in found.items()
    ]


def _summary(report: Report, setting: Setting) -> str:
    seen = report.observations
    if report.outcome is not Outcome.PROVED:
        wrong = sum(_problem(one, setting) is not None for one in seen)
        return f"Reuse is not proved: {wrong} of {len(seen)} requests object." if wrong else "Reuse is not proved."
    share = report.reused_tokens / report.prompt_tokens
    places = ", ".join(f"{tokens:,} from {_PLACES.get(place, place)}" for place, tokens in report.sources.items())
    counted = sum(one.counted is not None for one in seen)
    ties = sum(one.comparison.is_tie for one in seen)
    deviation = max(one.comparison.deviation for one in seen)
    return " ".join(
        [
            f"Reuse is real: {report.reused_tokens:,} of {report.prompt_tokens:,} prompt tokens ({share:.1%}) were not "
            f"computed again{f' ({places})' if places else ''}.",
            f"All {len(seen)} answers are those of an engine that reuses nothing: logprobs within "
            f"{deviation:.1e} (the engine's own, computing at once or in pieces: {setting.own_deviation:.1e})"
            f"{f', {ties} of them up to a tie' if ties else ''}.",
            f"The engines' own counters confirm {counted} of {len(seen)} receipts.",
        ]
    )


_PLACES = {
    "gpu": "the engine's own cache",
    "host": "the store's memory",
    "disk": "the store's disk",
    "peer": "another machine's store",
    "pool": "the shared pool",
    "remote": "another system's cache",
}
