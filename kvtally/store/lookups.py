"""Lookups: how much of a prompt is there, and the wait for what is about to be.

    Lookup ─▶ path of nodes ─▶ presence ─▶ longest_hit ─▶ Found
                 │ a source, or a pool: parked until they said what they have (`peers`, FindJob)
                 │ wait_ms: parked until what it waits for is committed or withdrawn, or the deadline passes
                 └ hold: a lease (`leases`)

A lookup waits for objects that somebody is writing, if they would make the hit longer. For a promised boundary
(`until_tokens`) it waits even if nobody has begun: prefill answers before its last chunks are saved.

Neighbours: `core.hits` (the rule), `lookup_view` (what a lookup sees), `leases`, `peers`, `beliefs`, `receipts` (right:
what is promised, what others have, which promise was withdrawn), `store` (left: it says when something has changed).
No I/O.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import partial
from operator import lt
from typing import TypeVar

from msgspec import structs

from kvtally.core.hits import needed
from kvtally.core.keys import CHAIN_BYTES
from kvtally.core.namespace import GroupKind
from kvtally.core.residency import Family, Node
from kvtally.store.alarms import Alarm
from kvtally.store.beliefs import Beliefs, Claim
from kvtally.store.context import Context, Session
from kvtally.store.jobs import FindJob, Outcome
from kvtally.store.lease import Lease
from kvtally.store.leases import Leases
from kvtally.store.lookup_view import View, bitmap, boundary_at, hit_of, longest_possible, view_of
from kvtally.store.peers import Answer, Peers
from kvtally.store.receipts import ReceiptDesk
from kvtally.store.tier_state import TierKind
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import ALL_RANKS, Found, Lookup, MissReason, Slot

FIND_NS = 200_000_000  # how long a pool may take to say what it holds
NOTHING_NS = 1 * SECOND_NS  # how long "nothing more" is believed
MOST_NOTHINGS = 65_536
MOST_TAILS = 64
MOST_SLOTS = 4096  # in an answer, which must fit into a frame; beyond that, the client asks for them

Watch = tuple[bytes, bytes]  # namespace and chain of a boundary
Key = TypeVar("Key")


@dataclass(slots=True, eq=False)
class Asking:
    """A lookup, from its request to its answer."""

    session: Session
    request: Lookup
    deadline_ns: int  # of the wait that its client allows
    is_asked: bool = False  # others were asked, as far as they can be
    reason: str = ""  # why others could not be asked, or have no more
    withdrawn: str = ""  # why prefill has saved nothing
    tails: set[int] = field(default_factory=set)  # that others know, in tokens from the start
    # While it waits, it is parked under a number.
    number: int = 0
    questions: set[int] = field(default_factory=set)  # to others, not answered yet
    watched: Watch | None = None  # a boundary that it waits for
    alarm: Alarm | None = None


class Lookups:
    def __init__(self, context: Context, leases: Leases, beliefs: Beliefs, peers: Peers, receipts: ReceiptDesk) -> None:
        self._context = context
        self._residency = context.residency
        self._leases = leases
        self._beliefs = beliefs
        self._peers = peers
        self._receipts = receipts
        self._parked: dict[int, Asking] = {}
        self._watchers: dict[Watch, set[int]] = {}  # boundary -> parked lookups
        self._of_ticket: dict[str, set[int]] = {}  # prefill's ticket -> parked lookups
        self._asked_by: dict[int, int] = {}  # question (FindJob or to a peer) -> parked lookup
        self._finds: dict[int, tuple[Alarm, Family, Lookup]] = {}  # FindJob -> its deadline, and what was asked
        self._nothing: dict[tuple[int, Watch], int] = {}  # tier, last boundary -> until when it has no more

    def lookup(self, session: Session, request: Lookup, now_ns: int) -> None:
        family = session.family
        assert family is not None
        problem = self._problem(session, family, request)
        if problem:
            self._context.refuse(session, request.id, *problem)
            return
        if request.deliver and not session.is_peer:
            self._peers.offer(family, request, now_ns)
        if request.source and self._peers.is_here(request.source):
            request = structs.replace(request, source="")
        wait_ns = min(max(0, request.wait_ms) * 1_000_000, self._context.limits.wait_ns)
        self._proceed(Asking(session, request, now_ns + wait_ns), now_ns)

    def _proceed(self, asking: Asking, now_ns: int) -> None:
        """Answer the lookup, or park it until something has changed."""
        session, request = asking.session, asking.request
        family = session.family
        assert family is not None
        tiers = self._context.tiers_for(session, now_ns)
        view = view_of(self._residency, family, request, tiers)
        is_whole = view.hit.end_tokens == longest_possible(request)
        may_wait = session.waiting < self._context.limits.waiting_per_client
        if not is_whole and not asking.is_asked and may_wait:
            self._ask_others(asking, family, view, now_ns)
        asking.withdrawn = asking.withdrawn or self._receipts.withdrawn(request.ticket, now_ns)
        if asking.questions and not is_whole:
            self._park(asking)
            return
        awaited = self._awaited(asking, family, view) if not is_whole and may_wait else None
        if awaited is not None and now_ns < asking.deadline_ns:
            self._park(asking, awaited)
        else:
            self._answer(asking, view, now_ns)

    def _awaited(self, asking: Asking, family: Family, view: View) -> Watch | None:
        """The boundary to wait for: the last one that is missing, because a prefill saves in order."""
        request, digest = asking.request, family.namespace.digest
        end = request.until_tokens
        at = bisect_left(request.ends, end)
        is_promised = end > view.hit.end_tokens and at < len(request.ends) and request.ends[at] == end
        if is_promised and end <= request.limit_tokens and not asking.withdrawn and not request.source:
            missing = [
                (digest, request.chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES])
                for index in sorted(_missing(family, request, view, at))
            ]
            if any(watch in self._context.spoiled for watch in missing):
                asking.reason = asking.reason or MissReason.CHECKSUM
            elif missing:
                return missing[-1]
        if view.hopeful.end_tokens > view.hit.end_tokens:
            path = view.path[: view.hopeful.boundaries]
            pending = next(node for node in reversed(path) if node is not None and node.pending)
            return digest, pending.chain
        return None

    def _answer(self, asking: Asking, view: View, now_ns: int) -> None:
        self._unpark(asking)
        session, request, family = asking.session, asking.request, asking.session.family
        assert family is not None
        self._residency.touch(view.path[: view.hit.boundaries])
        reason = self._reason(asking, family, view, now_ns)
        lease = None
        if request.hold and view.hit.end_tokens:
            if self._leases.may_begin(session, family, request, view):
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
        pulled = self._leases.tokens_by_kind(lease) if lease is not None and lease.is_announced else {}
        self._context.send(
            session,
            Found(
                request.id,
                view.hit.end_tokens,
                lease.id if lease is not None else 0,
                max(1, len(lease.awaited)) if lease is not None and not lease.is_announced else 0,
                view.hopeful.end_tokens,
                [bitmap(row) for row in view.rows],
                self._tails(asking, family, view),
                reason,
                in_arena,
                self._slots(lease) if lease is not None and lease.is_announced and request.slots else [],
                asking.withdrawn,
                pulled.get(TierKind.PEERS, 0),
                pulled.get(TierKind.POOL, 0),
            ),
        )
        if lease is not None:
            self._leases.follow_up(lease, now_ns)

    def _slots(self, lease: Lease) -> list[Slot]:
        slots = self._leases.slots_of(lease, ALL_RANKS if lease.session.is_peer else 0) or []
        return slots if len(slots) <= MOST_SLOTS else []

    @staticmethod
    def _tails(asking: Asking, family: Family, view: View) -> list[int]:
        """Where tails end that may continue the prompt: after the hit, and after every later boundary that full
        attention reaches. A recurrent state that is missing at those boundaries may exist where an answer ended."""
        specs = family.namespace.groups
        full = [row for spec, row in zip(specs, view.rows, strict=True) if spec.kind is GroupKind.FULL]
        first, last = view.hit.boundaries, len(view.path)
        reached = next((i for i in range(first, last) if not all(row[i] for row in full)), last)
        nodes = [family.root, *view.path[:reached]][first:]
        known = {node.end + length for node in nodes if node is not None and node.tails for length in node.tails}
        known |= {end for end in asking.tails if end > view.hit.end_tokens}
        return [end - view.hit.end_tokens for end in sorted(known)[-MOST_TAILS:]]

    def _reason(self, asking: Asking, family: Family, view: View, now_ns: int) -> str:
        """Why the hit is not longer: the first cause, as a `MissReason`."""
        request = asking.request
        if view.hit.end_tokens == longest_possible(request):
            return ""
        if asking.withdrawn or asking.reason:
            return asking.withdrawn or asking.reason
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
        if request.hold and not (session.shared_memory or session.is_peer):
            return "KV-204", "leases need shared memory", "Connect over the unix socket on the store's own machine."
        return None

    # ---- lookups that wait

    def _park(self, asking: Asking, watched: Watch | None = None) -> None:
        """Let it wait for the answers to its questions, or for a boundary until its deadline."""
        if not asking.number:
            asking.number = self._context.new_id()
            self._parked[asking.number] = asking
            asking.session.waiting += 1
            if asking.request.ticket:
                self._of_ticket.setdefault(asking.request.ticket, set()).add(asking.number)
        self._stop_watching(asking)
        for question in asking.questions:
            self._asked_by[question] = asking.number
        if watched is not None:
            asking.watched = watched
            self._watchers.setdefault(watched, set()).add(asking.number)
            if asking.alarm is None:
                asking.alarm = self._context.alarms.set(asking.deadline_ns, partial(self._over, asking.number))

    def _stop_watching(self, asking: Asking) -> None:
        if asking.watched is not None:
            _discard(self._watchers, asking.watched, asking.number)
            asking.watched = None

    def _unpark(self, asking: Asking) -> None:
        """It waits no longer. What others still say about it is taken in, and answers nobody."""
        if not asking.number:
            return
        del self._parked[asking.number]
        self._stop_watching(asking)
        if asking.request.ticket:
            _discard(self._of_ticket, asking.request.ticket, asking.number)
        if asking.alarm is not None:
            self._context.alarms.cancel(asking.alarm)
        for question in asking.questions:
            del self._asked_by[question]
            self._peers.forget(question)
        asking.questions.clear()
        asking.session.waiting -= 1
        asking.number = 0

    def _over(self, number: int, now_ns: int) -> None:
        """The wait is over: answer with what is there now."""
        asking = self._parked[number]
        asking.alarm = None
        self._proceed(asking, now_ns)

    def settled(self, node: Node, now_ns: int) -> None:
        """An object of `node` stopped being pending. Look again for those who wait for it."""
        if not node.pending:
            for number in sorted(self._watchers.get((node.family.namespace.digest, node.chain), ())):
                self._proceed(self._parked[number], now_ns)

    def withdrawn(self, ticket: str, now_ns: int) -> None:
        """The prefill of this ticket has saved nothing: nobody waits for it any more."""
        for number in sorted(self._of_ticket.get(ticket, ())):
            asking = self._parked[number]
            if not asking.questions:
                self._proceed(asking, now_ns)

    def answered(self, answer: Answer, now_ns: int) -> None:
        """A peer has said what it has, or is gone."""
        self._heard(answer.ask, answer, now_ns)

    def _heard(self, question: int, answer: Answer, now_ns: int) -> None:
        number = self._asked_by.pop(question, None)
        if number is None:
            return
        asking = self._parked[number]
        asking.questions.discard(question)
        self._note(asking, answer)
        self._proceed(asking, now_ns)

    @staticmethod
    def _note(asking: Asking, answer: Answer) -> None:
        if answer.reason not in ("", MissReason.ABSENT, MissReason.STATE_ABSENT):
            asking.reason = asking.reason or answer.reason
        asking.withdrawn = asking.withdrawn or answer.withdrawn
        asking.tails.update(answer.tails)

    def disconnect(self, session: Session) -> None:
        for asking in [asking for asking in self._parked.values() if asking.session is session]:
            self._unpark(asking)

    # ---- asking others

    def _ask_others(self, asking: Asking, family: Family, view: View, now_ns: int) -> None:
        """Ask the store that the request names, and pools, what they have of the prompt. Once for each lookup."""
        asking.is_asked = True
        request = asking.request
        if not request.hold or not request.ends or asking.session.is_peer:
            return
        if request.source:
            wait_ns = max(0, asking.deadline_ns - now_ns)
            said = self._peers.ask(family, request, _have(family, request, view), wait_ns, now_ns)
            if isinstance(said, Answer):
                self._note(asking, said)
            else:
                asking.questions.add(said)
        for number, tier in enumerate(self._context.tiers, 1):
            if tier.info.kind is TierKind.POOL:
                self._ask_pool(asking, number, family, view, now_ns)

    def _ask_pool(self, asking: Asking, number: int, family: Family, view: View, now_ns: int) -> None:
        request, tier = asking.request, self._context.tiers[number - 1]
        if now_ns < self._nothing.get((number, _last(family, request)), 0):
            return
        if not tier.askable(now_ns):
            asking.reason = asking.reason or MissReason.UNASKED
            return
        job = FindJob(
            id=self._context.new_id(),
            tier=number,
            namespace=family.namespace,
            boundaries=tuple(boundary_at(request, at) for at in range(view.hit.boundaries, len(request.ends))),
        )
        alarm = self._context.alarms.set(now_ns + FIND_NS, partial(self._find_late, job.id, number))
        self._finds[job.id] = alarm, family, request
        asking.questions.add(job.id)
        self._context.jobs.append(job)

    def _find_late(self, job: int, tier: int, now_ns: int) -> None:
        """A pool has not answered in time. If it does later, what it says is taken in."""
        self._context.tiers[tier - 1].ask_failed(now_ns)
        self._heard(job, Answer(job, MissReason.UNASKED), now_ns)

    def found(self, job: FindJob, outcome: Outcome, now_ns: int) -> None:
        """A FindJob ended."""
        alarm, family, request = self._finds.pop(job.id)
        self._context.alarms.cancel(alarm)
        tier = self._context.tiers[job.tier - 1]
        if outcome.code:
            tier.counts.errors[outcome.code] += 1
            tier.ask_failed(now_ns)
            self._heard(job.id, Answer(job.id, MissReason.UNASKED), now_ns)
            return
        tier.asked()
        tails = []
        claims = []
        for boundary, holding in zip(job.boundaries, outcome.found, strict=False):
            if holding is None:
                continue
            tails += [boundary.end_tokens + length for length in holding.tails]
            span = boundary.end_tokens - boundary.start_tokens
            for bit, checksum in holding.rows:
                if 0 <= bit < family.width and 0 <= checksum < 1 << 64:
                    length_bytes = family.namespace.object_bytes(bit // family.ranks, bit % family.ranks, span)
                    claims.append(Claim(boundary, bit, length_bytes, checksum))
        if claims and not family.is_forgotten:
            self._beliefs.take_in(job.tier, family, claims, now_ns)
        if len(outcome.found) < len(job.boundaries) or None in outcome.found:
            self._nothing[job.tier, _last(family, request)] = now_ns + NOTHING_NS
            if len(self._nothing) > MOST_NOTHINGS:
                del self._nothing[next(iter(self._nothing))]
        self._heard(job.id, Answer(job.id, tails=tuple(tails)), now_ns)

    # ---- for stats and checks

    @property
    def waiting(self) -> int:
        return len(self._parked)

    def check(self) -> None:
        for watch, numbers in self._watchers.items():
            assert numbers and all(self._parked[number].watched == watch for number in numbers)
        for question, number in self._asked_by.items():
            assert question in self._parked[number].questions
        for number, asking in self._parked.items():
            assert asking.number == number and (asking.questions or asking.watched is not None)
            assert asking.watched is None or asking.alarm is not None


def _discard(sets: dict[Key, set[int]], key: Key, number: int) -> None:
    """Take a number out of one of these sets, none of which is empty."""
    sets[key].discard(number)
    if not sets[key]:
        del sets[key]


def _missing(family: Family, request: Lookup, view: View, at: int) -> set[int]:
    """The boundaries at which something is missing that a hit at this boundary needs."""
    missing: set[int] = set()
    for group, spec in enumerate(family.namespace.groups):
        have = request.have[group] if request.have else 0
        missing.update(index for index in needed(spec, request.ends, at, have) if not view.rows[group][index])
    return missing


def _have(family: Family, request: Lookup, view: View) -> list[int]:
    """What a peer need not have: for full attention, everything without a gap that is here or in the engine."""
    have = list(request.have) or [0] * len(family.namespace.groups)
    for group, spec in enumerate(family.namespace.groups):
        if spec.kind is GroupKind.FULL:
            row = view.rows[group]
            first = bisect_right(request.ends, have[group])
            gap = next((index for index in range(first, len(row)) if not row[index]), len(row))
            have[group] = max(have[group], request.ends[gap - 1] if gap else 0)
    return have


def _last(family: Family, request: Lookup) -> Watch:
    return family.namespace.digest, request.chains[-CHAIN_BYTES:]
