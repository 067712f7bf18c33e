"""vLLM's NixlConnector: decode pulls from prefill's memory, or prefill pushes into decode's.

The router checks prefill's answer before decode gets it. Without `do_remote_prefill` decode would silently recompute;
without block ids its scheduler would fail an assertion; without an address the request would be parked for ever (see
vLLM 0.32, `nixl/pull_scheduler.py`). The engine does not say what a single request reused.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from kvtally.config.instances import Instance
from kvtally.router.flavours.base import Ask, Flavour, Handoff, Opening, Params, PrefillAnswer, prefill_half

_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Size = Annotated[int, msgspec.Meta(ge=1)]


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """The fields without which decode fails, in either direction."""

    do_remote_prefill: bool
    remote_engine_id: _Word
    remote_request_id: _Word
    remote_host: _Word
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    tp_size: _Size
    remote_block_ids: list[object]  # of blocks, or of lists of them, by group
    pp_size: _Size = 1
    dcp_size: _Size = 1
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    transfer_mode: str = "pull"


class Nixl(Flavour):
    """Pull: decode gets prefill's dictionary unchanged."""

    name = "nixl"
    has_one_reader = True
    mode: ClassVar[str] = "pull"

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return Opening({"do_remote_decode": True, "do_remote_prefill": False, **unknown})

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        if answer.params is None:
            return "no_handoff"
        try:
            remote = msgspec.convert(answer.params, Remote)
        except msgspec.ValidationError:
            return "bad_handoff"
        if remote.transfer_mode != self.mode:
            return f"transfer_mode_{'push' if self.mode == 'pull' else 'pull'}"
        if not remote.do_remote_prefill or not any(remote.remote_block_ids):
            return "no_handoff"
        half = prefill_half(ticket, prompt_tokens=answer.prompt_tokens, saved_tokens=remote.remote_num_tokens)
        return Handoff(self.told(answer.params, remote), half)

    def told(self, params: Params, remote: Remote) -> Params:
        return params


class NixlPush(Nixl):
    """Push: decode finds prefill by its address and registers there; prefill finds decode's request by its id.

    For that, both legs carry the same X-Request-Id and go to the same path.
    """

    name = "nixl-push"
    mode = "push"

    def told(self, params: Params, remote: Remote) -> Params:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": remote.remote_engine_id,
            "remote_request_id": remote.remote_request_id,
            "remote_host": remote.remote_host,
            "remote_port": remote.remote_port,
            "tp_size": remote.tp_size,
            "pp_size": remote.pp_size,
            "dcp_size": remote.dcp_size,
        }
