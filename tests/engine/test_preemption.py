"""Little KV memory. Where it is too little for what is asked at once, requests are preempted and go on later, with what
the store has of them. And where the store does not take what is to be saved, blocks that wait for it do not stop the
engine. Outputs are those of requests that had the engine to themselves.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtally.core.answers import TOLERANCE, compare
from kvtally.testing.conformance import ConnectorUnderTest
from kvtally.testing.engines import Engine, Prompt
from kvtally.testing.models import DENSE, Model, Recipe
from tests.engine.store import StoreProcess
from tests.waiting import eventually

pytestmark = pytest.mark.engine

AT_ONCE = 6
BLOCKS = 44  # enough for some of the requests to the end, not for all
STOPPED_PROMPTS = 30  # what they compute is several times the engine's memory


def small_engine(model: Model, connector: ConnectorUnderTest, directory: Path, *, in_process: bool = True) -> Engine:
    arguments = {
        **model.settings,
        "max_model_len": 1024,
        "num_gpu_blocks_override": BLOCKS,
        "kv_transfer_config": dict(connector.kv_transfer_config),
    }
    return Engine(arguments, directory / "engine.log", in_process=in_process)


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
    with small_engine(tiny_model(DENSE, 0), store.connector(), tmp_path) as engine:
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


def test_a_store_that_takes_nothing_does_not_stop_the_engine(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path: Path,
) -> None:
    """The first request waits for the store until its deadline, and so does the first save. Nobody after them does.
    (The engine has processes of its own, which step on between requests, as a server's do.)"""
    store = store_in(tmp_path)
    pick = random.Random(5)
    prompts = [Prompt([pick.randrange(10, 900) for _ in range(500)]) for _ in range(STOPPED_PROMPTS)]
    connector = store.connector(wait_ms=1_000)
    with small_engine(tiny_model(DENSE, 0), connector, tmp_path, in_process=False) as engine:
        right = [engine.generate([replace(prompt, salt="before")])[0] for prompt in prompts[:2]]
        asked_before = store.stats()["lookups"]["total"]
        store.signal(signal.SIGSTOP)
        begun = time.monotonic()
        outputs = [engine.generate([replace(prompt, salt="stopped")])[0] for prompt in prompts]
        stopped_s = time.monotonic() - begun
        store.signal(signal.SIGCONT)
        for before, after in zip(right, outputs, strict=False):
            assert not compare(before, after, TOLERANCE).problem
        # What it finds when it goes on: one lookup for every 5 s, however long the requests took, and not one for each.
        asked = store.stats()["lookups"]["total"] - asked_before
        assert asked <= 2 + stopped_s / 5, (asked, stopped_s)
        assert engine.counters()["vllm:kvtally_saves/left"] > 0

        def is_used() -> bool:
            engine.reset()
            return engine.generate([replace(prompts[0], salt="afterwards")])[0].cached_tokens > 0

        eventually(is_used, "a store that is heard again is used again")
