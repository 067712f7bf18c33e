"""Requests and bytes of a peer that knows the protocol and is out of its mind. Everything follows from one seed.

`Hostile.request` mixes values that fit the state the store is in (chains, leases and puts it was told of) with ones
that cannot be right, because a request that is wrong in every field never gets past the first check. `damaged` and
`noise` are the same for bytes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from kvtally.core.keys import ROOT_CHAIN, chain_value
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, canonical
from kvtally.core.receipts import Half, Role
from kvtally.wire.frames import encode
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    Ping,
    PutBegin,
    PutEnd,
    PutObject,
    PutSlots,
    PutStatus,
    ReceiptFile,
    ReceiptGet,
    Refused,
    Release,
    Reply,
    Request,
    Reset,
    SlotsGet,
    StatsGet,
    Wanted,
)

CHUNK = 64
PAGE = 1500
# Every integer that msgpack can carry lies between the first and the last of these.
EDGES = (
    *(-(1 << 63), -(1 << 31), -2, -1, 0, 1, 2, 15, 16, 17, 63, 64, 255, 4095, 4096, 4097, 65_535, 65_536),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
WORDS = ("", "t1", "t2", "t3", "ticket", "x" * 128, "x" * 129, "\x00", "é" * 100)
NAMESPACES = tuple(
    Namespace(model=model, groups=groups, chunk_tokens=CHUNK, alignment_tokens=16, tensor_parallel=ranks)
    for model, ranks, groups in (
        ("a", 1, (GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((PAGE,),)),)),
        (
            "b",
            2,
            (
                GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((PAGE,),)),
                GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((5000,),)),
                GroupSpec(kind=GroupKind.SLIDING, block_tokens=16, page_bytes=((PAGE,),), window_tokens=100),
            ),
        ),
    )
)
T = TypeVar("T")


class Dice(Random):
    """A Random that chooses five times as fast, and not quite evenly: it is rolled some millions of times."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[int(self.random() * len(seq))]

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        if stop is None:
            start, stop = 0, start
        return start + int(self.random() * (stop - start))


def paths(random: Random, count: int, depth: int) -> list[list[tuple[bytes, bytes, int, int]]]:
    """Prompts as lists of boundaries (chain, parent, start, end); they share stems, and some end in a tail."""
    found: list[list[tuple[bytes, bytes, int, int]]] = []
    for _ in range(count):
        path = list(random.choice(found)[: random.randrange(depth)]) if found and random.random() < 0.6 else []
        while len(path) < depth:
            parent, start = (path[-1][0], path[-1][3]) if path else (ROOT_CHAIN, 0)
            length = CHUNK if len(path) < depth - 1 else random.choice((16, 32, CHUNK))
            path.append((chain_value(parent, random.randbytes(4 * length)), parent, start, start + length))
        found.append(path)
    return found


