"""The order of transfers: nobody starves, short ones are not held up, and equals go one after the other."""

from __future__ import annotations

from itertools import cycle, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.transfer_order import TransferOrder

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=8)


class Job:
    def __init__(self, size: int) -> None:
        self.left = size


def play(jobs: list[Job], arrivals: dict[int, Job] | None = None) -> list[Job]:
    """A turn at a time, until all are done; who had each."""
    turns: TransferOrder[Job] = TransferOrder()
    for job in jobs:
        turns.add(job, job.left)
    had: list[Job] = []
    looks_before = cycle((0, 1, 0, 2))
    while len(turns) or (arrivals and max(arrivals) >= len(had)):
        if arrivals and len(had) in arrivals:
            turns.add(arrivals[len(had)], arrivals[len(had)].left)
        looks = next(looks_before)
        assert len({id(turns.order()[0]) for _ in range(looks + 1)}) == 1  # looking changes nothing
        first = turns.order()[0]
        turns.took()
        first.left -= 1
        had.append(first)
        if not first.left:
            turns.remove(first)
    return had


@given(SIZES)
def test_every_job_gets_all_its_turns(sizes: list[int]) -> None:
    jobs = [Job(size) for size in sizes]
    had = play(jobs)
    assert [had.count(job) for job in jobs] == sizes


@given(st.integers(1, 12), st.integers(1, 8))
def test_equals_go_one_after_the_other(size: int, count: int) -> None:
    jobs = [Job(size) for _ in range(count)]
    assert play(jobs) == [job for job in jobs for _ in range(size)]


@given(SIZES)
def test_the_oldest_gets_at_least_half(sizes: list[int]) -> None:
    jobs = [Job(size) for size in sizes]
    had = play(jobs)
    assert len(had[: len(had) - had[::-1].index(jobs[0])]) <= 2 * sizes[0]


@given(st.lists(st.integers(4, 12), min_size=1, max_size=6), st.integers(0, 3))
def test_a_short_one_that_comes_late_waits_for_one_turn_at_most_between_its_own(sizes: list[int], when: int) -> None:
    short = Job(3)
    had = play([Job(size) for size in sizes], {when: short})
    places = [place for place, job in enumerate(had) if job is short]
    assert places[0] - when <= 1
    assert all(later - earlier <= 2 for earlier, later in pairwise(places))


def test_those_behind_are_named_too() -> None:
    turns: TransferOrder[str] = TransferOrder()
    for job, size in (("long", 9), ("longer", 10), ("short", 1), ("middle", 5)):
        turns.add(job, size)
    assert turns.order() == ["long", "longer"]
    turns.took()
    assert turns.order() == ["short", "middle", "long", "longer"]
    turns.remove("short")
    assert len(turns) == 3


@given(st.lists(st.one_of(st.integers(1, 9), st.just(None)), min_size=1, max_size=30))
def test_who_was_named_is_named_until_removed_and_few_are_new(happenings: list[int | None]) -> None:
    turns: TransferOrder[Job] = TransferOrder()
    named: list[Job] = []
    for size in happenings:
        if size is not None:
            turns.add(Job(size), size)
        elif named:
            turns.remove(named.pop(0))
        turns.took()
        order = turns.order()
        assert len(order) >= min(len(turns), 2)
        assert set(named) <= set(order)
        assert len(set(order) - set(named)) <= 2
        named = order
