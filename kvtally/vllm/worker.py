"""The worker half: one thread per rank that copies between engine blocks and arena slots, and verifies.

    LoadJob ─▶ slots of the lease ─▶ copy and verify ─▶ finished, or failed with a reason (vLLM then recomputes)
    SaveJob ─▶ put begin ─▶ copy ─▶ commit ─▶ reported, blocks let go

The engine's thread only puts jobs into the queue and collects results. It puts in a save only after the step's forward
has returned without an error, so a step that died publishes nothing; a rank that failed alone makes no hit either,
because a hit needs every rank. Owns the rank's client and its view of engine memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtally.client import Miss, Put, StoreClient
from kvtally.core.geometry import GroupLayout, chunk_block_range, needed_blocks, runs, validate
from kvtally.device import Device, cpu
from kvtally.handles import ReadSlot
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.meta import LoadJob, LoadReport, SaveItem, SaveJob
from kvtally.wire.messages import MissReason, PutObject, PutStatus

log = logging.getLogger("kvtally.vllm")

IDLE_S = 0.2
CALL_S = 2.0  # how long one question to the store may take a load or a save


@dataclass(slots=True)
class Results:
    """What became ready since it was last collected."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    saved_bytes: int = 0
    save_seconds: list[float] = field(default_factory=list)
    loads: dict[str, LoadReport] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)  # as `saved`: those of which nothing is missing in the store


