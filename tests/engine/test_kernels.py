"""The GPU kernels in Triton's interpreter, where there is no GPU: the same digests as the host's, the same bytes. And
`device.cuda` on top of them, with streams and events that do everything at once: batches, tables, stages and checksums
are the real ones. And again with streams that run late, and beside each other in any order that events allow.

On a GPU `tests/gpu/copies.py` does this and more. The interpreter must be chosen before Triton is imported, hence the
processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import numpy as np, torch, xxhash
from kvtally.device import kernels
from kvtally.device.units import MOST_BLOCKS, leaf_rows

pick = np.random.default_rng(5)
for unit, units, lengths in ((256, 300, (256, 512, 1_280, 76_800)), (4096, 144, (4096, 65_536, 520_192, 589_824))):
    pages = pick.integers(0, 256, (2 * units, unit), np.uint8)
    order = pick.permutation(2 * units)[:units]
    table = torch.from_numpy(pages.ctypes.data + order.astype(np.int64) * unit)
    content = pages[order].tobytes()

    rows = [leaf_rows(length, 0, 0) for length in lengths]
    counts = [len(part) for part in rows]
    for first, part in zip(np.cumsum([0, *counts]), rows):
        part[:, 3] += first
    leaves = np.concatenate(rows)
    digests = torch.zeros(len(leaves), dtype=torch.int64)
    tables = torch.cat([table, torch.from_numpy(leaves.ravel())])
    constants = kernels.constants(torch.device("cpu"))
    expected = [xxhash.xxh3_64_intdigest(content[offset : offset + size]) for offset, size in leaves[:, 1:3].tolist()]
    buffer = torch.zeros(units * unit, dtype=torch.uint8)

    def hashed(**options):
        digests.zero_()
        sums = torch.zeros(len(leaves) * MOST_BLOCKS * 8, dtype=torch.int64)
        grid = (len(leaves), -(-int(leaves[:, 2].max()) // kernels.HASHED_BYTES))
        kernels.copy_summed[grid](tables, units, constants, sums, buffer, UNIT=unit, **options)
        known = (tables, units, constants, sums, buffer, digests, len(leaves))
        kernels.leaf_digests[(-(-len(leaves) // kernels.DIGESTS),)](*known, UNIT=unit)
        return [value % 2**64 for value in digests.tolist()]

    assert hashed(INTO_BUFFER=True) == expected, unit
    longest = max(lengths)
    assert buffer.numpy().tobytes() == content[:longest] + bytes(units * unit - longest)

    part = min(unit, 1024)
    kernels.copy_units[(units, unit // part)](table, buffer, UNIT=unit, PART=part, INTO_BUFFER=True)
    assert buffer.numpy().tobytes() == content
    before = pages.copy()
    table[3] = tables[3] = 0  # a gap: left alone
    buffer ^= 0xFF
    kernels.copy_units[(units, unit // part)](table, buffer, UNIT=unit, PART=part, INTO_BUFFER=False)
    before[np.delete(order, 3)] ^= 0xFF
    assert np.array_equal(pages, before)

    pages[order] = 0
    buffer ^= 0xFF
    assert hashed(INTO_BUFFER=False) == expected, unit  # what is in the buffer, the gap too
    after = np.frombuffer(content, np.uint8).reshape(units, unit).copy()
    after[3] = 0
    after.reshape(-1)[longest:] = 0
    assert np.array_equal(pages[order], after)
print("same")
"""

# Where a script has its `Event`, `Stream` and `Driver`: the rest of what a GPU is to `device.cuda`, and what is copied.
FAKED = """
class Runtime:
    cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 0)

empty, engine = torch.empty, Stream()
torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)
torch.cuda.Event, torch.cuda.Stream, torch.cuda.cudart = Event, Stream, Runtime
torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()
torch.cuda.current_stream, torch.cuda.set_device = lambda _: engine, lambda _: None
torch.cuda.synchronize = lambda _: engine.synchronize()

from kvtally.device import cuda
from kvtally.shm import map_arena
from tests.gpu import copies

cuda.Driver = Driver
copies.MEMORY_BYTES = 3 << 19
arena = os.memfd_create("arena")
os.ftruncate(arena, 32 << 20)
mapping = map_arena(arena, 32 << 20, writable=True)
memory = torch.empty(copies.MEMORY_BYTES, dtype=torch.uint8)
"""