class Hostile:
    """One peer's requests. `saw` lets it learn from replies, so that its next lies are better ones."""

    def __init__(
        self, random: Random, checksum: Callable[[Namespace, PutObject, list[int]], int] | None = None
    ) -> None:
        self.random = random
        self.namespace = random.choice(NAMESPACES)
        self.paths = paths(random, 12, 5)
        self._checksum = checksum  # what the slot of a put really adds up to, for commits that are to succeed
        self._leases: deque[int] = deque([0, 1], maxlen=8)
        self._puts: deque[tuple[int, int]] = deque([(0, 0), (1, 1)], maxlen=64)  # put, checksum
        self._begun: dict[int, list[PutObject]] = {}  # by the request's id
        self._last_id = 1 << 20
        weighted: list[tuple[int, Callable[[], Request]]] = [
            (30, self._lookup),
            (26, self._put_begin),
            (16, self._put_end),
            (9, self._release),
            (4, self._wanted),
            (9, self._slots_get),
            (4, self._receipt_file),
            (4, self._receipt_get),
            (3, self._hello),
            (1, lambda: Ping(self.number(7))),
            (1, lambda: StatsGet(self.number(7))),
            (1, self._reset),
        ]
        self._makers = [make for weight, make in weighted for _ in range(weight)]

    # ---- values

    def number(self, likely: int) -> int:
        roll = self.random.random()
        if roll < 0.96:
            return likely
        return self.random.choice(EDGES) if roll < 0.99 else self.random.randrange(-5, 5000)

    def some(self, most: int, make: Callable[[], T]) -> list[T]:
        return [make() for _ in range(self.random.randrange(most + 1))]

    # ---- requests

    def request(self) -> Request:
        return self.random.choice(self._makers)()

    def saw(self, reply: Reply) -> None:
        if isinstance(reply, Found) and reply.lease:
            self._leases.append(reply.lease)
        elif isinstance(reply, Refused):
            self._begun.pop(reply.id, None)
        elif isinstance(reply, PutSlots):  # perhaps to a request that was damaged on its way, so not to what was asked
            for item, slot in zip(self._begun.pop(reply.id, []), reply.slots, strict=False):
                if slot.status == PutStatus.WRITE:
                    right = 0
                    if self._checksum is not None and sum(slot.pieces[1::2]) == item.length_bytes:
                        right = self._checksum(self.namespace, item, slot.pieces)
                    self._puts.append((slot.put, right))

    def hello(self) -> Hello:
        """One that is welcome."""
        return Hello(1, PROTOCOL_VERSION, "hostile", canonical(self.namespace))

    def _hello(self) -> Hello:
        random = self.random
        description = canonical(random.choice(NAMESPACES))
        if random.random() < 0.5:
            description = damaged(random, description)
        protocol = self.number(PROTOCOL_VERSION)
        return Hello(self.number(1), protocol, random.choice(WORDS), description, random.choice((b"", b"e" * 32)))

    def _lookup(self) -> Lookup:
        random, number = self.random, self.number
        path = random.choice(self.paths)
        chains, ends = [step[0] for step in path], [step[3] for step in path]
        if random.random() < 0.1:
            ends = sorted(number(end) for end in ends)
        if random.random() < 0.1:
            chains = [random.choice(random.choice(self.paths))[0] for _ in chains]
        if random.random() < 0.05:
            chains[random.randrange(len(chains))] = random.choice((b"", ROOT_CHAIN, random.randbytes(32)))
        have = [number(random.choice((0, CHUNK))) for _ in self.namespace.groups]
        return Lookup(
            number(7),
            b"".join(chains),
            ends,
            number(ends[-1]),
            number(16),
            have[: number(9)] if random.random() < 0.3 else [],
            number(random.choice((0, 0, 20))),
            random.random() < 0.7,
            number(random.choice((0, 5))),
            number(random.choice((0, -3))),
            number(random.choice((0, 40))),
            random.random() < 0.5,
            number(random.choice((0, 1000))),
        )

    def _put_begin(self) -> PutBegin:
        random = self.random
        path = random.choice(self.paths)
        first = random.randrange(len(path))
        steps = path[first : first + random.choice((1, 1, 2, 5))]
        objects = [self._put_object(*step) for step in steps for _ in range(random.choice((1, 2)))]
        self._last_id += 1
        self._begun[self._last_id] = objects
        return PutBegin(self._last_id, objects)

    def _put_object(self, chain: bytes, parent: bytes, start: int, end: int) -> PutObject:
        random, number = self.random, self.number
        if random.random() < 0.02:
            chain, parent = parent, chain
        elif random.random() < 0.02:
            chain = random.choice((ROOT_CHAIN, b"short", random.randbytes(32)))
        if random.random() < 0.03:
            start, end = number(start), number(end)
        group, rank = random.randrange(len(self.namespace.groups)), random.randrange(self.namespace.ranks)
        if random.random() < 0.03:
            group, rank = number(group), number(rank)
        length = random.choice((1, 4096, 4 * PAGE, 5000)) if random.random() < 0.97 else number(1)
        return PutObject(chain, parent, start, end, group, rank, length)

    def _put_end(self) -> PutEnd:
        ends = self.some(6, self._known_put)
        commit = [(self.number(put), self.number(checksum)) for put, checksum in ends]
        return PutEnd(self.number(7), commit, [self.number(put) for put, _ in self.some(2, self._known_put)])

    def _known_put(self) -> tuple[int, int]:
        return self.random.choice(self._puts)

    def _wanted(self) -> Wanted:
        return Wanted(self.number(7), self._lease(), self.number(1000))

    def _release(self) -> Release:
        return Release(self.number(7), self.some(2, self._lease), self.some(3, self._bad))

    def _bad(self) -> tuple[int, int, int, int]:
        random = self.random
        return self._lease(), self.number(random.randrange(5)), self.number(random.randrange(3)), self.number(0)

    def _lease(self) -> int:
        return self.number(self.random.choice(self._leases))

    def _slots_get(self) -> SlotsGet:
        return SlotsGet(self.number(7), self._lease(), self.number(self.random.randrange(2)))

    def _receipt_file(self) -> ReceiptFile:
        random, number = self.random, self.number
        half = Half(
            role=random.choice((Role.PREFILL, Role.DECODE)),
            request=random.choice(WORDS),
            prompt_tokens=number(100),
            saved_tokens=number(64),
            tokens_gpu=number(64),
            wait_ms=random.choice((0.0, -1.0, float("nan"), float("inf"))),
            reason=random.choice(WORDS),
        )
        return ReceiptFile(number(7), random.choice(WORDS), half)

    def _reset(self) -> Reset:
        empties = self.random.random() < 0.1  # else nothing would ever grow old
        return Reset(self.number(7), b"" if empties else self.random.randbytes(32))

    def _receipt_get(self) -> ReceiptGet:
        number = self.number
        wait_ms = number(self.random.choice((0, 20)))
        return ReceiptGet(number(7), self.random.choice(WORDS), wait_ms, number(3))


# ---- bytes


def damaged(random: Random, data: bytes) -> bytes:
    """`data` with a few bytes changed, cut out, put in or moved."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 2 if at < len(changed):
                changed[at] = random.choice((0x00, 0x7F, 0x80, 0xC1, 0xDD, 0xFF))
            case 3:
                del changed[at : at + random.randrange(8)]
            case 4:
                changed[at:at] = random.randbytes(random.randrange(8))
            case _:
                changed[at : at + 8] = struct.pack("<q", random.choice(EDGES[:-2]))
    return bytes(changed)


def noise(random: Random) -> bytes:
    """Bytes that nobody made: any, any behind a fitting length, or a length alone."""
    payload = random.randbytes(random.choice((0, 1, 3, 4, 5, 20, 100)))
    match random.randrange(4):
        case 0:
            return payload
        case 1:
            return struct.pack("<I", random.choice((0, 1, 0xFFFF, 1 << 22, (1 << 22) + 1, 0xFFFFFFFF))) + payload
        case _:
            return struct.pack("<I", len(payload)) + payload


def frame_of(hostile: Hostile) -> bytes:
    """One frame, or what somebody makes of one: sound, damaged inside, cut short, or with a wrong length."""
    random = hostile.random
    frame = encode(hostile.request())
    match random.randrange(8):
        case 0:
            return noise(random)
        case 1 | 2:
            payload = damaged(random, frame[4:])
            return struct.pack("<I", len(payload)) + payload
        case 3:
            return frame[: random.randrange(len(frame))]
        case 4:
            return damaged(random, frame)
        case _:
            return frame
