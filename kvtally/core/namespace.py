"""Namespaces: the canonical description of everything that changes the bytes of KV cache, and its digest.

Owns `GroupSpec`, `Namespace` and the diff that lets `kvtally doctor` say which field keeps two engines apart.
Two engines share bytes only if their digests are equal. Does not know how an engine is asked (that is the engine's
package) nor where bytes lie (`geometry`, `residency`).
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

import msgspec
from blake3 import blake3

from kvtally.core.checksum import ALGORITHM

FORMAT_VERSION = 1
LARGEST_NUMBER = (1 << 32) - 1  # of tokens, bytes of a page, ranks: no message or metric holds what JSON can


_TOO_LARGE = f"a number is larger than {LARGEST_NUMBER}"


class GroupKind(StrEnum):
    FULL = "full"  # every token's keys and values: all chunks below a boundary are needed
    SLIDING = "sliding"  # only the last `window_tokens - 1` tokens below a boundary are needed
    RECURRENT = "recurrent"  # one state at exactly the boundary (Mamba2, GDN, short convolution, ...)


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One KV-cache group. `page_bytes[stage]`: unpadded bytes of one block in each layer of that pipeline stage.

    Impossible values raise ValueError, which `decode` turns into its ValidationError: a description comes from a peer.
    """

    kind: GroupKind
    block_tokens: int
    page_bytes: tuple[tuple[int, ...], ...]
    window_tokens: int = 0
    detail: dict[str, str] = {}  # dtype, heads, head size, state shapes, ...: whatever else decides the bytes

    def __post_init__(self) -> None:
        pages = [size for stage in self.page_bytes for size in stage]
        if self.block_tokens < 1 or any(size < 1 for size in pages):
            raise ValueError("blocks and pages have at least one token and one byte")
        if max(self.block_tokens, abs(self.window_tokens), *pages) > LARGEST_NUMBER:
            raise ValueError(_TOO_LARGE)
        if self.kind is GroupKind.SLIDING and self.window_tokens < 1:
            raise ValueError("a sliding group has a window: without one, no object would ever be needed")

    def block_bytes(self, stage: int = 0) -> int:
        """Bytes of one block, all layers of a pipeline stage together."""
        return sum(self.page_bytes[stage])

    def object_bytes(self, span_tokens: int, stage: int = 0) -> int:
        """Bytes of the object that covers `span_tokens` from a block's start (a state's span does not matter)."""
        blocks = 1
        if self.kind is not GroupKind.RECURRENT:
            blocks = -(-span_tokens // self.block_tokens) - self.first_kept(0, span_tokens) // self.block_tokens
        return blocks * self.block_bytes(stage)

    def first_kept(self, start_tokens: int, end_tokens: int) -> int:
        """The first token of which the object for `[start_tokens, end_tokens)` of an attention group has the KV.

        Under a sliding window that is the first one that a hit at `end_tokens` can see, and at least the last token.
        """
        if self.kind is not GroupKind.SLIDING:
            return start_tokens
        return min(max(start_tokens, end_tokens - (self.window_tokens - 1)), end_tokens - 1)


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Everything that must be equal for two engines to share bytes.

    `model` is an identity, not a name: the revision's commit, or a digest of the weights. Objects are stored per rank;
    rank `r` is tensor-parallel rank `r % tensor_parallel` of pipeline stage `r // tensor_parallel`.
    """

    model: str
    groups: tuple[GroupSpec, ...]
    chunk_tokens: int
    alignment_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    layout: str = ""
    backend: str = ""
    quantisation: str = ""
    checksum: str = ALGORITHM
    format_version: int = FORMAT_VERSION
    detail: dict[str, str] = {}

    def __post_init__(self) -> None:
        sizes = (self.chunk_tokens, self.alignment_tokens, self.tensor_parallel, self.pipeline_parallel)
        if min(sizes) < 1:
            raise ValueError("chunk, alignment and parallel sizes are at least 1")
        if max(*sizes, abs(self.format_version)) > LARGEST_NUMBER:
            raise ValueError(_TOO_LARGE)
        if not self.groups or any(len(spec.page_bytes) != self.pipeline_parallel for spec in self.groups):
            raise ValueError("there is at least one group, and each lists its pages for every pipeline stage")

    @cached_property
    def digest(self) -> bytes:
        return blake3(b"kvtally namespace\0" + canonical(self)).digest()

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def stage(self, rank: int) -> int:
        return rank // self.tensor_parallel

    def object_bytes(self, group: int, rank: int, span_tokens: int) -> int:
        return self.groups[group].object_bytes(span_tokens, self.stage(rank))


def canonical(namespace: Namespace) -> bytes:
    """One byte string for one description, whatever order its maps were built in."""
    return msgspec.json.encode(namespace, order="sorted")


def decode(description: bytes) -> Namespace:
    """Read a canonical description back. Raises `msgspec.ValidationError` on anything else."""
    try:
        return msgspec.json.decode(description, type=Namespace)
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(str(error)) from error


class Difference(msgspec.Struct, frozen=True):
    """One field in which two namespaces differ."""

    field: str
    ours: str
    theirs: str


def difference(ours: Namespace, theirs: Namespace) -> list[Difference]:
    """Every field in which two namespaces differ, by its path, in a stable order."""
    left, right = dict(_flatten("", msgspec.to_builtins(ours))), dict(_flatten("", msgspec.to_builtins(theirs)))
    absent = "(absent)"
    return [
        Difference(path, left.get(path, absent), right.get(path, absent))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)  # not the shown text: a value may read "(absent)" itself
    ]


def _flatten(path: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _flatten(f"{path}.{key}" if path else str(key), item)]
    if isinstance(value, list | tuple):
        return [leaf for index, item in enumerate(value) for leaf in _flatten(f"{path}[{index}]", item)]
    return [(path, str(value))]


def chunk_tokens(alignment_tokens: int, *, target_tokens: int = 256) -> int:
    """Tokens of one chunk: the smallest multiple of the hit alignment at or above about 256 tokens."""
    return -(-target_tokens // alignment_tokens) * alignment_tokens
