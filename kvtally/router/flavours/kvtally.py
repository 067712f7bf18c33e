"""The flavour of our own connector: the hand-off names a boundary in a store, and decode files a receipt there."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvtally.instances import Instance
from kvtally.router.flavours.base import Ask, Flavour, Handoff, Opening, Params, PrefillAnswer, prefill_half

KEY = "kvtally"

_Hex = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{2}){0,32}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill's connector answers. Fields beyond these are not passed on."""

    ticket: str
    store: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    namespace: _Hex
    saved_tokens: _Count
    prompt_tokens: _Count
    chain: _Hex
    state: str = "ready"
    reason: Annotated[str, msgspec.Meta(max_length=256)] = ""


class KVTally(Flavour):
    name = "kvtally"
    has_receipts = True

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        return Opening({KEY: {"ticket": ticket, "role": "prefill"}})

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        if answer.params is None or KEY not in answer.params:
            return "no_handoff"  # prefill runs without our connector
        try:
            saved = msgspec.convert(answer.params[KEY], Saved)
        except msgspec.ValidationError:
            return "bad_handoff"
        if saved.ticket != ticket or saved.saved_tokens > saved.prompt_tokens:
            return "bad_handoff"
        told: Params = {
            "ticket": ticket,
            "role": "decode",
            "store": saved.store,
            "namespace": saved.namespace,
            "saved_tokens": saved.saved_tokens,
            "prompt_tokens": saved.prompt_tokens,
            "chain": saved.chain,
        }
        half = prefill_half(
            ticket,
            prompt_tokens=saved.prompt_tokens,
            saved_tokens=saved.saved_tokens,
            chain=bytes.fromhex(saved.chain),
            reason=saved.reason,
        )
        return Handoff({KEY: told}, half)

    def alone(self, ticket: str) -> Params | None:
        return {KEY: {"ticket": ticket, "role": "decode"}}

    def again(self, ticket: str, told: Params | None) -> Params | None:
        """The same promise, for a receipt of its own: the first instance may have filed one."""
        first = (told or {}).get(KEY)
        if not isinstance(first, dict) or "saved_tokens" not in first:
            return self.alone(ticket)
        return {KEY: {"promise": first["ticket"], **first, "ticket": ticket}}
