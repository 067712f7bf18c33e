"""Copies between engine memory and slots: every byte arrives, the checksum is the object's, nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.checksum import checksum
from kvtally.core.geometry import GroupLayout, LayerView, Runs, runs
from kvtally.core.namespace import GroupKind, GroupSpec
from kvtally.device import cpu

SEED = 0x5EED


def columns(triples: list[tuple[int, int, int]]) -> Runs:
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0], table[:, 1], table[:, 2])


def cut(data: bytearray, lengths: list[int]) -> list[memoryview]:
    """Views of `data` of these lengths; whatever is left is the last piece."""
    view, pieces, start = memoryview(data), [], 0
    for length in lengths:
        end = min(start + length, len(data))
        pieces.append(view[start:end])
        start = end
    return [*pieces, view[start:]]


def gather(memory: bytes, layout: Runs) -> bytes:
    """What the object is, byte by byte: the oracle."""
    return b"".join(memory[run.engine_offset : run.engine_offset + run.length] for run in layout)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[bytes, Runs, list[int]]:
    """Memory, runs that lie apart in it in any order, and lengths at which the slot is cut."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    spaces = draw(st.lists(st.integers(0, 9), min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    order = draw(st.permutations(range(len(lengths))))
    offsets = [0] * len(lengths)
    position = 0
    for space, index in zip(spaces, order, strict=False):
        offsets[index] = position + space
        position += space + lengths[index]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    memory = bytes(np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, position + spaces[-1], np.uint8))
    layout = columns(list(zip(offsets, starts, lengths, strict=True)))
    return memory, layout, draw(st.lists(st.integers(0, 50), max_size=6))


@st.composite
def pages(draw: st.DrawFn) -> tuple[bytes, Runs, list[int]]:
    """Pages of one length at multiples of a pitch, in any order: what a block table looks like."""
    length, padding = draw(st.integers(1, 24)), draw(st.integers(0, 5))
    order = draw(st.permutations(range(draw(st.integers(1, 24)))))
    order = order[: draw(st.integers(1, len(order)))]
    first, pitch = draw(st.integers(0, 7)), length + padding
    memory = bytes(
        np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, first + pitch * (max(order) + 1), np.uint8)
    )
    layout = columns([(first + slot * pitch, index * length, length) for index, slot in enumerate(order)])
    return memory, layout, draw(st.lists(st.integers(0, 60), max_size=6))


@given(case=st.one_of(scattered(), pages()), step=st.sampled_from([1, 7, 64, 1 << 18]))
def test_save_then_load_restores_every_byte(case: tuple[bytes, Runs, list[int]], step: int) -> None:
    memory, layout, cuts = case
    expected = gather(memory, layout)
    slot = bytearray(len(expected))
    pieces = cut(slot, cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "STEP_BYTES", step)
        saved = cpu.save_object(memory, layout, pieces, SEED)
        assert bytes(slot) == expected
        assert saved == checksum(pieces, SEED)

        restored = bytearray(len(memory))
        assert cpu.load_object([piece.toreadonly() for piece in pieces], restored, layout, SEED) == saved
    mask = np.zeros(len(memory), dtype=bool)
    for run in layout:
        mask[run.engine_offset : run.engine_offset + run.length] = True
    assert bytes(restored) == bytes(np.where(mask, np.frombuffer(memory, np.uint8), 0).astype(np.uint8))


@given(case=st.one_of(scattered(), pages()), keep=st.lists(st.booleans(), min_size=24, max_size=24))
def test_a_partial_load_moves_its_runs_and_still_verifies_the_whole(
    case: tuple[bytes, Runs, list[int]], keep: list[bool]
) -> None:
    memory, layout, cuts = case
    slot = bytearray(gather(memory, layout))
    pieces = cut(slot, cuts)
    wanted = columns([(run[0], run[1], run[2]) for run, kept in zip(layout, keep, strict=False) if kept])

    restored = bytearray(len(memory))
    assert cpu.load_object(pieces, restored, wanted, SEED) == checksum(pieces, SEED)
    assert gather(bytes(restored), wanted) == gather(memory, wanted)
    assert sum(restored) == sum(gather(memory, wanted))  # and nothing else was written


