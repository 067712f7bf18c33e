"""Copies between an engine's memory and arena slots. One module per kind of memory, each with the same functions:

    fence() -> a function that waits until everything the engine has queued by now is done
    save(memory, runs, pieces, seed) -> checksum of what was written into the slot
    load(pieces, memory, runs, seed) -> checksum of what landed in the engine

`memory` is one rank's buffer, `runs` say which of its bytes belong to the object (`core.geometry`), `pieces` are the
slot's views in their order. With `seed` None nothing is hashed and the answer is None. Both raise ValueError for runs
that do not fit their memory or slot: those are our own bugs, never a store's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvtally.core.geometry import Runs

M_contra = TypeVar("M_contra", contravariant=True)


class Device(Protocol, Generic[M_contra]):
    """What each module here is: copies for one kind of memory `M`."""

    def fence(self) -> Callable[[], None]: ...

    def save(self, memory: M_contra, runs: Runs, pieces: Sequence[memoryview], seed: int | None) -> int | None: ...

    def load(self, pieces: Sequence[memoryview], memory: M_contra, runs: Runs, seed: int | None) -> int | None: ...
