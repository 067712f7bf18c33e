"""Prometheus: every metric that a store exports, as `wire.stats` names them, in the text format.

Counts nothing: the store's own numbers are read when somebody scrapes, so there is no second account that could
differ. Neighbours: `admin` (serves the text), `wire.stats` (the numbers, their metrics and what they mean).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtally.wire import stats as table
from kvtally.wire.stats import Each, Kind, StoreStats

EACH = "*"  # path step: every item of a list (labelled by its name) or of a map (labelled by its key)


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric. `path` leads to its value; each `EACH` on the way gives one of `labels`."""

    name: str
    kind: Kind
    path: str
    help: str
    labels: tuple[str, ...] = ()


def entries(record: type[msgspec.Struct], path: tuple[str, ...] = (), labels: tuple[str, ...] = ()) -> Iterator[Entry]:
    """The metrics of a record of statistics and of those within it."""
    for name, hint in get_type_hints(record, include_extras=True).items():
        at = (*path, name)
        kind, *notes = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        for note in notes:
            if isinstance(note, table.Metric):
                steps, of_map = ((*at, EACH), (note.label,)) if note.label else (at, ())
                yield Entry(note.name, note.kind, ".".join(steps), note.help, (*labels, *of_map))
            elif isinstance(note, Each):
                yield from entries(get_args(kind)[0], (*at, EACH), (*labels, note.label))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from entries(kind, at, labels)


METRICS = tuple(entries(StoreStats))


def render(stats: Callable[[], StoreStats]) -> bytes:
    """Every metric in Prometheus' text format, as of now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(stats))
    return generate_latest(registry)


def samples(value: Any, path: str, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers at `path` with the labels met on the way. A list at its end counts its items; None is no sample."""
    if not path:
        if isinstance(value, list):
            yield labels, len(value)
        elif value is not None:
            yield labels, value
        return
    step, _, rest = path.partition(".")
    if step != EACH:
        yield from samples(getattr(value, step), rest, labels)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from samples(item, rest, (*labels, str(key)))
    else:
        for item in value:
            yield from samples(item, rest, (*labels, item.name))


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for entry in METRICS:
            family = CounterMetricFamily if entry.kind is Kind.COUNTER else GaugeMetricFamily
            metric = family(entry.name, entry.help, labels=entry.labels)
            for labels, value in samples(stats, entry.path):
                metric.add_metric(labels, value)
            yield metric
