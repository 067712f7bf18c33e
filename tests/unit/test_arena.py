"""The arena and its mapping: shared, pre-faulted, sealed, and refused where it cannot fit."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtally import shm
from kvtally.config.sizes import available_memory_bytes
from kvtally.core.space import Piece
from kvtally.errors import ConfigError
from kvtally.shm import map_arena
from kvtally.store.arena import Arena
from kvtally.wire.limits import MIB
from tests.waiting import HANG_S, eventually

SIZE = 4 * MIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SIZE)
    yield arena
    arena.close()


def allocated_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def vm_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that begins at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(later for later in lines if later.startswith("VmFlags:")).split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_client_and_the_store_see_the_same_bytes(arena: Arena) -> None:
    mapping = map_arena(arena.fd, SIZE, writable=True)
    mapping.view(8192, 4)[:] = b"half"
    mapping.view(4096, 4)[:] = b"othe"
    assert [bytes(view) for view in arena.views([Piece(8192, 4), Piece(4096, 2)])] == [b"half", b"ot"]
    assert mapping.close()


def test_a_read_only_mapping_cannot_be_written(arena: Arena) -> None:
    mapping = map_arena(arena.fd, SIZE, writable=False)
    with pytest.raises(TypeError):
        mapping.view(0, 1)[:] = b"x"
    mapping.populate(0, SIZE)
    assert mapping.close()


def test_a_mapping_stays_while_views_of_it_are_alive(arena: Arena) -> None:
    mapping = map_arena(arena.fd, SIZE, writable=True)
    view = mapping.view(0, 4)
    assert not mapping.close()
    view[:] = b"safe"
    del view
    gc.collect()
    assert mapping.close()
    assert bytes(arena.views([Piece(0, 4)])[0]) == b"safe"


def test_an_announced_size_beyond_the_descriptor_is_refused(arena: Arena) -> None:
    for size in (SIZE + 1, 0):
        with pytest.raises(OSError, match="announced"):
            map_arena(arena.fd, size, writable=True)


def test_the_mapping_is_neither_inherited_nor_dumped(arena: Arena) -> None:
    mapping = map_arena(arena.fd, SIZE, writable=True)
    assert {"dc", "dd"} <= set(vm_flags(mapping.address))  # don't copy on fork, don't dump
    assert mapping.close()
    assert not os.get_inheritable(arena.fd)


def test_nobody_can_shrink_the_arena(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def populate(arena: Arena) -> list[ConfigError | None]:
    results: list[ConfigError | None] = []
    arena.populate(results.append)
    arena.wait_populated(10)
    return results


def test_populate_takes_every_page_and_changes_no_byte(arena: Arena) -> None:
    arena.views([Piece(0, 5)])[0][:] = b"early"
    assert allocated_bytes(arena) < SIZE
    assert populate(arena) == [None]
    assert arena.populated_bytes == SIZE
    assert allocated_bytes(arena) == SIZE
    assert bytes(arena.views([Piece(0, 5)])[0]) == b"early"


def failing_madvise(code: int) -> object:
    def madvise(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(code)
        return -1

    return madvise


def test_an_old_kernel_is_served_by_touching_pages(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_madvise", failing_madvise(errno.EINVAL))
    arena.views([Piece(mmap.PAGESIZE, 5)])[0][:] = b"early"
    assert populate(arena) == [None]
    assert allocated_bytes(arena) == SIZE
    assert bytes(arena.views([Piece(mmap.PAGESIZE, 5)])[0]) == b"early"


def test_an_interrupted_populate_goes_on(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = shm._madvise, []

    def interrupted_once(address: int, length: int, advice: int) -> int:
        calls.append(length)
        if len(calls) == 1:
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(address, length, advice))

    monkeypatch.setattr(shm, "_madvise", interrupted_once)
    assert populate(arena) == [None]
    assert allocated_bytes(arena) == SIZE


def test_running_out_of_memory_is_a_config_error(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_madvise", failing_madvise(errno.ENOMEM))
    (failure,) = populate(arena)
    assert failure is not None
    assert failure.code == "KV-102"
    assert not arena.wait_populated(0)


def test_close_ends_a_populate_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(200 * MIB)  # several steps
    entered, go_on = threading.Event(), threading.Event()

    def slow(address: int, length: int, advice: int) -> int:
        entered.set()
        assert go_on.wait(HANG_S)
        return 0

    monkeypatch.setattr(shm, "_madvise", slow)
    done: list[ConfigError | None] = []
    arena.populate(done.append)
    assert entered.wait(HANG_S)

    def go_on_once_it_closes() -> None:
        eventually(arena._closing.is_set)
        go_on.set()

    thread = threading.Thread(target=go_on_once_it_closes)
    thread.start()
    arena.close()
    arena.close()
    thread.join(HANG_S)
    assert arena.populated_bytes < arena.size_bytes
    assert done == []


@pytest.mark.parametrize("size_bytes", [0, 100, available_memory_bytes() + 1, 1 << 60])
def test_impossible_sizes_are_refused_with_a_remedy(size_bytes: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        Arena(size_bytes)
    assert refusal.value.code == "KV-102"
    assert "memory" in refusal.value.remedy


def test_huge_pages_are_asked_for_only_where_the_kernel_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "shmem_enabled"
    monkeypatch.setattr("kvtally.store.arena._SHMEM_HUGE_PAGES", setting)
    for text, expected in [("always [advise] never", True), ("always advise [never]", False), (None, False)]:
        setting.write_text(text) if text else setting.unlink()
        arena = Arena(SIZE)
        assert arena.huge_pages is expected
        arena.close()
