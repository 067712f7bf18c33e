"""The daemon's life: what keeps it from starting, what it waits for when it stops, what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtally.config import StoreConfig
from kvtally.errors import ConfigError, TierError
from kvtally.shm import Mapping
from kvtally.store import server
from kvtally.store.server import StoreServer, new_event_loop
from kvtally.store.tiers.base import ObjectRecord
from kvtally.testing.tiers import MemoryTier
from kvtally.wire.limits import MIB
from kvtally.wire.messages import Done, Found, Ping, SlotsGet, Staged
from tests.unit.shell import LOOKUP, OBJECT_BYTES, TOKEN, Bench, LoopFactory, Running, pieces_of, put
from tests.waiting import HANG_S, HOUR_S, eventually

ROOT = Path(__file__).parents[2]
LOOPS = [new_event_loop, asyncio.new_event_loop]


def refusal(config: StoreConfig) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        Running(StoreServer(config))
    return info.value


def test_a_second_store_on_the_same_socket_is_refused(bench: Bench) -> None:
    bench.start()
    peer = bench.client()
    inode = os.stat(bench.path).st_ino
    assert refusal(bench.config()).code == "KV-104"
    assert os.stat(bench.path).st_ino == inode
    assert peer.ask(Ping(2)) == Done(2)
    bench.client()


def test_a_stale_socket_is_taken_over(bench: Bench) -> None:
    Path(bench.path).parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(bench.path)
    bench.start()
    bench.client()


def test_stopping_closes_connections_and_removes_the_socket(bench: Bench) -> None:
    running = bench.start()
    peer = bench.client()
    running.stop()
    assert peer.is_closed()
    assert not Path(bench.path).exists()
    bench.start()
    bench.client()


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_comes_at_the_very_end_is_let_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, loop_factory: LoopFactory
) -> None:
    """Accepted in the turn of the loop in which the store was told to stop: it ended with an AttributeError."""
    fronts: list[server.Front] = []
    resume = server.Front._resume
    monkeypatch.setattr(server.Front, "_resume", lambda front: (fronts.append(front), resume(front)))

    async def come_and_stop(peer: socket.socket) -> None:
        async with StoreServer(bench.config()):
            peer.connect(bench.path)
            fronts[0]._accept()

    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(HANG_S)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(come_and_stop(peer))
        assert peer.recv(MIB)  # the greeting
        assert peer.recv(MIB) == b""


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_stopped_store_has_let_go_of_everything(bench: Bench, tmp_path: Path, loop_factory: LoopFactory) -> None:
    settings: dict[str, object] = {"tcp": "127.0.0.1:0", "admin": "127.0.0.1:0", "token": TOKEN}
    settings |= {"disk": str(tmp_path / "disk"), "disk_bytes": 16 * MIB}
    before, threads = open_descriptors(), threading.active_count()
    running = bench.start(StoreServer(bench.config(**settings)), loop_factory=loop_factory)
    peers = [bench.client(), bench.connect(), bench.connect_tcp(running)]
    refusal(bench.config(**settings))
    running.stop()
    for peer in peers:
        peer.close()
    assert (open_descriptors(), threading.active_count()) == (before, threads)


def test_a_file_that_is_no_socket_is_left_alone(bench: Bench) -> None:
    path = Path(bench.path)
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    assert refusal(bench.config()).code == "KV-102"
    assert path.read_text() == "precious"


def test_a_directory_others_can_write_is_refused(bench: Bench) -> None:
    directory = Path(bench.path).parent
    directory.mkdir()
    directory.chmod(0o777)
    assert refusal(bench.config()).code == "KV-103"
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"socket": "/tmp/" + "x" * 200}, "KV-102"),
        ({"memory_bytes": 1 << 60}, "KV-102"),
        ({"tcp": "127.0.0.1:0"}, "KV-100"),
        ({"tcp": "127.0.0.1:0", "token": TOKEN, "tls_cert": "/nowhere", "tls_key": "/nowhere"}, "KV-100"),
        ({"tcp": "nonsense", "token": TOKEN}, "KV-102"),
        ({"admin": "0.0.0.0:0"}, "KV-102"),
        ({"admin": "127.0.0.1.example.org:80"}, "KV-102"),
        ({"admin": "nonsense"}, "KV-102"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_serves(
    bench: Bench, settings: dict[str, object], code: str
) -> None:
    error = refusal(bench.config(**settings))
    assert (error.code, bool(error.remedy)) == (code, True)
    assert not Path(bench.path).exists()


@pytest.mark.parametrize("setting", ["tcp", "admin"])
def test_a_port_in_use_is_refused(bench: Bench, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings: dict[str, object] = {setting: f"127.0.0.1:{taken.getsockname()[1]}", "token": TOKEN}
        assert refusal(bench.config(**settings)).code == "KV-104"
    bench.start()  # the refused start gave everything back


def test_running_out_of_memory_stops_the_store(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Mapping, offset: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Mapping, "populate", no_memory)
    running = bench.start()
    running._thread.join(HANG_S)
    assert running.server.failure is not None
    assert running.server.failure.code == "KV-102"


def test_what_was_committed_is_served_from_disk_after_a_restart(bench: Bench, tmp_path: Path) -> None:
    """Stopping right after the commit: the write-behind is let finish."""
    running = bench.start(disk=str(tmp_path / "disk"), disk_bytes=16 * MIB)
    peer, data = bench.client(), os.urandom(OBJECT_BYTES)
    mapping = peer.map()
    put(peer, mapping, data)
    mapping.close()
    running.stop()

    again = bench.start(disk=str(tmp_path / "disk"), disk_bytes=16 * MIB)
    reader = bench.client()
    found = reader.ask(LOOKUP)
    assert isinstance(found, Found)
    assert found.staging == 1
    staged = reader.receive()
    assert isinstance(staged, Staged)
    assert (staged.lease, staged.end_tokens) == (found.lease, 256)
    slots = reader.ask(SlotsGet(8, found.lease))
    views = again.server.arena.views(pieces_of(slots.slots[0].pieces))  # type: ignore[union-attr]
    assert b"".join(bytes(view) for view in views) == data


def test_a_disk_directory_that_was_renamed_away_is_written_to_when_it_is_back(bench: Bench, tmp_path: Path) -> None:
    """Also if nobody saves anything more: what was saved meanwhile is still in memory."""
    disk = tmp_path / "disk"
    running = bench.start(disk=str(disk), disk_bytes=16 * MIB)
    disk.rename(tmp_path / "away")
    peer, data = bench.client(), os.urandom(OBJECT_BYTES)
    mapping = peer.map()
    put(peer, mapping, data)
    mapping.close()
    eventually(lambda: disk_of(running)["state"] == "not-writing")
    assert (disk_of(running)["objects"], disk_of(running)["errors"]) == (0, {"KV-602": 1})
    (tmp_path / "away").rename(disk)
    eventually(lambda: disk_of(running)["objects"] == 1)
    assert (disk_of(running)["state"], disk_of(running)["dropped"]) == ("ok", 0)


def disk_of(running: Running) -> dict[str, Any]:
    (tier,) = running.stats("tiers")  # type: ignore[misc]
    return tier  # type: ignore[no-any-return]


class SlowTier(MemoryTier):
    """Each write waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_through = threading.Event(), threading.Event()
        self.is_closed = False

    def write(self, record: ObjectRecord, source: Sequence[memoryview]) -> None:
        self.entered.set()
        assert self.let_through.wait(HOUR_S)
        super().write(record, source)

    def close(self) -> None:
        self.is_closed = True


