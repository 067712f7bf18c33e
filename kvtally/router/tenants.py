"""Tenants: whose cache a request may hit. Owns the key file, and the salt that is made from a tenant's identity.

Engines get the salt as `cache_salt`. It is part of every key in their caches and in the store, so requests share cached
prompts only if their salts are equal. The salt is a keyed hash: it reveals neither the API key nor other tenants'
salts. Routers with the same key file give a tenant the same salt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from kvtally.errors import ConfigError

logger = logging.getLogger(__name__)

SHORTEST_KEY = 16
KEY_HEADERS = ("Authorization", "X-Api-Key", "Api-Key")  # as OpenAI's, Anthropic's and Azure's clients send it
_CONTEXT = "kvtally 2026-01 tenant salt"


class Tenants:
    """`header` must be set by a trusted gateway: a client that can bypass the gateway can claim to be any tenant."""

    def __init__(self, secret: str, *, header: str = "") -> None:
        self._key = blake3(secret.encode(), derive_key_context=_CONTEXT).digest()
        self._header = header

    def salt(self, headers: Mapping[str, str]) -> str:
        """The salt of the tenant that sent these headers. Requests without any identity share one salt."""
        named = headers.get(self._header, "") if self._header else ""
        if named:
            return self._of(f"header\0{named}")
        key = next((headers[name] for name in KEY_HEADERS if name in headers), "")
        return self._of(f"key\0{key}")

    def _of(self, identity: str) -> str:
        return blake3(identity.encode("utf-8", "surrogateescape"), key=self._key).hexdigest()


def load_secret(path: Path) -> str:
    """Read the key file, or make one that only its owner can read.

    If there is no place to make one, this process uses a key of its own. Tenants stay apart, but after a restart, or
    through another router, nobody finds what was cached.
    """
    for _ in range(2):
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            try:
                _make(path)
            except OSError as error:
                logger.warning(
                    "the salt file %s cannot be made (%s): cached prompts will not be found again after a restart",
                    *(path, error.strerror),
                )
                return secrets.token_hex(32)
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(path, str(error)) from error
        else:
            if len(secret) < SHORTEST_KEY:
                raise _unusable(path, f"it has {len(secret)} characters, too few to be safe")
            return secret
    raise _unusable(path, "it vanished")


def _make(path: Path) -> None:
    """Write a temporary file and link it into place, so that two routers that start together agree on one key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".salt-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
            logger.info("made the salt file %s; routers that share instances need a copy of it", path)
    finally:
        os.unlink(name)


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the salt file {path} cannot be used: {why}",
        remedy=f"It holds a secret of {SHORTEST_KEY} characters or more, for example from: openssl rand -hex 32. "
        "Remove it to have a new one made.",
    )
