"""The state of one lower tier: its health, its speed, what waits for it, and what was counted.

A tier that fails is left alone for a while, longer each time, never for good; separately for reads and for writes.
Neighbours: `lower` and `staging` (which use the tier), `store` (shows the state). No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from msgspec import structs

from kvtally.core.keys import ObjectKey
from kvtally.core.residency import Node
from kvtally.core.speed import Speed
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.stats import TierStats


class TierKind(Enum):
    """Who changes a tier. What others may change is only ever believed, for a few seconds (`beliefs`)."""

    OWNED = "owned"  # this store alone: its index knows what the tier holds
    PEERS = "peers"  # other nodes' stores: pulled from, never written to
    POOL = "pool"  # an engine that several stores share: asked before it is read (`FindJob`), and written to


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """What the store must know of a lower tier."""

    name: str
    capacity_bytes: int | None
    kind: TierKind = TierKind.OWNED


FIRST_PAUSE_NS = 1 * SECOND_NS
LONGEST_PAUSE_NS = 60 * SECOND_NS
MOST_POSTPONED = 65_536


@dataclass(slots=True)
class TierState:
    """One lower tier: its health and its counters."""

    info: TierInfo
    write_paused_until_ns: int = 0
    read_paused_until_ns: int = 0
    write_pause_ns: int = FIRST_PAUSE_NS
    read_pause_ns: int = FIRST_PAUSE_NS
    ask_paused_until_ns: int = 0
    ask_pause_ns: int = FIRST_PAUSE_NS
    unreadable: int = 0  # objects in a row that could not be read
    queued_bytes: int = 0  # on their way down
    speed: Speed = field(default_factory=Speed)
    write_speed: Speed = field(default_factory=Speed)
    counts: TierStats = field(default_factory=TierStats)  # counters only; `stats` fills in the rest
    # Objects that the index has forgotten but the tier could not remove: a full disk cannot append to its journal. They
    # are tried again with the next removal, because a restart would bring them back. Never more than the tier holds.
    unremoved: dict[ObjectKey, None] = field(default_factory=dict)
    removing: int = 0  # RemoveJobs under way
    retrying: set[int] = field(default_factory=set)  # those of them that try again to remove what was in `unremoved`
    # Objects that were committed faster than the tier writes, or while it failed. They are written later, if they are
    # still in the arena. The value counts how often the device was found failing with this object.
    postponed: dict[tuple[Node, int], int] = field(default_factory=dict)

    def readable(self, now_ns: int) -> bool:
        """Whether to read from it now. A tier that hangs gets no more reads until one of them ends."""
        return now_ns >= self.read_paused_until_ns and not self.speed.is_stuck(now_ns)

    def writable(self, now_ns: int) -> bool:
        return now_ns >= self.write_paused_until_ns

    def read_failed(self, now_ns: int) -> None:
        if self.readable(now_ns):  # otherwise this job began before the pause and belongs to the same incident
            self.read_paused_until_ns = now_ns + self.read_pause_ns
            self.read_pause_ns = min(2 * self.read_pause_ns, LONGEST_PAUSE_NS)

    def askable(self, now_ns: int) -> bool:
        """Whether to ask it now what it holds."""
        return now_ns >= self.ask_paused_until_ns and self.readable(now_ns)

    def ask_failed(self, now_ns: int) -> None:
        """It failed to say what it holds, or took too long: of many lookups, one pays for that."""
        if now_ns >= self.ask_paused_until_ns:
            self.ask_paused_until_ns = now_ns + self.ask_pause_ns
            self.ask_pause_ns = min(2 * self.ask_pause_ns, LONGEST_PAUSE_NS)

    def asked(self) -> None:
        """It has said what it holds."""
        self.ask_paused_until_ns, self.ask_pause_ns = 0, FIRST_PAUSE_NS

    def object_unreadable(self, now_ns: int) -> None:
        """One unreadable object may be a bad sector. Two in a row mean that the device fails."""
        self.unreadable += 1
        if self.unreadable > 1:
            self.read_failed(now_ns)

    def write_failed(self, now_ns: int) -> None:
        self.write_paused_until_ns = now_ns + self.write_pause_ns
        self.write_pause_ns = min(2 * self.write_pause_ns, LONGEST_PAUSE_NS)

    @property
    def has_unremoved(self) -> bool:
        """Whether it may still hold objects that the index has forgotten, because a removal failed."""
        return bool(self.unremoved or self.retrying)

    def postpone(self, node: Node, bit: int, failures: int = 0) -> None:
        """If too many wait, this one is dropped: those before it are earlier in their chains, and a chunk is worth
        nothing without the chunks before it."""
        if len(self.postponed) >= MOST_POSTPONED and (node, bit) not in self.postponed:
            self.counts.dropped += 1
        else:
            self.postponed[node, bit] = failures

    def stats(self, now_ns: int, *, used_bytes: int, objects: int, evicted: int) -> TierStats:
        """Everything to be shown of it now."""
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
        if now_ns < self.ask_paused_until_ns:
            return "not-answering"
        return "ok" if self.writable(now_ns) and not self.write_speed.is_stuck(now_ns) else "not-writing"
