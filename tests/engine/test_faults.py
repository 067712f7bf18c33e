"""A real engine whose store fails in every way: each request gets the right output, and the engine lives.

The connector finds a store again by its socket, whatever came in between: so one engine serves for nearly all of it.
The model has attention and recurrent state, in float32: so an output is right or wrong, whatever it was batched with.
No test depends on how fast the machine is: deadlines are for hangs only.
"""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvtally.core.answers import TOLERANCE, compare
from kvtally.core.receipts import Half
from kvtally.testing.conformance import ConnectorUnderTest
from kvtally.testing.engines import Engine, Generate, Output, Prompt
from kvtally.testing.models import MAMBA, VOCABULARY, Model, Recipe
from kvtally.wire.messages import MissReason
from tests.engine.offline import run_offline
from tests.engine.store import StoreProcess, hoarder

pytestmark = pytest.mark.engine

ROUNDS = 50
DEADLINE_S = 240.0  # of any request; one that is computed takes about a second
WAIT_MS = 1_000  # what a request of an impatient engine may wait for the store
LENGTHS = (300, 560, 800, 1100)
LONG = 1500
DRAW = random.Random(3)
TOKENS = {length: [DRAW.randrange(VOCABULARY - 2) for _ in range(length)] for length in (*LENGTHS, LONG)}


class Scene:
    """The engine, its store, and what is right for each of the prompts."""

    def __init__(self, engine: Engine, store: StoreProcess) -> None:
        self.engine, self.store = engine, store
        self._count = 0
        self._tickets: list[str] = []
        asked = [Prompt(tokens, salt=f"reference {length}") for length, tokens in TOKENS.items()]
        outputs = [engine.generate([prompt])[0] for prompt in asked]
        assert not any(output.cached_tokens for output in outputs)
        self._right = dict(zip(TOKENS, outputs, strict=True))

    def begin(self, prompts: list[Prompt]) -> None:
        """Send them all at once, with nothing in the engine's own cache."""
        self._tickets = [f"ticket {self._count + number}" for number in range(len(prompts))]
        self._count += len(prompts)
        transfers = [{"kvtally": {"ticket": ticket, "role": "decode"}} for ticket in self._tickets]
        self.engine.reset()
        self.engine.send(Generate([replace(p, transfer=t) for p, t in zip(prompts, transfers, strict=True)]))

    def end(self, prompts: list[Prompt]) -> list[Output]:
        """They are answered in time, and right."""
        outputs = self.engine.receive(DEADLINE_S).outputs
        for prompt, output in zip(prompts, outputs, strict=True):
            assert not compare(self._right[len(prompt.tokens)], output, TOLERANCE).problem, len(prompt.tokens)
        return outputs

    def ask(self, *prompts: Prompt) -> list[Output]:
        self.begin(list(prompts))
        return self.end(list(prompts))

    def reasons(self) -> list[str]:
        """What the receipts of the last ones say."""
        return [self.store.receipt(ticket).reason for ticket in self._tickets]

    def replace_store(self, change: Callable[[], object] = lambda: None, **options: Any) -> None:
        """Another one takes its place, and the engine has found it."""
        if self.store.process.poll() is None:
            self.store.signal(signal.SIGCONT)
            self.store.stop()
        change()
        self.store.start(**options)
        self.store.wait_for_engine()

    def save(self, length: int, salt: str) -> Prompt:
        """A prompt that is in the store, on disk too. A store that has just come up may not be known to the engine."""
        prompt = Prompt(TOKENS[length], salt=salt)
        deadline = time.monotonic() + DEADLINE_S
        while not self.ask(prompt)[0].cached_tokens:
            assert time.monotonic() < deadline, self.counters("misses")
        self.store.write_out()
        return prompt

    def counters(self, name: str) -> dict[str, float]:
        prefix = f"vllm:kvtally_{name}/"
        return {
            key.removeprefix(prefix): value for key, value in self.engine.counters().items() if key.startswith(prefix)
        }


