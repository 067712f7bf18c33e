"""Lookups: how much of a prompt is there, and the wait for what is about to be.

    Lookup ─▶ path of nodes ─▶ presence ─▶ longest_hit ─▶ Found
                 │ wait_ms: parked until a pending object is committed or the deadline passes
                 │ a tier that cannot enumerate: parked until it said what it holds
                 └ hold: a lease (`leases`)

Neighbours: `core.hits` (the rule), `lookup_view` (what a lookup sees), `leases` (right: what is promised), `store`
(left: it says when something stopped being pending). No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import lt

from kvtally.core.keys import CHAIN_BYTES, ObjectKey
from kvtally.core.namespace import GroupKind
from kvtally.core.residency import Family, Node
from kvtally.store.alarms import Alarm
from kvtally.store.context import Context, Session
from kvtally.store.jobs import FindJob, Outcome
from kvtally.store.lease import Lease
from kvtally.store.leases import Leases
from kvtally.store.lookup_view import View, bitmap, hit_of, longest_possible, view_of
from kvtally.store.lower import LowerTiers
from kvtally.wire.messages import Found, Lookup, MissReason, Slot

FIND_NS = 200_000_000  # how long a lookup waits for tiers that must be asked, unless its own wait is longer
MOST_TAILS = 64
MOST_SLOTS = 4096  # in an answer, which must fit into a frame; beyond that, the client asks for them


@dataclass(slots=True)
class Parked:
    """A lookup that waits for pending objects, or for tiers to say what they hold."""

    session: Session
    request: Lookup
    alarm: Alarm
    nodes: list[Node] = field(default_factory=list)  # that had pending objects when it was parked
    watched: Node | None = None  # one of them that is still pending; the wait lasts at least as long
    finding: int = 0


class Lookups:
    def __init__(self, context: Context, leases: Leases, lower: LowerTiers) -> None:
        self._context = context
        self._residency = context.residency
        self._leases = leases
        self._lower = lower
        self._parked: dict[int, Parked] = {}
        self._watchers: dict[Node, set[int]] = {}  # node with pending objects -> parked lookups
        self._finding: dict[int, int] = {}  # FindJob -> parked lookup

    def lookup(self, session: Session, request: Lookup, now_ns: int) -> None:
        family = session.family
        assert family is not None
        problem = self._problem(session, family, request)
        if problem:
            self._context.refuse(session, request.id, *problem)
            return
        view = view_of(self._context, family, request, now_ns)
        if self._ask_tiers(session, family, request, view, now_ns):
            return
        wait_ns = min(request.wait_ms * 1_000_000, self._context.limits.wait_ns)
        if wait_ns > 0 and view.hopeful.end_tokens > view.hit.end_tokens and self._may_wait(session):
            pending = [node for node in view.path[: view.hopeful.boundaries] if node is not None and node.pending]
            self._park(session, request, now_ns + wait_ns, now_ns, nodes=pending)
            return
        self._answer(session, request, view, now_ns)

    def _answer(self, session: Session, request: Lookup, view: View, now_ns: int) -> None:
        family = session.family
        assert family is not None
        self._residency.touch(view.path[: view.hit.boundaries])
        reason = self._reason(family, request, view, now_ns)
        lease = None
        if request.hold and view.hit.end_tokens:
            if len(session.leases) < self._context.limits.leases_per_client:
                lease = self._leases.begin(session, family, request, view, reason, now_ns)
            else:
                self._context.counts.lookup(request, 0, MissReason.LIMIT)
                self._context.send(session, Found(request.id, 0, reason=MissReason.LIMIT))
                return
        if lease is None or lease.is_announced:
            self._context.counts.lookup(request, view.hit.end_tokens, reason)
        in_arena = view.hit.end_tokens
        if lease is not None and not lease.is_announced:
            missing = (node.start for _, node, mask in lease.needs if mask & ~self._residency.arena_mask(node))
            in_arena = min(missing, default=in_arena)
        self._context.send(
            session,
            Found(
                request.id,
                view.hit.end_tokens,
                lease.id if lease is not None else 0,
                max(1, len(lease.awaited)) if lease is not None and not lease.is_announced else 0,
                view.hopeful.end_tokens,
                [bitmap(row) for row in view.rows],
                self._tails(family, view),
                reason,
                in_arena,
                self._slots(lease) if lease is not None and lease.is_announced and request.slots else [],
            ),
        )
        if lease is not None:
            self._leases.follow_up(lease, now_ns)

    def _slots(self, lease: Lease) -> list[Slot]:
        slots = self._leases.slots_of(lease, 0) or []
        return slots if len(slots) <= MOST_SLOTS else []

    @staticmethod
    def _tails(family: Family, view: View) -> list[int]:
        """Where tails end that may continue the prompt: after the hit, and after every later boundary that full
        attention reaches. A recurrent state that is missing at those boundaries may exist where an answer ended."""
        specs = family.namespace.groups
        full = [row for spec, row in zip(specs, view.rows, strict=True) if spec.kind is GroupKind.FULL]
        first, last = view.hit.boundaries, len(view.path)
        reached = next((i for i in range(first, last) if not all(row[i] for row in full)), last)
        nodes = [family.root, *view.path[:reached]][first:]
        known = {node.end + length for node in nodes if node is not None and node.tails for length in node.tails}
        return [end - view.hit.end_tokens for end in sorted(known)[-MOST_TAILS:]]

    def _reason(self, family: Family, request: Lookup, view: View, now_ns: int) -> str:
        """Why the hit is not longer: the first cause, as a `MissReason`."""
        if view.hit.end_tokens == longest_possible(request):
            return ""
        if view.hopeful.end_tokens > view.hit.end_tokens:
            return MissReason.PENDING
        everywhere = range(len(self._context.tiers) + 1)
        if len(self._context.readable_tiers(now_ns)) < len(everywhere):
            rows = self._residency.presence(family, self._residency.masks(family, view.path, everywhere))
            if hit_of(family, request, rows).end_tokens > view.hit.end_tokens:
                return MissReason.STAGING_FAILED  # only a tier that fails or hangs has it
        following = view.hit.boundaries
        specs = family.namespace.groups
        full = [row[following] for spec, row in zip(specs, view.rows, strict=True) if spec.kind is GroupKind.FULL]
        return MissReason.STATE_ABSENT if full and all(full) and len(full) < len(specs) else MissReason.ABSENT

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
        self._watch(number)
        session.waiting += 1
        return number

    def _watch(self, number: int) -> bool:
        """Watch the last boundary that is still pending, because a prefill saves in order. False if none is."""
        parked = self._parked[number]
        self._stop_watching(number, parked)
        parked.watched = next((node for node in reversed(parked.nodes) if node.pending), None)
        if parked.watched is not None:
            self._watchers.setdefault(parked.watched, set()).add(number)
        return parked.watched is not None

    def _stop_watching(self, number: int, parked: Parked) -> None:
        if parked.watched is not None:
            watchers = self._watchers[parked.watched]
            watchers.discard(number)
            if not watchers:
                del self._watchers[parked.watched]

    def _take_parked(self, number: int) -> Parked | None:
        parked = self._parked.pop(number, None)
        if parked is None:
            return None
        self._context.alarms.cancel(parked.alarm)
        parked.session.waiting -= 1
        self._stop_watching(number, parked)
        return parked

    def _unpark(self, number: int, now_ns: int) -> None:
        """The wait is over: answer with what is there now."""
        parked = self._take_parked(number)
        if parked is not None:
            family = parked.session.family
            assert family is not None
            self._answer(parked.session, parked.request, view_of(self._context, family, parked.request, now_ns), now_ns)

    def settled(self, node: Node, now_ns: int) -> None:
        """An object of `node` stopped being pending. Answer the lookups that have nothing more to wait for."""
        if node.pending:
            return
        for number in sorted(self._watchers.get(node, ())):
            if not self._watch(number):
                self._unpark(number, now_ns)

    def _ask_tiers(self, session: Session, family: Family, request: Lookup, view: View, now_ns: int) -> bool:
        """Ask the tiers that cannot list what they hold. True if the lookup now waits for their answers."""
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
            tier.counts.errors[outcome.code] += 1
            tier.read_failed(now_ns)
        for record in outcome.found:
            if record is not None:
                self._lower.learn(job.tier, record)
        parked = self._parked.get(number)
        if parked is not None:
            parked.finding -= 1
            if parked.finding == 0:
                self._unpark(number, now_ns)

    def disconnect(self, session: Session) -> None:
        for number in [number for number, parked in self._parked.items() if parked.session is session]:
            self._take_parked(number)

    # ---- for stats and checks

    @property
    def waiting(self) -> int:
        return len(self._parked)

    def check(self) -> None:
        for node, numbers in self._watchers.items():
            assert node.pending and all(self._parked[number].watched is node for number in numbers)
