"""A real client in conversation with an impostor: it must never raise, never hang, and never step outside the arena."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from kvtally.client import Call, Lease, Miss, Put, ReadSlot, question
from kvtally.core.keys import CHAIN_BYTES, ROOT_CHAIN
from kvtally.testing.copying import CopyingClient
from kvtally.wire.messages import PutObject, PutStatus
from tests.chaos.processes import Eager
from tests.fuzz.hostile import NAMESPACES, Dice
from tests.fuzz.impostor import Impostor

NAMESPACE = NAMESPACES[0]
QUESTION = question(NAMESPACE, range(200))
TIMEOUT_S = 0.002
ROUNDS = 6  # of reading and writing, for one call
OPERATIONS = (
    *("hold", "hold", "lookup", "slots", "slots", "read", "read", "begin", "begin", "write", "end", "release"),
    *("stats", "receipts", "ping", "adopt", "put", "get"),
)


class Talk:
    def __init__(self, seed: int, path: Path) -> None:
        self.random = Dice(seed)
        self.impostor = Impostor(path, self.random, self.random.choice((0.0, 0.01, 0.05, 0.2)))
        self.client = CopyingClient(str(path), namespace=NAMESPACE, timeout_s=TIMEOUT_S, jitter=Eager())
        self.seen: Counter[str] = Counter()
        self._leases: list[Lease] = []
        self._slots: list[ReadSlot] = []
        self._puts: list[Put] = []

    def close(self) -> None:
        self.client.close()
        self.impostor.close()

    def step(self) -> None:
        name = self.random.choice(OPERATIONS)
        outcome = self._do(name)
        if isinstance(outcome, Call):
            call: Call[object] = outcome
            for _ in range(ROUNDS):
                if call.result is not None:
                    break
                self.impostor.pump()
                self.client.poll()
            outcome = call.result if call.result is not None or self.random.random() < 0.5 else call.wait()
        self.seen[f"{name} {outcome.reason if isinstance(outcome, Miss) else type(outcome).__name__}"] += 1
        self._keep(outcome)

    def _do(self, name: str) -> object:
        client, random = self.client, self.random
        item = PutObject(QUESTION.chains[:CHAIN_BYTES], ROOT_CHAIN, 0, 64, 0, 0, random.choice((1, 5000)))
        match name:
            case "hold":
                return client.hold(QUESTION)
            case "lookup":
                return client.lookup(QUESTION)
            case "slots" if self._leases:
                return client.slots(random.choice(self._leases))
            case "read" if self._slots:
                slot = random.choice(self._slots)
                return client.read(slot, bytearray(slot.length_bytes), verify=random.choice((None, True, False)))
            case "begin":
                return client.put_begin([item])
            case "write" if self._puts:
                put = random.choice(self._puts)
                return client.write(put, bytes(put.length_bytes)) if put.status is PutStatus.WRITE else None
            case "end" if self._puts:
                return client.put_end([(random.choice(self._puts), 5)], [random.choice(self._puts)])
            case "release" if self._leases:
                return client.release([self._leases.pop()])
            case "adopt" if self._leases:
                return client.adopt(self._leases[-1].share())
            case "stats":
                return client.stats()
            case "receipts":
                return client.receipts("t")
            case "ping":
                return client.ping()
            case "put":
                return client.put([(item, bytes(item.length_bytes))])  # nobody answers: it must come back by itself
            case "get":
                return client.get(QUESTION)
        return None

    def _keep(self, outcome: object) -> None:
        if isinstance(outcome, Lease):
            self._leases.append(outcome)
            self.client.wait_staged(outcome, timeout_s=0.0)
        elif isinstance(outcome, list):
            self._slots += [slot for slot in outcome if isinstance(slot, ReadSlot)]
            self._puts += [put for put in outcome if isinstance(put, Put)]
        del self._leases[:-6], self._slots[:-6], self._puts[:-6]


def talk(seed: int, steps: int) -> Counter[str]:
    """One conversation; what came of it, and how many replies the impostor made (`replies`)."""
    with tempfile.TemporaryDirectory() as directory:
        conversation = Talk(seed, Path(directory, "s.sock"))
        try:
            for _ in range(steps):
                conversation.step()
            conversation.seen["replies"] = conversation.impostor.replies
        except BaseException as error:
            error.add_note(f"again with: python -m tests.fuzz.talk {seed} {steps}")
            raise
        finally:
            conversation.close()
    return conversation.seen


if __name__ == "__main__":
    print(dict(talk(int(sys.argv[1]), int(sys.argv[2]))))
