"""The disk tier: objects in one data file, and a journal that says what lies where.

    DIRECTORY/format.json   format version, granule, and a random id that seeds the journal's checksums
              lock          flock'ed by the store that uses the directory
              data          the objects' bytes, in pieces handed out by `core.space` (as in the arena)
              journal       namespace, put and delete records, append-only, each with its length and checksum

Owns the journal's format, its replay and compaction, the allocation of the data file, and all file access. Decides
neither what is kept (the store) nor whether bytes are the right ones (the mover, its only caller).

Crashes. A write puts the bytes into `data` first and appends the record after; space is handed out again only after
the record that gives it up was appended. What the kernel took over survives `kill -9`, so nothing is synced. After a
power loss the files may hold any mixture of old and new: a damaged record is skipped (replay goes on at the next one
that verifies, so damage stays local; a namespace's record is written twice because other records lean on it), an object
whose place a newer one took is dropped, and bytes that are not the record's fail the mover's checksum. A miss each.

Threading: as `base` says, and `close` is called when no other call is under way. The space and the journal's end are
the writer's own; `_lock` guards the maps that readers share with it and is never held during I/O; `_journal_lock` keeps
`find` from reading a journal that is being replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import xxhash

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace, canonical, decode
from kvtally.core.space import GRANULE_BYTES, Piece, Space, rebuild, round_up
from kvtally.errors import ConfigError, IncompatibleError, IntegrityError, KVTallyError, TierError
from kvtally.store.tiers.base import ObjectRecord

FORMAT_VERSION = 1
COMPACTION_SLACK = 10_000  # dead records that a journal may hold beyond one for each live object
IOVEC_MAX = 1024
CLOSED = -1  # a file descriptor that the kernel itself refuses (EBADF)

NAMESPACE, PUT, DELETE = 1, 2, 3
MAGIC = b"\xf5kvj"  # begins every record; 0xf5 occurs in no UTF-8 text, so never inside a namespace's description
HEAD = struct.Struct("<4sIQI")  # magic, length of the record, checksum of what follows it, kind
KEY = struct.Struct("<8sHH32s")  # first bytes of the namespace's digest, group, rank, chain
DETAIL = struct.Struct("<32sQQQQ")  # parent, start and end tokens, length, checksum; in a put, PIECEs follow
PIECE = struct.Struct("<QQ")  # offset, length
PLACE = struct.Struct("<Q")  # in memory: where an object's put record begins; its PIECEs follow
PREFIX_BYTES = 8
SEALED_FROM = HEAD.size - 4
KEY_END = HEAD.size + KEY.size
PUT_BYTES = KEY_END + DETAIL.size  # without the pieces


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


class Dropped(StrEnum):
    """Why something in a journal was not recovered."""

    TORN = "torn"  # the end of the journal, cut in the middle of a record
    DAMAGED = "damaged"  # a record that does not verify, before others that do
    NAMESPACE = "namespace"  # an object whose namespace's description is lost
    MISPLACED = "misplaced"  # an object beyond the capacity (it was lowered), or at an impossible place
    OVERLAP = "overlap"  # an object whose place a newer one took


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


@dataclass(slots=True, kw_only=True)
class Contents:
    """What a journal says, and what the tier goes on from."""

    # compact key -> PLACE and PIECEs, in the order of writing. Bytes: no Python object costs less for what they say.
    objects: dict[bytes, bytes]
    namespaces: dict[bytes, Namespace]  # by the first bytes of their digest
    space: Space
    journal_end: int  # where the last intact record ends and the next one goes
    dead: int  # records since the last compaction that the next one would leave out
    dropped: Counter[Dropped]


class DiskTier:
    """A `Tier` on a `Device`. Opening it replays the journal."""

    def __init__(self, device: Device, capacity_bytes: int) -> None:
        if capacity_bytes < GRANULE_BYTES:
            raise _impossible(capacity_bytes, f"Give it at least {GRANULE_BYTES} bytes.")
        with translate_errors("read its journal"):
            self._held = replay(device.read_journal(0, None), device.identity, capacity_bytes)
        self.name = "disk"
        self.capacity_bytes: int | None = self._held.space.capacity_bytes
        self._device = device
        self._lock = threading.Lock()
        self._journal_lock = threading.Lock()
        if self._held.dropped.keys() - {Dropped.TORN}:
            self._compact()  # so that what was dropped today is not found again tomorrow
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
        held = self._held
        with translate_errors("read its journal"):
            journal = self._device.read_journal(0, held.journal_end)
        if len(journal) < held.journal_end:
            raise _shorter(f"the journal has {len(journal)} bytes of {held.journal_end}")
        for key, place in list(held.objects.items()):
            yield decode_put(journal, PLACE.unpack_from(place)[0], held.namespaces[key[:PREFIX_BYTES]])

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        length_bytes = sum(map(len, source))
        if length_bytes != record.length_bytes:
            raise _shorter(f"{length_bytes} bytes came with a record of {record.length_bytes}")
        pieces = self._held.space.allocate(length_bytes)
        if pieces is None:
            raise TierError(f"the disk tier has no room for {length_bytes} bytes", remedy="Evict first.", code="KV-601")
        try:
            with translate_errors("write an object"):
                for piece, run in zip(pieces, cut(source, pieces), strict=True):
                    self._device.pwritev(run, piece.offset)
            self._publish(record, pieces)
        except TierError:
            self._held.space.free(pieces)
            raise
        self._compact_when_due()

    def read(self, record: ObjectRecord, target: Sequence[memoryview]) -> None:
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
                if self._device.preadv(run, piece.offset) < piece.length:
                    raise _shorter(f"the data file ends inside the piece at {piece.offset}")

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
        place = PLACE.pack(held.journal_end + len(before)) + b"".join(PIECE.pack(*piece) for piece in pieces)
        span = (record.start_tokens, record.end_tokens, record.length_bytes, record.checksum)
        self._append(before + seal(PUT, key + DETAIL.pack(record.parent, *span) + place[PLACE.size :], seed))
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
        self._held.journal_end += len(records)  # only now: records written in part are cut off by the next append

    def _find(self, key: ObjectKey) -> ObjectRecord | None:
        with self._lock:
            place = self._held.objects.get(compact_key(key))
            namespace = self._held.namespaces.get(key.namespace[:PREFIX_BYTES])
        if place is None or namespace is None:
            return None
        with translate_errors("read its journal"):
            raw = self._device.read_journal(PLACE.unpack_from(place)[0], put_bytes(place))
        is_intact = record_end(raw, 0, self._device.identity) is not None
        return decode_put(raw, 0, namespace) if is_intact and namespace.digest == key.namespace else None

    def _compact_when_due(self) -> None:
        if self._held.dead > len(self._held.objects) + COMPACTION_SLACK:
            self._compact()

    def _compact(self) -> None:
        """Rewrite the journal with live records only. To fail costs nothing but the journal's length."""
        held = self._held
        held.dead = 0  # also where it fails: the next attempt comes after as many dead records again
        used = {key[:PREFIX_BYTES] for key in held.objects}
        namespaces = {prefix: namespace for prefix, namespace in held.namespaces.items() if prefix in used}
        head = b"".join(2 * seal(NAMESPACE, canonical(known), self._device.identity) for known in namespaces.values())
        with suppress(TierError), self._journal_lock, translate_errors("rewrite its journal"):
            self._device.replace_journal(self._live_records(head))
            objects, position = dict[bytes, bytes](), len(head)
            for key, place in held.objects.items():
                objects[key] = PLACE.pack(position) + place[PLACE.size :]
                position += put_bytes(place)
            with self._lock:
                held.objects, held.namespaces, held.journal_end = objects, namespaces, position

    def _live_records(self, head: bytes) -> Iterator[bytes]:
        """The compact journal record by record, so that a journal of any length is rewritten in constant memory."""
        yield head
        for place in self._held.objects.values():
            length_bytes = put_bytes(place)
            # A record that rotted away keeps its length: those behind it must lie where they are looked for.
            yield self._device.read_journal(PLACE.unpack_from(place)[0], length_bytes).ljust(length_bytes, b"\0")


