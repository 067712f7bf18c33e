"""Supervising processes: real ones, small and quick, instead of stores and engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtally.errors import ConfigError, TransportError
from kvtally.up import guard, supervise
from kvtally.up.plan import Part, Process
from kvtally.up.supervise import Row, State, Supervisor, bound_log, tail
from tests.waiting import HANG_S, HOUR_S, comes_about, eventually

ROOT = Path(__file__).parents[2]

# A server that is healthy once the file GATE exists. It notes its own process id and those of two children: one in its
# process group, one that has left it, as daemons do. `stubborn` ignores SIGTERM, `orderly` takes a while to end well.
SERVER = """
import os, signal, socket, subprocess, sys, time
port, pids, gate, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def end_well(*_):
    time.sleep(0.3)
    print("ended well", flush=True)
    os._exit(0)
if mode == "orderly":
    signal.signal(signal.SIGTERM, end_well)
print("hello from", mode, flush=True)
if mode == "broken" or (mode == "once" and os.path.exists(pids)):
    print("boom \\x1b[31m it is broken", flush=True)
    sys.exit(3)
sleepers = [subprocess.Popen(["sleep", "3600"], start_new_session=apart) for apart in (False, True)]
with open(pids, "a") as file:
    file.write(" ".join(map(str, [os.getpid(), *(sleeper.pid for sleeper in sleepers)])) + "\\n")
while not os.path.exists(gate):
    time.sleep(0.01)
listener = socket.create_server(("127.0.0.1", port))
while True:
    with listener.accept()[0] as client:
        client.recv(1000)
        client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
