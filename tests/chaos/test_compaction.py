"""kill -9 in the middle of a rewrite of the journal: the old one or the new one is found, never half of one."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path

import pytest

from kvtally.client import Miss
from kvtally.core.keys import ROOT_CHAIN
from kvtally.store.tiers.files import read_format
from kvtally.store.tiers.journal import replay
from kvtally.wire.limits import MIB
from kvtally.wire.messages import PutObject
from tests.chaos.processes import StoreProcess
from tests.chaos.single import CHUNK, NAMESPACE, asked
from tests.waiting import HANG_S

ROUNDS = 3
DISK_BYTES = 16 * MIB  # of objects of one byte: 4096


class Killer:
    """Kills the store as soon as it sees a new journal being written."""

    def __init__(self, store: StoreProcess) -> None:
        self._store = store
        self._found = store.disk / "journal.new"
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def join(self) -> None:
        self._given_up.set()
        self._thread.join(HANG_S)

    def _wait(self) -> None:
        while not self._found.exists():
            if self._given_up.is_set():
                return
        self._store.process.kill()


@pytest.mark.slow
def test_a_kill_while_the_journal_is_rewritten(tmp_path: Path) -> None:
    store = StoreProcess(tmp_path, "--memory", "32MiB", "--disk-size", str(DISK_BYTES), namespace=NAMESPACE)
    numbers = count()
    saved: list[int] = []
    unfinished = 0
    try:
        for _ in range(ROUNDS):
            killer = Killer(store)
            try:
                while store.process.child.poll() is None:
                    batch = [next(numbers) for _ in range(64)]
                    statuses = store.probe.put([(tiny(number), tiny_bytes(number)) for number in batch])
                    saved += batch if not isinstance(statuses, Miss) else []
            finally:
                killer.join()
            unfinished += (store.disk / "journal.new").exists()
            written = journal_says(store)
            assert len(written) > 1000
            store.start()
            assert store.stats("tiers", "0", "objects") == len(written)
            assert not (store.disk / "journal.new").exists()
            for number in saved[-100:]:
                found = store.probe.get(asked(number))
                assert isinstance(found, Miss) or found == {(0, 0): tiny_bytes(number)}
        print(f"{unfinished} of {ROUNDS} rewrites were left unfinished")
    finally:
        store.close()


def tiny(number: int) -> PutObject:
    return PutObject(asked(number).chains, ROOT_CHAIN, 0, CHUNK, 0, 0, 1)


def tiny_bytes(number: int) -> bytes:
    return bytes([number & 255])


def journal_says(store: StoreProcess) -> set[bytes]:
    form = read_format(store.disk)
    assert form is not None
    return set(replay((store.disk / "journal").read_bytes(), form.id, DISK_BYTES).objects)
