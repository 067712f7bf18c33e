"""What the parts of the sans-I/O store share: the index, the bounds, the tiers' health, what is to be sent and done.

Owns sessions, alarms, counters and the two queues through which the shell learns of effects (`outbox`, `jobs`).
Neighbours: `lookups`, `leases`, `puts` and `lower` (the parts of the logic), `store` (the facade the shell drives).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvtally.core.namespace import Namespace
from kvtally.core.residency import Family, Node, Residency
from kvtally.store.alarms import Alarms
from kvtally.store.jobs import Job
from kvtally.store.tier_state import TierKind, TierState
from kvtally.wire.limits import Limits
from kvtally.wire.messages import Lookup, Refused, Reply
from kvtally.wire.stats import LeaseStats, LookupStats, PutStats, QuarantinedObject, SendStats, StagedStats

MOST_SPOILED = 4_096


@dataclass(slots=True)
class Session:
    """One connection."""

    id: int
    shared_memory: bool
    is_peer: bool = False  # another store: it may hold leases and pull, and is served from what is this store's own
    client: str = ""
    family: Family | None = None
    greeted: bool = False
    leases: set[int] = field(default_factory=set)
    puts: set[int] = field(default_factory=set)
    put_bytes: int = 0  # in open writes and in limbo
    waiting: int = 0
    resets: int = 0  # not answered yet
    inbox: list[Reply] | None = None  # of a session of the store itself: replies stay here


@dataclass(slots=True)
class Counts:
    """Everything the store counts, in one place. Misses carry a reason from `MissReason`."""

    lookups: LookupStats = field(default_factory=LookupStats)
    puts: PutStats = field(default_factory=PutStats)
    staged: StagedStats = field(default_factory=StagedStats)
    leases: LeaseStats = field(default_factory=LeaseStats)
    sends: SendStats = field(default_factory=SendStats)
    refused: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)

    def lookup(self, request: Lookup, end_tokens: int, reason: str) -> None:
        """Count the final answer to one lookup, and why it was not longer."""
        lookups = self.lookups
        lookups.total += 1
        lookups.hits += end_tokens > 0
        lookups.hit_tokens += end_tokens
        lookups.asked_tokens += min(max(request.limit_tokens, 0), request.ends[-1]) if request.ends else 0
        if reason:
            lookups.misses[reason] += 1


class Context:
    """One store's shared state. Single-threaded."""

    def __init__(self, residency: Residency, limits: Limits, tiers: list[TierState]) -> None:
        self.residency = residency
        self.limits = limits
        self.tiers = tiers  # tiers[0] is the tier that `residency` numbers 1
        self.counts = Counts()
        self.alarms = Alarms()
        self.sessions: dict[int, Session] = {}
        self.outbox: list[tuple[int, Reply]] = []
        self.jobs: list[Job] = []
        self.quarantine: deque[QuarantinedObject] = deque(maxlen=256)  # the latest ones, to be shown
        # Boundaries of which an object was quarantined, by namespace and chain, until it is saved again. Their writers
        # believe that they are here, so nobody should wait for them.
        self.spoiled: dict[tuple[bytes, bytes], None] = {}
        self.just_spoiled: list[Node] = []  # taken by `store`
        self._last_id = 0

    def new_id(self) -> int:
        """An id for a lease, put or job. Ids are never reused, so a late message cannot hit somebody else's."""
        self._last_id += 1
        return self._last_id

    def send(self, session: Session, message: Reply) -> None:
        if session.inbox is not None:
            session.inbox.append(message)
        elif session.id in self.sessions:
            self.outbox.append((session.id, message))

    def refuse(self, session: Session, request: int, code: str, message: str, remedy: str) -> None:
        self.counts.refused[code] += 1
        self.send(session, Refused(request, code, message, remedy))

    def readable_tiers(self, now_ns: int) -> list[int]:
        """The arena, and every lower tier that can be read now."""
        return [0] + [number for number, tier in enumerate(self.tiers, 1) if tier.readable(now_ns)]

    def owned_tiers(self, now_ns: int) -> list[int]:
        """Those of them that nobody else changes."""
        return [n for n in self.readable_tiers(now_ns) if not n or self.is_owned(n)]

    def tiers_for(self, session: Session, now_ns: int) -> list[int]:
        """The tiers that a session is served from. A peer gets what is this store's own: it can ask others itself."""
        return self.owned_tiers(now_ns) if session.is_peer else self.readable_tiers(now_ns)

    def is_owned(self, tier: int) -> bool:
        return self.tiers[tier - 1].info.kind is TierKind.OWNED

    def has_place_for(self, namespace: Namespace) -> bool:
        """Whether one more namespace may be known. Namespaces without objects and without clients make way."""
        families, most = self.residency.families, self.limits.namespaces
        if namespace.digest not in families and len(families) >= most:
            here = {session.family for session in self.sessions.values()}
            for digest, family in list(families.items()):
                if family not in here and len(family.nodes) == 1:  # the root
                    del families[digest]
        return namespace.digest in families or len(families) < most

    def note_quarantine(self, tier: str, code: str, node: Node, bit: int) -> None:
        self.counts.quarantined[tier] += 1
        key = node.family.key(node, bit)
        found = QuarantinedObject(
            tier=tier,
            code=code,
            chain=key.chain.hex(),
            group=key.group,
            rank=key.rank,
            namespace=key.namespace.hex(),
            tokens=f"{node.start}..{node.end}",
        )
        self.quarantine.append(found)
        self.spoiled[key.namespace, key.chain] = None
        self.just_spoiled.append(node)
        if len(self.spoiled) > MOST_SPOILED:
            del self.spoiled[next(iter(self.spoiled))]
