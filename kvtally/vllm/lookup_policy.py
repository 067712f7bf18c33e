"""When the store is asked about a request, and for how long the engine waits for the answer.

    arrived ──early──▶ lookup ────────────────────▶ answer     while the request is queued: nobody waits
                          ▲ answer(): the scheduler reaches it  from now on the engine waits, up to a deadline

The scheduler often reaches a request at once, and then knows how much the engine's own cache covers. Where that may be
enough, the lookup is put off until the end of the step. Each attempt at a request has one lookup, in whatever order and
however often vLLM calls. An early answer is asked for once more when the scheduler reaches the request if it is worth
nothing any more: its lease has expired, or the prompt was not found whole and more may have been saved since.

Also owns two figures that the store plans with: how many requests have not begun, and how fast this engine computes.

Neighbours: `loads` (left), `lookup_thread` (right: does the asking). Imports no vLLM. Runs in vLLM's scheduler thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kvtally.core.prefetch import Rate
from kvtally.vllm.counters import EXPOSED, LOOKUPS, MISSES, PREFETCHES, WAIT, Counters
from kvtally.vllm.lookup_thread import LookupAnswer, LookupThread, PromptLookup
from kvtally.vllm.tracked_request import Attempt, TrackedRequest
from kvtally.wire.messages import MissReason

EARLY_NS = 60_000_000_000  # how long an early lookup may take; its lease expires then
REFRESH_NS = 100_000_000  # an early answer that is older, and was not the whole prompt, is asked for again
LATE_NS = 500_000_000  # how long after its deadline an answer may still come
MEASURED_TOKENS = 64  # a step must compute at least this many to tell how fast the engine is
# An engine with nothing to compute asks again and again, and so takes the interpreter from the thread that could
# answer. It waits for the answer instead: once in a step, for this long at most, and not where other engines wait for
# its steps.
IDLE_WAIT_S = 0.002
UNSEEN_NS = 2_000_000  # how long a lookup is put off while requests arrive and no step begins
LEAST_GAIN_S = 0.005  # a load takes a few steps of the engine: tokens that are computed sooner are not loaded


class LookupPolicy:
    """Decides about lookups; its thread carries them out.

    `reads`: whether this engine reads at all. `may_leave`: whether a request may go without an answer (`leave`).
    `steps_in_flight`: how many steps vLLM launches before the first of them is done. `is_alone`: no other engine waits
    for this one's steps.
    """

    def __init__(
        self,
        thread: LookupThread,
        counters: Counters,
        *,
        wait_ms: int,
        steps_in_flight: int = 2,
        is_alone: bool = True,
        reads: bool = True,
        prefetch: bool = True,
        always_load: bool = False,
        may_leave: bool = False,
    ) -> None:
        self.thread = thread
        self.counters = counters
        self._wait_ns = wait_ms * 1_000_000
        self._is_alone = is_alone
        self._reads = reads
        self._prefetch = prefetch
        self._always_load = always_load
        self._may_leave = may_leave
        self._unseen: dict[TrackedRequest, int] = {}  # not reached and not looked up yet; when each arrived
        self._waiting = 0  # requests that have not begun
        self._running = 0  # requests that have
        self._has_waited = False  # in this step
        self._rate = Rate()
        # Launched steps that are not done: when each was launched, and its tokens. If vLLM keeps the end of a step to
        # itself, that step falls out of the queue, and the next ends are not taken for those of the steps before.
        self._steps: deque[tuple[int, int]] = deque(maxlen=steps_in_flight)
        self._step_ended_ns = 0

    # ---- the life of a request

    def arrived(self, tracked: TrackedRequest) -> None:
        self._waiting += 1
        # The tokens of a streaming input are not complete yet: it is looked up when it is scheduled.
        if not self._prefetch or tracked.request.resumable:
            return
        now_ns = time.monotonic_ns()
        self._unseen[tracked] = now_ns
        self._ask_unseen(now_ns - UNSEEN_NS if self._may_leave else now_ns)

    def _ask_unseen(self, until_ns: int) -> None:
        """Look up the requests that arrived by then."""
        for tracked in [tracked for tracked, arrived_ns in self._unseen.items() if arrived_ns <= until_ns]:
            self._ask(tracked, is_early=True)

    def began(self, tracked: TrackedRequest) -> None:
        """The engine computes it from now on."""
        if not tracked.attempt.is_running:
            tracked.attempt.is_running = True
            self._waiting -= 1
            self._running += 1

    def preempted(self, tracked: TrackedRequest) -> None:
        """This attempt is over, and the request waits again."""
        self.ended(tracked)
        self._waiting += 1

    def ended(self, tracked: TrackedRequest) -> None:
        """This attempt is over. What the store holds for it, or will hold, is given back."""
        if tracked.attempt.is_running:
            self._running -= 1
        else:
            self._waiting -= 1
        self._cancel(tracked)

    # ---- the answer

    def answer(self, tracked: TrackedRequest) -> LookupAnswer | None:
        """The store's answer, now that the scheduler has reached the request; None: not yet. The first one stays."""
        attempt = tracked.attempt
        if attempt.answer is not None:
            return attempt.answer
        attempt.reached_ns = attempt.reached_ns or time.monotonic_ns()
        if attempt.lookup is None:
            self._ask(tracked)
        elif not attempt.lookup.is_wanted:
            self._reach(tracked, attempt.lookup)
        lookup = attempt.lookup
        if lookup is None:
            return attempt.answer
        if lookup.answer is None and self._is_alone and not self._running and not self._has_waited:
            self._has_waited = True
            self.thread.wait(lookup, IDLE_WAIT_S)
        answer = lookup.answer
        if answer is None and time.monotonic_ns() > lookup.deadline_ns + LATE_NS:
            self.thread.cancel(lookup)  # the thread has failed, or is not given the processor
            answer = LookupAnswer(reason=MissReason.DEADLINE, wait_s=self._wait_ns / 1e9)
        if answer is not None:
            attempt.answer, attempt.lease = answer, answer.lease
            attempt.exposed_s = min(answer.wait_s, max(0, answer.ready_ns - attempt.reached_ns) / 1e9)
            self._count(attempt, answer, was_asked=lookup.asks)
        return answer

    def give_back(self, attempt: Attempt) -> None:
        """Nothing is read through this attempt's lease (any more)."""
        if attempt.lease is not None:
            self.thread.release(attempt.lease)
            attempt.lease = None

    def ask_again(self, tracked: TrackedRequest) -> None:
        """The answer does not hold any more: the next `answer` is a new one."""
        attempt = tracked.attempt
        attempt.answer, attempt.lookup, attempt.is_left, attempt.reached_ns = None, None, False, 0

    def forget(self, tracked: TrackedRequest) -> None:
        """The store's bytes are void: a request without an answer gets an empty one, and its lease is given back."""
        attempt = tracked.attempt
        if attempt.answer is None and attempt.lookup is not None:
            self.thread.cancel(attempt.lookup)
            attempt.answer = LookupAnswer(reason=MissReason.ABSENT)
        self.give_back(attempt)

    # ---- requests that the engine's own cache covers

    def is_trifle(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether this many tokens are computed sooner than they could be loaded. A hand-off is always loaded."""
        return tracked.handoff is None and tokens < self._tokens_s * LEAST_GAIN_S

    def leave(self, tracked: TrackedRequest) -> bool:
        """Go without an answer: waiting for it would gain nothing. False if the answer is there already.

        If the request is saved, its boundaries are needed all the same, and the thread works them out.
        """
        attempt = tracked.attempt
        if attempt.answer is not None or (attempt.lookup is not None and attempt.lookup.answer is not None):
            return False
        self._cancel(tracked)
        attempt.answer, attempt.is_left = LookupAnswer(reason=MissReason.NO_GAIN), True
        if attempt.lookup is None and tracked.may_save:
            self._walk(tracked)
        return True

    def come_back(self, tracked: TrackedRequest) -> bool:
        """The engine's own cache does not cover the request any more: its blocks were evicted while it waited for room.
        Whether the store is asked now. (The thread may still be working out boundaries for `leave`; it does one thing
        after the other.)"""
        if not tracked.attempt.is_left or self._is_refused(tracked):
            return False
        self.ask_again(tracked)
        return True

    # ---- asking

    def _is_refused(self, tracked: TrackedRequest) -> bool:
        """Whether the store must not be asked about it."""
        return tracked.is_opaque or tracked.request.skip_reading_prefix_cache or not self._reads

    def _cancel(self, tracked: TrackedRequest) -> None:
        self._unseen.pop(tracked, None)
        lookup = tracked.attempt.lookup
        if lookup is None or tracked.attempt.answer is not None:
            return
        self.thread.cancel(lookup)
        if lookup.is_early:
            self.counters.count(PREFETCHES, "wasted" if lookup.answer is not None else "cancelled")

    def _ask(self, tracked: TrackedRequest, *, is_early: bool = False) -> None:
        self._unseen.pop(tracked, None)
        if self._is_refused(tracked):
            self._refuse(tracked)
            return
        tracked.attempt.lookup = self._lookup(tracked, is_early=is_early)
        self.thread.ask(tracked.attempt.lookup)

    def _refuse(self, tracked: TrackedRequest) -> None:
        """The store is not asked. If the request is saved, its boundaries are needed all the same: as a rule they are
        worked out when something is saved. But if its adapter is not named yet, or another store is to hear of the
        prompt, the thread works them out now, and the request waits for that."""
        if tracked.may_save and (tracked.boundaries.is_being_named or _deliver(tracked)):
            self._walk(tracked)
        else:
            tracked.attempt.answer = LookupAnswer(reason=MissReason.REFUSED)
            self.counters.count(MISSES, MissReason.REFUSED)

    def _walk(self, tracked: TrackedRequest) -> None:
        tracked.attempt.lookup = self._lookup(tracked)
        self.thread.walk(tracked.attempt.lookup)

    def _lookup(self, tracked: TrackedRequest, *, is_early: bool = False) -> PromptLookup:
        request = tracked.request
        tokens: Sequence[int] = request.prompt_token_ids or []
        if request.num_output_tokens:  # resumed after preemption: the prompt, and the answer so far
            tokens = list(request.all_token_ids)
        now_ns = time.monotonic_ns()
        return PromptLookup(
            tokens,
            tracked.boundaries,
            now_ns + (EARLY_NS if is_early else self._wait_ns),
            now_ns,
            tracked.handoff if not request.num_output_tokens else None,
            _deliver(tracked),
            is_early=is_early,
            is_wanted=not is_early,
            priority=request.priority,
            ahead=self._waiting - 1 if is_early else 0,
            prefill_tokens_s=self._tokens_s,
        )

    def _reach(self, tracked: TrackedRequest, lookup: PromptLookup) -> None:
        """The scheduler reaches a request that was looked up early. From now on the engine waits for the answer."""
        now_ns = time.monotonic_ns()
        answer = lookup.answer
        if answer is not None and _is_stale(answer, now_ns):
            if answer.lease is not None:
                self.thread.release(answer.lease)
            self._ask(tracked)
            return
        lookup.is_wanted = True
        if answer is None:
            lookup.deadline_ns = now_ns + self._wait_ns
            lookup.prefill_tokens_s = self._tokens_s
            self.thread.want(lookup)

    def _count(self, attempt: Attempt, answer: LookupAnswer, *, was_asked: bool = True) -> None:
        if answer.reason == MissReason.NO_GAIN:  # too short to be looked up
            return
        if not was_asked:
            self.counters.count(MISSES, answer.reason)
            return
        self.counters.count(LOOKUPS, "hit" if answer.end_tokens else "miss")
        self.counters.observe(WAIT, answer.wait_s)
        self.counters.observe(EXPOSED, attempt.exposed_s)
        if answer.left_tokens:
            self.counters.count(PREFETCHES, "skipped")
        elif answer.was_staged:
            self.counters.count(PREFETCHES, "late" if attempt.exposed_s else "in_time")
        if answer.reason:
            self.counters.count(MISSES, answer.reason)

    # ---- how fast this engine computes

    @property
    def _tokens_s(self) -> int:
        """What loading is weighed against. 0: nothing, because it is not known yet or loading is always wanted."""
        return 0 if self._always_load else int(self._rate.tokens_s)

    def step_launched(self, tokens: int) -> None:
        self._has_waited = False
        now_ns = time.monotonic_ns()
        self._ask_unseen(now_ns)
        self._steps.append((now_ns, tokens))  # a step without tokens ends, too

    def step_done(self) -> None:
        """Steps may overlap: one lasts from its launch, or from the end of the step before, to its own end."""
        now_ns = time.monotonic_ns()
        if self._steps:
            launched_ns, tokens = self._steps.popleft()
            if tokens >= MEASURED_TOKENS:
                self._rate.add(tokens, (now_ns - max(launched_ns, self._step_ended_ns)) / 1e9)
        self._step_ended_ns = now_ns


def _deliver(tracked: TrackedRequest) -> str:
    """The address of the store that wants what is saved of this prompt; empty if there is none."""
    return tracked.handoff.deliver if tracked.handoff is not None and tracked.hands_over else ""


def _is_stale(answer: LookupAnswer, now_ns: int) -> bool:
    """Whether an early answer is worth asking for again: its lease has ended, or more may have been saved since."""
    if answer.lease is not None and not answer.lease.is_live:
        return True
    return bool(answer.reason) and not answer.left_tokens and now_ns - answer.ready_ns > REFRESH_NS
