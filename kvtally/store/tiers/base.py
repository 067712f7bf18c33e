"""The contracts of what sits below the arena: tiers, which keep objects, and the stores of other machines.

    arena slot ──write──▶ tier        write-behind, after an object was committed
    arena slot ◀──read─── tier        staging, before a hit is promised
    arena slot ◀──pull─── peers       the same, from another store, which holds it under a lease

A tier stores bytes under an `ObjectKey` and remembers each object's record. It decides nothing: which objects go down,
come up or are evicted is the store's decision (chain-aware), and whether bytes that came up are the right ones is the
mover's (checksum). So a tier may lose anything at any time, and may even return wrong bytes: the cost is a counted
miss.

Threading: `write` and `remove` are called from one thread, in the order in which the store decided them. `read` and
`find` may be called from several threads at once, also while a write is under way, but never for an object that is
being removed. All calls block and may take as long as the device takes; none is made from the event loop. `recover` is
called once, before anything else.

A `read` or `pull` must not return, nor raise, before nothing can write to its target any more: the target is arena
space that belongs to the job until its outcome is known, and to some other object right after. Where a device or a
library writes and cannot be stopped, the call waits until it has ended, however late that is.

`tests/contract` runs one suite over every tier; a new tier is done when it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.errors import TierError


class ObjectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one object except its bytes: enough to rebuild the index from a tier alone."""

    namespace: Namespace
    chain: bytes
    parent: bytes
    start_tokens: int
    end_tokens: int
    group: int
    rank: int
    length_bytes: int
    checksum: int

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.namespace.digest, self.chain, self.group, self.rank)


class Boundary(NamedTuple):
    """One boundary of a prompt, as a shared tier is asked about it."""

    chain: bytes
    parent: bytes
    start_tokens: int
    end_tokens: int


class Holding(NamedTuple):
    """What a shared tier holds at a boundary: for each object its bit (`group * ranks + rank`) and checksum, and the
    lengths of the tails beneath it."""

    rows: tuple[tuple[int, int], ...]
    tails: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Where an object lies at another store: under which lease there, at which of its boundaries."""

    address: str
    lease: int
    index: int


class NoRoomError(TierError):
    """The tier has no room for an object. Removing others helps, unlike on a device that is full of other files."""

    default_code = "KV-601"


READERS = 4  # while one thread waits for the device, another one verifies what has landed


class Source(Protocol):
    """What the mover reads from. Every failure is a `TierError` (code KV-6xx) or an `IntegrityError`."""

    name: str
    # Bytes this tier may hold; the store evicts to stay below. None: the tier bounds itself (a shared Redis, say).
    capacity_bytes: int | None
    readers: int  # threads that read from it at once

    def close(self) -> None:
        """Flush and let go of every resource. Idempotent."""


@runtime_checkable
class PeerSource(Source, Protocol):
    """The stores of other machines. `pull` may be called from several threads at once, and `close` while it runs."""

    def pull(
        self,
        place: PeerPlace,
        record: ObjectRecord,
        target: Sequence[memoryview],
        landed: Callable[[memoryview], None],
    ) -> None:
        """Fill `target` with the object's bytes, unverified, as `Tier.read` does.

        Raises TierError KV-603 when the other store no longer holds it for us, KV-604 when that store is lost, KV-605
        when it has no room for one more send.
        """


class Tier(Source, Protocol):
    """See the module docstring for threading."""

    def recover(self) -> Iterator[ObjectRecord]:
        """Every object it knows it holds, in the order of their writing. A tier shared with others yields nothing."""

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        """Keep the concatenation of `source` under `record.key`, replacing what was there: all of it or nothing.

        Raises NoRoomError if the tier's own bounds leave no room, TierError KV-601 when the device is full, KV-602
        when it cannot be written.
        """

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        """Fill `target` (of exactly the record's length in all) with the object's bytes, unverified.

        Calls `landed` for each part of `target`, in order, as soon as it is filled, and when `read` returns has called
        it for all: the caller hashes a part while it is in the processor's cache. A tier that gets everything at once
        calls it once for each view.

        Raises TierError KV-603 when the tier does not hold it, IntegrityError KV-402 when it is shorter than that.
        """

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Forget these objects. Unknown keys are ignored."""

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        """What is held under each of these keys. For checks: the store knows what its own tiers hold."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier that other stores write to as well. It is asked what it holds before it is read."""

    def ask(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> Sequence[Holding | None]:
        """What is held at each of these boundaries of one prompt, in one question for all of them."""
