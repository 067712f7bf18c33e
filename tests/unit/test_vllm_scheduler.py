"""The scheduler half against vLLM's own classes, and what names an engine: no engine is started, requests are fakes.

Everything here needs vLLM. When the store is asked is in test_early; what is saved is in tests/engine/test_saves.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvtally.client import Lease, StoreClient
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Half, Loaded
from kvtally.testing.models import RECIPES, Recipe
from kvtally.wire.messages import Found, Staged
from tests.unit.early_kit import CHUNK, DENSE, Asked, lookups, request, save, scheduler_half, step, store
from tests.unit.shell import Bench
from tests.waiting import Clock, eventually

__all__ = ["lookups", "store"]  # fixtures
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 16
WINDOW = 64
FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=BLOCK, page_bytes=((64,),))
SLIDING = GroupSpec(kind=GroupKind.SLIDING, block_tokens=BLOCK, page_bytes=((64,),), window_tokens=WINDOW)
RECURRENT = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=BLOCK, page_bytes=((64,),))


def layout(*groups: GroupSpec, namespace: Namespace = DENSE) -> Any:
    from kvtally.vllm.layout import EngineLayout

    count = len(groups)
    named = structs.replace(namespace, groups=groups)
    return EngineLayout(named, tuple(range(count)), tuple((f"l{group}",) for group in range(count)), BLOCK)


@pytest.fixture
def half(lookups: Asked) -> Callable[..., Any]:
    def make(*groups: GroupSpec, **settings: Any) -> Any:
        made = scheduler_half(layout(*groups), lookups, **settings)
        blocks = SimpleNamespace(
            num_gpu_blocks=1000, blocks=range(1000), touch=lambda _: None, free_blocks=lambda _: None
        )
        made.bind(SimpleNamespace(block_pool=blocks))  # type: ignore[arg-type]
        return made

    return make


def told(answer: Any) -> Callable[[Any], Any]:
    """The store has answered this, whatever it is asked."""

    def tell(tracked: Any) -> Any:
        tracked.attempt.answer, tracked.attempt.lease = answer, answer.lease
        return answer

    return tell


# ---- divergence


@pytest.mark.parametrize(
    ("groups", "is_supported"),
    [((FULL,), False), ((FULL, RECURRENT), True), ((FULL, SLIDING), False), ((FULL, SLIDING, RECURRENT), False)],
)
def test_attention_without_its_state_is_taken_only_where_all_of_it_is_there(
    half: Callable[..., Any], groups: tuple[GroupSpec, ...], is_supported: bool
) -> None:
    assert half(*groups).loads.supports_divergence is is_supported


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_whose_state_only_we_have_is_not_overtaken_for_ever(
    half: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """vLLM must ask about it without divergence. If that were for one step, and others took the room in it, it would be
    put off again when there is room the next time, and so on."""
    from kvtally.vllm.lookup_thread import LookupAnswer

    made, asked = half(FULL, RECURRENT), request()
    made.loads._manager.get_computed_blocks = lambda _: (None, 0, 0)  # without a state nothing of it counts
    lease = SimpleNamespace(is_live=True, share=lambda: None, sources=Loaded(host=2 * CHUNK))
    answer = LookupAnswer(2 * CHUNK, [CHUNK, 2 * CHUNK], lease, "", 0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(made.policy, "answer", told(answer))
    made.on_new_request(asked)
    assert made.matched_tokens(asked, 3 * CHUNK) == (None, False)  # vLLM holds that much attention
    for _ in range(3):  # steps in which vLLM does not come to it
        made.build_step(step({}))
        assert not made.loads.supports_divergence
    if is_aborted:
        made.finished(asked, ())
    else:
        assert made.matched_tokens(asked, 0) == (2 * CHUNK, True)
        made.after_alloc(asked, SimpleNamespace(get_block_ids=lambda group_ids: ([1], [2])), 2 * CHUNK)
    assert made.loads.supports_divergence


def test_what_vllm_holds_of_full_attention_says_nothing_about_a_window() -> None:
    """Why: vLLM counts the full attention it holds, and hands out window blocks below that which hold nothing. We load
    from its count on, so nobody would ever write them."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

    from kvtally.vllm.step_jobs import LoadJob
    from kvtally.vllm.worker import WorkerHalf

    init_none_hash(sha256)
    plain: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    state = MambaSpec(block_size=BLOCK, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
    specs = [FullAttentionSpec(**plain), SlidingWindowSpec(**plain, sliding_window=WINDOW), state]
    config = KVCacheConfig(
        num_blocks=200,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"l{group}"], spec) for group, spec in enumerate(specs)],
        prefix_cache_retention_interval=0,
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
    )
    manager = KVCacheManager(config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK)

    def asked(name: str, tokens: list[int]) -> Any:
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=4),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )

    draw = random.Random(1)
    shared = draw.choices(range(1000), k=320)
    first = asked("first", shared + draw.choices(range(1000), k=320))
    while first.num_computed_tokens < first.num_tokens:
        count = min(160, first.num_tokens - first.num_computed_tokens)
        assert manager.allocate_slots(first, count) is not None
        first.num_computed_tokens += count
        manager.new_step_starts()
    manager.free(first)

    second = asked("second", shared + draw.choices(range(1000), k=40))  # the store has all of it
    end = second.num_tokens - 1
    blocks, held, *_ = manager.get_computed_blocks_for_connector(second)
    manager.allocate_slots(
        second,
        0,
        num_new_computed_tokens=held,
        new_computed_blocks=blocks,
        num_external_computed_tokens=end - held,
        delay_cache_blocks=True,
    )
    tables: Any = [list(table) for table in manager.get_block_ids("second")]
    worker = WorkerHalf(layout(FULL, SLIDING, RECURRENT), 0, lambda: StoreClient("nowhere"))
    lease: Any = None
    load = LoadJob("second", lease, [256, end], end, held, tables)
    window = manager.coordinator.single_type_managers[1].req_to_blocks["second"]
    written = {block for index in range(2) for block in worker._targets(load, index, 1)[0]}
    unwritten = [block for block in window if block.block_hash is None and block.block_id not in {0, *written}]
    assert held == 320
    assert unwritten


