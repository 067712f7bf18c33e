"""Ten thousand times the same: neither the client nor the store keeps anything of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest

from kvtally.client import Miss
from kvtally.testing.copying import CopyingClient
from tests.chaos.processes import Eager, StoreProcess
from tests.chaos.single import NAMESPACE, asked, item, load, save
from tests.waiting import HANG_S, eventually

KIB = 1024


def own_anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * KIB for line in status if line.startswith("RssAnon"))


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_come_and_go(daemon: StoreProcess, count: int) -> None:
    """Each maps the arena, holds a lease, leaves a put open, and goes without a word."""
    save_once(daemon)

    def visit() -> None:
        with CopyingClient(str(daemon.socket), namespace=NAMESPACE, timeout_s=HANG_S) as client:
            lease, puts = client.hold(asked(2003)).wait(), client.put_begin([item(2004)]).wait()
            assert not isinstance(lease, Miss)
            assert not isinstance(puts, Miss)

    stays_as_it_is(daemon, visit, count)
    eventually(lambda: daemon.stats("arena", "limbo_bytes") == 0, "all slots were given back")
    assert daemon.stats("leases", "open") == 0


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_one_client_that_is_cut_off_again_and_again(daemon: StoreProcess, count: int) -> None:
    save_once(daemon)
    with CopyingClient(str(daemon.socket), namespace=NAMESPACE, timeout_s=HANG_S, jitter=Eager()) as client:

        def be_cut_off() -> None:
            assert not isinstance(client.connect(), Miss)
            generation = client.generation
            connection = client._link._connection
            assert connection is not None
            connection.send(b"\xff\xff\xff\xff")  # what no client says: the store ends the connection
            while client.generation == generation:
                client._link.step(1 << 62)
            assert not isinstance(client.connect(), Miss)
            assert not isinstance(client.ping().wait(), Miss)

        stays_as_it_is(daemon, be_cut_off, count)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_leases_that_are_taken_and_released(daemon: StoreProcess, count: int) -> None:
    save_once(daemon)
    with CopyingClient(str(daemon.socket), namespace=NAMESPACE, timeout_s=HANG_S) as client:

        def hold_and_release() -> None:
            lease = client.hold(asked(2003)).wait()
            assert not isinstance(lease, Miss)
            assert lease.end_tokens
            assert not isinstance(client.release([lease]).wait(), Miss)

        stays_as_it_is(daemon, hold_and_release, count)
    assert daemon.stats("leases", "open") == 0


def save_once(store: StoreProcess) -> None:
    if load(store.probe, 2003) is not None:
        save(store.probe, 2003)


def stays_as_it_is(store: StoreProcess, action: Callable[[], None], count: int) -> None:
    """After a warm-up neither side's descriptors and memory grow with how often it is done."""
    for _ in range(100 + count // 10):
        action()
    who_left_is_forgotten(store)
    before = measures(store)
    for _ in range(count):
        action()
    who_left_is_forgotten(store)
    after = measures(store)
    grown = {name: after[name] - before[name] for name in before}
    print(f"{count} times: grown by {grown}")
    assert abs(grown["descriptors of the store"]) <= 2
    assert grown["descriptors of the client"] <= 0
    # A session or a lease is more than a kilobyte, so one that is kept each time shows at ten thousand. What does not
    # show: for a minute, the longest that a lease may live, emptied buckets of alarms stay behind, some megabytes.
    assert grown["memory of the store"] < 8192 * KIB
    assert grown["memory of the client"] < 2048 * KIB


def who_left_is_forgotten(store: StoreProcess) -> None:
    eventually(lambda: len(store.stats("clients")) <= 2, "who left was forgotten")
    eventually(lambda: store.stats("server", "strangers") == 0, "nobody was half-way in")


def measures(store: StoreProcess) -> dict[str, int]:
    gc.collect()  # of earlier tests
    return {
        "descriptors of the store": store.process.descriptors(),
        "descriptors of the client": own_descriptors(),
        "memory of the store": store.process.anonymous_bytes(),
        "memory of the client": own_anonymous_bytes(),
    }
