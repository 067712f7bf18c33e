"""How an engine is described, from vLLM's own configuration classes: both halves alike, and what is refused. Then what
the connector does in a worker's process where there is nothing to reuse, or to compute.

Everything here needs vLLM; no engine is started.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.core.geometry import validate
from kvtally.errors import IncompatibleError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 16


def engine(**changes: Any) -> Any:
    """vLLM's configuration, as far as it is looked at. Changes are named by section and field, with two underscores."""
    plain: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "data_parallel_size": 1,
            "distributed_executor_backend": "mp",
            "rank": 0,
            "world_size": 1,
        },
        "model_config": {
            "quantization": None,
            "dtype": "float32",
            "hf_overrides": {},
            "hf_config_path": None,
            "hf_config": SimpleNamespace(to_dict=dict),
            "is_diffusion": False,
            "multimodal_config": None,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "num_gpu_blocks_override": None,
            "prefix_cache_retention_interval": 0,
        },
        "attention_config": {"backend": None, "hisparse_config": None},
        "device_config": {"device_type": "cuda"},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        plain.setdefault(section, {})[field] = value
    sections = {name: SimpleNamespace(**fields) for name, fields in plain.items()}
    return SimpleNamespace(**{"speculative_config": None, "lora_config": None, **sections})


def configs(specs: dict[str, Any], layout: str = "LBHNC") -> tuple[Any, Any]:
    """What vLLM tells a worker and what it tells the scheduler, of a model whose layers are one group."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout

    described = engine(cache_config__get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout])
    together = UniformTypeKVCacheSpecs.from_specs(specs)
    assert together is not None
    groups = [KVCacheGroupSpec(list(specs), together)]
    worker = kv_cache_utils.get_kv_cache_config_from_groups(described, groups, 1 << 22)
    worker.kv_cache_layout = layout
    worker.cache_hit_alignment_tokens = worker.hash_block_size = BLOCK
    return worker, kv_cache_utils.generate_scheduler_kv_cache_config([worker])


def full(heads: int = 2, **changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**plain | changes)


def described(config: Any, cache: Any) -> Any:
    from kvtally.vllm.layout import engine_layout

    return engine_layout(config, cache, model="m")


# ---- both halves


def test_a_group_of_one_shape_is_described_by_its_pages() -> None:
    worker, scheduler = configs({"first": full(page_size_padded=4096), "second": full(page_size_padded=4096)})
    layout = described(engine(), worker)
    assert layout.groups[0].page_bytes == ((2048, 2048),)  # unpadded
    assert described(engine(), scheduler) == layout


@pytest.mark.parametrize("arrangement", ["LBHNC", "BLHNC"])
def test_both_halves_describe_a_group_of_several_shapes_alike(arrangement: str) -> None:
    """Else workers save under a name that the scheduler never asks for."""
    import torch

    from kvtally.vllm.layout import group_layouts

    specs = {"first": full(2), "second": full(4), "third": full(2), "last": full(1, page_size_padded=1280)}
    worker, scheduler = configs(specs, arrangement)
    layout = described(engine(), worker)
    assert layout.groups[0].page_bytes == ((2048, 4096, 2048, 1280),)
    assert described(engine(), scheduler) == layout
    memory = torch.zeros(worker.kv_cache_tensors[0].size, dtype=torch.int8)
    places = {name: tensor for tensor in worker.kv_cache_tensors for name in tensor.layers}
    starts = {name: places[name].offset + places[name].layers.index(name) * places[name].layer_stride for name in specs}
    layouts = group_layouts(layout, worker, {name: memory[start:] for name, start in starts.items()})
    validate(layout.namespace, {0: layouts})


# ---- settings


def sections() -> dict[str, Any]:
    """The classes of vLLM's configuration whose fields are listed, by their place in it."""
    from vllm import config as classes
    from vllm.config.attention import AttentionConfig
    from vllm.config.kernel import KernelConfig
    from vllm.config.mamba import MambaConfig

    return {
        "": classes.VllmConfig,
        "model_config": classes.ModelConfig,
        "model_config.multimodal_config": classes.MultiModalConfig,
        "cache_config": classes.CacheConfig,
        "parallel_config": classes.ParallelConfig,
        "load_config": classes.LoadConfig,
        "attention_config": AttentionConfig,
        "mamba_config": MambaConfig,
        "kernel_config": KernelConfig,
        "lora_config": classes.LoRAConfig,
        "kv_transfer_config": classes.KVTransferConfig,
    }


def test_every_field_of_vllms_configuration_is_judged() -> None:
    """A new vLLM adds fields. Whoever adapts us to it decides for each whether it changes KV, and why not."""
    from kvtally.vllm.config_fields import FIELDS

    assert sections().keys() == FIELDS.keys()
    for section, kind in sections().items():
        assert {field.name for field in dataclasses.fields(kind)} == FIELDS[section].keys(), section


