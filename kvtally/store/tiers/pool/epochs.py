"""Epochs: which of a pool's contents still count, as this store knows it.

    heard ──▶ its number is not lower than what is known? ─ yes ─▶ known
                          └ no: the pool has lost a reset, or never knew of it ─▶ untold, until a writer tells it

Of two epochs the one with the greater number counts. So a reset that this store has made or heard of holds for this
store, even if the pool forgets it; and the pool is told again. Of two with one number the pool's counts: both began
empty. But not for a store that has made its own by a reset: what was written in the other one may be from before that,
so it goes on to the next number. Numbers are seconds since 1970 where that is greater: a store that has never heard of
the pool's epoch, because the pool has lost it, still makes one that is later than those of stores that have. For that
the stores' clocks must agree, roughly; nothing else here depends on them.

Pure but for its lock: time and randomness are arguments.

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

    def __init__(
        self, clock: Callable[[], float], random: Callable[[int], bytes], wall_clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._random = random
        self._lock = threading.Lock()
        self._known: dict[bytes, _Known] = {}
        self._untold: set[bytes] = set()  # the pool says a lower epoch of these, or none
        self._reset: set[bytes] = set()  # those whose epoch was made by a reset here
        self._resetting: set[bytes] = set()  # of them, those of which the pool knows nothing yet

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
            epoch = known.epoch if known is not None else None
            if epoch is None and said is None:
                return
            if epoch is not None and (said is None or said.number < epoch.number):
                self._known[digest] = _Known(epoch, self._clock())
                self._untold.add(digest)
            elif said is not None and digest in self._reset and said != epoch and self._must_pass(digest, said):
                self._raise(digest, said.number)
                self._untold.add(digest)
            elif said is not None:
                self._known[digest] = _Known(said, self._clock())
                self._untold.discard(digest)
                if said != epoch:
                    self._reset.discard(digest)

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
            self._reset.add(digest)
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

    def _must_pass(self, digest: bytes, said: Epoch) -> bool:
        """Whether what was written in this epoch may be from before a reset of ours: it is one of the same number, or
        the pool did not know of the reset yet."""
        known = self._known[digest].epoch
        return digest in self._resetting or said.number == known.number

    def _raise(self, digest: bytes, at_least: int = 0) -> None:
        known = self._known.get(digest)
        last = max(at_least, known.epoch.number if known is not None else 0)
        number = max(last + 1, int(self._wall_clock()))
        self._known[digest] = _Known(Epoch(number, self._random(SALT_BYTES)), self._clock())
