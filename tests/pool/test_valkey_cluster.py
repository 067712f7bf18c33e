"""A Valkey cluster of six real processes: a killed primary, moved slots, a stopped node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtally.errors import TierError
from tests.pool.kit import (
    Kit,
    Site,
    code_of,
    contents,
    held,
    impatient,
    load,
    namespace_of,
    patient,
    prompt,
    save,
)
from tests.pool.servers import Valkey, ValkeyCluster
from tests.waiting import eventually

NAMESPACE = namespace_of(20_000)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site("valkey cluster", tmp_path)
    yield site
    site.close()


@pytest.fixture
def kit(site: Site) -> Iterator[Kit]:
    kit = Kit(site)
    yield kit
    kit.close()


def number(value: object) -> int:
    assert isinstance(value, int)
    return value


def test_a_killed_primary(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nobody serves its slots, and after its replica has taken over: no wrong byte. In the end everything that
    was replicated is there, and more can be saved."""
    cluster: ValkeyCluster = kit.site.server
    prompts = [prompt(NAMESPACE, index, 6) for index in range(1, 7)]
    tier = kit.open()
    for each in prompts:
        save(tier, each)
    victim = cluster.nodes[0]
    for node in cluster.nodes[:3]:
        node("WAIT", 1, 0)  # the replicas have it all
    impatient(monkeypatch)
    tier = kit.open()  # its connections give up early
    victim.process.kill()
    outcomes: list[str] = []

    def all_there() -> bool:
        try:
            loaded = [load(tier, each) for each in prompts]
        except TierError as error:
            outcomes.append(error.code)
            return False
        for each, (data, missed) in zip(prompts, loaded, strict=True):
            assert data.items() <= contents(each).items()
            assert set(missed) <= {"KV-600", "KV-603"}
            outcomes.extend(missed)
        return all(data == contents(each) for each, (data, _) in zip(prompts, loaded, strict=True))

    eventually(all_there, "the replica has taken over")
    assert set(outcomes) <= {"KV-600", "KV-603"}
    patient(monkeypatch)
    later = prompt(NAMESPACE, 9, 6)
    fresh = kit.open(engine=kit.engine)
    save(fresh, later)
    assert load(kit.open(engine=kit.engine), later) == (contents(later), [])
    assert {node.port for node in (cluster.primary_of(slot) for slot in (0, 6000, 12000))}.isdisjoint({victim.port})


def test_a_stopped_primary_costs_a_deadline(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: ValkeyCluster = kit.site.server
    saved = prompt(NAMESPACE, 1, 12)
    save(kit.open(), saved)
    impatient(monkeypatch)
    tier = kit.open()

    def found() -> bool:
        try:
            return held(tier, saved) == 12
        except TierError:
            return False

    eventually(found, "it was connected")
    for node in cluster.nodes:  # all of them: no replica takes over
        node.stop()
    assert code_of(lambda: tier.ask(NAMESPACE, saved.boundaries)) == "KV-600"
    for node in cluster.nodes:
        node.go_on()
    eventually(lambda: all(node.answers() and cluster.is_whole(node) for node in cluster.nodes), "it is whole again")
    eventually(found, "it is found again")


def test_moved_slots(kit: Kit) -> None:
    """A third of the slots goes to another primary while a store is connected: it follows, and misses nothing."""
    cluster: ValkeyCluster = kit.site.server
    saved = prompt(NAMESPACE, 1, 12)
    tier = kit.open()
    save(tier, saved)
    giver, taker = cluster.nodes[0], cluster.nodes[1]
    moved = 0
    for name in kit.names():
        slot = number(giver("CLUSTER", "KEYSLOT", name))
        if cluster.primary_of(slot) is giver:
            move(cluster, giver, taker, slot)
            moved += 1
    assert moved > 3
    assert load(tier, saved) == (contents(saved), [])
    later = prompt(NAMESPACE, 2, 12)
    save(tier, later)
    assert load(kit.open(), later) == (contents(later), [])


def move(cluster: ValkeyCluster, giver: Valkey, taker: Valkey, slot: int) -> None:
    """Give a slot with its keys to another primary, as an operator's tool does."""
    giver_id, taker_id = (bytes(node("CLUSTER", "MYID")) for node in (giver, taker))
    taker("CLUSTER", "SETSLOT", slot, "IMPORTING", giver_id)
    giver("CLUSTER", "SETSLOT", slot, "MIGRATING", taker_id)
    keys = giver("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    assert isinstance(keys, list)
    if keys:
        giver("MIGRATE", "127.0.0.1", taker.port, "", 0, 60_000, "AUTH", taker.password, "KEYS", *keys)
    for node in (taker, giver, cluster.nodes[2]):
        node("CLUSTER", "SETSLOT", slot, "NODE", taker_id)
