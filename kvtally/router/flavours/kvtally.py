"""Our own connector: the hand-off names a boundary in a store, and decode files its half of the receipt there."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec

from kvtally.config.instances import Instance
from kvtally.core import handoff
from kvtally.core.handoff import KEY
from kvtally.router.flavours.base import Ask, Flavour, Handoff, Opening, Params, PrefillAnswer

UNREACHABLE = "store_unreachable"


class KVTally(Flavour):
    name = "kvtally"
    has_receipts = True

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        return Opening({KEY: {"ticket": ticket, "role": "prefill"}})

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        if answer.params is None or KEY not in answer.params:
            return "no_handoff"  # prefill runs without our connector
        try:
            saved = handoff.parse(answer.params[KEY])
        except msgspec.ValidationError:
            return "bad_handoff"
        if saved.ticket != ticket or saved.saved_tokens > saved.prompt_tokens:
            return "bad_handoff"
        if not saved.store:  # prefill never reached its store, so it saved nothing there
            nothing = msgspec.structs.replace(saved, saved_tokens=0, chain="", reason=UNREACHABLE)
            return Handoff(self.alone(ticket), nothing.half())
        return Handoff(saved.told().params(), saved.half())

    def aimed(self, params: Params | None, *, source: str = "", deliver: str = "") -> Params | None:
        named = {name: address for name, address in (("source", source), ("deliver", deliver)) if address}
        if not params or not named:
            return params
        return {**params, KEY: {**cast("Params", params[KEY]), **named}}

    def trusted(self, params: Params | None, is_known: Callable[[str], bool]) -> Params | None:
        own = cast("Params", (params or {}).get(KEY, {}))
        if "address" not in own or is_known(cast("str", own["address"])):
            return params
        return {**(params or {}), KEY: {name: value for name, value in own.items() if name != "address"}}

    def alone(self, ticket: str) -> Params | None:
        return {KEY: {"ticket": ticket, "role": "decode"}}

    def again(self, ticket: str, told: Params | None) -> Params | None:
        """The same promise under a new ticket, because the first instance may have filed a receipt under the old."""
        first = handoff.parse((told or {}).get(KEY))
        if not first.store:
            return self.alone(ticket)
        return msgspec.structs.replace(first, ticket=ticket, promise=first.prefill_ticket).params()
