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
from dataclasses import dataclass, field

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_values
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.errors import KVTallyError
from kvtally.store.context import TierInfo
from kvtally.store.jobs import FindJob, Job, Outcome, ReadJob, WriteJob
from kvtally.store.store import Store
from kvtally.store.tiers.base import Tier
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.tiers import MemoryDevice, MemoryTier, Operation
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlots,
    PutStatus,
    Refused,
    Release,
    Reply,
    Request,
    Reset,
    Slots,
    SlotsGet,
    Staged,
    Welcome,
)

GRANULE = 4096
CHUNK = 64
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


class WrongByte(AssertionError):
    """The one thing that must never happen."""


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


def content(key: ObjectKey, length_bytes: int) -> bytes:
    """What an object's bytes must be: they follow from its identity alone."""
    return random.Random(b"".join((key.namespace, key.chain, bytes((key.group, key.rank))))).randbytes(length_bytes)


@dataclass(slots=True)
class Client:
    """One engine process: at most one task at a time, restarted with a new connection whenever the old one is lost."""

    name: str
    namespace: Namespace
    session: int = 0
    alive: bool = True
    stopped_until_ns: int = 0
    epoch: int = 0  # grows with each connection: late events of an old one are dropped
    step: Callable[[Reply], None] | None = None  # what to do with the next reply
    writing: list[tuple[int, ObjectKey, list[int], int]] = field(default_factory=list)  # put, key, pieces, length
    ghosts: list[list[int]] = field(default_factory=list)  # pieces that a lost connection of this process may still write to
    old_sessions: set[int] = field(default_factory=set)  # lost connections whose mapping this process still has
    staged: dict[int, Staged] = field(default_factory=dict)
    await_lease: int = 0
    chains: list[bytes] = field(default_factory=list)  # of the prompt it is loading
    asked_ns: int = 0


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
            Namespace(model=f"m{n}", groups=pick.choice(SHAPES), chunk_tokens=CHUNK, alignment_tokens=16, tensor_parallel=pick.choice((1, 1, 2)))
            for n in range(pick.choice((1, 2)))
        ]  # fmt: skip
        self.prompts = self._make_prompts()
        self.was_reset: set[bytes] = set()
        self.generation = 0
        self.durable: dict[ObjectKey, None] = {}  # what the disk said it had written, in order
        self.start_store()
        self.clients = [Client(f"c{n}", pick.choice(self.namespaces)) for n in range(pick.randint(1, 4))]

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
            infos.append(TierInfo(name="shared", capacity_bytes=None, enumerable=False))
        self.store = Store(name=f"g{self.generation}", version="sim", arena_bytes=self.arena_bytes, limits=LIMITS, tiers=infos)
        found = set()
        for number, tier in enumerate(self.tiers, 1):
            for record in tier.recover():
                self.store.recover(number, record)
                found.add(record.key)
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
                self.durable.popitem()  # the crash may fall into the last write, whose outcome nobody acted on yet
            self.disk.crash()
        self.start_store()
        for client in self.clients:
            self.lose_connection(client, told=False)
            client.ghosts.clear()  # the old arena is gone: whatever they write there is nobody's
            client.old_sessions.clear()

    def flush(self) -> None:
        generation = self.generation
        for session, reply in self.store.take_outbox():
            self.at(self.soon() // 10, lambda s=session, r=reply, g=generation: self.deliver(s, r, g))  # type: ignore[misc]
        for job in self.store.take_jobs():
            if isinstance(job, ReadJob | FindJob):
                self.at(self.soon(), lambda j=job, g=generation: self.run_job(j, g))  # type: ignore[misc]
                continue
            queue = self.queues[job.tier - 1]
            queue.append(job)
            if len(queue) == 1:
                self.at(self.soon(), lambda t=job.tier, g=generation: self.run_queue(t, g))  # type: ignore[misc]

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
                views = self.views(job.pieces)
                tier.read(job.record, views)
                if object_checksum(job.record.key, job.record.length_bytes, views) != job.record.checksum:
                    outcome = Outcome(code="KV-401")
            elif isinstance(job, FindJob):
                outcome = Outcome(found=tuple(tier.find(job.keys)))
            else:
                tier.remove(job.keys)
                for key in job.keys:
                    self.durable.pop(key, None)
        except KVTallyError as error:
            outcome = Outcome(code=error.code)
            if isinstance(job, WriteJob):
                self.durable.pop(job.record.key, None)
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
            self.disk.fail(self.random.choice((Operation.READ, Operation.WRITE, Operation.WRITE_JOURNAL)), number, times=None)
            self.at(self.soon() * 10, self.disk.heal)

    def views(self, pieces: object) -> list[memoryview]:
        memory = memoryview(self.arena)
        return [memory[offset : offset + length] for offset, length in pieces]  # type: ignore[attr-defined]

    # ---- connections

    def connect(self, client: Client) -> None:
        if client.session or not client.alive:
            return
        client.session = self.store.connect(shared_memory=True, now_ns=self.now_ns)
        client.epoch += 1
        self.ask(client, Hello(1, PROTOCOL_VERSION, client.name, canonical(client.namespace)), self._on_welcome(client))

    def _on_welcome(self, client: Client) -> Callable[[Reply], None]:
        def on_reply(reply: Reply) -> None:
            assert isinstance(reply, Welcome), reply
            self.at(self.soon(), self.guard(client, lambda: self.choose_task(client)))

        return on_reply

    def guard(self, client: Client, action: Callable[[], None]) -> Callable[[], None]:
        """`action`, unless the client lost its connection or died meanwhile; later, if it is stopped."""
        epoch = client.epoch

        def guarded() -> None:
            if client.epoch != epoch or not client.alive or not client.session:
                return
            if client.stopped_until_ns > self.now_ns:
                self.at(client.stopped_until_ns - self.now_ns + 1, guarded)
                return
            action()

        return guarded

    def lose_connection(self, client: Client, *, told: bool = True) -> None:
        """The socket closes; the process lives on, and what it was writing to it may go on writing to for a while."""
        if not client.session:
            return
        session, client.session = client.session, 0
        client.epoch += 1
        client.step, client.await_lease = None, 0
        client.ghosts += [pieces for _, _, pieces, _ in client.writing]
        client.writing.clear()
        if told:
            self.store.disconnect(session, self.now_ns)
            client.old_sessions.add(session)
            if client.alive:  # our clients keep the old mapping until they have let go of it, then close its pipe
                self.at(self.soon(), self._let_go(client, self.generation))
        if client.alive:
            self.at(self.soon(), lambda: self.connect(client))

    def _let_go(self, client: Client, generation: int) -> Callable[[], None]:
        def action() -> None:
            if generation == self.generation and client.alive and client.stopped_until_ns < self.now_ns:
                self._gone(client)

        return action

    def _gone(self, client: Client) -> None:
        """The process has let go of every mapping but its present one (or has died): nothing writes there any more."""
        client.ghosts.clear()
        for session in sorted(client.old_sessions):
            self.store.writer_gone(session, self.now_ns)
        client.old_sessions.clear()

    def crash(self, client: Client) -> None:
        self.note(f"{client.name} crashed")
        self.seen["crash_client"] += 1
        client.alive = False
        self.lose_connection(client)
        self._gone(client)
        replacement = Client(client.name + "'", client.namespace)
        self.clients[self.clients.index(client)] = replacement
        self.at(self.soon(), lambda: self.connect(replacement))

    def ask(self, client: Client, request: Request, then: Callable[[Reply], None]) -> None:
        assert client.step is None
        client.step = then
        client.asked_ns = self.now_ns
        session, generation = client.session, self.generation

        def arrive() -> None:
            if generation == self.generation and client.session == session:
                self.store.handle(session, request, self.now_ns)

        self.at(self.soon() // 10, arrive)

    def deliver(self, session: int, reply: Reply, generation: int) -> None:
        client = next((c for c in self.clients if c.session == session and generation == self.generation), None)
        if client is None:
            return
        if client.stopped_until_ns > self.now_ns:
            self.at(client.stopped_until_ns - self.now_ns + 1, lambda: self.deliver(session, reply, generation))
            return
        if isinstance(reply, Staged):
            client.staged[reply.lease] = reply
            if client.await_lease == reply.lease:
                client.await_lease = 0
                self._after_staged(client, reply)
            return
        step, client.step = client.step, None
        assert step is not None
        step(reply)

    # ---- what clients do

    def choose_task(self, client: Client) -> None:
        if self.strikes(self.faults.drop_connection):
            self.seen["drop_connection"] += 1
            self.lose_connection(client)
        elif self.strikes(self.faults.kill_store):
            self.kill_store()
        elif self.random.random() < 0.01:
            self.was_reset.add(client.namespace.digest)
            self.ask(client, Reset(2), lambda reply: self.finish(client))
        elif self.random.random() < 0.5:
            self.save(client)
        else:
            self.load(client)

    def finish(self, client: Client) -> None:
        self.at(self.soon(), self.guard(client, lambda: self.choose_task(client)))

    def path(self, prompt: bytes) -> tuple[list[int], list[bytes]]:
        tokens = len(prompt) // 4
        ends = list(range(CHUNK, tokens + 1, CHUNK))
        tail = tokens // 16 * 16
        if tail > (ends[-1] if ends else 0):
            ends.append(tail)
        return ends, chain_values(prompt, ends)

    def save(self, client: Client) -> None:
        prompt = self.random.choice(self.prompts)
        ends, chains = self.path(prompt)
        namespace, objects = client.namespace, []
        for index, chain in enumerate(chains):
            start, parent = (ends[index - 1], chains[index - 1]) if index else (0, ROOT_CHAIN)
            for group, spec in enumerate(namespace.groups):
                if spec.kind is GroupKind.RECURRENT and self.random.random() < 0.3:
                    continue  # not every boundary has a state
                for rank in range(namespace.ranks):
                    length = namespace.object_bytes(group, rank, ends[index] - start)
                    objects.append(PutObject(chain, parent, start, ends[index], group, rank, length))
        if not objects:
            self.finish(client)
            return
        self.ask(client, PutBegin(3, objects), lambda reply: self._on_slots(client, objects, reply))

    def _on_slots(self, client: Client, objects: list[PutObject], reply: Reply) -> None:
        assert isinstance(reply, PutSlots), reply
        digest = client.namespace.digest
        for item, slot in zip(objects, reply.slots, strict=True):
            if slot.status == PutStatus.WRITE:
                key = ObjectKey(digest, item.chain, item.group, item.rank)
                client.writing.append((slot.put, key, slot.pieces, item.length_bytes))
        self.at(self.soon(), self.guard(client, lambda: self._write(client, half=True)))

    def _write(self, client: Client, *, half: bool) -> None:
        """Write what was begun: first half of each object, later all of it. The writer may be stopped in between."""
        self._interrupt(client)
        if not client.session:
            return
        if client.stopped_until_ns > self.now_ns:
            self.at(self.soon(), self.guard(client, lambda: self._write(client, half=half)))
            return
        for _, key, pieces, length in client.writing:
            data = content(key, length)
            self._store_bytes(pieces, data[: length // 2] if half else data)
        if half:
            self.at(self.soon(), self.guard(client, lambda: self._write(client, half=False)))
        else:
            commit, abort = [], []
            for put, key, _, length in client.writing:
                if self.random.random() < 0.9:
                    commit.append((put, object_checksum(key, length, [memoryview(content(key, length))])))
                else:
                    abort.append(put)
            self.ask(client, PutEnd(4, commit, abort), lambda reply: self._on_put_end(client, reply))

    def _store_bytes(self, pieces: list[int], data: bytes) -> None:
        position = 0
        owned = self.store._writes.open_pieces()
        for offset, length in zip(pieces[::2], pieces[1::2], strict=True):
            mine = any(p.offset <= offset and offset + length <= p.offset + p.length for p in owned)
            assert mine, "a slot was reused while its writer might still write to it"
            part = data[position : position + length]
            self.arena[offset : offset + len(part)] = part
            position += length

    def _on_put_end(self, client: Client, reply: Reply) -> None:
        assert isinstance(reply, PutEnded), reply
        self.seen["committed"] += reply.committed
        self.seen["rejected"] += len(reply.rejected)
        client.writing.clear()
        self.finish(client)

    def load(self, client: Client) -> None:
        prompt = self.random.choice(self.prompts)
        ends, chains = self.path(prompt)
        have: list[int] = []
        if ends and self.random.random() < 0.3:
            local = self.random.choice(ends)
            have = [0 if spec.kind is GroupKind.RECURRENT else local for spec in client.namespace.groups]
        request = Lookup(
            5,
            b"".join(chains),
            ends,
            len(prompt) // 4 - self.random.choice((0, 1)),
            16,
            have,
            wait_ms=self.random.choice((0, 0, 100, 3000)),
            hold=True,
            lease_ms=self.random.choice((0, 50, 2000)),
        )
        self.ask(client, request, lambda reply: self._on_found(client, chains, reply))

    def _on_found(self, client: Client, chains: list[bytes], reply: Reply) -> None:
        assert isinstance(reply, Found), reply
        self.seen["hit" if reply.end_tokens else "miss"] += 1
        if not reply.lease:
            self.finish(client)
            return
        client.chains = chains
        if reply.staging and reply.lease not in client.staged:
            client.await_lease = reply.lease
            client.asked_ns = self.now_ns
            return
        self._read_slots(client, reply.lease, chains)

    def _after_staged(self, client: Client, reply: Staged) -> None:
        self.seen["staged"] += reply.end_tokens > 0
        self.seen["staging_failed"] += reply.end_tokens == 0
        if reply.end_tokens:
            self._read_slots(client, reply.lease, client.chains)
        else:
            self.finish(client)

    def _read_slots(self, client: Client, lease: int, chains: list[bytes]) -> None:
        rank = self.random.randrange(client.namespace.ranks)
        self.ask(client, SlotsGet(6, lease, rank), lambda reply: self._on_read_slots(client, lease, rank, chains, reply))

    def _on_read_slots(self, client: Client, lease: int, rank: int, chains: list[bytes], reply: Reply) -> None:
        assert isinstance(reply, Slots), reply
        if reply.reason:
            self.seen[f"slots:{reply.reason}"] += 1
            held = lease in self.store._reads._leases
            excused = self.faults.scribble or client.namespace.digest in self.was_reset
            assert not held or excused, f"the slots of a promised hit were refused: {reply.reason}"
        self.at(self.soon(), self.guard(client, lambda: self._copy(client, lease, rank, chains, reply)))

    def _copy(self, client: Client, lease: int, rank: int, chains: list[bytes], slots: Slots) -> None:
        """Copy out and verify, as an engine does before it may read. The lease may have expired meanwhile."""
        self._interrupt(client)
        bad = []
        for slot in slots.slots:
            key = ObjectKey(client.namespace.digest, chains[slot.index], slot.group, rank)
            data = b"".join(self.views(zip(slot.pieces[::2], slot.pieces[1::2], strict=True)))
            if object_checksum(key, slot.length_bytes, [memoryview(data)]) != slot.checksum:
                bad.append((lease, slot.index, slot.group, rank))
                still_held = lease in self.store._reads._leases
                assert not still_held or self.faults.scribble, "a leased object did not verify although nobody scribbled"
                self.seen["bad"] += 1
            elif data != content(key, slot.length_bytes):
                raise WrongByte(f"{key} verified with wrong bytes")
            else:
                self.seen["verified"] += 1
        if client.session and client.alive:
            self.ask(client, Release(7, [lease], bad), lambda reply: self.finish(client))

    def _interrupt(self, client: Client) -> None:
        """Faults that strike in the middle of a client's work."""
        if self.strikes(self.faults.crash_client):
            self.crash(client)
        elif self.strikes(self.faults.drop_connection):
            self.seen["drop_connection"] += 1
            self.lose_connection(client)
        elif self.strikes(self.faults.stop_client):
            self.seen["stop_client"] += 1
            client.stopped_until_ns = self.now_ns + self.random.choice((SECOND_NS // 10, 8 * SECOND_NS))
        elif self.strikes(self.faults.scribble):
            self.seen["scribble"] += 1
            at = self.random.randrange(self.arena_bytes)
            self.arena[at] ^= 1 << self.random.randrange(8)
        for pieces in client.ghosts:  # a lost connection's writer that has not noticed yet
            self._store_bytes(pieces, b"\xee" * sum(pieces[1::2]))

    # ---- the run

    def play(self, steps: int) -> None:
        for client in self.clients:
            self.at(self.soon(), lambda c=client: self.connect(c))  # type: ignore[misc]
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
            waiting = client.session and client.stopped_until_ns < self.now_ns and (client.step is not None or client.await_lease)
            assert not waiting or self.now_ns - max(client.asked_ns, client.stopped_until_ns) < 12 * SECOND_NS, f"{client.name} waits"

    def rest(self) -> None:
        """Everybody leaves; after the longest deadline nothing may be left but cached bytes."""
        for client in self.clients:
            client.alive = False
            self.lose_connection(client)
            self._gone(client)
        if self.disk is not None:
            self.disk.heal()
        self.faults = Faults()
        for _ in range(3):
            self.step_events(self.now_ns + 100 * SECOND_NS)
        self.store.check()
        stats = self.store.stats(self.now_ns)
        leftovers = (
            stats["leases"]["open"],  # type: ignore[index]
            stats["arena"]["limbo_bytes"],  # type: ignore[index]
            stats["arena"]["staging_bytes"],  # type: ignore[index]
            stats["lookups"]["waiting"],  # type: ignore[index]
            len(self.store._context.alarms),
            sum(node.pins for family in self.store._residency.families.values() for node in family.nodes.values()),
            sum(node.pending for family in self.store._residency.families.values() for node in family.nodes.values()),
        )
        assert leftovers == (0,) * 7, f"left behind: {leftovers}"


def run(seed: int, steps: int = 250) -> Counter[str]:
    """One simulated life of a node; what happened in it. Raises AssertionError where a promise was broken."""
    node = Node(seed)
    try:
        node.play(steps)
    except AssertionError as error:
        tail = "\n".join(node.log[-20:])
        raise type(error)(f"seed {seed}: {error}\n{tail}") from error
    return node.seen


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]))))
