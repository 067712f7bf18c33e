"""What lies in a pool, and under which names. Bytes in, values out: no I/O, no clock.

    PREFIX/format                          version, and proof of the key
    PREFIX/n/NAMESPACE                     the namespace's description, for `kvtally pool stat`
    PREFIX/e/NAMESPACE                     its epoch: a reset writes the next one
    PREFIX/NAMESPACE.EPOCH/m/CHAIN         manifest of a boundary: start, end, parent, (bit, checksum) of each object
    PREFIX/NAMESPACE.EPOCH/t/CHAIN         the lengths of the last tails beneath a boundary
    PREFIX/NAMESPACE.EPOCH/v/CHAIN.G.R.C   the bytes of an object: group, rank, checksum

Digests and chain values are hexadecimal in names: S3 and Mooncake want printable ones.

The checksum is part of a value's name, because two engines that compute the same KV rarely get the same bits. So a
value never changes, a manifest never means other bytes than it says, and two writers never destroy each other's copies.

Everything small ends with a digest over its own name and content. What is cut, flipped, or lies under a name that it
was not written for decodes to None: it counts as absent, and the caller counts it as damaged. The digest is no
signature; `seal` is. Neighbours: `ledger` (left: reads and writes them), `engines` (right: keep them).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from blake3 import blake3

from kvtally.core.keys import CHAIN_BYTES
from kvtally.store.tiers.base import Boundary, ObjectRecord

FORMAT_VERSION = 1
DEFAULT_PREFIX = f"kvt{FORMAT_VERSION}"
MOST_TAILS = 16
MOST_ROWS = 64 * 256  # groups x ranks, the most that the protocol allows
SALT_BYTES = 5
DIGEST_BYTES = 8

_MANIFEST = struct.Struct(f"<BII{CHAIN_BYTES}sH")  # version, start, end, parent, rows
_ROW = struct.Struct("<HQ")  # bit, checksum
_TAILS = struct.Struct("<BB")  # version, lengths
_LENGTH = struct.Struct("<I")
_EPOCH = struct.Struct(f"<BQ{SALT_BYTES}s")  # version, number, salt


class Epoch(NamedTuple):
    """What was written in an earlier epoch does not exist any more. The greatest number counts: a pool that has lost a
    reset (by a failover, by an eviction) is told again by whoever knows of it."""

    number: int
    salt: bytes  # random: a pool that was emptied and begins again at 1 must not find what an old store still writes

    def __str__(self) -> str:
        return f"{self.number}-{self.salt.hex()}"


class Manifest(NamedTuple):
    """What the pool holds at one boundary. `rows`: the checksum of each object, by its bit (`group * ranks + rank`)."""

    boundary: Boundary
    rows: dict[int, int]


# ---- names


class Names(NamedTuple):
    """Names under one prefix."""

    prefix: str

    @property
    def format(self) -> str:
        return f"{self.prefix}/format"

    @property
    def namespaces(self) -> str:
        return f"{self.prefix}/n/"

    def namespace(self, digest: bytes) -> str:
        return f"{self.namespaces}{digest.hex()}"

    @property
    def epochs(self) -> str:
        return f"{self.prefix}/e/"

    def epoch(self, digest: bytes) -> str:
        return f"{self.epochs}{digest.hex()}"

    def under(self, digest: bytes, epoch: Epoch) -> EpochNames:
        return EpochNames(f"{self.contents(digest)}{epoch}")

    def contents(self, digest: bytes) -> str:
        """What the names of a namespace's manifests, tails and values begin with, in all epochs."""
        return f"{self.prefix}/{digest.hex()}."

    def trial(self, word: str) -> str:
        """A name for `kvtally pool check`, which nothing else reads."""
        return f"{self.prefix}/check/{word}"


class EpochNames(NamedTuple):
    """Names of one namespace in one epoch."""

    root: str

    def manifest(self, chain: bytes) -> str:
        return f"{self.root}/m/{chain.hex()}"

    def tails(self, chain: bytes) -> str:
        return f"{self.root}/t/{chain.hex()}"

    def value(self, chain: bytes, group: int, rank: int, checksum: int) -> str:
        return f"{self.root}/v/{chain.hex()}.{group}.{rank}.{checksum:016x}"

    def value_of(self, record: ObjectRecord) -> str:
        return self.value(record.chain, record.group, record.rank, record.checksum)


