"""Where vLLM keeps recurrent states, and advice for users whose prompts only share a beginning. Imports no vLLM.

A state exists only where a prefill step ends. vLLM keeps some of these states, and offers them to a connector; its
retention interval says which. By default (0) it keeps the last one of each prompt. An exact repeat and the next turn of
a conversation then hit, but another question after the same system prompt does not. The second such question makes
vLLM keep a state where they part (`Loads._ask_for_state`), so the third one hits.
"""

from __future__ import annotations

from math import lcm

from kvtally.config.units import human_size
from kvtally.core.namespace import GroupKind, Namespace


def advice(namespace: Namespace, *, block_tokens: int, interval_tokens: int | None, step_tokens: int) -> str | None:
    """A line for the log if this retention interval keeps shared beginnings from being reused."""
    state_bytes = sum(spec.block_bytes() for spec in namespace.groups if spec.kind is GroupKind.RECURRENT)
    if not state_bytes or interval_tokens != 0:
        return None
    unit = lcm(block_tokens, namespace.chunk_tokens)
    return (
        "vLLM keeps recurrent states only near the end of a prompt (prefix_cache_retention_interval=0), so prompts "
        "that share a beginning and then differ reuse it from the third on. To reuse it from the second on, set "
        f"--prefix-cache-retention-interval {unit} (or a multiple, to keep fewer) and --max-num-batched-tokens (now "
        f"{step_tokens}) no longer than what prompts share: no state exists inside a step. "
        f"Each takes {human_size(state_bytes)} of the store per rank"
    )
