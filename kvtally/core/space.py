"""Space: which bytes of an arena or a data file are free. Pure arithmetic, one instance per arena or file.

An object is laid into at most `MAX_PIECES` pieces of whole granules, so that nothing is ever lost to holes of the wrong
size: a request that fits no single hole takes the largest ones. The alternative, one contiguous slot per object, needs
either slabs (which strand memory when the mix of models shifts) or moving live objects; pieces cost only an iovec.

Free holes are kept by start, by end (to merge neighbours) and in size classes of four steps per power of two, so that
allocating and freeing take constant time whatever the number of holes.
"""

from __future__ import annotations

from typing import NamedTuple

GRANULE_BYTES = 4096
MAX_PIECES = 16


class Piece(NamedTuple):
    """A run of bytes, `[offset, offset + length)`."""

    offset: int
    length: int


class Space:
    """Free-space bookkeeping for `[0, capacity_bytes)`. Not thread-safe: one owner."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.free_bytes = 0
        self._starts: dict[int, int] = {}  # hole's first byte -> its length
        self._ends: dict[int, int] = {}  # hole's end -> its first byte
        self._classes: dict[
            int, dict[int, None]
        ] = {}  # size class -> first bytes of its holes, in the order of their making
        self._mask = 0  # bit c is set while class c has a hole
        if self.capacity_bytes:
            self._add(0, self.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def allocate(self, length_bytes: int) -> tuple[Piece, ...] | None:
        """Pieces for an object (the last one cut to its length), or None, with nothing changed, if it does not fit."""
        size = round_up(length_bytes)
        start = self.run(size)
        if start is not None:
            return (Piece(start, length_bytes),)
        runs = self._gather(size) if 0 < size <= self.free_bytes else None
        if runs is None:
            return None
        for offset, length in runs:
            self._take(offset, length)
        last_offset, last_length = runs[-1]
        runs[-1] = (last_offset, last_length - (size - length_bytes))
        return tuple(Piece(offset, length) for offset, length in runs)

    def run(self, size_bytes: int) -> int | None:
        """Whole granules in one piece: where they begin, or None, with nothing changed, if no hole is that long."""
        start = self._hole_of(size_bytes) if 0 < size_bytes <= self.free_bytes else None
        if start is not None:
            self._take(start, size_bytes)
        return start

    def free(self, pieces: tuple[Piece, ...]) -> None:
        """Give an object's pieces back."""
        for piece in pieces:
            start, end = piece.offset, piece.offset + round_up(piece.length)
            if end in self._starts:
                end += self._remove(end)
            if start in self._ends:
                start = self._ends[start]
                self._remove(start)
            self._add(start, end - start)

    def check(self) -> None:
        """Assert the invariants: holes are inside, apart, never adjacent, and add up."""
        previous_end = -1
        total = 0
        for start in sorted(self._starts):
            length = self._starts[start]
            assert length > 0 and length % GRANULE_BYTES == 0 and start % GRANULE_BYTES == 0
            assert start > previous_end and start + length <= self.capacity_bytes
            assert self._ends[start + length] == start and start in self._classes[size_class(length)]
            previous_end = start + length
            total += length
        assert total == self.free_bytes and len(self._ends) == len(self._starts)
        assert sum(len(holes) for holes in self._classes.values()) == len(self._starts)

    def _hole_of(self, size: int) -> int | None:
        """A hole that holds `size` whole: one of its own class that is long enough, else any of a higher class."""
        own = size_class(size)
        if self._mask >> own & 1:
            for start in self._newest(own, 8):  # exact fits are common: one model's objects have one size
                if self._starts[start] >= size:
                    return start
        higher = self._mask >> (own + 1)
        if not higher:
            return None
        return self._newest(own + (higher & -higher).bit_length(), 1)[0]

    def _gather(self, size: int) -> list[tuple[int, int]] | None:
        """The largest holes that together hold `size`, or None if that takes more than `MAX_PIECES`."""
        runs: list[tuple[int, int]] = []
        missing = size
        mask = self._mask
        while mask and len(runs) < MAX_PIECES:
            highest = mask.bit_length() - 1
            for start in self._newest(highest, MAX_PIECES - len(runs)):
                taken = min(self._starts[start], missing)
                runs.append((start, taken))
                missing -= taken
                if not missing:
                    return runs
            mask &= ~(1 << highest)
        return None

    def _newest(self, index: int, count: int) -> list[int]:
        """Up to `count` holes of a size class, newest first. By `popitem`, because a dict that is emptied from the
        front is walked over its dead entries again and again."""
        holes = self._classes.get(index)
        if not holes:
            return []
        found = [holes.popitem()[0] for _ in range(min(count, len(holes)))]
        for start in reversed(found):
            holes[start] = None
        return found

    def _take(self, start: int, length: int) -> None:
        """Cut `length` off the front of a hole: `_remove` and `_add` in one, because every put comes this way."""
        hole = self._starts.pop(start)
        self.free_bytes -= length
        index, end, rest = size_class(hole), start + hole, hole - length
        holes = self._classes[index]
        del holes[start]
        if rest:
            self._starts[end - rest] = rest
            self._ends[end] = end - rest
            left = size_class(rest)
            self._classes.setdefault(left, {})[end - rest] = None
            self._mask |= 1 << left
        else:
            del self._ends[end]
        if not holes:
            self._mask &= ~(1 << index)

    def _add(self, start: int, length: int) -> None:
        self._starts[start] = length
        self._ends[start + length] = start
        index = size_class(length)
        self._classes.setdefault(index, {})[start] = None
        self._mask |= 1 << index
        self.free_bytes += length

    def _remove(self, start: int) -> int:
        length = self._starts.pop(start)
        del self._ends[start + length]
        index = size_class(length)
        holes = self._classes[index]
        del holes[start]
        if not holes:
            self._mask &= ~(1 << index)
        self.free_bytes -= length
        return length


def rebuild(capacity_bytes: int, taken: list[Piece]) -> Space:
    """A space in which exactly `taken` is in use. Raises ValueError if two of them overlap or one lies outside."""
    space = Space(0)
    space.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
    position = 0
    for piece in sorted(taken):
        if piece.offset < position or piece.offset % GRANULE_BYTES or piece.length <= 0:
            raise ValueError(f"piece at {piece.offset} overlaps another one or is misaligned")
        if piece.offset > position:
            space._add(position, piece.offset - position)
        position = piece.offset + round_up(piece.length)
    if position > space.capacity_bytes:
        raise ValueError(f"pieces end at {position}, beyond the capacity of {space.capacity_bytes} bytes")
    if position < space.capacity_bytes:
        space._add(position, space.capacity_bytes - position)
    return space


def round_up(length_bytes: int) -> int:
    return -(-length_bytes // GRANULE_BYTES) * GRANULE_BYTES


def size_class(length_bytes: int) -> int:
    """Four classes per power of two of granules; monotonic in the length."""
    granules = length_bytes // GRANULE_BYTES
    bits = granules.bit_length()
    if bits <= 2:
        return granules
    return (bits << 2) | ((granules >> (bits - 3)) & 3)
