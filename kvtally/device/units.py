"""Tables for GPU kernels: objects as units of equal size, and the leaves of their checksums. Arithmetic only.

Owns the translation of a `Move` into the arrays that `device.kernels` reads. Touches no memory. Neighbours:
`core.geometry` (where blocks lie), `core.checksum` (what a leaf is), `cuda` (uses the tables).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtally.core.checksum import LEAF_BYTES, leaf_count
from kvtally.core.geometry import GroupLayout

SHORTEST_BYTES = 256  # of a unit: with smaller ones the table would be a good part of all bytes moved
LONGEST_BYTES = 64 * 1024
ALIGNMENT_BYTES = 16  # what one thread loads at once
LENGTH_PRIME = np.uint64(0x9E3779B185EBCA87)  # xxh3 multiplies an input's length by it
LEAF_COLUMNS = 5
LENGTH_COLUMN = 2
BLOCK_BYTES = 1024  # xxh3 scrambles its accumulators after each block
MOST_BLOCKS = 2 * LEAF_BYTES // BLOCK_BYTES  # in a leaf, which is shorter than two usual ones (`leaf_count`)

Table = NDArray[np.int64]


def unit_bytes(layout: GroupLayout, base: int) -> int:
    """The largest unit for objects of this layout, in a memory that begins at address `base`: a power of two that
    divides every page. 0: units would be too small to be worth it."""
    if (layout.alignment_bytes | base) % ALIGNMENT_BYTES:
        return 0
    return unit_of(layout.grain_bytes)


def unit_of(size_bytes: int) -> int:
    """The largest unit that divides `size_bytes`; 0: it would be too small to be worth it."""
    unit = min(size_bytes & -size_bytes, LONGEST_BYTES)
    return unit if unit >= SHORTEST_BYTES else 0


def unit_addresses(layout: GroupLayout, block_ids: Sequence[int], skip_blocks: int, base: int, unit: int) -> Table:
    """The address of each unit of an object; 0 for the units of the leading blocks that are skipped."""
    offsets, strides, pages, _ = layout.columns
    starts: Table = np.array(block_ids, dtype=np.int64) * strides + (offsets + base)
    if skip_blocks:
        starts = np.concatenate([np.zeros((len(starts), skip_blocks), dtype=np.int64), starts], axis=1)
    if layout.longest_page_bytes == unit:
        return starts.ravel()
    counts = pages // unit
    each = np.repeat(counts, starts.shape[1])  # units of every page
    first = np.repeat(starts.ravel(), each)
    within = np.arange(len(first)) - np.repeat(np.cumsum(each) - each, each)
    return np.where(first == 0, 0, first + within * unit)


def leaf_rows(length_bytes: int, first_address: int, first_digest: int) -> Table:
    """The rows that `copy_summed` reads for an object's leaves. The object's addresses begin at `first_address`."""
    rows = _leaf_rows(length_bytes).copy()
    rows[:, 0] = first_address
    rows[:, 3] += first_digest
    return rows


@lru_cache(maxsize=64)
def _leaf_rows(length_bytes: int) -> Table:
    """The rows for an object at index 0. Cached, because objects have few different lengths."""
    count = leaf_count(length_bytes)
    rows = np.zeros((count, LEAF_COLUMNS), dtype=np.int64)
    rows[:, 1] = np.arange(count) * LEAF_BYTES
    rows[:, 2] = LEAF_BYTES
    rows[-1, 2] = length_bytes - (count - 1) * LEAF_BYTES
    rows[:, 3] = np.arange(count)
    rows[:, 4] = (rows[:, 2].astype(np.uint64) * LENGTH_PRIME).astype(np.int64)
    return rows
