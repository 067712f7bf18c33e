"""The comparer of answers: noise within the bound passes, one logprob beyond it does not."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.answers import Comparison, compare, margin
from kvtally.testing.cases import DIED, Case, conforms
from kvtally.testing.engines import Output

VOCABULARY = 5


class Said(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def greedy(steps: list[list[float]]) -> Said:
    """What an engine says whose tokens have these logprobs at each step."""
    tokens = [max(range(VOCABULARY), key=step.__getitem__) for step in steps]
    ranked = [sorted(step, reverse=True) for step in steps]
    return Said(tokens, [step[0] for step in ranked], [step[0] - step[1] for step in ranked])


# Sixteenths are exact, and so are their sums: no rounding of the test's own decides.
sixteenths = st.integers(-320, 0).map(lambda count: count / 16)
steps = st.lists(st.lists(sixteenths, min_size=VOCABULARY, max_size=VOCABULARY), min_size=1, max_size=6)


@st.composite
def moved(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], float]:
    """Logprobs, the same moved by a bounded noise, and the bound."""
    before = draw(steps)
    bound = draw(st.integers(0, 32))
    noise = st.integers(-bound, bound).map(lambda count: count / 16)
    return before, [[value + draw(noise) for value in step] for step in before], bound / 16


@given(moved())
def test_noise_within_the_bound_is_no_problem(case: tuple[list[list[float]], list[list[float]], float]) -> None:
    before, after, bound = case
    reference, answer = greedy(before), greedy(after)
    found = compare(reference, answer, bound)
    assert found.problem == ""
    assert found.deviation <= bound
    assert found.is_tie == (reference.tokens != answer.tokens)


@given(moved())
def test_what_passes_has_equal_tokens_up_to_a_tie(case: tuple[list[list[float]], list[list[float]], float]) -> None:
    before, after, bound = case
    reference, answer = greedy(before), greedy(after)
    found = compare(reference, answer, bound / 2)
    same = found.compared_tokens
    assert reference.tokens[:same] == answer.tokens[:same]
    if not found.problem and not found.is_tie:
        assert reference.tokens == answer.tokens


@given(steps, st.data())
def test_one_logprob_beyond_the_bound_is_a_problem(before: list[list[float]], data: st.DataObject) -> None:
    reference = greedy(before)
    index = data.draw(st.integers(0, len(before) - 1))
    logprobs = list(reference.logprobs)
    logprobs[index] += data.draw(st.sampled_from([-1, 1])) * 3 / 16
    answer = reference._replace(logprobs=logprobs)
    found = compare(reference, answer, 2 / 16)
    assert (f"token {index} " in found.problem, found.compared_tokens, found.deviation) == (True, index, 3 / 16)
    assert compare(reference, answer, 3 / 16).problem == ""


@given(steps, st.data())
def test_a_token_that_was_not_close_is_a_problem_however_likely_it_claims_to_be(
    before: list[list[float]], data: st.DataObject
) -> None:
    reference = greedy(before)
    index = data.draw(st.integers(0, len(before) - 1))
    reference = reference._replace(margins=[5 / 16] * len(before))
    tokens = [*reference.tokens[:index], reference.tokens[index] + 1, *reference.tokens[index + 1 :]]
    found = compare(reference, reference._replace(tokens=tokens), 2 / 16)
    assert found.problem == f"token {index} is {reference.tokens[index] + 1}, not {reference.tokens[index]}"


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
@pytest.mark.parametrize("allowed", [1e-3, math.inf])
def test_what_is_no_number_is_never_equal(wrong: float, allowed: float) -> None:
    reference = Said([1, 2], [-0.5, wrong], [1.0, 1.0])
    assert compare(reference, reference, allowed).problem
    assert compare(reference._replace(logprobs=[-0.5, -0.5]), reference, 1e-3).problem


def test_the_two_users_agree_on_a_tie_whose_logprob_is_too_far_off() -> None:
    """`verify` took it for a tie, the conformance harness for a failure. It is a failure: the likeliest token's logprob
    cannot move further than all tokens' do."""
    reference = Output([1, 2], [-1.0, -2.0], [1.0, 0.0015], 0)
    answer = Output([1, 3], [-1.0, -2.0012], [1.0, 0.0], 0)
    found = compare(reference, answer, 1e-3)
    assert "the logprob of token 1 is off by 0.0012" in found.problem
    assert conforms(Case("", []), reference, answer, 1e-3) == found
    assert compare(reference, Output([1, 3], [-1.0, -2.0008], [1.0, 0.0], 0), 1e-3).is_tie


def test_an_engine_that_died_says_nothing() -> None:
    assert conforms(Case("", []), Output([1], [0.0], [1.0], 0), DIED, 1.0) == Comparison(problem="the engine died")


@pytest.mark.parametrize(
    ("logprobs", "expected"), [([-0.5, -2.0, -1.0], 0.5), ([-1.0, -1.0], 0.0), ([-0.5], math.inf), ([], math.inf)]
)
def test_a_margin_is_the_lead_over_the_runner_up(logprobs: list[float], expected: float) -> None:
    assert margin(logprobs) == expected
