"""What `kvtally bench repeat` found: medians, ratios and targets, and whether answers are equal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import msgspec
from rich.console import RenderableType

from kvtally.bench import report
from kvtally.bench.engine import Answer
from kvtally.bench.report import EngineRun, Row, Target, median, rows_table
from kvtally.config.units import human_size
from kvtally.core.answers import TOLERANCE, Comparison, compare
from kvtally.core.receipts import Half


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the receipts say about one arm; medians over its requests."""

    tokens_host: int = 0
    tokens_disk: int = 0
    tokens_gpu: int = 0
    moved_bytes: int = 0
    wait_ms: float = 0.0  # from the request's arrival until everything is in the arena
    load_ms: float = 0.0  # from the arena into the engine, verified
    reasons: list[str] = []


class Figures(EngineRun, kw_only=True):
    """Everything that was measured. Times are medians, in seconds; `samples` has all of them."""

    fills: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of a repeat from the arena
    gpu_hit_tokens: int = 0  # of a repeat right after, without a connector

    cold_s: float = 0.0
    cold_no_connector_s: float = 0.0
    repeat_arena_s: float = 0.0
    repeat_disk_s: float = 0.0
    gpu_hit_s: float = 0.0  # the engine's own prefix cache, without a connector
    gpu_hit_with_connector_s: float = 0.0
    no_connector_repeat_s: float = 0.0

    repeat_over_gpu_hit: float = 0.0
    cold_over_no_connector: float = 0.0
    no_connector_over_repeat: float = 0.0  # how much faster a repeat became

    outputs_equal: bool = False
    logprob_difference: float = 0.0
    logprob_difference_own: float = 0.0  # of the engine's own hits, without a connector
    saved_bytes: int = 0  # of one prompt
    receipts: dict[str, View] = {}
    samples: dict[str, list[float]] = {}
    targets: list[Target] = []


@dataclass(slots=True)
class Outputs:
    """Answers to one prompt. `references` come from the engine without a connector: computed, and with its own hit."""

    references: list[Answer] = field(default_factory=list)
    restored: list[Answer] = field(default_factory=list)


def view(halves: Sequence[Half]) -> View:
    return View(
        tokens_host=int(median([half.tokens_host for half in halves])),
        tokens_disk=int(median([half.tokens_disk for half in halves])),
        tokens_gpu=int(median([half.tokens_gpu for half in halves])),
        moved_bytes=int(median([half.moved_bytes for half in halves])),
        wait_ms=median([half.wait_ms for half in halves]),
        load_ms=median([half.load_ms for half in halves]),
        reasons=sorted({half.reason for half in halves if half.reason}),
    )


class Agreement(NamedTuple):
    """Whether restored answers are equal to references, and by how much logprobs differ: of an answer from its nearest
    reference, and of the references from one another (`own_difference`)."""

    is_equal: bool
    difference: float
    own_difference: float


def agreement(outputs: Sequence[Outputs]) -> Agreement:
    """A restored answer must be equal to one of its references. Logprobs may differ by as much as they do when the
    engine itself continues from its own prefix cache instead of computing the whole prompt."""
    own = [compare(each.references[0], other, inf).deviation for each in outputs for other in each.references]
    allowed = max(TOLERANCE, *own)
    nearest = [
        min((compare(reference, answer, allowed) for reference in each.references), key=_distance)
        for each in outputs
        for answer in each.restored
    ]
    is_equal = not any(comparison.problem for comparison in nearest)
    return Agreement(is_equal, max(comparison.deviation for comparison in nearest), max(own))


def _distance(comparison: Comparison) -> tuple[bool, float]:
    return bool(comparison.problem), comparison.deviation


def rows(figures: Figures) -> list[Row]:
    """Times to the first token, in milliseconds, beside the engine without a connector."""

    def row(key: str, name: str, seconds: float, limit_s: float, limit_name: str) -> Row:
        return Row(key=key, name=name, value=seconds * 1e3, unit="ms").beside(limit_s * 1e3, limit_name)

    cold_s, hit_s, own_hit = figures.cold_no_connector_s, figures.gpu_hit_s, "its own hit"
    with_ours_s = figures.gpu_hit_with_connector_s
    return [
        row("repeat_over_gpu_hit", "repeat, from the arena", figures.repeat_arena_s, hit_s, own_hit).at_most(1.15),
        row("repeat_disk_s", "repeat, from disk", figures.repeat_disk_s, hit_s, own_hit),
        row("gpu_hit_with_connector_s", "repeat, own prefix hit", with_ours_s, hit_s, own_hit),
        row("no_connector_repeat_s", "repeat, computed again", figures.no_connector_repeat_s, hit_s, own_hit),
        row("cold_over_no_connector", "cold", figures.cold_s, cold_s, "cold").at_most(1.03),
    ]


def judge(figures: Figures) -> list[Target]:
    is_equal = figures.outputs_equal
    return [*Target.of(rows(figures)), Target(key="outputs_equal", value=is_equal, target="yes", ok=is_equal)]


def page(figures: Figures) -> RenderableType:
    prompts = f"{figures.fills} prompts of {figures.prompt_tokens:,} tokens"
    about = [figures.engine, figures.model, prompts, f"{figures.cpus} cores"]
    return report.page(figures, about, rows_table(rows(figures), "time to the first token"), notes=_notes(figures))


def _notes(figures: Figures) -> list[str]:
    notes = [
        "The limits come from the same engine without a connector, which took turns with ours.",
        f"Reused: {figures.reused_tokens:,} of {figures.prompt_tokens:,} tokens (by an own hit: "
        f"{figures.gpu_hit_tokens:,}); a repeat became {figures.no_connector_over_repeat:.1f} times as fast. "
        f"Saved: {human_size(figures.saved_bytes)} for each prompt.",
        "Outputs: equal to those without a connector."
        if figures.outputs_equal
        else f"Outputs: NOT equal; logprobs differ by up to {figures.logprob_difference:.2g}.",
    ]
    for arm, seen in figures.receipts.items():
        reasons = f" Cut short: {', '.join(seen.reasons)}." if seen.reasons else ""
        notes.append(
            f"Receipts, {arm}: {seen.tokens_host:,} tokens from memory, {seen.tokens_disk:,} from disk, "
            f"{human_size(seen.moved_bytes)} moved; {seen.wait_ms:.1f} ms until they were in the arena, "
            f"{seen.load_ms:.1f} ms to load and verify them.{reasons}"
        )
    if figures.load_at_start > 0.5:
        notes.append(f"This machine was busy with something else: load {figures.load_at_start:.1f} at the start.")
    return notes
