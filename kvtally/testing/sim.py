"""A whole cluster from a seed: stores, clients, disks and their faults on a virtual clock, deterministic to the byte.

`run(seed)` builds a random node, lets random clients save and load prompts while messages are delayed, connections
drop, processes crash and stop, the disk tears, flips and fails, and the store is killed and restarted; then it lets
everything come to rest and checks that

- no byte was ever accepted but those that somebody has committed under that name (`sim_client.Ledger`),
- nothing that was committed before a reset was served after it,
- whatever was promised and is still leased verifies, unless somebody scribbled into the arena,
- nothing was called corrupt unless something was damaged,
- nobody waits: every request on a living connection was answered within its deadline,
- nothing leaked: no lease, open put, limbo, staging or pin is left, and each arena byte has exactly one owner,
- what a tier said it had written before a crash is found again after it, unless that very object was damaged.

One seed is one run: `python -m kvtally.testing.sim SEED` replays it and prints its log.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, fields

from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.testing.sim_client import ALIGNMENT, CHUNK, Ledger
from kvtally.testing.sim_clock import Clock
from kvtally.testing.sim_node import Node
from kvtally.wire.limits import SECOND_NS

SHAPES = (
    (GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((700, 700),)),),
    (
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((900,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((6000,),)),
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=CHUNK, page_bytes=((5000,),)),
    ),
    (
        GroupSpec(kind=GroupKind.FULL, block_tokens=16, page_bytes=((1200,),)),
        GroupSpec(kind=GroupKind.SLIDING, block_tokens=16, page_bytes=((2500,),), window_tokens=100),
    ),
)


@dataclass(slots=True)
class Faults:
    """How often each fault strikes, per mille of the steps at which it could."""

    drop_connection: int = 0
    crash_client: int = 0
    stop_client: int = 0
    kill_store: int = 0
    stop_store: int = 0
    flip_disk: int = 0
    fail_disk: int = 0
    scribble: int = 0  # a stray write into resident arena bytes, as a broken process might make


class Cluster:
    """Everything that one seed draws."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock(seed)
        pick = self.clock.random
        self.faults = Faults()
        if pick.random() >= 0.1:
            self.faults = Faults(**{fault.name: pick.choice((0, 5, 20)) for fault in fields(Faults)})
        self.namespaces = [
            Namespace(
                model=f"m{n}",
                groups=pick.choice(SHAPES),
                chunk_tokens=CHUNK,
                alignment_tokens=ALIGNMENT,
                tensor_parallel=pick.choice((1, 1, 2)),
            )
            for n in range(pick.choice((1, 2)))
        ]
        self.prompts = self._make_prompts()
        self.ledger = Ledger()
        self.was_reset: set[bytes] = set()  # namespaces that anybody has begun to reset
        self.is_scribbled = False
        self.nodes: list[Node] = []
        self.nodes += [Node(self, name) for name in ("a",)]

    def _make_prompts(self) -> list[bytes]:
        """Prompts that share prefixes and diverge inside chunks and at boundaries; some shorter than a chunk."""
        pick = self.clock.random
        base = [pick.randbytes(4 * CHUNK * 6) for _ in range(2)]
        prompts = []
        for _ in range(8):
            stem = pick.choice(base)[: 4 * pick.randint(1, CHUNK * 6)]
            prompts.append(stem + pick.randbytes(4 * pick.choice((0, 0, 16, 70))))
        return prompts

    @property
    def is_damaged(self) -> bool:
        """Whether bits were flipped on any disk."""
        return any(node.is_disk_damaged for node in self.nodes)

    def play(self, steps: int) -> None:
        for node in self.nodes:
            for client in node.clients:
                self.clock.at(self.clock.soon(), client.connect)
        for _ in range(steps):
            if not self.clock.step():
                break
            for node in self.nodes:
                if self.clock.random.random() < 0.1:
                    node.check()
                node.check_waits()
        self.rest()

    def rest(self) -> None:
        """Everybody leaves, and everything heals; after the longest deadline nothing may be left but cached bytes."""
        self.faults = Faults()
        for node in self.nodes:
            for client in node.clients:
                client.die()
            node.heal()
        self.clock.run_for(300 * SECOND_NS)
        for node in self.nodes:
            node.check_rest()


def run(seed: int, steps: int = 250) -> Counter[str]:
    """Simulate one life and return what happened. Raises AssertionError if a promise was broken."""
    cluster = Cluster(seed)
    try:
        cluster.play(steps)
    except AssertionError as error:
        tail = "\n".join(cluster.clock.log[-20:])
        raise type(error)(f"seed {seed}: {error}\n{tail}") from error
    return cluster.clock.seen


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]))))  # noqa: T201
