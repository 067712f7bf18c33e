"""The connector's counters in the forms that vLLM wants: records between processes, a line in its log, Prometheus.

`counters` has the table of what is counted. A metric that is added there appears here by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvtally.vllm.counters import BYTES, COUNTS, DURATIONS, LOAD, SAVE, Count, Counters, Duration
from kvtally.vllm.worker import Results

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kvtally_"
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class ConnectorStats(KVConnectorStats):
    """`data` holds the two mappings of `Counters` under their names."""

    @property
    def counters(self) -> Counters:
        return Counters(self.data.setdefault("counts", {}), self.data.setdefault("seconds", {}))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.counters.add(other.data.get("counts", {}), other.data.get("seconds", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.counters.summary()

    def is_empty(self) -> bool:
        return self.counters.is_empty


def stats_of(counters: Counters) -> ConnectorStats | None:
    """The record that vLLM carries away; None, which costs nothing, if nothing happened."""
    return None if counters.is_empty else ConnectorStats({"counts": counters.counts, "seconds": counters.seconds})


def results_counters(results: Results) -> Counters:
    """The counters of one worker's step."""
    counters = Counters()
    counters.count(BYTES, "load", sum(report.moved_bytes for report in results.loads.values()))
    counters.count(BYTES, "save", results.saved_bytes)
    counters.observe(LOAD, *(report.seconds for report in results.loads.values()))
    counters.observe(SAVE, *results.save_seconds)
    return counters


class PrometheusMetrics(KVConnectorPromMetrics):
    """`vllm:kvtally_*` on vLLM's own /metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {metric.name: self._counter(metric) for metric in COUNTS}
        self._histograms = {metric.name: self._histogram(metric) for metric in DURATIONS}
        for labels in per_engine_labelvalues.values():
            for metric in COUNTS:
                for value in metric.values:
                    self._counters[metric.name].labels(*labels, value)
            for histogram in self._histograms.values():
                histogram.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.get("counts", {}).items():
            for value, amount in values.items():
                self._counters[name].labels(*labels, value).inc(amount)
        for name, observations in transfer_stats_data.get("seconds", {}).items():
            histogram = self._histograms[name].labels(*labels)
            for seconds in observations:
                histogram.observe(seconds)

    def _counter(self, metric: Count) -> Any:
        return self._counter_cls(
            name=f"{PREFIX}{metric.name}", documentation=metric.text, labelnames=[*self._labelnames, metric.label]
        )

    def _histogram(self, metric: Duration) -> Any:
        return self._histogram_cls(
            name=f"{PREFIX}{metric.name}",
            documentation=metric.text,
            labelnames=self._labelnames,
            buckets=list(BUCKETS_S),
        )
