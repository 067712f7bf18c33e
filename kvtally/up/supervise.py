"""Keeps the processes of a plan: starts them in order, waits until they are ready, restarts what dies, stops all.

    waiting ──▶ starting ──▶ ready ──died──▶ pausing ──▶ starting …          a process that dies too often: failed
                   └─ a first start that fails stops everything

Owns processes and their logs. Every process runs under a guard (see `guard`), which ends its whole tree, so nothing is
left behind even if this process is killed. A process that dies too often is given up. When a part (the store, all
decode engines, ...) has no process left, everything stops.

Neighbours: `plan` (which processes, how soon to restart), `host.answers` (the probe), `cli.up` (shows it).
Threading: one event loop; probes run in its thread pool. Every wait has a deadline, or ends when a process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from kvtally.errors import ConfigError, TransportError
from kvtally.up import guard
from kvtally.up.host import answers
from kvtally.up.plan import Process, counted, pause_s

GRACE_S = 35.0  # for a process to end by itself: a router finishes streams, for up to 30 s; a store writes to its disk
GUARD_START_S = 5.0
PROBE_EVERY_S = 0.1
TAIL_LINES = 20
TAIL_BYTES = 64 << 10
LARGEST_LOG_BYTES = 64 << 20
LOG_CHECK_S = 10.0


class State(StrEnum):
    WAITING = "waiting"  # for the stage before it
    STARTING = "starting"
    READY = "ready"
    PAUSING = "pausing"  # it died and starts again soon
    FAILED = "failed"  # it died too often
    STOPPING = "stopping"
    STOPPED = "stopped"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one process."""

    name: str
    state: State
    pid: int  # 0: none
    uptime_s: float
    port: int
    restarts: int


class Child:
    """One run of a process: the guard and the tree beneath it. `kvtally.processes.Child` is for a command that starts a
    process and waits for it; here an event loop keeps many for days, restarts them, and must end whole trees."""

    def __init__(self, process: Process, log: Path, environ: Mapping[str, str], grace_s: float) -> None:
        """Raises OSError if the log or the process cannot be created."""
        with contextlib.ExitStack() as undo:
            self._wire, theirs = socket.socketpair()
            undo.enter_context(self._wire)
            with theirs, log.open("ab") as file:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *process.argv],
                    env={**environ, **process.env},
                    stdin=theirs.fileno(),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C in the terminal is ours to handle
                )
            undo.pop_all()
        self.pid = self._told_pid()
        self._ended = asyncio.Event()
        self._end = os.pidfd_open(self._guard.pid)
        asyncio.get_running_loop().add_reader(self._end, self._bury)
        self.code = 0

    def stop(self) -> None:
        """Ask the process to end; the guard kills it if it takes too long."""
        self._tell(guard.STOP)

    def kill(self) -> None:
        self._tell(guard.KILL)

    async def ended(self) -> int:
        """Wait until the whole tree is gone. Returns the exit code."""
        await self._ended.wait()
        return self.code

    def _told_pid(self) -> int:
        """The process's id, which the guard sends at once. 0: it did not, or has ended already."""
        self._wire.settimeout(GUARD_START_S)
        with contextlib.suppress(TimeoutError):
            return int(self._wire.recv(32) or 0)
        return 0

    def _tell(self, what: bytes) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(OSError):  # it is ending
                self._wire.send(what)

    def abandon(self) -> None:
        """Kill the process group, guard included: for a guard that does not answer."""
        if not self._ended.is_set():
            os.killpg(self._guard.pid, signal.SIGKILL)

    def _bury(self) -> None:
        """The guard ended. If it was killed, part of the tree may live on, still in its group.

        The guard is reaped only after that group is killed, so its id cannot name another group yet.
        """
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self.code = self._guard.wait()
        self._wire.close()
        self._ended.set()


