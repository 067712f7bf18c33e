"""Puts: objects being written by clients, from the request for slots to commit or abort, and slots in limbo.

    PutBegin ─▶ pending ──PutEnd commit──▶ resident in the arena ─▶ `lower`: copied down
                   └──PutEnd abort, deadline, disconnect──▶ nothing is published

A slot whose writer missed its deadline or disconnected may still be written to. It goes to *limbo* and is reused only
when the writer says that it is done (a late PutEnd) or when its process is gone (`writer_gone`).

Owns open writes and limbo. Neighbours: `lower` (right: takes what was committed), `store` (left: it takes the nodes
that settled and tells `lookups`, which may wait for them). No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvtally.core.keys import CHAIN_BYTES
from kvtally.core.residency import ChainConflict, Family, Node
from kvtally.core.space import Piece, round_up
from kvtally.store.alarms import Alarm
from kvtally.store.context import Context, Session
from kvtally.store.lower import LowerTiers
from kvtally.wire.messages import PutBegin, PutEnd, PutEnded, PutObject, PutSlot, PutSlots, PutStatus

_ANSWERS = {status: PutSlot(status) for status in PutStatus}  # for all answers without a slot


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


class Puts:
    def __init__(self, context: Context, lower: LowerTiers) -> None:
        self._context = context
        self._residency = context.residency
        self._lower = lower
        self._puts: dict[int, Put] = {}
        self._limbo: dict[int, dict[int, tuple[Piece, ...]]] = {}  # session -> put -> pieces
        self._gone: set[int] = set()  # sessions whose process is gone but whose socket has not closed yet
        self._settled: list[Node] = []

    def take_settled(self) -> list[Node]:
        """The nodes in which an object stopped being pending since the last call."""
        settled, self._settled = self._settled, []
        return settled

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
        shifts = [tier * family.width for tier in self._context.owned_tiers(now_ns)]
        room_bytes = self._residency.space.capacity_bytes // 2 - session.put_bytes  # nobody may lease more than half
        try:
            for item in request.objects:
                node, bit, status = self._status(family, item, shifts)
                if status is PutStatus.WRITE and item.length_bytes > room_bytes:
                    self._residency.settle(node)
                    status = PutStatus.FULL
                elif status is PutStatus.WRITE:
                    self._residency.begin(node, bit)  # from now on its boundary is not evicted
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
        self._residency.touch_up(present)  # together: each alone would walk up to the root
        self._open(session, wanted, slots, now_ns)
        self._context.counts.puts.full += slots.count(_ANSWERS[PutStatus.FULL])
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
        """Give out slots for what is to be written, as far as there is room."""
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
            self._context.counts.puts.begun += len(numbers)

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
                self._context.counts.puts.aborted += 1
                discarded.append(put)
        for put in discarded:
            self._discard(put)
        self._context.counts.puts.rejected += len(rejected)
        self._context.counts.puts.committed += len(committed)
        self._context.counts.puts.bytes += sum(put.length_bytes for put in committed)
        self._residency.touch_up(put.node for put in committed)
        for put in committed:
            self._lower.write_behind(put.node, put.bit, now_ns)
        self._settled += [put.node for put in (*committed, *discarded)]
        self._context.send(session, PutEnded(request.id, len(committed), rejected))

    def _publish(self, put: Put, checksum: int) -> None:
        """Make an object readable. A tier that could not be read when the put began may hold the object, too: if it was
        staged since then, that copy stays; a copy with other bytes is dropped."""
        residency, node, bit = self._residency, put.node, put.bit
        self._context.spoiled.pop((node.family.namespace.digest, node.chain), None)
        if residency.arena_mask(node) >> bit & 1:
            residency.space.free(put.pieces)
            residency.end(node, bit)
            return
        if residency.differs(node, bit, put.length_bytes, checksum):
            self._lower.drop(node, bit)
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

    # ---- how an open write ends

    def _take(self, session: Session, number: int) -> Put | None:
        """Close one of the session's open puts. If it had expired into limbo, its slot is free: its writer is done."""
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
        """Publish nothing. The writer says that it is done, so the slot is free at once."""
        self._residency.space.free(put.pieces)
        self._residency.end(put.node, put.bit)

    def _expire(self, numbers: list[int], now_ns: int) -> None:
        for number in numbers:
            if number in self._puts:
                session = self._context.sessions[self._puts[number].session]
                self._context.counts.puts.expired += 1
                self._to_limbo(session, number)

    def _to_limbo(self, session: Session, number: int) -> None:
        put = self._take(session, number)
        assert put is not None
        self._limbo.setdefault(session.id, {})[number] = put.pieces
        session.put_bytes += put.length_bytes  # it may still write there
        self._residency.end(put.node, put.bit)
        self._settled.append(put.node)

    def disconnect(self, session: Session) -> None:
        self._context.counts.puts.aborted += len(session.puts)
        for number in sorted(session.puts):
            self._to_limbo(session, number)
        if session.id in self._gone or not session.shared_memory:
            self._gone.discard(session.id)
            self._free_limbo(session.id)

    def reset(self, family: Family) -> None:
        """Open writes of this family will not be published."""
        for put in [put for put in self._puts.values() if put.node.family is family]:
            self._context.counts.puts.aborted += 1
            self._to_limbo(self._context.sessions[put.session], put.id)

    def writer_gone(self, session_id: int) -> None:
        session = self._context.sessions.get(session_id)
        if session is not None:
            self._gone.add(session_id)
            session.shared_memory = False  # it has unmapped the arena, so it gets no more slots
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