def replay(journal: bytes, seed: int, capacity_bytes: int) -> Contents:
    """Read a journal, whatever its bytes are."""
    dropped: Counter[Dropped] = Counter()
    objects: dict[bytes, bytes] = {}
    namespaces: dict[bytes, Namespace] = {}
    count = journal_end = 0
    for start, end, kind in intact_records(journal, seed, dropped):
        key = journal[start + HEAD.size : start + KEY_END]
        if kind == PUT and end - start > PUT_BYTES and (end - start - PUT_BYTES) % PIECE.size == 0:
            objects.pop(key, None)  # the order of the map is the order of writing
            objects[key] = PLACE.pack(start) + journal[start + PUT_BYTES : end]
        elif kind == DELETE:
            objects.pop(key, None)
        elif kind == NAMESPACE:
            with suppress(msgspec.DecodeError):  # its objects are counted below
                namespace = decode(journal[start + HEAD.size : end])
                namespaces[namespace.digest[:PREFIX_BYTES]] = namespace
        count, journal_end = count + 1, end
    for key in [key for key in objects if key[:PREFIX_BYTES] not in namespaces]:
        del objects[key]
        dropped[Dropped.NAMESPACE] += 1
    space = settle(objects, capacity_bytes, dropped)
    dead = count - len(objects) - 2 * len(namespaces)
    return Contents(
        objects=objects, namespaces=namespaces, space=space, journal_end=journal_end, dead=dead, dropped=dropped
    )


