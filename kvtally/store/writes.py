"""The write half of the store: put begin → write → commit or abort, write-behind to lower tiers, and slots in limbo.

    PutBegin ─▶ pending ──PutEnd commit──▶ resident in the arena ──WriteJob──▶ resident in a lower tier
                   └──PutEnd abort, deadline, disconnect──▶ nothing is published

A slot whose writer stopped answering (deadline) or disconnected may still be written to. It goes to *limbo* and is
reused only when the writer says that it is done (a late PutEnd) or when its process is gone (`writer_gone`).

Neighbours: `lookups` (told of commits, for lookups that wait), `core.residency` (where objects are). No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvtally.core.keys import CHAIN_BYTES, ObjectKey
from kvtally.core.residency import ChainConflict, Family, Node
from kvtally.core.space import Piece, round_up
from kvtally.store.context import FIRST_PAUSE_NS, Alarm, Context, Session, TierState
from kvtally.store.jobs import Outcome, RemoveJob, WriteJob
from kvtally.store.tiers.base import ObjectRecord
from kvtally.wire.messages import PutBegin, PutEnd, PutEnded, PutObject, PutSlot, PutSlots, PutStatus

MOST_ATTEMPTS = 5  # at a write for which a tier has no room; before each, twice as much is evicted as before the last
MOST_FAILURES = 5  # of the device, at one object, before it is given up

_ANSWERS = {status: PutSlot(status) for status in PutStatus}  # of all that need no slot


@dataclass(slots=True)
class Batch:
    """The open writes of one request, which share a deadline."""

    alarm: Alarm | None = None
    open: int = 0


@dataclass(slots=True)
class Put:
    """An open write."""

    id: int
    session: int
    node: Node
    bit: int
    pieces: tuple[Piece, ...]
    length_bytes: int
    batch: Batch


class Writes:
    """`on_change(node)` is called whenever an object of a node stopped being pending."""

    def __init__(self, context: Context, on_change: Callable[[Node, int], None]) -> None:
        self._context = context
        self._residency = context.residency
        self._on_change = on_change
        self._puts: dict[int, Put] = {}
        self._limbo: dict[int, dict[int, tuple[Piece, ...]]] = {}  # session -> put -> pieces
        self._gone: set[int] = set()  # sessions whose process is gone but whose socket has not closed yet
        self._writing: dict[int, tuple[Node, int, int]] = {}  # WriteJob -> what it copies, and to which tier
        self._newest: dict[tuple[int, ObjectKey], int] = {}  # tier, key -> the last WriteJob that is not done

    # ---- requests

    def begin(self, session: Session, request: PutBegin, now_ns: int) -> None:
        family = session.family
        assert family is not None
        problem = self._problem(session, family, request)
        if problem:
            self._context.refuse(session, request.id, *problem)
            return
        slots: list[PutSlot] = []
        wanted: list[tuple[int, Node, int, int]] = []  # place in the answer, node, bit, length
        present: list[Node] = []
        shifts = [tier * family.width for tier in self._context.readable_tiers(now_ns)]
        room_bytes = self._residency.space.capacity_bytes // 2 - session.put_bytes  # nobody may lease more than half
        try:
            for item in request.objects:
                node, bit, status = self._status(family, item, shifts)
                if status is PutStatus.WRITE and item.length_bytes > room_bytes:
                    self._residency.settle(node)
                    status = PutStatus.FULL
                elif status is PutStatus.WRITE:
                    self._residency.begin(node, bit)  # from now on eviction does not take its boundary
                    wanted.append((len(slots), node, bit, item.length_bytes))
                    room_bytes -= item.length_bytes
                elif status is PutStatus.PRESENT:
                    present.append(node)
                slots.append(_ANSWERS[status])
        except ChainConflict as conflict:
            for _, node, bit, _ in wanted:
                self._residency.end(node, bit)
            remedy = "Client and store disagree about chains: restart the client, and report this if it comes back."
            self._context.refuse(session, request.id, "KV-200", str(conflict), remedy)
            return
        self._residency.touch_up(present)  # all at once: each alone would walk up to the root
        self._open(session, wanted, slots, now_ns)
        self._context.counts.puts_full += slots.count(_ANSWERS[PutStatus.FULL])
        self._context.send(session, PutSlots(request.id, slots))

    def _status(self, family: Family, item: PutObject, shifts: list[int]) -> tuple[Node, int, PutStatus]:
        node = self._residency.ensure(family, item.chain, item.parent, item.start_tokens, item.end_tokens)
        bit = item.group * family.ranks + item.rank
        for shift in shifts:
            if node.held >> (shift + bit) & 1:
                return node, bit, PutStatus.PRESENT
        return node, bit, PutStatus.PENDING if node.pending >> bit & 1 else PutStatus.WRITE

    def _open(
        self, session: Session, wanted: list[tuple[int, Node, int, int]], slots: list[PutSlot], now_ns: int
    ) -> None:
        """Lease slots for what is to be written, as far as there is room."""
        places = self._residency.allocate_all([length for _, _, _, length in wanted])
        batch = Batch()
        numbers = []
        for (position, node, bit, length), pieces in zip(wanted, places, strict=True):
            if pieces is None:
                self._residency.end(node, bit)
                slots[position] = _ANSWERS[PutStatus.FULL]
                continue
            number = self._context.new_id()
            numbers.append(number)
            self._puts[number] = Put(number, session.id, node, bit, pieces, length, batch)
            session.put_bytes += length
            slots[position] = PutSlot(PutStatus.WRITE, number, [value for piece in pieces for value in piece])
        if numbers:
            session.puts.update(numbers)
            batch.open = len(numbers)
            deadline_ns = now_ns + self._context.limits.lease_ns
            batch.alarm = self._context.alarms.set(deadline_ns, partial(self._expire, numbers))
            self._context.counts.puts_begun += len(numbers)

    def end(self, session: Session, request: PutEnd, now_ns: int) -> None:
        rejected = []
        committed: list[Put] = []
        discarded: list[Put] = []
        for number, checksum in request.commit:
            put = self._take(session, number)
            if put is None or not 0 <= checksum < 1 << 64:
                rejected.append(number)
                discarded += [put] if put is not None else []
                continue
            self._publish(put, checksum)
            committed.append(put)
        for number in request.abort:
            put = self._take(session, number)
            if put is not None:
                self._context.counts.puts_aborted += 1
                discarded.append(put)
        for put in discarded:
            self._discard(put)
        self._context.counts.puts_rejected += len(rejected)
        self._context.counts.puts_committed += len(committed)
        self._context.counts.put_bytes += sum(put.length_bytes for put in committed)
        self._residency.touch_up(put.node for put in committed)
        if self._context.tiers:
            for put in committed:
                self._write_behind(put.node, put.bit, now_ns)
        # Only now may lookups that wait go on: staging for one may evict what was committed a moment ago.
        for put in (*committed, *discarded):
            self._on_change(put.node, now_ns)
        self._context.send(session, PutEnded(request.id, len(committed), rejected))

    def _publish(self, put: Put, checksum: int) -> None:
        """A tier that could not be read when the put began may hold the object after all: what was staged from it
        meanwhile stays, and a copy of other bytes goes."""
        residency, node, bit = self._residency, put.node, put.bit
        if residency.arena_mask(node) >> bit & 1:
            residency.space.free(put.pieces)
            residency.end(node, bit)
            return
        for tier in range(1, residency.tiers):
            if residency.differs(node, bit, put.length_bytes, checksum) and residency.tier_mask(node, tier) >> bit & 1:
                residency.drop(node, bit, tier)
                self.remove(tier, [node.family.key(node, bit)])
        residency.commit(node, bit, put.pieces, put.length_bytes, checksum)

    def _problem(self, session: Session, family: Family, request: PutBegin) -> tuple[str, str, str] | None:
        limits = self._context.limits
        if len(request.objects) > limits.objects_per_put:
            message = f"{len(request.objects)} objects in one put, at most {limits.objects_per_put} are allowed"
            return "KV-302", message, "Split the put."
        if len(session.puts) + len(request.objects) > limits.open_puts_per_client:
            message = (
                f"this client has {len(session.puts)} open puts, at most {limits.open_puts_per_client} are allowed"
            )
            return "KV-302", message, "Commit or abort what is open first."
        groups = len(family.namespace.groups)
        for item in request.objects:
            if (
                len(item.chain) != CHAIN_BYTES
                or len(item.parent) != CHAIN_BYTES
                or not 0 <= item.start_tokens < item.end_tokens < 1 << 32
            ):
                return "KV-503", "a put names a malformed boundary", "Chain values are 32 bytes; start is below end."
            if not (
                0 <= item.group < groups
                and 0 <= item.rank < family.ranks
                and 0 < item.length_bytes <= limits.object_bytes
            ):
                message = f"a put names group {item.group}, rank {item.rank}, {item.length_bytes} bytes"
                remedy = f"There are {groups} groups, {family.ranks} ranks, and at most {limits.object_bytes} bytes."
                return "KV-503", message, remedy
        return None

    # ---- ends of an open write

    def _take(self, session: Session, number: int) -> Put | None:
        """The session's open put, no longer open. One that expired into limbo is freed: its writer says it is done."""
        put = self._puts.get(number)
        if put is None or put.session != session.id:
            pieces = self._limbo.get(session.id, {}).pop(number, None)
            if pieces is not None:
                session.put_bytes -= sum(piece.length for piece in pieces)
                self._residency.space.free(pieces)
            return None
        del self._puts[number]
        session.puts.discard(number)
        session.put_bytes -= put.length_bytes
        put.batch.open -= 1
        if not put.batch.open and put.batch.alarm is not None:
            self._context.alarms.cancel(put.batch.alarm)
        return put

    def _discard(self, put: Put) -> None:
        """Nothing is published; the writer is known to be done, so the slot is free at once."""
        self._residency.space.free(put.pieces)
        self._residency.end(put.node, put.bit)

    def _expire(self, numbers: list[int], now_ns: int) -> None:
        for number in numbers:
            if number in self._puts:
                session = self._context.sessions[self._puts[number].session]
                self._context.counts.puts_expired += 1
                self._to_limbo(session, number, now_ns)

    def _to_limbo(self, session: Session, number: int, now_ns: int) -> None:
        put = self._take(session, number)
        assert put is not None
        self._limbo.setdefault(session.id, {})[number] = put.pieces
        session.put_bytes += put.length_bytes  # still its own to write to
        self._residency.end(put.node, put.bit)
        self._on_change(put.node, now_ns)

    def disconnect(self, session: Session, now_ns: int) -> None:
        self._context.counts.puts_aborted += len(session.puts)
        for number in sorted(session.puts):
            self._to_limbo(session, number, now_ns)
        if session.id in self._gone or not session.shared_memory:
            self._gone.discard(session.id)
            self._free_limbo(session.id)

    def reset(self, family: Family, now_ns: int) -> None:
        """Open writes of this family are not to be published any more."""
        for put in [put for put in self._puts.values() if put.node.family is family]:
            self._context.counts.puts_aborted += 1
            self._to_limbo(self._context.sessions[put.session], put.id, now_ns)

    def writer_gone(self, session_id: int) -> None:
        session = self._context.sessions.get(session_id)
        if session is not None:
            self._gone.add(session_id)
            session.shared_memory = False  # it has let go of the arena: nothing more is handed out to it
        else:
            self._free_limbo(session_id)

    def _free_limbo(self, session_id: int) -> None:
        for pieces in self._limbo.pop(session_id, {}).values():
            self._residency.space.free(pieces)

    @property
    def limbo_bytes(self) -> int:
        return sum(
            round_up(piece.length) for puts in self._limbo.values() for pieces in puts.values() for piece in pieces
        )

    def open_pieces(self) -> list[Piece]:
        """Every piece that a writer may be writing to (for `check`)."""
        slots = [put.pieces for put in self._puts.values()]
        slots += [pieces for puts in self._limbo.values() for pieces in puts.values()]
        return [piece for pieces in slots for piece in pieces]

    # ---- lower tiers

    def _write_behind(self, node: Node, bit: int, now_ns: int) -> None:
        """Queue the object for every lower tier that takes it. One that cannot keep up takes it later, if it is still
        in the arena then: only what is queued is held there, and nobody waits."""
        for number, tier in enumerate(self._context.tiers, 1):
            if self._residency.tier_mask(node, number) >> bit & 1:
                continue
            if self._must_wait(tier, node, bit):
                tier.postpone(node, bit)
            else:
                self._queue_write(number, node, bit, now_ns)

    def _is_in_arena(self, node: Node, bit: int) -> bool:
        """Whether it still is: a job or a queue may know it for longer than the index does."""
        is_known = node.family.nodes.get(node.chain) is node
        return is_known and not node.family.is_forgotten and bool(self._residency.arena_mask(node) >> bit & 1)

    def _must_wait(self, tier: TierState, node: Node, bit: int) -> bool:
        """Whether it is too much for the tier now, or would come before the removal of what a reset has forgotten."""
        if self._residency.is_sweeping(node.family.namespace):
            return True
        size = round_up(self._residency.length_bytes(node, bit))
        # What is queued is held in the arena, which must not be held by a disk that hangs.
        most = min(self._context.limits.write_behind_bytes, self._residency.space.capacity_bytes // 4)
        return tier.queued_bytes > 0 and tier.queued_bytes + size > most

    def _queue_write(
        self, number: int, node: Node, bit: int, now_ns: int, *, attempt: int = 0, failures: int = 0
    ) -> None:
        tier = self._context.tiers[number - 1]
        size = round_up(self._residency.length_bytes(node, bit))
        if not tier.writable(now_ns):
            tier.postpone(node, bit, failures)
            return
        if not self._make_room(number, size):
            tier.dropped += 1
            return
        record = self.record(node, bit)
        if tier.unremoved:
            self.remove(number, ())
        tier.queued_bytes += size
        tier.write_speed.began(now_ns)
        self._residency.pin(node)
        job = self._context.new_id()
        self._writing[job] = (node, bit, number)
        self._newest[number, record.key] = job
        pieces = self._residency.pieces(node, bit)
        self._context.jobs.append(
            WriteJob(id=job, tier=number, record=record, pieces=pieces, attempt=attempt, failures=failures)
        )

    def catch_up_all(self, now_ns: int) -> None:
        """What waited for a sweep need not wait for it any more."""
        for number in range(1, self._residency.tiers):
            self._catch_up(number, now_ns)

    def _catch_up(self, number: int, now_ns: int) -> None:
        """A tier has written something, or may be tried again: it takes what had to wait."""
        tier = self._context.tiers[number - 1]
        while tier.postponed and tier.writable(now_ns):
            node, bit = next(iter(tier.postponed))
            is_there = self._is_in_arena(node, bit)
            if is_there and self._must_wait(tier, node, bit):
                return
            failures = tier.postponed.pop((node, bit))
            if not is_there:
                tier.dropped += 1
            elif not self._residency.tier_mask(node, number) >> bit & 1:
                self._queue_write(number, node, bit, now_ns, failures=failures)

    def _make_room(self, number: int, size_bytes: int) -> bool:
        """Evict from a lower tier until the object fits beside what is there and what is on its way."""
        tier = self._context.tiers[number - 1]
        capacity_bytes = tier.info.capacity_bytes
        if capacity_bytes is None:
            return True
        if tier.queued_bytes + size_bytes > capacity_bytes:
            return False  # to evict everything would not help
        while self._residency.lower_bytes[number] + tier.queued_bytes + size_bytes > capacity_bytes:
            keys = self._residency.evict(number)
            if not keys:
                return False
            self.remove(number, keys)
        return True

    def _write_again(self, job: WriteJob, node: Node, bit: int, now_ns: int) -> bool:
        """The tier's free bytes lie in too many pieces for this object: evict more and try once more. It ends, because
        attempts are counted and each evicts something."""
        if job.attempt + 1 >= MOST_ATTEMPTS or not self._is_current(job, node, bit):
            return False
        wanted_bytes = round_up(job.record.length_bytes) << job.attempt
        least_bytes = self._residency.lower_bytes[job.tier] - wanted_bytes
        evicted: list[ObjectKey] = []
        while self._residency.lower_bytes[job.tier] > least_bytes:
            keys = self._residency.evict(job.tier)
            if not keys:
                break
            evicted += keys
        if evicted:
            self.remove(job.tier, evicted)
            self._queue_write(job.tier, node, bit, now_ns, attempt=job.attempt + 1)
        return bool(evicted)

    def _write_failed(self, job: WriteJob, code: str, node: Node, bit: int, now_ns: int) -> None:
        """Leave the tier alone for a while, then try again what is still in the arena: the device may be back.

        Only the job that found the device failing counts that against its object; the others failed with it. So one
        that can never be written is given up in the end, and does not stop the tier again and again.
        """
        tier = self._context.tiers[job.tier - 1]
        tier.errors[code] += 1
        failures = job.failures
        if tier.writable(now_ns):
            failures += 1
            tier.write_failed(now_ns)
            self._context.alarms.set(tier.write_paused_until_ns, partial(self._catch_up, job.tier))
        if failures < MOST_FAILURES and self._is_current(job, node, bit):
            tier.postpone(node, bit, failures)
        else:
            tier.dropped += 1

    def _is_current(self, job: WriteJob, node: Node, bit: int) -> bool:
        """Whether what a job copies is what the arena holds, not forgotten (reset, quarantine) or saved anew since."""
        record = job.record
        return self._is_in_arena(node, bit) and not self._residency.differs(
            node, bit, record.length_bytes, record.checksum
        )

    def remove(self, number: int, keys: Iterable[ObjectKey], *, is_last: bool = True) -> int:
        """Take objects out of a lower tier, and with them (`is_last`: of several removals with the last of them) what
        an earlier removal failed to take out; the job's id. But not what is saved anew and on its way down: where that
        fails, the old copy is still to be taken out."""
        tier = self._context.tiers[number - 1]
        again = [key for key in tier.unremoved if (number, key) not in self._newest] if is_last else []
        for key in again:
            del tier.unremoved[key]
        job = RemoveJob(id=self._context.new_id(), tier=number, keys=(*again, *keys))
        tier.removing += 1
        if again:
            tier.retrying.add(job.id)
        self._context.jobs.append(job)
        return job.id

    def removed(self, job: RemoveJob, outcome: Outcome) -> None:
        tier = self._context.tiers[job.tier - 1]
        tier.removing -= 1
        tier.retrying.discard(job.id)
        if outcome.code:
            tier.errors[outcome.code] += 1
            tier.unremoved.update(dict.fromkeys(job.keys))
        elif tier.unremoved:
            for key in job.keys:
                tier.unremoved.pop(key, None)

    def record(self, node: Node, bit: int) -> ObjectRecord:
        assert node.parent is not None
        family = node.family
        return ObjectRecord(
            namespace=family.namespace,
            chain=node.chain,
            parent=node.parent.chain,
            start_tokens=node.start,
            end_tokens=node.end,
            group=bit // family.ranks,
            rank=bit % family.ranks,
            length_bytes=self._residency.length_bytes(node, bit),
            checksum=self._residency.checksum(node, bit),
        )

    def on_their_way(self, family: Family, number: int) -> list[ObjectKey]:
        """Objects of a family that are being written to a lower tier."""
        writes = self._writing.values()
        return [family.key(node, bit) for node, bit, tier in writes if tier == number and node.family is family]

    def written(self, job: WriteJob, outcome: Outcome, now_ns: int) -> None:
        node, bit, _ = self._writing.pop(job.id)
        place = (job.tier, job.record.key)
        if self._newest[place] == job.id:
            del self._newest[place]
        tier = self._context.tiers[job.tier - 1]
        length = job.record.length_bytes
        tier.queued_bytes -= round_up(length)
        tier.write_speed.ended(0 if outcome.code else length, now_ns)
        # What could not be removed may be what takes the room: then the device is at fault, and to evict more no help.
        if outcome.is_crowded and not tier.unremoved:
            tier.dropped += not self._write_again(job, node, bit, now_ns)
        elif outcome.code:
            self._write_failed(job, outcome.code, node, bit, now_ns)
        else:
            tier.writes += 1
            tier.write_bytes += length
            tier.write_seconds += outcome.seconds
            tier.write_pause_ns = FIRST_PAUSE_NS
            tier.unremoved.pop(job.record.key, None)  # replaced what a removal just before failed to take out
            if self._is_current(job, node, bit):
                self._residency.add(node, bit, job.tier, length, job.record.checksum)
            elif place not in self._newest:  # else a newer copy is on its way and replaces it
                self.remove(job.tier, [job.record.key])
        self._residency.unpin(node)
        self._catch_up(job.tier, now_ns)
