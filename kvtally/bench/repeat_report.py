"""What `kvtally bench repeat` found: medians, ratios and targets, whether outputs are equal; for programs and people.

Owns the figures' form, the rule by which answers count as equal, and the table. Measures nothing: `bench.repeat` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally.bench.repeat_engine import Answer
from kvtally.config.units import human_size
from kvtally.core.receipts import Half

LOGPROB_TOLERANCE = 1e-3
REPEAT_TARGET = 1.15
COLD_TARGET = 1.03


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the receipts say of one arm; medians over its requests."""

    tokens_host: int = 0
    tokens_disk: int = 0
    tokens_gpu: int = 0
    moved_bytes: int = 0
    wait_ms: float = 0.0  # from the request's arrival until everything is in the arena
    load_ms: float = 0.0  # from the arena into the engine, verified
    reasons: list[str] = []


class Figures(msgspec.Struct, kw_only=True):
    """Everything that was measured. Times are medians, in seconds; `samples` has all of them."""

    version: str = ""
    engine: str = ""
    model: str = ""
    cpus: int = 0
    load_at_start: float = 0.0
    elapsed_s: float = 0.0
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


class Target(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: float
    target: str
    ok: bool


@dataclass(slots=True)
class Outputs:
    """Answers to one prompt. `references` are the engine's without a connector: computed, and with its own hit."""

    references: list[Answer] = field(default_factory=list)
    restored: list[Answer] = field(default_factory=list)


def view(halves: Sequence[Half]) -> View:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values) if values else 0.0

    return View(
        tokens_host=int(median([half.tokens_host for half in halves])),
        tokens_disk=int(median([half.tokens_disk for half in halves])),
        tokens_gpu=int(median([half.tokens_gpu for half in halves])),
        moved_bytes=int(median([half.moved_bytes for half in halves])),
        wait_ms=median([half.wait_ms for half in halves]),
        load_ms=median([half.load_ms for half in halves]),
        reasons=sorted({half.reason for half in halves if half.reason}),
    )


def _apart(one: Answer, other: Answer) -> float:
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)


def difference(outputs: Outputs) -> float:
    """How far the restored answers' logprobs are from the nearest reference."""
    return max(min(_apart(answer, reference) for reference in outputs.references) for answer in outputs.restored)


def own_difference(outputs: Outputs) -> float:
    """How far the engine is from itself: computed at once, or continued from its own prefix cache."""
    return max(_apart(outputs.references[0], reference) for reference in outputs.references)


def are_equal(outputs: Sequence[Outputs]) -> bool:
    """Every restored answer has the tokens of a reference, and logprobs no further off than the engine is by itself."""
    tolerance = max(LOGPROB_TOLERANCE, *map(own_difference, outputs))
    return all(
        any(answer.tokens == reference.tokens for reference in each.references) and difference(each) <= tolerance
        for each in outputs
        for answer in each.restored
    )


def judge(figures: Figures) -> list[Target]:
    def at_most(key: str, value: float, target: float) -> Target:
        return Target(key=key, value=value, target=f"≤ {target:g} ×", ok=value <= target)

    return [
        at_most("repeat_over_gpu_hit", figures.repeat_over_gpu_hit, REPEAT_TARGET),
        at_most("cold_over_no_connector", figures.cold_over_no_connector, COLD_TARGET),
        Target(key="outputs_equal", value=figures.outputs_equal, target="yes", ok=figures.outputs_equal),
    ]


def page(figures: Figures) -> RenderableType:
    """The table for people."""
    table = Table(box=None, pad_edge=False)
    for column in ("first token after", ">no connector", ">kvtally", ">", "of", ">target", "verdict"):
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    targets = {target.key: target for target in figures.targets}
    computed_s, hit_s, own_hit = figures.no_connector_repeat_s, figures.gpu_hit_s, "an own hit"
    rows = [
        ("cold", figures.cold_no_connector_s, figures.cold_s, figures.cold_no_connector_s, "no connector"),
        ("repeat, own prefix hit", hit_s, figures.gpu_hit_with_connector_s, hit_s, "no connector"),
        ("repeat, from the arena", computed_s, figures.repeat_arena_s, hit_s, own_hit),
        ("repeat, from disk", computed_s, figures.repeat_disk_s, hit_s, own_hit),
    ]
    promised = {"cold": targets["cold_over_no_connector"], "repeat, from the arena": targets["repeat_over_gpu_hit"]}
    for name, plain_s, ours_s, against_s, against in rows:
        target = promised.get(name)
        verdict = Text("") if target is None else Text("ok", "green") if target.ok else Text("miss", "bold red")
        ratio = f"{ours_s / against_s:.2f} ×"
        table.add_row(name, _ms(plain_s), _ms(ours_s), ratio, against, target.target if target else "", verdict)
    return Group(Text(_headline(figures), style="bold"), Text(), table, Text(), *map(Text, _notes(figures)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _headline(figures: Figures) -> str:
    return (
        f"kvtally {figures.version} · {figures.engine} · {figures.model} · {figures.fills} prompts of "
        f"{figures.prompt_tokens:,} tokens · {figures.cpus} cores · {figures.elapsed_s:.0f} s"
    )


def _notes(figures: Figures) -> list[str]:
    notes = [
        f"Reused: {figures.reused_tokens:,} of {figures.prompt_tokens:,} tokens (by an own hit: "
        f"{figures.gpu_hit_tokens:,}); a repeat became {figures.no_connector_over_repeat:.1f} times as fast. "
        f"Saved: {human_size(figures.saved_bytes)} a prompt.",
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