def intact_records(journal: bytes, seed: int, dropped: Counter[Dropped]) -> Iterator[tuple[int, int, int]]:
    """Start, end and kind of every record that verifies. What lies between two of them is counted and skipped."""
    position = 0
    while position < len(journal):
        end = record_end(journal, position, seed)
        if end is None:
            following = journal.find(MAGIC, position + 1)
            dropped[Dropped.TORN if following < 0 else Dropped.DAMAGED] += 1
            end = following if following >= 0 else len(journal)
        else:
            yield position, end, journal[position + SEALED_FROM]
        position = end


def record_end(journal: bytes, position: int, seed: int) -> int | None:
    """Where the record at `position` ends, or None if there is no intact one."""
    if position + HEAD.size > len(journal):
        return None
    magic, length, checksum, _ = HEAD.unpack_from(journal, position)
    end: int = position + length
    if magic != MAGIC or length < HEAD.size or end > len(journal):
        return None
    return end if xxhash.xxh3_64_intdigest(journal[position + SEALED_FROM : end], seed) == checksum else None


def seal(kind: int, body: bytes, seed: int) -> bytes:
    """A record of the journal."""
    checksum = xxhash.xxh3_64_intdigest(kind.to_bytes(4, "little") + body, seed)
    return HEAD.pack(MAGIC, HEAD.size + len(body), checksum, kind) + body


def settle(objects: dict[bytes, bytes], capacity_bytes: int, dropped: Counter[Dropped]) -> Space:
    """The space that these objects leave free, after dropping those that cannot lie where they say."""
    with suppress(ValueError):  # raised for a damaged journal, or a capacity that was lowered
        return rebuild(capacity_bytes, all_pieces(objects))
    for key, reason in impossible_places(objects, capacity_bytes).items():
        del objects[key]
        dropped[reason] += 1
    return rebuild(capacity_bytes, all_pieces(objects))


def impossible_places(objects: Mapping[bytes, bytes], capacity_bytes: int) -> dict[bytes, Dropped]:
    """Objects outside the file, and of two that overlap the older one. `objects` is in the order of writing.

    One sweep over the pieces by offset. Those kept so far are apart, so a piece can only overlap the last one kept; and
    if that one goes, the piece begins where it began or later, which is behind all others.
    """
    found: dict[bytes, Dropped] = {}
    runs = sorted((piece, age, key) for age, (key, place) in enumerate(objects.items()) for piece in pieces_of(place))
    last_end, last_age, last_key = 0, 0, b""
    for piece, age, key in runs:
        end = piece.offset + round_up(piece.length)
        if key in found:
            continue
        if piece.offset % GRANULE_BYTES or piece.length == 0 or end > capacity_bytes:
            found[key] = Dropped.MISPLACED
        elif piece.offset < last_end and last_key not in found:
            found[key if age < last_age else last_key] = Dropped.OVERLAP
        if key not in found:
            last_end, last_age, last_key = end, age, key
    return found


