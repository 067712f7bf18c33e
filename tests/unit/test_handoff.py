"""Hand-offs without vLLM: what a router may write, and how decode's lookup waits, at a real store, for what prefill
promised. What it asks for, message by message, is in test_promises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvtally.client import Miss
from kvtally.core.handoff import Handoff
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Half, Role
from kvtally.testing.copying import CopyingClient
from kvtally.vllm.boundaries import Boundaries, Boundary, Extras
from kvtally.vllm.handoff import handoff_of, shorten_for_prefill
from kvtally.vllm.lookup_thread import LookupAnswer, LookupThread, PromptLookup
from kvtally.wire.messages import MissReason, PutObject, PutStatus
from tests.unit.shell import Bench
from tests.waiting import HOUR_S, eventually

CHUNK = 64
FULL, STATE = 0, 1
HYBRID = Namespace(
    model="hybrid",
    groups=(
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((64,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((512,),)),
    ),
    chunk_tokens=CHUNK,
    alignment_tokens=16,
)
PROMPT = list(range(200))  # three chunks and a tail of 7, one token to compute
END = len(PROMPT) - 1


# ---- what is written into a request


def test_what_a_router_writes_is_read() -> None:
    handoff = Handoff(ticket="t", role=Role.DECODE, store="s", saved_tokens=7, chain="ab")
    assert handoff_of(msgspec.json.decode(msgspec.json.encode(handoff.params()))) == handoff


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True},
        {"kvtally": None},
        {"kvtally": {"ticket": "t"}},
        {"kvtally": {"ticket": "", "role": "decode"}},
        {"kvtally": {"ticket": "t" * 300, "role": "decode"}},
        {"kvtally": {"ticket": "t", "role": "both"}},
        {"kvtally": {"ticket": "t", "role": "decode", "saved_tokens": -1}},
        {"kvtally": {"ticket": "t", "role": "decode", "saved_tokens": "all"}},
        {"kvtally": {"ticket": "t", "role": "decode", "chain": 5}},
    ],
)
def test_what_makes_no_sense_is_no_handoff(params: dict[str, Any] | None) -> None:
    assert handoff_of(params) is None


def request(tokens: list[int] | None, *, skip: bool = False) -> Any:
    return SimpleNamespace(
        prompt_token_ids=tokens,
        _all_token_ids=list(tokens or []),
        num_prompt_tokens=len(tokens or []),
        max_tokens=50,
        skip_reading_prefix_cache=skip,
    )


def test_prefill_stops_one_token_short() -> None:
    given = [1, 2, 3]
    shortened = request(given)
    assert shorten_for_prefill(shortened)
    assert (shortened.prompt_token_ids, shortened._all_token_ids, shortened.num_prompt_tokens) == ([1, 2], [1, 2], 2)
    assert shortened.max_tokens == 1
    assert given == [1, 2, 3]  # the caller's own


@pytest.mark.parametrize("untouched", [request([1]), request(None), request([1, 2], skip=True)])
def test_where_there_is_nothing_to_hand_over_nothing_is_changed(untouched: Any) -> None:
    before = dict(vars(untouched))
    assert not shorten_for_prefill(untouched)
    assert vars(untouched) == before


# ---- the lookup


@pytest.fixture
def lookups(bench: Bench) -> Iterator[LookupThread]:
    bench.start()
    lookups = LookupThread(lambda: CopyingClient(str(bench.path), namespace=HYBRID), HYBRID)
    lookups.start()
    yield lookups
    lookups.stop()


@pytest.fixture
def prefill(bench: Bench, lookups: LookupThread) -> Iterator[CopyingClient]:
    with CopyingClient(str(bench.path), namespace=HYBRID) as client:
        assert not isinstance(client.connect(), Miss)
        yield client


def path(tokens: list[int]) -> Boundaries:
    return Boundaries(CHUNK, Extras())


def boundaries(tokens: list[int], end: int) -> list[Boundary]:
    walk = path(tokens)
    walk.extend(tokens, end)
    whole = [walk.chunk(index) for index in range(len(walk.chains))]
    return [*whole, walk.tail(tokens, end)] if end % CHUNK else whole


def save(client: CopyingClient, groups: dict[int, list[Boundary]]) -> None:
    """As prefill's worker does: attention at every boundary, state where it is."""
    objects = []
    for group, ends in groups.items():
        for chain, parent, start, end in ends:
            length = 512 if group == STATE else -(-(end - start) // 16) * 64
            objects.append((PutObject(chain, parent, start, end, group, 0, length), bytes(length)))
    statuses = client.put(objects)
    assert not isinstance(statuses, Miss)
    assert set(statuses) == {PutStatus.WRITE}


def everything(tokens: list[int] = PROMPT) -> dict[int, list[Boundary]]:
    ends = boundaries(tokens, len(tokens) - 1)
    return {FULL: ends, STATE: ends[-1:]}


def handoff(client: CopyingClient, **changes: Any) -> Handoff:
    session = client.session
    assert session is not None
    told = Handoff(
        ticket="t",
        role=Role.DECODE,
        store=session.store,
        namespace=HYBRID.digest.hex(),
        saved_tokens=END,
        prompt_tokens=len(PROMPT),
        chain=boundaries(PROMPT, END)[-1].chain.hex(),
    )
    return msgspec.structs.replace(told, **changes)


def ask(lookups: LookupThread, told: Handoff | None, *, block_tokens: int = 1) -> PromptLookup:
    """It may wait for an hour: what is answered in a test did not wait for its deadline."""
    now_ns = time.monotonic_ns()
    deadline_ns = now_ns + int(HOUR_S * 1e9)
    lookup = PromptLookup(PROMPT, path(PROMPT), deadline_ns, now_ns, told)
    lookups.ask(lookup)
    return lookup


def answer(lookup: PromptLookup) -> LookupAnswer:
    eventually(lambda: lookup.answer is not None)
    assert lookup.answer is not None
    return lookup.answer


def answered(client: CopyingClient) -> int:
    """How many the store has answered."""
    stats = client.stats().wait()
    assert not isinstance(stats, Miss)
    counted = stats.stats["lookups"]
    assert isinstance(counted, dict)
    return int(counted["total"])


def is_asked_again_and_again(client: CopyingClient) -> None:
    before = answered(client)
    eventually(lambda: answered(client) >= before + 3)


def test_a_handoff_is_found_at_exactly_its_boundary(lookups: LookupThread, prefill: CopyingClient) -> None:
    save(prefill, everything())
    found = answer(ask(lookups, handoff(prefill)))
    assert (found.end_tokens, found.ends, found.reason) == (END, [64, 128, 192, END], "")


def test_decode_waits_for_a_writer_that_has_not_begun(lookups: LookupThread, prefill: CopyingClient) -> None:
    lookup = ask(lookups, handoff(prefill))
    is_asked_again_and_again(prefill)
    assert lookup.answer is None  # nothing is there, nothing is pending, and yet it waits
    save(prefill, {FULL: boundaries(PROMPT, END)})
    is_asked_again_and_again(prefill)
    assert lookup.answer is None  # attention alone is no hit
    save(prefill, {STATE: boundaries(PROMPT, END)[-1:]})
    assert answer(lookup).end_tokens == END


def test_the_wait_ends_with_the_deadline_and_keeps_what_is_there(
    lookups: LookupThread, prefill: CopyingClient, caplog: pytest.LogCaptureFixture
) -> None:
    ends = boundaries(PROMPT, END)
    save(prefill, {FULL: ends[:2], STATE: ends[1:2]})
    lookup = ask(lookups, handoff(prefill))
    is_asked_again_and_again(prefill)
    assert lookup.answer is None
    lookup.deadline_ns = time.monotonic_ns()
    found = answer(lookup)
    assert found.end_tokens == 128
    assert found.reason == MissReason.DEADLINE
    (said,) = [record.getMessage() for record in caplog.records if "did not come in time" in record.getMessage()]
    assert "the store has 128" in said
    assert found.lease is not None
    lookups.release(found.lease)
    eventually(lambda: prefill.stats().wait().stats["leases"]["open"] == 0)  # type: ignore[union-attr,index]


@pytest.mark.parametrize("second", [{}, {"ticket": "another", "promise": "t"}])
def test_the_wait_ends_when_prefill_withdraws_its_promise(
    lookups: LookupThread, prefill: CopyingClient, second: dict[str, str]
) -> None:
    ends = boundaries(PROMPT, END)
    save(prefill, {FULL: ends[:2], STATE: ends[1:2]})
    promised = Half(role=Role.PREFILL, prompt_tokens=len(PROMPT), saved_tokens=END)
    assert not isinstance(prefill.file_receipt("t", promised).wait(), Miss)
    lookup = ask(lookups, handoff(prefill, **second))
    is_asked_again_and_again(prefill)
    assert lookup.answer is None  # a promise that stands is waited for
    withdrawn = Half(role=Role.PREFILL, prompt_tokens=len(PROMPT), reason=MissReason.ARENA_FULL)
    assert not isinstance(prefill.file_receipt("t", withdrawn).wait(), Miss)
    found = answer(lookup)
    assert (found.end_tokens, found.reason) == (128, MissReason.ARENA_FULL)


def test_without_a_handoff_nobody_waits(lookups: LookupThread, prefill: CopyingClient) -> None:
    found = answer(ask(lookups, None))
    assert (found.end_tokens, found.reason) == (0, MissReason.ABSENT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store": "another"}, MissReason.FOREIGN_STORE),
        ({"namespace": "00" * 32}, MissReason.FOREIGN_NAMESPACE),
        ({"chain": "00" * 32}, MissReason.OTHER_TOKENS),
        ({"saved_tokens": END + 40}, MissReason.OTHER_TOKENS),
        ({"saved_tokens": 100}, MissReason.OTHER_TOKENS),
    ],
)
def test_a_handoff_that_cannot_be_meant_for_us_is_not_waited_for(
    lookups: LookupThread, prefill: CopyingClient, changes: dict[str, Any], reason: MissReason
) -> None:
    found = answer(ask(lookups, handoff(prefill, **changes)))
    assert (found.end_tokens, found.reason) == (0, reason)


