"""`kvtally demo-store` from outside: it proves what it says, fails when it does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import pytest

from kvtally.cli import demo as servers
from kvtally.cli import demo_store as demo
from kvtally.errors import TransportError
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one: sockets are kept beneath it, and a socket's path must not be long."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """The demo with its temporary directory in ours; a kvtally.yaml in the current one must not disturb it."""
    (directory / "here").mkdir()
    (directory / "here" / "kvtally.yaml").write_text("store: {memory: nonsense}\n")
    (directory / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "kvtally", "demo-store", *arguments],
        cwd=directory / "here",
        env={**os.environ, "TMPDIR": str(directory / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests may run in the background of a shell, which has its children ignore this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes(directory: Path) -> list[str]:
    """Command lines of living processes that mention the directory. A zombie has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue  # it ended while we looked
        if str(directory) in command:
            found.append(command.replace("\0", " "))
    return found


def test_every_step_is_proved_and_nothing_is_left_behind(directory: Path) -> None:
    with start(directory, "--json") as running:
        out, err = running.communicate(timeout=HANG_S)
    assert running.returncode == 0, err
    told = json.loads(out)
    assert told["proved"]
    assert [step["proved"] for step in told["steps"]] == [True] * 10
    assert [step["output_equal"] for step in told["steps"]].count(False) == 1  # the control
    assert {step["reason"] for step in told["steps"]} >= {"absent", "checksum", "store_unreachable"}
    assert list((directory / "tmp").iterdir()) == []
    assert processes(directory) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_outlives_it(directory: Path, number: signal.Signals, code: int) -> None:
    with start(directory) as running:
        eventually(lambda: len(processes(directory)) == 3, "the store and both engines ran")
        running.send_signal(number)
        running.communicate(timeout=HANG_S)
    assert running.returncode == code
    eventually(lambda: not processes(directory), "all of them ended")
    if number != signal.SIGKILL:
        assert list((directory / "tmp").iterdir()) == []


@pytest.fixture
def handlers() -> Iterator[None]:
    """`main` takes over signals, as a command may."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("arguments", [["--json"], []])
@pytest.mark.usefixtures("handlers")
def test_a_step_that_proves_nothing_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    good = demo.Row(
        step="a", reused_tokens=1, computed_tokens=1, source="disk", output_equal=True, reason="", proved=True
    )
    bad = demo.Row(step="b", reused_tokens=1, computed_tokens=1, source="disk", output_equal=False, reason="checksum")
    monkeypatch.setattr(demo, "play", lambda stage: iter([good, bad]))
    assert demo.main(arguments) == 1
    out = capsys.readouterr().out
    assert ('"proved": false' in out) if arguments else ("1 of 2 steps did not prove" in out)
    monkeypatch.setattr(demo, "play", lambda stage: iter([good]))
    assert demo.main(arguments) == 0
    monkeypatch.setattr(demo, "play", lambda stage: iter([]))
    assert demo.main(arguments) == 1


def test_the_control_has_teeth() -> None:
    """An output that is right where it should be wrong, or wrong where it should be right, proves nothing."""
    row = demo.Row(step="", reused_tokens=0, computed_tokens=0, source="", output_equal=True, reason="")
    assert demo._judge(row, True, "").proved
    assert not demo._judge(row, False, "").proved
    assert not demo._judge(row, True, "", output_equal=False).proved


def test_a_narrow_terminal_gets_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = demo.Row(
        step="A is killed",
        reused_tokens=1_536,
        computed_tokens=300,
        source="memory, disk",
        output_equal=True,
        reason="",
        proves="nothing is lost",
        proved=True,
    )
    for columns in (20, 40, 79, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        demo.Report().add(row)
        told = " ".join(capsys.readouterr().out.split())
        for words in ("A is killed", "1,536", "300", "memory,", "disk", "equal", "nothing is lost"):
            assert words in told


@pytest.mark.usefixtures("handlers")
def test_the_logs_of_real_servers_that_failed_are_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: name)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    row = servers.Row(
        step="a",
        verdict="missing",
        reused_tokens=0,
        computed_tokens=9,
        source="none",
        answer_equal=True,
        seconds=1.0,
        proves="b",
        proved=False,
    )

    def show(place: Path, console: object, nodes: int) -> list[servers.Row]:
        (place / "logs").mkdir()
        (place / "up.log").write_text("decode-0 died")
        (place / "logs" / "decode-0.log").write_text("out of memory")
        if not faults:
            return [row]
        raise faults.pop()

    monkeypatch.setattr(servers, "_show", show)
    told, faults = "", [TransportError("kvtally up ended", remedy="There."), IncompleteRead(b""), OSError(104, "reset")]
    while faults:
        with pytest.raises(TransportError, match=r"kvtally up ended|IncompleteRead|reset") as failed:
            servers.main([])
        told += failed.value.remedy
    assert servers.main([]) == 1
    told += "".join(capsys.readouterr().out.split())
    kept = sorted(directory.iterdir())
    assert [sorted(path.name for path in place.iterdir()) for place in kept] == [["decode-0.log", "up.log"]] * 4
    assert [place.name for place in kept if place.name not in told] == []
