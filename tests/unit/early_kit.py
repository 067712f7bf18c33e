"""What tests of early prefetch share: a store, lookups that remember what they were asked, and fake requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtally.client import Miss
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.testing.copying import CopyingClient
from kvtally.vllm.boundaries import Boundaries, Extras
from kvtally.vllm.counters import Counters
from kvtally.vllm.lookup_policy import LookupPolicy
from kvtally.vllm.lookup_thread import LookupThread, PromptLookup
from kvtally.wire.messages import PutObject, PutStatus
from tests.unit.shell import Bench, Running
from tests.waiting import HOUR_S

CHUNK = 64
DENSE = Namespace(
    model="dense",
    groups=(GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((64,),)),),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)
PROMPT = list(range(200))


class Asked(LookupThread):
    """Remembers what it was asked."""

    def __init__(self, connect: Callable[[], CopyingClient]) -> None:
        super().__init__(connect, DENSE)
        self.asked: list[PromptLookup] = []
        self.wanted: list[PromptLookup] = []
        self.walks = True  # False: as if its thread had not come to it yet

    def walk(self, lookup: PromptLookup) -> None:
        if self.walks:
            super().walk(lookup)

    def ask(self, lookup: PromptLookup) -> None:
        self.asked.append(lookup)
        super().ask(lookup)

    def want(self, lookup: PromptLookup) -> None:
        self.wanted.append(lookup)
        super().want(lookup)


@pytest.fixture
def store(bench: Bench) -> Running:
    return bench.start()


@pytest.fixture
def lookups(bench: Bench, store: Running) -> Iterator[Asked]:
    lookups = Asked(lambda: CopyingClient(str(bench.path), namespace=DENSE))
    lookups.start()
    yield lookups
    lookups.stop()


def scheduler_half(layout: Any, thread: LookupThread, **settings: Any) -> Any:
    """One of one rank. Settings are those of the policy for lookups, and of the half itself."""
    from kvtally.vllm.scheduler import SchedulerHalf

    own = {name: settings.pop(name) for name in ("may_save", "names_images", "on_reset", "events") if name in settings}
    policy = LookupPolicy(thread, Counters(), wait_ms=int(HOUR_S * 1e3), may_leave=not layout.has_states, **settings)
    return SchedulerHalf(layout, policy, world_size=1, **own)


def request(name: str = "r", tokens: list[int] = PROMPT, **changes: Any) -> Any:
    plain = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "_all_token_ids": tokens.copy(),  # of a Private, too: copying looks at no token in Python
        "max_tokens": 16,
        "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens),
        "num_output_tokens": 0,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "drop_stale_output": False,
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
    path = Boundaries(CHUNK, Extras())
    path.extend(tokens, len(tokens))
    chunks = [path.chunk(index) for index in range(len(path.chains))]
    objects = [(PutObject(*chunk, 0, 0, 256), bytes(256)) for chunk in chunks]
    with CopyingClient(str(bench.path), namespace=DENSE) as client:
        assert not isinstance(client.connect(), Miss)
        assert client.put(objects) == [PutStatus.WRITE] * len(chunks)


def step(scheduled: dict[str, int], **changes: Any) -> Any:
    """vLLM's SchedulerOutput of a step that computes so many tokens of each request."""
    plain = {
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "kv_connector_block_state": None,
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
    }
    return SimpleNamespace(**plain | changes)
