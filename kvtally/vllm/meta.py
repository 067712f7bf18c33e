"""What the two halves of the connector tell each other, once per engine step. Plain records; vLLM carries them.

scheduler half ──Metadata: loads, saves──▶ worker half
scheduler half ◀──WorkerReport: what was saved, how loads went── worker half (of all ranks, added up)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtally.handles import SharedLease


@dataclass(slots=True)
class LoadJob:
    """Bring everything below `hit_tokens` that the engine does not have into these blocks."""

    request: str
    lease: SharedLease
    ends: list[int]
    hit_tokens: int
    have_tokens: int
    tables: list[list[int]]  # for each group the request's block ids, from the first token on


@dataclass(slots=True)
class SaveItem:
    """One object: the bytes of these blocks of one group, on whichever rank carries it out."""

    chain: bytes
    parent: bytes
    start_tokens: int
    end_tokens: int
    group: int
    block_ids: list[int]


@dataclass(slots=True)
class SaveJob:
    """Objects whose blocks are held for this job until every rank has reported it."""

    id: int
    items: list[SaveItem]


@dataclass(slots=True)
class Metadata(KVConnectorMetadata):
    loads: list[LoadJob] = field(default_factory=list)
    early_loads: list[LoadJob] = field(default_factory=list)  # these need not wait for the step: it touches no block
    saves: list[SaveJob] = field(default_factory=list)  # of what this step computes
    late_saves: list[SaveJob] = field(default_factory=list)  # of finished requests: these need not wait for the step
    is_idle: bool = False  # nothing is computed in this step: the engine only waits for transfers


@dataclass(slots=True)
class LoadReport:
    """How the load of one rank, or of several together, went. `reason` is empty on success."""

    moved_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    ranks: int = 1
    verified: bool = False  # checksums were compared, and all matched

    def add(self, other: LoadReport) -> LoadReport:
        return LoadReport(
            self.moved_bytes + other.moved_bytes,
            max(self.seconds, other.seconds),
            self.reason or other.reason,
            self.ranks + other.ranks,
            self.verified and other.verified,
        )


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """One step's news from the workers.

    `saved` counts the ranks that are done with a save job, `stored` those which have all of it in the store. `lost`:
    why something of a job will not be there.
    """

    saved: dict[int, int] = field(default_factory=dict)
    saved_bytes: int = 0
    loads: dict[str, LoadReport] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        saved = dict(Counter(self.saved) + Counter(other.saved))
        stored = dict(Counter(self.stored) + Counter(other.stored))
        loads = dict(self.loads)
        for request, report in other.loads.items():
            loads[request] = loads[request].add(report) if request in loads else report
        return WorkerReport(saved, self.saved_bytes + other.saved_bytes, loads, stored, {**other.lost, **self.lost})
