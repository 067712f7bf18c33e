"""Checksums: a tree of xxh3-64 over an object's bytes, seeded with its identity (`keys.checksum_seed`).

    object    │ leaf 0: 256 KiB │ leaf 1: 256 KiB │ … │ last leaf: 256 KiB and what is left │
                    │ xxh3-64         │                      │
    checksum = xxh3-64 of these digests (little-endian), with the seed

Owns the one algorithm that tiers, clients, tools and GPU kernels (`device.kernels`) share. A tree, because a GPU hashes
leaves at once where one long xxh3 is a chain of steps. Its leaves are so large because xxh3 lets go of the interpreter
for each: with smaller ones threads would hand it to and fro instead of hashing side by side. Seeding means that bytes
of another object, length or rank never verify, however intact they are. Pure computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from kvtally.core.keys import ObjectKey, checksum_seed

ALGORITHM = "xxh3-64/256KiB"
LEAF_BYTES = 256 * 1024


def leaf_count(length_bytes: int) -> int:
    """A short remainder belongs to the last leaf: an object of less than two leaves' bytes is one."""
    return max(1, length_bytes // LEAF_BYTES)


def root(leaf_digests: bytes, seed: int) -> int:
    """The checksum of an object, from its leaves' digests."""
    return xxhash.xxh3_64_intdigest(leaf_digests, seed)


class RunningChecksum:
    """For bytes that come one part after the other: `update` with each, in any sizes; `intdigest` when all are in."""

    def __init__(self, seed: int, length_bytes: int) -> None:
        self._seed = seed
        self._left = leaf_count(length_bytes)  # leaves that are not complete
        self._leaf = xxhash.xxh3_64()
        self._filled_bytes = 0  # of the leaf that is being filled
        self._digests = bytearray()

    def update(self, data: memoryview) -> None:
        if data.ndim != 1:
            data = data.cast("B")
        start, size = 0, len(data)
        while self._left > 1 and start < size:
            end = start + LEAF_BYTES - self._filled_bytes
            if end > size:
                break
            if self._filled_bytes:
                self._leaf.update(data[start:end])
                self._digests += self._leaf.intdigest().to_bytes(8, "little")
                self._leaf.reset()
                self._filled_bytes = 0
            else:
                self._digests += xxhash.xxh3_64_intdigest(data[start:end]).to_bytes(8, "little")
            self._left -= 1
            start = end
        if start < size:
            self._leaf.update(data[start:])
            self._filled_bytes += size - start

    def intdigest(self) -> int:
        return root(bytes(self._digests) + self._leaf.intdigest().to_bytes(8, "little"), self._seed)


def checksum(pieces: Sequence[memoryview], seed: int) -> int:
    """Checksum of the concatenation of `pieces`."""
    running = RunningChecksum(seed, sum(piece.nbytes for piece in pieces))
    for piece in pieces:
        running.update(piece)
    return running.intdigest()


def object_checksum(key: ObjectKey, length_bytes: int, pieces: Iterable[memoryview]) -> int:
    """Checksum of the object `key`, whose bytes lie in `pieces`."""
    return checksum(list(pieces), checksum_seed(key, length_bytes))
