"""Saves: which blocks of a request go to the store with which step, and holding them until they are there.

    each step: chunks, tails and states that it completes ─▶ SaveJob, blocks held ─▶ worker half ─▶ reported ─▶ let go
    the end of a request: the end of its prompt or answer, and everything that was left until then, in the same way

A recurrent state is saved only where vLLM offers it, at exactly the boundary that vLLM names, and at the end of a
request if nothing was computed beyond. Owns the held blocks, and what an attempt has saved. Most steps of most requests
save nothing, and cost a few comparisons. Runs in vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtally.core.geometry import NULL_BLOCK, chunk_block_range
from kvtally.core.namespace import GroupKind
from kvtally.vllm.boundaries import Boundary
from kvtally.vllm.counters import SAVES, Counters
from kvtally.vllm.events import SaveEvents
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.step_jobs import SaveItem, SaveJob, WorkerReport
from kvtally.vllm.tracked_request import TrackedRequest
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import KVConnectorBlockState

# The share of the engine's blocks that may be held for saves: where saving is slower than computing, or the store takes
# nothing, the engine must not run out of blocks. A hand-off is saved whole or not at all, and another engine waits for
# it, so it may begin while less than a larger share is held.
MOST_HELD = 1 / 4
MOST_HELD_FOR_HANDOFFS = 1 / 2

Tables = Sequence[Sequence[int]]  # a request's block ids, for each of vLLM's groups
States = dict[int, list[tuple[int, int]]]  # by boundary: the groups that have a state there, and the block of each


class Held(NamedTuple):
    """Blocks that outlive their request until they are saved."""

    tracked: TrackedRequest
    blocks: list[int]
    missing: int  # ranks that have not reported yet


class Saves:
    """`world_size` ranks must report before a save's blocks are let go."""

    def __init__(
        self, layout: EngineLayout, counters: Counters, *, world_size: int, events: SaveEvents | None = None
    ) -> None:
        self.events = events
        self._layout = layout
        self._chunk_tokens = layout.namespace.chunk_tokens
        self._counters = counters
        self._world_size = world_size
        self._pool: BlockPool | None = None
        self._held: dict[int, Held] = {}  # by save job
        self._held_blocks = 0
        self._is_resting = False  # see `rest`
        self._late: list[SaveJob] = []  # of finished requests, for the next step
        self._last_job = 0
        self._attention = [g for g, spec in enumerate(layout.groups) if spec.kind is not GroupKind.RECURRENT]
        self._recurrent = [g for g, spec in enumerate(layout.groups) if spec.kind is GroupKind.RECURRENT]
        self._group_of = {group_id: g for g, group_id in enumerate(layout.group_ids)}

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    # ---- one step

    def began(self, tracked: TrackedRequest) -> None:
        """The attempt's first step is scheduled: what the store is known to have is not saved again."""
        tracked.attempt.saved_chunks = tracked.attempt.known_tokens // self._chunk_tokens

    def step(self, tracked: TrackedRequest, computed_end: int, state: KVConnectorBlockState) -> SaveJob | None:
        """The chunks, and the end of the prompt, that a step completes. vLLM copies a block table to hand it out, so it
        is asked for one only if something is due."""
        if not self._is_due(tracked, computed_end):
            return None
        if not self._room() > 0:
            self._counters.count(SAVES, "left")  # a later step saves it, or the end of the request
            return None
        tables = state.get_block_ids(tracked.id)
        if tables is None:
            return None
        return self._job(
            tracked, self._chunk_items(tracked, computed_end, tables) + self._tail_items(tracked, computed_end, tables)
        )

    def offered(
        self, tracked: TrackedRequest, offers: Sequence[tuple[int, int, int]], state: KVConnectorBlockState
    ) -> SaveJob | None:
        """The recurrent states that are worth saving, of those that vLLM offers in this step."""
        if not tracked.may_save or not tracked.are_boundaries_free:
            return None
        kept = self._kept_states(tracked, offers)
        if not kept:
            return None
        if not self._room() > 0:
            self._counters.count(SAVES, "left")
            return None
        return self._job(tracked, self._state_items(tracked, kept, state))

    def discard(self, jobs: Iterable[SaveJob]) -> None:
        """These jobs never reach the workers, so nobody would report them."""
        self._let_go(job.id for job in jobs)

    # ---- chunks and tails

    def _is_due(self, tracked: TrackedRequest, computed_end: int) -> bool:
        """Whether a step completes something that is to be saved, and its name can be worked out."""
        attempt = tracked.attempt
        is_tail_due = not attempt.is_tail_saved and self._is_tail_due(tracked, computed_end)
        if not is_tail_due and self._complete_chunks(tracked, computed_end) <= attempt.saved_chunks:
            return False
        return tracked.may_save and tracked.are_boundaries_free

    def _complete_chunks(self, tracked: TrackedRequest, computed_end: int) -> int:
        """With asynchronous scheduling the last token may not be known yet: its chunk is saved one step later."""
        return min(computed_end, tracked.request.num_tokens) // self._chunk_tokens

    def _chunk_items(self, tracked: TrackedRequest, computed_end: int, tables: Tables) -> list[SaveItem]:
        """Attention objects of every complete chunk that is not saved yet."""
        complete, saved = self._complete_chunks(tracked, computed_end), tracked.attempt.saved_chunks
        if complete <= saved:
            return []
        tracked.boundaries.extend(tracked.request.all_token_ids, complete * self._chunk_tokens)
        items = []
        for index in range(saved, min(complete, len(tracked.boundaries.chains))):
            items += self._attention_items(tracked.boundaries.chunk(index), tables)
        tracked.attempt.saved_chunks = complete
        return items

    def _is_tail_due(self, tracked: TrackedRequest, computed_end: int) -> bool:
        """Never for a prefill for another engine: it saves the end that it hands over."""
        prompt = tracked.request.num_prompt_tokens
        if tracked.attempt.is_tail_saved or computed_end < prompt or self._recurrent or tracked.is_prefill:
            return False
        return (prompt - 1) % self._chunk_tokens > 0

    def _tail_items(self, tracked: TrackedRequest, computed_end: int, tables: Tables) -> list[SaveItem]:
        """The end of the prompt, if it lies between two chunks. It makes a repeat of a short prompt a hit."""
        if not self._is_tail_due(tracked, computed_end):
            return []
        tracked.attempt.is_tail_saved = True
        end = tracked.request.num_prompt_tokens - 1
        return self._attention_items(tracked.boundaries.tail(tracked.request.all_token_ids, end), tables)

    def _attention_items(self, boundary: Boundary, tables: Tables) -> list[SaveItem]:
        items = []
        for group in self._attention:
            table = tables[self._layout.group_ids[group]]
            span = chunk_block_range(self._layout.groups[group], boundary.start_tokens, boundary.end_tokens)
            ids = list(table[span.start : span.stop])
            if len(ids) == len(span) and NULL_BLOCK not in ids:  # null: out of the window, gone, and not needed there
                items.append(SaveItem(*boundary, group, ids))
        return items

    # ---- states

    def _kept_states(self, tracked: TrackedRequest, offers: Sequence[tuple[int, int, int]]) -> States:
        kept: States = {}
        for group_id, block_id, end in offers:
            group = self._group_of.get(group_id)
            if group is not None and block_id != NULL_BLOCK and self._is_kept(tracked, end):
                kept.setdefault(end, []).append((group, block_id))
        return kept

    def _is_kept(self, tracked: TrackedRequest, end: int) -> bool:
        """Whether a state at this boundary is worth its bytes (decision 0018).

        At the end of a chunk always. Elsewhere only up to the prompt's end, where a later prompt may go on from it: the
        last one, for a repeat or a longer prompt; the one that vLLM was asked for, because prompts part there; and of
        the others one for each chunk's length at most, however short the engine's blocks are.
        """
        request, answer, block = tracked.request, tracked.attempt.answer, self._layout.block_tokens
        loaded = answer.end_tokens if answer is not None else 0
        if end == loaded or end > request.num_tokens:
            return False
        if end % self._chunk_tokens == 0:
            return True
        if end > request.num_prompt_tokens:
            return False
        is_last = end + block >= request.num_prompt_tokens
        is_shared = 0 <= request.shared_prefix_boundary - end < block
        return is_last or is_shared or end - max(loaded, tracked.attempt.state_tokens) >= self._chunk_tokens

    def _state_items(self, tracked: TrackedRequest, kept: States, state: KVConnectorBlockState) -> list[SaveItem]:
        """States at exactly the boundaries that vLLM names; inside a chunk, with the attention up to there."""
        items: list[SaveItem] = []
        for end, blocks in sorted(kept.items()):
            boundary = tracked.boundaries.tail(tracked.request.all_token_ids, end)
            if end % self._chunk_tokens:
                tables = state.get_block_ids(tracked.id)
                items += self._attention_items(boundary, tables) if tables is not None else []
            items += [SaveItem(*boundary, group, [block_id]) for group, block_id in blocks]
            tracked.attempt.state_tokens = end
        return items

    # ---- the end of a request

    def finish(self, tracked: TrackedRequest, tables: Tables) -> None:
        """Save the end of the conversation so far, so that its next turn goes on from here, and everything that was
        left until now: as much of it, from its beginning, as may be held. No later step can save the rest."""
        if not any(tables) or not tracked.may_save or not tracked.are_boundaries_free:
            return
        end = min(tracked.request.num_computed_tokens, tracked.request.num_tokens)
        items = self._chunk_items(tracked, end, tables) + self._tail_items(tracked, end, tables)
        if end > tracked.request.num_prompt_tokens:
            items += self._end_items(tracked, end, tables)
        fitting = self._fitting(items)
        if len(fitting) < len(items):
            self._counters.count(SAVES, "left")
        self._add_late(tracked, fitting)

    def hand_over(self, tracked: TrackedRequest, tables: Tables) -> int:
        """Save a prompt that was computed for another engine, whole or not at all: up to which boundary, or 0."""
        request, end = tracked.request, tracked.request.num_prompt_tokens
        if not (tracked.hands_over and tracked.are_boundaries_free and request.num_computed_tokens >= end):
            return 0
        last = self._end_items(tracked, end, tables)
        items = self._chunk_items(tracked, end, tables) + last
        if items and not self._room(MOST_HELD_FOR_HANDOFFS) > 0:
            self._counters.count(SAVES, "left")
            tracked.lost = tracked.lost or MissReason.LIMIT
        else:
            self._add_late(tracked, items)
        is_whole_chunks = end % self._chunk_tokens == 0 and not self._recurrent
        return end if (last or is_whole_chunks) and not tracked.lost else 0

    def _end_items(self, tracked: TrackedRequest, end: int, tables: Tables) -> list[SaveItem]:
        """All objects at the end of a finished request; none if a state there is missing.

        The running state is the one at exactly `end` only if nothing was, or is being, computed beyond. vLLM hands over
        the end of a request by the same rule.
        """
        request = tracked.request
        boundary = tracked.boundaries.tail(request.all_token_ids, end)
        items = self._attention_items(boundary, tables) if end % self._chunk_tokens else []
        if not self._recurrent:
            return items
        if request.num_computed_tokens != end or request.num_in_flight_tokens:
            return []
        for group in self._recurrent:
            slot = (end - 1) // self._layout.groups[group].block_tokens
            table = tables[self._layout.group_ids[group]]
            if slot >= len(table) or table[slot] == NULL_BLOCK:
                return []
            items.append(SaveItem(*boundary, group, [table[slot]]))
        return items

    def _add_late(self, tracked: TrackedRequest, items: list[SaveItem]) -> None:
        job = self._job(tracked, items)
        if job is not None:
            self._late.append(job)

    def take_late(self) -> list[SaveJob]:
        """Saves of finished requests."""
        late, self._late = self._late, []
        return late

    # ---- held blocks

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping although it has no requests: blocks are held."""
        return bool(self._held or self._late)

    def _room(self, share: float = MOST_HELD) -> float:
        """How many more blocks may be held."""
        return self._pool.num_gpu_blocks * share - self._held_blocks if self._pool is not None else 0.0

    def _fitting(self, items: list[SaveItem]) -> list[SaveItem]:
        """The first of these objects, as many as there is room for."""
        room, blocks = self._room(), set[int]()
        for count, item in enumerate(items):
            blocks.update(item.block_ids)
            if len(blocks) > room:
                return items[:count]
        return items

    def _job(self, tracked: TrackedRequest, items: list[SaveItem]) -> SaveJob | None:
        """A job with its blocks held: they outlive the request until every rank has copied them."""
        if not items or self._pool is None:
            return None
        self._last_job += 1
        if self.events is not None:
            self.events.begin(self._last_job, tracked.request, items)
        blocks = list(dict.fromkeys(block for item in items for block in item.block_ids))
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._held[self._last_job] = Held(tracked, blocks, self._world_size)
        self._held_blocks += len(blocks)
        self._counters.count(SAVES, "taken")
        return SaveJob(self._last_job, items)

    def _let_go(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            blocks = self._held.pop(job).blocks
            self._held_blocks -= len(blocks)
            if not self._is_resting:
                self._free(blocks)

    def _free(self, blocks: Sequence[int]) -> None:
        """The last tokens' first, as vLLM does it: a prompt is reused from its beginning."""
        if self._pool is not None:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def rest(self) -> None:
        """No request is left, and nobody steps the engine until the next one arrives: nothing can take a block until
        then. So none needs to be held, and vLLM can reset its cache while saves are still under way."""
        if not self._is_resting:
            self._is_resting = True
            for held in self._held.values():
                self._free(held.blocks)

    def wake(self) -> None:
        """A request has arrived, and has no blocks yet: blocks that are not saved are held again."""
        if self._is_resting and self._pool is not None:
            self._is_resting = False
            for held in self._held.values():
                self._pool.touch([self._pool.blocks[block] for block in held.blocks])

    def reported(self, report: WorkerReport) -> list[tuple[TrackedRequest, str]]:
        """Take in what workers report: the requests of which something could not be saved, and why."""
        if self.events is not None:
            for job, ranks in report.stored.items():
                self.events.stored(job, ranks)
        lost = [(self._held[job].tracked, reason) for job, reason in report.lost.items() if job in self._held]
        for job, ranks in report.saved.items():
            held = self._held.get(job)
            if held is None:
                continue
            if held.missing > ranks:
                self._held[job] = held._replace(missing=held.missing - ranks)
                continue
            self._let_go([job])
            if self.events is not None:
                self.events.ended(job)
        return lost
