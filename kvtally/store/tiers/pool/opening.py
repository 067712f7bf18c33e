"""How a pool is opened when a store or a command starts: what is wrong is refused, what is merely down is not."""

from __future__ import annotations

from typing import NamedTuple

from kvtally.config.remote import Remote
from kvtally.errors import ConfigError, KVTallyError, TierError
from kvtally.store.tiers.engines import open_engine
from kvtally.store.tiers.engines.base import Credentials, DeniedError
from kvtally.store.tiers.pool.seal import read_keys
from kvtally.store.tiers.pool.tier import PoolTier


class Opened(NamedTuple):
    tier: PoolTier
    error: TierError | None  # it could not be reached: to be logged; the tier tries again when it is used


def open_pool(remote: Remote, credentials: Credentials, *, key_file: str = "", write_bytes_s: int = 0) -> Opened:
    """The pool at an address. Raises ConfigError or IncompatibleError, and has touched nothing then."""
    seal = read_keys(key_file) if key_file else None
    try:
        engine = open_engine(remote, credentials)
    except DeniedError as error:  # its password file
        raise ConfigError(error.message, remedy=error.remedy) from error
    tier = PoolTier(engine, prefix=remote.prefix, ttl_s=remote.ttl_s, seal=seal, write_bytes_s=write_bytes_s)
    try:
        return Opened(tier, contact_at_start(tier))
    except KVTallyError:
        tier.close()
        raise


def contact_at_start(tier: PoolTier) -> TierError | None:
    """Contact a pool when a store starts. What only an operator can cure is refused (ConfigError, IncompatibleError). A
    pool that cannot be reached does not keep a store from starting: the error is returned."""
    try:
        tier.contact()
    except DeniedError as error:
        raise ConfigError(error.message, remedy=error.remedy) from error
    except TierError as error:
        return error
    return None
