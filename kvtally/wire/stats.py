"""Statistics: every number that a store tells about itself, once. What it is, and the metric that shows it.

The store counts in these records and sends them as they are: to `kvtally stat` and benches (the `Stats` message), as
JSON (`/inspect`), and, by the metrics named here, to Prometheus (`store.metrics`). The table of metrics in
docs/operations.md is made from them, too. A field that an older store lacks reads as zero; one that a newer store adds
is ignored.

Counters only ever rise while a store lives. Gauges are what is, at the moment of asking.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


class Metric(NamedTuple):
    """How a field is exported. Of a list, its length; of a map, each value, labelled by its key."""

    name: str
    help: str
    kind: Kind
    label: str = ""  # of a map: what its keys are


class Each(NamedTuple):
    """A list of records with metrics of their own, labelled by their names."""

    label: str


def counter(name: str, text: str, *, label: str = "") -> Metric:
    return Metric(name, text, Kind.COUNTER, label)


def gauge(name: str, text: str) -> Metric:
    return Metric(name, text, Kind.GAUGE)


class Prefetched(StrEnum):
    """What became of a lease for which something was to be staged."""

    IN_TIME = "in_time"  # everything was there when the engine came to the request
    LATE = "late"  # the engine waited for it
    WASTED = "wasted"  # staged, and given back unread
    CANCELLED = "cancelled"  # given back, or expired, before it was staged
    SKIPPED = "skipped"  # computing it was faster
    FAILED = "failed"  # a tier or the arena could not do it


def _outcomes() -> dict[str, int]:
    return {str(outcome): 0 for outcome in Prefetched}


def _counter() -> dict[str, int]:
    return Counter()


class ArenaStats(msgspec.Struct):
    capacity_bytes: Annotated[int, gauge("kvtally_arena_capacity_bytes", "Size of the host arena.")] = 0
    used_bytes: Annotated[int, gauge("kvtally_arena_used_bytes", "Bytes of the arena in use.")] = 0
    objects: Annotated[int, gauge("kvtally_arena_objects", "Objects in the arena.")] = 0
    evicted: Annotated[int, counter("kvtally_arena_evicted", "Objects evicted from the arena.")] = 0
    limbo_bytes: Annotated[int, gauge("kvtally_arena_limbo_bytes", "Bytes a lost writer may still be writing to.")] = 0
    staging_bytes: Annotated[int, gauge("kvtally_arena_staging_bytes", "Bytes on their way up from lower tiers.")] = 0
    held_bytes: Annotated[int, gauge("kvtally_arena_held_bytes", "Bytes held for requests that wait.")] = 0


class TierStats(msgspec.Struct):
    """One lower tier."""

    name: str = ""
    state: str = "ok"  # "not-writing", "failing" or "stuck"
    capacity_bytes: Annotated[int | None, gauge("kvtally_tier_capacity_bytes", "Size of a lower tier.")] = None
    used_bytes: Annotated[int, gauge("kvtally_tier_used_bytes", "Bytes a lower tier holds.")] = 0
    objects: Annotated[int, gauge("kvtally_tier_objects", "Objects a lower tier holds.")] = 0
    evicted: Annotated[int, counter("kvtally_tier_evicted", "Objects evicted from a lower tier.")] = 0
    queued_bytes: Annotated[int, gauge("kvtally_tier_queued_bytes", "Bytes waiting to be written.")] = 0
    reads: Annotated[int, counter("kvtally_tier_reads", "Objects read from a lower tier.")] = 0
    read_bytes: Annotated[int, counter("kvtally_tier_read_bytes", "Bytes read from a lower tier.")] = 0
    read_seconds: Annotated[float, counter("kvtally_tier_read_seconds", "Time spent reading.")] = 0.0
    read_bytes_s: Annotated[float, gauge("kvtally_tier_read_speed_bytes", "Bytes read per second.")] = 0.0
    prefetched: Annotated[
        dict[str, int],
        counter("kvtally_prefetched", "Leases that needed staging, by what became of them.", label="outcome"),
    ] = msgspec.field(default_factory=_outcomes)
    prefetched_bytes: Annotated[
        dict[str, int], counter("kvtally_prefetched_bytes", "Bytes staged for them.", label="outcome")
    ] = msgspec.field(default_factory=_outcomes)
    hidden_seconds: Annotated[float, counter("kvtally_hidden_seconds", "Staging nobody waited for.")] = 0.0
    exposed_seconds: Annotated[float, counter("kvtally_exposed_seconds", "Staging an engine awaited.")] = 0.0
    writes: Annotated[int, counter("kvtally_tier_writes", "Objects written to a lower tier.")] = 0
    write_bytes: Annotated[int, counter("kvtally_tier_write_bytes", "Bytes written to a tier.")] = 0
    write_seconds: Annotated[float, counter("kvtally_tier_write_seconds", "Time spent writing.")] = 0.0
    dropped: Annotated[int, counter("kvtally_tier_dropped", "Objects a tier could not take.")] = 0
    postponed: Annotated[int, gauge("kvtally_tier_postponed", "Objects that wait for a slow or failing tier.")] = 0
    unremoved: int = 0  # forgotten by the index, but the tier could not remove them
    errors: Annotated[dict[str, int], counter("kvtally_tier_errors", "Failures of a lower tier.", label="code")] = (
        msgspec.field(default_factory=_counter)
    )


class LookupStats(msgspec.Struct):
    total: Annotated[int, counter("kvtally_lookups", "Lookups answered.")] = 0
    hits: Annotated[int, counter("kvtally_lookup_hits", "Lookups that found something to reuse.")] = 0
    hit_tokens: Annotated[int, counter("kvtally_lookup_hit_tokens", "Tokens found.")] = 0
    asked_tokens: Annotated[int, counter("kvtally_lookup_asked_tokens", "Tokens asked for.")] = 0
    waiting: Annotated[int, gauge("kvtally_lookups_waiting", "Lookups that wait for pending objects.")] = 0
    misses: Annotated[dict[str, int], counter("kvtally_lookup_misses", "Why hits were not longer.", label="reason")] = (
        msgspec.field(default_factory=_counter)
    )


class PutStats(msgspec.Struct):
    begun: Annotated[int, counter("kvtally_puts_begun", "Writes begun.")] = 0
    committed: Annotated[int, counter("kvtally_puts_committed", "Writes committed.")] = 0
    aborted: Annotated[int, counter("kvtally_puts_aborted", "Writes aborted by their client or its death.")] = 0
    expired: Annotated[int, counter("kvtally_puts_expired", "Writes not committed in time.")] = 0
    rejected: Annotated[int, counter("kvtally_puts_rejected", "Commits that came too late.")] = 0
    full: Annotated[int, counter("kvtally_puts_full", "Writes for which there was no room.")] = 0
    bytes: Annotated[int, counter("kvtally_put_bytes", "Bytes committed.")] = 0


class StagedStats(msgspec.Struct):
    objects: Annotated[int, counter("kvtally_staged_objects", "Objects brought up from lower tiers.")] = 0
    bytes: Annotated[int, counter("kvtally_staged_bytes", "Bytes brought up from lower tiers.")] = 0


class LeaseStats(msgspec.Struct):
    open: Annotated[int, gauge("kvtally_leases_open", "Leases held by clients.")] = 0
    waiting: Annotated[int, gauge("kvtally_leases_waiting", "Leases that wait for room in the arena.")] = 0
    expired: Annotated[int, counter("kvtally_leases_expired", "Leases not released in time.")] = 0


class PeerStats(msgspec.Struct):
    """One other store, as this one knows it."""

    name: str = ""  # its address
    state: str = "ok"  # or "lost"
    asks: Annotated[int, counter("kvtally_peer_asks", "Lookups that another store was asked about.")] = 0
    hits: Annotated[int, counter("kvtally_peer_hits", "Those for which it had something.")] = 0
    objects: Annotated[int, counter("kvtally_peer_pulled_objects", "Objects pulled from another store.")] = 0
    bytes: Annotated[int, counter("kvtally_peer_pulled_bytes", "Bytes pulled from another store.")] = 0
    errors: Annotated[dict[str, int], counter("kvtally_peer_errors", "Failures of another store.", label="code")] = (
        msgspec.field(default_factory=_counter)
    )


class SendStats(msgspec.Struct):
    """What other stores have pulled from this one."""

    open: Annotated[int, gauge("kvtally_sends_open", "Objects being sent to other stores.")] = 0
    objects: Annotated[int, counter("kvtally_sent_objects", "Objects sent to other stores.")] = 0
    bytes: Annotated[int, counter("kvtally_sent_bytes", "Bytes sent to other stores.")] = 0
    failed: Annotated[int, counter("kvtally_sends_failed", "Sends that did not end.")] = 0
    refused: Annotated[
        dict[str, int], counter("kvtally_pulls_refused", "Pulls answered without bytes.", label="status")
    ] = msgspec.field(default_factory=_counter)


class ClientStats(msgspec.Struct):
    session: int = 0
    client: str = ""
    namespace: str = ""  # its digest, in hex; empty without one
    shared_memory: bool = False
    leases: int = 0
    puts: int = 0
    waiting: int = 0


class NamespaceStats(msgspec.Struct):
    digest: str = ""
    model: str = ""
    objects: int = 0
    boundaries: int = 0
    chunk_tokens: int = 0


class QuarantinedObject(msgspec.Struct):
    tier: str = ""
    code: str = ""
    chain: str = ""
    group: int = 0
    rank: int = 0
    namespace: str = ""
    tokens: str = ""


class QuarantineStats(msgspec.Struct):
    count: Annotated[
        dict[str, int], counter("kvtally_quarantined", "Objects with wrong bytes, by where.", label="where")
    ] = msgspec.field(default_factory=_counter)
    latest: list[QuarantinedObject] = []


class ServerStats(msgspec.Struct):
    """What only the daemon around the store knows."""

    pid: int = 0
    populated_bytes: Annotated[int, gauge("kvtally_arena_populated_bytes", "Bytes of the arena pre-faulted.")] = 0
    huge_pages: bool = False
    unwritten_jobs: int = 0
    strangers: int = 0  # connections that have not said hello
    ended: Annotated[
        dict[str, int], counter("kvtally_connections_ended", "Connections ended by the store.", label="code")
    ] = msgspec.field(default_factory=_counter)


class StoreStats(msgspec.Struct):
    store: str = ""
    version: str = ""
    uptime_s: Annotated[float, gauge("kvtally_uptime_seconds", "Time since the store started.")] = 0.0
    verify_reads: bool = True
    arena: ArenaStats = msgspec.field(default_factory=ArenaStats)
    tiers: Annotated[list[TierStats], Each("tier")] = []
    lookups: LookupStats = msgspec.field(default_factory=LookupStats)
    puts: PutStats = msgspec.field(default_factory=PutStats)
    staged: StagedStats = msgspec.field(default_factory=StagedStats)
    leases: LeaseStats = msgspec.field(default_factory=LeaseStats)
    beliefs: Annotated[int, gauge("kvtally_beliefs", "Answers of peers and pools that are believed now.")] = 0
    peers: Annotated[list[PeerStats], Each("peer")] = []
    sends: SendStats = msgspec.field(default_factory=SendStats)
    clients: Annotated[list[ClientStats], gauge("kvtally_clients", "Connected clients.")] = []
    namespaces: Annotated[list[NamespaceStats], gauge("kvtally_namespaces", "Namespaces known.")] = []
    receipts: Annotated[int, gauge("kvtally_receipts", "Receipts kept.")] = 0
    refused: Annotated[dict[str, int], counter("kvtally_refused", "Requests refused.", label="code")] = msgspec.field(
        default_factory=_counter
    )
    quarantined: QuarantineStats = msgspec.field(default_factory=QuarantineStats)
    server: ServerStats = msgspec.field(default_factory=ServerStats)
