"""A simulated engine process: it saves and loads prompts, one task after another, and checks every byte it accepts.

An object's bytes follow from its key and a variant (`content`), which is drawn for each save: KV that is computed again
is rarely the same to the bit. The cluster's `Ledger` knows which variants were committed, so any client can check what
another has saved. Owns how one client carries its tasks out, including what it does if its connection is lost while it
writes. Which task comes next is up to `sim_tasks`; the store and its faults belong to `sim_node`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtally.core.checksum import object_checksum
from kvtally.core.hits import needed
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_values
from kvtally.core.namespace import GroupKind, Namespace, canonical
from kvtally.store.peers import ASK_NS
from kvtally.store.resets import REMOVAL_NS
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    MissReason,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlots,
    PutStatus,
    Release,
    Reply,
    Request,
    Reset,
    ResetDone,
    Slots,
    SlotsGet,
    Staged,
    Wanted,
    Welcome,
)

if TYPE_CHECKING:
    from kvtally.testing.sim_node import Node

CHUNK = 64  # tokens
ALIGNMENT = 16
RATES = (0, 1_000, 100_000, 100_000_000)  # tokens that engines compute in a second
VARIANTS = 3
LEASE_NS = 5 * SECOND_NS  # the longest
TRAVEL_NS = SECOND_NS // 10  # messages on their way, and alarms that ring up to 10 ms late


class WrongByte(AssertionError):
    """The one thing that must never happen."""


def content(key: ObjectKey, length_bytes: int, variant: int = 0) -> bytes:
    """The bytes of one variant of an object. They follow from its identity alone."""
    seed = b"".join((key.namespace, key.chain, bytes((key.group, key.rank, variant))))
    return random.Random(seed).randbytes(length_bytes)


class Ledger:
    """Which variants of each object were committed, and when for the last time, on any node."""

    def __init__(self) -> None:
        self._committed: dict[ObjectKey, dict[int, int]] = {}  # key -> variant -> time
        self._contents: dict[tuple[ObjectKey, int, int], bytes] = {}

    def content(self, key: ObjectKey, length_bytes: int, variant: int) -> bytes:
        name = (key, length_bytes, variant)
        if name not in self._contents:
            self._contents[name] = content(key, length_bytes, variant)
        return self._contents[name]

    def commit(self, key: ObjectKey, variant: int, now_ns: int) -> None:
        self._committed.setdefault(key, {})[variant] = now_ns

    def check(self, key: ObjectKey, data: bytes, after_ns: int) -> None:
        """These bytes were accepted. Raises WrongByte unless somebody committed them, after this time."""
        for variant, committed_ns in self._committed.get(key, {}).items():
            if data == self.content(key, len(data), variant):
                if committed_ns < after_ns:
                    raise WrongByte(f"{key} was served after the reset that forgot it")
                return
        raise WrongByte(f"{key} verified with bytes that nobody committed")


def boundaries(prompt: bytes) -> tuple[list[int], list[bytes]]:
    """Whole chunks and the prompt's aligned tail, with their chain values."""
    tokens = len(prompt) // 4
    ends = list(range(CHUNK, tokens + 1, CHUNK))
    tail = tokens // ALIGNMENT * ALIGNMENT
    if tail > (ends[-1] if ends else 0):
        ends.append(tail)
    return ends, chain_values(prompt, ends)


@dataclass(slots=True)
class Write:
    """An object that the client has a slot for."""

    put: int
    key: ObjectKey
    pieces: list[int]
    data: bytes
    variant: int


@dataclass(slots=True)
class Load:
    """The load that the client is busy with."""

    request: Lookup
    chains: list[bytes]
    after_ns: int  # nothing that was committed before may be accepted
    then: Callable[[Load], None]
    lease: int = 0
    end_tokens: int = 0  # promised
    reason: str = ""
    withdrawn: str = ""
    sources: tuple[int, int, int] = (0, 0, 0)  # tokens of the hit that came from disk, peers and a pool
    ranks: list[int] = field(default_factory=list)  # yet to be copied
    is_verified: bool = True


