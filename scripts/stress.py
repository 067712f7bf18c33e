"""Runs tests in rounds while busy loops compete for every processor, and reports which tests failed and how often.

    scripts/stress.py                                the whole suite, three rounds
    scripts/stress.py --rounds 10 tests/chaos        one directory, ten rounds
    scripts/stress.py tests/unit -- -m "not slow"    what follows -- goes to pytest

A test that passes alone and fails here takes the machine's speed for granted. Exit status: 0 if every test passed in
every round, 1 if any failed, 2 if there was nothing to run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
HANG_S = 1800  # after so long in one test, pytest prints every thread's stack and the round ends


class Recorder:
    """A pytest plugin: writes each test's beginning and result to a file, at once, so that a run that is killed leaves
    behind the name of the test that it was in."""

    def __init__(self, file: TextIO):
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, begun=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, failed=f"{report.when}: {reason(report)}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(test=nodeid, ended=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, failed=f"collect: {reason(report)}")

    def _write(self, **line: object) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return lines[0] if lines else "no reason given"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Each loop ends by itself when this process is gone, however it ended."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_round(pytest_arguments: list[str]) -> tuple[int, dict[str, str], int]:
    """How many tests ran, which failed and why, and pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="stress-") as directory:
        record = Path(directory) / "record"
        command = [sys.executable, __file__, "--record", str(record), "--", *pytest_arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    failed: dict[str, str] = {}
    running: str | None = None
    for line in lines:
        if "failed" in line:
            failed.setdefault(line["test"], line["failed"])
        elif "begun" in line:
            running = line["test"]
        else:
            running = None
    if running is not None:
        failed[running] = f"the run ended in this test, with status {status}"
    return sum("begun" in line for line in lines), failed, status


def stress(rounds: int, loops: int, pytest_arguments: list[str]) -> int:
    failures: dict[str, list[str]] = defaultdict(list)
    ran: list[int] = []
    with busy_loops(loops):
        for number in range(1, rounds + 1):
            print(f"stress: round {number} of {rounds}, beside {loops} busy loops", flush=True)
            count, failed, status = run_round(pytest_arguments)
            ran.append(count)
            if status not in (0, 1, 5) and not failed:
                failed["(no test)"] = f"pytest ended with status {status}"
            for test, why in failed.items():
                failures[test].append(why)
    print(f"\nstress: {rounds} rounds of {', '.join(map(str, ran))} tests beside {loops} busy loops")
    for test, reasons in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"  failed {len(reasons)} of {rounds}  {test}\n{'':16}{reasons[0][:200]}")
    if failures:
        return 1
    if not any(ran):
        print("  no tests were found: name directories, files or tests", file=sys.stderr)
        return 2
    print("  none failed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--rounds N] [--loops N] [TEST ...] [-- PYTEST OPTIONS]",
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="directories, files or tests (default: the whole suite)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often the tests run (default: 3)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--loops", type=int, default=cores, metavar="N", help="busy loops (default: one for each processor)"
    )
    parser.add_argument("--record", help=argparse.SUPPRESS)  # one round, in a process of its own
    own, options = sys.argv[1:], list[str]()
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    chosen = parser.parse_args(own)
    if chosen.record:
        with open(chosen.record, "w", encoding="utf-8") as file:
            return pytest.main(options, plugins=[Recorder(file)])
    if chosen.rounds < 1 or chosen.loops < 0:
        parser.error("--rounds must be at least 1, --loops at least 0")
    return stress(chosen.rounds, chosen.loops, ["-q", "-o", f"faulthandler_timeout={HANG_S}", *options, *chosen.tests])


if __name__ == "__main__":
    sys.exit(main())
