"""Several ranks below the engine: what their reports amount to, and that pipeline stages are refused. Starts no engine.

What a stage's objects are is `tests/property/test_geometry`'s; ranks in a real engine are `test_tensor_parallel`'s.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from kvtally.errors import IncompatibleError
from kvtally.wire.messages import MissReason

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]


def test_a_load_is_whole_only_if_every_rank_has_it() -> None:
    from kvtally.vllm.step_jobs import LoadReport, WorkerReport

    good = LoadReport(moved_bytes=10, seconds=1.0, verified=True)
    bad = LoadReport(moved_bytes=4, seconds=3.0, reason=MissReason.CHECKSUM)
    reports = [
        WorkerReport({1: 1}, 100, {"a": good, "b": good}, {1: 1}),
        WorkerReport({1: 1}, 50, {"a": good, "b": bad}),
    ]
    for first, second in (reports, reports[::-1]):
        both = first.aggregate(second)
        assert both.loads["a"] == LoadReport(20, 1.0, "", 2, verified=True)
        assert both.loads["b"] == LoadReport(14, 3.0, MissReason.CHECKSUM, 2)
        assert (both.saved, both.saved_bytes, both.stored) == ({1: 2}, 150, {1: 1})  # one rank has not stored it


def test_pipeline_stages_are_refused_with_a_remedy() -> None:
    from kvtally.vllm.layout import engine_layout

    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(IncompatibleError, match="pipeline") as refused:
        engine_layout(config, SimpleNamespace(), model="m")
    assert "tensor parallelism" in refused.value.remedy
    assert refused.value.code == "KV-209"
