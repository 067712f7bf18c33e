"""What once broke where others change a tier, five ways, with real bytes: two stores over one shared tier, or as peers.

No threads and no clock: each test carries out the stores' jobs itself, so it also decides which of them hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.errors import KVTallyError, TierError
from kvtally.store import beliefs
from kvtally.store.jobs import FindJob, Job, Outcome, PeerLink, ReadJob, WriteJob
from kvtally.store.mover import read_verified
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.store.tiers.base import ObjectRecord
from kvtally.testing.sim_client import content
from kvtally.testing.tiers import MemoryTier
from kvtally.wire.limits import SECOND_NS, Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    MissReason,
    PutBegin,
    PutEnd,
    PutObject,
    PutSlots,
    PutStatus,
    Release,
    Request,
    Staged,
)

CHUNK = 64
LENGTH = 4096
NAMESPACE = Namespace(
    model="m",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((LENGTH // 4,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)
PEER = "tcp://peer:7400"
POOL_INFO = TierInfo(name="pool", capacity_bytes=None, kind=TierKind.POOL)
DISK_INFO = TierInfo(name="disk", capacity_bytes=1 << 30)
PEERS_INFO = TierInfo(name="peers", capacity_bytes=None, kind=TierKind.PEERS)


def chain_of(prompt: int) -> bytes:
    """Prompts are numbers, and one chunk long."""
    return (prompt + 1).to_bytes(32, "little")  # 0 is the root's


def key_of(prompt: int) -> ObjectKey:
    return ObjectKey(NAMESPACE.digest, chain_of(prompt), 0, 0)


class Pool(MemoryTier):
    """A shared tier that names its values by their content, as every pool must: what somebody else writes under the
    same key is another value."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[ObjectKey, int], bytes] = {}

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        super().write(record, source)
        self.values[record.key, record.checksum] = b"".join(source)

    def read(self, record: ObjectRecord, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        data = self.values.get((record.key, record.checksum))
        if data is None:
            raise TierError("the pool does not hold this value", remedy="It is recomputed.", code="KV-603")
        (view,) = target
        view[:] = data
        landed(view)


class Machine:
    """One store with its arena, one engine, and a lower tier that is this store's own or shared with others."""

    def __init__(self, info: TierInfo, tier: MemoryTier | None = None, *, arena_bytes: int = 64 * LENGTH) -> None:
        self.now_ns = 1
        self.arena = bytearray(arena_bytes)
        self.tier = tier
        self.does: Callable[[Job], bool] = lambda job: True  # whether the tier carries a job out, or hangs with it
        self.finds = 0
        self.asked: list[tuple[PeerLink, Request]] = []
        self.store = Store(
            name="store",
            version="0",
            arena_bytes=arena_bytes,
            limits=Limits(),
            tiers=(info,),
            address="tcp://here:7400",
            may_ask=lambda address: address == PEER,
        )
        self.session = self.store.connect(shared_memory=True, now_ns=1)
        self.ask(Hello(1, PROTOCOL_VERSION, "engine", canonical(NAMESPACE)))

    def advance(self, seconds: float) -> None:
        """Time passes, alarm by alarm."""
        until_ns = self.now_ns + round(seconds * SECOND_NS)
        while (next_ns := self.store.tick(self.now_ns)) is not None and next_ns <= until_ns:
            self.now_ns = max(next_ns, self.now_ns + 1)
            self.work()
        self.now_ns = until_ns
        self.work()

    def work(self) -> None:
        """Carry out what the store wants, until it wants nothing more."""
        self.store.tick(self.now_ns)
        while jobs := self.store.take_jobs():
            for job in jobs:
                self.finds += isinstance(job, FindJob)
                if self.does(job):
                    self.store.job_done(job, self._outcome(job), self.now_ns)
        self.asked += self.store.take_peer_messages()
        self.store.check()

    def _outcome(self, job: Job) -> Outcome:
        assert self.tier is not None
        memory = memoryview(self.arena)
        try:
            if isinstance(job, FindJob):
                return Outcome(found=tuple(self.tier.ask(job.namespace, job.boundaries)))
            if isinstance(job, WriteJob | ReadJob):
                views = [memory[piece.offset : piece.offset + piece.length] for piece in job.pieces]
                if isinstance(job, WriteJob):
                    self.tier.write(job.record, views)
                elif not read_verified(self.tier, job.record, views):
                    return Outcome(code="KV-401")
            else:
                self.tier.remove(job.keys)
        except KVTallyError as error:
            return Outcome(code=error.code)
        return Outcome()

    def ask(self, request: Request) -> list[object]:
        """Ask, and let everything happen that does not hang. Returns what the engine was told meanwhile."""
        self.store.handle(self.session, request, self.now_ns)
        self.work()
        return self.heard()

    def heard(self) -> list[object]:
        return [reply for session, reply in self.store.take_outbox() if session == self.session]

    def save(self, prompt: int, variant: int = 0) -> PutStatus:
        item = PutObject(chain_of(prompt), ROOT_CHAIN, 0, CHUNK, 0, 0, LENGTH)
        (slots,) = self.ask(PutBegin(2, [item]))
        assert isinstance(slots, PutSlots)
        (slot,) = slots.slots
        if slot.status == PutStatus.WRITE:
            data = content(key_of(prompt), LENGTH, variant)
            offset, length = slot.pieces
            self.arena[offset : offset + length] = data
            self.ask(PutEnd(3, [(slot.put, object_checksum(key_of(prompt), LENGTH, [memoryview(data)]))]))
        return PutStatus(slot.status)

    def load(self, prompt: int, source: str = "") -> tuple[int, str]:
        """Look a prompt up and give it back: how many tokens were promised in the end, and why no more."""
        replies = self.look(prompt, source)
        found = next(reply for reply in replies if isinstance(reply, Found))
        staged = next((reply for reply in replies if isinstance(reply, Staged)), None)
        if found.lease:
            self.ask(Release(5, [found.lease]))
        return (found.end_tokens, found.reason) if staged is None else (staged.end_tokens, staged.reason)

    def look(self, prompt: int, source: str = "") -> list[object]:
        return self.ask(Lookup(4, chain_of(prompt), [CHUNK], CHUNK, hold=True, source=source))

    def evict_all(self) -> None:
        """Fill the arena with other prompts."""
        for other in range(len(self.arena) // LENGTH):
            self.save(1_000_000 + other)

    @property
    def quarantined(self) -> int:
        return self.store._context.counts.quarantined.total()

    @property
    def objects(self) -> int:
        """In the index."""
        return sum(family.objects for family in self.store._residency.families.values())


# ---- 1: bytes of one identity differ between nodes, and none of them is corrupt


@pytest.mark.parametrize("seconds", [0, 6])
def test_another_nodes_bits_are_not_corruption(seconds: float) -> None:
    pool = Pool()
    a, b = Machine(POOL_INFO, pool), Machine(POOL_INFO, pool)
    assert a.save(1, variant=1) is PutStatus.WRITE
    assert b.save(1, variant=2) is PutStatus.WRITE
    assert pool.objects[key_of(1)][1] == content(key_of(1), LENGTH, 2)  # asked now, the pool speaks of B's bytes
    a.evict_all()
    a.advance(seconds)
    assert a.load(1) == (CHUNK, "")  # at once by what A believes of its own bytes, later by what the pool says
    assert a.quarantined == b.quarantined == 0
    assert len([value for value in pool.values if value[0] == key_of(1)]) == 2  # nobody has deleted the other's copy


def test_a_value_that_is_gone_is_not_corruption() -> None:
    pool = Pool()
    machine = Machine(POOL_INFO, pool)
    machine.save(1)
    machine.evict_all()
    pool.values.clear()
    assert machine.load(1) == (0, MissReason.ABSENT)
    assert machine.quarantined == 0


def test_bits_that_flip_in_a_shared_tier_are_corruption() -> None:
    pool = Pool()
    machine = Machine(POOL_INFO, pool)
    machine.save(1)
    machine.evict_all()
    for name, data in pool.values.items():
        pool.values[name] = bytes([data[0] ^ 1]) + data[1:]
    assert machine.load(1) == (0, MissReason.CHECKSUM)
    assert machine.quarantined == 1


# ---- 2: what others may have lost is not "present" for a save


@pytest.mark.parametrize("info", [POOL_INFO, DISK_INFO])
def test_a_save_is_present_only_by_what_is_this_stores_own(info: TierInfo) -> None:
    tier = MemoryTier()
    machine = Machine(info, tier)
    machine.save(1)
    machine.evict_all()
    tier.objects.clear()  # the tier loses everything, and says nothing
    if info is POOL_INFO:
        assert machine.save(1) is PutStatus.WRITE
        assert machine.load(1) == (CHUNK, "")
    else:  # the control: nobody else changes a disk, so what was written there counts until a read fails
        assert machine.save(1) is PutStatus.PRESENT
        assert machine.load(1) == (0, MissReason.ABSENT)
        assert machine.save(1) is PutStatus.WRITE


# ---- 3: what others hold does not fill this store's index


@pytest.mark.parametrize("info", [POOL_INFO, DISK_INFO])
def test_the_index_holds_what_is_its_own_and_a_bounded_rest(info: TierInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beliefs, "MOST_BOUNDARIES", 100)
    machine = Machine(info, MemoryTier())
    room = len(machine.arena) // LENGTH
    for prompt in range(400):
        machine.save(prompt)
        if info is POOL_INFO:
            assert machine.objects <= room + 100
    assert machine.objects == 400 if info is DISK_INFO else machine.objects <= room + 100
    machine.advance(6)
    assert machine.objects == (400 if info is DISK_INFO else room)


# ---- 4: the same question is not asked again and again


def test_a_shared_tier_is_asked_for_a_missing_prompt_once_a_second() -> None:
    machine = Machine(POOL_INFO, MemoryTier())
    for _ in range(20):
        assert machine.load(1) == (0, MissReason.ABSENT)
    assert machine.finds == 1
    machine.advance(1.1)
    machine.load(1)
    assert machine.finds == 2


def test_a_peer_is_asked_for_a_missing_prompt_once_a_second() -> None:
    machine = Machine(PEERS_INFO)
    for _ in range(20):
        machine.look(1, PEER)
        while machine.asked:
            link, request = machine.asked.pop()
            machine.finds += isinstance(request, Lookup)
            machine.store.peer_said(link, Found(request.id, 0, reason=MissReason.ABSENT), machine.now_ns)
        (found,) = machine.heard() or [None]
    assert machine.finds == 1
    assert found is None  # the others were answered at once, inside `look`
    machine.advance(1.1)
    machine.look(1, PEER)
    assert len(machine.asked) == 1


# ---- 5: of many lookups against one that hangs, one waits


def waits(machine: Machine, source: str = "") -> list[float]:
    """How long each of 20 lookups waits for its answer, one after the other, in seconds."""
    waited = []
    for prompt in range(20):
        began_ns = machine.now_ns
        replies = machine.look(prompt, source)
        while not replies:
            machine.advance(0.01)
            replies = machine.heard()
        (found,) = replies
        assert isinstance(found, Found)
        assert found.reason in (MissReason.UNASKED, MissReason.PEER_LOST, MissReason.ABSENT)
        waited.append((machine.now_ns - began_ns) / SECOND_NS)
    return waited


def test_a_shared_tier_that_hangs_is_waited_for_once() -> None:
    machine = Machine(POOL_INFO, MemoryTier())
    machine.does = lambda job: not isinstance(job, FindJob)
    first, *others = waits(machine)
    assert 0.2 <= first <= 0.22
    assert others == [0.0] * 19
    assert machine.load(100) == (0, MissReason.UNASKED)  # nobody knows whether it is there
    assert machine.store.health(machine.now_ns).tiers == {"pool": "not-answering"}
    machine.advance(2)
    assert 0.2 <= waits(machine)[0] <= 0.22  # after a pause it is tried again


def test_a_shared_tier_that_answers_is_not_waited_for() -> None:
    machine = Machine(POOL_INFO, MemoryTier())
    assert waits(machine) == [0.0] * 20
    assert machine.load(100) == (0, MissReason.ABSENT)
    assert machine.store.health(machine.now_ns).tiers == {"pool": "ok"}


def test_a_peer_that_hangs_is_waited_for_once() -> None:
    machine = Machine(PEERS_INFO)
    first, *others = waits(machine, PEER)
    assert 0.9 <= first <= 0.92
    assert others == [0.0] * 19
    machine.advance(2)
    assert 0.9 <= waits(machine, PEER)[0] <= 0.92