# ---- requests that are left to the engine's own cache


def test_what_was_covered_and_is_evicted_while_it_waits_is_loaded(
    half: Callable[..., Any], bench: Bench, clock: Clock
) -> None:
    tokens = list(range(2000))
    save(bench, tokens)
    scheduler = half(FULL)
    clock.stop()
    scheduler.policy.step_launched(4000)
    clock.forward(0.2)
    scheduler.policy.step_done()  # an engine of some 20,000 tokens a second
    asked = request("r", tokens)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 1984) == (0, False)
    assert scheduler._requests["r"].attempt.known_tokens == 31 * CHUNK
    found = (None, False)  # there was no room for it, and others took the blocks
    while found[0] is None:
        found = scheduler.matched_tokens(asked, 0)
    assert found == (1984, True)
    assert scheduler._requests["r"].attempt.known_tokens == 31 * CHUNK


def test_chunks_that_are_gone_everywhere_are_saved_again(half: Callable[..., Any], lookups: Asked) -> None:
    scheduler = half(FULL)
    scheduler.policy.is_trifle = lambda track, tokens: tokens < CHUNK
    asked = request("r", list(range(200)))
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 192) == (0, False)
    while scheduler.matched_tokens(asked, 0)[0] is None:
        pass
    tables = [list(range(1, 14))]
    state = SimpleNamespace(get_block_ids=lambda _: tables, boundary_state_offloads={})
    (job,) = scheduler.build_step(step({"r": 200}, kv_connector_block_state=state)).saves
    assert [item.end_tokens for item in job.items] == [64, 128, 192, 199]


# ---- lives


