"""Space against a bitmap of granules, and against the traffic of four models at once."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtally.core.space import GRANULE_BYTES, MAX_PIECES, Piece, Space, rebuild, size_class

CAPACITY_GRANULES = 64
MIB = 1024 * 1024


def granules_of(piece: Piece) -> set[int]:
    assert piece.offset % GRANULE_BYTES == 0
    assert piece.length > 0
    return {byte // GRANULE_BYTES for byte in range(piece.offset, piece.offset + piece.length, GRANULE_BYTES)} | {
        (piece.offset + piece.length - 1) // GRANULE_BYTES
    }


def free_map(space: Space) -> list[bool]:
    """Which granules a space gives out, found by taking one granule after another until there is none."""
    free = [False] * (space.capacity_bytes // GRANULE_BYTES)
    taken = []
    while (pieces := space.allocate(GRANULE_BYTES)) is not None:
        taken.append(pieces)
        (piece,) = pieces
        assert not free[piece.offset // GRANULE_BYTES]
        free[piece.offset // GRANULE_BYTES] = True
    for pieces in taken:
        space.free(pieces)
    return free


class SpaceMachine(RuleBasedStateMachine):
    """The model: which object, if any, each granule belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(CAPACITY_GRANULES * GRANULE_BYTES + 17)  # a ragged end is not used
        self.owner: list[int | None] = [None] * CAPACITY_GRANULES
        self.objects: dict[int, tuple[Piece, ...]] = {}
        self.count = 0

    def free_count(self) -> int:
        return self.owner.count(None)

    @rule(length=st.integers(1, 3 * GRANULE_BYTES) | st.integers(1, CAPACITY_GRANULES * GRANULE_BYTES + 1))
    def allocate(self, length: int) -> None:
        pieces = self.space.allocate(length)
        if pieces is None:
            assert sum(sorted(self.holes())[-MAX_PIECES:]) * GRANULE_BYTES < length
            return
        assert 1 <= len(pieces) <= MAX_PIECES
        assert sum(piece.length for piece in pieces) == length
        assert all(piece.length % GRANULE_BYTES == 0 for piece in pieces[:-1])
        self.count += 1
        for piece in pieces:
            for granule in granules_of(piece):
                assert self.owner[granule] is None, "two objects share a granule"
                self.owner[granule] = self.count
        self.objects[self.count] = pieces

    def holes(self) -> list[int]:
        """Lengths of the runs of free granules. A refusal is right only if the largest MAX_PIECES are too little."""
        return [len(run) for run in "".join("." if owner is None else "#" for owner in self.owner).split("#")]

    @rule(length=st.integers(-3 * GRANULE_BYTES, 0))
    def allocate_nothing(self, length: int) -> None:
        assert self.space.allocate(length) is None

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.objects)))
        self.space.free(self.objects.pop(name))
        self.owner = [None if owner == name else owner for owner in self.owner]

    @precondition(lambda self: len(self.objects) > 4)
    @rule()
    def free_every_other(self) -> None:
        """Makes many small holes, which single frees rarely do."""
        for name in sorted(self.objects)[::2]:
            self.space.free(self.objects.pop(name))
            self.owner = [None if owner == name else owner for owner in self.owner]

    @rule()
    def every_free_granule_can_be_had(self) -> None:
        assert free_map(self.space) == [owner is None for owner in self.owner]

    @rule()
    def rebuilt_from_what_is_in_use(self) -> None:
        """What recovery does; the rebuilt space must be as good as the old one, so go on with it."""
        rebuilt = rebuild(
            CAPACITY_GRANULES * GRANULE_BYTES, [piece for pieces in self.objects.values() for piece in pieces]
        )
        rebuilt.check()
        assert free_map(rebuilt) == free_map(self.space)
        self.space = rebuilt

    @invariant()
    def books_balance(self) -> None:
        self.space.check()
        assert self.space.free_bytes == self.free_count() * GRANULE_BYTES
        assert self.space.used_bytes == (CAPACITY_GRANULES - self.free_count()) * GRANULE_BYTES


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=40)


def space_with(holes: list[int]) -> Space:
    """A space with just these holes, in granules, each followed by a granule in use."""
    taken, position = [], 0
    for hole in holes:
        position += hole * GRANULE_BYTES
        taken.append(Piece(position, GRANULE_BYTES))
        position += GRANULE_BYTES
    return rebuild(position, taken)


