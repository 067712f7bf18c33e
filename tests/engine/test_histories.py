"""Receipts say what vLLM did, whatever happened to the request. In random histories requests are preempted, aborted and
resumed, and the cache is reset under them; each receipt is compared with what vLLM's scheduler did and counts itself.

`KVTALLY_TEST_HISTORIES=2000` asks for that many requests in all instead of a few hundred.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvtally.core.receipts import Half, Role
from kvtally.testing.models import DENSE, MAMBA, SLIDING, Model, Recipe
from tests.engine.offline import run_offline
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

REQUESTS = int(os.environ.get("KVTALLY_TEST_HISTORIES", "400"))
PROGRAM = """
from tests.engine.histories import run
result = run(llm, given)
"""
# Blocks for three or four of the longest requests, of the six that come at once.
ENGINES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "dense": (DENSE, {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 128}),
    "sliding": (SLIDING, {"num_gpu_blocks_override": 150, "max_num_batched_tokens": 128}),
    "mamba": (MAMBA, {"num_gpu_blocks_override": 34}),
}


def problem(half: Half, seen: dict[str, Any]) -> str:
    """What is wrong with a receipt. The last attempt before the first token is the one that gave it."""
    reused = seen["attempts"][-1]
    if half.reused_tokens != reused:
        return f"{half} does not add up to {reused} reused tokens"
    if half.computed_tokens != seen["prompt_tokens"] - reused:
        return f"{half} has not {seen['prompt_tokens'] - reused} computed tokens"
    # vLLM's own account is that of the first attempt, and stays so when the request is preempted.
    if not seen["preemptions"] and [half.tokens_gpu, half.loaded_tokens] != seen["stats"]:
        return f"{half} is not {seen['stats']} local and external tokens"
    return ""


@pytest.mark.parametrize("name", ENGINES)
def test_receipts_are_what_vllm_did(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path, name: str
) -> None:
    recipe, settings = ENGINES[name]
    store = store_in(tmp_path)
    config = {"kv_transfer_config": dict(store.connector().kv_transfer_config)}
    arguments = {**tiny_model(recipe, 0).settings, "max_model_len": 1024, **settings, **config}
    given = {"seed": 1, "requests": -(-REQUESTS // len(ENGINES))}
    told = run_offline(PROGRAM, arguments, given, tmp_path / "engine.log")
    answered = {ticket: seen for ticket, seen in told["seen"].items() if seen["stats"] is not None}
    halves = {ticket: store.receipt(ticket) for ticket in answered}
    problems = [f"{ticket}: {wrong}" for ticket, seen in answered.items() if (wrong := problem(halves[ticket], seen))]
    early, late = (sum(seen[key] > 0 for seen in answered.values()) for key in ("preemptions", "later_preemptions"))
    loaded = sum(half.loaded_tokens > 0 for half in halves.values())
    print(
        f"{name}: {len(answered)} answered, {loaded} loaded, {early} preempted before their first token, {late} after, "
        f"{told['aborts']} aborted, {told['resets']} resets"
    )
    assert not problems, problems[:5]
    assert min(early, late, loaded, told["aborts"], told["resets"]) > 0  # all of it did happen


def test_a_wrong_receipt_is_noticed() -> None:
    right = Half(role=Role.DECODE, request="r", prompt_tokens=100, tokens_gpu=16, tokens_host=32, computed_tokens=52)
    seen = {"prompt_tokens": 100, "attempts": [0, 48], "stats": [16, 32], "preemptions": 0}
    assert not problem(right, seen)
    for wrong in ({"tokens_host": 33}, {"computed_tokens": 51}, {"tokens_gpu": 32, "tokens_host": 16}):
        assert problem(replace(right, **wrong), seen)  # type: ignore[arg-type]
