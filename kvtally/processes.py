"""Processes that a command of ours starts, talks to and ends; benches, demos and the engines of tests share them.

    Child    kvtally store, route, up ...             serves until SIGTERM; its output is its log
    Worker   one JSON line: a message ──▶ stdin       a module that calls `serve` or reads a `Wire`;
             one JSON line: a `Reply` ◀── stdout      it ends when its stdin does; stderr is its log

No process outlives its parent, however that ended. A Child is tied to it by the kernel. A Worker sees its stdin end,
shuts down, and kills its own process group if that takes too long: it may have processes of its own. Both lead a
process group, so Ctrl-C in the terminal is the parent's to handle, and `kill` reaches everything.

Every wait has a deadline; an error carries the end of the log. Threading: none in the parent; in a Worker one thread
watches stdin. `up.supervise` restarts processes for days, from an event loop and through a guard; that is a different
job and stays there.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, Self, TypeVar

import msgspec

from kvtally.config import LONGEST_SOCKET_PATH_BYTES
from kvtally.errors import ConfigError, KVTallyError, TransportError

GRACE_S = 20.0  # how long a worker may take to shut down before it kills its own group
STOP_S = GRACE_S + 10.0  # after which its parent does
END_S = 30.0  # for the kernel to end what was killed
POLL_S = 0.02
LOG_LINES = 15
LOCALHOST = "127.0.0.1"
FIRST_PORT = 10_000  # below, services have their own
MOST_TRIES = 100  # of ports that may be taken
SOCKET_NAME_BYTES = len("/kvtally-demo-12345678/index-1000000.sock")  # the longest name made in a workplace

T = TypeVar("T")


class Reply(msgspec.Struct, frozen=True):
    """What a worker answers: a result, or what went wrong and the remedy."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    remedy: str = ""


# ---- the parent's end


class Process:
    """The leader of a process group, by its id and a pidfd. `name` and `remedy` are for error messages."""

    def __init__(self, pid: int, end: int, log: Path, *, name: str, remedy: str = "") -> None:
        self.pid, self.name, self.end = pid, name, end
        self._log, self._remedy = log, remedy or "See what its log says; try again on a quieter machine."

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, or ends within that time."""
        return self.end < 0 or bool(_readable([self.end], timeout_s))

    def wait_for(self, is_done: Callable[[], bool], problem: str, timeout_s: float, every_s: float = POLL_S) -> None:
        """Wait for a condition. Raises TransportError if the process ends first, or `problem` when time is up."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if self.has_ended():
                raise self.broken(f"{self.name} ended")
            if time.monotonic() >= deadline:
                raise self.broken(problem)
            time.sleep(every_s)

    def broken(self, problem: str) -> TransportError:
        """The error for this problem, with the end of the log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        said = ":\n" + "\n".join(lines) + "\n" if lines else ""
        return TransportError(f"{problem}{said}", remedy=self._remedy)

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9 for the whole group, and gone when this returns. Only the first call does anything: after it, the
        number may be another group's."""
        if self.end < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or only zombies
            os.killpg(self.pid, signal.SIGKILL)
        self.has_ended(END_S)
        os.close(self.end)
        self.end = -1

    @property
    def cpu_s(self) -> float:
        """Processor time that the process has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: see proc(5)

    def memory_bytes(self, kind: str = "VmRSS") -> int:
        """Resident memory. `RssAnon` leaves out shared memory, such as an arena, and the program's own files."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{kind}:"))
        return int(line.split()[1]) * 1024


class Child(Process):
    """A command that serves until it gets SIGTERM. The kernel sends it `tie` if this process dies first."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        name: str,
        remedy: str = "",
        directory: Path | None = None,
        tie: signal.Signals = signal.SIGKILL,
        grace_s: float = 10.0,
    ) -> None:
        self._grace_s = grace_s
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ending_with_us(command, tie),
                cwd=directory,
                env=own_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,  # not a session of its own: the scheduler would treat it as a rival of the bench
            )
        super().__init__(self._process.pid, os.pidfd_open(self._process.pid), log, name=name, remedy=remedy)

    def close(self) -> None:
        if not self.has_ended():
            self._process.terminate()
            self.has_ended(self._grace_s)
        self.kill()

    def kill(self) -> None:
        super().kill()  # the group first: once the process is reaped, its id may mean another group
        self._process.wait(END_S)


class Lines:
    """The pipes to a worker: a JSON line for a JSON line."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], process: Process) -> None:
        self._stdin, self._stdout, self._process = stdin, stdout, process
        self._unread = b""

    def send(self, message: object) -> None:
        try:
            self._stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError as error:
            raise self._process.broken(f"{self._process.name} ended") from error

    def receive(self, kind: type[T], timeout_s: float) -> T:
        """The next result. Raises TransportError if the worker reports an error, dies or takes too long."""
        reply = msgspec.json.decode(self._line(timeout_s), type=Reply)
        if reply.error:
            raise TransportError(reply.error, remedy=reply.remedy)
        return msgspec.json.decode(reply.result, type=kind)

    @property
    def has_answer(self) -> bool:
        """Whether `receive` would return at once."""
        return b"\n" in self._unread or bool(_readable([self._stdout.fileno()]))

    def end(self) -> None:
        """Tell the worker to shut down."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def close(self) -> None:
        self.end()
        self._stdout.close()

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        process, stdout = self._process, self._stdout.fileno()
        while b"\n" not in self._unread:
            # Its end is watched too: a process that it started may still hold its stdout open.
            ready = _readable([stdout, process.end], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise process.broken(f"{process.name} did not answer within {timeout_s:g} s")
            part = os.read(stdout, 1 << 20) if stdout in ready else b""
            if not part:
                raise process.broken(f"{process.name} ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class Worker(Process):
    """A process that runs `python -m module` and does what it is asked, one thing at a time."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path,
        name: str = "a measuring process",
        remedy: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if shutil.which(python) is None:
            remedy = "Give --python an interpreter that has vLLM."
            raise ConfigError(f"{python} cannot be run: no such program", remedy=remedy, code="KV-102")
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                env=own_environment() if environment is None else environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                process_group=0,  # not a session of its own: the scheduler would treat it as a rival of the bench
            )
        super().__init__(self._process.pid, os.pidfd_open(self._process.pid), log, name=name, remedy=remedy)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines = Lines(self._process.stdin, self._process.stdout, self)

    def ask(self, message: object, kind: type[T], timeout_s: float) -> T:
        self.send(message)
        return self.receive(kind, timeout_s)

    def send(self, message: object) -> None:
        """For a parent that does something else meanwhile; `receive` gets the result."""
        self._lines.send(message)

    def receive(self, kind: type[T], timeout_s: float) -> T:
        return self._lines.receive(kind, timeout_s)

    def close(self) -> None:
        """Let it shut down cleanly; what is left of its group is killed."""
        self._lines.end()
        self.has_ended(STOP_S)
        self.kill()

    def kill(self) -> None:
        super().kill()
        self._process.wait(END_S)
        self._lines.close()


