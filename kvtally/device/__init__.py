"""Copies between an engine's memory and arena slots. One module per kind of memory, each with the same functions:

    fence()                      what the engine has queued by now: called in its own thread
    save(memory, moves, after)   engine → slots, once `after` has been reached
    load(memory, moves, after)   slots → engine, likewise

`memory` is one rank's buffer; a `Move` says of which of its blocks an object is made (`core.geometry`) and where its
slot lies. Both are generators, so that one thread keeps many of them going: each `next` does or queues a part of the
work and yields 0, or the seconds after which it is worth to look again at what was queued. They end with the checksums
of what was written to the slots, or to the engine's memory; None for moves without a seed. Both raise ValueError
for blocks that do not fit their memory or slot: those are our own bugs, never a store's fault.
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
    """One object between engine memory and its slot. With `seed` None nothing is hashed. `skip_blocks` leading blocks
    of the object stay in the slot."""

    layout: GroupLayout
    block_ids: Sequence[int]
    pieces: Sequence[memoryview]
    seed: int | None
    skip_blocks: int = 0

    @property
    def runs(self) -> Runs:
        """Which bytes these are, each time worked out anew."""
        return runs(self.layout, self.block_ids, skip_blocks=self.skip_blocks)


Checksums = list[int | None]
Steps = Generator[float, None, Checksums]


class Device(Protocol, Generic[M_contra, F]):
    """What each module here has: copies for one kind of memory `M`, ordered after fences `F`."""

    def pin(self, mapping: Mapping | None) -> None:
        """The arena that slots lie in from now on; None: it is gone, let go of it."""

    def fence(self) -> F: ...

    def save(self, memory: M_contra, moves: Iterable[Move], after: F) -> Steps: ...

    def load(self, memory: M_contra, moves: Iterable[Move], after: F) -> Steps: ...


def finish(steps: Steps) -> Checksums:
    """Carry out one save or load to its end."""
    while True:
        try:
            if (pause_s := next(steps)) > 0:
                time.sleep(pause_s)
        except StopIteration as end:
            checksums: Checksums = end.value
            return checksums
