"""What the connector tells people: its counts, the advice on states, KV events, and the reset of the cache.

What needs vLLM's own classes is marked `engine`; the rest runs without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.client import StoreClient
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.vllm.counters import BYTES, COUNTS, DURATIONS, LOAD, LOOKUPS, MISSES, SAVE, TOKENS, WAIT, Counters
from kvtally.vllm.lookup_thread import LookupThread
from kvtally.vllm.retention import advice
from kvtally.wire.messages import MissReason, Reset
from tests.unit.fake_store import NAMESPACE, World
from tests.waiting import HANG_S

# ---- counting

happenings = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(COUNTS), st.sampled_from(["a", "b"]), st.integers(0, 1 << 40)),
        st.tuples(st.sampled_from(DURATIONS), st.floats(0, 1e3)),
    )
)


def counted(happened: list[Any]) -> Counters:
    tally = Counters()
    for metric, *rest in happened:
        if len(rest) == 2:
            tally.count(metric, *rest)
        else:
            tally.observe(metric, *rest)
    return tally


@given(happenings, st.integers(0, 20))
def test_parts_add_up_to_the_whole(happened: list[Any], at: int) -> None:
    whole, first, second = counted(happened), counted(happened[:at]), counted(happened[at:])
    first.add(second.counts, second.seconds)
    assert (first.counts, first.seconds) == (whole.counts, whole.seconds)


@given(happenings)
def test_a_tally_survives_the_wire(happened: list[Any]) -> None:
    tally = counted(happened)
    data = msgspec.msgpack.decode(msgspec.msgpack.encode([tally.counts, tally.seconds]))
    assert data == [tally.counts, tally.seconds]


def test_taking_begins_anew() -> None:
    tally = Counters()
    tally.count(TOKENS, "host", 3)
    taken = tally.take()
    tally.count(TOKENS, "host", 4)
    assert (taken.counts, tally.counts) == ({"tokens": {"host": 3}}, {"tokens": {"host": 4}})
    assert tally.take().is_empty is False
    assert tally.is_empty


def test_nothing_is_nothing() -> None:
    tally = Counters()
    tally.count(TOKENS, "disk", 0)
    tally.observe(SAVE)
    assert tally.is_empty
    assert tally.summary() == {}


def test_the_line_that_people_read() -> None:
    tally = Counters()
    tally.count(LOOKUPS, "hit")
    tally.count(LOOKUPS, "miss", 2)
    tally.count(TOKENS, "host", 512)
    tally.count(BYTES, "load", 3 << 19)
    tally.count(MISSES, MissReason.STATE_ABSENT, 2)
    tally.observe(WAIT, 0.001, 0.002, 0.006)
    assert tally.summary() == {
        "lookups_hit": 1,
        "lookups_miss": 2,
        "tokens_host": 512,
        "load_MiB": 1.5,
        "misses_state_absent": 2,
        "wait_ms_mean": 3.0,
        "wait_ms_max": 6.0,
    }


# ---- where states are kept


def namespace(*kinds: GroupKind, chunk_tokens: int = 256) -> Namespace:
    groups = tuple(GroupSpec(kind=kind, block_tokens=256, page_bytes=((1 << 20, 1 << 20),)) for kind in kinds)
    return Namespace(model="m", groups=groups, chunk_tokens=chunk_tokens, alignment_tokens=256)


def test_a_hybrid_engine_is_told_what_to_set() -> None:
    hybrid = namespace(GroupKind.RECURRENT, GroupKind.RECURRENT, GroupKind.FULL, chunk_tokens=512)
    text = advice(hybrid, block_tokens=256, interval_tokens=0, step_tokens=8192)
    assert text is not None
    assert "--prefix-cache-retention-interval 512 " in text  # a state elsewhere than at a chunk's end is not saved
    assert "8192" in text
    assert "4MiB" in text


@pytest.mark.parametrize("interval", [256, None])
def test_who_keeps_states_is_not_lectured(interval: int | None) -> None:
    hybrid = namespace(GroupKind.RECURRENT, GroupKind.FULL)
    assert advice(hybrid, block_tokens=256, interval_tokens=interval, step_tokens=8192) is None


def test_a_model_without_states_needs_no_advice() -> None:
    assert advice(namespace(GroupKind.FULL), block_tokens=256, interval_tokens=0, step_tokens=8192) is None


# ---- reset


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def lookups(world: World) -> Iterator[LookupThread]:
    lookups = LookupThread(lambda: StoreClient(world.path, namespace=NAMESPACE), NAMESPACE)
    yield lookups
    lookups.stop()


def test_reset_reaches_the_store(world: World, lookups: LookupThread) -> None:
    store = world.store()
    lookups.start()
    assert lookups.reset(HANG_S)
    assert store.take(Reset).digest == b""  # the session's own namespace


def test_reset_without_a_store_fails(world: World, lookups: LookupThread) -> None:
    lookups.start()
    assert not lookups.reset(HANG_S)


def test_reset_does_not_wait_for_ever(world: World, lookups: LookupThread) -> None:
    store = world.store()
    store.on[Reset] = lambda request: []
    lookups.start()
    assert not lookups.reset(0.2)


# ---- with vLLM


def engine(test: Callable[..., None]) -> Callable[..., None]:
    """vLLM and torch warn on import of what they do themselves."""
    marked: Callable[..., None] = pytest.mark.engine(pytest.mark.filterwarnings("ignore")(test))
    return marked


@engine
def test_stats_travel_and_add_up() -> None:
    from kvtally.vllm.connector import KVTallyConnector
    from kvtally.vllm.stats import stats_of

    tally = Counters()
    tally.count(BYTES, "load", 1 << 20)
    tally.observe(LOAD, 0.5)
    stats = stats_of(tally)
    assert stats is not None
    other = KVTallyConnector.build_kv_connector_stats(copy.deepcopy(stats.to_dict()))
    assert other is not None
    total = stats.aggregate(other)
    assert total.reduce() == {"load_MiB": 2.0, "load_ms_mean": 500.0, "load_ms_max": 500.0}
    assert other.reduce()["load_MiB"] == 1.0
    total.reset()
    assert total.is_empty()
    assert stats_of(Counters()) is None


@engine
def test_prometheus_has_every_metric() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from kvtally.vllm.stats import PrometheusMetrics

    registry = CollectorRegistry()

    def within(kind: Any) -> Any:
        return lambda **settings: kind(registry=registry, **settings)

    types: dict[Any, Any] = {kind: within(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = PrometheusMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe({"counts": {"tokens": {"disk": 256}}, "seconds": {"wait_seconds": [0.02]}}, engine_idx=1)
    text = generate_latest(registry).decode()
    assert 'vllm:kvtally_tokens_total{engine="1",source="disk"} 256.0' in text
    assert 'vllm:kvtally_tokens_total{engine="0",source="disk"} 0.0' in text
    assert 'vllm:kvtally_misses_total{engine="0",reason="state_absent"} 0.0' in text
    assert 'vllm:kvtally_wait_seconds_bucket{engine="1",le="0.025"} 1.0' in text
    assert 'vllm:kvtally_wait_seconds_bucket{engine="1",le="0.01"} 0.0' in text
    assert 'vllm:kvtally_load_seconds_count{engine="0"} 0.0' in text


def request(tokens: int, hashes: int) -> Any:
    return SimpleNamespace(
        all_token_ids=list(range(tokens)),
        block_hashes=[bytes([index]) * 32 for index in range(hashes)],
        lora_request=None,
        mm_features=[],
        cache_salt="tenant",
        prompt_embeds=None,
        session_id=None,
    )


def public(index: int) -> Any:
    """A request's hash as vLLM publishes it."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return maybe_convert_block_hash(BlockHash(bytes([index]) * 32))


