"""Staging: leased objects brought up from lower tiers into the arena, as `core.prefetch` plans it.

    want ─▶ planner ─▶ pump: arena pieces, ReadJob ─▶ read: resident, or a reason ─▶ the leases that await nothing more

Several leases may wait for one object, which is read once. An object that no lease waits for any more is given up,
unless its read has begun. What came from elsewhere is written behind, like what was saved here. Owns the objects on
their way up; what a lease promises is up to `leases`.
Neighbours: `leases` (left), `lower` (what cannot be read is taken out), `beliefs` and `peers` (what others have, and
whether they deliver it), `mover` (right: carries ReadJobs out and verifies). No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtally.core.prefetch import Planner
from kvtally.core.residency import Node
from kvtally.core.space import Piece
from kvtally.store.beliefs import Beliefs
from kvtally.store.context import Context
from kvtally.store.jobs import Outcome, ReadJob
from kvtally.store.lease import Lease, Part
from kvtally.store.lower import LowerTiers
from kvtally.store.peers import Peers
from kvtally.store.tier_state import FIRST_PAUSE_NS, TierKind
from kvtally.wire.messages import MissReason

INTEGRITY_CODES = ("KV-401", "KV-402")
PROBED_OBJECTS = 3


@dataclass(slots=True)
class Rising:
    """One object on its way up; several leases may wait for it."""

    tier: int
    leases: dict[int, Lease] = field(default_factory=dict)  # by id, because a thousand requests may share a prefix
    pieces: tuple[Piece, ...] = ()
    is_reading: bool = False
    is_probe: bool = False  # read only to measure the tier, until a lease waits for it


class Staging:
    """Methods in which a read may end return the leases that await nothing more."""

    def __init__(
        self, context: Context, planner: Planner[Part], lower: LowerTiers, beliefs: Beliefs, peers: Peers
    ) -> None:
        self._context = context
        self._planner = planner
        self._residency = context.residency
        self._lower = lower
        self._beliefs = beliefs
        self._peers = peers
        self._rising: dict[Part, Rising] = {}
        self._reading: dict[int, Part] = {}  # ReadJob -> what it brings up

    def source(self, node: Node, bit: int, readable: Sequence[int]) -> int:
        """The first of these tiers that holds the object; 0 if none does. Ask only for what is not in the arena."""
        for tier in readable:
            if self._residency.tier_mask(node, tier) >> bit & 1:
                return tier
        return 0

    def is_reading(self, node: Node, bit: int) -> bool:
        rising = self._rising.get((node, bit))
        return rising is not None and rising.is_reading

    def want(self, lease: Lease, node: Node, bit: int, readable: Sequence[int]) -> int:
        """A lease waits for this object. Returns the tier that it comes from."""
        key = (node, bit)
        lease.awaited.add(key)
        rising = self._rising.get(key)
        if rising is None:
            tier = self.source(node, bit, readable)
            assert tier  # the hit was found because of this tier
            rising = self._rising[key] = Rising(tier)
            self._residency.pin(node)
        rising.leases[lease.id] = lease
        rising.is_probe = False
        lease.tier = max(lease.tier, rising.tier)
        self._planner.ask(rising.tier, key, self._residency.length_bytes(node, bit), lease.id)
        return rising.tier

    def hasten(self, lease: Lease) -> None:
        """The lease has moved forward in the order: what it awaits moves with it."""
        for node, bit in lease.awaited:
            size_bytes = self._residency.length_bytes(node, bit)
            self._planner.ask(self._rising[node, bit].tier, (node, bit), size_bytes, lease.id)

    def pump(self, now_ns: int) -> list[Lease]:
        """Start as many reads as the planner allows."""
        done: list[Lease] = []
        for tier, state in enumerate(self._context.tiers, 1):
            while (key := self._planner.start(tier, state.speed.bytes_s)) is not None:
                node, bit = key
                gone = self._gone(tier, node, bit)
                pieces = self._residency.allocate(self._residency.length_bytes(node, bit)) if gone is None else None
                if pieces is None:
                    self._planner.ended(tier, key)
                    done += self._end(node, bit, MissReason.ARENA_FULL if gone is None else gone)
                else:
                    self._start(node, bit, pieces, now_ns)
        return done

    def _gone(self, tier: int, node: Node, bit: int) -> str | None:
        """Why there is nothing to read: an object may have left its tier since it was asked for. None: it has not."""
        if self._residency.tier_mask(node, tier) >> bit & 1:
            return None
        if self._residency.arena_mask(node) >> bit & 1:  # saved here meanwhile
            return ""
        is_peers = self._context.tiers[tier - 1].info.kind is TierKind.PEERS
        return MissReason.PEER_LOST if is_peers else MissReason.ABSENT

    def _start(self, node: Node, bit: int, pieces: tuple[Piece, ...], now_ns: int) -> None:
        rising = self._rising[node, bit]
        rising.pieces, rising.is_reading = pieces, True
        self._context.tiers[rising.tier - 1].speed.began(now_ns)
        job = ReadJob(
            id=self._context.new_id(),
            tier=rising.tier,
            record=self._lower.record(node, bit),
            pieces=pieces,
            place=self._beliefs.place(rising.tier, node, bit),
        )
        self._reading[job.id] = (node, bit)
        self._context.jobs.append(job)

    def probe(self, tier: int, keys: Iterable[Part], now_ns: int) -> None:
        """Read a few objects that nobody waits for, to measure the tier. Only if it is idle, only into free room."""
        if self._planner.tier_in_flight_bytes(tier):
            return
        for count, (node, bit) in enumerate(keys):
            if count == PROBED_OBJECTS or (node, bit) in self._rising:
                return
            size_bytes = self._residency.length_bytes(node, bit)
            pieces = self._residency.space.allocate(size_bytes)
            if pieces is None or not self._planner.begin(tier, (node, bit), size_bytes):
                self._residency.space.free(pieces or ())
                return
            self._rising[node, bit] = Rising(tier, is_probe=True)
            self._residency.pin(node)
            self._start(node, bit, pieces, now_ns)

    def read(self, job: ReadJob, outcome: Outcome, now_ns: int) -> list[Lease]:
        """A ReadJob ended."""
        node, bit = self._reading.pop(job.id)
        tier = self._context.tiers[job.tier - 1]
        length = job.record.length_bytes
        self._planner.ended(job.tier, (node, bit))
        tier.speed.ended(0 if outcome.code else length, now_ns)
        if self._rising[node, bit].is_probe:  # only the time counted; damage is found when the object is needed
            self._residency.space.free(job.pieces)
            return self._end(node, bit, "")
        reason = ""
        already = self._residency.arena_mask(node) >> bit & 1
        # Not forgotten while it was read. What others have may have left the index, and is right all the same.
        is_owned = self._context.is_owned(job.tier)
        wanted = self._residency.tier_mask(node, job.tier) >> bit & 1 if is_owned else not node.family.is_forgotten
        if outcome.code or already or not wanted:
            self._residency.space.free(job.pieces)
        if not wanted and not already:
            reason = MissReason.ABSENT  # it was forgotten while it was read, which is not the tier's fault
        if outcome.code and wanted:
            fail = self._read_failed if is_owned else self._not_delivered
            reason = fail(job, outcome.code, node, bit, now_ns)
        elif not outcome.code:
            tier.counts.reads += 1
            tier.counts.read_bytes += length
            tier.counts.read_seconds += outcome.seconds
            tier.read_pause_ns, tier.unreadable = FIRST_PAUSE_NS, 0
            self._context.counts.staged.objects += 1
            self._context.counts.staged.bytes += length
            if wanted and not already:
                self._residency.publish(node, bit, job.pieces, length, job.record.checksum)
            if not is_owned:
                self._delivered(job, node, bit, now_ns)
            for lease in self._rising[node, bit].leases.values():
                lease.staged_bytes += length
        return self._end(node, bit, reason, came=not outcome.code)

    def _delivered(self, job: ReadJob, node: Node, bit: int, now_ns: int) -> None:
        """What others hold has arrived: it is this store's own from now on."""
        self._beliefs.arrived(job.tier, node, bit, now_ns)
        if job.place is not None:
            self._peers.pulled(job.place.address, job.record.length_bytes)
        if self._residency.arena_mask(node) >> bit & 1:
            self._lower.write_behind(node, bit, now_ns)

    def _not_delivered(self, job: ReadJob, code: str, node: Node, bit: int, now_ns: int) -> str:
        """What others were said to hold has not arrived. Nothing of theirs is removed."""
        tier = self._context.tiers[job.tier - 1]
        tier.counts.errors[code] += 1
        if code in INTEGRITY_CODES:
            self._context.note_quarantine(tier.info.name, code, node, bit)
            self._beliefs.accuse(job.tier, node, bit)
            return MissReason.CHECKSUM
        self._beliefs.forget(job.tier, node, bit)
        if job.place is None:
            if code == "KV-603":
                return MissReason.ABSENT
            if tier.readable(now_ns):
                tier.object_unreadable(now_ns)
            return MissReason.STAGING_FAILED
        if code == "KV-605":
            return MissReason.LIMIT
        if code != "KV-603":
            self._peers.unreadable(job.place.address, now_ns)
        return MissReason.PEER_LOST

    def _read_failed(self, job: ReadJob, code: str, node: Node, bit: int, now_ns: int) -> str:
        """Drop an object that cannot be read. If it stayed in the index, it would be found and never saved again.

        Objects that were being read when the whole tier began to fail stay: they are probably there when it recovers.
        """
        tier = self._context.tiers[job.tier - 1]
        tier.counts.errors[code] += 1
        reason = MissReason.STAGING_FAILED
        if code in INTEGRITY_CODES:
            reason = MissReason.CHECKSUM
            self._context.note_quarantine(tier.info.name, code, node, bit)
        elif code == "KV-603":
            reason = MissReason.ABSENT
        elif tier.readable(now_ns):
            tier.object_unreadable(now_ns)
        else:
            return reason
        self._residency.drop(node, bit, job.tier)
        self._lower.remove(job.tier, [job.record.key])
        return reason

    def _end(self, node: Node, bit: int, reason: str, *, came: bool = False) -> list[Lease]:
        """An object is in the arena, or will not come. Returns the leases that awaited nothing else."""
        rising = self._rising.pop((node, bit))
        has_left = not self._residency.tier_mask(node, rising.tier) >> bit & 1
        for lease in rising.leases.values():
            lease.awaited.discard((node, bit))
            lease.reason = lease.reason or reason
            lease.may_aim_lower |= bool(reason) and has_left
            if came and not reason:
                lease.staged[node] = max(rising.tier, lease.staged.get(node, 0))
        self._residency.unpin(node)
        return [lease for lease in rising.leases.values() if not lease.awaited]

    def forget(self, lease: Lease, still: frozenset[Part] = frozenset()) -> None:
        """The lease no longer waits, except for `still`. Give up what no other lease waits for."""
        for key in lease.awaited - still:
            rising = self._rising[key]
            del rising.leases[lease.id]
            if not rising.leases and not rising.is_reading:
                self._planner.unask(rising.tier, key)
                del self._rising[key]
                self._residency.unpin(key[0])
        lease.awaited &= still

    def pieces(self) -> list[Piece]:
        """Every piece that a read may be writing to (for `check`)."""
        return [piece for key in self._reading.values() for piece in self._rising[key].pieces]

    def check(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            assert all(lease.id in self._rising[key].leases for key in lease.awaited)
        assert all(rising.leases or rising.is_reading for rising in self._rising.values())
        assert sum(piece.length for piece in self.pieces()) == self._planner.in_flight_bytes
