"""A measuring process of a bench, from both ends: the bench's (`Child`) and the process's own (`wire`, `serve`).

    bench ──one JSON line: what to measure──▶ stdin    ┌ python -m kvtally.bench.repeat_engine, gpu_copies, ... ┐
          ◀──one JSON line: what came out───  stdout   └ its log is stderr                                       ┘

Whatever needs an engine or a GPU runs in such a process: a crash there costs one part of the bench, and its memory is
free afterwards. Owns the pipe and the process's end: it leads a process group, which ends when its stdin does, by force
if need be. Every wait has a deadline. Threading: in the process one thread reads stdin, the main thread does all else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self, TypeVar

import msgspec

from kvtally.errors import ConfigError, TransportError
from kvtally.machine import own_environment

GRACE_S = 20.0  # how long a process may take to shut down
STOP_S = GRACE_S + 10.0
LOG_LINES = 15

T = TypeVar("T")


class Child:
    """A process that runs `module`, which calls `wire` or `serve`. It is asked one thing at a time. `what` it is, and
    the `remedy`, are for whoever reads that it failed."""

    def __init__(
        self,
        module: str,
        log: Path,
        *,
        python: str = sys.executable,
        what: str = "a measuring process",
        remedy: str = "See what its log says; --part runs parts one by one.",
    ) -> None:
        self._log, self._what, self._remedy = log, what, remedy
        with log.open("ab") as file:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", module],
                    env=own_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                reason = f"{python} cannot be run: {error.strerror}"
                raise ConfigError(
                    reason, remedy="Give --python an interpreter that has vLLM.", code="KV-102"
                ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, message: msgspec.Struct, reply: type[T], timeout_s: float) -> T:
        """Raises TransportError with the end of the log if it dies or takes too long; it is of no use afterwards."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._stdout, select.POLLIN)
        try:
            self._stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError as error:
            raise self.broken(f"{self._what} ended") from error
        line = b""
        while not line.endswith(b"\n"):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise self.broken(f"{self._what} did not answer within {timeout_s:g} s")
            part = os.read(self._stdout.fileno(), 1 << 20)
            if not part:
                raise self.broken(f"{self._what} ended")
            line += part
        return msgspec.json.decode(line, type=reply)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or only zombies
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        self._stdout.close()

    def broken(self, what: str) -> TransportError:
        last = "\n".join(self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:])
        return TransportError(f"{what}:\n{last}\n", remedy=self._remedy)


def wire() -> tuple[Callable[[], bytes], Callable[[msgspec.Struct], None]]:
    """In the process: how to take the next line (empty: no more will come) and how to answer it."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries log to stdout, which is ours
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    return lines.get, lambda answer: _send(out, answer)


def serve(handle: Callable[[bytes], msgspec.Struct]) -> None:
    """Answer line by line until stdin ends. An error in `handle` ends the process; its traceback is in the log."""
    take, answer = wire()
    while line := take():
        answer(handle(line))


def _send(out: IO[bytes], answer: msgspec.Struct) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    while line := sys.stdin.buffer.readline():
        lines.put(line)
    lines.put(b"")
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)
