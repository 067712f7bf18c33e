"""One request on its way through the engine: what the scheduler half knows of it, and its half of the receipt.

Plain state, which `scheduler` changes, and, as far as it is a `Question`, `asking`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtally.core.receipts import Half, Role
from kvtally.vllm.asking import Question
from kvtally.vllm.meta import LoadReport


@dataclass(slots=True, eq=False)
class Track(Question):
    """One request on its way through the engine."""

    prompt_tokens: int = 0  # of the request as it came: a prefill for somebody else computes one less
    may_save: bool = False  # whether its KV is what its name says, for others to reuse
    has_failed: bool = False  # a load failed: never promise this request anything again
    is_loading: bool = False
    is_counted: bool = False  # whether what was loaded is in the tally
    saved_chunks: int = 0  # chunks that are in the store already or on their way there
    tail_saved: bool = False
    preemptions: int = 0  # how many the request had when it was last asked about
    expired: int = 0  # leases of it that ended before it could be loaded
    local_tokens: int = 0
    external_tokens: int = 0
    disk_tokens: int = 0
    report: LoadReport = field(default_factory=LoadReport)
    lost: str = ""  # why something of it could not be saved
    promised: Half | None = None  # what was filed of a hand-off whose bytes were still being saved
    is_filed: bool = False  # its half of the receipt is on its way

    def half(self, role: Role, *, holds_beginnings: bool = True) -> Half:
        """This engine's half of its receipt, as far as is known by now."""
        reused = self.local_tokens + self.external_tokens
        weighed = self.answer
        return Half(
            role=role,
            request=self.request.request_id,
            prompt_tokens=self.prompt_tokens,
            tokens_gpu=self.local_tokens,
            tokens_host=self.external_tokens - self.disk_tokens,
            tokens_disk=self.disk_tokens,
            computed_tokens=max(0, self.request.num_prompt_tokens - reused),
            moved_bytes=self.report.moved_bytes,
            wait_ms=self.wait_s * 1e3,
            load_ms=self.report.seconds * 1e3,
            verified=self.external_tokens > 0 and self.report.verified,
            reason=self.reason,
            exposed_ms=self.exposed_s * 1e3,
            left_tokens=weighed.left_tokens if weighed is not None else 0,
            load_estimate_ms=weighed.load_ms if weighed is not None else 0.0,
            compute_estimate_ms=weighed.compute_ms if weighed is not None else 0.0,
            holds_beginnings=holds_beginnings,
        )
