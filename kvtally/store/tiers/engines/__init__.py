"""Engines under the pool tier: each speaks to one kind of server, through that server's own library.

A library is imported only when an address asks for it: without the extra, nothing of it is needed.
"""

from __future__ import annotations

import importlib
import importlib.util

from kvtally.config.remote import Remote
from kvtally.errors import ConfigError
from kvtally.store.tiers.engines.base import Credentials, Engine

# kind of address -> module, class, the extra that installs its library, the library
_ENGINES = {
    "valkey": ("valkey", "ValkeyEngine", "valkey", "glide_sync"),
    "s3": ("s3", "ObjectStoreEngine", "s3", "obstore"),
    "gs": ("s3", "ObjectStoreEngine", "s3", "obstore"),
    "az": ("s3", "ObjectStoreEngine", "s3", "obstore"),
    "mooncake": ("mooncake", "MooncakeEngine", "mooncake", "mooncake"),
}


def open_engine(remote: Remote, credentials: Credentials) -> Engine:
    """The engine for an address. Connects to nothing yet. Raises ConfigError if its library is not installed."""
    name, class_name, extra, library = _ENGINES[remote.kind]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"a pool at {remote.kind}:// needs the package of {library}, which is not installed",
            remedy=f"Install it: pip install 'kvtally[{extra}]'.",
            code="KV-106",
        )
    try:
        module = importlib.import_module(f"kvtally.store.tiers.engines.{name}")
    except ImportError as error:
        raise ConfigError(
            f"the package of {library} is installed but cannot be loaded: {error}",
            remedy="Install what it names; Mooncake needs libibverbs1 and libnuma1 of the distribution.",
            code="KV-106",
        ) from error
    engine: Engine = getattr(module, class_name)(remote, credentials)
    return engine
