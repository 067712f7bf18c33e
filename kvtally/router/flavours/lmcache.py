"""LMCache with storage that prefill and decode share. There is no hand-off: both are sent the same prompt.

When prefill answers, its bytes may not be stored yet; LMCache does not say when they are. Its multi-process connector
says what decode found if it is asked for `cached_token_stats`, in responses that are not streamed.
"""

from __future__ import annotations

import msgspec

from kvtally.config.instances import Instance
from kvtally.core.receipts import Half, Role
from kvtally.router.flavours.base import (
    Ask,
    Flavour,
    Handoff,
    Opening,
    Params,
    PrefillAnswer,
    ResponseUsage,
    prefill_half,
)

STATS = "cached_token_stats"


class _Stats(msgspec.Struct):
    num_vllm_cached_tokens: int
    num_lmcache_extra_cached_tokens: int


class _Params(msgspec.Struct):
    cached_token_stats: _Stats


class _Response(msgspec.Struct):
    kv_transfer_params: _Params
    usage: ResponseUsage


class LMCache(Flavour):
    name = "lmcache"
    has_evidence = True

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        return Opening(None)

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        wanted = max(answer.prompt_tokens - 1, 0)
        half = prefill_half(ticket, prompt_tokens=answer.prompt_tokens, saved_tokens=wanted)
        return Handoff(self.alone(ticket), half)

    def alone(self, ticket: str) -> Params | None:
        return {STATS: True}

    def evidence(self, body: bytes) -> Half | None:
        try:
            response = msgspec.json.decode(body, type=_Response)
        except (msgspec.DecodeError, RecursionError):
            return None
        stats, prompt_tokens = response.kv_transfer_params.cached_token_stats, response.usage.prompt_tokens
        loaded = stats.num_lmcache_extra_cached_tokens
        return Half(
            role=Role.DECODE,
            prompt_tokens=prompt_tokens,
            tokens_gpu=stats.num_vllm_cached_tokens,
            tokens_remote=loaded,
            computed_tokens=max(prompt_tokens - stats.num_vllm_cached_tokens - loaded, 0),
            reason="unverified" if loaded else "absent",
        )
