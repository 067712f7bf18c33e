"""What `kvtally bench prefetch` found: times to the first token, by arm and by the disk's speed. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import RenderableType

from kvtally.bench import report
from kvtally.bench.report import EngineRun, Row, Target, p99, plain_table, rows_table

GAIN_TARGET = 0.28  # the best figure of the pull request that asked for this in vLLM
ARENA_TARGET = 1.10
NOTHING_TARGET = 1.01
ADDED_CPU_TARGET = 0.01
RECOMPUTE_TARGET = 1.05


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, for all requests of an arm."""

    mean_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    queue_s: float = 0.0  # how long the running queue was full, on average
    cpu_s: list[float] = []  # processor time of each burst
    connector_cpu_s: list[float] = []  # the part of it used by kvtally's threads
    samples: list[float] = []

    @property
    def after_queue_s(self) -> float:
        return self.mean_s - self.queue_s


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One speed of the disk. `disk_bytes_s` 0: as fast as it is."""

    name: str
    disk_bytes_s: int
    arms: dict[str, Times]

    def ratio(self, one: str, other: str) -> float:
        return same_queue_ratio(self.arms, one, other)


class Figures(EngineRun, kw_only=True):
    """Everything that was measured. The `mean_ttft_*` are for the disk that loads one prompt in the time in which two
    are computed."""

    rounds: int = 0
    requests: int = 0  # of a burst
    fillers: int = 0
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    compute_s: float = 0.0  # of one prompt, alone
    queue_s: float = 0.0  # for which the running queue is full

    mean_ttft_on_s: float = 0.0
    mean_ttft_off_s: float = 0.0
    mean_ttft_arena_s: float = 0.0
    mean_ttft_no_store_s: float = 0.0
    gain: float = 0.0  # by how much prefetch shortens the mean, behind the same queue
    gain_as_measured: float = 0.0  # the same from the means above, each behind its own queue
    on_over_arena: float = 0.0
    nothing_added_cpu: float = (
        0.0  # how much more kvtally's threads use with prefetch on, as a share of the whole engine's time
    )
    nothing_on_over_off: float = 0.0  # processor time, for prompts that the store does not have
    nothing_ttft_on_over_off: float = 0.0
    slow_tier_over_no_store: float = 0.0  # one request at a time, a slow disk, loading weighed against computing
    slow_tier_bytes_s: int = 0
    slow_tier_left_tokens: int = 0
    fast_tier_disk_tokens: int = 0
    outputs_equal: bool = False
    speeds: list[Speed] = []
    single: dict[str, Times] = {}
    nothing: dict[str, Times] = {}
    targets: list[Target] = []


def same_queue_ratio(arms: Mapping[str, Times], one: str, other: str) -> float:
    """The ratio of two arms' mean times to the first token, as if both had waited
    in the median arm's queue. A busy neighbour lengthens the queue of one arm and not of another, by more than what is
    to be measured."""
    queue_s = statistics.median(found.queue_s for found in arms.values())
    return (queue_s + arms[one].after_queue_s) / (queue_s + arms[other].after_queue_s)


def times(
    seconds: Sequence[float],
    queues_s: Sequence[float] = (0.0,),
    cpu_s: Sequence[float] = (),
    connector_cpu_s: Sequence[float] = (),
) -> Times:
    return Times(
        mean_s=statistics.mean(seconds),
        p50_s=statistics.median(seconds),
        p99_s=p99(seconds),
        queue_s=statistics.mean(queues_s),
        cpu_s=list(cpu_s),
        connector_cpu_s=list(connector_cpu_s),
        samples=list(seconds),
    )


def rows(figures: Figures) -> list[Row]:
    """Everything with a target, in the parts that were measured."""
    found: list[Row] = []
    if figures.speeds:
        found.append(Row(key="gain", value=figures.gain).at_least(GAIN_TARGET, f"{GAIN_TARGET:.0%}"))
        found.append(Row(key="on_over_arena", value=figures.on_over_arena, unit="×").at_most(ARENA_TARGET))
    if figures.nothing:
        ratio = Row(key="nothing_on_over_off", value=figures.nothing_on_over_off, unit="×").at_most(NOTHING_TARGET)
        found.append(_unless_noisy(ratio, figures.nothing["off"].cpu_s, NOTHING_TARGET))
        found.append(Row(key="nothing_added_cpu", value=figures.nothing_added_cpu).at_most(ADDED_CPU_TARGET))
    if figures.single:
        slow = Row(key="slow_tier_over_no_store", value=figures.slow_tier_over_no_store, unit="×")
        same = figures.single["no_store"].samples
        found.append(_unless_noisy(slow.at_most(RECOMPUTE_TARGET), same, RECOMPUTE_TARGET))
        kept = figures.fast_tier_disk_tokens
        found.append(Row(key="fast_tier_disk_tokens", value=kept).judged("kept", kept > 0))
    return found


def judge(figures: Figures) -> list[Target]:
    return Target.of(rows(figures))


def _unless_noisy(row: Row, samples: Sequence[float], target: float) -> Row:
    """Do not judge if samples of the same thing vary by more than five times the difference to be seen."""
    spread = (max(samples) - min(samples)) / statistics.median(samples) if samples else 0.0
    return row.judged(row.target, None) if spread > 5 * abs(target - 1) else row


def _compared(figures: Figures) -> str:
    if not figures.speeds and not figures.single:
        return "not compared"
    return "equal" if figures.outputs_equal else "DIFFER"


def page(figures: Figures) -> RenderableType:
    table = plain_table("disk", "arm", ">mean s", ">p50", ">p99", ">queue")
    parts = [(speed.name, speed.arms) for speed in figures.speeds]
    for title, arms in (*parts, ("one at a time", figures.single), ("nothing saved", figures.nothing)):
        for arm, found in arms.items():
            shown = (found.mean_s, found.p50_s, found.p99_s, found.queue_s)
            table.add_row(title, arm, *(f"{value:.3f}" for value in shown))
    about = [figures.engine, figures.model, f"{figures.cpus} cores"]
    notes = [
        f"Seconds to the first token of {figures.requests} prompts of {figures.prompt_tokens:,} tokens, behind "
        f"{figures.fillers} requests that keep the running queue full for {figures.queue_s:.1f} s. Computing one "
        f"prompt takes {figures.compute_s:.2f} s. Outputs: {_compared(figures)}.",
        f"Load at the start: {figures.load_at_start:.1f}. Where equal bursts vary too much, a target is not judged.",
    ]
    return report.page(figures, about, table, rows_table(rows(figures), "target"), notes=notes)
