"""Every bound of the protocol and the store in one record. Nothing here grows without one of these."""

from __future__ import annotations

import msgspec

KIB = 1024
MIB = 1024 * KIB
SECOND_NS = 1_000_000_000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to every client in the greeting, so that clients do not send what the store would refuse."""

    frame_bytes: int = 4 * MIB  # one message, either way
    object_bytes: int = 64 * MIB  # one object
    clients: int = 256
    chains_per_lookup: int = 65_536
    objects_per_put: int = 4_096
    groups: int = 64
    ranks: int = 256
    namespaces: int = 1_024
    leases_per_client: int = 4_096
    open_puts_per_client: int = 16_384
    waiting_per_client: int = 1_024  # lookups and receipt fetches parked until a deadline
    unsent_bytes_per_client: int = 16 * MIB  # replies a client has not read yet; beyond that it is cut off
    lease_ns: int = 60 * SECOND_NS  # the longest a lease or an open put may live without renewal
    wait_ns: int = 60 * SECOND_NS  # the longest a lookup may wait for pending objects
    staging_bytes: int = 0  # bytes being read from lower tiers at once; 0: a quarter of the arena
    # Bytes queued for one lower tier, which are held in the arena: at most a quarter of it. Other objects wait.
    write_behind_bytes: int = 256 * MIB
    receipts: int = 16_384
    receipt_ns: int = 600 * SECOND_NS
    ticket_bytes: int = 128
