"""Epochs: which of a pool's contents still count, as this store knows it.

    heard ──▶ greater than what is known? ─ yes ─▶ known
                          └ no: the pool has lost a reset, or never knew of it ─▶ untold, until a writer tells it

Of two epochs the greater one counts, always. So a reset that this store has made or heard of holds for this store,
even if the pool forgets it; and the pool is told again. Pure but for its lock: time and randomness are arguments.

Threading: every call may be made from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvtally.store.tiers.pool.format import SALT_BYTES, Epoch


class _Known(NamedTuple):
    epoch: Epoch
    at_s: float  # when the pool was last asked for it


class Epochs:
    """One epoch for each namespace, by its digest."""

    def __init__(self, clock: Callable[[], float], random: Callable[[int], bytes]) -> None:
        self._clock = clock
        self._random = random
        self._lock = threading.Lock()
        self._known: dict[bytes, _Known] = {}
        self._untold: set[bytes] = set()  # the pool says a lower epoch of these, or none
        self._resetting: set[bytes] = set()  # reset here, and the pool was not told yet: what it says is from before

    def get(self, digest: bytes) -> Epoch | None:
        known = self._known.get(digest)
        return known.epoch if known is not None else None

    def age_s(self, digest: bytes) -> float:
        """How long ago the pool was asked."""
        known = self._known.get(digest)
        return self._clock() - known.at_s if known is not None else float("inf")

    def heard(self, digest: bytes, said: Epoch | None) -> None:
        """The pool said this; None: it says nothing of the namespace."""
        with self._lock:
            known = self._known.get(digest)
            if said is not None and (known is None or said >= known.epoch):
                if digest in self._resetting:
                    self._raise(digest, said.number)
                else:
                    self._known[digest] = _Known(said, self._clock())
                    self._untold.discard(digest)
            elif known is not None:
                self._known[digest] = _Known(known.epoch, self._clock())
                self._untold.add(digest)

    def begin(self, digest: bytes) -> Epoch:
        """The epoch to write in: a new one if none is known."""
        with self._lock:
            if digest not in self._known:
                self._raise(digest)
                self._untold.add(digest)
            return self._known[digest].epoch

    def reset(self, digest: bytes) -> None:
        """Nothing from before counts any more."""
        with self._lock:
            self._resetting.add(digest)
            self._untold.add(digest)
            self._raise(digest)

    def untold(self) -> list[bytes]:
        return list(self._untold)

    def is_untold(self, digest: bytes) -> bool:
        return digest in self._untold

    def told(self, digest: bytes, epoch: Epoch) -> None:
        """The pool has been told."""
        with self._lock:
            if self.get(digest) == epoch:
                self._untold.discard(digest)
                self._resetting.discard(digest)

    def _raise(self, digest: bytes, at_least: int = 0) -> None:
        known = self._known.get(digest)
        number = max(at_least, known.epoch.number if known is not None else 0) + 1
        self._known[digest] = _Known(Epoch(number, self._random(SALT_BYTES)), self._clock())