def test_every_request_from_every_hole() -> None:
    """A size class holds several sizes: a hole of the request's own class may still be too short for it."""
    for hole in range(1, 40):
        for wanted in range(1, 40):
            space = space_with([hole, hole, hole])
            pieces = space.allocate(wanted * GRANULE_BYTES)
            space.check()
            assert space.free_bytes == (3 * hole - (wanted if pieces else 0)) * GRANULE_BYTES
            assert len(pieces or ()) == (-(-wanted // hole) if wanted <= 3 * hole else 0)


hole_sizes = st.integers(1, 20) | st.integers(8, 12)


@given(st.lists(hole_sizes, max_size=8) | st.lists(hole_sizes, min_size=MAX_PIECES + 1, max_size=30), st.data())
def test_holes_of_any_sizes(holes: list[int], data: st.DataObject) -> None:
    """More and larger holes than the machine above ever has: size classes wider than one size, more than MAX_PIECES."""
    nearly_all = st.integers(0, 30).map(lambda spare: max(1, sum(holes) - spare))
    wanted = data.draw(st.integers(1, 20) | st.integers(1, 200) | nearly_all)
    space = space_with(holes)
    free = free_map(space)
    pieces = space.allocate(wanted * GRANULE_BYTES)
    space.check()
    if pieces is None:
        assert free_map(space) == free
        assert sum(holes) < wanted or len(holes) > MAX_PIECES
        if max(holes, default=0) < 8:  # below that each size is a class of its own, and the choice is exact
            assert sum(sorted(holes)[-MAX_PIECES:]) < wanted
        return
    assert len(pieces) <= MAX_PIECES
    given_out = [granule for piece in pieces for granule in granules_of(piece)]
    assert len(given_out) == len(set(given_out)) == wanted
    assert all(free[granule] for granule in given_out)
    if max(holes) >= wanted and len(holes) <= 8:
        assert len(pieces) == 1


@pytest.mark.parametrize("first", [1, 12])  # all of one size class, or of two
def test_a_request_takes_up_to_max_pieces_and_a_refusal_changes_nothing(first: int) -> None:
    space = space_with([first] + [1] * (MAX_PIECES + 3))
    before = free_map(space)
    most = first + MAX_PIECES - 1
    assert space.allocate((most + 1) * GRANULE_BYTES) is None
    space.check()
    assert free_map(space) == before
    pieces = space.allocate(most * GRANULE_BYTES - 1)
    assert pieces is not None
    assert len(pieces) == MAX_PIECES
    assert pieces[-1].length % GRANULE_BYTES == GRANULE_BYTES - 1
    space.free(pieces)
    assert free_map(space) == before


@given(st.lists(st.integers(1, 40), max_size=12))
def test_everything_freed_makes_one_hole_again(sizes: list[int]) -> None:
    space = Space(CAPACITY_GRANULES * GRANULE_BYTES)
    objects = [pieces for size in sizes if (pieces := space.allocate(size * GRANULE_BYTES))]
    for pieces in objects:
        space.free(pieces)
    assert space.allocate(space.capacity_bytes) == (Piece(0, space.capacity_bytes),)


pieces_lists = st.lists(
    st.builds(Piece, st.integers(0, 20).map(lambda i: i * GRANULE_BYTES // 2), st.integers(-1, 3 * GRANULE_BYTES)),
    max_size=4,
)


@given(pieces_lists)
def test_rebuild_refuses_what_cannot_be(pieces: list[Piece]) -> None:
    """Taken from a disk that may be damaged: overlap, misalignment and what lies outside must be noticed."""
    capacity = 8 * GRANULE_BYTES
    possible = all(p.length > 0 and p.offset % GRANULE_BYTES == 0 for p in pieces)
    used = [granule for piece in pieces for granule in granules_of(piece)] if possible else []
    possible = possible and len(used) == len(set(used)) and max(used, default=0) < 8
    if not possible:
        with pytest.raises(ValueError, match="piece"):
            rebuild(capacity, pieces)
        return
    space = rebuild(capacity, pieces)
    space.check()
    assert free_map(space) == [granule not in used for granule in range(8)]


def test_size_classes_ascend_by_at_most_a_quarter() -> None:
    """A hole of a higher class is always long enough: that is what makes allocating fast and right."""
    sizes = [granules * GRANULE_BYTES for granules in range(1, 20_000)]
    classes = [size_class(size) for size in sizes]
    assert classes == sorted(classes)
    smallest: dict[int, int] = {}
    for size, index in zip(sizes, classes, strict=True):
        assert size < 1.26 * smallest.setdefault(index, size)


# ---- four models in one arena


class Model(NamedTuple):
    """What one engine stores for one chunk: object sizes, one entry for each group and rank."""

    name: str
    chunk_objects: list[int]
    tail_blocks: int  # a chunk has so many blocks; a tail any number below
    tail_block_bytes: int


MODELS = [
    Model("dense 8B, two ranks", [36 * 4096 * 256 // 2] * 2, 16, 36 * 4096 * 16 // 2),
    Model("hybrid 27B", [26_214_400] + [3_211_264] * 3, 1, 26_214_400),
    Model("sliding window 12B", [8 * 4096 * 128, 1_048_576, 2_097_152, 3_145_728, 4_194_304], 2, 8 * 4096 * 64),
    Model("small hybrid", [16 * 65_536] + [71_680] * 3, 1, 65_536),
]


class Arena:
    """Least-recently-used eviction until an object fits: the crudest policy there is, so fragmentation shows."""

    def __init__(self, capacity_bytes: int) -> None:
        self.space = Space(capacity_bytes)
        self.objects: OrderedDict[int, tuple[int, tuple[Piece, ...]]] = OrderedDict()
        self.live_bytes = 0
        self.evictions = self.allocations = self.pieces = 0

    def put(self, length: int) -> None:
        while (pieces := self.space.allocate(length)) is None:
            _, (gone, old) = self.objects.popitem(last=False)
            self.space.free(old)
            self.live_bytes -= gone
            self.evictions += 1
        self.allocations += 1
        self.pieces += len(pieces)
        self.objects[self.allocations] = (length, pieces)
        self.live_bytes += length

    def touch(self, chooser: random.Random) -> None:
        """Some objects are read again, so that the order of eviction is not the order of allocation."""
        name = chooser.choice(list(self.objects)[:: max(1, len(self.objects) // 64)])
        self.objects.move_to_end(name)


def mixed_traffic(chooser: random.Random, chunks: int) -> list[int]:
    """Object lengths in the order of their making. The mix shifts: for a while one model has most of the traffic."""
    lengths = []
    for step in range(chunks):
        favourite = MODELS[step * 8 // chunks % len(MODELS)]
        model = favourite if chooser.random() < 0.7 else chooser.choice(MODELS)
        if chooser.random() < 0.2:
            lengths.append(model.tail_block_bytes * chooser.randint(1, model.tail_blocks))
        else:
            lengths += model.chunk_objects
    return lengths


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_four_models_lose_little_to_fragmentation(seed: int, record_property: Callable[[str, object], None]) -> None:
    chooser = random.Random(seed)
    arena = Arena(4096 * MIB)
    lowest = 1.0
    for length in mixed_traffic(chooser, 4_000):
        warm = arena.evictions > 0
        arena.put(length)
        if chooser.random() < 0.3:
            arena.touch(chooser)
        if warm:
            lowest = min(lowest, arena.live_bytes / arena.space.capacity_bytes)
    arena.space.check()
    assert arena.evictions > 4_000
    print(
        f"\nseed {seed}: live bytes never below {lowest:.2%} of the arena; "
        f"{arena.allocations} allocations, {arena.evictions} evictions, "
        f"{arena.pieces / arena.allocations:.2f} pieces for each object"
    )
    record_property("lowest_live_fraction", lowest)
    assert lowest >= 0.95


def test_a_full_space_is_used_again_and_again() -> None:
    chooser = random.Random(5)
    space = Space(64 * 1024 * MIB)
    sizes = [71_680, 3_211_264, 1_048_576, 18_874_368]
    held = [pieces for _ in range(5_000) if (pieces := space.allocate(chooser.choice(sizes)))]
    assert len(held) == 5_000
    for _ in range(20_000):
        index = chooser.randrange(len(held))
        space.free(held[index])
        again = space.allocate(chooser.choice(sizes))
        assert again is not None
        held[index] = again
    space.check()