def _readable(descriptors: Sequence[int], timeout_s: float = 0.0) -> set[int]:
    """Those that can be read without waiting, or have ended; as soon as there is one."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(timeout_s * 1e3)}


# ---- the worker's end


class Wire:
    """What this process is asked, line by line until stdin ends, and its answers. Whatever else is written to stdout
    from now on, as libraries do, goes to the log."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        watch_stdin(grace_s)

    def __iter__(self) -> Iterator[bytes]:
        return iter(sys.stdin.buffer.readline, b"")

    def answer(self, result: object) -> None:
        self._write(Reply(msgspec.Raw(msgspec.json.encode(result))))

    def fail(self, error: KVTallyError) -> None:
        self._write(Reply(error=error.message, remedy=error.remedy))

    def _write(self, reply: Reply) -> None:
        self._out.write(msgspec.json.encode(reply) + b"\n")


def serve(handle: Callable[[bytes], object]) -> None:
    """Answer line by line until stdin ends. An error of our own tree is an answer; any other ends the process, and its
    traceback is in the log."""
    wire = Wire()
    for line in wire:
        try:
            wire.answer(handle(line))
        except KVTallyError as error:
            wire.fail(error)


def watch_stdin(grace_s: float, then: Callable[[], object] = lambda: None) -> None:
    """When the other end of stdin is closed, do `then`, and kill the whole process group after `grace_s`. The thread
    that watches reads nothing and is asleep until then: it must not disturb what is being timed."""

    def watch() -> None:
        poller = select.poll()
        poller.register(0, 0)  # only its end
        poller.poll()
        then()
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# ---- where they live


@contextlib.contextmanager
def workplace(prefix: str = "kvtally-") -> Iterator[Path]:
    """A temporary directory, gone afterwards even if a signal ends this process. It is the usual one, unless a socket's
    path in there would be too long."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) + SOCKET_NAME_BYTES <= LONGEST_SOCKET_PATH_BYTES
    with _leaving(), tempfile.TemporaryDirectory(prefix=prefix, dir=usual if is_short else "/tmp") as directory:
        yield Path(directory)


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that `with` blocks clean up. A hang-up that is ignored (`nohup`)
    stays ignored."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


# ---- what a process is started with


def free_ports(count: int, proc: Path = Path("/proc")) -> list[int]:
    """Free TCP ports on this machine. An engine may take minutes until it listens on one, so they lie outside the range
    from which the kernel serves outgoing connections. Raises OSError if there are too few."""
    outgoing: list[str] = []
    with contextlib.suppress(OSError):
        outgoing = (proc / "sys" / "net" / "ipv4" / "ip_local_port_range").read_text(encoding="utf-8").split()
    span = range(FIRST_PORT, int(outgoing[0]) if outgoing else FIRST_PORT)
    tried = random.SystemRandom().sample(span, min(len(span), MOST_TRIES))
    ports: list[int] = []
    with contextlib.ExitStack() as probes:
        for port in [*tried, *[0] * count]:  # 0: let the system choose
            with contextlib.suppress(OSError):
                ports.append(probes.enter_context(socket.create_server((LOCALHOST, port))).getsockname()[1])
            if len(ports) == count:
                return ports
    raise OSError(f"{count} ports are wanted, {len(ports)} are free")


def python_path() -> str:
    """The PYTHONPATH with which a process imports this very package, wherever ours came from."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def ending_with_us(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command, wrapped so that the kernel sends it this signal when our process ends, however it ends.

    The new process asks for the signal itself, just before it runs the command: code of ours between fork and exec is
    unsafe beside threads. Start it from a thread that lives as long as our process: the kernel watches that thread."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(int(number)), str(os.getpid()), *command]


_TIE = """
import ctypes, os, sys
number, parent = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG; it outlives exec
if os.getppid() != parent:
    sys.exit(127)  # the parent ended before we asked
os.execv(sys.argv[3], sys.argv[3:])
"""


def own_environment() -> dict[str, str]:
    """Our environment for a process that we start: with this package on its path, and without KVTALLY_ settings, which
    were meant for us."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTALLY_")}
    return {**kept, "PYTHONPATH": python_path()}
