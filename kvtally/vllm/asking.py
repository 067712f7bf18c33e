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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtally.core.prefetch import Rate
from kvtally.core.receipts import Role
from kvtally.vllm.handoff import Handoff
from kvtally.vllm.inquiry import Answer, Inquiries, Inquiry
from kvtally.vllm.path import Path
from kvtally.vllm.tally import EXPOSED, LOOKUPS, MISSES, PREFETCHES, WAIT, Tally
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

EARLY_NS = 60_000_000_000  # how long an early inquiry may go on; what it holds expires then
REFRESH_NS = 100_000_000  # an early answer older than this is asked for again where it was not the whole prompt
LATE_NS = 500_000_000  # how long after its deadline an inquiry is believed to be answered yet
MEASURED_TOKENS = 64  # in a step, for it to tell how fast prompts are computed
# An engine that computes nothing asks again and again, and takes the interpreter from the thread that could answer. It
# waits for the answer instead, once in a step, and so long at most; not where other engines wait for its steps.
IDLE_WAIT_S = 0.002
UNSEEN_NS = 2_000_000  # how long asking is left, where many arrive and no step begins
LEAST_GAIN_S = 0.005  # a load takes some steps of the engine: what is computed sooner than this is not loaded


@dataclass(slots=True, eq=False)
class Question:
    """One request, as far as the store is asked about it."""

    request: Request
    path: Path
    handoff: Handoff | None = None
    is_opaque: bool = False  # its name does not say what its KV is (prompt embeddings, ...): neither read nor saved
    inquiry: Inquiry | None = None
    answer: Answer | None = None
    is_left: bool = False  # that answer is none: the request was left to the engine's own cache
    came_ns: int = 0  # when the scheduler first came to the request
    is_started: bool = False  # was scheduled to be computed
    wait_s: float = 0.0
    exposed_s: float = 0.0  # of `wait_s`: after the scheduler had come to the request
    reason: str = ""

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a prompt for another engine."""
        return self.handoff is not None and self.handoff.role is Role.PREFILL

    @property
    def was_staged(self) -> bool:
        """Whether something had to be brought into the arena for it."""
        lease = self.answer.lease if self.answer is not None else None
        return lease is not None and lease.outcome is not None and lease.outcome.staged_bytes > 0


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
        self._wait_ns = wait_ms * 1_000_000
        self._is_alone = is_alone
        self._reads = reads
        self._prefetch = prefetch
        self._always_load = always_load
        self._may_leave = may_leave
        self._unseen: dict[Question, int] = {}  # by the scheduler, and not asked about; when they arrived
        self._waiting = 0  # requests that have not begun
        self._running = 0  # those that have
        self._has_waited = False  # in this step
        self._rate = Rate()
        # Launched and not done: when, and how many tokens. No more than can be: if vLLM keeps the end of a step to
        # itself, that one falls out, and the next ends are not taken for those of the steps before.
        self._steps: deque[tuple[int, int]] = deque(maxlen=steps_in_flight)
        self._step_ended_ns = 0

    # ---- a request

    def arrived(self, question: Question) -> None:
        self._waiting += 1
        # The tokens of a streaming input are not complete yet: it is asked about when it is scheduled.
        if not self._prefetch or question.request.resumable:
            return
        now_ns = time.monotonic_ns()
        self._unseen[question] = now_ns
        self._ask_unseen(now_ns - UNSEEN_NS if self._may_leave else now_ns)

    def _ask_unseen(self, until_ns: int) -> None:
        """About those that arrived until then."""
        for question in [question for question, arrived_ns in self._unseen.items() if arrived_ns <= until_ns]:
            self._ask(question, is_early=True)

    def answer(self, question: Question) -> Answer | None:
        """The scheduler wants to know; None: not yet. The first answer stays the question's."""
        if question.answer is not None:
            return question.answer
        question.came_ns = question.came_ns or time.monotonic_ns()
        if question.inquiry is None:
            self._ask(question)
        elif not question.inquiry.is_wanted:
            self._come_to(question, question.inquiry)
        inquiry = question.inquiry
        if inquiry is None:
            return question.answer
        if inquiry.answer is None and self._is_alone and not self._running and not self._has_waited:
            self._has_waited = True
            self._inquiries.wait(inquiry, IDLE_WAIT_S)
        answer = inquiry.answer
        if answer is None and time.monotonic_ns() > inquiry.deadline_ns + LATE_NS:
            self._inquiries.cancel(inquiry)  # its thread has failed, or is not given the processor
            answer = Answer(0, [], None, MissReason.DEADLINE, self._wait_ns / 1e9)
        if answer is not None:
            question.answer, question.reason, question.wait_s = answer, answer.reason, answer.wait_s
            question.exposed_s = min(answer.wait_s, max(0, answer.ready_ns - question.came_ns) / 1e9)
            self._count(question, answer)
        return answer

    def began(self, question: Question) -> None:
        """It is computed from now on."""
        if not question.is_started:
            question.is_started = True
            self._waiting -= 1
            self._running += 1

    def again(self, question: Question) -> None:
        """Another life, another question: it was preempted, or what was answered does not hold any more."""
        question.answer, question.inquiry, question.is_left, question.came_ns = None, None, False, 0

    def ended(self, question: Question) -> None:
        """It is over; an answer that nobody took, or that is yet to come, is given back."""
        if question.is_started:
            self._running -= 1
        else:
            self._waiting -= 1
        self._cancel(question)

    def forget(self, question: Question) -> None:
        """The store is made to forget everything: nothing is promised any more."""
        if question.answer is None and question.inquiry is not None:
            self._inquiries.cancel(question.inquiry)
            question.answer = Answer(0, [], None, MissReason.ABSENT, 0.0)

    def is_trifle(self, question: Question, tokens: int) -> bool:
        """Whether so many tokens are computed sooner than they could be loaded. A hand-off is loaded all the same."""
        return question.handoff is None and tokens < self._tokens_s * LEAST_GAIN_S

    def leave(self, question: Question, *, is_saved: bool) -> bool:
        """Nothing could be gained by waiting for an answer. False: it is there already. What is saved of the request
        needs its path all the same."""
        if question.answer is not None or (question.inquiry is not None and question.inquiry.answer is not None):
            return False
        self._cancel(question)
        question.answer, question.is_left = Answer(0, [], None, "", 0.0), True
        if question.inquiry is None and is_saved and not question.is_opaque:
            question.inquiry = self._inquiry(question)
            self._inquiries.walk(question.inquiry)
        return True

    def come_back(self, question: Question) -> bool:
        """What was left is not covered any more: its blocks were evicted while it waited for room. Whether it is asked
        about now. (Its path may still be walked for that other answer; the inquiry thread does one after the other.)"""
        if not question.is_left or self._is_refused(question):
            return False
        self.again(question)
        return True

    def _is_refused(self, question: Question) -> bool:
        """Whether nobody may be asked about it."""
        return question.is_opaque or question.request.skip_reading_prefix_cache or not self._reads

    def _cancel(self, question: Question) -> None:
        self._unseen.pop(question, None)
        if question.inquiry is None or question.answer is not None:
            return
        self._inquiries.cancel(question.inquiry)
        if question.inquiry.is_early:
            was_answered = question.inquiry.answer is not None
            self._tally.count(PREFETCHES, "wasted" if was_answered else "cancelled")

    def _ask(self, question: Question, *, is_early: bool = False) -> None:
        self._unseen.pop(question, None)
        if self._is_refused(question):
            question.answer = Answer(0, [], None, MissReason.REFUSED, 0.0)
            question.reason = MissReason.REFUSED
            self._tally.count(MISSES, MissReason.REFUSED)
            return
        question.inquiry = self._inquiry(question, is_early=is_early)
        self._inquiries.ask(question.inquiry)

    def _inquiry(self, question: Question, *, is_early: bool = False) -> Inquiry:
        request = question.request
        tokens: Sequence[int] = request.prompt_token_ids or []
        if request.num_output_tokens:  # resumed after preemption: prompt and answer so far
            tokens = list(request.all_token_ids)
        now_ns = time.monotonic_ns()
        return Inquiry(
            tokens,
            question.path,
            now_ns + (EARLY_NS if is_early else self._wait_ns),
            now_ns,
            self._full_groups,
            question.handoff if not question.is_prefill and not request.num_output_tokens else None,
            is_early=is_early,
            is_wanted=not is_early,
            priority=request.priority,
            ahead=self._waiting - 1 if is_early else 0,
            prefill_tokens_s=self._tokens_s,
        )

    def _come_to(self, question: Question, inquiry: Inquiry) -> None:
        """The scheduler wants a request that was asked about early. From now on the engine waits for the answer."""
        now_ns = time.monotonic_ns()
        answer = inquiry.answer
        if answer is not None and _is_stale(answer, now_ns):
            if answer.lease is not None:
                self._inquiries.release(answer.lease)
            self._ask(question)
            return
        inquiry.is_wanted = True
        if answer is None:
            inquiry.deadline_ns = now_ns + self._wait_ns
            inquiry.prefill_tokens_s = self._tokens_s
            self._inquiries.want(inquiry)

    def _count(self, question: Question, answer: Answer) -> None:
        if not answer.end_tokens and not answer.reason:  # too short to be asked about
            return
        self._tally.count(LOOKUPS, "hit" if answer.end_tokens else "miss")
        self._tally.observe(WAIT, answer.wait_s)
        self._tally.observe(EXPOSED, question.exposed_s)
        if answer.left_tokens:
            self._tally.count(PREFETCHES, "skipped")
        elif question.was_staged:
            self._tally.count(PREFETCHES, "late" if question.exposed_s else "in_time")
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
