"""KV events for saves: vLLM's `BlockStored` with medium CPU, for routers that follow where prefixes lie.

An event is prepared when a save begins, while the request and its block hashes are at hand. It is sent when every rank
has reported the whole save to be in the store; a save that failed in any part is not announced. Nothing announces that
objects are gone: the store evicts without telling engines, and serves other engines, too. So an event means "it was
there once", and a consumer must confirm it by asking the store (`Lookup`) or by the hit itself. Runs in vLLM's
scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtally.core.geometry import chunk_block_range
from kvtally.vllm.layout import EngineLayout
from kvtally.vllm.step_jobs import SaveItem

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOCAL = "LOCAL"  # the store is on the engine's node


class SaveEvents:
    """One engine's announcements. Jobs are named by their ids."""

    def __init__(self, layout: EngineLayout, cache: KVCacheConfig, *, world_size: int) -> None:
        self._layout = layout
        self._cache = cache
        self._world_size = world_size
        self._hash_tokens = cache.hash_block_size or layout.block_tokens
        self._open: dict[int, tuple[list[BlockStored], int]] = {}  # job -> its events, and how many ranks are missing
        self._ready: list[BlockStored] = []

    def begin(self, job: int, request: Request, items: Sequence[SaveItem]) -> None:
        events = [event for item in items if (event := self._event(request, item)) is not None]
        self._open[job] = (events, self._world_size)

    def stored(self, job: int, ranks: int) -> None:
        """This many more ranks have the whole job in the store."""
        if job not in self._open:
            return
        events, missing = self._open.pop(job)
        if missing > ranks:
            self._open[job] = (events, missing - ranks)
        else:
            self._ready += events

    def ended(self, job: int) -> None:
        """Every rank is done with this job. If any of them failed, it is not announced."""
        self._open.pop(job, None)

    def take(self) -> list[BlockStored]:
        ready, self._ready = self._ready, []
        return ready

    def _event(self, request: Request, item: SaveItem) -> BlockStored | None:
        """The whole blocks of one object. A block that is only begun has no hash, and is not announced."""
        spec = self._layout.groups[item.group]
        size = spec.block_tokens
        hashes = resolve_block_hashes(request.block_hashes, self._hash_tokens, size)
        blocks = chunk_block_range(spec, item.start_tokens, item.end_tokens)
        first, last = blocks.start, min(blocks.stop, item.end_tokens // size, len(hashes))
        if first >= last:
            return None
        extra = [generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0] for at in range(first, last)]
        group_id = self._layout.group_ids[item.group]
        engine_spec = self._cache.kv_cache_groups[group_id].kv_cache_spec
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(value) for value in hashes[first:last]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * size : last * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group_id,
            kv_cache_spec_kind=get_kv_cache_spec_kind(engine_spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(engine_spec),
            locality=LOCAL,
            session_id=request.session_id,
        )
