"""When a request is asked about, and what becomes of the answer.

    arrived ──early──▶ inquiry ──────────────────────▶ answer      while the request is queued: nobody waits
                          ▲ answer(): the scheduler comes to it     from now on the engine waits, with a deadline

The scheduler often comes to a request at once, and knows then what the engine's own cache covers: where that may be
enough, asking is left until the end of its step. One inquiry for each life of a request, whatever the order and number
of calls. An early answer that is no longer worth anything (its lease has expired, or the prompt was not all there and
more may have been saved since) is asked for once more. Owns also what the store needs to plan: how many requests have
not begun, and how fast this engine computes.

Neighbours: `scheduler` (left), `inquiry` (right: the thread that asks). Imports no vLLM. Runs in
vLLM's scheduler thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kvtally.core.prefetch import Rate
from kvtally.vllm.inquiry import Answer, Inquiries, Inquiry
from kvtally.vllm.tally import EXPOSED, LOOKUPS, MISSES, PREFETCHES, WAIT, Tally
from kvtally.vllm.track import Life, Track
from kvtally.wire.messages import MissReason

EARLY_NS = 60_000_000_000  # how long an early inquiry may go on; what it holds expires then
REFRESH_NS = 100_000_000  # an early answer older than this is asked for again where it was not the whole prompt
LATE_NS = 500_000_000  # how long after its deadline an inquiry is believed to be answered yet
MEASURED_TOKENS = 64  # in a step, for it to tell how fast prompts are computed
# An engine that computes nothing asks again and again, and takes the interpreter from the thread that could answer. It
# waits for the answer instead, once in a step, and so long at most; not where other engines wait for its steps.
IDLE_WAIT_S = 0.002
UNSEEN_NS = 2_000_000  # how long asking is left, where many arrive and no step begins
LEAST_GAIN_S = 0.005  # a load takes some steps of the engine: what is computed sooner than this is not loaded


class Asking:
    """`reads`: whether this engine reads at all. `may_leave`: whether it may go without an answer (`leave`).
    `steps_in_flight`: how many vLLM launches before the first of them is done. `is_alone`: no other engine waits for
    its steps. The tally is the scheduler half's."""

    def __init__(
        self,
        inquiries: Inquiries,
        tally: Tally,
        *,
        full_groups: tuple[int, ...],
        wait_ms: int,
        block_tokens: int = 1,
        steps_in_flight: int = 2,
        is_alone: bool = True,
        reads: bool = True,
        prefetch: bool = True,
        always_load: bool = False,
        may_leave: bool = False,
    ) -> None:
        self._inquiries = inquiries
        self._tally = tally
        self._full_groups = full_groups
        self._block_tokens = block_tokens
        self._wait_ns = wait_ms * 1_000_000
        self._is_alone = is_alone
        self._reads = reads
        self._prefetch = prefetch
        self._always_load = always_load
        self._may_leave = may_leave
        self._unseen: dict[Track, int] = {}  # by the scheduler, and not asked about; when they arrived
        self._waiting = 0  # requests that have not begun
        self._running = 0  # those that have
        self._has_waited = False  # in this step
        self._rate = Rate()
        # Launched and not done: when, and how many tokens. No more than can be: if vLLM keeps the end of a step to
        # itself, that one falls out, and the next ends are not taken for those of the steps before.
        self._steps: deque[tuple[int, int]] = deque(maxlen=steps_in_flight)
        self._step_ended_ns = 0

    # ---- a request

    def arrived(self, track: Track) -> None:
        self._waiting += 1
        # The tokens of a streaming input are not complete yet: it is asked about when it is scheduled.
        if not self._prefetch or track.request.resumable:
            return
        now_ns = time.monotonic_ns()
        self._unseen[track] = now_ns
        self._ask_unseen(now_ns - UNSEEN_NS if self._may_leave else now_ns)

    def _ask_unseen(self, until_ns: int) -> None:
        """About those that arrived until then."""
        for track in [track for track, arrived_ns in self._unseen.items() if arrived_ns <= until_ns]:
            self._ask(track, is_early=True)

    def answer(self, track: Track) -> Answer | None:
        """The scheduler wants to know; None: not yet. The first answer stays the life's."""
        life = track.life
        if life.answer is not None:
            return life.answer
        life.came_ns = life.came_ns or time.monotonic_ns()
        if life.inquiry is None:
            self._ask(track)
        elif not life.inquiry.is_wanted:
            self._come_to(track, life.inquiry)
        inquiry = life.inquiry
        if inquiry is None:
            return life.answer
        if inquiry.answer is None and self._is_alone and not self._running and not self._has_waited:
            self._has_waited = True
            self._inquiries.wait(inquiry, IDLE_WAIT_S)
        answer = inquiry.answer
        if answer is None and time.monotonic_ns() > inquiry.deadline_ns + LATE_NS:
            self._inquiries.cancel(inquiry)  # its thread has failed, or is not given the processor
            answer = Answer(0, [], None, MissReason.DEADLINE, self._wait_ns / 1e9)
        if answer is not None:
            life.answer, life.reason, life.wait_s = answer, answer.reason, answer.wait_s
            life.exposed_s = min(answer.wait_s, max(0, answer.ready_ns - life.came_ns) / 1e9)
            self._count(life, answer)
        return answer

    def began(self, track: Track) -> None:
        """It is computed from now on."""
        if not track.life.is_started:
            track.life.is_started = True
            self._waiting -= 1
            self._running += 1

    def start_over(self, track: Track) -> None:
        """It was preempted: a new life begins, about which the store has not been asked yet."""
        self._stop(track)
        self._waiting += 1
        track.life = Life(track.request.num_preemptions)

    def again(self, track: Track) -> None:
        """The answer does not hold any more: ask once more."""
        life = track.life
        life.answer, life.inquiry, life.is_left, life.came_ns = None, None, False, 0

    def ended(self, track: Track) -> None:
        """The request is over. An answer that nobody took, or that is yet to come, is given back."""
        self._stop(track)

    def _stop(self, track: Track) -> None:
        """Its life is over."""
        if track.life.is_started:
            self._running -= 1
        else:
            self._waiting -= 1
        self._cancel(track)

    def forget(self, track: Track) -> None:
        """The store is made to forget everything: nothing is promised any more."""
        if track.life.answer is None and track.life.inquiry is not None:
            self._inquiries.cancel(track.life.inquiry)
            track.life.answer = Answer(0, [], None, MissReason.ABSENT, 0.0)

    def is_trifle(self, track: Track, tokens: int) -> bool:
        """Whether so many tokens are computed sooner than they could be loaded. A hand-off is loaded all the same."""
        return track.handoff is None and tokens < self._tokens_s * LEAST_GAIN_S

    def leave(self, track: Track, *, is_saved: bool) -> bool:
        """Nothing could be gained by waiting for an answer. False: it is there already. What is saved of the request
        needs its path all the same."""
        life = track.life
        if life.answer is not None or (life.inquiry is not None and life.inquiry.answer is not None):
            return False
        self._cancel(track)
        life.answer, life.is_left = Answer(0, [], None, MissReason.NO_GAIN, 0.0), True
        life.reason = MissReason.NO_GAIN
        if life.inquiry is None and is_saved and not track.is_opaque:
            life.inquiry = self._inquiry(track)
            self._inquiries.walk(life.inquiry)
        return True

    def come_back(self, track: Track) -> bool:
        """What was left is not covered any more: its blocks were evicted while it waited for room. Whether it is asked
        about now. (Its path may still be walked for that other answer; the inquiry thread does one after the other.)"""
        if not track.life.is_left or self._is_refused(track):
            return False
        self.again(track)
        return True

    def _is_refused(self, track: Track) -> bool:
        """Whether nobody may be asked about it."""
        return track.is_opaque or track.request.skip_reading_prefix_cache or not self._reads

    def _cancel(self, track: Track) -> None:
        self._unseen.pop(track, None)
        inquiry = track.life.inquiry
        if inquiry is None or track.life.answer is not None:
            return
        self._inquiries.cancel(inquiry)
        if inquiry.is_early:
            was_answered = inquiry.answer is not None
            self._tally.count(PREFETCHES, "wasted" if was_answered else "cancelled")

    def _ask(self, track: Track, *, is_early: bool = False) -> None:
        self._unseen.pop(track, None)
        if self._is_refused(track):
            track.life.answer = Answer(0, [], None, MissReason.REFUSED, 0.0)
            track.life.reason = MissReason.REFUSED
            self._tally.count(MISSES, MissReason.REFUSED)
            return
        track.life.inquiry = self._inquiry(track, is_early=is_early)
        self._inquiries.ask(track.life.inquiry)

    def _inquiry(self, track: Track, *, is_early: bool = False) -> Inquiry:
        request = track.request
        tokens: Sequence[int] = request.prompt_token_ids or []
        if request.num_output_tokens:  # resumed after preemption: prompt and answer so far
            tokens = list(request.all_token_ids)
        now_ns = time.monotonic_ns()
        return Inquiry(
            tokens,
            track.path,
            now_ns + (EARLY_NS if is_early else self._wait_ns),
            now_ns,
            self._full_groups,
            track.handoff if not track.is_prefill and not request.num_output_tokens else None,
            is_early=is_early,
            is_wanted=not is_early,
            priority=request.priority,
            ahead=self._waiting - 1 if is_early else 0,
            prefill_tokens_s=self._tokens_s,
            block_tokens=self._block_tokens,
        )

    def _come_to(self, track: Track, inquiry: Inquiry) -> None:
        """The scheduler wants a request that was asked about early. From now on the engine waits for the answer."""
        now_ns = time.monotonic_ns()
        answer = inquiry.answer
        if answer is not None and _is_stale(answer, now_ns):
            if answer.lease is not None:
                self._inquiries.release(answer.lease)
            self._ask(track)
            return
        inquiry.is_wanted = True
        if answer is None:
            inquiry.deadline_ns = now_ns + self._wait_ns
            inquiry.prefill_tokens_s = self._tokens_s
            self._inquiries.want(inquiry)

    def _count(self, life: Life, answer: Answer) -> None:
        if answer.reason == MissReason.NO_GAIN:  # too short to be asked about
            return
        self._tally.count(LOOKUPS, "hit" if answer.end_tokens else "miss")
        self._tally.observe(WAIT, answer.wait_s)
        self._tally.observe(EXPOSED, life.exposed_s)
        if answer.left_tokens:
            self._tally.count(PREFETCHES, "skipped")
        elif life.was_staged:
            self._tally.count(PREFETCHES, "late" if life.exposed_s else "in_time")
        if answer.reason:
            self._tally.count(MISSES, answer.reason)

    # ---- how fast this engine computes

    @property
    def _tokens_s(self) -> int:
        """What loading is weighed against; 0: nothing, because it is not known yet or not wanted."""
        return 0 if self._always_load else int(self._rate.tokens_s)

    def step_launched(self, tokens: int) -> None:
        self._has_waited = False
        now_ns = time.monotonic_ns()
        self._ask_unseen(now_ns)
        self._steps.append((now_ns, tokens))  # also of no tokens: that one ends, too

    def step_done(self) -> None:
        """Steps may overlap: one lasts from its launch, or the end of the one before, to its own end."""
        now_ns = time.monotonic_ns()
        if self._steps:
            launched_ns, tokens = self._steps.popleft()
            if tokens >= MEASURED_TOKENS:
                self._rate.add(tokens, (now_ns - max(launched_ns, self._step_ended_ns)) / 1e9)
        self._step_ended_ns = now_ns


def _is_stale(answer: Answer, now_ns: int) -> bool:
    """Whether an early answer is worth asking again: what it holds has expired, or more may have been saved since."""
    if answer.lease is not None and not answer.lease.is_live:
        return True
    return bool(answer.reason) and not answer.left_tokens and now_ns - answer.ready_ns > REFRESH_NS