"""


class Yard:
    """Where the test's processes leave their traces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        self.told: list[str] = []
        self.is_open = directory / "open"
        self.is_open.touch()

    def server(
        self,
        name: str,
        *,
        stage: int = 0,
        mode: str = "plain",
        part: Part = Part.PLAIN,
        gate: Path | None = None,
        start_timeout_s: float = HANG_S,
    ) -> Process:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        script = [sys.executable, "-S", "-c", SERVER]
        return Process(
            name=name,
            part=part,
            stage=stage,
            argv=[*script, str(port), str(self.directory / f"{name}.pids"), str(gate or self.is_open), mode],
            host="127.0.0.1",
            port=port,
            health=f"http://127.0.0.1:{port}/health",
            start_timeout_s=start_timeout_s,
        )

    def pids(self, name: str) -> list[list[int]]:
        """For each run of the process: its own id and its children's."""
        file = self.directory / f"{name}.pids"
        return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()] if file.exists() else []

    def everybody(self) -> list[int]:
        files = self.directory.glob("*.pids")
        return [pid for file in files for run in self.pids(file.stem) for pid in run]

    def supervisor(self, *processes: Process, grace_s: float = HANG_S, most: int = 100) -> Supervisor:
        return Supervisor(
            processes,
            self.logs,
            tell=self.told.append,
            grace_s=grace_s,
            pause=lambda lives: 0.0 if len(lives) <= most else None,
        )


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    monkeypatch.setattr(supervise, "GUARD_START_S", HANG_S)
    yard = Yard(tmp_path)
    yield yard
    left = [pid for pid in yard.everybody() if lives(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def lives(pid: int) -> bool:
    try:
        return status(pid)[0] != b"Z"
    except OSError:
        return False


def status(pid: int) -> list[bytes]:
    """State, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def ignores(pid: int, number: int) -> bool:
    mask = re.search(r"^SigIgn:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert mask is not None
    return bool(int(mask[1], 16) >> (number - 1) & 1)


def is_reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def play(supervisor: Supervisor, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a supervisor while the story happens, then stop it."""

    async def both() -> None:
        running = asyncio.create_task(supervisor.run())
        telling = asyncio.create_task(story())
        async with asyncio.timeout(2 * HANG_S):
            await asyncio.wait({running, telling}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                telling.cancel()
            else:
                telling.result()
            supervisor.stop()
            await running

    asyncio.run(both())


def row(supervisor: Supervisor, name: str) -> Row:
    return next(row for row in supervisor.rows() if row.name == name)


def test_each_stage_starts_when_the_one_before_is_ready(yard: Yard) -> None:
    supervisor = yard.supervisor(
        yard.server("store"), yard.server("a", stage=1), yard.server("b", stage=1), yard.server("router", stage=2)
    )

    async def story() -> None:
        assert [row.state for row in supervisor.rows()] == [State.WAITING] * 4
        await supervisor.ready.wait()
        assert [row.state for row in supervisor.rows()] == [State.READY] * 4
        assert [row.pid for row in supervisor.rows()] == [
            yard.pids(name)[0][0] for name in ("store", "a", "b", "router")
        ]

    play(supervisor, story)
    events = [" ".join(line.split()[:2]).rstrip(",") for line in yard.told]
    assert events[:2] == ["store: starting", "store: ready"]
    assert sorted(events[2:6]) == ["a: ready", "a: starting", "b: ready", "b: starting"]
    assert events[6:8] == ["router: starting", "router: ready"]
    assert events[8:10] == ["stopping, in", "router: stopped"]
    assert sorted(events[10:12]) == ["a: stopped", "b: stopped"]
    assert events[12:] == ["store: stopped"]


def test_a_process_is_ready_when_it_answers_and_not_before(yard: Yard) -> None:
    gate = yard.directory / "gate"
    supervisor = yard.supervisor(yard.server("slow", gate=gate), yard.server("next", stage=1))

    async def story() -> None:
        await comes_about(lambda: bool(yard.pids("slow")))
        assert [row.state for row in supervisor.rows()] == [State.STARTING, State.WAITING]
        assert yard.pids("next") == []
        gate.touch()
        await supervisor.ready.wait()

    play(supervisor, story)


def test_what_dies_is_started_again_and_leaves_no_orphans(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("engine"))

    async def story() -> None:
        await supervisor.ready.wait()
        first = row(supervisor, "engine")
        os.kill(first.pid, signal.SIGKILL)
        await comes_about(
            lambda: row(supervisor, "engine").restarts == 1 and row(supervisor, "engine").state is State.READY
        )
        assert row(supervisor, "engine").pid == yard.pids("engine")[1][0] != first.pid
        assert [lives(pid) for pid in yard.pids("engine")[0]] == [False] * 3  # its children too

    play(supervisor, story)
    assert any("was killed by SIGKILL; starts again" in line for line in yard.told)


def test_a_killed_guard_takes_its_process_along(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("engine"))

    async def story() -> None:
        await supervisor.ready.wait()
        process, sleeper, apart = yard.pids("engine")[0]
        os.kill(int(status(process)[1]), signal.SIGKILL)
        await comes_about(
            lambda: row(supervisor, "engine").restarts == 1 and row(supervisor, "engine").state is State.READY
        )
        assert not lives(process)
        assert not lives(sleeper)
        os.kill(apart, signal.SIGKILL)  # who left the group is nobody's, if the guard is killed

    play(supervisor, story)


def test_a_signal_to_all_leaves_the_process_its_time_to_end(yard: Yard) -> None:
    """systemd stops a service by signalling every process of it, guards included."""
    supervisor = yard.supervisor(yard.server("engine", mode="orderly"))

    async def story() -> None:
        await supervisor.ready.wait()
        process = yard.pids("engine")[0][0]
        for number in guard.IGNORED:
            os.kill(int(status(process)[1]), number)
        os.kill(process, signal.SIGTERM)

    play(supervisor, story)
    assert (yard.logs / "engine.log").read_text().splitlines() == ["hello from orderly", "ended well"]
    assert row(supervisor, "engine").restarts == 0


def test_what_a_guard_ignores_its_process_does_not(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("engine"))

    async def story() -> None:
        await supervisor.ready.wait()
        process = yard.pids("engine")[0][0]
        both = (int(status(process)[1]), process)
        assert [[ignores(pid, number) for number in guard.IGNORED] for pid in both] == [[True] * 3, [False] * 3]

    play(supervisor, story)


def test_who_ends_while_all_is_stopped_has_not_died(yard: Yard) -> None:
    """The process may have got the same signal, and end before we stop it."""
    supervisor = yard.supervisor(yard.server("engine"), most=0)  # a death would be an error

    async def story() -> None:
        await supervisor.ready.wait()
        process = yard.pids("engine")[0][0]
        its_guard = int(status(process)[1])
        os.kill(process, signal.SIGTERM)
        while not is_reaped(its_guard):  # noqa: ASYNC110 - then we are between its end and what is made of it
            await asyncio.sleep(0)
        supervisor.stop()

    play(supervisor, story)
    assert [line.split(",")[0] for line in yard.told[2:]] == ["stopping", "engine: stopped"]


def test_a_life_is_counted_from_when_it_was_ready(yard: Yard) -> None:
    seen: list[list[float]] = []

    def pause(lives_s: Sequence[float]) -> float | None:
        seen.append([*lives_s])
        return 0.0 if len(lives_s) < 2 else None

    process = yard.server("engine", mode="once")
    supervisor = Supervisor(
        [process, yard.server("other")], yard.logs, tell=yard.told.append, grace_s=HANG_S, pause=pause
    )

    async def story() -> None:
        await supervisor.ready.wait()
        await asyncio.sleep(0.2)
        os.kill(row(supervisor, "engine").pid, signal.SIGKILL)
        await comes_about(lambda: row(supervisor, "engine").state is State.FAILED)

    play(supervisor, story)
    assert len(seen) == 2
    assert seen[0][0] >= 0.2
    assert seen[1] == [seen[0][0], 0.0]  # the second time it was not ready at all


def test_a_process_that_dies_too_often_ends_it_all_with_its_log(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("engine", mode="once"), yard.server("other", part=Part.STORE), most=2)

    async def story() -> None:
        await supervisor.ready.wait()
        os.kill(row(supervisor, "engine").pid, signal.SIGKILL)
        await asyncio.sleep(HANG_S)

    with pytest.raises(TransportError, match="engine died 3 times") as raised:
        play(supervisor, story)
    assert raised.value.code == "KV-504"
    assert "boom" in raised.value.message
    assert row(supervisor, "engine").state is State.FAILED
    assert row(supervisor, "other").state is State.STOPPED


def test_one_of_two_engines_may_be_given_up(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("bad", mode="once"), yard.server("good"), most=1)

    async def story() -> None:
        await supervisor.ready.wait()
        os.kill(row(supervisor, "bad").pid, signal.SIGKILL)
        await comes_about(lambda: row(supervisor, "bad").state is State.FAILED)
        assert row(supervisor, "good").state is State.READY

    play(supervisor, story)
    assert any("bad died 2 times and is given up" in line for line in yard.told)


def test_a_failed_start_shows_the_log_and_stops_the_rest(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("store"), yard.server("engine", stage=1, mode="broken"))
    with pytest.raises(TransportError) as raised:
        play(supervisor, lambda: asyncio.sleep(HANG_S))
    assert "engine did not start: it ended with exit code 3" in raised.value.message
    assert "hello from broken\nboom  [31m it is broken" in raised.value.message  # and no escape sequence
    assert row(supervisor, "store").state is State.STOPPED


def test_a_command_that_does_not_exist_is_a_failed_start(yard: Yard) -> None:
    process = msgspec.structs.replace(yard.server("engine"), argv=["/no/such/program"])
    with pytest.raises(TransportError, match="/no/such/program cannot be started: No such file"):
        play(yard.supervisor(process), lambda: asyncio.sleep(HANG_S))


def test_a_start_that_takes_too_long_is_ended(yard: Yard) -> None:
    never = yard.server("slow", gate=yard.directory / "never", start_timeout_s=0.5)
    with pytest.raises(TransportError, match=r"slow did not start: it was not ready within 0\.5 s"):
        play(yard.supervisor(never), lambda: asyncio.sleep(HANG_S))


@pytest.mark.parametrize("stops", [1, 2], ids=["after its time of grace", "at once when asked twice"])
def test_who_does_not_listen_is_killed(yard: Yard, stops: int) -> None:
    supervisor = yard.supervisor(yard.server("deaf", mode="stubborn"), grace_s=0.3 if stops == 1 else HOUR_S)

    async def story() -> None:
        await supervisor.ready.wait()
        for _ in range(stops - 1):
            asyncio.get_running_loop().call_later(0.1, supervisor.stop)

    play(supervisor, story)
    assert [row.state for row in supervisor.rows()] == [State.STOPPED]


def test_logs_of_the_last_run_are_kept_apart(yard: Yard) -> None:
    for _ in range(2):
        supervisor = yard.supervisor(yard.server("engine"))
        play(supervisor, lambda waiting=supervisor.ready: waiting.wait())  # type: ignore[misc]
    assert [(yard.logs / name).read_text() for name in ("engine.log", "engine.log.1")] == ["hello from plain\n"] * 2
    assert (yard.logs.stat().st_mode & 0o777, (yard.logs / "engine.log").stat().st_mode & 0o777) == (0o700, 0o600)


def test_logs_that_cannot_be_written_are_an_error(yard: Yard) -> None:
    yard.logs.touch()
    with pytest.raises(ConfigError, match="logs cannot be written"):
        play(yard.supervisor(yard.server("engine")), lambda: asyncio.sleep(HANG_S))


def test_removed_logs_stop_nothing_until_one_is_needed(yard: Yard) -> None:
    supervisor = yard.supervisor(yard.server("engine"))

    async def story() -> None:
        await supervisor.ready.wait()
        shutil.rmtree(yard.logs)
        os.kill(row(supervisor, "engine").pid, signal.SIGKILL)
        await asyncio.sleep(HANG_S)

    with pytest.raises(TransportError, match=r"engine could not be started: .*No such file") as raised:
        play(supervisor, story)
    assert raised.value.code == "KV-504"


def test_a_large_log_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    bound_log(log, largest_bytes=1)  # nobody has written it yet
    log.write_text("x" * 100)
    bound_log(log, largest_bytes=100)
    assert log.stat().st_size == 100
    with log.open("ab") as writer:
        bound_log(log, largest_bytes=99)
        writer.write(b"more")
    assert (log.read_text(), len((tmp_path / "a.log.1").read_text())) == ("more", 100)


def test_the_tail_is_the_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"line\n" * 100_000 + b"tab\there \xff\x1b[2J\n")
    lines = tail(log).splitlines()
    assert len(lines) == 20
    assert lines[-1] == "tab     here � [2J"


# ---- the command, as a process of its own


COMMAND = """
import asyncio, pathlib, sys
import msgspec
from kvtally.up.live import keep
from kvtally.up.plan import Process
asyncio.run(keep(msgspec.json.decode(sys.argv[1], type=list[Process]), pathlib.Path(sys.argv[2])))
"""


def start_command(yard: Yard, output: int, *under: str) -> subprocess.Popen[str]:
    processes = [yard.server("store"), yard.server("engine", stage=1)]
    return subprocess.Popen(
        [*under, sys.executable, "-c", COMMAND, msgspec.json.encode(processes).decode(), str(yard.logs)],
        stdout=output,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )


@pytest.fixture
def command(yard: Yard) -> Iterator[subprocess.Popen[str]]:
    with start_command(yard, subprocess.PIPE) as command:
        yield command
        command.kill()


def lines_until_ready(command: subprocess.Popen[str]) -> list[str]:
    assert command.stdout is not None
    lines = []
    for line in command.stdout:  # ends when the process does
        lines.append(line.strip())
        if line.startswith("ready:"):
            return lines
    raise AssertionError("\n".join(lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(yard: Yard, command: subprocess.Popen[str], number: signal.Signals) -> None:
    lines = lines_until_ready(command)
    assert "kvtally verify http://127.0.0.1:" in lines[-1]
    assert [lives(pid) for pid in yard.everybody()] == [True] * 6
    command.send_signal(number)
    out, _ = command.communicate(timeout=HANG_S)
    assert command.returncode == 0
    assert out.splitlines()[1:] == ["engine: stopped", "store: stopped"]
    assert [lives(pid) for pid in yard.everybody()] == [False] * 6


def test_a_terminal_that_closes_stops_nothing_under_nohup(yard: Yard) -> None:
    with start_command(yard, subprocess.PIPE, "nohup") as command:
        try:
            lines_until_ready(command)
            command.send_signal(signal.SIGHUP)
            os.kill(yard.pids("engine")[0][0], signal.SIGKILL)
            eventually(lambda: len(yard.pids("engine")) == 2, "the restart")
            command.terminate()
            out, _ = command.communicate(timeout=HANG_S)
        finally:
            command.kill()
    assert command.returncode == 0
    assert out.splitlines()[-2:] == ["engine: stopped", "store: stopped"]


def test_nothing_outlives_a_killed_command(yard: Yard, command: subprocess.Popen[str]) -> None:
    lines_until_ready(command)
    command.kill()
    command.wait(HANG_S)
    eventually(lambda: not any(lives(pid) for pid in yard.everybody()), "the end of all")


def test_nobody_has_to_listen(yard: Yard, command: subprocess.Popen[str]) -> None:
    """`kvtally up | head`: output that cannot be written neither stops the processes nor keeps them alive."""
    lines_until_ready(command)
    assert command.stdout is not None
    command.stdout.close()
    os.kill(yard.pids("engine")[0][0], signal.SIGKILL)
    eventually(lambda: len(yard.pids("engine")) == 2, "the restart")
    command.terminate()
    assert command.wait(HANG_S) == 0


def test_a_terminal_gets_a_table(yard: Yard) -> None:
    ours, theirs = os.openpty()
    with start_command(yard, theirs) as command:
        os.close(theirs)
        shown = b""
        while b"stop: Ctrl-C" not in shown or not re.search(rb"engine +\S*ready\S* +\d+ +\d:\d\d:\d\d +\d+ +0", shown):
            shown += os.read(ours, 1 << 16)  # fails when the process ends
        command.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal's other side is closed
            while part := os.read(ours, 1 << 16):
                shown += part
        assert command.wait(HANG_S) == 0
    os.close(ours)
    assert b"process" in shown
    assert b"restarts" in shown
    assert b"store: stopped" in shown
