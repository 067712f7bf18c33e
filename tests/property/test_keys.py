"""Chain values and seeds: equal exactly where the identity is equal, in every process.

The oracle is the identity itself, spelled out: a chain value names the list of (a chunk's tokens, a chunk's extra) from
the start of the prompt. Nothing else may enter, and nothing of it may be lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.keys import (
    CHAIN_BYTES,
    ROOT_CHAIN,
    ObjectKey,
    chain_value,
    chain_values,
    checksum_seed,
    chunk_ends,
    chunk_extra,
    token_bytes,
)
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "keys.json"

token_ids = st.integers(0, 2**32 - 1)
few_tokens = st.sampled_from([0, 1, 2, 255, 256, 2**32 - 1])  # small alphabet: equal prefixes must be common
extras = st.sampled_from(
    [b"", b"\0", b"a", chunk_extra(salt="a"), chunk_extra(lora="a"), token_bytes([0]), token_bytes([1])]
)


class Prompt(NamedTuple):
    tokens: list[int]
    ends: list[int]
    extras: dict[int, bytes]

    def identity(self, index: int) -> tuple[tuple[tuple[int, ...], bytes], ...]:
        """What the chain value at `index` stands for."""
        spans = pairwise([0, *self.ends[: index + 1]])
        return tuple((tuple(self.tokens[a:b]), self.extras.get(i, b"")) for i, (a, b) in enumerate(spans))

    def chains(self) -> list[bytes]:
        return chain_values(token_bytes(self.tokens), self.ends, self.extras)


@st.composite
def prompts(draw: st.DrawFn, tokens: st.SearchStrategy[int] = few_tokens) -> Prompt:
    ids = draw(st.lists(tokens, min_size=1, max_size=8))
    ends = sorted(draw(st.sets(st.integers(1, len(ids)), min_size=1)))
    return Prompt(ids, ends, draw(st.dictionaries(st.integers(0, len(ends) - 1), extras)))


@given(prompts(), prompts())
def test_two_chains_are_equal_exactly_where_their_prefixes_are(one: Prompt, other: Prompt) -> None:
    named: dict[bytes, object] = {}
    for prompt in (one, other):
        for index, chain in enumerate(prompt.chains()):
            assert len(chain) == CHAIN_BYTES
            assert named.setdefault(chain, prompt.identity(index)) == prompt.identity(index)
    identities = {prompt.identity(index) for prompt in (one, other) for index in range(len(prompt.ends))}
    assert len(named) == len(identities)


@given(prompts(token_ids), st.lists(token_ids, min_size=1, max_size=4), extras)
def test_what_follows_a_boundary_does_not_change_it(prompt: Prompt, more: list[int], extra: bytes) -> None:
    longer = Prompt(prompt.tokens + more, [*prompt.ends, len(prompt.tokens) + len(more)], dict(prompt.extras))
    longer.extras[len(prompt.ends)] = extra
    assert longer.chains()[:-1] == prompt.chains()


@given(prompts(token_ids), st.data())
def test_walking_on_gives_the_same_chain_as_one_walk(prompt: Prompt, data: st.DataObject) -> None:
    """A connector extends a request's chain as tokens arrive: how the walk was cut up must not show."""
    packed = token_bytes(prompt.tokens)
    walked: list[bytes] = []
    while len(walked) < len(prompt.ends):
        done = len(walked)
        upto = data.draw(st.integers(done + 1, len(prompt.ends)))
        walked += chain_values(
            packed,
            prompt.ends[done:upto],
            {index - done: extra for index, extra in prompt.extras.items()},
            previous=walked[-1] if walked else ROOT_CHAIN,
            start=prompt.ends[done - 1] if done else 0,
        )
    assert walked == prompt.chains()


@given(prompts(token_ids))
def test_a_walk_is_a_fold_of_single_steps(prompt: Prompt) -> None:
    chain = ROOT_CHAIN
    for index, (start, end) in enumerate(pairwise([0, *prompt.ends])):
        chain = chain_value(chain, token_bytes(prompt.tokens[start:end]), prompt.extras.get(index, b""))
        assert chain == prompt.chains()[index]


def test_the_formula_is_the_documented_one() -> None:
    """Other languages compute it too: blake3 of previous, u32 count, u32 ids, extra, all little-endian."""
    spelled_out = bytes.fromhex("11" * 32 + "02000000" + "01000000" + "70110100") + b"extra"
    assert chain_value(b"\x11" * 32, token_bytes([1, 70_000]), b"extra") == blake3(spelled_out).digest()
    assert bytes(32) == ROOT_CHAIN