def test_what_the_store_has_is_used_whatever_the_handoff_says(lookups: LookupThread, prefill: CopyingClient) -> None:
    save(prefill, everything())
    found = answer(ask(lookups, handoff(prefill, store="another")))
    assert (found.end_tokens, found.reason) == (END, "")


# ---- where conversations have ended


def conversation(seed: int) -> list[int]:
    """As long as the prompt; from token 130 on another one, unless the seed is 0."""
    return PROMPT if seed == 0 else [*PROMPT[:130], *range(seed, seed + len(PROMPT) - 130)]


def test_the_end_of_an_answer_is_found_among_those_of_other_conversations(
    lookups: LookupThread, prefill: CopyingClient
) -> None:
    """No boundary before it has a state: the hit without it would be nothing."""
    ends = {0: 150, 500: 160, 700: 170}
    chunks = boundaries(PROMPT, 128)
    tails = {end: boundaries(conversation(seed), end)[-1] for seed, end in ends.items()}
    save(prefill, {FULL: [*chunks, *tails.values()], STATE: list(tails.values())})
    found = answer(ask(lookups, None))
    assert (found.end_tokens, found.ends) == (150, [64, 128, 150])


def test_where_no_end_fits_the_chunks_before_are_reused(lookups: LookupThread, prefill: CopyingClient) -> None:
    chunks, other = boundaries(PROMPT, 128), boundaries(conversation(500), 160)[-1]
    save(prefill, {FULL: [*chunks, other], STATE: [chunks[-1], other]})
    found = answer(ask(lookups, None))
    assert (found.end_tokens, found.ends) == (128, [64, 128])


