"""What the two halves of the connector send each other in each engine step. Plain records, which vLLM carries.

scheduler half ──StepJobs: loads, saves──▶ worker half
scheduler half ◀──WorkerReport: what was saved, how loads went── worker halves of all ranks, added up
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtally.client import SharedLease


@dataclass(slots=True)
class LoadJob:
    """Bring everything below `hit_tokens` that the engine does not have yet into these blocks."""

    request: str
    lease: SharedLease
    ends: list[int]
    hit_tokens: int
    have_tokens: int
    tables: list[list[int]]  # each group's block ids of the request, from its first token


@dataclass(slots=True)
class SaveItem:
    """One object: the bytes of these blocks of one group. Each rank saves its own."""

    chain: bytes
    parent: bytes
    start_tokens: int
    end_tokens: int
    group: int
    block_ids: list[int]


@dataclass(slots=True)
class SaveJob:
    """Objects to save. Their blocks are held until every rank has reported the job."""

    id: int
    items: list[SaveItem]


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):
    loads: list[LoadJob] = field(default_factory=list)
    early_loads: list[LoadJob] = field(default_factory=list)  # need not wait for the step, which touches no block
    saves: list[SaveJob] = field(default_factory=list)  # of blocks that this step computes
    late_saves: list[SaveJob] = field(default_factory=list)  # of finished requests: need not wait for the step
    is_idle: bool = False  # the step computes nothing: the engine only waits for transfers


@dataclass(slots=True)
class LoadReport:
    """How a load went on one rank, or on several together. `reason` is empty on success."""

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
    """One step's news from the workers. Save jobs are named by their ids, loads by their requests.

    `saved`: how many ranks are done with a job. `stored`: how many of them have all of it in the store. `lost`: why
    some of a job will not be there.
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
