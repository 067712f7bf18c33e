"""What the observations prove. Pure: answers, receipts and counters in; an outcome, its words and remedies out.

Three witnesses must agree: the answer (equal to that of an engine that reused nothing), the receipt (what the router
says was reused) and the engine's own counters (what it says it computed). Reuse counts as real where none objects.
Neighbours: `run` (what was observed), `reasons` (words for reasons), `cli.verify` (prints it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from kvtally.core.answers import TOLERANCE, Comparison
from kvtally.core.receipts import Verdict
from kvtally.core.routing import Skip
from kvtally.verify.reasons import Explained, explain

_LEFT_OUT = frozenset(Skip) - {Skip.HELD}
MARGIN = 2.0  # times what the engine itself deviates by: other pieces, other rounding
LOOSE = 1.0  # an engine that deviates from itself by more: nearly any answer would be taken for its own


class Outcome(StrEnum):
    """In the order of the command's exit codes."""

    PROVED = "proved"
    NOT_PROVED = "not proved"
    CANNOT_TEST = "cannot test"


class Turn(StrEnum):
    FIRST = "first"  # nobody has asked this before
    AGAIN = "again"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine generated. `margins`: by how much each token's logprob leads the runner-up's."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    text: str = ""

    def part(self, first: int, count: int) -> Answer:
        """So many of its tokens."""
        wanted = slice(first, first + count)
        return Answer(tokens=self.tokens[wanted], logprobs=self.logprobs[wanted], margins=self.margins[wanted])


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the router says of one request: its headers, and the receipt's halves where they can be read."""

    request: str
    verdict: str  # a Verdict
    reason: str = ""  # why not more
    prefill: str = ""  # the instance; empty where none took part
    skipped: str = ""  # why none took part
    decode: str = ""
    reused_tokens: int = 0
    computed_tokens: int = 0
    promised_tokens: int | None = None
    is_late: bool = False  # decode's half came after the headers had been sent
    sources: dict[str, int] = {}  # tokens by where they came from


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine that decoded counted meanwhile, of this request alone."""

    computed_tokens: int
    local_tokens: int  # from its own prefix cache
    external_tokens: int  # from a connector

    @property
    def total_tokens(self) -> int:
        return self.computed_tokens + self.local_tokens + self.external_tokens


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One request through the router, and its witnesses."""

    case: str
    turn: Turn
    prompt_tokens: int
    is_streamed: bool = False
    comparison: Comparison = Comparison()
    is_same_arithmetic: bool = False  # what was reused was computed as the reference was, and so was the rest
    told: Told | None = None  # None: no receipt at all
    counted: Counted | None = None
    uncounted: str = ""  # why the engine's counters say nothing
    failure: str = ""  # the request failed; nothing else is known then
    failure_reason: str = ""  # of a strict router's refusal


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was tested, as far as it changes what must hold."""

    has_prefill: bool
    chunk_tokens: int
    own_deviation: float = 0.0  # of the engine itself, between tokens computed at once and in pieces


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be said, of all the requests it was seen in."""

    what: str
    remedy: str
    requests: list[str]
    is_problem: bool = True


class Report(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    summary: str
    findings: list[Finding] = []
    prompt_tokens: int = 0  # of requests in which reuse was to be expected
    reused_tokens: int = 0  # of those
    sources: dict[str, int] = {}
    observations: list[Observation] = []
    own_deviation: float = 0.0  # as in the setting


def tolerance(own_deviation: float, *, is_same_arithmetic: bool) -> float:
    """By how much logprobs may differ."""
    return TOLERANCE if is_same_arithmetic else max(TOLERANCE, MARGIN * own_deviation)


def cannot_test(why: str, remedy: str) -> Report:
    finding = Finding(what=why, remedy=remedy, requests=[])
    return Report(outcome=Outcome.CANNOT_TEST, summary=f"Nothing could be tested: {why}.", findings=[finding])


def judge(observations: Sequence[Observation], setting: Setting) -> Report:
    """The verdict on a run."""
    if not observations:
        return cannot_test("no probe fits into the model's context", "Start the engines with a larger max_model_len.")
    if all(seen.told is None and not seen.failure for seen in observations):
        return cannot_test(
            "responses carry no receipt, so this is no kvtally router",
            "Give the address of one: `kvtally route` prints it, `kvtally up` too.",
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
    """Whether this request ought to have reused something.

    With prefill: always, unless the router left it out for what the request is. Without: when the same prompt comes
    again and is long enough for any model; a hybrid one keeps states at the ends of blocks only.
    """
    if seen.told is None:
        return False
    if setting.has_prefill:
        return seen.told.skipped not in _LEFT_OUT
    return seen.turn is Turn.AGAIN and seen.prompt_tokens >= 2 * setting.chunk_tokens


def _problem(seen: Observation, setting: Setting) -> Explained | None:
    """What this request proves to be wrong; the gravest first."""
    if seen.failure:
        if seen.failure_reason:
            return explain(Verdict.RECOMPUTED, seen.failure_reason, refused=True)
        return Explained(
            f"the request failed: {seen.failure}", "Look at the router's log, and at `/health` for who is down."
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
    if not _is_expected(seen, setting):
        return None
    if seen.told.verdict == Verdict.SHORT or not seen.told.reused_tokens:
        return explain(Verdict(seen.told.verdict), seen.told.reason)
    is_held = seen.told.skipped == Skip.HELD and not seen.told.reason
    if setting.has_prefill and seen.told.verdict == Verdict.LOCAL and not is_held:
        return explain(Verdict.LOCAL, seen.told.reason)
    return None


def _contradiction(seen: Observation) -> Explained | None:
    """The receipt against the engine's own counters."""
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
    """What is worth knowing and proves nothing."""
    told = seen.told
    if told is None or seen.failure:
        return None
    if setting.has_prefill and told.skipped in _LEFT_OUT:
        return Explained(
            f"prefill took no part ({told.skipped}): decode computed the prompt itself",
            "Short prompts are cheaper to compute than to move; router.prefill_from decides from where on.",
        )
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
    """Why this answer is a weak witness, even if it is equal."""
    if seen.is_same_arithmetic or setting.own_deviation <= LOOSE:
        return None
    return Explained(
        f"the engine's own logprobs differ by {setting.own_deviation:.2g} where tokens are computed at once and in "
        "pieces: that answers agree says little then, receipts and counters are what is left",
        "See whether this engine answers well without reuse; with --dtype float32 it should agree with itself.",
    )


def _gather(
    observations: Sequence[Observation], look: Callable[[Observation], Explained | None], *, is_problem: bool
) -> list[Finding]:
    """What was found, each thing once, with the requests it was found in."""
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
    "remote": "a remote store",
}
