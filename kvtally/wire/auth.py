"""How the two ends of a TCP connection prove that they know the store's token, without sending it.

Owns the functions both sides compute. The store sends a fresh nonce in its greeting, and the client answers it in its
Hello with a keyed hash. A client that takes bytes from the store sends a nonce of its own, and the store answers that
one in its Welcome. What was recorded is worth nothing on the next connection. The token itself never travels; keeping
what follows secret from the network is TLS's part, not this one's.

The two directions have keys of their own: otherwise an impostor without the token could greet a client with that
client's own nonce from another connection, and use its answer as the store's proof there.
"""

from __future__ import annotations

from blake3 import blake3

NONCE_BYTES = 32
_CLIENTS_CONTEXT = "kvtally 2026-01 store token proof"
_STORES_CONTEXT = "kvtally 2026-11 store token proof of the store"


def proof(token: str, nonce: bytes) -> bytes:
    """The answer of a client that knows `token` to the nonce of a store's greeting."""
    return _answer(_CLIENTS_CONTEXT, token, nonce)


def store_proof(token: str, nonce: bytes) -> bytes:
    """The answer of a store that knows `token` to the nonce of a client's Hello."""
    return _answer(_STORES_CONTEXT, token, nonce)


def _answer(context: str, token: str, nonce: bytes) -> bytes:
    key = blake3(token.encode(), derive_key_context=context).digest()
    return blake3(nonce, key=key).digest()
