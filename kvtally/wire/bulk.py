"""Bulk connections: how one store pulls bytes out of another one's arena. Owns the layout of an answer.

    puller ──Hello(peer, nonce) after the greeting──▶ store ──Welcome(proof)──▶      as on the control port
    puller ──Pull──▶ store ──header, then exactly `length` bytes──▶ puller           one at a time
    puller ──Pull(in_place)──▶ store ──header, pieces──▶ puller, reads ──Pulled──▶ store ──header──▶      by NIXL

A bulk connection listens on a port of its own, which `Welcome.bulk_port` names. Frames in, raw bytes out: a header and
the object. The puller knows length and checksum from the lookup; the header only says whether the bytes follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from kvtally.core.space import MAX_PIECES, Piece

_HEADER = struct.Struct("<QII")
HEADER_BYTES = _HEADER.size
_PIECE = struct.Struct("<QQ")
MOST_PIECES_BYTES = MAX_PIECES * _PIECE.size


class PullStatus(IntEnum):
    SENT = 0  # the bytes follow
    GONE = 1  # the lease has ended, or does not hold this object: nothing follows
    BUSY = 2  # the store has no room for one more send: nothing follows
    PLACED = 3  # the object's pieces follow. It stays there until the puller says `Pulled`, and is answered SENT


class Header(NamedTuple):
    length_bytes: int
    pull: int  # `Pull.id`, modulo 2**32
    status: int

    def pack(self) -> bytes:
        return _HEADER.pack(self.length_bytes, self.pull & 0xFFFFFFFF, self.status)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Of exactly HEADER_BYTES bytes."""
        return cls(*_HEADER.unpack(data))


def pack_pieces(pieces: Iterable[Piece]) -> bytes:
    return b"".join(_PIECE.pack(*piece) for piece in pieces)


def unpack_pieces(data: bytes | bytearray | memoryview) -> list[Piece]:
    """Raises ValueError if it is not some pieces."""
    if not data or len(data) % _PIECE.size:
        raise ValueError(f"{len(data)} bytes are no pieces")
    return [Piece(*numbers) for numbers in _PIECE.iter_unpack(data)]
