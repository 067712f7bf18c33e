"""Every message of the store protocol: tagged, array-like msgspec structs whose fields are only ever appended to.

A connection begins with the store's `Greeting` (on a unix socket it carries two file descriptors: the arena, and the
write end of a liveness pipe that the client keeps open for as long as it has the arena mapped). The client answers
`Hello` and gets `Welcome` or `Refused`. After that every request carries an `id` the client chose, and exactly one
reply carries it back; `Staged` is the one message the store sends unasked.

Chain values travel as one byte string of 32 bytes each. Bulk bytes go through the arena; between two stores they travel
on connections of their own (`Pull`, `wire.bulk`).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from kvtally.core.receipts import Half, Receipt
from kvtally.wire.limits import Limits

PROTOCOL_VERSION = 1

# Lists that a client sends are bounded before they are built: a frame could hold millions of numbers, and reading them
# would take the store a second. What a store may be asked for is in `Limits`, and less.
Boundaries = Annotated[list[int], msgspec.Meta(max_length=1 << 17)]  # more chain values do not fit into a frame
PerGroup = Annotated[list[int], msgspec.Meta(max_length=1 << 10)]
Ids = Annotated[list[int], msgspec.Meta(max_length=1 << 14)]
MOST_ITEMS = msgspec.Meta(max_length=1 << 14)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """Base of all messages."""


class MissReason(StrEnum):
    """Why less than the whole prompt was reused. The one list of reasons, for metrics, receipts and people."""

    ABSENT = "absent"  # nobody saved it, or it was evicted
    STATE_ABSENT = "state_absent"  # attention is there, the recurrent state (or window) at that boundary is not
    PENDING = "pending"  # still being written when the wait ended
    STAGING_FAILED = "staging_failed"  # a lower tier could not deliver it in time
    CHECKSUM = "checksum"  # bytes did not match their identity; quarantined
    ARENA_FULL = "arena_full"  # no room to stage: everything else is leased
    LEASE_EXPIRED = "lease_expired"
    LIMIT = "limit"  # the client or the store reached a bound
    STORE_UNREACHABLE = "store_unreachable"
    DEADLINE = "deadline"
    REFUSED = "refused"
    FOREIGN_STORE = "foreign_store"  # handed over through a store that is not this engine's
    FOREIGN_NAMESPACE = "foreign_namespace"  # handed over by an engine whose bytes this one cannot read
    OTHER_TOKENS = "other_tokens"  # prefill and decode saw different tokens
    SLOW_TIER = "slow_tier"  # loading it would have taken longer than computing it
    NO_GAIN = "no_gain"  # too short: one token, which is always computed, or computed before a load could begin
    UNASKED = "unasked"  # nobody knows: a tier or store that may have it could not be asked
    PEER_LOST = "peer_lost"  # the store that has it cannot be reached, or went away while it was read
    UNKNOWN_ADAPTER = "unknown_adapter"  # nobody knows yet, or any more, which bytes the request's adapter has


# ---- handshake


class Greeting(Message, frozen=True, tag="greeting"):
    """First message of a connection, from the store."""

    protocol: int
    version: str
    store: str  # a random name for each store process; with a new one, everything known before is void
    arena_bytes: int
    verify_reads: bool
    limits: Limits
    nonce: bytes = b""  # TCP only: to be answered with the token's proof in Hello
    address: str = ""  # by which other stores reach this one (tcp://host:port); empty: they cannot


class Hello(Message, frozen=True, tag="hello"):
    """First message of a client. Without a namespace it may only use receipts, stats and tools' requests."""

    id: int
    protocol: int
    client: str  # for people: shown by `kvtally stat`
    namespace: bytes = b""  # canonical description (core.namespace.canonical)
    expect: bytes = (
        b""  # digest that the namespace must have (a P/D peer's); refused otherwise, with the differing fields
    )
    proof: bytes = b""  # TCP only: keyed blake3 of the nonce
    peer: bool = False  # TCP only: another store, which may hold leases and pull what they hold
    nonce: bytes = b""  # from a peer: to be answered with the token's proof in Welcome


class Welcome(Message, frozen=True, tag="welcome"):
    id: int
    session: int
    digest: bytes = b""  # of the registered namespace
    proof: bytes = b""  # to a peer: of its nonce, so that it takes bytes only from a store that knows the token
    bulk_port: int = 0  # to a peer: where bytes are pulled from, on the same host
    card: bytes = b""  # on bulk connections: what a peer's NIXL needs to read this store's arena


