"""What the scheduler half knows about one request, and that request's half of its receipt.

    TrackedRequest ── what holds from the request's arrival to its end
      └─ attempt: Attempt ── what holds until the next preemption

A preempted request loses its blocks and starts over: what an earlier attempt found, loaded or saved says nothing about
the next one. So each attempt has a record of its own, and no field of the old one can survive by accident.

Every group of fields has one writer, which its comment names. All writers run in vLLM's scheduler thread. Imports no
vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtally.client import Lease
from kvtally.core.handoff import Handoff
from kvtally.core.receipts import NOTHING, Half, Loaded, Role
from kvtally.vllm.boundaries import Boundaries
from kvtally.vllm.lookup_thread import LookupAnswer, PromptLookup
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtally.vllm.step_jobs import LoadReport


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request: from its arrival, or a preemption, to its end or the next preemption."""

    number: int = 0  # preemptions before it

    # `lookup_policy`: the question to the store, and its answer
    is_running: bool = False  # the engine computes it
    lookup: PromptLookup | None = None
    answer: LookupAnswer | None = None
    lease: Lease | None = None  # the answer's, until it is given back
    is_left: bool = False  # the store was not asked: the engine's own cache covers the request, so `answer` is empty
    reached_ns: int = 0  # when the scheduler first reached the request
    exposed_s: float = 0.0  # the part of the wait for the answer after the scheduler had reached the request

    # `loads`: what it begins with
    local_tokens: int = 0  # from the engine's own cache
    loaded: Loaded = NOTHING  # from the store
    unused: str = ""  # why an answer was not used: a MissReason
    is_loading: bool = False
    load: LoadReport | None = None  # how the load went, once it has ended
    is_counted: bool = False  # the loaded tokens are in the counters
    known_tokens: int = 0  # the store has every chunk up to here

    # `saves`: what it has saved
    saved_chunks: int = 0  # chunks that are in the store or on their way there
    is_tail_saved: bool = False
    state_tokens: int = 0  # the boundary of the last recurrent state that was saved

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.loaded.tokens

    @property
    def reason(self) -> str:
        """Why the store gave less than the whole prompt."""
        return self.unused or (self.answer.reason if self.answer is not None else "")


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request on its way through the engine. `scheduler` owns it and replaces its attempts."""

    request: Request
    boundaries: Boundaries
    handoff: Handoff | None = None
    is_opaque: bool = False  # its name does not identify its KV (prompt embeddings, ...): neither read nor saved
    prompt_tokens: int = 0  # as the request came; a prefill for another engine computes one token less
    may_save: bool = False
    lost: str = ""  # why something could not be saved. A later attempt saves it again, but maybe not all of it
    promised: Half | None = None  # the half that was filed for a hand-off whose bytes were still being saved
    is_filed: bool = False  # the half of the attempt that gave the first token is on its way

    # `loads`
    failure: str = ""  # why a load failed; the request is never promised anything again
    expired: int = 0  # leases that ended before the request could be loaded

    attempt: Attempt = field(default_factory=Attempt)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a prompt for another engine."""
        return self.handoff is not None and self.handoff.role is Role.PREFILL

    @property
    def are_boundaries_free(self) -> bool:
        """Whether the boundaries have chain values, and the lookup thread is done with them. Until then nothing can be
        saved."""
        return self.boundaries.is_named and (self.attempt.lookup is None or self.attempt.lookup.is_walked)

    @property
    def hands_over(self) -> bool:
        """Whether it is saved for another engine, up to the end of its prompt, which was shortened for that."""
        return self.is_prefill and self.may_save and self.request.num_prompt_tokens < self.prompt_tokens

    def half(self, role: Role, *, holds_beginnings: bool = True) -> Half:
        """This engine's half of the receipt: the account of the current attempt, as far as it is known."""
        attempt, answer, load = self.attempt, self.attempt.answer, self.attempt.load
        weighed = answer.weighed if answer is not None else None
        reason = self.failure or attempt.reason
        if reason == MissReason.NO_GAIN and attempt.reused_tokens:
            reason = ""  # the engine's own cache covers the request: nothing is missing that needs a reason
        return Half(
            role=role,
            request=self.id,
            prompt_tokens=self.prompt_tokens,
            tokens_gpu=attempt.local_tokens,
            tokens_host=attempt.loaded.host,
            tokens_disk=attempt.loaded.disk,
            tokens_peer=attempt.loaded.peer,
            tokens_pool=attempt.loaded.pool,
            computed_tokens=max(0, self.request.num_prompt_tokens - attempt.reused_tokens),
            moved_bytes=load.moved_bytes if load is not None else 0,
            wait_ms=answer.wait_s * 1e3 if answer is not None else 0.0,
            load_ms=load.seconds * 1e3 if load is not None else 0.0,
            verified=attempt.loaded.tokens > 0 and load is not None and load.verified,
            reason=reason,
            exposed_ms=attempt.exposed_s * 1e3,
            left_tokens=weighed.left_tokens if weighed is not None else 0,
            load_estimate_ms=weighed.load_ms if weighed is not None else 0.0,
            compute_estimate_ms=weighed.compute_ms if weighed is not None else 0.0,
            holds_beginnings=holds_beginnings,
        )
