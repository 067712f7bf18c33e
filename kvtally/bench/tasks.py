"""The measuring process of `kvtally bench store`: a task takes one sample, of a figure or its limit.

Owns what is timed and what is not; `bench.store` decides what is measured when, and against what. A task is so small
that samples of a limit and of ours can alternate, and a noisy neighbour disturbs both. Every byte that was read is
compared with what was written, outside the timed part: a fast wrong answer is an error.

`TaskWorker` is the bench's end of the process; the rest runs in it. Neighbours: `store` (left: the plan), `client`
(right: what is measured). One thread on one core, like the limits it is compared with.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtally.bench.daemon import answer, hit, read_state
from kvtally.client import Call, Miss, question
from kvtally.client import Put as WriteSlot
from kvtally.core.keys import ROOT_CHAIN, chain_values, chunk_ends, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import TransportError
from kvtally.processes import Worker, serve
from kvtally.testing.copying import CopyingClient
from kvtally.wire.limits import KIB, MIB, SECOND_NS
from kvtally.wire.messages import PutObject, PutStatus

CHUNK_TOKENS = 256
PROMPT_TOKENS = 16_384
OBJECT_BYTES = 2 * MIB
SMALL_BYTES = 4 * KIB  # one granule: objects that only fill the index
FIRST_BATCH = 4  # objects of a set's first put
COMMIT = 20  # objects that are committed together
FILL_PROMPTS = 8  # 256 objects each; two batches are half of the puts that a client may have open
VOCABULARY = 150_000
PATIENCE_S = 60.0
RECEIVED_BYTES = 256 * KIB  # at once, as a store does
TASK_S = 300.0  # the longest task fills an index with a million objects

Tokens: TypeAlias = "array[int]"  # not subscriptable at run time before Python 3.12


class Shape(StrEnum):
    """The kinds of engine that are imitated."""

    BULK = "bulk"  # full attention, 2 MiB for a chunk
    DENSE = "dense"  # full attention, one granule for a chunk
    HYBRID = "hybrid"  # full attention and three kinds of recurrent state, one granule for each


def namespace_of(shape: Shape) -> Namespace:
    size = OBJECT_BYTES if shape is Shape.BULK else SMALL_BYTES
    full = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((size // (CHUNK_TOKENS // 16),),))
    state = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK_TOKENS, page_bytes=((size,),))
    groups = (full, state, state, state) if shape is Shape.HYBRID else (full,)
    return Namespace(model=f"bench {shape}", groups=groups, chunk_tokens=CHUNK_TOKENS, alignment_tokens=16)


def prompt(seed: int, length_tokens: int = PROMPT_TOKENS) -> Tokens:
    """The same tokens for the same seed, in every process."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, length_tokens, dtype=np.uint32)
    return array("I", tokens.tobytes())


def objects_of(namespace: Namespace, tokens: Tokens, boundaries: int) -> list[PutObject]:
    """All groups' objects at a prompt's first boundaries."""
    ends = chunk_ends(len(tokens), CHUNK_TOKENS)[:boundaries]
    found = []
    parent = ROOT_CHAIN
    for end, chain in zip(ends, chain_values(token_bytes(tokens), ends), strict=True):
        for group in range(len(namespace.groups)):
            size = namespace.object_bytes(group, 0, CHUNK_TOKENS)
            found.append(PutObject(chain, parent, end - CHUNK_TOKENS, end, group, 0, size))
        parent = chain
    return found


class Bench:
    """What the process keeps between tasks: its clients, and memory to copy from and to."""

    def __init__(self) -> None:
        self.clients: dict[str, tuple[CopyingClient, Namespace]] = {}
        self.source: NDArray[np.uint8] = np.zeros((0, OBJECT_BYTES), dtype=np.uint8)  # one row for each object
        self.target = self.source
        self.listener: socket.socket | None = None

    @property
    def size_bytes(self) -> int:
        return self.source.size

    def set_prompt(self, number: int) -> Tokens:
        """The prompt whose chunks are one set of objects, and one token more: a hit leaves one to compute."""
        return prompt(number, len(self.source) * CHUNK_TOKENS + 1)

    def blank(self) -> None:
        """Spoil the target, so that bytes which were never copied are noticed."""
        self.target[:, ::SMALL_BYTES] = 0

    def compare(self) -> None:
        if not np.array_equal(self.source, self.target):
            raise _failed("the bytes that were read are not those that were written")


class Task(msgspec.Struct, frozen=True, tag=True):
    """One thing to do. `run` answers with seconds, unless the task says otherwise."""

    def run(self, bench: Bench) -> list[float]:
        raise NotImplementedError


