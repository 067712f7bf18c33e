"""The mover: threads that carry the store's jobs out on lower tiers.

    Store.take_jobs ──submit──▶ mover ──▶ tier.read / write / remove / ask, peers.pull ──▶ Outcome ──▶ Store.job_done

Owns the threads and the verification of bytes that came up. Decides nothing: what to move, where to and how much at
once is the store's, which emits no more than its limits allow, so the queues here need no bound of their own.

Threading: for each tier one writer thread (writes and removes, in their order) and a few reader threads (reads, in any
order): while one of them waits for the device, another one verifies. A shared tier has one more, for finds, which must
not wait behind reads; for other stores there are only readers. `submit`, `deliver` and `unwritten` belong to the event
loop's thread; outcomes cross over in batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from kvtally.core.checksum import RunningChecksum
from kvtally.core.keys import checksum_seed
from kvtally.errors import KVTallyError
from kvtally.log import Seldom
from kvtally.store.arena import Arena
from kvtally.store.jobs import FindJob, Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.tiers.base import NoRoomError, ObjectRecord, PeerPlace, PeerSource, SharedTier, Tier

logger = logging.getLogger("kvtally.store")


Batch = list[tuple[Job, Outcome]]
_Queue = SimpleQueue[Job | None]  # None: the thread that takes it ends


class Mover:
    """Runs jobs until `stop`. `post` runs a function in the event loop's thread, `deliver` takes outcomes there."""

    def __init__(self, tiers: Sequence[Tier | PeerSource], arena: Arena) -> None:
        self.unwritten = 0  # writes and removes submitted and not delivered yet
        self._tiers = tiers
        self._arena = arena
        self._writes: list[_Queue] = [SimpleQueue() for _ in tiers]
        self._reads: list[_Queue] = [SimpleQueue() for _ in tiers]
        self._finds: list[_Queue] = [SimpleQueue() for _ in tiers]
        self._threads: list[threading.Thread] = []
        self._abandoned = threading.Event()
        self._told = Seldom()
        self._finished: Batch = []
        self._lock = threading.Lock()  # guards _finished
        self._post: Callable[[Callable[[], None]], object]
        self._deliver: Callable[[Batch], None]

    def start(self, *, post: Callable[[Callable[[], None]], object], deliver: Callable[[Batch], None]) -> None:
        self._post = post
        self._deliver = deliver
        for tier, writes, reads, finds in zip(self._tiers, self._writes, self._reads, self._finds, strict=True):
            queues = [(f"read-{number}", reads) for number in range(tier.readers)]
            if not isinstance(tier, PeerSource):
                queues.append(("write", writes))
            if isinstance(tier, SharedTier):
                queues.append(("find", finds))
            for name, queue in queues:
                thread = threading.Thread(target=self._run, args=(tier, queue), name=f"{tier.name}-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            index = job.tier - 1  # the store numbers the arena 0
            if isinstance(job, WriteJob | RemoveJob):
                self.unwritten += 1
                self._writes[index].put(job)
            elif isinstance(job, FindJob):
                self._finds[index].put(job)
            else:
                self._reads[index].put(job)

    def stop(self, timeout_s: float) -> bool:
        """End the threads, each after the job it is in; what is still queued is dropped. False if one of them is still
        inside its tier when the time is up (a hung device): then the tiers must not be closed under it."""
        self._abandoned.set()
        for queue in (*self._writes, *self._finds):
            queue.put(None)
        for tier, queue in zip(self._tiers, self._reads, strict=True):
            for _ in range(tier.readers):
                queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, tier: Tier | PeerSource, queue: _Queue) -> None:
        while (job := queue.get()) is not None and not self._abandoned.is_set():
            self._finish(job, self._outcome(tier, job))

    def _outcome(self, tier: Tier | PeerSource, job: Job) -> Outcome:
        """Carry out one job. Whatever a tier raises becomes an outcome: otherwise its thread would die, and every later
        job of the tier would wait for ever."""
        begun = time.perf_counter()
        code = ""
        try:
            if isinstance(job, ReadJob):
                is_right = read_verified(tier, job.record, self._arena.views(job.pieces), job.place)
                code = "" if is_right else "KV-401"
            elif isinstance(tier, PeerSource):
                raise TypeError("other stores are only read from")
            elif isinstance(job, FindJob):
                assert isinstance(tier, SharedTier)
                found = tuple(tier.ask(job.namespace, job.boundaries))
                return Outcome(found=found, seconds=time.perf_counter() - begun)
            elif isinstance(job, WriteJob):
                tier.write(job.record, self._arena.views(job.pieces))
            else:
                tier.remove(job.keys)
        except NoRoomError as error:  # not a failure: the store makes room
            return Outcome(code=error.code, is_crowded=True, seconds=time.perf_counter() - begun)
        except KVTallyError as error:
            self._tell(tier, error)
            code = error.code
        except Exception:
            logger.exception("tier %s: %s ended in an unexpected error [KV-600]", tier.name, type(job).__name__)
            code = "KV-600"
        return Outcome(code=code, seconds=time.perf_counter() - begun)

    def _tell(self, tier: Tier | PeerSource, error: KVTallyError) -> None:
        """Log a failure once a minute for each tier and code: on a full disk, thousands of jobs fail."""
        if self._told.is_due((tier.name, error.code)):
            logger.warning("tier %s: %s", tier.name, error)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        with self._lock:
            self._finished.append((job, outcome))
            is_first = len(self._finished) == 1
        if is_first and not self._abandoned.is_set():  # later outcomes go with the first one's wake-up
            self._post(self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            batch, self._finished = self._finished, []
        self.unwritten -= sum(isinstance(job, WriteJob | RemoveJob) for job, _ in batch)
        self._deliver(batch)


def read_verified(
    tier: Tier | PeerSource, record: ObjectRecord, target: Sequence[memoryview], place: PeerPlace | None = None
) -> bool:
    """Read an object into `target`, and hash each part as it lands. Returns whether the bytes are the right ones.

    `place` is where it lies at another store."""
    running = RunningChecksum(checksum_seed(record.key, record.length_bytes), record.length_bytes)
    if isinstance(tier, PeerSource):
        if place is None:
            raise TypeError("an object of another store is pulled from its place there")
        tier.pull(place, record, target, running.update)
    else:
        tier.read(record, target, running.update)
    return running.intdigest() == record.checksum
