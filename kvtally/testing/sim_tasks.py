"""What simulated clients do: save, load, reset, and hand a prompt over from one client to another.

    prefill at A ──Lookup(deliver=B)──▶ saves chunk after chunk ──▶ files its half, or withdraws the promise
       └─ at some moment: Promise ──▶ decode at B ──Lookup(source=A, ticket, until_tokens)──▶ loads, files its half

A prefill may die in the middle, and may be withdrawn. Decode copies every rank and verifies it, so that a receipt which
says `proved` can be held against what was really accepted. Owns the choice of tasks; `sim_client` carries them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtally.core.receipts import Half, Role
from kvtally.store.peers import ASK_NS
from kvtally.testing.sim_client import ALIGNMENT, TRAVEL_NS, Client, Load, boundaries
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import Done, Lookup, MissReason, ReceiptFile, Reply

if TYPE_CHECKING:
    from kvtally.testing.sim_node import Node


def choose(client: Client) -> None:
    """The client is free: let it do something."""
    node, cluster, clock, pick = client.node, client.cluster, client.clock, client.clock.random
    if clock.strikes(cluster.faults.kill_store):
        node.kill_store()
    elif clock.strikes(cluster.faults.stop_store):
        node.stop_store(pick.choice((SECOND_NS // 10, 3 * SECOND_NS, 12 * SECOND_NS)))
        client.finish()
    elif pick.random() < 0.01:
        client.reset()
    elif promise := node.take_promise(client.namespace.digest):
        decode(client, promise)
    elif pick.random() < 0.15:
        Prefill(client, cluster.prompt_at(node), pick.choice(cluster.nodes)).begin()
    elif pick.random() < 0.5:
        client.save(cluster.prompt_at(node))
    else:
        client.load(pick.choice(cluster.prompts))


class Promise(NamedTuple):
    """What decode is told."""

    ticket: str
    prompt: bytes
    namespace: bytes
    source: str
    until_tokens: int


class Prefill:
    """One prefill, by one client."""

    def __init__(self, client: Client, prompt: bytes, decode: Node) -> None:
        pick = client.clock.random
        self._client, self._prompt, self._decode = client, prompt, decode
        self._ends, self._chains = boundaries(prompt)
        tokens = len(prompt) // 4
        self._promised = max((end for end in self._ends if end < tokens), default=0)
        self._ticket = client.cluster.new_ticket()
        self._tells_at = pick.randrange(len(self._ends) + 1)  # boundaries that are saved before decode is told
        self._withdraws_at = pick.randrange(len(self._ends) + 1) if pick.random() < 0.2 else -1

    def begin(self) -> None:
        if not self._promised:
            self._client.finish()
            return
        is_offered = self._client.clock.random.random() < 0.5
        self._client.clock.seen["offered"] += is_offered
        request = Lookup(
            9,
            b"".join(self._chains),
            self._ends,
            self._promised,
            ALIGNMENT,
            ticket=self._ticket,
            deliver=self._decode.address if is_offered else "",
        )
        self._client.ask(request, lambda reply: self._next(0), within_ns=ASK_NS + TRAVEL_NS)

    def _next(self, index: int) -> None:
        """So many boundaries are saved."""
        client = self._client
        if index == self._tells_at:
            own = client.node.address
            source = own if self._decode is not client.node or client.clock.random.random() < 0.5 else ""
            promise = Promise(self._ticket, self._prompt, client.namespace.digest, source, self._promised)
            self._decode.promises.append(promise)
        if index == self._withdraws_at:
            self._file(MissReason.LIMIT)
        elif index == len(self._ends):
            self._file("")
        else:
            objects = client.objects(self._ends, self._chains, index, all_states=True)
            client.put(objects, lambda is_whole: self._next(index + 1) if is_whole else self._file(MissReason.LIMIT))

    def _file(self, reason: str) -> None:
        client = self._client
        client.clock.seen["withdrawn" if reason else "promised"] += 1
        half = Half(
            role=Role.PREFILL,
            prompt_tokens=len(self._prompt) // 4,
            saved_tokens=0 if reason else self._promised,
            chain=b"" if reason else self._chains[self._ends.index(self._promised)],
            reason=reason,
        )
        _file(client, self._ticket, half)


def decode(client: Client, promise: Promise) -> None:
    """Load what was promised, wherever it lies."""
    pick = client.clock.random
    ends, chains = boundaries(promise.prompt)
    request = Lookup(
        5,
        b"".join(chains),
        ends,
        len(promise.prompt) // 4 - 1,
        ALIGNMENT,
        wait_ms=pick.choice((0, 100, 1000, 2000)),
        hold=True,
        early=pick.random() < 0.5,
        source=promise.source,
        ticket=promise.ticket,
        until_tokens=promise.until_tokens,
    )
    ranks = list(range(client.namespace.ranks))
    client.fetch(request, chains, ranks, lambda load: _decoded(client, promise, load))


def _decoded(client: Client, promise: Promise, load: Load) -> None:
    disk, peer, pool = load.sources
    reused = load.end_tokens if load.is_verified else 0
    half = Half(
        role=Role.DECODE,
        prompt_tokens=len(promise.prompt) // 4,
        tokens_host=reused - disk - peer - pool if reused else 0,
        tokens_disk=disk if reused else 0,
        tokens_peer=peer if reused else 0,
        tokens_pool=pool if reused else 0,
        computed_tokens=len(promise.prompt) // 4 - reused,
        verified=load.is_verified,
        reason=load.withdrawn or load.reason,
    )
    assert min(half.tokens_host, half.computed_tokens) >= 0 and half.reused_tokens == reused, f"sources: {half.sources}"
    assert reused >= promise.until_tokens or half.reason, f"{reused} of {promise.until_tokens} tokens, without a reason"
    client.clock.seen["decode:withdrawn"] += bool(load.withdrawn)
    _file(client, promise.ticket, half)


def _file(client: Client, ticket: str, half: Half) -> None:
    def filed(reply: Reply) -> None:
        assert isinstance(reply, Done), reply
        client.cluster.filed(ticket, half)
        client.finish()

    client.ask(ReceiptFile(10, ticket, half), filed)
