"""The patience of tests: every constant that it names is one of the product's, and it reaches other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.patient.patience import ELSEWHERE, HANG_S
from tests.waiting import HANG_S as WAITED_S

PATIENT = Path(__file__).parents[1] / "patient"
ASK = "import kvtally.core.routing as routing; print(routing.LEAST_SILENCE_S)"


def asked(**environment: str) -> float:
    command = [sys.executable, "-c", ASK]
    surroundings = {**os.environ, **environment}
    return float(subprocess.run(command, env=surroundings, capture_output=True, timeout=HANG_S, check=True).stdout)


@pytest.mark.parametrize("module", ELSEWHERE)
def test_what_is_patient_is_there(module: str) -> None:
    known = vars(import_module(module))
    assert [name for name in ELSEWHERE[module] if name not in known] == []


def test_other_processes_are_patient_where_they_are_told_to_be() -> None:
    assert HANG_S == WAITED_S
    assert asked(PYTHONPATH=str(PATIENT)) == HANG_S
    assert asked() < HANG_S
