"""Tables for GPU kernels: every unit of an object has its address, and leaves are those of the checksum."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.checksum import LEAF_BYTES, checksum, root
from kvtally.core.geometry import GroupLayout, LayerView, Runs, runs
from kvtally.core.namespace import GroupKind, GroupSpec
from kvtally.device.units import ONE_PIECE, SHORTEST_BYTES, leaf_rows, unit_addresses, unit_bytes

BASE = 0x7000_0000_0000


@st.composite
def objects(draw: st.DrawFn) -> tuple[Runs, int]:
    """Some blocks of a layout with pages of any multiple of 16 bytes, perhaps without their first ones."""
    pages = draw(st.lists(st.integers(1, 300).map(lambda n: 16 * n), min_size=1, max_size=4))
    if draw(st.booleans()):
        pages = [draw(st.sampled_from([256, 4096, 12_288, 65_536]))] * len(pages)
    blocks = draw(st.integers(2, 12))
    views, offset = [], 0
    for page in pages:
        stride = page + 16 * draw(st.integers(0, 3))
        views.append(LayerView(offset, stride, page))
        offset += blocks * stride
    layout = GroupLayout(
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=(tuple(pages),)), tuple(views), blocks, offset
    )
    ids = draw(st.permutations(range(1, blocks)))[: draw(st.integers(1, blocks - 1))]
    skip = draw(st.integers(0, 2))
    return runs(layout, ids, skip_blocks=skip), (skip + len(ids)) * sum(pages)


@given(objects())
def test_every_unit_is_where_the_runs_say(given_object: tuple[Runs, int]) -> None:
    layout, length = given_object
    unit = unit_bytes(layout, length, BASE)
    if not unit:
        assert any(value % SHORTEST_BYTES for run in layout for value in (run.length, run.object_offset)) or (
            length % SHORTEST_BYTES
        )
        return
    expected = {}
    for run in layout:
        assert run.length % unit == run.object_offset % unit == 0
        for start in range(0, run.length, unit):
            expected[(run.object_offset + start) // unit] = BASE + run.engine_offset + start
    table = unit_addresses(layout, length, BASE, unit)
    assert len(table) * unit == length
    assert {index: address for index, address in enumerate(table.tolist()) if address} == expected


def test_memory_that_threads_cannot_load_at_once_has_no_units() -> None:
    column = np.array([4096], dtype=np.int64)
    aligned, odd = np.array([32], dtype=np.int64), np.array([40], dtype=np.int64)
    start = np.array([0], dtype=np.int64)
    assert unit_bytes(Runs(aligned, start, column), 4096, BASE) == 4096
    assert unit_bytes(Runs(odd, start, column), 4096, BASE) == 0
    assert unit_bytes(Runs(aligned, start, column), 4096, BASE + 8) == 0
    assert unit_bytes(Runs(start[:0], start[:0], start[:0]), 0, BASE) == 0


@given(st.integers(1, 40).map(lambda n: n * 4096 * 13), st.integers(0, 9), st.integers(0, 9))
def test_leaves_are_those_of_the_checksum(length: int, first: int, digest: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    rows = leaf_rows(length, first, 4096, digest)
    assert set(rows[:, 0].tolist()) == {first}
    assert set(rows[:, 3].tolist()) == {12}
    assert rows[:, 4].tolist() == list(range(digest, digest + len(rows)))
    leaves = [data[offset : offset + size] for offset, size in rows[:, 1:3].tolist()]
    assert b"".join(leaves) == data
    digests = b"".join(xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves)
    assert root(digests, 7) == checksum([memoryview(data)], 7)
    assert [value % 2**64 for value in rows[:, 5].tolist()] == [
        len(leaf) * 0x9E3779B185EBCA87 % 2**64 for leaf in leaves
    ]
    assert leaf_rows(LEAF_BYTES, 0, None, 0)[0, 3] == ONE_PIECE
