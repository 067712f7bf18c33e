"""One suite over every tier: a new tier is done when it passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtally.core.keys import ObjectKey
from kvtally.core.space import GRANULE_BYTES, round_up
from kvtally.errors import IntegrityError, TierError
from kvtally.store.tiers.base import ObjectRecord, Tier
from kvtally.store.tiers.disk import DiskTier
from kvtally.store.tiers.files import open_disk
from kvtally.store.tiers.limited import LimitedTier
from kvtally.testing.tiers import MemoryDevice, MemoryTier, sample_namespace, sample_record
from kvtally.wire.limits import MIB
from tests.waiting import HANG_S

CAPACITY_BYTES = 4 * MIB


class Kit:
    """One kind of tier: `open` gives the tier, and each further call what a restarted store would find."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.enumerable = kind != "shared"
        self._directory = directory
        self._device = MemoryDevice()
        self._memory: MemoryTier | None = None
        self._opened: list[Tier] = []

    def open(self, capacity_bytes: int = CAPACITY_BYTES) -> Tier:
        self.close()
        tier = self._make(capacity_bytes)
        self._opened.append(tier)
        return tier

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def _make(self, capacity_bytes: int) -> Tier:
        if self.kind == "disk on files":
            return open_disk(self._directory / "disk", capacity_bytes)
        if self.kind == "disk on memory":
            self._device.reopen()
            return DiskTier(self._device, capacity_bytes)
        if self._memory is None:
            self._memory = MemoryTier(capacity_bytes, enumerable=self.enumerable)
        return LimitedTier(self._memory, 1 << 40) if self.kind == "limited" else self._memory


