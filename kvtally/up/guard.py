"""The process between `kvtally up` and a process it runs. When either of those ends, the process's whole tree ends.

    up ──socket (stdin)──▶ guard ──fork, exec──▶ process ──▶ its own children (vLLM's engine core, its workers)

An engine is a tree of processes. If only its root is killed the others live on: an orphaned engine core holds the GPU's
memory, and the next start fails. So the guard reaps the whole tree. When the process ends, the guard kills the rest.
When `up` asks (`STOP`, `KILL`) or is gone (end of file), the process gets SIGTERM and some time, then everything is
killed. If the guard is killed, the process dies with it (PR_SET_PDEATHSIG), and `supervise` kills what is left of the
process group. The guard ignores the signals that end processes: a service manager sends them to everything it started,
and the process, which gets them too, needs time to end.

It runs as a script, isolated and without site packages: it imports only the standard library and is up in 30 ms. It
writes the process's id as a line on the socket, and exits with the process's exit code, or 128 + the signal that killed
it. Threading: none, so fork is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

STOP, KILL = b"s", b"k"
WIRE = 0  # the socket to `up`
RETRY_S = 0.02
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def main(arguments: list[str]) -> int:
    grace_s, command = float(arguments[0]), arguments[1:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the tree become ours, not init's
    guard = os.getpid()
    process = os.fork()
    if process == 0:
        _become(command, guard)
    with contextlib.suppress(OSError):  # `up` is gone: the next read notices
        os.write(WIRE, b"%d\n" % process)
    end = os.pidfd_open(process)
    if WIRE in _wait([end, WIRE], None) and _asked() != KILL:
        os.kill(process, signal.SIGTERM)  # it is not reaped yet, so the id is still its own
        _grant(end, grace_s)
    return _clear(process)


def _become(command: list[str], guard: int) -> NoReturn:
    """In the child: become the process. All of these settings survive exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before we asked
        os._exit(127)
    for number in (*IGNORED, signal.SIGPIPE):  # Python ignores SIGPIPE, and exec keeps ignored signals ignored
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), WIRE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _grant(end: int, grace_s: float) -> None:
    """Give the process this long to end by itself, unless `up` loses patience."""
    if WIRE in _wait([end, WIRE], grace_s) and not _has_ended(end) and _asked() != KILL:
        _wait([end], grace_s)


def _asked() -> bytes:
    """What `up` asks for; empty if it is gone."""
    try:
        return os.read(WIRE, 1)
    except ConnectionError:
        return b""


def _has_ended(end: int) -> bool:
    return bool(_wait([end], 0))


def _wait(descriptors: list[int], timeout_s: float | None) -> list[int]:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [ready for ready, _ in poller.poll(None if timeout_s is None else timeout_s * 1e3)]


def _clear(process: int) -> int:
    """Kill what is left of the tree until nothing is. Returns the process's exit code."""
    code = 0
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == process:
            result = os.waitstatus_to_exitcode(status)
            code = result if result >= 0 else 128 - result
        elif not ended:
            time.sleep(RETRY_S)


def _children() -> list[int]:
    """Processes whose parent we are. Orphans join while we look, so one look is not enough."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if int(parent) == os.getpid() and state != b"Z":
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
