"""A simulated engine process: it saves and loads prompts, one task after another, and checks every byte it accepts.

An object's bytes follow from its key (`content`), so any client can check what another has saved. Owns one client's
behaviour, including what it does if its connection is lost while it writes. Time, faults and the store belong to
`sim.Node`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_values
from kvtally.core.namespace import GroupKind, Namespace, canonical
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
    Slots,
    SlotsGet,
    Staged,
    Wanted,
    Welcome,
)

if TYPE_CHECKING:
    from kvtally.testing.sim import Node

CHUNK = 64  # tokens
ALIGNMENT = 16
RATES = (0, 1_000, 100_000, 100_000_000)  # tokens that engines compute in a second


class WrongByte(AssertionError):
    """The one thing that must never happen."""


def content(key: ObjectKey, length_bytes: int) -> bytes:
    """The bytes an object must have. They follow from its identity alone."""
    return random.Random(b"".join((key.namespace, key.chain, bytes((key.group, key.rank))))).randbytes(length_bytes)


def boundaries(prompt: bytes) -> tuple[list[int], list[bytes]]:
    """Whole chunks and the prompt's aligned tail, with their chain values."""
    tokens = len(prompt) // 4
    ends = list(range(CHUNK, tokens + 1, CHUNK))
    tail = tokens // ALIGNMENT * ALIGNMENT
    if tail > (ends[-1] if ends else 0):
        ends.append(tail)
    return ends, chain_values(prompt, ends)


