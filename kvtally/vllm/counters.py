"""What the connector counts: the table of its metrics, and their sums since vLLM last took them. Imports no vLLM.

Each half has `Counters` of its own. With every step vLLM takes their plain data away, adds up ranks and halves, logs a
line of it now and then, and feeds it to Prometheus (`stats`). Not thread-safe: counters belong to one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtally.core.receipts import Loaded
from kvtally.wire.messages import MissReason

MIB = 1 << 20


class Count(NamedTuple):
    """A counter with one label. It starts with these `values` at 0, so that the first increase shows as one."""

    name: str
    text: str
    label: str
    values: tuple[str, ...]


class Duration(NamedTuple):
    """A histogram of seconds."""

    name: str
    text: str


LOOKUPS = Count("lookups", "Prompts that the store was asked about.", "outcome", ("hit", "miss"))
TOKENS = Count(
    "tokens", "Prompt tokens that were loaded and used, by where the store had them.", "source", Loaded._fields
)
BYTES = Count("bytes", "Bytes copied between engine and store.", "direction", ("load", "save"))
MISSES = Count(
    "misses", "Prompts that were not reused as far as possible, and loads that failed.", "reason", tuple(MissReason)
)
PREFETCHES = Count(
    "prefetches",
    "Prompts for which the store staged something: before the engine reached them or after, never read, given up, or "
    "left because computing was faster.",
    "outcome",
    ("in_time", "late", "wasted", "cancelled", "skipped"),
)
SAVES = Count(
    "saves",
    "Saves that were taken, and saves that were not because too many blocks were waiting to be saved.",
    "outcome",
    ("taken", "left"),
)
WAIT = Duration("wait_seconds", "From the arrival of a prompt until its hit was known and staged in host memory.")
EXPOSED = Duration("exposed_seconds", "The part of that after the scheduler had reached the request.")
LOAD = Duration("load_seconds", "One load of one request by one worker.")
SAVE = Duration("save_seconds", "One save of one request's step by one worker.")

COUNTS = (LOOKUPS, TOKENS, BYTES, MISSES, PREFETCHES, SAVES)
DURATIONS = (WAIT, EXPOSED, LOAD, SAVE)

Counts = Mapping[str, Mapping[str, int]]  # metric -> label value -> sum
Seconds = Mapping[str, Sequence[float]]  # metric -> observations


class Counters:
    """Sums by metric and label, and lists of durations by metric. Both are plain, so that any codec carries them."""

    __slots__ = ("counts", "seconds")

    def __init__(
        self, counts: dict[str, dict[str, int]] | None = None, seconds: dict[str, list[float]] | None = None
    ) -> None:
        self.counts = {} if counts is None else counts
        self.seconds = {} if seconds is None else seconds

    @property
    def is_empty(self) -> bool:
        return not self.counts and not self.seconds

    def count(self, metric: Count, value: str, amount: int = 1) -> None:
        if amount:
            values = self.counts.setdefault(metric.name, {})
            values[value] = values.get(value, 0) + amount

    def observe(self, metric: Duration, *seconds: float) -> None:
        if seconds:
            self.seconds.setdefault(metric.name, []).extend(seconds)

    def add(self, counts: Counts, seconds: Seconds) -> None:
        for name, values in counts.items():
            sums = self.counts.setdefault(name, {})
            for value, amount in values.items():
                sums[value] = sums.get(value, 0) + amount
        for name, observations in seconds.items():
            self.seconds.setdefault(name, []).extend(observations)

    def take(self) -> Counters:
        """Everything so far. Counting starts over."""
        taken = Counters(self.counts, self.seconds)
        self.counts, self.seconds = {}, {}
        return taken

    def summary(self) -> dict[str, int | float]:
        """For a line in a log: only metrics that are not 0, with short names and handy units."""
        line: dict[str, int | float] = {}
        for metric in COUNTS:
            for value, amount in sorted(self.counts.get(metric.name, {}).items()):
                if metric is BYTES:
                    line[f"{value}_MiB"] = round(amount / MIB, 3)
                else:
                    line[f"{metric.name}_{value}"] = amount
        for duration in DURATIONS:
            observations = sorted(self.seconds.get(duration.name, ()))
            if observations:
                name = duration.name.removesuffix("_seconds")
                line[f"{name}_ms_mean"] = round(sum(observations) / len(observations) * 1e3, 3)
                line[f"{name}_ms_max"] = round(observations[-1] * 1e3, 3)
        return line
