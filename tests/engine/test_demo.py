"""`kvtally demo`, as the README has it: every step proves what it says, on whatever processor this is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.waiting import HANG_S

pytestmark = pytest.mark.engine


def demo(*arguments: str) -> list[dict[str, Any]]:
    """Run it; its steps, each of which must have proved what it should."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvtally", "demo", "--json", *arguments],
        capture_output=True,
        timeout=20 * HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()
    told = json.loads(ran.stdout)
    assert told["proved"]
    steps: list[dict[str, Any]] = told["steps"]
    assert [step["step"] for step in steps if not (step["proved"] and step["answer_equal"])] == []
    return steps


def test_every_step_proves_what_it_should(patient: None) -> None:
    steps = demo()
    assert len(steps) == 7
    flipped = steps[-1]
    assert (flipped["verdict"], flipped["reused_tokens"]) == ("recomputed:checksum", 0)


def test_every_step_across_two_stores_proves_what_it_should(patient: None) -> None:
    handed_over, turn, flipped, killed = demo("--nodes", "2")
    assert (handed_over["verdict"], handed_over["source"]) == ("proved", f"peer:{handed_over['reused_tokens']}")
    assert (turn["verdict"], turn["computed_tokens"]) == ("proved", 1)
    assert (flipped["verdict"], flipped["reused_tokens"]) == ("recomputed:checksum", 0)
    assert (killed["verdict"], killed["reused_tokens"]) == ("recomputed:peer_lost", 0)
