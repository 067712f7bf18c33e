"""A real router process in front of engines that answer at once, and what its other clients notice of an attack.

`Rig.watched` asks for `/health` and for completions all the time while an attack runs. Of each answer it keeps the
status and the processor time that the router used from the question to the answer, without the time in which the asker
itself was busy or had no processor. That time, and not the clock's, is the verdict: it says how long others had to wait
for the router's own work, however busy the machine is beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvtally.processes import free_ports
from tests.waiting import HANG_S, comes_about
from tests.work import occupied_s

ROOT = Path(__file__).parents[2]
PATH = "/v1/completions"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Notes:
    """What others noticed."""

    statuses: set[int] = field(default_factory=set)
    answers: int = 0
    work_s: float = 0.0  # the most that the router worked while somebody waited for `/health`


@dataclass
class Rig:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def work_s(self) -> float:
        """The processor time of the router so far, all threads together."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S  # utime, stime: see proc(5)

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """`VmRSS`: now. `VmHWM`: the most since `forget_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Notes]:
        """Others ask on while the body of this context runs, and a little longer."""
        notes = Notes()
        is_over = asyncio.Event()
        # Each of them is a new client, with a connection of its own.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            asking = asyncio.create_task(self._ask_on(session, notes, is_over))
            try:
                yield notes
                seen = notes.answers
                await comes_about(lambda: notes.answers >= seen + 4 or asking.done(), "others are answered")
            finally:
                is_over.set()
                await asking

    async def _ask_on(self, session: aiohttp.ClientSession, notes: Notes, is_over: asyncio.Event) -> None:
        limit = aiohttp.ClientTimeout(total=HANG_S)
        while not is_over.is_set():
            begun_s = self.work_s - occupied_s()
            async with session.get(f"{self.url}/health", timeout=limit) as response:
                await response.read()
                notes.statuses.add(response.status)
            notes.work_s = max(notes.work_s, self.work_s - occupied_s() - begun_s)
            async with session.post(self.url + PATH, json={"prompt": "an honest prompt"}, timeout=limit) as response:
                await response.read()
                notes.statuses.add(response.status)
            notes.answers += 2
            await asyncio.sleep(0.005)

    async def post(self, data: bytes | AsyncIterator[bytes]) -> int:
        """The status of one request."""
        body = io.BytesIO(data) if isinstance(data, bytes) else data
        async with aiohttp.ClientSession() as session, session.post(self.url + PATH, data=body) as response:
            await response.read()
            return response.status

    @contextlib.asynccontextmanager
    async def connections(
        self, sent: list[bytes]
    ) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
        """So many connections, on each of which this was sent."""
        opened = []
        for data in sent:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            opened.append((reader, writer))
            writer.write(data)
        try:
            yield opened
        finally:
            for _, writer in opened:
                writer.close()


@contextlib.contextmanager
def a_router(directory: Path, *flags: str, open_files: int = 0) -> Iterator[Rig]:
    """A router that serves. `open_files` limits it."""

    def limit() -> None:
        if open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            _process([sys.executable, "-m", "tests.hostile.engine"], environment, stdout=subprocess.PIPE)
        )
        assert engine.stdout is not None
        (port,) = free_ports(1)
        address = f"http://127.0.0.1:{int(engine.stdout.readline())},store={directory / 'none.sock'}"
        command = [sys.executable, "-m", "kvtally", "route", "--decode", address, "--listen", f"127.0.0.1:{port}"]
        log = stack.enter_context((directory / "router.log").open("wb"))
        router = stack.enter_context(
            _process(
                [*command, "--salt-file", str(directory / "salt"), *flags],
                environment,
                stdout=log,
                stderr=subprocess.PIPE,
                preexec_fn=limit,
            )
        )
        assert router.stderr is not None
        while b"is ready" not in router.stderr.readline():
            assert router.poll() is None
        yield Rig(router, port)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
