"""The process between `kvtally up` and one it keeps: nothing of that process's tree outlives either of the two.

    up ──socket (stdin)──▶ guard ──fork, exec──▶ process ──▶ its own children (vLLM's engine core, its workers)

An engine is a tree of processes, and a tree whose root is killed lives on: an orphaned engine core holds the GPU's
memory, and the next start fails. So the guard is the reaper of the whole tree: when the process ends, the rest of the
tree is killed; when `up` asks (`STOP`, `KILL`) or is gone (end of file), the process gets SIGTERM, some time, and then
all are killed. The process itself dies with the guard (PR_SET_PDEATHSIG); `supervise` kills what is then left of the
process group. So signals that end processes are not for the guard: a service manager sends them to all it started, and
the process, which gets them too, must have its time to end.

Started as a script, isolated and without site packages: it imports the standard library only and is up in 30 ms. It
tells its process's id as a line on the socket and ends with its exit code, or 128 + the signal that killed it.
Threading: none, so that fork is safe.
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
    with contextlib.suppress(OSError):  # `up` is gone: the next read says so
        os.write(WIRE, b"%d\n" % process)
    end = os.pidfd_open(process)
    if WIRE in _wait([end, WIRE], None) and _asked() != KILL:
        os.kill(process, signal.SIGTERM)  # it is not reaped yet, so the id is still its own
        _grant(end, grace_s)
    return _clear(process)


def _become(command: list[str], guard: int) -> NoReturn:
    """In the child: turn into the process. All of these settings survive exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before we asked to be told
        os._exit(127)
    for number in (*IGNORED, signal.SIGPIPE):  # Python ignores the last; an ignored signal would stay ignored
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), WIRE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _grant(end: int, grace_s: float) -> None:
    """Let the process end by itself, for so long, or until `up` loses patience."""
    if WIRE in _wait([end, WIRE], grace_s) and not _has_ended(end) and _asked() != KILL:
        _wait([end], grace_s)


def _asked() -> bytes:
    """What `up` wants; nothing where it is gone."""
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
    """Kill all that is left, until there is nobody to wait for. The process's exit code."""
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
    """Who has us as its parent. Orphans join while we look, so one look is not enough."""
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
