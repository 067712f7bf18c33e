"""Writing to a pool: the value first, then the manifest that names it.

    in it already? ─ yes ─▶ done: somebody else has saved this prefix
    the boundary before it neither there nor being written? ─ yes ─▶ orphan: of no use to anybody
    value ─▶ manifest with one more row (and, for a tail, its length beneath the boundary before it)

Several threads may write at once. Then a write waits for those of the boundary before it, and the rows of one boundary
are added one after the other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtally.core.keys import ROOT_CHAIN
from kvtally.core.namespace import canonical
from kvtally.errors import TierError
from kvtally.store.tiers.base import Boundary, ObjectRecord
from kvtally.store.tiers.pool.format import EpochNames, Manifest, pack_manifest, pack_tails
from kvtally.store.tiers.pool.ledger import Ledger

PARENT_S = 10.0  # the longest a write waits for those of the boundary before it
TURNS = 3  # how often a place is looked for again because a reset came in between
_LOCKS = 64


class OrphanError(TierError):
    """The pool does not hold the boundary before this one, so nobody could use the object. Nothing failed."""

    default_code = "KV-606"


class Writing:
    def __init__(
        self,
        ledger: Ledger,
        *,
        ttl_s: int,
        describe_every_s: float,
        write_bytes_s: int = 0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._ledger = ledger
        self._ttl_s = ttl_s
        self._describe_every_s = describe_every_s
        self._write_bytes_s = write_bytes_s
        self._sleep = sleep
        self._lock = threading.Lock()  # guards what follows; not held while the engine is asked
        self._described: dict[bytes, float] = {}  # namespace -> when its description was written
        self._under_way: Counter[bytes] = Counter()  # writes, by their boundary's chain
        self._ended = threading.Condition(self._lock)
        self._free_at_s = 0.0  # when the bytes that were written have had their time
        self._merging = [threading.Lock() for _ in range(_LOCKS)]  # by the boundary before: who changes manifests there

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        with self._as_under_way(record.chain):
            names, manifest = self._place(record)
            if manifest is not None and bit_of(record) in manifest.rows:
                self._ledger.count("present")
                return
            self._wait_for_room(record.length_bytes)
            self._ledger.engine.put_from(names.value_of(record), source, self._ttl_s)
            with self._merging[hash(record.parent) % _LOCKS]:
                # Another thread may have added a row since.
                self._add_row(record, names, self._ledger.remembered(names.manifest(record.chain)) or manifest)
        self._ledger.count("written")

    def _place(self, record: ObjectRecord) -> tuple[EpochNames, Manifest | None]:
        """Under which names an object goes, and what is held at its boundary. Raises OrphanError."""
        ledger, digest, parent = self._ledger, record.namespace.digest, record.parent
        for _ in range(TURNS):
            if ledger.epochs.get(digest) is None or ledger.epochs.is_untold(digest):
                ledger.tell_epoch(digest)
            names = ledger.names_of(digest)
            assert names is not None  # it has just been told
            self._wait_for(parent)
            chains = [record.chain] if parent == ROOT_CHAIN else [record.chain, parent]
            held = ledger.manifests(record.namespace, names, chains)
            if ledger.names_of(digest) == names:
                break
        else:
            raise TierError("the pool is being reset", remedy="The object is not written.", code="KV-602")
        if parent != ROOT_CHAIN and held[parent] is None:
            ledger.count("orphans")
            raise OrphanError(
                "the pool does not hold the boundary before this one",
                remedy="Nothing to do: the object would be of no use there.",
            )
        manifest = held[record.chain]
        if manifest is not None and manifest.boundary != boundary_of(record):
            ledger.count("damaged")
            ledger.unremember([names.manifest(record.chain)])
            manifest = None
        return names, manifest

    def _add_row(self, record: ObjectRecord, names: EpochNames, manifest: Manifest | None) -> None:
        ledger, namespace, now_s = self._ledger, record.namespace, self._ledger.clock()
        rows = {**(manifest.rows if manifest is not None else {}), bit_of(record): record.checksum}
        merged = Manifest(boundary_of(record), rows)
        own = names.manifest(record.chain)
        items = {own: pack_manifest(own, merged)}
        length = record.end_tokens - record.start_tokens
        if manifest is None and length % namespace.chunk_tokens:
            name = names.tails(record.parent)
            known = ledger.tails(name, ledger.engine.get_small([name])[0])
            items[name] = pack_tails(name, (length, *known))
        is_due = now_s - self._described.get(namespace.digest, float("-inf")) >= self._describe_every_s
        if is_due:
            items[ledger.names.namespace(namespace.digest)] = canonical(namespace)
        ledger.engine.put_small(items, self._ttl_s)
        ledger.remember(own, merged, now_s)
        if is_due:
            self._described[namespace.digest] = now_s

    @contextmanager
    def _as_under_way(self, chain: bytes) -> Iterator[None]:
        with self._lock:
            self._under_way[chain] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[chain] -= 1
                if not self._under_way[chain]:
                    del self._under_way[chain]
                self._ended.notify_all()

    def _wait_for(self, chain: bytes) -> None:
        """Wait until no write of this boundary is under way."""
        if chain in self._under_way:
            with self._lock:
                self._ended.wait_for(lambda: chain not in self._under_way, PARENT_S)

    def _wait_for_room(self, length_bytes: int) -> None:
        """Keep to the limit on bytes written."""
        if not self._write_bytes_s:
            return
        with self._lock:
            now_s = self._ledger.clock()
            start_s = max(self._free_at_s, now_s)
            self._free_at_s = start_s + length_bytes / self._write_bytes_s
        if start_s > now_s:
            self._sleep(start_s - now_s)


def bit_of(record: ObjectRecord) -> int:
    return record.group * record.namespace.ranks + record.rank


def boundary_of(record: ObjectRecord) -> Boundary:
    return Boundary(record.chain, record.parent, record.start_tokens, record.end_tokens)
