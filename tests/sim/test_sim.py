"""Seeded lives of a whole node. A failing seed replays alone: `python -m kvtally.testing.sim SEED`."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvtally.testing.sim import run

FAST_SEEDS = 150
ALL_SEEDS = int(os.environ.get("KVTALLY_SIM_SEEDS", "10000"))
# What must have happened often enough in a batch for its success to mean anything.
COVERED = ("verified", "staged", "rejected", "kill_store", "crash_client", "stop_client", "drop_connection")
COVERED += ("wanted", "cancelled", "slow_tier")
ALSO_COVERED = ("KV-401", "KV-601", "KV-602", "scribble", "bad", "flip_disk", "fail_disk", "staging_failed")


def batch(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed)
    return seen


def test_some_hundred_lives() -> None:
    seen = batch(range(FAST_SEEDS))
    assert all(seen[event] >= 10 for event in COVERED), dict(seen)


@pytest.mark.slow
def test_thousands_of_lives() -> None:
    step = 100
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        seen = sum(pool.map(batch, [range(at, at + step) for at in range(0, ALL_SEEDS, step)]), Counter[str]())
    assert all(seen[event] >= ALL_SEEDS // 125 for event in COVERED + ALSO_COVERED), dict(seen)
    print(f"{ALL_SEEDS} lives: {dict(seen)}")


def test_one_seed_is_one_run() -> None:
    assert run(7) == run(7)
