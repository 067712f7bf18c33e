"""The metrics table: every metric a store exports, and where in its stats tree it is read.

Owns names, kinds, help texts and labels. Counts nothing: the store's own counters are read when somebody scrapes, so
there is no second account that could differ. Neighbours: `admin` (serves the text), `Store.stats` (the tree).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

EACH = "*"  # path step: every item of a list (labelled by its name) or of a map (labelled by its key)

Stats = dict[str, object]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric. `path` leads to its value; each `EACH` on the way gives one of `labels`."""

    name: str
    kind: Kind
    path: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Entry, ...] = (
    Entry("kvtally_uptime_seconds", Kind.GAUGE, "uptime_s", "Time since the store started."),
    Entry("kvtally_arena_capacity_bytes", Kind.GAUGE, "arena.capacity_bytes", "Size of the host arena."),
    Entry("kvtally_arena_populated_bytes", Kind.GAUGE, "server.populated_bytes", "Bytes of the arena pre-faulted."),
    Entry("kvtally_arena_used_bytes", Kind.GAUGE, "arena.used_bytes", "Bytes of the arena in use."),
    Entry("kvtally_arena_limbo_bytes", Kind.GAUGE, "arena.limbo_bytes", "Bytes a lost writer may still be writing to."),
    Entry("kvtally_arena_staging_bytes", Kind.GAUGE, "arena.staging_bytes", "Bytes on their way up from lower tiers."),
    Entry("kvtally_arena_held_bytes", Kind.GAUGE, "arena.held_bytes", "Bytes held for requests that wait."),
    Entry("kvtally_arena_objects", Kind.GAUGE, "arena.objects", "Objects in the arena."),
    Entry("kvtally_arena_evicted", Kind.COUNTER, "arena.evicted", "Objects evicted from the arena."),
    Entry("kvtally_tier_capacity_bytes", Kind.GAUGE, "tiers.*.capacity_bytes", "Size of a lower tier.", ("tier",)),
    Entry("kvtally_tier_used_bytes", Kind.GAUGE, "tiers.*.used_bytes", "Bytes a lower tier holds.", ("tier",)),
    Entry("kvtally_tier_queued_bytes", Kind.GAUGE, "tiers.*.queued_bytes", "Bytes waiting to be written.", ("tier",)),
    Entry("kvtally_tier_objects", Kind.GAUGE, "tiers.*.objects", "Objects a lower tier holds.", ("tier",)),
    Entry("kvtally_tier_evicted", Kind.COUNTER, "tiers.*.evicted", "Objects evicted from a lower tier.", ("tier",)),
    Entry("kvtally_tier_reads", Kind.COUNTER, "tiers.*.reads", "Objects read from a lower tier.", ("tier",)),
    Entry("kvtally_tier_read_bytes", Kind.COUNTER, "tiers.*.read_bytes", "Bytes read from a lower tier.", ("tier",)),
    Entry("kvtally_tier_read_seconds", Kind.COUNTER, "tiers.*.read_seconds", "Time spent reading.", ("tier",)),
    Entry("kvtally_tier_read_speed_bytes", Kind.GAUGE, "tiers.*.read_bytes_s", "Bytes read per second.", ("tier",)),
    Entry(
        "kvtally_prefetched",
        Kind.COUNTER,
        "tiers.*.prefetched.*",
        "Leases that needed staging, by what became of them.",
        ("tier", "outcome"),
    ),
    Entry(
        "kvtally_prefetched_bytes",
        Kind.COUNTER,
        "tiers.*.prefetched_bytes.*",
        "Bytes staged for them.",
        ("tier", "outcome"),
    ),
    Entry("kvtally_hidden_seconds", Kind.COUNTER, "tiers.*.hidden_seconds", "Staging nobody waited for.", ("tier",)),
    Entry("kvtally_exposed_seconds", Kind.COUNTER, "tiers.*.exposed_seconds", "Staging an engine awaited.", ("tier",)),
    Entry("kvtally_tier_writes", Kind.COUNTER, "tiers.*.writes", "Objects written to a lower tier.", ("tier",)),
    Entry("kvtally_tier_write_bytes", Kind.COUNTER, "tiers.*.write_bytes", "Bytes written to a tier.", ("tier",)),
    Entry("kvtally_tier_write_seconds", Kind.COUNTER, "tiers.*.write_seconds", "Time spent writing.", ("tier",)),
    Entry("kvtally_tier_dropped", Kind.COUNTER, "tiers.*.dropped", "Objects a tier could not take.", ("tier",)),
    Entry(
        "kvtally_tier_postponed",
        Kind.GAUGE,
        "tiers.*.postponed",
        "Objects that wait for a slow or failing tier.",
        ("tier",),
    ),
    Entry("kvtally_tier_errors", Kind.COUNTER, "tiers.*.errors.*", "Failures of a lower tier.", ("tier", "code")),
    Entry("kvtally_lookups", Kind.COUNTER, "lookups.total", "Lookups answered."),
    Entry("kvtally_lookup_hits", Kind.COUNTER, "lookups.hits", "Lookups that found something to reuse."),
    Entry("kvtally_lookup_hit_tokens", Kind.COUNTER, "lookups.hit_tokens", "Tokens found."),
    Entry("kvtally_lookup_asked_tokens", Kind.COUNTER, "lookups.asked_tokens", "Tokens asked for."),
    Entry("kvtally_lookups_waiting", Kind.GAUGE, "lookups.waiting", "Lookups that wait for pending objects."),
    Entry("kvtally_lookup_misses", Kind.COUNTER, "lookups.misses.*", "Why hits were not longer.", ("reason",)),
    Entry("kvtally_puts_begun", Kind.COUNTER, "puts.begun", "Writes begun."),
    Entry("kvtally_puts_committed", Kind.COUNTER, "puts.committed", "Writes committed."),
    Entry("kvtally_puts_aborted", Kind.COUNTER, "puts.aborted", "Writes aborted by their client or its death."),
    Entry("kvtally_puts_expired", Kind.COUNTER, "puts.expired", "Writes not committed in time."),
    Entry("kvtally_puts_rejected", Kind.COUNTER, "puts.rejected", "Commits that came too late."),
    Entry("kvtally_puts_full", Kind.COUNTER, "puts.full", "Writes for which there was no room."),
    Entry("kvtally_put_bytes", Kind.COUNTER, "puts.bytes", "Bytes committed."),
    Entry("kvtally_staged_objects", Kind.COUNTER, "staged.objects", "Objects brought up from lower tiers."),
    Entry("kvtally_staged_bytes", Kind.COUNTER, "staged.bytes", "Bytes brought up from lower tiers."),
    Entry("kvtally_leases_open", Kind.GAUGE, "leases.open", "Leases held by clients."),
    Entry("kvtally_leases_waiting", Kind.GAUGE, "leases.waiting", "Leases that wait for room in the arena."),
    Entry("kvtally_leases_expired", Kind.COUNTER, "leases.expired", "Leases not released in time."),
    Entry("kvtally_clients", Kind.GAUGE, "clients", "Connected clients."),
    Entry("kvtally_namespaces", Kind.GAUGE, "namespaces", "Namespaces known."),
    Entry("kvtally_receipts", Kind.GAUGE, "receipts", "Receipts kept."),
    Entry(
        "kvtally_quarantined", Kind.COUNTER, "quarantined.count.*", "Objects with wrong bytes, by where.", ("where",)
    ),
    Entry("kvtally_refused", Kind.COUNTER, "refused.*", "Requests refused.", ("code",)),
    Entry("kvtally_connections_ended", Kind.COUNTER, "server.ended.*", "Connections ended by the store.", ("code",)),
)


def render(stats: Callable[[], Stats]) -> bytes:
    """Every metric in Prometheus' text format, as of now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(stats))
    return generate_latest(registry)


def samples(value: object, path: str, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers at `path` with the labels met on the way. A list at its end counts its items; None is no sample."""
    if not path:
        if isinstance(value, list):
            yield labels, len(value)
        elif isinstance(value, int | float):
            yield labels, value
        return
    step, _, rest = path.partition(".")
    if step == EACH and isinstance(value, dict):
        for key, item in value.items():
            yield from samples(item, rest, (*labels, str(key)))
    elif step == EACH and isinstance(value, list):
        for item in value:
            yield from samples(item, rest, (*labels, str(item["name"])))
    elif isinstance(value, dict):
        yield from samples(value[step], rest, labels)


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for entry in METRICS:
            family = CounterMetricFamily if entry.kind is Kind.COUNTER else GaugeMetricFamily
            metric = family(entry.name, entry.help, labels=entry.labels)
            for labels, value in samples(stats, entry.path):
                metric.add_metric(labels, value)
            yield metric
