"""Early prefetch in the scheduler half as vLLM calls it; the rules themselves are in tests/unit/test_early.py.

Requests are fakes; no engine is started.
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

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

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
    own = sorted(seconds)[len(seconds) // 10]  # without what neighbours on a busy machine add
    print(f"on_new_request: {own * 1e6:.1f} µs")
    assert own < 50e-6
