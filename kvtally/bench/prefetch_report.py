"""What `kvtally bench prefetch` found: times to the first token by arm and disk speed; for programs and people.

Owns the figures' form, the targets and the table. Measures nothing: `bench.prefetch` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GAIN_TARGET = 0.28  # the best figure of the pull request that asked for this in vLLM
ARENA_TARGET = 1.10
NOTHING_TARGET = 1.01
ADDED_CPU_TARGET = 0.01
RECOMPUTE_TARGET = 1.05


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, of all requests of an arm."""

    mean_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    queue_s: float = 0.0  # of it, on average, the running queue was full
    cpu_s: list[float] = []  # processor time of each burst
    connector_cpu_s: list[float] = []  # of it, that of kvtally's threads
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


class Target(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: float
    target: str
    ok: bool | None  # None: what was measured varies by more than what is to be told apart


class Figures(msgspec.Struct, kw_only=True):
    """Everything that was measured. The `mean_ttft_*` are those of the disk that loads one request while two could be
    computed."""

    version: str = ""
    engine: str = ""
    model: str = ""
    cpus: int = 0
    load_at_start: float = 0.0
    elapsed_s: float = 0.0
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
    gain_as_measured: float = 0.0  # the same of the means above, with the queues that each arm had
    on_over_arena: float = 0.0
    nothing_added_cpu: float = 0.0  # what kvtally's threads use more with prefetch on, as a share of the engine's all
    nothing_on_over_off: float = 0.0  # prompts of which the store has nothing; processor time, which neighbours spare
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


def is_noisy(samples: Sequence[float], target: float) -> bool:
    """Whether samples of the same thing vary by more than five times the difference that is to be told."""
    return bool(samples) and (max(samples) - min(samples)) / statistics.median(samples) > 5 * abs(target - 1)


def same_queue_ratio(arms: Mapping[str, Times], one: str, other: str) -> float:
    """Of two arms' mean times to the first token, each behind the same queue: that of the median arm. A busy neighbour
    lengthens the queue of one arm and not of another, by more than what is to be measured."""
    queue_s = statistics.median(found.queue_s for found in arms.values())
    return (queue_s + arms[one].after_queue_s) / (queue_s + arms[other].after_queue_s)


def times(
    seconds: Sequence[float],
    queues_s: Sequence[float] = (0.0,),
    cpu_s: Sequence[float] = (),
    connector_cpu_s: Sequence[float] = (),
) -> Times:
    ordered = sorted(seconds)
    return Times(
        mean_s=statistics.mean(ordered),
        p50_s=statistics.median(ordered),
        p99_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        queue_s=statistics.mean(queues_s),
        cpu_s=list(cpu_s),
        connector_cpu_s=list(connector_cpu_s),
        samples=list(seconds),
    )


def judge(figures: Figures) -> list[Target]:
    """Of what was measured."""

    def at_most(key: str, value: float, target: float, reference: Sequence[float] = ()) -> Target:
        ok = None if is_noisy(reference, target) else value <= target
        return Target(key=key, value=value, target=f"≤ {target:g} ×", ok=ok)

    gain = Target(key="gain", value=figures.gain, target=f"≥ {GAIN_TARGET:.0%}", ok=figures.gain >= GAIN_TARGET)
    kept = figures.fast_tier_disk_tokens
    targets: list[Target] = []
    if figures.speeds:
        targets += [gain, at_most("on_over_arena", figures.on_over_arena, ARENA_TARGET)]
    if figures.nothing:
        same = figures.nothing["off"].cpu_s
        targets.append(at_most("nothing_on_over_off", figures.nothing_on_over_off, NOTHING_TARGET, same))
        added = figures.nothing_added_cpu
        is_little = added <= ADDED_CPU_TARGET
        targets.append(Target(key="nothing_added_cpu", value=added, target=f"≤ {ADDED_CPU_TARGET:g}", ok=is_little))
    if figures.single:
        same = figures.single["no_store"].samples
        targets.append(at_most("slow_tier_over_no_store", figures.slow_tier_over_no_store, RECOMPUTE_TARGET, same))
        targets.append(Target(key="fast_tier_disk_tokens", value=kept, target="kept", ok=kept > 0))
    return targets


_VERDICTS = {True: "ok", False: "miss", None: "too noisy to tell"}


def _compared(figures: Figures) -> str:
    if not figures.speeds and not figures.single:
        return "not compared"
    return "equal" if figures.outputs_equal else "DIFFER"


def page(figures: Figures) -> RenderableType:
    table = Table(
        "disk", "arm", "mean", "p50", "p99", "queue", title="time to the first token, in seconds", title_justify="left"
    )
    for speed in figures.speeds:
        for arm, found in speed.arms.items():
            shown = (found.mean_s, found.p50_s, found.p99_s, found.queue_s)
            table.add_row(speed.name, arm, *(f"{value:.3f}" for value in shown))
    for title, arms in (("one at a time", figures.single), ("nothing saved", figures.nothing)):
        for arm, found in arms.items():
            shown = (found.mean_s, found.p50_s, found.p99_s, found.queue_s)
            table.add_row(title, arm, *(f"{value:.3f}" for value in shown))
    targets = Table("target", "measured", "to reach", "", title_justify="left")
    for target in figures.targets:
        targets.add_row(target.key, f"{target.value:.3f}", target.target, _VERDICTS[target.ok])
    what = (
        f"{figures.engine}, {figures.model}: {figures.requests} prompts of {figures.prompt_tokens} tokens behind "
        f"{figures.fillers} that keep the running queue full for {figures.queue_s:.1f} s; computing one takes "
        f"{figures.compute_s:.2f} s. Outputs {_compared(figures)}. "
        f"{figures.cpus} cores, load {figures.load_at_start:.1f} at the start, {figures.elapsed_s:.0f} s."
    )
    return Group(table, Text(), targets, Text(), Text(what))