class Allocate(Task, frozen=True):
    """Allocate and pre-fault memory for this many objects of 2 MiB."""

    objects: int

    def run(self, bench: Bench) -> list[float]:
        words = np.random.default_rng(1).integers(0, 1 << 63, (self.objects, OBJECT_BYTES // 8), dtype=np.uint64)
        bench.source = words.view(np.uint8)
        bench.target = np.ones_like(bench.source)
        return []


class Connect(Task, frozen=True):
    """Connect to a store as a client. Tasks refer to it by this name."""

    name: str
    socket: str
    shape: Shape
    prefault: bool = False  # map the whole arena into this process now, as an engine does when it starts

    def run(self, bench: Bench) -> list[float]:
        namespace = namespace_of(self.shape)
        client = CopyingClient(self.socket, namespace=namespace, name=f"bench {self.name}", timeout_s=PATIENCE_S)
        if isinstance(client.connect(PATIENCE_S), Miss) or client.arena is None:
            raise _failed(f"no connection to {self.socket}")
        if self.prefault:
            client.arena.populate(0, client.arena.size_bytes)
        bench.clients[self.name] = client, namespace
        return []


class Disconnect(Task, frozen=True):
    """Close all connections, before their store stops."""

    def run(self, bench: Bench) -> list[float]:
        for client, _ in bench.clients.values():
            client.close()
        bench.clients.clear()
        return []


# ---- bytes


class Stopwatch:
    """Seconds since it was made, and how many of them this thread spent on a processor."""

    def __init__(self) -> None:
        self._begun, self._begun_cpu = time.perf_counter(), time.thread_time()

    def read(self) -> list[float]:
        return [time.perf_counter() - self._begun, time.thread_time() - self._begun_cpu]


class Copy(Task, frozen=True):
    """The limit of puts and gets: copy the same bytes, object by object, between two buffers of this process."""

    def run(self, bench: Bench) -> list[float]:
        watch = Stopwatch()
        for source, target in zip(bench.source, bench.target, strict=True):
            target[:] = source
        return watch.read()


class CopyWhole(Task, frozen=True):
    """Copy everything at once. The C library then bypasses the cache, as it does when neighbouring objects are copied
    as one."""

    def run(self, bench: Bench) -> list[float]:
        watch = Stopwatch()
        bench.target[:] = bench.source
        return watch.read()


class Put(Task, frozen=True):
    """Begin, write and commit one set of objects, in batches: the store prepares the next while one is written."""

    client: str
    number: int
    checksummed: bool

    def run(self, bench: Bench) -> list[float]:
        client, namespace = bench.clients[self.client]
        objects = objects_of(namespace, bench.set_prompt(self.number), len(bench.source))
        watch = Stopwatch()
        # A short first batch, and a commit now and then: the store works while other objects are written.
        batches = [client.put_begin(objects[:FIRST_BATCH]), client.put_begin(objects[FIRST_BATCH:])]
        ends = []
        done = 0
        for call in batches:
            puts = answer(call)
            for at in range(0, len(puts), COMMIT):
                part = puts[at : at + COMMIT]
                if any(put.status is not PutStatus.WRITE for put in part):
                    raise _failed(f"the store gave no slot: {[put.status.name for put in part]}")
                sources = bench.source[done : done + len(part)]
                ends.append(client.put_end(hit(client.write_all(part, list(sources), hashed=self.checksummed))))
                done += len(part)
        for end in ends:
            answer(end)
        return watch.read()


class Get(Task, frozen=True):
    """Look up, hold, find, copy out and release one set. Returns the time until it was staged, then the two times of a
    stopwatch for all of it."""

    client: str
    number: int
    verify: bool
    source: str = ""  # address of the store that has it

    def run(self, bench: Bench) -> list[float]:
        bench.blank()
        seconds = self.read(bench)
        bench.compare()
        return seconds

    def read(self, bench: Bench) -> list[float]:
        client, namespace = bench.clients[self.client]
        tokens = bench.set_prompt(self.number)
        watch = Stopwatch()
        lease = answer(client.hold(msgspec.structs.replace(question(namespace, tokens), source=self.source)))
        hit(client.wait_staged(lease, timeout_s=PATIENCE_S))
        staged = watch.read()
        slots = answer(client.slots(lease))
        hit(client.read_all(slots, [bench.target[slot.index] for slot in slots], verify=self.verify))
        client.release([lease])  # without waiting for the reply, as an engine does
        ended = watch.read()
        if len(slots) != len(bench.source):
            raise _failed(f"{len(slots)} objects were held, {len(bench.source)} were saved")
        return [staged[0], *ended]


class Window(Task, frozen=True):
    """Until the time is up, copy (without a client), or save new sets with checksums and read each back. Returns bytes
    per second."""

    start_ns: int  # of the machine's monotonic clock, so that all workers begin together
    length_s: float
    client: str = ""
    first: int = 0  # number of the first set

    def run(self, bench: Bench) -> list[float]:
        while (left_ns := self.start_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / SECOND_NS)
        moved_bytes = 0
        begun = time.perf_counter()
        for number in count(self.first):
            seconds = time.perf_counter() - begun
            if seconds >= self.length_s:
                return [moved_bytes / seconds]
            if self.client:
                Put(self.client, number, checksummed=True).run(bench)
                Get(self.client, number, verify=True).read(bench)
            else:
                Copy().run(bench)
                Copy().run(bench)
            moved_bytes += 2 * bench.size_bytes
        return []


# ---- disk


class PutThrough(Task, frozen=True):
    """Save a set, and wait until the lower tier has it. Returns the time from the commit on."""

    client: str
    number: int

    def run(self, bench: Bench) -> list[float]:
        client, namespace = bench.clients[self.client]
        objects = objects_of(namespace, bench.set_prompt(self.number), len(bench.source))
        puts = answer(client.put_begin(objects))
        commits = [(put, hit(client.write(put, source))) for put, source in zip(puts, bench.source, strict=True)]
        begun = time.perf_counter()
        answer(client.put_end(commits))
        _drained(client)
        return [time.perf_counter() - begun]


class RawRead(Task, frozen=True):
    """The limit of reads from disk: one `preadv` for each object of a set, into memory that is already mapped."""

    path: str
    offset_bytes: int

    def run(self, bench: Bench) -> list[float]:
        bench.blank()
        fd = os.open(self.path, os.O_RDONLY)
        try:
            begun = time.perf_counter()
            offset = self.offset_bytes
            for target in bench.target:
                _whole(os.preadv(fd, [target.data], offset))
                offset += OBJECT_BYTES
            seconds = time.perf_counter() - begun
        finally:
            os.close(fd)
        bench.compare()
        return [seconds]


class RawWrite(Task, frozen=True):
    """The limit of writes to disk: one `pwritev` for each object, into a new file."""

    path: str

    def run(self, bench: Bench) -> list[float]:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            begun = time.perf_counter()
            for number, source in enumerate(bench.source):
                _whole(os.pwritev(fd, [source.data], number * OBJECT_BYTES))
            return [time.perf_counter() - begun]
        finally:
            os.close(fd)
            os.unlink(self.path)


# ---- the network


class Listen(Task, frozen=True):
    """Listen for the connections of a `Send`. Returns the port."""

    host: str

    def run(self, bench: Bench) -> list[float]:
        bench.listener = socket.create_server((self.host, 0))
        return [bench.listener.getsockname()[1]]


class Receive(Task, frozen=True):
    """The limit of pulls: receive a set over plain sockets, as many as a store pulls with, a thread for each."""

    connections: int

    def run(self, bench: Bench) -> list[float]:
        listener = bench.listener
        if listener is None:
            raise _failed("nobody listens")
        listener.settimeout(PATIENCE_S)
        peers = [listener.accept()[0] for _ in range(self.connections)]
        bench.blank()
        begun = time.perf_counter()
        _each(peers, lambda peer, at: _fill_all(peer, bench.target[at :: self.connections]))
        seconds = time.perf_counter() - begun
        bench.compare()
        return [seconds]


class Send(Task, frozen=True):
    """The other end of it."""

    host: str
    port: int
    connections: int

    def run(self, bench: Bench) -> list[float]:
        peers = [socket.create_connection((self.host, self.port), PATIENCE_S) for _ in range(self.connections)]
        _each(peers, lambda peer, at: _send_all(peer, bench.source[at :: self.connections]))
        return []


def _each(peers: Sequence[socket.socket], action: Callable[[socket.socket, int], object]) -> None:
    """Do this with each connection, in a thread of its own, and close them."""
    with ThreadPoolExecutor(len(peers)) as pool, ExitStack() as closing:
        for peer in peers:
            closing.enter_context(peer)
            peer.settimeout(None)
        for done in [pool.submit(action, peer, at) for at, peer in enumerate(peers)]:
            done.result(PATIENCE_S)


def _send_all(peer: socket.socket, objects: NDArray[np.uint8]) -> None:
    for row in objects:
        peer.sendall(row.data)


def _fill_all(peer: socket.socket, objects: NDArray[np.uint8]) -> None:
    for row in objects:
        view = memoryview(row.data).cast("B")
        while view:
            count = peer.recv_into(view[:RECEIVED_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                raise _failed("the sender has closed")
            view = view[count:]


# ---- lookups


class Fill(Task, frozen=True):
    """Put the objects of prompts `[first, first + prompts)` into the index. Nothing is written into their slots."""

    client: str
    first: int
    prompts: int
    boundaries: int = PROMPT_TOKENS // CHUNK_TOKENS

    def run(self, bench: Bench) -> list[float]:
        client, namespace = bench.clients[self.client]
        begun: Call[list[WriteSlot]] | None = None
        for objects in self._batches(namespace):  # the store works on one batch while the next one is made
            following = client.put_begin(objects)
            if begun is not None:
                _commit(client, begun)
            begun = following
        if begun is not None:
            _commit(client, begun)
        _drained(client)
        return []

    def _batches(self, namespace: Namespace) -> Iterator[list[PutObject]]:
        last = self.first + self.prompts
        for first in range(self.first, last, FILL_PROMPTS):
            seeds = range(first, min(first + FILL_PROMPTS, last))
            yield [item for seed in seeds for item in objects_of(namespace, prompt(seed), self.boundaries)]


def _commit(client: CopyingClient, begun: Call[list[WriteSlot]]) -> None:
    """Publish slots as they are, without waiting for the reply: if one fails, lookups will find less."""
    client.put_end([(put, 0) for put in answer(begun) if put.status is PutStatus.WRITE])


class Ping(Task, frozen=True):
    """Empty round trips."""

    client: str
    times: int

    def run(self, bench: Bench) -> list[float]:
        client, _ = bench.clients[self.client]
        return [_timed(lambda: answer(client.ping())) for _ in range(self.times)]


class Part(StrEnum):
    """The part of a lookup that is timed."""

    WHOLE = "whole"  # from packed tokens to the answer
    HOLD = "hold"  # the same, and everything found is leased
    ROUND_TRIP = "round_trip"  # from chain values to the answer
    HASH = "hash"  # from packed tokens to chain values
    PACK = "pack"  # from a list of integers to packed tokens


class Look(Task, frozen=True):
    """Look up each prompt once. The store must answer `expect_tokens`."""

    client: str
    seeds: list[int]
    expect_tokens: int
    part: Part = Part.WHOLE
    source: str = ""  # address of another store, which is asked as well

    def run(self, bench: Bench) -> list[float]:
        return [self._one(*bench.clients[self.client], prompt(seed)) for seed in self.seeds]

    def _one(self, client: CopyingClient, namespace: Namespace, tokens: Tokens) -> float:
        if self.part is Part.PACK:
            listed = tokens.tolist()
            return _timed(lambda: token_bytes(listed))
        begun = time.perf_counter()
        asked = msgspec.structs.replace(question(namespace, tokens), source=self.source)
        hashed = time.perf_counter()
        if self.part is Part.HOLD:
            lease = answer(client.hold(asked))
            seconds = time.perf_counter() - begun
            self._check(lease.end_tokens)
            answer(client.release([lease]))
            return seconds
        self._check(answer(client.lookup(asked)).end_tokens)
        ended = time.perf_counter()
        if self.part is Part.HASH:
            return hashed - begun
        return ended - (hashed if self.part is Part.ROUND_TRIP else begun)

    def _check(self, end_tokens: int) -> None:
        if end_tokens != self.expect_tokens:
            raise _failed(f"a lookup found {end_tokens} tokens, {self.expect_tokens} are there")


AnyTask: TypeAlias = (
    Allocate | Connect | Disconnect | Copy | CopyWhole | Put | Get | Window | PutThrough | RawRead | RawWrite | Fill
    | Ping | Look | Listen | Receive | Send
)  # fmt: skip


class TaskWorker(Worker):
    """The process that runs tasks, as the bench sees it."""

    def __init__(self, log: Path) -> None:
        super().__init__("kvtally.bench.tasks", log=log)

    def run(self, task: Task) -> list[float]:
        return self.ask(task, list[float], TASK_S)


def run_all(workers: Sequence[TaskWorker], tasks: Sequence[Task]) -> list[list[float]]:
    """One task for each worker, all at the same time."""
    for worker, task in zip(workers, tasks, strict=True):
        worker.send(task)
    return [worker.receive(list[float], TASK_S) for worker in workers]


def _drained(client: CopyingClient) -> None:
    """Wait until the lower tiers have everything. Raises if something was dropped."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = read_state(client)
        if any(tier.dropped for tier in state.tiers):
            raise _failed("the disk tier dropped objects")
        if state.server.unwritten_jobs == 0 and not any(tier.postponed for tier in state.tiers):
            return
        time.sleep(0.0005)
    raise _failed(f"the disk tier did not take all objects within {PATIENCE_S:g} s")


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _whole(moved_bytes: int) -> None:
    if moved_bytes != OBJECT_BYTES:
        raise _failed(f"the file system moved {moved_bytes} bytes instead of {OBJECT_BYTES}")


def _failed(why: str) -> TransportError:
    return TransportError(f"a measurement failed: {why}", remedy="Try again; if it comes back, report it.")


def main() -> None:
    bench, decoder = Bench(), msgspec.json.Decoder(AnyTask)
    serve(lambda line: decoder.decode(line).run(bench))


if __name__ == "__main__":
    main()