@given(st.lists(token_ids, min_size=1, max_size=6), st.integers(1, 3))
def test_the_token_count_keeps_tokens_and_extra_apart(tokens: list[int], moved: int) -> None:
    """The last tokens given as `extra` make the same bytes, but another identity."""
    split = max(0, len(tokens) - moved)
    assert chain_value(ROOT_CHAIN, token_bytes(tokens)) != chain_value(
        ROOT_CHAIN, token_bytes(tokens[:split]), token_bytes(tokens[split:])
    )


@pytest.mark.parametrize("ends", [[3], [2, 2], [2, 1], [0], [1, 3]])
def test_a_prefix_that_is_not_there_has_no_name(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        chain_values(token_bytes([7, 8]), ends)


def test_a_walk_may_not_start_after_its_first_end() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        chain_values(token_bytes([7, 8, 9]), [2], start=3)


@given(st.integers(0, 2_000), st.integers(1, 600))
def test_chunk_ends_are_the_multiples_within_the_length(length: int, chunk: int) -> None:
    assert chunk_ends(length, chunk) == [end for end in range(1, length + 1) if end % chunk == 0]


class Extra(NamedTuple):
    lora: str
    items: tuple[tuple[int, bytes], ...]
    embeds: bytes
    salt: str

    def encoded(self) -> bytes:
        return chunk_extra(lora=self.lora, items=self.items, embeds=self.embeds, salt=self.salt)


# Words that could be mistaken for the encoding's own, so that a missing length or label would show.
words = st.sampled_from(["", "a", "lora", "salt", "item", "embeds", "\x04\0\0\0salt", "\ud800"]) | st.text(max_size=3)
blobs = st.sampled_from([b"", b"item", b"\x04\0\0\0item", bytes(32)]) | st.binary(max_size=3)
extra_records = st.builds(
    Extra, words, st.lists(st.tuples(st.integers(0, 3), blobs), max_size=3).map(tuple), blobs, words
)


@given(extra_records, extra_records)
def test_extra_is_injective(one: Extra, other: Extra) -> None:
    assert (one.encoded() == other.encoded()) == (one == other)


def test_extra_is_empty_only_where_there_is_nothing() -> None:
    assert chunk_extra() == b""
    assert chunk_extra(lora="x")
    assert chunk_extra(salt="x")
    assert chunk_extra(embeds=b"x")
    assert chunk_extra(items=[(0, b"")])


digests = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, 2**32 - 1)
seed_inputs = st.tuples(st.builds(ObjectKey, digests, digests, u32, u32), st.integers(0, 2**64 - 1))


@given(seed_inputs, seed_inputs)
def test_seeds_differ_with_every_component(one: tuple[ObjectKey, int], other: tuple[ObjectKey, int]) -> None:
    """Take the components of `other` into `one`, one at a time: the seed changes exactly where the component does."""
    key, length = one
    assert 0 <= checksum_seed(key, length) < 2**64
    for field in ObjectKey._fields:
        changed = key._replace(**{field: other[0]._asdict()[field]})
        assert (checksum_seed(changed, length) == checksum_seed(key, length)) == (changed == key)
    assert (checksum_seed(key, other[1]) == checksum_seed(key, length)) == (other[1] == length)
    swapped = key._replace(group=key.rank, rank=key.group)
    assert (checksum_seed(swapped, length) == checksum_seed(key, length)) == (swapped == key)


def golden_values() -> dict[str, object]:
    """Values of every function that names something; this file also runs as a script, in other processes."""
    tokens = [0, 1, 2, 3, 70_000, 2**32 - 1, 5, 6]
    extra = chunk_extra(lora="adapter", items=[(3, b"\x01\x02")], embeds=b"\xff", salt="tenant")
    chains = chain_values(token_bytes(tokens), [4, 6, 7], {0: extra, 2: chunk_extra(lora="adapter")})
    key = ObjectKey(bytes(range(32)), chains[-1], 3, 1)
    return {
        "extra": extra.hex(),
        "tokens": token_bytes(tokens).hex(),
        "one_token": chain_value(ROOT_CHAIN, token_bytes([1])).hex(),
        "chains": [chain.hex() for chain in chains],
        "checksum_seed": checksum_seed(key, 71_680),
    }


def test_identity_has_not_changed() -> None:
    """If this fails, what was stored is no longer found: raise `namespace.FORMAT_VERSION`, then write the file anew."""
    assert golden_values() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("hash_seed", ["0", "random"])
def test_identity_does_not_depend_on_the_process(hash_seed: str) -> None:
    finished = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        timeout=HANG_S,
    )
    assert json.loads(finished.stdout) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    print(json.dumps(golden_values(), indent=1))
