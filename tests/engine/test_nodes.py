"""Prefill and decode with a store each, as on two machines: `kvtally verify` proves what is pulled, and names the link
that is broken."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtally.testing.deployment import TwoNodes
from kvtally.testing.models import DENSE, Model, Recipe

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def up(tiny_model: Callable[[Recipe, int], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    patient = {"receipt_wait": 5_000}  # what a receipt says is tested, not how soon it comes on busy processors
    deployment = TwoNodes(tiny_model(DENSE, 0), tmp_path_factory.mktemp("nodes"), router=patient)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.close()


def verify(up: TwoNodes, token: Path) -> tuple[int, dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, "-m", "kvtally", "verify", up.router, "--token-file", str(token), "--json"],
        capture_output=True,
        timeout=600,
        check=False,
    )
    report: dict[str, Any] = json.loads(ran.stdout)
    return ran.returncode, report


def test_what_is_pulled_from_another_store_is_proved(up: TwoNodes) -> None:
    """A store waits for another one no longer than a second, so on a starved machine some requests find it lost."""
    code, report = verify(up, up.token)
    seen = [(each["told"]["verdict"], each["told"]["reason"]) for each in report["observations"]]
    lost = [reason for verdict, reason in seen if verdict not in ("proved", "local")]
    assert set(lost) <= {"peer_lost"}, report["findings"]
    assert (code, report["outcome"]) == ((1, "not proved") if lost else (0, "proved")), report["findings"]
    pulled = [each["told"]["sources"].get("peer", 0) for each in report["observations"]]
    assert any(pulled), report["observations"]
    assert [each["comparison"]["problem"] for each in report["observations"]] == [""] * len(seen)


def test_a_store_with_another_token_is_the_link_that_is_named(up: TwoNodes, tmp_path: Path) -> None:
    """Its own engine shares memory with it and needs none: prompts are saved, and cannot be pulled."""
    known = tmp_path / "token"
    known.write_text(up.token.read_text())
    up.token.write_text(secrets.token_hex(16))
    killed = up.pid_of("store")
    os.kill(killed, signal.SIGKILL)
    up.wait(lambda: up.pid_of("store") != killed and up.is_ready(), "prefill's store does not come back")
    code, report = verify(up, known)
    assert (code, report["outcome"]) == (1, "not proved")
    link = report["findings"][0]
    a, b = up.stores
    assert link["what"] == (
        f"decode's store, {b}, cannot pull from prefill's, {a}: it is refused, because the two have different tokens"
    )
    assert "token_file" in link["remedy"]
    assert "long, first" in link["requests"]
    answers = [seen["comparison"]["problem"] for seen in report["observations"]]
    assert answers == [""] * len(answers)  # it costs time, and no answer
