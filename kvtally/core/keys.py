"""Identity: what names a piece of KV cache.

Owns chain values, object keys and the checksum seed bound to a key. Does not know engines, tiers or bytes.
Neighbours: `namespace` (left: whose bytes), `residency` (right: where they are).

    chain_i = blake3(chain_{i-1} ‖ u32 number of tokens ‖ token ids as little-endian u32 ‖ extra_i)

A chain value names the *whole prefix* that ends at its boundary, so it is also the identity of a recurrent state there.
The token count in front of the ids keeps `tokens ‖ extra` unambiguous. No process, version or environment variable
enters: two processes that see the same tokens compute the same chain.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from operator import ge
from typing import NamedTuple

from blake3 import blake3

CHAIN_BYTES = 32
ROOT_CHAIN = bytes(CHAIN_BYTES)
TOKEN_BYTES = 4

_U32 = struct.Struct("<I")
_IDENTITY = struct.Struct("<IIQ")


class ObjectKey(NamedTuple):
    """One group's bytes for one chunk on one rank."""

    namespace: bytes
    chain: bytes
    group: int
    rank: int


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form that is hashed."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_value(previous: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """The chain value one boundary after `previous`; `tokens` are the ids between, as `token_bytes` packs them."""
    return blake3(previous + _U32.pack(len(tokens) // TOKEN_BYTES) + tokens + extra).digest()


def chain_values(
    tokens: bytes,
    ends: Sequence[int],
    extras: Mapping[int, bytes] | None = None,
    *,
    previous: bytes = ROOT_CHAIN,
    start: int = 0,
) -> list[bytes]:
    """Chain values at the token positions `ends` (ascending), walking on from `previous` at `start`.

    `extras[i]` is what else decides the bytes between `ends[i-1]` and `ends[i]` (see `chunk_extra`). Raises ValueError
    where `ends` do not ascend or reach beyond the tokens: the name of a prefix that is not there must not exist.
    """
    starts = (start, *ends)
    if start < 0 or any(map(ge, starts, ends)) or starts[-1] * TOKEN_BYTES > len(tokens):
        raise ValueError(f"no tokens up to {list(ends)} from {start} among {len(tokens) // TOKEN_BYTES}")
    values = []
    pack = _U32.pack
    for index, end in enumerate(ends):  # `chain_value`, written out: a prompt has hundreds of chunks
        message = previous + pack(end - start) + tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        if extras:
            message += extras.get(index, b"")
        previous = blake3(message).digest()
        values.append(previous)
        start = end
    return values


def chunk_ends(length_tokens: int, chunk_tokens: int) -> list[int]:
    """Boundaries of the whole chunks within the first `length_tokens`."""
    return list(range(chunk_tokens, length_tokens + 1, chunk_tokens))


def chunk_extra(
    *, lora: str = "", items: Sequence[tuple[int, bytes]] = (), embeds: bytes = b"", salt: str = ""
) -> bytes:
    """Canonical bytes of everything beside the tokens that decides a chunk's KV.

    `lora` is the adapter's identity, `items` the multimodal item hashes with their positions inside the chunk,
    `embeds` a digest of prompt embeddings, `salt` the tenant (chunk 0 only: the chain carries it on). Empty when there
    is nothing.
    """
    if not (lora or items or embeds or salt):
        return b""
    # A client chooses these words: one that is not valid Unicode must still have a name, not raise in the engine.
    lora_bytes, salt_bytes = lora.encode(errors="surrogatepass"), salt.encode(errors="surrogatepass")
    parts = [b"lora", lora_bytes, b"salt", salt_bytes, b"embeds", embeds]
    for position, digest in items:
        parts += [b"item", _U32.pack(position), digest]
    return b"".join(_U32.pack(len(part)) + part for part in parts)


def checksum_seed(key: ObjectKey, length_bytes: int) -> int:
    """The seed that binds an object's checksum to its identity: right bytes in the wrong place do not verify."""
    digest = blake3(key.namespace + key.chain + _IDENTITY.pack(key.group, key.rank, length_bytes)).digest(length=8)
    return int.from_bytes(digest, "little")
