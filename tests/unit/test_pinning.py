"""Pinned memory and what crosses the bus, without a GPU: CUDA's calls are doubles. Needs torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.shm import Mapping
from tests.waiting import HANG_S

pytestmark = pytest.mark.engine


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Four parts, of which two could be pinned, and no GPU."""
    import torch

    from kvtally.device import pinning

    registered: list[int] = []

    def register(address: int, length: int, flags: int) -> int:
        registered.append(length)
        return 0 if len(registered) <= 2 else 2  # the third time there is no memory left to lock

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    mapping = Mapping(mmap.mmap(-1, 4 << 20), writable=True)
    arena = pinning.PinnedArena(mapping, torch.device("cpu"))
    assert not arena.wait(HANG_S)
    yield arena
    arena.close()


def test_no_copy_reaches_over_the_end_of_what_is_pinned(arena: Any) -> None:
    view = arena.mapping.view
    inside, across, edge, beyond = (
        [tuple(place) for place in arena.places(view(start, 8192))]
        for start in (0, (1 << 20) - 4096, (2 << 20) - 4096, 3 << 20)
    )
    assert inside == [(0, 8192, True)]
    assert across == [((1 << 20) - 4096, 4096, True), (1 << 20, 4096, True)]
    assert edge == [((2 << 20) - 4096, 4096, True), (2 << 20, 4096, False)]
    assert beyond == [(3 << 20, 8192, False)]
    assert arena.places(memoryview(bytearray(64))) == []


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "save"])
def test_bytes_cross_whatever_is_pinned(arena: Any, is_load: bool) -> None:
    import torch

    from kvtally.device.cuda import CudaCopies, Part

    queued: list[int] = []

    def copy(target: int, source: int, size_bytes: int, stream: int) -> None:
        queued.append(size_bytes)
        ctypes.memmove(target, source, size_bytes)

    copies: Any = CudaCopies.__new__(CudaCopies)
    copies._arena = arena
    copies._driver = SimpleNamespace(enter=lambda: None, copy=copy)
    copies._in, copies._out = (SimpleNamespace(bus=SimpleNamespace(cuda_stream=number)) for number in (1, 2))
    outside = bytearray(100)
    pieces = [arena.mapping.view((2 << 20) - 4096, 8192), memoryview(outside), arena.mapping.view(0, 4096)]
    content = random.Random(5).randbytes(8192 + 100 + 4096)
    buffer = torch.zeros(len(content) + 64, dtype=torch.uint8)
    stage = SimpleNamespace(buffer=buffer, address=buffer.data_ptr())
    at = 0
    if is_load:
        for piece in pieces:
            piece[:] = content[at : at + len(piece)]
            at += len(piece)
    else:
        buffer[64:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    move = SimpleNamespace(pieces=pieces)
    copies._cross(copies._in if is_load else copies._out, stage, Part(0, move, 64, len(content), 0))
    assert bytes(buffer[64:].numpy()) == content
    assert b"".join(map(bytes, pieces)) == content
    assert queued == [4096, 4096]  # of what is pinned, each part by itself
