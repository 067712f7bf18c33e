"""Load or compute: how long each boundary that could be promised would take to load. `core.prefetch` then chooses.

Owns the estimates and the probes that keep them fresh; `leases` acts on them. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtally.core.hits import Hit
from kvtally.core.prefetch import Option, Planner
from kvtally.core.residency import ARENA, Node, each_bit
from kvtally.store.context import Context
from kvtally.store.lease import Lease, Part
from kvtally.store.lookup_view import hit_of, needs_of, path_of
from kvtally.store.staging import Staging

MOST_OPTIONS = 32  # boundaries that are compared with computing


@dataclass(frozen=True, slots=True)
class Costs:
    """What the hits of one comparison share, so that each of a prompt's thousands of objects is looked at once."""

    readable: Sequence[int]
    missing: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # by boundary and mask: tier -> bytes
    backlogs: dict[int, int] = field(default_factory=dict)  # by tier; each takes a walk over everything that waits


class LoadEstimates:
    def __init__(self, context: Context, planner: Planner[Part], staging: Staging) -> None:
        self._context = context
        self._residency = context.residency
        self._planner = planner
        self._staging = staging

    def options(self, lease: Lease, now_ns: int) -> list[tuple[Hit, Option]]:
        """The boundaries that could be promised, from the one that is in the arena up to the lease's own. Empty if the
        speed of a tier is not known."""
        family, request = lease.family, lease.request
        lease.path = path_of(self._residency, family, request)
        in_arena = self._residency.presence(family, self._residency.masks(family, lease.path, [ARENA]))
        least = hit_of(family, request, in_arena)
        costs = Costs(self._context.tiers_for(lease.session, now_ns))
        rows = self._residency.presence(family, self._residency.masks(family, lease.path, costs.readable))
        step = max(1, (lease.end_tokens - least.end_tokens) // MOST_OPTIONS)
        options: list[tuple[Hit, Option]] = []
        limit = lease.end_tokens
        while limit > least.end_tokens:
            hit = hit_of(family, request, rows, limit)
            if hit.end_tokens <= least.end_tokens:
                break
            load_s = self._load_s(lease, hit, costs)
            if load_s is None:
                return []
            options.append((hit, Option(hit.end_tokens, load_s)))
            limit = hit.end_tokens - step
        return [(least, Option(least.end_tokens, 0.0)), *reversed(options)]

    def _load_s(self, lease: Lease, hit: Hit, costs: Costs) -> float | None:
        """How long it takes until everything that a hit needs is in the arena; None if a tier's speed is not known."""
        missing: dict[int, int] = {}
        for index, node, mask in needs_of(lease.family, lease.request, lease.path, hit):
            if (index, mask) not in costs.missing:
                costs.missing[index, mask] = self._missing(node, mask, costs.readable)
            for tier, size_bytes in costs.missing[index, mask].items():
                missing[tier] = missing.get(tier, 0) + size_bytes
        load_s = 0.0
        for tier, size_bytes in missing.items():
            speed = self._context.tiers[tier - 1].speed.bytes_s if tier else 0.0
            if not speed:
                return None
            if tier not in costs.backlogs:
                costs.backlogs[tier] = self._planner.backlog_bytes(tier, lease.id)
            load_s += (costs.backlogs[tier] + size_bytes) / speed
        return load_s

    def _missing(self, node: Node, mask: int, readable: Sequence[int]) -> dict[int, int]:
        """The bytes to be read from each tier for these objects of a node. Objects that are being read count as 0."""
        missing: dict[int, int] = {}
        for bit in each_bit(mask & ~self._residency.arena_mask(node)):
            tier = self._staging.source(node, bit, readable)
            is_counted = self._staging.is_reading(node, bit)  # as part of the backlog
            size_bytes = 0 if is_counted else self._residency.length_bytes(node, bit)
            missing[tier] = missing.get(tier, 0) + size_bytes
        return missing

    def probe(self, lease: Lease, now_ns: int) -> None:
        """Read a little of what this lease gives up, if the tier's speed was not measured lately. Otherwise a tier that
        was once found slow would never be tried again."""
        readable = self._context.tiers_for(lease.session, now_ns)
        for number, tier in enumerate(self._context.tiers, 1):
            if tier.speed.is_due(now_ns):
                keys = [key for key in lease.awaited if self._staging.source(*key, readable) == number]
                self._staging.forget(lease, frozenset(lease.awaited.difference(keys)))
                self._staging.probe(number, keys, now_ns)