@pytest.fixture(scope="module")
def shared_scene(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    """Requests wait as long as a busy machine may take."""
    directory = tmp_path_factory.mktemp("faults")
    store = store_in(directory)
    with engine_of(tiny_model(MAMBA, 0), store.connector(), directory) as engine:
        yield Scene(engine, store)


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    """Every test leaves a store that works."""
    yield shared_scene
    shared_scene.replace_store()


def engine_of(model: Model, connector: ConnectorUnderTest, directory: Path) -> Engine:
    arguments = {**model.settings, "kv_transfer_config": dict(connector.kv_transfer_config)}
    return Engine(arguments, directory / "engine.log", in_process=False)


def test_the_store_is_killed_or_stopped_at_any_moment(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path
) -> None:
    """Two rounds strike before anything is asked, so that requests meet a store that is stopped, and one that is gone.
    The others strike whenever they do: what they find under way is a matter of luck, that it is safe is not."""
    store = store_in(tmp_path)
    with engine_of(tiny_model(MAMBA, 0), store.connector(wait_ms=WAIT_MS), tmp_path) as engine:
        scene = Scene(engine, store)
        repeated = [scene.save(length, "repeated") for length in LENGTHS]
        stop = functools.partial(store.signal, signal.SIGSTOP)
        for strike, reason in ((stop, MissReason.DEADLINE), (store.kill, MissReason.STORE_UNREACHABLE)):
            before = scene.counters("misses").get(reason, 0)
            strike()
            scene.ask(*_crowd(repeated, reason))
            assert scene.counters("misses")[reason] > before
            scene.replace_store()
        in_flight = sum(_round(scene, repeated, random.Random(f"strike {number}"), number) for number in range(ROUNDS))
        print(f"{in_flight} of {ROUNDS} strikes met requests that were under way")
        moved = scene.counters("bytes")
        assert moved["load"] > 0
        assert moved["save"] > 0
        for length in LENGTHS:
            scene.save(length, "repeated")  # all is as it was


def _crowd(repeated: list[Prompt], salt: str) -> list[Prompt]:
    """Two that are loaded and two that are saved."""
    draw = random.Random(salt)
    return [
        *draw.sample(repeated, 2),
        *(Prompt(TOKENS[length], salt=salt) for length in draw.sample(LENGTHS, 2)),
    ]


def _round(scene: Scene, repeated: list[Prompt], draw: random.Random, number: int) -> bool:
    """Whether the store was struck while requests were under way: half of the time while they are looked up and
    loaded, else at any moment of their life."""
    prompts = _crowd(repeated, f"round {number}")
    scene.begin(prompts)
    time.sleep(draw.uniform(0.0, draw.choice([0.05, 1.0])))
    in_flight = not scene.engine.has_answered
    how = draw.choice(["kill", "stop and go on", "stop and kill"])
    if how == "kill":
        scene.store.kill()
    else:
        scene.store.signal(signal.SIGSTOP)
    scene.end(prompts)
    if how == "stop and go on":
        scene.store.signal(signal.SIGCONT)
        return in_flight
    scene.store.kill()
    scene.store.start()
    return in_flight


def test_flipped_bits_on_disk_are_a_miss(scene: Scene) -> None:
    prompt = scene.save(800, "flipped on disk")
    scene.replace_store(scene.store.spoil_disk)
    assert scene.ask(prompt)[0].cached_tokens == 0
    assert scene.reasons() == [MissReason.CHECKSUM]
    scene.save(800, "flipped on disk")  # it can be saved again


def test_flipped_bits_in_memory_are_a_miss(scene: Scene) -> None:
    prompt = scene.save(800, "flipped in memory")
    scene.store.spoil_arena()
    assert scene.ask(prompt)[0].cached_tokens == 0
    assert scene.reasons() == [MissReason.CHECKSUM]


def test_a_lease_that_expires_before_the_load_is_a_miss(scene: Scene) -> None:
    prompt = scene.save(800, "expired")
    scene.replace_store(lease_ns=1)
    assert scene.ask(prompt)[0].cached_tokens == 0
    assert scene.reasons() == [MissReason.LEASE_EXPIRED]


QUEUED = """
import time
engine, half = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
def add(name, tokens, count):
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)
ask(given[0])
assert llm.reset_prefix_cache()
add("ahead", given[1], 40)
engine.step()
add("queued", given[0], 4)
[tracked] = [tracked for name, tracked in half._requests.items() if name.startswith("queued")]
deadline = time.monotonic() + 240
while tracked.attempt.lookup is None or tracked.attempt.lookup.answer is None:
    assert time.monotonic() < deadline
    time.sleep(0.001)
first = tracked.attempt.lookup
first.answer.lease.expires_ns = 0
done = {}
while engine.has_unfinished_requests():
    done.update({output.request_id: output.num_cached_tokens for output in engine.step() if output.finished})
result = {"cached": done["queued"], "asked again": tracked.attempt.lookup is not first}
"""


def test_a_lease_that_expires_in_the_queue_is_asked_for_again(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path
) -> None:
    """Looked up when it arrived, it waits behind another until its lease has ended."""
    config = {"kv_transfer_config": dict(store_in(tmp_path).connector().kv_transfer_config)}
    arguments = {**tiny_model(MAMBA, 0).settings, "max_num_seqs": 1, **config}
    told = run_offline(QUEUED, arguments, [TOKENS[800], TOKENS[300]], tmp_path / "engine.log")
    assert told["asked again"]
    assert told["cached"] > 0


def test_what_an_arena_cannot_hold_at_once_is_held_in_turn(scene: Scene) -> None:
    """Eight prompts at once, of which the arena holds some: the others wait for room, while they are queued anyway."""
    prompts = [scene.save(LONG, f"crowded {number}") for number in range(8)]
    scene.replace_store(memory="16MiB")
    outputs = scene.ask(*prompts)
    reasons = scene.reasons()
    assert any(output.cached_tokens > 0 for output in outputs)
    for output, reason in zip(outputs, reasons, strict=True):
        # What is held says that nobody saved the prompt's last tokens.
        assert reason in ("", MissReason.ABSENT, MissReason.ARENA_FULL)
        assert (output.cached_tokens > 0) == (reason != MissReason.ARENA_FULL), (outputs, reasons)


def test_a_hand_off_that_the_arena_cannot_hold_is_not_waited_for(scene: Scene) -> None:
    """Prefill answers before it knows that its bytes find no room. Decode learns it: had it waited until its patience
    ended, the reason would be its deadline."""
    scene.replace_store(memory="16MiB")
    with hoarder(scene.store.socket), hoarder(scene.store.socket):
        told, half = hand_over(scene)
    if told.get("saved_tokens"):  # it was promised, and withdrawn
        assert half.reason == MissReason.ARENA_FULL
    else:
        assert (told["reason"], half.reason) == (MissReason.ARENA_FULL, MissReason.ARENA_FULL)


def hand_over(scene: Scene) -> tuple[dict[str, Any], Half]:
    """From prefill to decode, in one engine: what decode is told, and what it says of it."""
    ticket = {"ticket": "no room", "role": "prefill"}
    (handed,) = scene.engine.generate([Prompt(TOKENS[LONG], salt="no room", transfer={"kvtally": ticket})])
    scene.engine.reset()
    told = {**handed.transfer["kvtally"], "role": "decode"}
    prompt = Prompt(TOKENS[LONG], salt="no room", transfer={"kvtally": told})
    scene.engine.send(Generate([prompt]))
    scene.end([prompt])
    return told, scene.store.receipt("no room")


def test_a_full_disk_keeps_what_fits(scene: Scene) -> None:
    scene.replace_store(disk="small disk", disk_size="16MiB")
    prompts = [scene.save(LONG, f"too many {number}") for number in range(8)]
    scene.replace_store(disk="small disk", disk_size="16MiB")
    hits = 0
    for prompt in reversed(prompts):  # the newest first: what is computed is saved, and takes the place of the oldest
        is_hit = scene.ask(prompt)[0].cached_tokens > 0
        hits += is_hit
        assert is_hit or scene.reasons()[0] in (MissReason.ABSENT, MissReason.STATE_ABSENT)
    assert 0 < hits < len(prompts)
