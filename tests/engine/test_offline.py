"""vLLM as a library: notebooks, batch programs and trainers. Nobody steps such an engine once `generate()` has
returned, so nothing may be left for a later step. It sleeps, wakes and is reset by calls, perhaps for other weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtally.testing.models import DENSE, VOCABULARY, Model, Recipe
from tests.engine.offline import run_offline
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

TOKENS = random.Random(11).choices(range(VOCABULARY - 2), k=700)

TRAINER = """
result = {"computed": ask(given), "reset": llm.reset_prefix_cache()}
settle()
result["restored"] = ask(given)
try:
    raise ValueError("the caller's own")
except ValueError:
    result["other"] = ask(given[::-1])
    result["reset in except"] = llm.reset_prefix_cache()
    settle()
    result["other restored"] = ask(given[::-1])
llm.sleep(level=1)
llm.wake_up()
result["asleep"] = ask(given)
result["reset after sleep"] = llm.reset_prefix_cache()
settle()
result["awake"] = ask(given)
"""
FRESH = """
result = ask(given)
"""


def test_nothing_is_left_for_a_later_step(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path
) -> None:
    store, whole = store_in(tmp_path), len(TOKENS) - 1
    config = {"kv_transfer_config": dict(store.connector().kv_transfer_config)}
    arguments = {**tiny_model(DENSE, 0).settings, **config}
    told = run_offline(TRAINER, arguments, TOKENS, tmp_path / "trainer.log")
    # Each answer's own cache can be reset at once, and the store has all of the prompt.
    assert (told["computed"], told["reset"], told["restored"]) == (0, True, whole)
    assert (told["other"], told["reset in except"], told["other restored"]) == (0, True, whole)
    # It slept, and may have woken with other weights: it takes nothing from before, and goes on by itself.
    assert (told["asleep"], told["reset after sleep"], told["awake"]) == (0, True, whole)
    # Others keep what they had, and find the last answer of a program that has ended.
    assert run_offline(FRESH, arguments, TOKENS, tmp_path / "fresh.log") == whole
    other = TOKENS[:300][::-1]
    assert [run_offline(FRESH, arguments, other, tmp_path / "fresh.log") for _ in range(2)] == [0, len(other) - 1]