class Refused(Message, frozen=True, tag="refused"):
    """A refusal of one request, or (id 0) of the connection, which is then closed."""

    id: int
    code: str
    message: str
    remedy: str


# ---- reading


class Lookup(Message, frozen=True, tag="lookup"):
    """Up to which boundary of this prompt can all groups be served? One round trip for a whole prompt.

    With `hold`, everything that the hit needs is leased and, if it lies in a lower tier, staged into the arena.
    """

    id: int
    chains: bytes  # chain values at `ends`, 32 bytes each
    ends: Boundaries  # in tokens, ascending; each continues the one before
    limit_tokens: int  # the hit may not be longer (tokens - 1)
    alignment_tokens: int = 1
    have: PerGroup = []  # tokens the engine holds already (see core.hits)
    wait_ms: int = 0  # how long to wait for pending objects that would lengthen the hit
    hold: bool = False
    lease_ms: int = 0  # 0: the longest allowed
    priority: int = 0  # of the request; a smaller one goes first
    ahead: int = 0  # requests that the engine begins before this one
    early: bool = False  # the engine has not come to this request yet; it says `Wanted` when it has
    prefill_tokens_s: int = 0  # what the engine computes in a second, to be compared with loading; 0: load anyway
    slots: bool = (
        False  # include where the objects of rank 0 lie, if all of them are in the arena; to a peer: all ranks
    )
    source: str = ""  # address of a store that probably has more of this prompt
    ticket: str = ""  # of the prefill that saves it: if its half says that it saved nothing, waiting is over
    until_tokens: int = 0  # a promised boundary: worth waiting for (`wait_ms`) though nobody has begun to write it
    deliver: str = ""  # address of a store that will want this prompt: it is offered there (`Offer`)


class Slot(Message, frozen=True, tag="slot"):
    """One leased object: which it is, where it lies in the arena, and its checksum."""

    index: int  # boundary index of the lookup
    group: int
    length_bytes: int
    checksum: int
    pieces: list[int]  # offset, length, offset, length, ...; empty to a peer, which pulls
    rank: int = 0


class Found(Message, frozen=True, tag="found"):
    """The answer to a lookup. `end_tokens` is promised only when `staging` is 0; otherwise wait for `Staged`."""

    id: int
    end_tokens: int
    lease: int = 0  # 0: nothing is held
    staging: int = 0  # objects on their way up from a lower tier
    pending_tokens: int = 0  # the boundary that would be servable if every pending object were committed
    presence: list[
        bytes
    ] = []  # per group: bit i (LSB first) is set where the object at boundary i exists on every rank
    tails: list[int] = []  # where tails end that may continue the prompt, in tokens beyond the hit
    reason: str = ""  # why the hit is not longer (a MissReason; empty where it reached the last boundary asked for)
    arena_tokens: int = 0  # of the hit: tokens whose objects were already in the arena
    slots: list[Slot] = []  # if asked for and held; none while `staging`
    withdrawn: str = ""  # why the prefill of `ticket` has saved nothing after all
    # Of the hit: tokens that came from another store, or from the pool, for this ticket before it was asked about.
    peer_tokens: int = 0
    pool_tokens: int = 0


class Staged(Message, frozen=True, tag="staged"):
    """Unasked: the staging of a lease has ended. `end_tokens` may be less than was found (a tier failed), even 0."""

    id: int  # always 0
    lease: int
    end_tokens: int
    reason: str = ""
    disk_tokens: int = 0  # of the hit: tokens that came from disk
    staged_bytes: int = 0
    wait_ns: int = 0
    left_tokens: int = 0  # found beyond `end_tokens`, and not worth loading
    load_ms: float = 0.0  # estimate, when the engine came to the request: to load all that was found
    compute_ms: float = 0.0  # estimate: to compute it instead
    peer_tokens: int = 0  # of the hit: tokens that came from another store
    pool_tokens: int = 0  # of the hit: tokens that came from the pool


class Wanted(Message, frozen=True, tag="wanted"):
    """The engine has come to a request that was looked up early: it waits from now on. Answered by `Done`.

    What is still to be staged now goes before early requests, or is given up if computing it is faster.
    """

    id: int
    lease: int
    prefill_tokens_s: int = 0  # as in Lookup


NO_RANK = -1
ALL_RANKS = -2


class SlotsGet(Message, frozen=True, tag="slots_get"):
    """Where the leased objects of one rank lie. Any session of the same namespace may ask (a worker for its
    scheduler). With `NO_RANK` the answer lists no slots: it only says whether the lease stands. With `ALL_RANKS` it
    lists every rank's, without pieces: for a peer.
    """

    id: int
    lease: int
    rank: int = 0


