"""Engines that share a store: what one saves another reuses, if everything is equal that decides the bytes; where the
weights, the configuration, the dtype or the block size differ, or the tenant, nothing is, not even if a router hands it
over."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtally.core.answers import TOLERANCE, compare
from kvtally.testing.engines import Engine, Output, Prompt
from kvtally.testing.models import DENSE, VOCABULARY, Model, Recipe
from kvtally.wire.messages import MissReason
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

TOKENS, OTHERS = (random.Random(seed).choices(range(VOCABULARY - 2), k=700) for seed in (7, 8))
PROMPT, UNSHARED = Prompt(TOKENS), Prompt(TOKENS, salt="another tenant's")
FOREIGN: dict[str, tuple[int, Mapping[str, Any]]] = {
    "other weights": (1, {}),
    "other dtype": (0, {"dtype": "bfloat16"}),
    "other block size": (0, {"block_size": 64}),
    "other rope": (0, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}),
}


class Scene(NamedTuple):
    """A store, an engine that has saved to it, its output, and what it tells a decode engine about the prompt."""

    store: StoreProcess
    engine: Engine
    output: Output
    handed_over: dict[str, Any]
    start: Callable[..., Engine]


@pytest.fixture(scope="module")
def scene(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("namespaces")
    store = store_in(directory)
    config = {"kv_transfer_config": dict(store.connector().kv_transfer_config)}

    def start(name: str, seed: int = 0, settings: Mapping[str, Any] | None = None) -> Engine:
        arguments = {**tiny_model(DENSE, seed).settings, **(settings or {}), **config}
        return Engine(arguments, directory / f"{name}.log")

    with start("first") as engine:
        output = engine.generate([PROMPT])[0]
        ticket = {"ticket": "handed over", "role": "prefill"}
        answer = engine.generate([Prompt(TOKENS, 1, transfer={"kvtally": ticket})])[0].transfer["kvtally"]
        assert answer["saved_tokens"] == len(TOKENS) - 1
        yield Scene(store, engine, output, {**answer, "role": "decode"}, start)


def test_two_engines_reuse_what_the_other_has_saved(scene: Scene) -> None:
    """Nothing is saved twice: whatever the second one reuses of the first prompt is the first one's."""
    with scene.start("second") as second:
        restored = second.generate([PROMPT])[0]
        assert restored.cached_tokens == len(TOKENS) - 1
        assert not compare(scene.output, restored, TOLERANCE).problem
        computed = second.generate([Prompt(OTHERS)])[0]
    back = scene.engine.generate([Prompt(OTHERS)])[0]
    assert (computed.cached_tokens, back.cached_tokens) == (0, len(OTHERS) - 1)
    assert not compare(computed, back, TOLERANCE).problem
    assert len(scene.store.stats()["namespaces"]) == 1


def test_tenants_do_not_share(scene: Scene) -> None:
    scene.engine.reset()
    unshared = scene.engine.generate([UNSHARED])[0]
    assert unshared.cached_tokens == 0
    assert not compare(scene.output, unshared, TOLERANCE).problem


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_foreign_is_reused(scene: Scene, name: str) -> None:
    seed, settings = FOREIGN[name]
    before = len(scene.store.stats()["namespaces"])
    with scene.start(name, seed, settings) as engine:
        reference = engine.generate([UNSHARED])[0]
        transfer = {"kvtally": {**scene.handed_over, "ticket": name}}
        output = engine.generate([Prompt(TOKENS, transfer=transfer)])[0]
        assert (reference.cached_tokens, output.cached_tokens) == (0, 0)
        assert not compare(reference, output, TOLERANCE).problem
        assert scene.store.receipt(name).reason == MissReason.FOREIGN_NAMESPACE
        engine.reset()
        assert engine.generate([PROMPT])[0].cached_tokens > 0  # it has a namespace of its own
    assert len(scene.store.stats()["namespaces"]) == before + 1
