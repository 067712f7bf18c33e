"""Residency: which objects exist, in which tier, in which state. The store's one index, mutated by its loop alone.

Objects that share a boundary form a *node* of a tree: one node per chain value, its parent the boundary before it.
Within a node an object is a bit, `group * ranks + rank`, so that "is everything here?" is one integer comparison and a
whole prompt is looked up in microseconds.

    Family (one namespace)                    Node.held, one mask per tier, packed
      root ─ 256 ─ 512 ─ 768 ─ 992 (tail)       ┌── tier 2 ──┬── tier 1 ──┬── arena ──┐
                     └─ 768' ─ 1024'             └ width bits ┴ width bits ┴ width bits┘

States of an object: absent; *pending* (a writer has a slot, nobody may read); resident in the arena, in lower tiers, or
both. A node is pinned while a lease or a job uses it, and is not evicted then. Bytes of an object that is dropped while
its node is pinned are freed when the last pin goes: a reader may still be copying.

Neighbours: `hits` (right: what may be promised), `eviction` (who goes next), `space` (arena bytes). No clock, no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product

from kvtally.core.eviction import TailFirst
from kvtally.core.keys import ROOT_CHAIN, ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.space import Piece, Space, round_up

ARENA = 0
_CELL = struct.Struct("<QQQ")  # of one object: place in the arena, length in bytes, checksum
_SCATTERED = 1 << 63  # the place cell holds an index into `Residency._scattered`
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1
# The usual values of `Node.counts`: at most two children in each of three tiers. Nodes share these integers, which
# would otherwise take 32 bytes of each node.
_USUAL_COUNTS = {
    counts: counts
    for few in product(range(3), repeat=3)
    for counts in [sum(children << (tier * _COUNT_BITS) for tier, children in enumerate(few))]
}


class Node:
    """One boundary of one chain. A plain record with slots: there may be millions."""

    __slots__ = (
        "cells",
        "chain",
        "children",
        "counts",
        "end",
        "family",
        "held",
        "known",
        "parent",
        "pending",
        "pins",
        "queued",
        "start",
        "tails",
        "used",
    )

    def __init__(self, family: Family, chain: bytes, parent: Node | None, start: int, end: int) -> None:
        self.family = family
        self.chain = chain
        self.parent = parent
        self.start = start
        self.end = end
        # One `_CELL` for each object of `known`, packed: a third of the memory of Python objects. Only for those: with
        # 64 groups on 256 ranks, cells for all of them would take 100 times as much as a boundary's first object.
        self.cells = b""
        self.known = 0  # objects that have a cell; they keep it while the node lives, even after they are dropped
        self.held = 0  # resident objects, a mask of `family.width` bits for each tier
        self.counts = 0  # children resident in each tier, 32 bits each
        self.children = 0  # children in all
        self.pending = 0  # objects being written
        self.pins = 0
        self.used = 0  # stamp of the last use; a parent's is never older than its children's
        self.queued = 0  # tiers whose eviction heap has this node
        self.tails: dict[int, int] | None = None  # length in tokens -> resident children of that length that are tails


class Family:
    """All nodes of one namespace."""

    __slots__ = ("full", "group_masks", "is_forgotten", "namespace", "nodes", "objects", "ranks", "root", "width")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.ranks = namespace.ranks
        self.width = len(namespace.groups) * self.ranks
        self.full = (1 << self.width) - 1
        rank_mask = (1 << self.ranks) - 1
        self.group_masks = tuple(rank_mask << (group * self.ranks) for group in range(len(namespace.groups)))
        self.root = Node(self, ROOT_CHAIN, None, 0, 0)
        self.nodes: dict[bytes, Node] = {ROOT_CHAIN: self.root}
        self.objects = 0  # objects resident in at least one tier
        self.is_forgotten = False  # lookups find nothing of it, and its objects are being dropped

    def bit(self, group: int, rank: int) -> int:
        return group * self.ranks + rank

    def key(self, node: Node, bit: int) -> ObjectKey:
        return ObjectKey(self.namespace.digest, node.chain, bit // self.ranks, bit % self.ranks)


class ChainConflict(ValueError):
    """A chain value that is already known with another parent or span: the peer computes chains wrongly."""


class Residency:
    """The index over an arena and `lower_tiers` tiers below it."""

    def __init__(self, arena_bytes: int, lower_tiers: int = 0) -> None:
        self.tiers = 1 + lower_tiers
        self.space = Space(arena_bytes)
        self.families: dict[bytes, Family] = {}
        self.forgotten: dict[Family, list[Node]] = {}  # family -> nodes yet to be swept, in the order of resets
        self.resident_objects = [0] * self.tiers
        self.lower_bytes = [0] * self.tiers  # whole granules; the arena's are counted by `space`
        self.evicted_objects = [0] * self.tiers
        self._stamp = 0
        self._scattered: dict[int, tuple[Piece, ...]] = {}
        self._next_scattered = 0
        self._doomed: dict[Node, list[tuple[Piece, ...]]] = {}
        self._candidates = [TailFirst(tier, self._candidate_test(tier)) for tier in range(self.tiers)]

    # ---- nodes

    def register(self, namespace: Namespace) -> Family:
        return self.families.setdefault(namespace.digest, Family(namespace))

    def ensure(self, family: Family, chain: bytes, parent: bytes, start: int, end: int) -> Node:
        """The node for this boundary; it and its parent are made if they do not exist. Raises ChainConflict."""
        node = family.nodes.get(chain)
        if node is not None and node.parent is not None:
            if node.end != end or node.start != start or node.parent.chain != parent:
                raise ChainConflict(
                    f"chain {chain.hex()[:16]} is known as tokens {node.start}..{node.end}, not {start}..{end}"
                )
            return node
        if chain in (ROOT_CHAIN, parent) or start >= end or (start == 0) != (parent == ROOT_CHAIN):
            raise ChainConflict(f"chain {chain.hex()[:16]} cannot cover the tokens {start}..{end} after this parent")
        if node is not None and node.end != end:
            raise ChainConflict(f"chain {chain.hex()[:16]} is known to end at token {node.end}, not {end}")
        above = family.nodes.get(parent)
        if above is None:  # not saved, or evicted: known only as a parent, and its own parent is unknown
            above = family.nodes[parent] = Node(family, parent, None, 0, start)
        elif above.end != start:
            raise ChainConflict(f"parent {parent.hex()[:16]} ends at token {above.end}, not {start}")
        if node is None:
            node = family.nodes[chain] = Node(family, chain, above, above.end, end)
        else:  # known only as a parent until now
            node.parent, node.start = above, start
        above.children += 1
        return node

    def arena_mask(self, node: Node) -> int:
        return node.held & node.family.full

    def tier_mask(self, node: Node, tier: int) -> int:
        return (node.held >> (tier * node.family.width)) & node.family.full

    def children(self, node: Node, tier: int) -> int:
        return (node.counts >> (tier * _COUNT_BITS)) & _COUNT_MASK

    def touch(self, nodes: Iterable[Node | None]) -> None:
        """These nodes were used now. Give whole paths: a parent must never look older than its child."""
        self._stamp += 1
        stamp = self._stamp
        for node in nodes:
            if node is not None:
                node.used = stamp

    def touch_up(self, nodes: Iterable[Node]) -> None:
        """These nodes and all their ancestors were used now."""
        self._stamp += 1
        stamp = self._stamp
        for node in nodes:
            above: Node | None = node
            while above is not None and above.used != stamp:
                above.used = stamp
                above = above.parent

    def pin(self, node: Node) -> None:
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        if node.pins == 0:
            for pieces in self._doomed.pop(node, ()):
                self.space.free(pieces)
            self.settle(node)

    # ---- objects

    def slot(self, node: Node, bit: int) -> tuple[tuple[Piece, ...], int, int]:
        """An object in the arena: where it lies, its length and its checksum."""
        place, length, checksum = _CELL.unpack_from(node.cells, _cell_at(node, bit))
        pieces = self._scattered[place & ~_SCATTERED] if place & _SCATTERED else (Piece(place, length),)
        return pieces, length, checksum

    def pieces(self, node: Node, bit: int) -> tuple[Piece, ...]:
        """Where an object lies in the arena."""
        return self.slot(node, bit)[0]

    def length_bytes(self, node: Node, bit: int) -> int:
        length: int = _CELL.unpack_from(node.cells, _cell_at(node, bit))[1]
        return length

    def checksum(self, node: Node, bit: int) -> int:
        value: int = _CELL.unpack_from(node.cells, _cell_at(node, bit))[2]
        return value

    def differs(self, node: Node, bit: int, length_bytes: int, checksum: int) -> bool:
        """Whether the object is resident with other bytes: KV that is computed again is rarely the same to the bit."""
        if not self._anywhere(node) >> bit & 1:
            return False
        return (self.length_bytes(node, bit), self.checksum(node, bit)) != (length_bytes, checksum)

    def allocate(self, length_bytes: int) -> tuple[Piece, ...] | None:
        """Arena pieces for an object, evicting as needed. None if everything that is left is in use."""
        while True:
            pieces = self.space.allocate(length_bytes)
            if pieces is not None or round_up(length_bytes) > self.space.capacity_bytes:
                return pieces
            if not self.evict(ARENA):
                return None

    def allocate_all(self, lengths_bytes: Sequence[int]) -> list[tuple[Piece, ...] | None]:
        """Arena pieces for several objects: one after the other from one hole if one is large enough."""
        sizes = list(map(round_up, lengths_bytes))
        start = self.space.run(sum(sizes)) if len(sizes) > 1 else None
        if start is None:
            return [self.allocate(length) for length in lengths_bytes]
        starts = accumulate(sizes, initial=start)
        return [(Piece(at, length),) for at, length in zip(starts, lengths_bytes, strict=False)]

    def begin(self, node: Node, bit: int) -> None:
        """A writer has a slot for this object."""
        node.pending |= 1 << bit

    def end(self, node: Node, bit: int) -> None:
        """The writer is done, one way or the other."""
        node.pending &= ~(1 << bit)
        self.settle(node)

    def publish(self, node: Node, bit: int, pieces: tuple[Piece, ...], length_bytes: int, checksum: int) -> None:
        """The object is in the arena now, in these pieces, readable."""
        place = pieces[0].offset
        if len(pieces) > 1:
            self._scattered[self._next_scattered] = pieces
            place = _SCATTERED | self._next_scattered
            self._next_scattered += 1
        self._write_cell(node, bit, place, length_bytes, checksum)
        self._set(node, bit, ARENA)

    def commit(self, node: Node, bit: int, pieces: tuple[Piece, ...], length_bytes: int, checksum: int) -> None:
        """The writer is done, and what it wrote is readable: `end` and `publish` in one."""
        node.pending &= ~(1 << bit)
        self.publish(node, bit, pieces, length_bytes, checksum)
        if self.tiers > 1:
            self.settle(node)

    def add(self, node: Node, bit: int, tier: int, length_bytes: int, checksum: int) -> None:
        """A lower tier holds the object now."""
        if self.tier_mask(node, tier) >> bit & 1:
            return
        if not self._anywhere(node) >> bit & 1:
            self._write_cell(node, bit, 0, length_bytes, checksum)
        self.lower_bytes[tier] += round_up(length_bytes)
        self._set(node, bit, tier)

    def drop(self, node: Node, bit: int, tier: int) -> None:
        """The tier no longer holds the object. In the arena its bytes are freed now, or with the node's last pin."""
        if self.tier_mask(node, tier) >> bit & 1:
            self._drop(node, 1 << bit, tier)

    def evict(self, tier: int) -> list[ObjectKey]:
        """Drop the next victim's objects from a tier. Returns their keys; none if no node may go."""
        node = self._candidates[tier].next()
        if node is None:
            return []
        mask = self.tier_mask(node, tier)
        self._drop(node, mask, tier)
        self.evicted_objects[tier] += mask.bit_count()
        return [node.family.key(node, bit) for bit in each_bit(mask)]

    def forget(self, family: Family) -> Family:
        """Put an empty family in this one's place, and return it. Nothing of the old one is found; `sweep` drops it."""
        family.is_forgotten = True
        self.forgotten[family] = list(family.nodes.values())
        successor = self.families[family.namespace.digest] = Family(family.namespace)
        return successor

    def sweep(self, family: Family, most_objects: int) -> tuple[list[list[ObjectKey]], int]:
        """Drop some objects of a forgotten family, children before parents. Returns their keys by tier, and how many
        more objects the call would have dropped."""
        nodes = self.forgotten[family]
        keys: list[list[ObjectKey]] = [[] for _ in range(self.tiers)]
        while nodes and most_objects > 0:
            node = nodes.pop()
            most_objects -= 1  # a node without objects takes time, too
            for tier in range(self.tiers):
                mask = self.tier_mask(node, tier)
                if mask:
                    self._drop(node, mask, tier)
                    most_objects -= mask.bit_count()
                if tier != ARENA:
                    keys[tier] += [family.key(node, bit) for bit in each_bit(mask)]
        if not nodes:
            del self.forgotten[family]
        return keys, max(0, most_objects)

    def is_sweeping(self, namespace: Namespace) -> bool:
        """Whether a tier may still hold objects of this namespace that were forgotten."""
        return any(family.namespace.digest == namespace.digest for family in self.forgotten)

    # ---- presence

    def path(self, family: Family, chains: bytes) -> list[Node | None]:
        """The nodes of a prompt, one for each 32-byte chain value."""
        find = family.nodes.get if not family.is_forgotten else _nothing
        return [find(chains[at : at + 32]) for at in range(0, len(chains), 32)]

    def masks(self, family: Family, path: Sequence[Node | None], tiers: Iterable[int]) -> list[int]:
        """For each node of a path the objects resident in any of these tiers."""
        full, shifts = family.full, [tier * family.width for tier in tiers]
        if shifts == [0]:
            return [node.held & full if node is not None else 0 for node in path]
        found = []
        for node in path:
            mask = 0
            if node is not None:
                held = node.held
                for shift in shifts:
                    mask |= held >> shift
            found.append(mask & full)
        return found

    def presence(self, family: Family, masks: Sequence[int]) -> Sequence[Sequence[bool]]:
        """Rows of `hits.longest_hit`: for each group, at each boundary, whether it is there on every rank."""
        if not masks:
            return [()] * len(family.group_masks)
        by_mask = {mask: [mask & wanted == wanted for wanted in family.group_masks] for mask in set(masks)}
        return list(zip(*[by_mask[mask] for mask in masks], strict=True))

    # ---- inside

    def _candidate_test(self, tier: int) -> Callable[[Node], bool]:
        shift = tier * _COUNT_BITS

        def is_candidate(node: Node) -> bool:
            if node.pins or node.pending or (node.counts >> shift) & _COUNT_MASK:
                return False
            return bool((node.held >> (tier * node.family.width)) & node.family.full)

        return is_candidate

    def _write_cell(self, node: Node, bit: int, place: int, length_bytes: int, checksum: int) -> None:
        at = _cell_at(node, bit)
        after = at
        if node.known >> bit & 1:
            after += _CELL.size
        else:
            known = node.known | 1 << bit
            node.known = node.family.full if known == node.family.full else known  # one integer for all whole nodes
        node.cells = node.cells[:at] + _CELL.pack(place, length_bytes, checksum) + node.cells[after:]

    def _drop(self, node: Node, mask: int, tier: int) -> None:
        """Drop some of a node's objects, at least one, all of which the tier holds."""
        family = node.family
        for bit in each_bit(mask):
            if tier != ARENA:
                self.lower_bytes[tier] -= round_up(self.length_bytes(node, bit))
            elif node.pins:
                self._doomed.setdefault(node, []).append(self._forget_place(node, bit))
            else:
                self.space.free(self._forget_place(node, bit))
        before = self._anywhere(node)
        node.held &= ~(mask << (tier * family.width))
        self.resident_objects[tier] -= mask.bit_count()
        family.objects -= (before & ~self._anywhere(node)).bit_count()
        if not self.tier_mask(node, tier):
            self._left(node, tier)
        self.settle(node)

    def _forget_place(self, node: Node, bit: int) -> tuple[Piece, ...]:
        place, length, _ = _CELL.unpack_from(node.cells, _cell_at(node, bit))
        return self._scattered.pop(place & ~_SCATTERED) if place & _SCATTERED else (Piece(place, length),)

    def _anywhere(self, node: Node) -> int:
        held, mask = node.held, 0
        while held:
            mask |= held & node.family.full
            held >>= node.family.width
        return mask

    def _set(self, node: Node, bit: int, tier: int) -> None:
        family = node.family
        if not self._anywhere(node) >> bit & 1:
            family.objects += 1
        was_resident = self.tier_mask(node, tier)
        node.held |= 1 << (tier * family.width + bit)
        self.resident_objects[tier] += 1
        if not was_resident:
            self._came(node, tier)
        self._candidates[tier].offer(node)

    def _came(self, node: Node, tier: int) -> None:
        """The node's first object in this tier."""
        parent = node.parent
        assert parent is not None
        counts = parent.counts + (1 << (tier * _COUNT_BITS))
        parent.counts = _USUAL_COUNTS.get(counts, counts)
        length = node.end - node.start
        if length % node.family.namespace.chunk_tokens:
            if parent.tails is None:
                parent.tails = {}
            parent.tails[length] = parent.tails.get(length, 0) + 1

    def _left(self, node: Node, tier: int) -> None:
        """The node's last object in this tier is gone."""
        parent = node.parent
        assert parent is not None
        counts = parent.counts - (1 << (tier * _COUNT_BITS))
        parent.counts = _USUAL_COUNTS.get(counts, counts)
        length = node.end - node.start
        if parent.tails is not None and length % node.family.namespace.chunk_tokens:
            parent.tails[length] -= 1
            if not parent.tails[length]:
                del parent.tails[length]
        self._candidates[tier].offer(parent)

    def settle(self, node: Node) -> None:
        """After a change: the node may now be evicted, or removed if nothing needs it; and so may its parents."""
        for tier in range(self.tiers):
            self._candidates[tier].offer(node)
        current: Node | None = node
        while current is not None and not (current.held or current.children or current.pending or current.pins):
            parent = current.parent
            if current is current.family.root or current.family.nodes.get(current.chain) is not current:
                return
            del current.family.nodes[current.chain]
            if parent is not None:
                parent.children -= 1
            current = parent

    # ---- invariants

    def check(self) -> None:
        """Assert every invariant. Linear; for tests and simulation."""
        self.space.check()
        objects = [0] * self.tiers
        for family in (*self.families.values(), *self.forgotten):
            resident = 0
            expected: dict[bytes, int] = {}
            children: dict[bytes, int] = {}
            for chain, node in family.nodes.items():
                assert node.chain == chain and node.family is family and node.pins >= 0
                assert node is family.root or node.held or node.children or node.pending or node.pins
                resident += self._anywhere(node).bit_count()
                for tier in range(self.tiers):
                    mask = self.tier_mask(node, tier)
                    objects[tier] += mask.bit_count()
                    if mask and node.parent is not None:
                        expected[node.parent.chain] = expected.get(node.parent.chain, 0) + (1 << (tier * _COUNT_BITS))
                if node.parent is not None:
                    chain_above = node.parent.chain
                    assert family.nodes[chain_above] is node.parent and node.parent.end == node.start
                    children[chain_above] = children.get(chain_above, 0) + 1
                assert len(node.cells) == node.known.bit_count() * _CELL.size and not self._anywhere(node) & ~node.known
                for bit in each_bit(self.arena_mask(node)):
                    assert sum(piece.length for piece in self.pieces(node, bit)) == self.length_bytes(node, bit)
            assert resident == family.objects
            assert all(node.counts == expected.get(chain, 0) for chain, node in family.nodes.items())
            assert all(node.children == children.get(chain, 0) for chain, node in family.nodes.items())
        assert objects == self.resident_objects

    def owned_pieces(self) -> list[Piece]:
        """Every arena piece of a resident object, or of a dropped one that is still pinned (for `check`)."""
        owned = [piece for doomed in self._doomed.values() for pieces in doomed for piece in pieces]
        for family in (*self.families.values(), *self.forgotten):
            for node in family.nodes.values():
                for bit in each_bit(self.arena_mask(node)):
                    owned += self.pieces(node, bit)
        return owned


def _cell_at(node: Node, bit: int) -> int:
    """Where an object's cell begins, or would be inserted."""
    if node.known == node.family.full:
        return bit * _CELL.size
    return (node.known & ((1 << bit) - 1)).bit_count() * _CELL.size


def _nothing(chain: bytes) -> Node | None:
    return None


def each_bit(mask: int) -> Iterator[int]:
    """The positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
