"""Resets: a namespace is forgotten at once, and the caller is told when no restart can bring it back.

    reset ─▶ open writes end, nothing is found any more ─▶ swept, a slice at a time: RemoveJobs for each lower tier
          ─▶ the last of them removed, failed or late ─▶ `on_end`

Owns the resets under way. Slices are short, so that dropping a million objects does not stop everybody else. What a
tier could not remove, `lower` tries again with its next write.
Neighbours: `store` (left: who asked), `puts` (open writes end), `lower` (right: removes). No I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtally.core.residency import Family
from kvtally.store.alarms import Alarm
from kvtally.store.beliefs import Beliefs
from kvtally.store.context import Context
from kvtally.store.jobs import Outcome, RemoveJob
from kvtally.store.lower import LowerTiers
from kvtally.store.puts import Puts
from kvtally.store.tier_state import TierKind
from kvtally.wire.limits import SECOND_NS

REMOVAL_NS = 3 * SECOND_NS // 2  # clients give up after 2 s by default, and should be told before that
SLICE_OBJECTS = 4096  # dropped in one go, which takes about 10 ms
MOST_RESETS = 64  # at once, in the whole store
MOST_OF_CLIENT = 8  # for one client
PAUSE_NS = 1  # between two slices: until alarms run again, some milliseconds later


class ResetEnd(NamedTuple):
    """How many objects were forgotten. With a code if they are still in a lower tier, and why."""

    objects: int
    code: str = ""
    message: str = ""
    remedy: str = "See that the tier can be written (its errors are in `kvtally stat`), then reset once more."


@dataclass(slots=True, eq=False)
class Forgetting:
    """A reset that is not over."""

    family: Family
    objects: int
    on_end: Callable[[ResetEnd], None]
    alarm: Alarm | None = None  # None once the caller was told
    jobs: set[int] = field(default_factory=set)  # the last RemoveJob of each tier, once everything is swept
    code: str = ""


class Resets:
    def __init__(self, context: Context, puts: Puts, lower: LowerTiers, beliefs: Beliefs) -> None:
        self._context = context
        self._beliefs = beliefs
        self._residency = context.residency
        self._puts = puts
        self._lower = lower
        self._sweeping: deque[Forgetting] = deque()  # the first one is swept, the others wait
        self._removing: dict[int, Forgetting] = {}  # by RemoveJob; one reset may wait for several
        self._under_way: set[Forgetting] = set()  # not swept yet, or the caller was not told yet

    def begin(self, family: Family, now_ns: int, on_end: Callable[[ResetEnd], None]) -> None:
        """Forget every object of a namespace. Leased bytes stay in place until they are released."""
        if len(self._under_way) >= MOST_RESETS:
            message = f"{MOST_RESETS} resets are under way, the most at once; nothing was forgotten"
            on_end(ResetEnd(0, "KV-302", message, "Reset once more in a few seconds."))
            return
        forgetting = Forgetting(family, family.objects, on_end)
        self._under_way.add(forgetting)
        successor = self._residency.forget(family)
        for session in self._context.sessions.values():
            if session.family is family:
                session.family = successor
        self._puts.reset(family)
        self._beliefs.reset(family)
        if any(tier.info.kind is TierKind.OWNED for tier in self._context.tiers):
            forgetting.alarm = self._context.alarms.set(now_ns + REMOVAL_NS, partial(self._late, forgetting))
        else:
            on_end(ResetEnd(forgetting.objects))
        self._sweeping.append(forgetting)
        if len(self._sweeping) == 1:
            self._sweep(now_ns)

    def _sweep(self, now_ns: int) -> None:
        """Drop the next slice, of one reset or of several, and have it removed from lower tiers."""
        left = SLICE_OBJECTS
        while self._sweeping and left:
            left = self._sweep_first(left)
        self._lower.catch_up_all(now_ns)
        if self._sweeping:
            self._context.alarms.set(now_ns + PAUSE_NS, self._sweep)

    def _sweep_first(self, most_objects: int) -> int:
        """Continue with the first reset in the queue. Returns how many more objects may be dropped now."""
        forgetting = self._sweeping[0]
        keys, left = self._residency.sweep(forgetting.family, most_objects)
        is_swept = forgetting.family not in self._residency.forgotten
        for number, tier in enumerate(self._context.tiers, 1):
            if not self._context.is_owned(number):
                continue
            if is_swept:
                keys[number] += self._lower.on_their_way(
                    forgetting.family, number
                )  # they arrive before the removal does
            # Earlier removals come before our last one, and may fail.
            if keys[number] or (is_swept and (tier.unremoved or tier.removing)):
                job = self._lower.remove(number, keys[number], is_last=is_swept)
                if is_swept and forgetting.alarm is not None:
                    forgetting.jobs.add(job)
                    self._removing[job] = forgetting
        if is_swept:
            self._sweeping.popleft()
            if not forgetting.jobs:
                self._end(forgetting)
            self._settle(forgetting)
        return left

    def removed(self, job: RemoveJob, outcome: Outcome) -> None:
        """Some RemoveJob ended, perhaps one of a reset."""
        forgetting = self._removing.pop(job.id, None)
        if forgetting is None:
            return
        forgetting.jobs.discard(job.id)
        is_left = self._context.tiers[job.tier - 1].has_unremoved
        forgetting.code = forgetting.code or outcome.code or ("KV-600" if is_left else "")
        if not forgetting.jobs:
            self._end(forgetting, "a lower tier could not remove them")

    def _late(self, forgetting: Forgetting, now_ns: int) -> None:
        for job in forgetting.jobs:
            del self._removing[job]
        forgetting.code = forgetting.code or "KV-600"
        self._end(forgetting, "a lower tier has not removed them yet")

    def _end(self, forgetting: Forgetting, why: str = "") -> None:
        """Tell the caller, once."""
        if forgetting.alarm is None:
            return
        self._context.alarms.cancel(forgetting.alarm)
        forgetting.alarm = None
        objects = forgetting.objects
        message = f"{objects} objects are forgotten, but {why}: a restart of the store would bring them back"
        forgetting.on_end(ResetEnd(objects, forgetting.code, message) if forgetting.code else ResetEnd(objects))
        self._settle(forgetting)

    def _settle(self, forgetting: Forgetting) -> None:
        if forgetting.alarm is None and forgetting.family not in self._residency.forgotten:
            self._under_way.discard(forgetting)
