"""Jobs: what the store asks of its lower tiers and of its bulk connections, as data. The store decides, threads act,
the outcome comes back.

Neighbours: `store` (emits jobs, takes outcomes), `mover` (threads that run them), `tiers` (what they run on), `bulk`
(threads that send to other stores).
Jobs of one tier that write or remove are carried out in the order of their emission; reads and finds in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.space import Piece
from kvtally.store.tiers.base import Boundary, Holding, ObjectRecord
from kvtally.store.tiers.base import PeerPlace as PeerPlace  # where an object lies at another store
from kvtally.wire.bulk import PullStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """Copy an arena object down. The object is pinned in the arena until the outcome is known."""

    id: int
    tier: int
    record: ObjectRecord
    pieces: tuple[Piece, ...]
    attempt: int = 0  # how often the tier had no room for it
    failures: int = 0  # how often the device was found failing with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveJob:
    id: int
    tier: int
    keys: tuple[ObjectKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """Bring an object up into arena pieces and verify it there."""

    id: int
    tier: int
    record: ObjectRecord
    pieces: tuple[Piece, ...]
    place: PeerPlace | None = None  # of an object that another store holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Answer one `Pull` on a bulk connection. The object is pinned in the arena until the outcome is known."""

    id: int
    connection: int
    pull: int  # `Pull.id`
    status: PullStatus
    pieces: tuple[Piece, ...] = ()  # none unless `status` is SENT
    length_bytes: int = 0


class PeerLink(NamedTuple):
    """A control connection to another store: one for each namespace, as for engines."""

    address: str
    namespace: bytes  # its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FindJob:
    """Ask a tier that others change what it holds at these boundaries of a prompt."""

    id: int
    tier: int
    namespace: Namespace
    boundaries: tuple[Boundary, ...]


Job = WriteJob | RemoveJob | ReadJob | FindJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended: `code` is empty on success, else the KV-xxx code of the error. `found` belongs to a FindJob."""

    code: str = ""
    is_crowded: bool = False  # of a WriteJob, with a code: there will be room when other objects are removed
    seconds: float = 0.0
    found: tuple[Holding | None, ...] = ()  # one for each boundary
