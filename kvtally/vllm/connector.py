"""The class vLLM sees. It delegates to the two halves and owns one thing: the edge.

An exception inside a connector method kills the engine. So each method that vLLM calls while it serves goes through
`edge`, which counts the exception, logs the first of its kind, and returns the answer that means "nothing reused". Only
the start may raise: a setting or a model that we cannot serve is refused with its remedy.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtally.client import TIMEOUT_S, StoreClient
from kvtally.config import ConnectorConfig, load
from kvtally.device import cpu
from kvtally.errors import IncompatibleError
from kvtally.vllm.autostart import ensure_store
from kvtally.vllm.compat import require_supported
from kvtally.vllm.counters import Counters
from kvtally.vllm.events import SaveEvents
from kvtally.vllm.identity import model_identity
from kvtally.vllm.layout import EngineLayout, engine_layout, group_layouts, names_images
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.lookup_thread import LookupThread
from kvtally.vllm.retention import advice
from kvtally.vllm.scheduler import SchedulerHalf
from kvtally.vllm.stats import ConnectorStats, PrometheusMetrics, results_counters, stats_of
from kvtally.vllm.step_jobs import StepJobs, WorkerReport
from kvtally.vllm.worker import Results, WorkerHalf, refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("kvtally.vllm")

P = ParamSpec("P")
R = TypeVar("R")

RESET_S = 5.0  # how long a reset of the cache may stop the engine
# An engine with nothing to compute steps in a tight loop until its transfers are done, and so keeps the interpreter
# from the thread that does them. In each of those steps it waits for that thread, for at most this long.
IDLE_WAIT_S = 0.005

# What vLLM calls the places that a store loads from. For a pool it has no name.
HIT_SOURCES = {
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "peer": CacheHitSource.P2P,
    "pool": CacheHitSource.EXTERNAL_UNSPECIFIED,
}

# The worker halves of this process, by the id of their engine.
workers: WeakValueDictionary[str, WorkerHalf] = WeakValueDictionary()

failures: Counter[str] = Counter()  # exceptions that `edge` has turned into misses, by method


def edge(otherwise: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Where the method raises, return `otherwise()`: at worst the cache is not used, and the engine lives."""

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception:  # the engine's edge
                failures[method.__name__] += 1
                if failures[method.__name__] == 1:
                    log.exception("kvtally failed in %s; requests continue without reuse", method.__name__)
                answer: R = otherwise()
                return answer

        return guarded

    return wrap


class KVTallyConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector: KVTally`. One instance per process and role."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._lookups: LookupThread | None = None
        self._neighbour: WorkerHalf | None = None  # in-process engines: the worker half that this scheduler half drives
        self._results = Results()
        self._callers_exception: BaseException | None = None  # what our caller was handling when the step began
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        # A request whose load failed is computed. By vLLM's default it would fail.
        transfer.kv_load_failure_policy = "recompute"
        settings = load(extra=transfer.kv_connector_extra_config).connector()
        self._serves_anyway = settings.on_unsupported == "serve"
        try:
            require_supported(allow_untested=settings.allow_untested)
            identity = settings.model_identity or self._identity(vllm_config)
            layout = engine_layout(vllm_config, kv_cache_config, model=identity)
        except IncompatibleError as error:
            self._give_up(error)
            return
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config, layout, settings)
        else:
            self._start_worker(vllm_config, layout, settings)

    def _give_up(self, error: IncompatibleError) -> None:
        """This engine cannot be served: stop its start, or serve without reuse if the settings say so."""
        if not self._serves_anyway:
            raise error
        log.warning("kvtally serves without reuse: %s", error)

    @staticmethod
    def _identity(config: VllmConfig) -> str:
        model = config.model_config
        if str(config.load_config.load_format) == "dummy":
            return f"dummy:{model.model}:{model.seed}"
        return model_identity(model.model, model.revision)

    def _start_scheduler(self, config: VllmConfig, layout: EngineLayout, settings: ConnectorConfig) -> None:
        address = ensure_store(settings)
        name = f"vllm scheduler {config.kv_transfer_config.engine_id}" if config.kv_transfer_config else "vllm"
        self._lookups = LookupThread(lambda: _client(address, name, layout, settings), layout.namespace)
        self._lookups.start()
        world = config.parallel_config.world_size
        announced = config.kv_events_config
        events = None
        if announced is not None and announced.enable_kv_cache_events:
            events = SaveEvents(layout, self._kv_cache_config, world_size=world)
        transfer = config.kv_transfer_config
        assert transfer is not None
        policy = LookupPolicy(
            self._lookups,
            Counters(),
            wait_ms=settings.wait_ms,
            steps_in_flight=config.max_concurrent_batches,
            is_alone=_is_alone(config),
            reads=transfer.is_kv_consumer,
            prefetch=settings.prefetch,
            always_load=settings.always_load,
            may_leave=not layout.has_states,
        )
        self._scheduler = SchedulerHalf(
            layout,
            policy,
            world_size=world,
            may_save=transfer.is_kv_producer,
            names_images=names_images(config),
            on_reset=settings.on_reset,
            events=events,
        )
        neighbour = workers.get(transfer.engine_id or "")
        if _is_in_process(config) and neighbour is not None and neighbour.is_running:
            self._neighbour = neighbour
        groups = ", ".join(f"{spec.kind}×{len(spec.page_bytes[0])}/{spec.block_tokens}" for spec in layout.groups)
        log.warning(
            "kvtally: groups [%s], chunk %d tokens, namespace %s, store %s",
            groups,
            layout.namespace.chunk_tokens,
            layout.namespace.digest.hex()[:12],
            address,
        )
        states = advice(
            layout.namespace,
            block_tokens=layout.block_tokens,
            interval_tokens=self._kv_cache_config.prefix_cache_retention_interval,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        if states is not None:
            log.warning("kvtally: %s", states)

    def _start_worker(self, config: VllmConfig, layout: EngineLayout, settings: ConnectorConfig) -> None:
        address = settings.store
        rank = config.parallel_config.rank
        name = f"vllm worker {rank}"
        self._layout = layout
        self._idle_wait_s = IDLE_WAIT_S if _is_alone(config) else 0.0
        self._worker = WorkerHalf(layout, rank, lambda: _client(address, name, layout, settings))
        if config.kv_transfer_config is not None and config.kv_transfer_config.engine_id:
            workers[config.kv_transfer_config.engine_id] = self._worker

    # ---- what we are

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost costs a later miss, nothing else

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self._scheduler is not None and self._scheduler.loads.supports_divergence

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBHNC"  # one block of one layer is one run of bytes

    # ---- scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    @edge(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @edge(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler else (0, False)

    @edge(lambda: None)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks, num_external_tokens)

    @edge(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        counts = self._scheduler.loading(request.request_id)._asdict()
        return {HIT_SOURCES[place]: tokens for place, tokens in counts.items() if tokens}

    @edge(StepJobs)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_step(scheduler_output) if self._scheduler else StepJobs()

    @edge(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.update(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @edge(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = self._scheduler.finished(request, block_ids) if self._scheduler is not None else None
        self._rest()
        return False, answer.params() if answer is not None else None

    @edge(lambda: None)
    def _rest(self) -> None:
        """An in-process engine is not stepped once its last request is answered. So its last saves are handed to the
        worker here, and no blocks are held while it rests: `reset_prefix_cache()` works right after `generate()`."""
        if self._neighbour is None or self._scheduler is None or self._scheduler.has_requests:
            return
        self._neighbour.save(self._scheduler.saves.take_late())
        self._scheduler.saves.rest()

    @edge(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.saves.is_busy

    # ---- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Refuses memory that is not laid out as vLLM's configuration says."""
        if self._worker is None or not kv_caches:
            return
        try:
            self._register(self._worker, kv_caches)
        except IncompatibleError as error:
            self._give_up(error)
            self._worker = None

    def _register(self, worker: WorkerHalf, kv_caches: dict[str, torch.Tensor]) -> None:
        layouts = group_layouts(self._layout, self._kv_cache_config, kv_caches)
        tensor = next(iter(kv_caches.values()))
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        if tensor.is_cuda:
            from kvtally.device.cuda import CudaCopies  # brings Triton along

            namespace = self._layout.namespace
            sizes = [namespace.object_bytes(group, 0, namespace.chunk_tokens) for group in range(len(layouts))]
            copies = CudaCopies(memory.device, largest_bytes=max(sizes))
            copies.prepare([layout.grain_bytes for layout in layouts])
            worker.register(layouts, memory, copies)
        else:
            worker.register(layouts, memory.numpy(), cpu)

    @edge(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this first in every step. Saves of finished requests start here and not after the forward: another
        engine may be waiting for a hand-off, and a step can take long."""
        metadata = kv_connector_metadata
        if self._worker is not None and isinstance(metadata, StepJobs):
            if not metadata.is_idle:
                self._worker.prepare()
            self._worker.load_first(metadata.early_loads)
            self._worker.save(metadata.late_saves)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._callers_exception = sys.exception()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._callers_exception = None

    @edge(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, StepJobs):
            self._worker.load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when its load is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: saves are taken after the forward, all layers at once."""

    @edge(lambda: None)
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._worker is None or not isinstance(metadata, StepJobs):
            return
        # vLLM calls this in a `finally`. An exception that is younger than the step means that the forward died, and
        # its blocks hold nothing. An older one belongs to the caller: `generate()` may run in an `except` block.
        if sys.exception() is not self._callers_exception:
            return
        self._worker.save(metadata.saves)

    @edge(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._connector_metadata
        if not isinstance(metadata, StepJobs):
            metadata = StepJobs()
        if self._worker is None:
            self._results = refused(metadata)
        else:
            self._results = self._worker.collect(self._idle_wait_s if metadata.is_idle else 0.0)
        return KVConnectorTransferResults(finished_recving=self._results.finished, failed_recving=self._results.failed)

    @edge(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        news = self._results
        return WorkerReport(news.saved, news.saved_bytes, news.loads, news.stored, news.lost)

    # ---- seen by the user

    @edge(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Everything that was counted since the last call. vLLM calls this once per step in each process."""
        if self._worker is not None:
            return stats_of(results_counters(self._results))
        return stats_of(self._scheduler.counters.take()) if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @edge(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._scheduler.saves.events if self._scheduler is not None else None
        return events.take() if events is not None else ()

    @edge(lambda: False)
    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return True
        if self._neighbour is not None:  # what follows may take the memory away that saves still read
            done = self._neighbour.finish_saves(RESET_S)
            self._scheduler.update_saves(WorkerReport(saved=done.saved, stored=done.stored, lost=done.lost))
        return self._scheduler.reset(RESET_S)

    @edge(lambda: None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._lookups is not None:
            self._lookups.stop()
        if self._scheduler is not None:
            self._scheduler.stop()


def _is_in_process(config: VllmConfig) -> bool:
    """Whether vLLM's `LLM` runs the engine in its caller's own process, with one worker there too."""
    return not envs.VLLM_ENABLE_V1_MULTIPROCESSING and config.parallel_config.world_size == 1


def _is_alone(config: VllmConfig) -> bool:
    """Whether no other engine waits for this one's steps. With data-parallel experts all engines step together, so an
    idle one must not slow its steps down."""
    return bool(config.parallel_config.data_parallel_size == 1)


def _client(address: str, name: str, layout: EngineLayout, settings: ConnectorConfig) -> StoreClient:
    """A client whose calls may take at least as long as a request may wait. If a save were given up earlier, the
    request that it was promised to would wait in vain."""
    patience_s = max(TIMEOUT_S, settings.wait_ms / 1e3)
    return StoreClient(address, name=name, namespace=layout.namespace, timeout_s=patience_s)
