"""What the scheduler half has saved, and how many blocks it holds for it. Requests and vLLM's block pool are fakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvtally.client import Miss, StoreClient
from kvtally.core.receipts import Half
from tests.unit.early_kit import CHUNK, DENSE, Asked, lookups, request, scheduler_half, step, store
from tests.unit.shell import Bench
from tests.waiting import eventually

__all__ = ["lookups", "store"]  # fixtures
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 16
POOL = 40  # blocks, of which ten may be held


class Pool:
    """vLLM's, as far as the scheduler half uses it."""

    num_gpu_blocks = POOL
    blocks = range(POOL)

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def touch(self, blocks: Sequence[int]) -> None:
        self.held.update(blocks)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        self.held -= Counter(blocks)


class Scene:
    """One engine whose requests compute a chunk with each step."""

    def __init__(self, lookups: Asked, *, reads: bool = False) -> None:
        from kvtally.vllm.layout import EngineLayout

        layout = EngineLayout(namespace=DENSE, group_ids=(0,), layer_names=(("l",),), block_tokens=BLOCK)
        self.pool = Pool()
        self.half = scheduler_half(layout, lookups, reads=reads)
        self.half.bind(SimpleNamespace(block_pool=self.pool))  # type: ignore[arg-type]
        self.tables: dict[str, list[int]] = {}
        self.read: list[str] = []  # whose table was asked for
        self.asked: dict[str, Any] = {}

    def arrive(self, name: str, first_block: int, tokens: int, *, computed: int = 0, **changes: Any) -> None:
        self.tables[name] = list(range(first_block, first_block + -(-tokens // BLOCK)))
        self.asked[name] = request(name, [first_block] * tokens, **changes)
        self.half.on_new_request(self.asked[name])
        self.half.matched_tokens(self.asked[name], computed)
        self.asked[name].num_computed_tokens = computed

    def step(self, *names: str, tokens: int = CHUNK, **changes: Any) -> list[list[int]]:
        """The blocks that are to be saved, job by job."""
        saves = self.metadata(dict.fromkeys(names, tokens), **changes).saves
        for name in names:
            self.asked[name].num_computed_tokens += tokens
        return [blocks(job) for job in saves]

    def metadata(self, scheduled: dict[str, int], **changes: Any) -> Any:
        state = SimpleNamespace(get_block_ids=self._table, boundary_state_offloads={})
        return self.half.build_step(step(scheduled, **{"kv_connector_block_state": state} | changes))

    def _table(self, name: str) -> list[list[int]]:
        self.read.append(name)
        return [self.tables[name]]

    def saved(self, *jobs: int, lost: dict[int, str] | None = None) -> None:
        from kvtally.vllm.step_jobs import WorkerReport

        self.half.update(WorkerReport(dict.fromkeys(jobs, 1), 0, {}, {}, lost or {}))

    def prefill(self, name: str, first_block: int, tokens: int) -> None:
        """A prompt that is computed for somebody else, under a ticket of its name."""
        asked = {"kv_transfer_params": {"kvtally": {"ticket": name, "role": "prefill"}}}
        ids = [first_block] * tokens
        self.arrive(name, first_block, tokens, **asked, _all_token_ids=ids, all_token_ids=ids)

    def hand_over(self, name: str) -> Any:
        self.asked[name].num_computed_tokens = self.asked[name].num_prompt_tokens
        return self.half.finished(self.asked[name], [self.tables[name]])


def blocks(job: Any) -> list[int]:
    return [block for item in job.items for block in item.block_ids]


@pytest.fixture
def scene(lookups: Asked) -> Scene:
    return Scene(lookups)


def test_blocks_are_held_until_they_are_saved(scene: Scene) -> None:
    scene.arrive("a", 1, 2 * CHUNK + 1)
    assert scene.step("a") == [[1, 2, 3, 4]]
    assert set(scene.pool.held) == {1, 2, 3, 4}
    scene.saved(1)
    assert not scene.pool.held


def test_what_was_held_is_evicted_from_its_end(scene: Scene) -> None:
    """A prompt is reused from its beginning on: without that, the engine's own cache has kept the rest in vain."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=POOL, enable_caching=True, hash_block_size=BLOCK)
    scene.half.bind(SimpleNamespace(block_pool=pool))  # type: ignore[arg-type]
    own = pool.get_new_blocks(8)
    for block in own:
        block.set_block_hash(block.block_id.to_bytes(8, "little"), num_tokens=BLOCK)  # type: ignore[arg-type]
    scene.arrive("a", own[0].block_id, 2 * CHUNK)
    scene.step("a", tokens=2 * CHUNK)
    pool.free_blocks(reversed(own))  # the request is over before it is saved
    scene.saved(1)
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()][-8:] == scene.tables["a"][::-1]


def test_no_more_than_a_quarter_is_held_and_the_rest_is_saved_later(scene: Scene) -> None:
    for number, name in enumerate("abc"):
        scene.arrive(name, 1 + 10 * number, 2 * CHUNK + 1)
    assert len(scene.step("a", "b", "c")) == 3  # the third began when eight were held
    assert scene.step("a") == []
    assert len(scene.pool.held) == 12
    assert scene.half.counters.counts["saves"] == {"taken": 3, "left": 1}
    scene.saved(1, 2, 3)
    assert scene.step("a") == [[5, 6, 7, 8]]


def test_a_decode_that_completes_nothing_costs_nothing(scene: Scene) -> None:
    """vLLM copies a table to tell it: for hundreds of long requests in each step that takes milliseconds."""
    for number, name in enumerate("abc"):
        scene.arrive(name, 1 + 10 * number, CHUNK + 1)
        scene.step(name)
        scene.step(name, tokens=1)  # the prompt's end; by then as many are held as may be
        scene.asked[name].num_tokens += 1
    read, counted = list(scene.read), dict(scene.half.counters.counts["saves"])
    for _ in range(3):
        assert scene.step("a", "b", "c", tokens=1) == []
    assert scene.read == read
    assert scene.half.counters.counts["saves"] == counted  # nothing is left where nothing is to be saved


def test_a_promise_that_cannot_be_kept_is_withdrawn(scene: Scene, bench: Bench) -> None:
    scene.prefill("p", 21, CHUNK + 2)
    assert len(scene.step("p")) == 1
    answer = scene.hand_over("p")
    assert answer.saved_tokens == CHUNK + 1
    eventually(lambda: promise(bench, "p") == (CHUNK + 1, ""))
    scene.saved(1)
    scene.saved(2, lost={2: "arena_full"})
    eventually(lambda: promise(bench, "p") == (0, "arena_full"))
    assert not scene.half.saves._held


def test_what_could_not_be_saved_is_not_promised(scene: Scene, bench: Bench) -> None:
    scene.prefill("p", 21, CHUNK + 2)
    scene.step("p")
    scene.saved(1, lost={1: "store_unreachable"})
    answer = scene.hand_over("p")
    assert (answer.saved_tokens, answer.reason) == (0, "store_unreachable")
    eventually(lambda: promise(bench, "p") == (0, "store_unreachable"))


def test_a_lost_save_of_anybody_else_is_only_a_later_miss(scene: Scene) -> None:
    scene.arrive("a", 1, 2 * CHUNK + 1)
    scene.step("a")
    scene.saved(1, lost={1: "arena_full"})
    assert not scene.pool.held


def promise(bench: Bench, ticket: str) -> tuple[int, str] | None:
    """What prefill's half says: tokens promised, or why none."""
    half = prefill_half(bench, ticket)
    return (half.saved_tokens, half.reason) if half is not None else None


def prefill_half(bench: Bench, ticket: str) -> Half | None:
    with StoreClient(str(bench.path)) as client:
        found = client.receipts(ticket).wait()
        assert not isinstance(found, Miss)
        return found.receipts[0].prefill if found.receipts else None


def test_a_hand_off_saves_what_was_left(scene: Scene) -> None:
    scene.arrive("a", 1, 2 * CHUNK + 1)
    scene.arrive("b", 11, 2 * CHUNK + 1)
    scene.prefill("p", 21, 2 * CHUNK + 2)
    scene.step("a", "b")
    scene.step("a", "b")  # twelve, at least
    assert scene.step("p") == []
    assert scene.step("p") == []
    answer = scene.hand_over("p")
    assert answer is not None
    assert answer.saved_tokens == scene.asked["p"].num_prompt_tokens
    (job,) = scene.metadata({}).late_saves
    assert [(item.start_tokens, item.end_tokens) for item in job.items] == [(0, 64), (64, 128), (128, 129)]


def full(scene: Scene, name: str, tokens: int) -> None:
    """A step computes so many tokens, while as many blocks are held as may be: nothing of it is saved."""
    scene.half.saves._held_blocks += POOL
    assert scene.step(name, tokens=tokens) == []
    scene.half.saves._held_blocks -= POOL


def finish(scene: Scene, name: str) -> list[tuple[int, int]]:
    """The request ends; which tokens are saved then."""
    scene.half.finished(scene.asked[name], [scene.tables[name]])
    return [(item.start_tokens, item.end_tokens) for job in scene.metadata({}).late_saves for item in job.items]


def test_what_was_left_is_saved_when_the_answer_has_one_token(scene: Scene) -> None:
    scene.arrive("a", 1, 2 * CHUNK + 10)
    full(scene, "a", 2 * CHUNK + 10)
    assert finish(scene, "a") == [(0, 64), (64, 128), (128, 137)]


def test_requests_that_end_hold_no_more_than_a_quarter_either(scene: Scene) -> None:
    saved = []
    for number, name in enumerate("abcd"):
        scene.arrive(name, 1 + 6 * number, CHUNK + 20)
        full(scene, name, CHUNK + 20)
        saved.append(finish(scene, name))
    assert saved == [[(0, 64), (64, 83)], [(0, 64)], [], []]  # six blocks, and four more
    assert len(scene.pool.held) == POOL / 4
    assert scene.half.counters.counts["saves"] == {"left": 4 + 3, "taken": 2}


def test_hand_offs_do_not_hold_everything(scene: Scene) -> None:
    """One is saved whole or not at all. What cannot be held is not promised, and the reason says why."""
    answers = []
    for number in range(4):
        name = f"p{number}"
        scene.prefill(name, 1 + 9 * number, 2 * CHUNK + 2)
        full(scene, name, 2 * CHUNK + 1)
        answers.append(scene.hand_over(name))
    assert [(answer.saved_tokens, answer.reason) for answer in answers] == 3 * [(129, "")] + [(0, "limit")]
    assert len(scene.pool.held) == 27


def test_prefill_accounts_for_its_prompt_as_decode_does(scene: Scene, bench: Bench) -> None:
    scene.prefill("p", 21, CHUNK + 20)
    scene.asked["p"].num_computed_tokens = 32  # from the engine's own cache
    scene.step("p", tokens=CHUNK + 19 - 32)
    answer = scene.hand_over("p")
    eventually(lambda: promise(bench, "p") == (CHUNK + 19, ""))
    filed = prefill_half(bench, "p")
    assert filed is not None
    assert (filed.tokens_gpu, filed.tokens_host, filed.computed_tokens, filed.prompt_tokens) == (32, 0, 51, 84)
    assert structs.replace(answer.half(), request="p") == filed  # so the router's receipt says the same


@pytest.fixture
def covered(lookups: Asked, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A request of which the engine's own cache has nearly all."""
    monkeypatch.setattr(
        "kvtally.vllm.lookup_policy.LookupPolicy.is_trifle", lambda self, track, tokens: tokens <= CHUNK // 2
    )
    scene = Scene(lookups, reads=True)
    lookups.walks = False
    scene.arrive("a", 1, 2 * CHUNK - 15, computed=CHUNK + 32)
    return scene


def walked(scene: Scene) -> None:
    """The lookup thread has come to its path."""
    lookup = scene.half._requests["a"].attempt.lookup
    assert lookup is not None
    lookup.walk()


def test_of_a_covered_prompt_nobody_is_asked_and_its_end_is_saved_when_its_path_is_known(
    covered: Scene, lookups: Asked
) -> None:
    assert lookups.asked == []
    assert covered.step("a", tokens=17) == []
    walked(covered)
    assert covered.step("a", tokens=1) == [[5, 6, 7]]
    assert covered.step("a", tokens=1) == []


def test_a_covered_prompt_that_ends_with_its_first_token_is_saved_all_the_same(covered: Scene) -> None:
    covered.step("a", tokens=17)
    walked(covered)
    covered.half.finished(covered.asked["a"], [covered.tables["a"]])
    (job,) = covered.metadata({}).late_saves
    assert blocks(job) == [5, 6, 7]


def test_where_its_path_is_known_at_once_it_is_saved_with_its_first_token(covered: Scene) -> None:
    walked(covered)
    assert covered.step("a", tokens=17) == [[5, 6, 7]]


def test_loads_wait_for_a_step_that_touches_blocks_and_for_no_other(scene: Scene) -> None:
    scene.arrive("a", 1, 2 * CHUNK)
    job: Any = object()
    for changes, is_early in (
        ({"scheduled": {}}, True),
        ({"scheduled": {"a": 1}}, False),
        ({"scheduled": {}, "new_block_ids_to_zero": [3]}, False),
        ({"scheduled": {}, "kv_cache_block_copies": [object()]}, False),
    ):
        scene.half.loads._jobs = [job]
        metadata = scene.metadata(**changes)  # type: ignore[arg-type]
        assert (metadata.early_loads, metadata.loads) == (([job], []) if is_early else ([], [job]))
        assert scene.half.loads._jobs == []
