"""A store as benches use it: its process, and what it tells a tool.

`Daemon` is the process, ready when it is made. `Ledger` reads the store's receipts and waits until everything is saved.
Neither knows what is measured. Every wait has a deadline. Threading: none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtally.client import Call, Miss, StoreClient
from kvtally.core.receipts import Half, Receipt
from kvtally.errors import TransportError
from kvtally.processes import Child
from kvtally.wire.stats import StoreStats

START_S = 60.0
SETTLE_S = 60.0
POLL_S = 0.005
QUIETER = "Try again on a quieter machine."

T = TypeVar("T")


def read_state(client: StoreClient) -> StoreStats:
    return msgspec.convert(answer(client.stats()).stats, StoreStats)


def answer(call: Call[T]) -> T:
    return hit(call.wait())


def hit(result: T | Miss) -> T:
    """A miss is a matter of course for an engine; a bench cannot measure one."""
    if isinstance(result, Miss):
        raise TransportError(f"the store answered with a miss: {result.reason} {result.detail}", remedy=QUIETER)
    return result


# ---- the process


class Daemon(Child):
    """A store in a process of its own, ready when this returns."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        memory_bytes: int,
        disk: Path | None = None,
        disk_read_bytes_s: int | None = None,
        logs: Path | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.socket = str(directory / f"{name}.sock")
        command = [sys.executable, "-m", "kvtally", "store", "--socket", self.socket, "--memory", str(memory_bytes)]
        if disk is not None:
            command += ["--disk", str(disk), "--disk-size", str(2 * memory_bytes)]
        if disk_read_bytes_s is not None:
            command += ["--disk-read-limit", str(disk_read_bytes_s)]
        command += flags
        super().__init__(command, (logs or directory) / f"{name}.log", name="a store", directory=directory)
        self._client = StoreClient(self.socket, name="bench")
        with ExitStack() as undo:
            undo.callback(self.close)
            self.wait_for(self._is_connected, "a store did not start", START_S)
            undo.pop_all()

    def close(self) -> None:
        self._client.close()
        super().close()

    @property
    def state(self) -> StoreStats:
        return read_state(self._client)

    def wait_populated(self) -> None:
        """Wait until the arena is pre-faulted: the store must not do that while something is timed."""

        def is_populated() -> bool:
            state = self.state
            return state.server.populated_bytes >= state.arena.capacity_bytes

        self.wait_for(is_populated, f"an arena was not pre-faulted within {START_S:g} s", START_S)

    def _is_connected(self) -> bool:
        return not isinstance(self._client.connect(timeout_s=0.2), Miss)


class Ledger:
    """What a store says about requests: how much each reused, and whether everything of them is saved."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._client = StoreClient(daemon.socket, name="bench ledger")
        self._seen = {receipt.ticket for receipt in self._last()}

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def next_half(self, prompt_tokens: int = 0, *, timeout_s: float = SETTLE_S) -> Half:
        """Decode's half of the request that has just ended; if prompts of other lengths run too, of one this long."""
        halves: list[Half] = []

        def has_come() -> bool:
            for receipt in self._last():
                half = receipt.decode
                if half is None or receipt.ticket in self._seen:
                    continue
                if prompt_tokens in (0, half.prompt_tokens):
                    self._seen.add(receipt.ticket)
                    halves.append(half)
                    return True
            return False

        self._daemon.wait_for(has_come, f"no receipt came within {timeout_s:g} s", timeout_s, POLL_S)
        return halves[0]

    def wait_saved(self) -> int:
        """Wait until everything is saved, on disk too. The bytes saved since the store's start."""
        state = read_state(self._client)

        def is_quiet() -> bool:
            nonlocal state
            state = read_state(self._client)
            is_writing = any(client.puts for client in state.clients)
            return not is_writing and not any(tier.queued_bytes or tier.postponed for tier in state.tiers)

        self._daemon.wait_for(is_quiet, f"not everything was saved within {SETTLE_S:g} s", SETTLE_S, POLL_S)
        for tier in state.tiers:
            if tier.objects < state.arena.objects:
                what = f"tier {tier.name} has {tier.objects} of {state.arena.objects} objects and writes no more"
                raise TransportError(what, remedy="See what `kvtally stat` says about this tier.")
        return state.puts.bytes

    def _last(self) -> Sequence[Receipt]:
        return answer(self._client.receipts(last=4)).receipts


def drop_pages(place: Path) -> None:
    """Drop the page cache of a file, or of every file in a directory: then bytes from disk come from the disk."""
    for path in [place, *place.rglob("*")]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages would stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
