"""vLLM's MooncakeConnector: decode asks prefill for a transfer, by an id that the router makes up.

Decode needs the id of prefill's engine, which changes at every start. The router asks prefill's bootstrap server for it
with each request: with a remembered id, decode would wait for an engine that is gone.
"""

from __future__ import annotations

import msgspec

from kvtally.config.instances import Instance
from kvtally.router.flavours.base import Ask, Flavour, Handoff, Opening, Params, PrefillAnswer, prefill_half


class Engine(msgspec.Struct):
    engine_id: str


class Mooncake(Flavour):
    name = "mooncake"
    has_one_reader = True

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        engines = msgspec.convert(await ask(f"{prefill.bootstrap}/query"), dict[str, Engine])
        if not engines:
            raise ValueError("no engine is registered there")
        ranks = sorted(engines)
        rank = ranks[int.from_bytes(ticket.encode()) % len(ranks)]  # spreads requests over data-parallel ranks
        transfer = f"xfer-{ticket}"
        promised: Params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": prefill.bootstrap,
            "remote_engine_id": engines[rank].engine_id,
        }
        return Opening(
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer},
            # Mooncake transfers only requests that ended by length, so the one token must not be a stop token.
            fields={"ignore_eos": True, "stop": None, "stop_token_ids": None},
            headers={"X-data-parallel-rank": rank},
            promised=promised,
        )

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        if answer.finish_reason != "length":
            return "stopped_early"
        half = prefill_half(ticket, prompt_tokens=answer.prompt_tokens, saved_tokens=answer.prompt_tokens)
        return Handoff(opening.promised, half)
