"""KVTally in real vLLM, judged by the harness that any connector can be judged by: four shapes of KV cache, each once
through all arms; the tests look at the one report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtally.testing.conformance import Report, judge
from kvtally.testing.engines import Engine, Runs, Server
from kvtally.testing.models import DENSE, GDN, MAMBA, SLIDING, Model, Recipe
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

ARMS = ["cold", "warm", "new engine", "new store"]


class Trial(NamedTuple):
    recipe: Recipe
    restarted: Callable[..., Runs]
    """What the engine is restarted as: scheduler and worker in one process, in several, or behind HTTP."""


TRIALS = [
    Trial(DENSE, partial(Engine, in_process=False)),
    Trial(SLIDING, Engine),
    Trial(GDN, Server),
    Trial(MAMBA, Engine),
]


@pytest.fixture(scope="module", params=TRIALS, ids=lambda trial: trial.recipe.name)
def trial(request: pytest.FixtureRequest) -> Trial:
    chosen: Trial = request.param
    return chosen


@pytest.fixture(scope="module")
def report(
    trial: Trial,
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    directory = tmp_path_factory.mktemp(trial.recipe.name)
    connector = store_in(directory).connector()
    report = judge(connector, tiny_model(trial.recipe, 0), directory, restarted=trial.restarted)
    print(report.table())
    return report


def test_outputs_are_those_without_reuse(report: Report) -> None:
    assert not report.problems, report.table()
    assert [result.arm for result in report.results if result.mode == "alone"] == ARMS
    assert [result.arm for result in report.results if result.mode == "together"] == ARMS


def test_spoilt_blocks_of_every_kind_are_noticed(report: Report, trial: Trial) -> None:
    """The controls have run: without them, equal outputs say nothing."""
    spoilt = {control.name: control for control in report.controls}
    for kind in trial.recipe.kinds:
        assert not spoilt[f"one restored block zeroed, {kind} group"].problem


def test_a_conversation_goes_on_where_it_ended(report: Report) -> None:
    """Not at a block's or a chunk's end before: prompt and answer are saved to the last token that was computed."""
    cases = {case.name: index for index, case in enumerate(report.modes[0].cases)}
    ended = len(report.modes[0].cases[cases["goes on"]].tokens) - 1
    for arm in ARMS:
        outputs = report.result(arm, "alone").outputs
        assert outputs[cases["goes on"]].cached_tokens == ended, arm
        assert outputs[cases["turn 2"]].cached_tokens >= ended, arm


def test_receipts_agree_with_vllm(report: Report) -> None:
    for result in report.results:
        assert result.store["receipts"] == len(result.outputs), result.arm
        assert result.store["receipt_tokens"] == result.external_tokens, result.arm
        assert (result.store["receipt_bytes"] > 0) == (result.external_tokens > 0), result.arm


def test_bytes_come_from_disk_after_a_restart_and_only_then(report: Report) -> None:
    for result in report.results:
        assert (result.store["disk"] > 0) == (result.arm == "new store"), result.arm
        assert (result.store["saved"] > 0) == (result.arm == "cold"), result.arm
