"""Hits: the one rule that must be right.

`longest_hit` answers: up to which boundary may an engine be told that its KV cache exists? Owns the rule and the list
of objects a hit needs; knows nothing of leases, tiers or time. Neighbours: `residency` (left: what is present),
the store and the connector (right: what is promised).

A *path* is a chain of boundaries `0 < ends[0] < ends[1] < ...`; the object of group g at index i covers the tokens
`[ends[i-1], ends[i])`, or, for a recurrent group, is the state at exactly `ends[i]`. A boundary b = ends[i] is servable
if for every group

    full        every object at an index j <= i that ends above have[g] is present,
    sliding     every such object that also intersects the last window - 1 tokens below b is present,
    recurrent   the object at index i is present, unless have[g] == b,

where `have[g]` is what the engine holds already (tokens from the start; for a recurrent group the exact boundary of
its state). The answer is the greatest servable boundary that is aligned and at most the limit. "Present" is the
caller's word: in the arena, or in any tier, or also pending.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvtally.core.namespace import GroupKind, GroupSpec


class Hit(NamedTuple):
    """The deepest servable boundary: how many boundaries of the path it covers (0: none), and where it ends."""

    boundaries: int
    end_tokens: int


NO_HIT = Hit(0, 0)


def longest_hit(
    groups: Sequence[GroupSpec],
    ends: Sequence[int],
    present: Sequence[Sequence[bool]],
    *,
    limit_tokens: int,
    alignment_tokens: int = 1,
    have: Sequence[int] = (),
) -> Hit:
    """The deepest boundary at which every group can be served.

    `present[g][i]` says whether group g's object at index i is there, on every rank.

    One pass down from the deepest candidate. Full groups only bound where it starts: they can be served up to their
    first gap and nowhere beyond it. Of the others each condition is O(1), for sliding ones after one pass over their
    presence: `reach[g][i]` is the lowest index from which group g is present without a gap up to and including i.
    """
    held = list(have) if have else [0] * len(groups)
    count = bisect_right(ends, limit_tokens)
    others = []
    for spec, row, have_tokens in zip(groups, present, held, strict=True):
        if spec.kind is GroupKind.FULL:
            count = min(count, _first_gap(row, bisect_right(ends, have_tokens)))
        else:
            others.append((spec, row, _reach(row) if spec.kind is GroupKind.SLIDING else [], have_tokens))
    for index in range(count - 1, -1, -1):
        end = ends[index]
        if end % alignment_tokens:
            continue
        if all(_servable(spec, ends, index, row, reach, have_tokens) for spec, row, reach, have_tokens in others):
            return Hit(index + 1, end)
    return NO_HIT


def _first_gap(row: Sequence[bool], start: int) -> int:
    """The first index at or after `start` that is absent, or the end."""
    try:
        return row.index(False, start)
    except ValueError:
        return len(row)


def needed(spec: GroupSpec, ends: Sequence[int], index: int, have_tokens: int = 0) -> range:
    """Indices of the objects that a hit at `index` reads from this group, given what the engine holds already."""
    end = ends[index]
    if spec.kind is GroupKind.RECURRENT:
        return range(index, index) if have_tokens == end else range(index, index + 1)
    first = have_tokens
    if spec.kind is GroupKind.SLIDING:
        first = max(first, end - (spec.window_tokens - 1))
    # The object at j covers [ends[j-1], ends[j]), so the first one needed is the first that ends above `first`.
    return range(min(bisect_right(ends, first), index + 1), index + 1)


def _servable(
    spec: GroupSpec, ends: Sequence[int], index: int, row: Sequence[bool], reach: list[int], have_tokens: int
) -> bool:
    want = needed(spec, ends, index, have_tokens)
    if len(want) == 0:
        return True
    if spec.kind is GroupKind.RECURRENT:
        return row[index]
    return reach[index] <= want.start


def _reach(row: Sequence[bool]) -> list[int]:
    """For each index the start of the gap-free run that ends there (index + 1 where the object itself is absent)."""
    starts = []
    start = 0
    for index, is_present in enumerate(row):
        if not is_present:
            start = index + 1
        starts.append(start)
    return starts
