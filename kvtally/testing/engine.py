"""A stand-in for a hybrid vLLM engine: paged memory, block tables, prefill, and an output that depends on every byte.

For the demo and for tests that need an engine's behaviour without vLLM, a model or a GPU. Owns its memory and the small
recurrence that fills it. Everything else is the real thing: geometry, chains, client, copies, store.

    one buffer, block-major         ┌ block b ──────────────────────────────┬ block b + 1 ─── ...
    three groups alias it           │ layer 0: page ··padding│ layer 1: page ··padding│
                                    └ a block id belongs to one group of one request at a time

Like real KV, a token's bytes follow from all tokens before it: `state_t ‖ kv_t = expand(hash(state_{t-1} ‖ token_t))`.
The recurrent group holds `state`, the attention groups hold `kv`. `output` is a digest of just the bytes that the last
token's step reads: all of full attention, the last window of the sliding group, the state. So one wrong byte anywhere
in what was restored is a wrong output, and one missing byte too, because fresh memory holds noise.

Neighbours: `client` (saves and restores), `core.geometry` (which bytes). Threading: one thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from blake3 import blake3

from kvtally.client import Lease, Miss, Put, ReadSlot
from kvtally.core.geometry import (
    GroupLayout,
    LayerView,
    chunk_block_range,
    needed_blocks,
    object_length,
    runs,
    validate,
)
from kvtally.core.keys import ROOT_CHAIN, chain_values, chunk_ends, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace, chunk_tokens
from kvtally.core.receipts import NOTHING, Half, Loaded, Role
from kvtally.testing.copying import CopyingClient
from kvtally.wire.messages import Lookup, MissReason, PutObject, PutStatus

LAYERS = 2
PAGE_BYTES = 4096  # padded: what every group's page takes in memory
BLOCK_TOKENS = 16
STATE_TOKENS = 64  # a state is kept this often, and at the end of what was computed
WINDOW_TOKENS = 200
FULL, SLIDING, STATE = 0, 1, 2
GROUPS = (
    GroupSpec(kind=GroupKind.FULL, block_tokens=BLOCK_TOKENS, page_bytes=((4096,) * LAYERS,)),
    GroupSpec(
        kind=GroupKind.SLIDING, block_tokens=BLOCK_TOKENS, page_bytes=((3072,) * LAYERS,), window_tokens=WINDOW_TOKENS
    ),
    GroupSpec(kind=GroupKind.RECURRENT, block_tokens=STATE_TOKENS, page_bytes=((3600,) * LAYERS,)),
)
NAMESPACE = Namespace(
    model="synthetic hybrid, 2 layers",
    groups=GROUPS,
    chunk_tokens=chunk_tokens(STATE_TOKENS),
    alignment_tokens=STATE_TOKENS,
    layout="block-major",
)
STATE_BYTES = LAYERS * 3600
TOKEN_BYTES = tuple(spec.page_bytes[0][0] // BLOCK_TOKENS for spec in GROUPS[:STATE])  # of one token in one layer


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went."""

    output: str
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    sources: Loaded = NOTHING  # where the store had the reused ones
    saved_objects: int = 0
    reason: str = ""  # why no more was reused: a MissReason, or empty


@dataclass(frozen=True, slots=True)
class Restored:
    tokens: int = 0
    sources: Loaded = NOTHING
    moved_bytes: int = 0
    reason: str = ""


@dataclass(slots=True)
class Request:
    tokens: Sequence[int]
    ends: list[int]  # its boundaries: whole chunks, and the tail that ends before the last token
    chains: list[bytes]
    tables: list[list[int]]  # for each group the block ids, in the order of their tokens
    computed: int = 0  # tokens that need no more work
    restored: Restored = Restored()

    def start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0


