"""The hand-off: the record that prefill, router and decode pass on in a request's `kv_transfer_params`.

    router ──{"kvtally": {"ticket", "role": "prefill"}}──▶ prefill
    prefill ──{"kvtally": {ticket, role, store, namespace, saved_tokens, chain, …}}──▶ router
    router ──the same with "role": "decode"──▶ decode

Owns the schema and its limits; the connector (`vllm.handoff`) and the router (`router.flavours.kvtally`) both read and
write through it. Nobody trusts the writer: a record that does not fit the schema is no hand-off, and decode compares
every claim with its own tokens. Fields that this version does not know are ignored, so a later version may add some.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvtally.core.receipts import Half, Role

KEY = "kvtally"  # the record's place in `kv_transfer_params`
LONGEST_TEXT = 256

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{2}){0,32}\Z")]  # in hex; empty where there is none
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's part in a hand-off. The router sends prefill only ticket and role; prefill fills in the rest."""

    ticket: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_TEXT)]
    role: Role
    store: _Text = ""  # the name of prefill's store process (`Greeting.store`); empty: it never reached its store
    namespace: _Hash = ""
    saved_tokens: _Count = 0  # everything up to this boundary is saved, or on its way into the store
    prompt_tokens: _Count = 0
    chain: _Hash = ""  # the chain value at `saved_tokens`
    state: _Text = ""  # "pending": still on its way into the store when prefill answered
    reason: _Text = ""  # why `saved_tokens` is 0
    tokens_gpu: _Count = 0  # prefill's account of its prompt, as in `receipts.Half`
    tokens_host: _Count = 0
    tokens_disk: _Count = 0
    computed_tokens: _Count = 0
    promise: _Text = ""  # prefill's ticket, where it is not this one: decode's second try has a ticket of its own
    tokens_peer: _Count = 0
    tokens_pool: _Count = 0
    # Addresses of stores, as other stores reach them (`Greeting.address`).
    address: _Text = ""  # prefill's own store: decode's store pulls from it
    source: _Text = ""  # a store that has seen most of this prompt, as the router knows it
    deliver: _Text = ""  # for prefill: decode's store, which pulls each chunk as soon as it is saved

    @property
    def prefill_ticket(self) -> str:
        """The ticket under which prefill files what becomes of its promise."""
        return self.promise or self.ticket

    def half(self) -> Half:
        """Prefill's half of the receipt, as far as the hand-off tells it."""
        return Half(
            role=Role.PREFILL,
            request=self.ticket,
            prompt_tokens=self.prompt_tokens,
            saved_tokens=self.saved_tokens,
            chain=bytes.fromhex(self.chain),
            tokens_gpu=self.tokens_gpu,
            tokens_host=self.tokens_host,
            tokens_disk=self.tokens_disk,
            tokens_peer=self.tokens_peer,
            tokens_pool=self.tokens_pool,
            computed_tokens=self.computed_tokens,
            reason=self.reason,
        )

    def told(self) -> Handoff:
        """The part that decode is told: the promise, and nothing of how prefill came by it."""
        return Handoff(
            ticket=self.ticket,
            role=Role.DECODE,
            store=self.store,
            namespace=self.namespace,
            saved_tokens=self.saved_tokens,
            prompt_tokens=self.prompt_tokens,
            chain=self.chain,
            address=self.address,
        )

    def params(self) -> dict[str, object]:
        """The record as `kv_transfer_params` carries it."""
        return {KEY: msgspec.to_builtins(self)}


def parse(record: object) -> Handoff:
    """Raises msgspec.ValidationError for anything that is not a hand-off."""
    return msgspec.convert(record, Handoff)
