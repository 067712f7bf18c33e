"""Zero configuration: the engine uses the user's default store, and starts one if there is none.

The store runs in its own process and session. It outlives the engine, so the next engine finds what this one saved. If
two engines start at once, one store survives: the other finds the socket's lock taken and exits.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from kvtally.client import Miss, StoreClient
from kvtally.config import ConnectorConfig
from kvtally.errors import IncompatibleError

log = logging.getLogger("kvtally.vllm")

START_S = 20.0


def ensure_store(settings: ConnectorConfig) -> str:
    """The address of the store, which is started if necessary. If none comes up, the engine runs without reuse."""
    address = settings.store
    problem = _problem(address, 0.5)
    if isinstance(problem, IncompatibleError):  # a store is there, so starting another would not help
        log.error("kvtally: running without reuse: %s", problem)
    if not isinstance(problem, Miss) or not settings.autostart:
        return address
    log.warning("kvtally: no store at %s, starting one", address)
    subprocess.Popen(
        [sys.executable, "-m", "kvtally", "store", "--socket", address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if _problem(address, 1.0) is None:
            return address
        time.sleep(0.1)
    log.error("kvtally: no store came up at %s within %d s; running without reuse until one does", address, START_S)
    return address


def _problem(address: str, timeout_s: float) -> Miss | IncompatibleError | None:
    """Why the store cannot be used: it refuses us, or it is not there."""
    with StoreClient(address, name="vllm start") as client:
        connected = client.connect(timeout_s)
        return (client.refusal or connected) if isinstance(connected, Miss) else None
