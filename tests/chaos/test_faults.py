"""One fault at a time, on real processes, real files and real memory: what it costs, and what it must not cost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtally.client import Call, Miss
from kvtally.core.space import Piece
from kvtally.device import cpu
from kvtally.store.server import StoreServer
from kvtally.store.tiers.files import read_format
from kvtally.store.tiers.journal import compact_key, pieces_of, replay
from kvtally.testing.copying import CopyingClient
from kvtally.wire.limits import MIB, SECOND_NS, Limits
from kvtally.wire.messages import Found, MissReason, PutStatus
from tests.chaos.processes import Eager, StoreProcess, environment, tree
from tests.chaos.single import NAMESPACE, OBJECT_BYTES, asked, item, key, load, right_bytes, save
from tests.unit.shell import Bench, Running
from tests.waiting import HANG_S, HOUR_S, Clock, eventually

GRANULES_BYTES = 3 * 4096  # what an object takes
LIMIT_S = 0.15


def seen(running: Running, *path: str) -> Any:
    return tree(msgspec.to_builtins(running.call(running.server.hub.stats)), *path)


@contextlib.contextmanager
def client_of(path: str | Path) -> Iterator[CopyingClient]:
    with CopyingClient(str(path), namespace=NAMESPACE, timeout_s=HANG_S, jitter=Eager()) as client:
        assert not isinstance(client.connect(), Miss)
        yield client


@pytest.fixture
def client(bench: Bench) -> Iterator[CopyingClient]:
    """Connects when it is first used: the store may be started after it was made."""
    with CopyingClient(bench.path, namespace=NAMESPACE, timeout_s=HANG_S, jitter=Eager()) as client:
        yield client


# ---- a store that does not answer


def test_calls_return_in_time_while_the_store_is_stopped(daemon: StoreProcess) -> None:
    with client_of(daemon.socket) as client:
        save(client, 10)
        session = client.session
        daemon.process.signal(signal.SIGSTOP)
        try:
            newcomer = CopyingClient(str(daemon.socket), namespace=NAMESPACE)
            calls: list[Callable[[], object]] = [
                lambda: client.get(asked(10), timeout_s=LIMIT_S),
                lambda: client.put([(item(11), right_bytes(11))], timeout_s=LIMIT_S),
                lambda: client.lookup(asked(10), timeout_s=LIMIT_S).wait(),
                lambda: newcomer.get(asked(10), timeout_s=LIMIT_S),
                lambda: newcomer.connect(LIMIT_S),
            ]
            for call in calls:
                begun = time.monotonic()
                answer = call()
                took_s = time.monotonic() - begun
                assert isinstance(answer, Miss), answer
                assert answer.reason in (MissReason.DEADLINE, MissReason.STORE_UNREACHABLE)
                assert took_s < HANG_S  # the deadline of calls that name none
            newcomer.close()
        finally:
            daemon.process.signal(signal.SIGCONT)
        assert load(client, 10) is None
        assert client.session is session, "stopping a store for a moment costs nobody the connection"
        save(client, 12)
    # What was granted to calls that nobody waited for any more was given back.
    eventually(lambda: daemon.stats("leases", "open") == 0, "late leases were released")
    eventually(lambda: [c["client"] for c in daemon.stats("clients")] == ["probe"], "the client left")
    assert daemon.stats("arena", "limbo_bytes") == 0


def test_what_a_late_answer_grants_is_given_back(daemon: StoreProcess) -> None:
    """The client lives on: nothing but its own care releases a lease or a put that came after the deadline."""
    with client_of(daemon.socket) as client:
        save(client, 20)
        daemon.process.signal(signal.SIGSTOP)
        calls: list[Call[Any]] = [
            client.hold(asked(20), timeout_s=0.05),
            client.put_begin([item(21)], timeout_s=0.05),
        ]
        assert [call.wait().reason for call in calls] == [MissReason.DEADLINE] * 2
        daemon.process.signal(signal.SIGCONT)

        def nothing_is_held() -> bool:
            client.poll()
            own = next(c for c in daemon.stats("clients") if c["client"] == "client")
            return (own["leases"], own["puts"]) == (0, 0)

        eventually(nothing_is_held, "lease and put were given back")
        save(client, 21)


def test_calls_return_in_time_while_nobody_is_let_in(daemon: StoreProcess) -> None:
    """The queue of connections that a stopped store has not accepted yet is full."""
    daemon.process.signal(signal.SIGSTOP)
    with contextlib.ExitStack() as crowd:
        codes = set()
        while errno.EAGAIN not in codes:
            stranger = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            codes.add(stranger.connect_ex(str(daemon.socket)))
        with CopyingClient(str(daemon.socket), namespace=NAMESPACE) as client:
            begun = time.monotonic()
            assert isinstance(client.get(asked(10), timeout_s=LIMIT_S), Miss)
            assert isinstance(client.connect(LIMIT_S), Miss)
            assert time.monotonic() - begun < HANG_S
    daemon.process.signal(signal.SIGCONT)
    eventually(lambda: daemon.stats("server", "strangers") == 0, "the crowd was sent away")
    with client_of(daemon.socket) as client:
        assert not isinstance(client.ping().wait(), Miss)


# ---- clients that stop or die in the middle


@contextlib.contextmanager
def half_way(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a write, with a lease on prompt 2."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.writer", bench.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            yield child
        finally:
            child.kill()


def slot_of_the_writer(running: Running) -> list[Piece]:
    """The one slot that is being written to, or might be."""
    return running.call(running.server.hub.store._puts.open_pieces)


def bytes_at(running: Running, pieces: list[Piece]) -> bytes:
    return running.call(lambda: b"".join(bytes(view) for view in running.server.arena.views(pieces)))


def use_every_byte(running: Running, client: CopyingClient, begin: int) -> None:
    """Save more than three arenas full."""
    before = seen(running, "arena", "evicted")
    save(client, *range(begin, begin + 3 * MIB // GRANULES_BYTES))
    assert int(seen(running, "arena", "evicted")) - int(before) > 2 * MIB // GRANULES_BYTES


def leases_expire(running: Running, clock: Clock) -> None:
    clock.forward(HOUR_S)
    running.call(lambda: None)  # it looks at its timers


def test_a_stopped_writers_slot_is_not_reused_until_it_says_so(
    bench: Bench, client: CopyingClient, clock: Clock
) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop, memory_bytes=1 * MIB)
    save(client, 2)
    with half_way(bench) as writer:
        slot = slot_of_the_writer(running)
        writer.send_signal(signal.SIGSTOP)
        leases_expire(running, clock)
        eventually(lambda: seen(running, "puts", "expired") == 1, "the put expired")
        eventually(lambda: seen(running, "leases", "open") == 0, "the lease expired")
        assert seen(running, "arena", "limbo_bytes") == GRANULES_BYTES
        assert (slot_of_the_writer(running), load(client, 1)) == (slot, Miss(MissReason.ABSENT))
        before = bytes_at(running, slot)
        use_every_byte(running, client, 100)
        assert bytes_at(running, slot) == before, "somebody else wrote where a stopped process still might"

        save(client, 1)  # somebody else's turn: the object is not lost to everybody because of one stopped process
        writer.send_signal(signal.SIGCONT)
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("go on\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "rejected 1\n"
        assert (seen(running, "arena", "limbo_bytes"), slot_of_the_writer(running)) == (0, [])
        assert load(client, 1) is None


def test_a_stopped_writer_that_is_killed_gives_its_slot_back(bench: Bench, client: CopyingClient, clock: Clock) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop, memory_bytes=1 * MIB)
    save(client, 2)
    with half_way(bench) as writer:
        writer.send_signal(signal.SIGSTOP)
        leases_expire(running, clock)
        eventually(lambda: seen(running, "arena", "limbo_bytes") == GRANULES_BYTES, "the put expired")
        writer.kill()
        eventually(lambda: seen(running, "arena", "limbo_bytes") == 0, "limbo was freed")
        use_every_byte(running, client, 100)


def test_a_reader_that_was_stopped_for_too_long_gets_a_miss_not_others_bytes(
    bench: Bench, client: CopyingClient, clock: Clock
) -> None:
    running = bench.start(loop_factory=asyncio.new_event_loop, memory_bytes=1 * MIB)
    save(client, 1)
    lease = client.hold(asked(1)).wait()
    assert not isinstance(lease, Miss)
    slots = client.slots(lease).wait()
    assert not isinstance(slots, Miss)
    leases_expire(running, clock)
    eventually(lambda: seen(running, "leases", "open") == 0, "the lease expired")
    use_every_byte(running, client, 100)
    target = bytearray(OBJECT_BYTES)
    expired = Miss(MissReason.LEASE_EXPIRED)
    assert client.read(slots[0], target) == expired
    # It was stopped within the copy, so that nothing but the outcome can tell.
    checksum = cpu.load_object(slots[0].pieces, target, None, slots[0].seed)
    assert checksum is not None
    assert bytes(target) != right_bytes(1)
    assert client.accept(slots[0], checksum) == expired
    assert client.confirm(lease).wait() == expired
    client.release([lease])
    assert seen(running, "quarantined", "count") == {}


def test_a_killed_client_loses_leases_and_puts_at_once(bench: Bench, client: CopyingClient) -> None:
    """At once, not when they expire: that would be in an hour."""
    limits = Limits(lease_ns=int(HOUR_S) * SECOND_NS, wait_ns=int(HOUR_S) * SECOND_NS)
    running = bench.start(StoreServer(bench.config(memory_bytes=1 * MIB), limits=limits))
    save(client, 2)
    with half_way(bench) as writer:
        assert (seen(running, "leases", "open"), len(slot_of_the_writer(running))) == (1, 1)
        waiting = client.lookup(asked(1, wait_ms=int(HOUR_S * 1e3)))
        writer.kill()
        found = waiting.wait()  # whoever waits for what it was writing learns of it, too
        assert isinstance(found, Found)
        assert (found.end_tokens, found.reason) == (0, MissReason.ABSENT)
        eventually(lambda: seen(running, "leases", "open") == 0, "the lease was dropped")
        eventually(lambda: seen(running, "arena", "limbo_bytes") == 0, "limbo was freed")
        assert seen(running, "arena", "used_bytes") == GRANULES_BYTES
        save(client, 1)


def test_of_two_that_save_the_same_one_writes_and_the_other_may_wait(bench: Bench, client: CopyingClient) -> None:
    """It is answered by the commit: its own deadline is an hour away."""
    running = bench.start(StoreServer(bench.config(), limits=Limits(wait_ns=int(HOUR_S) * SECOND_NS)))
    with client_of(bench.path) as second:
        mine = client.put_begin([item(1)]).wait()
        theirs = second.put_begin([item(1)]).wait()
        assert not isinstance(mine, Miss)
        assert not isinstance(theirs, Miss)
        assert (mine[0].status, theirs[0].status) == (PutStatus.WRITE, PutStatus.PENDING)
        waiting = second.hold(asked(1, wait_ms=int(HOUR_S * 1e3)))
        second.poll()
        eventually(lambda: seen(running, "lookups", "waiting") == 1, "the lookup waits")
        checksum = client.write(mine[0], right_bytes(1))
        assert not isinstance(checksum, Miss)
        assert not isinstance(client.put_end([(mine[0], checksum)]).wait(), Miss)
        lease = waiting.wait()
        assert not isinstance(lease, Miss)
        assert lease.end_tokens == 64
        second.release([lease]).wait()
        assert load(second, 1) is None


# ---- the disk under a running store


def on_disk(directory: Path, number: int) -> tuple[Piece, ...]:
    """Where the object lies in the data file."""
    form = read_format(directory)
    assert form is not None
    held = replay((directory / "journal").read_bytes(), form.id, 1 << 40).objects
    return pieces_of(held[compact_key(key(number))])


def overwrite(directory: Path, pieces: tuple[Piece, ...], change: Callable[[bytes], bytes]) -> None:
    with (directory / "data").open("r+b") as stream:
        for offset, length in pieces:
            stream.seek(offset)
            data = change(stream.read(length))
            stream.seek(offset)
            stream.write(data)


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x10]) + data[1:]


def written(running: Running) -> None:
    eventually(lambda: seen(running, "server", "unwritten_jobs") == 0, "everything was written")


def quarantined(running: Running) -> Any:
    return seen(running, "quarantined", "count")


def swap(directory: Path, first: int, second: int) -> None:
    places = on_disk(directory, first), on_disk(directory, second)
    data = (directory / "data").read_bytes()
    parts = [data[place[0].offset : place[0].offset + place[0].length] for place in places]
    overwrite(directory, places[0], lambda _: parts[1])
    overwrite(directory, places[1], lambda _: parts[0])


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "a flipped bit": (lambda directory: overwrite(directory, on_disk(directory, 3), flip), (3,)),
    "null bytes": (lambda directory: overwrite(directory, on_disk(directory, 3), lambda d: bytes(len(d))), (3,)),
    "two objects exchanged": (lambda directory: swap(directory, 2, 4), (2, 4)),
    "a data file cut short": (
        lambda directory: os.truncate(directory / "data", on_disk(directory, 5)[0].offset + 100),
        (5,),
    ),
}


@pytest.mark.parametrize("is_running", [False, True], ids=["while it is down", "while it runs"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_on_disk_is_a_counted_miss_and_never_served(
    bench: Bench, client: CopyingClient, tmp_path: Path, damage: str, is_running: bool
) -> None:
    do_damage, hurt = DAMAGES[damage]
    disk = tmp_path / "disk"
    settings: dict[str, object] = {"memory_bytes": 1 * MIB, "disk": str(disk), "disk_bytes": 16 * MIB}
    running = bench.start(**settings)  # type: ignore[arg-type]
    save(client, *range(1, 6))
    written(running)
    if is_running:
        use_every_byte(running, client, 100)  # so that these are on disk alone
        written(running)
        hurt = hurt if damage != "a data file cut short" else (5, *range(100, 120))
        do_damage(disk)
    else:
        running.stop()
        do_damage(disk)
        running = bench.start(**settings)  # type: ignore[arg-type]
        assert not isinstance(client.connect(), Miss)
    for number in hurt:
        assert load(client, number) == Miss(MissReason.CHECKSUM), damage
    assert quarantined(running) == {"disk": len(hurt)}
    for number in range(1, 6):
        if number in hurt:
            assert load(client, number) == Miss(MissReason.ABSENT), "what was quarantined is not looked at again"
            save(client, number)
        assert load(client, number) is None
    assert quarantined(running) == {"disk": len(hurt)}


def test_a_scribble_in_the_arena_is_found_and_the_disk_has_the_object_still(
    bench: Bench, client: CopyingClient, tmp_path: Path
) -> None:
    running = bench.start(memory_bytes=1 * MIB, disk=str(tmp_path / "disk"), disk_bytes=16 * MIB)
    save(client, 1)
    written(running)
    assert client.arena is not None
    view = client.arena.view(0, 1 * MIB)
    at = bytes(view).index(right_bytes(1)[:4096])
    view[at] ^= 1
    assert load(client, 1) is not None
    eventually(lambda: quarantined(running) == {"arena": 1}, "the copy in the arena was dropped")
    assert load(client, 1) is None


def test_a_working_set_larger_than_the_arena_is_served_from_disk(
    bench: Bench, client: CopyingClient, tmp_path: Path
) -> None:
    running = bench.start(memory_bytes=256 * 1024, disk=str(tmp_path / "disk"), disk_bytes=16 * MIB)
    for number in range(60):
        save(client, number)
        written(running)
    for _ in range(2):
        assert [load(client, number) for number in range(60)] == [None] * 60
    assert int(seen(running, "staged", "objects")) > 60


def test_a_removed_directory_degrades_the_tier_and_nothing_else(
    bench: Bench, client: CopyingClient, tmp_path: Path, clock: Clock
) -> None:
    disk = tmp_path / "disk"
    running = bench.start(memory_bytes=1 * MIB, disk=str(disk), disk_bytes=16 * MIB)
    save(client, 1)
    written(running)
    shutil.rmtree(disk)
    clock.stop()  # it is not tried again, however long this takes
    save(client, 2)
    eventually(lambda: seen(running, "tiers", "0", "state") == "not-writing", "the tier degraded")
    assert seen(running, "tiers", "0", "errors") == {"KV-602": 1}
    save(client, 3)
    assert [load(client, number) for number in (1, 2, 3)] == [None] * 3
    assert not disk.exists()


def test_a_device_that_takes_no_more_bytes_degrades_the_tier(daemon: StoreProcess) -> None:
    unlimited = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    with client_of(daemon.socket) as client:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (64 * 1024, unlimited[1]))
        try:
            save(client, *range(30, 50))
            eventually(lambda: daemon.stats("tiers", "0", "state") == "not-writing", "the tier degraded")
            assert "KV-602" in daemon.stats("tiers", "0", "errors")
            assert [load(client, number) for number in range(30, 50)] == [None] * 20
        finally:
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
        recovers(client, lambda: daemon.stats("tiers", "0"), count(10_000))


def recovers(client: CopyingClient, tier: Callable[[], Any], unsaved: Iterator[int]) -> None:
    """After a while the tier is tried again, and takes what is saved then."""
    before = tier()["writes"]

    def is_written() -> bool:
        save(client, next(unsaved))
        return bool(tier()["state"] == "ok" and tier()["writes"] > before)

    eventually(is_written, "the tier recovered")


@contextlib.contextmanager
def mounted(directory: Path, *options: str) -> Iterator[Path]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", *options, "none", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_volume_degrades_the_tier_until_there_is_room(
    bench: Bench, client: CopyingClient, tmp_path: Path
) -> None:
    with mounted(tmp_path / "volume", "-o", "size=4m") as volume:
        running = bench.start(memory_bytes=4 * MIB, disk=str(volume / "disk"), disk_bytes=3 * MIB)
        save(client, *range(10))
        written(running)
        with contextlib.suppress(OSError), (volume / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        save(client, *range(10, 30))
        eventually(lambda: seen(running, "tiers", "0", "state") == "not-writing", "the tier degraded")
        assert set(seen(running, "tiers", "0", "errors")) == {"KV-601"}
        assert [load(client, number) for number in range(30)] == [None] * 30
        (volume / "filler").unlink()
        recovers(client, lambda: seen(running, "tiers", "0"), count(30))
        running.stop()
