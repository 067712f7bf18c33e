"""An engine through which everything is sealed: `engines.base.Engine`, with `seal` in front of it.

What does not open counts as absent if it is small; a value that does not open raises KV-403, like one that is cut.
Epochs stay as they are: they outlive keys, they say nothing, and no seal keeps anybody from putting an old one back.
Threading: as the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtally.errors import IntegrityError
from kvtally.store.tiers.engines.base import Condition, Engine, Landed, Listed, Stored, length_of
from kvtally.store.tiers.pool.seal import ForeignKeyError, Seal


class SealedEngine:
    """`engine` behind `seal`; names that begin with `plain` are not sealed. `damaged` is called with each small thing
    that did not open: its name, and whether the key is one that this store does not have."""

    def __init__(self, engine: Engine, seal: Seal, *, plain: str, damaged: Callable[[str, bool], None]) -> None:
        self.name = engine.name
        self.readers = engine.readers
        self.writers = engine.writers
        self.is_charged = engine.is_charged
        self._engine = engine
        self._seal = seal
        self._plain = plain
        self._damaged = damaged
        self._scratch = threading.local()

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        held = self._engine.get_small(names)
        return [self._open(name, data) for name, data in zip(names, held, strict=True)]

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        sealed = {
            name: data if name.startswith(self._plain) else self._sealed(name, data) for name, data in items.items()
        }
        self._engine.put_small(sealed, ttl_s)

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        sealed_bytes = self._seal.sealed_bytes(length_of(target))
        scratch: bytearray | None = getattr(self._scratch, "bytes", None)  # each reader's own
        if scratch is None or len(scratch) < sealed_bytes:
            scratch = self._scratch.bytes = bytearray(sealed_bytes)
        sealed = memoryview(scratch)[:sealed_bytes]
        self._engine.get_into(name, [sealed], lambda _: None)
        self._seal.open_into(name, sealed, target, landed)

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        self._engine.put_from(name, [memoryview(self._seal.seal(name, source))], ttl_s)

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        self._engine.touch(self._lengthened(names), ttl_s)

    def remove(self, names: Sequence[Stored]) -> None:
        self._engine.remove(self._lengthened(names))

    def register(self, memory: memoryview) -> None:
        """Nothing to prepare: values come and go through memory of our own."""

    def names(self, prefix: str) -> Iterator[Listed]:
        return self._engine.names(prefix)

    def condition(self) -> Condition:
        return self._engine.condition()

    def close(self) -> None:
        self._engine.close()

    def _open(self, name: str, data: bytes | None) -> bytes | None:
        if data is None or name.startswith(self._plain):
            return data
        try:
            return self._seal.open(name, memoryview(data))
        except IntegrityError as error:
            self._damaged(name, isinstance(error, ForeignKeyError))
        return None

    def _sealed(self, name: str, data: bytes) -> bytes:
        return bytes(self._seal.seal(name, [memoryview(data)]))

    def _lengthened(self, names: Sequence[Stored]) -> list[Stored]:
        return [Stored(name, self._seal.sealed_bytes(length) if length else 0) for name, length in names]
