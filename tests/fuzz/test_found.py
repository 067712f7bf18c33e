"""What fuzzing found once, each alone and as small as it gets. None of it may come back."""

from __future__ import annotations

import msgspec
from msgspec import structs

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_value
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.receipts import Half, Role
from kvtally.store.jobs import Job, Outcome, ReadJob, RemoveJob, WriteJob
from kvtally.store.receipts import HALF_TEXT_BYTES
from kvtally.store.store import Store, TierInfo
from kvtally.store.tiers.base import ObjectRecord
from kvtally.wire.frames import encode
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Found,
    Hello,
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
    Refused,
    Release,
    Reply,
    Request,
    Reset,
    ResetDone,
    Staged,
    Stats,
    Welcome,
)
from tests.work import opcodes

GRANULE = 4096
FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=64, page_bytes=((GRANULE,),))
STATE = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=64, page_bytes=((GRANULE,),))
PLAIN = Namespace(model="plain", groups=(FULL,), chunk_tokens=64, alignment_tokens=16)
HYBRID = Namespace(model="hybrid", groups=(FULL, STATE), chunk_tokens=64, alignment_tokens=16)
DISK = TierInfo(name="disk", capacity_bytes=1 << 30)


def chain(number: int, parent: bytes = ROOT_CHAIN) -> bytes:
    return chain_value(parent, number.to_bytes(4, "little") * 64)


def record(namespace: Namespace, own: bytes, parent: bytes, start: int, group: int = 0) -> ObjectRecord:
    """What a tier holds: an object of one granule. Its checksum is not looked at here."""
    return ObjectRecord(
        namespace=namespace,
        chain=own,
        parent=parent,
        start_tokens=start,
        end_tokens=start + 64,
        group=group,
        rank=0,
        length_bytes=GRANULE,
        checksum=object_checksum(ObjectKey(namespace.digest, own, group, 0), GRANULE, [memoryview(bytes(GRANULE))]),
    )


class Node:
    """A store and its jobs, which end when the test says so."""

    def __init__(self, *records: ObjectRecord, granules: int = 16, limits: Limits | None = None) -> None:
        self.store = Store(
            name="n", version="0", arena_bytes=granules * GRANULE, limits=limits or Limits(), tiers=[DISK]
        )
        for known in records:
            self.store.recover(1, known)
        self.now_ns = 0
        self.jobs: list[Job] = []

    def connect(self, namespace: Namespace) -> int:
        session = self.store.connect(shared_memory=True, now_ns=self.now_ns)
        (reply,) = self.ask(session, Hello(1, PROTOCOL_VERSION, "test", canonical(namespace)))
        assert isinstance(reply, Welcome)
        return session

    def ask(self, session: int, request: Request) -> list[Reply]:
        self.store.handle(session, request, self.now_ns)
        return self._effects()

    def finish(self, code: str = "") -> list[Reply]:
        """Let the next job end."""
        self.store.job_done(self.jobs.pop(0), Outcome(code=code), self.now_ns)
        return self._effects()

    def fail_reads(self, session: int, damaged: list[bytes]) -> None:
        """Several objects in a row cannot be read, so the tier is left alone; their removals succeed."""
        for own in damaged:
            self.ask(session, Lookup(3, own, [64], 64, hold=True))
        for _ in damaged:
            self.finish("KV-602")
        while self.jobs:
            self.finish()

    def _effects(self) -> list[Reply]:
        self.jobs += self.store.take_jobs()
        return [reply for _, reply in self.store.take_outbox()]

    def begin(self, session: int, own: bytes) -> int:
        (reply,) = self.ask(session, PutBegin(2, [PutObject(own, ROOT_CHAIN, 0, 64, 0, 0, GRANULE)]))
        assert isinstance(reply, PutSlots)
        assert reply.slots[0].status == PutStatus.WRITE
        return reply.slots[0].put


def test_staging_a_lower_boundary_instead_ends_when_the_arena_is_full() -> None:
    """It went round for ever: the first failure's reason stayed, so each "arena full" was a reason to try again."""
    first, second, other = chain(1), chain(2, chain(1)), chain(3)
    node = Node(
        record(HYBRID, first, ROOT_CHAIN, 0),
        record(HYBRID, first, ROOT_CHAIN, 0, group=1),
        record(HYBRID, second, first, 64),
        record(HYBRID, second, first, 64, group=1),
        record(PLAIN, other, ROOT_CHAIN, 0),
        granules=12,
        limits=Limits(staging_bytes=GRANULE),
    )
    hybrid, plain, writers = node.connect(HYBRID), node.connect(PLAIN), [node.connect(PLAIN), node.connect(PLAIN)]
    node.ask(hybrid, Lookup(3, first + second, [64, 128], 128, hold=True))
    node.ask(hybrid, Lookup(5, first + second, [64, 128], 128, have=[0, 128], hold=True))  # keeps attention there
    assert node.finish() == []
    assert len(node.finish()) == 1
    node.ask(plain, Lookup(4, other, [64], 64, hold=True, priority=-1))
    for number in range(9):  # the rest of the arena
        node.begin(writers[number % 2], chain(10 + number))
    assert node.finish("KV-401") == []  # the state does not verify, and is removed
    # The state one boundary before would do, but somebody else's object takes the place in the arena that is left.
    assert isinstance(node.jobs.pop(0), RemoveJob)
    replies = node.finish()
    assert [(reply.end_tokens, reply.reason) for reply in replies if isinstance(reply, Staged)] == [
        (64, ""),
        (0, MissReason.CHECKSUM),
    ]
    assert node.jobs == []
    node.store.check()


