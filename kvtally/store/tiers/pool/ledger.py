"""The ledger: a pool's small things, read and written for the rest of the tier, and what they said lately.

Asks the engine for manifests, tails and epochs, many at once, and decodes them. What is malformed or misplaced counts
as absent, and is counted. Manifests that were read or written in the last seconds are remembered for writers.

Neighbours: `finding`, `writing` and `upkeep` (left: what for), `format` (the bytes), `engines` (right: the server).
Threading: every call may be made from any thread; no lock is held while the engine is asked.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtally.core.namespace import Namespace
from kvtally.store.tiers.engines.base import Engine, Stored
from kvtally.store.tiers.pool.epochs import Epochs
from kvtally.store.tiers.pool.format import (
    EpochNames,
    Manifest,
    Names,
    pack_epoch,
    unpack_epoch,
    unpack_manifest,
    unpack_tails,
)

FRESH_S = 5.0  # how long what the pool said is taken as true by writers
MOST_REMEMBERED = 4_096  # manifests


class Recent:
    """The last few manifests by name, and when they were read. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[str, tuple[float, Manifest]] = OrderedDict()

    def get(self, name: str, since_s: float) -> Manifest | None:
        at_s, manifest = self._held.get(name, (float("-inf"), None))
        return manifest if at_s >= since_s else None

    def put(self, name: str, manifest: Manifest, at_s: float) -> None:
        self._held[name] = (at_s, manifest)
        self._held.move_to_end(name)
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def drop(self, name: str) -> None:
        self._held.pop(name, None)


class Ledger:
    def __init__(
        self,
        engine: Engine,
        names: Names,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self.engine = engine
        self.names = names
        self.clock = clock
        self.epochs = Epochs(clock, random, wall_clock)
        self._lock = threading.Lock()  # guards what follows
        self._counts: Counter[str] = Counter()
        self._recent = Recent(MOST_REMEMBERED)

    # ---- counting

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    # ---- epochs

    def names_of(self, digest: bytes) -> EpochNames | None:
        """Where a namespace's things lie now; None if nobody is known to have written any."""
        epoch = self.epochs.get(digest)
        return self.names.under(digest, epoch) if epoch is not None else None

    def ask_epoch(self, digest: bytes) -> None:
        self.heard(digest, self.engine.get_small([self.names.epoch(digest)])[0])

    def heard(self, digest: bytes, data: bytes | None) -> None:
        """The pool said which epoch it is in."""
        said = unpack_epoch(self.names.epoch(digest), data) if data is not None else None
        if data is not None and said is None:
            self.count("damaged")
        self.epochs.heard(digest, said)

    def tell_epoch(self, digest: bytes) -> None:
        """Tell the pool of an epoch that it does not know, or has lost, unless somebody has told it meanwhile."""
        self.ask_epoch(digest)
        epoch, name = self.epochs.begin(digest), self.names.epoch(digest)
        if self.epochs.is_untold(digest):
            self.engine.put_small({name: pack_epoch(name, epoch)}, 0)
            self.epochs.told(digest, epoch)

    # ---- manifests and tails

    def ask(self, digest: bytes, names: Sequence[str]) -> list[bytes | None]:
        """Ask for these and for the namespace's epoch, in one question."""
        said, *held = self.engine.get_small([self.names.epoch(digest), *names])
        self.heard(digest, said)
        return held

    def manifests(
        self, namespace: Namespace, names: EpochNames, chains: Iterable[bytes]
    ) -> dict[bytes, Manifest | None]:
        """The manifests of these boundaries: those that were heard of lately, the others in one question, with the
        epoch."""
        now_s = self.clock()
        with self._lock:
            found = {chain: self._recent.get(names.manifest(chain), now_s - FRESH_S) for chain in chains}
        missing = {chain: names.manifest(chain) for chain, manifest in found.items() if manifest is None}
        if missing:
            held = self.ask(namespace.digest, list(missing.values()))
            for (chain, name), data in zip(missing.items(), held, strict=True):
                found[chain] = manifest = self.manifest(namespace, name, chain, data)
                if manifest is not None:
                    self.remember(name, manifest, now_s)
        return found

    def remembered(self, name: str) -> Manifest | None:
        with self._lock:
            return self._recent.get(name, self.clock() - FRESH_S)

    def remember(self, name: str, manifest: Manifest, at_s: float) -> None:
        with self._lock:
            self._recent.put(name, manifest, at_s)

    def unremember(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._recent.drop(name)

    def manifest(self, namespace: Namespace, name: str, chain: bytes, data: bytes | None) -> Manifest | None:
        if data is None:
            return None
        manifest = unpack_manifest(name, data, chain, len(namespace.groups) * namespace.ranks)
        if manifest is None:
            self.count("damaged")
        return manifest

    def tails(self, name: str, data: bytes | None) -> tuple[int, ...]:
        lengths = unpack_tails(name, data) if data is not None else ()
        if lengths is None:
            self.count("damaged")
        return lengths or ()


def values_of(
    namespace: Namespace, names: EpochNames, manifest: Manifest, rows: Mapping[int, int] | None = None
) -> list[Stored]:
    """The values that a manifest names, or some rows of it."""
    chain, _, start, end = manifest.boundary
    found = []
    for bit, checksum in (manifest.rows if rows is None else rows).items():
        group, rank = divmod(bit, namespace.ranks)
        length_bytes = namespace.object_bytes(group, rank, end - start)
        found.append(Stored(names.value(chain, group, rank, checksum), length_bytes))
    return found
