"""The GPU's copies and checksums against plain host code, on whatever CUDA device there is. Run by hand:

    python tests/gpu/copies.py [--rounds N] [--seed N]
    compute-sanitizer --tool memcheck python tests/gpu/copies.py --rounds 3

Random layouts (page sizes that can be cut into units and such that cannot, padding, several layers), random blocks,
slots in one piece or several. Each round: save, compare every byte of the slots and the checksum with what the host
makes of it; load into other blocks, whole or in part, compare again, and see that no other byte was touched; flip a bit
in a slot: the checksum must change. With and without kernels, pinned and not yet pinned, one transfer or several at
once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

import numpy as np
import torch

from kvtally.core.checksum import checksum
from kvtally.core.geometry import GroupLayout, LayerView, Runs
from kvtally.core.namespace import GroupKind, GroupSpec
from kvtally.device import Move, finish
from kvtally.device.cuda import CudaCopies
from kvtally.shm import Mapping, map_arena

ARENA_BYTES = 256 << 20
MEMORY_BYTES = 192 << 20
PAGES = (256, 320, 1000, 1024, 4096, 18_432, 41_984, 65_536, 102_144, 262_144, 1_634_304, 1_638_400)


def layout_of(pick: random.Random, page: int, most_bytes: int) -> GroupLayout:
    layers = pick.randint(1, 8)
    stride = page + pick.choice((0, 0, page, 256, 48))
    blocks = max(2, min(64, most_bytes // (layers * stride) - 1))
    views, offset = [], pick.choice((0, 512))
    for _ in range(layers):
        views.append(LayerView(offset, stride, page))
        offset += blocks * stride
    spec = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=(tuple(view.page_bytes for view in views),))
    return GroupLayout(spec, tuple(views), blocks, most_bytes)


class Slots:
    """Where objects go: pieces of the arena, never the same twice in a round."""

    def __init__(self, mapping: Mapping, pick: random.Random) -> None:
        self._mapping, self._pick, self._at = mapping, pick, 0

    def pieces(self, length: int) -> list[memoryview]:
        found: list[memoryview] = []
        while length:
            part = length if self._pick.random() < 0.6 else min(length, self._pick.randint(1, 8) * 4096)
            self._at += self._pick.choice((0, 4096))
            found.append(self._mapping.view(self._at, part))
            self._at += -(-part // 4096) * 4096
            length -= part
        return found


def on_host(memory: np.ndarray, layout: Runs) -> bytes:
    return b"".join(memory[run.engine_offset : run.engine_offset + run.length].tobytes() for run in layout)


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def play(copies: CudaCopies, memory: torch.Tensor, mapping: Mapping, pick: random.Random) -> int:
    """One round; how many bytes were compared."""
    layout = layout_of(pick, pick.choice(PAGES), MEMORY_BYTES)
    slots = Slots(mapping, pick)
    ids = list(range(1, layout.blocks_count))
    pick.shuffle(ids)
    per_object = pick.randint(1, 4)
    count = max(1, min(len(ids) // (2 * per_object), 12))
    if len(ids) < 2 * per_object:
        per_object, count = 1, 1
    if len(ids) < 2:
        return 0
    sources = [ids[index * per_object : (index + 1) * per_object] for index in range(count)]
    targets = [ids[-(index + 1) * per_object :][:per_object] for index in range(count)]
    memory.copy_(torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device=memory.device))
    before = memory.cpu().numpy()

    length = per_object * sum(layer.page_bytes for layer in layout.layers)
    moves = [Move(layout, group, slots.pieces(length), pick.getrandbits(64)) for group in sources]
    saved = finish(copies.save(memory, moves, copies.fence()))
    for move, value in zip(moves, saved, strict=True):
        assert joined(list(move.pieces)) == on_host(before, move.runs), "saved bytes differ"
        assert value == checksum(list(move.pieces), move.seed or 0), "checksum of a save differs from the host's"

    skip = pick.randint(0, per_object - 1)
    loads = [
        Move(layout, group[skip:], move.pieces, move.seed, skip) for group, move in zip(targets, moves, strict=True)
    ]
    expected = before.copy()
    for move, load in zip(moves, loads, strict=True):
        content = joined(list(move.pieces))
        for run in load.runs:
            part = content[run.object_offset : run.object_offset + run.length]
            expected[run.engine_offset : run.engine_offset + run.length] = np.frombuffer(part, np.uint8)
    middle = len(loads) // 2
    halves = [copies.load(memory, part, copies.fence()) for part in (loads[:middle], loads[middle:]) if part]
    for half in halves:  # the second begins while the first is under way
        next(half)
    landed = [value for half in halves for value in finish(half)]
    assert landed == saved, "checksum of a load differs from that of the save"
    assert np.array_equal(memory.cpu().numpy(), expected), "loaded bytes differ, or others were touched"

    damaged = pick.randrange(len(loads))
    piece = list(loads[damaged].pieces)[-1]
    piece[pick.randrange(len(piece))] ^= 1 << pick.randrange(8)
    values = finish(copies.load(memory, loads, copies.fence()))
    assert [value == good for value, good in zip(values, saved, strict=True)] == [
        index != damaged for index in range(len(loads))
    ], "a flipped bit was not noticed, or blamed on another"
    unhashed = finish(copies.load(memory, [load._replace(seed=None) for load in loads], copies.fence()))
    assert unhashed == [None] * len(loads)
    return 3 * length * count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda:0")
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, ARENA_BYTES)
    mapping = map_arena(descriptor, ARENA_BYTES, writable=True)
    memory = torch.empty(MEMORY_BYTES, dtype=torch.uint8, device=device)
    for use_kernels in (True, False):
        copies = CudaCopies(device, largest_bytes=64 << 20, use_kernels=use_kernels)
        copies.prepare([page for page in PAGES if page % 256 == 0])
        moved = 0
        for number in range(options.rounds if use_kernels else max(2, options.rounds // 10)):
            if number == 2:  # the first rounds copy from memory that is not pinned
                copies.pin(mapping)
                assert copies.wait_pinned(60)
            moved += play(copies, memory, mapping, random.Random(options.seed * 1000 + number))
        copies.close()
        print(f"{copies.way}: {moved >> 20} MiB compared, all right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
