"""A whole node from a seed: store, clients, lower tiers and their faults on a virtual clock, deterministic to the byte.

`run(seed)` builds a random node, lets random clients save and load prompts while messages are delayed, connections
drop, processes crash and stop, the disk tears, flips and fails, and the store is killed and restarted; then it lets
everything come to rest and checks that

- no byte was ever accepted that is not the byte its identity says (every object's content follows from its key),
- whatever was promised and is still leased verifies, unless somebody scribbled into the arena,
- nobody waits: every request on a living connection was answered within its deadline,
- nothing leaked: no lease, open put, limbo, staging or pin is left, and each arena byte has exactly one owner,
- what a tier said it had written before a crash is found again after it, unless that very object was damaged.

One seed is one run: `python -m kvtally.testing.sim SEED` replays it and prints its log.
"""

from __future__ import annotations

import errno
import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.space import Piece
from kvtally.errors import KVTallyError
from kvtally.store.jobs import FindJob, Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.mover import read_verified
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.store.tiers.base import NoRoomError, Tier
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.sim_client import ALIGNMENT, CHUNK, Client
from kvtally.testing.tiers import MemoryDevice, MemoryTier, Operation
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import Reply

GRANULE = 4096
LIMITS = Limits(lease_ns=5 * SECOND_NS, wait_ns=2 * SECOND_NS, write_behind_bytes=16 * GRANULE)
SHAPES = (
    (GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((700, 700),)),),
    (
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((900,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((6000,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((5000,),)),
    ),
    (
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((1200,),)),
        GroupSpec(kind=GroupKind.SLIDING, block_tokens=16, page_bytes=((2500,),), window_tokens=100),
    ),
)


@dataclass(slots=True)
class Faults:
    """How often each fault strikes, per mille of the steps at which it could."""

    drop_connection: int = 0
    crash_client: int = 0
    stop_client: int = 0
    kill_store: int = 0
    flip_disk: int = 0
    fail_disk: int = 0
    scribble: int = 0  # a stray write into resident arena bytes, as a broken process might make


class Node:
    """The simulated machine."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.now_ns = 1
        self.log: list[str] = []
        self.seen: Counter[str] = Counter()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self.faults = self._choose_faults()
        self.arena_bytes = pick.choice((16, 24, 48)) * GRANULE
        self.arena = bytearray(self.arena_bytes)
        self.disk = MemoryDevice(seed) if pick.random() < 0.8 else None
        self.shared = MemoryTier(enumerable=False) if pick.random() < 0.2 else None
        self.disk_bytes = pick.choice((32, 64, 128)) * GRANULE
        self.namespaces = [
            Namespace(
                model=f"m{n}",
                groups=pick.choice(SHAPES),
                chunk_tokens=CHUNK,
                alignment_tokens=ALIGNMENT,
                tensor_parallel=pick.choice((1, 1, 2)),
            )
            for n in range(pick.choice((1, 2)))
        ]
        self.prompts = self._make_prompts()
        self.was_reset: set[bytes] = set()
        self.generation = 0
        self.durable: dict[ObjectKey, None] = {}  # what the disk said it had written, in order
        self.start_store()
        self.clients = [Client(self, f"c{n}", pick.choice(self.namespaces)) for n in range(pick.randint(1, 4))]

    def _choose_faults(self) -> Faults:
        pick = self.random
        if pick.random() < 0.1:
            return Faults()
        names = ("drop_connection", "crash_client", "stop_client", "kill_store", "flip_disk", "fail_disk", "scribble")
        return Faults(**{name: pick.choice((0, 5, 20)) for name in names})

    def _make_prompts(self) -> list[bytes]:
        """Prompts that share prefixes and diverge inside chunks and at boundaries; some shorter than a chunk."""
        base = [self.random.randbytes(4 * CHUNK * 6) for _ in range(2)]
        prompts = []
        for _ in range(8):
            stem = self.random.choice(base)[: 4 * self.random.randint(1, CHUNK * 6)]
            prompts.append(stem + self.random.randbytes(4 * self.random.choice((0, 0, 16, 70))))
        return prompts

    # ---- time

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._sequence, action))

    def soon(self) -> int:
        """A delay: mostly microseconds, sometimes long enough to cross a deadline."""
        exponent = self.random.random() ** 3
        return int(10_000 * (3_000_000 ** (exponent * 0.5)))

    def note(self, what: str) -> None:
        self.log.append(f"{self.now_ns / 1e9:10.6f} {what}")

    def strikes(self, per_mille: int) -> bool:
        return per_mille > 0 and self.random.randrange(1000) < per_mille

    def step_events(self, until_ns: int) -> None:
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, action = heapq.heappop(self._events)
            action()
            self.tick()
        self.now_ns = until_ns
        self.tick()

    def tick(self) -> None:
        self.store.tick(self.now_ns)
        self.flush()

    # ---- store and tiers

    def start_store(self) -> None:
        self.generation += 1
        self.tiers: list[Tier] = []
        infos = []
        if self.disk is not None:
            disk = DiskTier(self.disk, capacity_bytes=self.disk_bytes)
            self.tiers.append(disk)
            infos.append(TierInfo(name="disk", capacity_bytes=self.disk_bytes))
        if self.shared is not None:
            self.tiers.append(self.shared)
            infos.append(TierInfo(name="shared", capacity_bytes=None, kind=TierKind.POOL))
        self.store = Store(
            name=f"g{self.generation}", version="sim", arena_bytes=self.arena_bytes, limits=LIMITS, tiers=infos
        )
        found = set()
        for number, tier in enumerate(self.tiers, 1):
            for record in tier.recover():
                self.store.recover(number, record)
                found.add(record.key)
        self.store.probe(self.now_ns)
        if self.faults.flip_disk == 0:
            lost = self.durable.keys() - found
            assert not lost, f"{len(lost)} objects written to disk were lost by a restart"
        self.queues: list[list[Job]] = [[] for _ in self.tiers]  # writes and removes, in order
        self.arena = bytearray(self.arena_bytes)

    def kill_store(self) -> None:
        self.note("store killed")
        self.seen["kill_store"] += 1
        if self.disk is not None:
            if self.durable:
                self.durable.popitem()  # the crash may hit the last write, and nobody has acted on its outcome yet
            self.disk.crash()
        self.start_store()
        for client in self.clients:
            client.lose_connection(store_lives=False)

    def flush(self) -> None:
        """Deliver the store's messages and jobs, each after its own delay; a tier's writes and removes stay in
        order."""
        generation = self.generation
        for session, reply in self.store.take_outbox():
            self.at(self.soon() // 10, partial(self.deliver, session, reply, generation))
        for job in self.store.take_jobs():
            if isinstance(job, ReadJob | FindJob):
                self.at(self.soon(), partial(self.run_job, job, generation))
                continue
            queue = self.queues[job.tier - 1]
            queue.append(job)
            if len(queue) == 1:
                self.at(self.soon(), partial(self.run_queue, job.tier, generation))

    def deliver(self, session: int, reply: Reply, generation: int) -> None:
        client = next((c for c in self.clients if c.session == session and generation == self.generation), None)
        if client is None:
            return
        if client.is_stopped:
            self.at(client.stopped_until_ns - self.now_ns + 1, partial(self.deliver, session, reply, generation))
        else:
            client.take(reply)

    def run_queue(self, tier: int, generation: int) -> None:
        if generation != self.generation:
            return
        queue = self.queues[tier - 1]
        job = queue[0]
        self.run_job(job, generation)
        if generation == self.generation:
            queue.pop(0)
            if queue:
                self.at(self.soon(), lambda: self.run_queue(tier, generation))

    def run_job(self, job: Job, generation: int) -> None:
        if generation != self.generation:
            return
        self.disturb_disk()
        tier = self.tiers[job.tier - 1]
        outcome = Outcome()
        try:
            if isinstance(job, WriteJob):
                tier.write(job.record, self.views(job.pieces))
                if self.tiers[job.tier - 1] is not self.shared:
                    self.durable.pop(job.record.key, None)
                    self.durable[job.record.key] = None
            elif isinstance(job, ReadJob):
                if not read_verified(tier, job.record, self.views(job.pieces)):
                    outcome = Outcome(code="KV-401")
            elif isinstance(job, FindJob):
                outcome = Outcome(found=tuple(self.shared.ask(job.namespace, job.boundaries) if self.shared else ()))
            elif isinstance(job, RemoveJob):
                tier.remove(job.keys)
                for key in job.keys:
                    self.durable.pop(key, None)
        except KVTallyError as error:
            outcome = Outcome(code=error.code, is_crowded=isinstance(error, NoRoomError))
            if isinstance(job, WriteJob):
                self.durable.pop(job.record.key, None)
            elif isinstance(job, RemoveJob):  # some of its records may have been written before it failed
                for key in job.keys:
                    self.durable.pop(key, None)
        if outcome.code:
            self.seen[outcome.code] += 1
        self.store.job_done(job, outcome, self.now_ns)

    def disturb_disk(self) -> None:
        if self.disk is None:
            return
        if self.strikes(self.faults.flip_disk):
            content = self.random.choice((self.disk.journal, self.disk.data, self.disk.data))
            if content:
                self.seen["flip_disk"] += 1
                self.disk.flip_bit(content)
        if self.strikes(self.faults.fail_disk):
            self.seen["fail_disk"] += 1
            number = self.random.choice((errno.EIO, errno.ENOSPC, errno.EROFS))
            self.disk.fail(
                self.random.choice((Operation.READ, Operation.WRITE, Operation.WRITE_JOURNAL)), number, times=None
            )
            self.at(self.soon() * 10, self.disk.heal)

    # ---- what clients need

    def views(self, pieces: tuple[Piece, ...]) -> list[memoryview]:
        memory = memoryview(self.arena)
        return [memory[offset : offset + length] for offset, length in pieces]

    def read(self, pieces: list[int]) -> bytes:
        spans = zip(pieces[::2], pieces[1::2], strict=True)
        return b"".join(self.arena[offset : offset + length] for offset, length in spans)

    def write(self, pieces: list[int], data: bytes) -> None:
        """Write to a slot. Nobody else may own it while its writer might still do this."""
        owned = self.store._puts.open_pieces()
        position = 0
        for offset, length in zip(pieces[::2], pieces[1::2], strict=True):
            mine = any(p.offset <= offset and offset + length <= p.offset + p.length for p in owned)
            assert mine, "a slot was reused while its writer might still write to it"
            part = data[position : position + length]
            self.arena[offset : offset + len(part)] = part
            position += length

    def is_leased(self, lease: int) -> bool:
        return lease in self.store._leases._leases

    def replace(self, client: Client) -> None:
        """The client's process crashes; another one takes its place."""
        self.note(f"{client.name} crashed")
        self.seen["crash_client"] += 1
        client.die()
        successor = Client(self, client.name + "'", client.namespace)
        self.clients[self.clients.index(client)] = successor
        self.at(self.soon(), successor.connect)

    # ---- the run

    def play(self, steps: int) -> None:
        for client in self.clients:
            self.at(self.soon(), client.connect)
        for _ in range(steps):
            if not self._events:
                break
            self.step_events(self._events[0][0])
            if self.random.random() < 0.1:
                self.store.check()
            self._assert_nobody_waits()
        self.rest()

    def _assert_nobody_waits(self) -> None:
        for client in self.clients:
            since_ns = max(client.asked_ns, client.stopped_until_ns)
            is_late = client.is_waiting and not client.is_stopped and self.now_ns - since_ns > 12 * SECOND_NS
            assert not is_late, f"{client.name} waits"

    def rest(self) -> None:
        """Everybody leaves; after the longest deadline nothing may be left but cached bytes."""
        for client in self.clients:
            client.die()
        if self.disk is not None:
            self.disk.heal()
        self.faults = Faults()
        for _ in range(3):
            self.step_events(self.now_ns + 100 * SECOND_NS)
        self.store.check()
        stats = self.store.stats(self.now_ns)
        leftovers = (
            stats.leases.open,
            stats.arena.limbo_bytes,
            stats.arena.staging_bytes,
            stats.lookups.waiting,
            len(self.store._context.alarms),
            sum(node.pins for family in self.store._residency.families.values() for node in family.nodes.values()),
            sum(node.pending for family in self.store._residency.families.values() for node in family.nodes.values()),
        )
        assert leftovers == (0,) * 7, f"left behind: {leftovers}"


def run(seed: int, steps: int = 250) -> Counter[str]:
    """Simulate a node's life and return what happened. Raises AssertionError if a promise was broken."""
    node = Node(seed)
    try:
        node.play(steps)
    except AssertionError as error:
        tail = "\n".join(node.log[-20:])
        raise type(error)(f"seed {seed}: {error}\n{tail}") from error
    return node.seen


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]))))  # noqa: T201
