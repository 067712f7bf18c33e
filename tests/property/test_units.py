"""Tables for GPU kernels: every unit of an object has its address, and leaves are those of the checksum."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.checksum import checksum, root
from kvtally.core.geometry import GroupLayout, LayerView, object_length, runs
from kvtally.core.namespace import GroupKind, GroupSpec
from kvtally.device.units import SHORTEST_BYTES, leaf_rows, unit_addresses, unit_bytes

BASE = 0x7000_0000_0000


@st.composite
def objects(draw: st.DrawFn) -> tuple[GroupLayout, list[int], int]:
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
    return layout, ids, skip


@given(objects())
def test_every_unit_is_where_the_runs_say(given_object: tuple[GroupLayout, list[int], int]) -> None:
    layout, ids, skip = given_object
    unit = unit_bytes(layout, BASE)
    if not unit:
        assert any(layer.page_bytes % SHORTEST_BYTES for layer in layout.layers)
        return
    expected = {}
    for run in runs(layout, ids, skip_blocks=skip):
        assert run.length % unit == run.object_offset % unit == 0
        for start in range(0, run.length, unit):
            expected[(run.object_offset + start) // unit] = BASE + run.engine_offset + start
    table = unit_addresses(layout, ids, skip, BASE, unit)
    assert len(table) * unit == object_length(layout, skip + len(ids))
    assert {index: address for index, address in enumerate(table.tolist()) if address} == expected


def test_memory_that_threads_cannot_load_at_once_has_no_units() -> None:
    def layout(*layers: LayerView) -> GroupLayout:
        spec = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=(tuple(view.page_bytes for view in layers),))
        return GroupLayout(spec, layers, 2, 32_768)

    assert unit_bytes(layout(LayerView(32, 4096, 4096)), BASE) == 4096
    assert unit_bytes(layout(LayerView(32, 4096 + 16, 4096)), BASE) == 4096
    assert unit_bytes(layout(LayerView(40, 4096, 4096)), BASE) == 0
    assert unit_bytes(layout(LayerView(32, 4096 + 8, 4096)), BASE) == 0
    assert unit_bytes(layout(LayerView(32, 4096, 4096)), BASE + 8) == 0
    assert unit_bytes(layout(LayerView(0, 4096, 4096), LayerView(8192, 512, 512)), BASE) == 512
    assert unit_bytes(layout(LayerView(0, 4096, 4096), LayerView(8192, 512, 128)), BASE) == 0
    assert unit_bytes(layout(), BASE) == 0


@given(st.integers(1, 40).map(lambda n: n * 4096 * 13), st.integers(0, 9), st.integers(0, 9))
def test_leaves_are_those_of_the_checksum(length: int, first: int, digest: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    rows = leaf_rows(length, first, digest)
    assert set(rows[:, 0].tolist()) == {first}
    assert rows[:, 3].tolist() == list(range(digest, digest + len(rows)))
    leaves = [data[offset : offset + size] for offset, size in rows[:, 1:3].tolist()]
    assert b"".join(leaves) == data
    digests = b"".join(xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves)
    assert root(digests, 7) == checksum([memoryview(data)], 7)
    assert [value % 2**64 for value in rows[:, 4].tolist()] == [
        len(leaf) * 0x9E3779B185EBCA87 % 2**64 for leaf in leaves
    ]
