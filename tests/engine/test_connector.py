"""The connector in a real vLLM engine (CPU), briefly: restored KV gives the output that vLLM's own prefix cache gives,
a spoilt block of any kind is noticed, and what was saved outlives engine and store. `test_conformance` is longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtally.testing.engines import Engine, Output, Prompt
from kvtally.testing.models import DENSE, GDN, Model, Recipe
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

LENGTHS = (300, 700, 1500)


def prompts() -> list[Prompt]:
    pick = random.Random(5)
    return [Prompt([pick.randrange(10, 900) for _ in range(length)]) for length in LENGTHS]


def one_by_one(engine: Engine, *, resets: bool) -> list[Output]:
    outputs = []
    for prompt in prompts():
        if resets:
            engine.reset()
        outputs += engine.generate([prompt])
    return outputs


def same(left: Output, right: Output) -> bool:
    deviation = max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True))
    return left.tokens == right.tokens and deviation <= 1e-3


@pytest.mark.parametrize("recipe", [DENSE, GDN], ids=lambda recipe: recipe.name)
def test_restored_kv_is_as_good_as_kept_kv(
    recipe: Recipe,
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path: Path,
) -> None:
    store = store_in(tmp_path)
    model = tiny_model(recipe, 0)
    arguments = {**model.settings, "kv_transfer_config": dict(store.connector().kv_transfer_config)}
    with Engine(arguments, tmp_path / "first.log") as engine:
        one_by_one(engine, resets=False)  # saved
        kept = one_by_one(engine, resets=False)  # vLLM's own prefix cache
        restored = one_by_one(engine, resets=True)
        assert all(output.cached_tokens > 0 for output in restored)
        assert [output.cached_tokens for output in restored] == [output.cached_tokens for output in kept]
        assert all(same(a, b) for a, b in zip(kept, restored, strict=True))
        kinds = engine.kinds
    counters = store.counters()
    assert counters["receipt_tokens"] >= sum(output.cached_tokens for output in restored)
    assert counters["receipt_bytes"] > 0
    store.restart()
    with Engine(arguments, tmp_path / "second.log") as engine:
        again = one_by_one(engine, resets=True)
        assert all(same(a, b) for a, b in zip(kept, again, strict=True))
        assert store.counters()["disk"] > 0
        for kind in kinds:
            engine.sabotage(kind)
            spoilt = one_by_one(engine, resets=True)
            assert engine.sabotage(None) > 0
            assert not all(same(a, b) for a, b in zip(kept, spoilt, strict=True)), f"blind to {kind}"
