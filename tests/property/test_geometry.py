"""Geometry against an oracle that lists addresses byte by byte, and whole loads on real buffers.

The invariant: every byte a load writes lies inside the request's own blocks. Shared blocks, null blocks, padding, other
groups in the same memory: all of it must be as it was.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtally.core.geometry import (
    NULL_BLOCK,
    GroupLayout,
    LayerView,
    Run,
    chunk_block_range,
    needed_blocks,
    object_length,
    runs,
    validate,
)
from kvtally.core.hits import longest_hit, needed
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import IncompatibleError

Buffer = NDArray[np.uint8]

kinds = st.sampled_from(GroupKind)


def group_spec(kind: GroupKind, pages: tuple[int, ...], block_tokens: int = 1, window: int = 3) -> GroupSpec:
    window = window if kind is GroupKind.SLIDING else 0
    return GroupSpec(kind=kind, block_tokens=block_tokens, page_bytes=(pages,), window_tokens=window)


class Engine(NamedTuple):
    """One rank: groups that alias one buffer, as an engine with a shared block pool lays them out."""

    layouts: tuple[GroupLayout, ...]
    blocks_count: int

    def namespace(self, chunk_tokens: int) -> Namespace:
        groups = tuple(layout.spec for layout in self.layouts)
        return Namespace(model="m", groups=groups, chunk_tokens=chunk_tokens, alignment_tokens=1)

    def buffer(self, seed: int) -> Buffer:
        size = self.layouts[0].buffer_bytes
        return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@st.composite
def engines(draw: st.DrawFn, specs: list[GroupSpec] | None = None, least_blocks: int = 6) -> Engine:
    """Memory slots of one stride, layer- or block-outermost; layer i of every group uses slot i, with its own page."""
    if specs is None:
        page_lists = st.lists(st.integers(1, 5), max_size=3).map(tuple)
        specs = [group_spec(draw(kinds), draw(page_lists)) for _ in range(draw(st.integers(1, 3)))]
    blocks = least_blocks + draw(st.integers(0, 3))
    slots = max(len(spec.page_bytes[0]) for spec in specs)
    largest = max((page for spec in specs for page in spec.page_bytes[0]), default=1)
    slot_bytes = largest + draw(st.sampled_from([0, 0, 2]))
    front = draw(st.integers(0, 3))
    layers: list[tuple[int, int]]  # offset, stride
    if draw(st.booleans()):
        layers = [(front + slot * blocks * slot_bytes, slot_bytes) for slot in range(slots)]
    else:
        layers = [(front + slot * slot_bytes, slots * slot_bytes) for slot in range(slots)]
    buffer_bytes = front + slots * blocks * slot_bytes + draw(st.integers(0, 3))
    layouts = tuple(
        GroupLayout(
            spec,
            tuple(LayerView(*place, page) for place, page in zip(layers, spec.page_bytes[0], strict=False)),
            blocks,
            buffer_bytes,
        )
        for spec in specs
    )
    return Engine(layouts, blocks)


def page_addresses(layer: LayerView, block: int) -> list[int]:
    return [layer.offset + block * layer.stride_bytes + byte for byte in range(layer.page_bytes)]


def object_addresses(layout: GroupLayout, block_ids: list[int]) -> list[int]:
    """Where each byte of the object lies in engine memory: for each layer, for each block, the page."""
    return [address for layer in layout.layers for block in block_ids for address in page_addresses(layer, block)]


def draw_ids(data: st.DataObject, layout: GroupLayout, least: int = 1) -> list[int]:
    most = 1 if layout.spec.kind is GroupKind.RECURRENT else 5
    ids = st.integers(1, layout.blocks_count - 1)
    shuffled = data.draw(st.lists(ids, min_size=min(least, most), max_size=most, unique=True))
    return sorted(shuffled) if data.draw(st.booleans()) else shuffled


def gather(memory: Buffer, layout: GroupLayout, block_ids: list[int]) -> Buffer:
    content = np.zeros(object_length(layout, len(block_ids)), dtype=np.uint8)
    for run in runs(layout, block_ids):
        piece = memory[run.engine_offset : run.engine_offset + run.length]
        content[run.object_offset : run.object_offset + run.length] = piece
    return content


def scatter(memory: Buffer, layout: GroupLayout, block_ids: list[int], content: Buffer, skip: int = 0) -> None:
    assert len(content) == object_length(layout, len(block_ids) + skip)
    for run in runs(layout, block_ids, skip_blocks=skip):
        piece = content[run.object_offset : run.object_offset + run.length]
        memory[run.engine_offset : run.engine_offset + run.length] = piece


@given(engines(), st.data())
def test_runs_are_the_oracles_bytes_in_order_and_as_long_as_can_be(engine: Engine, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(engine.layouts))
    block_ids = draw_ids(data, layout)
    addresses = object_addresses(layout, block_ids)
    found = list(runs(layout, block_ids))

    assert [run.object_offset + i for run in found for i in range(run.length)] == list(range(len(addresses)))
    assert [run.engine_offset + i for run in found for i in range(run.length)] == addresses
    assert len(addresses) == object_length(layout, len(block_ids))
    seams = sum(1 for before, after in pairwise(addresses) if after != before + 1)
    assert len(found) == (seams + 1 if addresses else 0)
    assert len(runs(layout, block_ids)) == len(found)


@given(engines(), st.data())
def test_skipped_blocks_leave_the_rest_where_it_was(engine: Engine, data: st.DataObject) -> None:
    """Moving only an object's end moves the same bytes to the same places as moving all of it would, and no others."""
    attention = [layout for layout in engine.layouts if layout.spec.kind is not GroupKind.RECURRENT]
    assume(attention)
    layout = data.draw(st.sampled_from(attention))
    block_ids = draw_ids(data, layout, least=2)
    skip = data.draw(st.integers(0, len(block_ids) - 1))
    kept = set(block_ids[skip:])
    block_of = [block for layer in layout.layers for block in block_ids for _ in range(layer.page_bytes)]
    whole = list(enumerate(object_addresses(layout, block_ids)))
    expected = [(offset, address) for offset, address in whole if block_of[offset] in kept]
    moved = runs(layout, block_ids[skip:], skip_blocks=skip)
    assert [(r.object_offset + i, r.engine_offset + i) for r in moved for i in range(r.length)] == expected


