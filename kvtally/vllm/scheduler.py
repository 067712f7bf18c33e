"""The scheduler half: the requests that vLLM schedules, what becomes of each, and its receipt.

    on_new_request ─▶ the store is asked ─▶ matched_tokens ─▶ after_alloc ─▶ loads        (`loads`)
    build_step: chunks and states that the step completes ─▶ saves                        (`saves`)
    finished: the end of the request is saved; a prefill for another engine answers with a hand-off

Owns the tracked requests, receipts and hand-offs; `loads` and `saves` own what their names say. Every method does a few
microseconds of bookkeeping: chain values, lookups and filing are the lookup thread's. Runs in vLLM's scheduler thread.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs
from vllm.v1.request import RequestStatus

from kvtally.core.handoff import Handoff
from kvtally.core.receipts import NOTHING, Loaded, Role
from kvtally.vllm.adapters import Adapters
from kvtally.vllm.boundaries import Boundaries, extras_of
from kvtally.vllm.events import SaveEvents
from kvtally.vllm.handoff import handoff_of, shorten_for_prefill
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.loads import Loads
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.saves import Saves
from kvtally.vllm.step_jobs import SaveJob, StepJobs, WorkerReport
from kvtally.vllm.tracked_request import Attempt, TrackedRequest
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("kvtally.vllm")


class SchedulerHalf:
    """`world_size` ranks report each load and each save. `may_save`: vLLM's role lets this engine save. `names_images`:
    the names that vLLM gives images tell them apart. `on_reset`: see `reset`."""

    def __init__(
        self,
        layout: EngineLayout,
        policy: LookupPolicy,
        *,
        world_size: int,
        may_save: bool = True,
        names_images: bool = True,
        on_reset: str = "part",
        events: SaveEvents | None = None,
    ) -> None:
        self.counters = policy.counters
        self.policy = policy
        self.loads = Loads(layout, policy, world_size=world_size)
        self.saves = Saves(layout, self.counters, world_size=world_size, events=events)
        self._thread = policy.thread
        self._layout = layout
        self._may_save = may_save
        self._names_images = names_images
        self._on_reset = on_reset
        self._salt = ""  # keeps what this engine computed since its last reset apart from everything else
        self._requests: dict[str, TrackedRequest] = {}
        self._adapters = Adapters()

    def bind(self, manager: KVCacheManager) -> None:
        self.loads.bind(manager)
        self.saves.bind(manager.block_pool)

    # ---- before a request runs

    def on_new_request(self, request: Request) -> None:
        """The request has arrived: ask the store at once, long before the scheduler reaches the request."""
        self.saves.wake()
        if request.request_id in self._requests:
            return
        extras = extras_of(request, self._adapters.adapter(request.lora_request), self._salt)
        # Parts of a streaming input that are yet to come may have images, too.
        is_unnamed = not self._names_images and (bool(request.mm_features) or request.resumable)
        is_opaque = request.prompt_embeds is not None or is_unnamed
        tracked = TrackedRequest(
            request,
            Boundaries(self._layout.namespace.chunk_tokens, extras),
            handoff_of(request.kv_transfer_params),
            is_opaque,
            prompt_tokens=request.num_prompt_tokens,
        )
        # Where a part of a streaming input ends, vLLM goes back to before a step that may be under way. Keys and values
        # are written anew then. But a state has that step in it for good, and so has everything computed from it.
        is_unsafe = request.resumable and self._layout.has_states
        tracked.may_save = self._may_save and not is_opaque and not is_unsafe
        self._requests[request.request_id] = tracked
        if tracked.is_prefill and tracked.may_save and not request.resumable:
            shorten_for_prefill(request)
        self.policy.arrived(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` may be loaded; None while that is not known yet."""
        tracked = self._current(request.request_id)
        return self.loads.matched_tokens(tracked, computed_tokens) if tracked is not None else (0, False)

    def _current(self, request_id: str) -> TrackedRequest | None:
        """The request, in the attempt that vLLM is in: if it has been preempted since, a new one begins here.

        A half of the receipt that was filed stands, because its attempt gave the first token: vLLM also delivers a
        token that was in flight, unless it says that it drops it.
        """
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.request.num_preemptions > tracked.attempt.number:
            self.loads.preempted(tracked)
            tracked.attempt = Attempt(tracked.request.num_preemptions)
            if tracked.request.drop_stale_output and not tracked.request.num_output_tokens:
                tracked.is_filed = False
        return tracked

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self.loads.allocated(tracked, blocks, external_tokens)

    def loading(self, request_id: str) -> Loaded:
        """The tokens that are being loaded for a request, by where the store had them."""
        tracked = self._requests.get(request_id)
        return tracked.attempt.loaded if tracked is not None else NOTHING

    # ---- one step

    def build_step(self, output: SchedulerOutput) -> StepJobs:
        """The jobs that go to the workers with this step."""
        self.policy.step_launched(output.total_num_scheduled_tokens)
        saves: list[SaveJob] = []
        is_planned = False
        try:
            self._plan_saves(output, saves)
            is_planned = True
        finally:
            if not is_planned:  # the edge turns this into an empty step
                self.saves.discard(saves)
        is_idle = not output.total_num_scheduled_tokens
        touches_blocks = not is_idle or output.new_block_ids_to_zero or output.kv_cache_block_copies
        jobs = StepJobs(saves=saves, late_saves=self.saves.take_late(), is_idle=is_idle)
        if touches_blocks:
            jobs.loads = self.loads.take_jobs()
        else:
            jobs.early_loads = self.loads.take_jobs()
        return jobs

    def _plan_saves(self, output: SchedulerOutput, saves: list[SaveJob]) -> None:
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._current(request_id)
            if tracked is None:
                continue
            if not tracked.attempt.is_running:
                self.loads.began(tracked)
                self.saves.began(tracked)
            computed_end = tracked.request.num_computed_tokens + count
            if not tracked.is_filed and computed_end >= tracked.request.num_prompt_tokens and not tracked.is_prefill:
                self._file_receipt(tracked)  # before the first token goes out: its reader may ask for the receipt
            job = self.saves.step(tracked, computed_end, state)
            if job is not None:
                saves.append(job)
        for request_id, offers in state.boundary_state_offloads.items():
            tracked = self._requests.get(request_id)
            job = self.saves.offered(tracked, offers, state) if tracked is not None else None
            if job is not None:
                saves.append(job)

    def update(self, report: WorkerReport) -> None:
        """A step is done: the news from all ranks."""
        self.policy.step_done()
        self.update_saves(report)
        for request_id, load in self.loads.reported(report.loads).items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self.loads.finished(tracked, load)
                if tracked.request.is_finished():  # aborted while it was loading
                    del self._requests[request_id]

    def update_saves(self, report: WorkerReport) -> None:
        """The part of a report that is about saves."""
        for tracked, reason in self.saves.reported(report):
            self._withdraw(tracked, reason)

    def stop(self) -> None:
        self._adapters.stop()

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def reset(self, timeout_s: float) -> bool:
        """vLLM's cache is void: its weights may be others from now on. False if older bytes may yet be used.

        What the store has was right when it was saved, and is right for engines whose weights stay. So it is not
        touched: this engine gives everything that it saves or asks for from now on a name of its own. Requests that
        are under way are neither saved nor promised anything: parts of them may be computed with either weights.
        With `on_reset` "keep", weights stay. With "forget", everything in the namespace is dropped, for all engines.
        """
        is_loading = any(tracked.attempt.is_loading for tracked in self._requests.values())
        is_quiet = not self.saves.is_busy and not is_loading
        if self._on_reset == "keep":
            return is_quiet
        for tracked in self._requests.values():
            if self._on_reset == "part":
                tracked.may_save, tracked.failure = False, MissReason.ABSENT
            if not tracked.attempt.is_loading:
                self.policy.forget(tracked)
        if self._on_reset == "forget":
            return self._thread.reset(timeout_s) and is_quiet
        self._salt = secrets.token_hex(16)
        log.warning("kvtally: this engine was reset; until its next start it shares nothing with others")
        return is_quiet

    # ---- the end of a request

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Handoff | None:
        """The request is over. A prefill for another engine answers with the hand-off."""
        tracked = self._current(request.request_id)
        if tracked is None:
            return None
        self.loads.ended(tracked)
        if tracked.attempt.is_running:
            self._adapters.used(request.lora_request)
        if tracked.attempt.is_loading:  # aborted: the worker reports the load later
            return None
        del self._requests[request.request_id]
        if tracked.is_prefill:
            return self._hand_over(tracked, block_ids)
        self.saves.finish(tracked, block_ids)
        self._file_receipt(tracked)
        return None

    def _hand_over(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]]) -> Handoff | None:
        """Save a prompt that was computed for another engine, and say what that engine will find."""
        request, asked = tracked.request, tracked.handoff
        assert asked is not None
        if request.status == RequestStatus.FINISHED_ABORTED:
            return None
        saved = self.saves.hand_over(tracked, block_ids)
        chain = tracked.boundaries.tail(request.all_token_ids, saved).chain if saved else b""
        refused = MissReason.REFUSED if tracked.prompt_tokens > 1 else MissReason.NO_GAIN
        if not tracked.boundaries.is_named:
            refused = MissReason.UNKNOWN_ADAPTER
        reason = "" if saved else tracked.lost or refused
        half = structs.replace(tracked.half(Role.PREFILL), saved_tokens=saved, chain=chain, reason=reason)
        tracked.promised = half if saved else None
        self._thread.file(asked.ticket, half)
        return Handoff(
            ticket=asked.ticket,
            role=Role.PREFILL,
            store=self._thread.store,
            namespace=self._layout.namespace.digest.hex(),
            saved_tokens=saved,
            prompt_tokens=half.prompt_tokens,
            chain=chain.hex(),
            address=self._thread.address,
            state="pending" if saved else "",
            reason=reason,
            tokens_gpu=half.tokens_gpu,
            tokens_host=half.tokens_host,
            tokens_disk=half.tokens_disk,
            tokens_peer=half.tokens_peer,
            tokens_pool=half.tokens_pool,
            computed_tokens=half.computed_tokens,
        )

    def _withdraw(self, tracked: TrackedRequest, reason: str) -> None:
        """Something of a request could not be saved. An engine to which it was promised must not wait for it."""
        tracked.lost = tracked.lost or reason
        if tracked.promised is not None and tracked.handoff is not None:
            withdrawn = structs.replace(tracked.promised, saved_tokens=0, chain=b"", reason=tracked.lost)
            self._thread.file(tracked.handoff.ticket, withdrawn)
            tracked.promised = None

    def _file_receipt(self, tracked: TrackedRequest) -> None:
        if not tracked.is_filed:
            tracked.is_filed = True
            ticket = tracked.handoff.ticket if tracked.handoff is not None else tracked.id
            self._thread.file(ticket, tracked.half(Role.DECODE, holds_beginnings=not self._layout.has_states))
