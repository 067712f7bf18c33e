"""Hybrid models whose blocks are shorter than a chunk. The states that vLLM keeps mostly lie inside a chunk there: they
must be found where vLLM's own cache would have found them. Outputs equal those of vLLM's own continuation from there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtally.core.answers import TOLERANCE, compare
from kvtally.core.namespace import GroupKind
from kvtally.testing.engines import Engine, Output, Prompt
from kvtally.testing.models import SMALL_STATES, Model, Recipe
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

BLOCK, CHUNK = SMALL_STATES.block_tokens, 256
LENGTHS = [900, 300, 520, 700, 1000, 333, 650, 810, 450, 960]


@pytest.fixture(scope="module")
def store(store_in: Callable[[Path], StoreProcess], tmp_path_factory: pytest.TempPathFactory) -> StoreProcess:
    return store_in(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def engine(
    store: StoreProcess, tiny_model: Callable[[Recipe, int], Model], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    transfer = dict(store.connector().kv_transfer_config)
    settings = {**tiny_model(SMALL_STATES, 0).settings, "kv_transfer_config": transfer}
    with Engine(settings, tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 900), k=count)


def one(engine: Engine, prompt: Prompt) -> Output:
    return engine.generate([prompt])[0]


def test_a_first_repeat_finds_what_vllms_own_cache_would_have(engine: Engine, store: StoreProcess) -> None:
    prompts = [Prompt(tokens(length, length)) for length in LENGTHS]
    for prompt in prompts:
        one(engine, prompt)
    own = [one(engine, prompt) for prompt in prompts]
    before = store.counters()
    engine.reset()
    ours = [one(engine, prompt) for prompt in prompts]
    after = store.counters()
    assert [output.cached_tokens for output in own] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert [output.cached_tokens for output in ours] == [output.cached_tokens for output in own]
    assert after["receipt_tokens"] - before["receipt_tokens"] == sum(output.cached_tokens for output in own)
    assert after["receipt_bytes"] > before["receipt_bytes"]
    for right, output in zip(own, ours, strict=True):
        assert not compare(right, output, TOLERANCE).problem
    for kind in (GroupKind.RECURRENT, GroupKind.FULL):  # the control: what was restored is what the answer is made of
        engine.reset()
        engine.sabotage(kind)
        spoilt = one(engine, prompts[0])
        assert engine.sabotage(None) > 0
        assert compare(own[0], spoilt, TOLERANCE).problem, kind


def test_a_longer_prompt_goes_on_from_where_a_shorter_one_left_its_state(engine: Engine) -> None:
    beginning = tokens(900, 1)
    one(engine, Prompt(beginning))
    longer = Prompt([*beginning, *tokens(200, 2)])
    own = one(engine, longer)
    engine.reset()
    ours = one(engine, longer)
    assert ours.cached_tokens >= own.cached_tokens == 7 * BLOCK
    engine.reset()
    other = one(engine, Prompt([*beginning, *tokens(200, 3)]))
    assert other.cached_tokens == 7 * BLOCK


def test_where_prompts_part_inside_a_chunk_the_third_finds_the_state(engine: Engine) -> None:
    """vLLM makes a state where the second parts from the first, at a block's end."""
    shared = tokens(2 * CHUNK + BLOCK + 60, 4)
    for seed in (5, 6):
        one(engine, Prompt([*shared, *tokens(300, seed)]))
    third = Prompt([*shared, *tokens(300, 7)])
    engine.reset()
    assert one(engine, third).cached_tokens == 2 * CHUNK + BLOCK
