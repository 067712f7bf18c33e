"""Residency, eviction and allocation together, against a model that only knows sets."""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtally.core.keys import ROOT_CHAIN, chain_value
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.residency import ARENA, Node, Residency, each_bit
from kvtally.core.space import GRANULE_BYTES, Piece

DISK = 1
CHUNK = 4
GROUPS = (
    GroupSpec(kind=GroupKind.FULL, block_tokens=4, page_bytes=((100,),)),
    GroupSpec(kind=GroupKind.RECURRENT, block_tokens=4, page_bytes=((100,),)),
)
NAMESPACE = Namespace(model="m", groups=GROUPS, chunk_tokens=CHUNK, alignment_tokens=4, tensor_parallel=2)
WIDTH = 4
chunks = st.lists(st.integers(0, 2), min_size=1, max_size=4)
bits = st.integers(0, WIDTH - 1)


class Machine(RuleBasedStateMachine):
    """Paths are lists of small token values; the model remembers what is resident where."""

    @initialize(granules=st.integers(4, 24))
    def start(self, granules: int) -> None:
        self.residency = Residency(granules * GRANULE_BYTES, lower_tiers=1)
        self.family = self.residency.register(NAMESPACE)
        self.pinned: list[Node] = []
        self.open: list[tuple[Node, int, tuple[Piece, ...], int]] = []
        self.resident: dict[tuple[bytes, int], set[int]] = {}  # (chain, bit) -> tiers
        self.facts: dict[tuple[bytes, int], tuple[int, int]] = {}  # (chain, bit) -> length, checksum
        self.commits = 0

    def node(self, path: list[int]) -> Node:
        parent, start = ROOT_CHAIN, 0
        for token in path:
            chain = chain_value(parent, bytes((token, 0, 0, 0)))
            end = start + (CHUNK if token != 2 else 1)  # value 2 makes a tail
            node = self.residency.ensure(self.family, chain, parent, start, end)
            self.residency.pin(node)  # keep it while its own child is made
            if parent != ROOT_CHAIN:
                self.residency.unpin(self.family.nodes[parent])
            parent, start = chain, end
        self.residency.unpin(node)  # which may have dropped it again
        assert node.parent is not None
        return self.residency.ensure(self.family, node.chain, node.parent.chain, node.start, node.end)

    @rule(path=chunks, bit=bits, length=st.integers(1, 6 * GRANULE_BYTES))
    def begin(self, path: list[int], bit: int, length: int) -> None:
        node = self.node(path)
        if node.pending >> bit & 1 or ARENA in self.resident.get((node.chain, bit), ()):
            self.residency.settle(node)
            return
        before = {key for key, tiers in self.resident.items() if ARENA in tiers}
        self.residency.pin(node)
        pieces = self.residency.allocate(length)
        self.forget_evicted(before)
        if pieces is not None:
            self.residency.begin(node, bit)
            self.open.append((node, bit, pieces, length))
        elif length <= self.residency.space.capacity_bytes:  # then really nothing more could go
            assert all(self.is_stuck(key) for key, tiers in self.resident.items() if ARENA in tiers)
        self.residency.unpin(node)

    def is_stuck(self, key: tuple[bytes, int]) -> bool:
        """Pinned, being written to, or with such a node or a resident child beneath it."""
        node = self.family.nodes[key[0]]
        if node.pins or node.pending:
            return True
        children = [child for child in self.family.nodes.values() if child.parent is node]
        return any(self.residency.arena_mask(child) for child in children)

    def forget_evicted(self, before: set[tuple[bytes, int]]) -> None:
        """What left the arena was neither pinned nor in front of something that stayed."""
        for chain, bit in before:
            node = self.family.nodes.get(chain)
            if node is None or not self.residency.arena_mask(node) >> bit & 1:
                self.resident[chain, bit].discard(ARENA)
                assert node is None or not node.pins
                assert node is None or not any(
                    self.residency.arena_mask(child) for child in self.family.nodes.values() if child.parent is node
                )

    @precondition(lambda self: self.open)
    @rule(commit=st.booleans(), data=st.data())
    def end(self, commit: bool, data: st.DataObject) -> None:
        node, bit, pieces, length = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if commit:
            self.commits += 1
            self.residency.publish(node, bit, pieces, length, self.commits)
            self.facts[node.chain, bit] = length, self.commits
            self.resident.setdefault((node.chain, bit), set()).add(ARENA)
            self.residency.touch_up([node])
            assert self.residency.pieces(node, bit) == pieces
            assert self.residency.length_bytes(node, bit) == length
        else:
            self.residency.space.free(pieces)
        self.residency.end(node, bit)

    @rule(path=chunks, bit=bits)
    def write_down(self, path: list[int], bit: int) -> None:
        node = self.node(path)
        if ARENA in self.resident.get((node.chain, bit), ()):
            self.residency.add(node, bit, DISK, *self.facts[node.chain, bit])
            self.resident[node.chain, bit].add(DISK)
        self.residency.settle(node)

    @rule(path=chunks)
    def pin(self, path: list[int]) -> None:
        node = self.node(path)
        if self.residency.arena_mask(node):
            self.residency.pin(node)
            self.pinned.append(node)
        self.residency.settle(node)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.residency.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(path=chunks, bit=bits, tier=st.sampled_from((ARENA, DISK)))
    def drop(self, path: list[int], bit: int, tier: int) -> None:
        node = self.node(path)
        self.residency.drop(node, bit, tier)
        self.resident.get((node.chain, bit), set()).discard(tier)
        self.residency.settle(node)

    @rule()
    def evict_from_disk(self) -> None:
        for key in self.residency.evict(DISK):
            self.resident[key.chain, self.family.bit(key.group, key.rank)].discard(DISK)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.residency.check()
        seen: dict[tuple[bytes, int], set[int]] = {}
        for node in self.family.nodes.values():
            for tier in (ARENA, DISK):
                for bit in each_bit(self.residency.tier_mask(node, tier)):
                    seen.setdefault((node.chain, bit), set()).add(tier)
                    fact = self.residency.length_bytes(node, bit), self.residency.checksum(node, bit)
                    assert fact == self.facts[node.chain, bit]
        assert seen == {key: tiers for key, tiers in self.resident.items() if tiers}
        owned = self.residency.owned_pieces() + [piece for _, _, pieces, _ in self.open for piece in pieces]
        used = sum(-(-piece.length // GRANULE_BYTES) * GRANULE_BYTES for piece in owned)
        assert used == self.residency.space.used_bytes
        tails = {length for node in self.family.nodes.values() for length in (node.tails or ())}
        assert tails <= {1}


TestResidency = Machine.TestCase


def test_least_recently_used_tail_goes_first() -> None:
    residency = Residency(64 * GRANULE_BYTES)
    family = residency.register(NAMESPACE)
    nodes = {}
    for name in "abc":
        parent, start = ROOT_CHAIN, 0
        for depth in range(3):
            chain = chain_value(parent, f"{name}{depth}__".encode())
            node = residency.ensure(family, chain, parent, start, start + CHUNK)
            pieces = residency.allocate(10)
            assert pieces is not None
            residency.publish(node, 0, pieces, 10, 0)
            residency.touch_up([node])
            nodes[name, depth] = node
            parent, start = chain, start + CHUNK
    residency.touch([nodes["a", 0], nodes["a", 1]])
    order = []
    while keys := residency.evict(ARENA):
        order += [place for key in keys for place, node in nodes.items() if node.chain == key.chain]
    assert order == [("a", 2), ("b", 2), ("b", 1), ("b", 0), ("c", 2), ("c", 1), ("c", 0), ("a", 1), ("a", 0)]


def test_a_boundary_takes_memory_for_the_objects_it_has_not_for_all_it_could_have() -> None:
    groups = tuple(GroupSpec(kind=GroupKind.FULL, block_tokens=4, page_bytes=((100,),)) for _ in range(64))
    wide = Namespace(model="w", groups=groups, chunk_tokens=CHUNK, alignment_tokens=4, tensor_parallel=256)
    residency = Residency(64 * GRANULE_BYTES, lower_tiers=1)
    family = residency.register(wide)
    assert family.width == 64 * 256
    node = residency.ensure(family, b"c" * 32, ROOT_CHAIN, 0, CHUNK)
    places = {}
    for bit in (9_000, 16_383, 0, 8_999, 1):
        pieces = residency.allocate(10 + bit)
        assert pieces is not None
        residency.commit(node, bit, pieces, 10 + bit, bit)
        places[bit] = pieces
    assert {bit: residency.pieces(node, bit) for bit in places} == places
    assert all((residency.length_bytes(node, bit), residency.checksum(node, bit)) == (10 + bit, bit) for bit in places)
    assert sum(map(sys.getsizeof, (node.cells, node.held, node.known, node.pending))) < 8_192
    residency.check()