class Client:
    """One process. Connects again whenever its connection is lost."""

    def __init__(self, node: Node, name: str, namespace: Namespace) -> None:
        self.node = node
        self.name = name
        self.namespace = namespace
        self.session = 0
        self.alive = True
        self.stopped_until_ns = 0
        self.asked_ns = 0
        self._epoch = 0  # grows with each connection: late events of an old one are dropped
        self._step: Callable[[Reply], None] | None = None  # what to do with the next reply
        self._awaited_lease = 0
        self._chains: list[bytes] = []  # of the prompt it is loading
        self._staged: dict[int, Staged] = {}
        self._writing: list[tuple[int, ObjectKey, list[int], int]] = []  # put, key, pieces, length
        self._ghosts: list[list[int]] = []  # pieces of a lost connection to which this process may still write
        self._old_sessions: set[int] = set()  # lost connections whose mapping this process still has

    @property
    def is_waiting(self) -> bool:
        return bool(self.session) and (self._step is not None or self._awaited_lease != 0)

    @property
    def is_stopped(self) -> bool:
        return self.stopped_until_ns > self.node.now_ns

    # ---- connection

    def connect(self) -> None:
        if self.session or not self.alive:
            return
        self.session = self.node.store.connect(shared_memory=True, now_ns=self.node.now_ns)
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
        self._step, self._awaited_lease = None, 0
        self._staged.clear()  # a new store numbers its leases from the start
        if store_lives:
            self._ghosts += [pieces for _, _, pieces, _ in self._writing]
            self.node.store.disconnect(session, self.node.now_ns)
            self._old_sessions.add(session)
            generation = self.node.generation
            self.node.at(self.node.soon(), lambda: self._notice(generation))
        self._writing.clear()
        if self.alive:
            self.node.at(self.node.soon(), self.connect)

    def _notice(self, generation: int) -> None:
        """The client notices the loss, stops its copies and drops the old mapping, and with it its pipe."""
        if generation == self.node.generation and self.alive and not self.is_stopped:
            self.let_go()

    def let_go(self) -> None:
        self._ghosts.clear()
        for session in sorted(self._old_sessions):
            self.node.store.writer_gone(session, self.node.now_ns)
        self._old_sessions.clear()

    def die(self) -> None:
        self.alive = False
        self.lose_connection()
        self.let_go()

    def ask(self, request: Request, then: Callable[[Reply], None]) -> None:
        assert self._step is None
        self._step = then
        self.asked_ns = self.node.now_ns
        session, generation = self.session, self.node.generation

        def arrive() -> None:
            if generation == self.node.generation and self.session == session:
                self.node.store.handle(session, request, self.node.now_ns)

        self.node.at(self.node.soon() // 10, arrive)

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

    def later(self, action: Callable[[], None]) -> None:
        """Do this after a while, unless the connection is lost first; later still if the process is stopped."""
        epoch = self._epoch

        def guarded() -> None:
            if self._epoch != epoch or not self.alive:
                return
            if self.is_stopped:
                self.node.at(self.stopped_until_ns - self.node.now_ns + 1, guarded)
            else:
                action()

        self.node.at(self.node.soon(), guarded)

    # ---- tasks

    def finish(self) -> None:
        self.later(self.choose_task)

    def choose_task(self) -> None:
        node, pick = self.node, self.node.random
        if node.strikes(node.faults.kill_store):
            node.kill_store()
        elif pick.random() < 0.01:
            node.was_reset.add(self.namespace.digest)
            self.ask(Reset(2), lambda reply: self.finish())
        elif pick.random() < 0.5:
            self.save(pick.choice(node.prompts))
        else:
            self.load(pick.choice(node.prompts))

    def _interrupt(self) -> bool:
        """Faults that strike in the middle of the work. True if it cannot go on now."""
        node = self.node
        if node.strikes(node.faults.crash_client):
            node.replace(self)
        elif node.strikes(node.faults.drop_connection):
            node.seen["drop_connection"] += 1
            self.lose_connection()
        elif node.strikes(node.faults.stop_client):
            node.seen["stop_client"] += 1
            self.stopped_until_ns = node.now_ns + node.random.choice((SECOND_NS // 10, 8 * SECOND_NS))
        elif node.strikes(node.faults.scribble):
            node.seen["scribble"] += 1
            node.arena[node.random.randrange(node.arena_bytes)] ^= 1 << node.random.randrange(8)
        for pieces in self._ghosts:
            node.write(pieces, b"\xee" * sum(pieces[1::2]))
        return not self.session or self.is_stopped

    def save(self, prompt: bytes) -> None:
        ends, chains = boundaries(prompt)
        objects = []
        for index, chain in enumerate(chains):
            start, parent = (ends[index - 1], chains[index - 1]) if index else (0, ROOT_CHAIN)
            for group, spec in enumerate(self.namespace.groups):
                if spec.kind is GroupKind.RECURRENT and self.node.random.random() < 0.3:
                    continue  # not every boundary has a state
                for rank in range(self.namespace.ranks):
                    length = self.namespace.object_bytes(group, rank, ends[index] - start)
                    objects.append(PutObject(chain, parent, start, ends[index], group, rank, length))
        if objects:
            self.ask(PutBegin(3, objects), lambda reply: self._on_put_slots(objects, reply))
        else:
            self.finish()

    def _on_put_slots(self, objects: list[PutObject], reply: Reply) -> None:
        assert isinstance(reply, PutSlots), reply
        for item, slot in zip(objects, reply.slots, strict=True):
            if slot.status == PutStatus.WRITE:
                key = ObjectKey(self.namespace.digest, item.chain, item.group, item.rank)
                self._writing.append((slot.put, key, slot.pieces, item.length_bytes))
        self.later(lambda: self._write(half=True))

    def _write(self, *, half: bool) -> None:
        """Write the objects that were begun: half of each, then the rest. The writer may be stopped in between."""
        if self._interrupt():
            self.later(lambda: self._write(half=half))
            return
        for _, key, pieces, length in self._writing:
            data = content(key, length)
            self.node.write(pieces, data[: length // 2] if half else data)
        if half:
            self.later(lambda: self._write(half=False))
            return
        commit, abort = [], []
        for put, key, _, length in self._writing:
            if self.node.random.random() < 0.9:
                commit.append((put, object_checksum(key, length, [memoryview(content(key, length))])))
            else:
                abort.append(put)
        self.ask(PutEnd(4, commit, abort), self._on_put_end)

    def _on_put_end(self, reply: Reply) -> None:
        assert isinstance(reply, PutEnded), reply
        self.node.seen["committed"] += reply.committed
        self.node.seen["rejected"] += len(reply.rejected)
        self._writing.clear()
        self.finish()

    def load(self, prompt: bytes) -> None:
        pick = self.node.random
        ends, self._chains = boundaries(prompt)
        have: list[int] = []
        if ends and pick.random() < 0.3:
            local = pick.choice(ends)
            have = [0 if spec.kind is GroupKind.RECURRENT else local for spec in self.namespace.groups]
        request = Lookup(
            5,
            b"".join(self._chains),
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
        )
        self.ask(request, lambda reply: self._on_found(reply, early=request.early))

    def _on_found(self, reply: Reply, *, early: bool) -> None:
        assert isinstance(reply, Found), reply
        self.node.seen["hit" if reply.end_tokens else "miss"] += 1
        if not reply.lease:
            self.finish()
        elif reply.staging:
            self._awaited_lease = reply.lease
            self.asked_ns = self.node.now_ns
            self._go_on(reply.lease)
            if early and self._awaited_lease:
                self.later(lambda: self._come_to(reply.lease))
        else:
            self._get_slots(reply.lease)

    def _go_on(self, lease: int) -> None:
        """Use this lease, if it is the one that the client waits for and it is staged."""
        if self._awaited_lease == lease and lease in self._staged:
            self._awaited_lease = 0
            self._on_staged(self._staged[lease])

    def _come_to(self, lease: int) -> None:
        """The scheduler gets to a request that was looked up early, or the request is aborted before that."""
        if self._awaited_lease != lease:
            return
        if self.node.random.random() < 0.3:
            self.node.seen["cancelled"] += 1
            self._awaited_lease = 0
            self.ask(Release(7, [lease]), lambda reply: self.finish())
        else:
            self.node.seen["wanted"] += 1
            rate = self.node.random.choice(RATES)
            self.ask(Wanted(8, lease, rate), lambda reply: self._go_on(lease))

    def _on_staged(self, reply: Staged) -> None:
        self.node.seen["staged" if reply.end_tokens else "staging_failed"] += 1
        self.node.seen["slow_tier"] += reply.reason == MissReason.SLOW_TIER
        if reply.end_tokens:
            self._get_slots(reply.lease)
        else:
            self.finish()

    def _get_slots(self, lease: int) -> None:
        rank = self.node.random.randrange(self.namespace.ranks)
        self.ask(SlotsGet(6, lease, rank), lambda reply: self._on_slots(lease, rank, reply))

    def _on_slots(self, lease: int, rank: int, reply: Reply) -> None:
        assert isinstance(reply, Slots), reply
        if reply.reason:
            self.node.seen[f"slots:{reply.reason}"] += 1
            excused = self.node.faults.scribble or self.namespace.digest in self.node.was_reset
            assert excused or not self.node.is_leased(lease), f"the slots of a promised hit: {reply.reason}"
        self.later(lambda: self._copy(lease, rank, reply))

    def _copy(self, lease: int, rank: int, slots: Slots) -> None:
        """Copy out and verify, as an engine does before it may read. The lease may have expired meanwhile."""
        if self._interrupt():
            self.later(lambda: self._copy(lease, rank, slots))
            return
        bad = []
        for slot in slots.slots:
            key = ObjectKey(self.namespace.digest, self._chains[slot.index], slot.group, rank)
            data = self.node.read(slot.pieces)
            if object_checksum(key, slot.length_bytes, [memoryview(data)]) != slot.checksum:
                bad.append((lease, slot.index, slot.group, rank))
                excused = self.node.faults.scribble or not self.node.is_leased(lease)
                assert excused, "a leased object did not verify although nobody scribbled"
                self.node.seen["bad"] += 1
            elif data != content(key, slot.length_bytes):
                raise WrongByte(f"{key} verified with wrong bytes")
            else:
                self.node.seen["verified"] += 1
        self.ask(Release(7, [lease], bad), lambda reply: self.finish())