def test_what_was_staged_while_it_was_being_written_is_kept_once() -> None:
    """The tier could not be read when the put began, and could again before it ended: the slot was leaked."""
    wanted, damaged = chain(1), [chain(2), chain(3)]
    node = Node(*[record(PLAIN, own, ROOT_CHAIN, 0) for own in (wanted, *damaged)])
    session = node.connect(PLAIN)
    node.fail_reads(session, damaged)
    put = node.begin(session, wanted)
    node.now_ns += 2 * SECOND_NS
    node.ask(session, Lookup(4, wanted, [64], 64, hold=True))
    assert isinstance(node.finish()[0], Staged)
    assert node.ask(session, PutEnd(5, [(put, 77)])) == [PutEnded(5, 1)]
    node.store.check()
    assert node.store.stats(0).arena.objects == 1


def test_bytes_computed_anew_replace_the_copy_in_a_tier_that_came_back() -> None:
    """The index has one checksum for all copies of an object: the old one would have failed it, and been miscounted."""
    wanted, damaged = chain(1), [chain(2), chain(3)]
    node = Node(*[record(PLAIN, own, ROOT_CHAIN, 0) for own in (wanted, *damaged)])
    session = node.connect(PLAIN)
    node.fail_reads(session, damaged)
    put = node.begin(session, wanted)
    node.now_ns += 2 * SECOND_NS
    node.ask(session, PutEnd(5, [(put, 77)]))
    assert [type(job) for job in node.jobs] == [RemoveJob, WriteJob]
    node.finish()
    node.finish()
    assert node.store.stats(0).tiers[0].used_bytes == GRANULE
    node.store.check()


def test_a_boundary_named_twice_is_found_once() -> None:
    """One object was waited for twice by one lease, and the second time its lease was gone."""
    known = chain(1)
    node = Node(record(PLAIN, known, ROOT_CHAIN, 0))
    session = node.connect(PLAIN)
    (found,) = node.ask(session, Lookup(3, known * 2, [64, 128], 128, hold=True))
    assert isinstance(found, Found)
    assert (found.end_tokens, found.staging, [type(job) for job in node.jobs]) == (64, 1, [ReadJob])
    assert len(node.finish("KV-603")) == 1
    node.store.check()


def test_a_chain_value_at_another_length_is_absent() -> None:
    node = Node(record(PLAIN, chain(1), ROOT_CHAIN, 0))
    session = node.connect(PLAIN)
    (found,) = node.ask(session, Lookup(3, chain(1), [80], 80))
    assert isinstance(found, Found)
    assert (found.end_tokens, found.presence) == (0, [b"\0"])


def test_a_bad_report_about_a_group_that_is_not_there_is_ignored() -> None:
    node = Node()
    session = node.connect(PLAIN)
    put = node.begin(session, chain(1))
    node.ask(session, PutEnd(3, [(put, 77)]))
    (found,) = node.ask(session, Lookup(4, chain(1), [64], 64, hold=True))
    assert isinstance(found, Found)
    bad = [(found.lease, 0, group, rank) for group in (-1, 1, 1 << 63) for rank in (0, -1, 1)]
    assert node.ask(session, Release(5, [], bad)) == [Done(5)]
    assert node.store.stats(0).quarantined.count == {}


def test_no_lookup_makes_stats_unreadable() -> None:
    """Tokens asked for were summed up unseen, until the sum was no number of msgpack's."""
    node = Node()
    session = node.connect(PLAIN)
    for end in ((1 << 64) - 1, (1 << 32) - 1):
        for limit in ((1 << 64) - 1, -(1 << 63)):
            for _ in range(3):
                node.ask(session, Lookup(3, chain(1), [end], limit))
    encode(Stats(1, msgspec.to_builtins(node.store.stats(0))))


def test_two_fetches_with_one_id_are_both_answered() -> None:
    """The one that was to wait longer was taken for the other, which then waited for ever."""
    node = Node()
    session = node.connect(PLAIN)
    assert node.ask(session, ReceiptGet(7, "t", wait_ms=500)) == []
    assert node.ask(session, ReceiptGet(7, "t", wait_ms=100)) == []
    node.now_ns = SECOND_NS
    node.store.tick(node.now_ns)
    assert [reply for _, reply in node.store.take_outbox()] == [Receipts(7, [])] * 2


