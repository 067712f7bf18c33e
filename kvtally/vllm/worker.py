"""The worker half: one thread per rank that copies between engine blocks and arena slots, and verifies.

    LoadJob ─▶ slots of the lease ─▶ copy and verify ─▶ finished, or failed with a reason (vLLM then recomputes)
    SaveJob ─▶ put begin ─▶ copy ─▶ commit ─▶ reported, blocks let go

The engine's thread only puts jobs into the queue and collects results. It puts in a save only after the step's forward
has returned without an error, so a step that died publishes nothing; a rank that failed alone makes no hit either,
because a hit needs every rank.

Jobs are generators (`device`). Loads take turns (`core.turns`), and while the one before has all its copies under way,
the next begins; saves go one after the other, when loads have nothing to do or have had their turns. Owns the rank's
client and its view of engine memory.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, TypeVar

from kvtally.client import Call, Miss, ReadSlot, StoreClient
from kvtally.core.geometry import GroupLayout, chunk_block_range, needed_blocks, object_length, validate
from kvtally.core.turns import Turns
from kvtally.device import Checksums, Device, Move, Steps, cpu
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.step_jobs import LoadJob, LoadReport, SaveItem, SaveJob, StepJobs
from kvtally.wire.messages import MissReason, PutObject, PutStatus

log = logging.getLogger("kvtally.vllm")

IDLE_S = 0.2
CONNECT_S = 2.0
SAVE_PAUSE_S = 0.002  # at least, between two looks at copies: nobody waits for them, and each disturbs the engine
ANSWER_PAUSE_S = 0.0001  # between two looks for the store's answer, while other jobs go on
MOST_LOAD_TURNS = 4  # without one for a save
# While the engine's thread prepares and launches a step, this one leaves the interpreter to it, so long at most, and
# then while that launches what chooses the next tokens: what is queued keeps the bus busy for longer.
QUIET_S = 0.002
SAMPLING_S = 0.001
BEGIN_S = 0.001  # how long an engine that has nothing to compute waits until its load is on the way

R = TypeVar("R")

Job = Generator[float, None, None]  # it yields how long there is nothing to do for it


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
    lost: dict[int, str] = field(default_factory=dict)  # those of which something will be missing, and why


def refused(jobs: StepJobs) -> Results:
    """What a worker answers that serves without reuse, because only it knows why it must: the scheduler half waits."""
    loads = [load.request for load in (*jobs.loads, *jobs.early_loads)]
    saves = [save.id for save in (*jobs.saves, *jobs.late_saves)]
    return Results(
        finished=set(loads),
        failed=set(loads),
        loads={request: LoadReport(reason=MissReason.REFUSED) for request in loads},
        saved=dict.fromkeys(saves, 1),
        lost=dict.fromkeys(saves, str(MissReason.REFUSED)),
    )


class Saved(NamedTuple):
    """What became of a save job. It is neither stored nor lost while somebody else is writing the same."""

    saved_bytes: int = 0
    is_stored: bool = False
    lost: str = ""


class WorkerHalf:
    """`connect` makes this rank's client; it is called in the thread that uses it."""

    def __init__(self, layout: EngineLayout, rank: int, connect: Callable[[], StoreClient]) -> None:
        self._layout = layout
        self._rank = rank
        self._connect = connect
        self._layouts: list[GroupLayout] = []
        self._memory: object = None
        self._device: Device[Any, Any] = cpu
        self._jobs: queue.SimpleQueue[tuple[LoadJob | SaveJob, Any] | None] = queue.SimpleQueue()
        self._loads: Turns[Job] = Turns()
        self._saves: deque[Job] = deque()
        self._load_turns = 0
        self._pause_s = 0.0
        # Set by the engine's first step: while it still captures CUDA graphs, other threads must leave CUDA alone.
        self._is_serving = False
        self._quiet_until_s = 0.0
        self._is_launched = threading.Event()  # the last step that was prepared
        self._is_launched.set()
        self._has_begun = threading.Event()  # some load, since it was last cleared
        self._news = threading.Condition()  # guards what follows; told whenever a job is done
        self._unfinished = 0  # jobs given and not done
        self._results = Results()
        self._has_told = False  # of a load that has ended, the last time
        self._was_refused = False  # a save, and that was said
        self._thread = threading.Thread(target=self._run, name="kvtally-worker", daemon=True)

    def register(self, layouts: list[GroupLayout], memory: object, device: Device[Any, Any]) -> None:
        """Engine memory is known: check it against the namespace and start to work."""
        validate(self._layout.namespace, {self._rank: layouts})
        self._layouts, self._memory, self._device = layouts, memory, device
        self._thread.start()

    # ---- the engine's thread

    def prepare(self) -> None:
        """A step begins; it is launched when `collect` is called."""
        self._is_launched.clear()
        self._quiet_until_s = time.monotonic() + QUIET_S

    def load(self, jobs: list[LoadJob]) -> None:
        """Called after the step was launched, if that touches any block: those to be loaded may be zeroed by it."""
        self._give(jobs)

    def load_first(self, jobs: list[LoadJob]) -> None:
        """Called at the beginning of a step that touches no block. What is left of it is done while bytes are on their
        way: the thread would not get the interpreter before its end."""
        if jobs:
            self._has_begun.clear()
            self._give(jobs)
            self._has_begun.wait(BEGIN_S)

    def save(self, jobs: list[SaveJob]) -> None:
        """Called after the step was launched: blocks to be saved may still be written by it."""
        self._give(jobs)

    def _give(self, jobs: Sequence[LoadJob | SaveJob]) -> None:
        if not jobs:
            return
        fence = self._device.fence()
        with self._news:
            self._unfinished += len(jobs)
        for job in jobs:
            self._jobs.put((job, fence))

    def collect(self, wait_s: float = 0.0) -> Results:
        """What became ready; with nothing ready and jobs under way, wait at most so long for the next. Not right after
        a load has ended: vLLM may hear of that only when this step is over too."""
        self._is_serving = True
        if not self._is_launched.is_set():
            self._quiet_until_s = time.monotonic() + SAMPLING_S
            self._is_launched.set()
        with self._news:
            is_ready = self._results.finished or self._results.saved or self._has_told
            if wait_s and self._unfinished and not is_ready:
                self._news.wait(wait_s)
            results, self._results = self._results, Results()
            self._has_told = bool(results.finished)
        return results

    def finish_saves(self, timeout_s: float) -> Results:
        """Wait until no job is under way, at most so long, and say what became of saves. Loads, and what is counted,
        are left to `collect`."""
        self._is_launched.set()
        self._quiet_until_s = 0.0
        with self._news:
            self._news.wait_for(lambda: self._unfinished == 0, timeout_s)
            taken = Results(saved=self._results.saved, stored=self._results.stored, lost=self._results.lost)
            self._results.saved, self._results.stored, self._results.lost = {}, {}, {}
        return taken

    def stop(self, timeout_s: float = 5.0) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        client = self._connect()
        client.connect(CONNECT_S)  # else the first load, right after the start, finds no session to read through
        while self._take(client):
            self._keep_quiet()
            try:
                self._round(client)
            except Exception:  # the supervisor's edge: jobs go on in the next round
                log.exception("the arena could not be looked after")
        self._device.pin(None)
        client.close()

    def _keep_quiet(self) -> None:
        """While the engine's thread has a step to launch; through one step at most."""
        now_s = time.monotonic()
        deadline_s = now_s + QUIET_S + SAMPLING_S
        while (until_s := min(self._quiet_until_s, deadline_s)) > now_s:
            if self._is_launched.is_set():
                time.sleep(until_s - now_s)
            else:
                self._is_launched.wait(until_s - now_s)
            now_s = time.monotonic()

    def _round(self, client: StoreClient) -> None:
        """A turn for one load, and for a save if loads have nothing to do or have had enough."""
        if self._loads or self._saves:
            pause_s = self._load_some()
            self._has_begun.set()
            self._load_turns = self._load_turns + 1 if pause_s == 0 else MOST_LOAD_TURNS
            if self._load_turns >= MOST_LOAD_TURNS:
                self._load_turns = 0
                self._pause_s = min(pause_s, self._save_some())
        else:
            client.poll()
        if self._is_serving:
            self._device.pin(client.arena)

    def _load_some(self) -> float:
        """Whoever has something to do does it; else how long nobody has."""
        pause_s = math.inf
        for load in self._loads.order():
            next_s = self._turn(load)
            if next_s is None:
                self._loads.remove(load)
            if not next_s:
                self._loads.took()
                return 0.0
            pause_s = min(pause_s, next_s)
        return pause_s

    def _save_some(self) -> float:
        if not self._saves:
            return math.inf
        next_s = self._turn(self._saves[0])
        if next_s is None:
            self._saves.popleft()
        return next_s or 0.0

    def _take(self, client: StoreClient) -> bool:
        """New jobs, waited for as long as there is nothing to do; False when asked to stop."""
        pause_s = self._pause_s if self._loads or self._saves else IDLE_S
        self._pause_s = 0.0
        try:
            given = self._jobs.get(timeout=pause_s) if pause_s else self._jobs.get_nowait()
            while given is not None:
                job, fence = given
                if isinstance(job, LoadJob):
                    self._loads.add(self._load(job, fence, client), job.hit_tokens - job.have_tokens)
                else:
                    self._saves.append(self._save(job, fence, client))
                given = self._jobs.get_nowait()
            return False
        except queue.Empty:
            return True

    @staticmethod
    def _turn(job: Job) -> float | None:
        """A job goes on: how long it has nothing to do now (0: it did something), or None: it is over."""
        try:
            return next(job)
        except StopIteration:
            return None
        except Exception:  # the supervisor's edge; each job has settled itself by then
            log.exception("a transfer failed")
            return None

    def _load(self, job: LoadJob, fence: Any, client: StoreClient) -> Job:
        begun = time.monotonic()
        report = LoadReport(reason=MissReason.STORE_UNREACHABLE)
        try:
            report = yield from self._load_all(client, job, fence)
        finally:  # whatever happened, vLLM waits for this request's name
            report.seconds = time.monotonic() - begun
            with self._news:
                self._unfinished -= 1
                self._news.notify()
                self._results.finished.add(job.request)
                self._results.loads[job.request] = report
                if report.reason:
                    self._results.failed.add(job.request)

    def _load_all(self, client: StoreClient, job: LoadJob, fence: Any) -> Generator[float, None, LoadReport]:
        lease = client.adopt(job.lease)
        slots = yield from _answer(client, client.slots(lease, rank=self._rank))
        if isinstance(slots, Miss):
            return LoadReport(reason=slots.reason)
        is_verified = lease.session.verify_reads
        wanted: list[ReadSlot] = []
        moved_bytes, is_covered = 0, False

        def moves() -> Iterator[Move]:
            """Worked out while the first are on their way; so is whether these are all there should be."""
            nonlocal moved_bytes, is_covered
            for slot in slots:
                ids, skip = self._targets(job, slot.index, slot.key.group)
                if ids:
                    layout = self._layouts[slot.key.group]
                    wanted.append(slot)
                    moved_bytes += object_length(layout, len(ids))
                    yield Move(layout, ids, slot.pieces, slot.seed if is_verified else None, skip)
            every = product(range(len(job.ends)), range(len(self._layout.groups)))
            others = set(every) - {(slot.index, slot.key.group) for slot in wanted}
            is_covered = not any(self._targets(job, *other)[0] for other in others)

        checksums = yield from self._device.load(self._memory, moves(), fence)
        if not is_covered:
            return LoadReport(reason=MissReason.ABSENT)  # less than was promised: no block is left unwritten
        if not is_verified:  # then only the lease says that nobody else wrote there during the copy
            standing = yield from _answer(client, client.confirm(lease))
            return LoadReport(reason=standing.reason) if isinstance(standing, Miss) else LoadReport(moved_bytes)
        for slot, checksum in zip(wanted, checksums, strict=True):
            assert checksum is not None  # each move had a seed
            missed = client.accept(slot, checksum)
            if missed is not None:
                client.release([lease])  # reports what did not verify
                return LoadReport(reason=missed.reason)
        return LoadReport(moved_bytes, verified=True)

    def _targets(self, job: LoadJob, index: int, group: int) -> tuple[list[int], int]:
        """The blocks that this object is to be written to, and how many of its leading blocks are not. None where the
        store names what was not asked for."""
        if not (index < len(job.ends) and group < len(self._layout.groups)):
            return [], 0
        spec = self._layout.groups[group]
        start, end = job.ends[index - 1] if index else 0, job.ends[index]
        whole = chunk_block_range(spec, start, end)
        part = needed_blocks(spec, start, end, hit_tokens=job.hit_tokens, have_tokens=job.have_tokens)
        return job.tables[group][part.start : part.stop], part.start - whole.start

    def _save(self, job: SaveJob, fence: Any, client: StoreClient) -> Job:
        begun = time.monotonic()
        saved = Saved(lost=MissReason.STORE_UNREACHABLE)
        try:
            saved = yield from self._save_all(client, job, fence)
        finally:  # whatever happened, the job's blocks are let go
            with self._news:
                self._unfinished -= 1
                self._news.notify()
                self._results.saved[job.id] = 1
                self._results.saved_bytes += saved.saved_bytes
                self._results.save_seconds.append(time.monotonic() - begun)
                if saved.is_stored:
                    self._results.stored[job.id] = 1
                if saved.lost:
                    self._results.lost[job.id] = saved.lost

    def _save_all(self, client: StoreClient, job: SaveJob, fence: Any) -> Generator[float, None, Saved]:
        puts = yield from _answer(client, client.put_begin([self._object(item) for item in job.items]))
        if isinstance(puts, Miss):
            if puts.reason == MissReason.REFUSED and not self._was_refused:
                self._was_refused = True
                log.warning("kvtally: the store refuses what is to be saved: %s", puts.detail)
            return Saved(lost=puts.reason)
        is_whole = all(put.status in (PutStatus.WRITE, PutStatus.PRESENT) for put in puts)
        lost = MissReason.ARENA_FULL if any(put.status is PutStatus.FULL for put in puts) else ""
        given = [(put, item) for put, item in zip(puts, job.items, strict=True) if put.status is PutStatus.WRITE]
        if not given:
            return Saved(0, is_whole, lost)
        moves = (Move(self._layouts[item.group], item.block_ids, put.pieces, put.seed) for put, item in given)
        is_copied = False
        try:
            checksums = yield from _unhurried(self._device.save(self._memory, moves, fence))
            is_copied = True
        finally:
            if not is_copied:  # nothing writes there any more; else the store keeps the slots for as long as we live
                client.put_end(abort=[put for put, _ in given])
        commit = [(put, checksum) for (put, _), checksum in zip(given, checksums, strict=True) if checksum is not None]
        ended = yield from _answer(client, client.put_end(commit=commit))
        if isinstance(ended, Miss):
            return Saved(lost=ended.reason)
        saved_bytes = sum(put.length_bytes for put, _ in commit if put.id not in ended.rejected)
        if ended.rejected:
            lost = MissReason.LEASE_EXPIRED
        return Saved(saved_bytes, is_whole and not ended.rejected, lost)

    def _object(self, item: SaveItem) -> PutObject:
        blocks = len(item.block_ids)
        length = blocks * self._layout.groups[item.group].block_bytes()
        return PutObject(item.chain, item.parent, item.start_tokens, item.end_tokens, item.group, self._rank, length)


def _answer(client: StoreClient, call: Call[R]) -> Generator[float, None, R | Miss]:
    while (result := call.result) is None:
        client.poll()
        if call.result is None:
            yield ANSWER_PAUSE_S
    return result


def _unhurried(steps: Steps) -> Generator[float, None, Checksums]:
    with closing(steps):
        while True:
            try:
                pause_s = next(steps)
            except StopIteration as end:
                checksums: Checksums = end.value
                return checksums
            yield max(pause_s, SAVE_PAUSE_S) if pause_s else 0.0
