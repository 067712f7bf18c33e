"""The state of one lower tier: its health, its speed, what waits for it, and what was counted.

A tier that fails is left alone for a while, longer each time, never for good; separately for reads and for writes.
Neighbours: `lower` and `staging` (which use the tier), `store` (shows the state). No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from kvtally.core.keys import ObjectKey
from kvtally.core.residency import Node
from kvtally.core.speed import Speed
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.stats import TierStats


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
