"""Bytes are never reused where anything differs that decides them: weights, dtype, block size; nor across tenants."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvtally.testing.conformance import TOLERANCE, compare
from kvtally.testing.engines import Engine, Prompt
from kvtally.testing.models import DENSE, VOCABULARY, Model, Recipe, Setting
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine

TOKENS = random.Random(7).choices(range(VOCABULARY - 2), k=700)
FOREIGN: dict[str, tuple[int, Mapping[str, Setting]]] = {
    "other weights": (1, {}),
    "other dtype": (0, {"dtype": "bfloat16"}),
    "other block size": (0, {"block_size": 64}),
}


def test_nothing_foreign_is_reused(
    tiny_model: Callable[[Recipe, int], Model], store_in: Callable[[Path], StoreProcess], tmp_path: Path
) -> None:
    store = store_in(tmp_path)
    config = {"kv_transfer_config": dict(store.connector().kv_transfer_config)}
    prompt, unshared = Prompt(TOKENS), Prompt(TOKENS, salt="another tenant's")
    with Engine({**tiny_model(DENSE, 0).settings, **config}, tmp_path / "first.log") as engine:
        engine.generate([prompt])
        engine.reset()
        assert engine.generate([prompt])[0].cached_tokens > 0  # it is there for those it is for
        engine.reset()
        assert engine.generate([unshared])[0].cached_tokens == 0  # not for another tenant
    for name, (seed, settings) in FOREIGN.items():
        arguments = {**tiny_model(DENSE, seed).settings, **settings, **config}
        with Engine(arguments, tmp_path / f"{name}.log") as engine:
            reference, output = engine.generate([unshared])[0], engine.generate([prompt])[0]
            assert (reference.cached_tokens, output.cached_tokens) == (0, 0), name
            assert not compare(reference, output, TOLERANCE).problem, name
            engine.reset()
            again = engine.generate([prompt])[0]
            assert again.cached_tokens > 0, name  # it has a namespace of its own
    assert len(store.stats()["namespaces"]) == 1 + len(FOREIGN)
