"""The read half of the store: lookups and leases.

    Lookup ─▶ path of nodes ─▶ presence ─▶ longest_hit ─▶ Found
                 │ wait_ms: parked until a pending object is committed or the deadline passes
                 │ a tier that cannot enumerate: parked until it said what it holds
                 └ hold: a lease. When there is room (`core.prefetch`), all that the hit needs is pinned, what is not in
                   the arena is staged, and `Staged` tells the client how much of the hit is really there

Only a boundary whose objects are all in the arena is promised. A lease for which nothing is to be staged and that is
wanted now is granted at once. Neighbours: `core.hits` (the rule), `writes` (tells when something stopped being
pending), `staging` (brings up what is not in the arena). No I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import lt

from kvtally.core.hits import Hit
from kvtally.core.keys import CHAIN_BYTES, ObjectKey
from kvtally.core.namespace import GroupKind
from kvtally.core.prefetch import Planner, worth_loading
from kvtally.core.residency import ARENA, Family, Node, each_bit
from kvtally.store.context import Alarm, Context, Prefetched, Session
from kvtally.store.jobs import FindJob, Outcome
from kvtally.store.needs import bitmap, hit_of, needs_of, path_of
from kvtally.store.staging import Lease, Staging
from kvtally.store.tiers.base import ObjectRecord
from kvtally.store.weighing import Weighing
from kvtally.wire.messages import Done, Found, Lookup, MissReason, Release, Slot, Slots, SlotsGet, Staged, Wanted

FIND_NS = 200_000_000  # how long a lookup waits for tiers that must be asked, unless it allows more
MOST_TAILS = 64


@dataclass(slots=True)
class Parked:
    """A lookup that waits: for pending objects, or for what a tier says it holds."""

    session: Session
    request: Lookup
    alarm: Alarm
    nodes: list[Node] = field(default_factory=list)
    finding: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What a lookup sees."""

    path: list[Node | None]
    rows: Sequence[Sequence[bool]]
    hit: Hit
    hopeful: Hit  # the hit if every pending object were committed


