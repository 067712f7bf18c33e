"""The harness itself, without vLLM: what it takes for equal, what it asks, and that its processes end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtally.core.answers import Comparison, compare
from kvtally.errors import TransportError
from kvtally.testing import nursery as nurseries
from kvtally.testing.cases import Case, cases, conforms, crowd, going_on, next_turn
from kvtally.testing.conformance import Control, Report, Result
from kvtally.testing.engines import Engine, Output, ProcessGroup, sums
from kvtally.testing.models import RECIPES, Recipe
from tests.waiting import HANG_S, eventually

REFERENCE = Output(tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], margins=[0.5, 0.001, 0.5], cached_tokens=0)


def output(tokens: list[int], logprobs: list[float]) -> Output:
    return Output(tokens=tokens, logprobs=logprobs, margins=[0.5] * len(tokens), cached_tokens=0)


def test_equal_outputs_conform() -> None:
    assert compare(REFERENCE, REFERENCE, 0.001) == Comparison(3, 0.0)
    close = compare(REFERENCE, output([1, 2, 3], [-1.0, -2.0005, -3.0]), 0.001)
    assert not close.problem
    assert close.deviation == pytest.approx(0.0005)


def test_another_logprob_or_token_does_not_conform() -> None:
    off = compare(REFERENCE, output([1, 2, 3], [-1.0, -2.01, -3.0]), 0.001)
    assert "logprob of token 1 is off by 0.01" in off.problem
    assert compare(REFERENCE, output([1, 2, 4], [-1.0, -2.0, -3.0]), 0.001).problem == "token 2 is 4, not 3"


def test_a_tie_may_be_broken_either_way_and_ends_the_comparison() -> None:
    tie = compare(REFERENCE, output([1, 9, 7], [-1.0, -2.0005, -9.0]), 0.001)
    assert (tie.is_tie, tie.problem, tie.compared_tokens) == (True, "", 1)
    assert compare(REFERENCE, output([1, 9, 7], [-1.0, -2.0005, -9.0]), 0.0004).problem  # no tie at this tolerance
    assert compare(REFERENCE, output([1, 9, 7], [-1.0, -2.5, -9.0]), 0.001).problem  # nor with such a logprob


def test_who_reuses_all_but_one_token_is_compared_with_the_engines_own_continuation() -> None:
    continuation = output([1, 2, 3], [-1.1, -2.1, -3.1])
    case = Case("goes on", [5] * 10, 3, continuation, slack=0.2)
    restored = msgspec.structs.replace(continuation, cached_tokens=9)
    assert conforms(case, REFERENCE, restored, 0.001).deviation == 0.0
    assert conforms(case, REFERENCE, msgspec.structs.replace(REFERENCE, cached_tokens=9), 0.001).problem
    partly = conforms(case, REFERENCE, msgspec.structs.replace(continuation, cached_tokens=8), 0.001)
    assert (partly.problem, partly.deviation) == ("", pytest.approx(0.1))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_awkward_length_is_asked(recipe: Recipe) -> None:
    block, chunk, draw = recipe.block_tokens, 256, random.Random(0)
    asked = {case.name: case for case in cases(recipe, chunk, draw)}
    lengths = {len(case.tokens) for case in asked.values()}
    assert lengths >= {1, 30, block - 1, block, block + 1}
    assert len(asked["long"].tokens) > 5 * chunk > 2 * recipe.window_tokens
    assert shared(asked["long"], asked["parts at boundary"]) % chunk == 0
    assert shared(asked["long"], asked["parts inside"]) % block > 0
    first = asked["turn 1"]
    answer = output([7] * first.max_tokens + [8, 9], [-1.0] * (first.max_tokens + 2))
    on, turn = going_on(first, answer, first.max_tokens, 2), next_turn(first, answer, draw)
    assert on.tokens == first.tokens + answer.tokens[:-2]
    assert on.continuation is not None
    assert on.continuation.tokens == [8, 9]
    assert turn.tokens[: len(on.tokens)] == on.tokens
    at_once = crowd(recipe, chunk, draw)
    assert len(at_once) == 8
    assert not {tuple(case.tokens[:8]) for case in at_once} & {tuple(case.tokens[:8]) for case in asked.values()}


def shared(one: Case, other: Case) -> int:
    return next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)


def test_the_report_says_what_is_wrong() -> None:
    result = Result(
        arm="warm",
        mode="alone",
        outputs=[REFERENCE],
        comparisons=[Comparison(1, 0.5, problem="token 1 is 9, not 2")],
        external_tokens=0,
        store={},
        problems=["'30': token 1 is 9, not 2"],
    )
    report = Report("Some", "dense", results=[result], controls=[Control("spoilt", 0.0, "unseen")], errors=["died"])
    assert report.problems == ["warm, alone: '30': token 1 is 9, not 2", "spoilt: unseen", "died"]
    assert "DOES NOT CONFORM" in report.table()
    assert report.result("warm", "alone") is result
    assert "CONFORMS" in Report("Some", "dense").table()


def test_counters_are_summed_over_engines_and_kept_apart_by_other_labels() -> None:
    samples = [
        ("vllm:tokens", {"engine": "0", "model_name": "m", "source": "disk"}, 1.0),
        ("vllm:tokens", {"engine": "1", "model_name": "m", "source": "disk"}, 2.0),
        ("vllm:tokens", {"engine": "0", "source": "host"}, 5.0),
        ("vllm:cache_config_info", {"engine": "0"}, 1.0),
        ("python_gc", {}, 1.0),
    ]
    assert sums(samples) == {"vllm:tokens/disk": 3.0, "vllm:tokens/host": 5.0}


# A process that starts another and ignores SIGTERM, as a server does that hangs while it shuts down.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("ready", file=sys.stderr, flush=True)
time.sleep(1000)
"""
# A test process that has such an engine, and hangs.
PARENT = """
import sys, time
from pathlib import Path
from kvtally.testing import engines
group = engines.ProcessGroup(["guard", sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {}, grace_s=0.5)
time.sleep(1000)
"""


