"""Frames: a little-endian u32 length, then that many bytes of msgpack. Sans I/O: bytes in, messages out.

Any byte string yields messages, "need more", or `TransportError` KV-503; never another exception.
"""

from __future__ import annotations

import struct
import sys
from typing import Generic, TypeVar

import msgspec

from kvtally.errors import TransportError
from kvtally.wire.messages import Reply, Request

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def fits(message: Request | Reply, limit_bytes: int) -> bool:
    """Whether a reader with this limit takes it."""
    return len(_encoder.encode(message)) <= limit_bytes


class FrameReader(Generic[T]):
    """Collects bytes and yields whole messages of type `T`. After an error, close the connection."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], limit_bytes: int) -> None:
        self._decoder = decoder
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._start = 0  # of the bytes that were not taken yet

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Add received bytes; return the messages they complete."""
        self.push(data)
        return self.take(sys.maxsize)

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self, most: int) -> list[T]:
        """The next whole messages, at most so many. No others are decoded."""
        buffer, start = self._buffer, self._start
        messages: list[T] = []
        while len(messages) < most and len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.limit_bytes:
                raise TransportError(
                    f"a frame of {length} bytes is over the limit of {self.limit_bytes}",
                    remedy="Send fewer objects or boundaries in one message.",
                    code="KV-503",
                )
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        if start > len(buffer) // 2:  # not each time, or the rest would be moved again and again
            del buffer[:start]
            start = 0
        self._start = start
        return messages

    def _decode(self, payload: bytes) -> T:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(
                f"a frame of {len(payload)} bytes is not a message: {error}",
                remedy="The peer is not a kvtally of this protocol version, or its bytes were damaged on the way.",
                code="KV-503",
            ) from error


def request_reader(limit_bytes: int) -> FrameReader[Request]:
    return FrameReader(msgspec.msgpack.Decoder(Request), limit_bytes)


def reply_reader(limit_bytes: int) -> FrameReader[Reply]:
    return FrameReader(msgspec.msgpack.Decoder(Reply), limit_bytes)
