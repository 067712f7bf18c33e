"""Prefill on one machine, decode on another: two real vLLM servers, each with its own store, and nothing shared between
them but a link. What decode answers is what it would have answered alone, it computes one prompt token, and everything
else was pulled from the other store; what was tampered with there is computed again.

The machines are network namespaces where this process may make them, else loopback addresses: the tests' ids say which.
The reference is vLLM's own continuation (see `Deployment.continued`), so tokens and logprobs must agree to the bit.
"""

from __future__ import annotations

import json
import os
import random
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtally.client import Miss
from kvtally.core.answers import compare
from kvtally.testing.deployment import REQUEST_S, Answer, Hosts, TwoNodes, body
from kvtally.testing.models import DENSE, GDN, SLIDING, Model, Recipe
from kvtally.up.host import direct
from kvtally.wire.stats import PeerStats, StoreStats
from tests.engine.machines import Namespaces, hosts, leftovers, obstacle
from tests.engine.store import hoarder
from tests.waiting import HANG_S

pytestmark = pytest.mark.engine

SAME = 1e-5  # how much a logprob may move where the same arithmetic was done
SLACK = {"float32": 1e-3, "bfloat16": 0.1}  # how much a batch may move a logprob
PLACE = "loopback" if obstacle() else "namespaces"


class Shape(NamedTuple):
    recipe: Recipe
    ranks: int = 1


SHAPES = [Shape(DENSE), Shape(SLIDING), Shape(GDN), Shape(DENSE, 2)]
only_dense = pytest.mark.parametrize("shape", SHAPES[:1], indirect=True, ids=[f"dense-{PLACE}"])


def name_of(shape: Shape) -> str:
    return "-".join([shape.recipe.name, *(["tp2"] if shape.ranks > 1 else []), PLACE])


@pytest.fixture(scope="module", params=SHAPES, ids=name_of)
def shape(request: pytest.FixtureRequest) -> Shape:
    chosen: Shape = request.param
    return chosen


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with hosts() as made:
        yield made


@pytest.fixture(scope="module")
def up(
    shape: Shape,
    network: Hosts,
    tiny_model: Callable[[Recipe, int], Model],
    tmp_path_factory: pytest.TempPathFactory,
    patient: None,
) -> Iterator[TwoNodes]:
    # What becomes of a hand-off is tested, not how soon it does on busy processors.
    patience = {"connector": {"wait_ms": int(HANG_S * 1e3)}, "router": {"receipt_wait": 60_000}}
    directory = tmp_path_factory.mktemp(name_of(shape))
    ranks = {"tensor_parallel_size": shape.ranks} if shape.ranks > 1 else {}
    deployment = TwoNodes(tiny_model(shape.recipe, 0), directory, network, args=ranks, **patience)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.close()


def tokens(length: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(10, 900) for _ in range(length)]


class Moved(NamedTuple):
    """What prefill's store has sent, and what decode's store has got from it."""

    sent: tuple[int, int]  # objects, bytes
    pulled: tuple[int, int]

    def since(self, before: Moved) -> Moved:
        return Moved(*((now[0] - then[0], now[1] - then[1]) for now, then in zip(self, before, strict=True)))


def moved(up: TwoNodes) -> Moved:
    sends, peer = up.stats(up.prefill_socket).sends, peer_of(up.stats(up.socket))
    return Moved((sends.objects, sends.bytes), (peer.objects, peer.bytes))


def peer_of(told: StoreStats) -> PeerStats:
    """The other store, as one store knows it."""
    return next((peer for peer in told.peers if peer.objects or peer.asks), PeerStats())


def is_pulled(answer: Answer, count: int) -> bool:
    told = answer.told
    return (told["verdict"], told["computed-tokens"], told["source"]) == ("proved", "1", f"peer:{count}")


# ---- what is handed over


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_the_stores_are_in_network_namespaces_of_their_own(up: TwoNodes) -> None:
    stores = up.pid_of("store"), up.b.pid_of("store")
    engines = up.pid_of("prefill-0"), up.b.pid_of("decode-0")
    a, b, *others = (os.readlink(f"/proc/{pid}/ns/net") for pid in (*stores, *engines, "thread-self"))
    assert others[:2] == [a, b]
    assert len({a, b, others[2]}) == 3