def test_a_namespace_that_is_no_text_is_refused() -> None:
    node = Node()
    session = node.store.connect(shared_memory=True, now_ns=0)
    description = canonical(PLAIN).replace(b"plain", b"pl\xff\xfen")
    (refused,) = node.ask(session, Hello(1, PROTOCOL_VERSION, "test", description))
    assert isinstance(refused, Refused)
    assert refused.code == "KV-202"


def test_a_report_of_many_bad_objects_takes_little_for_each() -> None:
    """Each was looked for among all that the lease holds: one frame stopped the store for minutes."""
    node = Node(granules=2100)
    session = node.connect(PLAIN)
    path: list[bytes] = []
    for index in range(2000):
        parent = path[-1] if path else ROOT_CHAIN
        path.append(chain(index, parent))
        span = (64 * index, 64 * index + 64)
        (reply,) = node.ask(session, PutBegin(2, [PutObject(path[-1], parent, *span, 0, 0, GRANULE)]))
        assert isinstance(reply, PutSlots)
        node.ask(session, PutEnd(3, [(reply.slots[0].put, 7)]))
    ends = list(range(64, 64 * 2001, 64))

    def cost(times: int) -> int:
        (found,) = node.ask(session, Lookup(4, b"".join(path), ends, ends[-1], hold=True))
        assert isinstance(found, Found)
        bad = [(found.lease, index, 0, 0) for index in (1999, -1, 2000, 1 << 40)] * times

        def report() -> None:
            assert node.ask(session, Release(5, [found.lease], bad)) == [Done(5)]

        return opcodes(report)

    cost(1)
    assert node.store.stats(0).quarantined.count == {"arena": 1}
    assert cost(2000) - cost(1000) < 4000 * 150
    node.store.check()


def test_receipts_are_as_short_as_one_frame_needs_them() -> None:
    """A half could have megabytes of text, and a thousand receipts were to fit into one reply."""
    node = Node()
    session = node.connect(PLAIN)
    most = HALF_TEXT_BYTES
    for text, kind in (("x" * (most + 1), Refused), ("é" * (most // 2 + 1), Refused), ("é" * (most // 2), Done)):
        half = Half(role=Role.DECODE, reason=text)
        assert [type(reply) for reply in node.ask(session, ReceiptFile(1, "t", half))] == [kind]
    for index in range(1000):
        for role in Role:
            half = Half(role=role, reason="x" * HALF_TEXT_BYTES, prompt_tokens=1 << 63, moved_bytes=1 << 63)
            node.ask(session, ReceiptFile(1, f"{index:0128d}", half))
    (reply,) = node.ask(session, ReceiptGet(2, last=1000))
    assert isinstance(reply, Receipts)
    assert len(reply.receipts) == 1000
    assert len(encode(reply)) < Limits().frame_bytes


def test_a_ticket_that_nobody_can_file_is_not_waited_for() -> None:
    node = Node()
    session = node.connect(PLAIN)
    assert node.ask(session, ReceiptGet(1, "x" * 1_000_000, wait_ms=1000)) == [Receipts(1, [])]


def test_namespaces_that_are_empty_and_unused_make_way() -> None:
    """A reset was named as the remedy, and did not help."""
    node = Node(limits=Limits(namespaces=2))
    names = iter(structs.replace(PLAIN, model=f"m{index}") for index in range(9))
    kept = node.connect(next(names))
    node.begin(kept, chain(1))
    gone = node.connect(next(names))
    put = node.begin(gone, chain(1))
    node.ask(gone, PutEnd(3, [(put, 7)]))
    hello = Hello(1, PROTOCOL_VERSION, "test", canonical(next(names)))
    third = node.store.connect(shared_memory=True, now_ns=0)
    assert isinstance(node.ask(third, hello)[0], Refused)
    replies = node.ask(gone, Reset(4))
    while node.jobs:
        replies += node.finish()
    assert replies == [ResetDone(4, 1)]
    assert isinstance(node.ask(third, hello)[0], Refused), "somebody is still here"
    node.store.disconnect(gone, 0)
    assert isinstance(node.ask(third, hello)[0], Welcome)
    assert isinstance(node.ask(kept, Ping(1))[0], Done)
    node.store.check()


def test_one_incident_is_one_reason_to_pause() -> None:
    """Each of the writes that were queued when the disk failed doubled the pause: a moment cost a minute."""
    node = Node(granules=80)
    session = node.connect(PLAIN)
    for number in range(20):
        put = node.begin(session, chain(number))
        node.ask(session, PutEnd(3, [(put, 7)]))
    assert len(node.jobs) == 20
    while node.jobs:
        node.finish("KV-602")
    node.now_ns += 2 * SECOND_NS
    put = node.begin(session, chain(20))
    node.ask(session, PutEnd(3, [(put, 7)]))
    assert [type(job) for job in node.jobs] == [WriteJob]
