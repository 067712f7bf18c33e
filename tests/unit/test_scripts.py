"""The scripts that developers run: the counter of lines of code, and the suite beside busy loops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_S, eventually

ROOT = Path(__file__).parents[2]

SOURCE = '''"""A docstring
of two lines."""

# A comment.
import os  # counts, in spite of its comment


class A:
    """Another."""

    text = """this is
    no docstring"""  # 2 lines

    def f(self):
        """One more."""
        return (
            os
        )
'''

# The second test fails in every other round; the third ends the whole run in the third.
UNSTEADY = """
import os
from pathlib import Path

rounds = Path(__file__).with_name("rounds")

def test_steady():
    rounds.write_text(rounds.read_text() + "." if rounds.exists() else ".")

def test_unsteady():
    assert len(rounds.read_text()) != 2, "the second time"

def test_deadly():
    if len(rounds.read_text()) == 3:
        os._exit(7)
"""


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_only_code_is_counted(tmp_path: Path) -> None:
    for path, source in {"kvtally/core/a.py": SOURCE, "kvtally/bench/b.py": "b = 1\n", "tests/c.py": "c = 1\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "count_lines.py").write_bytes((ROOT / "scripts" / "count_lines.py").read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    counted = subprocess.run(
        [sys.executable, "scripts/count_lines.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    _, _, totals = counted.stdout.partition("total\n")
    # import, class, text (2), def, return (3)
    assert {line.split()[0]: int(line.split()[1]) for line in totals.splitlines()} == {
        "product": 8,
        "bench": 1,
        "testing": 0,
        "tests": 1,
    }


def test_a_commit_that_is_not_there_is_said() -> None:
    ended = script("count_lines.py", "--at", "no-such-commit")
    assert (ended.returncode, "no-such-commit" in ended.stderr) == (2, True)


def test_stress_says_what_failed_how_often(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    ended = script("stress.py", "--rounds", "3", "--loops", "1", str(tmp_path))
    _, _, table = ended.stdout.partition("stress: 3 rounds of 3, 3, 3 tests beside 1 busy loops\n")
    assert ended.returncode == 1
    assert re.findall(r"^  failed (.*)  .*::(.*)$", table, re.MULTILINE) == [
        ("1 of 3", "test_unsteady"),
        ("1 of 3", "test_deadly"),
    ], ended.stdout
    assert "the second time" in table
    assert "the run ended in this test, with status 7" in table


@pytest.mark.parametrize(("options", "status"), [(["-k", "steady and not un"], 0), (["-k", "nothing"], 2)])
def test_stress_ends_with_a_status(tmp_path: Path, options: list[str], status: int) -> None:
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    ended = script("stress.py", "--rounds", "1", str(tmp_path), "--", *options)
    assert ended.returncode == status, ended.stdout + ended.stderr


def test_busy_loops_end_with_the_script(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os, signal\ndef test(): os.kill(os.getppid(), signal.SIGKILL)\n")
    command = [sys.executable, str(ROOT / "scripts" / "stress.py"), "--rounds", "1", "--loops", "2", str(tmp_path)]
    killed = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # where it leaves its files
    )
    assert killed.wait(HANG_S) == -signal.SIGKILL
    eventually(lambda: not session(killed.pid))


def session(number: int) -> list[int]:
    """Every process of this session that has not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if int(of) == number and state != "Z":
                found.append(int(path.parent.name))
    return found
