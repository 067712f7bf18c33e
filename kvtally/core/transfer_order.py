"""The order in which several transfers use a bus that carries one thing at a time.

The oldest and the shortest take turns. So transfers finish one after the other; if all shared the bus, each would end
as late as the last. A short one does not wait for long ones before it, and a long one gets at least half of the bus,
however many short ones come. Owns the order only. Neighbours: `vllm.worker` (right). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

J = TypeVar("J")

NAMED = 2  # the job whose turn it is, and one for when that has nothing to do: looking at more takes time


@dataclass(slots=True, eq=False)
class _Entry(Generic[J]):
    job: J
    size: int
    is_named: bool = False


class TransferOrder(Generic[J]):
    """Jobs by age, each with its size. A job is known by identity."""

    def __init__(self) -> None:
        self._entries: list[_Entry[J]] = []
        self._is_shortest_first = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job: J, size: int) -> None:
        self._entries.append(_Entry(job, size))

    def remove(self, job: J) -> None:
        self._entries = [entry for entry in self._entries if entry.job is not job]

    def took(self) -> None:
        """A job has used its turn, so the turn passes on. Looking at a job that has nothing to do does not count."""
        self._is_shortest_first = not self._is_shortest_first

    def order(self) -> list[J]:
        """The job whose turn it is, then those for when it has nothing to do: one more, and all that were named before,
        because they may have begun and hold what others wait for."""
        entries = sorted(self._entries, key=attrgetter("size")) if self._is_shortest_first else self._entries
        for entry in entries[:NAMED]:
            entry.is_named = True
        return [entry.job for entry in entries if entry.is_named]
