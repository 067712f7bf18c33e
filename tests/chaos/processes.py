"""Real processes for chaos tests: a store daemon and its clients, to be stopped, continued, killed and restarted."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from kvtally.client import Miss
from kvtally.core.namespace import Namespace
from kvtally.testing.copying import CopyingClient
from tests.waiting import HANG_S, eventually

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Of child processes: no settings from outside, and the package that is tested."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTALLY_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def _die_with_the_test() -> None:
    """Even a test run that is itself killed leaves no process behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Eager(Random):
    """For a client that tries again at once: pauses are spread by this factor."""

    def uniform(self, a: float, b: float) -> float:
        return 0.01


def tree(stats: Mapping[str, Any], *path: str) -> Any:
    """One value of the stats tree; "0" is the first of a list."""
    found: Any = stats
    for step in path:
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


class Process:
    """A child that is ended, whatever happens (`with`), and whose stderr is kept."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with log.open("ab") as stream:
            self.child = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                env=environment(), cwd=log.parent, preexec_fn=_die_with_the_test,
            )  # fmt: skip
        self.pid = self.child.pid
        self.is_stopped = False

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.is_stopped = number == signal.SIGSTOP
            eventually(lambda: (self._state() == "T") == self.is_stopped, f"{self.pid} obeyed {number.name}")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(HANG_S)

    def end(self) -> int:
        """As an orderly end is asked for; its exit code."""
        if self.is_stopped:
            self.signal(signal.SIGCONT)
        self.child.terminate()
        return self.child.wait(HANG_S)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def anonymous_bytes(self) -> int:
        """Resident memory that is the process's own, without the arena."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

    def _state(self) -> str:
        if self.child.poll() is not None:
            return "gone"
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


class StoreProcess:
    """The daemon, as its user starts it, and a client of the test's own to look at it with."""

    def __init__(self, directory: Path, *options: str, namespace: Namespace | None = None) -> None:
        self.directory = directory
        self.socket = directory / "run" / "s.sock"
        self.disk = directory / "disk"
        self.log = directory / "store.log"
        self.options = options
        self.process: Process
        self.probe = CopyingClient(
            str(self.socket), namespace=namespace, name="probe", timeout_s=HANG_S, jitter=Eager()
        )
        self.start()

    def start(self) -> None:
        arguments = ["-m", "kvtally", "store", "--socket", str(self.socket), "--disk", str(self.disk), *self.options]
        self.process = Process(arguments, self.log)
        eventually(lambda: self._is_served(), f"the store started; see {self.log}")

    def stats(self, *path: str) -> Any:
        reply = self.probe.stats().wait()
        assert not isinstance(reply, Miss), reply
        return tree(reply.stats, *path)

    def close(self) -> None:
        self.probe.close()
        if self.process.child.poll() is None:
            self.process.kill()

    def _is_served(self) -> bool:
        assert self.process.child.poll() is None, self.log.read_text()
        if isinstance(self.probe.connect(0.1), Miss):
            return False
        return not isinstance(self.probe.ping().wait(), Miss)  # else that was the old store's connection, unnoticed yet


class WorkerProcess:
    """A client at full load."""

    def __init__(self, store: StoreProcess, seed: int) -> None:
        self.report = store.directory / f"worker-{seed}.jsonl"
        self.log = store.directory / f"worker-{seed}.log"
        self.process = Process(["-m", "tests.chaos.worker", str(store.socket), str(seed), str(self.report)], self.log)

    def stop(self) -> None:
        if not self.process.is_stopped:
            self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process.is_stopped:
            self.process.signal(signal.SIGCONT)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Of its report so far. A line that it was killed in the middle of does not count."""
        if not self.report.exists():
            return []
        whole = self.report.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def seen(self) -> Counter[str]:
        """What it has done so far, as it last said."""
        sums = self.lines("sum")
        return Counter(sums[-1]["seen"] if sums else {})
