"""What the conformance harness asks an engine, and which outputs it accepts.

Owns the prompts (every awkward length, prompts that diverge from another, conversations, a crowd) and what an output is
compared with; `core.answers` compares. Pure: randomness is an argument. Neighbour: `testing.conformance`, which runs
them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvtally.core.answers import TOLERANCE, Comparison, compare
from kvtally.testing.engines import Output, Prompt
from kvtally.testing.models import VOCABULARY, Recipe

# ---- requests


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt. If it is an earlier prompt with its answer, `continuation` is how the engine itself went on."""

    name: str
    tokens: list[int]
    max_tokens: int = 8
    continuation: Output | None = None
    slack: float = 0.0  # by how much the engine's own logprobs vary here, depending on how it computed its KV

    def prompt(self, salt: str = "") -> Prompt:
        return Prompt(self.tokens, self.max_tokens, salt)


def cases(recipe: Recipe, chunk: int, draw: random.Random) -> list[Case]:
    """Prompts of every awkward length, and prompts that diverge from another inside a chunk or at a boundary."""
    block = recipe.block_tokens
    long = _tokens(draw, 5 * chunk + 37)
    return [
        Case("1", _tokens(draw, 1)),
        Case("30", _tokens(draw, 30)),
        Case("block - 1", _tokens(draw, block - 1)),
        Case("block", _tokens(draw, block)),
        Case("block + 1", _tokens(draw, block + 1)),
        Case("long", long),
        Case("parts inside", long[: 2 * chunk + chunk // 2 + 5] + _tokens(draw, chunk)),
        Case("parts at boundary", long[: 3 * chunk] + _tokens(draw, chunk + 11)),
        # If whole blocks of a chunk changed places, attention would not notice: it sums over all keys, and keys know
        # their positions. This prompt does: it shares only the first block of a chunk.
        Case("parts after a block", long[: 2 * chunk + block] + _tokens(draw, block)),
        Case("turn 1", _tokens(draw, chunk + 3 * block // 4), max_tokens=min(block, 64) + 12),
    ]


def going_on(first: Case, answer: Output, after: int, count: int = 8) -> Case:
    """The prompt with the first `after` tokens of its answer. The rest of the answer says how the engine goes on."""
    rest = slice(after, after + count)
    own = Output(answer.tokens[rest], answer.logprobs[rest], answer.margins[rest], 0)
    return Case("goes on", [*first.tokens, *answer.tokens[:after]], count, own)


def next_turn(first: Case, answer: Output, draw: random.Random) -> Case:
    return Case("turn 2", [*first.tokens, *answer.tokens[: first.max_tokens], *_tokens(draw, 60)])


def crowd(recipe: Recipe, chunk: int, draw: random.Random) -> list[Case]:
    """Eight requests to run at once; four share a prefix."""
    long = _tokens(draw, 4 * chunk + 50)
    return [
        Case("30", _tokens(draw, 30)),
        Case("block + 1", _tokens(draw, recipe.block_tokens + 1)),
        Case("long", long),
        Case("parts inside", long[: chunk + chunk // 2 - 3] + _tokens(draw, chunk)),
        Case("parts at boundary", long[: 2 * chunk] + _tokens(draw, 90)),
        Case("shorter", long[: 3 * chunk + 1]),
        Case("two chunks", _tokens(draw, 2 * chunk)),
        Case("two chunks + 5", _tokens(draw, 2 * chunk + 5)),
    ]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY - 2) for _ in range(count)]


# ---- comparison

DIED = Output([], [], [], 0)  # stands in for the output of an engine that died


def conforms(case: Case, reference: Output, output: Output, tolerance: float) -> Comparison:
    """Compare with what the engine does by itself: a whole prefill, or its own continuation of an answer."""
    if output is DIED:
        return Comparison(problem="the engine died")
    if case.continuation is not None and output.cached_tokens == len(case.tokens) - 1:
        return compare(case.continuation, output, TOLERANCE)
    return compare(reference, output, max(tolerance, case.slack))
