"""`kvtally demo`, as the README has it: every step proves what it says, on whatever processor this is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


def test_every_step_proves_what_it_should() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvtally", "demo", "--json"], capture_output=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()
    told = json.loads(ran.stdout)
    assert told["proved"]
    assert len(told["steps"]) == 7
    assert [step["step"] for step in told["steps"] if not (step["proved"] and step["answer_equal"])] == []
    flipped = told["steps"][-1]
    assert (flipped["verdict"], flipped["reused_tokens"]) == ("recomputed:checksum", 0)
