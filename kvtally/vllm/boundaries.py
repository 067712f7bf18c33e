"""The boundaries of one request and their chain values. The list grows with the request's tokens.

Owns where chunks and tails end, and what enters a chain value beside tokens (LoRA, multimodal items, the tenant's
salt). The lookup thread works out the boundaries of the prompt, the scheduler half those of the answer, never both at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtally.core.keys import ROOT_CHAIN, chain_value, chunk_extra, token_bytes
from kvtally.vllm.adapters import Adapter

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


class Boundary(NamedTuple):
    """A place in a request at which objects end."""

    chain: bytes
    parent: bytes
    start_tokens: int
    end_tokens: int


class Extras(NamedTuple):
    """What decides KV beside the tokens. `features` is the request's own list of multimodal items: every part of a
    streaming input makes it longer."""

    adapter: Adapter | None = None
    salt: str = ""
    features: Sequence[MultiModalFeatureSpec] = ()

    def between(self, start: int, end: int) -> bytes:
        """The canonical extra of the tokens `[start, end)`. Raises IncompatibleError for an adapter without a name: its
        chain values would be those of the bare model."""
        lora = self.adapter.name if self.adapter is not None else ""
        if not (lora or self.salt or self.features):
            return b""
        items = []
        for feature in self.features:
            position, length = feature.mm_position.offset, feature.mm_position.length
            if position < end and start < position + length:
                items.append(((position - start) & 0xFFFFFFFF, str(feature.identifier).encode()))
        return chunk_extra(lora=lora, items=items, salt=self.salt if start == 0 else "")


def extras_of(request: Request, adapter: Adapter | None, engine_salt: str = "") -> Extras:
    """`engine_salt` keeps an engine apart from all others."""
    salt = request.cache_salt or ""
    return Extras(adapter, f"{engine_salt}\0{salt}" if engine_salt else salt, request.mm_features)


class Boundaries:
    """The ends of whole chunks are kept; a tail is worked out when it is asked for."""

    def __init__(self, chunk_tokens: int, extras: Extras) -> None:
        self.chunk_tokens = chunk_tokens
        self._extras = extras
        self.chains: list[bytes] = []  # at chunk_tokens, 2 * chunk_tokens, ...

    @property
    def is_named(self) -> bool:
        """Whether there are chain values at all: an adapter that nobody can name has none."""
        return self._extras.adapter is None or bool(self._extras.adapter.identity)

    @property
    def is_being_named(self) -> bool:
        return self._extras.adapter is not None and self._extras.adapter.identity is None

    @property
    def end_tokens(self) -> int:
        return len(self.chains) * self.chunk_tokens

    def extend(self, tokens: Sequence[int], until: int) -> None:
        """Compute the chains of every whole chunk that ends at or below `until`."""
        start = self.end_tokens
        end = until // self.chunk_tokens * self.chunk_tokens
        if end <= start:
            return
        packed = token_bytes(tokens[start:end])
        step = 4 * self.chunk_tokens
        previous = self.chains[-1] if self.chains else ROOT_CHAIN
        for at in range(0, len(packed), step):
            extra = self._extras.between(start, start + self.chunk_tokens)
            previous = chain_value(previous, packed[at : at + step], extra)
            self.chains.append(previous)
            start += self.chunk_tokens

    def chunk(self, index: int) -> Boundary:
        parent = self.chains[index - 1] if index else ROOT_CHAIN
        return Boundary(self.chains[index], parent, index * self.chunk_tokens, (index + 1) * self.chunk_tokens)

    def tail(self, tokens: Sequence[int], end: int) -> Boundary:
        """The boundary at `end`: a tail, or the end of a whole chunk."""
        self.extend(tokens, end)
        index, inside = divmod(end, self.chunk_tokens)
        if not inside:
            return self.chunk(index - 1)
        start = index * self.chunk_tokens
        parent = self.chains[index - 1] if index else ROOT_CHAIN
        chain = chain_value(parent, token_bytes(tokens[start:end]), self._extras.between(start, end))
        return Boundary(chain, parent, start, end)
