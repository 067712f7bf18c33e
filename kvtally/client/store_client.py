"""The operations that a store offers, for engines and tools. Never blocks past a deadline; every fault is a `Miss`.

    hold ─▶ Lease ─▶ slots ─▶ ReadSlot: copied by the engine ─▶ accept ─▶ release          arena slot ─▶ engine block
    put_begin ─▶ Put: copied by the engine ─▶ put_end                                      engine block ─▶ arena slot

Each operation sends its request at once and returns a `Call`. An engine's step goes on and looks at `call.result` after
a later `poll()`; a tool says `call.wait()`, which returns at the latest at the call's deadline. Nothing raises for what
a store does or fails to do; wrong arguments raise ValueError.

Leases and puts are handles. They belong to the session in which they were given: when the connection is lost, the store
has dropped them, and the handle answers for itself (LEASE_EXPIRED) without asking the next store, which might know
something else by that number. Memory stays mapped while a view of it exists: a copy under way is never cut off.

Neighbours: `link` (calls, deadlines, reconnecting), `handles` (what replies become). Nothing is copied here: an engine
takes a handle's `pieces` and `seed` to its device (`kvtally.device`), in any thread, and brings the checksum back
(`accept`, `put_end`). What was copied without a checksum counts only if the lease is confirmed afterwards (`confirm`).
Threading: one thread at a time.
"""

from __future__ import annotations

import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

from msgspec import structs

from kvtally.client.handles import (
    Lease,
    Put,
    ReadSlot,
    SharedLease,
    confirmed,
    lease_of,
    puts_of,
    read_slots_of,
    reason_of,
)
from kvtally.client.link import SPIN_NS, Call, Introduction, Link, Miss, Session, miss_of
from kvtally.core.keys import chain_values, chunk_ends, token_bytes
from kvtally.core.namespace import Namespace, canonical
from kvtally.core.receipts import Half
from kvtally.endpoint import endpoint
from kvtally.errors import IncompatibleError
from kvtally.shm import Mapping
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    NO_RANK,
    Done,
    Found,
    Lookup,
    MissReason,
    Ping,
    PutBegin,
    PutEnd,
    PutEnded,
    PutObject,
    PutSlots,
    PutStatus,
    ReceiptFile,
    ReceiptGet,
    Receipts,
    Release,
    Reply,
    Request,
    Reset,
    ResetDone,
    Slots,
    SlotsGet,
    Staged,
    Stats,
    StatsGet,
    Wanted,
)

__all__ = ["Call", "Lease", "Miss", "Put", "ReadSlot", "SharedLease", "StoreClient", "question"]

# Requests that a silent store does not get. It gets all others as soon as it listens: they say what is over.
QUESTIONS = (Lookup, SlotsGet, PutBegin)
GIVES_BACK = (Release, PutEnd)
TIMEOUT_S = 2.0
GIVE_BACK_S = 2.0  # for requests that nobody waits for
ELSEWHERE_NS = 1_000_000_000  # how long a store may wait for another one that it asks, and that does not answer

M = TypeVar("M", bound=Reply)
R = TypeVar("R")


def question(namespace: Namespace, tokens: Sequence[int], *, wait_ms: int = 0) -> Lookup:
    """The lookup for a prompt: all its whole chunks, leaving at least one token to compute."""
    ends = chunk_ends(len(tokens), namespace.chunk_tokens)
    chains = b"".join(chain_values(token_bytes(tokens), ends))
    return Lookup(0, chains, ends, max(len(tokens) - 1, 0), namespace.alignment_tokens, wait_ms=wait_ms)


