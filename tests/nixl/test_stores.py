"""Two real stores with `transport: nixl-tcp`: what one has saved is read by the other, out of its arena.

UCX uses TCP on the loopback interface here: bytes and faults are real, speed is not.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec import structs

from kvtally.client import Miss
from kvtally.processes import free_ports
from kvtally.store.tiers.nixl import WHEELS
from kvtally.wire.messages import Lookup, MissReason, PutStatus
from tests.chaos.processes import StoreProcess, environment
from tests.chaos.workload import NAMESPACE, asked, objects, problem, right_bytes
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow
needs_nixl = pytest.mark.skipif(
    not any(find_spec(wheel) for wheel in WHEELS),
    reason="NIXL is not installed; `scripts/install-nixl PYTHON` does that",
)
TOKEN = "a token of enough characters"


def options(directory: Path, host: str, port: int, transport: str) -> list[str]:
    token = directory / "token"
    token.parent.mkdir(exist_ok=True)
    token.write_text(TOKEN)
    token.chmod(0o600)
    network = ["--tcp", f"{host}:{port}", "--bulk", f"{host}:0", "--peers", "127.0.0.0/8", "--token-file", str(token)]
    return ["--memory", "64MiB", *network, "--transport", transport]


class Pair:
    """A has saved what B is asked for."""

    def __init__(self, directory: Path) -> None:
        self.stores = []
        for name, host, port in zip("ab", ("127.0.0.2", "127.0.0.3"), free_ports(2), strict=True):
            given = options(directory / name, host, port, "nixl-tcp")
            self.stores.append(StoreProcess(directory / name, *given, namespace=NAMESPACE))
        self.a, self.b = self.stores
        found = re.search(r"peers reach this store at (\S+),", self.a.log.read_text())
        assert found is not None
        self.source = found[1]

    def save(self, prompt: int) -> None:
        items = [(item, right_bytes(item.chain, item.group)) for item in objects(prompt)]
        assert self.a.probe.put(items) == [PutStatus.WRITE] * len(items)

    def question(self, prompt: int) -> Lookup:
        return structs.replace(asked(prompt), source=self.source)

    def load(self, prompt: int) -> dict[tuple[int, int], bytearray] | Miss:
        return self.b.probe.get(self.question(prompt))

    def close(self) -> None:
        for store in self.stores:
            if store.process.is_stopped and store.process.child.poll() is None:
                store.process.signal(signal.SIGCONT)
            store.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")  # no shared memory, which UCX would choose on one machine
    pair = Pair(tmp_path)
    yield pair
    pair.close()


@needs_nixl
def test_what_one_store_saved_the_other_one_reads(pair: Pair) -> None:
    pair.save(0)
    found = pair.load(0)
    assert isinstance(found, dict), found
    assert problem(0, found) == ""
    count = len(found)
    assert pair.a.stats("sends", "objects") == count
    assert "peers read this arena by NIXL, which may use TCP" in pair.b.log.read_text()
    assert isinstance(pair.b.probe.get(asked(0)), dict)  # it is B's own now
    assert pair.a.stats("sends", "objects") == count


@needs_nixl
def test_a_store_that_is_killed_costs_a_miss_and_its_successor_serves(pair: Pair) -> None:
    pair.save(0)
    assert isinstance(pair.load(0), dict)
    pair.save(1)
    pair.a.process.kill()
    assert isinstance(pair.load(1), Miss)
    pair.a.start()
    pair.save(2)
    eventually(lambda: isinstance(pair.load(2), dict), "the successor is read from")
    found = pair.load(2)
    assert isinstance(found, dict)
    assert problem(2, found) == ""


@needs_nixl
def test_a_store_whose_peer_is_stopped_answers_and_stops_in_order(pair: Pair) -> None:
    pair.save(0)
    lease = pair.b.probe.hold(pair.question(0)).wait()
    assert not isinstance(lease, Miss)
    pair.a.process.signal(signal.SIGSTOP)  # before, after or while it is read: it must not matter
    pair.b.probe.wait_staged(lease, timeout_s=HANG_S)
    missed = pair.load(1)
    assert isinstance(missed, Miss)
    assert missed.reason in (MissReason.PEER_LOST, MissReason.ABSENT)
    assert pair.b.process.end() == 0


def refused(directory: Path, transport: str, **variables: str) -> str:
    where = ["--socket", str(directory / "s.sock"), "--disk", str(directory / "disk")]
    command = ["store", *where, *options(directory, "127.0.0.2", 0, transport)]
    ended = subprocess.run(
        [sys.executable, "-m", "kvtally", *command],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert not (directory / "s.sock").exists()
    assert not (directory / "disk").exists()
    return "\n".join(ended.stderr.splitlines()[-2:])  # what is wrong, and the remedy


@needs_nixl
def test_without_rdma_a_store_does_not_start(tmp_path: Path) -> None:
    said = refused(tmp_path, "nixl")
    assert "UCX finds no RDMA device that it can use" in said
    assert "remedy: Use transport: tcp" in said


def test_without_the_extra_a_store_does_not_start(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    directory = tmp_path / "store"
    for wheel in WHEELS:
        (hidden / wheel).mkdir(parents=True)
        (hidden / wheel / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {wheel}")')
    path = f"{hidden}:{environment()['PYTHONPATH']}"
    said = refused(directory, "nixl", PYTHONPATH=path)
    assert "it is not installed" in said
    assert "remedy: pip install 'kvtally[nixl]'" in said
