"""Two machines under blows, at moments drawn from a seed, while requests are under way: stores and engines are killed,
stopped and restarted, one store comes back with another token, the link between the stores is cut, half cut or slow.

Every answer is right, in time, and only a decode engine that was killed itself may owe one. Whatever is broken, decode
computes what it does not get. After each blow prompts are pulled again, and in the end nothing is left over.

The link between the stores is broken only where the machines are network namespaces (`tests.engine.machines`); there,
the way of requests to the engines is another one. Each blow either passes while requests are under way, or lasts until
the requests that were sent meanwhile are answered.
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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import pytest

from kvtally.testing.deployment import Answer, Hosts, Refused, TwoNodes, Up, family
from kvtally.testing.models import DENSE, Model, Recipe
from tests.engine.machines import Namespaces, hosts, leftovers, obstacle

pytestmark = pytest.mark.engine

AT_ONCE = 3
WAIT_MS = 3_000  # the deadline of a request: how long it may wait for its store
SLACK_S = 5.0  # beyond that deadline
CALM = 20.0  # a request may take this many times what it takes at rest, by its own work: others use the machine too


class Case(NamedTuple):
    prompt: list[int]
    alone: Answer


class Outcome(NamedTuple):
    """What a client is left with: "right", "error", or what is wrong."""

    what: str
    seconds: float
    told: dict[str, str] = {}


class Scene:
    """The deployment, and what its clients ask."""

    def __init__(self, up: TwoNodes, network: Hosts) -> None:
        self.up, self.network = up, network
        self.pick = random.Random(7)
        self.cases = [Case(*up.continued(self._tokens())) for _ in range(10)]
        self._asked = 0
        self.calm_s = 0.0

    def _tokens(self) -> list[int]:
        return [self.pick.randrange(10, 900) for _ in range(self.pick.randrange(100, 1500))]

    def ask(self, case: Case, *, key: str, stream: bool) -> Outcome:
        begun_s = time.monotonic()
        try:
            answer = self.up.complete(case.prompt, key=key, stream=stream)
        except (Refused, OSError, http.client.HTTPException) as error:
            return Outcome("error", time.monotonic() - begun_s, {"error": repr(error)})
        what = "right" if answer.tokens == case.alone.tokens else f"wrong: {answer} is not {case.alone}"
        return Outcome(what, time.monotonic() - begun_s, answer.told)

    def send(self, pool: ThreadPoolExecutor) -> list[Future[Outcome]]:
        """A few requests. Each is of a client of its own, so that nobody holds its prompt."""
        sent = []
        for _ in range(AT_ONCE):
            self._asked += 1
            case, is_stream = self.pick.choice(self.cases), self.pick.random() < 0.5
            sent.append(pool.submit(self.ask, case, key=f"client {self._asked}", stream=is_stream))
        return sent

    def is_well(self) -> bool:
        """Whether a prompt is pulled from the other store."""
        self._asked += 1
        outcome = self.ask(self.cases[0], key=f"client {self._asked}", stream=False)
        assert outcome.what == "right", outcome
        promised = len(self.cases[0].prompt) - 1
        return (outcome.told["verdict"], outcome.told["source"]) == ("proved", f"peer:{promised}")


# ---- blows: entering one strikes, leaving it makes good what does not come back by itself


def node_of(scene: Scene, node: str) -> Up:
    return scene.up if node == "a" else scene.up.b


@contextmanager
def ended(scene: Scene, node: str, name: str, number: signal.Signals) -> Iterator[None]:
    """A process ends, and `kvtally up` starts it again."""
    on = node_of(scene, node)
    starts = on.log().count(f"{name}: starting")
    os.kill(on.pid_of(name), number)
    # So that whoever waits for it to be ready waits for the next one.
    scene.up.wait(lambda: on.log().count(f"{name}: starting") > starts, f"{name} is not started again")
    yield


@contextmanager
def stopped(scene: Scene, node: str, name: str) -> Iterator[None]:
    """Of an engine, any of its processes."""
    process = scene.pick.choice(family(node_of(scene, node).pid_of(name)))
    with scene.up.stopped([process]):
        yield


@contextmanager
def estranged(scene: Scene, node: str) -> Iterator[None]:
    """A store is restarted with another token than the others have."""
    token = scene.up.token
    right = token.read_text()
    token.write_text("another token than the others have")
    try:
        with ended(scene, node, "store", signal.SIGKILL):
            scene.up.wait_ready()
            yield
    finally:
        token.write_text(right)
        with ended(scene, node, "store", signal.SIGKILL):
            pass


@contextmanager
def broken(scene: Scene, how: Callable[[Namespaces, str, str], None], one: str, other: str) -> Iterator[None]:
    network = scene.network
    assert isinstance(network, Namespaces)
    how(network, one, other)
    try:
        yield
    finally:
        network.heal(one, other)


class Blow(NamedTuple):
    name: str
    strike: Callable[[Scene], AbstractContextManager[None]]
    lasts: bool = False  # until requests that were sent meanwhile are answered
    cuts: bool = False  # no byte can pass between the stores meanwhile


def _blows(place: str) -> Iterator[Blow]:
    for node, engine in (("a", "prefill-0"), ("b", "decode-0")):
        store = f"{node}'s store"
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            yield Blow(f"{number.name} of {store}", partial(ended, node=node, name="store", number=number))
        for lasts in (False, False, True):
            yield Blow(f"SIGSTOP of {store}", partial(stopped, node=node, name="store"), lasts, cuts=lasts)
        yield Blow(f"another token for {store}", partial(estranged, node=node), lasts=True, cuts=True)
        yield Blow(f"SIGKILL of {engine}", partial(ended, node=node, name=engine, number=signal.SIGKILL))
        for _ in range(2):
            yield Blow(f"SIGSTOP of {engine}", partial(stopped, node=node, name=engine))
    if place:
        return
    for one, other in ("ab", "ba"):
        way = f"from {one} to {other}"
        yield Blow(f"no route {way}", partial(broken, how=Namespaces.blackhole, one=one, other=other), True, True)
        for lasts in (False, True):
            mute = partial(broken, how=Namespaces.mute, one=one, other=other)
            yield Blow(f"nothing arrives {way}", mute, lasts, cuts=lasts)
        yield Blow(f"100 Mbit/s {way}", partial(broken, how=Namespaces.slow, one=one, other=other), lasts=True)
    unplugged = partial(broken, how=Namespaces.unplug, one="a", other="b")
    yield Blow("link down", unplugged)
    yield Blow("link down", unplugged, lasts=True, cuts=True)


BLOWS = list(_blows(obstacle()))


# ---- the test


@pytest.fixture(scope="module")
def scene(tiny_model: Callable[[Recipe, int], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with hosts() as network:
        up = TwoNodes(
            tiny_model(DENSE, 0),
            tmp_path_factory.mktemp("chaos"),
            network,
            router={"timeout": 30},
            connector={"wait_ms": WAIT_MS, "always_load": True},
        )
        try:
            up.wait_ready()
            yield Scene(up, network)
        finally:
            up.close()


def test_the_stores_link_is_broken_too() -> None:
    if obstacle():
        pytest.skip(f"{len(BLOWS)} blows without a network of their own: {obstacle()}")
    assert len(BLOWS) == 30


def test_blows(scene: Scene) -> None:
    blows = list(BLOWS)
    scene.pick.shuffle(blows)
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        scene.up.wait(scene.is_well, "prompts are not pulled")
        calm = [request.result() for request in scene.send(pool)]
        assert [outcome.what for outcome in calm] == ["right"] * AT_ONCE
        scene.calm_s = max(outcome.seconds for outcome in calm)
        for blow in blows:
            outcomes, seconds = struck(scene, blow, pool)
            for outcome in outcomes:
                verdict = outcome.told.get("verdict", "")
                seen[f"{blow.name}: {outcome.what} {verdict}"] += 1
                owed = {"right", "error"} if blow.name == "SIGKILL of decode-0" else {"right"}
                assert outcome.what in owed, (blow, outcome)
                allowed_s = seconds + WAIT_MS / 1e3 + SLACK_S + CALM * scene.calm_s
                assert outcome.seconds <= allowed_s, (blow, outcome, seconds)
                assert not (blow.cuts and "peer:" in outcome.told.get("source", "")), (blow, outcome)
            scene.up.wait_ready()
            scene.up.wait(scene.is_well, f"after {blow.name} prompts are not pulled any more")
            assert [scene.up.stats(socket).quarantined.count for socket in scene.up.sockets] == [{}, {}], blow
    print(*sorted(f"{count} × {what}" for what, count in seen.items()), sep="\n")
    scene.up.wait(lambda: not leftovers(scene.up), "something is left over")


def struck(scene: Scene, blow: Blow, pool: ThreadPoolExecutor) -> tuple[list[Outcome], float]:
    """What becomes of requests under a blow, and how long the blow was."""
    if blow.lasts:
        with blow.strike(scene):
            return [request.result() for request in scene.send(pool)], 0.0
    requests = scene.send(pool)
    time.sleep(scene.pick.uniform(0.0, scene.calm_s))
    begun_s = time.monotonic()
    with blow.strike(scene):
        time.sleep(scene.pick.uniform(0.3, 2.5))
    seconds = time.monotonic() - begun_s
    return [request.result() for request in requests], seconds
