"""Sealing: what goes into a pool is encrypted and authenticated, so that who can read or write the pool can neither
read prompts out of it nor slip bytes into an engine.

    sealed = version, key id, salt ‖ segments: AES-256-GCM of up to 1 MiB each, with its tag

Each thing has a key of its own, HMAC-SHA256(key, salt), with a random salt; its segments count up their nonce. So no
nonce is ever used twice with one key, however much is written. The name (with namespace, epoch, chain, group, rank and
checksum) and the length are associated data: what is moved to another name, replayed into another epoch or cut does not
open. A key file holds one or two keys: the first one seals, both open, so that keys can be changed while stores run.

Needs `cryptography`, which is imported only here. No state but the keys; every call may be made from any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from kvtally.errors import ConfigError, IntegrityError
from kvtally.store.tiers.engines.base import Landed, cut, length_of, scatter

SEGMENT_BYTES = 1024 * 1024
KEY_BYTES = 32
TAG_BYTES = 16
MOST_KEYS = 2
EXTRA = "seal"

_HEADER = struct.Struct("<B4s16s")  # version, key id, salt
_LENGTH = struct.Struct("<Q")
_VERSION = 1


class ForeignKeyError(IntegrityError):
    """Sealed with a key that this store does not have. Unlike what is damaged, it may be right for others."""

    default_code = "KV-403"


class Seal:
    """Seals with the first of `keys`, opens with each."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "store.remote_key_file needs the package cryptography, which is not installed",
                remedy=f"Install it: pip install 'kvtally[{EXTRA}]'.",
            ) from error
        self._cipher = AESGCM
        self._invalid = InvalidTag
        self._keys = {_key_id(key): key for key in reversed(keys)}
        self._first = keys[0]

    def __repr__(self) -> str:
        return f"Seal({len(self._keys)} keys)"

    def sealed_bytes(self, length_bytes: int) -> int:
        return _HEADER.size + length_bytes + TAG_BYTES * len(_segments(length_bytes))

    def seal(self, name: str, source: Sequence[memoryview]) -> bytearray:
        """The concatenation of `source`, sealed for this name."""
        length = length_of(source)
        sealed = bytearray(self.sealed_bytes(length))
        header = _HEADER.pack(_VERSION, _key_id(self._first), os.urandom(16))
        sealed[: _HEADER.size] = header
        cipher, identity = self._cipher(_own_key(self._first, header)), _identity(name, header, length)
        position = _HEADER.size
        for number, part in enumerate(cut(source, SEGMENT_BYTES) if length else [[memoryview(b"")]]):
            plain = part[0] if len(part) == 1 else memoryview(b"".join(part))
            end = position + len(plain) + TAG_BYTES
            cipher.encrypt_into(_nonce(number), plain, identity, memoryview(sealed)[position:end])
            position = end
        return sealed

    def open(self, name: str, sealed: memoryview) -> bytes:
        """What was sealed for this name. Raises IntegrityError KV-403 for anything else."""
        length = _opened_bytes(len(sealed))
        if length is None:
            raise _unauthentic(name)
        plain = bytearray(length)
        self.open_into(name, sealed, [memoryview(plain)], lambda _: None)
        return bytes(plain)

    def open_into(self, name: str, sealed: memoryview, target: Sequence[memoryview], landed: Landed) -> None:
        """The same, straight into `target`, which has the right length in all. `landed` as in `Tier.read`."""
        length = length_of(target)
        if len(sealed) != self.sealed_bytes(length):
            raise _unauthentic(name)
        header = bytes(sealed[: _HEADER.size])
        version, key_id, _ = _HEADER.unpack(header)
        key = self._keys.get(key_id)
        if version != _VERSION or key is None:
            raise ForeignKeyError(
                f"{name} is sealed with a key that this store does not have",
                remedy="Stores that share a pool need one key: compare their key files.",
            )
        cipher, identity = self._cipher(_own_key(key, header)), _identity(name, header, length)
        position = _HEADER.size
        try:
            for number, part in enumerate(cut(target, SEGMENT_BYTES) if length else [[memoryview(bytearray())]]):
                end = position + length_of(part) + TAG_BYTES
                if len(part) == 1:
                    cipher.decrypt_into(_nonce(number), sealed[position:end], identity, part[0])
                    landed(part[0])
                else:
                    plain = memoryview(cipher.decrypt(_nonce(number), sealed[position:end], identity))
                    scatter(plain, part, landed)
                position = end
        except self._invalid as error:
            raise _unauthentic(name) from error


def read_keys(path: str) -> Seal:
    """The keys of a key file: one or two lines of 64 hexadecimal digits. Raises ConfigError."""
    try:
        found = os.stat(path)
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key file {path} cannot be read: {error}", remedy="Check the path, its owner and its mode."
        ) from error
    # As with PostgreSQL's keys: a file that root owns may be read by one group, which is how Kubernetes mounts secrets.
    allowed = stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else 0
    if stat.S_IMODE(found.st_mode) & 0o077 & ~allowed:
        raise ConfigError(
            f"the key file {path} can be read by others (its mode is {stat.S_IMODE(found.st_mode):04o})",
            remedy=f"chmod 600 {path}; and if others may have read it, make a new key.",
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(lines) <= MOST_KEYS or not all(re.fullmatch(r"[0-9a-fA-F]{64}", line) for line in lines):
        raise ConfigError(
            f"the key file {path} does not hold one or two keys of 64 hexadecimal digits, each on a line",
            remedy=f"Make one: openssl rand -hex 32 > {path}; chmod 600 {path}.",
        )
    keys = [bytes.fromhex(line) for line in lines]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"the key file {path} holds one key twice", remedy="Leave one of the lines out.")
    return Seal(keys)


def _key_id(key: bytes) -> bytes:
    """Says which key sealed something, and nothing about the key."""
    return hashlib.sha256(b"kvtally pool key id\0" + key).digest()[:4]


def _own_key(key: bytes, header: bytes) -> bytes:
    return hmac.digest(key, b"kvtally pool\0" + header, "sha256")


def _identity(name: str, header: bytes, length_bytes: int) -> bytes:
    return header + _LENGTH.pack(length_bytes) + name.encode()


def _nonce(segment: int) -> bytes:
    return segment.to_bytes(12, "big")


def _segments(length_bytes: int) -> range:
    return range(max(1, -(-length_bytes // SEGMENT_BYTES)))


def _opened_bytes(sealed_bytes: int) -> int | None:
    """How long what was sealed is, from its sealed length."""
    left = sealed_bytes - _HEADER.size
    segments = max(1, -(-left // (SEGMENT_BYTES + TAG_BYTES)))
    return left - segments * TAG_BYTES if left >= segments * TAG_BYTES else None


def _unauthentic(name: str) -> IntegrityError:
    return IntegrityError(
        f"{name} does not open with the pool's key",
        remedy="It was changed, or written by somebody without the key: it is dropped and computed anew.",
        code="KV-403",
    )
