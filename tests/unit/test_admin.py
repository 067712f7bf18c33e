"""Admin HTTP: what it shows, what it refuses, and that every metric of the table is read from a real stats tree."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtally.config import StoreConfig
from kvtally.core.keys import ObjectKey
from kvtally.errors import TierError
from kvtally.store.admin import MOST_CONNECTIONS
from kvtally.store.metrics import EACH, METRICS, render, samples
from kvtally.store.server import StoreServer
from kvtally.store.tiers.base import ObjectRecord, Tier
from kvtally.testing.tiers import MemoryTier
from kvtally.wire.stats import Kind
from tests.unit.shell import LOOKUP, NAMESPACE, OBJECT_BYTES, TOKEN, Bench, Running, put
from tests.waiting import HANG_S, eventually


class Answer(NamedTuple):
    status: int
    body: bytes

    def json(self) -> dict[str, object]:
        tree = json.loads(self.body)
        assert isinstance(tree, dict)
        return tree


def request(running: Running, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", running.server.admin_port, timeout=HANG_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()


class FailingTier(MemoryTier):
    """A device that cannot be written."""

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        raise TierError("the device is gone", remedy="None.", code="KV-602")


@pytest.fixture
def running(bench: Bench, tmp_path: Path) -> Running:
    """A store with one object in arena and disk, and one hit."""
    running = bench.start(admin="127.0.0.1:0", token=TOKEN, disk=str(tmp_path / "disk"), disk_bytes=1 << 24)
    peer = bench.client()
    mapping = peer.map()
    put(peer, mapping, os.urandom(OBJECT_BYTES))
    mapping.close()
    peer.ask(LOOKUP)
    eventually(lambda: running.call(lambda: running.server.hub.stats().tiers[0].writes) == 1)
    eventually(lambda: running.server.arena.populated_bytes == running.server.arena.size_bytes)
    return running


def test_health(running: Running) -> None:
    answer = request(running, "/health")
    assert answer.status == 200
    health = answer.json()
    assert (health["status"], health["populated"], health["tiers"]) == ("ok", 1.0, {"disk": "ok"})
    assert float(str(health["uptime_s"])) > 0


def test_a_failing_tier_is_named_and_the_store_lives_on(bench: Bench) -> None:
    def broken(config: StoreConfig) -> list[Tier]:
        return [FailingTier(name="broken")]

    running = bench.start(StoreServer(bench.config(admin="127.0.0.1:0"), open_tiers=broken))
    peer = bench.client()
    mapping = peer.map()
    put(peer, mapping, bytes(OBJECT_BYTES))
    mapping.close()
    eventually(lambda: request(running, "/health").json()["status"] == "degraded")
    answer = request(running, "/health")
    assert (answer.status, answer.json()["tiers"]) == (200, {"broken": "not-writing"})
    assert 'kvtally_tier_errors_total{code="KV-602",tier="broken"} 1.0' in request(running, "/metrics").body.decode()


def test_metrics_are_the_stores_own_numbers(running: Running) -> None:
    answer = request(running, "/metrics")
    assert answer.status == 200
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert values[("kvtally_puts_committed_total",)] == 1
    assert values[("kvtally_put_bytes_total",)] == OBJECT_BYTES
    assert values[("kvtally_lookup_hits_total",)] == 1
    assert values[("kvtally_arena_objects",)] == 1
    assert values[("kvtally_tier_write_bytes_total", "disk")] == OBJECT_BYTES
    assert values[("kvtally_clients",)] == 1


def test_every_metric_is_found_in_a_real_tree(running: Running) -> None:
    """A renamed field of the tree must not silently become a metric without samples."""
    stats = running.call(running.server.hub.stats)
    for entry in METRICS:
        found = list(samples(stats, entry.path))
        may_be_empty = entry.path.endswith(EACH) or entry.path.startswith("peers.")  # codes, reasons, other stores
        assert found or may_be_empty, entry.name
        assert all(len(labels) == len(entry.labels) for labels, _ in found), entry.name
        assert entry.path.split(".").count(EACH) == len(entry.labels), entry.name


def test_the_metrics_table_is_well_formed(running: Running) -> None:
    names = [entry.name for entry in METRICS]
    assert len(set(names)) == len(names)
    assert not any(name.endswith("_total") for name in names)  # the exposition adds it to counters
    stats = running.call(running.server.hub.stats)
    families = {family.name: family for family in text_string_to_metric_families(render(lambda: stats).decode())}
    for entry in METRICS:
        assert families[entry.name].type == entry.kind.value
        assert families[entry.name].documentation == entry.help
    assert {entry.kind for entry in METRICS} == set(Kind)


def test_inspect_is_the_whole_tree(running: Running) -> None:
    tree = request(running, "/inspect").json()
    assert {"arena", "tiers", "lookups", "puts", "leases", "clients", "namespaces", "server"} <= tree.keys()
    namespaces = json.loads(request(running, "/inspect/namespaces").body)
    assert [item["digest"] for item in namespaces] == [NAMESPACE.digest.hex()]


RESET = f"/reset?namespace={NAMESPACE.digest.hex()}"


def test_reset_needs_the_token(running: Running) -> None:
    assert request(running, RESET, "POST").status == 401
    assert request(running, RESET, "POST", Authorization="Bearer guess").status == 401
    assert request(running, RESET, "POST", Authorization="Bearer t\xf6ken").status == 401
    assert request(running, RESET, Authorization=f"Bearer {TOKEN}").status == 405
    assert running.stats("arena", "objects") == 1

    answer = request(running, RESET, "POST", Authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.json()) == (200, {"objects": 1})
    assert running.stats("namespaces")[0]["objects"] == 0  # type: ignore[index]


class FullTier(MemoryTier):
    """A volume without a byte for the record of a removal."""

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        if any(key in self.objects for key in keys):
            raise TierError("the volume is full", remedy="None.", code="KV-601")


def test_a_reset_that_a_tier_could_not_carry_out_is_no_success(bench: Bench) -> None:
    def full(config: StoreConfig) -> list[Tier]:
        return [FullTier(name="full")]

    running = bench.start(StoreServer(bench.config(admin="127.0.0.1:0", token=TOKEN), open_tiers=full))
    peer = bench.client()
    mapping = peer.map()
    put(peer, mapping, bytes(OBJECT_BYTES))
    mapping.close()
    eventually(lambda: running.call(lambda: running.server.hub.stats().tiers[0].writes) == 1)
    answer = request(running, RESET, "POST", Authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.json()["code"]) == (503, "KV-601")
    assert running.stats("namespaces")[0]["objects"] == 0  # type: ignore[index]


@pytest.mark.parametrize("query", ["", "?namespace=zz", "?namespace=" + "00" * 32])
def test_reset_of_an_unknown_namespace_says_so(running: Running, query: str) -> None:
    answer = request(running, "/reset" + query, "POST", Authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.json()["code"]) == (404, "KV-206")


def test_without_a_token_nothing_can_be_changed(bench: Bench) -> None:
    running = bench.start(admin="127.0.0.1:0")
    for headers in ({}, {"Authorization": "Bearer "}):
        answer = request(running, RESET, "POST", **headers)
        assert (answer.status, answer.json()["code"]) == (403, "KV-205")
        assert "token" in str(answer.json()["remedy"])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:80", 200),
        ("[::1]:80", 200),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_answered(bench: Bench, host: str, status: int) -> None:
    running = bench.start(admin="127.0.0.1:0")
    assert request(running, "/inspect", Host=host).status == status


def idle_connections(running: Running, count: int, said: bytes = b"") -> list[socket.socket]:
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", running.server.admin_port), timeout=HANG_S)
        connection.sendall(said)
        connections.append(connection)
    return connections


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /health HT",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["nothing", "half a request", "kept alive", "a body that never comes"],
)
def test_idle_connections_shut_nobody_out(bench: Bench, said: bytes) -> None:
    running = bench.start(admin="127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        for connection in idle_connections(running, 3 * MOST_CONNECTIONS, said):
            stack.enter_context(connection)
            assert request(running, "/health").status == 200


def test_the_connection_that_was_idle_for_longest_makes_way(bench: Bench) -> None:
    running = bench.start(admin="127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        first, second, *_ = map(stack.enter_context, idle_connections(running, MOST_CONNECTIONS))
        assert request(running, "/health").status == 200
        assert first.recv(1) == b""
        second.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert second.recv(12) == b"HTTP/1.0 200"


def test_a_head_has_no_body_and_other_paths_are_named(bench: Bench) -> None:
    running = bench.start(admin="127.0.0.1:0")
    assert request(running, "/health", "HEAD") == (200, b"")
    missing = request(running, "/")
    assert (missing.status, b"/inspect/namespaces" in missing.body) == (404, True)
