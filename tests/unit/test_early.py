"""Early prefetch in the scheduler half, rule by rule: when a request is asked about, how often, and what is given back.

The scheduler half is the real one, with vLLM's own enumerations (so these are `engine` tests); requests are fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.client import Miss, StoreClient
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.vllm.inquiry import Inquiries, Inquiry
from kvtally.vllm.path import Extras
from kvtally.vllm.path import Path as TokenPath
from kvtally.wire.messages import PutObject, PutStatus
from tests.unit.shell import Bench, Running, eventually

pytestmark = pytest.mark.engine

CHUNK = 64
DENSE = Namespace(
    model="dense",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((64,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)
PROMPT = list(range(200))


class Asked(Inquiries):
    """Remembers what it was asked."""

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        super().__init__(connect)
        self.asked: list[Inquiry] = []
        self.wanted: list[Inquiry] = []

    def ask(self, inquiry: Inquiry) -> None:
        self.asked.append(inquiry)
        super().ask(inquiry)

    def want(self, inquiry: Inquiry) -> None:
        self.wanted.append(inquiry)
        super().want(inquiry)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def store(bench: Bench) -> Running:
    return bench.start()


@pytest.fixture
def inquiries(bench: Bench, store: Running) -> Iterator[Asked]:
    inquiries = Asked(lambda: StoreClient(str(bench.path), namespace=DENSE))
    inquiries.start()
    yield inquiries
    inquiries.stop()


@pytest.fixture
def half(inquiries: Asked) -> Callable[..., Any]:
    from kvtally.vllm.layout import EngineLayout
    from kvtally.vllm.scheduler import SchedulerHalf

    layout = EngineLayout(namespace=DENSE, group_ids=(0,), layer_names=(("l",),), block_tokens=16)
    return lambda **settings: SchedulerHalf(layout, inquiries, world_size=1, wait_ms=2000, **settings)


def request(name: str = "r", tokens: list[int] = PROMPT, **changes: Any) -> Any:
    plain = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens),
        "num_output_tokens": 0,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "shared_prefix_boundary": 0,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "prompt_embeds": None,
        "kv_transfer_params": None,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "priority": 0,
        "status": None,
        "is_finished": lambda: False,
    }
    return SimpleNamespace(**plain | changes)


def save(bench: Bench, tokens: list[int] = PROMPT) -> None:
    path = TokenPath(CHUNK, Extras())
    path.extend(tokens, len(tokens))
    chunks = [path.chunk(index) for index in range(len(path.chains))]
    objects = [(PutObject(*chunk, 0, 0, 256), bytes(256)) for chunk in chunks]
    with StoreClient(str(bench.path), namespace=DENSE) as client:
        assert not isinstance(client.connect(5), Miss)
        assert client.put(objects) == [PutStatus.WRITE] * len(chunks)


def matched(half: Any, asked: Any) -> int:
    found: list[int] = []

    def is_known() -> bool:
        count, _ = half.matched_tokens(asked, 0)
        found.extend([] if count is None else [count])
        return count is not None

    eventually(is_known)
    return found[0]


def test_called_before_scheduling(half: Callable[..., Any], inquiries: Asked, bench: Bench) -> None:
    """The lookup is answered before the scheduler has asked for anything, and without its help."""
    save(bench)
    half().on_new_request(request())
    eventually(lambda: inquiries.asked[0].answer is not None)
    assert inquiries.asked[0].is_early
    assert inquiries.asked[0].answer is not None
    assert inquiries.asked[0].answer.end_tokens == 192


def test_skipped_for_incomplete_prompts(half: Callable[..., Any], inquiries: Asked, bench: Bench) -> None:
    """A streaming input is asked about when it is scheduled, not before its tokens are there."""
    save(bench)
    scheduler = half()
    streaming = request(tokens=PROMPT[:10], resumable=True)
    scheduler.on_new_request(streaming)
    assert inquiries.asked == []
    streaming.prompt_token_ids = streaming.all_token_ids = PROMPT
    streaming.num_tokens = streaming.num_prompt_tokens = len(PROMPT)
    assert matched(scheduler, streaming) == 192
    assert [inquiry.is_early for inquiry in inquiries.asked] == [False]


def test_idempotent(half: Callable[..., Any], inquiries: Asked, bench: Bench) -> None:
    """One lookup for one request, whatever the order and number of calls."""
    save(bench)
    scheduler = half()
    for name in ("first", "second"):
        asked = request(name)
        scheduler.on_new_request(asked)
        scheduler.on_new_request(asked)
        assert matched(scheduler, asked) == 192
        assert matched(scheduler, asked) == 192
        scheduler.on_new_request(asked)
        scheduler.matched_tokens(asked, 64)
    assert len(inquiries.asked) == 2


def test_off_switch(half: Callable[..., Any], inquiries: Asked, bench: Bench, store: Running) -> None:
    """With `prefetch: off` nothing happens until the scheduler asks; then the same is found."""
    save(bench)
    scheduler = half(prefetch=False)
    asked = request()
    lookups = store.stats("lookups", "total")
    scheduler.on_new_request(asked)
    time.sleep(0.05)
    assert inquiries.asked == []
    assert store.stats("lookups", "total") == lookups
    assert matched(scheduler, asked) == 192
    assert [inquiry.is_early for inquiry in inquiries.asked] == [False]


def test_the_deadline_counts_from_when_the_scheduler_comes(half: Callable[..., Any], inquiries: Asked) -> None:
    scheduler = half()
    asked = request()
    scheduler.on_new_request(asked)
    (inquiry,) = inquiries.asked
    assert inquiry.deadline_ns - inquiry.asked_ns > 10_000_000_000  # a queue may be long
    inquiry.is_wanted, inquiry.answer = False, None
    scheduler.matched_tokens(asked, 0)
    assert inquiry.answer is not None or inquiry.deadline_ns - time.monotonic_ns() <= 2_000_000_000


def test_what_was_saved_while_a_request_queued_is_found(
    half: Callable[..., Any], inquiries: Asked, bench: Bench
) -> None:
    scheduler = half()
    asked = request()
    scheduler.on_new_request(asked)
    eventually(lambda: inquiries.asked[0].answer is not None)
    save(bench)
    time.sleep(0.15)
    assert matched(scheduler, asked) == 192
    assert len(inquiries.asked) == 2


def test_an_aborted_request_gives_back_what_it_holds(
    half: Callable[..., Any], inquiries: Asked, bench: Bench, store: Running
) -> None:
    save(bench)
    scheduler = half()
    for name, is_matched in (("early", False), ("late", True)):
        asked = request(name)
        scheduler.on_new_request(asked)
        if is_matched:
            matched(scheduler, asked)
        scheduler.finished(asked, ((),))
    eventually(lambda: inquiries.asked[0].answer is not None)
    eventually(lambda: store.stats("leases", "open") == 0)
    assert store.stats("arena", "held_bytes") == 0


def test_place_and_priority_reach_the_store(half: Callable[..., Any], inquiries: Asked) -> None:
    scheduler = half()
    for number in range(3):
        scheduler.on_new_request(request(f"r{number}", priority=-number))
    scheduler.finished(request("r0"), ((),))
    scheduler.on_new_request(request("r3"))
    assert [(inquiry.ahead, inquiry.priority) for inquiry in inquiries.asked] == [(0, 0), (1, -1), (2, -2), (2, 0)]


def test_arrival_costs_the_engine_less_than_50_microseconds(half: Callable[..., Any]) -> None:
    scheduler = half()
    tokens = list(range(16_000))
    requests = [request(f"r{number}", tokens) for number in range(300)]
    seconds = []
    for asked in requests:
        begun = time.perf_counter()
        scheduler.on_new_request(asked)
        seconds.append(time.perf_counter() - begun)
        time.sleep(0.001)
    median = sorted(seconds)[len(seconds) // 2]
    print(f"on_new_request: {median * 1e6:.1f} µs")
    assert median < 50e-6