def test_fields_of_a_later_version_are_ignored() -> None:
    record = {"ticket": "t", "role": "decode", "store": "s", "peers": [{"address": "10.0.0.9:7400"}]}
    assert handoff_of({"kvtally": record}) == Handoff(ticket="t", role=Role.DECODE, store="s")


def test_hashes_are_hex() -> None:
    """The router turns them into bytes; it must never meet one that it cannot turn."""
    for name in ("namespace", "chain"):
        for text in ("zz", "abc", "AB", "ab" * 33, "ab\n"):
            assert handoff_of({"kvtally": {"ticket": "t", "role": "decode", name: text}}) is None


@pytest.mark.parametrize(("block_tokens", "found_tokens"), [(80, 160), (1, 128)])
def test_the_last_state_of_the_same_prompt_is_found_among_the_ends_of_many_conversations(
    lookups: LookupThread, prefill: CopyingClient, block_tokens: int, found_tokens: int
) -> None:
    """They share their first two chunks. Of the ends that are known behind these, four are tried at most."""
    chunks, own = boundaries(PROMPT, 128), boundaries(PROMPT, 160)[-1]
    others = [boundaries(conversation(1000 * number), 170 + number)[-1] for number in range(1, 9)]
    save(prefill, {FULL: [*chunks, own, *others], STATE: [chunks[-1], own, *others]})
    lookups._block_tokens = block_tokens
    found = answer(ask(lookups, None))
    assert found.end_tokens == found_tokens
