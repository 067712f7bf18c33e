"""A lookup's path through the index, its hit, and the objects that the hit needs: `core.hits` applied to a request.

Owns what a lookup sees at one moment; `lookups` and `leases` act on it. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtally.core.hits import Hit, longest_hit, needed
from kvtally.core.keys import CHAIN_BYTES, ROOT_CHAIN
from kvtally.core.residency import Family, Node, Residency
from kvtally.store.lease import Need
from kvtally.store.tiers.base import Boundary
from kvtally.wire.messages import Lookup


@dataclass(frozen=True, slots=True)
class View:
    """What a lookup sees."""

    path: list[Node | None]
    rows: Sequence[Sequence[bool]]
    hit: Hit
    hopeful: Hit  # the hit if every pending object were committed


def view_of(residency: Residency, family: Family, request: Lookup, tiers: Sequence[int]) -> View:
    """What a lookup sees in these tiers."""
    path = path_of(residency, family, request)
    masks = residency.masks(family, path, tiers)
    rows = residency.presence(family, masks)
    hit = hopeful = hit_of(family, request, rows)
    if any(node.pending for node in path if node is not None):
        hoped = [mask | (node.pending if node is not None else 0) for mask, node in zip(masks, path, strict=True)]
        hopeful = hit_of(family, request, residency.presence(family, hoped))
    return View(path, rows, hit, hopeful)


def path_of(residency: Residency, family: Family, request: Lookup) -> list[Node | None]:
    """The nodes of a prompt. A node that ends at another boundary than the one asked for does not count; so no node
    occurs twice."""
    known = zip(residency.path(family, request.chains), request.ends, strict=True)
    return [node if node is not None and node.end == end else None for node, end in known]


def hit_of(family: Family, request: Lookup, rows: Sequence[Sequence[bool]], limit_tokens: int | None = None) -> Hit:
    """The longest hit with what is present, up to the request's limit or a lower one."""
    return longest_hit(
        family.namespace.groups,
        request.ends,
        rows,
        limit_tokens=request.limit_tokens if limit_tokens is None else limit_tokens,
        alignment_tokens=request.alignment_tokens,
        have=request.have,
    )


def longest_possible(request: Lookup) -> int:
    """The last boundary that a hit could reach, in tokens."""
    limit, step = request.limit_tokens, request.alignment_tokens
    return next((end for end in reversed(request.ends) if end <= limit and end % step == 0), 0)


def needs_of(family: Family, request: Lookup, path: Sequence[Node | None], hit: Hit) -> list[Need]:
    """Everything that a hit reads, in the order of boundaries."""
    masks: dict[int, int] = {}
    for group, spec in enumerate(family.namespace.groups):
        have = request.have[group] if request.have else 0
        for index in needed(spec, request.ends, hit.boundaries - 1, have):
            masks[index] = masks.get(index, 0) | family.group_masks[group]
    needs = []
    for index in sorted(masks):
        node = path[index]
        assert node is not None
        needs.append((index, node, masks[index]))
    return needs


def boundary_at(request: Lookup, index: int) -> Boundary:
    """One boundary of a lookup. Each continues the one before."""
    chains, start = request.chains, request.ends[index - 1] if index else 0
    parent = chains[(index - 1) * CHAIN_BYTES : index * CHAIN_BYTES] if index else ROOT_CHAIN
    return Boundary(chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES], parent, start, request.ends[index])


def bitmap(row: Sequence[bool]) -> bytes:
    """Bit i, least significant first, is row[i]."""
    if all(row):
        return ((1 << len(row)) - 1).to_bytes((len(row) + 7) // 8, "little")
    value = 0
    for index, is_present in enumerate(row):
        if is_present:
            value |= 1 << index
    return value.to_bytes((len(row) + 7) // 8, "little")
