"""A pool's engine in a dict, for tests and for the simulator: it does everything to a pool that real servers do.

It evicts, forgets, flips bits, is full, fails, hangs and loses the last writes in a failover, on demand; its seed
decides everything random about that. Several pool tiers, of several stores, may share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from kvtally.errors import TierError
from kvtally.store.tiers.engines.base import Condition, Landed, Listed, Stored, absent, length_of, scatter, wrong_length


class MemoryEngine:
    """An `Engine` in memory. Names live until they are removed or evicted: it has no clock of its own unless given one,
    in seconds."""

    name = "memory"
    readers = 2
    writers = 1

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity_bytes: int | None = None,
        evicts: bool = True,
        is_charged: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.random = Random(seed)
        self.capacity_bytes = capacity_bytes
        self.evicts = evicts
        self.is_charged = is_charged
        self.held: dict[str, bytes] = {}  # the least recently used first
        self.ends_s: dict[str, float] = {}
        self.requests = 0  # names asked for, one by one
        self.calls = 0
        self.deleted: list[str] = []  # names that somebody removed
        self.failure: TierError | None = None  # raised by every call until it is taken away
        self.fails_writes: TierError | None = None
        self.before: Callable[[], None] = lambda: None  # called first by every call: may block, raise or change things
        self._clock = clock
        self._replica: dict[str, bytes] | None = None
        self._lock = threading.RLock()

    # ---- faults

    def lose(self, count: int = 1, containing: str = "") -> list[str]:
        """Forget random names, as an eviction does."""
        with self._lock:
            names = [name for name in sorted(self.held) if containing in name]
            lost = self.random.sample(names, min(count, len(names)))
            for name in lost:
                del self.held[name]
            return lost

    def flip(self, name: str) -> None:
        """Flip a random bit of what is held under a name."""
        with self._lock:
            data = bytearray(self.held[name])
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            self.held[name] = bytes(data)

    def replicate(self) -> None:
        """The replica has everything that is held now."""
        with self._lock:
            self._replica = dict(self.held)

    def fail_over(self) -> None:
        """The replica takes over: what was written since `replicate` is lost, what was removed is back."""
        with self._lock:
            self.held = dict(self._replica or {})

    # ---- the contract

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        with self._called():
            self.requests += len(names)
            return [self._get(name) for name in names]

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        with self._called(is_write=True):
            for name, data in items.items():
                self._put(name, data, ttl_s)

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        with self._called():
            self.requests += 1
            data = self._get(name)
        if data is None:
            raise absent(name)
        if len(data) != length_of(target):
            raise wrong_length(name, len(data), length_of(target))
        scatter(memoryview(data), target, landed)

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        with self._called(is_write=True):
            self._put(name, b"".join(source), ttl_s)

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        with self._called(is_write=True):
            for name, _ in names:
                if self._get(name) is not None and ttl_s:
                    self.ends_s[name] = self._clock() + ttl_s

    def remove(self, names: Sequence[Stored]) -> None:
        with self._called(is_write=True):
            for name, _ in names:
                if self.held.pop(name, None) is not None:
                    self.deleted.append(name)

    def register(self, memory: memoryview) -> None:
        """Nothing to prepare."""

    def names(self, prefix: str) -> Iterator[Listed]:
        with self._called():
            found = [Listed(name, len(data), None) for name, data in self.held.items() if name.startswith(prefix)]
        return iter(found)

    def condition(self) -> Condition:
        with self._called():
            used = sum(map(len, self.held.values()))
            eviction = "lru" if self.evicts else "none"
            return Condition(server="memory", used_bytes=used, capacity_bytes=self.capacity_bytes, eviction=eviction)

    def close(self) -> None:
        """Nothing to release: a test can still look at what was written."""

    # ---- the dict

    def _called(self, *, is_write: bool = False) -> threading.RLock:
        """What every call does first; returns the lock to hold for the rest."""
        self.calls += 1
        self.before()
        failure = self.failure or (self.fails_writes if is_write else None)
        if failure is not None:
            raise failure
        return self._lock

    def _get(self, name: str) -> bytes | None:
        if name in self.held and self.ends_s.get(name, float("inf")) <= self._clock():
            del self.held[name]
        data = self.held.pop(name, None)
        if data is not None:
            self.held[name] = data  # the most recently used
        return data

    def _put(self, name: str, data: bytes, ttl_s: int) -> None:
        used = sum(map(len, self.held.values())) if self.capacity_bytes is not None else 0
        used -= len(self.held.pop(name, b""))
        while self.capacity_bytes is not None and used + len(data) > self.capacity_bytes:
            if not self.evicts or not self.held:
                raise TierError("the pool is full", remedy="Give it more memory, or let it evict.", code="KV-601")
            used -= len(self.held.pop(next(iter(self.held))))
        self.held[name] = data
        self.ends_s.pop(name, None)
        if ttl_s:
            self.ends_s[name] = self._clock() + ttl_s
