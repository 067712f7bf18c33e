"""What cannot work is refused by the real command: exit code 2, what is wrong and its remedy, and nothing touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtally.errors import CODES
from tests.chaos.processes import StoreProcess, environment
from tests.chaos.single import load, save
from tests.waiting import HANG_S

OTHER_FORMAT = b'{"kvtally_disk":99,"granule_bytes":4096,"id":5}'


class Start(NamedTuple):
    """An attempt to start a store. `{}` in options stands for a directory of the case's own, which `prepare` fills."""

    code: str
    options: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda directory: None


def _with(name: str, content: bytes) -> Callable[[Path], None]:
    def prepare(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return prepare


def _open_to_all(directory: Path) -> None:
    (directory / "shared").mkdir()
    (directory / "shared").chmod(0o777)


STARTS: dict[str, Start] = {
    "unknown key in the file": Start("KV-101", ("--config", "{}/c.yaml"), _with("c.yaml", b"store: {memroy: 1GiB}")),
    "more disk than the volume has": Start("KV-102", ("--disk", "{}/disk", "--disk-size", "1EiB")),
    "a disk that is a file": Start("KV-103", ("--disk", "{}/disk"), _with("disk", b"precious")),
    "a disk where nothing can be made": Start("KV-103", ("--disk", "{}/file/disk"), _with("file", b"precious")),
    "a disk of another format": Start("KV-203", ("--disk", "{}/disk"), _with("disk/format.json", OTHER_FORMAT)),
    "a socket in a directory for all": Start("KV-103", ("--socket", "{}/shared/s.sock"), _open_to_all),
}


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path with its mode, time and content."""
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted([directory, *directory.rglob("*")])
    }


def begin(directory: Path, options: list[str]) -> subprocess.Popen[str]:
    if "--socket" not in options:
        options = [*options, "--socket", str(directory.with_suffix(".run") / "s.sock")]
    return subprocess.Popen(
        [sys.executable, "-m", "kvtally", "store", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=directory.parent,
        text=True,
    )


def problem(child: subprocess.Popen[str], code: str) -> str:
    """What is wrong with how it ended; empty where it was refused as it should be."""
    try:
        output, errors = child.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "it did not end"
    said = [line for line in errors.splitlines() if line.startswith(("error: ", "remedy: "))]
    if (child.returncode, output, len(said), len(errors.splitlines())) != (2, "", 2, 2):
        return f"exit code {child.returncode}, said {output}{errors}"
    if not said[0].endswith(f"[{code}]") or code not in CODES or len(said[1]) < 20:
        return f"said {errors}, not {code}"
    return ""


def test_what_cannot_work_is_refused_in_words_and_nothing_is_touched(tmp_path: Path) -> None:
    directories = {name: tmp_path / f"case-{index}" for index, name in enumerate(STARTS)}
    for name, directory in directories.items():
        directory.mkdir()
        STARTS[name].prepare(directory)
    before = {name: snapshot(directory) for name, directory in directories.items()}
    children = {
        name: begin(directories[name], [o.format(directories[name]) for o in start.options])
        for name, start in STARTS.items()
    }
    problems = {name: problem(child, STARTS[name].code) for name, child in children.items()}
    assert [f"{name}: {what}" for name, what in problems.items() if what] == []
    touched = [name for name, directory in directories.items() if snapshot(directory) != before[name]]
    assert touched == []


def test_a_second_store_is_refused_and_the_first_does_not_notice(daemon: StoreProcess, tmp_path: Path) -> None:
    save(daemon.probe, 2001)
    session, name = daemon.probe.session, daemon.stats("store")
    inode = os.stat(daemon.socket).st_ino
    settings = ["--memory", "16MiB", "--disk-size", "16MiB"]
    children = {
        "socket": begin(tmp_path, [*settings, "--socket", str(daemon.socket), "--disk", str(tmp_path / "d")]),
        "disk": begin(tmp_path, [*settings, "--disk", str(daemon.disk)]),
    }
    assert {what: problem(child, "KV-104") for what, child in children.items()} == dict.fromkeys(children, "")
    assert not (tmp_path / "d").exists()
    assert (load(daemon.probe, 2001), daemon.stats("store"), os.stat(daemon.socket).st_ino) == (None, name, inode)
    assert daemon.probe.session is session
    save(daemon.probe, 2002)


def test_a_disk_on_a_read_only_volume_is_refused(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64m", "none", str(volume)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        child = begin(tmp_path, ["--memory", "16MiB", "--disk", str(volume / "disk"), "--disk-size", "16MiB"])
        assert problem(child, "KV-103") == ""
    finally:
        subprocess.run(["umount", str(volume)], check=True)
