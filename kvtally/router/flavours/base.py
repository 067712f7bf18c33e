"""What every flavour answers: what prefill is sent, what its answer is worth, what decode is sent, and where proof is.

    open ─▶ prefill leg ─▶ PrefillAnswer ─▶ close ─▶ Handoff (or why there is none) ─▶ decode leg ─▶ evidence

Owns the records that pass between a flavour and the proxy. A flavour holds no state and does no I/O of its own; the one
question that one of them must ask beforehand goes through the `Ask` it is given. Legs are always sequential: where an
engine would allow both at once, waiting costs nothing that a failed hand-off would not cost many times over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from kvtally.config.instances import Instance
from kvtally.core.receipts import Half, Role

Params = dict[str, object]  # a request's `kv_transfer_params`
Ask = Callable[[str], Awaitable[object]]  # GET this URL, decode its JSON; raises OSError or ValueError


class Opening(NamedTuple):
    """What the prefill leg carries beyond the client's own request."""

    params: Params | None
    fields: Mapping[str, object] = {}  # laid over the body
    headers: Mapping[str, str] = {}
    promised: Params = {}  # kept for `close`


class PrefillAnswer(NamedTuple):
    """What a prefill instance answered."""

    prompt_tokens: int
    finish_reason: str
    params: Params | None


class Handoff(NamedTuple):
    """What decode is told, and what prefill says it has done."""

    params: Params | None
    half: Half


class Flavour:
    """One way in which prefill hands over to decode."""

    name: ClassVar[str]
    has_receipts: ClassVar[bool] = False  # decode files its half in the store
    has_evidence: ClassVar[bool] = False  # decode's response says what it reused
    has_one_reader: ClassVar[bool] = False  # what prefill keeps is read once: not for n > 1, nor by a second instance

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        """What to send to this prefill instance. Raises OSError or ValueError where it cannot be told."""
        raise NotImplementedError

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        """Turn prefill's answer into what decode needs; a reason in one word where it cannot be used."""
        raise NotImplementedError

    def alone(self, ticket: str) -> Params | None:
        """What decode is told when there is no hand-off."""
        return None

    def again(self, ticket: str, told: Params | None) -> Params | None:
        """What a second decode instance is told, after one that was told this has failed: it may have read what was
        handed over, and have said so."""
        return self.alone(ticket)

    def evidence(self, body: bytes) -> Half | None:
        """Decode's half as far as its response (not streamed) tells it; where `has_evidence`."""
        return None


def prefill_half(ticket: str, *, prompt_tokens: int, saved_tokens: int, chain: bytes = b"", reason: str = "") -> Half:
    return Half(
        role=Role.PREFILL,
        request=ticket,
        prompt_tokens=prompt_tokens,
        saved_tokens=saved_tokens,
        chain=chain,
        reason=reason,
    )


class ResponseUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
