"""A `Store` without sockets, driven by hostile peers. Requests go through real frames, jobs through tiers in memory.

What holds for the store whatever it is asked: no request raises, each one is answered exactly once within its bounds,
every reply can be encoded and fits into a frame, the invariants stand, and when everybody has gone nothing is left.
"""

from __future__ import annotations

import sys
from collections import Counter, deque

import msgspec

from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ObjectKey
from kvtally.core.namespace import Namespace
from kvtally.core.residency import each_bit
from kvtally.core.space import Piece, round_up
from kvtally.errors import TransportError
from kvtally.store.jobs import Job, Outcome, RemoveJob, WriteJob
from kvtally.store.mover import Mover
from kvtally.store.store import Store
from kvtally.store.tier_state import TierInfo, TierKind
from kvtally.store.tiers.base import Tier
from kvtally.store.tiers.disk import DiskTier
from kvtally.testing.tiers import MemoryDevice, MemoryTier
from kvtally.wire.frames import FrameReader, encode
from kvtally.wire.limits import KIB, SECOND_NS, Limits
from kvtally.wire.messages import PutObject, Refused, Reply, Request, Staged, Stats
from tests.chaos.processes import tree
from tests.fuzz.hostile import Dice, Hostile, frame_of

GRANULE = 4096
LIMITS = Limits(
    frame_bytes=256 * KIB,
    object_bytes=8 * GRANULE,
    clients=8,
    chains_per_lookup=64,
    objects_per_put=8,
    namespaces=6,
    leases_per_client=6,
    open_puts_per_client=12,
    waiting_per_client=3,
    lease_ns=SECOND_NS // 2,
    wait_ns=SECOND_NS // 4,
    write_behind_bytes=24 * GRANULE,
    receipts=16,
    receipt_ns=SECOND_NS,
)
ARENA_BYTES = 48 * GRANULE
REASONS = ("KV-401", "KV-402", "KV-600", "KV-601", "KV-602", "KV-603")


DECODER = msgspec.msgpack.Decoder(Request)  # made once: making one takes longer than reading a frame


def new_reader() -> FrameReader[Request]:
    return FrameReader(DECODER, LIMITS.frame_bytes)


class Peer:
    """One session of one process, and what it still waits for."""

    def __init__(self, rig: Rig, session: int) -> None:
        self.session = session
        self.unanswered = 0
        self.reader = new_reader()
        self.hostile = Hostile(Dice(rig.random.getrandbits(64)), rig.checksum)
        self.hostile.paths = rig.paths


