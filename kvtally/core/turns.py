"""Turns: in which order several transfers get at a bus that carries one thing at a time.

The oldest and the shortest come first, in turn. So one after the other is done, where shares for all would let every
one of them end as late as the last; a short one does not wait for long ones before it, and a long one gets at least
half of the bus, however many short ones come. Owns the order only. Neighbours: `vllm.worker` (right). Pure.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Generic, TypeVar

J = TypeVar("J")


class Turns(Generic[J]):
    """Jobs by age, each with its size. A job is known by identity."""

    def __init__(self) -> None:
        self._jobs: list[tuple[int, J]] = []
        self._is_shortest_first = False

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: J, size: int) -> None:
        self._jobs.append((size, job))

    def remove(self, job: J) -> None:
        self._jobs = [(size, known) for size, known in self._jobs if known is not job]

    def took(self) -> None:
        """Somebody has used the turn. Only then it passes on: looks that find nothing to do do not count."""
        self._is_shortest_first = not self._is_shortest_first

    def order(self) -> list[J]:
        """All jobs, the one first whose turn it is; those behind it are for when it has nothing to do."""
        jobs = sorted(self._jobs, key=itemgetter(0)) if self._is_shortest_first else self._jobs
        return [job for _, job in jobs]