class Reads:
    """`record` and `remove` are the write half's ways to describe an object and to take one out of a lower tier."""

    def __init__(
        self,
        context: Context,
        record: Callable[[Node, int], ObjectRecord],
        remove: Callable[[int, Sequence[ObjectKey]], None],
        learn: Callable[[int, ObjectRecord], None],
    ) -> None:
        self._context = context
        self._residency = context.residency
        self._learn = learn
        self._leases: dict[int, Lease] = {}
        self._parked: dict[int, Parked] = {}
        self._waiters: dict[Node, set[int]] = {}  # node with pending objects -> parked lookups
        self._finding: dict[int, int] = {}  # FindJob -> parked lookup
        capacity_bytes = self._residency.space.capacity_bytes
        self.planner: Planner[tuple[Node, int]] = Planner(
            tiers=len(context.tiers),
            arena_bytes=capacity_bytes * 3 // 4,  # the rest is for saves, and for what running loads have leased
            in_flight_bytes=context.limits.staging_bytes or capacity_bytes // 4,
        )
        self._is_room_new = False  # somebody who waits for room may fit now
        self.staging = Staging(context, self.planner, record, remove, self._announce)
        self._weighing = Weighing(context, self.planner, self.staging)

    def advance(self, now_ns: int) -> None:
        """After every event: grant what there is room for, start what may be read, and keep to the budgets."""
        while self._is_room_new:
            self._is_room_new = False
            for lane in range(self._residency.tiers):
                while (number := self.planner.next(lane)) is not None and self._grant_next(
                    self._leases[number], now_ns
                ):
                    pass
        self.staging.pump(now_ns)
        self.planner.check_budgets()

    # ---- lookup

    def lookup(self, session: Session, request: Lookup, now_ns: int) -> None:
        family = session.family
        assert family is not None
        problem = self._problem(session, family, request)
        if problem:
            self._context.refuse(session, request.id, *problem)
            return
        view = self._view(family, request, now_ns)
        if self._ask_tiers(session, family, request, view, now_ns):
            return
        wait_ns = min(request.wait_ms * 1_000_000, self._context.limits.wait_ns)
        if wait_ns > 0 and view.hopeful.end_tokens > view.hit.end_tokens and self._may_wait(session):
            pending = [node for node in view.path[: view.hopeful.boundaries] if node is not None and node.pending]
            self._park(session, request, now_ns + wait_ns, now_ns, nodes=pending)
            return
        self._answer(session, request, view, now_ns)

    def _view(self, family: Family, request: Lookup, now_ns: int) -> View:
        path = path_of(self._residency, family, request)
        masks = self._residency.masks(family, path, self._context.readable_tiers(now_ns))
        rows = self._residency.presence(family, masks)
        hit = hopeful = hit_of(family, request, rows)
        if any(node.pending for node in path if node is not None):
            hoped = [mask | (node.pending if node is not None else 0) for mask, node in zip(masks, path, strict=True)]
            hopeful = hit_of(family, request, self._residency.presence(family, hoped))
        return View(path, rows, hit, hopeful)

    def _answer(self, session: Session, request: Lookup, view: View, now_ns: int) -> None:
        family = session.family
        assert family is not None
        self._residency.touch(view.path[: view.hit.boundaries])
        lease = None
        if request.hold and view.hit.end_tokens:
            if len(session.leases) < self._context.limits.leases_per_client:
                lease = self._lease(session, family, request, view, now_ns)
            else:
                self._count(request, 0, MissReason.LIMIT)
                self._context.send(session, Found(request.id, 0, reason=MissReason.LIMIT))
                return
        reason = self._reason(family, request, view, now_ns)
        if lease is None or lease.announced:
            self._count(request, view.hit.end_tokens, reason)
        in_arena = view.hit.end_tokens
        if lease is not None and not lease.announced:
            missing = (node.start for _, node, mask in lease.needs if mask & ~self._residency.arena_mask(node))
            in_arena = min(missing, default=in_arena)
        self._context.send(
            session,
            Found(
                request.id,
                view.hit.end_tokens,
                lease.id if lease is not None else 0,
                max(1, len(lease.awaited)) if lease is not None and not lease.announced else 0,
                view.hopeful.end_tokens,
                [bitmap(row) for row in view.rows],
                self._tails(family, view),
                reason,
                in_arena,
            ),
        )
        if lease is not None:
            lease.is_told = True
            if lease.wanted_ns is not None and lease.awaited:
                self._weigh(lease, now_ns)

    @staticmethod
    def _tails(family: Family, view: View) -> list[int]:
        """Beneath the hit, and beneath every boundary beyond it that full attention reaches: where only a state is
        missing there, an answer that ended further on has left its own."""
        specs = family.namespace.groups
        full = [row for spec, row in zip(specs, view.rows, strict=True) if spec.kind is GroupKind.FULL]
        first, last = view.hit.boundaries, len(view.path)
        reached = next((i for i in range(first, last) if not all(row[i] for row in full)), last)
        nodes = [family.root, *view.path[:reached]][first:]
        known = {node.end + length for node in nodes if node is not None and node.tails for length in node.tails}
        return [end - view.hit.end_tokens for end in sorted(known)[-MOST_TAILS:]]

    def _reason(self, family: Family, request: Lookup, view: View, now_ns: int) -> str:
        """Why the hit is not longer: the nearest cause, in the one list of reasons."""
        limit, step = request.limit_tokens, request.alignment_tokens
        last = next((end for end in reversed(request.ends) if end <= limit and end % step == 0), 0)
        if view.hit.end_tokens == last:
            return ""
        if view.hopeful.end_tokens > view.hit.end_tokens:
            return MissReason.PENDING
        everywhere = range(len(self._context.tiers) + 1)
        if len(self._context.readable_tiers(now_ns)) < len(everywhere):
            rows = self._residency.presence(family, self._residency.masks(family, view.path, everywhere))
            if hit_of(family, request, rows).end_tokens > view.hit.end_tokens:
                return MissReason.STAGING_FAILED  # a tier that fails or hangs has it
        following = view.hit.boundaries
        specs = family.namespace.groups
        full = [row[following] for spec, row in zip(specs, view.rows, strict=True) if spec.kind is GroupKind.FULL]
        return MissReason.STATE_ABSENT if full and all(full) and len(full) < len(specs) else MissReason.ABSENT

    def _count(self, request: Lookup, end_tokens: int, reason: str) -> None:
        counts = self._context.counts
        counts.lookups += 1
        counts.hits += end_tokens > 0
        counts.hit_tokens += end_tokens
        counts.asked_tokens += min(max(request.limit_tokens, 0), request.ends[-1]) if request.ends else 0
        if reason:
            counts.misses[reason] += 1

    def _problem(self, session: Session, family: Family, request: Lookup) -> tuple[str, str, str] | None:
        ends = request.ends
        if len(ends) > self._context.limits.chains_per_lookup:
            message = (
                f"{len(ends)} boundaries in one lookup, at most {self._context.limits.chains_per_lookup} are allowed"
            )
            return "KV-302", message, "Ask for a shorter prefix."
        rising = all(map(lt, ends, ends[1:]))
        if (
            len(request.chains) != CHAIN_BYTES * len(ends)
            or not rising
            or (ends and not 0 < ends[0] <= ends[-1] < 1 << 32)
        ):
            return (
                "KV-503",
                "a lookup's chains and boundaries do not match",
                "One 32-byte chain value for each rising boundary.",
            )
        if request.alignment_tokens < 1 or len(request.have) not in (0, len(family.namespace.groups)):
            return (
                "KV-503",
                "a lookup's alignment or per-group tokens are malformed",
                "Give `have` for every group or not at all.",
            )
        if request.hold and not session.shared_memory:
            return "KV-204", "leases need shared memory", "Connect over the unix socket on the store's own machine."
        return None

    # ---- lookups that wait

    def _may_wait(self, session: Session) -> bool:
        return session.waiting < self._context.limits.waiting_per_client

    def _park(
        self, session: Session, request: Lookup, deadline_ns: int, now_ns: int, *, nodes: Sequence[Node] = ()
    ) -> int:
        number = self._context.new_id()
        alarm = self._context.alarms.set(deadline_ns, partial(self._unpark, number))
        self._parked[number] = Parked(session, request, alarm, list(nodes))
        for node in nodes:
            self._waiters.setdefault(node, set()).add(number)
        session.waiting += 1
        return number

    def _take_parked(self, number: int) -> Parked | None:
        parked = self._parked.pop(number, None)
        if parked is None:
            return None
        self._context.alarms.cancel(parked.alarm)
        parked.session.waiting -= 1
        for node in parked.nodes:
            waiting = self._waiters[node]
            waiting.discard(number)
            if not waiting:
                del self._waiters[node]
        return parked

    def _unpark(self, number: int, now_ns: int) -> None:
        """The wait is over: answer with what is there now."""
        parked = self._take_parked(number)
        if parked is not None:
            family = parked.session.family
            assert family is not None
            self._answer(parked.session, parked.request, self._view(family, parked.request, now_ns), now_ns)

    def changed(self, node: Node, now_ns: int) -> None:
        """An object of `node` stopped being pending. Lookups for which nothing more is to come are answered."""
        if node not in self._waiters:
            return
        for number in sorted(self._waiters[node]):
            parked = self._parked[number]
            if not any(waited.pending for waited in parked.nodes):
                self._unpark(number, now_ns)

    def _ask_tiers(self, session: Session, family: Family, request: Lookup, view: View, now_ns: int) -> bool:
        """Ask tiers that cannot enumerate for what the index does not know. True if the lookup now waits for them."""
        shared = [
            n for n, tier in enumerate(self._context.tiers, 1) if not tier.info.enumerable and tier.readable(now_ns)
        ]
        if not shared or not request.hold or not self._may_wait(session):
            return False
        ends = [end for end in request.ends if end <= request.limit_tokens]
        if not ends or view.hit.end_tokens == ends[-1]:
            return False
        digest, ranks = family.namespace.digest, family.ranks
        keys = []
        for index in range(len(ends)):
            chain = request.chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES]
            for group, row in enumerate(view.rows):
                if not row[index]:
                    keys += [ObjectKey(digest, chain, group, rank) for rank in range(ranks)]
        deadline_ns = now_ns + max(FIND_NS, min(request.wait_ms * 1_000_000, self._context.limits.wait_ns))
        number = self._park(session, request, deadline_ns, now_ns)
        for tier in shared:
            job = FindJob(id=self._context.new_id(), tier=tier, keys=tuple(keys))
            self._finding[job.id] = number
            self._parked[number].finding += 1
            self._context.jobs.append(job)
        return True

    def found(self, job: FindJob, outcome: Outcome, now_ns: int) -> None:
        number = self._finding.pop(job.id)
        tier = self._context.tiers[job.tier - 1]
        if outcome.code:
            tier.errors[outcome.code] += 1
            tier.read_failed(now_ns)
        for record in outcome.found:
            if record is not None:
                self._learn(job.tier, record)
        parked = self._parked.get(number)
        if parked is not None:
            parked.finding -= 1
            if parked.finding == 0:
                self._unpark(number, now_ns)

    # ---- leases

    def _lease(self, session: Session, family: Family, request: Lookup, view: View, now_ns: int) -> Lease:
        longest = self._context.limits.lease_ns
        span_ns = min(request.lease_ms * 1_000_000, longest) if request.lease_ms > 0 else longest
        number = self._context.new_id()
        alarm = self._context.alarms.set(now_ns + span_ns, partial(self._expire, number))
        needs = needs_of(family, request, view.path, view.hit)
        lease = Lease(number, session, family, request, view.path, view.hit.end_tokens, needs, alarm, started_ns=now_ns)
        self._leases[number] = lease
        session.leases.add(number)
        lease.tier = self._lane(needs, now_ns)
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
        return lease

    def _lane(self, needs: Sequence[tuple[int, Node, int]], now_ns: int) -> int:
        """The lowest tier that has to be read for these."""
        missing = ((node, mask & ~self._residency.arena_mask(node)) for _, node, mask in needs)
        tiers = (self.staging.source(node, bit, now_ns) for node, mask in missing for bit in each_bit(mask))
        return max(tiers, default=ARENA)

    def _sizes(self, needs: Sequence[tuple[int, Node, int]]) -> dict[tuple[Node, int], int]:
        length_bytes = self._residency.length_bytes
        return {(node, bit): length_bytes(node, bit) for _, node, mask in needs for bit in each_bit(mask)}

    def _needs_now(self, lease: Lease, now_ns: int) -> tuple[View, list[tuple[int, Node, int]]]:
        view = self._view(lease.family, lease.request, now_ns)
        return view, needs_of(lease.family, lease.request, view.path, view.hit) if view.hit.end_tokens else []

    def _grant_next(self, lease: Lease, now_ns: int) -> bool:
        """Grant a lease that has waited, with what is there now, if there is room. False: it is to wait on."""
        view, needs = self._needs_now(lease, now_ns)
        if not self.planner.admit(lease.id, self._sizes(needs)):
            return False
        lease.path, lease.needs, lease.end_tokens = view.path, needs, view.hit.end_tokens
        self._grant(lease, now_ns)
        if lease.wanted_ns is not None and lease.awaited:
            self._weigh(lease, now_ns)
        return True

    def _grant(self, lease: Lease, now_ns: int) -> None:
        """There is room: what the lease needs is held from now on."""
        lease.is_granted = True
        for _, node, _ in lease.needs:
            self._residency.pin(node)
        self._stage_missing(lease, now_ns)
        if not lease.awaited and lease.is_told:
            self._announce(lease, now_ns)
        elif not lease.awaited:  # `Found` will say so
            lease.announced, lease.staged_ns = True, now_ns

    def want(self, session: Session, request: Wanted, now_ns: int) -> None:
        """The engine has come to a request: it goes before those that are early, or is answered with what is there."""
        lease = self._leases.get(request.lease)
        self._context.send(session, Done(request.id))
        if lease is None or lease.session is not session or lease.wanted_ns is not None:
            return
        lease.wanted_ns, lease.tokens_s = now_ns, max(0, request.prefill_tokens_s)
        if lease.announced:
            return
        self.planner.want(lease.id)
        if lease.is_granted:
            self.staging.hasten(lease)
            self._weigh(lease, now_ns)
        elif not self._grant_resident(lease, now_ns):
            self._is_room_new = True

    def _grant_resident(self, lease: Lease, now_ns: int) -> bool:
        """Grant a lease that waits, if nothing is to be staged for it: then it need not wait for room."""
        view, needs = self._needs_now(lease, now_ns)
        if not needs or self._lane(needs, now_ns) != ARENA:
            return False
        self.planner.leave(lease.id)
        lease.path, lease.needs, lease.end_tokens = view.path, needs, view.hit.end_tokens
        self._grant(lease, now_ns)
        return True

    def _weigh(self, lease: Lease, now_ns: int) -> None:
        """Load or compute: leave what would take longer to load than to compute."""
        hits = self._weighing.options(lease, now_ns) if lease.tokens_s else []
        if not hits:
            return
        choice = worth_loading([option for _, option in hits], lease.tokens_s)
        lease.load_s, lease.compute_s = choice.load_s, choice.compute_s
        if choice.end_tokens >= lease.end_tokens:
            return
        lease.left_tokens = lease.end_tokens - choice.end_tokens
        lease.reason = lease.reason or MissReason.SLOW_TIER
        self._weighing.probe(lease, now_ns)
        self._aim(lease, next(hit for hit, option in hits if option.end_tokens == choice.end_tokens))
        kept = frozenset((node, bit) for _, node, mask in lease.needs for bit in each_bit(mask))
        self.staging.forget(lease, kept)
        self._stage_missing(lease, now_ns)
        if not lease.awaited:
            self._announce(lease, now_ns)

    def _aim(self, lease: Lease, hit: Hit) -> None:
        """Let the lease hold what another hit needs."""
        if hit.end_tokens == lease.end_tokens:
            return
        needs = needs_of(lease.family, lease.request, lease.path, hit) if hit.end_tokens else []
        if self.planner.is_known(lease.id):
            self.planner.admit(lease.id, self._sizes(needs))  # where that does not fit, what it held stays counted
            self._is_room_new = True
        for _, node, _ in needs:
            self._residency.pin(node)
        for _, node, _ in lease.needs:
            self._residency.unpin(node)
        lease.needs, lease.end_tokens = needs, hit.end_tokens

    def _stage_missing(self, lease: Lease, now_ns: int) -> None:
        for _, node, mask in lease.needs:
            for bit in each_bit(mask & ~self._residency.arena_mask(node)):
                if (node, bit) not in lease.awaited:
                    self.staging.want(lease, node, bit, now_ns)

    def slots(self, session: Session, request: SlotsGet) -> None:
        lease = self._leases.get(request.lease)
        if lease is None or lease.family is not session.family:
            self._context.send(session, Slots(request.id, [], MissReason.LEASE_EXPIRED))
            return
        if not lease.announced:
            self._context.send(session, Slots(request.id, [], MissReason.PENDING))
            return
        lease.is_read = True
        slots = []
        ranks = lease.family.ranks
        for index, node, mask in lease.needs:
            for bit in each_bit(mask):
                if bit % ranks != request.rank:
                    continue
                if not self._residency.arena_mask(node) >> bit & 1:  # quarantined since
                    self._context.send(session, Slots(request.id, [], MissReason.CHECKSUM))
                    return
                pieces = [value for piece in self._residency.pieces(node, bit) for value in piece]
                length, checksum = self._residency.length_bytes(node, bit), self._residency.checksum(node, bit)
                slots.append(Slot(index, bit // ranks, length, checksum, pieces))
        self._context.send(session, Slots(request.id, slots))

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
        if lease is None or lease.family is not session.family or not 0 <= rank < lease.family.ranks:
            return
        if not 0 <= group < len(lease.family.group_masks):
            return
        bit = lease.family.bit(group, rank)
        at = bisect_left(lease.needs, index, key=_index_of)  # one report may name as many objects as a frame holds
        _, node, mask = lease.needs[at] if at < len(lease.needs) and lease.needs[at][0] == index else (0, None, 0)
        if node is not None and mask & self._residency.arena_mask(node) & 1 << bit:
            self._context.note_quarantine("arena", "KV-401", node, bit)
            self._residency.drop(node, bit, ARENA)

    def _expire(self, number: int, now_ns: int) -> None:
        lease = self._leases[number]
        self._context.counts.leases_expired += 1
        if not lease.announced:
            reason = MissReason.STAGING_FAILED if lease.is_granted else MissReason.LEASE_EXPIRED
            self._count(lease.request, 0, reason)
            self._context.send(lease.session, Staged(0, lease.id, 0, reason))
        self._drop(lease, now_ns)

    def _drop(self, lease: Lease, now_ns: int) -> None:
        del self._leases[lease.id]
        lease.session.leases.discard(lease.id)
        self._context.alarms.cancel(lease.alarm)
        if lease.tier:
            self._account(lease, now_ns)
        self.staging.forget(lease)
        if self.planner.is_known(lease.id):
            self.planner.leave(lease.id)
            self._is_room_new = True
        if lease.is_granted:
            for _, node, _ in lease.needs:
                self._residency.unpin(node)

    def _account(self, lease: Lease, now_ns: int) -> None:
        """What the staging of a lease, which is over now, has been good for."""
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
        tier.prefetched[outcome] += 1
        tier.prefetched_bytes[outcome] += lease.staged_bytes
        tier.hidden_s += (wanted_ns - lease.started_ns) / 1e9
        tier.exposed_s += (ended_ns - wanted_ns) / 1e9

    def disconnect(self, session: Session, now_ns: int) -> None:
        for number in sorted(session.leases):
            self._drop(self._leases[number], now_ns)
        for number in [number for number, parked in self._parked.items() if parked.session is session]:
            self._take_parked(number)

    def _announce(self, lease: Lease, now_ns: int) -> None:
        """All that could be staged is: promise the boundary that is whole in the arena now, if need be a lower one."""
        family, request = lease.family, lease.request
        lease.path = path_of(self._residency, family, request)
        rows = self._residency.presence(family, self._residency.masks(family, lease.path, [ARENA]))
        hit = hit_of(family, request, rows)
        if hit.end_tokens < lease.end_tokens and lease.may_aim_lower:
            # A lower boundary may still be whole further down. Each time something has left the index, so this ends.
            lease.may_aim_lower = False
            below = self._view(family, request, now_ns).hit
            if below.end_tokens > hit.end_tokens:
                self._aim(lease, below)
                self._stage_missing(lease, now_ns)
                return
        self._aim(lease, hit)
        lease.announced, lease.staged_ns = True, now_ns
        self._count(request, hit.end_tokens, lease.reason)
        self._context.send(lease.session, self._staged(lease, now_ns))
        if not hit.end_tokens:
            self._drop(lease, now_ns)

    @staticmethod
    def _staged(lease: Lease, now_ns: int) -> Staged:
        return Staged(
            0,
            lease.id,
            lease.end_tokens,
            lease.reason,
            sum(node.end - node.start for _, node, _ in lease.needs if node in lease.staged),
            lease.staged_bytes,
            now_ns - lease.started_ns,
            lease.left_tokens,
            lease.load_s * 1e3,
            lease.compute_s * 1e3,
        )

    # ---- for stats and checks

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> int:
        return len(self._parked)

    def check(self) -> None:
        for lease in self._leases.values():
            assert lease.id in lease.session.leases and lease.is_told
            assert not lease.is_granted or all(node.pins > 0 for _, node, _ in lease.needs)
            assert lease.announced == (lease.is_granted and not lease.awaited)
            assert lease.is_granted or self.planner.is_known(lease.id)
        self.planner.check()
        self.staging.check(self._leases.values())
        assert all(number in self._parked for numbers in self._waiters.values() for number in numbers)


def _index_of(need: tuple[int, Node, int]) -> int:
    return need[0]
