"""Tests with real vLLM. One engine lives at a time: starting one takes a quarter of a minute of processor time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtally.testing.models import Model, Recipe, tiny_models
from tests.engine.store import StoreProcess

PATIENT = Path(__file__).parents[1] / "patient"


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """Processes that are started from now on wait for one another as tests do, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PATIENT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Callable[[Recipe, int], Model]:
    """Makes a model, or finds it where an earlier run has left it."""
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    directory = request.config.cache.mkdir("tiny-models")

    def make(recipe: Recipe, seed: int) -> Model:
        [model] = tiny_models(directory, [(recipe, seed)])
        return model

    return make


@pytest.fixture(scope="module")
def store_in() -> Iterator[Callable[[Path], StoreProcess]]:
    """Starts stores in directories; they are stopped in the end."""
    stores: list[StoreProcess] = []

    def start(directory: Path) -> StoreProcess:
        stores.append(StoreProcess(directory))
        return stores[-1]

    yield start
    for store in stores:
        if store.process.poll() is None:
            store.signal(signal.SIGCONT)
            store.stop()