class Slots(Message, frozen=True, tag="slots"):
    id: int
    slots: list[Slot]
    reason: str = ""  # set, with no slots, when the lease is gone


class Release(Message, frozen=True, tag="release"):
    """Give leases back. `bad` names objects whose bytes did not verify after the copy: (lease, index, group, rank)
    each.
    """

    id: int
    leases: Ids
    bad: Annotated[list[tuple[int, int, int, int]], MOST_ITEMS] = []


class Done(Message, frozen=True, tag="done"):
    id: int


# ---- between stores


class Offer(Message, frozen=True, tag="offer"):
    """From a store to a peer: this prompt is being computed here and will be wanted there. Answered by `Done`.

    The peer may look it up here, again and again, and pull each chunk as it is committed.
    """

    id: int
    source: str  # the offering store's address
    chains: bytes
    ends: Boundaries
    ticket: str = ""  # of the hand-off that it is for


class Pull(Message, frozen=True, tag="pull"):
    """Send the bytes of one leased object. Only on bulk connections; the answer is raw (`wire.bulk`)."""

    id: int
    lease: int
    index: int  # boundary index of the lookup
    group: int
    rank: int
    in_place: bool = False  # say where the object lies instead, and keep it there until `Pulled`


class Pulled(Message, frozen=True, tag="pulled"):
    """The object of a Pull that was answered with its place has been read there. Only on bulk connections."""

    id: int  # of the Pull


# ---- writing


class PutStatus(IntEnum):
    WRITE = 0  # yours to write: here is the slot
    PRESENT = 1  # already committed
    PENDING = 2  # another writer has begun
    FULL = 3  # no room now


class PutObject(Message, frozen=True, tag="put_object"):
    chain: bytes
    parent: bytes  # chain value at `start_tokens` (the root chain at 0)
    start_tokens: int
    end_tokens: int
    group: int
    rank: int
    length_bytes: int


class PutBegin(Message, frozen=True, tag="put_begin"):
    """Lease slots for objects about to be written. Identical concurrent puts get one writer."""

    id: int
    objects: Annotated[list[PutObject], MOST_ITEMS]


class PutSlot(Message, frozen=True, tag="put_slot"):
    status: int  # a PutStatus
    put: int = 0
    pieces: list[int] = []  # offset, length, ...


class PutSlots(Message, frozen=True, tag="put_slots"):
    """One per object of the request, in its order."""

    id: int
    slots: list[PutSlot]


class PutEnd(Message, frozen=True, tag="put_end"):
    """Commit and abort. By sending this, a client promises that it no longer touches those slots."""

    id: int
    commit: Annotated[list[tuple[int, int]], MOST_ITEMS] = []  # put, checksum
    abort: Ids = []


class PutEnded(Message, frozen=True, tag="put_ended"):
    id: int
    committed: int
    rejected: list[int] = []  # puts that had expired or were unknown: not published


# ---- receipts, tools


class ReceiptFile(Message, frozen=True, tag="receipt_file"):
    id: int
    ticket: str
    half: Half


class ReceiptGet(Message, frozen=True, tag="receipt_get"):
    """One ticket (waiting up to `wait_ms` until both halves, or decode's alone, are there), or the last ones filed."""

    id: int
    ticket: str = ""
    wait_ms: int = 0
    last: int = 0


class Receipts(Message, frozen=True, tag="receipts"):
    id: int
    receipts: list[Receipt]


class Ping(Message, frozen=True, tag="ping"):
    id: int


class StatsGet(Message, frozen=True, tag="stats_get"):
    id: int


class Stats(Message, frozen=True, tag="stats"):
    id: int
    stats: dict[str, object]  # the same tree that admin HTTP serves as JSON


class Reset(Message, frozen=True, tag="reset"):
    """Forget a namespace (by digest), or, with an empty digest, the session's own."""

    id: int
    digest: bytes = b""
    name: str = ""  # between stores: of the reset that is passed on, so that each is carried out once


class ResetDone(Message, frozen=True, tag="reset_done"):
    """Forgotten, and removed from every tier. If a tier has not removed it, the answer is `Refused`."""

    id: int
    objects: int


Request = (
    Hello
    | Lookup
    | Wanted
    | SlotsGet
    | Release
    | Offer
    | Pull
    | Pulled
    | PutBegin
    | PutEnd
    | ReceiptFile
    | ReceiptGet
    | Ping
    | StatsGet
    | Reset
)
Reply = (
    Greeting | Welcome | Refused | Found | Staged | Slots | Done | PutSlots | PutEnded | Receipts | Stats | ResetDone
)
