"""The disk tier: objects in one data file, and a journal that says what lies where.

Owns the allocation of the data file (in pieces handed out by `core.space`, as in the arena), the order of writes, and
when the journal is rewritten. Decides neither what is kept (the store) nor whether bytes are the right ones (the mover,
its only caller). Neighbours: `journal` (the records, what a damaged journal still says), and a `Device` below, which is
`files` or, in tests, memory.

Crashes. A write puts the bytes into `data` first and appends the record after; space is handed out again only after
the record that gives it up was appended. What the kernel took over survives `kill -9`, so nothing is synced. After a
power loss `journal` makes the best of what is there, and bytes that are not the record's fail the mover's checksum.

Threading: as `base` says, and `close` is called when no other call is under way. The space and the journal's end are
the writer's own; `_lock` guards the maps that readers share with it and is never held during I/O; `_journal_lock` keeps
`find` from reading a journal that is being replaced.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import canonical
from kvtally.core.space import GRANULE_BYTES, Piece, rebuild
from kvtally.errors import ConfigError, IntegrityError, TierError
from kvtally.store.tiers.base import READERS, NoRoomError, ObjectRecord
from kvtally.store.tiers.journal import (
    DELETE,
    NAMESPACE,
    PREFIX_BYTES,
    Dropped,
    all_pieces,
    compact_key,
    decode_put,
    encode_put,
    moved,
    pieces_of,
    place_of,
    position_of,
    put_bytes,
    record_end,
    replay,
    seal,
)

# This part of the file (one in so many) stays free. In a file that is full to the last byte, the holes are so small
# that hardly any large object fits into MAX_PIECES of them.
SPARE_PART = 32
COMPACTION_SLACK = 10_000  # dead records that a journal may hold, beside one for each live object
# Between two steps a reader hands the interpreter to another thread. Smaller steps would still be in the processor's
# cache when `landed` hashes them, but that gain is lost on hand-overs (measured: 0.68 and 0.95 of a preadv).
READ_STEP_BYTES = 2 * 1024 * 1024


class Device(Protocol):
    """The bytes under a disk tier. Every failure is an OSError; a write that fails may have written a part."""

    identity: int  # seeds the journal's checksums, so that records of another directory never verify

    def read_journal(self, offset: int, length_bytes: int | None) -> bytes:
        """Up to `length_bytes` of the journal from `offset` on; None: to its end."""

    def write_journal(self, offset: int, data: bytes) -> None:
        """Cut the journal off at `offset` and append `data`."""

    def replace_journal(self, parts: Iterable[bytes]) -> None:
        """Put the concatenation of `parts` (which may be read from the old journal) in its place, atomically."""

    def preadv(self, target: Sequence[memoryview], offset: int) -> int:
        """Fill `target` from the data file; returns the bytes read, fewer only where the file ends."""

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        """Write all of `source` into the data file."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounters:
    objects: int
    used_bytes: int
    journal_bytes: int
    dropped_at_recovery: Mapping[Dropped, int]


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """The one place where a device's OSError becomes an error of ours."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free space on its volume or lower the disk size." if full else "Check the device and the directory."
        what = f"the disk tier cannot {action}: {error}"
        raise TierError(what, remedy=remedy, code="KV-601" if full else "KV-602") from error


class DiskTier:
    """A `Tier` on a `Device`. Opening it replays the journal."""

    def __init__(self, device: Device, capacity_bytes: int) -> None:
        if capacity_bytes < GRANULE_BYTES:
            raise impossible_size(capacity_bytes, f"Give it at least {GRANULE_BYTES} bytes.")
        with translate_errors("read its journal"):
            journal = device.read_journal(0, None)
        self._held = replay(journal, device.identity, capacity_bytes)
        # Kept for `recover`, which must not fail if opening did not, until it is called or something is written.
        self._as_opened: tuple[bytes, dict[bytes, bytes]] | None = (journal, self._held.objects)
        self.name = "disk"
        self.readers = READERS
        space_bytes = self._held.space.capacity_bytes
        self.capacity_bytes: int | None = space_bytes - space_bytes // SPARE_PART // GRANULE_BYTES * GRANULE_BYTES
        self._device = device
        self._lock = threading.Lock()
        self._journal_lock = threading.Lock()
        if self._held.dropped.keys() - {Dropped.TORN}:
            self._compact()  # so that what was dropped now is not found again after the next start
        self._compact_when_due()

    @property
    def counters(self) -> DiskCounters:
        held = self._held
        return DiskCounters(
            objects=len(held.objects),
            used_bytes=held.space.used_bytes,
            journal_bytes=held.journal_end,
            dropped_at_recovery=dict(held.dropped),
        )

    def recover(self) -> Iterator[ObjectRecord]:
        journal, objects = self._as_opened or self._read_again()
        self._as_opened = None
        for key, place in list(objects.items()):
            yield decode_put(journal, position_of(place), self._held.namespaces[key[:PREFIX_BYTES]])

    def _read_again(self) -> tuple[bytes, dict[bytes, bytes]]:
        held = self._held
        with translate_errors("read its journal"):
            journal = self._device.read_journal(0, held.journal_end)
        if len(journal) < held.journal_end:
            raise _shorter(f"the journal has {len(journal)} bytes of {held.journal_end}")
        return journal, held.objects

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        length_bytes = sum(map(len, source))
        if length_bytes != record.length_bytes:
            raise _shorter(f"{length_bytes} bytes came with a record of {record.length_bytes}")
        pieces = self._held.space.allocate(length_bytes)
        if pieces is None:
            raise NoRoomError(f"the disk tier has no room for {length_bytes} bytes", remedy="Evict first.")
        try:
            with translate_errors("write an object"):
                for piece, run in zip(pieces, cut(source, pieces), strict=True):
                    self._device.pwritev(run, piece.offset)
            self._publish(record, pieces)
        except TierError:
            self._held.space.free(pieces)
            raise
        self._compact_when_due()

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        with self._lock:
            place = self._held.objects.get(compact_key(record.key))
        if place is None:
            raise TierError("the disk tier does not hold this object", remedy="It is recomputed.", code="KV-603")
        pieces = pieces_of(place)
        held_bytes, wanted_bytes = sum(piece.length for piece in pieces), sum(map(len, target))
        if held_bytes != wanted_bytes:
            raise _shorter(f"{held_bytes} bytes are held where {wanted_bytes} are wanted")
        with translate_errors("read an object"):
            for piece, run in zip(pieces, cut(target, pieces), strict=True):
                for offset, part in in_steps(run, piece.offset):
                    if self._device.preadv([part], offset) < len(part):
                        raise _shorter(f"the data file ends inside the piece at {piece.offset}")
                    landed(part)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        held = self._held
        known = [key for key in dict.fromkeys(map(compact_key, keys)) if key in held.objects]
        if not known:
            return
        self._append(b"".join(seal(DELETE, key, self._device.identity) for key in known))
        with self._lock:
            for key in known:
                held.space.free(pieces_of(held.objects.pop(key)))
        held.dead += 2 * len(known)
        self._compact_when_due()

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        with self._journal_lock:
            return [self._find(key) for key in keys]

    def close(self) -> None:
        with translate_errors("close its files"):
            self._device.close()

    def check(self) -> None:
        """Assert that exactly the objects' pieces are in use."""
        held = self._held
        held.space.check()
        assert rebuild(held.space.capacity_bytes, all_pieces(held.objects)).free_bytes == held.space.free_bytes
        assert {key[:PREFIX_BYTES] for key in held.objects} <= held.namespaces.keys()

    def _publish(self, record: ObjectRecord, pieces: Sequence[Piece]) -> None:
        """Append the object's record, then make it visible in place of the one it replaces."""
        held, seed = self._held, self._device.identity
        key = compact_key(record.key)
        before = seal(DELETE, key, seed) if key in held.objects else b""
        if key[:PREFIX_BYTES] not in held.namespaces:
            before += 2 * seal(NAMESPACE, canonical(record.namespace), seed)
        place = place_of(held.journal_end + len(before), pieces)
        self._append(before + encode_put(record, place, seed))
        with self._lock:
            held.namespaces.setdefault(key[:PREFIX_BYTES], record.namespace)
            replaced = held.objects.pop(key, None)
            held.objects[key] = place
        if replaced is not None:
            held.space.free(pieces_of(replaced))
            held.dead += 2

    def _append(self, records: bytes) -> None:
        with translate_errors("write its journal"):
            self._device.write_journal(self._held.journal_end, records)
        self._as_opened = None
        self._held.journal_end += len(records)  # only now: the next append cuts off records that were written in part

    def _find(self, key: ObjectKey) -> ObjectRecord | None:
        with self._lock:
            place = self._held.objects.get(compact_key(key))
            namespace = self._held.namespaces.get(key.namespace[:PREFIX_BYTES])
        if place is None or namespace is None:
            return None
        with translate_errors("read its journal"):
            raw = self._device.read_journal(position_of(place), put_bytes(place))
        is_intact = record_end(raw, 0, self._device.identity) is not None
        return decode_put(raw, 0, namespace) if is_intact and namespace.digest == key.namespace else None

    def _compact_when_due(self) -> None:
        if self._held.dead > len(self._held.objects) + COMPACTION_SLACK:
            self._compact()

    def _compact(self) -> None:
        """Rewrite the journal with live records only. If that fails, the journal stays long; nothing is lost."""
        held = self._held
        held.dead = 0  # also if this fails: the next attempt comes after as many dead records again
        used = {key[:PREFIX_BYTES] for key in held.objects}
        namespaces = {prefix: namespace for prefix, namespace in held.namespaces.items() if prefix in used}
        head = b"".join(2 * seal(NAMESPACE, canonical(known), self._device.identity) for known in namespaces.values())
        with suppress(TierError), self._journal_lock, translate_errors("rewrite its journal"):
            self._device.replace_journal(self._live_records(head))
            objects, position = dict[bytes, bytes](), len(head)
            for key, place in held.objects.items():
                objects[key] = moved(place, position)
                position += put_bytes(place)
            with self._lock:
                held.objects, held.namespaces, held.journal_end = objects, namespaces, position

    def _live_records(self, head: bytes) -> Iterator[bytes]:
        """The compact journal record by record, so that a journal of any length is rewritten in constant memory."""
        yield head
        for place in self._held.objects.values():
            length_bytes = put_bytes(place)
            # A damaged record keeps its length, so that the records behind it are where they should be.
            yield self._device.read_journal(position_of(place), length_bytes).ljust(length_bytes, b"\0")


def in_steps(run: Iterable[memoryview], offset: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes of `run`, which lie at `offset` in the data file, in parts of READ_STEP_BYTES at most."""
    for view in run:
        for start in range(0, len(view), READ_STEP_BYTES):
            yield offset + start, view[start : start + READ_STEP_BYTES]
        offset += len(view)


def cut(views: Sequence[memoryview], pieces: Iterable[Piece]) -> Iterator[list[memoryview]]:
    """The bytes of `views`, in order, cut into runs as long as each of `pieces` (which add up to as many bytes)."""
    index = used = 0
    for piece in pieces:
        run, missing = [], piece.length
        while missing:
            part = views[index][used : used + missing]
            run.append(part)
            missing -= len(part)
            used += len(part)
            if used == len(views[index]):
                index, used = index + 1, 0
        yield run


def _shorter(what: str) -> IntegrityError:
    return IntegrityError(f"disk tier: {what}", remedy="The object is dropped and recomputed.", code="KV-402")


def impossible_size(capacity_bytes: int, remedy: str) -> ConfigError:
    return ConfigError(f"a disk size of {capacity_bytes} bytes cannot work", remedy=remedy, code="KV-102")
