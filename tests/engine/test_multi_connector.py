"""Inside vLLM's MultiConnector. A load that fails is computed again only if the *parent's* configuration says so: vLLM
gives each child a configuration of its own, and its scheduler looks at the parent's (docs/vllm.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtally.testing.cases import TOLERANCE, compare
from kvtally.testing.engines import Engine, Prompt
from kvtally.testing.models import DENSE, Model, Recipe
from tests.engine.store import StoreProcess

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_whether_a_failed_load_is_computed_is_the_parents_to_say(
    tiny_model: Callable[[Recipe, int], Model],
    store_in: Callable[[Path], StoreProcess],
    tmp_path: Path,
    policy: str,
) -> None:
    store = store_in(tmp_path)
    child = dict(store.connector().kv_transfer_config)
    transfer: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [child]},
    }
    prompt = Prompt(random.Random(8).choices(range(10, 900), k=700))
    with Engine({**tiny_model(DENSE, 0).settings, "kv_transfer_config": transfer}, tmp_path / "engine.log") as engine:
        right = engine.generate([prompt])[0]
        engine.reset()
        restored = engine.generate([prompt])[0]
        assert restored.cached_tokens == 699
        assert not compare(right, restored, TOLERANCE).problem
        engine.reset()
        assert store.spoil_arena()
        output = engine.generate([prompt])[0]
    if policy == "recompute":
        assert not compare(right, output, TOLERANCE).problem
    else:
        assert output.tokens == []