def test_decode_computes_one_token_and_pulls_the_rest(up: TwoNodes, shape: Shape) -> None:
    block = shape.recipe.block_tokens
    for index, length in enumerate(sorted({2, 30, block + 1, 257, 700, 3000})):
        prompt, alone = up.continued(tokens(length - 1, length))
        counted, bytes_before = [up.counted(engine) for engine in (up.decode, up.prefill)], moved(up)
        answer = up.complete(prompt, stream=index % 2 == 1)
        assert compare(alone, answer, SAME).problem == "", (length, answer, alone)
        assert is_pulled(answer, length - 1), (length, answer.told)
        for engine, before, expected in (
            (up.decode, counted[0], {"local_compute": 1.0, "external_kv_transfer": length - 1.0}),
            (up.prefill, counted[1], {"local_compute": length - 1.0}),
        ):
            up.wait(lambda engine=engine, before=before: up.counted(engine) != before, "it was not counted")  # type: ignore[misc]
            after = up.counted(engine)
            assert {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)} == expected
        receipt = up.receipt(answer)
        assert receipt["prefill"]["saved_tokens"] == length - 1
        assert receipt["decode"]["verified"]
        new = moved(up).since(bytes_before)
        assert new.sent == new.pulled
        assert min(new.sent) > 0
        assert receipt["decode"]["moved_bytes"] <= new.sent[1], (length, receipt, new)


def test_what_came_while_prefill_computed_counts_as_pulled_too(up: TwoNodes) -> None:
    """Decode's engine is stopped until its store has pulled the beginning: nobody but prefill's store can have told it
    of the prompt."""
    prompt, alone = up.continued(tokens(1500, 41))
    before = moved(up)
    with ThreadPoolExecutor(1) as pool:
        with up.stopped(up.decode_engine):
            asked = pool.submit(up.complete, prompt)
            up.wait(lambda: moved(up).since(before).pulled[0] > 0, "nothing is pulled before decode asks for it")
        answer = asked.result()
    assert compare(alone, answer, SAME).problem == "", (answer, alone)
    assert is_pulled(answer, 1500), answer.told


def test_eight_at_once(up: TwoNodes, shape: Shape) -> None:
    pairs = [up.continued(tokens(300 + 37 * n, 1000 + n)) for n in range(8)]
    before = moved(up)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pair: up.complete(pair[0], stream=True), pairs))
    for (prompt, alone), answer in zip(pairs, answers, strict=True):
        assert is_pulled(answer, len(prompt) - 1), answer.told
        assert compare(alone, answer, SLACK[shape.recipe.dtype]).problem == "", (answer, alone)
    new = moved(up).since(before)
    assert new.sent == new.pulled
    assert new.sent[0] >= 8 * shape.ranks


def test_a_repeat_moves_nothing_and_the_next_turn_only_what_is_new(up: TwoNodes) -> None:
    prompt, alone = up.continued(tokens(600, 5))
    first = up.complete(prompt)
    assert is_pulled(first, 600), first.told
    assert compare(alone, first, SAME).problem == ""
    before = moved(up)
    again = up.complete(prompt)
    assert (again.tokens, again.told["verdict"]) == (alone.tokens, "local")
    assert (again.told["prefill"], again.told["computed-tokens"]) == ("skipped:held", "1")
    up.forget(up.decode)  # what was pulled is kept in decode's store
    kept = up.complete(prompt)
    assert (kept.tokens, kept.told["source"]) == (alone.tokens, "host:600")
    assert moved(up) == before
    turn = up.complete([*prompt, *first.tokens, *tokens(300, 6)])
    assert (turn.told["verdict"], turn.told["computed-tokens"]) == ("proved", "1"), turn.told
    assert "peer:" in turn.told["source"]
    assert moved(up) != before


# ---- what is not


def test_a_byte_that_was_flipped_at_prefill_is_not_used(up: TwoNodes, shape: Shape) -> None:
    """The negative control: one bit of one object in the memory of prefill's store, before it is pulled. Beside it the
    same without."""
    whole = tokens(200, 9)
    untouched = up.meanwhile(lambda: up.complete(whole), lambda: None)
    assert is_pulled(untouched, 199), untouched.told
    prompt = tokens(200, 10)
    computed = up.computed(prompt)
    before, committed = arena(up), up.stats(up.prefill_socket).puts.committed

    def flip() -> None:
        up.wait(lambda: is_saved(up, committed), "prefill saves nothing")
        flip_one(up, before)

    answer = up.meanwhile(lambda: up.complete(prompt), flip)
    assert answer.told["verdict"] == "recomputed:checksum", (answer, up.receipt(answer))
    assert compare(computed, answer, SAME).problem == "", (answer, computed)
    up.wait(lambda: up.stats(up.prefill_socket).quarantined.count == {"arena": 1}, "prefill's store keeps it")
    assert [(bad.tier, bad.code) for bad in up.stats(up.prefill_socket).quarantined.latest] == [("arena", "KV-401")]
    assert is_pulled(up.complete(tokens(200, 11)), 199)  # and the next one is handed over again


