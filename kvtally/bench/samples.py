"""Samples: what a worker measured, by name, and the one number that each name comes to.

Neighbours: `store` (left: takes samples in an order that is fair), `report` (right: what the numbers mean).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from kvtally.bench.processes import Worker
from kvtally.bench.report import Latency
from kvtally.bench.tasks import Task


class Samples:
    """Seconds by name, in the blocks in which a worker told them."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._blocks: dict[str, list[list[float]]] = defaultdict(list)

    def take(self, name: str, task: Task) -> None:
        self._blocks[name].append(self.worker.ask(task))

    def take_each(self, names: Sequence[str], task: Task) -> None:
        """Several times of one task, each under a name of its own."""
        for name, seconds in zip(names, self.worker.ask(task), strict=True):
            self._blocks[name].append([seconds])

    def gbps(self, name: str, size_bytes: int) -> float:
        return size_bytes / min(self._all(name)) / 1e9

    def median_gbps(self, name: str, size_bytes: int) -> float:
        return size_bytes / statistics.median(self._all(name)) / 1e9

    def latency(self, name: str) -> Latency:
        ordered = self._all(name)
        return Latency(
            quiet_ms=min(map(statistics.median, self._blocks[name])) * 1e3,
            median_ms=statistics.median(ordered) * 1e3,
            p99_ms=ordered[int(0.99 * len(ordered))] * 1e3,
        )

    def _all(self, name: str) -> list[float]:
        return sorted(seconds for block in self._blocks[name] for seconds in block)