class SyntheticEngine:
    """One engine. `role` is the half of a receipt that it files. Without `verify` it accepts whatever bytes it
    restored; that only serves to show what checksums are for."""

    def __init__(
        self, *, seed: int = 0, role: Role = Role.DECODE, verify: bool = True, blocks_count: int = 512
    ) -> None:
        stride = LAYERS * PAGE_BYTES
        noise = np.random.default_rng(seed)
        self.memory = noise.integers(0, 256, blocks_count * stride, dtype=np.uint8)
        self.layouts = [
            GroupLayout(
                spec,
                tuple(LayerView(layer * PAGE_BYTES, stride, page) for layer, page in enumerate(spec.page_bytes[0])),
                blocks_count,
                self.memory.size,
            )
            for spec in GROUPS
        ]
        validate(NAMESPACE, {0: self.layouts})
        self._role, self._verify = role, verify
        self._free = list(range(1, blocks_count))  # 0 is the null block
        random.Random(seed).shuffle(self._free)  # as in an engine that has run for a while

    # ---- one request

    def serve(self, tokens: Sequence[int], client: CopyingClient | None = None, *, ticket: str = "") -> Answer:
        """Restore what the store has, compute the rest, save it; then compute the last token and look at the output.

        With a ticket, this engine's half of the receipt is filed.
        """
        request = self.admit(tokens)
        saved = 0
        if client is not None:
            request.restored = self.restore(request, client)
        self.compute(request, len(tokens) - 1)
        if client is not None:
            saved = self.save(request, client)
            if ticket:
                client.file_receipt(ticket, self._half(request)).wait()
        self.compute(request, len(tokens))
        output = self.output(request)
        self.finish(request)
        return Answer(
            output=output,
            prompt_tokens=len(tokens),
            reused_tokens=request.restored.tokens,
            computed_tokens=len(tokens) - request.restored.tokens,
            sources=request.restored.sources,
            saved_objects=saved,
            reason=request.restored.reason,
        )

    def admit(self, tokens: Sequence[int]) -> Request:
        """Give a request its boundaries and blocks. A prompt has two tokens or more."""
        last = len(tokens) - 1
        ends = chunk_ends(last, NAMESPACE.chunk_tokens)
        if last % NAMESPACE.chunk_tokens:
            ends.append(last)
        tables = [[self._free.pop() for _ in range(-(-len(tokens) // spec.block_tokens))] for spec in GROUPS]
        return Request(tokens, ends, chain_values(token_bytes(tokens), ends), tables)

    def finish(self, request: Request) -> None:
        """Take the blocks back. Their bytes stay, as they do in an engine."""
        for table in request.tables:
            self._free += table

    # ---- compute

    def compute(self, request: Request, until: int) -> None:
        """Fill the request's blocks up to token `until`, going on from what they hold."""
        state = self._state(request, request.computed) if request.computed else bytes(STATE_BYTES)
        kv_bytes = LAYERS * sum(TOKEN_BYTES)
        for position in range(request.computed, until):
            token = request.tokens[position].to_bytes(4, "little")
            stream = blake3(state + token).digest(length=STATE_BYTES + kv_bytes)
            state = stream[:STATE_BYTES]
            kv = np.frombuffer(stream, dtype=np.uint8, offset=STATE_BYTES)
            for group, size in enumerate(TOKEN_BYTES):
                block, row = divmod(position, BLOCK_TOKENS)
                for page in self._pages(group, request.tables[group][block]):
                    page[row * size : (row + 1) * size] = kv[:size]
                    kv = kv[size:]
            if (position + 1) % STATE_TOKENS == 0 or position + 1 == until:
                self._keep_state(request, position + 1, state)
        request.computed = until

    def output(self, request: Request) -> str:
        """A digest of the bytes that computing one more token would read."""
        digest = blake3()
        length = len(request.tokens)
        for group, size in enumerate(TOKEN_BYTES):
            first = max(0, length - WINDOW_TOKENS) if group == SLIDING else 0
            for block in range(first // BLOCK_TOKENS, -(-length // BLOCK_TOKENS)):
                low, high = max(first - block * BLOCK_TOKENS, 0), min(length - block * BLOCK_TOKENS, BLOCK_TOKENS)
                for page in self._pages(group, request.tables[group][block]):
                    digest.update(page[low * size : high * size].tobytes())
        digest.update(self._state(request, length))
        return digest.hexdigest(length=16)

    def _pages(self, group: int, block: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """A block's page in each layer, without its padding."""
        for layer in self.layouts[group].layers:
            start = layer.offset + block * layer.stride_bytes
            yield self.memory[start : start + layer.page_bytes]

    def _state(self, request: Request, end: int) -> bytes:
        slot = chunk_block_range(GROUPS[STATE], 0, end).start
        return b"".join(page.tobytes() for page in self._pages(STATE, request.tables[STATE][slot]))

    def _keep_state(self, request: Request, end: int, state: bytes) -> None:
        slot = chunk_block_range(GROUPS[STATE], 0, end).start
        for layer, page in enumerate(self._pages(STATE, request.tables[STATE][slot])):
            page[:] = np.frombuffer(state, dtype=np.uint8, count=page.size, offset=layer * page.size)

    # ---- store

    @staticmethod
    def question(request: Request) -> Lookup:
        return Lookup(0, b"".join(request.chains), request.ends, len(request.tokens) - 1)

    def restore(self, request: Request, client: CopyingClient) -> Restored:
        """Load the longest hit. If bytes did not verify during staging, ask once more: nothing was promised yet, and
        the store now knows which objects are bad and may serve an earlier boundary."""
        question = self.question(request)
        lease = _stage(client, question)
        reason = lease.reason
        if reason == MissReason.CHECKSUM:
            if isinstance(lease, Lease):
                client.release([lease]).wait()
            lease = _stage(client, question)
        if isinstance(lease, Miss):
            return Restored(reason=reason)
        try:
            return self._load_all(request, client, lease, reason)
        finally:
            client.release([lease]).wait()

    def _load_all(self, request: Request, client: CopyingClient, lease: Lease, reason: str) -> Restored:
        """If one object fails, nothing counts as restored: computing overwrites what landed."""
        slots = client.slots(lease).wait()
        if isinstance(slots, Miss):
            return Restored(reason=slots.reason)
        moved_bytes = 0
        for slot in slots:
            outcome = self._load(request, client, slot, lease.end_tokens)
            if isinstance(outcome, Miss):
                return Restored(reason=outcome.reason)
            moved_bytes += outcome
        request.computed = lease.end_tokens
        return Restored(request.computed, lease.sources, moved_bytes, reason)

    def _load(self, request: Request, client: CopyingClient, slot: ReadSlot, hit_tokens: int) -> int | Miss:
        group, spec = slot.key.group, GROUPS[slot.key.group]
        start, end = request.start(slot.index), request.ends[slot.index]
        wanted = needed_blocks(spec, start, end, hit_tokens=hit_tokens)
        if not wanted:
            return 0
        skipped = wanted.start - chunk_block_range(spec, start, end).start
        blocks = [request.tables[group][block] for block in wanted]
        where = runs(self.layouts[group], blocks, skip_blocks=skipped)
        return client.read(slot, self.memory, where, verify=self._verify)

    def save(self, request: Request, client: CopyingClient) -> int:
        """Save every object of which this engine has all bytes. How many were new to the store."""
        written = self.write(request, client)
        if not written:
            return 0
        ended = client.put_end(written).wait()
        return 0 if isinstance(ended, Miss) else ended.committed

    def write(self, request: Request, client: CopyingClient) -> list[tuple[Put, int]]:
        """The first phase of a save: get slots and write them. Nobody can read them before they are committed."""
        objects = list(self._objects(request))
        puts = client.put_begin(objects).wait() if objects else []
        if isinstance(puts, Miss):
            return []
        written = []
        for item, put in zip(objects, puts, strict=True):
            if put.status is PutStatus.WRITE:
                checksum = client.write(put, self.memory, runs(self.layouts[item.group], self._blocks(request, item)))
                if not isinstance(checksum, Miss):
                    written.append((put, checksum))
        return written

    def _objects(self, request: Request) -> Iterator[PutObject]:
        for index, end in enumerate(request.ends):
            start = request.start(index)
            parent = request.chains[index - 1] if index else ROOT_CHAIN
            for group, spec in enumerate(GROUPS):
                if end <= request.computed and _holds(spec, start, end, request.restored.tokens):
                    length = object_length(self.layouts[group], len(chunk_block_range(spec, start, end)))
                    yield PutObject(request.chains[index], parent, start, end, group, 0, length)

    @staticmethod
    def _blocks(request: Request, item: PutObject) -> list[int]:
        wanted = chunk_block_range(GROUPS[item.group], item.start_tokens, item.end_tokens)
        return [request.tables[item.group][block] for block in wanted]

    def _half(self, request: Request) -> Half:
        restored = request.restored
        return Half(
            role=self._role,
            prompt_tokens=len(request.tokens),
            saved_tokens=request.ends[-1],
            chain=request.chains[-1],
            tokens_host=restored.sources.host,
            tokens_disk=restored.sources.disk,
            tokens_peer=restored.sources.peer,
            tokens_pool=restored.sources.pool,
            computed_tokens=len(request.tokens) - restored.tokens,
            moved_bytes=restored.moved_bytes,
            verified=self._verify,
            reason=restored.reason,
        )


def _stage(client: CopyingClient, question: Lookup) -> Lease | Miss:
    """Hold the longest hit, and wait until it is in the arena."""
    lease = client.hold(question).wait()
    if isinstance(lease, Miss):
        return lease
    staged = client.wait_staged(lease)
    if isinstance(staged, Miss):
        client.release([lease]).wait()
    return staged


def _holds(spec: GroupSpec, start: int, end: int, restored_tokens: int) -> bool:
    """Whether an engine that restored this many tokens, and computed the rest, has all bytes of this object."""
    if spec.kind is GroupKind.RECURRENT:
        return end >= restored_tokens  # earlier states were not restored
    if spec.kind is GroupKind.SLIDING:
        return start >= restored_tokens - (spec.window_tokens - 1)  # nor was what lies before the window
    return True
