"""Geometry: where the bytes of an object lie in an engine's memory.

Owns the map between an engine's blocks and an object's bytes, and one invariant: *every byte a load writes lies inside
the given blocks of the given group*. Does not copy (that is `device`) and does not choose block ids (the engine's
package does). Neighbours: `namespace` (left: what a block is made of), `device` (right: who carries out the runs).

    engine memory, one buffer per rank                      object of the blocks (7, 3), attention: layer-major
    layer.offset + block * layer.stride_bytes               ┌ layer 0 ───────────┬ layer 1 ───────────┐
      ┌──────────── stride_bytes ───────────┐               │ block 7 │ block 3  │ block 7 │ block 3  │
      ├─ page_bytes ─────────────┬─ padding ┤               └─────────┴──────────┴─────────┴──────────┘
                                                            object of a recurrent group: one block, the state

Only page bytes are moved, never padding. Groups may alias one buffer: a block id belongs to one group at a time, and
`validate` checks that pages of two ids never overlap, in whatever groups they are used. Layers that share another
layer's KV are not listed. Pure functions; frozen records, safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import IncompatibleError

NULL_BLOCK = 0  # the engine's placeholder for "no block": its bytes belong to nobody


class LayerView(NamedTuple):
    """One layer's pages: block b's lie at `[offset + b * stride_bytes, ... + page_bytes)` of the rank's buffer."""

    offset: int
    stride_bytes: int
    page_bytes: int


class Run(NamedTuple):
    """Bytes that lie in one piece on both sides."""

    engine_offset: int
    object_offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of one object in its order, as columns: a thousand are common, and a batched copy takes arrays."""

    engine_offsets: NDArray[np.int64]
    object_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.engine_offsets.tolist(), self.object_offsets.tolist(), self.lengths.tolist())


@dataclass(frozen=True)
class GroupLayout:
    """A group's layers as they lie in one rank's buffer. One that exists never reaches outside that buffer."""

    spec: GroupSpec
    layers: tuple[LayerView, ...]  # those of this rank's pipeline stage; a stage may have none
    blocks_count: int  # block ids are below this
    buffer_bytes: int

    def __post_init__(self) -> None:
        if self.blocks_count < 2:
            raise ValueError(f"a pool of {self.blocks_count} blocks has none to use: the first is the null block")
        for index, layer in enumerate(self.layers):
            if not (layer.offset >= 0 and 0 < layer.page_bytes <= layer.stride_bytes):
                raise ValueError(f"layer {index} has impossible sizes: {layer}")
            if layer.offset + (self.blocks_count - 1) * layer.stride_bytes + layer.page_bytes > self.buffer_bytes:
                raise ValueError(f"layer {index} ends beyond the buffer of {self.buffer_bytes} bytes: {layer}")

    @cached_property
    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets, strides and page sizes of the layers, and the sum of the pages before each, as columns."""
        table = np.array(self.layers, dtype=np.int64).reshape(len(self.layers), 3)
        pages = table[:, 2:3]
        return table[:, 0:1], table[:, 1:2], pages, np.cumsum(pages, axis=0) - pages

    @cached_property
    def block_bytes(self) -> int:
        """One block's pages in all layers."""
        return sum(layer.page_bytes for layer in self.layers)

    @cached_property
    def longest_page_bytes(self) -> int:
        return max((layer.page_bytes for layer in self.layers), default=0)

    @cached_property
    def grain_bytes(self) -> int:
        """The largest power of two that divides every page; 0 without any."""
        merged = reduce(or_, (layer.page_bytes for layer in self.layers), 0)
        return merged & -merged

    @cached_property
    def alignment_bytes(self) -> int:
        """The largest power of two that divides the place of every page; 0 where they all begin at 0."""
        merged = reduce(or_, (layer.offset | layer.stride_bytes for layer in self.layers), 0)
        return merged & -merged


def object_length(layout: GroupLayout, blocks_count: int) -> int:
    """Bytes of the object that holds `blocks_count` blocks."""
    return blocks_count * layout.block_bytes


