"""Eight clients at full load while processes are killed and stopped: nothing wrong, nothing stuck, lost or left.

KVTALLY_CHAOS_EVENTS sets how much happens in the long storm, KVTALLY_CHAOS_SEED what.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from kvtally.client import Miss
from tests.chaos.processes import StoreProcess, WorkerProcess
from tests.chaos.storm import CLIENTS, Storm
from tests.waiting import eventually

# Read here: a fixture hides such variables from the tests themselves.
EVENTS = int(os.environ.get("KVTALLY_CHAOS_EVENTS", "100"))
SEED = int(os.environ.get("KVTALLY_CHAOS_SEED", "1"))
MIB = 1024 * 1024


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    live_through(Storm(tmp_path, SEED, clients=3), events=12)


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path) -> None:
    live_through(Storm(tmp_path, SEED, clients=CLIENTS), events=EVENTS)


def live_through(storm: Storm, *, events: int) -> None:
    try:
        storm.blow(events)
        storm.calm()
        seen = storm.seen + what_clients_saw([*storm.clients, *storm.fallen])
        everything_was_given_back(storm.store)
        print(f"seed {SEED}: {dict(sorted(seen.items()))}")
        wanted = ("store killed", "store audited", "store stopped", "client killed", "client stopped", "put WRITE")
        assert all(seen[event] for event in (*wanted, "objects audited", "get verified")), dict(seen)
        nothing_stays_behind(storm.store)
    finally:
        storm.close()


def what_clients_saw(clients: list[WorkerProcess]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for client in clients:
        assert client.log.read_text() == "", "a client said something"
        assert client.lines("wrong") == []
        sums = client.lines("sum")
        if sums:
            seen.update(sums[-1]["seen"])
            assert int(sums[-1]["descriptors"]) < 20, "a client leaks descriptors"
    return seen


def everything_was_given_back(store: StoreProcess) -> None:
    eventually(lambda: len(store.stats("clients")) == 1, "only the probe was left")
    held = (("leases", "open"), ("arena", "limbo_bytes"), ("arena", "staging_bytes"), ("lookups", "waiting"))
    for path in (*held, ("server", "strangers")):
        eventually(lambda path=path: store.stats(*path) == 0, f"nothing was left of {' '.join(path)}")  # type: ignore[misc]
    assert [client["puts"] for client in store.stats("clients")] == [0]
    assert store.stats("quarantined", "count") == {}, "nobody damaged anything"
    assert store.process.anonymous_bytes() < 200 * MIB
    assert store.process.descriptors() < 30 + 2 * CLIENTS
    # What remains in use when nothing is resident any more has no owner.
    assert not isinstance(store.probe.reset().wait(), Miss)
    eventually(lambda: store.stats("server", "unwritten_jobs") == 0, "the disk tier forgot everything")
    assert (store.stats("arena", "used_bytes"), store.stats("arena", "objects")) == (0, 0)
    assert (store.stats("tiers", "0", "used_bytes"), store.stats("tiers", "0", "objects")) == (0, 0)


def nothing_stays_behind(store: StoreProcess) -> None:
    assert store.process.end() == 0
    assert sorted(path.name for path in store.socket.parent.iterdir()) == ["s.sock.lock"]
    assert sorted(path.name for path in store.disk.iterdir()) == ["data", "format.json", "journal", "lock"]
    log = store.log.read_text()
    assert "Traceback" not in log, log
