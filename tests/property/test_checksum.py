"""Checksums: one number for the bytes of an object, however they are cut into pieces, and for no other object."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.checksum import ALGORITHM, LEAF_BYTES, checksum, leaf_count, object_checksum, root
from kvtally.core.keys import ObjectKey

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "checksums.json"

# xxh3 takes other code paths at 16, 128, 240 and 1024 bytes, and the tree at whole leaves: on both sides of each.
PATTERN = bytes(i * 7 % 251 for i in range(4 * LEAF_BYTES))
sizes = st.integers(1000, 1100) | st.builds(
    lambda leaves, extra: leaves * LEAF_BYTES + extra, st.integers(1, 3), st.integers(-65, 65)
)
contents = st.binary(max_size=300) | sizes.map(lambda size: PATTERN[:size])
seeds = st.integers(0, 2**64 - 1)
digests = st.binary(min_size=32, max_size=32)
keys = st.builds(ObjectKey, digests, digests, st.integers(0, 63), st.integers(0, 255))


def pieces_of(data: bytes, cuts: list[int]) -> list[memoryview]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(bounds)]


@given(contents, seeds, st.lists(st.integers(0, 4 * LEAF_BYTES), max_size=16))
def test_pieces_do_not_matter(data: bytes, seed: int, cuts: list[int]) -> None:
    """An object lies in up to 16 pieces of the arena, in others on disk, in one run in a test: one checksum."""
    assert checksum(pieces_of(data, cuts), seed) == checksum([memoryview(data)], seed)


def test_rows_are_bytes_too() -> None:
    whole = memoryview(PATTERN[:786_400])
    assert checksum([whole.cast("B", (7_864, 100))], 3) == checksum([whole], 3)


@given(contents, seeds)
def test_it_is_the_tree_that_the_module_describes(data: bytes, seed: int) -> None:
    starts = [leaf * LEAF_BYTES for leaf in range(leaf_count(len(data)))]
    leaves = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    digests = b"".join(xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves)
    assert checksum([memoryview(data)], seed) == root(digests, seed) == xxhash.xxh3_64_intdigest(digests, seed)


@given(contents.filter(len), seeds, st.data())
def test_any_flipped_bit_is_noticed(data: bytes, seed: int, draw: st.DataObject) -> None:
    position, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    assert checksum([memoryview(damaged)], seed) != checksum([memoryview(data)], seed)


@given(contents, keys, keys, st.integers(0, 2**40))
def test_right_bytes_in_the_wrong_place_do_not_verify(
    data: bytes, key: ObjectKey, other: ObjectKey, length: int
) -> None:
    whole = [memoryview(data)]
    at_home = object_checksum(key, len(data), whole)
    assert 0 <= at_home < 2**64
    assert (object_checksum(other, len(data), whole) == at_home) == (other == key)
    assert (object_checksum(key, length, whole) == at_home) == (length == len(data))


def golden_values() -> dict[str, object]:
    data = bytes(range(256)) * 5
    long = bytes(range(256)) * 2_800  # two leaves, the last of them longer
    key = ObjectKey(b"\x01" * 32, b"\x02" * 32, 3, 4)
    return {
        "algorithm": ALGORITHM,
        "unseeded": checksum([memoryview(b"kvtally")], 0),
        "seeded": checksum([memoryview(data)], 2**64 - 1),
        "object": object_checksum(key, len(data), [memoryview(data)]),
        "long": object_checksum(key, len(long), [memoryview(long)]),
        "empty": checksum([], 0),
    }


def test_checksums_have_not_changed() -> None:
    """If this fails, nothing stored verifies any more: `ALGORITHM` is part of the namespace, so give it a new name."""
    assert golden_values() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    print(json.dumps(golden_values(), indent=1))