def runs(layout: GroupLayout, block_ids: Sequence[int], *, skip_blocks: int = 0) -> Runs:
    """The runs that make up an object, each as long as both sides allow.

    `skip_blocks` leading blocks of the object are not moved (see `needed_blocks`); `block_ids` are all that follow.
    Raises ValueError for ids that no request can own, and for the same id twice: those are our own bugs.
    """
    check_blocks(layout, block_ids, skip_blocks)
    offsets, strides, pages, before = layout.columns
    ids = np.array(block_ids, dtype=np.int64)
    positions = np.arange(skip_blocks, skip_blocks + len(ids))

    engine = (offsets + ids * strides).ravel()
    target = (before * (skip_blocks + len(ids)) + positions * pages).ravel()
    lengths = np.repeat(pages, len(ids))
    if not len(lengths):
        return Runs(engine, target, lengths)  # a pipeline stage without layers of this group
    ends = engine + lengths
    broken = engine[1:] != ends[:-1]
    if skip_blocks:  # else the object has no gaps
        broken |= target[1:] != target[:-1] + lengths[:-1]
    if broken.all():  # as most are: nothing to merge
        return Runs(engine, target, lengths)
    firsts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return Runs(engine[firsts], target[firsts], np.add.reduceat(lengths, firsts))


def check_blocks(layout: GroupLayout, block_ids: Sequence[int], skip_blocks: int) -> None:
    """Whether these can be an object's: a request may own them, and each is there once. Raises ValueError."""
    if not block_ids or skip_blocks < 0:
        raise ValueError(f"no blocks to move ({len(block_ids)} ids, {skip_blocks} skipped)")
    if min(block_ids) <= NULL_BLOCK or max(block_ids) >= layout.blocks_count:
        raise ValueError(f"block ids must lie in [1, {layout.blocks_count}): {list(block_ids)}")
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"a block cannot be moved twice: {list(block_ids)}")
    if layout.spec.kind is GroupKind.RECURRENT and (len(block_ids) != 1 or skip_blocks):
        raise ValueError(f"a state is exactly one block, not {skip_blocks} + {len(block_ids)}")


