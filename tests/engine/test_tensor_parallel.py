"""Two tensor-parallel ranks in real vLLM: each has objects of its own, a hit needs both, and what one of them cannot
load is the whole request's miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtally.core.answers import TOLERANCE, compare
from kvtally.testing.engines import Engine, Output, Prompt
from kvtally.testing.models import GDN, VOCABULARY, Model, Recipe
from kvtally.wire.messages import MissReason
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

# Each test has its own: the same tokens have the same bytes, whatever their salt.
TOKENS, SPOILT, HALVED = (random.Random(seed).choices(range(VOCABULARY - 2), k=700) for seed in (11, 12, 13))
ANSWER = 20


class Scene(NamedTuple):
    engine: Engine
    store: StoreProcess


@pytest.fixture(scope="module")
def scene(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("ranks")
    store = store_in(directory)
    config = {"tensor_parallel_size": 2, "kv_transfer_config": dict(store.connector().kv_transfer_config)}
    arguments = {**tiny_model(GDN, 0).settings, **config}
    with Engine(arguments, directory / "engine.log", in_process=False) as engine:
        yield Scene(engine, store)


def asked(scene: Scene, prompt: Prompt) -> Output:
    """With nothing in the engine's own cache."""
    scene.engine.reset()
    return scene.engine.generate([prompt])[0]


def test_ranks_save_apart_and_are_restored_together(scene: Scene) -> None:
    computed = asked(scene, Prompt(TOKENS, salt="another"))
    cold = asked(scene, Prompt(TOKENS, ANSWER))
    kept = scene.engine.generate([Prompt(TOKENS)])[0]  # vLLM's own prefix cache
    restored = asked(scene, Prompt(TOKENS))
    assert (computed.cached_tokens, cold.cached_tokens) == (0, 0)
    assert restored.cached_tokens == kept.cached_tokens > 0
    assert not compare(kept, restored, TOLERANCE).problem
    assert compare(computed, restored, float("inf")).deviation <= max(
        TOLERANCE, compare(computed, kept, float("inf")).deviation
    )
    scene.store.write_out()
    objects = [scene.store.objects(rank) for rank in range(2)]
    assert len(objects[0]) == len(objects[1]) > 0
    assert not set(objects[0]) & set(objects[1])  # of different heads


def test_an_answer_goes_on_where_it_ended(scene: Scene) -> None:
    """Compared with vLLM's own continuation, which computes just what is computed here."""
    whole = asked(scene, Prompt(TOKENS, ANSWER + 8, salt="whole"))
    first = asked(scene, Prompt(TOKENS, ANSWER, salt="in parts"))
    assert first.tokens == whole.tokens[:ANSWER]
    ticket = {"kvtally": {"ticket": "goes on", "role": "decode"}}
    rest = asked(scene, Prompt([*TOKENS, *first.tokens], salt="in parts", transfer=ticket))
    assert rest.cached_tokens == len(TOKENS) + ANSWER - 1, scene.store.receipt("goes on")
    reference = Output(whole.tokens[ANSWER:], whole.logprobs[ANSWER:], whole.margins[ANSWER:], 0)
    assert not compare(reference, rest, TOLERANCE).problem


def test_what_one_rank_cannot_load_is_computed_by_both(scene: Scene) -> None:
    prompt = Prompt(SPOILT, transfer={"kvtally": {"ticket": "spoilt", "role": "decode"}})
    known = set(scene.store.objects(1))
    computed = asked(scene, Prompt(SPOILT))
    scene.store.write_out()
    assert scene.store.spoil_arena(set(scene.store.objects(1)) - known) > 0
    spoilt = asked(scene, prompt)
    assert (computed.cached_tokens, spoilt.cached_tokens) == (0, 0)
    assert not compare(computed, spoilt, TOLERANCE).problem
    assert scene.store.receipt("spoilt").reason == MissReason.CHECKSUM


def test_a_hit_needs_both_ranks(scene: Scene) -> None:
    """Of this prompt rank 1 has nothing left that is intact: what rank 0 has is of no use."""
    known = set(scene.store.objects(1))
    computed = asked(scene, Prompt(HALVED))
    assert asked(scene, Prompt(HALVED)).cached_tokens > 0
    scene.store.write_out()
    scene.store.stop()
    assert scene.store.spoil_disk(set(scene.store.objects(1)) - known) > 0
    scene.store.start()
    scene.store.wait_for_engine(ranks=2)
    halved = asked(scene, Prompt(HALVED))
    assert (computed.cached_tokens, halved.cached_tokens) == (0, 0)
    assert not compare(computed, halved, TOLERANCE).problem
    assert asked(scene, Prompt(HALVED)).cached_tokens > 0  # rank 1 has saved its part again
