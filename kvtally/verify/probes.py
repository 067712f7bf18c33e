"""What `kvtally verify` asks: prompts of random words, with the lengths at which reuse goes wrong.

Reuse breaks at boundaries: a prompt that ends just before, at or after the end of a block or a chunk, one that is
shorter than either, one that continues an earlier one. Pure: the dice are an argument.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from kvtally.core.namespace import chunk_tokens

SHORT_TOKENS = 30
TURN_TOKENS = 40  # that the next turn adds
MAX_TOKENS = 12  # of each answer
_SOUNDS = ("ba", "ke", "li", "mo", "nu", "ra", "si", "to", "vu", "za", "den", "fir", "gol", "hap", "jus", "wen")


class Shape(NamedTuple):
    """The shape of one prompt."""

    name: str
    tokens: int
    is_streamed: bool = False


def shapes(block_tokens: int, limit_tokens: int) -> list[Shape]:
    """The prompts for an engine with this block size and context length; each length once."""
    chunk = chunk_tokens(block_tokens)
    wanted = [
        Shape("short", SHORT_TOKENS),
        *(Shape(f"a block {_off(off)}", block_tokens + off) for off in (-1, 0, 1)),
        *(Shape(f"a chunk {_off(off)}", chunk + off) for off in (-1, 0, 1)),
        Shape("streamed", 2 * chunk + 5, is_streamed=True),
        Shape("long", 4 * chunk + block_tokens // 2 + 3),
    ]
    fitting: dict[int, Shape] = {}
    for shape in wanted:
        if 2 <= shape.tokens <= limit_tokens - 2 * MAX_TOKENS - TURN_TOKENS:
            fitting.setdefault(shape.tokens, shape)
    return sorted(fitting.values(), key=lambda shape: shape.tokens)


def words(dice: random.Random, count: int) -> str:
    """Random text that no cache has seen. Each word is at least one token."""
    return " ".join("".join(dice.choices(_SOUNDS, k=3)) for _ in range(count))


def _off(off: int) -> str:
    return {-1: "less one", 0: "exactly", 1: "and one"}[off]
