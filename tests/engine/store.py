"""A real store for engine tests: a process of its own with a disk directory, restarted at will."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtally.client import Miss, StoreClient
from kvtally.core.keys import ROOT_CHAIN
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Half
from kvtally.store.tiers.files import read_format
from kvtally.store.tiers.journal import KEY, pieces_of, replay
from kvtally.testing.conformance import ConnectorUnderTest
from kvtally.wire.messages import PutObject, PutStatus

DEADLINE_S = 60.0


# A store whose leases end soon. No setting makes one: a lease must outlive the longest load.
IMPATIENT = """
import sys
from kvtally.config import load
from kvtally.store.server import run
from kvtally.wire.limits import Limits
names = ["store.socket", "store.memory", "store.disk", "store.disk_size"]
sys.exit(run(load(flags=dict(zip(names, sys.argv[2:9:2]))).store(), limits=Limits(lease_ns=int(sys.argv[9]))))
"""


def _die_with_the_test() -> None:
    """Even a test run that is itself killed leaves no store behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class StoreProcess:
    """Each `start` may have other sizes, another disk directory or shorter leases; the socket stays."""

    def __init__(self, directory: Path, *, memory: str = "256MiB", disk_size: str = "2GiB") -> None:
        self.socket = str(directory / "s.sock")
        self._directory = directory
        self._log = directory / "store.log"
        self._sizes = (memory, disk_size)
        self.start()

    def start(self, *, memory: str = "", disk: str = "disk", disk_size: str = "", lease_ns: int = 0) -> None:
        self.disk = self._directory / disk
        settings = [
            *("--socket", self.socket, "--memory", memory or self._sizes[0]),
            *("--disk", str(self.disk), "--disk-size", disk_size or self._sizes[1]),
        ]
        command = ["-m", "kvtally", "store", *settings]
        if lease_ns:
            command = ["-c", IMPATIENT, *settings, str(lease_ns)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=os.environ, preexec_fn=_die_with_the_test
            )
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

    def kill(self) -> None:
        """kill -9; also of one that is stopped."""
        self._client.close()
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for_engine(self, ranks: int = 1) -> None:
        """Until all of an engine is connected; it is somewhat later than the store is up."""
        names = ["vllm scheduler", *(f"vllm worker {rank}" for rank in range(ranks))]

        def is_there() -> bool:
            clients = [client["client"] for client in self.stats()["clients"]]
            return all(any(client.startswith(name) for client in clients) for name in names)

        self._wait(is_there, "the engine did not connect")

    def write_out(self) -> None:
        """Wait until everything is on disk."""
        self._wait(lambda: self.stats()["tiers"][0]["queued_bytes"] == 0, "the write-behind queue did not empty")

    def receipt(self, ticket: str) -> Half:
        """Decode's half."""
        found = self._client.receipts(ticket, wait_ms=5_000).wait()
        assert not isinstance(found, Miss), found
        half = found.receipts[0].decode if found.receipts else None
        assert half is not None, ticket
        return half

    def objects(self, rank: int) -> list[bytes]:
        """Of one rank, as they are on disk."""
        form = read_format(self.disk)
        assert form is not None
        held = replay((self.disk / "journal").read_bytes(), form.id, 1 << 40).objects
        data = (self.disk / "data").read_bytes()
        return [
            b"".join(data[offset : offset + length] for offset, length in pieces_of(place))
            for key, place in held.items()
            if KEY.unpack(key)[2] == rank
        ]

    def spoil_arena(self, objects: Iterable[bytes] | None = None) -> int:
        """Flip a bit in each of these objects, or in everything, behind everybody's back; how many bits."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        path = next(path for path in files if "kvtally-arena" in str(path.readlink()))
        return _flip(path, objects)

    def spoil_disk(self, objects: Iterable[bytes] | None = None) -> int:
        """The same on disk; while the store is down."""
        return _flip(self.disk / "data", objects)

    def restart(self) -> None:
        """Once everything is on disk."""
        self.write_out()
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
            "receipt_tokens": sum(half.loaded_tokens for half in halves),
            "receipt_bytes": sum(half.moved_bytes for half in halves),
        }

    def connector(self, *, wait_ms: int = 30_000) -> ConnectorUnderTest:
        """By default it waits as long as a busy machine may take, and loads what a tiny model computes faster: what is
        tested is neither its patience nor its judgement."""
        settings = {"store": self.socket, "autostart": False, "wait_ms": wait_ms, "always_load": True}
        config = {"kv_connector": "KVTally", "kv_role": "kv_both", "kv_connector_extra_config": settings}
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


def _flip(path: Path, objects: Iterable[bytes] | None) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        places = range(0, len(memory), 4096) if objects is None else [memory.find(each[:4096]) for each in objects]
        found = [place for place in places if place >= 0]
        for place in found:
            memory[place] ^= 0x10
    return len(found)


@contextmanager
def hoarder(socket: str) -> Iterator[None]:
    """Half of the arena, as much as one client may have, is being written to."""
    with StoreClient(socket) as client:
        assert not isinstance(client.connect(DEADLINE_S), Miss)
        assert client.arena is not None
        length_bytes = client.arena.size_bytes // 16
    group = GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((length_bytes // 16,),))
    namespace = Namespace(model="hoarder", groups=(group,), chunk_tokens=256, alignment_tokens=16)
    chains = [os.urandom(32) for _ in range(8)]
    with StoreClient(socket, namespace=namespace) as client:
        assert not isinstance(client.connect(DEADLINE_S), Miss)
        puts = client.put_begin([PutObject(chain, ROOT_CHAIN, 0, 256, 0, 0, length_bytes) for chain in chains]).wait()
        assert not isinstance(puts, Miss)
        assert {put.status for put in puts} == {PutStatus.WRITE}
        yield