def compact_key(key: ObjectKey) -> bytes:
    return KEY.pack(key.namespace[:PREFIX_BYTES], key.group, key.rank, key.chain)


def decode_put(journal: bytes, position: int, namespace: Namespace) -> ObjectRecord:
    _, group, rank, chain = KEY.unpack_from(journal, position + HEAD.size)
    parent, start_tokens, end_tokens, length_bytes, checksum = DETAIL.unpack_from(journal, position + KEY_END)
    return ObjectRecord(
        namespace=namespace,
        chain=chain,
        parent=parent,
        start_tokens=start_tokens,
        end_tokens=end_tokens,
        group=group,
        rank=rank,
        length_bytes=length_bytes,
        checksum=checksum,
    )


def put_bytes(place: bytes) -> int:
    """Length of the put record of the object at `place`."""
    return PUT_BYTES + len(place) - PLACE.size


def pieces_of(place: bytes) -> tuple[Piece, ...]:
    return tuple(map(Piece._make, PIECE.iter_unpack(place[PLACE.size :])))


def all_pieces(objects: Mapping[bytes, bytes]) -> list[Piece]:
    joined = b"".join(place[PLACE.size :] for place in objects.values())
    return list(map(Piece._make, PIECE.iter_unpack(joined)))


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


def _impossible(capacity_bytes: int, remedy: str) -> ConfigError:
    return ConfigError(f"a disk size of {capacity_bytes} bytes cannot work", remedy=remedy, code="KV-102")


def _unusable(directory: Path, why: str) -> ConfigError:
    what = f"the disk directory {directory} cannot be used: {why}"
    return ConfigError(what, remedy="Give it a writable directory that is empty or a store's own.", code="KV-103")


def open_disk(directory: Path, capacity_bytes: int) -> DiskTier:
    """The disk tier in `directory`, which is made if absent. Refusing it (KV-1xx, KV-2xx) leaves it untouched."""
    try:
        volume = os.statvfs(next(path for path in (directory, *directory.absolute().parents) if path.exists()))
        volume_bytes = volume.f_blocks * volume.f_frsize  # 0 where a file system does not tell
        if not GRANULE_BYTES <= capacity_bytes <= (volume_bytes or capacity_bytes):
            raise _impossible(
                capacity_bytes, f"Choose from {GRANULE_BYTES} to {volume_bytes}, all of {directory}'s volume."
            )
        device = FileDevice(directory, capacity_bytes)
    except OSError as error:
        raise _unusable(directory, str(error)) from error
    try:
        return DiskTier(device, capacity_bytes)
    except TierError as error:
        device.close()
        raise _unusable(directory, error.message) from error


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """`format.json`. The version is all that another version is expected to share."""

    kvtally_disk: int
    granule_bytes: int = 0
    id: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_format(directory: Path) -> Format | None:
    """What `directory` says it is; None where it is absent, empty, or was left while being set up. Changes nothing."""
    names = set(os.listdir(directory)) if directory.exists() else set()
    if "format.json" not in names:
        if names - {"lock", "format.json.new", "lost+found"}:  # an empty volume of its own has a lost+found
            raise _unusable(directory, "it holds files that are not a store's")
        return None
    try:
        found = msgspec.json.decode((directory / "format.json").read_bytes(), type=Format)
    except msgspec.DecodeError as error:
        raise _unusable(directory, f"its format.json cannot be read: {error}") from error
    if (found.kvtally_disk, found.granule_bytes) != (FORMAT_VERSION, GRANULE_BYTES):
        theirs, ours = f"{found.kvtally_disk}/{found.granule_bytes}", f"{FORMAT_VERSION}/{GRANULE_BYTES}"
        what = f"the disk directory {directory} has format {theirs}, this store reads {ours}"
        raise IncompatibleError(what, remedy="Empty it (it holds only cached data), or use another.", code="KV-203")
    return found


