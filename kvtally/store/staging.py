"""Staging: leased objects brought up from lower tiers into the arena, within a budget of bytes, in the order asked for.

    want ─▶ queue ─▶ pump: arena pieces, ReadJob ─▶ read: resident, or a reason ─▶ `on_end` with a lease's last object

Several leases may wait for one object: it is read once. Owns what is on its way; what a lease promises is for `reads`.
Neighbours: `reads` (left), `mover` (right: carries ReadJobs out and verifies). No I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtally.core.keys import ObjectKey
from kvtally.core.residency import Family, Node
from kvtally.core.space import Piece
from kvtally.store.context import FIRST_PAUSE_NS, Alarm, Context, Session
from kvtally.store.jobs import Outcome, ReadJob
from kvtally.store.tiers.base import ObjectRecord
from kvtally.wire.messages import Lookup, MissReason

INTEGRITY_CODES = ("KV-401", "KV-402")


@dataclass(slots=True)
class Lease:
    """Everything one hit needs, pinned until released or expired."""

    id: int
    session: Session
    family: Family
    request: Lookup
    path: list[Node | None]
    end_tokens: int
    needs: list[tuple[int, Node, int]]  # boundary index (rising), node, mask of objects
    alarm: Alarm
    awaited: set[tuple[Node, int]] = field(default_factory=set)  # objects still on their way up
    announced: bool = True  # False while the client waits for `Staged`
    started_ns: int = 0
    staged_bytes: int = 0
    staged: set[Node] = field(default_factory=set)  # boundaries of which something came from a lower tier
    reason: str = ""
    may_aim_lower: bool = False  # something that was to be staged has left the index


@dataclass(slots=True)
class Rising:
    """One object on its way up; several leases may wait for it."""

    tier: int
    leases: list[Lease]
    pieces: tuple[Piece, ...] = ()


class Staging:
    """`record` and `remove` are the write half's ways to describe an object and to take one out of a lower tier."""

    def __init__(
        self,
        context: Context,
        record: Callable[[Node, int], ObjectRecord],
        remove: Callable[[int, Sequence[ObjectKey]], None],
        on_end: Callable[[Lease, int], None],
    ) -> None:
        self._context = context
        self._residency = context.residency
        self._record = record
        self._remove = remove
        self._on_end = on_end
        self._rising: dict[tuple[Node, int], Rising] = {}
        self._queue: deque[tuple[Node, int]] = deque()  # what waits for the byte budget
        self._reading: dict[int, tuple[Node, int]] = {}  # ReadJob -> what it brings up
        self.reading_bytes = 0
        self._budget_bytes = context.limits.staging_bytes or self._residency.space.capacity_bytes // 4

    def want(self, lease: Lease, node: Node, bit: int, now_ns: int) -> None:
        key = (node, bit)
        lease.awaited.add(key)
        known = self._rising.get(key)
        if known is not None:
            known.leases.append(lease)
            return
        readable = self._context.readable_tiers(now_ns)[1:]
        tier = next(tier for tier in readable if self._residency.tier_mask(node, tier) >> bit & 1)
        self._rising[key] = Rising(tier, [lease])
        self._residency.pin(node)
        self._queue.append(key)

    def pump(self, now_ns: int) -> None:
        """Start as many reads as the byte budget allows, in the order they were asked for."""
        while self._queue:
            node, bit = self._queue[0]
            rising = self._rising[node, bit]
            if not rising.leases:  # everybody who wanted it has gone
                self._queue.popleft()
                self._end(node, bit, "", now_ns)
                continue
            length = self._residency.length_bytes(node, bit)
            if self.reading_bytes and self.reading_bytes + length > self._budget_bytes:
                return
            self._queue.popleft()
            pieces = self._residency.allocate(length)
            if pieces is None:
                self._end(node, bit, MissReason.ARENA_FULL, now_ns)
                continue
            rising.pieces = pieces
            self.reading_bytes += length
            job = ReadJob(id=self._context.new_id(), tier=rising.tier, record=self._record(node, bit), pieces=pieces)
            self._reading[job.id] = (node, bit)
            self._context.jobs.append(job)

    def read(self, job: ReadJob, outcome: Outcome, now_ns: int) -> None:
        """A ReadJob ended."""
        node, bit = self._reading.pop(job.id)
        tier = self._context.tiers[job.tier - 1]
        length = job.record.length_bytes
        self.reading_bytes -= length
        reason = ""
        already = self._residency.arena_mask(node) >> bit & 1
        wanted = self._residency.tier_mask(node, job.tier) >> bit & 1  # not forgotten meanwhile
        if outcome.code or already or not wanted:
            self._residency.space.free(job.pieces)
        if outcome.code and not wanted:
            reason = MissReason.ABSENT  # forgotten while it was on its way: no fault of the tier
        elif outcome.code:
            reason = self._read_failed(job, outcome.code, node, bit, now_ns)
        else:
            tier.reads += 1
            tier.read_bytes += length
            tier.read_seconds += outcome.seconds
            tier.read_pause_ns = FIRST_PAUSE_NS
            self._context.counts.staged_objects += 1
            self._context.counts.staged_bytes += length
            if wanted and not already:
                self._residency.publish(node, bit, job.pieces, length, job.record.checksum)
            for lease in self._rising[node, bit].leases:
                lease.staged_bytes += length
        self._end(node, bit, reason, now_ns)
        self.pump(now_ns)

    def _read_failed(self, job: ReadJob, code: str, node: Node, bit: int, now_ns: int) -> str:
        tier = self._context.tiers[job.tier - 1]
        tier.errors[code] += 1
        if code not in (*INTEGRITY_CODES, "KV-603"):
            tier.read_failed(now_ns)
            return MissReason.STAGING_FAILED
        if code in INTEGRITY_CODES:
            self._context.note_quarantine(tier.info.name, code, node, bit)
        self._residency.drop(node, bit, job.tier)
        self._remove(job.tier, [job.record.key])
        return MissReason.CHECKSUM if code in INTEGRITY_CODES else MissReason.ABSENT

    def _end(self, node: Node, bit: int, reason: str, now_ns: int) -> None:
        rising = self._rising.pop((node, bit))
        for lease in rising.leases:
            lease.awaited.discard((node, bit))
            lease.reason = lease.reason or reason
            lease.may_aim_lower |= reason in (MissReason.CHECKSUM, MissReason.ABSENT)
            if not reason:
                lease.staged.add(node)
            if not lease.awaited:
                self._on_end(lease, now_ns)
        self._residency.unpin(node)

    def forget(self, lease: Lease) -> None:
        """The lease is gone: what nobody else waits for is not brought up any more, unless its read has begun."""
        for key in lease.awaited:
            self._rising[key].leases.remove(lease)

    def pieces(self) -> list[Piece]:
        """Every piece that a read may be writing to (for `check`)."""
        return [piece for key in self._reading.values() for piece in self._rising[key].pieces]

    def check(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            assert all(lease in self._rising[key].leases for key in lease.awaited)
        assert self.reading_bytes <= max(self._budget_bytes, self._context.limits.object_bytes)
