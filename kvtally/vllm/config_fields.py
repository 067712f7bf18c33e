"""Every field of vLLM's configuration, and how the namespace knows it where it decides the bytes of KV cache.

    In(default)     part of the namespace's detail where the value is not `default`, by the name "section.field"
    Known(where)    the namespace says it in another place
    Out(why)        decides no bytes

The rule: a field is `In` where it may change the function that the model computes, or the format of its KV cache. It is
`Out` where it only chooses among implementations of one function: kernels round differently, and so do batches of
another size, which vLLM's own prefix cache mixes as well. A field that we are not sure of is `In`: two engines that
needlessly share nothing lose time, two that wrongly share answer wrongly.

`In` holds vLLM 0.32's default by value. So an absent entry keeps its meaning if a later vLLM changes the default.
A unit test compares this table with vLLM's classes, and fails for a field that is not here. Imports no vLLM.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from blake3 import blake3

from kvtally.vllm.identity import plain


class In(NamedTuple):
    default: object
    alike: tuple[object, ...] = ()  # values that mean the same as the default


class Known(NamedTuple):
    where: str


class Out(NamedTuple):
    why: str


Field = In | Known | Out

LONGEST_VALUE = 200  # characters; of a longer value, the namespace has a digest

KERNEL = Out("chooses or tunes kernels of one function")
PLACEMENT = Out("where processes run and how they talk to each other")
SCHEDULING = Out("when and together with what tokens are computed, not what")
OUTPUT = Out("what is done with the model's output")
TEXT = Out("how text becomes tokens, or tokens text; chain values are made of tokens")
MEMORY = Out("how much memory is used, and for what")
DERIVED = Out("vLLM derives it from other fields")
FILES = Known("the model's identity: it is made of the files, or of the hub's commit")
GROUPS = Known("the groups: kinds, block sizes, page sizes, windows, dtypes")
REFUSED = Known("an engine that sets it is refused")
UNREAD = Out("of connectors other than ours")
# Load formats that read the files which "auto" reads.
SAFETENSORS = ("hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")

FIELDS: dict[str, dict[str, Field]] = {
    "": {  # of VllmConfig itself; a section that has no table of its own is judged here, as a whole
        "model_config": Known("its table"),
        "cache_config": Known("its table"),
        "parallel_config": Known("its table"),
        "load_config": Known("its table"),
        "attention_config": Known("its table"),
        "mamba_config": Known("its table"),
        "kernel_config": Known("its table"),
        "lora_config": Known("its table"),
        "kv_transfer_config": Known("its table"),
        "device_config": Known("backend"),
        "speculative_config": REFUSED,
        "additional_config": In({}),  # of platforms and models outside vLLM: nobody knows what it says
        "quant_config": Known("quantisation, model_config.quantization_config and the model's identity"),
        "scheduler_config": SCHEDULING,
        "offload_config": MEMORY,
        "engram_config": MEMORY,
        "aux_output_config": OUTPUT,
        "watermark_config": OUTPUT,
        "diffusion_config": REFUSED,
        "structured_outputs_config": OUTPUT,
        "observability_config": OUTPUT,
        "logging_config": OUTPUT,
        "compilation_config": KERNEL,
        "optimization_level": KERNEL,
        "performance_mode": KERNEL,
        "profiler_config": OUTPUT,
        "kv_events_config": OUTPUT,
        "ec_transfer_config": Out("moves an encoder's output, which is named by its item"),
        "ec_manager_config": Out("keeps an encoder's output, which is named by its item"),
        "reasoning_config": OUTPUT,
        "instance_id": PLACEMENT,
        "weight_transfer_config": Out(
            "how weights come that replace others; the setting connector.on_reset says what then"
        ),
        "shutdown_timeout": PLACEMENT,
    },
    "model_config": {
        "model": FILES,
        "model_weights": FILES,
        "runner": OUTPUT,
        "convert": OUTPUT,
        "tokenizer": TEXT,
        "tokenizer_mode": TEXT,
        "trust_remote_code": FILES,  # what code there is lies with the weights
        "dtype": Known("model_dtype"),
        "seed": Known("the model's identity, where weights are drawn at random; else of sampling"),
        "hf_config": Known("the model's identity and overrides"),
        "hf_text_config": Known("the model's identity and overrides"),
        "is_submodel_config": DERIVED,
        "word_embeddings_untied_by_checkpoint": DERIVED,
        "hf_config_path": Known("overrides"),
        "allowed_local_media_path": Out("which items are allowed"),
        "allowed_media_domains": Out("which items are allowed"),
        "revision": FILES,
        "code_revision": In(None),
        "tokenizer_revision": TEXT,
        "max_model_len": Known("max_model_len, where it changes what is computed"),
        "spec_target_max_model_len": REFUSED,
        "quantization": Known("quantisation"),
        "quantization_config": In(None),
        "allow_deprecated_quantization": Out("whether an engine starts"),
        "enforce_eager": KERNEL,
        "return_sampling_mask": OUTPUT,
        "max_logprobs": OUTPUT,
        "logprobs_mode": OUTPUT,
        "use_fp64_gumbel": OUTPUT,
        "enable_trace_replay": OUTPUT,
        "disable_sliding_window": GROUPS,
        "disable_cascade_attn": KERNEL,
        "skip_tokenizer_init": TEXT,
        "enable_prompt_embeds": Out("requests that have embeddings are neither saved nor reused"),
        "served_model_name": OUTPUT,
        "config_format": In("auto"),
        "hf_token": FILES,
        "hf_overrides": Known("overrides"),
        "model_class_overrides": In({}),
        "generation_config": OUTPUT,
        "override_generation_config": OUTPUT,
        "enable_sleep_mode": MEMORY,
        "sleep_preserve_parameter_names": MEMORY,
        "sleep_mode_backend": MEMORY,
        "sleep_mode_offload_cudagraph": MEMORY,
        "enable_nccl_comm_suspend": MEMORY,
        "enable_cumem_allocator": MEMORY,
        "model_impl": In("auto"),
        "logits_processors": OUTPUT,
        "io_processor_plugin": OUTPUT,
        "renderer_num_workers": PLACEMENT,
        "pooler_config": OUTPUT,
        "multimodal_config": Known("its table"),
    },
    "model_config.multimodal_config": {
        "language_model_only": Out("which items are allowed"),
        "limit_per_prompt": Out("which items are allowed"),
        "enable_mm_embeds": Out("which items are allowed; embeddings are named by their content"),
        "media_io_kwargs": In({}),
        "mm_processor_kwargs": Known("images"),
        "mm_device_do_normalize": KERNEL,
        "mm_processor_cache_gb": Known("names_images: where it is 0, requests with items may not be reused"),
        "mm_processor_cache_type": MEMORY,
        "mm_hasher_algorithm": Out("how items are named; another algorithm gives another name"),
        "mm_shm_cache_max_object_size_mb": MEMORY,
        "mm_encoder_only": GROUPS,  # there are none then
        "mm_encoder_tp_mode": PLACEMENT,
        "mm_encoder_attn_backend": KERNEL,
        "mm_encoder_attn_dtype": Known("images"),
        "mm_encoder_fp8_scale_path": Known("images"),
        "mm_encoder_fp8_scale_save_path": OUTPUT,
        "mm_encoder_fp8_scale_save_margin": OUTPUT,
        "interleave_mm_strings": TEXT,
        "skip_mm_profiling": MEMORY,
        "video_pruning_rate": Known("images"),
        "video_pruning_method": Known("images"),
        "mm_tensor_ipc": PLACEMENT,
        "allow_missing_mm_embeddings": Out("where an item's embedding comes from"),
        "mm_ipc_gpu_memory_gb": MEMORY,
    },
    "cache_config": {
        "block_size": GROUPS,
        "user_specified_block_size": DERIVED,
        "kv_cache_layout": Known("layout"),
        "prefix_match_unit": Known("alignment_tokens"),
        "gpu_memory_utilization": MEMORY,
        "cache_dtype": Known("cache_dtype"),
        "is_attention_free": GROUPS,
        "num_gpu_blocks_override": MEMORY,
        "sliding_window": GROUPS,
        "enable_prefix_caching": SCHEDULING,
        "prefix_caching_hash_algo": Out("the names of vLLM's own cache; ours are made of tokens"),
        "prefix_cache_retention_interval": Out("which blocks are kept"),
        "kv_cache_dtype_skip_layers": In([]),
        "mamba_page_size_padded": GROUPS,
        "skip_page_size_padded": GROUPS,
        "mamba_block_size": GROUPS,
        "mamba_cache_dtype": GROUPS,
        "mamba_ssm_cache_dtype": GROUPS,
        "mamba_cache_mode": GROUPS,
        "enable_mamba_shared_prefix_checkpoint": Out("which blocks are kept"),
        "replayssm_buffer_len": Out("of use_replayssm, which vLLM refuses beside a connector"),
        "use_replayssm": Out("vLLM refuses it beside a connector"),
        "use_kda_recoverssm": DERIVED,
        "num_gpu_blocks": MEMORY,
        "num_cpu_blocks": MEMORY,
        "effective_attention_block_size": DERIVED,
        "kv_cache_size_tokens": MEMORY,
        "kv_cache_max_concurrency": MEMORY,
        "hash_block_size": DERIVED,
        "cache_hit_alignment_tokens": Known("alignment_tokens"),
        "kv_sharing_fast_prefill": In(False),
        "swa_bounded_replay": In(True),
        "kv_cache_memory_bytes": MEMORY,
        "kv_offloading_size": UNREAD,
        "kv_offloading_backend": UNREAD,
        "_block_size_resolved": DERIVED,
    },
    "parallel_config": {
        "pipeline_parallel_size": REFUSED,
        "tensor_parallel_size": Known("tensor_parallel"),
        "prefill_context_parallel_size": REFUSED,
        "data_parallel_size": PLACEMENT,
        "data_parallel_size_local": PLACEMENT,
        "data_parallel_rank": PLACEMENT,
        "data_parallel_rank_local": PLACEMENT,
        "data_parallel_master_ip": PLACEMENT,
        "data_parallel_rpc_port": PLACEMENT,
        "dp_sync_interval": SCHEDULING,
        "data_parallel_master_port": PLACEMENT,
        "data_parallel_backend": PLACEMENT,
        "data_parallel_external_lb": PLACEMENT,
        "data_parallel_hybrid_lb": PLACEMENT,
        "is_moe_model": DERIVED,
        "enable_hc_sp": PLACEMENT,
        "enable_expert_parallel": PLACEMENT,
        "enable_batch_sharded_sampling": OUTPUT,
        "enable_ep_weight_filter": PLACEMENT,
        "enable_eplb": PLACEMENT,
        "eplb_config": PLACEMENT,
        "expert_placement_strategy": PLACEMENT,
        "all2all_backend": In("allgather_reducescatter"),  # some send what they exchange in 8 bits
        "max_parallel_loading_workers": PLACEMENT,
        "disable_custom_all_reduce": KERNEL,
        "enable_shm_tensor_arena": PLACEMENT,
        "enable_elastic_ep": PLACEMENT,
        "elastic_ep_max_dp_size": PLACEMENT,
        "enable_dbo": SCHEDULING,
        "ubatch_size": SCHEDULING,
        "dbo_decode_token_threshold": SCHEDULING,
        "dbo_prefill_token_threshold": SCHEDULING,
        "disable_nccl_for_dp_synchronization": PLACEMENT,
        "ray_workers_use_nsight": PLACEMENT,
        "ray_runtime_env": PLACEMENT,
        "placement_group": PLACEMENT,
        "distributed_executor_backend": PLACEMENT,
        "worker_cls": Out("the user's own code cannot be named: give such an engine a model_identity"),
        "worker_extension_cls": Out("the user's own code cannot be named: give such an engine a model_identity"),
        "master_addr": PLACEMENT,
        "master_port": PLACEMENT,
        "node_rank": PLACEMENT,
        "nnodes": PLACEMENT,
        "numa_bind": PLACEMENT,
        "numa_bind_nodes": PLACEMENT,
        "numa_bind_cpus": PLACEMENT,
        "assigned_physical_gpu_ids": PLACEMENT,
        "distributed_timeout_seconds": PLACEMENT,
        "cpu_distributed_timeout_seconds": PLACEMENT,
        "world_size": PLACEMENT,
        "rank": Known("each object's rank"),
        "_data_parallel_master_port_list": PLACEMENT,
        "_coord_store_port": PLACEMENT,
        "decode_context_parallel_size": REFUSED,
        "dcp_kv_cache_interleave_size": REFUSED,
        "dcp_comm_backend": REFUSED,
        "dcp_q_replicate": REFUSED,
        "cp_kv_cache_interleave_size": REFUSED,
        "_allow_auto_resolve_cp_interleave_size": REFUSED,
        "data_parallel_index": PLACEMENT,
        "_api_process_count": PLACEMENT,
        "_api_process_rank": PLACEMENT,
        "enable_fault_tolerance": PLACEMENT,
        "fault_tolerance_config": PLACEMENT,
    },
    "load_config": {
        "load_format": In("auto", (*SAFETENSORS, "dummy")),  # the model's identity says "dummy"
        "download_dir": FILES,
        "safetensors_load_strategy": MEMORY,
        "safetensors_prefetch_num_threads": MEMORY,
        "safetensors_prefetch_block_size": MEMORY,
        "model_loader_extra_config": In({}),  # some loaders take the weights' place from it
        "device": PLACEMENT,
        "ignore_patterns": In(["original/**/*"]),
        "use_tqdm_on_load": OUTPUT,
        "pt_load_map_location": PLACEMENT,
    },
    "attention_config": {
        "backend": Known("backend"),
        "minimax_m3_msa_decode_backend": KERNEL,
        "backend_per_kind": In({}),
        "flash_attn_version": KERNEL,
        "flash_attn_max_num_splits_for_cuda_graph": KERNEL,
        "tokenspeed_mla_min_split_kv": KERNEL,
        "tq_max_kv_splits_for_cuda_graph": KERNEL,
        "use_trtllm_attention": In(None),  # with an 8-bit cache it quantises queries as well
        "disable_flashinfer_q_quantization": In(False),
        "mla_prefill_backend": KERNEL,
        "use_prefill_query_quantization": In(False),
        "indexer_kv_dtype": In("auto"),
        "indexer_sparse_logits": In(False),
        "hisparse_config": GROUPS,  # of a kind that is refused
        "use_non_causal": In(False),
        "sparse_mla_force_mqa": KERNEL,
        "sparse_mla_prefill_workspace_factor": MEMORY,
        "flex_attn_block_m": KERNEL,
        "flex_attn_block_n": KERNEL,
        "flex_attn_q_block_size": KERNEL,
        "flex_attn_kv_block_size": KERNEL,
    },
    "mamba_config": {
        "backend": KERNEL,
        "enable_stochastic_rounding": In(False),
        "stochastic_rounding_philox_rounds": In(0),
        "ssu_algorithm": KERNEL,
    },
    "kernel_config": {
        "ir_op_priority": KERNEL,
        "enable_flashinfer_autotune": KERNEL,
        "enable_rocm_segmented_attn_autotune": KERNEL,
        "enable_cutedsl_warmup": KERNEL,
        "enable_jit_warmup": KERNEL,
        "moe_backend": In("auto"),  # of quantised layers, some quantise activations and some do not
        "sparse_indexer_topk_backend": KERNEL,
        "linear_backend": In("auto"),
        "linear_backend_per_quant": In(None),
    },
    "lora_config": {
        "max_lora_rank": MEMORY,
        "max_loras": MEMORY,
        "fully_sharded_loras": PLACEMENT,
        "max_cpu_loras": MEMORY,
        "lora_dtype": Known("lora_dtype, where it is not the model's"),
        "target_modules": In(None),
        "default_mm_loras": Out("requests then name the adapter"),
        "enable_tower_connector_lora": In(False),
        "specialize_active_lora": KERNEL,
        "enable_mixed_moe_lora_format": KERNEL,
        "enable_moe_shared_loras": In(False),
        "max_lora_cls_labels": OUTPUT,
    },
    "kv_transfer_config": {
        "kv_connector": UNREAD,
        "engine_id": PLACEMENT,
        "kv_buffer_device": UNREAD,
        "kv_role": Out("who saves and who loads"),
        "kv_port": UNREAD,
        "kv_connector_extra_config": Out("our settings; of those, model_identity is the model's identity"),
        "kv_connector_module_path": UNREAD,
        "enable_permute_local_kv": UNREAD,
        "kv_load_failure_policy": Out("what becomes of a request whose load failed"),
    },
}


def decisive(config: object) -> dict[str, str]:
    """Every `In` field of a `VllmConfig` that is not what it is by default, by "section.field"."""
    told = {}
    for path, fields in FIELDS.items():
        section: Any = config
        for name in path.split(".") if path else ():
            section = getattr(section, name, None)
        for name, field in fields.items():
            if isinstance(field, In):
                value = getattr(section, name, field.default)  # a section may be None, and a field another version's
                if plain(value) != plain(field.default) and value not in field.alike:
                    told[f"{path}.{name}" if path else name] = _text(value)
    return told


def _text(value: object) -> str:
    text = json.dumps(plain(value), sort_keys=True)
    return text if len(text) <= LONGEST_VALUE else blake3(text.encode()).hexdigest(length=16)