class Named(NamedTuple):
    """A name of a pool taken apart. `kind` is the letter: n, e, m, t or v."""

    kind: str
    namespace: bytes
    epoch: str = ""


def parse(prefix: str, name: str) -> Named | None:
    """Take a name apart; None for one that is not of this format: others may keep something in the same place."""
    parts = name.removeprefix(prefix + "/").split("/")
    if not name.startswith(prefix + "/"):
        return None
    if len(parts) == 2 and parts[0] in ("n", "e"):
        digest = _bytes(parts[1])
        return Named(parts[0], digest) if digest is not None else None
    if len(parts) >= 3 and parts[1] in ("m", "t", "v"):
        text, _, epoch = parts[0].partition(".")
        digest = _bytes(text)
        return Named(parts[1], digest, epoch) if digest is not None else None
    return None


def _bytes(text: str) -> bytes | None:
    """A digest from its text."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        return None
    return data if len(data) == CHAIN_BYTES and data.hex() == text else None


# ---- small things: each is packed for one name, and unpacks under no other


def pack_manifest(name: str, manifest: Manifest) -> bytes:
    _, parent, start, end = manifest.boundary
    rows = b"".join(_ROW.pack(bit, checksum) for bit, checksum in sorted(manifest.rows.items()))
    return _signed(name, _MANIFEST.pack(FORMAT_VERSION, start, end, parent, len(manifest.rows)) + rows)


def unpack_manifest(name: str, data: bytes, chain: bytes, width: int) -> Manifest | None:
    """The manifest of the boundary `chain`, in a namespace with `width` objects at a boundary."""
    body = _checked(name, data)
    if body is None or len(body) < _MANIFEST.size:
        return None
    version, start, end, parent, count = _MANIFEST.unpack_from(body)
    if version != FORMAT_VERSION or len(body) != _MANIFEST.size + count * _ROW.size or start >= end:
        return None
    rows = dict(_ROW.iter_unpack(body[_MANIFEST.size :]))
    if len(rows) != count or any(bit >= width for bit in rows):
        return None
    return Manifest(Boundary(chain, parent, start, end), rows)


def pack_tails(name: str, lengths: Iterable[int]) -> bytes:
    """The lengths of tails, the latest first; beyond the first few they are dropped."""
    kept = list(dict.fromkeys(lengths))[:MOST_TAILS]
    return _signed(name, _TAILS.pack(FORMAT_VERSION, len(kept)) + b"".join(map(_LENGTH.pack, kept)))


def unpack_tails(name: str, data: bytes) -> tuple[int, ...] | None:
    body = _checked(name, data)
    if body is None or len(body) < _TAILS.size:
        return None
    version, count = _TAILS.unpack_from(body)
    if version != FORMAT_VERSION or count > MOST_TAILS or len(body) != _TAILS.size + count * _LENGTH.size:
        return None
    return tuple(length for (length,) in _LENGTH.iter_unpack(body[_TAILS.size :]))


def pack_epoch(name: str, epoch: Epoch) -> bytes:
    return _signed(name, _EPOCH.pack(FORMAT_VERSION, epoch.number, epoch.salt))


def unpack_epoch(name: str, data: bytes) -> Epoch | None:
    body = _checked(name, data)
    if body is None or len(body) != _EPOCH.size:
        return None
    version, number, salt = _EPOCH.unpack(body)
    return Epoch(number, salt) if version == FORMAT_VERSION else None


def _signed(name: str, body: bytes) -> bytes:
    return body + _digest(name, body)


def _checked(name: str, data: bytes) -> bytes | None:
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return body if digest == _digest(name, body) else None


def _digest(name: str, body: bytes) -> bytes:
    # The name ends at the first zero byte: names have none.
    return blake3(name.encode() + b"\0" + body).digest(length=DIGEST_BYTES)