@pytest.fixture(params=["memory", "limited", "shared", "disk on memory", "disk on files"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(request.param, tmp_path)
    yield kit
    kit.close()


def views(data: bytes, cuts: Sequence[int] = ()) -> list[memoryview]:
    """`data` in writable pieces, cut at these positions."""
    whole = memoryview(bytearray(data))
    bounds = [0, *cuts, len(data)]
    return [whole[start:end] for start, end in pairwise(bounds)]


def put(tier: Tier, number: int, data: bytes) -> ObjectRecord:
    record = sample_record(number, data)
    tier.write(record, views(data))
    return record


def get(tier: Tier, record: ObjectRecord, cuts: Sequence[int] = ()) -> bytes:
    target = views(bytes(record.length_bytes), cuts)
    landed: list[bytes] = []
    tier.read(record, target, lambda part: landed.append(bytes(part)))
    assert b"".join(landed) == b"".join(target)
    return b"".join(target)


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises((TierError, IntegrityError)) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("length_bytes", [1, 2, 4095, 4096, 4097, 100_000, 1 * MIB])
def test_what_was_written_is_read(kit: Kit, length_bytes: int) -> None:
    tier = kit.open()
    data = Random(length_bytes).randbytes(length_bytes)
    assert get(tier, put(tier, 1, data)) == data


def test_source_and_target_may_be_cut_differently(kit: Kit) -> None:
    tier = kit.open()
    data = Random(1).randbytes(20_000)
    record = sample_record(1, data)
    tier.write(record, views(data, [1, 4096, 4096, 9000, 19_999]))
    assert get(tier, record, [5000, 12_288]) == data
    assert get(tier, record, range(10, 20_000, 1000)) == data


@pytest.mark.parametrize("cuts", [[], [1], [300_000, 300_000, 300_001, 800_000]])
def test_each_part_of_the_target_is_reported_once_it_is_filled(kit: Kit, cuts: list[int]) -> None:
    """In order, without gaps, and in the target's own memory: what the mover hashes is what an engine will read."""
    tier = kit.open()
    data = Random(6).randbytes(MIB + 5)
    record = put(tier, 1, data)
    target = views(bytes(len(data)), cuts)
    position = 0

    def landed(part: memoryview) -> None:
        nonlocal position
        assert part == data[position : position + len(part)]
        assert not part or address(part) == address(target[0]) + position
        position += len(part)

    tier.read(record, target, landed)
    assert position == len(data)


def test_more_views_than_one_system_call_takes(kit: Kit) -> None:
    tier = kit.open()
    data = Random(2).randbytes(3000)
    record = sample_record(1, data)
    tier.write(record, views(data, range(1, 3000)))
    assert get(tier, record, range(1, 3000)) == data


def test_an_object_in_many_pieces(kit: Kit) -> None:
    """Holes between objects force a tier that allocates to lay the next one into several."""
    tier = kit.open(64 * GRANULE_BYTES)
    small = [put(tier, number, bytes([number]) * GRANULE_BYTES) for number in range(64)]
    tier.remove([record.key for record in small[::4]])
    data = Random(3).randbytes(15 * GRANULE_BYTES + 7)
    record = put(tier, 100, data)
    assert get(tier, record, [4097, 30_000]) == data
    for number, kept in enumerate(small):
        if number % 4:
            assert get(tier, kept) == bytes([number]) * GRANULE_BYTES
    if kit.enumerable:
        assert get(kit.open(64 * GRANULE_BYTES), record) == data


def test_the_largest_object(kit: Kit) -> None:
    tier = kit.open(80 * MIB)
    data = (Random(4).randbytes(MIB + 1) * 64)[: 64 * MIB]
    record = put(tier, 1, data)
    assert get(tier, record, [MIB, 33 * MIB + 1]) == data


def test_a_write_replaces(kit: Kit) -> None:
    tier = kit.open()
    old = put(tier, 1, b"old" * 5000)
    put(tier, 2, b"other")
    new = put(tier, 1, b"new")
    assert get(tier, new) == b"new"
    assert code_of(lambda: get(tier, old)) == "KV-402"
    assert tier.find([new.key]) == [new]
    if kit.enumerable:
        assert [record.chain[-1] for record in kit.open().recover()] == [2, 1]


def test_replacing_again_and_again_takes_no_room(kit: Kit) -> None:
    tier = kit.open(4 * GRANULE_BYTES)
    for number in range(50):
        record = put(tier, 1, bytes([number]) * 2 * GRANULE_BYTES)
    assert get(tier, record) == bytes([49]) * 2 * GRANULE_BYTES


def test_what_was_removed_is_gone(kit: Kit) -> None:
    tier = kit.open()
    first, second = put(tier, 1, b"one"), put(tier, 2, b"two")
    tier.remove([first.key, first.key])
    assert code_of(lambda: get(tier, first)) == "KV-603"
    assert tier.find([first.key, second.key]) == [None, second]
    assert get(tier, second) == b"two"
    assert get(tier, put(tier, 1, b"again")) == b"again"


def test_unknown_keys(kit: Kit) -> None:
    tier = kit.open()
    stranger = sample_record(1, b"data", namespace=sample_namespace("stranger"))
    for _ in range(2):
        assert code_of(lambda: get(tier, stranger)) == "KV-603"
        assert tier.find([stranger.key]) == [None]
        assert tier.find([]) == []
        tier.remove([])
        tier.remove([stranger.key])
        put(tier, 1, b"data")  # the same chain in another namespace makes no difference


def test_a_record_of_another_length(kit: Kit) -> None:
    tier = kit.open()
    put(tier, 1, b"12345")
    assert code_of(lambda: get(tier, sample_record(1, b"123456"))) == "KV-402"
    assert code_of(lambda: tier.write(sample_record(2, b"123456"), views(b"12345"))) == "KV-402"
    assert tier.find([sample_record(2, b"123456").key]) == [None]


def test_identity_is_namespace_chain_group_and_rank(kit: Kit) -> None:
    tier = kit.open()
    records = []
    for model in range(20):
        for group in range(2):
            for rank in range(2):
                data = f"{model} {group} {rank}".encode()
                record = sample_record(7, data, namespace=sample_namespace(f"m{model}"), group=group, rank=rank)
                tier.write(record, views(data))
                records.append((record, data))
    tier.remove([records[5][0].key])
    del records[5]
    for _ in range(2):
        assert [get(tier, record) for record, _ in records] == [data for _, data in records]
        assert tier.find([record.key for record, _ in records]) == [record for record, _ in records]
        tier = kit.open()
        list(tier.recover())


def test_recovery_is_complete_and_in_the_order_of_writing(kit: Kit) -> None:
    tier = kit.open()
    records = {number: put(tier, number, bytes([number]) * (number + 1)) for number in (5, 3, 9, 1, 7)}
    tier.remove([records.pop(9).key])
    records[3] = put(tier, 3, b"moves to the end")
    expected = [records[number] for number in (5, 1, 7, 3)]
    for _ in range(3):
        tier = kit.open()
        assert list(tier.recover()) == (expected if kit.enumerable else [])
        assert tier.find([record.key for record in expected]) == expected
        assert get(tier, records[7]) == bytes([7]) * 8
        expected.append(put(tier, 20 + len(expected), b"after a restart"))


def test_a_full_tier_says_so_and_goes_on(kit: Kit) -> None:
    tier = kit.open(8 * GRANULE_BYTES)
    held = [put(tier, number, bytes([number]) * GRANULE_BYTES) for number in range(8)]
    assert code_of(lambda: put(tier, 100, b"x" * GRANULE_BYTES)) == "KV-601"
    assert tier.find([sample_record(100, b"x").key]) == [None]
    assert [get(tier, record) for record in held] == [bytes([number]) * GRANULE_BYTES for number in range(8)]
    tier.remove([held.pop().key, held.pop().key])
    data = b"y" * 2 * GRANULE_BYTES
    assert get(tier, put(tier, 101, data)) == data


def test_too_large_for_the_whole_tier(kit: Kit) -> None:
    tier = kit.open(2 * GRANULE_BYTES)
    assert code_of(lambda: put(tier, 1, bytes(3 * GRANULE_BYTES))) == "KV-601"
    assert get(tier, put(tier, 1, bytes(2 * GRANULE_BYTES))) == bytes(2 * GRANULE_BYTES)


def test_reads_while_writing(kit: Kit) -> None:
    tier = kit.open()
    steady = [
        (put(tier, number, data), data) for number, data in enumerate(Random(5).randbytes(9000) for _ in range(8))
    ]
    stop = threading.Event()
    wrong: list[object] = []

    def read_all() -> None:
        while not stop.is_set():
            for record, data in steady:
                try:
                    if get(tier, record, [100]) != data or tier.find([record.key]) != [record]:
                        wrong.append(record.chain)
                except (TierError, IntegrityError) as error:
                    wrong.append(error)

    readers = [threading.Thread(target=read_all) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(300):
        record = put(tier, 1000 + turn % 20, bytes([turn % 256]) * (1 + turn * 37 % 20_000))
        if turn % 3 == 0:
            tier.remove([record.key])
    stop.set()
    for reader in readers:
        reader.join(HANG_S)
        assert not reader.is_alive()
    assert wrong == []


@pytest.mark.parametrize("is_given_up", [False, True])
def test_nothing_is_written_to_a_target_after_its_read_has_ended(kit: Kit, is_given_up: bool) -> None:
    """However it ended: by then the space is somebody else's."""
    tier = kit.open()
    records = [put(tier, number, Random(number).randbytes(MIB // 2)) for number in range(3)]
    target = views(bytes(records[0].length_bytes), [1000, 300_000])

    def landed(part: memoryview) -> None:
        if is_given_up:
            raise TierError("enough", remedy="None.")

    if is_given_up:
        assert code_of(lambda: tier.read(records[0], target, landed)) == "KV-600"
    else:
        tier.read(records[0], target, landed)
    assert any(b"".join(target))  # something had been written
    for view in target:
        view[:] = bytes(len(view))
    for record in records[1:]:
        get(tier, record)
    put(tier, 10, b"x" * 100_000)
    tier.remove([records[0].key])
    tier.close()
    assert not any(b"".join(target))


def test_close_twice(kit: Kit) -> None:
    tier = kit.open()
    put(tier, 1, b"data")
    tier.close()
    tier.close()


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls and restarts against a dict. Objects of 8 granules fit whatever holes there are."""

    capacity_bytes = 64 * GRANULE_BYTES
    kind = "disk on memory"

    @initialize()
    def start(self) -> None:
        self.kit = Kit(self.kind, Path())
        self.tier = self.kit.open(self.capacity_bytes)
        self.model: dict[ObjectKey, tuple[ObjectRecord, bytes]] = {}

    @rule(
        number=st.integers(0, 15),
        group=st.integers(0, 1),
        length=st.integers(1, 8 * GRANULE_BYTES),
        fill=st.binary(max_size=8),
    )
    def write(self, number: int, group: int, length: int, fill: bytes) -> None:
        data = (fill * length)[:length].ljust(length, b".")
        record = sample_record(number, data, group=group)
        used = sum(self.size(len(held)) for _, held in self.model.values())
        cuts = sorted({length // 3, length // 2})
        if used + self.size(length) > self.capacity_bytes:
            assert code_of(lambda: self.tier.write(record, views(data, cuts))) == "KV-601"
            return
        self.tier.write(record, views(data, cuts))
        self.model.pop(record.key, None)
        self.model[record.key] = (record, data)

    @rule(numbers=st.lists(st.integers(0, 15), max_size=6), group=st.integers(0, 1))
    def remove(self, numbers: list[int], group: int) -> None:
        keys = [sample_record(number, b"", group=group).key for number in numbers]
        self.tier.remove(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule()
    def restart(self) -> None:
        self.tier = self.kit.open(self.capacity_bytes)

    @rule(number=st.integers(0, 15), group=st.integers(0, 1))
    def look(self, number: int, group: int) -> None:
        stranger = sample_record(number, b"?", group=group)
        held = self.model.get(stranger.key)
        assert self.tier.find([stranger.key]) == [held[0] if held else None]
        if held:
            assert get(self.tier, held[0], [held[0].length_bytes // 2]) == held[1]
        else:
            assert code_of(lambda: get(self.tier, stranger)) == "KV-603"

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert list(self.tier.recover()) == [record for record, _ in self.model.values()]
        if isinstance(self.tier, DiskTier):
            self.tier.check()

    def size(self, length: int) -> int:
        return round_up(length)


class MemoryTierMachine(TierMachine):
    kind = "memory"

    def size(self, length: int) -> int:
        return length


TestDiskTierMachine = TierMachine.TestCase
TestMemoryTierMachine = MemoryTierMachine.TestCase
TestDiskTierMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestMemoryTierMachine.settings = settings(max_examples=20, stateful_step_count=30)
