"""vLLM's KV-cache configuration → our namespace (what the bytes are) and geometry (where they lie).

The translation happens once, here: the rest of the connector sees our types only. An engine that we cannot serve
correctly is refused with the reason (`IncompatibleError`); the connector then stops the start or, if the settings say
so, serves without reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtally.core.geometry import GroupLayout, LayerView
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, chunk_tokens
from kvtally.errors import IncompatibleError
from kvtally.vllm.config_fields import decisive
from kvtally.vllm.identity import is_length_decisive, override_digest
from kvtally.wire.limits import Limits

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig, VllmConfig

FULL = (FullAttentionSpec, MLAAttentionSpec)
SLIDING = (SlidingWindowSpec, SlidingWindowMLASpec)
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One engine as the rest of the connector sees it. Our group g is vLLM's `group_ids[g]`."""

    namespace: Namespace
    group_ids: tuple[int, ...]
    layer_names: tuple[tuple[str, ...], ...]
    block_tokens: int  # vLLM's scheduler block size

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self.namespace.groups

    @property
    def has_states(self) -> bool:
        """Whether a group of the model is recurrent."""
        return any(spec.kind is GroupKind.RECURRENT for spec in self.groups)


def engine_layout(config: VllmConfig, cache: KVCacheConfig, *, model: str) -> EngineLayout:
    """Describe an engine, or refuse it."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise refusal("pipeline parallelism: one scheduler cannot see every stage's layers", "Use tensor parallelism.")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise refusal("context parallelism splits blocks over ranks", "Set the context-parallel sizes to 1.")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise refusal(
            "with an external launcher each rank has its own scheduler, and a load ends on one rank before the others",
            "Let vLLM launch its workers.",
        )
    if config.speculative_config is not None:
        raise refusal("speculative decoding changes what a block holds", "Run without a draft model.")
    if config.model_config.is_diffusion:
        raise refusal("a diffusion model's last blocks hold drafts, not final KV", "Run this model without kvtally.")
    if config.device_config.device_type not in DEVICES:
        raise refusal(f"it runs on {config.device_config.device_type}", "Run it on NVIDIA GPUs or on CPUs.")
    layout = KVCacheLayout[cache.kv_cache_layout] if cache.kv_cache_layout else None
    if layout is None or not layout.is_block_compact:
        raise refusal(f"KV-cache layout {cache.kv_cache_layout} spreads a block", "Set VLLM_KV_CACHE_LAYOUT=LBHNC.")
    group_ids = tuple(cache.prefix_cacheable_group_ids)
    if not cache.kv_cache_groups:
        raise refusal("it has no KV cache", "Run this model without kvtally.")
    if len(group_ids) != len(cache.kv_cache_groups):
        raise refusal("some of the model's KV-cache groups cannot be cached", "Enable prefix caching.")
    alignment = cache.cache_hit_alignment_tokens
    if not alignment:
        raise refusal("vLLM resolved no alignment for prefix hits", "Enable prefix caching.")
    groups = tuple(_group(cache, group_id) for group_id in group_ids)
    chunk = _chunk_tokens(groups, alignment)
    if any(chunk % spec.block_tokens for spec in groups if spec.kind is not GroupKind.RECURRENT):
        sizes = ", ".join(str(spec.block_tokens) for spec in groups)
        raise refusal(f"block sizes {sizes} do not fit into chunks of {chunk} tokens", "Set block_size explicitly.")
    namespace = Namespace(
        model=model,
        groups=groups,
        chunk_tokens=chunk,
        alignment_tokens=alignment,
        tensor_parallel=parallel.tensor_parallel_size,
        layout=cache.kv_cache_layout or "",
        backend=_backend(config),
        quantisation=str(config.model_config.quantization or ""),
        detail=_model_detail(config),
    )
    names = tuple(tuple(cache.kv_cache_groups[group_id].layer_names) for group_id in group_ids)
    return EngineLayout(namespace, group_ids, names, _scheduler_block_tokens(groups))


def _chunk_tokens(groups: tuple[GroupSpec, ...], alignment: int) -> int:
    """About 256; fewer if an object of 256 tokens would be larger than a store accepts."""

    def largest_bytes(chunk: int) -> int:
        return max(spec.object_bytes(chunk) for spec in groups)

    most_bytes = Limits().object_bytes
    chunk = chunk_tokens(alignment)
    while largest_bytes(chunk) > most_bytes and chunk % (2 * alignment) == 0:
        chunk //= 2
    if largest_bytes(chunk) > most_bytes:
        raise refusal(
            f"{chunk} tokens have {largest_bytes(chunk)} bytes of KV on one rank; objects have at most {most_bytes}",
            "Use more tensor parallelism, a smaller block size or an 8-bit KV cache.",
        )
    return chunk


def _model_detail(config: VllmConfig) -> dict[str, str]:
    """How the weights are used, where neither the weights nor the shapes say so. `config_fields` lists what must be in
    here."""
    model, lora = config.model_config, config.lora_config
    detail = {"model_dtype": str(model.dtype), "cache_dtype": str(config.cache_config.cache_dtype), **decisive(config)}
    if lora is not None and lora.lora_dtype not in ("auto", model.dtype):
        detail["lora_dtype"] = str(lora.lora_dtype)
    if overrides := override_digest(model.hf_overrides, model.hf_config_path):
        detail["overrides"] = overrides
    if images := override_digest(_image_settings(model.multimodal_config), None):
        detail["images"] = images
    if is_length_decisive(model.hf_config.to_dict()):
        # With "auto" vLLM finds the length after it has built the model. The model was built for its longest context.
        detail["max_model_len"] = "auto" if model.original_max_model_len == -1 else str(model.max_model_len)
    return detail


def _image_settings(multimodal: MultiModalConfig | None) -> dict[str, object]:
    """The engine's settings for turning images and the like into embeddings. vLLM's name of an item covers its content
    and its request's settings, but not these."""
    told: dict[str, object] = {}
    if multimodal is None:
        return told
    if multimodal.mm_processor_kwargs:
        told["processor"] = multimodal.mm_processor_kwargs
    if multimodal.mm_encoder_attn_dtype:
        told["encoder"] = [multimodal.mm_encoder_attn_dtype, multimodal.mm_encoder_fp8_scale_path]
    if multimodal.video_pruning_rate:
        told["pruning"] = [multimodal.video_pruning_rate, multimodal.video_pruning_method]
    return told


