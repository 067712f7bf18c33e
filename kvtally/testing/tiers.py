"""Tiers and devices in memory, for tests and for the simulator: no files, no threads, made in microseconds.

`MemoryDevice` replaces the files under a `DiskTier` and fails on demand; its seed decides everything random about a
failure. `MemoryTier` is a whole tier in a dict. Both follow the threading rule of `store.tiers.base`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import product
from random import Random

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import CHAIN_BYTES, ROOT_CHAIN, ObjectKey
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import IntegrityError, TierError
from kvtally.store.tiers.base import READERS, Boundary, Holding, ObjectRecord


class Operation(StrEnum):
    """What a device can be told to fail at."""

    READ_JOURNAL = "read journal"
    WRITE_JOURNAL = "write journal"
    REPLACE_JOURNAL = "replace journal"
    READ = "read"
    WRITE = "write"


class MemoryDevice:
    """A `Device` in memory. It outlives a tier that crashed on it: `crash()`, then open the next tier on it."""

    identity = 0x6B76

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.journal = bytearray()
        self.data = bytearray()
        self._failures: dict[Operation, tuple[int, int | None]] = {}  # operation -> errno, how many more times
        self._short_reads = 0
        # What a crash may still tear: the last append (offset, bytes), the data write right before it (offset, bytes
        # before, bytes after), and the journal that the last compaction replaced.
        self._last_append: tuple[int, bytes] | None = None
        self._last_write: tuple[int, bytes, bytes] | None = None
        self._replaced: bytes | None = None
        self._is_closed = False

    def fail(self, operation: Operation, error_number: int, *, times: int | None = 1) -> None:
        """Let the next `times` operations fail; None: all of them, until `heal`. A write that fails writes a random
        part first."""
        self._failures[operation] = (error_number, times)

    def shorten_reads(self, times: int = 1) -> None:
        """Let the next reads of data stop early, at a random byte."""
        self._short_reads = times

    def heal(self) -> None:
        self._failures.clear()
        self._short_reads = 0

    def flip_bit(self, content: bytearray) -> int:
        """Flip a random bit of `journal` or `data`; returns its byte's position."""
        position = self.random.randrange(len(content))
        content[position] ^= 1 << self.random.randrange(8)
        return position

    def crash(self) -> None:
        """Go back to a moment during the last write, as `kill -9` would: earlier writes are whole, later ones absent.

        The last write of a tier is its bytes and then its record: the crash may fall before, inside or after either.
        """
        if self._replaced is not None and self.random.random() < 0.5:
            self.journal[:] = self._replaced
        kept = 0
        if self._last_append is not None:
            offset, appended = self._last_append
            kept = self._torn_length(len(appended))
            self.journal[offset:] = appended[:kept]
        if self._last_write is not None and not kept:  # else its record has begun, so the object's bytes are whole
            offset, before, after = self._last_write
            kept = self._torn_length(len(after))
            self.data[offset : offset + len(after)] = after[:kept] + before[kept:]
        self._after_restart()

    def reopen(self) -> None:
        """Restart after an orderly shutdown: everything written is there."""
        self._after_restart()

    def read_journal(self, offset: int, length_bytes: int | None) -> bytes:
        self._raise_when_due(Operation.READ_JOURNAL)
        end = len(self.journal) if length_bytes is None else offset + length_bytes
        return bytes(self.journal[offset:end])

    def write_journal(self, offset: int, data: bytes) -> None:
        error = self._due(Operation.WRITE_JOURNAL)
        written = data if error is None else data[: self.random.randrange(len(data))]
        if self._last_append is not None or self._replaced is not None:
            self._last_write = None  # it belongs to an earlier record
        self._replaced = None
        self._last_append = (offset, written)
        self.journal[offset:] = written
        if error is not None:
            raise error

    def replace_journal(self, parts: Iterable[bytes]) -> None:
        self._raise_when_due(Operation.REPLACE_JOURNAL)
        replacement = b"".join(parts)
        self._replaced = bytes(self.journal)
        self._last_append = self._last_write = None
        self.journal[:] = replacement

    def preadv(self, target: Sequence[memoryview], offset: int) -> int:
        self._raise_when_due(Operation.READ)
        end = min(offset + sum(map(len, target)), len(self.data))
        if self._short_reads and end > offset:
            self._short_reads -= 1
            end = self.random.randrange(offset, end)
        position = offset
        for view in target:
            part = self.data[position : min(position + len(view), max(end, position))]
            view[: len(part)] = part
            position += len(part)
        return position - offset

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        error = self._due(Operation.WRITE)
        data = b"".join(source)
        written = data if error is None else data[: self.random.randrange(len(data))]
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        end = offset + len(written)
        self._last_write = (offset, bytes(self.data[offset:end]), written)
        self._last_append = self._replaced = None
        self.data[offset:end] = written
        if error is not None:
            raise error

    def close(self) -> None:
        self._is_closed = True

    def _due(self, operation: Operation) -> OSError | None:
        if self._is_closed:
            return OSError(errno.EBADF, os.strerror(errno.EBADF))
        error_number, times = self._failures.get(operation, (0, 0))
        if times == 0:
            return None
        if times is not None:
            self._failures[operation] = (error_number, times - 1)
        return OSError(error_number, os.strerror(error_number))

    def _raise_when_due(self, operation: Operation) -> None:
        error = self._due(operation)
        if error is not None:
            raise error

    def _torn_length(self, length_bytes: int) -> int:
        """How much of a write survives: nothing, all, or a part, each as likely."""
        return self.random.choice((0, self.random.randrange(length_bytes + 1), length_bytes))

    def _after_restart(self) -> None:
        self._last_append = self._last_write = self._replaced = None
        self._is_closed = False