class Rig:
    """The node. `step` is one request; whatever else happens, happens now and then in between."""

    def __init__(self, seed: int) -> None:
        self.random = Dice(seed)
        self.now_ns = 1
        self.seen: Counter[str] = Counter()
        self.arena = bytearray(self.random.randbytes(ARENA_BYTES))
        self.paths = Hostile(Dice(seed)).paths
        self.tiers: list[Tier] = [
            DiskTier(MemoryDevice(seed), 40 * GRANULE),
            MemoryTier(name="shared", enumerable=False),
        ]
        infos = [
            TierInfo(name="disk", capacity_bytes=40 * GRANULE),
            TierInfo(name="shared", capacity_bytes=None, kind=TierKind.POOL),
        ]
        self.store = Store(name="rig", version="0", arena_bytes=ARENA_BYTES, limits=LIMITS, tiers=infos)
        self._mover = Mover(self.tiers, self)  # type: ignore[arg-type] # of an arena it needs nothing but `views`
        self._writes: list[deque[Job]] = [deque(), deque()]  # each tier's, in order
        self._reads: list[Job] = []
        self._gone: list[int] = []  # sessions whose socket closed before their process ended
        self.peers: dict[int, Peer] = {}

    def step(self) -> None:
        random = self.random
        roll = random.random()
        if len(self.peers) < 6 and (not self.peers or roll < 0.05):
            self.connect()
        elif roll < 0.005:
            self.disconnect(random.choice(list(self.peers)))
        elif roll < 0.15:
            self.now_ns += random.choice((1000, 1_000_000, 30_000_000, 700_000_000 if roll < 0.01 else 1_000_000))
        elif roll < 0.45:
            self.run_job()
        if self._gone and roll < 0.02:
            self.store.writer_gone(self._gone.pop(), self.now_ns)
        self.ask(random.choice(list(self.peers.values())))
        self.flush()

    def connect(self) -> None:
        session = self.store.connect(shared_memory=self.random.random() < 0.9, now_ns=self.now_ns)
        peer = self.peers[session] = Peer(self, session)
        peer.unanswered += 1
        self.store.handle(session, peer.hostile.hello(), self.now_ns)

    def disconnect(self, session: int) -> None:
        del self.peers[session]
        if self.random.random() < 0.2:
            self.store.writer_gone(session, self.now_ns)  # it let go of its mapping first
            self.store.disconnect(session, self.now_ns)
        else:
            self.store.disconnect(session, self.now_ns)
            self._gone.append(session)

    def ask(self, peer: Peer) -> None:
        """One frame, sound or not. Whoever sends what is no message is cut off, now and then at once."""
        try:
            requests = peer.reader.feed(frame_of(peer.hostile))
        except TransportError:
            self.seen["cut off"] += 1
            peer.reader = new_reader()
            if self.random.random() < 0.01:
                self.disconnect(peer.session)
            return
        if not requests and self.random.random() < 0.7:
            peer.reader = new_reader()  # else all that follows would be the rest of half a frame
        for request in requests:
            peer.unanswered += 1
            self.seen[type(request).__name__] += 1
            self.store.handle(peer.session, request, self.now_ns)

    def flush(self) -> None:
        self.store.tick(self.now_ns)
        for session, reply in self.store.take_outbox():
            self._take(session, reply)
        for job in self.store.take_jobs():
            if isinstance(job, WriteJob | RemoveJob):
                self._writes[job.tier - 1].append(job)
            else:
                self._reads.append(job)

    def _take(self, session: int, reply: Reply) -> None:
        assert len(encode(reply)) <= LIMITS.frame_bytes, f"{type(reply).__name__} does not fit into a frame"
        self.seen[f"{type(reply).__name__} {reply.code}" if isinstance(reply, Refused) else type(reply).__name__] += 1
        peer = self.peers.get(session)
        if peer is None:
            return
        if not isinstance(reply, Staged):
            peer.unanswered -= 1
            assert peer.unanswered >= 0, "a request was answered twice"
        peer.hostile.saw(reply)

    # ---- tiers

    def run_job(self) -> None:
        queues = [queue for queue in self._writes if queue]
        if self._reads and (not queues or self.random.random() < 0.5):
            job = self._reads.pop(self.random.randrange(len(self._reads)))
        elif queues:
            job = self.random.choice(queues).popleft()
        else:
            return
        outcome = self._run(job) if self.random.random() < 0.97 else Outcome(code=self.random.choice(REASONS))
        self.seen[f"{type(job).__name__} {outcome.code}".rstrip()] += 1
        self.store.job_done(job, outcome, self.now_ns)

    def _run(self, job: Job) -> Outcome:
        return self._mover._outcome(self.tiers[job.tier - 1], job)

    def views(self, pieces: tuple[Piece, ...]) -> list[memoryview]:
        memory = memoryview(self.arena)
        return [memory[offset : offset + length] for offset, length in pieces]

    def checksum(self, namespace: Namespace, item: PutObject, pieces: list[int]) -> int:
        """What a writer that wrote nothing would have to commit with: the slot's bytes as they are."""
        if not 0 <= item.group < 1 << 32 or not 0 <= item.rank < 1 << 32:
            return 0  # a request that cannot have been granted was, so somebody repaired it on its way
        key = ObjectKey(namespace.digest, item.chain, item.group, item.rank)
        views = self.views(tuple(Piece(*run) for run in zip(pieces[::2], pieces[1::2], strict=True)))
        return object_checksum(key, item.length_bytes, views)

    def check(self) -> None:
        self.store.check()
        residency = self.store._residency
        for tier in range(1, residency.tiers):
            held = [
                residency.length_bytes(node, bit)
                for family in (*residency.families.values(), *residency.forgotten)
                for node in family.nodes.values()
                for bit in each_bit(residency.tier_mask(node, tier))
            ]
            assert residency.lower_bytes[tier] == sum(map(round_up, held)), "a tier's bytes are miscounted"

    # ---- the end

    def rest(self) -> None:
        """Everybody waits for the last answer, then leaves."""
        for _ in range(8):
            self._settle()
        late = {peer.session: peer.unanswered for peer in self.peers.values() if peer.unanswered}
        assert not late, f"requests were never answered: {late}"
        for session in list(self.peers):
            self.disconnect(session)
        for session in self._gone:
            self.store.writer_gone(session, self.now_ns)
        self._gone.clear()
        for _ in range(8):
            self._settle()
        self.check()
        stats = msgspec.to_builtins(self.store.stats(self.now_ns))
        encode(Stats(1, stats))
        wanted = (("arena", "limbo_bytes"), ("arena", "staging_bytes"), ("leases", "open"), ("lookups", "waiting"))
        assert [tree(stats, *path) for path in wanted] == [0] * 4
        assert stats["clients"] == []
        for namespace in tree(stats, "namespaces"):
            self.store.reset(bytes.fromhex(namespace["digest"]), self.now_ns)
        self._settle()
        self.check()
        emptied = msgspec.to_builtins(self.store.stats(self.now_ns))
        assert (tree(emptied, "arena", "objects"), tree(emptied, "arena", "used_bytes")) == (0, 0)

    def _settle(self) -> None:
        self.now_ns += SECOND_NS
        self.flush()
        while self._reads or any(self._writes):
            self.run_job()
            self.flush()


def live(seed: int, frames: int) -> Counter[str]:
    """One life of the rig; what happened in it. Whatever goes wrong carries the seed."""
    rig = Rig(seed)
    try:
        for number in range(frames):
            rig.step()
            if number % 500 == 0:
                rig.check()
        rig.rest()
    except BaseException as error:
        error.add_note(f"again with: python -m tests.fuzz.rig {seed} {frames}")
        raise
    return rig.seen


if __name__ == "__main__":
    print(dict(live(int(sys.argv[1]), int(sys.argv[2]))))