@given(engines(), st.data())
def test_what_is_saved_from_some_blocks_is_loaded_into_others(engine: Engine, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(engine.layouts))
    sources = draw_ids(data, layout)
    ids = st.integers(1, layout.blocks_count - 1)
    targets = data.draw(st.lists(ids, min_size=len(sources), max_size=len(sources), unique=True))
    first, second = engine.buffer(1), engine.buffer(2)
    expected = second.copy()
    for layer in layout.layers:
        for source, target in zip(sources, targets, strict=True):
            expected[page_addresses(layer, target)] = first[page_addresses(layer, source)]
    scatter(second, layout, targets, gather(first, layout, sources))
    assert np.array_equal(second, expected)
    assert np.array_equal(gather(second, layout, targets), gather(first, layout, sources))


@given(engines(), st.data())
def test_a_load_into_one_group_leaves_the_blocks_of_every_other_group_alone(
    engine: Engine, data: st.DataObject
) -> None:
    layout, other = data.draw(st.sampled_from(engine.layouts)), data.draw(st.sampled_from(engine.layouts))
    block_ids = draw_ids(data, layout)
    memory = engine.buffer(1)
    others = [block for block in range(engine.blocks_count) if block not in block_ids]
    watched = [address for layer in other.layers for block in others for address in page_addresses(layer, block)]
    before = memory[watched].copy()
    scatter(memory, layout, block_ids, np.full(object_length(layout, len(block_ids)), 7, dtype=np.uint8))
    assert np.array_equal(memory[watched], before)


