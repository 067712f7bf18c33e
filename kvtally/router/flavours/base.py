"""What every flavour answers: what prefill is sent, what its answer is worth, what decode is sent, and what proves it.

    open ─▶ prefill leg ─▶ PrefillAnswer ─▶ close ─▶ Handoff (or why there is none) ─▶ decode leg ─▶ evidence

Owns the records that pass between a flavour and the router. A flavour has no state and does no I/O. The one flavour
that must ask something beforehand does so through the `Ask` that it is given. The legs always follow one another, even
where an engine would allow both at once: that would save little, and a failed hand-off costs much.
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
    """What the prefill leg carries beyond the client's request."""

    params: Params | None
    fields: Mapping[str, object] = {}  # laid over the body
    headers: Mapping[str, str] = {}
    promised: Params = {}  # kept for `close`


class PrefillAnswer(NamedTuple):
    """A prefill instance's answer, as far as flavours need it."""

    prompt_tokens: int
    finish_reason: str
    params: Params | None


class Handoff(NamedTuple):
    """What decode is told, and prefill's half of the receipt."""

    params: Params | None
    half: Half


class Flavour:
    """One way in which prefill hands over to decode."""

    name: ClassVar[str]
    has_receipts: ClassVar[bool] = False  # decode files its half in the store
    has_evidence: ClassVar[bool] = False  # decode's response says what it reused
    has_one_reader: ClassVar[bool] = False  # what prefill keeps can be read once: not for n > 1, nor for a retry

    async def open(self, ticket: str, prefill: Instance, ask: Ask) -> Opening:
        """What to send to this prefill instance. Raises OSError or ValueError if that cannot be found out."""
        raise NotImplementedError

    def close(self, ticket: str, opening: Opening, answer: PrefillAnswer) -> Handoff | str:
        """Turn prefill's answer into what decode needs. A string says in one word why it cannot be used."""
        raise NotImplementedError

    def alone(self, ticket: str) -> Params | None:
        """What decode is told without a hand-off."""
        return None

    def again(self, ticket: str, told: Params | None) -> Params | None:
        """What a second decode instance is told after the first has failed. The first was told `told`; it may have
        read what prefill kept, and may have filed a receipt."""
        return self.alone(ticket)

    def aimed(self, params: Params | None, *, source: str = "", deliver: str = "") -> Params | None:
        """The same parameters with addresses of stores: the one that has seen most of the prompt, and the one that will
        want it. Only where engines have stores."""
        return params

    def trusted(self, params: Params | None, is_known: Callable[[str], bool]) -> Params | None:
        """What prefill says, without addresses of stores that the router does not know."""
        return params

    def evidence(self, body: bytes) -> Half | None:
        """Decode's half of the receipt, made from a response that is not streamed. Only where `has_evidence`."""
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