class Filed(list[Half]):
    """The halves that a scheduler half files, in order."""

    def __init__(self, lookups: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(lookups, "file", lambda ticket, half: self.append(half))


@pytest.fixture
def filed(lookups: Asked, monkeypatch: pytest.MonkeyPatch) -> Filed:
    return Filed(lookups, monkeypatch)


def found(scheduler: Any, asked: Any) -> tuple[int, bool]:
    while (answer := scheduler.matched_tokens(asked, 0))[0] is None:
        pass
    return answer  # type: ignore[no-any-return]


def load(scheduler: Any, asked: Any, tokens: int, **report: Any) -> None:
    """vLLM gives it blocks, the worker fills them, and vLLM goes on with it."""
    from kvtally.vllm.step_jobs import LoadReport, WorkerReport

    blocks = SimpleNamespace(get_block_ids=lambda group_ids: [list(range(1, 14))])
    scheduler.after_alloc(asked, blocks, tokens)
    scheduler.update(WorkerReport(loads={asked.request_id: LoadReport(**report)}))
    scheduler.after_alloc(asked, blocks, 0)
    asked.num_computed_tokens = tokens


def preempt(asked: Any) -> None:
    asked.num_preemptions += 1
    asked.num_computed_tokens = 0


def computed(scheduler: Any, asked: Any, tokens: int) -> list[int]:
    """A step computes so many tokens of it; where the objects end that are saved with that step."""
    state = SimpleNamespace(get_block_ids=lambda _: [list(range(1, 14))], boundary_state_offloads={})
    metadata = scheduler.build_step(step({asked.request_id: tokens}, kv_connector_block_state=state))
    asked.num_computed_tokens += tokens
    return [item.end_tokens for job in metadata.saves for item in job.items]


def test_a_receipt_is_of_the_life_that_gave_the_answer(
    half: Callable[..., Any], lookups: Asked, filed: Filed, bench: Bench
) -> None:
    """Preempted in mid-prompt, and then the store has forgotten: what the first life had loaded is not claimed."""
    save(bench)
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    assert found(scheduler, asked) == (192, True)
    load(scheduler, asked, 192, moved_bytes=768, seconds=0.5, verified=True)
    assert computed(scheduler, asked, 4) == []
    preempt(asked)
    assert lookups.reset(5)
    assert found(scheduler, asked) == (0, False)
    scheduler.after_alloc(asked, None, 0)
    assert computed(scheduler, asked, 200) == [64, 128, 192, 199]  # it saves its beginning again
    (told,) = filed
    assert (told.tokens_gpu, told.tokens_host, told.tokens_disk, told.computed_tokens) == (0, 0, 0, 200)
    assert (told.moved_bytes, told.load_ms, told.verified, told.reason) == (0, 0.0, False, "absent")


def test_a_later_life_that_loads_says_so(half: Callable[..., Any], filed: Filed, bench: Bench) -> None:
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    assert found(scheduler, asked) == (0, False)
    assert computed(scheduler, asked, 100) == [64]
    preempt(asked)
    save(bench)
    assert found(scheduler, asked) == (192, True)
    load(scheduler, asked, 192, moved_bytes=768, verified=True)
    assert computed(scheduler, asked, 8) == [199]
    (told,) = filed
    assert (told.tokens_gpu, told.tokens_host, told.computed_tokens, told.verified) == (0, 192, 8, True)


@pytest.mark.parametrize("held", [0, 64])
def test_a_receipt_says_where_the_store_had_what_was_loaded(
    half: Callable[..., Any], filed: Filed, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """And so do the engine's counters, and what vLLM is told. What the engine's own cache held was not loaded."""
    from kvtally.vllm.connector import HIT_SOURCES
    from kvtally.vllm.counters import TOKENS
    from kvtally.vllm.lookup_thread import LookupAnswer

    staged = Staged(0, 7, 192, disk_tokens=20, peer_tokens=60, pool_tokens=40)
    session = SimpleNamespace(alive=True, store="s")
    lease: Any = Lease(
        session=session,  # type: ignore[arg-type]
        id=7,
        found=Found(0, 192, 7, staging=3),
        chains=b"",
        expires_ns=1 << 62,
        outcome=staged,
    )
    made, asked = half(FULL), request()
    monkeypatch.setattr(made.policy, "answer", told(LookupAnswer(192, [64, 128, 192], lease)))
    made.on_new_request(asked)
    assert made.matched_tokens(asked, held) == (192 - held, True)
    load(made, asked, 192 - held, verified=True)
    asked.num_computed_tokens = 192
    computed(made, asked, 8)
    (filed_half,) = filed
    places = {"gpu": held, "host": 72 - held, "disk": 20, "peer": 60, "pool": 40}
    assert filed_half.sources == {place: tokens for place, tokens in places.items() if tokens}
    assert filed_half.reused_tokens == 192
    del places["gpu"]
    assert made.counters.counts[TOKENS.name] == places == made.loading("r")._asdict()
    assert set(HIT_SOURCES) == set(places)


def test_tokens_that_went_out_keep_their_receipt(half: Callable[..., Any], filed: Filed) -> None:
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    found(scheduler, asked)
    computed(scheduler, asked, 200)
    asked.num_output_tokens, asked.num_tokens, asked.all_token_ids = 1, 201, [*asked.all_token_ids, 5]
    preempt(asked)
    found(scheduler, asked)
    computed(scheduler, asked, 201)
    scheduler.finished(asked, ())
    assert len(filed) == 1


def test_a_token_that_vllm_drops_was_nobodys_answer(half: Callable[..., Any], filed: Filed, bench: Bench) -> None:
    """`reset_prefix_cache` preempts what runs, and throws away what is being computed."""
    save(bench)
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    found(scheduler, asked)
    load(scheduler, asked, 192, verified=True)
    computed(scheduler, asked, 8)
    preempt(asked)
    asked.drop_stale_output = True
    scheduler.policy.forget(scheduler._requests["r"])
    scheduler._thread.reset(5)
    found(scheduler, asked)
    computed(scheduler, asked, 200)
    assert [told.computed_tokens for told in filed] == [8, 200]


def test_a_load_that_failed_is_the_reason_in_every_later_life(
    half: Callable[..., Any], filed: Filed, bench: Bench
) -> None:
    save(bench)
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    found(scheduler, asked)
    load(scheduler, asked, 192, reason="checksum")
    asked.num_computed_tokens = 0
    assert found(scheduler, asked) == (0, False)
    computed(scheduler, asked, 100)
    preempt(asked)
    assert found(scheduler, asked) == (0, False)
    computed(scheduler, asked, 200)
    (told,) = filed
    assert (told.reused_tokens, told.computed_tokens, told.reason) == (0, 200, "checksum")


def test_a_preempted_request_waits_again(half: Callable[..., Any], lookups: Asked) -> None:
    """What waits is told to the store with every early lookup, and an engine in which nothing runs may wait for it."""
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    found(scheduler, asked)
    computed(scheduler, asked, 100)
    preempt(asked)
    found(scheduler, asked)
    assert (scheduler.policy._waiting, scheduler.policy._running) == (1, 0)
    computed(scheduler, asked, 100)
    scheduler.finished(asked, ())
    assert (scheduler.policy._waiting, scheduler.policy._running) == (0, 0)


# ---- prompts that are too short


def test_a_prompt_of_one_token_says_why_nothing_of_it_is_reused(half: Callable[..., Any], filed: Filed) -> None:
    scheduler, asked = half(FULL), request("r", [7])
    scheduler.on_new_request(asked)
    assert found(scheduler, asked) == (0, False)
    computed(scheduler, asked, 1)
    (told,) = filed
    assert (told.reused_tokens, told.computed_tokens, told.reason) == (0, 1, "no_gain")
    assert scheduler.counters.counts["misses"] == {"no_gain": 1}


def test_one_token_that_is_to_be_handed_over_says_why_it_is_not(half: Callable[..., Any], filed: Filed) -> None:
    scheduler = half(FULL)
    asked = request("r", [7], kv_transfer_params={"kvtally": {"ticket": "t", "role": "prefill"}})
    scheduler.on_new_request(asked)
    found(scheduler, asked)
    computed(scheduler, asked, 1)
    answer = scheduler.finished(asked, [[1]])
    assert (answer.saved_tokens, answer.reason) == (0, "no_gain")


@pytest.mark.parametrize(("held", "reason"), [(0, "no_gain"), (16, "")])
def test_what_is_computed_at_once_says_so_where_nothing_of_it_is_held(
    half: Callable[..., Any], filed: Filed, held: int, reason: str
) -> None:
    scheduler = half(FULL)
    scheduler.policy.is_trifle = lambda track, tokens: tokens < CHUNK
    asked = request("r", list(range(40)))
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, held) == (0, False)
    asked.num_computed_tokens = held
    computed(scheduler, asked, 40 - held)
    (told,) = filed
    assert (told.tokens_gpu, told.computed_tokens, told.reason) == (held, 40 - held, reason)


# ---- streaming input


@pytest.mark.parametrize("resumable", [False, True])
def test_nothing_of_a_streaming_input_is_saved_where_there_are_states(
    half: Callable[..., Any], resumable: bool
) -> None:
    """Where a part of it ended, vLLM went back by the token that a step under way had put into the state already."""
    recurrent = structs.replace(RECURRENT, block_tokens=CHUNK)
    scheduler = half(FULL, recurrent, reads=False)
    asked = request("r", list(range(128)), resumable=resumable, num_in_flight_tokens=0)
    scheduler.on_new_request(asked)
    scheduler.matched_tokens(asked, 0)
    tables = [list(range(1, 10)), [11, 12, 13]]
    offers = {"r": [(1, 12, 128)]}
    state = SimpleNamespace(get_block_ids=lambda _: tables, boundary_state_offloads=offers)
    metadata = scheduler.build_step(step({"r": 128}, kv_connector_block_state=state))
    assert bool(metadata.saves) is not resumable
    asked.num_tokens, asked.num_computed_tokens = 138, 137
    asked.all_token_ids = list(range(138))
    scheduler.finished(asked, tables)
    assert bool(scheduler.saves._late) is not resumable


def test_a_streaming_input_without_states_is_saved(half: Callable[..., Any]) -> None:
    scheduler = half(FULL, reads=False)
    asked = request("r", list(range(128)), resumable=True)
    scheduler.on_new_request(asked)
    scheduler.matched_tokens(asked, 0)
    state = SimpleNamespace(get_block_ids=lambda _: [list(range(1, 10))], boundary_state_offloads={})
    assert scheduler.build_step(step({"r": 128}, kv_connector_block_state=state)).saves


# ---- which states are saved


class Prefill:
    """A prompt of a hybrid model with blocks of 16 and chunks of 64, of which each step computes a part."""

    def __init__(self, half: Callable[..., Any], tokens: int, *, shared: int = 0) -> None:
        self.half = half(FULL, RECURRENT, reads=False)
        self.asked = request("r", list(range(tokens)), shared_prefix_boundary=shared, num_in_flight_tokens=0)
        self.half.on_new_request(self.asked)
        self.half.matched_tokens(self.asked, 0)
        self.blocks = list(range(1, 2 + tokens // BLOCK))
        self.tables = 0  # how often vLLM was asked for them

    def step(self, tokens: int, offered: list[int]) -> dict[int, list[int]]:
        """It computes so many tokens, and vLLM offers these states: where objects end, and of which groups."""

        def table(_: str) -> list[list[int]]:
            self.tables += 1
            return [self.blocks, []]

        offers = {"r": [(1, 500 + end // BLOCK, end) for end in offered]}
        state = SimpleNamespace(get_block_ids=table, boundary_state_offloads=offers)
        metadata = self.half.build_step(step({"r": tokens}, kv_connector_block_state=state))
        self.asked.num_computed_tokens += tokens
        saved: dict[int, list[int]] = {}
        for item in (item for job in metadata.saves for item in job.items):
            assert item.block_ids == ([500 + item.end_tokens // BLOCK] if item.group else self._blocks_of(item))
            saved.setdefault(item.end_tokens, []).append(item.group)
        return saved

    def _blocks_of(self, item: Any) -> list[int]:
        return self.blocks[item.start_tokens // BLOCK : -(-item.end_tokens // BLOCK)]


def test_the_last_state_of_a_prompt_is_saved_with_the_attention_up_to_it(half: Callable[..., Any]) -> None:
    assert Prefill(half, 190).step(190, [176]) == {64: [0], 128: [0], 176: [0, 1]}
    assert Prefill(half, 176).step(176, [160]) == {64: [0], 128: [0], 160: [0, 1]}
    assert Prefill(half, 193).step(193, [192]) == {64: [0], 128: [0], 192: [0, 1]}


def test_a_state_where_prompts_part_is_saved_with_the_attention_up_to_it(half: Callable[..., Any]) -> None:
    """vLLM stops at a block's end: there may be up to a block between it and what it was asked for."""
    prefill = Prefill(half, 400, shared=104)
    assert prefill.step(96, [96]) == {64: [0], 96: [0, 1]}
    assert prefill.step(32, [128]) == {128: [0, 1]}


def test_of_many_states_one_is_saved_for_each_chunk_and_the_last(half: Callable[..., Any]) -> None:
    """Steps of one block each, and vLLM keeps every state: with all of them, states would fill the store."""
    prefill, saved = Prefill(half, 400), {}
    for end in range(16, 400, 16):
        saved |= prefill.step(16, [end])
    assert [end for end, groups in saved.items() if 1 in groups] == [64, 128, 192, 256, 320, 384]


def test_steps_that_end_inside_chunks_leave_a_state_each_but_not_closer_than_a_chunk(half: Callable[..., Any]) -> None:
    prefill, saved = Prefill(half, 490), {}
    for end in range(48, 490, 48):
        saved |= prefill.step(48, [end])
    assert [end for end, groups in saved.items() if 1 in groups] == [96, 192, 288, 384, 480]
    assert saved[288] == [0, 1]


def test_of_an_answer_states_are_saved_at_chunks_only(half: Callable[..., Any]) -> None:
    prefill = Prefill(half, 100)
    assert prefill.step(100, [96]) == {64: [0], 96: [0, 1]}
    tables, saved = prefill.tables, {}
    prefill.asked.all_token_ids = list(range(180))
    prefill.asked.num_tokens = 180
    prefill.blocks = list(range(1, 13))
    for end in range(112, 176, 16):
        saved |= prefill.step(16, [end])
    assert [end for end, groups in saved.items() if 1 in groups] == [128]
    assert prefill.tables == tables + 1  # for the chunk; not for states that nobody keeps


def test_a_state_that_was_loaded_is_not_saved_again(half: Callable[..., Any]) -> None:
    """vLLM offers it again after the load."""
    from kvtally.vllm.lookup_thread import LookupAnswer

    prefill = Prefill(half, 190)
    prefill.half._requests["r"].attempt.answer = LookupAnswer(176, [64, 128, 176], None, "", 0.0)
    prefill.half._requests["r"].attempt.known_tokens = 2 * CHUNK
    prefill.asked.num_computed_tokens = 176
    assert prefill.step(14, [176]) == {}


# ---- adapters


def adapted(name: str, folder: Path, **changes: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return request(name, lora_request=LoRARequest("sql", 1, str(folder)), **changes)


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"1" * 100)
    return tmp_path / "lora"


def test_requests_with_an_adapter_are_saved_under_its_name(
    half: Callable[..., Any], filed: Filed, adapter: Path, tmp_path: Path
) -> None:
    """And those of another engine, which has it elsewhere, under the same."""
    copied = Path(shutil.copytree(adapter, tmp_path / "copied"))
    saved = []
    for folder in (adapter, copied):
        scheduler = half(FULL)
        asked = adapted("r", folder)
        scheduler.on_new_request(asked)
        assert found(scheduler, asked) == (0, False)
        saved.append(chains_saved(scheduler, "r"))
        scheduler.stop()
    assert saved[0] == saved[1]
    bare = half(FULL)
    assert asks(bare, "r") == 0
    assert not set(saved[0]) & set(chains_saved(bare, "r"))
    assert len(saved[0]) == 4


@pytest.mark.parametrize("is_known", [False, True])
def test_an_adapter_without_a_name_is_neither_read_nor_saved(
    half: Callable[..., Any], lookups: Asked, filed: Filed, adapter: Path, is_known: bool
) -> None:
    """Its files were replaced under this engine; or they are being read, and the wait for that is over."""
    from vllm.v1.request import RequestStatus

    from kvtally.vllm.adapters import Adapter
    from kvtally.vllm.counters import MISSES

    scheduler, unnamed = half(FULL), Adapter("" if is_known else None)
    scheduler._adapters.adapter = lambda lora: unnamed
    ticket = {"kvtally": {"ticket": "t", "role": "prefill"}}
    for asked in (adapted("plain", adapter), adapted("prefill", adapter, kv_transfer_params=ticket)):
        scheduler.on_new_request(asked)
        scheduler.policy.step_launched(0)
        if not is_known:
            assert scheduler.matched_tokens(asked, 0) == (None, False)
            lookups.asked[-1].deadline_ns = 0
            eventually(lambda: lookups.asked[-1].answer is not None)
        assert found(scheduler, asked) == (0, False)
        assert chains_saved(scheduler, asked.request_id) == []
        asked.status = RequestStatus.FINISHED_STOPPED
        told = scheduler.finished(asked, [list(range(1, 14))])
        assert (told.reason, told.saved_tokens) == ("unknown_adapter", 0) if asked.kv_transfer_params else told is None
    assert [half.reason for half in filed] == ["unknown_adapter"] * 2
    assert scheduler.counters.counts[MISSES.name] == {"unknown_adapter": 2}
    assert not scheduler.saves.is_busy
    unnamed.identity = ""  # for the thread, which would wait for it


# ---- stores of other machines


def handed(deliver: str, **changes: Any) -> Any:
    told = {"ticket": "t", "role": "prefill", "source": "tcp://10.0.0.9:7400", "deliver": deliver}
    return request("r", kv_transfer_params={"kvtally": told}, **changes)


def test_a_handoff_says_where_its_store_is(half: Callable[..., Any], lookups: Asked, filed: Filed) -> None:
    from vllm.v1.request import RequestStatus

    scheduler, asked = half(FULL), handed("tcp://10.0.0.8:7400")
    scheduler.on_new_request(asked)
    assert found(scheduler, asked) == (0, False)
    assert lookups.asked[0].deliver == "tcp://10.0.0.8:7400"
    assert lookups.asked[0].handoff is not None
    assert lookups.asked[0].handoff.source == "tcp://10.0.0.9:7400"
    asked.num_computed_tokens = asked.num_prompt_tokens
    asked.status = RequestStatus.FINISHED_STOPPED
    lookups.address = "tcp://10.0.0.7:7400"
    told = scheduler.finished(asked, [list(range(1, 14))])
    assert (told.address, told.saved_tokens) == ("tcp://10.0.0.7:7400", 199)


def test_what_is_not_saved_is_offered_to_nobody(half: Callable[..., Any], lookups: Asked) -> None:
    for settings, changes in (({"may_save": False}, {}), ({}, {"skip_reading_prefix_cache": True})):
        scheduler, asked = half(FULL, **settings), handed("tcp://10.0.0.8:7400", **changes)
        scheduler.on_new_request(asked)
        scheduler.policy.step_launched(0)
        assert scheduler.policy._lookup(scheduler._requests["r"]).deliver == ""


def test_an_engine_that_only_saves_has_its_prompts_offered_too(
    half: Callable[..., Any], lookups: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtally.vllm.counters import MISSES

    walk, walked = lookups.walk, list[Any]()

    def note(lookup: Any) -> None:
        walked.append(lookup)
        walk(lookup)

    monkeypatch.setattr(lookups, "walk", note)
    scheduler, asked = half(FULL, reads=False), handed("tcp://10.0.0.8:7400")
    scheduler.on_new_request(asked)
    assert found(scheduler, asked) == found(scheduler, asked) == (0, False)
    assert [(lookup.deliver, lookup.is_walked) for lookup in walked] == [("tcp://10.0.0.8:7400", True)]
    assert lookups.asked == []
    assert scheduler.counters.counts == {MISSES.name: {"refused": 1}}
    assert chains_saved(scheduler, "r")


# ---- images


def test_what_has_images_that_are_only_counted_is_neither_read_nor_saved(
    half: Callable[..., Any], lookups: Asked
) -> None:
    made = half(FULL, names_images=False)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=3, length=9))
    for asked in (request("image", mm_features=[image]), request("later", resumable=True), request("text")):
        made.on_new_request(asked)
    assert {name: track.is_opaque for name, track in made._requests.items()} == {
        "image": True,
        "later": True,
        "text": False,
    }
    assert [name for name, track in made._requests.items() if track.may_save] == ["text"]
    assert made.matched_tokens(request("image", mm_features=[image]), 0) == (0, False)
    assert [asked.tokens for asked in lookups.asked] == []  # the text's turn comes with the next step


def test_a_state_is_asked_for_whenever_vllm_comes_to_the_request(
    half: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has attention and no state: vLLM is to make one where that ends, also if there is no room at first."""
    from kvtally.vllm.lookup_thread import LookupAnswer

    made, asked = half(FULL, RECURRENT), request()
    monkeypatch.setattr(made.policy, "answer", told(LookupAnswer(reason="absent", attention_tokens=2 * CHUNK)))
    made.on_new_request(asked)
    for own in (0, BLOCK):
        asked.shared_prefix_boundary = own  # what vLLM's own cache has seen
        assert made.matched_tokens(asked, 0) == (0, False)
        assert asked.shared_prefix_boundary == 2 * CHUNK


# ---- resets


def asks(scheduler: Any, name: str) -> int | None:
    """How many tokens a new request by this name may load."""
    asked = request(name)
    scheduler.on_new_request(asked)
    return found(scheduler, asked)[0]


def chains_saved(scheduler: Any, name: str) -> list[bytes]:
    """The names under which a request that is computed is saved."""
    asked = scheduler._requests[name].request
    state = SimpleNamespace(get_block_ids=lambda _: [list(range(1, 14))], boundary_state_offloads={})
    metadata = scheduler.build_step(step({name: 200}, kv_connector_block_state=state))
    asked.num_computed_tokens += 200
    return [item.chain for job in metadata.saves for item in job.items]


def test_a_reset_engine_parts_from_the_others_and_takes_nothing_from_them(
    half: Callable[..., Any], bench: Bench
) -> None:
    """It may sleep and wake with other weights: what it had saved is not its own any more, but is still theirs."""
    save(bench)
    sleeper, other = half(FULL), half(FULL)
    assert asks(sleeper, "before") == 192
    assert sleeper.reset(5)
    assert asks(sleeper, "after") == 0
    assert asks(other, "other") == 192
    after = chains_saved(sleeper, "after")
    assert asks(sleeper, "again") == 0
    assert chains_saved(sleeper, "again") == after  # it shares with itself
    fresh = half(FULL)
    fresh.on_new_request(request("fresh"))
    found(fresh, fresh._requests["fresh"].request)
    fresh._requests["fresh"].attempt.known_tokens = 0
    assert not set(after) & set(chains_saved(fresh, "fresh"))
    sleeper.saves._let_go(list(sleeper.saves._held))
    assert sleeper.reset(5)
    asks(sleeper, "third")
    assert not set(after) & set(chains_saved(sleeper, "third"))


def test_requests_that_are_under_way_at_a_reset_are_not_mixed(half: Callable[..., Any], bench: Bench) -> None:
    """vLLM preempts them and computes them again, by other weights perhaps: their old name is wrong then."""
    save(bench)
    scheduler, asked = half(FULL), request()
    scheduler.on_new_request(asked)
    assert scheduler.reset(5)
    preempt(asked)
    assert found(scheduler, asked) == (0, False)
    assert chains_saved(scheduler, "r") == []


def test_a_reset_while_blocks_are_held_fails(half: Callable[..., Any], filed: Filed) -> None:
    scheduler = half(FULL)
    assert asks(scheduler, "r") == 0
    assert chains_saved(scheduler, "r")
    for on_reset in ("part", "keep"):
        scheduler._on_reset = on_reset
        assert not scheduler.reset(5)


def test_blocks_are_held_for_saves_only_while_the_engine_has_requests(half: Callable[..., Any], filed: Filed) -> None:
    """A save may outlive the last request. The next one finds the blocks held again, unless they are saved by then."""
    from kvtally.vllm.step_jobs import WorkerReport

    scheduler, held = half(FULL), Counter[int]()
    pool = SimpleNamespace(num_gpu_blocks=1000, blocks=range(1000), touch=held.update, free_blocks=held.subtract)
    scheduler.bind(SimpleNamespace(block_pool=pool))
    assert asks(scheduler, "first") == 0
    assert chains_saved(scheduler, "first")
    saving = +held
    assert saving
    scheduler.saves.rest()
    scheduler.saves.rest()  # another request's end changes nothing
    assert not +held
    scheduler.on_new_request(request("second"))
    assert +held == saving
    scheduler.saves.rest()
    scheduler.update_saves(WorkerReport(saved=dict.fromkeys(scheduler.saves._held, 1)))
    scheduler.on_new_request(request("third"))
    assert not +held


def test_an_engine_whose_weights_stay_forgets_nothing(half: Callable[..., Any], bench: Bench) -> None:
    save(bench)
    scheduler = half(FULL, on_reset="keep")
    assert scheduler.reset(5)
    assert asks(scheduler, "after") == 192


def test_engines_that_get_new_weights_together_forget_together(half: Callable[..., Any], bench: Bench) -> None:
    save(bench)
    scheduler, other = half(FULL, on_reset="forget"), half(FULL)
    assert scheduler.reset(5)
    assert asks(other, "other") == 0
    after = asks(scheduler, "after")
    assert after == 0
    other._requests["other"].attempt.known_tokens = 0
    assert chains_saved(scheduler, "after") == chains_saved(other, "other")  # and share again


# ---- the configuration's name


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def digest(path: Path, dtype: str, **settings: Any) -> str:
        from vllm.config import ModelConfig

        from kvtally.vllm.layout import _model_detail

        model = ModelConfig(model=str(path), tokenizer=str(path), skip_tokenizer_init=True, dtype=dtype, **settings)
        cache = SimpleNamespace(cache_dtype="auto")
        config: Any = SimpleNamespace(model_config=model, cache_config=cache, lora_config=None)
        detail = _model_detail(config)
        return detail.get("overrides", "") + detail.get("max_model_len", "")

    return digest


def configuration(recipe: Recipe, path: Path, **changes: Any) -> Path:
    import transformers  # type: ignore[import-not-found,import-untyped,unused-ignore]

    transformers.AutoConfig.for_model(recipe.model_type, **{**recipe.config, **changes}).save_pretrained(path)
    return path


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_model_in_another_folder_has_the_same_configuration(
    digest: Callable[..., str], tmp_path: Path, recipe: Recipe
) -> None:
    here = configuration(recipe, tmp_path / "here")
    there = Path(shutil.copytree(here, tmp_path / "there" / "as well"))
    assert digest(here, recipe.dtype) == digest(there, recipe.dtype)
    assert digest(here, recipe.dtype, max_model_len=1024) == digest(here, recipe.dtype)


def test_overrides_and_another_file_are_another_configuration(digest: Callable[..., str], tmp_path: Path) -> None:
    recipe = RECIPES["dense"]
    path = configuration(recipe, tmp_path / "model")
    tree = json.loads((path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192}
    tree["rope_parameters"]["rope_theta"] = 77.0
    (tmp_path / "config.json").write_text(json.dumps(tree))
    digests = [
        digest(path, recipe.dtype),
        digest(path, recipe.dtype, hf_overrides={"rope_parameters": yarn}),
        digest(path, recipe.dtype, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        digest(path, recipe.dtype, hf_config_path=str(tmp_path)),
    ]
    assert len(set(digests)) == len(digests)


def test_with_longrope_the_longest_context_counts(digest: Callable[..., str], tmp_path: Path) -> None:
    recipe = RECIPES["dense"]
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    path = configuration(recipe, tmp_path, rope_parameters=rope)
    digests = {digest(path, recipe.dtype, max_model_len=length) for length in (2048, 8192)}
    assert len(digests) == 2


# ---- how long a chunk is


def sized(layers: int, page_bytes: int, kind: GroupKind = GroupKind.FULL, *, window: int = 0) -> GroupSpec:
    return GroupSpec(kind=kind, block_tokens=BLOCK, page_bytes=((page_bytes,) * layers,), window_tokens=window)


@pytest.mark.parametrize(
    ("group", "tokens"),
    [
        (sized(36, 64 << 10), 256),  # Qwen3-8B
        (sized(32, 256 << 10), 128),  # Llama-2-7B: 512 KiB for each token
        (sized(80, 256 << 10), 32),
        (sized(32, 256 << 10, GroupKind.SLIDING, window=64), 256),  # a window's objects are short
        (sized(1, 8 << 20, GroupKind.RECURRENT), 256),  # a state is one block, however long the chunk
    ],
)
def test_a_chunk_is_short_where_its_tokens_are_large(group: GroupSpec, tokens: int) -> None:
    from kvtally.vllm.layout import _chunk_tokens
    from kvtally.wire.limits import Limits

    assert _chunk_tokens((group,), BLOCK) == tokens
    namespace = structs.replace(DENSE, groups=(group,), chunk_tokens=tokens)
    assert namespace.object_bytes(0, 0, tokens) <= Limits().object_bytes


def test_what_no_object_holds_is_refused_at_the_start() -> None:
    from kvtally.errors import IncompatibleError
    from kvtally.vllm.layout import _chunk_tokens

    with pytest.raises(IncompatibleError, match="on one rank"):
        _chunk_tokens((sized(80, 2 << 20),), BLOCK)
