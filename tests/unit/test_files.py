"""The disk tier's directory: what is refused and left as it was, and what real files and a real kernel do to it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtally
from kvtally.bench.daemon import drop_pages
from kvtally.core.space import GRANULE_BYTES
from kvtally.errors import ConfigError, IncompatibleError, IntegrityError, KVTallyError
from kvtally.store.tiers.disk import READ_STEP_BYTES
from kvtally.store.tiers.files import CLOSED, FileDevice, open_disk
from kvtally.store.tiers.journal import Dropped
from tests.unit.disk_kit import CAPACITY_BYTES, code_of, get, numbers, put, snapshot, verifies
from tests.waiting import eventually

# ---------------------------------------------------------------- how it is read


@pytest.mark.parametrize("length", [100, 4096, 3 * 4096, 3 * 4096 + 123, READ_STEP_BYTES + 4096])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("cached", [0, 1, 9], ids=["cold", "partly cached", "cached"])
def test_bytes_are_the_same_whichever_way_they_are_read(tmp_path: Path, length: int, shift: int, cached: int) -> None:
    content = os.urandom(length)
    device = FileDevice(tmp_path, CAPACITY_BYTES)
    device.pwritev([memoryview(content)], 2 * 4096)
    drop_pages(tmp_path)
    with (tmp_path / "data").open("rb") as file:
        os.pread(file.fileno(), cached * 4096, 2 * 4096)
    target = memoryview(bytearray(length + shift))[shift:]
    assert device.preadv([target], 2 * 4096) == length
    assert bytes(target) == content
    assert device.preadv([target], 2 * 4096 + 5) == length - 5  # the file ends there
    assert device.preadv([target], 1 << 30) == 0
    first, second = memoryview(bytearray(length // 2)), memoryview(bytearray(length - length // 2))
    assert device.preadv([first, second], 2 * 4096) == length
    assert bytes(first) + bytes(second) == content
    device.close()


def test_what_is_not_cached_is_read_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FileDevice(tmp_path, CAPACITY_BYTES)
    if device._direct_fd == CLOSED:
        pytest.skip("this file system has no direct reads")
    length = 8192 + 100
    device.pwritev([memoryview(os.urandom(length))], 0)

    def is_dropped() -> bool:
        drop_pages(tmp_path)  # a file system may hold pages for a moment after they are written
        return not device._is_cached(0, length)

    eventually(is_dropped)
    read: list[tuple[bool, int]] = []
    preadv = os.preadv

    def spy(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        count = preadv(fd, views, offset, flags)
        if not flags:
            read.append((fd == device._direct_fd, count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    assert device.preadv([memoryview(bytearray(length))], 0) == length
    assert read == [(True, length)]
    device.close()


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    tier.check()
    assert verifies(tier, put(tier, 3))
    tier.close()


# ---------------------------------------------------------------- what is refused, and left as it was


def test_a_second_store_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    record = put(tier, 1)
    before = snapshot(tmp_path)
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-104"
    assert snapshot(tmp_path) == before
    put(tier, 2)
    assert verifies(tier, record)
    tier.close()
    again = open_disk(tmp_path, CAPACITY_BYTES)
    assert numbers(again) == [1, 2]
    again.close()


@pytest.mark.parametrize(
    ("name", "content", "kind", "code"),
    [
        ("thesis.tex", b"years of work", ConfigError, "KV-103"),
        ("data", b"not ours", ConfigError, "KV-103"),
        ("format.json", b"", ConfigError, "KV-103"),
        ("format.json", b"{}", ConfigError, "KV-103"),
        ("format.json", b"\xff\x00 not json", ConfigError, "KV-103"),
        ("format.json", b'{"kvtally_disk":1,"granule_bytes":4096,"id":-5}', ConfigError, "KV-103"),
        ("format.json", b'{"kvtally_disk":2,"granule_bytes":4096,"id":5}', IncompatibleError, "KV-203"),
        ("format.json", b'{"kvtally_disk":99,"something":"else"}', IncompatibleError, "KV-203"),
        ("format.json", b'{"kvtally_disk":1,"granule_bytes":8192,"id":5}', IncompatibleError, "KV-203"),
    ],
)
def test_a_directory_that_is_not_ours(
    tmp_path: Path, name: str, content: bytes, kind: type[KVTallyError], code: str
) -> None:
    (tmp_path / name).write_bytes(content)
    before = snapshot(tmp_path)
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), kind) == code
    assert snapshot(tmp_path) == before


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert code_of(lambda: open_disk(tmp_path / "file", CAPACITY_BYTES), ConfigError) == "KV-103"
    assert code_of(lambda: open_disk(tmp_path / "file" / "below", CAPACITY_BYTES), ConfigError) == "KV-103"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-103"
        assert code_of(lambda: open_disk(tmp_path / "below", CAPACITY_BYTES), ConfigError) == "KV-103"
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("capacity_bytes", [-1, 0, GRANULE_BYTES - 1, 1 << 62])
def test_an_impossible_capacity(tmp_path: Path, capacity_bytes: int) -> None:
    assert code_of(lambda: open_disk(tmp_path / "new", capacity_bytes), ConfigError) == "KV-102"
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    open_disk(tmp_path / "a" / "b", CAPACITY_BYTES).close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "a" / "b").iterdir()}
    assert modes.keys() == {"format.json", "lock", "data", "journal"}
    assert modes["data"] == modes["journal"] == 0


def test_a_directory_left_while_it_was_set_up_or_a_new_volume(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"")
    (tmp_path / "format.json.new").write_bytes(b"half of")
    (tmp_path / "lost+found").mkdir()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    put(tier, 1)
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "format.json", "journal", "lock", "lost+found"]


def test_a_new_format_is_on_the_device_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed and not synced, a power loss left an empty format.json, and the store refused to start."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(fd: int) -> None:
        calls.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
        fsync(fd)

    def watched_rename(path: Path, target: Path) -> Path:
        calls.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    open_disk(tmp_path / "disk", CAPACITY_BYTES).close()
    assert calls == ["sync format.json.new", "rename format.json.new to format.json", "sync disk"]


@pytest.mark.parametrize("content", [b"", bytes(57)], ids=["empty", "zeros"])
def test_a_format_that_a_power_loss_left_blank(tmp_path: Path, content: bytes) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    for number in range(20):
        put(tier, number)
    tier.close()
    (tmp_path / "format.json").write_bytes(content)
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert (numbers(tier), tier.counters.used_bytes) == ([], 0)
    record = put(tier, 30)
    tier.close()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert numbers(tier) == [30]
    assert verifies(tier, record)
    tier.close()


def test_a_blank_format_among_the_files_of_others(tmp_path: Path) -> None:
    for name in ("format.json", "lock", "thesis.tex"):
        (tmp_path / name).write_bytes(b"")
    before = snapshot(tmp_path)
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-103"
    assert snapshot(tmp_path) == before


def test_a_journal_that_cannot_be_read_at_start(tmp_path: Path) -> None:
    open_disk(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "journal").unlink()
    (tmp_path / "journal").mkdir()
    assert code_of(lambda: open_disk(tmp_path, CAPACITY_BYTES), ConfigError) == "KV-103"
    (tmp_path / "journal").rmdir()
    open_disk(tmp_path, CAPACITY_BYTES).close()  # the refusal left no lock behind


# ---------------------------------------------------------------- crashes


def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from kvtally.store.tiers.files import open_disk
from tests.unit.disk_kit import put
tier = open_disk(Path({str(tmp_path)!r}), 1 << 30)
for number in range(1_000_000):
    record = put(tier, number)
    if number % 5 == 4:
        tier.remove([record.key])
    print(number, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvtally.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        last = 0
        for line in child.stdout:
            last = int(line)
            if last >= 400:
                child.send_signal(signal.SIGKILL)
                break
        last = max([last, *map(int, child.stdout.read().split())])  # what it reported until the signal came
    tier = open_disk(tmp_path, 1 << 30)
    tier.check()
    recovered = list(tier.recover())
    found = {int.from_bytes(record.chain, "big") for record in recovered}
    reported = {number for number in range(last + 1) if number % 5 != 4}
    assert found >= reported
    assert found <= reported | {last + 1}  # written, but killed before it could say so
    assert all(verifies(tier, record) for record in recovered)
    tier.close()


def test_a_copy_taken_between_any_two_calls_is_a_store(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "live", CAPACITY_BYTES)
    expected: list[int] = []
    for number in range(12):
        record = put(tier, number)
        expected.append(number)
        if number % 3 == 2:
            tier.remove([record.key])
            expected.pop()
        copy = tmp_path / f"copy {number}"
        shutil.copytree(tmp_path / "live", copy)
        restarted = open_disk(copy, CAPACITY_BYTES)
        assert [int.from_bytes(record.chain, "big") for record in restarted.recover()] == expected
        assert all(verifies(restarted, record) for record in restarted.recover())
        restarted.close()
    tier.close()


# ---------------------------------------------------------------- files that fail, shrink or vanish


def test_a_missing_data_file_is_a_shorter_one(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    record = put(tier, 1)
    tier.close()
    (tmp_path / "data").unlink()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert code_of(lambda: get(tier, record), IntegrityError) == "KV-402"
    tier.close()


def test_a_lowered_capacity_drops_what_lies_beyond(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 8 * GRANULE_BYTES)
    records = [put(tier, number, bytes([number]) * 2 * GRANULE_BYTES) for number in range(4)]
    tier.close()
    tier = open_disk(tmp_path, 5 * GRANULE_BYTES)
    tier.check()
    assert list(tier.recover()) == records[:2]
    assert tier.counters.dropped_at_recovery == {Dropped.MISPLACED: 2}
    assert (tmp_path / "data").stat().st_size <= 5 * GRANULE_BYTES
    tier.close()
    tier = open_disk(tmp_path, 8 * GRANULE_BYTES)
    assert (list(tier.recover()), tier.counters.dropped_at_recovery) == (records[:2], {})
    tier.close()


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Makes the kernel take a write to a real file in part, up to this size, and then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_append_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    kept = put(tier, 0)
    for _ in range(100):
        record = put(tier, 1, b"the journal grows, the data do not")
    with file_size_limit(tier.counters.journal_bytes + 100):
        assert code_of(lambda: put(tier, 2, b"never")) == "KV-602"
    assert (tmp_path / "journal").stat().st_size == tier.counters.journal_bytes + 100
    tier.remove([record.key])  # its record is shorter than what the failed one left behind
    assert (tmp_path / "journal").stat().st_size == tier.counters.journal_bytes
    tier.check()
    tier.close()
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    assert list(tier.recover()) == [kept]
    assert tier.counters.dropped_at_recovery == {}
    tier.close()


def test_a_compaction_that_the_kernel_cuts_short(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, CAPACITY_BYTES)
    records = [put(tier, number, bytes([number])) for number in range(30)]
    before = tier.counters
    with file_size_limit(1000):
        tier._compact()
    assert not (tmp_path / "journal.new").exists()
    assert tier.counters == before
    assert list(tier.recover()) == tier.find([record.key for record in records]) == records
    tier.close()


def test_a_vanished_directory(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk", CAPACITY_BYTES)
    record = put(tier, 1)
    shutil.rmtree(tmp_path / "disk")
    assert code_of(lambda: put(tier, 2)) == "KV-602"
    assert code_of(lambda: tier.remove([record.key])) == "KV-602"
    assert verifies(tier, record)
    tier.check()
    successor = open_disk(tmp_path / "disk", CAPACITY_BYTES)
    third = put(successor, 3)
    before = snapshot(tmp_path)
    assert code_of(lambda: put(tier, 4)) == "KV-602"
    tier._compact()  # not even then does it write into its successor's files
    assert snapshot(tmp_path) == before
    tier.close()
    assert verifies(successor, third)
    successor.close()
