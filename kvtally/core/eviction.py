"""Eviction: which chain node goes next. Tail first, least recently used among the tails.

A chunk in the middle of a chain is worth nothing without those before it, so a node is a candidate only while no child
of it is resident in the same tier, nothing pins it and nothing is being written to it. Owns the order; what is resident
and what evicting means is `residency`'s.

One heap per tier, entries lazily corrected: using a node only updates its stamp, and the heap notices when the entry
surfaces. A node that is no candidate at that moment leaves the heap and is offered again by the event that makes it
one (last child gone, last pin gone, write ended). Entries gone stale are also swept out whenever the heap has doubled,
so it holds candidates, not every node that ever was one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtally.core.residency import Node


class TailFirst:
    """The candidates of one tier. `is_candidate` is asked again whenever a node surfaces."""

    def __init__(self, tier: int, is_candidate: Callable[[Node], bool]) -> None:
        self._flag = 1 << tier
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, Node]] = []
        self._sequence = 0
        self._sweep_at = 1024

    def offer(self, node: Node) -> None:
        """`node` may have become a candidate. Cheap and idempotent."""
        if not node.queued & self._flag and self._is_candidate(node):
            self._push(node)

    def next(self) -> Node | None:
        """Take the next victim out, or None if nothing may be evicted."""
        while self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued &= ~self._flag
            if not self._is_candidate(node):
                continue
            if node.used != stamp:
                self._push(node)
                continue
            return node
        return None

    def _push(self, node: Node) -> None:
        node.queued |= self._flag
        self._sequence += 1
        heapq.heappush(self._heap, (node.used, self._sequence, node))
        if len(self._heap) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            if self._is_candidate(entry[2]):
                kept.append(entry)
            else:
                entry[2].queued &= ~self._flag
        heapq.heapify(kept)
        self._heap = kept
        self._sweep_at = max(1024, 2 * len(kept))
