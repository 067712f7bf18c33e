"""The marker of a pool: one small thing that says which format a prefix has, and proves which key seals it.

A store that starts reads it before anything else, so that a prefix of another format, a missing key or a wrong one is
refused with a clear word, instead of finding nothing for ever. Pure: bytes in, bytes out.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

import msgspec

from kvtally.errors import ConfigError, IncompatibleError, IntegrityError
from kvtally.store.tiers.pool.format import FORMAT_VERSION, Names
from kvtally.store.tiers.pool.seal import Seal

_PROOF = b"kvtally"
_ELSEWHERE = "Use another prefix, or empty this one (it holds only cached data)."


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """`PREFIX/format`. The version is all that another version is expected to share."""

    kvtally_pool: int
    proof: str = ""  # something sealed, in base64; empty if the pool is not sealed


def marker(names: Names, seal: Seal | None) -> bytes:
    """The marker of a pool that is sealed so."""
    proof = "" if seal is None else b64encode(seal.seal(names.format, [memoryview(_PROOF)])).decode()
    return msgspec.json.encode(Format(kvtally_pool=FORMAT_VERSION, proof=proof))


def check_marker(names: Names, seal: Seal | None, held: bytes) -> None:
    """Raise IncompatibleError or ConfigError if the pool is not one of this format, or is sealed otherwise."""
    prefix = names.prefix
    try:
        found = msgspec.json.decode(held, type=Format)
    except msgspec.DecodeError as error:
        what = f"{names.format} in the pool is not a pool's: {error}"
        raise IncompatibleError(what, remedy=_ELSEWHERE, code="KV-203") from error
    if found.kvtally_pool != FORMAT_VERSION:
        what = f"the pool at {prefix} has format {found.kvtally_pool}, this store reads {FORMAT_VERSION}"
        raise IncompatibleError(what, remedy=_ELSEWHERE, code="KV-203")
    if seal is None:
        if found.proof:
            remedy = "Give its key as store.remote_key_file, or use another prefix."
            raise ConfigError(f"the pool at {prefix} is encrypted", remedy=remedy)
        return
    if not found.proof:
        what = f"the pool at {prefix} is not encrypted, but there is a key for it"
        raise ConfigError(what, remedy="Leave store.remote_key_file out, or use another prefix.")
    try:
        seal.open(names.format, memoryview(b64decode(found.proof)))
    except (IntegrityError, ValueError) as error:
        what = f"the pool at {prefix} is encrypted with another key"
        raise ConfigError(what, remedy="Give the key that its other stores have, or use another prefix.") from error
