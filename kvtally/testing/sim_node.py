"""One machine of the simulated cluster: a store process, its arena and its disk, and the clients beside it.

The store process can be killed, and comes back under a new name with what its disk holds. It can be stopped: then
nothing reaches it, nothing in it runs and its time passes, while clients still have its arena mapped. Owns what happens
inside one machine. Time and chance belong to `sim_clock`, what clients do to `sim_client`, the whole to `sim`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.space import Piece, round_up
from kvtally.errors import KVTallyError
from kvtally.store.jobs import Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.lookup_view import hit_of, path_of
from kvtally.store.mover import read_verified
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.store.tiers.base import NoRoomError, Tier
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.sim_client import Client
from kvtally.testing.sim_network import Link
from kvtally.testing.sim_tasks import Promise, choose
from kvtally.testing.tiers import MemoryDevice, Operation
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import Lookup, Reply

if TYPE_CHECKING:
    from kvtally.testing.sim import Cluster

GRANULE = 4096
LIMITS = Limits(lease_ns=5 * SECOND_NS, wait_ns=2 * SECOND_NS, write_behind_bytes=16 * GRANULE)


class Node:
    """The machine. `generation` counts the lives of its store process; whatever belongs to an old one is dropped."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.clock, self.name = cluster, cluster.clock, name
        self.address = f"tcp://{name}:7400"
        pick = self.clock.random
        self.arena_bytes = pick.choice((16, 24, 48, 96)) * GRANULE
        self.arena = bytearray(self.arena_bytes)
        self.disk = MemoryDevice(pick.getrandbits(64)) if pick.random() < 0.8 else None
        self.disk_bytes = pick.choice((32, 64, 128)) * GRANULE
        self.is_disk_damaged = False
        self.durable: dict[ObjectKey, None] = {}  # what the disk said it had written, in order
        self.generation = 0
        self.is_up = False
        self.stopped_until_ns = 0  # 0: it is not stopped
        self.back_ns = 0  # when it went on for the last time
        self._held: list[Callable[[], None]] = []  # what reaches the store when it goes on
        self._wake_ns: int | None = None
        self.limits = LIMITS
        self.reset_ns: dict[bytes, int] = {}  # namespace -> when the last reset began that the store said is done
        self.promises: list[Promise] = []  # to clients of this node
        self.peers: dict[int, Link] = {}  # sessions of other stores
        self.clients: list[Client] = []
        self.start_store()
        for number in range(pick.randint(1, 4)):
            self.clients.append(Client(self, f"{name}.c{number}", pick.choice(cluster.namespaces), choose))

    # ---- the store process

    def start_store(self) -> None:
        self.generation += 1
        self.tiers: list[Tier] = []
        infos = []
        if self.disk is not None:
            self.tiers.append(DiskTier(self.disk, capacity_bytes=self.disk_bytes))
            infos.append(TierInfo(name="disk", capacity_bytes=self.disk_bytes))
        infos.append(TierInfo(name="peers", capacity_bytes=None, kind=TierKind.PEERS))
        self.store = Store(
            name=f"{self.name}.g{self.generation}",
            version="sim",
            arena_bytes=self.arena_bytes,
            limits=self.limits,
            tiers=infos,
            address=self.address,
            may_ask=self.cluster.may_ask,
        )
        found = set()
        for number, tier in enumerate(self.tiers, 1):
            for record in tier.recover():
                self.store.recover(number, record)
                found.add(record.key)
        self.store.probe(self.clock.now_ns)
        lost = self.durable.keys() - found
        assert self.is_disk_damaged or not lost, f"{len(lost)} objects written to disk were lost by a restart"
        self.queues: list[list[Job]] = [[] for _ in self.tiers]  # writes and removes, in order
        self.arena = bytearray(self.arena_bytes)
        self.is_up = True
        if len(self.cluster.nodes) > 1:
            self.reset_ns.clear()  # a restart does not remember which peers have not heard of a reset
        self.tick()

    def kill_store(self) -> None:
        """SIGKILL, and a supervisor that starts it again, at once or after a while."""
        if not self.is_up:
            return
        self.clock.note(f"{self.name}: store killed")
        self.clock.seen["kill_store"] += 1
        self._check_accusations()
        is_heard = self.clock.random.random() < 0.8
        self.clock.seen["kill_machine"] += not is_heard
        self.cluster.network.died(self, is_heard=is_heard)
        self.peers.clear()
        self.generation += 1
        self.is_up, self.stopped_until_ns, self._wake_ns = False, 0, None
        self._held.clear()
        if self.disk is not None:
            self._crash_disk(self.disk)
        for client in self.clients:
            client.lose_connection(store_lives=False)
        self.clock.at(self.clock.random.choice((0, self.clock.soon(), SECOND_NS // 2)), self.start_store)

    def _crash_disk(self, disk: MemoryDevice) -> None:
        """Perhaps the process dies in the middle of what the disk is busy with. What the disk has confirmed stays."""
        disk.reopen()
        if self.queues[0] and self.clock.random.random() < 0.5:
            job = self.queues[0][0]
            assert isinstance(job, WriteJob | RemoveJob)
            self._act(job)
            for key in (job.record.key,) if isinstance(job, WriteJob) else job.keys:
                self.durable.pop(key, None)
            disk.crash()

    def stop_store(self, span_ns: int) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if not self.is_up or self.is_stopped:
            return
        self.clock.note(f"{self.name}: store stopped for {span_ns / 1e9} s")
        self.clock.seen["stop_store"] += 1
        self.stopped_until_ns = self.clock.now_ns + span_ns
        generation = self.generation
        self.clock.at(span_ns, lambda: self._go_on(generation))

    def _go_on(self, generation: int) -> None:
        if generation == self.generation:
            self.stopped_until_ns, self.back_ns = 0, self.clock.now_ns
            held, self._held = self._held, []
            for action in held:
                self.in_store(action)
            self.tick()

    @property
    def is_stopped(self) -> bool:
        return self.stopped_until_ns != 0

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_stopped

    def in_store(self, action: Callable[[], None]) -> None:
        """Do something in the store process: now, when it goes on, or never if it is dead."""
        if self.is_up and self.is_stopped:
            self._held.append(action)
        elif self.is_up:
            action()
            self.tick()

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later in the store process that lives now."""
        generation = self.generation

        def guarded() -> None:
            if generation == self.generation:
                self.in_store(action)

        self.clock.at(delay_ns, guarded)

    def tick(self) -> None:
        """As the store's shell does after each event: what is due, what is to be sent, and when to wake up."""
        if not self.is_running:
            return
        next_ns = self.store.tick(self.clock.now_ns)
        self._flush()
        if next_ns is not None and (self._wake_ns is None or next_ns < self._wake_ns):
            self._wake_ns = next_ns
            self.at(next_ns - self.clock.now_ns, partial(self._wake, next_ns))

    def _wake(self, due_ns: int) -> None:
        if self._wake_ns == due_ns:
            self._wake_ns = None

    def _flush(self) -> None:
        """Deliver the store's messages and jobs, each after its own delay; a tier's writes and removes stay in
        order."""
        for link, request in self.store.take_peer_messages():
            self.cluster.network.send(self, link, request)
        for send in self.store.take_sends():
            self.cluster.network.send_bytes(self, send)
        for session, reply in self.store.take_outbox():
            if session in self.peers:
                self.peers[session].answer(reply)
                continue
            self.clock.at(self.clock.soon() // 10, partial(self._deliver, session, reply, self.generation))
        for job in self.store.take_jobs():
            if isinstance(job, ReadJob) and job.place is not None:
                self.at(self.clock.soon() // 10, partial(self.cluster.network.pull, self, job))
                continue
            if isinstance(job, ReadJob):
                self.at(self.clock.soon(), partial(self._run_job, job))
                continue
            queue = self.queues[job.tier - 1]
            queue.append(job)
            if len(queue) == 1:
                self.at(self.clock.soon(), partial(self._run_queue, job.tier))

    def _deliver(self, session: int, reply: Reply, generation: int) -> None:
        client = next((c for c in self.clients if c.session == session and generation == self.generation), None)
        if client is None:
            return
        if client.is_stopped:
            self.clock.at(
                client.stopped_until_ns - self.clock.now_ns + 1, partial(self._deliver, session, reply, generation)
            )
        else:
            client.take(reply)

    # ---- tiers

    def _run_queue(self, tier: int) -> None:
        queue = self.queues[tier - 1]
        self._run_job(queue.pop(0))
        if queue:
            self.at(self.clock.soon(), partial(self._run_queue, tier))

    def _run_job(self, job: Job) -> None:
        self._disturb_disk()
        outcome = self._act(job)
        if outcome.code:
            self.clock.seen[outcome.code] += 1
        self.store.job_done(job, outcome, self.clock.now_ns)

    def _act(self, job: Job) -> Outcome:
        tier = self.tiers[job.tier - 1]
        try:
            if isinstance(job, WriteJob):
                tier.write(job.record, self.views(job.pieces))
                self.durable.pop(job.record.key, None)
                self.durable[job.record.key] = None
            elif isinstance(job, ReadJob):
                if not read_verified(tier, job.record, self.views(job.pieces)):
                    return Outcome(code="KV-401")
            else:
                assert isinstance(job, RemoveJob)
                tier.remove(job.keys)
                for key in job.keys:
                    self.durable.pop(key, None)
        except KVTallyError as error:
            if isinstance(job, WriteJob):
                self.durable.pop(job.record.key, None)
            elif isinstance(job, RemoveJob):  # some of its records may have been written before it failed
                for key in job.keys:
                    self.durable.pop(key, None)
            return Outcome(code=error.code, is_crowded=isinstance(error, NoRoomError))
        return Outcome()

    def _disturb_disk(self) -> None:
        clock, faults = self.clock, self.cluster.faults
        if self.disk is None:
            return
        if clock.strikes(faults.flip_disk):
            content = clock.random.choice((self.disk.journal, self.disk.data, self.disk.data))
            if content:
                clock.seen["flip_disk"] += 1
                self.is_disk_damaged = True
                self.disk.flip_bit(content)
        if clock.strikes(faults.fail_disk):
            clock.seen["fail_disk"] += 1
            number = clock.random.choice((errno.EIO, errno.ENOSPC, errno.EROFS))
            self.disk.fail(
                clock.random.choice((Operation.READ, Operation.WRITE, Operation.WRITE_JOURNAL)), number, times=None
            )
            clock.at(clock.soon() * 10, self.disk.heal)

    # ---- what clients need

    def take_promise(self, namespace: bytes) -> Promise | None:
        """A hand-off that waits for a client of this namespace."""
        promise = next((promise for promise in self.promises if promise.namespace == namespace), None)
        if promise is not None:
            self.promises.remove(promise)
        return promise

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

    def scribble(self) -> None:
        """A stray write into the arena, as a broken process might make."""
        self.clock.seen["scribble"] += 1
        self.cluster.is_scribbled = True
        self.arena[self.clock.random.randrange(self.arena_bytes)] ^= 1 << self.clock.random.randrange(8)

    def is_leased(self, lease: int) -> bool:
        return lease in self.store._leases._leases

    def replace(self, client: Client) -> None:
        """The client's process crashes; another one takes its place."""
        self.clock.note(f"{client.name} crashed")
        self.clock.seen["crash_client"] += 1
        client.die()
        successor = Client(self, client.name + "'", client.namespace, client.choose)
        self.clients[self.clients.index(client)] = successor
        self.clock.at(self.clock.soon(), successor.connect)

    # ---- checks

    def hit_of(self, namespace: Namespace, request: Lookup) -> tuple[int, int]:
        """The longest hit in the arena and on the disk, in tokens: what a lookup here must find at least. And how many
        bytes it may hold in an arena, where whole boundaries are pinned."""
        residency = self.store._residency
        family = residency.families.get(namespace.digest)
        if family is None:
            return 0, 0
        path = path_of(residency, family, request)
        tiers = range(1 + (self.disk is not None))
        hit = hit_of(family, request, residency.presence(family, residency.masks(family, path, tiers)))
        spans = [end - start for start, end in pairwise((0, *request.ends[: hit.boundaries]))]
        objects = product(range(len(namespace.groups)), range(namespace.ranks), spans)
        return hit.end_tokens, sum(round_up(namespace.object_bytes(*item)) for item in objects)

    def heal(self) -> None:
        if self.disk is not None:
            self.disk.heal()

    def check(self) -> None:
        if self.is_up:
            self.store.check()

    def check_waits(self) -> None:
        """Nobody waits: whatever a client asked of a running store is answered within its deadline."""
        if self.is_running:
            for client in self.clients:
                client.check_waits()

    def _check_accusations(self) -> None:
        """Bytes are called corrupt only where somebody has damaged some."""
        is_excused = self.cluster.is_scribbled or self.cluster.is_damaged
        quarantined = dict(self.store._context.counts.quarantined)
        assert is_excused or not quarantined, f"{self.name}: good bytes were quarantined: {quarantined}"

    def check_rest(self) -> None:
        """Everybody has left: nothing may be left but cached bytes."""
        self.store.check()
        self._check_accusations()
        stats = self.store.stats(self.clock.now_ns)
        nodes = [node for family in self.store._residency.families.values() for node in family.nodes.values()]
        leftovers = {
            "leases": stats.leases.open,
            "limbo": stats.arena.limbo_bytes,
            "staging": stats.arena.staging_bytes,
            "lookups": stats.lookups.waiting,
            "peers": self.store._peers.open,
            "offers": self.store._offers.open,
            "sends": self.store._sends.open,
            "beliefs": len(self.store._beliefs),
            "alarms": len(self.store._context.alarms),
            "pins": sum(node.pins for node in nodes),
            "pending": sum(node.pending for node in nodes),
        }
        assert not any(leftovers.values()), f"{self.name}: left behind: {leftovers}"
