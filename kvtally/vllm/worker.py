"""The worker half: one thread per rank that copies between engine blocks and arena slots, and verifies.

    LoadJob ─▶ slots of the lease ─▶ copy and verify ─▶ finished, or failed with a reason (vLLM then recomputes)
    SaveJob ─▶ put begin ─▶ copy ─▶ commit ─▶ reported, blocks let go

The engine's thread only queues jobs and collects results. It queues a save only after the step's forward has returned
without an error, so a step that died publishes nothing. Nor does a rank that failed alone: a hit needs every rank.

Jobs are generators (`device`). Loads take turns (`core.transfer_order`): the next one begins as soon as the copies of
the one before are all queued. Saves run one after the other, when no load has anything to do or loads have had enough
turns. Owns the rank's client and its view of engine memory.
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
from kvtally.core.transfer_order import TransferOrder
from kvtally.device import Checksums, Device, Move, Steps, cpu
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.step_jobs import LoadJob, LoadReport, SaveItem, SaveJob, StepJobs
from kvtally.wire.messages import MissReason, PutObject, PutStatus

log = logging.getLogger("kvtally.vllm")

IDLE_S = 0.2  # between two looks at the connection, without jobs
CONNECT_S = 2.0
LAST_SAVES_S = 2.0
SAVE_PAUSE_S = 0.002  # shortest pause between two checks on a save: each disturbs the engine, and nobody waits
ANSWER_PAUSE_S = 0.0001  # between two checks for the store's answer
MOST_LOAD_TURNS = 4  # in a row, while a save waits
# The thread stays off the interpreter while the engine's thread prepares and launches a step (for at most QUIET_S), and
# again while that thread launches the sampler. The copies that are already queued keep the bus busy for longer.
QUIET_S = 0.002
SAMPLING_S = 0.001
BEGIN_S = 0.001  # how long an idle engine waits for its load to get under way

R = TypeVar("R")

Job = Generator[float, None, None]  # yields the seconds until it is worth continuing; 0: at once


@dataclass(slots=True)
class Results:
    """Everything that ended since results were last collected. Loads go by request, saves by job id."""

    finished: set[str] = field(default_factory=set)  # loads that ended, well or not
    failed: set[str] = field(default_factory=set)
    loads: dict[str, LoadReport] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)  # saves that ended, well or not: 1 rank each
    stored: dict[int, int] = field(default_factory=dict)  # the saves that are in the store completely
    lost: dict[int, str] = field(default_factory=dict)  # the saves that will never be there completely, and why
    saved_bytes: int = 0
    save_seconds: list[float] = field(default_factory=list)


def refused(jobs: StepJobs) -> Results:
    """The results of a worker that transfers nothing. The scheduler half does not know that, and waits for results."""
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
    """How a save job ended. It is neither stored nor lost if another engine is writing the same object."""

    saved_bytes: int = 0
    is_stored: bool = False
    lost: str = ""


class WorkerHalf:
    """`connect` makes this rank's client. The thread that uses the client calls it."""

    def __init__(self, layout: EngineLayout, rank: int, connect: Callable[[], StoreClient]) -> None:
        self._layout = layout
        self._rank = rank
        self._connect = connect
        self._layouts: list[GroupLayout] = []
        self._memory: object = None
        self._device: Device[Any, Any] = cpu
        self._jobs: queue.SimpleQueue[tuple[LoadJob | SaveJob, Any] | None] = queue.SimpleQueue()
        self._loads: TransferOrder[Job] = TransferOrder()
        self._saves: deque[Job] = deque()
        self._load_turns = 0
        self._pause_s = 0.0
        # Set by the engine's first step. Before that the engine captures CUDA graphs, and no other thread may use CUDA.
        self._is_serving = False
        self._quiet_until_s = 0.0
        self._is_launched = threading.Event()  # whether the step that was prepared last has been launched
        self._is_launched.set()
        self._has_begun = threading.Event()  # a load has begun since this was cleared
        self._news = threading.Condition()  # guards the four fields below; notified when a job ends
        self._unfinished = 0  # jobs that were queued and have not ended
        self._results = Results()
        self._has_told = False  # the last collection reported a load that had ended
        self._was_refused = False  # the store has refused a save, and the log says so
        self._thread = threading.Thread(target=self._run, name="kvtally-worker", daemon=True)

    def register(self, layouts: list[GroupLayout], memory: object, device: Device[Any, Any]) -> None:
        """Engine memory is known now: check it against the namespace and start the thread."""
        validate(self._layout.namespace, {self._rank: layouts})
        self._layouts, self._memory, self._device = layouts, memory, device
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether jobs are carried out: memory was registered, and nobody has stopped the thread."""
        return self._thread.is_alive()

    # ---- the engine's thread

    def prepare(self) -> None:
        """A step begins. It has been launched once `collect` is called."""
        self._is_launched.clear()
        self._quiet_until_s = time.monotonic() + QUIET_S

    def load(self, jobs: list[LoadJob]) -> None:
        """For steps that touch blocks. Called after the launch: the step may zero the blocks that are to be loaded."""
        self._give(jobs)

    def load_first(self, jobs: list[LoadJob]) -> None:
        """For steps that touch no block. Called at the step's beginning, so that bytes travel while vLLM does the rest
        of the step. It waits a moment: otherwise the thread would not get the interpreter before the step's end."""
        if jobs:
            self._has_begun.clear()
            self._give(jobs)
            self._has_begun.wait(BEGIN_S)

    def save(self, jobs: list[SaveJob]) -> None:
        """Called after the launch: the step may still write the blocks that are to be saved."""
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
        """Take the results so far. If there are none, but jobs are under way, wait up to `wait_s` for one. There is no
        wait right after a load has ended: vLLM may act on that load only when this step is over, too."""
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
        """Wait up to `timeout_s` until no job is under way, and take the results of saves. Results of loads, and the
        bytes and seconds of saves, stay for `collect`."""
        self._is_launched.set()
        self._quiet_until_s = 0.0
        with self._news:
            self._news.wait_for(lambda: self._unfinished == 0, timeout_s)
            taken = Results(saved=self._results.saved, stored=self._results.stored, lost=self._results.lost)
            self._results.saved, self._results.stored, self._results.lost = {}, {}, {}
        return taken

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread. The last answers' saves are finished first, unless they take longer than LAST_SAVES_S."""
        if self._thread.is_alive():
            with self._news:
                self._news.wait_for(lambda: self._unfinished == 0, LAST_SAVES_S)
            self._jobs.put(None)
            self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        client = self._connect()
        client.connect(CONNECT_S)  # a load right after the start would find no session to read through
        while self._take(client):
            self._keep_quiet()
            try:
                self._round(client)
            except Exception:  # the supervisor's edge: jobs continue in the next round
                log.exception("kvtally: the arena could not be pinned, or the connection not be served")
        self._device.pin(None)
        client.close()

    def _keep_quiet(self) -> None:
        """Stay off the interpreter while the engine's thread launches a step; for the length of one step at most."""
        now_s = time.monotonic()
        deadline_s = now_s + QUIET_S + SAMPLING_S
        while (until_s := min(self._quiet_until_s, deadline_s)) > now_s:
            if self._is_launched.is_set():
                time.sleep(until_s - now_s)
            else:
                self._is_launched.wait(until_s - now_s)
            now_s = time.monotonic()

    def _round(self, client: StoreClient) -> None:
        """Give one load a turn; and a save, if no load has anything to do or loads have had MOST_LOAD_TURNS."""
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
        """Let the first load that can go on do so, and return 0. If none can, return the seconds until one may."""
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
        """Take new jobs; wait for them if there is nothing else to do. False: asked to stop."""
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
        """Continue a job: the seconds until it is worth continuing again (0: at once), or None if it has ended."""
        try:
            return next(job)
        except StopIteration:
            return None
        except Exception:  # the supervisor's edge; the job has recorded its result by now
            log.exception("kvtally: a transfer failed")
            return None

    def _load(self, job: LoadJob, fence: Any, client: StoreClient) -> Job:
        begun = time.monotonic()
        report = LoadReport(reason=MissReason.STORE_UNREACHABLE)
        try:
            report = yield from self._load_all(client, job, fence)
        finally:  # vLLM waits for this request, whatever happened to its load
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
            """Worked out while the first ones are already being copied. At the end, `is_covered` says whether they
            write every block that they should."""
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
            return LoadReport(reason=MissReason.ABSENT)  # the store named fewer objects than it had promised
        if not is_verified:  # only a standing lease proves that nobody wrote to the slots during the copy
            standing = yield from _answer(client, client.confirm(lease))
            return LoadReport(reason=standing.reason) if isinstance(standing, Miss) else LoadReport(moved_bytes)
        for slot, checksum in zip(wanted, checksums, strict=True):
            assert checksum is not None  # each move had a seed
            missed = client.accept(slot, checksum)
            if missed is not None:
                client.release([lease])  # tells the store which object did not verify
                return LoadReport(reason=missed.reason)
        return LoadReport(moved_bytes, verified=True)

    def _targets(self, job: LoadJob, index: int, group: int) -> tuple[list[int], int]:
        """The blocks that this object is written to, and how many of its leading blocks are skipped. No blocks if the
        store names an object that nobody asked for."""
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
        finally:  # the job's blocks are held until this result is reported
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
                log.warning("kvtally: the store refuses to save this engine's KV: %s", puts.detail)
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
            if not is_copied:  # tell the store that nobody writes there any more, or it keeps the slots while we live
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
