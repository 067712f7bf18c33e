"""The synthetic engine: its output depends on every byte it reads, and what it saves another engine can restore."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtally.core.geometry import LayerView
from kvtally.core.receipts import Role, Verdict
from kvtally.testing.copying import CopyingClient
from kvtally.testing.engine import FULL, NAMESPACE, SLIDING, STATE, WINDOW_TOKENS, Request, SyntheticEngine
from kvtally.wire.limits import MIB
from kvtally.wire.messages import MissReason
from tests.unit.shell import Bench, Running

CHUNK = NAMESPACE.chunk_tokens


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=length)


@pytest.fixture
def store(bench: Bench) -> Running:
    return bench.start(memory_bytes=16 * MIB)


@pytest.fixture
def client(bench: Bench, store: Running) -> Iterator[CopyingClient]:
    with CopyingClient(bench.path, namespace=NAMESPACE) as client:
        yield client


class TestAlone:
    def test_output_follows_from_the_tokens_alone(self) -> None:
        tokens = prompt(300)
        assert SyntheticEngine(seed=1).serve(tokens).output == SyntheticEngine(seed=2).serve(tokens).output

    @pytest.mark.parametrize("changed", [0, 150, 299])
    def test_every_token_counts(self, changed: int) -> None:
        tokens, other = prompt(300), prompt(300)
        other[changed] += 1
        assert SyntheticEngine().serve(tokens).output != SyntheticEngine().serve(other).output

    def test_computing_in_parts_is_computing(self) -> None:
        tokens = prompt(300)
        engine = SyntheticEngine()
        request = engine.admit(tokens)
        for until in (1, 63, 64, 65, 200, 300):
            engine.compute(request, until)
        assert engine.output(request) == SyntheticEngine(seed=2).serve(tokens).output

    def test_blocks_are_taken_back(self) -> None:
        engine = SyntheticEngine(blocks_count=60)
        outputs = {engine.serve(prompt(300)).output for _ in range(5)}
        assert len(outputs) == 1


class TestWithAStore:
    @pytest.mark.parametrize("length", [2, 17, 64, 65, 66, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 100, 4 * CHUNK])
    def test_another_engine_computes_only_the_last_token(self, client: CopyingClient, length: int) -> None:
        tokens = prompt(length)
        saved = SyntheticEngine(seed=1).serve(tokens, client)
        restored = SyntheticEngine(seed=2).serve(tokens, client)
        assert (saved.reused_tokens, saved.computed_tokens) == (0, length)
        assert (restored.reused_tokens, restored.computed_tokens) == (length - 1, 1)
        assert restored.output == saved.output == SyntheticEngine(seed=3).serve(tokens).output

    @pytest.mark.parametrize("shared", [CHUNK, 3 * CHUNK, 3 * CHUNK + 40])
    def test_a_shared_beginning_is_reused_to_its_last_boundary(self, client: CopyingClient, shared: int) -> None:
        tokens = prompt(4 * CHUNK)
        other = tokens[:shared] + prompt(300, seed=2)
        SyntheticEngine(seed=1).serve(tokens, client)
        answer = SyntheticEngine(seed=2).serve(other, client)
        assert answer.reused_tokens == shared // CHUNK * CHUNK
        assert answer.output == SyntheticEngine(seed=3).serve(other).output

    def test_what_was_not_restored_is_not_saved(self, client: CopyingClient) -> None:
        """After a restore the blocks before the window and the earlier states hold noise. Were they saved, the next
        engine would restore it, and at those boundaries its output would be wrong."""
        tokens = prompt(4 * CHUNK)
        SyntheticEngine(seed=1).serve(tokens, client)
        second = SyntheticEngine(seed=2)
        request = second.admit(tokens)
        request.restored = second.restore(request, client)
        client.reset().wait()
        assert second.save(request, client) > 0
        for length in (CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK + 1, 4 * CHUNK):
            expected = SyntheticEngine(seed=3).serve(tokens[:length])
            answer = SyntheticEngine(seed=4).serve(tokens[:length], client)
            assert answer.output == expected.output

    def test_a_receipt_is_proved(self, client: CopyingClient) -> None:
        SyntheticEngine(seed=1, role=Role.PREFILL).serve(prompt(300), client, ticket="t")
        SyntheticEngine(seed=2, role=Role.DECODE).serve(prompt(300), client, ticket="t")
        found = client.receipts("t").wait()
        assert [receipt.verdict for receipt in found.receipts] == [Verdict.PROVED]  # type: ignore[union-attr]

    def test_uncommitted_objects_are_not_there(self, client: CopyingClient) -> None:
        engine = SyntheticEngine(seed=1)
        request = engine.admit(prompt(300))
        engine.compute(request, 299)
        assert engine.write(request, client)
        answer = SyntheticEngine(seed=2).serve(prompt(300), client)
        assert (answer.reused_tokens, answer.reason) == (0, MissReason.PENDING)

    def test_without_the_store_everything_is_computed(self, tmp_path: Path) -> None:
        with CopyingClient(str(tmp_path / "nobody.sock"), namespace=NAMESPACE) as client:
            answer = SyntheticEngine().serve(prompt(100), client)
        assert (answer.reused_tokens, answer.reason) == (0, MissReason.STORE_UNREACHABLE)

    def test_one_wrong_byte_is_a_wrong_output(self, client: CopyingClient) -> None:
        tokens = prompt(2 * CHUNK + 100)
        expected = SyntheticEngine(seed=1).serve(tokens, client).output
        engine = SyntheticEngine(seed=2)
        request = engine.admit(tokens)
        engine.restore(request, client)
        restored = engine.memory.copy()
        for at in bytes_read(engine, request, random.Random(3)):
            engine.memory[:] = restored
            engine.memory[at] ^= 1
            request.computed = len(tokens) - 1
            engine.compute(request, len(tokens))
            assert engine.output(request) != expected, f"byte {at} does not matter"


def bytes_read(engine: SyntheticEngine, request: Request, pick: random.Random) -> Iterator[int]:
    """Places in memory of some restored bytes that the last token needs: of any token, layer and group."""

    def place(layer: LayerView, block: int, offset: int) -> int:
        return layer.offset + block * layer.stride_bytes + offset

    last = len(request.tokens) - 1
    for _ in range(40):
        for group, lowest in ((FULL, 0), (SLIDING, last + 1 - WINDOW_TOKENS)):
            layout = engine.layouts[group]
            layer, token = pick.choice(layout.layers), pick.randrange(lowest, last)
            block, row = divmod(token, layout.spec.block_tokens)
            size = layer.page_bytes // layout.spec.block_tokens
            yield place(layer, request.tables[group][block], row * size + pick.randrange(size))
        layout = engine.layouts[STATE]
        layer = pick.choice(layout.layers)
        slot = request.tables[STATE][(last - 1) // layout.spec.block_tokens]
        yield place(layer, slot, pick.randrange(layer.page_bytes))
