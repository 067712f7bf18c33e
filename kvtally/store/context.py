"""What the parts of the sans-I/O store share: the index, the bounds, the tiers' health, what is to be sent and done.

Owns sessions, alarms, counters and the two queues through which the shell learns of effects (`outbox`, `jobs`).
Neighbours: `lookups`, `leases`, `puts` and `lower` (the parts of the logic), `store` (the facade the shell drives).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.residency import Family, Node, Residency
from kvtally.core.speed import Speed
from kvtally.store.jobs import Job
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import Lookup, Refused, Reply
from kvtally.wire.stats import LeaseStats, LookupStats, PutStats, QuarantinedObject, StagedStats, TierStats

BUCKET_NS = (
    10_000_000  # alarms are kept in buckets of 10 ms: cancelling is O(1) and a released lease leaves nothing behind
)
MOST_ACTIONS = 256  # of alarms, in one go


@dataclass(slots=True)
class Session:
    """One connection."""

    id: int
    shared_memory: bool
    client: str = ""
    family: Family | None = None
    greeted: bool = False
    leases: set[int] = field(default_factory=set)
    puts: set[int] = field(default_factory=set)
    put_bytes: int = 0  # of open writes, and of those in limbo
    waiting: int = 0
    resets: int = 0  # asked for and not answered


@dataclass(frozen=True, slots=True)
class Alarm:
    bucket: int
    number: int


class Alarms:
    """Deadlines and what to do when they pass. Rounded up to buckets, so never early."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Callable[[int], None]]] = {}
        self._order: list[int] = []
        self._number = 0

    def set(self, deadline_ns: int, action: Callable[[int], None]) -> Alarm:
        bucket = -(-deadline_ns // BUCKET_NS)
        if bucket not in self._buckets:
            self._buckets[bucket] = {}
            heapq.heappush(self._order, bucket)
        self._number += 1
        self._buckets[bucket][self._number] = action
        return Alarm(bucket, self._number)

    def cancel(self, alarm: Alarm) -> None:
        self._buckets.get(alarm.bucket, {}).pop(alarm.number, None)

    def run(self, now_ns: int) -> int | None:
        """Do what is due, as much of it as may be done at once; the next deadline, or None."""
        left = MOST_ACTIONS
        while self._order:
            bucket = self._order[0]
            actions = self._buckets[bucket]
            if actions and bucket * BUCKET_NS > now_ns:
                return bucket * BUCKET_NS
            while actions:
                if not left:
                    return now_ns  # others first: thousands may be due together
                left -= 1
                actions.pop(next(iter(actions)))(now_ns)
            if self._order[0] == bucket:  # else an action has set an earlier one
                heapq.heappop(self._order)
                del self._buckets[bucket]
        return None

    def __len__(self) -> int:
        return sum(len(actions) for actions in self._buckets.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """A lower tier as the store sees it. One that is not enumerable is asked (`FindJob`) what it holds."""

    name: str
    capacity_bytes: int | None
    enumerable: bool = True


FIRST_PAUSE_NS = 1 * SECOND_NS
LONGEST_PAUSE_NS = 60 * SECOND_NS
MOST_POSTPONED = 65_536


@dataclass(slots=True)
class TierState:
    """A lower tier: health and counters. One that fails is left alone for a while, longer each time, never for good."""

    info: TierInfo
    write_paused_until_ns: int = 0
    read_paused_until_ns: int = 0
    write_pause_ns: int = FIRST_PAUSE_NS
    read_pause_ns: int = FIRST_PAUSE_NS
    unreadable: int = 0  # objects, since the last one that could be read
    queued_bytes: int = 0  # on their way down
    speed: Speed = field(default_factory=Speed)
    write_speed: Speed = field(default_factory=Speed)
    counts: TierStats = field(default_factory=TierStats)  # all that is counted; the rest is filled in by `stats`
    # Forgotten by the index, but the tier could not remove them (a full disk cannot append its journal): tried again
    # with the next removal. Never more than the tier holds; what is not in here would be back after a restart.
    unremoved: dict[ObjectKey, None] = field(default_factory=dict)
    removing: int = 0  # RemoveJobs that are not done
    retrying: set[int] = field(default_factory=set)  # those among them that are to take out what was in `unremoved`
    # Committed faster than the tier writes, or while it failed: written when their turn comes, if they are in the arena
    # then. The value counts how often the device was found failing with this object.
    postponed: dict[tuple[Node, int], int] = field(default_factory=dict)

    def readable(self, now_ns: int) -> bool:
        """Whether it is worth asking now. One that hangs is asked for nothing more until something comes."""
        return now_ns >= self.read_paused_until_ns and not self.speed.is_stuck(now_ns)

    def writable(self, now_ns: int) -> bool:
        return now_ns >= self.write_paused_until_ns

    def read_failed(self, now_ns: int) -> None:
        if self.readable(now_ns):  # else a job of the same incident, begun before the pause: not one more reason
            self.read_paused_until_ns = now_ns + self.read_pause_ns
            self.read_pause_ns = min(2 * self.read_pause_ns, LONGEST_PAUSE_NS)

    def object_unreadable(self, now_ns: int) -> None:
        """One may be a bad sector and costs only itself; from the second in a row on it is the device."""
        self.unreadable += 1
        if self.unreadable > 1:
            self.read_failed(now_ns)

    def write_failed(self, now_ns: int) -> None:
        self.write_paused_until_ns = now_ns + self.write_pause_ns
        self.write_pause_ns = min(2 * self.write_pause_ns, LONGEST_PAUSE_NS)

    @property
    def has_unremoved(self) -> bool:
        """Whether it may hold what the index has forgotten because a removal failed."""
        return bool(self.unremoved or self.retrying)

    def postpone(self, node: Node, bit: int, failures: int = 0) -> None:
        self.postponed[node, bit] = failures
        if len(self.postponed) > MOST_POSTPONED:
            del self.postponed[next(iter(self.postponed))]
            self.counts.dropped += 1

    def stats(self, now_ns: int, *, used_bytes: int, objects: int, evicted: int) -> TierStats:
        """All there is to see of it now."""
        return structs.replace(
            self.counts,
            name=self.info.name,
            state=self.state(now_ns),
            capacity_bytes=self.info.capacity_bytes,
            used_bytes=used_bytes,
            objects=objects,
            evicted=evicted,
            queued_bytes=self.queued_bytes,
            read_bytes_s=self.speed.bytes_s,
            postponed=len(self.postponed),
            unremoved=len(self.unremoved),
        )

    def state(self, now_ns: int) -> str:
        if self.speed.is_stuck(now_ns):
            return "stuck"
        if not self.readable(now_ns):
            return "failing"
        return "ok" if self.writable(now_ns) and not self.write_speed.is_stuck(now_ns) else "not-writing"


@dataclass(slots=True)
class Counts:
    """Everything the store counts, in one place. Misses carry a reason from `MissReason`."""

    lookups: LookupStats = field(default_factory=LookupStats)
    puts: PutStats = field(default_factory=PutStats)
    staged: StagedStats = field(default_factory=StagedStats)
    leases: LeaseStats = field(default_factory=LeaseStats)
    refused: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)

    def lookup(self, request: Lookup, end_tokens: int, reason: str) -> None:
        """One lookup is answered for good: with what, and why not with more."""
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
        self.quarantine: deque[QuarantinedObject] = deque(maxlen=256)  # the latest, for people
        self._last_id = 0

    def new_id(self) -> int:
        """Ids of leases, puts and jobs: never reused, so a late message cannot touch a stranger's."""
        self._last_id += 1
        return self._last_id

    def send(self, session: Session, message: Reply) -> None:
        if session.id in self.sessions:
            self.outbox.append((session.id, message))

    def refuse(self, session: Session, request: int, code: str, message: str, remedy: str) -> None:
        self.counts.refused[code] += 1
        self.send(session, Refused(request, code, message, remedy))

    def readable_tiers(self, now_ns: int) -> list[int]:
        """The arena and every lower tier that is worth asking now."""
        return [0] + [number for number, tier in enumerate(self.tiers, 1) if tier.readable(now_ns)]

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
