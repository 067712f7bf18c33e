"""The sans-I/O store with many of everything: what one event costs must not grow with what else is there.

What is done is counted, so that no bound depends on the machine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvtally.core.keys import ROOT_CHAIN
from kvtally.core.receipts import Half
from kvtally.core.residency import Node as Boundary
from kvtally.store.jobs import Outcome
from kvtally.store.staging import Staging
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import (
    Found,
    Lookup,
    PutBegin,
    PutEnd,
    PutObject,
    PutSlots,
    PutStatus,
    ReceiptFile,
    ReceiptGet,
    Release,
)
from tests.unit.test_prefetch_store import CHUNK, GRANULE, Node
from tests.work import opcodes


def handle(node: Node, *requests: Any) -> list[Any]:
    """What `Node.ask` does, without checking all that the store knows after each."""
    for request in requests:
        node.store.handle(node.session, request, node.now_ns)
    return [message for _, message in node.store.take_outbox()]


def question(node: Node, prompt: int, **options: Any) -> Lookup:
    path = node.prompts[prompt]
    ends = list(range(CHUNK, CHUNK * len(path) + 1, CHUNK))
    return Lookup(4, b"".join(path), ends, ends[-1], **options)


def objects(path: list[bytes]) -> list[PutObject]:
    parents = [ROOT_CHAIN, *path]
    return [
        PutObject(chain, parent, CHUNK * index, CHUNK * (index + 1), 0, 0, GRANULE)
        for index, (chain, parent) in enumerate(zip(path, parents, strict=False))
    ]


def begin(node: Node, path: list[bytes]) -> list[int]:
    (slots,) = handle(node, PutBegin(2, objects(path)))
    assert isinstance(slots, PutSlots)
    return [slot.put for slot in slots.slots if slot.status == PutStatus.WRITE]


def test_leases_that_share_a_prefix_are_given_back_in_any_order() -> None:
    """Each object had a list of who waits for it, which was walked for each lease and object: the last to come took
    many times as long to leave as the first."""
    node = Node({1: (1, 200)}, granules=1024)

    def release_s(order: int) -> float:
        found = handle(node, *[question(node, 1, hold=True)] * 600)
        leases = [message.lease for message in found if isinstance(message, Found)]
        assert len(leases) == 600
        begun = time.process_time()
        handle(node, *(Release(5, [lease]) for lease in leases[::order]))
        return time.process_time() - begun

    assert release_s(-1) < 4 * release_s(1)
    node.store.check()


def test_a_put_of_what_is_there_walks_up_to_the_root_once() -> None:
    """It did so once for each object."""

    def work(chunks: int) -> int:
        node = Node({1: (1, chunks)})
        return opcodes(lambda: begin(node, node.prompts[1]))

    assert work(1000) < 2.5 * work(500)


def test_a_lookup_that_waits_does_not_count_what_is_left_with_every_commit() -> None:
    """It looked at all boundaries that it had waited for, with each object that was committed."""

    def work(lookups: int) -> int:
        node = Node({}, granules=4096)
        node.prompts[1] = path = [bytes([number // 256, number % 256, *range(30)]) for number in range(200)]
        puts = begin(node, path)
        assert handle(node, *[question(node, 1, wait_ms=1000)] * lookups) == []

        def commit() -> None:
            assert len(handle(node, *(PutEnd(3, [(put, 7)]) for put in puts[:-1]))) == 199

        cost = opcodes(commit)
        assert len(handle(node, PutEnd(3, [(puts[-1], 7)]))) == 1 + lookups
        node.store.check()
        return cost

    assert work(64) < 1.1 * work(0)


def test_to_weigh_a_long_prompt_looks_at_each_of_its_objects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so for each of the boundaries that were weighed."""
    node = Node({1: (1, 500)}, granules=4096)
    node.store.probe(node.now_ns)
    for job in node.store.take_jobs():
        node.now_ns += 1_000_000
        node.store.job_done(job, Outcome(), node.now_ns)
    looked_at: Counter[tuple[object, int]] = Counter()
    is_reading = Staging.is_reading

    def count(self: Staging, boundary: Boundary, bit: int) -> bool:
        looked_at[boundary, bit] += 1
        return is_reading(self, boundary, bit)

    monkeypatch.setattr(Staging, "is_reading", count)
    handle(node, question(node, 1, hold=True, prefill_tokens_s=1))
    assert (len(looked_at), looked_at.total()) == (500, 500)
    node.store.check()


def fetches_of(count: int) -> Node:
    """So many clients' fetches that wait for one receipt, and are late together."""
    node = Node({})
    for _ in range(count):
        session = node.store.connect(shared_memory=False, now_ns=node.now_ns)
        for number in range(4):
            node.store.handle(session, ReceiptGet(number, "t", wait_ms=100), node.now_ns)
    return node


def end_all(node: Node) -> None:
    later_ns = node.now_ns + SECOND_NS
    while node.store.tick(later_ns) == later_ns:
        pass


@pytest.mark.parametrize("end", ["late", "filed", "gone"])
def test_fetches_of_one_receipt_end_in_a_time_that_grows_with_their_number(end: str) -> None:
    """Each looked for itself among all that waited: 32 sessions with 1,024 each took 4.6 s."""
    costs = []
    for count in (20, 40):
        node = fetches_of(count)
        sessions = list(node.store._context.sessions)
        half = Half(role="decode")
        actions: dict[str, Callable[[], object]] = {
            "late": partial(end_all, node),
            "filed": partial(node.store.handle, node.session, ReceiptFile(1, "t", half), node.now_ns),
            "gone": lambda: [node.store.disconnect(session, node.now_ns) for session in sessions],  # noqa: B023
        }
        costs.append(opcodes(actions[end]))
        assert not node.store._context.alarms
        assert end == "gone" or len(node.store.take_outbox()) >= 4 * count
    assert costs[1] < 2.2 * costs[0]


def test_what_is_due_together_is_done_a_part_at_a_time() -> None:
    """Between the parts other clients have their turn."""
    node = fetches_of(100)
    later_ns = node.now_ns + SECOND_NS
    answered = []
    while node.store.tick(later_ns) == later_ns:
        answered.append(len(node.store.take_outbox()))
    answered.append(len(node.store.take_outbox()))
    assert answered == [256, 144]