def processes(mark: str) -> list[int]:
    """Those that were started with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found


def test_no_engine_outlives_its_test(tmp_path: Path) -> None:
    """Not even if the test's process is killed and the engine does not listen."""
    mark = f"mark-{tmp_path}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "KVTALLY_TEST_MARK": mark}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN, str(tmp_path / "log")], env=environment)
    try:
        # The parent, the nursery, the runner, the stubborn one and its child.
        eventually(lambda: len(processes(mark)) == 5, "all of them ran")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(HANG_S)
    eventually(lambda: not processes(mark), "all of them ended")


def test_a_group_that_listens_ends_in_order(tmp_path: Path) -> None:
    script = "import time\ntry:\n    time.sleep(1000)\nfinally:\n    print('in order', flush=True)"
    obedient = (
        f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); print('up', flush=True)\n{script}"
    )
    log = tmp_path / "log"
    group = ProcessGroup(["guard", sys.executable, "-c", obedient], log, {})
    eventually(lambda: "up" in log.read_text(), "it ran")
    group.close()
    assert log.read_text().splitlines() == ["up", "in order"]


# A command that lives until it is told to end, and says who it is.
PATIENT = "import sys, time; print(sys.argv[1], flush=True); time.sleep(1000)"


def test_orders_of_several_threads_are_not_mixed_up(tmp_path: Path) -> None:
    def order(name: str) -> tuple[str, ProcessGroup]:
        return name, ProcessGroup(["guard", sys.executable, "-c", PATIENT, name], tmp_path / name, {}, grace_s=0.1)

    with ThreadPoolExecutor(8) as pool:
        ordered = list(pool.map(order, [f"r{number}" for number in range(16)]))
    for name, group in ordered:
        eventually(lambda name=name: (tmp_path / name).read_text().split() == [name])
        children = Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split()
        assert any(name in Path(f"/proc/{child}/cmdline").read_text() for child in children)
    for _, group in ordered:
        group.kill()


def test_a_group_can_be_killed_as_soon_as_it_is_there(tmp_path: Path) -> None:
    for number in range(5):
        group = ProcessGroup(["guard", sys.executable, "-c", PATIENT, str(number)], tmp_path / "log", {})
        group.kill()
        assert group.has_ended(0)


def test_an_order_that_fails_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="at most"):
        ProcessGroup(["guard", "x" * (1 << 18)], tmp_path / "log", {})
    before = len(os.listdir("/proc/self/fd"))
    failing = nurseries.nursery(0)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", lambda *_: (_ for _ in ()).throw(TimeoutError("too late")))
        with pytest.raises(TransportError, match="too late"):
            ProcessGroup(["guard", sys.executable, "-c", PATIENT, "late"], tmp_path / "log", {})
    assert len(os.listdir("/proc/self/fd")) == before - 1  # that nursery's socket, and no other
    assert nurseries.nursery(0) is not failing
    group = ProcessGroup(["guard", sys.executable, "-c", PATIENT, "next"], tmp_path / "next", {}, grace_s=0.1)
    eventually(lambda: (tmp_path / "next").read_text() == "next\n")
    group.kill()


@pytest.mark.engine
def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    engine = Engine({"model": str(tmp_path / "nowhere")}, tmp_path / "log")
    try:
        with pytest.raises(TransportError, match="the engine ended"):
            engine.wait_ready()
    finally:
        engine.close()
