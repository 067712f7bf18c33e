"""How a hand-off changes a request inside vLLM. The record itself is `core.handoff`.

Prefill computes all but the last prompt token, so that its recurrent state is the one at exactly the boundary from
which decode goes on, and then generates one token. Neighbours: `scheduler` (uses both functions), `core.receipts` (the
halves filed under the ticket).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kvtally.core.handoff import KEY, Handoff, parse

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("kvtally.vllm")


def handoff_of(params: dict[str, Any] | None) -> Handoff | None:
    """The hand-off in a request's parameters; None where there is none, or none that fits the schema."""
    if not params or KEY not in params:
        return None
    try:
        return parse(params[KEY])
    except msgspec.ValidationError as error:
        log.warning("kv_transfer_params.%s is not a hand-off and is ignored: %s", KEY, error)
        return None


def shorten_for_prefill(request: Request) -> bool:
    """Let prefill stop one token short and answer with one token. False where there is nothing to hand over.

    As vLLM's own P/D connectors do it, before the request is scheduled for the first time.
    """
    if request.prompt_token_ids is None or request.num_prompt_tokens < 2 or request.skip_reading_prefix_cache:
        return False
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # not in place: the list may be the caller's
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    return True