class MemoryTier:
    """A `Tier` in a dict. If it is not `enumerable`, it is like a tier that stores share: `recover` yields nothing."""

    def __init__(self, capacity_bytes: int | None = None, *, name: str = "memory", enumerable: bool = True) -> None:
        self.name = name
        self.readers = READERS
        self.capacity_bytes = capacity_bytes
        self.enumerable = enumerable
        self.objects: dict[ObjectKey, tuple[ObjectRecord, bytes]] = {}
        self.used_bytes = 0

    def recover(self) -> Iterator[ObjectRecord]:
        held = list(self.objects.values()) if self.enumerable else []
        return iter([record for record, _ in held])

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        data = b"".join(source)
        if len(data) != record.length_bytes:
            raise _shorter(len(data), record.length_bytes)
        if self.capacity_bytes is not None and self.used_bytes + len(data) > self.capacity_bytes:
            raise TierError(f"{self.name} has no room for {len(data)} bytes", remedy="Evict first.", code="KV-601")
        self.remove([record.key])
        self.objects[record.key] = (record, data)
        self.used_bytes += len(data)

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        held = self.objects.get(record.key)
        if held is None:
            raise TierError(f"{self.name} does not hold this object", remedy="It is recomputed.", code="KV-603")
        data = memoryview(held[1])
        if len(data) != sum(map(len, target)):
            raise _shorter(len(data), sum(map(len, target)))
        position = 0
        for view in target:
            view[:] = data[position : position + len(view)]
            position += len(view)
            landed(view)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            held = self.objects.pop(key, None)
            if held is not None:
                self.used_bytes -= len(held[1])

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        held = [self.objects.get(key) for key in keys]
        return [found[0] if found else None for found in held]

    def ask(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> list[Holding | None]:
        found: list[Holding | None] = []
        for boundary in boundaries:
            rows = []
            for group, rank in product(range(len(namespace.groups)), range(namespace.ranks)):
                held = self.objects.get(ObjectKey(namespace.digest, boundary.chain, group, rank))
                if held is not None:
                    rows.append((group * namespace.ranks + rank, held[0].checksum))
            found.append(Holding(tuple(rows)) if rows else None)
        return found

    def close(self) -> None:
        """Nothing to release: a test can still look at what was written."""


def _shorter(held_bytes: int, wanted_bytes: int) -> IntegrityError:
    what = f"{held_bytes} bytes are held where {wanted_bytes} are wanted"
    return IntegrityError(what, remedy="The object is dropped and recomputed.", code="KV-402")


def sample_namespace(model: str = "model") -> Namespace:
    group = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((4096,),))
    return Namespace(model=model, groups=(group, group), chunk_tokens=256, alignment_tokens=16, tensor_parallel=2)


SAMPLE_NAMESPACE = sample_namespace()


def sample_record(
    number: int, data: bytes, *, namespace: Namespace = SAMPLE_NAMESPACE, group: int = 0, rank: int = 0
) -> ObjectRecord:
    """The record of an object that holds `data`, under the `number`th chain of its namespace."""
    chain = number.to_bytes(CHAIN_BYTES, "big")
    key = ObjectKey(namespace.digest, chain, group, rank)
    return ObjectRecord(
        namespace=namespace,
        chain=chain,
        parent=(number - 1).to_bytes(CHAIN_BYTES, "big") if number else ROOT_CHAIN,
        start_tokens=number * 256,
        end_tokens=number * 256 + 256,
        group=group,
        rank=rank,
        length_bytes=len(data),
        checksum=object_checksum(key, len(data), [memoryview(data)]),
    )
