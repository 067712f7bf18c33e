"""The hand-off: what a router writes into a request's `kv_transfer_params`, and what prefill answers there.

    router ──{"kvtally": {"ticket", "role": "prefill"}}──▶ prefill ──{"kvtally": {ticket, store, namespace, boundary,
    chain, …}}──▶ router ──the same, "role": "decode"──▶ decode

Owns the shape of these records and how a hand-off changes a request: prefill computes all but the last prompt token, so
that its recurrent state is the one at exactly the boundary that decode goes on from, and one token more. Whoever wrote
the record is not trusted: what cannot be read is no hand-off, and what it claims is compared, never believed.
Neighbours: `scheduler` (uses both), `core.receipts` (the halves filed under the ticket).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvtally.core.receipts import Role

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("kvtally.vllm")

KEY = "kvtally"
LONGEST_TEXT = 256

Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part in a hand-off. Prefill is given ticket and role only; the rest is what it answers."""

    ticket: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_TEXT)]
    role: Role
    store: Text = ""  # name of the store's process (`Greeting.store`)
    namespace: Text = ""  # hex digest
    saved_tokens: Count = 0  # the boundary up to which everything is saved, or is being saved
    prompt_tokens: Count = 0
    chain: Text = ""  # hex chain value at `saved_tokens`
    state: Text = ""  # "pending": on its way into the store when prefill answered
    reason: Text = ""  # why `saved_tokens` is 0
    promise: Text = ""  # the ticket prefill has filed under, where decode is another one's second try

    @property
    def prefill_ticket(self) -> str:
        """Under which prefill says what becomes of its promise."""
        return self.promise or self.ticket

    def params(self) -> dict[str, Any]:
        """As vLLM returns it to the client."""
        return {KEY: msgspec.to_builtins(self)}


def handoff_of(params: dict[str, Any] | None) -> Handoff | None:
    """What the router wrote, or None: it wrote nothing, or nothing that makes sense."""
    if not params or KEY not in params:
        return None
    try:
        return msgspec.convert(params[KEY], Handoff)
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