def test_what_is_listed_as_a_default_is_vllms() -> None:
    """Else every engine would have such a field in its namespace, or none that sets it."""
    from kvtally.vllm.config_fields import FIELDS, In
    from kvtally.vllm.identity import plain

    for section, kind in sections().items():
        for field in dataclasses.fields(kind):
            judged = FIELDS[section][field.name]
            if isinstance(judged, In):
                assert plain(judged.default) == plain(default_of(field)), (section, field.name)


def default_of(field: Any) -> Any:
    """Of a dataclass's field, as vLLM declares it: directly, or through pydantic."""
    if field.default is dataclasses.MISSING:
        return field.default_factory()
    if hasattr(field.default, "get_default"):
        return field.default.get_default(call_default_factory=True)
    return field.default


def online(**arguments: Any) -> Any:
    from vllm.config.quantization import resolve_quantization_config

    return resolve_quantization_config("online", arguments)


def test_engines_that_quantise_differently_share_nothing() -> None:
    told = [
        None,
        online(linear="fp8_per_tensor"),
        online(linear="fp8_per_block"),
        online(linear="fp8_per_tensor", ignore=["qkv_proj"]),
        online(targets={"re:.*mlp.*": "fp8_per_tensor"}),
    ]
    cache, _ = configs({"first": full()})
    names = [described(engine(model_config__quantization_config=each), cache).namespace.digest for each in told]
    assert len(set(names)) == len(names)
    again = online(targets={"re:.*mlp.*": "fp8_per_tensor"})
    assert described(engine(model_config__quantization_config=again), cache).namespace.digest == names[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model_class_overrides": {"Qwen3ForCausalLM": "mine:Qwen3"}},
        {"model_config__model_impl": "transformers"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0", "1"]},
        {"load_config__load_format": "mistral"},
        {"attention_config__indexer_kv_dtype": "mxfp4"},
        {"mamba_config__enable_stochastic_rounding": True},
        {"kernel_config__linear_backend": "marlin"},
        {"lora_config__target_modules": ["o_proj"], "lora_config__lora_dtype": "auto"},
        {"lora_config__lora_dtype": "bfloat16"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_decides_kv_is_part_of_the_name(change: dict[str, Any]) -> None:
    cache, _ = configs({"first": full()})
    assert described(engine(**change), cache).namespace.digest != described(engine(), cache).namespace.digest


@pytest.mark.parametrize(
    "change",
    [
        {"load_config__load_format": "safetensors"},
        {"model_config__enforce_eager": True},
        {"lora_config__lora_dtype": "float32"},  # the model's
        {"attention_config__backend_per_kind": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_decides_nothing_is_not(change: dict[str, Any]) -> None:
    cache, _ = configs({"first": full()})
    namespace = described(engine(**change), cache).namespace
    assert namespace.digest == described(engine(), cache).namespace.digest
    assert namespace.detail == {"model_dtype": "float32", "cache_dtype": "auto"}  # as before any of this was listed


# ---- images


def images(**changes: Any) -> Any:
    from vllm.config import MultiModalConfig

    return MultiModalConfig(**changes)


def test_how_an_engine_is_told_to_read_images_is_part_of_its_name() -> None:
    """vLLM's own names of images hold what requests say, not what the engine was started with."""
    told = [
        images(),
        images(mm_processor_kwargs={"image_mean": [0.0, 0.0, 0.0]}),
        images(mm_processor_kwargs={"image_mean": [0.5, 0.5, 0.5]}),
        images(mm_encoder_attn_dtype="fp8"),
        images(video_pruning_rate=0.5),
        images(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    ]
    worker, _ = configs({"first": full()})
    names = [described(engine(model_config__multimodal_config=settings), worker).namespace.digest for settings in told]
    assert len(set(names)) == len(names)
    assert names[0] == described(engine(), worker).namespace.digest


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "is_named"), [(4, True, True), (4, False, True), (0, True, True), (0, False, False)]
)
def test_images_that_vllm_only_counts_have_no_name(cache_gb: float, prefix_caching: bool, is_named: bool) -> None:
    from vllm.renderers.base import BaseRenderer

    from kvtally.vllm.layout import names_images

    config = engine(
        model_config__multimodal_config=images(mm_processor_cache_gb=cache_gb),
        cache_config__enable_prefix_caching=prefix_caching,
    )
    assert names_images(config) is is_named
    renderer: Any = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *items: None
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    counted = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    assert counted == ({} if is_named else {"image": ["renderer0-mm-1-image-0"]})


# ---- what is refused


def refused(config: Any, **changes: Any) -> IncompatibleError:
    worker, _ = configs({"first": full(), "second": full(**changes)})
    with pytest.raises(IncompatibleError) as refused:
        described(config, worker)
    assert refused.value.code == "KV-209"
    assert "on_unsupported" in refused.value.remedy
    return refused.value


def test_what_sees_the_end_of_a_prompt_is_not_the_same_with_another_end() -> None:
    assert "attend to the last" in str(refused(engine(), non_causal=True))


def test_drafts_are_not_what_their_tokens_say() -> None:
    assert "diffusion" in str(refused(engine(model_config__is_diffusion=True)))


def test_a_model_without_kv_cache_has_nothing_to_reuse() -> None:
    worker, _ = configs({"first": full()})
    worker.kv_cache_groups.clear()  # as vLLM does it for encoders
    with pytest.raises(IncompatibleError, match="no KV cache"):
        described(engine(), worker)


def test_memory_that_nobody_here_can_copy() -> None:
    assert "xpu" in str(refused(engine(device_config__device_type="xpu")))


def test_ranks_that_schedule_by_themselves_would_part() -> None:
    """Each has an engine of its own, which hears of its own loads only: one would go on before the others."""
    launched = {"parallel_config__distributed_executor_backend": "external_launcher"}
    assert "launcher" in str(refused(engine(parallel_config__world_size=2, **launched)))
    worker, _ = configs({"first": full()})
    assert described(engine(**launched), worker).namespace.ranks == 1


# ---- without reuse


def worker(cache: Any, config: Any = None, **settings: Any) -> Any:
    """The connector in a worker's process. No store is looked for before memory is registered."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvtally.vllm.connector import KVTallyConnector

    config = config or engine()
    extra = {"model_identity": "m", **settings}
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config=extra, kv_load_failure_policy="fail", engine_id="engine"
    )
    return KVTallyConnector(config, KVConnectorRole.WORKER, cache)


@pytest.fixture
def misplaced() -> dict[str, Any]:
    """A layer's memory, where the configuration does not say."""
    import torch

    return {"first": torch.zeros(1 << 22, dtype=torch.int8)[64:]}


def test_memory_that_is_not_as_configured_is_refused(misplaced: dict[str, Any]) -> None:
    connector = worker(configs({"first": full()})[0])
    with pytest.raises(IncompatibleError, match="is not where"):
        connector.register_kv_caches(misplaced)


def test_a_worker_without_reuse_leaves_nobody_waiting(misplaced: dict[str, Any]) -> None:
    """The scheduler half does not know: it holds blocks until each rank has saved them, and vLLM waits for loads."""
    from kvtally.vllm.step_jobs import LoadJob, SaveJob, StepJobs

    connector = worker(configs({"first": full()})[0], on_unsupported="serve")
    connector.register_kv_caches(misplaced)
    loads = [LoadJob(name, None, [], 0, 0, []) for name in ("late", "early")]  # type: ignore[arg-type]
    metadata = StepJobs(loads[:1], loads[1:], saves=[SaveJob(1, [])], late_saves=[SaveJob(2, [])])
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    results, report = connector.get_transfer_results(set()), connector.build_connector_worker_meta()
    assert results.finished_recving == results.failed_recving == {"late", "early"}
    assert {name: load.reason for name, load in report.loads.items()} == {"late": "refused", "early": "refused"}
    assert report.saved == {1: 1, 2: 1}
    assert report.lost == {1: "refused", 2: "refused"}
    connector.shutdown()


# ---- steps that fail


def step(connector: Any, *, dies: bool) -> list[Any]:
    """One step, as vLLM takes it, and the save jobs that reached the worker's thread."""
    from kvtally.vllm.step_jobs import SaveJob, StepJobs

    given: list[Any] = []
    connector._worker.save = given.extend
    try:
        connector.bind_connector_metadata(StepJobs(saves=[SaveJob(1, [])]))
        try:
            if dies:
                raise RuntimeError("the forward died")
        finally:
            connector.wait_for_save()
            connector.clear_connector_metadata()
    except RuntimeError:
        assert dies
    return given


@pytest.mark.parametrize("dies", [False, True])
def test_saves_are_dropped_only_where_the_forward_died(dies: bool) -> None:
    """A caller that generates while it handles an exception of its own has a healthy engine."""
    connector = worker(configs({"first": full()})[0])
    saved = 0 if dies else 1
    assert len(step(connector, dies=dies)) == saved
    try:
        raise ValueError("the caller's")
    except ValueError:
        assert len(step(connector, dies=dies)) == saved
    assert connector._callers_exception is None  # nothing keeps the caller's frames alive


# ---- idle steps


@pytest.mark.parametrize(("engines", "waits"), [(1, True), (2, False)])
def test_an_idle_engine_waits_for_transfers_only_where_no_other_waits_for_it(
    engines: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data parallelism of experts all engines step together: one that is idle keeps the decodes of all waiting."""
    from kvtally.vllm.step_jobs import StepJobs
    from kvtally.vllm.worker import Results

    connector = worker(configs({"first": full()})[0], engine(parallel_config__data_parallel_size=engines))
    waited: list[float] = []
    monkeypatch.setattr(connector._worker, "collect", lambda wait_s: waited.append(wait_s) or Results())
    for is_idle in (True, False):
        connector.bind_connector_metadata(StepJobs(is_idle=is_idle))
        connector.get_transfer_results(set())
    assert [wait_s > 0 for wait_s in waited] == [waits, False]
