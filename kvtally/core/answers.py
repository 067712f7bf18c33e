"""When two answers to one prompt count as equal: the one rule for `verify`, the conformance harness and the benches.

Both answers must be greedy: every token is the likeliest one at its place. Reuse must not change an answer. But an
engine that computes the same tokens in other pieces rounds differently, so the caller says by how much logprobs may
differ. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isnan
from typing import Protocol

import msgspec

TOLERANCE = 1e-3  # of a logprob, where the same arithmetic was done


class Answered(Protocol):
    """What is compared of an answer. `margins`: by how much each token's logprob leads the runner-up's."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def margins(self) -> Sequence[float]: ...


def margin(logprobs: Iterable[float]) -> float:
    """By how much the likeliest token leads the runner-up; infinite if there is none."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else inf


class Comparison(msgspec.Struct, frozen=True):
    """An answer beside its reference. `problem` is empty if they are equal as far as anybody can tell."""

    compared_tokens: int = 0  # equal ones, from the first on
    deviation: float = 0.0  # the largest difference of logprobs among them, and at the token where they part
    is_tie: bool = False  # they part where two tokens are equally likely
    problem: str = ""


def compare(reference: Answered, answer: Answered, allowed: float) -> Comparison:
    """Compare token by token, up to the first that differs: after it, the two answer different prompts.

    Where tokens differ, two things follow if no logprob has moved by more than `allowed`. The reference's token led the
    other one by at most twice that, since both may have moved. And the two tokens, each the likeliest of its answer,
    differ in logprob by no more than `allowed`: the largest of many values moves no further than they do. If both hold
    it is a tie, and either token is right.
    """
    if len(reference.tokens) != len(answer.tokens):
        return Comparison(problem=f"it has {len(answer.tokens)} tokens, not {len(reference.tokens)}")
    deviation = 0.0
    for index, (wanted, got) in enumerate(zip(reference.tokens, answer.tokens, strict=True)):
        off = abs(reference.logprobs[index] - answer.logprobs[index])
        deviation = off if isnan(off) else max(deviation, off)
        if wanted != got and reference.margins[index] > 2 * allowed:
            return Comparison(index, deviation, problem=f"token {index} is {got}, not {wanted}")
        if not deviation <= allowed:
            problem = f"the logprob of token {index} is off by {deviation:.2g}, allowed are {allowed:.2g}"
            return Comparison(index, deviation, problem=problem)
        if wanted != got:
            return Comparison(index, deviation, is_tie=True)
    return Comparison(len(answer.tokens), deviation)