@given(
    length=st.integers(1, 30),
    spaces=st.lists(st.integers(0, 13), min_size=4, max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_runs_of_one_length_at_odd_distances(length: int, spaces: list[int], cuts: list[int]) -> None:
    offsets = np.cumsum(spaces) + length * np.arange(len(spaces))
    memory = np.random.default_rng(5).integers(0, 256, int(offsets[-1]) + length, np.uint8)
    layout = columns([(int(offset), index * length, length) for index, offset in enumerate(offsets)])
    slot = bytearray(length * len(spaces))
    saved = cpu.save_object(memory, layout, cut(slot, cuts), SEED)
    assert bytes(slot) == gather(memory.tobytes(), layout)
    restored = np.zeros_like(memory)
    assert cpu.load_object(cut(slot, cuts), restored, layout, SEED) == saved
    assert gather(restored.tobytes(), layout) == bytes(slot)
    assert int(restored.sum()) == sum(slot)


@given(case=pages())
def test_without_a_seed_nothing_is_hashed(case: tuple[bytes, Runs, list[int]]) -> None:
    memory, layout, cuts = case
    slot = bytearray(len(gather(memory, layout)))
    assert cpu.save_object(memory, layout, cut(slot, cuts), None) is None
    restored = bytearray(len(memory))
    assert cpu.load_object(cut(slot, cuts), restored, layout, None) is None
    assert gather(bytes(restored), layout) == gather(memory, layout)


def test_runs_of_a_real_layout_pass_through_the_rows() -> None:
    """Two layers with padded pages, blocks out of order: the batched path, against plain slicing."""
    spec = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((4096, 4096),))
    layers = (LayerView(0, 5000, 4096), LayerView(64 * 5000, 5000, 4096))
    layout = GroupLayout(spec, layers, blocks_count=64, buffer_bytes=128 * 5000)
    memory = np.random.default_rng(1).integers(0, 256, layout.buffer_bytes, np.uint8)
    ids = [9, 3, 40, 41, 7, 63, 1, 22]
    expected = b"".join(memory[layer.offset + block * 5000 :][:4096].tobytes() for layer in layers for block in ids)
    slot = bytearray(len(expected))
    pieces = cut(slot, [4096 * 3, 4096 * 2 + 100])
    saved = cpu.save_object(memory, runs(layout, ids), pieces, SEED)
    assert bytes(slot) == expected
    restored = np.zeros_like(memory)
    assert cpu.load_object(pieces, restored, runs(layout, ids), SEED) == saved
    assert (restored[memory != restored] == 0).all()
    assert gather(restored.tobytes(), runs(layout, ids)) == expected


def test_large_objects_are_hashed_in_steps_like_in_one_go() -> None:
    memory = np.random.default_rng(2).integers(0, 256, 3 * cpu.STEP_BYTES + 12_345, np.uint8)
    slot = bytearray(memory.size)
    pieces = cut(slot, [cpu.STEP_BYTES + 1, 5, 4096])
    assert cpu.save_object(memory, None, pieces, SEED) == checksum([memoryview(memory.tobytes())], SEED)
    assert slot == memory.tobytes()


def test_a_flipped_bit_changes_what_a_load_adds_up_to() -> None:
    memory = np.random.default_rng(3).integers(0, 256, 50_000, np.uint8)
    slot = bytearray(memory.size)
    saved = cpu.save_object(memory, None, [memoryview(slot)], SEED)
    slot[31_000] ^= 4
    assert cpu.load_object([memoryview(slot)], np.empty_like(memory), None, SEED) != saved


@pytest.mark.parametrize("length", [1_000, 40])
def test_what_is_hashed_is_what_landed(length: int) -> None:
    """The engine's memory lies over the slot here, so that landing changes the slot: its bytes then add up to another
    sum than those that arrived. In one run, and in rows."""
    shared = bytearray(np.random.default_rng(4).integers(0, 256, 1_100, np.uint8).tobytes())
    slot, memory = memoryview(shared)[:1_000], memoryview(shared)[100:]
    expected = checksum([memoryview(bytes(slot))], SEED)
    layout = columns([(start, start, length) for start in range(0, 1_000, length)])
    assert cpu.load_object([slot], memory, layout, SEED) == expected
    assert checksum([slot], SEED) != expected


@pytest.mark.parametrize(
    "triples",
    [
        [(0, 0, 101)],  # beyond the memory
        [(-1, 0, 10)],
        [(0, 95, 10)],  # beyond the slot
        [(0, 0, 10), (20, 5, 10)],  # overlapping in the object
        [(0, 10, 10), (20, 0, 10)],  # not in its order
        [(0, 0, -1)],
        *[[(10 * n, 10 * n, 10) for n in range(8)] + [last] for last in [(95, 80, 10), (0, 95, 10), (0, 75, 10)]],
    ],
)
def test_runs_that_do_not_fit_are_refused_before_anything_moves(triples: list[tuple[int, int, int]]) -> None:
    memory, slot = bytearray(b"m" * 100), bytearray(b"s" * 100)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.load_object([memoryview(slot)], memory, columns(triples), SEED)
    with pytest.raises(ValueError, match=r"do not fit|cannot fill"):
        cpu.save_object(memory, columns(triples), [memoryview(slot)], SEED)
    assert bytes(memory + slot) == b"m" * 100 + b"s" * 100


def test_a_save_must_fill_its_slot() -> None:
    with pytest.raises(ValueError, match="cannot fill"):
        cpu.save_object(bytes(100), columns([(0, 0, 40), (40, 50, 50)]), [memoryview(bytearray(100))], SEED)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.data())
def test_many_objects_at_once(shapes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Objects with gaps between them, or none, on either side: each byte goes where it belongs and nowhere else."""
    engine = bytearray(np.random.default_rng(3).integers(1, 256, 600, np.uint8).tobytes())
    slots = bytearray(600)
    expected, objects, at, slot = bytearray(600), [], 0, 0
    for length, gap, slot_gap in shapes:
        at, slot = at + gap, slot + slot_gap
        middle = data.draw(st.integers(0, length))
        pieces = [memoryview(slots)[slot : slot + middle], memoryview(slots)[slot + middle : slot + length]]
        objects.append((memoryview(engine)[at : at + length], [piece for piece in pieces if piece]))
        expected[slot : slot + length] = engine[at : at + length]
        at, slot = at + length, slot + length
    cpu.move_all(objects, into_slots=True)
    assert slots == expected
    before = bytes(engine)
    for memory, _ in objects:
        memory[:] = bytes(len(memory))
    cpu.move_all(objects, into_slots=False)
    assert engine == before


def test_objects_that_do_not_fit_are_refused() -> None:
    slot = memoryview(bytearray(8))
    with pytest.raises(ValueError, match="8 bytes cannot be copied"):
        cpu.move_all([(bytearray(7), [slot])], into_slots=True)
    with pytest.raises(ValueError, match="read-only"):
        cpu.move_all([(bytearray(8), [slot.toreadonly()])], into_slots=True)
    with pytest.raises(ValueError, match="read-only"):
        cpu.move_all([(bytes(8), [slot])], into_slots=False)