def arena(up: TwoNodes) -> bytes:
    """The memory of prefill's store."""
    with up.store(up.prefill_socket) as client:
        assert client.arena is not None
        return bytes(client.arena.view(0, client.arena.size_bytes))


def flip_one(up: TwoNodes, before: bytes) -> None:
    """Flip a bit among the bytes there that have changed since."""
    with up.store(up.prefill_socket) as client:
        assert client.arena is not None
        memory = np.frombuffer(client.arena.view(0, client.arena.size_bytes), dtype=np.uint8)
        written = np.flatnonzero(memory != np.frombuffer(before, dtype=np.uint8))
        memory[written[len(written) // 2]] ^= 1
        del memory


def is_saved(up: TwoNodes, before: int) -> bool:
    told = up.stats(up.prefill_socket)
    return told.puts.committed > before and not any(client.puts for client in told.clients)


@only_dense
def test_a_promise_that_prefill_cannot_keep_is_not_waited_for(up: TwoNodes) -> None:
    """Prefill answers before it knows that its bytes find no room. Had decode waited until its patience ended, the
    reason would be its deadline."""
    prompt = tokens(700, 50)
    computed = up.computed(prompt)
    with hoarder(up.prefill_socket), hoarder(up.prefill_socket):
        answer = up.complete(prompt)
    assert answer.told["verdict"] == "recomputed:arena_full", (answer, up.receipt(answer))
    assert compare(computed, answer, SAME).problem == "", (answer, computed)
    assert is_pulled(up.complete(tokens(700, 51)), 699)


@only_dense
def test_a_hand_off_from_a_store_that_is_no_peer_leads_to_no_connection(up: TwoNodes, network: Hosts) -> None:
    prompt = tokens(300, 60)
    computed = up.computed(prompt)
    outside = (network.router, network.addresses["r"]) if isinstance(network, Namespaces) else ("a", "localhost")
    for (node, host), reason, is_tried in (
        (outside, "foreign_store", False),
        (("a", network.addresses["a"]), "peer_lost", True),  # the control: a peer's address, where no store is
    ):
        with network.on(node), listening(host) as (port, came):
            ticket = f"old-{reason}"
            told = handed_over(up, prompt, ticket)
            old = {**told, "role": "decode", "store": "a store of before", "address": f"tcp://{host}:{port}"}
            answer = ask(up.decode, body(prompt, cache_salt=ticket, kv_transfer_params={"kvtally": old}))
            with up.store() as client:
                found = client.receipts(ticket, wait_ms=60_000).wait()
            assert not isinstance(found, Miss)
            assert found.receipts[0].decode is not None
            assert found.receipts[0].decode.reason == reason
            assert bool(came) == is_tried
            assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [
                [f"token_id:{token}" for token in computed.tokens]
            ]


def handed_over(up: TwoNodes, prompt: list[int], ticket: str) -> dict[str, Any]:
    """What prefill promises, of a prompt that nobody else shares."""
    asked = {"kvtally": {"ticket": ticket, "role": "prefill"}}
    answer = ask(up.prefill, body(prompt, 1, cache_salt=ticket, kv_transfer_params=asked))
    told: dict[str, Any] = answer["kv_transfer_params"]["kvtally"]
    assert told["saved_tokens"] == len(prompt) - 1
    return told


def ask(engine: str, content: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(content).encode()
    request = urllib.request.Request(f"{engine}/v1/completions", data, {"Content-Type": "application/json"})
    with direct.open(request, timeout=REQUEST_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@contextmanager
def listening(host: str) -> Iterator[tuple[int, list[str]]]:
    """A port on which nobody says anything, and who has connected to it."""
    came: list[str] = []
    with socket.create_server((host, 0)) as listener, ThreadPoolExecutor(1) as pool:

        def accept() -> None:
            with suppress(OSError):  # closed in the end
                while True:
                    connection, where = listener.accept()
                    came.append(where[0])
                    connection.close()

        pool.submit(accept)
        try:
            yield listener.getsockname()[1], came
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_nothing_is_left_over(up: TwoNodes) -> None:
    up.wait(lambda: not leftovers(up), "something is left over")
