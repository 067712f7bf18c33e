"""How to find the end of what a pool holds of a prompt, where every question costs money: S3 and its relatives.

A pool holds a prefix of the prompt's boundaries (a boundary goes in after the one before it), perhaps with holes where
something was evicted. So the end is looked for, not every boundary asked:

    the first alone           most prompts that are not there end here, after one request
    the 2nd, 4th, 8th, …      at once
    a few in the gap          between the last that is there and the first that is not, until the gap is closed;
                              with them, those below, which have to be read anyway

Pure: `search` says what to ask next and is told what was there.
"""

from __future__ import annotations

from collections.abc import Generator

AT_ONCE = 8  # questions into the gap, in one round

Rounds = Generator[list[int], list[bool], None]


def search(count: int) -> Rounds:
    """Yield the boundaries to ask next, by their index; is sent whether each is there. When it ends, each boundary up
    to the last one that was found has been asked, and none twice."""
    if not count:
        return
    (is_there,) = yield [0]
    if not is_there:
        return
    asked = {0}
    low, high = 0, count  # there; not there, or beyond the end
    probes = [size - 1 for size in _doublings(count)]
    while True:
        below = [index for index in range(low) if index not in asked]
        if not below and not probes:
            return
        asked.update(below, probes)
        answers = yield below + probes
        low, high = _narrowed(low, high, probes, answers[len(below) :])
        probes = _spread(low, high)


def _doublings(count: int) -> list[int]:
    sizes, size = [], 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count] if count > 1 else []


def _spread(low: int, high: int) -> list[int]:
    """Up to AT_ONCE indexes strictly between, evenly."""
    gap = high - low - 1
    if gap <= AT_ONCE:
        return list(range(low + 1, high))
    return sorted({low + 1 + gap * step // (AT_ONCE + 1) for step in range(1, AT_ONCE + 1)})


def _narrowed(low: int, high: int, probes: list[int], answers: list[bool]) -> tuple[int, int]:
    """The gap after these answers. Where a hole was met, what lies beyond it is left aside."""
    for index, is_there in zip(probes, answers, strict=True):
        if not is_there:
            return low, index
        low = index
    return low, high