class Client:
    """One process. Connects again whenever its connection is lost."""

    def __init__(self, node: Node, name: str, namespace: Namespace, choose: Callable[[Client], None]) -> None:
        self.node, self.cluster, self.clock = node, node.cluster, node.clock
        self.name = name
        self.namespace = namespace
        self.choose = choose  # called when it is free: gives it its next task
        self.session = 0
        self.alive = True
        self.stopped_until_ns = 0
        self._epoch = 0  # grows with each connection: late events of an old one are dropped
        self._step: Callable[[Reply], None] | None = None  # what to do with the next reply
        self._asked: tuple[int, int] = (0, 0)  # since when it waits for that reply, and how long it may
        self._awaited_lease = 0
        self._awaited: tuple[int, int] = (0, 0)
        self._staged: dict[int, Staged] = {}
        self._load: Load | None = None
        self._writing: list[Write] = []
        self._ghosts: list[list[int]] = []  # pieces of a lost connection to which this process may still write
        self._old_sessions: set[int] = set()  # lost connections whose mapping this process still has

    @property
    def is_stopped(self) -> bool:
        return self.stopped_until_ns > self.clock.now_ns

    def check_waits(self) -> None:
        """What this client asked of a running store is answered within its deadline."""
        if not self.session or self.is_stopped:
            return
        for what, (since_ns, most_ns) in (
            ("an answer", self._asked if self._step is not None else (0, 0)),
            ("its lease", self._awaited if self._awaited_lease else (0, 0)),
        ):
            waits_ns = self.clock.now_ns - max(since_ns, self.stopped_until_ns, self.node.back_ns)
            assert not most_ns or waits_ns <= most_ns, f"{self.name} has waited {waits_ns / 1e9} s for {what}"

    # ---- connection

    def connect(self) -> None:
        if self.session or not self.alive:
            return
        if not self.node.is_running:
            self.clock.at(max(SECOND_NS // 100, self.node.stopped_until_ns - self.clock.now_ns), self.connect)
            return
        self.session = self.node.store.connect(shared_memory=True, now_ns=self.clock.now_ns)
        self._epoch += 1
        self.ask(Hello(1, PROTOCOL_VERSION, self.name, canonical(self.namespace)), self._on_welcome)

    def _on_welcome(self, reply: Reply) -> None:
        assert isinstance(reply, Welcome), reply
        self.finish()

    def lose_connection(self, *, store_lives: bool = True) -> None:
        """The socket closes. The process lives on, and may go on writing to its slots for a while."""
        if not store_lives:  # the old arena is gone, and with it everything that was being written
            self._ghosts.clear()
            self._old_sessions.clear()
        if not self.session:
            return
        session, self.session = self.session, 0
        self._epoch += 1
        self._step, self._awaited_lease, self._load = None, 0, None
        self._staged.clear()  # a new store numbers its leases from the start
        if store_lives:
            self._ghosts += [write.pieces for write in self._writing]
            self._old_sessions.add(session)
            store, generation = self.node.store, self.node.generation
            self.node.in_store(lambda: store.disconnect(session, self.clock.now_ns))
            self.clock.at(self.clock.soon(), lambda: self._notice(generation))
        self._writing.clear()
        if self.alive:
            self.clock.at(self.clock.soon(), self.connect)

    def _notice(self, generation: int) -> None:
        """The client notices the loss, stops its copies and drops the old mapping, and with it its pipe."""
        if generation == self.node.generation and self.alive and not self.is_stopped:
            self.let_go()

    def let_go(self) -> None:
        self._ghosts.clear()
        store = self.node.store
        for session in sorted(self._old_sessions):
            self.node.in_store(partial(store.writer_gone, session, self.clock.now_ns))
        self._old_sessions.clear()

    def die(self) -> None:
        self.alive = False
        self.lose_connection()
        self.let_go()

    def ask(self, request: Request, then: Callable[[Reply], None], *, within_ns: int = TRAVEL_NS) -> None:
        assert self._step is None
        self._step = then
        self._asked = (self.clock.now_ns, within_ns)
        session = self.session

        def arrive() -> None:
            if self.session == session:
                if isinstance(request, PutEnd):
                    self._commit(request)
                self.node.store.handle(session, request, self.clock.now_ns)

        self.node.at(self.clock.soon() // 10, arrive)

    def take(self, reply: Reply) -> None:
        """A message from the store has arrived."""
        if isinstance(reply, Staged):
            self._staged[reply.lease] = reply
            if self._step is None:
                self._go_on(reply.lease)
            return
        step, self._step = self._step, None
        assert step is not None, f"an answer nobody asked for: {reply}"
        step(reply)

    def later(self, action: Callable[[], None], rests_ns: int = 0) -> None:
        """Do this after a while, unless the connection is lost first; later still if the process is stopped."""
        epoch = self._epoch

        def guarded() -> None:
            if self._epoch != epoch or not self.alive:
                return
            if self.is_stopped:
                self.clock.at(self.stopped_until_ns - self.clock.now_ns + 1, guarded)
            else:
                action()

        self.clock.at(self.clock.soon() + rests_ns, guarded)

    # ---- tasks

    def finish(self) -> None:
        """A task is over. The next one comes soon, or after seconds, in which leases, beliefs and pauses may end."""
        self._load = None
        rests_ns = self.clock.random.randrange(3 * SECOND_NS) if self.clock.random.random() < 0.05 else 0
        self.later(lambda: self.choose(self), rests_ns)

    def _interrupt(self) -> bool:
        """Faults that strike in the middle of the work. True if it cannot go on now."""
        node, clock, faults = self.node, self.clock, self.cluster.faults
        if clock.strikes(faults.crash_client):
            node.replace(self)
        elif clock.strikes(faults.drop_connection):
            clock.seen["drop_connection"] += 1
            self.lose_connection()
        elif clock.strikes(faults.stop_client):
            clock.seen["stop_client"] += 1
            self.stopped_until_ns = clock.now_ns + clock.random.choice((SECOND_NS // 10, 8 * SECOND_NS))
        elif clock.strikes(faults.scribble):
            node.scribble()
        for pieces in self._ghosts:
            node.write(pieces, b"\xee" * sum(pieces[1::2]))
        return not self.session or self.is_stopped

    def reset(self) -> None:
        """Forget the namespace. If the store says that this is done, nothing committed before may be served here."""
        node, digest, began_ns = self.node, self.namespace.digest, self.clock.now_ns
        self.cluster.was_reset.add(digest)

        def ended(reply: Reply) -> None:
            if isinstance(reply, ResetDone):
                self.clock.seen["reset"] += 1
                node.reset_ns[digest] = max(began_ns, node.reset_ns.get(digest, 0))
            self.finish()

        self.ask(Reset(2), ended, within_ns=REMOVAL_NS + TRAVEL_NS)

    # ---- saving

    def save(self, prompt: bytes) -> None:
        """Save a whole prompt at once, perhaps without some of its recurrent states."""
        ends, chains = boundaries(prompt)
        objects = [item for index in range(len(ends)) for item in self.objects(ends, chains, index)]
        if objects:
            self.put(objects, lambda is_whole: self.finish(), aborted=0.1)
        else:
            self.finish()

    def objects(
        self, ends: Sequence[int], chains: Sequence[bytes], index: int, *, all_states: bool = False
    ) -> list[PutObject]:
        """All objects of one boundary. Not every boundary has a state."""
        start, parent = (ends[index - 1], chains[index - 1]) if index else (0, ROOT_CHAIN)
        objects = []
        for group, spec in enumerate(self.namespace.groups):
            if spec.kind is GroupKind.RECURRENT and not all_states and self.clock.random.random() < 0.3:
                continue
            for rank in range(self.namespace.ranks):
                length = self.namespace.object_bytes(group, rank, ends[index] - start)
                objects.append(PutObject(chains[index], parent, start, ends[index], group, rank, length))
        return objects

    def put(self, objects: list[PutObject], then: Callable[[bool], None], *, aborted: float = 0.0) -> None:
        """Write objects and commit them, but for this share of them. `then` is told whether all of them are saved."""
        self.ask(PutBegin(3, objects), lambda reply: self._on_put_slots(objects, then, aborted, reply))

    def _on_put_slots(
        self, objects: list[PutObject], then: Callable[[bool], None], aborted: float, reply: Reply
    ) -> None:
        assert isinstance(reply, PutSlots), reply
        variant = self.clock.random.randrange(VARIANTS)
        for item, slot in zip(objects, reply.slots, strict=True):
            if slot.status == PutStatus.WRITE:
                key = ObjectKey(self.namespace.digest, item.chain, item.group, item.rank)
                data = self.cluster.ledger.content(key, item.length_bytes, variant)
                self._writing.append(Write(slot.put, key, slot.pieces, data, variant))
        is_whole = all(slot.status in (PutStatus.WRITE, PutStatus.PRESENT) for slot in reply.slots)
        self.later(lambda: self._write(then, aborted, is_whole, half=True))

    def _write(self, then: Callable[[bool], None], aborted: float, is_whole: bool, *, half: bool) -> None:
        """Write the objects that were begun: half of each, then the rest. The writer may be stopped in between."""
        if self._interrupt():
            self.later(lambda: self._write(then, aborted, is_whole, half=half))
            return
        for write in self._writing:
            self.node.write(write.pieces, write.data[: len(write.data) // 2] if half else write.data)
        if half:
            self.later(lambda: self._write(then, aborted, is_whole, half=False))
            return
        commit, abort = [], []
        for write in self._writing:
            if self.clock.random.random() >= aborted:
                commit.append((write.put, object_checksum(write.key, len(write.data), [memoryview(write.data)])))
            else:
                abort.append(write.put)
        self.ask(PutEnd(4, commit, abort), lambda reply: self._on_put_end(then, is_whole and not abort, reply))

    def _commit(self, request: PutEnd) -> None:
        """A commit reaches the store: from now on these bytes may be served."""
        writes = {write.put: write for write in self._writing}
        for put, _ in request.commit:
            self.cluster.ledger.commit(writes[put].key, writes[put].variant, self.clock.now_ns)

    def _on_put_end(self, then: Callable[[bool], None], is_whole: bool, reply: Reply) -> None:
        assert isinstance(reply, PutEnded), reply
        self.clock.seen["committed"] += reply.committed
        self.clock.seen["rejected"] += len(reply.rejected)
        self._writing.clear()
        then(is_whole and not reply.rejected)

    # ---- loading

    def load(self, prompt: bytes) -> None:
        """Ask for a prompt as some request does, and load what is found."""
        pick = self.clock.random
        ends, chains = boundaries(prompt)
        have: list[int] = []
        if ends and pick.random() < 0.3:
            local = pick.choice(ends)
            have = [0 if spec.kind is GroupKind.RECURRENT else local for spec in self.namespace.groups]
        request = Lookup(
            5,
            b"".join(chains),
            ends,
            len(prompt) // 4 - pick.choice((0, 1)),
            ALIGNMENT,
            have,
            wait_ms=pick.choice((0, 0, 100, 3000)),
            hold=True,
            lease_ms=pick.choice((0, 50, 2000)),
            priority=pick.choice((0, 0, -1, 5)),
            ahead=pick.choice((0, 1, 100)),
            early=pick.random() < 0.5,
            prefill_tokens_s=pick.choice(RATES),
            source=self.cluster.source_of(prompt) if pick.random() < 0.7 else "",
        )
        self.fetch(request, chains, [pick.randrange(self.namespace.ranks)], lambda load: self.finish())

    def fetch(self, request: Lookup, chains: list[bytes], ranks: list[int], then: Callable[[Load], None]) -> None:
        """Look a prompt up, and copy and verify what these ranks of it are promised."""
        after_ns = self.node.reset_ns.get(self.namespace.digest, 0)
        load = self._load = Load(request, chains, after_ns, then, ranks=ranks)
        wait_ns = min(request.wait_ms * 1_000_000, self.node.limits.wait_ns)
        self.ask(request, lambda reply: self._on_found(load, reply), within_ns=wait_ns + ASK_NS + TRAVEL_NS)

    def _on_found(self, load: Load, reply: Reply) -> None:
        assert isinstance(reply, Found), reply
        self.clock.seen["hit" if reply.end_tokens else "miss"] += 1
        self.clock.seen[f"miss:{reply.reason or 'none'}"] += 1
        load.lease, load.end_tokens, load.reason, load.withdrawn = (
            reply.lease,
            reply.end_tokens,
            reply.reason,
            reply.withdrawn,
        )
        if not reply.lease:
            load.end_tokens = 0  # nothing is held, so nothing is promised
            self._end_load(load)
        elif reply.staging:
            self._awaited_lease = reply.lease
            span_ns = load.request.lease_ms * 1_000_000 or LEASE_NS
            self._awaited = (self.clock.now_ns, span_ns + TRAVEL_NS)
            self._go_on(reply.lease)
            if load.request.early and self._awaited_lease:
                self.later(lambda: self._come_to(load))
        else:
            self._take_sources(load, 0, reply.peer_tokens, reply.pool_tokens)
            self._get_slots(load)

    def _go_on(self, lease: int) -> None:
        """Use this lease, if it is the one that the client waits for and it is staged."""
        if self._awaited_lease == lease and lease in self._staged and self._load is not None:
            self._awaited_lease = 0
            self._on_staged(self._load, self._staged[lease])

    def _come_to(self, load: Load) -> None:
        """The scheduler gets to a request that was looked up early, or the request is aborted before that."""
        if self._awaited_lease != load.lease:
            return
        if self.clock.random.random() < 0.3:
            self.clock.seen["cancelled"] += 1
            self._awaited_lease = 0
            self.ask(Release(7, [load.lease]), lambda reply: self.finish())
        else:
            self.clock.seen["wanted"] += 1
            rate = self.clock.random.choice(RATES)
            self.ask(Wanted(8, load.lease, rate), lambda reply: self._go_on(load.lease))

    def _on_staged(self, load: Load, reply: Staged) -> None:
        self.clock.seen["staged" if reply.end_tokens else "staging_failed"] += 1
        self.clock.seen[f"staged:{reply.reason or 'all'}"] += 1
        load.end_tokens, load.reason = reply.end_tokens, reply.reason or load.reason
        self._take_sources(load, reply.disk_tokens, reply.peer_tokens, reply.pool_tokens)
        if reply.end_tokens:
            self._get_slots(load)
        else:
            self._end_load(load)

    def _take_sources(self, load: Load, disk: int, peer: int, pool: int) -> None:
        """Where the tokens came from adds up to no more than what is reused."""
        load.sources = disk, peer, pool
        assert min(load.sources) >= 0, f"sources of a hit: {load.sources}"
        if not load.request.have:
            total = sum(load.sources)
            assert total <= load.end_tokens, f"{load.sources} tokens came from elsewhere, of {load.end_tokens}"
        self.clock.seen["from_peer"] += peer > 0

    def _get_slots(self, load: Load) -> None:
        rank = load.ranks[-1]
        self.ask(SlotsGet(6, load.lease, rank), lambda reply: self._on_slots(load, rank, reply))

    def _on_slots(self, load: Load, rank: int, reply: Reply) -> None:
        assert isinstance(reply, Slots), reply
        if reply.reason:
            self.clock.seen[f"slots:{reply.reason}"] += 1
            excused = self.cluster.is_scribbled or self.namespace.digest in self.cluster.was_reset
            assert excused or not self.node.is_leased(load.lease), f"the slots of a promised hit: {reply.reason}"
            load.is_verified, load.reason = False, reply.reason
        else:
            self._check_slots(load, reply)
        self.later(lambda: self._copy(load, rank, reply))

    def _check_slots(self, load: Load, reply: Slots) -> None:
        """A promise covers every object that the hit needs."""
        request = load.request
        last = request.ends.index(load.end_tokens)
        have = request.have or [0] * len(self.namespace.groups)
        wanted = {
            (index, group)
            for group, spec in enumerate(self.namespace.groups)
            for index in needed(spec, request.ends, last, have[group])
        }
        given = {(slot.index, slot.group) for slot in reply.slots}
        assert given == wanted, f"a hit of {load.end_tokens} needs {wanted}, and was given {given}"

    def _copy(self, load: Load, rank: int, slots: Slots) -> None:
        """Copy out and verify, as an engine does before it may read. The lease may have expired meanwhile."""
        if self._interrupt():
            self.later(lambda: self._copy(load, rank, slots))
            return
        bad = []
        for slot in slots.slots:
            key = ObjectKey(self.namespace.digest, load.chains[slot.index], slot.group, rank)
            data = self.node.read(slot.pieces)
            if object_checksum(key, slot.length_bytes, [memoryview(data)]) != slot.checksum:
                bad.append((load.lease, slot.index, slot.group, rank))
                excused = self.cluster.is_scribbled or not self.node.is_leased(load.lease)
                assert excused, "a leased object did not verify although nobody scribbled"
                self.clock.seen["bad"] += 1
                load.is_verified, load.reason = False, MissReason.CHECKSUM
            else:
                self.cluster.ledger.check(key, data, load.after_ns if not self.cluster.is_damaged else 0)
                self.clock.seen["verified"] += 1
        load.ranks.pop()
        if load.ranks and load.is_verified:
            self._get_slots(load)
        else:
            self.ask(Release(7, [load.lease], bad), lambda reply: self._end_load(load))

    def _end_load(self, load: Load) -> None:
        load.is_verified &= load.end_tokens > 0 and not load.ranks
        load.then(load)
