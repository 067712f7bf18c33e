"""Loads: how many tokens a request may skip, and the jobs that bring them from the store into the engine's blocks.

    matched_tokens: None … n ─▶ allocated ─▶ LoadJob ─▶ worker half ─▶ reported ─▶ the request goes on

Owns the load jobs of the next step, the reports of loads that only some ranks have finished, and what an attempt begins
with. Neighbours: `scheduler` (left), `lookup_policy` (right: what the store has). Runs in vLLM's scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtally.core.namespace import GroupKind
from kvtally.core.receipts import NOTHING
from kvtally.vllm.counters import MISSES, TOKENS
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.lookup_thread import LookupAnswer
from kvtally.vllm.step_jobs import LoadJob, LoadReport
from kvtally.vllm.tracked_request import Attempt, TrackedRequest
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

MOST_EXPIRED = 4  # leases of a request that end before there is room for it; then it is computed


class Loads:
    """`world_size` ranks must report before a load is over."""

    def __init__(self, layout: EngineLayout, policy: LookupPolicy, *, world_size: int) -> None:
        self._layout = layout
        self._policy = policy
        self._counters = policy.counters
        self._world_size = world_size
        self._manager: KVCacheManager | None = None
        self._jobs: list[LoadJob] = []  # for the next step
        self._reports: dict[str, LoadReport] = {}  # of loads that some ranks have finished
        self._lagging: set[str] = set()  # requests that wait until vLLM asks without divergence (see `_state_lags`)
        # With divergence, vLLM says how much full attention it holds. The blocks of a sliding window below that may be
        # gone, and would not be loaded.
        kinds = {spec.kind for spec in layout.groups}
        self._has_states = GroupKind.RECURRENT in kinds
        self._may_diverge = self._has_states and GroupKind.SLIDING not in kinds

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    # ---- what may be skipped

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` may be loaded; None while that is not known yet."""
        if tracked.failure:
            return 0, False
        request, attempt = tracked.request, tracked.attempt
        # Where the engine's own cache covers nearly all, the store's answer is not waited for. With recurrent states
        # that is not known here: vLLM may count attention as computed whose state is gone.
        rest = request.num_tokens - 1 - computed_tokens
        is_covered = not self._has_states and self._policy.is_trifle(tracked, rest)
        if is_covered and self._policy.leave(tracked):
            attempt.known_tokens = max(attempt.known_tokens, computed_tokens)  # saved when they were computed
            return 0, False
        if not is_covered and self._policy.come_back(tracked):
            attempt.known_tokens = 0  # the engine has forgotten them, and the store may have, too
        answer = self._policy.answer(tracked)
        if answer is None:
            time.sleep(0)  # give the lookup thread the interpreter: an idle scheduler asks in a tight loop
            return None, False
        attempt.known_tokens = max(attempt.known_tokens, answer.end_tokens)
        self._ask_for_state(request, answer)
        lease = attempt.lease
        if lease is not None and not lease.is_live:  # the request found no room in time, or the store is gone
            self._policy.give_back(attempt)
            if lease.session.alive and tracked.expired < MOST_EXPIRED:
                tracked.expired += 1
                self._policy.ask_again(tracked)
                return self.matched_tokens(tracked, computed_tokens)
            attempt.unused = MissReason.LEASE_EXPIRED if lease.session.alive else MissReason.STORE_UNREACHABLE
            self._counters.count(MISSES, attempt.unused)
            return 0, False
        if lease is None:
            return 0, False
        if is_covered:
            attempt.unused = answer.reason or MissReason.NO_GAIN
            return 0, False
        external = answer.end_tokens - computed_tokens
        if external > 0:
            return external, True
        return (None, False) if self._state_lags(request, answer.end_tokens) else (0, False)

    def _ask_for_state(self, request: Request, answer: LookupAnswer) -> None:
        """Where the store has attention but no state, have vLLM make a state while it passes there.

        vLLM does so by itself for prefixes that its own cache has seen; this tells it of prefixes that the store has
        seen. It must be told each time: while there is no room for the request, vLLM looks at its own cache anew and
        forgets what it was told.
        """
        block = self._layout.block_tokens
        boundary = min(answer.attention_tokens, request.num_tokens - 1) // block * block
        if self._has_states and boundary > max(answer.end_tokens, request.shared_prefix_boundary):
            request.shared_prefix_boundary = boundary

    @property
    def supports_divergence(self) -> bool:
        """Whether vLLM may report attention that it still holds although the state there is gone."""
        return self._may_diverge and not self._lagging

    def _state_lags(self, request: Request, end_tokens: int) -> bool:
        """Whether the engine holds attention up to our hit or beyond, but only we have the state.

        vLLM can take a state only together with at least one external token, and would throw its attention hit away.
        So divergence is not supported until that request has its blocks: vLLM then reports what all its groups hold,
        and we load the rest. One step would not be enough: on a full engine others would take the room each time.
        """
        if not self.supports_divergence or self._manager is None:
            return False
        if self._manager.get_computed_blocks(request)[1] >= end_tokens:
            return False
        self._lagging.add(request.request_id)
        return True

    # ---- jobs

    def allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has given the request blocks: before a load, and once more when it goes on after the load."""
        self._lagging.discard(tracked.id)
        attempt, answer, lease = tracked.attempt, tracked.attempt.answer, tracked.attempt.lease
        if attempt.is_loading:
            return
        if external_tokens == 0 or answer is None or lease is None:
            self._policy.give_back(attempt)
            self._count(attempt)
            return
        tables = [list(table) for table in blocks.get_block_ids(group_ids=self._layout.group_ids)]
        have = answer.end_tokens - external_tokens
        self._jobs.append(LoadJob(tracked.id, lease.share(), list(answer.ends), answer.end_tokens, have, tables))
        attempt.is_loading, attempt.is_counted = True, False
        attempt.loaded = answer.sources.last(external_tokens)

    def _count(self, attempt: Attempt) -> None:
        """The request goes on, and everything is there on all ranks: now the loaded tokens count as reused."""
        if attempt.is_counted:
            return
        attempt.is_counted = True
        for place, tokens in attempt.loaded._asdict().items():
            self._counters.count(TOKENS, place, tokens)

    def take_jobs(self) -> list[LoadJob]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def began(self, tracked: TrackedRequest) -> None:
        """The attempt's first step is scheduled: its tokens so far were loaded, or came from the engine's own cache."""
        attempt = tracked.attempt
        self._policy.began(tracked)
        attempt.local_tokens = max(0, tracked.request.num_computed_tokens - attempt.loaded.tokens)
        if attempt.reason == MissReason.NO_GAIN and not attempt.reused_tokens:
            self._counters.count(MISSES, MissReason.NO_GAIN)

    def reported(self, loads: Mapping[str, LoadReport]) -> dict[str, LoadReport]:
        """Take in what workers report: the loads that are over now. Ranks may finish in different steps, but share one
        lease."""
        over = {}
        for request_id, load in loads.items():
            known = self._reports.pop(request_id, None)
            together = known.add(load) if known is not None else load
            if together.ranks < self._world_size:
                self._reports[request_id] = together
            else:
                over[request_id] = together
        return over

    def finished(self, tracked: TrackedRequest, report: LoadReport) -> None:
        """All ranks have finished the load."""
        attempt = tracked.attempt
        attempt.is_loading, attempt.load = False, report
        self._policy.give_back(attempt)
        if report.reason and not tracked.request.is_finished():
            self._counters.count(MISSES, report.reason)
            tracked.failure = report.reason
            attempt.loaded = NOTHING

    # ---- the end of an attempt

    def ended(self, tracked: TrackedRequest) -> None:
        """The request is over. A load that is still under way keeps its lease until it is over, too."""
        self._lagging.discard(tracked.id)
        self._policy.ended(tracked)
        if not tracked.attempt.is_loading:
            self._policy.give_back(tracked.attempt)

    def preempted(self, tracked: TrackedRequest) -> None:
        """vLLM has taken the request's blocks."""
        self._policy.give_back(tracked.attempt)
        self._policy.preempted(tracked)