def chunk_block_range(spec: GroupSpec, start_tokens: int, end_tokens: int) -> range:
    """Indices into a request's block table of the blocks that the object for `[start_tokens, end_tokens)` holds.

    A recurrent group's object is the state at `end_tokens`, which lives in the one slot that the last token falls into.
    A sliding group's object holds no more than a hit at `end_tokens` can see: the engine has let go of what is below.
    An attention object may end inside a block (a tail), but none may begin there: the block would be in two objects,
    and the one that is loaded last would win.
    """
    if not 0 <= start_tokens < end_tokens:
        raise ValueError(f"not a chunk: [{start_tokens}, {end_tokens})")
    if spec.kind is GroupKind.RECURRENT:
        slot = (end_tokens - 1) // spec.block_tokens
        return range(slot, slot + 1)
    if start_tokens % spec.block_tokens:
        raise ValueError(f"an object cannot begin at token {start_tokens}, inside a block of {spec.block_tokens}")
    return range(spec.first_kept(start_tokens, end_tokens) // spec.block_tokens, -(-end_tokens // spec.block_tokens))


def needed_blocks(
    spec: GroupSpec, start_tokens: int, end_tokens: int, *, hit_tokens: int, have_tokens: int = 0
) -> range:
    """The part of `chunk_block_range` that a load for a hit at `hit_tokens` writes: its end, possibly nothing.

    The rest is not the request's to write: blocks below `have_tokens` are the engine's own prefix hit, which other
    requests share, and blocks below a sliding window are null in the table. What was cut off in front is what
    `skip_blocks` of `runs` says.
    """
    blocks = chunk_block_range(spec, start_tokens, end_tokens)
    if end_tokens > hit_tokens:
        raise ValueError(f"the object ends at token {end_tokens}, beyond the hit at {hit_tokens}")
    if spec.kind is GroupKind.RECURRENT:
        return blocks if end_tokens == hit_tokens != have_tokens else blocks[:0]
    if have_tokens % spec.block_tokens and have_tokens < end_tokens:
        raise ValueError(f"the engine cannot hold {have_tokens} tokens: that is inside a block of {spec.block_tokens}")
    first = have_tokens
    if spec.kind is GroupKind.SLIDING:
        first = max(first, hit_tokens - (spec.window_tokens - 1))
    if first >= end_tokens:
        return blocks[:0]
    return range(max(blocks.start, first // spec.block_tokens), blocks.stop)


def validate(namespace: Namespace, layouts_per_rank: Mapping[int, Sequence[GroupLayout]]) -> None:
    """Check that layouts are what the namespace says, so that an object's length is `Namespace.object_bytes` of it.

    A worker passes its own rank only. Raises IncompatibleError KV-202.
    """
    for rank, layouts in layouts_per_rank.items():
        if not 0 <= rank < namespace.ranks or len(layouts) != len(namespace.groups):
            expected = f"{namespace.ranks} ranks of {len(namespace.groups)} groups"
            raise _mismatch(f"rank {rank} with {len(layouts)} groups, in a namespace of {expected}")
        for group, (spec, layout) in enumerate(zip(namespace.groups, layouts, strict=True)):
            where = f"group {group} on rank {rank}"
            if layout.spec != spec:
                raise _mismatch(f"{where} has another spec than the namespace")
            if tuple(layer.page_bytes for layer in layout.layers) != spec.page_bytes[namespace.stage(rank)]:
                raise _mismatch(f"{where} has other pages than the namespace")
            if spec.kind is not GroupKind.RECURRENT and namespace.chunk_tokens % spec.block_tokens:
                raise _mismatch(f"{where}: {namespace.chunk_tokens} tokens are not whole blocks of {spec.block_tokens}")
        _check_apart(rank, layouts)


def _check_apart(rank: int, layouts: Sequence[GroupLayout]) -> None:
    """Pages may overlap only where they have the same block id and belong to different groups.

    With a common stride s, block b in layer i and block c in layer j overlap just if k = b - c satisfies

        gap - pages_i < k * s < gap + pages_j

    so all blocks of all pairs of layers are checked at once. (Where extents meet and some k other than 0 satisfies it,
    one does that two existing blocks have.) Layers of different strides must lie apart as a whole: whatever interleaves
    them is no layout we know.
    """
    layers = np.array([layer for layout in layouts for layer in layout.layers], dtype=np.int64).reshape(-1, 3)
    groups = np.repeat(np.arange(len(layouts)), [len(layout.layers) for layout in layouts])
    last = np.repeat([layout.blocks_count - 1 for layout in layouts], [len(layout.layers) for layout in layouts])
    offsets, strides, pages = layers.T
    ends = offsets + last * strides + pages
    extents_meet = (offsets[:, None] < ends) & (offsets < ends[:, None])

    gap = offsets - offsets[:, None]  # of pair (i, j): how far layer j begins after layer i
    stride = strides[:, None]
    lowest = (gap - pages[:, None]) // stride + 1  # smallest and largest k (block in i minus block in j) that overlap
    highest = -(-(gap + pages) // stride) - 1
    other_block = (lowest <= highest) & ((lowest != 0) | (highest != 0))
    same_group = (groups[:, None] == groups) & ~np.eye(len(groups), dtype=bool)
    same_block = same_group & (lowest <= 0) & (highest >= 0)
    clash = extents_meet & ((strides != stride) | other_block | same_block)
    if clash.any():
        first, second = np.argwhere(clash)[0].tolist()
        raise _mismatch(f"layers {first} and {second} of rank {rank} overlap in memory")


def _mismatch(what: str) -> IncompatibleError:
    return IncompatibleError(
        f"the engine's memory layout cannot be used: {what}",
        remedy="Run without the cache for this model and report its KV-cache layout.",
        code="KV-202",
    )