def start_with_unwritten_object(bench: Bench, tier: SlowTier) -> Running:
    running = bench.start(StoreServer(bench.config(), open_tiers=lambda config: [tier]))
    peer = bench.client()
    mapping = peer.map()
    put(peer, mapping, bytes(OBJECT_BYTES))
    mapping.close()
    assert tier.entered.wait(HANG_S)
    return running


def test_stopping_waits_for_what_is_on_its_way_down(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DRAIN_TIMEOUT_S", HANG_S)
    tier = SlowTier()
    running = start_with_unwritten_object(bench, tier)

    def let_through_once_it_stops() -> None:
        eventually(running.server.stopping.is_set)
        tier.let_through.set()

    thread = threading.Thread(target=let_through_once_it_stops)
    thread.start()
    running.stop()
    thread.join(HANG_S)
    assert len(tier.objects) == 1
    assert tier.is_closed


def test_stopping_does_not_wait_for_a_hung_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DRAIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server, "_MOVER_STOP_TIMEOUT_S", 0.1)
    tier = SlowTier()
    running = start_with_unwritten_object(bench, tier)
    running.stop()
    assert not tier.is_closed  # a thread is still inside
    tier.let_through.set()


class LosingTier(SlowTier):
    """A device that fails in the last sync."""

    def close(self) -> None:
        super().close()
        raise TierError("the device is gone", remedy="None.", code="KV-602")


def test_a_tier_that_cannot_be_closed_does_not_keep_the_store_from_ending(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [LosingTier(), LosingTier()]
    running = bench.start(StoreServer(bench.config(), open_tiers=lambda config: tiers))
    running.stop()
    assert all(tier.is_closed for tier in tiers)
    assert caplog.text.count("was not closed in order: the device is gone [KV-602]") == 2


@contextlib.contextmanager
def a_process(path: str) -> Iterator[subprocess.Popen[bytes]]:
    script = (
        "import sys; from kvtally.store.server import run; from kvtally.config import StoreConfig\n"
        "sys.exit(run(StoreConfig(socket=sys.argv[1], memory_bytes=1 << 22, admin='127.0.0.1:0'),"
        " on_ready=lambda: print('ready', flush=True)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def times_run(pid: int) -> dict[str, int]:
    """How often each thread of a process was given a processor."""
    return {
        path.parent.name: int(path.read_text().split()[2]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_with_0_on_a_signal(bench: Bench, number: signal.Signals) -> None:
    with a_process(bench.path) as child:
        bench.client()
        child.send_signal(number)
        assert child.wait(HANG_S) == 0
    assert not Path(bench.path).exists()


def test_an_idle_store_does_not_wake_up(bench: Bench) -> None:
    """Once it has started and nobody asks, no thread of it runs: seen when a second passes without any."""
    with a_process(bench.path) as child:
        bench.client()

        def sleeps() -> bool:
            before = times_run(child.pid)
            time.sleep(1.0)
            return times_run(child.pid) == before

        eventually(sleeps, "no thread of the store ran for a second")
        child.terminate()
        assert child.wait(HANG_S) == 0
