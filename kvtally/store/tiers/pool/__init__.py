"""The pool tier: a server that several stores share, and the order that makes sharing safe. See `tier`."""

from kvtally.store.tiers.pool.tier import PoolTier as PoolTier
