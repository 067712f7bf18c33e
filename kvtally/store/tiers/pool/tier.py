"""The pool tier: an engine that several stores share (Valkey, S3, Mooncake), and the order that makes sharing safe.

    write   the value, then the manifest that names it      ask      one question for a whole prompt
    read    the value that a manifest has named             keep     the path of a hit lives on
                                                            forget   a new epoch: all names change

Any store may write, and the engine may lose anything at any time. So nothing here is an index: a manifest is a hint,
and bytes are verified where they land. What is malformed, misplaced or does not open counts as absent and is counted;
it never raises. Two stores that add different objects to one manifest at the same moment may lose one of the rows: a
miss, until somebody saves it again.

Neighbours: `mover` (left: its threads call), `engines` (right: the server). Inside: `finding`, `writing`, `upkeep`,
over a common `ledger`; `format` is the layout, `seal` the encryption.

Threading: every call may be made from several threads at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.errors import IntegrityError, TierError
from kvtally.store.tiers.base import Boundary, Holding, ObjectRecord
from kvtally.store.tiers.engines.base import Engine, length_of, wrong_length
from kvtally.store.tiers.pool import finding
from kvtally.store.tiers.pool.format import DEFAULT_PREFIX, Names
from kvtally.store.tiers.pool.ledger import Ledger
from kvtally.store.tiers.pool.marker import check_marker, marker
from kvtally.store.tiers.pool.seal import ForeignKeyError, Seal
from kvtally.store.tiers.pool.sealed_engine import SealedEngine
from kvtally.store.tiers.pool.upkeep import Rows, Upkeep
from kvtally.store.tiers.pool.writing import Writing

DEFAULT_TTL_S = 24 * 3600


class PoolTier:
    """A `SharedTier` over an engine. `ttl_s` is how long things live in it that nobody uses, where the engine can do
    that; 0: until it evicts them."""

    capacity_bytes = None  # the engine bounds itself

    def __init__(
        self,
        engine: Engine,
        *,
        prefix: str = DEFAULT_PREFIX,
        ttl_s: int = DEFAULT_TTL_S,
        seal: Seal | None = None,
        write_bytes_s: int = 0,  # 0: no limit
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.name = engine.name
        self.readers = engine.readers
        self.writers = engine.writers
        self._bare = engine
        self._seal = seal
        self.names = Names(prefix)
        self.engine = engine  # through it, everything is sealed
        if seal is not None:
            self.engine = SealedEngine(engine, seal, plain=self.names.epochs, damaged=self._did_not_open)
        self._ledger = Ledger(self.engine, self.names, clock=clock, wall_clock=wall_clock, random=random)
        refresh_s = (ttl_s or DEFAULT_TTL_S) / 4
        self._upkeep = Upkeep(self._ledger, ttl_s=ttl_s, keep_every_s=refresh_s)
        self._writing = Writing(
            self._ledger, ttl_s=ttl_s, describe_every_s=refresh_s, write_bytes_s=write_bytes_s, sleep=sleep
        )
        self._namespaces: dict[bytes, Namespace] = {}  # by digest
        self._is_checked = False

    # ---- the contract

    def recover(self) -> Iterator[ObjectRecord]:
        return iter(())

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        """Keep the object, unless the pool has one of this key already: then its bytes may be another store's. Raises
        `writing.OrphanError` (KV-606) if the pool does not hold the boundary before it."""
        if length_of(source) != record.length_bytes:
            raise wrong_length("the object to write", length_of(source), record.length_bytes)
        self._prepare(record.namespace)
        self._writing.write(record, source)
        self._upkeep.beside()

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        names = self._ledger.names_of(record.namespace.digest)
        if names is None:
            raise TierError("the pool was never asked about this object", remedy="It is computed.", code="KV-603")
        try:
            self.engine.get_into(names.value_of(record), target, landed)
        except ForeignKeyError:  # it may be right for those who have that key
            raise
        except IntegrityError:
            self._upkeep.note(record, is_bad=True)
            raise
        except TierError as error:
            if error.code == "KV-603":
                self._upkeep.note(record, is_bad=False)
            raise

    def ask(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> list[Holding | None]:
        """What is held at each boundary. One with the root's chain stands for the beginning of every prompt: it has
        tails and no objects."""
        self._prepare(namespace)
        return finding.find(self._ledger, namespace, boundaries) if boundaries else []

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectRecord | None]:
        """What the manifests say of these objects, in namespaces that this store has used."""
        return [self._find(key) for key in keys]

    def _find(self, key: ObjectKey) -> ObjectRecord | None:
        namespace, names = self._namespaces.get(key.namespace), self._ledger.names_of(key.namespace)
        if namespace is None or names is None:
            return None
        manifest = self._ledger.manifests(namespace, names, [key.chain])[key.chain]
        checksum = manifest.rows.get(key.group * namespace.ranks + key.rank) if manifest is not None else None
        if manifest is None or checksum is None:
            return None
        chain, parent, start, end = manifest.boundary
        return ObjectRecord(
            namespace=namespace,
            chain=chain,
            parent=parent,
            start_tokens=start,
            end_tokens=end,
            group=key.group,
            rank=key.rank,
            length_bytes=namespace.object_bytes(key.group, key.rank, end - start),
            checksum=checksum,
        )

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Take out whatever the manifests name under these keys."""
        wanted: dict[bytes, Rows] = {}
        for key in keys:
            namespace = self._namespaces.get(key.namespace)
            if namespace is not None:
                bit = key.group * namespace.ranks + key.rank
                wanted.setdefault(key.namespace, {}).setdefault(key.chain, {})[bit] = None
        for digest, rows in wanted.items():
            self.engine.remove(self._upkeep.strike(self._namespaces[digest], rows))

    def close(self) -> None:
        self.engine.close()

    # ---- beyond the contract

    def contact(self) -> None:
        """See that the pool is one of this format, with this key, and may be written. Raises IncompatibleError and
        ConfigError, which waiting does not cure, and TierError if it cannot be reached. The first use does it too."""
        names = self.names
        (held,) = self._bare.get_small([names.format])
        if held is not None:
            check_marker(names, self._seal, held)
        self._bare.put_small({names.format: marker(names, self._seal)}, 0)  # also shows that it may be written
        self._is_checked = True

    def forget(self, digest: bytes) -> None:
        """Begin a new epoch of a namespace. This store finds nothing of the old one from now on, even if this raises:
        then others may not have been told, and a restart could bring it back."""
        self._ledger.epochs.reset(digest)
        self._contact_once()
        self._ledger.tell_epoch(digest)

    def keep(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> None:
        """These are the boundaries of a hit, wherever it came from: let them live on, no more often than in a quarter
        of their time."""
        self._prepare(namespace)
        self._upkeep.keep(namespace, boundaries)
        self._upkeep.beside()

    def disown(self, records: Sequence[ObjectRecord]) -> None:
        """These did not verify after they were read: take out exactly those values, and the rows that name them."""
        for record in records:
            self._upkeep.note(record, is_bad=True)
        self._upkeep.strike_noted()

    def counts(self) -> dict[str, int]:
        """What happened since the start: objects written, present, orphans; small things damaged, foreign; rows struck;
        boundaries kept."""
        return self._ledger.counts()

    def register(self, memory: memoryview) -> None:
        """Tell the engine where the arena is, before anything is read or written."""
        self.engine.register(memory)

    def _prepare(self, namespace: Namespace) -> None:
        self._contact_once()
        self._namespaces.setdefault(namespace.digest, namespace)

    def _contact_once(self) -> None:
        if not self._is_checked:
            self.contact()

    def _did_not_open(self, name: str, is_foreign: bool) -> None:
        self._ledger.count("foreign" if is_foreign else "damaged")
