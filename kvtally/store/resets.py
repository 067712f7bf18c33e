"""Resets: a namespace is forgotten at once, and its user is told when no restart can bring it back.

    reset ─▶ open writes end, the index forgets ─▶ RemoveJob for each lower tier ─▶ removed, failed or late ─▶ `on_end`

Owns resets whose removals are under way. What a tier could not remove is tried again by `writes` with its next write.
Neighbours: `store` (left: who asked), `writes` (right: removes). No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtally.core.residency import ARENA, Family
from kvtally.store.context import Alarm, Context
from kvtally.store.jobs import Outcome, RemoveJob
from kvtally.store.writes import Writes
from kvtally.wire.limits import SECOND_NS

REMOVAL_NS = 3 * SECOND_NS // 2  # whoever asked gives up after 2 s by default: told before, it knows what became of it


class ResetEnd(NamedTuple):
    """How many objects were forgotten; with a code where they are still in a lower tier, and why."""

    objects: int
    code: str = ""
    message: str = ""
    remedy: str = "See that the tier can be written (its errors are in `kvtally stat`), then reset once more."


@dataclass(slots=True)
class Removing:
    """A reset whose removals are not all done."""

    objects: int
    jobs: set[int]
    alarm: Alarm
    on_end: Callable[[ResetEnd], None]
    code: str = ""


class Resets:
    def __init__(self, context: Context, writes: Writes) -> None:
        self._context = context
        self._residency = context.residency
        self._writes = writes
        self._removing: dict[int, Removing] = {}  # by RemoveJob; one reset may wait for several

    def begin(self, family: Family, now_ns: int, on_end: Callable[[ResetEnd], None]) -> None:
        """Forget every object of a namespace. Leases stay readable until they are released."""
        objects = family.objects
        self._writes.reset(family, now_ns)
        jobs = set()
        for tier in range(self._residency.tiers):
            keys = self._residency.forget(family, tier)
            if tier == ARENA:
                continue
            keys += self._writes.disown(family, tier)  # written before the removal comes to its turn
            state = self._context.tiers[tier - 1]
            if keys or state.unremoved or state.removing:  # what is on its way out comes before ours, and may fail
                jobs.add(self._writes.remove(tier, keys))
        if not jobs:
            on_end(ResetEnd(objects))
            return
        alarm = self._context.alarms.set(now_ns + REMOVAL_NS, partial(self._late, jobs))
        removing = Removing(objects, jobs, alarm, on_end)
        self._removing.update(dict.fromkeys(jobs, removing))

    def removed(self, job: RemoveJob, outcome: Outcome) -> None:
        """Some RemoveJob ended, perhaps one of a reset."""
        removing = self._removing.pop(job.id, None)
        if removing is None:
            return
        removing.jobs.discard(job.id)
        is_left = bool(self._context.tiers[job.tier - 1].unremoved)
        removing.code = removing.code or outcome.code or ("KV-600" if is_left else "")
        if not removing.jobs:
            self._context.alarms.cancel(removing.alarm)
            self._end(removing, "a lower tier could not remove them")

    def _late(self, jobs: set[int], now_ns: int) -> None:
        removing = self._removing[min(jobs)]
        for job in jobs:
            del self._removing[job]
        removing.code = removing.code or "KV-600"
        self._end(removing, "a lower tier has not removed them yet")

    @staticmethod
    def _end(removing: Removing, why: str) -> None:
        objects = removing.objects
        message = f"{objects} objects are forgotten, but {why}: a restart of the store would bring them back"
        removing.on_end(ResetEnd(objects, removing.code, message) if removing.code else ResetEnd(objects))
