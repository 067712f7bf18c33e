"""Checksums: xxh3-64 over an object's bytes, seeded with its identity (`keys.checksum_seed`).

Owns the one algorithm that tiers, clients and tools share. Seeding means that bytes of another object, length or rank
never verify, however intact they are. Pure computation; xxh3 releases the interpreter lock on large buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvtally.core.keys import ObjectKey, checksum_seed

ALGORITHM = "xxh3-64"


def running_checksum(seed: int) -> xxhash.xxh3_64:
    """For bytes that come one part after the other: `update` it with each; its `intdigest` is their checksum."""
    return xxhash.xxh3_64(seed=seed)


def checksum(pieces: Iterable[memoryview], seed: int) -> int:
    """Checksum of the concatenation of `pieces`."""
    running = running_checksum(seed)
    for piece in pieces:
        running.update(piece)
    return running.intdigest()


def object_checksum(key: ObjectKey, length_bytes: int, pieces: Iterable[memoryview]) -> int:
    """Checksum of the object `key`, whose bytes lie in `pieces`."""
    return checksum(pieces, checksum_seed(key, length_bytes))
