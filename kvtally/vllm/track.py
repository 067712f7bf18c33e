"""What the scheduler half knows about one request, and that request's half of its receipt.

    Track ── what holds for the request from its arrival to its end
      └─ life: Life ── what holds until the next preemption

A preempted request loses its blocks and starts over: nothing that an earlier life found, loaded or saved says anything
about the next one. So a new life gets a new record, and no field of the old one can survive by accident. `scheduler`
and `asking` change these records; both run in vLLM's scheduler thread. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtally.core.handoff import Handoff
from kvtally.core.receipts import Half, Role
from kvtally.vllm.inquiry import Answer, Inquiry
from kvtally.vllm.path import Path
from kvtally.wire.messages import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtally.vllm.meta import LoadReport


@dataclass(slots=True, eq=False)
class Life:
    """One life of a request: from its arrival, or a preemption, to its end or the next preemption."""

    number: int = 0  # preemptions before it
    is_started: bool = False  # the engine computes it

    # what the store was asked
    inquiry: Inquiry | None = None
    answer: Answer | None = None
    is_left: bool = False  # the store was not asked: the engine's own cache covers the request, so `answer` is empty
    came_ns: int = 0  # when the scheduler first came to the request
    wait_s: float = 0.0
    exposed_s: float = 0.0  # the part of `wait_s` after the scheduler had come to the request
    reason: str = ""  # why the store gave less than the whole prompt

    # what it began with
    local_tokens: int = 0  # from the engine's own cache
    external_tokens: int = 0  # from the store
    disk_tokens: int = 0  # the part of `external_tokens` that the store read from disk
    is_loading: bool = False
    load: LoadReport | None = None  # how the load went, once it has ended
    is_counted: bool = False  # the loaded tokens are in the tally

    # what it has saved
    saved_chunks: int = 0  # chunks that are in the store or on their way there
    tail_saved: bool = False
    state_tokens: int = 0  # where the last recurrent state ends that was saved

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.external_tokens

    @property
    def was_staged(self) -> bool:
        """Whether the store had to bring something into the arena for it."""
        lease = self.answer.lease if self.answer is not None else None
        return lease is not None and lease.outcome is not None and lease.outcome.staged_bytes > 0


@dataclass(slots=True, eq=False)
class Track:
    """One request on its way through the engine."""

    request: Request
    path: Path
    handoff: Handoff | None = None
    is_opaque: bool = False  # its name does not identify its KV (prompt embeddings, ...): neither read nor saved
    prompt_tokens: int = 0  # as the request came; a prefill for another engine computes one token less
    may_save: bool = False
    failure: str = ""  # why a load failed; the request is never promised anything again
    expired: int = 0  # leases that ended before the request could be loaded
    lost: str = ""  # why something could not be saved. A later life saves it again, but may not have saved all of it
    promised: Half | None = None  # the half that was filed for a hand-off whose bytes were still being saved
    is_filed: bool = False  # the half of the life that gave the first token is on its way
    life: Life = field(default_factory=Life)

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a prompt for another engine."""
        return self.handoff is not None and self.handoff.role is Role.PREFILL

    def half(self, role: Role, *, holds_beginnings: bool = True) -> Half:
        """This engine's half of the receipt: the account of the current life, as far as it is known."""
        life, weighed = self.life, self.life.answer
        reason = self.failure or life.reason
        if reason == MissReason.NO_GAIN and life.reused_tokens:
            reason = ""  # the engine's own cache covers it: nothing went wrong that wants a reason
        return Half(
            role=role,
            request=self.request.request_id,
            prompt_tokens=self.prompt_tokens,
            tokens_gpu=life.local_tokens,
            tokens_host=life.external_tokens - life.disk_tokens,
            tokens_disk=life.disk_tokens,
            computed_tokens=max(0, self.request.num_prompt_tokens - life.reused_tokens),
            moved_bytes=life.load.moved_bytes if life.load is not None else 0,
            wait_ms=life.wait_s * 1e3,
            load_ms=life.load.seconds * 1e3 if life.load is not None else 0.0,
            verified=life.external_tokens > 0 and life.load is not None and life.load.verified,
            reason=reason,
            exposed_ms=life.exposed_s * 1e3,
            left_tokens=weighed.left_tokens if weighed is not None else 0,
            load_estimate_ms=weighed.load_ms if weighed is not None else 0.0,
            compute_estimate_ms=weighed.compute_ms if weighed is not None else 0.0,
            holds_beginnings=holds_beginnings,
        )
