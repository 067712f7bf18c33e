"""For tests of pools: engines wait as patiently as tests do, unless a test is about what happens when they do not."""

from __future__ import annotations

import pytest

from tests.pool.kit import patient


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