class Kept:
    """A process of the plan, and its history."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.state = State.WAITING
        self.child: Child | None = None
        self.begun_s = 0.0
        self.lives_s: list[float] = []  # how long it was ready before each death, since it last lived long
        self.restarts = 0
        self.has_been_ready = False
        self.ready_s: float | None = None  # when its present life became ready

    @property
    def is_running(self) -> bool:
        return self.state in (State.STARTING, State.READY, State.STOPPING)

    def row(self, now_s: float) -> Row:
        pid = self.child.pid if self.child is not None and self.is_running else 0
        uptime_s = now_s - self.begun_s if pid else 0.0
        port = self.process.port
        name, restarts = self.process.name, self.restarts
        return Row(name=name, state=self.state, pid=pid, uptime_s=uptime_s, port=port, restarts=restarts)


class Supervisor:
    """Keeps the processes of a plan running until `stop`. `tell` gets a line for people for each event."""

    def __init__(
        self,
        processes: Sequence[Process],
        logs: Path,
        *,
        tell: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        grace_s: float = GRACE_S,
        probe: Callable[[str], bool] = answers,
        pause: Callable[[Sequence[float]], float | None] = pause_s,
    ) -> None:
        self._kept = [Kept(process, logs / f"{process.name}.log") for process in processes]
        self._logs = logs
        self._tell = tell
        self._environ = environ
        self._grace_s = grace_s
        self._probe = probe
        self._pause = pause
        self._stopping = asyncio.Event()
        self._progress = asyncio.Condition()
        self.ready = asyncio.Event()  # every process has been ready once

    def rows(self) -> list[Row]:
        now_s = time.monotonic()
        return [kept.row(now_s) for kept in self._kept]

    def stop(self) -> None:
        """End `run` in order. A second call ends it at once."""
        if not self._stopping.is_set():
            self._tell("stopping, in order; a second Ctrl-C stops at once")
            self._stopping.set()
            return
        for kept in self._kept:
            if kept.child is not None:
                kept.child.kill()

    async def run(self) -> None:
        """Run until `stop`. Raises TransportError KV-504, with the end of a log, if a process fails for good."""
        self._open_logs()
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(kept)) for kept in self._kept]
                tasks.append(group.create_task(self._bound_logs()))
                await self._stopping.wait()
                for task in tasks:
                    task.cancel()
        except* TransportError as failures:
            failure = failures.exceptions[0]
        finally:
            await self._stop_all()
        if failure is not None:
            raise failure

    # ---- one process

    async def _keep(self, kept: Kept) -> None:
        await self._turn(kept)
        while True:
            child = self._start(kept)
            if await self._becomes_ready(kept, child):
                await self._note_ready(kept)
                await child.ended()
            if self._stopping.is_set():  # it may have got the same signal as we did: that is no death
                return
            if not kept.has_been_ready:
                raise self._failure(kept, f"{kept.process.name} did not start: it {self._how_it_ended(kept, child)}")
            delay_s = self._after_death(kept, child)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)
            kept.restarts += 1

    async def _turn(self, kept: Kept) -> None:
        earlier = [other for other in self._kept if other.process.stage < kept.process.stage]
        async with self._progress:
            await self._progress.wait_for(lambda: all(other.has_been_ready for other in earlier))

    def _start(self, kept: Kept) -> Child:
        kept.state = State.STARTING
        kept.begun_s = time.monotonic()
        try:
            kept.child = child = Child(kept.process, kept.log, self._environ, self._grace_s)
        except OSError as error:  # of the log file, or of the system's limits
            raise self._failure(kept, f"{kept.process.name} could not be started: {error}") from error
        self._tell(f"{kept.process.name}: starting, pid {child.pid}, log {kept.log}")
        return child

    async def _becomes_ready(self, kept: Kept, child: Child) -> bool:
        """Whether it became ready. False: it ended first, or took too long and was killed."""
        end = asyncio.create_task(child.ended())
        deadline_s = kept.begun_s + kept.process.start_timeout_s
        try:
            while not end.done():
                if await asyncio.to_thread(self._probe, kept.process.health):
                    return not end.done()  # otherwise another process answers there
                if time.monotonic() >= deadline_s:
                    child.kill()
                    await end
                    return False
                await asyncio.wait({end}, timeout=PROBE_EVERY_S)
            return False
        finally:
            end.cancel()

    async def _note_ready(self, kept: Kept) -> None:
        kept.state = State.READY
        self._tell(f"{kept.process.name}: ready after {time.monotonic() - kept.begun_s:.1f} s")
        kept.has_been_ready = True
        kept.ready_s = time.monotonic()
        if all(other.has_been_ready for other in self._kept):
            self.ready.set()
        async with self._progress:
            self._progress.notify_all()

    def _after_death(self, kept: Kept, child: Child) -> float | None:
        """How long to wait before the next start. None: it is given up. Raises if its part has no process left."""
        life_s = 0.0 if kept.ready_s is None else time.monotonic() - kept.ready_s
        kept.lives_s = counted([*kept.lives_s, life_s])
        kept.ready_s = None
        how = self._how_it_ended(kept, child)
        delay_s = self._pause(kept.lives_s)
        if delay_s is not None:
            kept.state = State.PAUSING
            self._tell(f"{kept.process.name}: {how}; starts again in {delay_s:g} s, log {kept.log}")
            return delay_s
        kept.state = State.FAILED
        what = f"{kept.process.name} died {len(kept.lives_s)} times and is given up; the last time it {how}"
        failure = self._failure(kept, what)
        if all(other.state is State.FAILED for other in self._kept if other.process.part is kept.process.part):
            raise failure
        self._tell(failure.message)
        return None

    def _how_it_ended(self, kept: Kept, child: Child) -> str:
        if time.monotonic() >= kept.begun_s + kept.process.start_timeout_s and kept.state is State.STARTING:
            return f"was not ready within {kept.process.start_timeout_s:g} s"
        code = child.code
        if code > 128 and code - 128 in set(signal.Signals):
            return f"was killed by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"

    def _failure(self, kept: Kept, what: str) -> TransportError:
        return TransportError(
            f"{what}\n\nthe end of {kept.log}:\n{tail(kept.log)}\n",
            remedy="The log above says why; `kvtally up --print` shows the whole command.",
            code="KV-504",
        )

    # ---- all of them

    async def _stop_all(self) -> None:
        """The last stage first: the router stops taking requests, engines save, then the store writes to disk."""
        for stage in sorted({kept.process.stage for kept in self._kept}, reverse=True):
            running = [
                (kept, kept.child)
                for kept in self._kept
                if kept.process.stage == stage and kept.child is not None and kept.is_running
            ]
            for kept, child in running:
                kept.state = State.STOPPING
                child.stop()
            ends = [asyncio.ensure_future(child.ended()) for _, child in running]
            if ends and (await asyncio.wait(ends, timeout=self._grace_s + 5))[1]:
                for _, child in running:
                    child.abandon()
                await asyncio.wait(ends)
            for kept, _ in running:
                kept.state = State.STOPPED
                self._tell(f"{kept.process.name}: stopped")

    def _open_logs(self) -> None:
        """Make the directory, for this user alone. The logs of the last run are kept as .1."""
        try:
            self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            for kept in self._kept:
                if kept.log.exists():
                    kept.log.replace(kept.log.with_suffix(".log.1"))
                kept.log.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"logs cannot be written to {self._logs}: {error.strerror}",
                remedy="Choose another directory in the file: `logs: DIR`.",
                code="KV-103",
            ) from error

    async def _bound_logs(self) -> None:
        """Keep logs from growing without end. Processes append, so a log can be cut while they write; a few lines may
        be lost."""
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for kept in self._kept:
                bound_log(kept.log)


def bound_log(log: Path, largest_bytes: int = LARGEST_LOG_BYTES) -> None:
    with contextlib.suppress(OSError):  # it was removed, or the disk is full: then the old part is not kept
        if log.stat().st_size > largest_bytes:
            with contextlib.suppress(OSError):
                shutil.copyfile(log, log.with_suffix(".log.1"))
            os.truncate(log, 0)


def tail(log: Path) -> str:
    """The last lines, without control characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError as error:
        return f"({error.strerror})"
    return "\n".join("".join(c if c.isprintable() else " " for c in line.expandtabs()) for line in lines)
