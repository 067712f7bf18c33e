"""The scheduler half: which requests may skip what, which blocks are to be saved, and which must be held meanwhile.

    on_new_request ─▶ Inquiry ─▶ get_num_new_matched_tokens: None … n ─▶ update_state_after_alloc ─▶ LoadJob
    build_connector_meta: chunks and states that this step completes ─▶ SaveJob, its blocks held until all ranks report
    request_finished: the end of prompt and answer, the same way; of a prefill for somebody else, the hand-off

Every method does a few microseconds of bookkeeping; chains, lookups and receipts are the inquiry thread's. Recurrent
state is saved only where vLLM offers it, at exactly the boundary it names, and at the end of a request that nothing was
computed beyond. Runs in vLLM's scheduler thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs
from vllm.v1.request import RequestStatus

from kvtally.core.geometry import NULL_BLOCK, chunk_block_range
from kvtally.core.handoff import Handoff
from kvtally.core.namespace import GroupKind
from kvtally.core.receipts import Role
from kvtally.vllm.asking import Asking
from kvtally.vllm.events import SaveEvents
from kvtally.vllm.handoff import handoff_of, shorten_for_prefill
from kvtally.vllm.identity import Adapters
from kvtally.vllm.inquiry import Answer, Inquiries
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.meta import LoadJob, LoadReport, Metadata, SaveItem, SaveJob, WorkerReport
from kvtally.vllm.path import Boundary, Path, extras_of
from kvtally.vllm.tally import MISSES, SAVES, TOKENS, Tally
from kvtally.vllm.track import Life, Track
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("kvtally.vllm")

# The share of the engine's blocks that may be held for saves: where saving is slower than computing, or the store takes
# nothing, the engine must not run out of blocks. A hand-off is saved whole or not at all, and another engine waits for
# it, so it may begin while less than a larger share is held.
MOST_HELD = 1 / 4
MOST_HELD_FOR_HANDOFFS = 1 / 2
MOST_EXPIRED = 4  # leases of a request that end before there is room for it; then it is computed


class Held(NamedTuple):
    """Blocks that outlive their request until they are saved."""

    track: Track
    blocks: list[int]
    missing: int  # ranks that are still to report


class SchedulerHalf:
    """See the module docstring. `world_size` ranks must report before a save's blocks are let go.

    `reads` and `saves` are what vLLM's role allows: a producer only saves, a consumer only reads. `names_images`:
    whether what vLLM calls an image says which one it is.
    """

    def __init__(
        self,
        layout: EngineLayout,
        inquiries: Inquiries,
        *,
        world_size: int,
        wait_ms: int,
        steps_in_flight: int = 2,
        is_alone: bool = True,
        reads: bool = True,
        saves: bool = True,
        prefetch: bool = True,
        always_load: bool = False,
        names_images: bool = True,
        on_reset: str = "part",
        events: SaveEvents | None = None,
    ) -> None:
        self._layout = layout
        self._inquiries = inquiries
        self._world_size = world_size
        self._saves = saves
        self._names_images = names_images
        self._on_reset = on_reset
        self._salt = ""  # keeps what this engine computed since its last reset apart from everything else
        self._manager: KVCacheManager | None = None
        self._pool: BlockPool | None = None
        self._lagging: set[str] = set()  # requests that wait until vLLM asks without divergence (see `_state_lags`)
        self._tracks: dict[str, Track] = {}
        self._held: dict[int, Held] = {}  # by save job
        self._held_blocks = 0
        self._loads: list[LoadJob] = []
        self._reports: dict[str, LoadReport] = {}  # of loads that some ranks have finished
        self._late_saves: list[SaveJob] = []  # of finished requests, for the next step
        self._last_job = 0
        kinds = {spec.kind for spec in layout.groups}
        self._has_states = GroupKind.RECURRENT in kinds
        # What vLLM then says it holds is full attention; a window's blocks below it may be gone, and are not loaded.
        self._may_diverge = self._has_states and GroupKind.SLIDING not in kinds
        self._attention = [g for g, spec in enumerate(layout.groups) if spec.kind is not GroupKind.RECURRENT]
        self._recurrent = [g for g, spec in enumerate(layout.groups) if spec.kind is GroupKind.RECURRENT]
        self._group_of = {group_id: g for g, group_id in enumerate(layout.group_ids)}
        self._adapters = Adapters()
        self.tally = Tally()
        self.events = events
        self._asking = Asking(
            inquiries,
            self.tally,
            full_groups=tuple(g for g, spec in enumerate(layout.groups) if spec.kind is GroupKind.FULL),
            wait_ms=wait_ms,
            block_tokens=layout.block_tokens,
            steps_in_flight=steps_in_flight,
            is_alone=is_alone,
            reads=reads,
            prefetch=prefetch,
            always_load=always_load,
            may_leave=not self._has_states,
        )

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool

    # ---- hits

    def on_new_request(self, request: Request) -> None:
        """The request has arrived: ask the store at once, long before the scheduler gets to it."""
        if request.request_id in self._tracks:
            return
        adapter = self._adapters.adapter(request.lora_request)
        path = Path(self._layout.namespace.chunk_tokens, extras_of(request, adapter.identity, self._salt))
        handoff = handoff_of(request.kv_transfer_params)
        # The parts of a streaming input that are yet to come may have images, too.
        is_unnamed = not self._names_images and (bool(request.mm_features) or request.resumable)
        is_opaque = request.prompt_embeds is not None or adapter.is_mixed or is_unnamed
        track = Track(request, path, handoff, is_opaque, prompt_tokens=request.num_prompt_tokens)
        # Where a part of a streaming input ends, vLLM goes back to before a step that may be under way. Keys and values
        # are written anew then; a state has that step in it for good, and everything that is computed from it.
        track.may_save = self._saves and not is_opaque and not (request.resumable and self._has_states)
        self._tracks[request.request_id] = track
        if track.is_prefill and track.may_save and not request.resumable:
            shorten_for_prefill(request)
        self._asking.arrived(track)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` may be loaded; None while that is not known yet."""
        track = self._current(request.request_id)
        if track is None or track.failure:
            return 0, False
        life = track.life
        # Where the engine's own cache covers nearly all, nobody waits for the store. (With recurrent states that is
        # not known here: what vLLM counts as computed may be attention without its state.)
        is_covered = not self._has_states and self._asking.is_trifle(track, request.num_tokens - 1 - computed_tokens)
        if is_covered and self._asking.leave(track, is_saved=self._saves):
            known = computed_tokens // self._layout.namespace.chunk_tokens
            life.saved_chunks = max(life.saved_chunks, known)  # they were saved when they were computed
            return 0, False
        if not is_covered and self._asking.come_back(track):
            life.saved_chunks = 0  # what the engine has forgotten, the store may have forgotten too
        if life.answer is None:
            answer = self._asking.answer(track)
            if answer is None:
                time.sleep(0)  # let the inquiry thread have the interpreter: an idle scheduler asks in a tight loop
                return None, False
            life.answer = answer
            known = answer.end_tokens // self._layout.namespace.chunk_tokens
            life.saved_chunks = max(life.saved_chunks, known)
        self._ask_for_state(request, life.answer)
        lease = life.answer.lease
        if lease is not None and not lease.is_live:  # there was no room for it for so long, or the store is gone
            self._let_go(life)
            if lease.session.alive and track.expired < MOST_EXPIRED:
                track.expired += 1
                self._asking.again(track)
                return self.matched_tokens(request, computed_tokens)
            life.reason = MissReason.LEASE_EXPIRED if lease.session.alive else MissReason.STORE_UNREACHABLE
            self.tally.count(MISSES, life.reason)
        if lease is None or not lease.is_live:
            return 0, False
        if is_covered:
            life.reason = life.reason or MissReason.NO_GAIN
            return 0, False
        external = life.answer.end_tokens - computed_tokens
        if external > 0:
            return external, True
        return (None, False) if self._state_lags(request, life.answer.end_tokens) else (0, False)

    def _current(self, request_id: str) -> Track | None:
        """The request, in the life that vLLM is in: if it has been preempted since, a new one begins here.

        A half of the receipt that was filed stands, because its life gave the first token: vLLM delivers a token that
        was in flight, too, unless it says that it drops it.
        """
        track = self._tracks.get(request_id)
        if track is not None and track.request.num_preemptions > track.life.number:
            self._let_go(track.life)
            self._asking.start_over(track)
            if track.request.drop_stale_output and not track.request.num_output_tokens:
                track.is_filed = False
        return track

    def _ask_for_state(self, request: Request, answer: Answer) -> None:
        """Where the store has attention but no state, let vLLM make one while it passes there.

        vLLM does so by itself for prefixes that its own cache has seen; this tells it of those the store has seen. Each
        time: where there is no room for the request yet, vLLM looks at its own cache anew and forgets what it was told.
        """
        block = self._layout.block_tokens
        boundary = min(answer.attention_tokens, request.num_tokens - 1) // block * block
        if self._has_states and boundary > max(answer.end_tokens, request.shared_prefix_boundary):
            request.shared_prefix_boundary = boundary

    @property
    def supports_divergence(self) -> bool:
        """Whether vLLM may report attention it still holds although the state there is gone (see `_state_lags`)."""
        return self._may_diverge and not self._lagging

    def _state_lags(self, request: Request, end_tokens: int) -> bool:
        """Whether the engine holds attention up to our hit or beyond, but the state only we have.

        vLLM can take a state only together with at least one external token, and would throw its attention hit away.
        So we do not support divergence until that request has its blocks: vLLM then reports what all its groups hold,
        and we load the rest. Not only for the next step: on a full engine others would take the room each time.
        """
        if not self.supports_divergence or self._manager is None:
            return False
        if self._manager.get_computed_blocks(request)[1] >= end_tokens:
            return False
        self._lagging.add(request.request_id)
        return True

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        self._lagging.discard(request.request_id)
        track = self._tracks.get(request.request_id)
        if track is None or track.life.is_loading:
            return
        life, answer = track.life, track.life.answer
        if external_tokens == 0 or answer is None or answer.lease is None:
            self._let_go(life)
            self._count_reuse(life)
            return
        tables = [list(table) for table in blocks.get_block_ids(group_ids=self._layout.group_ids)]
        have = answer.end_tokens - external_tokens
        load = LoadJob(request.request_id, answer.lease.share(), answer.ends, answer.end_tokens, have, tables)
        self._loads.append(load)
        life.is_loading, life.is_counted = True, False
        life.external_tokens = external_tokens
        outcome = answer.lease.outcome
        life.disk_tokens = min(external_tokens, outcome.disk_tokens) if outcome is not None else 0

    def _count_reuse(self, life: Life) -> None:
        """The request goes on after its load, with everything there on all ranks: now it is reused."""
        if life.is_counted:
            return
        life.is_counted = True
        self.tally.count(TOKENS, "host", life.external_tokens - life.disk_tokens)
        self.tally.count(TOKENS, "disk", life.disk_tokens)

    def _let_go(self, life: Life) -> None:
        """Nothing is read through its lease (any more)."""
        if life.answer is not None and life.answer.lease is not None:
            self._inquiries.release(life.answer.lease)
            life.answer = life.answer._replace(lease=None)

    def host_and_disk(self, request_id: str) -> tuple[int, int]:
        """Of the tokens being loaded: how many were in host memory, how many came from below."""
        track = self._tracks.get(request_id)
        if track is None:
            return 0, 0
        return track.life.external_tokens - track.life.disk_tokens, track.life.disk_tokens

    # ---- one step

    def build_metadata(self, output: SchedulerOutput) -> Metadata:
        self._asking.step_launched(output.total_num_scheduled_tokens)
        saves: list[SaveJob] = []
        is_planned = False
        try:
            self._plan_saves(output, saves)
            is_planned = True
        finally:
            if not is_planned:  # the edge turns this into an empty step: nobody would ever report these jobs
                self._unhold(job.id for job in saves)
        is_idle = not output.total_num_scheduled_tokens
        touches_blocks = not is_idle or output.new_block_ids_to_zero or output.kv_cache_block_copies
        metadata = Metadata(saves=saves, late_saves=self._late_saves, is_idle=is_idle)
        if touches_blocks:
            metadata.loads = self._loads
        else:
            metadata.early_loads = self._loads
        self._loads, self._late_saves = [], []
        return metadata

    def _plan_saves(self, output: SchedulerOutput, saves: list[SaveJob]) -> None:
        state = output.kv_connector_block_state
        if state is None:
            return
        for request_id, count in output.num_scheduled_tokens.items():
            track = self._current(request_id)
            if track is None:
                continue
            life = track.life
            if not life.is_started:  # what it begins with was not computed here: ours, or the engine's own
                self._asking.began(track)
                life.local_tokens = max(0, track.request.num_computed_tokens - life.external_tokens)
                if life.reason == MissReason.NO_GAIN and not life.reused_tokens:
                    self.tally.count(MISSES, MissReason.NO_GAIN)
            computed_end = track.request.num_computed_tokens + count
            if computed_end >= track.request.num_prompt_tokens and not track.is_prefill:
                self._file_receipt(track)  # before the first token goes out: whoever gets it may ask for the receipt
            # Most decodes complete nothing in most steps, and their tables are not looked at: vLLM copies them to tell.
            if self._is_due(track, computed_end):
                if not self._room() > 0:
                    self.tally.count(SAVES, "left")  # it is saved with a later step, or when the request ends
                    continue
                tables = state.get_block_ids(request_id)
                items = self._chunk_items(track, computed_end, tables) + self._tail_items(track, computed_end, tables)
                self._add_job(saves, track, items)
        for request_id, offers in state.boundary_state_offloads.items():
            track = self._tracks.get(request_id)
            if track is None or not track.may_save or not self._is_path_free(track):
                continue
            kept = self._kept_states(track, offers)
            if kept and not self._room() > 0:
                self.tally.count(SAVES, "left")
            elif kept:
                self._add_job(saves, track, self._state_items(track, kept, state))

    def _is_due(self, track: Track, computed_end: int) -> bool:
        """Whether a step completes anything that is to be saved, and its path is known."""
        is_complete = self._complete_chunks(track, computed_end) > track.life.saved_chunks
        is_due = is_complete or self._is_tail_due(track, computed_end)
        return is_due and track.may_save and self._is_path_free(track)

    def _room(self, share: float = MOST_HELD) -> float:
        """How many more blocks may be held."""
        return self._pool.num_gpu_blocks * share - self._held_blocks if self._pool is not None else 0.0

    def _complete_chunks(self, track: Track, computed_end: int) -> int:
        """With asynchronous scheduling the last token may not be known yet: its chunk is named one step later."""
        return min(computed_end, track.request.num_tokens) // self._layout.namespace.chunk_tokens

    def _chunk_items(self, track: Track, computed_end: int, tables: Sequence[Sequence[int]]) -> list[SaveItem]:
        """Attention objects of every chunk that this step completes."""
        complete = self._complete_chunks(track, computed_end)
        if complete <= track.life.saved_chunks:
            return []
        track.path.extend(track.request.all_token_ids, complete * self._layout.namespace.chunk_tokens)
        items = []
        for index in range(track.life.saved_chunks, min(complete, len(track.path.chains))):
            items += self._attention_items(track.path.chunk(index), tables)
        track.life.saved_chunks = complete
        return items

    @staticmethod
    def _is_path_free(track: Track) -> bool:
        """Whether the inquiry thread is done with the path. If not, what is to be saved waits for a later step."""
        return track.life.inquiry is None or track.life.inquiry.path_ready

    def _is_tail_due(self, track: Track, computed_end: int) -> bool:
        """Of a prefill for another engine it never is: the end that it hands over is saved as one."""
        prompt = track.request.num_prompt_tokens
        if track.life.tail_saved or computed_end < prompt or self._has_states or track.is_prefill:
            return False
        return (prompt - 1) % self._layout.namespace.chunk_tokens > 0

    def _tail_items(self, track: Track, computed_end: int, tables: Sequence[Sequence[int]]) -> list[SaveItem]:
        """The end of the prompt, where it lies between two chunks: what makes a repeat of a short prompt a hit."""
        if not self._is_tail_due(track, computed_end):
            return []
        track.life.tail_saved = True
        end = track.request.num_prompt_tokens - 1
        return self._attention_items(track.path.tail(track.request.all_token_ids, end), tables)

    def _attention_items(self, boundary: Boundary, tables: Sequence[Sequence[int]]) -> list[SaveItem]:
        items = []
        for group in self._attention:
            table = tables[self._layout.group_ids[group]]
            span = chunk_block_range(self._layout.groups[group], boundary.start_tokens, boundary.end_tokens)
            ids = list(table[span.start : span.stop])
            if len(ids) == len(span) and NULL_BLOCK not in ids:  # out of the window: gone, and not needed there
                items.append(SaveItem(*boundary, group, ids))
        return items

    def _kept_states(self, track: Track, offers: Sequence[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
        """The recurrent states that are saved, of those that vLLM offers: by boundary, each group's block."""
        kept: dict[int, list[tuple[int, int]]] = {}
        for group_id, block_id, end in offers:
            group = self._group_of.get(group_id)
            if group is not None and block_id != NULL_BLOCK and self._is_kept(track, end):
                kept.setdefault(end, []).append((group, block_id))
        return kept

    def _is_kept(self, track: Track, end: int) -> bool:
        """Whether a state at this boundary is worth its bytes (decision 0018).

        At the end of a chunk always. Elsewhere only below the prompt's end, where a later prompt may go on from it: the
        last one, for a repeat or a longer prompt; the one that was asked for, because prompts part there; and of the
        others one for each chunk's length at most, however short the engine's blocks are.
        """
        request, answer = track.request, track.life.answer
        chunk, block = self._layout.namespace.chunk_tokens, self._layout.block_tokens
        loaded = answer.end_tokens if answer is not None else 0
        if end == loaded or end > request.num_tokens:
            return False
        if end % chunk == 0:
            return True
        if end > request.num_prompt_tokens:
            return False
        is_last = end + block >= request.num_prompt_tokens
        is_shared = 0 <= request.shared_prefix_boundary - end < block
        return is_last or is_shared or end - max(loaded, track.life.state_tokens) >= chunk

    def _state_items(
        self, track: Track, kept: dict[int, list[tuple[int, int]]], state: KVConnectorBlockState
    ) -> list[SaveItem]:
        """States at exactly the boundaries that vLLM names; inside a chunk, with the attention up to there."""
        items: list[SaveItem] = []
        for end, blocks in sorted(kept.items()):
            boundary = track.path.tail(track.request.all_token_ids, end)
            if end % self._layout.namespace.chunk_tokens:
                tables = state.get_block_ids(track.request.request_id)
                items += self._attention_items(boundary, tables) if tables is not None else []
            items += [SaveItem(*boundary, group, [block_id]) for group, block_id in blocks]
            track.life.state_tokens = end
        return items

    def _add_job(self, jobs: list[SaveJob], track: Track, items: list[SaveItem]) -> None:
        """A job, with its blocks held: they outlive the request until every rank has copied them."""
        if not items or self._pool is None:
            return
        self._last_job += 1
        if self.events is not None:
            self.events.begin(self._last_job, track.request, items)
        blocks = list(dict.fromkeys(block for item in items for block in item.block_ids))
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._held[self._last_job] = Held(track, blocks, self._world_size)
        self._held_blocks += len(blocks)
        self.tally.count(SAVES, "taken")
        jobs.append(SaveJob(self._last_job, items))

    def _unhold(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            blocks = self._held.pop(job).blocks
            self._held_blocks -= len(blocks)
            if self._pool is not None:  # the last tokens' first, as vLLM does it: a prompt is reused from its beginning
                self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def update(self, report: WorkerReport) -> None:
        """News from the workers, all ranks together: a step is done."""
        self._asking.step_done()
        self.update_saves(report)
        for request_id, load in report.loads.items():
            known = self._reports.pop(request_id, None)
            together = known.add(load) if known is not None else load
            if together.ranks < self._world_size:  # ranks may be done in different steps; the lease is for all of them
                self._reports[request_id] = together
            else:
                self._loaded(request_id, together)

    def update_saves(self, report: WorkerReport) -> None:
        """The part of a report that is about saves."""
        if self.events is not None:
            for job, ranks in report.stored.items():
                self.events.stored(job, ranks)
        for job, reason in report.lost.items():
            if job in self._held:
                self._withdraw(self._held[job].track, reason)
        for job, ranks in report.saved.items():
            held = self._held.get(job)
            if held is None:
                continue
            if held.missing > ranks:
                self._held[job] = held._replace(missing=held.missing - ranks)
                continue
            self._unhold([job])
            if self.events is not None:
                self.events.ended(job)

    def _loaded(self, request_id: str, load: LoadReport) -> None:
        track = self._tracks.get(request_id)
        if track is None:
            return
        life = track.life
        life.is_loading, life.load = False, load
        self._let_go(life)
        if track.request.is_finished():  # aborted while it was loading
            del self._tracks[request_id]
        elif load.reason:
            self.tally.count(MISSES, load.reason)
            track.failure = load.reason
            life.external_tokens = life.disk_tokens = 0

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping although it has no requests: blocks are held for saves."""
        return bool(self._held or self._late_saves)

    @property
    def has_requests(self) -> bool:
        return bool(self._tracks)

    def take_late_saves(self) -> list[SaveJob]:
        """Saves of finished requests, for whoever does not wait until the next step carries them out."""
        late, self._late_saves = self._late_saves, []
        return late

    def reset(self, timeout_s: float) -> bool:
        """vLLM's cache is void: its weights may be others from now on. False where bytes from before may yet be used.

        What the store has was right when it was saved, and is right for engines whose weights stay. So it is not
        touched: this engine gives everything that it saves or asks for from now on a name of its own. Requests that
        are under way are neither saved nor promised anything: parts of them may be computed by either weights.
        With `on_reset` "keep", weights stay; with "forget", everything that the namespace has is dropped, for all.
        """
        is_quiet = not self.is_busy and not any(track.life.is_loading for track in self._tracks.values())
        if self._on_reset == "keep":
            return is_quiet
        for track in self._tracks.values():
            if self._on_reset == "part":
                track.may_save, track.failure = False, MissReason.ABSENT
            if not track.life.is_loading:
                self._asking.forget(track)
                self._let_go(track.life)
        if self._on_reset == "forget":
            return self._inquiries.reset(timeout_s) and is_quiet
        self._salt = secrets.token_hex(16)
        log.warning("kvtally: this engine was reset; until its next start it shares nothing with others")
        return is_quiet

    # ---- the end of a request

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Handoff | None:
        """The request is over. A prefill for another engine answers what that engine is to be told."""
        self._lagging.discard(request.request_id)
        track = self._current(request.request_id)
        if track is None:
            return None
        self._asking.ended(track)
        if track.life.is_loading:  # aborted: the lease is let go when the worker is done
            return None
        del self._tracks[request.request_id]
        self._let_go(track.life)
        if track.is_prefill:
            return self._hand_over(track, block_ids)
        if any(block_ids) and track.may_save:
            self._save_answer_tail(track, block_ids)
        self._file_receipt(track)
        return None

    def _save_answer_tail(self, track: Track, block_ids: Sequence[Sequence[int]]) -> None:
        """The end of the conversation so far, so that its next turn goes on from here, and what was left until now: as
        much of it, from its beginning, as may be held. There is no later step for the rest."""
        end = min(track.request.num_computed_tokens, track.request.num_tokens)
        if not self._is_path_free(track):
            return
        items = self._chunk_items(track, end, block_ids) + self._tail_items(track, end, block_ids)
        if end > track.request.num_prompt_tokens:
            items += self._end_items(track, end, block_ids)
        fitting = self._fitting(items)
        if len(fitting) < len(items):
            self.tally.count(SAVES, "left")
        self._add_job(self._late_saves, track, fitting)

    def _fitting(self, items: list[SaveItem]) -> list[SaveItem]:
        """The first of these objects, as many as there is room for."""
        room, blocks = self._room(), set[int]()
        for count, item in enumerate(items):
            blocks.update(item.block_ids)
            if len(blocks) > room:
                return items[:count]
        return items

    def _end_items(self, track: Track, end: int, block_ids: Sequence[Sequence[int]]) -> list[SaveItem]:
        """Everything at the end of what a finished request has computed; nothing if a state there is missing.

        The running state is the one at exactly `end` only if nothing was, or is being, computed beyond: the rule by
        which vLLM itself hands over the end of a request.
        """
        request = track.request
        boundary = track.path.tail(request.all_token_ids, end)
        items = self._attention_items(boundary, block_ids) if end % self._layout.namespace.chunk_tokens else []
        if not self._recurrent:
            return items
        if request.num_computed_tokens != end or request.num_in_flight_tokens:
            return []
        for group in self._recurrent:
            slot = (end - 1) // self._layout.groups[group].block_tokens
            table = block_ids[self._layout.group_ids[group]]
            if slot >= len(table) or table[slot] == NULL_BLOCK:
                return []
            items.append(SaveItem(*boundary, group, [table[slot]]))
        return items

    def _hand_over(self, track: Track, block_ids: Sequence[Sequence[int]]) -> Handoff | None:
        """Save the end of a prompt that was computed for another engine, and say what it will find."""
        request, handoff = track.request, track.handoff
        assert handoff is not None
        if request.status == RequestStatus.FINISHED_ABORTED:
            return None
        end = request.num_prompt_tokens if request.num_prompt_tokens < track.prompt_tokens else 0
        last: list[SaveItem] = []
        if end and track.may_save and self._is_path_free(track) and request.num_computed_tokens >= end:
            last = self._end_items(track, end, block_ids)
            items = self._chunk_items(track, end, block_ids) + last
            if items and not self._room(MOST_HELD_FOR_HANDOFFS) > 0:
                self.tally.count(SAVES, "left")
                track.lost = track.lost or MissReason.LIMIT
            else:
                self._add_job(self._late_saves, track, items)
        is_whole_chunks = end % self._layout.namespace.chunk_tokens == 0 and not self._recurrent
        saved = end if (last or (end and is_whole_chunks)) and not track.lost else 0
        chain = track.path.tail(request.all_token_ids, saved).chain if saved else b""
        refused = MissReason.REFUSED if track.prompt_tokens > 1 else MissReason.NO_GAIN
        reason = "" if saved else track.lost or refused
        half = structs.replace(track.half(Role.PREFILL), saved_tokens=saved, chain=chain, reason=reason)
        answer = Handoff(
            ticket=handoff.ticket,
            role=Role.PREFILL,
            store=self._inquiries.store,
            namespace=self._layout.namespace.digest.hex(),
            saved_tokens=saved,
            prompt_tokens=half.prompt_tokens,
            chain=chain.hex(),
            state="pending" if saved else "",
            reason=reason,
            tokens_gpu=half.tokens_gpu,
            tokens_host=half.tokens_host,
            tokens_disk=half.tokens_disk,
            computed_tokens=half.computed_tokens,
        )
        track.promised = half if saved else None
        self._inquiries.file(handoff.ticket, half)
        return answer

    def _withdraw(self, track: Track, reason: str) -> None:
        """Something of a request could not be saved. If it was promised to somebody, nobody is to wait for it."""
        track.lost = track.lost or reason
        if track.promised is not None and track.handoff is not None:
            withdrawn = structs.replace(track.promised, saved_tokens=0, chain=b"", reason=track.lost)
            self._inquiries.file(track.handoff.ticket, withdrawn)
            track.promised = None

    def _file_receipt(self, track: Track) -> None:
        if not track.is_filed:
            track.is_filed = True
            ticket = track.handoff.ticket if track.handoff is not None else track.request.request_id
            self._inquiries.file(ticket, track.half(Role.DECODE, holds_beginnings=not self._has_states))