COPIES = (
    """
import contextlib, ctypes, os, random, sys, torch

class Event:
    looks = 0
    cuda_event = property(lambda self: self)
    def record(self, *_): self.looks = random.randrange(3)
    def synchronize(self): pass

class Stream:
    cuda_stream = property(lambda self: self)
    def __init__(self, *_): pass
    def wait_event(self, _): pass
    def synchronize(self): pass

class Driver:
    copies = 0
    def enter(self): pass
    def copy(self, target, source, size, stream): ctypes.memmove(target, source, size); Driver.copies += 1
    def record(self, event, stream): event.record()
    def wait(self, stream, event): pass
    def is_done(self, event): event.looks -= 1; return event.looks < 0
    def kernel(self, compiled, sizes): return None

"""
    + FAKED
    + """
cuda.STAGE_BYTES = 1 << 20  # so that transfers take several, and wait for one
copies.PAGES = (256, 320, 1000, 4096, 18_432, 65_536, 102_144)
for use_kernels, rounds in ((True, 8), (False, 3)):
    it = cuda.CudaCopies(torch.device("cpu"), largest_bytes=0, use_kernels=use_kernels)
    it.prepare([page for page in copies.PAGES if page % 256 == 0])
    for number in range(rounds):
        if number == 2:
            it.pin(mapping)
            assert it.wait_pinned(60)
        copies.play(it, memory, mapping, random.Random(number))
    assert not it._in.taken + it._out.taken
    it.close()
assert Driver.copies > 100  # what is pinned is not left to torch
print("same")
"""
)

ORDER = (
    """
import contextlib, ctypes, os, random, torch

pick = random.Random(7)

class Event:
    cuda_event = property(lambda self: self)
    def __init__(self): self.recorded = self.reached = 0
    def record(self, stream):
        self.recorded += 1
        stream.add(lambda number=self.recorded: setattr(self, "reached", number))
    def synchronize(self):
        while self.reached < self.recorded: advance()

class Stream:
    every = []
    cuda_stream = property(lambda self: self)
    def __init__(self, *_): self.queue = []; Stream.every.append(self)
    def add(self, do, event=None, number=0): self.queue.append((do, event, number))
    def wait_event(self, event): self.add(lambda: None, event, event.recorded)
    def synchronize(self):
        while self.queue: advance()
    @property
    def is_ready(self):
        return self.queue and (self.queue[0][1] is None or self.queue[0][1].reached >= self.queue[0][2])

favourites = []

def advance():
    if pick.random() < 0.03:  # some run ahead of the others for a while
        favourites[:] = pick.sample(Stream.every, 2)
    ready = [stream for stream in Stream.every if stream.is_ready]
    pick.choice([stream for stream in ready if stream in favourites] or ready).queue.pop(0)[0]()

class Driver:
    def enter(self): pass
    def copy(self, target, source, size, stream): stream.add(lambda: ctypes.memmove(target, source, size))
    def record(self, event, stream): event.record(stream)
    def wait(self, stream, event): stream.wait_event(event)
    def is_done(self, event):
        for _ in range(pick.randrange(4)):
            if any(stream.queue for stream in Stream.every): advance()
        return event.reached == event.recorded

"""
    + FAKED
    + """
class Late(cuda.CudaCopies):
    def _run(self, name, grid, stream, arguments, **options):
        stream.add(lambda: getattr(cuda.kernels, name)[grid](*arguments, **options))

cuda.STAGE_BYTES = 128 << 10  # room for one object: saves use their buffers again and again
copies.PAGES = (256, 1024, 4096)
it = Late(torch.device("cpu"), largest_bytes=0)
it.prepare(copies.PAGES)
it.pin(mapping)
assert it.wait_pinned(60)
for number in range(6):
    copies.play(it, memory, mapping, random.Random(number))
assert not it._in.taken + it._out.taken

class Never(dict):
    def __getitem__(self, _): return Event()

it._out.emptied = Never()  # nobody waits until a buffer is empty: wrong bytes must be noticed, or this is blind
try:
    for number in range(6):
        copies.play(it, memory, mapping, random.Random(number))
except AssertionError as error:
    assert "differ" in str(error), error
    print("same")
"""
)


@pytest.mark.parametrize("script", [SCRIPT, COPIES, ORDER], ids=["kernels", "copies", "order"])
def test_the_same_as_on_the_host(script: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.endswith(b"same\n"), ran.stderr.decode()
