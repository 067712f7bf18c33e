"""The store's logic as one object without I/O: messages, outcomes and time go in, messages and jobs come out.

Owns sessions, the handshake's content, dispatch, stats and the order of events. The parts are `lookups` and `leases`
(reading), `puts` and `lower` (writing), `peers`, `offers` and `sends` (other stores), `beliefs`, `receipts`, `resets`,
and the index, `core.residency`. They know those to their right, and nothing calls back: what the left must hear of, it
takes after every event (`_follow_up`). The shell (`server`, `mover`, `dial`, `bulk`) and the simulator drive the store
in the same way, which is why a whole cluster can be run from a seed. Single-threaded: the event loop's thread owns it.

    shell ──handle / disconnect / writer_gone / tick / job_done──▶ Store ──take_outbox / take_jobs──▶ shell
          ──peer_said / peer_lost / pull / sent─────────────────▶       ──take_peer_messages / take_sends──▶
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
from msgspec import structs

from kvtally.core.checksum import ALGORITHM
from kvtally.core.namespace import FORMAT_VERSION, Namespace, canonical, decode, difference
from kvtally.core.residency import ARENA, Family, Residency, each_bit
from kvtally.core.space import round_up
from kvtally.errors import CapacityError
from kvtally.store.beliefs import Beliefs
from kvtally.store.context import Context, Session
from kvtally.store.jobs import FindJob, Job, Outcome, PeerLink, ReadJob, SendJob, WriteJob
from kvtally.store.leases import Leases
from kvtally.store.lookups import Lookups
from kvtally.store.lower import LowerTiers
from kvtally.store.offers import Offers
from kvtally.store.peers import Peers
from kvtally.store.puts import Puts
from kvtally.store.receipts import ReceiptDesk
from kvtally.store.resets import MOST_OF_CLIENT, ResetEnd, Resets
from kvtally.store.sends import Sends
from kvtally.store.tier_state import TierInfo, TierKind, TierState
from kvtally.store.tiers.base import ObjectRecord
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Greeting,
    Hello,
    Lookup,
    Offer,
    Ping,
    Pull,
    PutBegin,
    PutEnd,
    ReceiptFile,
    ReceiptGet,
    Release,
    Reply,
    Request,
    Reset,
    ResetDone,
    SlotsGet,
    Stats,
    StatsGet,
    Wanted,
    Welcome,
)
from kvtally.wire.stats import ArenaStats, ClientStats, NamespaceStats, QuarantineStats, StoreStats

__all__ = ["Health", "Store", "TierInfo"]

LONGEST_NAME = 200  # characters of a client's or a model's name in stats, all of which must fit into one frame


class Health(NamedTuple):
    """What a health check asks for. Cheap, however much the store holds."""

    uptime_s: float
    tiers: dict[str, str]  # name -> state


class Store:
    """One node's store. See the module docstring; every method returns at once."""

    def __init__(
        self,
        *,
        name: str,
        version: str,
        arena_bytes: int,
        limits: Limits,
        tiers: Sequence[TierInfo] = (),
        verify_reads: bool = True,
        started_ns: int = 0,
        address: str = "",
        may_ask: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self._name, self._version, self._verify_reads = name, version, verify_reads
        self._started_ns = started_ns
        self._address = address
        residency = Residency(arena_bytes, len(tiers))
        self._residency = residency
        self._context = Context(residency, limits, [TierState(info) for info in tiers])
        self._beliefs = Beliefs(self._context)
        peers_tier = next((number for number, info in enumerate(tiers, 1) if info.kind is TierKind.PEERS), 0)
        self._peers = Peers(self._context, self._beliefs, tier=peers_tier, address=address, may_ask=may_ask)
        self._lower = LowerTiers(self._context, self._beliefs)
        self._puts = Puts(self._context, self._lower)
        self._resets = Resets(self._context, self._puts, self._lower, self._beliefs)
        self._leases = Leases(self._context, self._lower, self._beliefs, self._peers)
        self._receipts = ReceiptDesk(self._context)
        self._lookups = Lookups(self._context, self._leases, self._beliefs, self._peers, self._receipts)
        self._offers = Offers(self._context, self._lookups, self._leases)
        self._sends = Sends(self._context, self._leases)
        self._last_session = 0

    # ---- connections

    def greeting(self, *, nonce: bytes = b"") -> Greeting:
        limits = self._context.limits
        size = self._residency.space.capacity_bytes
        return Greeting(
            PROTOCOL_VERSION, self._version, self._name, size, self._verify_reads, limits, nonce, self._address
        )

    def connect(self, *, shared_memory: bool, now_ns: int, is_peer: bool = False) -> int:
        """Let a client in, or another store (`is_peer`), which gets leases without shared memory."""
        if len(self._context.sessions) >= self._context.limits.clients:
            message = f"the store already serves {self._context.limits.clients} clients"
            raise CapacityError(message, remedy="Close idle clients, or start another store.", code="KV-301")
        self._last_session += 1
        self._context.sessions[self._last_session] = Session(self._last_session, shared_memory, is_peer)
        return self._last_session

    def disconnect(self, session_id: int, now_ns: int) -> None:
        """The socket closed: leases and open puts end, and slots that may still be written to go to limbo."""
        session = self._context.sessions[session_id]
        self._receipts.disconnect(session)
        self._lookups.disconnect(session)
        self._leases.disconnect(session, now_ns)
        self._puts.disconnect(session)
        del self._context.sessions[session_id]
        self._follow_up(now_ns)

    def writer_gone(self, session_id: int, now_ns: int) -> None:
        """The process behind a session is gone for certain, so its slots in limbo may be reused."""
        self._puts.writer_gone(session_id)

    # ---- requests

    def handle(self, session_id: int, request: Request, now_ns: int) -> None:
        """Carry out one request. Its reply goes to the outbox, now or when what it waits for has happened."""
        session = self._context.sessions[session_id]
        if isinstance(request, Hello):
            self._hello(session, request)
        elif isinstance(request, Lookup | Wanted | SlotsGet | Release | Offer | PutBegin | PutEnd):
            self._handle_bytes(session, request, now_ns)
            self._follow_up(now_ns)
        elif isinstance(request, ReceiptFile):
            self._receipts.file(session, request, now_ns)
            self._follow_up(now_ns)
        elif isinstance(request, ReceiptGet):
            self._receipts.get(session, request, now_ns)
        elif isinstance(request, Ping):
            self._context.send(session, Done(request.id))
        elif isinstance(request, StatsGet):
            self._context.send(session, Stats(request.id, msgspec.to_builtins(self.stats(now_ns))))
        elif isinstance(request, Reset):
            self._reset(session, request, now_ns)
        else:
            remedy = "Pull on a bulk connection (`Welcome.bulk_port`)."
            self._context.refuse(session, request.id, "KV-503", "this connection carries no bytes", remedy)

    def _handle_bytes(
        self, session: Session, request: Lookup | Wanted | SlotsGet | Release | Offer | PutBegin | PutEnd, now_ns: int
    ) -> None:
        if session.family is None:
            message = "this request needs a namespace"
            self._context.refuse(session, request.id, "KV-206", message, "Say hello with the engine's namespace first.")
        elif isinstance(request, Lookup):
            self._lookups.lookup(session, request, now_ns)
        elif isinstance(request, Offer) and session.is_peer:
            self._offers.take(session, session.family, request, now_ns)
        elif not session.shared_memory and not (session.is_peer and isinstance(request, SlotsGet | Release)):
            message = "this request needs shared memory"
            remedy = "Connect over the unix socket on the store's own machine."
            self._context.refuse(session, request.id, "KV-204", message, remedy)
        elif isinstance(request, Wanted):
            self._leases.want(session, request, now_ns)
        elif isinstance(request, SlotsGet):
            self._leases.slots(session, request)
        elif isinstance(request, Release):
            self._leases.release(session, request, now_ns)
        elif isinstance(request, PutBegin):
            self._puts.begin(session, request, now_ns)
        elif isinstance(request, PutEnd):
            self._puts.end(session, request, now_ns)
        else:
            message = "offers come from other stores"
            self._context.refuse(session, request.id, "KV-503", message, "Say hello as a peer first.")

    def _hello(self, session: Session, request: Hello) -> None:
        refuse = partial(self._context.refuse, session, request.id)
        if session.greeted:
            refuse("KV-503", "a second hello on one connection", "Open another connection for another namespace.")
            return
        if request.protocol != PROTOCOL_VERSION:
            message = f"the client speaks protocol {request.protocol}, this store {PROTOCOL_VERSION}"
            refuse("KV-201", message, "Install the same kvtally version in the engine and for the store.")
            return
        digest = b""
        if request.namespace:
            try:
                namespace = decode(request.namespace)
            except msgspec.DecodeError as error:
                refuse(
                    "KV-202",
                    f"the namespace description cannot be read: {error}",
                    "Send core.namespace.canonical(...).",
                )
                return
            problem = self._namespace_problem(namespace, request)
            if problem:
                refuse("KV-202", *problem)
                return
            session.family = self._residency.register(namespace)
            digest = namespace.digest
        session.greeted = True
        session.client = request.client[:LONGEST_NAME]
        self._context.send(session, Welcome(request.id, session.id, digest))

    def _namespace_problem(self, namespace: Namespace, request: Hello) -> tuple[str, str] | None:
        limits = self._context.limits
        if canonical(namespace) != request.namespace:
            return "the namespace description is not canonical", "Send core.namespace.canonical(...)."
        if namespace.format_version != FORMAT_VERSION or namespace.checksum != ALGORITHM:
            ours = f"{FORMAT_VERSION}/{ALGORITHM}"
            message = f"the namespace has format {namespace.format_version}/{namespace.checksum}, this store {ours}"
            return message, "Install the same kvtally version in the engine and for the store."
        if not 1 <= len(namespace.groups) <= limits.groups or not 1 <= namespace.ranks <= limits.ranks:
            size = f"{len(namespace.groups)} groups on {namespace.ranks} ranks"
            message = f"{size}; 1 to {limits.groups} groups and {limits.ranks} ranks are allowed"
            return message, "Use fewer ranks for one engine."
        if namespace.chunk_tokens < 1 or namespace.alignment_tokens < 1:
            return "chunk and alignment must be at least one token", "Derive them with core.namespace.chunk_tokens."
        if request.expect and request.expect != namespace.digest:
            return self._mismatch(namespace, request.expect)
        if not self._context.has_place_for(namespace):
            message = f"the store already knows {limits.namespaces} namespaces"
            return message, "Restart the store, or reset namespaces that are no longer used (kvtally reset)."
        return None

    def _mismatch(self, ours: Namespace, expected: bytes) -> tuple[str, str]:
        peer = self._residency.families.get(expected)
        if peer is None:
            return f"the peer's namespace {expected.hex()[:12]} is unknown here", "Let both engines use the same store."
        fields = "; ".join(f"{d.field}: {d.ours} here, {d.theirs} there" for d in difference(ours, peer.namespace)[:5])
        return f"the engine and its peer cannot share bytes: {fields}", "Start both engines with the same settings."

    # ---- tiers

    def recover(self, tier: int, record: ObjectRecord) -> None:
        """Before serving: a lower tier holds this object."""
        self._lower.recover(tier, record)

    def probe(self, now_ns: int) -> None:
        """Before serving: read a few objects from each lower tier, to measure its speed."""
        for tier in range(1, self._residency.tiers):
            families = self._residency.families.values()
            nodes = (node for family in families for node in reversed(family.nodes.values()))
            keys = ((node, bit) for node in nodes for bit in each_bit(self._residency.tier_mask(node, tier)))
            self._leases.staging.probe(tier, keys, now_ns)

    def job_done(self, job: Job, outcome: Outcome, now_ns: int) -> None:
        if isinstance(job, WriteJob):
            self._lower.written(job, outcome, now_ns)
        elif isinstance(job, ReadJob):
            self._leases.read(job, outcome, now_ns)
        elif isinstance(job, FindJob):
            self._lookups.found(job, outcome, now_ns)
        else:
            self._lower.removed(job, outcome)
            self._resets.removed(job, outcome)
        self._follow_up(now_ns)

    def _follow_up(self, now_ns: int) -> None:
        """After every event: look again for lookups that waited for what has changed, and move leases and offers on."""
        is_done = False
        while not is_done:
            for node in self._puts.take_settled():
                self._lookups.settled(node, now_ns)
            spoiled, self._context.just_spoiled = self._context.just_spoiled, []
            for node in spoiled:
                self._lookups.settled(node, now_ns)
            for ticket in self._receipts.take_withdrawn():
                self._lookups.withdrawn(ticket, now_ns)
            for answer in self._peers.take_answers():
                self._lookups.answered(answer, now_ns)
            self._leases.advance(now_ns)
            is_done = not self._offers.advance(now_ns) and not self._peers.has_answers
        self._peers.give_back_ended()

    # ---- other stores

    def description(self, digest: bytes) -> bytes:
        """The canonical description of a namespace, for a hello to another store; empty if it is not known any more."""
        family = self._residency.families.get(digest)
        return canonical(family.namespace) if family is not None else b""

    def peer_said(self, link: PeerLink, reply: Reply, now_ns: int) -> None:
        """Another store has sent this on a link."""
        self._peers.said(link, reply, now_ns)
        self._follow_up(now_ns)

    def peer_lost(self, link: PeerLink, code: str, now_ns: int) -> None:
        """A link could not be made, was refused, or has ended."""
        self._peers.lost(link, code, now_ns)
        self._follow_up(now_ns)

    def take_peer_messages(self) -> list[tuple[PeerLink, Request]]:
        return self._peers.take_outbox()

    def pull(self, connection: int, request: Pull, now_ns: int) -> None:
        """Another store pulls an object, on a bulk connection."""
        self._sends.pull(connection, request, now_ns)

    def take_sends(self) -> list[SendJob]:
        return self._sends.take_jobs()

    def sent(self, job: SendJob, outcome: Outcome, now_ns: int) -> None:
        self._sends.sent(job, outcome)
        self._follow_up(now_ns)

    # ---- tools

    def _reset(self, session: Session, request: Reset, now_ns: int) -> None:
        digest = request.digest or (session.family.namespace.digest if session.family is not None else b"")
        if digest not in self._residency.families:
            known = ", ".join(sorted(known.hex()[:12] for known in self._residency.families)) or "none"
            message = f"no namespace {digest.hex()[:12] or '(empty)'} here; known: {known}"
            self._context.refuse(session, request.id, "KV-206", message, "Run `kvtally stat` to see the namespaces.")
            return
        name = request.name if session.is_peer else ""
        if name and self._peers.knows_reset(digest, name):
            self._context.send(session, ResetDone(request.id, 0))
            return
        if session.resets >= MOST_OF_CLIENT:
            message = f"this client waits for {session.resets} resets, the most at once"
            self._context.refuse(session, request.id, "KV-302", message, "Wait for the answers first.")
            return
        session.resets += 1
        self.reset(digest, now_ns, partial(self._reset_ended, session, request.id), name=name)

    def _reset_ended(self, session: Session, request: int, end: ResetEnd) -> None:
        session.resets -= 1
        if end.code:
            self._context.refuse(session, request, end.code, end.message, end.remedy)
        else:
            self._context.send(session, ResetDone(request, end.objects))

    def reset(
        self, digest: bytes, now_ns: int, on_end: Callable[[ResetEnd], None] = lambda end: None, *, name: str = ""
    ) -> None:
        """Forget every object of a namespace. `on_end` is called when lower tiers have removed them, or could not.
        `name` is that of a reset which another store passes on."""
        self._resets.begin(self._residency.families[digest], now_ns, on_end)
        self._peers.reset(digest, name or f"{self._name}.{self._context.new_id()}")
        self._follow_up(now_ns)

    def tick(self, now_ns: int) -> int | None:
        self._context.alarms.run(now_ns)
        self._follow_up(now_ns)  # this may set alarms, too
        next_ns = self._context.alarms.next_ns()
        return max(next_ns, now_ns) if next_ns is not None else None

    def take_outbox(self) -> list[tuple[int, Reply]]:
        outbox, self._context.outbox = self._context.outbox, []
        return outbox

    def take_jobs(self) -> list[Job]:
        jobs, self._context.jobs = self._context.jobs, []
        return jobs

    def health(self, now_ns: int) -> Health:
        tiers = {tier.info.name: tier.state(now_ns) for tier in self._context.tiers}
        return Health(self._uptime_s(now_ns), tiers)

    def _uptime_s(self, now_ns: int) -> float:
        return (now_ns - self._started_ns) / 1e9

    def stats(self, now_ns: int) -> StoreStats:
        """Everything that `kvtally stat`, /inspect and /metrics show."""
        context, counts, residency, planner = self._context, self._context.counts, self._residency, self._leases.planner
        return StoreStats(
            store=self._name,
            version=self._version,
            uptime_s=self._uptime_s(now_ns),
            verify_reads=self._verify_reads,
            arena=ArenaStats(
                capacity_bytes=residency.space.capacity_bytes,
                used_bytes=residency.space.used_bytes,
                objects=residency.resident_objects[ARENA],
                evicted=residency.evicted_objects[ARENA],
                limbo_bytes=self._puts.limbo_bytes,
                staging_bytes=planner.in_flight_bytes,
                held_bytes=sum(planner.held_bytes),
            ),
            tiers=[
                tier.stats(
                    now_ns,
                    used_bytes=residency.lower_bytes[number],
                    objects=residency.resident_objects[number],
                    evicted=residency.evicted_objects[number],
                )
                for number, tier in enumerate(context.tiers, 1)
            ],
            lookups=structs.replace(counts.lookups, waiting=self._lookups.waiting),
            puts=counts.puts,
            staged=counts.staged,
            leases=structs.replace(counts.leases, open=self._leases.open, waiting=planner.waiting),
            beliefs=len(self._beliefs),
            peers=self._peers.stats(now_ns),
            sends=structs.replace(counts.sends, open=self._sends.open),
            clients=[_client_stats(session) for session in context.sessions.values()],
            namespaces=[_namespace_stats(family) for family in residency.families.values()],
            receipts=len(self._receipts),
            refused=counts.refused,
            quarantined=QuarantineStats(counts.quarantined, list(context.quarantine)),
        )

    def check(self) -> None:
        """Assert every invariant, also that each arena byte has exactly one owner. Linear; for tests and simulation."""
        self._residency.check()
        self._lookups.check()
        self._leases.check()
        self._beliefs.check()
        self._peers.check()
        in_flight = self._puts.open_pieces() + self._leases.staging.pieces()
        owned = self._residency.owned_pieces() + in_flight
        owned.sort()
        for before, after in pairwise(owned):
            assert before.offset + round_up(before.length) <= after.offset, "two owners of the same arena bytes"
        assert sum(round_up(piece.length) for piece in owned) == self._residency.space.used_bytes, "arena bytes leaked"


def _client_stats(session: Session) -> ClientStats:
    return ClientStats(
        session=session.id,
        client=session.client,
        namespace=session.family.namespace.digest.hex() if session.family is not None else "",
        shared_memory=session.shared_memory,
        leases=len(session.leases),
        puts=len(session.puts),
        waiting=session.waiting,
    )


def _namespace_stats(family: Family) -> NamespaceStats:
    return NamespaceStats(
        digest=family.namespace.digest.hex(),
        model=family.namespace.model[:LONGEST_NAME],
        objects=family.objects,
        boundaries=len(family.nodes) - 1,
        chunk_tokens=family.namespace.chunk_tokens,
    )