class WorkerHalf:
    """`connect` makes this rank's client; it is called in the thread that uses it."""

    def __init__(self, layout: EngineLayout, rank: int, connect: Callable[[], StoreClient]) -> None:
        self._layout = layout
        self._rank = rank
        self._connect = connect
        self._layouts: list[GroupLayout] = []
        self._memory: object = None
        self._device: Device[Any] = cpu
        self._commands: queue.SimpleQueue[Callable[[StoreClient], None] | None] = queue.SimpleQueue()
        self._news = threading.Condition()  # guards what follows; told whenever a job is done
        self._unfinished = 0  # jobs given and not done
        self._results = Results()
        self._thread = threading.Thread(target=self._run, name="kvtally-worker", daemon=True)

    def register(self, layouts: list[GroupLayout], memory: object, device: Device[Any]) -> None:
        """Engine memory is known: check it against the namespace and start to work."""
        validate(self._layout.namespace, {self._rank: layouts})
        self._layouts, self._memory, self._device = layouts, memory, device
        self._thread.start()

    # ---- the engine's thread

    def load(self, jobs: list[LoadJob]) -> None:
        """Called after the step was launched: blocks to be loaded may still be zeroed by it."""
        for job in jobs:
            self._give(partial(self._load, job, self._device.fence()))

    def save(self, jobs: list[SaveJob]) -> None:
        """Called after the step was launched: blocks to be saved may still be written by it."""
        for job in jobs:
            self._give(partial(self._save, job, self._device.fence()))

    def _give(self, command: Callable[[StoreClient], None]) -> None:
        with self._news:
            self._unfinished += 1
        self._commands.put(command)

    def collect(self, wait_s: float = 0.0) -> Results:
        """What became ready; with nothing ready and jobs under way, wait at most so long for the next."""
        with self._news:
            if wait_s and self._unfinished and not (self._results.finished or self._results.saved):
                self._news.wait(wait_s)
            results, self._results = self._results, Results()
        return results

    def stop(self, timeout_s: float = 5.0) -> None:
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        client = self._connect()
        while True:
            try:
                command = self._commands.get(timeout=IDLE_S)
            except queue.Empty:
                client.poll()
                continue
            if command is None:
                break
            try:
                command(client)
            except Exception:  # the supervisor's edge; each command has settled its own job by then
                log.exception("a transfer failed")
        client.close()

    def _load(self, job: LoadJob, fence: Callable[[], None], client: StoreClient) -> None:
        begun = time.monotonic()
        report = LoadReport(reason=MissReason.STORE_UNREACHABLE)
        try:
            fence()
            report = self._load_all(client, job)
        finally:  # whatever happened, vLLM waits for this request's name
            report.seconds = time.monotonic() - begun
            with self._news:
                self._unfinished -= 1
                self._news.notify()
                self._results.finished.add(job.request)
                self._results.loads[job.request] = report
                if report.reason:
                    self._results.failed.add(job.request)

    def _load_all(self, client: StoreClient, job: LoadJob) -> LoadReport:
        lease = client.adopt(job.lease)
        slots = client.slots(lease, rank=self._rank, timeout_s=CALL_S).wait()
        if isinstance(slots, Miss):
            return LoadReport(reason=slots.reason)
        report = LoadReport(verified=lease.session.verify_reads)
        loaded: set[tuple[int, int]] = set()
        for slot in slots:
            moved = self._load_slot(client, job, slot)
            if isinstance(moved, Miss):
                client.release([lease])  # reports what did not verify
                return LoadReport(report.moved_bytes, reason=moved.reason)
            report.moved_bytes += moved
            loaded.add((slot.index, slot.key.group))
        missing = self._wanted(job) - loaded
        if missing:  # the lease does not cover what was promised: never leave a block unwritten
            return LoadReport(report.moved_bytes, reason=MissReason.ABSENT)
        return report

    def _load_slot(self, client: StoreClient, job: LoadJob, slot: ReadSlot) -> int | Miss:
        group = slot.key.group
        ids, skip = self._targets(job, slot.index, group)
        if not ids:
            return 0
        where = runs(self._layouts[group], ids, skip_blocks=skip)
        seed = slot.seed if slot.lease.session.verify_reads else None
        checksum = self._device.load(slot.pieces, self._memory, where, seed)
        return client.accept(slot, checksum) or int(where.lengths.sum())

    def _targets(self, job: LoadJob, index: int, group: int) -> tuple[list[int], int]:
        """The blocks that this object is to be written to, and how many of its leading blocks are not."""
        spec = self._layout.groups[group]
        start, end = job.ends[index - 1] if index else 0, job.ends[index]
        whole = chunk_block_range(spec, start, end)
        part = needed_blocks(spec, start, end, hit_tokens=job.hit_tokens, have_tokens=job.have_tokens)
        return job.tables[group][part.start : part.stop], part.start - whole.start

    def _wanted(self, job: LoadJob) -> set[tuple[int, int]]:
        return {
            (index, group)
            for index in range(len(job.ends))
            for group in range(len(self._layout.groups))
            if self._targets(job, index, group)[0]
        }

    def _save(self, job: SaveJob, fence: Callable[[], None], client: StoreClient) -> None:
        begun = time.monotonic()
        saved_bytes, is_stored = 0, False
        try:
            fence()
            saved_bytes, is_stored = self._save_all(client, job)
        finally:  # whatever happened, the job's blocks are let go
            with self._news:
                self._unfinished -= 1
                self._news.notify()
                self._results.saved[job.id] = 1
                self._results.saved_bytes += saved_bytes
                self._results.save_seconds.append(time.monotonic() - begun)
                if is_stored:
                    self._results.stored[job.id] = 1

    def _save_all(self, client: StoreClient, job: SaveJob) -> tuple[int, bool]:
        """How many bytes were saved, and whether the store now has everything of the job."""
        puts = client.put_begin([self._object(item) for item in job.items], timeout_s=CALL_S).wait()
        if isinstance(puts, Miss):
            return 0, False
        is_whole = all(put.status in (PutStatus.WRITE, PutStatus.PRESENT) for put in puts)
        commit: list[tuple[Put, int]] = []
        for item, put in zip(job.items, puts, strict=True):
            if put.status is PutStatus.WRITE:
                where = runs(self._layouts[item.group], item.block_ids)
                checksum = self._device.save(self._memory, where, put.pieces, put.seed)
                assert checksum is not None
                commit.append((put, checksum))
        if not commit:
            return 0, is_whole
        ended = client.put_end(commit=commit, timeout_s=CALL_S).wait()
        if isinstance(ended, Miss):
            return 0, False
        saved_bytes = sum(put.length_bytes for put, _ in commit if put.id not in ended.rejected)
        return saved_bytes, is_whole and not ended.rejected

    def _object(self, item: SaveItem) -> PutObject:
        blocks = len(item.block_ids)
        length = blocks * self._layout.groups[item.group].block_bytes()
        return PutObject(item.chain, item.parent, item.start_tokens, item.end_tokens, item.group, self._rank, length)
