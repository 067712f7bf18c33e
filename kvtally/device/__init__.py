"""Copies between an engine's memory and arena slots. One module per kind of memory, each with the same functions:

    fence()                      marks what the engine has queued so far; the engine's thread calls it
    save(memory, moves, after)   engine → slots, once `after` has been reached
    load(memory, moves, after)   slots → engine, likewise

`memory` is one rank's buffer. A `Move` names the blocks that make up an object (`core.geometry`) and the slot.

`save` and `load` are generators, so that one thread can run many of them. Each `next` does or queues a part of the work
and yields 0, or the seconds until it is worth checking what was queued. They return the checksums of the bytes that
were written, into the slots or into the engine's memory; None for moves without a seed. Both raise ValueError for
blocks that do not fit their memory or slot: those are our own bugs, never a store's fault.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvtally.core.geometry import GroupLayout, Runs, runs
from kvtally.shm import Mapping

M_contra = TypeVar("M_contra", contravariant=True)
F = TypeVar("F")


class Move(NamedTuple):
    """One object that is copied between engine memory and its slot. Without a `seed` nothing is hashed. The object's
    first `skip_blocks` blocks are not copied."""

    layout: GroupLayout
    block_ids: Sequence[int]
    pieces: Sequence[memoryview]
    seed: int | None
    skip_blocks: int = 0

    @property
    def runs(self) -> Runs:
        """The bytes of the engine's memory. Computed on each access."""
        return runs(self.layout, self.block_ids, skip_blocks=self.skip_blocks)


Checksums = list[int | None]
Steps = Generator[float, None, Checksums]


class Device(Protocol, Generic[M_contra, F]):
    """The functions of each module here: copies for one kind of memory `M`, ordered after fences `F`."""

    def pin(self, mapping: Mapping | None) -> None:
        """Slots lie in this arena from now on. None: the arena is gone, so release it."""

    def fence(self) -> F: ...

    def save(self, memory: M_contra, moves: Iterable[Move], after: F) -> Steps: ...

    def load(self, memory: M_contra, moves: Iterable[Move], after: F) -> Steps: ...


def finish(steps: Steps) -> Checksums:
    """Run one save or load to its end."""
    while True:
        try:
            if (pause_s := next(steps)) > 0:
                time.sleep(pause_s)
        except StopIteration as end:
            checksums: Checksums = end.value
            return checksums
