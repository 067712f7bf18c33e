"""The processes of a measurement, from outside: stores and workers, started, asked, and ended whatever happens.

Owns their lives and the pipes to workers. Does not know what is measured (`bench.store`) nor how (`bench.worker`).
Every wait has a deadline. Threading: none, and nothing forks with state: each process is started anew.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvtally.bench.tasks import StoreState, Task
from kvtally.bench.worker import Answer
from kvtally.client import Miss, StoreClient
from kvtally.errors import TransportError
from kvtally.machine import ending_with_us, own_environment

START_S = 60.0
TASK_S = 300.0  # the longest task fills an index with a million objects
STOP_S = 10.0
LOG_LINES = 2  # of a store that gave up: what was wrong, and its remedy


class Daemon:
    """A store in a process of its own, ready when this returns. Its log goes to a file beside its socket."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        memory_bytes: int,
        disk: Path | None = None,
        disk_read_bytes_s: int | None = None,
        logs: Path | None = None,
    ) -> None:
        self.socket = str(directory / f"{name}.sock")
        self._log = (logs or directory) / f"{name}.log"
        command = ["store", "--socket", self.socket, "--memory", str(memory_bytes)]
        if disk is not None:
            command += ["--disk", str(disk), "--disk-size", str(2 * memory_bytes)]
        if disk_read_bytes_s is not None:
            command += ["--disk-read-limit", str(disk_read_bytes_s)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ending_with_us([sys.executable, "-m", "kvtally", *command]),
                cwd=directory,
                env=own_environment(),
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is ours to handle
            )
        self._client = StoreClient(self.socket, name="bench")
        with ExitStack() as stack:
            stack.callback(_end, self._process)
            stack.callback(self._client.close)
            self._await_ready()
            self._stack = stack.pop_all()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def state(self) -> StoreState:
        stats = self._client.stats().wait()
        if isinstance(stats, Miss):
            raise _broken(f"a store does not answer: {stats.reason}", self._log.read_text(errors="replace"))
        return msgspec.convert(stats.stats, StoreState)

    def wait_populated(self) -> None:
        """Wait until the arena is pre-faulted."""
        deadline = time.monotonic() + START_S
        while (state := self.state).server.populated_bytes < state.arena.capacity_bytes:
            if time.monotonic() >= deadline:
                raise _broken(f"an arena was not pre-faulted within {START_S:g} s", "")
            time.sleep(0.02)

    @property
    def anonymous_bytes(self) -> int:
        """Resident memory beyond the arena (which is shared memory) and the program's own files."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    @property
    def cpu_s(self) -> float:
        """Processor time that the store has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: see proc(5)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(STOP_S)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while isinstance(self._client.connect(timeout_s=0.2), Miss):
            if self._process.poll() is not None or time.monotonic() >= deadline:
                raise _broken("a store did not start", self._log.read_text(errors="replace"))


class Worker:
    """A measuring process. One task at a time: `send`, then `receive`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtally.bench.worker"],
            env=own_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C is ours to handle; it ends when its stdin does
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stdin.close()  # it ends by itself, unless it hangs
        _end(self._process, ask=False)
        self._stdout.close()

    def ask(self, task: Task) -> list[float]:
        self.send(task)
        return self.receive()

    def send(self, task: Task) -> None:
        try:
            self._stdin.write(msgspec.json.encode(task) + b"\n")
        except BrokenPipeError as error:
            raise _broken("a worker ended", "") from error

    def receive(self) -> list[float]:
        deadline = time.monotonic() + TASK_S
        poller = select.poll()
        poller.register(self._stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise _broken(f"a worker did not answer within {TASK_S:g} s", "")
            part = os.read(self._stdout.fileno(), 1 << 20)
            if not part:
                raise _broken("a worker ended", "")
            line += part
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise TransportError(answer.error, remedy=answer.remedy)
        return answer.numbers


def ask_all(workers: Sequence[Worker], tasks: Sequence[Task]) -> list[list[float]]:
    """One task each, at the same time."""
    for worker, task in zip(workers, tasks, strict=True):
        worker.send(task)
    return [worker.receive() for worker in workers]


def _end(process: subprocess.Popen[bytes], *, ask: bool = True) -> None:
    if ask:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def _broken(what: str, log: str) -> TransportError:
    last = " | ".join(log.strip().splitlines()[-LOG_LINES:])
    what = f"{what}: {last}" if last else what
    return TransportError(what, remedy="See what it says; try again on a quieter machine.")


def drop_pages(place: Path) -> None:
    """Of a file, or of all in a directory: so that what comes from disk comes from the disk."""
    for path in [place, *place.rglob("*")]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