class StoreClient:
    """One client of one store. Connects when first used, and again whenever the connection is lost.

    `expect` is the digest that the namespace must have (a P/D peer's). `timeout_s` is the default deadline of calls.
    Raises ConfigError for an address that cannot work.
    """

    def __init__(
        self,
        address: str,
        *,
        namespace: Namespace | None = None,
        expect: bytes = b"",
        name: str = "client",
        token: str = "",
        ca_file: str = "",
        timeout_s: float = TIMEOUT_S,
        jitter: random.Random | None = None,
    ) -> None:
        description = canonical(namespace) if namespace is not None else b""
        self._digest = namespace.digest if namespace is not None else b""
        self._timeout_s = timeout_s
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._link = Link(
            endpoint(address, token=token, ca_file=ca_file),
            Introduction(client=name, namespace=description, expect=expect),
            self._unasked,
            jitter=jitter,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the connection

    @property
    def session(self) -> Session | None:
        """The present session, or None while there is none."""
        return self._link.session

    @property
    def digest(self) -> bytes:
        """The digest of this client's namespace; empty without one."""
        return self._digest

    @property
    def generation(self) -> int:
        """Increases whenever a session was lost, and with it every lease and put."""
        return self._link.generation

    @property
    def refusal(self) -> IncompatibleError | None:
        """Why the store refuses this client, with a remedy, to be shown to people."""
        return self._link.error if isinstance(self._link.error, IncompatibleError) else None

    @property
    def arena(self) -> Mapping | None:
        """The mapped arena, to be pre-faulted or pinned. The memory stays mapped as long as somebody keeps this."""
        return self._link.session.mapping if self._link.session is not None else None

    @property
    def misses(self) -> Counter[MissReason]:
        """How many calls ended in a Miss, by reason."""
        return self._link.misses

    def connect(self, timeout_s: float | None = None) -> Session | Miss:
        """Wait for a session, trying again as often as the time allows. A refusal ends the wait."""
        deadline_ns = self._deadline_ns(timeout_s)
        self._link.poll()
        while self._link.session is None:
            if self.refusal is not None or time.monotonic_ns() >= deadline_ns:
                return self._count(miss_of(self._link.error))
            self._link.step(deadline_ns)
        return self._link.session

    def poll(self) -> None:
        """Make all the progress that is possible without waiting: send, receive, reconnect, expire."""
        self._link.poll()

    def step(self, wait_s: float, *, is_urgent: bool = False) -> None:
        """Wait at most this long for something to happen, then poll. If `is_urgent`, stay awake at first."""
        now_ns = time.monotonic_ns()
        self._link.step(now_ns + int(wait_s * 1e9), now_ns + SPIN_NS if is_urgent else 0)

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._link.close()

    # ---- reading

    def lookup(self, question: Lookup, *, timeout_s: float | None = None) -> Call[Found]:
        """How much of a prompt is there? Nothing is held, so nothing is promised."""
        request = structs.replace(question, hold=False)
        return self._submit(request, _expect(Found), timeout_s, question.wait_ms)

    def hold(self, question: Lookup, *, timeout_s: float | None = None) -> Call[Lease]:
        """Look up, lease what was found, and have it brought into the arena."""
        begun_ns = time.monotonic_ns()
        request = structs.replace(question, hold=True)
        return self._submit(request, lambda reply: self._lease(request, begun_ns, reply), timeout_s, question.wait_ms)

    def want(self, lease: Lease, *, prefill_tokens_s: int = 0, timeout_s: float | None = None) -> Call[Done]:
        """The engine has come to a request that was looked up early: what is still to be staged is urgent now."""
        if not lease.is_live:
            return self._link.answered(Miss(MissReason.LEASE_EXPIRED))
        return self._submit(Wanted(0, lease.id, prefill_tokens_s), _expect(Done), timeout_s)

    def adopt(self, shared: SharedLease) -> Lease:
        """Another session's lease, to read through this one. Releasing it only reports what did not verify."""
        if self._link.session is None:
            self._link.poll()
        session = self._link.session
        if session is None or session.store != shared.store:
            session = _LOST
        return Lease(
            session=session,
            id=shared.id,
            found=Found(0, 0, shared.id, slots=shared.slots),
            chains=shared.chains,
            expires_ns=shared.expires_ns,
            is_own=False,
        )

    def slots(self, lease: Lease, *, rank: int = 0, timeout_s: float | None = None) -> Call[list[ReadSlot]]:
        """Where the leased objects of one rank lie."""
        if not lease.is_live:
            return self._link.answered(Miss(reason_of(lease.reason, MissReason.ABSENT), "nothing is held"))
        # An adopted lease can end unnoticed, and its slots be given to somebody else. Checksums would show that;
        # without them, ask the store.
        told = lease.found.slots if lease.session.verify_reads else []
        known = read_slots_of(lease, self._digest, 0, Slots(0, told)) if told and rank == 0 else None
        if known is not None:
            return self._link.answered(known)
        return self._submit(
            SlotsGet(0, lease.id, rank), lambda reply: read_slots_of(lease, self._digest, rank, reply), timeout_s
        )

    def accept(self, slot: ReadSlot, checksum: int) -> Miss | None:
        """Judge a copy by its checksum: a Miss where its bytes must not be used.

        Bytes that match are right whatever became of the lease. Bytes that do not match condemn the object only while
        the lease stands: after that, somebody else may have been allowed to write there.
        """
        if checksum == slot.checksum:
            return None
        if not slot.lease.is_live:
            return self._count(Miss(MissReason.LEASE_EXPIRED))
        slot.lease.bad.append((slot.lease.id, slot.index, slot.key.group, slot.key.rank))
        return self._count(Miss(MissReason.CHECKSUM, f"group {slot.key.group}, rank {slot.key.rank} [KV-401]"))

    def confirm(self, lease: Lease, *, timeout_s: float | None = None) -> Call[Lease]:
        """Ask, after a copy without checksums, whether the lease still stands: only then are those bytes right.

        A session knows when its own lease ended. An adopted lease ends with the session that was given it, which this
        one never hears of, so the store is asked.
        """
        self._link.poll()
        if not lease.is_live:
            return self._link.answered(Miss(MissReason.LEASE_EXPIRED))
        if lease.is_own:
            return self._link.answered(lease)
        return self._submit(SlotsGet(0, lease.id, NO_RANK), lambda reply: confirmed(lease, reply), timeout_s)

    def release(self, leases: Iterable[Lease], *, timeout_s: float | None = None) -> Call[Done]:
        """Give leases back, and report which of their objects did not verify. Leases that are lost need no release."""
        ids, bad = [], []
        for lease in leases:
            if lease.id and lease.session.alive:
                bad += lease.bad
                ids += [lease.id] if lease.is_own else []
            lease.bad = []
            lease.expires_ns = 0
        if not ids and not bad:
            return self._link.answered(Done(0))
        return self._submit(Release(0, ids, bad), _expect(Done), timeout_s)

    # ---- writing

    def put_begin(self, objects: Sequence[PutObject], *, timeout_s: float | None = None) -> Call[list[Put]]:
        """Ask for slots to write to. One answer for each object, in their order."""
        return self._submit(PutBegin(0, list(objects)), lambda reply: self._puts(objects, reply), timeout_s)

    def put_end(
        self, commit: Iterable[tuple[Put, int]] = (), abort: Iterable[Put] = (), *, timeout_s: float | None = None
    ) -> Call[PutEnded]:
        """Publish what was written (with its checksum), drop the rest. Nobody may write to these slots any more."""
        commits = [(put.id, checksum) for put, checksum in commit if put.session.alive]
        aborts = [put.id for put in abort if put.session.alive]
        if not commits and not aborts:
            return self._link.answered(Miss(MissReason.LEASE_EXPIRED, "the store that gave these slots is gone"))
        return self._submit(PutEnd(0, commits, aborts), _expect(PutEnded), timeout_s)

    # ---- receipts, tools

    def file_receipt(self, ticket: str, half: Half, *, timeout_s: float | None = None) -> Call[Done]:
        return self._submit(ReceiptFile(0, ticket, half), _expect(Done), timeout_s)

    def receipts(
        self, ticket: str = "", *, wait_ms: int = 0, last: int = 0, timeout_s: float | None = None
    ) -> Call[Receipts]:
        """One ticket's receipt, waiting for its halves, or the last ones filed."""
        return self._submit(ReceiptGet(0, ticket, wait_ms, last), _expect(Receipts), timeout_s, wait_ms)

    def stats(self, *, timeout_s: float | None = None) -> Call[Stats]:
        return self._submit(StatsGet(0), _expect(Stats), timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> Call[Done]:
        return self._submit(Ping(0), _expect(Done), timeout_s)

    def reset(self, digest: bytes = b"", *, timeout_s: float | None = None) -> Call[ResetDone]:
        """Forget a namespace, or this client's own."""
        return self._submit(Reset(0, digest), _expect(ResetDone), timeout_s)

    # ---- requests and replies

    def _submit(
        self,
        request: Request,
        finish: Callable[[Reply], R | Miss | None],
        timeout_s: float | None,
        wait_ms: int = 0,
    ) -> Call[R]:
        if self._link.is_silent and isinstance(request, QUESTIONS):
            return self._link.answered(Miss(MissReason.DEADLINE, "the store does not answer: not asked [KV-501]"))
        deadline_ns = self._deadline_ns(timeout_s, wait_ms)
        wait_ns = wait_ms * 1_000_000 + (ELSEWHERE_NS if isinstance(request, Lookup) and request.source else 0)
        gives_back = isinstance(request, GIVES_BACK)
        return self._link.submit(request, finish, deadline_ns, wait_ns=wait_ns, gives_back=gives_back)

    def _deadline_ns(self, timeout_s: float | None, wait_ms: int = 0) -> int:
        """By default, a request that asks the store to wait has that much more time."""
        seconds = timeout_s if timeout_s is not None else self._timeout_s + wait_ms / 1e3
        return time.monotonic_ns() + int(seconds * 1e9)

    def _count(self, miss: Miss) -> Miss:
        self._link.misses[miss.reason] += 1
        return miss

    def _lease(self, request: Lookup, begun_ns: int, reply: Reply) -> Lease | None:
        session = self._link.session
        if not isinstance(reply, Found) or session is None:
            return None
        lease = lease_of(session, request, begun_ns, reply)
        if lease.id:
            self._leases[lease.id] = lease
        return lease

    def _puts(self, objects: Sequence[PutObject], reply: Reply) -> list[Put] | None:
        session = self._link.session
        if not isinstance(reply, PutSlots) or session is None:
            return None
        return puts_of(session, self._digest, objects, reply)

    def _unasked(self, message: Reply) -> None:
        """Take a message that answers no call: news of a lease, or a late answer, whose grants are given back."""
        if isinstance(message, Staged):
            lease = self._leases.get(message.lease)
            if lease is not None and lease.session is self._link.session:
                lease.outcome = message
        elif isinstance(message, Found) and message.lease:
            self._submit(Release(0, [message.lease]), _expect(Done), GIVE_BACK_S)
        elif isinstance(message, PutSlots):
            unwanted = [slot.put for slot in message.slots if slot.status == PutStatus.WRITE]
            if unwanted:
                self._submit(PutEnd(0, abort=unwanted), _expect(PutEnded), GIVE_BACK_S)


_LOST = Session(generation=0, store="", limits=Limits(), verify_reads=True, mapping=None, alive=False)


def _expect(kind: type[M]) -> Callable[[Reply], M | None]:
    return lambda reply: reply if isinstance(reply, kind) else None
