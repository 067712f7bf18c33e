"""Zero configuration: the engine uses the user's default store, and starts one if there is none.

The store is a process of its own in a session of its own: it outlives the engine, and the next engine finds what this
one saved. Two engines that start at once start one store: the second finds the socket's lock taken and waits for it.
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
    """The address of a store, started if need be. If none comes up the engine runs on without reuse."""
    address = settings.store
    problem = _problem(address, 0.5)
    if isinstance(problem, IncompatibleError):  # it is there, and another would not get its place
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
    """What keeps a store from being used: it does not want us, or is not there."""
    with StoreClient(address, name="vllm start") as client:
        connected = client.connect(timeout_s)
        return (client.refusal or connected) if isinstance(connected, Miss) else None
