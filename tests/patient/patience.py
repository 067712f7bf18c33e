"""How long the product waits for others, put to what tests wait, so that no verdict depends on how fast a machine is.

`PATIENCE` is for the process of the tests (`tests/conftest.py`), `ELSEWHERE` for the processes that tests start
(`sitecustomize`, beside this file). Imports nothing of the product, because it is read before the product is.
"""

from __future__ import annotations

HANG_S = 120.0  # see `tests.waiting`

# Constants by module. A test about impatience names a deadline of its own.
PATIENCE: dict[str, dict[str, float]] = {
    "kvtally.client.link": {"HANDSHAKE_NS": int(HANG_S * 1e9)},
    "kvtally.router.app": {"FIRST_TRY_S": HANG_S},
    "kvtally.router.intake": {"BODY_S": HANG_S},
    "kvtally.router.receipts": {"HANDSHAKE_S": HANG_S, "ANSWER_SLACK_S": HANG_S},
    "kvtally.router.upstream": {"CONNECT_S": HANG_S},
    "kvtally.store.bulk": dict.fromkeys(("HELLO_S", "IDLE_S", "STALL_S", "READ_S", "JOB_S", "JOIN_S"), HANG_S),
    "kvtally.store.dial": {"HANDSHAKE_S": HANG_S},
    "kvtally.store.tiers.peer": dict.fromkeys(("CONNECT_S", "STALL_S"), HANG_S),
}
ELSEWHERE: dict[str, dict[str, float]] = {
    **PATIENCE,
    "kvtally.core.routing": {"LEAST_SILENCE_S": HANG_S},
    "kvtally.router.fleet": {"MOST_UNANSWERED": 1_000},
    "kvtally.store.connections": {"HELLO_TIMEOUT_S": HANG_S},
    "kvtally.store.peers": {"ASK_NS": int(HANG_S * 1e9)},
    "kvtally.testing.deployment": {"WAIT_MS": int(HANG_S * 1e3), "RECEIPT_WAIT_MS": 60_000},  # of `kvtally demo`
}
