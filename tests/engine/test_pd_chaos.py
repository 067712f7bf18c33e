"""Processes of a P/D deployment killed and stopped in the middle of requests, at seeded moments: a client gets the
right answer or an error that it can tell from one, in time; `kvtally up` brings back what died; nothing stays leased.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from kvtally.testing.deployment import Answer, Deployment, Refused, family
from kvtally.testing.models import DENSE, Model, Recipe

pytestmark = pytest.mark.engine

MOMENTS = 30
AT_ONCE = 3
PATIENCE_S = 240.0  # of a client
# Engines take half a minute to come back, so they are mostly stopped, and killed once each.
BLOWS = [
    *[("store", signal.SIGKILL)] * 6,
    *[("store", signal.SIGSTOP)] * 5,
    *[("router", signal.SIGKILL)] * 5,
    *[("router", signal.SIGSTOP)] * 3,
    *[("prefill-0", signal.SIGSTOP)] * 5,
    *[("decode-0", signal.SIGSTOP)] * 4,
    ("prefill-0", signal.SIGKILL),
    ("decode-0", signal.SIGKILL),
]


class Case(NamedTuple):
    prompt: list[int]
    alone: Answer


@pytest.fixture(scope="module")
def up(tiny_model: Callable[[Recipe, int], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tiny_model(DENSE, 0), tmp_path_factory.mktemp("chaos"), router={"timeout": 30})
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.close()


def cases(up: Deployment) -> list[Case]:
    pick = random.Random(1)
    prompts = [[pick.randrange(10, 900) for _ in range(pick.randrange(100, 1500))] for _ in range(12)]
    return [Case(*up.continued(prompt)) for prompt in prompts]


def ask(up: Deployment, case: Case, *, stream: bool) -> str:
    """What the client is left with, in one word. A truncated or wrong answer is neither of the words allowed."""
    begun = time.monotonic()
    try:
        answer = up.complete(case.prompt, stream=stream)
    except (Refused, OSError, http.client.HTTPException):
        outcome = "error"
    else:
        outcome = "right" if answer.tokens == case.alone.tokens else f"wrong: {answer} is not {case.alone}"
    return outcome if time.monotonic() - begun < PATIENCE_S else "late"


def strike(up: Deployment, target: str, blow: signal.Signals, pick: random.Random) -> None:
    """Kill a process, or stop one for a while. Of an engine any of its processes may be stopped."""
    process = up.pid_of(target)
    if blow is signal.SIGSTOP:
        process = pick.choice(family(process))
    deaths = up.log().count(f"{target}: was killed")
    os.kill(process, blow)
    if blow is signal.SIGSTOP:
        time.sleep(pick.uniform(0.3, 1.5))
        os.kill(process, signal.SIGCONT)
    else:  # so that whoever waits for it to be ready waits for the next one
        up.wait(lambda: up.log().count(f"{target}: was killed") > deaths, f"{target} does not die")


def test_thirty_blows(up: Deployment) -> None:
    known = cases(up)
    blows = list(BLOWS)
    assert len(blows) == MOMENTS
    pick = random.Random(7)
    pick.shuffle(blows)
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, (target, blow) in enumerate(blows):
            requests: list[Future[str]] = [
                pool.submit(ask, up, pick.choice(known), stream=pick.random() < 0.5) for _ in range(AT_ONCE)
            ]
            time.sleep(pick.uniform(0.0, 1.5))
            strike(up, target, blow, pick)
            outcomes = [request.result(PATIENCE_S + 10) for request in requests]
            assert set(outcomes) <= {"right", "error"}, (number, target, blow, outcomes)
            seen.update(f"{target} {blow.name}: {outcome}" for outcome in outcomes)
            up.wait_ready()
    print(dict(seen))
    # A store's death or sleep costs latency, never an answer.
    assert not [what for what in seen if what.startswith("store") and what.endswith("error")], dict(seen)
    assert sum(count for what, count in seen.items() if what.endswith("right")) > MOMENTS
    answer = up.complete(known[0].prompt)
    assert answer.tokens == known[0].alone.tokens
    with up.store() as client:

        def is_quiet() -> bool:
            stats = client.stats().wait()
            return (stats.stats["leases"]["open"], stats.stats["arena"]["limbo_bytes"]) == (0, 0)  # type: ignore[union-attr,index,call-overload]

        up.wait(is_quiet, "slots or leases do not come back")
