"""Handles: what a lease says of itself."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtally.client import Lease
from kvtally.wire.messages import Found, MissReason, Staged

ABSENT, FAILED = MissReason.ABSENT, MissReason.STAGING_FAILED


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        (Found(1, 256, 5, 2, reason=ABSENT), None, ABSENT),
        (Found(1, 256, 5, 2, reason=ABSENT), Staged(0, 5, 256), ABSENT),  # all that was found, which was not all
        (Found(1, 256, 5, 2, reason=ABSENT), Staged(0, 5, 0, FAILED), FAILED),
        (Found(1, 256, 5, 2, reason=ABSENT), Staged(0, 5, 512), ""),  # saved while it waited for room
        (Found(1, 512, 5, 2), Staged(0, 5, 512), ""),
    ],
)
def test_why_a_hit_is_not_longer(found: Found, outcome: Staged | None, reason: str) -> None:
    session = cast("Any", SimpleNamespace(alive=True))
    expires_ns = time.monotonic_ns() + 60_000_000_000
    lease = Lease(session=session, id=5, found=found, chains=b"", expires_ns=expires_ns, outcome=outcome)
    assert lease.reason == reason
