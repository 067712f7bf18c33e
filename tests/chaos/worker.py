"""One client process of a chaos run: saves and loads at full load until SIGTERM, and writes down what it saw.

`python -m tests.chaos.worker SOCKET SEED REPORT`. The report is one JSON object per line: `wrong` for the one thing
that must never happen, and every now and then `sum`, because the process may be killed at any moment. A call that never
came back would show in sums that stop growing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from random import Random

from kvtally.client import Miss
from kvtally.testing.copying import CopyingClient
from tests.chaos.workload import DEPTH, NAMESPACE, PROMPTS, asked, objects, problem, right_bytes

SUM_EVERY_S = 0.1
TIMEOUTS_S = (0.05, 0.25, 1.0, 5.0)  # too short for a store that is stopped, some for a slow machine, too


class Worker:
    def __init__(self, socket: str, seed: int, report: str) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.stopping = False
        self.report = open(report, "a", buffering=1)  # noqa: SIM115 - for as long as the process lives
        self.client = CopyingClient(socket, namespace=NAMESPACE, name=f"worker-{seed}")

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        self.client.connect(10.0)
        self.tell(kind="ready")
        next_sum = 0.0
        while not self.stopping:
            self.step()
            if time.monotonic() > next_sum:
                next_sum = time.monotonic() + SUM_EVERY_S
                self.sum()
        self.client.close()
        self.sum()

    def step(self) -> None:
        prompt, timeout_s = self.random.randrange(PROMPTS), self.random.choice(TIMEOUTS_S)
        if self.client.session is None:
            self.client.connect(timeout_s)
            self.seen["reconnecting"] += 1
        elif self.random.random() < 0.5:
            self.save(prompt, timeout_s)
        else:
            self.load(prompt, timeout_s)
        self.seen["calls"] += 1

    def save(self, prompt: int, timeout_s: float) -> None:
        wanted = objects(prompt, self.random.randint(1, DEPTH))
        items = [(item, right_bytes(item.chain, item.group)) for item in wanted]
        statuses = self.client.put(items, timeout_s=timeout_s)
        if isinstance(statuses, Miss):
            self.seen[f"put {statuses.reason}"] += 1
        else:
            self.seen.update(f"put {status.name}" for status in statuses)

    def load(self, prompt: int, timeout_s: float) -> None:
        found = self.client.get(asked(prompt), timeout_s=timeout_s)
        if isinstance(found, Miss):
            self.seen[f"get {found.reason}"] += 1
            return
        self.seen["get verified"] += len(found)
        if wrong := problem(prompt, found):
            self.tell(kind="wrong", what=wrong)

    def sum(self) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        self.tell(kind="sum", seen=self.seen, generation=self.client.generation, descriptors=descriptors)

    def tell(self, **line: object) -> None:
        self.report.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    Worker(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run()