# ---- a whole request


class Load(NamedTuple):
    """A request with a hit: one chunk size, a tail perhaps, groups of any kind with their own block sizes."""

    specs: list[GroupSpec]
    ends: list[int]
    have: list[int]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    chunk = draw(st.sampled_from([4, 6]))
    ends = [chunk * (i + 1) for i in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        ends.append(ends[-1] + draw(st.integers(1, chunk - 1)))
    sizes = [size for size in (1, 2, 3, 4, 6) if chunk % size == 0]
    specs, have = [], []
    for _ in range(draw(st.integers(1, 3))):
        kind, block = draw(kinds), draw(st.sampled_from(sizes))
        pages = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        specs.append(group_spec(kind, pages, block, draw(st.integers(1, 16))))
        held = [0, *ends] if kind is GroupKind.RECURRENT else range(0, ends[-1] + 1, block)
        have.append(draw(st.sampled_from(held)))
    return Load(specs, ends, have)


@given(loads(), st.data())
def test_a_load_writes_what_the_engine_will_read_and_nothing_else(load: Load, data: st.DataObject) -> None:
    """The target's table is as an engine makes it: null below the window, shared below `have`, else the request's own.

    Afterwards every page that the engine may read and did not hold is the saved one, and no other byte has changed.
    """
    hit = load.ends[-1]
    sizes = [-(-hit // spec.block_tokens) for spec in load.specs]
    engine = data.draw(engines(load.specs, sum(sizes) + 1))
    validate(engine.namespace(load.ends[0]), {0: engine.layouts})
    source, target = engine.buffer(1), engine.buffer(2)
    expected = target.copy()
    saved_ids, loaded_ids = (iter(data.draw(st.permutations(range(1, engine.blocks_count)))) for _ in range(2))

    present = [[True] * len(load.ends)] * len(load.specs)
    assert longest_hit(load.specs, load.ends, present, limit_tokens=hit, have=load.have).end_tokens == hit
    for layout, size, have in zip(engine.layouts, sizes, load.have, strict=True):
        saved = [next(saved_ids) for _ in range(size)]
        visible = blocks_to_load(layout.spec, hit, 0)
        table = [next(loaded_ids) if block in visible else NULL_BLOCK for block in range(size)]
        for block in blocks_to_load(layout.spec, hit, have):
            for layer in layout.layers:
                expected[page_addresses(layer, table[block])] = source[page_addresses(layer, saved[block])]
        for index in needed(layout.spec, load.ends, len(load.ends) - 1, have):
            start, end = [0, *load.ends][index], load.ends[index]
            whole = chunk_block_range(layout.spec, start, end)
            content = gather(source, layout, [saved[block] for block in whole])
            wanted = needed_blocks(layout.spec, start, end, hit_tokens=hit, have_tokens=have)
            scatter(target, layout, [table[block] for block in wanted], content, wanted.start - whole.start)
    assert np.array_equal(target, expected)


def blocks_to_load(spec: GroupSpec, hit: int, have: int) -> set[int]:
    """Blocks of the table that hold a token which the engine will read and does not hold; token by token."""
    if spec.kind is GroupKind.RECURRENT:
        return set() if have == hit else {(hit - 1) // spec.block_tokens}
    lowest = 0 if spec.kind is GroupKind.FULL else hit - spec.window_tokens + 1
    return {token // spec.block_tokens for token in range(have, hit) if token >= lowest}


@given(st.integers(1, 6), kinds, st.integers(0, 5), st.integers(1, 40), st.integers(1, 20))
def test_the_blocks_of_a_chunk_by_counting_tokens(
    block: int, kind: GroupKind, start: int, span: int, window: int
) -> None:
    spec = group_spec(kind, (1,), block, window)
    begin, end = start * block, start * block + span
    blocks = set(chunk_block_range(spec, begin, end))
    if kind is GroupKind.RECURRENT:
        assert blocks == {(end - 1) // block}
    else:  # under a window: what the next token can see, and at least the last one
        lowest = min(end - window + 1, end - 1) if kind is GroupKind.SLIDING else begin
        assert blocks == {token // block for token in range(begin, end) if token >= lowest}
    namespace = Namespace(model="m", groups=(spec,), chunk_tokens=block, alignment_tokens=1)
    layout = GroupLayout(spec, (LayerView(0, 1, 1),), 1000, 1000)
    assert object_length(layout, len(blocks)) == namespace.object_bytes(0, 0, span)


FULL = group_spec(GroupKind.FULL, (4,), 4)
STATE = group_spec(GroupKind.RECURRENT, (4,), 4)
SMALL = GroupLayout(FULL, (LayerView(0, 4, 4),), 8, 32)


@pytest.mark.parametrize("block_ids", [[], [0], [3, 0], [8], [-1], [2, 2]])
def test_ids_that_no_request_can_own_are_refused(block_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        runs(SMALL, block_ids)


def test_a_state_is_one_whole_block() -> None:
    layout = GroupLayout(STATE, (LayerView(0, 4, 4),), 8, 32)
    assert list(runs(layout, [3])) == [Run(12, 0, 4)]
    with pytest.raises(ValueError, match="state"):
        runs(layout, [3, 4])
    with pytest.raises(ValueError, match="state"):
        runs(layout, [3], skip_blocks=1)


def test_neighbouring_blocks_without_padding_are_one_run() -> None:
    assert list(runs(SMALL, [2, 3, 4])) == [Run(8, 0, 12)]
    assert list(runs(SMALL, [4, 3])) == [Run(16, 0, 4), Run(12, 4, 4)]


@pytest.mark.parametrize(("start", "end"), [(2, 8), (8, 8), (8, 4), (-4, 4)])
def test_what_is_no_chunk_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"chunk|begin"):
        chunk_block_range(FULL, start, end)


def test_a_hit_below_the_object_or_inside_a_held_block_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the hit"):
        needed_blocks(FULL, 0, 8, hit_tokens=4)
    with pytest.raises(ValueError, match="inside a block"):
        needed_blocks(FULL, 0, 8, hit_tokens=8, have_tokens=2)


def test_a_state_is_loaded_only_at_the_hit_and_only_if_it_is_not_held() -> None:
    assert needed_blocks(STATE, 4, 8, hit_tokens=8, have_tokens=4) == range(1, 2)
    assert len(needed_blocks(STATE, 4, 8, hit_tokens=8, have_tokens=8)) == 0
    assert len(needed_blocks(STATE, 0, 4, hit_tokens=8)) == 0


@pytest.mark.parametrize(
    "layer", [LayerView(0, 4, 5), LayerView(0, 4, 0), LayerView(-1, 4, 4), LayerView(4, 4, 4), LayerView(0, 5, 4)]
)
def test_a_layout_outside_its_buffer_cannot_be_made(layer: LayerView) -> None:
    with pytest.raises(ValueError, match="layer 0"):
        GroupLayout(FULL, (layer,), 8, 32)


def test_a_pool_has_more_than_the_null_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        GroupLayout(FULL, (LayerView(0, 4, 4),), 1, 32)


# ---- validate


@given(engines())
def test_what_an_engine_lays_out_is_accepted_with_the_lengths_of_the_namespace(engine: Engine) -> None:
    namespace = engine.namespace(chunk_tokens=4)
    validate(namespace, {0: engine.layouts})
    for group, layout in enumerate(engine.layouts):
        blocks = len(chunk_block_range(layout.spec, 0, 4))
        assert object_length(layout, blocks) == namespace.object_bytes(group, 0, 4)


def test_every_pipeline_stage_has_its_own_layers() -> None:
    spec = GroupSpec(kind=GroupKind.FULL, block_tokens=4, page_bytes=((4, 4), (8,), ()))
    namespace = Namespace(
        model="m", groups=(spec,), chunk_tokens=8, alignment_tokens=4, tensor_parallel=2, pipeline_parallel=3
    )
    stages = [
        GroupLayout(spec, (LayerView(0, 4, 4), LayerView(32, 4, 4)), 8, 64),
        GroupLayout(spec, (LayerView(0, 8, 8),), 8, 64),
        GroupLayout(spec, (), 8, 64),
    ]
    layouts = {rank: [stages[rank // 2]] for rank in range(6)}
    validate(namespace, layouts)
    for rank in range(6):
        assert object_length(stages[rank // 2], 2) == namespace.object_bytes(0, rank, 8)
    assert list(runs(stages[2], [1, 2])) == []
    with pytest.raises(IncompatibleError, match="pages"):
        validate(namespace, {0: [stages[1]]})


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ({0: []}, "0 groups"),
        ({1: [SMALL]}, "rank 1"),
        ({-1: [SMALL]}, "rank -1"),
        ({0: [GroupLayout(STATE, SMALL.layers, 8, 32)]}, "spec"),
        ({0: [GroupLayout(FULL, (LayerView(0, 4, 3),), 8, 32)]}, "pages"),
        ({0: [GroupLayout(FULL, (), 8, 32)]}, "pages"),
    ],
)
def test_layouts_that_are_not_the_namespaces_are_refused(layouts: dict[int, list[GroupLayout]], says: str) -> None:
    namespace = Namespace(model="m", groups=(FULL,), chunk_tokens=8, alignment_tokens=4)
    with pytest.raises(IncompatibleError, match=says) as caught:
        validate(namespace, layouts)
    assert caught.value.code == "KV-202"


def test_a_chunk_is_whole_blocks() -> None:
    namespace = Namespace(model="m", groups=(FULL,), chunk_tokens=6, alignment_tokens=2)
    with pytest.raises(IncompatibleError, match="whole blocks"):
        validate(namespace, {0: [SMALL]})
    validate(msgspec.structs.replace(namespace, chunk_tokens=8), {0: [SMALL]})


views = st.builds(
    lambda offset, stride, page: LayerView(offset, stride, min(stride, page)),
    st.integers(0, 24) | st.integers(0, 80),
    st.sampled_from([4, 4, 4, 8]),
    st.integers(1, 8),
)


@given(st.lists(st.tuples(st.lists(views, min_size=1, max_size=2), st.integers(2, 4)), min_size=1, max_size=3))
def test_pages_that_overlap_are_refused(groups: list[tuple[list[LayerView], int]]) -> None:
    """By listing who owns each byte: one block id in different groups is fine, all else is an overlap."""
    layouts = []
    owners: dict[int, set[tuple[int, int, int]]] = {}
    for group, (layers, blocks) in enumerate(groups):
        spec = group_spec(GroupKind.FULL, tuple(layer.page_bytes for layer in layers))
        layouts.append(GroupLayout(spec, tuple(layers), blocks, 1_000))
        for number, layer in enumerate(layers):
            for block in range(blocks):
                for address in page_addresses(layer, block):
                    owners.setdefault(address, set()).add((group, number, block))
    overlap = any(
        one[2] != other[2] or one[0] == other[0]
        for sharing in owners.values()
        for one in sharing
        for other in sharing
        if one != other
    )
    spans = [
        (layer.stride_bytes, range(page_addresses(layer, 0)[0], page_addresses(layer, blocks - 1)[-1] + 1))
        for layers, blocks in groups
        for layer in layers
    ]
    interleaved = any(a != b and set(one) & set(other) for a, one in spans for b, other in spans)
    namespace = Namespace(
        model="m", groups=tuple(layout.spec for layout in layouts), chunk_tokens=1, alignment_tokens=1
    )
    if overlap:
        with pytest.raises(IncompatibleError, match="overlap"):
            validate(namespace, {0: layouts})
    elif not interleaved:
        validate(namespace, {0: layouts})