class FileDevice:
    """A `Device` in a directory. Opening it takes the directory's lock."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._directory = directory
        self._lock_fd = self._data_fd = self._journal_fd = CLOSED
        read_format(directory)  # refuses what is not ours before anything is made in it
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._take_lock()
            self.identity = (read_format(directory) or self._write_format()).id
            (directory / "journal.new").unlink(missing_ok=True)
            self._data_fd = self._open("data")
            if os.fstat(self._data_fd).st_size > capacity_bytes:
                os.ftruncate(self._data_fd, capacity_bytes)
            self._journal_fd = self._open("journal")
            self._journal_bytes = os.fstat(self._journal_fd).st_size
            self._opened = {"data": os.fstat(self._data_fd), "journal": os.fstat(self._journal_fd)}
        except (OSError, KVTallyError):
            self.close()
            raise

    def read_journal(self, offset: int, length_bytes: int | None) -> bytes:
        missing = self._journal_bytes - offset if length_bytes is None else length_bytes
        parts = []
        while missing > 0 and (part := os.pread(self._journal_fd, missing, offset)):
            parts.append(part)
            offset += len(part)
            missing -= len(part)
        return b"".join(parts)

    def write_journal(self, offset: int, data: bytes) -> None:
        self._require_present()
        if self._journal_bytes > offset:
            os.ftruncate(self._journal_fd, offset)
        self._journal_bytes = offset + len(data)  # before writing: what fails half-way is cut off by the next write
        _write_all(self._journal_fd, [memoryview(data)], offset)

    def replace_journal(self, parts: Iterable[bytes]) -> None:
        self._require_present()
        temporary = self._directory / "journal.new"
        fd = self._open("journal.new", os.O_TRUNC)
        try:
            with open(fd, "wb", buffering=1 << 20, closefd=False) as stream:
                stream.writelines(parts)
            os.fdatasync(fd)  # rare, and without it a power loss could leave an empty journal
            temporary.rename(self._directory / "journal")
            os.dup2(fd, self._journal_fd, inheritable=False)  # not close and reopen: the number stays valid for readers
            self._opened["journal"] = os.fstat(fd)
            self._journal_bytes = self._opened["journal"].st_size
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def preadv(self, target: Sequence[memoryview], offset: int) -> int:
        return _transfer(os.preadv, self._data_fd, list(target), offset)

    def pwritev(self, source: Sequence[memoryview], offset: int) -> None:
        _write_all(self._data_fd, source, offset)

    def close(self) -> None:
        journal_fd, fds = self._journal_fd, (self._journal_fd, self._data_fd, self._lock_fd)
        self._journal_fd = self._data_fd = self._lock_fd = CLOSED
        try:
            if journal_fd != CLOSED:
                os.fdatasync(journal_fd)
        finally:
            for fd in fds:
                with suppress(OSError):  # CLOSED, or a device that fails to the last
                    os.close(fd)

    def _take_lock(self) -> None:
        self._lock_fd = self._open("lock")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another store uses the disk directory {self._directory}"
            raise ConfigError(what, remedy="Stop it, or give this one a directory of its own.", code="KV-104") from None

    def _write_format(self) -> Format:
        made = Format(kvtally_disk=FORMAT_VERSION, granule_bytes=GRANULE_BYTES, id=secrets.randbits(63))
        temporary = self._directory / "format.json.new"
        temporary.write_bytes(msgspec.json.encode(made) + b"\n")
        temporary.rename(self._directory / "format.json")
        return made

    def _open(self, name: str, flags: int = 0) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | flags, 0o600)

    def _require_present(self) -> None:
        """Notice files that were deleted or replaced: what is written to them would be gone after a restart."""
        for name, opened in self._opened.items():
            if not os.path.samestat(os.stat(os.path.join(self._directory, name)), opened):
                raise FileNotFoundError(errno.ENOENT, "replaced by another file", name)


def _write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    if _transfer(os.pwritev, fd, list(views), offset) < sum(map(len, views)):
        raise OSError(errno.EIO, "the device takes no more bytes")


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, views: list[memoryview], offset: int) -> int:
    """Repeat preadv or pwritev until `views` (consumed) are done or it moves nothing; returns the bytes moved."""
    done = 0
    while views and (count := call(fd, views[:IOVEC_MAX], offset + done)):
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return done
