"""A real store for engine tests: a process of its own with a disk directory, restarted at will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtally.client import Miss, StoreClient
from kvtally.testing.conformance import ConnectorUnderTest

DEADLINE_S = 60.0


class StoreProcess:
    def __init__(self, directory: Path, *, memory: str = "1GiB", disk_size: str = "2GiB") -> None:
        self.socket = str(directory / "s.sock")
        self._log = directory / "store.log"
        disk = str(directory / "disk")
        self._command = [
            *(sys.executable, "-m", "kvtally", "store", "--socket", self.socket),
            *("--memory", memory, "--disk", disk, "--disk-size", disk_size),
        ]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=os.environ)
        self._client = StoreClient(self.socket, name="test")
        self._wait(lambda: not isinstance(self._client.connect(0.2), Miss), "the store did not start")

    def stop(self) -> None:
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            raise

    def restart(self) -> None:
        """Once everything is on disk."""
        self._wait(lambda: self.stats()["tiers"][0]["queued_bytes"] == 0, "the write-behind queue did not empty")
        self.stop()
        self.start()

    def stats(self) -> dict[str, Any]:
        stats = self._client.stats().wait()
        assert not isinstance(stats, Miss), stats
        return stats.stats

    def counters(self) -> dict[str, float]:
        """Saved bytes, loaded tokens, bytes read from disk; receipts and what they say. They are filed a bit later
        than requests are answered: this waits until no more come in."""
        latest: dict[str, float] = {}

        def is_settled() -> bool:
            previous = dict(latest)
            latest.update(self._counters())
            time.sleep(0.1)
            return previous == latest

        self._wait(is_settled, "the store's counters do not come to rest")
        return latest

    def _counters(self) -> dict[str, float]:
        stats = self.stats()
        receipts = self._client.receipts(last=10_000).wait()
        assert not isinstance(receipts, Miss), receipts
        halves = [receipt.decode for receipt in receipts.receipts if receipt.decode is not None]
        return {
            "saved": stats["puts"]["bytes"],
            "loaded": stats["lookups"]["hit_tokens"],
            "disk": stats["tiers"][0]["read_bytes"],
            "receipts": len(halves),
            "receipt_tokens": sum(half.tokens_host + half.tokens_disk for half in halves),
            "receipt_bytes": sum(half.moved_bytes for half in halves),
        }

    def connector(self) -> ConnectorUnderTest:
        config = {
            "kv_connector": "KVTally",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": self.socket, "autostart": False},
        }
        return ConnectorUnderTest(
            name="KVTally",
            kv_transfer_config=config,
            counters=self.counters,
            restart=self.restart,
            hit_share=1.0,
        )

    def _wait(self, is_done: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_done():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, problem
            time.sleep(0.02)
