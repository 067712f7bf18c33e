"""A storm over real processes: one store, eight clients at full load, and a seeded sequence of what can go wrong.

    calm ─▶ one after the other: kill -9 and restart the store, stop and continue it; kill -9 and replace a client, stop
    and continue some ─▶ calm again, and everything must have been given back

Its time is counted in events, and in calls that clients make between two of them: a slow machine has the same storm.

Some kills of the store are *audited*: the clients are stopped, what is on its way to the disk is let arrive, the
journal is read, and after the restart all that it said must be there. The others strike in the middle of anything.
"""

from __future__ import annotations

import heapq
import signal
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

from kvtally.client import Miss
from kvtally.core.keys import CHAIN_BYTES, ObjectKey
from kvtally.store.tiers.files import read_format
from kvtally.store.tiers.journal import compact_key, replay
from kvtally.wire.limits import MIB
from tests.chaos.processes import StoreProcess, WorkerProcess
from tests.chaos.workload import NAMESPACE, PROMPTS, asked, problem
from tests.waiting import eventually

CLIENTS = 8
# Less than what the clients save, about 45 MiB in all: objects are evicted from both, and staged.
ARENA_BYTES = 16 * MIB
DISK_BYTES = 24 * MIB
EVENTS = ("kill store", "audit store", "stop store", "kill client", "kill client", *["stop client"] * 3)


class Storm:
    def __init__(self, directory: Path, seed: int, clients: int = CLIENTS) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        options = ("--memory", str(ARENA_BYTES), "--disk-size", str(DISK_BYTES))
        self.store = StoreProcess(directory, *options, namespace=NAMESPACE)
        self.clients: list[WorkerProcess] = []
        self.fallen: list[WorkerProcess] = []
        self._numbers = count(1000 * seed)
        self._now = 0  # the number of the event
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._is_store_stopped = False
        for _ in range(clients):
            self._add_client()

    def blow(self, events: int) -> None:
        """The storm itself, from the moment when all clients are at work."""
        self._wait_for_clients()
        first = self.random.sample(EVENTS, len(EVENTS))  # each at least once, in some order
        for self._now in range(events):
            while self._later and self._later[0][0] <= self._now:
                heapq.heappop(self._later)[2]()
            match first.pop() if first else self.random.choice(EVENTS):
                case "kill store":
                    self._kill_store()
                case "audit store":
                    self._audit_store()
                case "stop store":
                    self._stop_store()
                case "kill client":
                    self._kill_client()
                case "stop client":
                    self._stop_client()
            self._let_clients_work()

    def calm(self) -> None:
        """Let everybody go on, then ask the clients to leave."""
        while self._later:
            heapq.heappop(self._later)[2]()
        for client in self.clients:
            client.go_on()
        eventually(lambda: not isinstance(self.store.probe.connect(1.0), Miss), "the store answered again")
        self._wait_for_clients()  # one that has only just begun would not hear it
        before = self._verified()
        eventually(lambda: self._verified() > before + 100, "clients found again what they save")
        codes = [client.process.end() for client in self.clients]
        assert set(codes) == {0}, [client.log.read_text() for client in self.clients]

    def close(self) -> None:
        for client in self.clients:
            client.process.kill()
        self.store.close()

    # ---- what happens

    def _kill_store(self) -> None:
        """In the middle of whatever it does; it may even be stopped."""
        self.store.process.kill()
        self._is_store_stopped = False
        self.store.start()
        self.seen["store killed"] += 1

    def _audit_store(self) -> None:
        """Kill it, and see whether all is found again that had reached the disk."""
        self._continue_store()
        eventually(lambda: self.store.stats("tiers", "0", "objects") > 0, "something was on disk")
        was_stopped = [client.process.is_stopped for client in self.clients]
        for client in self.clients:
            client.stop()
        written = self._everything_written()
        assert written
        self.store.process.kill()
        self.store.start()
        lost = written - self._found()
        assert not lost, f"{len(lost)} of {len(written)} objects that were on disk are lost after kill -9"
        for prompt in self.random.sample(range(PROMPTS), 8):
            loaded = self.store.probe.get(asked(prompt))
            assert isinstance(loaded, Miss) or not problem(prompt, loaded), problem(prompt, loaded)
        for client, stopped in zip(self.clients, was_stopped, strict=True):
            if not stopped:
                client.go_on()
        self.seen["store audited"] += 1
        self.seen["objects audited"] += len(written)

    def _everything_written(self) -> set[bytes]:
        """The objects on disk, as the journal says when nothing is on its way there any more."""
        eventually(lambda: self.store.stats("tiers", "0", "queued_bytes") == 0, "everything queued was written")
        eventually(lambda: self.store.stats("server", "unwritten_jobs") == 0, "everything evicted was removed")
        journal = (self.store.disk / "journal").read_bytes()
        form = read_format(self.store.disk)
        assert form is not None
        written = replay(journal, form.id, DISK_BYTES).objects.keys()
        assert len(written) == self.store.stats("tiers", "0", "objects"), "journal and store disagree"
        return set(written)

    def _found(self) -> set[bytes]:
        """The objects that the store says it has."""
        found = set()
        for prompt in range(PROMPTS):
            answer = self.store.probe.lookup(asked(prompt)).wait()
            assert not isinstance(answer, Miss), answer
            for group, bitmap in enumerate(answer.presence):
                for index in range(len(asked(prompt).ends)):
                    if bitmap[index // 8] >> index % 8 & 1:
                        chain = asked(prompt).chains[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES]
                        found.add(compact_key(ObjectKey(NAMESPACE.digest, chain, group, 0)))
        return found

    def _stop_store(self) -> None:
        if self._is_store_stopped:
            return
        self.store.process.signal(signal.SIGSTOP)
        self._is_store_stopped = True
        self.seen["store stopped"] += 1
        self._in(self.random.choice((1, 1, 3)), self._continue_store)

    def _continue_store(self) -> None:
        if self._is_store_stopped:
            self._is_store_stopped = False
            self.store.process.signal(signal.SIGCONT)

    def _kill_client(self) -> None:
        victim = self.clients.pop(self.random.randrange(len(self.clients)))
        victim.process.kill()
        self.fallen.append(victim)
        self._add_client()
        self.seen["client killed"] += 1

    def _stop_client(self) -> None:
        client = self.random.choice(self.clients)
        client.stop()
        self.seen["client stopped"] += 1
        self._in(self.random.choice((1, 2, 8)), lambda: self._continue_client(client))

    def _continue_client(self, client: WorkerProcess) -> None:
        if client in self.clients:
            client.go_on()

    def _add_client(self) -> None:
        self.clients.append(WorkerProcess(self.store, next(self._numbers)))

    def _wait_for_clients(self) -> None:
        eventually(lambda: all(client.lines("sum") for client in self.clients), "all clients were at work")

    # ---- time

    def _in(self, events: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now + events, next(self._numbers), action))

    def _let_clients_work(self) -> None:
        """Until those that are not stopped have made some more calls; while the store is stopped, each takes long."""
        running = [client for client in self.clients if not client.process.is_stopped]
        wanted = self.random.randint(1, 10) if self._is_store_stopped else self.random.randint(10, 400)

        def calls() -> int:
            return sum(client.seen()["calls"] for client in running)

        target = calls() + wanted
        eventually(lambda: not running or calls() >= target, f"{len(running)} clients made {wanted} more calls")

    def _verified(self) -> int:
        return sum(client.seen()["get verified"] for client in self.clients)
