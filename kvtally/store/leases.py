"""Leases: what was found is held, brought into the arena, promised, and given back.

    begin ─▶ wait for room (`core.prefetch`) ─▶ all that the hit needs is pinned, what is not in the arena is staged
          ─▶ Staged: how much of the hit is really there ─▶ slots ─▶ release, or expiry

Only a boundary whose objects are all in the arena is promised. A lease for which nothing is to be staged and that is
wanted now is granted at once. Owns all leases; `lease` says which states one goes through. Neighbours: `lookups` (left:
what was found), `staging` (right: brings up what is not in the arena), `load_estimates` (load or compute). No I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from kvtally.core.hits import Hit
from kvtally.core.prefetch import Planner, worth_loading
from kvtally.core.residency import ARENA, Family, Node, each_bit
from kvtally.store.beliefs import LOAN_NS, Beliefs
from kvtally.store.context import Context, Session
from kvtally.store.jobs import Outcome, ReadJob
from kvtally.store.lease import Lease, LeaseState, Need, Part
from kvtally.store.load_estimates import LoadEstimates
from kvtally.store.lookup_view import View, hit_of, longest_possible, needs_of, path_of, view_of
from kvtally.store.lower import LowerTiers
from kvtally.store.peers import Peers
from kvtally.store.staging import Staging
from kvtally.store.tier_state import TierKind
from kvtally.wire.frames import fits
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import (
    ALL_RANKS,
    Done,
    Lookup,
    MissReason,
    Release,
    Slot,
    Slots,
    SlotsGet,
    Staged,
    Wanted,
)
from kvtally.wire.stats import Prefetched

MOST_TICKETS = 4_096  # of hand-offs, for which it is known what was pulled
PULLED_NS = 60 * SECOND_NS  # for how long
NUMBER_BYTES = 9  # the longest encoding of a number in a message
SLOT_BYTES = 6 + 5 * NUMBER_BYTES  # the longest encoding of a slot without its pieces


class Leases:
    def __init__(self, context: Context, lower: LowerTiers, beliefs: Beliefs, peers: Peers) -> None:
        self._context = context
        self._residency = context.residency
        self._leases: dict[int, Lease] = {}
        capacity_bytes = self._residency.space.capacity_bytes
        self.planner: Planner[Part] = Planner(
            tiers=len(context.tiers),
            arena_bytes=capacity_bytes * 3 // 4,  # the rest is for saves and for loads that are running
            in_flight_bytes=context.limits.staging_bytes or capacity_bytes // 4,
        )
        self._peer_bytes = 0  # in leases of peers
        # Ticket of a hand-off -> what was pulled for it, and from which tier. A hand-off may take several leases, and
        # chunks may come before its first one (`offers`).
        self._pulled_for: dict[str, dict[Node, int]] = {}
        self._is_room_new = False  # a lease that waits for room may fit now
        self.staging = Staging(context, self.planner, lower, beliefs, peers)
        self._estimates = LoadEstimates(context, self.planner, self.staging)

    def advance(self, now_ns: int) -> None:
        """After every event: grant what there is room for, start what may be read, and keep to the budgets."""
        while True:
            self._grant_waiting(now_ns)
            done = self.staging.pump(now_ns)
            if not done:
                break
            self._announce_all(done, now_ns)
        self.planner.check_budgets()

    def _grant_waiting(self, now_ns: int) -> None:
        while self._is_room_new:
            self._is_room_new = False
            for lane in range(self._residency.tiers):
                while (number := self.planner.next(lane)) is not None and self._grant_next(
                    self._leases[number], now_ns
                ):
                    pass

    def read(self, job: ReadJob, outcome: Outcome, now_ns: int) -> None:
        """A ReadJob ended."""
        self._announce_all(self.staging.read(job, outcome, now_ns), now_ns)

    def _announce_all(self, done: Sequence[Lease], now_ns: int) -> None:
        for lease in done:
            self._announce(lease, now_ns)

    def begin(
        self, session: Session, family: Family, request: Lookup, view: View, found_reason: str, now_ns: int
    ) -> Lease:
        """Hold what a lookup found. The client is told with `Found`; after that, `follow_up`."""
        longest = min(LOAN_NS, self._context.limits.lease_ns) if session.is_peer else self._context.limits.lease_ns
        span_ns = min(request.lease_ms * 1_000_000, longest) if request.lease_ms > 0 else longest
        number = self._context.new_id()
        alarm = self._context.alarms.set(now_ns + span_ns, partial(self._expire, number))
        needs = needs_of(family, request, view.path, view.hit)
        lease = Lease(
            number,
            session,
            family,
            request,
            view.path,
            view.hit.end_tokens,
            needs,
            alarm,
            now_ns,
            found_reason,
            span_ns,
        )
        if session.is_peer:
            lease.peer_bytes = sum(self._sizes(needs).values())
            self._peer_bytes += lease.peer_bytes
        self._leases[number] = lease
        session.leases.add(number)
        lease.tier = self._lane(session, needs, now_ns)
        if not request.early:
            lease.wanted_ns, lease.tokens_s = now_ns, max(0, request.prefill_tokens_s)
        if lease.tier == ARENA and not request.early:
            self._grant(lease, now_ns)
        else:
            self.planner.join(
                number, lease.tier, ahead=request.ahead, priority=request.priority, is_early=request.early
            )
            if self.planner.next(lease.tier) == number and self.planner.admit(number, self._sizes(needs)):
                self._grant(lease, now_ns)
        if lease.state is LeaseState.GRANTED and not lease.awaited:  # `Found` announces it
            lease.enter(LeaseState.ANNOUNCED)
            lease.staged_ns = now_ns
        return lease

    def may_begin(self, session: Session, family: Family, request: Lookup, view: View) -> bool:
        """Whether the session may hold one more lease, for this hit. Peers together hold a quarter of the arena, or one
        lease that is larger."""
        if len(session.leases) >= self._context.limits.leases_per_client:
            return False
        if not session.is_peer or not self._peer_bytes:
            return True
        needs = needs_of(family, request, view.path, view.hit)
        size_bytes = self._peer_bytes + sum(self._sizes(needs).values())
        return size_bytes <= self._residency.space.capacity_bytes // 4

    def pulled(self, number: int, index: int, group: int, rank: int, now_ns: int) -> Part | None:
        """An object that a peer's lease holds. None if it does not. A lease that is pulled from lasts for longer."""
        lease = self._leases.get(number)
        if lease is None or not lease.session.is_peer or not lease.is_announced:
            return None
        part = self._held(lease, index, group, rank)
        if part is not None:
            lease.is_read = True
            self._context.alarms.cancel(lease.alarm)
            lease.alarm = self._context.alarms.set(now_ns + lease.span_ns, partial(self._expire, number))
        return part

    def _held(self, lease: Lease, index: int, group: int, rank: int) -> Part | None:
        """The object of a lease that a client names, if it is in the arena."""
        if not 0 <= rank < lease.family.ranks or not 0 <= group < len(lease.family.group_masks):
            return None
        bit = lease.family.bit(group, rank)
        at = bisect_left(lease.needs, index, key=_index_of)  # a report may name thousands of objects
        if at == len(lease.needs) or lease.needs[at][0] != index:
            return None
        _, node, mask = lease.needs[at]
        return (node, bit) if mask & self._residency.arena_mask(node) & 1 << bit else None

    def _view(self, lease: Lease, now_ns: int) -> View:
        tiers = self._context.tiers_for(lease.session, now_ns)
        return view_of(self._residency, lease.family, lease.request, tiers)

    def follow_up(self, lease: Lease, now_ns: int) -> None:
        """The client has been told of the lease, so it may now be told what becomes of it."""
        if lease.wanted_ns is not None and lease.awaited:
            self._weigh(lease, now_ns)

    def _lane(self, session: Session, needs: Sequence[Need], now_ns: int) -> int:
        """The lowest tier that these objects have to be read from."""
        readable = self._context.tiers_for(session, now_ns)
        missing = ((node, mask & ~self._residency.arena_mask(node)) for _, node, mask in needs)
        tiers = (self.staging.source(node, bit, readable) for node, mask in missing for bit in each_bit(mask))
        return max(tiers, default=ARENA)

    def _sizes(self, needs: Sequence[Need]) -> dict[Part, int]:
        length_bytes = self._residency.length_bytes
        return {(node, bit): length_bytes(node, bit) for _, node, mask in needs for bit in each_bit(mask)}

    def _needs_now(self, lease: Lease, now_ns: int) -> tuple[View, list[Need]]:
        view = self._view(lease, now_ns)
        return view, needs_of(lease.family, lease.request, view.path, view.hit) if view.hit.end_tokens else []

    def _grant_next(self, lease: Lease, now_ns: int) -> bool:
        """Grant a lease that has waited, for what is there now. False if there is still no room."""
        view, needs = self._needs_now(lease, now_ns)
        if not self.planner.admit(lease.id, self._sizes(needs)):
            return False
        self._grant_now(lease, view, needs, now_ns)
        if lease.wanted_ns is not None and lease.awaited:
            self._weigh(lease, now_ns)
        return True

    def _grant_now(self, lease: Lease, view: View, needs: list[Need], now_ns: int) -> None:
        """Grant a lease that has waited, for what is there now."""
        if view.hit.end_tokens < lease.end_tokens:  # something was evicted, or is no longer believed
            lease.reason = lease.reason or MissReason.ABSENT
        lease.path, lease.needs, lease.end_tokens = view.path, needs, view.hit.end_tokens
        self._grant(lease, now_ns)
        if not lease.awaited:
            self._announce(lease, now_ns)

    def _grant(self, lease: Lease, now_ns: int) -> None:
        """There is room: pin what the lease needs, and stage what is missing."""
        lease.enter(LeaseState.GRANTED)
        for _, node, _ in lease.needs:
            self._residency.pin(node)
        self._stage_missing(lease, now_ns)

    def want(self, session: Session, request: Wanted, now_ns: int) -> None:
        """The engine has come to a request: it goes before early ones, or is answered with what is already there."""
        lease = self._leases.get(request.lease)
        self._context.send(session, Done(request.id))
        if lease is None or lease.session is not session or lease.wanted_ns is not None:
            return
        lease.wanted_ns, lease.tokens_s = now_ns, max(0, request.prefill_tokens_s)
        if lease.is_announced:
            return
        self.planner.want(lease.id)
        if lease.state is LeaseState.GRANTED:
            self.staging.hasten(lease)
            self._weigh(lease, now_ns)
        elif not self._grant_resident(lease, now_ns):
            self._is_room_new = True

    def _grant_resident(self, lease: Lease, now_ns: int) -> bool:
        """Grant a lease that waits, if everything is in the arena: then it need not wait for room."""
        view, needs = self._needs_now(lease, now_ns)
        if not needs or self._lane(lease.session, needs, now_ns) != ARENA:
            return False
        self.planner.leave(lease.id)
        self._grant_now(lease, view, needs, now_ns)
        return True

    def _weigh(self, lease: Lease, now_ns: int) -> None:
        """Load or compute: give up what would take longer to load than to compute."""
        hits = self._estimates.options(lease, now_ns) if lease.tokens_s else []
        if not hits:
            return
        choice = worth_loading([option for _, option in hits], lease.tokens_s)
        lease.load_s, lease.compute_s = choice.load_s, choice.compute_s
        if choice.end_tokens >= lease.end_tokens:
            return
        lease.left_tokens = hits[-1][1].end_tokens - choice.end_tokens  # objects beyond that cannot be read any more
        gone = MissReason.ABSENT if lease.family.is_forgotten else MissReason.STAGING_FAILED
        lease.reason = lease.reason or (MissReason.SLOW_TIER if lease.left_tokens else gone)
        self._estimates.probe(lease, now_ns)
        self._aim(lease, next(hit for hit, option in hits if option.end_tokens == choice.end_tokens))
        kept = frozenset((node, bit) for _, node, mask in lease.needs for bit in each_bit(mask))
        self.staging.forget(lease, kept)
        self._stage_missing(lease, now_ns)
        if not lease.awaited:
            self._announce(lease, now_ns)

    def _aim(self, lease: Lease, hit: Hit) -> None:
        """Make the lease hold what another hit needs."""
        if hit.end_tokens == lease.end_tokens:
            return
        needs = needs_of(lease.family, lease.request, lease.path, hit) if hit.end_tokens else []
        if self.planner.is_known(lease.id):
            self.planner.admit(lease.id, self._sizes(needs))  # if that does not fit, what it held before stays counted
            self._is_room_new = True
        for _, node, _ in needs:
            self._residency.pin(node)
        for _, node, _ in lease.needs:
            self._residency.unpin(node)
        lease.needs, lease.end_tokens = needs, hit.end_tokens

    def _stage_missing(self, lease: Lease, now_ns: int) -> None:
        readable = self._context.tiers_for(lease.session, now_ns)
        for _, node, mask in lease.needs:
            for bit in each_bit(mask & ~self._residency.arena_mask(node)):
                if (node, bit) not in lease.awaited:
                    self._remember_pulled(lease, node, self.staging.want(lease, node, bit, readable), now_ns)

    def slots(self, session: Session, request: SlotsGet) -> None:
        lease = self._leases.get(request.lease)
        if lease is None or lease.family is not session.family:
            self._context.send(session, Slots(request.id, [], MissReason.LEASE_EXPIRED))
            return
        if not lease.is_announced:
            self._context.send(session, Slots(request.id, [], MissReason.PENDING))
            return
        lease.is_read = True
        slots = self.slots_of(lease, request.rank)
        reply = Slots(request.id, slots or [], "" if slots is not None else MissReason.CHECKSUM)
        most_bytes = sum(SLOT_BYTES + NUMBER_BYTES * len(slot.pieces) for slot in reply.slots)
        if most_bytes > self._context.limits.frame_bytes and not fits(reply, self._context.limits.frame_bytes):
            reply = Slots(request.id, [], MissReason.LIMIT)  # a longer frame would end the client's connection
        self._context.send(session, reply)

    def slots_of(self, lease: Lease, rank: int) -> list[Slot] | None:
        """Where the objects of one rank lie; None if one was quarantined after the lease was announced. For a peer,
        with `ALL_RANKS`: which objects there are."""
        slots = []
        ranks = lease.family.ranks
        is_all = rank == ALL_RANKS
        for index, node, mask in lease.needs:
            for bit in each_bit(mask):
                if bit % ranks != rank and not is_all:
                    continue
                if not self._residency.arena_mask(node) >> bit & 1:
                    return None
                pieces, length, checksum = self._residency.slot(node, bit)
                flat = [] if is_all else [value for piece in pieces for value in piece]
                slots.append(Slot(index, bit // ranks, length, checksum, flat, bit % ranks))
        return slots

    def release(self, session: Session, request: Release, now_ns: int) -> None:
        for number, index, group, rank in request.bad:
            self._quarantine_arena(session, number, index, group, rank)
        for number in request.leases:
            lease = self._leases.get(number)
            if lease is not None and lease.session is session:
                self._drop(lease, now_ns)
        self._context.send(session, Done(request.id))

    def _quarantine_arena(self, session: Session, number: int, index: int, group: int, rank: int) -> None:
        lease = self._leases.get(number)
        part = self._held(lease, index, group, rank) if lease is not None and lease.family is session.family else None
        if part is not None:
            self._context.note_quarantine("arena", "KV-401", *part)
            self._residency.drop(*part, ARENA)

    def _expire(self, number: int, now_ns: int) -> None:
        lease = self._leases[number]
        self._context.counts.leases.expired += 1
        if not lease.is_announced:
            is_granted = lease.state is LeaseState.GRANTED
            reason = MissReason.STAGING_FAILED if is_granted else MissReason.LEASE_EXPIRED
            self._context.counts.lookup(lease.request, 0, reason)
            self._context.send(lease.session, Staged(0, lease.id, 0, reason))
        self._drop(lease, now_ns)

    def _drop(self, lease: Lease, now_ns: int) -> None:
        del self._leases[lease.id]
        self._peer_bytes -= lease.peer_bytes
        lease.session.leases.discard(lease.id)
        self._context.alarms.cancel(lease.alarm)
        if lease.tier:
            self._account(lease, now_ns)
        self.staging.forget(lease)
        if self.planner.is_known(lease.id):
            self.planner.leave(lease.id)
            self._is_room_new = True
        if lease.is_held:
            for _, node, _ in lease.needs:
                self._residency.unpin(node)
        lease.enter(LeaseState.ENDED)

    def _account(self, lease: Lease, now_ns: int) -> None:
        """A lease is over: count whether its staging was of use."""
        if lease.staged_ns is None:
            outcome = Prefetched.CANCELLED
        elif not lease.end_tokens:
            outcome = Prefetched.SKIPPED if lease.left_tokens else Prefetched.FAILED
        elif not lease.is_read:
            outcome = Prefetched.WASTED
        elif lease.wanted_ns is None or lease.staged_ns <= lease.wanted_ns:
            outcome = Prefetched.IN_TIME
        else:
            outcome = Prefetched.LATE
        ended_ns = now_ns if lease.staged_ns is None else lease.staged_ns
        wanted_ns = ended_ns if lease.wanted_ns is None else min(lease.wanted_ns, ended_ns)
        tier = self._context.tiers[lease.tier - 1]
        tier.counts.prefetched[outcome] += 1
        tier.counts.prefetched_bytes[outcome] += lease.staged_bytes
        tier.counts.hidden_seconds += (wanted_ns - lease.started_ns) / 1e9
        tier.counts.exposed_seconds += (ended_ns - wanted_ns) / 1e9

    def disconnect(self, session: Session, now_ns: int) -> None:
        for number in sorted(session.leases):
            self._drop(self._leases[number], now_ns)

    def _announce(self, lease: Lease, now_ns: int) -> None:
        """Staging is over: promise the boundary that is whole in the arena now, which may be lower than was found."""
        family, request = lease.family, lease.request
        lease.path = path_of(self._residency, family, request)
        rows = self._residency.presence(family, self._residency.masks(family, lease.path, [ARENA]))
        hit = hit_of(family, request, rows)
        if hit.end_tokens < lease.end_tokens and lease.may_aim_lower:
            # A lower boundary may still be whole in a lower tier. This ends: each time, something has left the index.
            lease.may_aim_lower = False
            below = self._view(lease, now_ns).hit
            if below.end_tokens > hit.end_tokens:
                self._aim(lease, below)
                self._stage_missing(lease, now_ns)
                return
        self._aim(lease, hit)
        lease.enter(LeaseState.ANNOUNCED)
        lease.staged_ns = now_ns
        found_reason = lease.found_reason if hit.end_tokens < longest_possible(request) else ""
        self._context.counts.lookup(request, hit.end_tokens, lease.reason or found_reason)
        self._context.send(lease.session, self._staged(lease, now_ns))
        if not hit.end_tokens:
            self._drop(lease, now_ns)

    def tokens_by_kind(self, lease: Lease) -> dict[TierKind, int]:
        """Tokens of the hit that came from lower tiers, by the kind of tier."""
        tokens = dict.fromkeys(TierKind, 0)
        pulled = self._pulled_for.get(lease.request.ticket, {})
        for _, node, _ in lease.needs:
            tier = lease.staged.get(node) or pulled.get(node)
            if tier:
                tokens[self._context.tiers[tier - 1].info.kind] += node.end - node.start
        return tokens

    def _remember_pulled(self, lease: Lease, node: Node, tier: int, now_ns: int) -> None:
        """Keep account of what a hand-off's lease pulls, for its next one: it may land when this one is over."""
        ticket = lease.request.ticket
        if not ticket or lease.session.is_peer or self._context.is_owned(tier):
            return
        if ticket not in self._pulled_for:
            if len(self._pulled_for) >= MOST_TICKETS:
                return
            self._context.alarms.set(now_ns + PULLED_NS, partial(self._forget_pulled, ticket))
        self._pulled_for.setdefault(ticket, {})[node] = tier

    def _forget_pulled(self, ticket: str, now_ns: int) -> None:
        del self._pulled_for[ticket]

    def _staged(self, lease: Lease, now_ns: int) -> Staged:
        tokens = self.tokens_by_kind(lease)
        return Staged(
            0,
            lease.id,
            lease.end_tokens,
            lease.reason,
            tokens[TierKind.OWNED],
            lease.staged_bytes,
            now_ns - lease.started_ns,
            lease.left_tokens,
            lease.load_s * 1e3,
            lease.compute_s * 1e3,
            tokens[TierKind.PEERS],
            tokens[TierKind.POOL],
        )

    # ---- for stats and checks

    @property
    def open(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        for lease in self._leases.values():
            assert lease.id in lease.session.leases and lease.state is not LeaseState.ENDED
            assert not lease.is_held or all(node.pins > 0 for _, node, _ in lease.needs)
            assert lease.is_announced == (lease.is_held and not lease.awaited)
            assert lease.is_held or self.planner.is_known(lease.id)
        assert self._peer_bytes == sum(lease.peer_bytes for lease in self._leases.values())
        self.planner.check()
        self.staging.check(self._leases.values())


def _index_of(need: Need) -> int:
    return need[0]
