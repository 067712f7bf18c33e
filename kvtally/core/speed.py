"""How fast a tier delivers, measured so that a few slow reads of a starved processor do not count.

    began, ended ─▶ batch: a few reads, bytes over busy time ─▶ typical: the weighted median of the latest batches

Reads of several threads overlap, so one read alone says little: its time is shared. A *batch* is four reads, or fewer
where the tier ran out of work; its rate is the bytes of all of them over the time in which the tier was busy. A read
that waited three seconds for a processor makes its own batch slow and no other.

Owns the estimate and when it is worth measuring again. Neighbours: `prefetch` (plans by it), `store.load_estimates`
(probes). No clock: times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

BATCH_READS = 4  # what a tier's readers have under way at once: any four reads in a row span one round of theirs
MOST_READS = 16  # in the batches that the estimate is made of
PATIENCE_NS = 2_000_000_000  # with a tier from which nothing comes, beyond what its speed explains
NEW_PATIENCE_NS = 10_000_000_000  # the same, as long as its speed is not known
LARGEST_READ_BYTES = 64 << 20
# How long after the last measurement a tier that was found slow is tried again. Soon, because it may have been starved
# and not slow; but a tier that really is slow is not to spend its time on measurements.
SOONEST_PROBE_NS = 1_000_000_000
LATEST_PROBE_NS = 10_000_000_000
PROBE_PAUSE = 3  # in times of what the last batch took


class Batch(NamedTuple):
    reads: int
    bytes: int
    ns: int

    @property
    def bytes_s(self) -> float:
        return self.bytes / self.ns * 1e9

    def plus(self, other: Batch) -> Batch:
        return Batch(self.reads + other.reads, self.bytes + other.bytes, self.ns + other.ns)


NO_READS = Batch(0, 0, 0)


class Speed:
    """What a tier delivers, all its readers together."""

    def __init__(self) -> None:
        self._bytes_s: float | None = 0.0  # None: a batch has come since it was worked out
        self._batches: deque[Batch] = deque()
        self._open = NO_READS
        self._is_continued = False  # the last batch ended in the middle of the present busy time
        self._busy = 0
        self._since_ns = 0  # the last event
        self._measured_ns: int | None = None

    @property
    def bytes_s(self) -> float:
        """The estimate; 0: not known yet."""
        if self._bytes_s is None:
            self._bytes_s = typical(self._batches)
        return self._bytes_s

    def is_stuck(self, now_ns: int) -> bool:
        """Whether nothing has come for far longer than the largest read takes: the device hangs."""
        patience_ns = NEW_PATIENCE_NS
        if self.bytes_s:
            patience_ns = PATIENCE_NS + int(4 * LARGEST_READ_BYTES / self.bytes_s * 1e9)
        return self._busy > 0 and now_ns - self._since_ns >= patience_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether to measure again, if the tier was found slow."""
        if self._measured_ns is None or not self._batches:
            return True
        pause_ns = PROBE_PAUSE * self._batches[-1].ns
        return now_ns - self._measured_ns >= min(max(pause_ns, SOONEST_PROBE_NS), LATEST_PROBE_NS)

    def began(self, now_ns: int) -> None:
        if not self._busy:
            self._since_ns = now_ns
            self._is_continued = False
        self._busy += 1

    def ended(self, size_bytes: int, now_ns: int) -> None:
        """A read is over. One that failed brought 0 bytes and measures nothing."""
        self._busy -= 1
        if size_bytes:
            self._open = self._open.plus(Batch(1, size_bytes, now_ns - self._since_ns))
            self._measured_ns = now_ns
        self._since_ns = now_ns
        if self._open.ns and (self._open.reads >= BATCH_READS or not self._busy):
            self._close()
        elif self._open.ns and not self._batches:
            self._bytes_s = self._open.bytes_s  # better than nothing

    def _close(self) -> None:
        batch, self._open = self._open, NO_READS
        if self._is_continued and batch.reads < BATCH_READS:
            # The rest of a round whose first reads are in the batch before, and with them the time that it took.
            batch = self._batches.pop().plus(batch)
        self._batches.append(batch)
        self._is_continued = True
        while sum(each.reads for each in self._batches) - self._batches[0].reads >= MOST_READS:
            self._batches.popleft()
        self._bytes_s = None


def typical(batches: Collection[Batch]) -> float:
    """The median of their rates, weighted by bytes. The largest batch weighs no more than all others together, so that
    no single one decides. Of two halves the faster wins: starving makes reads slower, and nothing makes them faster."""
    total = sum(batch.bytes for batch in batches)
    largest = max(batch.bytes for batch in batches)
    limit = min(largest, total - largest) or largest
    total += limit - largest
    weight, is_limited = 0, False
    for batch in sorted(batches, key=lambda batch: batch.bytes_s, reverse=True):
        if batch.bytes == largest and not is_limited:
            weight, is_limited = weight + limit, True
        else:
            weight += batch.bytes
        if 2 * weight >= total:
            return batch.bytes_s
    raise ValueError("no batches")
