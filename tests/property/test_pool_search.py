"""The search for the end of a prompt in a pool where each question costs a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtally.store.tiers.pool.search import search


def run(present: list[bool]) -> list[list[int]]:
    """The rounds of a search over these boundaries."""
    rounds, found = search(len(present)), []
    answers: list[bool] | None = None
    try:
        while True:
            asked = next(rounds) if answers is None else rounds.send(answers)
            found.append(asked)
            answers = [present[index] for index in asked]
    except StopIteration:
        return found


@given(st.integers(0, 700), st.integers(0, 700))
def test_a_prefix_is_found_whole(held: int, count: int) -> None:
    held = min(held, count)
    rounds = run([index < held for index in range(count)])
    asked = [index for each in rounds for index in each]
    assert len(asked) == len(set(asked))  # none twice
    assert set(range(held)) <= set(asked)
    assert held == count or held in asked  # and that it ends there was seen, not guessed
    assert all(rounds)


@given(st.lists(st.booleans(), max_size=300))
def test_holes_end_it_somewhere_true(present: list[bool]) -> None:
    """Whatever is there: the search ends, asks none twice, and has asked for everything before the first hole."""
    rounds = run(present)
    asked = [index for each in rounds for index in each]
    assert len(asked) == len(set(asked))
    whole = next((index for index, is_there in enumerate(present) if not is_there), len(present))
    assert set(range(whole)) <= set(asked)


def test_what_is_not_there_costs_one_request() -> None:
    assert run([False] * 64) == [[0]]
    assert run([]) == []


def test_rounds_and_requests_of_long_prompts() -> None:
    """At 25 ms a round, the longest prompt must be answered well within 200 ms."""
    for count in (64, 512):
        for held in range(count + 1):
            rounds = run([index < held for index in range(count)])
            assert len(rounds) <= 5
            assert sum(map(len, rounds)) <= held + 2 * 9 + 8