@pytest.fixture
def events() -> Any:
    """Two groups, as our layout and as vLLM's configuration: full attention of 32 tokens a block, states at 64."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from kvtally.vllm.events import SaveEvents
    from kvtally.vllm.layout import EngineLayout

    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=64, shapes=((4,),), dtypes=(torch.float32,))
    cache = SimpleNamespace(
        hash_block_size=16, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in (state, attention)]
    )
    groups = (
        GroupSpec(kind=GroupKind.FULL, block_tokens=32, page_bytes=((8,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=64, page_bytes=((8,),)),
    )
    layout = EngineLayout(
        Namespace(model="m", groups=groups, chunk_tokens=64, alignment_tokens=64),
        group_ids=(1, 0),
        layer_names=(("a",), ("b",)),
        block_tokens=64,
    )
    return SaveEvents(layout, cache, world_size=2)


def item(start: int, end: int, group: int = 0) -> Any:
    from kvtally.vllm.step_jobs import SaveItem

    return SaveItem(b"c" * 32, b"p" * 32, start, end, group, [5])


@engine
def test_a_save_is_announced_when_every_rank_has_it(events: Any) -> None:
    events.begin(1, request(150, 9), [item(64, 128), item(64, 128, group=1)])
    events.stored(1, 1)
    assert events.take() == []
    events.stored(1, 1)
    events.ended(1)
    attention, state = events.take()
    assert events.take() == []
    assert attention.block_hashes == [public(5), public(7)]  # those that end at 96 and at 128
    assert attention.parent_block_hash == public(3)
    assert attention.token_ids == list(range(64, 128))
    assert (attention.block_size, attention.group_idx, attention.medium) == (32, 1, "CPU")
    assert attention.kv_cache_spec_kind == "full_attention"
    assert (state.block_hashes, state.parent_block_hash) == ([public(7)], public(3))
    assert (state.block_size, state.group_idx, state.kv_cache_spec_kind) == (64, 0, "mamba")


@engine
def test_a_save_that_failed_anywhere_is_not_announced(events: Any) -> None:
    events.begin(1, request(150, 9), [item(0, 64)])
    events.stored(1, 1)
    events.ended(1)
    events.stored(1, 1)
    assert events.take() == []


@engine
def test_a_block_that_is_only_begun_is_not_announced(events: Any) -> None:
    events.begin(1, request(150, 9), [item(0, 48), item(128, 144)])
    events.stored(1, 2)
    (event,) = events.take()
    assert event.token_ids == list(range(32))
    assert event.parent_block_hash is None
    assert event.extra_keys == [("tenant",)]
