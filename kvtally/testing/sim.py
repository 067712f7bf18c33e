"""A whole cluster from a seed: stores, clients, disks and their faults on a virtual clock, deterministic to the byte.

`run(seed)` builds one to three machines. Random clients save prompts, load them, and hand them over to one another, on
one machine or between two, while messages are delayed, connections drop, links break at one end or at both, machines
cannot reach each other, processes crash and stop, disks tear, flip and fail, and stores are killed and restarted. Then
it lets everything come to rest and checks that

1. no byte was ever accepted but those that somebody has committed under that name (`sim_client.Ledger`), a promise
   covers what its hit needs, and what is leased verifies unless somebody scribbled into the arena,
2. nothing was called corrupt unless something was damaged,
3. nobody waits: every request on a living connection was answered within its deadline,
4. nothing leaked: no lease, open put, limbo, staging, pin, send, question, offer or belief is left, each arena byte has
   exactly one owner, and stores that nobody asks fall silent,
5. what lies whole in one store is found through any other one that is told whom to ask (`Cluster.probe`),
6. nothing that was committed before a reset is served after it by the store that was reset,
7. the sources of what was reused add up, and a receipt says `proved` only if every promised byte was accepted,
8. what a disk said it had written before a crash is found again after it, unless that very object was damaged.

One seed is one run: `python -m kvtally.testing.sim SEED` replays it and prints what happened, with every message that
stores sent to each other.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, fields

from msgspec import structs

from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.core.receipts import Half, Receipt, Verdict
from kvtally.testing.sim_client import ALIGNMENT, CHUNK, Client, Ledger, Load, boundaries
from kvtally.testing.sim_clock import Clock
from kvtally.testing.sim_network import Network
from kvtally.testing.sim_node import Node
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import Lookup

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

STEPS = {1: 300, 2: 900, 3: 1200}  # events of one life, by the number of nodes
MOST_MESSAGES = (
    1_000  # between stores, while nobody asks them: they follow what they were offered, and give leases back
)
PROBES = 4  # lookups after everything has come to rest, each of which must find what there is
DEAD = "tcp://dead:7400"  # nobody listens there
STRANGER = "tcp://stranger:7400"  # not on the list of peers


@dataclass(slots=True)
class Faults:
    """How often each fault strikes, per mille of the steps at which it could."""

    drop_connection: int = 0
    crash_client: int = 0
    stop_client: int = 0
    kill_store: int = 0
    stop_store: int = 0
    cut: int = 0  # a connection between stores ends, and both ends hear of it
    half_open: int = 0  # only one end hears of it
    partition: int = 0
    flip_disk: int = 0
    fail_disk: int = 0
    scribble: int = 0  # a stray write into resident arena bytes, as a broken process might make


class Cluster:
    """Everything that one seed draws. One machine alone is a cluster, too."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock(seed)
        pick = self.clock.random
        self.faults = Faults()
        if pick.random() >= 0.1:
            often = {fault.name: pick.choice((0, 5, 20)) for fault in fields(Faults)}
            if pick.random() < 0.5:  # what damages bytes excuses much, so it must not always be there
                often |= {"flip_disk": 0, "scribble": 0}
            self.faults = Faults(**often)
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
        self.receipts: dict[str, Receipt] = {}
        self._tickets = 0
        self.network = Network(self.clock)
        self.network.faults = self.faults
        names = "abc"[: pick.choice((1, 1, 2, 2, 3))]
        self.nodes: list[Node] = []
        for name in names:
            node = Node(self, name)
            self.nodes.append(node)
            self.network.nodes[node.address] = node

    def _make_prompts(self) -> list[bytes]:
        """Prompts that share prefixes and diverge inside chunks and at boundaries; some shorter than a chunk."""
        pick = self.clock.random
        base = [pick.randbytes(4 * CHUNK * 6) for _ in range(2)]
        prompts = []
        for _ in range(8):
            stem = pick.choice(base)[: 4 * pick.randint(1, CHUNK * 6)]
            prompts.append(stem + pick.randbytes(4 * pick.choice((0, 0, 16, 70))))
        return prompts

    def may_ask(self, address: str) -> bool:
        """The list of peers, the same on every node."""
        return address != STRANGER

    def prompt_at(self, node: Node) -> bytes:
        """A prompt to be computed here. Each has its home, where it is computed most of the time."""
        pick = self.clock.random
        if pick.random() < 0.2:
            return pick.choice(self.prompts)
        homes = self.prompts[self.nodes.index(node) :: len(self.nodes)]
        return pick.choice(homes)

    def source_of(self, prompt: bytes) -> str:
        """The store that probably has this prompt, or another one, or none."""
        pick = self.clock.random
        if pick.random() < 0.7:
            return self.nodes[self.prompts.index(prompt) % len(self.nodes)].address
        return pick.choice((DEAD, STRANGER)) if pick.random() < 0.1 else pick.choice(self.nodes).address

    def new_ticket(self) -> str:
        self._tickets += 1
        return f"t{self._tickets}"

    def filed(self, ticket: str, half: Half) -> None:
        """A store has taken a half. `proved` must mean that every promised byte was accepted."""
        known = self.receipts.get(ticket, Receipt(ticket=ticket))
        receipt = structs.replace(known, **{half.role.value: half})
        self.receipts[ticket] = receipt
        if receipt.decode is not None and receipt.prefill is not None:
            self.clock.seen[f"receipt:{receipt.verdict}"] += 1
            if receipt.verdict is Verdict.PROVED:
                assert receipt.decode.verified and receipt.decode.reused_tokens >= receipt.prefill.saved_tokens

    @property
    def is_damaged(self) -> bool:
        """Whether bits were flipped on any disk."""
        return any(node.is_disk_damaged for node in self.nodes)

    def play(self) -> None:
        for node in self.nodes:
            for client in node.clients:
                self.clock.at(self.clock.soon(), client.connect)
        for _ in range(STEPS[len(self.nodes)]):
            if not self.clock.step():
                break
            for node in self.nodes:
                if self.clock.random.random() < 0.1:
                    node.check()
                node.check_waits()
        self.rest()

    def rest(self) -> None:
        """Everybody leaves, and everything heals; after the longest deadline nothing may be left but cached bytes."""
        self.faults = self.network.faults = Faults()
        self.network.heal()
        for node in self.nodes:
            for client in node.clients:
                client.die()
            node.heal()
        messages = self.network.messages
        self.clock.run_for(300 * SECOND_NS)
        said = self.network.messages - messages
        assert said <= MOST_MESSAGES, f"stores that nobody asks have sent {said} messages"
        for node in self.nodes:
            node.check_rest()
        if len(self.nodes) > 1:
            for number in range(PROBES):
                self.probe(f"probe{number}")
            self.clock.run_for(30 * SECOND_NS)
            for node in self.nodes:
                node.check_rest()

    def probe(self, name: str) -> None:
        """What lies whole in one store is found through any other one that is told whom to ask, and verifies."""
        pick = self.clock.random
        here, there = pick.sample(self.nodes, 2)
        namespace = pick.choice(self.namespaces)
        ends, chains = boundaries(pick.choice(self.prompts))
        request = Lookup(5, b"".join(chains), ends, ends[-1] if ends else 0, ALIGNMENT, hold=True, source=there.address)
        expected = [0]
        answers: list[Load] = []

        def ask(client: Client) -> None:
            if answers:
                return
            hits = [node.hit_of(namespace, request) for node in (here, there)]
            is_reset = namespace.digest in self.was_reset  # perhaps each tells the other first to forget it all
            room = min(node.arena_bytes for node in (here, there)) // 2
            expected[0] = 0 if is_reset else max(hits)[0]
            if max(hits)[1] > room or self.is_damaged or self.is_scribbled:
                expected[0] = 0
            client.fetch(request, chains, list(range(namespace.ranks)), answers.append)

        client = Client(here, name, namespace, ask)
        here.clients.append(client)
        client.connect()
        self.clock.run_for(20 * SECOND_NS)
        client.die()
        here.clients.remove(client)
        assert len(answers) == 1, f"{name} at {here.name} got {len(answers)} answers"
        load = answers[0]
        self.clock.seen["probed" if expected[0] else "probed_nothing"] += 1
        self.clock.seen["probe_pulled"] += load.sources[1] > 0
        got = f"{load.end_tokens} tokens ({load.reason or 'no reason'})"
        assert load.end_tokens >= expected[0], f"{here.name} asked {there.name} and got {got} of {expected[0]}"
        assert load.is_verified or not load.end_tokens or not expected[0], f"{name} at {here.name} did not verify"


def run(seed: int) -> Counter[str]:
    """Simulate one life and return what happened. Raises AssertionError if a promise was broken."""
    cluster = Cluster(seed)
    try:
        cluster.play()
    except AssertionError as error:
        tail = "\n".join(cluster.clock.log[-20:])
        raise type(error)(f"seed {seed}: {error}\n{tail}") from error
    return cluster.clock.seen


def main() -> None:
    cluster = Cluster(int(sys.argv[1]))
    cluster.clock.is_verbose = True
    try:
        cluster.play()
    finally:
        print("\n".join(cluster.clock.log))  # noqa: T201
    print(dict(cluster.clock.seen))  # noqa: T201


if __name__ == "__main__":
    main()
