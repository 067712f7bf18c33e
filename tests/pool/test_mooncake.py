"""A real Mooncake cluster: into the registered arena without a copy, memory that dies, a master that is restarted."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtally.errors import TierError
from kvtally.store.mover import read_verified
from kvtally.store.tiers.pool import PoolTier
from kvtally.wire.limits import MIB
from tests.pool.kit import Kit, Site, code_of, contents, held, load, namespace_of, prompt, save
from tests.pool.servers import Mooncake
from tests.waiting import eventually

NAMESPACE = namespace_of(100_000)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site("mooncake", tmp_path)
    yield site
    site.close()


def works(tier: PoolTier, number: int) -> bool:
    """Whether a prompt can be saved and loaded."""
    each = prompt(NAMESPACE, number, 2)
    try:
        save(tier, each)
        return load(tier, each) == (contents(each), [])
    except TierError:
        return False


def test_straight_between_the_arena_and_the_pool(site: Site) -> None:
    """Pieces anywhere in the registered memory, larger than the library's own buffer could hold at once."""
    arena = memoryview(mmap.mmap(-1, 96 * MIB))
    kit = Kit(site)
    tier = kit.open()
    tier.register(arena)
    length = 40 * MIB + 13
    saved = prompt(namespace_of(length), 1, 1)
    ((record, data),) = saved.records(0)
    source = [arena[MIB : 2 * MIB], arena[4 * MIB : 4 * MIB + length - MIB]]
    source[0][:], source[1][:] = data[:MIB], data[MIB:]
    tier.write(record, source)
    target = [arena[50 * MIB : 51 * MIB], arena[90 * MIB : 90 * MIB + 13], arena[51 * MIB : 90 * MIB]]
    assert read_verified(tier, record, target)
    assert b"".join(target) == data
    short = [arena[50 * MIB : 51 * MIB]]
    assert code_of(lambda: tier.read(record, short, lambda _: None)) == "KV-402"
    beside = [memoryview(bytearray(length))]  # and memory that is not registered works as well
    assert read_verified(tier, record, beside)
    kit.close()


def test_memory_that_dies_takes_its_values(site: Site) -> None:
    server: Mooncake = site.server
    kit = Kit(site)
    tier = kit.open()
    saved = prompt(NAMESPACE, 1, 4)
    save(tier, saved)
    found = tier.ask(NAMESPACE, saved.boundaries)
    server.memory.kill()
    loaded = load(tier, saved, found)
    assert loaded.data == {}
    assert set(loaded.missed) <= {"KV-600", "KV-603"}
    server.memory = server.start_memory()
    eventually(lambda: works(tier, 2), "it works again")
    kit.close()


def test_a_master_that_is_restarted_has_forgotten(site: Site) -> None:
    server: Mooncake = site.server
    kit = Kit(site)
    tier = kit.open()
    saved = prompt(NAMESPACE, 1, 4)
    save(tier, saved)
    server.master.kill()
    assert code_of(lambda: tier.ask(NAMESPACE, saved.boundaries)) == "KV-600"
    server.master = server.start_master()
    eventually(lambda: works(tier, 2), "it works again")
    assert held(tier, saved) == 0
    kit.close()


def test_a_stopped_master_costs_a_deadline(site: Site) -> None:
    server: Mooncake = site.server
    kit = Kit(site)
    tier = kit.open()
    saved = prompt(NAMESPACE, 1, 2)
    save(tier, saved)
    os.kill(server.master.pid, signal.SIGSTOP)
    assert code_of(lambda: tier.ask(NAMESPACE, prompt(NAMESPACE, 5, 2).boundaries)) == "KV-600"
    os.kill(server.master.pid, signal.SIGCONT)
    eventually(lambda: works(tier, 2), "it works again")
    kit.close()


def test_a_full_pool(tmp_path: Path) -> None:
    """It evicts what was not used for ten seconds; until then it says that it is full."""
    site = Site("mooncake", tmp_path, segment_bytes=64 * MIB)
    kit = Kit(site)
    tier = kit.open()
    codes: set[str] = set()
    prompts = [prompt(namespace_of(4 * MIB), number, 1) for number in range(1, 40)]
    for each in prompts:
        try:
            save(tier, each)
        except TierError as error:
            codes.add(error.code)
    assert codes <= {"KV-601"}
    for each in prompts:
        loaded = load(tier, each)
        assert set(loaded.missed) <= {"KV-603"}
        assert loaded.data in ({}, contents(each))
    kit.close()
    site.close()


def test_what_it_says_of_itself(site: Site) -> None:
    kit = Kit(site)
    save(kit.open(), prompt(NAMESPACE, 1, 2))
    condition = kit.engine.condition()
    assert condition.server.startswith("mooncake")
    assert any("no authentication" in what for what, _ in condition.warnings)
    sizes = [item.length_bytes for item in kit.engine.names(kit.prefix + "/") if "/v/" in item.name]
    assert sizes == [100_000] * 2
    kit.close()
