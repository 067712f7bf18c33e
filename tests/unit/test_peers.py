"""Two stores that know each other, message by message: no sockets, no threads, one clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtally.core.keys import ROOT_CHAIN, chain_values, chunk_ends, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.receipts import Half, Role
from kvtally.store.jobs import Outcome, PeerLink, ReadJob, WriteJob
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.wire.bulk import PullStatus
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    MissReason,
    Pull,
    PutBegin,
    PutEnd,
    PutObject,
    PutStatus,
    ReceiptFile,
    Refused,
    Release,
    Reply,
    Reset,
    ResetDone,
    Staged,
    Welcome,
)

CHUNK = 256
FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((256,),))
STATE = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=256, page_bytes=((5000,),))
DENSE = Namespace(model="dense", groups=(FULL,), chunk_tokens=CHUNK, alignment_tokens=16, tensor_parallel=1)
HYBRID = Namespace(model="hybrid", groups=(FULL, STATE), chunk_tokens=CHUNK, alignment_tokens=16)
ENDS = chunk_ends(1024, CHUNK)
CHAINS = chain_values(token_bytes(range(1024)), ENDS)
PEERS = TierInfo(name="peers", capacity_bytes=None, kind=TierKind.PEERS)
DISK = TierInfo(name="disk", capacity_bytes=1 << 30)


class Node:
    """One store and one engine."""

    def __init__(self, pair: Pair, name: str, *, namespace: Namespace, disk: bool, arena_bytes: int) -> None:
        self.pair, self.name, self.namespace = pair, name, namespace
        self.address = f"tcp://{name}:7400"
        self.store = Store(
            name=name,
            version="0",
            arena_bytes=arena_bytes,
            limits=Limits(),
            tiers=(DISK, PEERS) if disk else (PEERS,),
            address=self.address,
            may_ask=lambda address: address in pair.allowed,
        )
        self.session = self.store.connect(shared_memory=True, now_ns=pair.now_ns)
        self.store.handle(self.session, Hello(1, PROTOCOL_VERSION, "engine", canonical(namespace)), pair.now_ns)
        self.replies: list[Reply] = []
        self.links: dict[tuple[str, PeerLink], int] = {}  # who has connected, and the session it got
        self.jobs: list[WriteJob | ReadJob] = []

    def ask(self, request, session: int | None = None):  # type: ignore[no-untyped-def]
        """Ask, and let everything that follows from it happen. Returns what the engine is told, if it is one thing."""
        self.store.handle(session or self.session, request, self.pair.now_ns)
        self.pair.settle()
        return self.take()

    def take(self):  # type: ignore[no-untyped-def]
        replies, self.replies = self.replies, []
        return replies[0] if len(replies) == 1 else replies or None

    def save(self, *boundaries: int, checksum: int = 7, groups: tuple[int, ...] = (0,)) -> list[int]:
        """Save these chunks; returns the statuses of the puts."""
        items = []
        for index in boundaries:
            parent, start = (CHAINS[index - 1], ENDS[index - 1]) if index else (ROOT_CHAIN, 0)
            for group in groups:
                length = self.namespace.object_bytes(group, 0, CHUNK)
                items.append(PutObject(CHAINS[index], parent, start, ENDS[index], group, 0, length))
        slots = self.ask(PutBegin(2, items)).slots
        self.ask(PutEnd(3, [(slot.put, checksum) for slot in slots if slot.status == PutStatus.WRITE]))
        return [slot.status for slot in slots]

    def lookup(self, source: Node | None = None, **options):  # type: ignore[no-untyped-def]
        settings = {"limit_tokens": 1024, "hold": True, "source": source.address if source else ""} | options
        return self.ask(Lookup(4, b"".join(CHAINS), ENDS, **settings))


class Pair:
    """Nodes a and b, and the network between them."""

    def __init__(self, *, namespace: Namespace = DENSE, disk: bool = False, arena_bytes: int = 1 << 20) -> None:
        self.now_ns = 1
        self.allowed = {"tcp://a:7400", "tcp://b:7400"}
        self.a = Node(self, "a", namespace=namespace, disk=disk, arena_bytes=arena_bytes)
        self.b = Node(self, "b", namespace=namespace, disk=disk, arena_bytes=arena_bytes)
        self.dead: set[str] = set()  # names of nodes to which nothing gets through
        self.mute: set[str] = set()  # names of nodes that take everything and say nothing
        self.outcome = Outcome()  # of each pull
        self.held_pulls: list[tuple[Node, ReadJob]] | None = None  # a list: pulls wait in it
        self.settle()
        self.a.take(), self.b.take()

    def nodes(self) -> Iterator[Node]:
        yield from (self.a, self.b)

    def settle(self) -> None:
        """Deliver everything, until nothing more happens."""
        is_done = False
        while not is_done:
            is_done = sum(self._turn(node) for node in self.nodes()) == 0
        for node in self.nodes():
            node.store.check()

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        for node in self.nodes():
            node.store.tick(self.now_ns)
        self.settle()

    def _turn(self, node: Node) -> bool:
        messages, jobs, outbox = node.store.take_peer_messages(), node.store.take_jobs(), node.store.take_outbox()
        for link, request in messages:
            other = self.a if link.address == self.a.address else self.b
            if other.name in self.dead:
                node.store.peer_lost(link, "KV-500", self.now_ns)
            elif other.name not in self.mute:
                other.store.handle(self._session(node, other, link), request, self.now_ns)
        for job in jobs:
            if isinstance(job, ReadJob) and job.place is not None and self.held_pulls is not None:
                self.held_pulls.append((node, job))
            elif isinstance(job, ReadJob) and job.place is not None:
                self.pull(node, job)
            else:
                node.store.job_done(job, Outcome(), self.now_ns)
        for session, reply in outbox:
            back = next((key for key, known in node.links.items() if known == session), None)
            if back is None:
                node.replies.append(reply)
            elif not isinstance(reply, Welcome):
                (self.a if back[0] == "a" else self.b).store.peer_said(back[1], reply, self.now_ns)
        return bool(messages or jobs or outbox)

    def _session(self, node: Node, other: Node, link: PeerLink) -> int:
        if (node.name, link) not in other.links:
            session = other.store.connect(shared_memory=False, is_peer=True, now_ns=self.now_ns)
            other.links[node.name, link] = session
            hello = Hello(1, PROTOCOL_VERSION, "peer", node.store.description(link.namespace), peer=True)
            other.store.handle(session, hello, self.now_ns)
        return other.links[node.name, link]

    def pull(self, node: Node, job: ReadJob) -> None:
        """What the mover at one side and the bulk thread at the other side do."""
        assert job.place is not None
        other = self.a if job.place.address == self.a.address else self.b
        if other.name in self.dead | self.mute:
            node.store.job_done(job, Outcome(code="KV-604"), self.now_ns)
            return
        other.store.pull(1, Pull(9, job.place.lease, job.place.index, job.record.group, job.record.rank), self.now_ns)
        (sent,) = other.store.take_sends()
        other.store.sent(sent, Outcome(), self.now_ns)
        code = {PullStatus.SENT: self.outcome.code, PullStatus.GONE: "KV-603"}[PullStatus(sent.status)]
        node.store.job_done(job, Outcome(code=code), self.now_ns)

    def is_quiet(self) -> bool:
        """Whether nothing is held, awaited or believed."""
        stats = [node.store.stats(self.now_ns) for node in self.nodes()]
        return all(
            (s.leases.open, s.lookups.waiting, s.beliefs, s.sends.open, s.arena.staging_bytes) == (0,) * 5
            for s in stats
        ) and not any(node.store._peers.open or node.store._offers.open for node in self.nodes())


def found_and_staged(replies: object) -> tuple[Found, Staged]:
    assert isinstance(replies, list)
    found, staged = replies
    assert isinstance(found, Found)
    assert isinstance(staged, Staged)
    return found, staged


def test_a_prompt_is_found_at_its_source_and_pulled() -> None:
    pair = Pair()
    pair.a.save(0, 1, 2)
    assert pair.b.lookup().end_tokens == 0  # nobody says who has it
    found, staged = found_and_staged(pair.b.lookup(source=pair.a))
    assert (found.end_tokens, found.staging) == (768, 3)
    assert (staged.end_tokens, staged.peer_tokens, staged.disk_tokens) == (768, 768, 0)
    again = pair.b.lookup()  # now it is here
    assert (again.end_tokens, again.staging) == (768, 0)
    (peer,) = pair.b.store.stats(pair.now_ns).peers
    assert (peer.name, peer.asks, peer.hits, peer.objects) == (pair.a.address, 1, 1, 3)
    assert pair.a.store.stats(pair.now_ns).sends.objects == 3
    pair.b.ask(Release(5, [found.lease, again.lease]))
    assert pair.is_quiet()


def test_only_what_is_missing_is_pulled() -> None:
    pair = Pair()
    pair.b.save(0, 1, checksum=8)  # the same prompt, computed here: other bits
    pair.a.save(0, 1, 2)
    _, staged = found_and_staged(pair.b.lookup(source=pair.a))
    assert (staged.end_tokens, staged.peer_tokens) == (768, 256)
    assert pair.b.store.stats(pair.now_ns).quarantined.count == {}


def test_a_peer_that_has_lost_the_beginning_gives_the_rest() -> None:
    pair = Pair()
    pair.b.save(0, 1)
    pair.a.save(2, 3)
    _, staged = found_and_staged(pair.b.lookup(source=pair.a))
    assert (staged.end_tokens, staged.peer_tokens) == (1024, 512)


def test_a_state_alone_is_pulled_where_attention_is_here() -> None:
    pair = Pair(namespace=HYBRID)
    pair.b.save(0, 1)
    pair.a.save(0, 1)
    pair.a.save(1, groups=(1,))
    _, staged = found_and_staged(pair.b.lookup(source=pair.a))
    assert (staged.end_tokens, staged.peer_tokens) == (512, 256)
    assert pair.a.store.stats(pair.now_ns).sends.objects == 1


def test_a_belief_does_not_last() -> None:
    pair = Pair()
    pair.a.save(0)
    pair.held_pulls = []
    found = pair.b.lookup(source=pair.a)
    assert (found.end_tokens, found.staging) == (256, 1)
    pair.b.ask(Release(5, [found.lease]))
    (node, job), pair.held_pulls = pair.held_pulls[0], None
    pair.pull(node, job)  # it had begun; nobody waits for it any more
    pair.advance(11)
    assert pair.is_quiet()


def test_what_others_hold_is_not_present_for_a_save() -> None:
    pair = Pair()
    pair.a.save(0, 1)
    pair.held_pulls = []
    pair.b.lookup(source=pair.a)
    assert pair.b.save(0, checksum=8) == [PutStatus.WRITE]
    for node, job in pair.held_pulls:
        pair.pull(node, job)
    pair.settle()
    assert pair.b.store.stats(pair.now_ns).quarantined.count == {}
    assert pair.b.take().end_tokens == 512  # staged: its own copy of the first, the peer's of the second


def test_bytes_that_do_not_verify_are_no_hit_and_their_store_is_told() -> None:
    pair = Pair()
    pair.a.save(0, 1)
    pair.outcome = Outcome(code="KV-401")
    _, staged = found_and_staged(pair.b.lookup(source=pair.a))
    assert (staged.end_tokens, staged.reason) == (0, MissReason.CHECKSUM)
    pair.advance(6)
    assert pair.a.store.stats(pair.now_ns).quarantined.count == {"arena": 2}
    assert pair.a.lookup().end_tokens == 0
    assert pair.b.store.stats(pair.now_ns).quarantined.count == {"peers": 2}


def test_what_was_pulled_goes_to_disk_like_what_was_saved() -> None:
    pair = Pair(disk=True)
    pair.a.save(0)
    pair.b.lookup(source=pair.a)
    assert [tier.writes for tier in pair.b.store.stats(pair.now_ns).tiers] == [1, 0]


class TestPromises:
    def test_a_promised_boundary_is_waited_for_though_nobody_has_begun(self) -> None:
        pair = Pair()
        pair.a.save(0)
        assert pair.a.lookup(until_tokens=512, wait_ms=1_000) is None
        parent, length = CHAINS[0], DENSE.object_bytes(0, 0, CHUNK)
        slot = pair.a.ask(PutBegin(2, [PutObject(CHAINS[1], parent, 256, 512, 0, 0, length)])).slots[0]
        replies = pair.a.ask(PutEnd(3, [(slot.put, 7)]))
        (found,) = [reply for reply in replies if isinstance(reply, Found)]
        assert found.end_tokens == 512

    def test_the_wait_ends(self) -> None:
        pair = Pair()
        pair.a.save(0)
        assert pair.a.lookup(until_tokens=512, wait_ms=1_000) is None
        pair.advance(1.1)
        found = pair.a.take()
        assert (found.end_tokens, found.reason) == (256, MissReason.ABSENT)

    @pytest.mark.parametrize("is_early", [False, True])
    def test_a_withdrawn_promise_ends_it_at_once(self, is_early: bool) -> None:
        pair = Pair()
        half = Half(role=Role.PREFILL, reason="arena_full")
        if is_early:
            pair.a.ask(ReceiptFile(6, "t", half))
        found = pair.a.lookup(until_tokens=512, wait_ms=1_000, ticket="t")
        if not is_early:
            assert found is None
            replies = pair.a.ask(ReceiptFile(6, "t", half))
            (found,) = [reply for reply in replies if isinstance(reply, Found)]
        assert (found.end_tokens, found.withdrawn, found.reason) == (0, "arena_full", "arena_full")

    def test_it_is_waited_for_at_the_source(self) -> None:
        pair = Pair()
        pair.a.save(0)
        assert pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=1_000) is None
        pair.a.save(1)
        found, staged = found_and_staged(pair.b.take())
        assert (found.end_tokens, staged.peer_tokens) == (512, 512)

    def test_it_is_withdrawn_at_the_source(self) -> None:
        pair = Pair()
        assert pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=1_000, ticket="t") is None
        pair.a.ask(ReceiptFile(6, "t", Half(role=Role.PREFILL, reason="arena_full")))
        found = pair.b.take()
        assert (found.end_tokens, found.withdrawn, found.reason) == (0, "arena_full", "arena_full")

    def test_nobody_waits_for_what_was_quarantined(self) -> None:
        """Its writer believes that it is there."""
        pair = Pair()
        pair.a.save(0, 1)
        pair.outcome = Outcome(code="KV-401")
        pair.b.lookup(source=pair.a)
        pair.advance(6)
        found = pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=5_000)
        assert (found.end_tokens, found.reason) == (0, MissReason.CHECKSUM)
        pair.a.save(0, 1)
        pair.outcome = Outcome()
        _, staged = found_and_staged(pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=5_000))
        assert staged.end_tokens == 512

    def test_a_wait_ends_when_what_is_there_is_quarantined(self) -> None:
        pair = Pair()
        pair.a.save(0, 1)
        held = pair.a.lookup(limit_tokens=512)
        assert pair.a.lookup(until_tokens=768, wait_ms=5_000) is None
        pair.a.ask(Release(5, [held.lease], [(held.lease, 1, 0, 0)]))
        parent, length = CHAINS[1], DENSE.object_bytes(0, 0, CHUNK)
        slot = pair.a.ask(PutBegin(2, [PutObject(CHAINS[2], parent, 512, 768, 0, 0, length)])).slots[0]
        replies = pair.a.ask(PutEnd(3, [(slot.put, 7)]))
        (found,) = [reply for reply in replies if isinstance(reply, Found)]
        assert (found.end_tokens, found.reason) == (256, MissReason.CHECKSUM)

    def test_an_alarm_that_an_alarm_leads_to_is_not_forgotten(self) -> None:
        """A lookup whose wait ends gets a lease, and the store must wake up when that expires."""
        pair = Pair()
        pair.a.save(0)
        pair.a.lookup(until_tokens=512, wait_ms=1_000, lease_ms=50)
        pair.now_ns += 1_010_000_000
        next_ns = pair.a.store.tick(pair.now_ns)
        assert next_ns is not None
        assert next_ns - pair.now_ns <= 60_000_000

    def test_another_tickets_withdrawal_changes_nothing(self) -> None:
        pair = Pair()
        pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=1_000, ticket="t")
        pair.a.ask(ReceiptFile(6, "u", Half(role=Role.PREFILL, reason="arena_full")))
        assert pair.b.take() is None


class TestLostPeers:
    def test_a_dead_peer_costs_one_lookup_nothing(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.dead.add("a")
        found = pair.b.lookup(source=pair.a, until_tokens=256, wait_ms=1_000)
        assert (found.end_tokens, found.reason) == (0, MissReason.PEER_LOST)
        pair.dead.clear()
        assert pair.b.lookup(source=pair.a, until_tokens=256).reason == MissReason.PEER_LOST  # left alone for a second
        pair.advance(1.1)
        _, staged = found_and_staged(pair.b.lookup(source=pair.a))
        assert staged.end_tokens == 256

    def test_one_that_says_nothing_is_given_up_after_its_time(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.mute.add("a")
        assert pair.b.lookup(source=pair.a) is None
        pair.advance(0.8)
        assert pair.b.take() is None
        pair.advance(0.2)
        assert pair.b.take().reason == MissReason.PEER_LOST
        assert pair.b.lookup(source=pair.a).reason == MissReason.PEER_LOST  # at once

    def test_what_has_landed_is_used(self) -> None:
        pair = Pair()
        pair.a.save(0, 1, 2)
        pair.held_pulls = []
        pair.b.lookup(source=pair.a)
        first, *others = pair.held_pulls
        pair.pull(*first)
        pair.dead.add("a")
        for node, job in others:
            pair.pull(node, job)
        pair.settle()
        staged = pair.b.take()
        assert (staged.end_tokens, staged.reason, staged.peer_tokens) == (256, MissReason.PEER_LOST, 256)
        assert pair.b.store.stats(pair.now_ns).quarantined.count == {}

    def test_a_read_that_ends_after_its_peer_was_given_up_is_used(self) -> None:
        pair = Pair()
        pair.a.save(0, 1)
        pair.held_pulls = []
        pair.b.lookup(source=pair.a)
        first, second = pair.held_pulls
        pair.b.store.job_done(second[1], Outcome(code="KV-604"), pair.now_ns)
        pair.pull(*first)
        pair.settle()
        assert pair.b.take().end_tokens == 256

    def test_a_lost_link_voids_what_was_believed(self) -> None:
        pair = Pair()
        pair.a.save(0, 1)
        pair.held_pulls = []
        pair.b.lookup(source=pair.a)
        pair.b.store.peer_lost(PeerLink(pair.a.address, DENSE.digest), "KV-502", pair.now_ns)
        assert pair.b.store.stats(pair.now_ns).beliefs == 0
        for node, job in pair.held_pulls:
            node.store.job_done(job, Outcome(code="KV-604"), pair.now_ns)
        pair.settle()
        assert pair.b.take().reason == MissReason.PEER_LOST

    def test_nothing_is_asked_of_an_address_that_is_not_a_peers(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.allowed.clear()
        found = pair.b.lookup(source=pair.a, until_tokens=256)
        assert (found.end_tokens, found.reason) == (0, MissReason.FOREIGN_STORE)
        assert pair.b.store.stats(pair.now_ns).peers == []

    def test_a_cancelled_lookup_leaves_nothing_behind(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.b.lookup(source=pair.a, until_tokens=512, wait_ms=5_000)
        pair.b.store.disconnect(pair.b.session, pair.now_ns)
        pair.a.save(1)
        pair.advance(11)
        assert pair.is_quiet()


class TestLending:
    def test_peers_hold_a_quarter_of_the_arena_or_one_lease(self) -> None:
        size = 4 * DENSE.object_bytes(0, 0, CHUNK)
        pair = Pair(arena_bytes=3 * size)
        pair.a.save(0, 1, 2)
        pair.held_pulls = []
        assert pair.b.lookup(source=pair.a).end_tokens == 768  # the first may be larger
        other = pair.a.store.connect(shared_memory=False, is_peer=True, now_ns=pair.now_ns)
        pair.a.links["b", PeerLink("x", b"")] = other
        hello = Hello(1, PROTOCOL_VERSION, "peer", canonical(DENSE), peer=True)
        pair.a.store.handle(other, hello, pair.now_ns)
        pair.a.store.take_outbox()
        pair.a.store.handle(other, Lookup(5, b"".join(CHAINS), ENDS, 1024, hold=True), pair.now_ns)
        ((_, reply),) = pair.a.store.take_outbox()
        assert isinstance(reply, Found)
        assert (reply.end_tokens, reply.reason) == (0, MissReason.LIMIT)

    def test_an_object_stays_while_it_is_sent_whatever_becomes_of_its_lease(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.held_pulls = []
        pair.b.lookup(source=pair.a)
        ((_, job),) = pair.held_pulls
        assert job.place is not None
        pair.a.store.pull(1, Pull(9, job.place.lease, job.place.index, 0, 0), pair.now_ns)
        (send,) = pair.a.store.take_sends()
        used = pair.a.store.stats(pair.now_ns).arena.used_bytes
        pair.advance(11)
        pair.a.ask(Reset(8))
        assert pair.a.store.stats(pair.now_ns).arena.used_bytes == used > 0
        pair.a.store.sent(send, Outcome(code="KV-502"), pair.now_ns)
        assert pair.a.store.stats(pair.now_ns).arena.used_bytes == 0

    def test_a_pull_without_a_lease_gets_nothing(self) -> None:
        pair = Pair()
        pair.a.save(0)
        own = pair.a.lookup()
        for pull in (Pull(9, 12345, 0, 0, 0), Pull(9, own.lease, 0, 0, 0)):  # no such lease; an engine's lease
            pair.a.store.pull(1, pull, pair.now_ns)
            (send,) = pair.a.store.take_sends()
            assert (send.status, send.pieces) == (PullStatus.GONE, ())

    def test_a_peer_may_not_write(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.b.lookup(source=pair.a)
        (session,) = pair.a.links.values()
        pair.a.store.handle(session, PutBegin(2, []), pair.now_ns)
        ((_, reply),) = pair.a.store.take_outbox()
        assert isinstance(reply, Refused)
        assert reply.code == "KV-204"


class TestOffers:
    def test_chunks_are_pulled_as_they_are_committed(self) -> None:
        pair = Pair()
        assert pair.a.lookup(deliver=pair.b.address).end_tokens == 0
        for index in range(4):
            pair.a.save(index)
            pair.settle()
        assert pair.b.store.stats(pair.now_ns).arena.objects >= 3  # it may wait for several at once
        pair.advance(2.1)
        assert pair.b.store.stats(pair.now_ns).arena.objects == 4
        found = pair.b.lookup()
        assert (found.end_tokens, found.staging) == (1024, 0)

    def test_what_was_pulled_early_counts_as_pulled_for_its_hand_off(self) -> None:
        pair = Pair()
        pair.a.lookup(deliver=pair.b.address, ticket="t")
        pair.a.save(0, 1, 2, 3)
        pair.advance(2.1)
        found = pair.b.lookup(ticket="t")
        assert (found.end_tokens, found.staging, found.peer_tokens) == (1024, 0, 1024)
        again = pair.b.lookup(ticket="u")  # another request finds it in the arena
        assert (again.end_tokens, again.peer_tokens) == (1024, 0)

    def test_what_an_earlier_lease_of_the_hand_off_pulled_counts_too(self) -> None:
        pair = Pair()
        pair.a.save(0)
        _, staged = found_and_staged(pair.b.lookup(source=pair.a, ticket="t"))
        assert staged.peer_tokens == 256
        pair.a.save(1)
        pair.advance(1.1)
        _, staged = found_and_staged(pair.b.lookup(source=pair.a, ticket="t"))
        assert (staged.end_tokens, staged.peer_tokens) == (512, 512)

    def test_attention_of_a_hybrid_model_is_pulled_without_its_states(self) -> None:
        pair = Pair(namespace=HYBRID)
        pair.a.lookup(deliver=pair.b.address)
        pair.a.save(0, 1, 2, 3)
        pair.advance(2.1)
        assert pair.b.store.stats(pair.now_ns).arena.objects == 4

    def test_one_that_goes_no_further_is_given_up(self) -> None:
        pair = Pair()
        pair.a.lookup(deliver=pair.b.address)
        pair.a.save(0)
        for _ in range(40):
            pair.advance(1)
        assert pair.is_quiet()

    def test_it_ends_with_its_source(self) -> None:
        pair = Pair()
        pair.a.lookup(deliver=pair.b.address)
        pair.dead.add("a")
        pair.advance(3)
        pair.advance(11)
        assert pair.is_quiet()


class TestResets:
    def test_nothing_is_taken_from_a_peer_that_was_not_reset_as_well(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.b.ask(Reset(8))
        assert pair.b.lookup(source=pair.a).end_tokens == 0
        assert pair.a.lookup().end_tokens == 0
        pair.a.save(0)
        _, staged = found_and_staged(pair.b.lookup(source=pair.a, until_tokens=256, wait_ms=100))
        assert staged.end_tokens == 256

    def test_a_reset_ends_what_is_believed(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.held_pulls = []
        pair.b.lookup(source=pair.a)
        pair.b.ask(Reset(8))
        assert pair.b.store.stats(pair.now_ns).beliefs == 0
        for node, job in pair.held_pulls:
            node.store.job_done(job, Outcome(), pair.now_ns)
        pair.settle()
        assert pair.b.store.stats(pair.now_ns).arena.objects == 0

    def test_a_reset_while_one_is_under_way_is_carried_out_as_well(self) -> None:
        pair = Pair()
        pair.a.save(0)
        pair.b.lookup(source=pair.a)
        pair.mute.add("a")
        pair.b.ask(Reset(8))
        pair.b.ask(Reset(9))
        pair.mute.clear()
        pair.advance(1)
        pair.b.take()
        link = PeerLink(pair.a.address, DENSE.digest)
        first = pair.b.store._peers._links[link].resetting
        pair.b.store.peer_said(link, ResetDone(first, 1), pair.now_ns)  # of the first one
        assert pair.b.lookup(source=pair.a).end_tokens == 0
        assert pair.a.lookup().end_tokens == 0

    def test_a_reset_is_passed_on_once(self) -> None:
        """Both have peers that hold the other: without a name it would go round for ever."""
        pair = Pair()
        pair.a.save(0)
        pair.b.lookup(source=pair.a)
        pair.a.lookup(source=pair.b)
        pair.b.ask(Reset(8))
        pair.advance(1)
        assert pair.a.store._peers._resets[DENSE.digest] == pair.b.store._peers._resets[DENSE.digest]
        pair.a.save(0)
        assert pair.a.lookup().end_tokens == 256  # nobody takes it out again
        pair.advance(1)
        assert pair.a.lookup().end_tokens == 256
