"""How a client proves over TCP that it knows the store's token, without sending it.

Owns the one function both sides compute. The store sends a fresh nonce in its greeting; the client answers, in its
Hello, with the keyed hash of that nonce. What was recorded is worth nothing on the next connection. The token itself
never travels; keeping what follows secret from the network is TLS's part, not this one's.
"""

from __future__ import annotations

from blake3 import blake3

NONCE_BYTES = 32
_CONTEXT = "kvtally 2026-01 store token proof"


def proof(token: str, nonce: bytes) -> bytes:
    """The answer to `nonce` of whoever knows `token`."""
    key = blake3(token.encode(), derive_key_context=_CONTEXT).digest()
    return blake3(nonce, key=key).digest()
