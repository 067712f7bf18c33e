"""Eight clients at full load while processes are killed and stopped: nothing wrong, nothing late, nothing lost or left.

KVTALLY_CHAOS_SECONDS sets how long the slow storm lasts, KVTALLY_CHAOS_SEED what happens in it.
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
SECONDS = float(os.environ.get("KVTALLY_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("KVTALLY_CHAOS_SEED", "1"))
SLACK_S = 1.0  # beyond a deadline, on a machine with more busy processes than processors
MIB = 1024 * 1024


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    seen = live_through(Storm(tmp_path, SEED, clients=3), duration_s=4.0)
    assert seen["get verified"] > 50


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path) -> None:
    seen = live_through(Storm(tmp_path, SEED, clients=CLIENTS), duration_s=SECONDS)
    wanted = ("store killed", "store audited", "store stopped", "client killed", "client stopped", "put WRITE")
    assert all(seen[event] for event in wanted) or SECONDS < 30, dict(seen)
    assert min(seen["get verified"], seen["objects audited"]) > 100 or SECONDS < 30


def live_through(storm: Storm, *, duration_s: float) -> Counter[str]:
    try:
        storm.blow(duration_s)
        storm.calm()
        seen = storm.seen + what_clients_saw([*storm.clients, *storm.fallen])
        everything_was_given_back(storm.store)
        print(f"seed {SEED}: {dict(sorted(seen.items()))}; starts {max(storm.store.starts_s):.2f} s at most")
        nothing_stays_behind(storm.store)
    finally:
        storm.close()
    return seen


def what_clients_saw(clients: list[WorkerProcess]) -> Counter[str]:
    seen: Counter[str] = Counter()
    worst = (0.0, 0.0)
    for client in clients:
        assert client.log.read_text() == "", "a client said something"
        assert client.lines("wrong") == []
        sums = client.lines("sum")
        if sums:
            seen.update(sums[-1]["seen"])
            assert int(sums[-1]["descriptors"]) < 20, "a client leaks descriptors"
        worst = max([worst, *client.lateness_s()])
    late_s, starved_s = worst
    print(f"the latest call came {late_s:.3f} s after its deadline ({starved_s:.3f} s without a processor)")
    assert late_s - starved_s < SLACK_S
    return seen


def everything_was_given_back(store: StoreProcess) -> None:
    eventually(lambda: len(store.stats("clients")) == 1, "only the probe was left")
    stats = store.stats()
    left = {
        "leases": store.stats("leases", "open"),
        "limbo": store.stats("arena", "limbo_bytes"),
        "staging": store.stats("arena", "staging_bytes"),
        "waiting": store.stats("lookups", "waiting"),
        "strangers": store.stats("server", "strangers"),
        "puts": sum(client["puts"] for client in stats["clients"]),
    }
    assert left == dict.fromkeys(left, 0)
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
