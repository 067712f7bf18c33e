"""The disk tier's journal: what its records look like, and what their sequence says.

    record    HEAD ‖ body         the checksum in HEAD covers the kind and the body; the device's identity seeds it
    body      of a namespace: its description      of a put: KEY ‖ DETAIL ‖ PIECE…      of a delete: KEY
    place     PLACE ‖ PIECE…      in memory, for each object: where its put record and its bytes are

Owns these formats and the reading of a journal that may hold anything. Does not know files, nor when a record is
written and the journal rewritten: that is `disk`, its only user. A change of format changes `files.FORMAT_VERSION`.

After a power loss a journal may hold any mixture of old and new. A damaged record is skipped: replay continues at the
next one that verifies, so damage stays local. A namespace's record is written twice, because others depend on it. An
object whose place a newer one took is dropped. Each of these costs a miss.

Threading: pure computation; only `Contents` is changed, by the tier that owns it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import xxhash

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace, decode
from kvtally.core.space import GRANULE_BYTES, Piece, Space, rebuild, round_up
from kvtally.store.tiers.base import ObjectRecord

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


class Dropped(StrEnum):
    """Why something in a journal was not recovered."""

    TORN = "torn"  # the end of the journal, cut in the middle of a record
    DAMAGED = "damaged"  # a record that does not verify, before others that do
    NAMESPACE = "namespace"  # an object whose namespace's description is lost
    MISPLACED = "misplaced"  # an object beyond the capacity (it was lowered), or at an impossible place
    OVERLAP = "overlap"  # an object whose place a newer one took


@dataclass(slots=True, kw_only=True)
class Contents:
    """What a journal says. The tier continues from there."""

    # compact key -> PLACE and PIECEs, in the order of writing; as bytes, which take the least memory
    objects: dict[bytes, bytes]
    namespaces: dict[bytes, Namespace]  # by the first bytes of their digest
    space: Space
    journal_end: int  # where the last intact record ends and the next one goes
    dead: int  # records since the last compaction that the next one would leave out
    dropped: Counter[Dropped]


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
    """The space that these objects leave free, after dropping objects at impossible places."""
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


def encode_put(record: ObjectRecord, place: bytes, seed: int) -> bytes:
    span = (record.start_tokens, record.end_tokens, record.length_bytes, record.checksum)
    detail = DETAIL.pack(record.parent, *span)
    return seal(PUT, compact_key(record.key) + detail + place[PLACE.size :], seed)


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


def place_of(position: int, pieces: Iterable[Piece]) -> bytes:
    """The place of an object whose put record begins at `position`."""
    return PLACE.pack(position) + b"".join(PIECE.pack(*piece) for piece in pieces)


def moved(place: bytes, position: int) -> bytes:
    """The same pieces, with the record at another position."""
    return PLACE.pack(position) + place[PLACE.size :]


def position_of(place: bytes) -> int:
    position: int = PLACE.unpack_from(place)[0]
    return position


def put_bytes(place: bytes) -> int:
    """Length of the put record of the object at `place`."""
    return PUT_BYTES + len(place) - PLACE.size


def pieces_of(place: bytes) -> tuple[Piece, ...]:
    return tuple(map(Piece._make, PIECE.iter_unpack(place[PLACE.size :])))


def all_pieces(objects: Mapping[bytes, bytes]) -> list[Piece]:
    joined = b"".join(place[PLACE.size :] for place in objects.values())
    return list(map(Piece._make, PIECE.iter_unpack(joined)))
