"""Processes that a command starts: they answer, fail and end as promised, whatever happens to their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtally.errors import ConfigError, TransportError
from kvtally.processes import Child, Worker, own_environment, workplace
from tests.waiting import HANG_S

# A worker with a process of its own. It answers numbers by their double.
WORKER = """
import subprocess, sys, time
import msgspec
from kvtally.errors import TransportError
from kvtally.processes import serve

below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

def handle(line):
    asked = msgspec.json.decode(line)
    if asked == "who":
        return below.pid
    if asked == "fail":
        raise TransportError("it failed", remedy="Ask for something else.")
    if asked == "hang":
        time.sleep(1000)
    print("noise on stdout")
    return 2 * asked

serve(handle)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "doubling.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "doubling"


@contextmanager
def end_of(pid: int) -> Iterator[int]:
    """A descriptor that becomes readable when the process has ended."""
    end = os.pidfd_open(pid)
    try:
        yield end
    finally:
        os.close(end)


def has_ended(end: int) -> bool:
    return bool(select.select([end], [], [], HANG_S)[0])


def test_a_worker_answers_in_turn_whatever_its_libraries_print(module: str, tmp_path: Path) -> None:
    with Worker(module, log=tmp_path / "log") as worker:
        assert [worker.ask(number, int, HANG_S) for number in (1, 2)] == [2, 4]
        worker.send(5)
        worker.send(6)
        assert [worker.receive(int, HANG_S) for _ in range(2)] == [10, 12]
        assert worker.cpu_s >= 0
        assert worker.memory_bytes() > worker.memory_bytes("RssAnon") > 0


def test_an_error_is_an_answer_and_the_worker_goes_on(module: str, tmp_path: Path) -> None:
    with Worker(module, log=tmp_path / "log") as worker:
        with pytest.raises(TransportError, match="it failed") as failed:
            worker.ask("fail", int, HANG_S)
        assert failed.value.remedy == "Ask for something else."
        assert worker.ask(1, int, HANG_S) == 2


def test_a_worker_that_dies_or_is_late_is_an_error_with_the_end_of_its_log(module: str, tmp_path: Path) -> None:
    with Worker(module, log=tmp_path / "log", name="the worker") as worker:
        assert worker.ask(1, int, HANG_S) == 2
        with pytest.raises(TransportError, match=r"the worker did not answer within 0.05 s:\nnoise"):
            worker.ask("hang", int, 0.05)
        worker.kill()
    with (
        Worker(module, log=tmp_path / "log", name="the worker") as worker,
        pytest.raises(TransportError, match=r"(?s)the worker ended.*TypeError"),
    ):
        worker.ask({}, int, HANG_S)


def test_what_a_worker_has_started_ends_with_it(module: str, tmp_path: Path) -> None:
    with Worker(module, log=tmp_path / "log") as worker:
        below = worker.ask("who", int, HANG_S)
        assert os.getpgid(below) == worker.pid != os.getpgid(0)  # so Ctrl-C is the parent's to handle
        with end_of(below) as end:
            worker.close()
            assert has_ended(end)
    worker.kill()  # once more does nothing


PARENT = """
import sys, time
from pathlib import Path
from kvtally import processes
if sys.argv[1] == "worker":
    process = processes.Worker("doubling", log=Path(sys.argv[2]))
    below = process.ask("who", int, 120)
else:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    process = processes.Child(command, Path(sys.argv[2]), name="a child")
    below = process.pid
print(process.pid, below, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["worker", "child"])
def test_no_process_outlives_a_parent_that_was_killed(kind: str, module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, kind, str(tmp_path / "log")]
    with subprocess.Popen(command, env=own_environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, below = map(int, parent.stdout.readline().split())
        with end_of(pid) as end:
            parent.kill()
            assert has_ended(end)
        if below != pid:  # what a worker has started is not told of its death, so it is ours to end
            os.kill(below, signal.SIGKILL)


def test_an_interpreter_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/nonexistent/python cannot be run"):
        Worker("kvtally.bench.engine", log=tmp_path / "log", python="/nonexistent/python")


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
)


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Child([sys.executable, "-c", STUBBORN], log, name="a child", grace_s=0.05) as child:
        child.wait_for(lambda: "up" in log.read_text(), "it did not start", HANG_S)
        assert not child.has_ended()
    assert child.has_ended()


def test_a_wait_ends_with_the_child_or_the_deadline(tmp_path: Path) -> None:
    short = Child([sys.executable, "-c", "print('no room')"], tmp_path / "log", name="the store")
    with short, pytest.raises(TransportError, match="the store ended:\nno room"):
        short.wait_for(lambda: False, "it did not start", HANG_S)
    stubborn = Child([sys.executable, "-c", STUBBORN], tmp_path / "other", name="the store", grace_s=0.0)
    with stubborn, pytest.raises(TransportError, match="it did not start"):
        stubborn.wait_for(lambda: False, "it did not start", 0.01)


def test_sockets_find_room_where_the_temporary_path_is_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/" + "x" * 80)
        with workplace() as directory:
            assert directory.parent == Path("/tmp")
    short = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", short)
    with workplace("here-") as directory:
        assert directory.parent == Path(short)
        assert directory.name.startswith("here-")
    os.rmdir(short)  # it is empty again


def test_a_workplace_is_gone_after_a_signal() -> None:
    seen: list[Path] = []

    def work() -> None:
        with workplace() as directory:
            seen.append(directory)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        work()
    assert left.value.code == 128 + signal.SIGTERM
    assert not seen[0].exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
