"""Handles: what a store's replies become for their user. A lease, the slots it opens for reading, slots for writing.

Owns the check of everything a reply says about memory: a store that names bytes outside the arena is broken, and None
is the answer here (`link` then ends the connection). A handle belongs to the session in which it was given and is worth
nothing after it. Views keep the arena mapped; nothing else does. Neighbours: `link` (left), `client` (right). No I/O.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvtally.client.link import Miss, Session
from kvtally.core.keys import CHAIN_BYTES, ObjectKey, checksum_seed
from kvtally.core.receipts import Loaded
from kvtally.wire.messages import (
    Found,
    Lookup,
    MissReason,
    PutObject,
    PutSlots,
    PutStatus,
    Reply,
    Slot,
    Slots,
    Staged,
)

MOST_GROUPS = 1 << 32  # the most that a key can hold
_STATUSES = frozenset(PutStatus)


class SharedLease(NamedTuple):
    """A lease in the form in which an engine's scheduler sends it to workers, which have their own connections."""

    store: str
    id: int
    chains: bytes
    expires_ns: int  # of the machine's monotonic clock, which all its processes share
    slots: list[Slot]  # where the objects of rank 0 lie, if the store has said so


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Lease:
    """The answer to a lookup that holds what it found: the right to read it, until released or expired.

    `found` is what the store said at first; `end_tokens` is what may be promised, 0 until everything is staged.
    """

    session: Session
    id: int  # 0: nothing was found, nothing is held
    found: Found
    chains: bytes
    expires_ns: int
    is_own: bool = True  # False: another session's, adopted
    outcome: Staged | None = None
    bad: list[tuple[int, int, int, int]] = field(default_factory=list)  # reported when the lease is released

    @property
    def is_live(self) -> bool:
        return self.id != 0 and self.session.alive and time.monotonic_ns() < self.expires_ns

    @property
    def is_staged(self) -> bool:
        """Whether nothing more is on its way: it is there, it failed, or the store was lost."""
        return not self.found.staging or self.outcome is not None or not self.session.alive

    @property
    def end_tokens(self) -> int:
        if not (self.is_live and self.is_staged):
            return 0
        return self.outcome.end_tokens if self.outcome is not None else self.found.end_tokens

    @property
    def reason(self) -> str:
        """Why the hit is not longer: a MissReason, or empty."""
        if self.id and not self.is_live:
            return MissReason.LEASE_EXPIRED
        if self.outcome is None or (not self.outcome.reason and self.outcome.end_tokens <= self.found.end_tokens):
            return self.found.reason  # all that was found was staged
        return self.outcome.reason

    @property
    def sources(self) -> Loaded:
        """Where the store had the tokens that may be promised."""
        if self.outcome is None:
            return Loaded(0, 0, self.found.peer_tokens, self.found.pool_tokens).last(self.end_tokens)
        staged = self.outcome
        return Loaded(0, staged.disk_tokens, staged.peer_tokens, staged.pool_tokens).last(self.end_tokens)

    def share(self) -> SharedLease:
        return SharedLease(self.session.store, self.id, self.chains, self.expires_ns, self.found.slots)


class ReadSlot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One leased object: which it is, its bytes in the arena, and their checksum."""

    lease: Lease
    key: ObjectKey
    index: int  # boundary index of the lookup
    length_bytes: int
    checksum: int
    pieces: list[memoryview]

    @property
    def seed(self) -> int:
        return checksum_seed(self.key, self.length_bytes)


class Put(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The store's answer for one object to be saved. Only with status WRITE is there anything to write to."""

    session: Session
    id: int
    status: PutStatus
    key: ObjectKey
    length_bytes: int
    pieces: list[memoryview]

    @property
    def seed(self) -> int:
        return checksum_seed(self.key, self.length_bytes)


def lease_of(session: Session, request: Lookup, begun_ns: int, found: Found) -> Lease:
    """The lease that a lookup gave. Its time begins at `begun_ns`, when it was asked for; the store's begins later."""
    longest_ns = session.limits.lease_ns
    span_ns = min(request.lease_ms * 1_000_000, longest_ns) if request.lease_ms else longest_ns
    return Lease(session=session, id=found.lease, found=found, chains=request.chains, expires_ns=begun_ns + span_ns)


def read_slots_of(lease: Lease, namespace: bytes, rank: int, reply: Reply) -> list[ReadSlot] | Miss | None:
    if not isinstance(reply, Slots):
        return None
    if reply.reason:
        return Miss(reason_of(reply.reason, MissReason.LEASE_EXPIRED))
    slots = [_read_slot(lease, namespace, rank, slot) for slot in reply.slots]
    sound = [slot for slot in slots if slot is not None]
    return sound if len(sound) == len(slots) else None


def confirmed(lease: Lease, reply: Reply) -> Lease | Miss | None:
    """The lease, if the store says that it stands."""
    if not isinstance(reply, Slots):
        return None
    return Miss(reason_of(reply.reason, MissReason.LEASE_EXPIRED)) if reply.reason else lease


def _read_slot(lease: Lease, namespace: bytes, rank: int, slot: Slot) -> ReadSlot | None:
    start = slot.index * CHAIN_BYTES
    pieces = _views(lease.session, slot.pieces, slot.length_bytes)
    if pieces is None or not 0 <= start < len(lease.chains) or not 0 <= slot.group < MOST_GROUPS:
        return None
    return ReadSlot(
        lease=lease,
        key=ObjectKey(namespace, lease.chains[start : start + CHAIN_BYTES], slot.group, rank),
        index=slot.index,
        length_bytes=slot.length_bytes,
        checksum=slot.checksum,
        pieces=[piece.toreadonly() for piece in pieces],
    )


def puts_of(session: Session, namespace: bytes, objects: Sequence[PutObject], reply: PutSlots) -> list[Put] | None:
    if len(reply.slots) != len(objects):
        return None
    puts = []
    for item, slot in zip(objects, reply.slots, strict=True):
        if slot.status not in _STATUSES:
            return None
        pieces = _views(session, slot.pieces, item.length_bytes) if slot.status == PutStatus.WRITE else []
        if pieces is None:
            return None
        put = Put(
            session=session,
            id=slot.put,
            status=PutStatus(slot.status),
            key=ObjectKey(namespace, item.chain, item.group, item.rank),
            length_bytes=item.length_bytes,
            pieces=pieces,
        )
        puts.append(put)
    return puts


def _views(session: Session, pieces: Sequence[int], length_bytes: int) -> list[memoryview] | None:
    """The bytes at these offsets and lengths; None if a store names bytes that cannot be right."""
    mapping = session.mapping
    if mapping is None or len(pieces) % 2:
        return None
    views = []
    total = 0
    for offset, length in zip(pieces[::2], pieces[1::2], strict=True):
        if offset < 0 or length <= 0 or offset + length > mapping.size_bytes:
            return None
        views.append(mapping.view(offset, length))
        total += length
    return views if total == length_bytes else None


def reason_of(text: str, otherwise: MissReason) -> MissReason:
    """The reason that a store gave. A newer store may know reasons that we do not."""
    try:
        return MissReason(text)
    except ValueError:
        return otherwise
