"""Upkeep of a pool that any store may write to and any engine may lose things from.

*Kept*: the whole path of a hit lives on, from its first boundary. Without that an engine would first evict what all
stores have in memory and therefore never ask for: the beginning of everybody's prompts.

*Struck*: a row whose value is gone would cost every reader a wasted read, and keep writers from saving it again. So
does a value that does not verify. Rows are taken out, and such a value, by its own name, which can mean no other bytes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvtally.core.namespace import Namespace
from kvtally.errors import TierError
from kvtally.store.tiers.base import Boundary, ObjectRecord
from kvtally.store.tiers.engines.base import Stored
from kvtally.store.tiers.pool.format import EpochNames, pack_manifest
from kvtally.store.tiers.pool.ledger import Ledger, values_of
from kvtally.store.tiers.pool.writing import bit_of

MOST_KEPT = 65_536  # boundaries whose last refresh is remembered
MOST_AMISS = 1_024
STRIKE_S = 1.0  # rows are struck no more often, unless somebody asks for it

Rows = dict[bytes, dict[int, int | None]]  # chain -> bits with the checksums to strike; None: whatever it is


class Amiss(NamedTuple):
    """An object whose value is gone, or is not what it should be."""

    record: ObjectRecord
    is_bad: bool  # the value is there and is to be removed


class Upkeep:
    def __init__(self, ledger: Ledger, *, ttl_s: int, keep_every_s: float) -> None:
        self._ledger = ledger
        self._ttl_s = ttl_s
        self._keep_every_s = keep_every_s
        self._kept: OrderedDict[str, float] = OrderedDict()  # manifest -> when; the oldest first
        self._amiss: deque[Amiss] = deque(maxlen=MOST_AMISS)
        self._struck_s = float("-inf")

    def keep(self, namespace: Namespace, boundaries: Sequence[Boundary]) -> None:
        ledger, digest = self._ledger, namespace.digest
        names = ledger.names_of(digest)
        if names is None or ledger.engine.is_charged:
            return  # charged engines delete by age alone, and each touch would be a request
        due = self._take_due(names, boundaries)
        if not due:
            return
        kept = [Stored(ledger.names.namespace(digest))]
        for chain, manifest in ledger.manifests(namespace, names, due).items():
            if manifest is not None:
                kept += [Stored(names.manifest(chain)), Stored(names.tails(chain))]
                kept += values_of(namespace, names, manifest)
                ledger.count("kept")
        ledger.engine.touch([Stored(ledger.names.epoch(digest))], 0)
        ledger.engine.touch(kept, self._ttl_s)

    def _take_due(self, names: EpochNames, boundaries: Sequence[Boundary]) -> list[bytes]:
        now_s = self._ledger.clock()
        due = []
        for chain in (boundary.chain for boundary in boundaries):
            name = names.manifest(chain)
            if now_s - self._kept.get(name, float("-inf")) >= self._keep_every_s:
                due.append(chain)
                self._kept[name] = now_s
                self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return due

    def note(self, record: ObjectRecord, *, is_bad: bool) -> None:
        """A reader found something amiss; the next writer sees to it."""
        self._amiss.append(Amiss(record, is_bad))

    def beside(self) -> None:
        """What a writer does beside its work, which succeeds or fails without it."""
        with suppress(TierError):
            for digest in self._ledger.epochs.untold():
                self._ledger.tell_epoch(digest)
            if self._amiss and self._ledger.clock() - self._struck_s >= STRIKE_S:
                self.strike_noted()

    def strike_noted(self) -> None:
        self._struck_s = self._ledger.clock()
        bad: list[Stored] = []
        namespaces: dict[bytes, Namespace] = {}
        wanted: dict[bytes, Rows] = {}
        for _ in range(len(self._amiss)):
            record, is_bad = self._amiss.popleft()
            digest = record.namespace.digest
            names = self._ledger.names_of(digest)
            if names is None:
                continue
            namespaces[digest] = record.namespace
            wanted.setdefault(digest, {}).setdefault(record.chain, {})[bit_of(record)] = record.checksum
            if is_bad:
                bad.append(Stored(names.value_of(record), record.length_bytes))
        if bad:
            self._ledger.engine.remove(bad)
        for digest, rows in wanted.items():
            self.strike(namespaces[digest], rows)

    def strike(self, namespace: Namespace, wanted: Mapping[bytes, Mapping[int, int | None]]) -> list[Stored]:
        """Take rows out of manifests. A row that says another checksum by now stays. Returns the values that the rows
        named."""
        ledger = self._ledger
        names = ledger.names_of(namespace.digest)
        if names is None:
            return []
        ledger.unremember(map(names.manifest, wanted))
        values: list[Stored] = []
        empty: list[Stored] = []
        items: dict[str, bytes] = {}
        for chain, manifest in ledger.manifests(namespace, names, wanted).items():
            if manifest is None:
                continue
            struck = dict(_matching(manifest.rows, wanted[chain]))
            rows = {bit: checksum for bit, checksum in manifest.rows.items() if bit not in struck}
            name = names.manifest(chain)
            if struck and rows:
                items[name] = pack_manifest(name, manifest._replace(rows=rows))
            elif struck:
                empty.append(Stored(name))
            values += values_of(namespace, names, manifest, struck)
        ledger.unremember(map(names.manifest, wanted))
        if items:
            ledger.engine.put_small(items, self._ttl_s)
        if empty:
            ledger.engine.remove(empty)
        ledger.count("struck", len(values))
        return values


def _matching(rows: Mapping[int, int], wanted: Mapping[int, int | None]) -> Iterable[tuple[int, int]]:
    for bit, checksum in wanted.items():
        held = rows.get(bit)
        if held is not None and checksum in (None, held):
            yield bit, held