def names_images(config: VllmConfig) -> bool:
    """Whether vLLM names images and the like by their content. If it caches neither items nor prompts, it only numbers
    them, and starts at 1 after each start."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None or multimodal.mm_processor_cache_gb > 0:
        return True
    return bool(config.cache_config.enable_prefix_caching)


def _scheduler_block_tokens(groups: tuple[GroupSpec, ...]) -> int:
    from math import lcm

    return lcm(*(spec.block_tokens for spec in groups))


def _group(cache: KVCacheConfig, group_id: int) -> GroupSpec:
    group = cache.kv_cache_groups[group_id]
    spec = group.kv_cache_spec
    per_layer = [_layer_spec(spec, name) for name in group.layer_names]
    kind = _kind(per_layer[0])
    if any(_kind(other) is not kind for other in per_layer):
        raise refusal(f"group {group_id} mixes kinds of attention", "Report this model.")
    if any(getattr(layer, "non_causal", False) for layer in per_layer):
        raise refusal("the first tokens of a prompt attend to the last ones", "Run this model without kvtally.")
    window = per_layer[0].sliding_window if isinstance(per_layer[0], SlidingWindowSpec) else 0
    return GroupSpec(
        kind=kind,
        block_tokens=spec.block_size,
        page_bytes=(_page_bytes(cache, group.layer_names, per_layer),),
        window_tokens=window,
        detail=_detail(next(iter(iter_layer_specs(spec)))),
    )


def _page_bytes(cache: KVCacheConfig, names: list[str], per_layer: list[KVCacheSpec]) -> tuple[int, ...]:
    """Bytes of one block in each layer.

    Layers of one shape lie in one tensor. If a group has several shapes (an indexer beside its MLA, other heads in some
    layers), vLLM tells its scheduler only one of them. Pages are then as long as their strides, which both the
    scheduler and the workers know.
    """
    places = [_place(cache, name) for name in names]
    if len({id(place) for place in places}) == 1:
        return tuple(int(layer.real_page_size_bytes) for layer in per_layer)
    is_block_outermost = KVCacheLayout[cache.kv_cache_layout or ""].is_block_outermost
    return tuple(place.layer_stride if is_block_outermost else place.block_stride for place in places)


def _place(cache: KVCacheConfig, name: str) -> KVCacheTensor:
    for tensor in cache.kv_cache_tensors:
        if name in tensor.layers:
            return tensor
    raise refusal(f"layer {name} has no memory of its own", "Report this model.")


def _layer_spec(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind(spec: KVCacheSpec) -> GroupKind:
    if type(spec) in FULL:
        return GroupKind.FULL
    if type(spec) in SLIDING:
        return GroupKind.SLIDING
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise refusal(f"recurrent state in mode {spec.mamba_cache_mode!r}", "Enable prefix caching (mode 'align').")
        return GroupKind.RECURRENT
    raise refusal(f"{type(spec).__name__} is an unknown kind of KV cache", "Run this model without kvtally.")


def _detail(spec: KVCacheSpec) -> dict[str, str]:
    if isinstance(spec, MambaSpec):
        return {
            "kind": spec.mamba_type.name,
            "shapes": str(spec.shapes),
            "dtypes": ",".join(str(dtype) for dtype in spec.dtypes),
        }
    assert isinstance(spec, AttentionSpec)
    return {
        "kind": type(spec).__name__,
        "heads": str(spec.num_kv_heads),
        "head_size": str(spec.head_size),
        "dtype": str(spec.dtype),
        "kv_quant": str(spec.kv_quant_mode),
    }


def _backend(config: VllmConfig) -> str:
    """The device, and the attention backend if the user chose one: together they decide the format of a page."""
    chosen = config.attention_config.backend
    return f"{config.device_config.device_type}:{chosen.name if chosen is not None else 'default'}"


def group_layouts(layout: EngineLayout, cache: KVCacheConfig, tensors: dict[str, torch.Tensor]) -> list[GroupLayout]:
    """Where each group's layers lie in this rank's buffer, checked against the tensors that vLLM registered."""
    buffer_bytes = next(iter(tensors.values())).untyped_storage().nbytes()
    layouts = []
    for spec, names in zip(layout.groups, layout.layer_names, strict=True):
        layers = tuple(
            _layer_view(cache, name, page_bytes, tensors)
            for name, page_bytes in zip(names, spec.page_bytes[0], strict=True)
        )
        layouts.append(GroupLayout(spec, layers, cache.num_blocks, buffer_bytes))
    return layouts


def _layer_view(cache: KVCacheConfig, name: str, page_bytes: int, tensors: dict[str, torch.Tensor]) -> LayerView:
    placed = _place(cache, name)
    if name not in tensors:
        raise refusal(f"layer {name} has no memory of its own", "Report this model.")
    offset = placed.offset + placed.layers.index(name) * placed.layer_stride
    tensor = tensors[name]
    if tensor.storage_offset() * tensor.element_size() != offset:
        raise refusal(f"layer {name} is not where vLLM's configuration says", "Report this model.")
    return LayerView(offset, placed.block_stride, page_bytes)


def refusal(why: str, remedy: str) -> IncompatibleError:
    remedy += ' Or set "on_unsupported": "serve" in kv_connector_extra_config to run without reuse.'
    return IncompatibleError(f"kvtally cannot serve this engine: {why}", remedy=remedy, code="KV-209")
