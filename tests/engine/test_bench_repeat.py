"""`kvtally bench repeat`: its rules on their own, and once with real engines. Times are not judged: machines vary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvtally.bench.engine import Answer
from kvtally.bench.repeat import main
from kvtally.bench.repeat_report import Figures, Outputs, View, agreement, judge, page, view
from kvtally.core.receipts import Half, Role
from kvtally.errors import ConfigError

RUN_S = 600.0


def answer(*tokens: int, logprob: float = -1.0, margin: float = 1.0) -> Answer:
    return Answer(tokens=list(tokens), logprobs=[logprob] * len(tokens), margins=[margin] * len(tokens))


def test_an_answer_is_equal_to_what_was_computed_or_to_the_own_hit() -> None:
    references = [answer(1, 2), answer(1, 3)]
    assert agreement([Outputs(references, [answer(1, 2), answer(1, 3)])]).is_equal
    assert not agreement([Outputs(references, [answer(1, 2), answer(1, 4)])]).is_equal
    assert not agreement([Outputs(references, [answer(1, 2)]), Outputs([answer(5)], [answer(6)])]).is_equal


def test_of_two_tokens_that_are_equally_likely_either_is_right() -> None:
    assert agreement([Outputs([answer(1, 2, margin=1e-3)], [answer(1, 4)])]).is_equal


def test_logprobs_may_be_as_far_off_as_the_engine_is_by_itself() -> None:
    restored = [answer(1, logprob=-1.01)]
    assert not agreement([Outputs([answer(1)], restored)]).is_equal
    found = agreement([Outputs([answer(1), answer(1, logprob=-1.02)], restored)])
    assert found.is_equal
    assert found.difference == pytest.approx(0.01)
    assert found.own_difference == pytest.approx(0.02)


def test_receipts_are_seen_by_their_medians() -> None:
    halves = [
        Half(role=Role.DECODE, tokens_host=512, moved_bytes=10, load_ms=1.0),
        Half(role=Role.DECODE, tokens_host=512, moved_bytes=10, load_ms=3.0),
        Half(role=Role.DECODE, tokens_host=0, moved_bytes=0, load_ms=9.0, reason="deadline"),
    ]
    assert view(halves) == View(tokens_host=512, moved_bytes=10, load_ms=3.0, reasons=["deadline"])


@pytest.mark.parametrize(("repeat_s", "cold_s", "verdicts"), [(1.15, 1.03, [True, True]), (1.2, 1.04, [False, False])])
def test_targets(repeat_s: float, cold_s: float, verdicts: list[bool]) -> None:
    figures = Figures(
        repeat_arena_s=repeat_s, gpu_hit_s=1.0, cold_s=cold_s, cold_no_connector_s=1.0, outputs_equal=True
    )
    assert [target.ok for target in judge(figures)] == [*verdicts, True]


def test_page_shows_misses_and_unequal_outputs() -> None:
    figures = Figures(cold_s=1.0, cold_no_connector_s=0.5, repeat_arena_s=0.2, gpu_hit_s=0.1, load_at_start=3)
    figures.targets = judge(figures)
    console = Console(file=StringIO(), width=100, highlight=False)
    console.print(page(figures))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert text.count("miss") == 2
    assert "NOT equal" in text
    assert "busy" in text


@pytest.mark.parametrize(
    "arguments", [["--fills", "0"], ["--prompt-tokens", "1"], ["--memory", "much"], ["--engine", "[]"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)


@pytest.mark.engine
@pytest.mark.slow
def test_real_engines(tmp_path: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    done = subprocess.run(
        [sys.executable, "-m", "kvtally", "bench", "repeat", "--prompt-tokens", "600", "--fills", "2", "--json"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    figures = json.loads(done.stdout)
    assert figures["outputs_equal"]
    assert figures["prompt_tokens"] == 600
    assert figures["reused_tokens"] == figures["gpu_hit_tokens"] == 512
    arena, disk = figures["receipts"]["arena"], figures["receipts"]["disk"]
    assert (arena["tokens_host"], arena["tokens_disk"], arena["tokens_gpu"]) == (512, 0, 0)
    assert (disk["tokens_host"], disk["tokens_disk"], disk["tokens_gpu"]) == (0, 512, 0)
    assert arena["moved_bytes"] == disk["moved_bytes"] == figures["saved_bytes"] > 0
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in figures["samples"].values())
    assert figures["no_connector_repeat_s"] > 0  # more than a repeat from the arena takes, but that is what is measured
    assert figures["repeat_over_gpu_hit"] == pytest.approx(figures["repeat_arena_s"] / figures["gpu_hit_s"])
    assert figures["cold_over_no_connector"] == pytest.approx(figures["cold_s"] / figures["cold_no_connector_s"])
    assert not list(tmp_path.glob("kvtally-*")), "what was temporary is still there"
