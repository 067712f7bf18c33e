"""For all tests: no setting of the machine that runs them reaches them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("KVTALLY_") and variable != "KVTALLY_HYPOTHESIS":
            monkeypatch.delenv(variable)
