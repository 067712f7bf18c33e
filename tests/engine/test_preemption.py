"""Too little KV memory for what is asked at once: requests are preempted and go on later, with what the store has of
them. Their outputs are those of requests that had the engine to themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtally.testing.cases import TOLERANCE, compare
from kvtally.testing.engines import Engine, Prompt
from kvtally.testing.models import DENSE, Model, Recipe
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

AT_ONCE = 6
BLOCKS = 44  # enough for some of the requests to the end, not for all


def test_preempted_requests_are_right(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path: Path,
) -> None:
    store = store_in(tmp_path)
    pick = random.Random(4)
    # Prompts that end a little before a block does: answering them takes one block more, which is not there.
    lengths = [256 * (1 + number % 2) - 20 - number for number in range(AT_ONCE)]
    prompts = [Prompt([pick.randrange(10, 900) for _ in range(length)], max_tokens=60) for length in lengths]
    arguments = {
        **tiny_model(DENSE, 0).settings,
        "max_model_len": 1024,
        "num_gpu_blocks_override": BLOCKS,
        "kv_transfer_config": dict(store.connector().kv_transfer_config),
    }
    with Engine(arguments, tmp_path / "engine.log") as engine:
        alone = [engine.generate([replace(prompt, salt=f"alone {n}")])[0] for n, prompt in enumerate(prompts)]
        for _ in range(2):  # computed and saved; then restored
            before = engine.counters()
            outputs = engine.generate(prompts)
            after = engine.counters()
            assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
            for right, output in zip(alone, outputs, strict=True):
                assert not compare(right, output, TOLERANCE).problem
        assert any(output.cached_tokens for output in outputs)
    assert store.stats()["leases"]["open"] == 0
