"""The router's metrics: a table of names, kinds and help texts, and where each value is read. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtally.router.book import Book
from kvtally.router.fleet import Fleet
from kvtally.router.stores import Stores

Sample = tuple[tuple[str, ...], float]


class Known(NamedTuple):
    """Everything that the router knows and tells: in its metrics, and on its own paths."""

    book: Book
    fleet: Fleet
    stores: Stores
    lost_lines: Callable[[], int]


class Entry(NamedTuple):
    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Known], Iterable[Sample]]

    @property
    def exported_name(self) -> str:
        return f"{self.name}_total" if self.kind is CounterMetricFamily else self.name


def _by_label(counts: dict[str, int]) -> Iterator[Sample]:
    return (((label,), count) for label, count in counts.items())


COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
METRICS: tuple[Entry, ...] = (
    Entry(
        "kvtally_router_verdicts",
        COUNTER,
        "Responses by what was proved of their reuse.",
        ("verdict",),
        lambda at: _by_label(at.book.verdicts),
    ),
    Entry(
        "kvtally_router_requests",
        COUNTER,
        "Requests by the status they ended with; 499: the client left.",
        ("status",),
        lambda at: (((str(status),), count) for status, count in at.book.statuses.items()),
    ),
    Entry(
        "kvtally_router_prompt_tokens",
        COUNTER,
        "Prompt tokens by where decode had them from; computed: not reused.",
        ("source",),
        lambda at: _by_label(at.book.tokens),
    ),
    Entry(
        "kvtally_router_moved_bytes",
        COUNTER,
        "Bytes that decode instances loaded.",
        (),
        lambda at: [((), at.book.moved_bytes)],
    ),
    Entry(
        "kvtally_router_prefill_skipped",
        COUNTER,
        "Requests that prefill did not see, by why.",
        ("reason",),
        lambda at: _by_label(at.book.skipped),
    ),
    Entry(
        "kvtally_router_retries",
        COUNTER,
        "Legs that were tried again with another instance.",
        ("leg",),
        lambda at: _by_label(at.book.retries),
    ),
    Entry(
        "kvtally_router_cut",
        COUNTER,
        "Answers that broke off after their first byte.",
        (),
        lambda at: [((), at.book.cut)],
    ),
    Entry(
        "kvtally_router_dropped",
        COUNTER,
        "Fields and headers that clients sent and may not set.",
        ("name",),
        lambda at: _by_label(at.book.dropped),
    ),
    Entry(
        "kvtally_router_instance_up",
        GAUGE,
        "Whether an instance is up.",
        ("instance",),
        lambda at: (((name,), member.is_up) for name, member in at.fleet.members.items()),
    ),
    Entry(
        "kvtally_router_instance_draining",
        GAUGE,
        "Whether an instance gets no new requests.",
        ("instance",),
        lambda at: (((name,), member.is_draining) for name, member in at.fleet.members.items()),
    ),
    Entry(
        "kvtally_router_instance_requests",
        GAUGE,
        "Requests in flight to an instance.",
        ("instance",),
        lambda at: (((name,), member.legs) for name, member in at.fleet.members.items()),
    ),
    Entry(
        "kvtally_router_store_connected",
        GAUGE,
        "Whether receipts can be read from a store.",
        ("store",),
        lambda at: (((address,), not reader.problem) for address, reader in at.stores.readers.items()),
    ),
    Entry(
        "kvtally_router_pulls",
        COUNTER,
        "Pulls from a store by engines that use another one; ok, or why the store could not be asked.",
        ("store", "result"),
        lambda at: (
            ((store, result), count)
            for store, pulls in at.stores.pulls.items()
            for result, count in {"ok": pulls.count, **pulls.failures}.items()
        ),
    ),
    Entry(
        "kvtally_router_foreign_addresses",
        COUNTER,
        "Hand-offs that name a store which is no configured instance's; decode is not told of it.",
        (),
        lambda at: [((), at.stores.foreign)],
    ),
    Entry(
        "kvtally_router_log_lines_lost",
        COUNTER,
        "Request log lines dropped because nobody read them.",
        (),
        lambda at: [((), at.lost_lines())],
    ),
)


def render(known: Known) -> bytes:
    """Every metric in Prometheus' text format, as of now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(known))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, known: Known) -> None:
        self._known = known

    def collect(self) -> Iterator[Metric]:
        for entry in METRICS:
            metric = entry.kind(entry.name, entry.help, labels=entry.labels)
            for labels, value in entry.samples(self._known):
                metric.add_metric(labels, value)
            yield metric
