"""Simulated traffic for the choice of a prefill instance: engines, stores and links as simple as they can be. No clock.

    arrival ─▶ the rule picks an instance ─▶ what another store has is pulled ─▶ queue ─▶ computed ─▶ first token
                                                                                                       │
    the next turn of the conversation, a while after the answer ◀──────────────────────────────────────┘

An engine computes one prompt after the other. A store drops what was unused for longest. A pull occupies the links of
both stores, and happens only where it is faster than computing, as a store would weigh it. The rule knows what a router
knows: the prefix map, what it sent where, and what answers and receipts told it. It does not know what was dropped.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from kvtally.core.receipts import Half, Role
from kvtally.core.routing import Candidate, Choice, Held, PrefixMap, Print, Work
from kvtally.router.stores import NOT_PULLED, Pulls, computed_bytes, computed_instead, pull_bytes_s

REQUEST_S = 0.005  # what each prompt takes beside computing
PULL_S = 0.002
Rule = Callable[[Sequence[Candidate], dict[str, Held], int], Choice | None]
Segment = tuple[str, int]  # a part of a prompt: its name, its bytes


@dataclass(frozen=True)
class Talk:
    """A conversation: a text, then one message more in each turn."""

    begin_s: float
    segments: list[Segment]
    pauses_s: list[float]


@dataclass(frozen=True)
class Cluster:
    """What is drawn for one case."""

    rates: list[float]  # of each engine, bytes/s
    stores: list[int]  # of each engine
    pull_bytes_s: float
    room_bytes: float  # of each store
    talks: list[Talk]


def drawn(case: int, traffic: int, requests: int) -> Cluster:
    """Cluster number `case`. `traffic` changes only who comes when."""
    draw = Random(case)
    engines = draw.randint(2, 5)
    base = draw.choice([10_000, 36_000, 100_000])
    spread = draw.choice([1, 1, 1.5, 3])
    rates = [base * draw.uniform(1, spread) for _ in range(engines)]
    stores = [number if draw.random() < 0.8 else max(0, number - 1) for number in range(engines)]
    pull_bytes_s = base * 2 ** draw.uniform(-1, 4)
    texts = [draw.randint(2_000, 80_000) for _ in range(draw.randint(1, 12))]
    shared, turns = draw.random(), draw.choice([(1, 1), (1, 4), (3, 10)])
    longest_bytes, load, is_roomy = draw.choice([1_000, 6_000]), draw.uniform(0.1, 0.6), draw.random() < 0.75

    draw = Random(f"{case} {traffic}")
    talks: list[tuple[list[Segment], list[float]]] = []
    sizes: dict[str, int] = {}
    while sum(len(pauses) for _, pauses in talks) < requests:
        number, text = len(talks), draw.randrange(len(texts))
        name = f"text {text}" if draw.random() < shared else f"own {number}"
        messages = [(f"{number}.{turn}", draw.randint(200, longest_bytes)) for turn in range(draw.randint(*turns))]
        talks.append(([(name, texts[text]), *messages], [0.5 + draw.expovariate(1 / 8) for _ in messages]))
        sizes.update(talks[-1][0])
    work_bytes = sum(sizes.values())  # if everything is computed once
    begins_s = sorted(draw.uniform(0, work_bytes / sum(rates) / load) for _ in talks)
    return Cluster(
        rates=rates,
        stores=stores,
        pull_bytes_s=pull_bytes_s,
        room_bytes=1e18 if is_roomy else work_bytes / engines,
        talks=[Talk(begin_s, *talk) for begin_s, talk in zip(begins_s, talks, strict=True)],
    )


@dataclass
class Store:
    room_bytes: float
    held: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    free_s: float = 0.0  # when its link is
    pulls: Pulls = field(default_factory=Pulls)

    def hit(self, prints: Sequence[Print]) -> int:
        end = 0
        for item in prints:
            if item.digest not in self.held:
                break
            end = item.end_bytes
        return end

    def keep(self, prints: Sequence[Print]) -> None:
        ends = [0, *(item.end_bytes for item in prints)]
        for item, begin in reversed(list(zip(prints, ends, strict=False))):  # beginnings are dropped last
            if item.digest not in self.held:
                self.held[item.digest] = item.end_bytes - begin
                self.used_bytes += item.end_bytes - begin
            self.held.move_to_end(item.digest)
        while self.used_bytes > self.room_bytes:
            self.used_bytes -= self.held.popitem(last=False)[1]


@dataclass(eq=False)
class Leg:
    talk: Talk
    turn: int
    engine: int
    chosen: Candidate
    begin_s: float
    prints: list[Print]
    compute_bytes: int
    pulled_bytes: int
    pulled_s: float
    source: Store | None

    @property
    def prompt_bytes(self) -> int:
        return self.prints[-1].end_bytes

    @property
    def half(self) -> Half:
        """With a token for each byte."""
        return Half(
            role=Role.PREFILL,
            prompt_tokens=self.prompt_bytes,
            computed_tokens=self.compute_bytes,
            tokens_peer=self.pulled_bytes,
            wait_ms=self.pulled_s * 1e3,
        )


class Traffic:
    """One run of one cluster under one rule."""

    def __init__(self, cluster: Cluster, rule: Rule) -> None:
        self._cluster, self._rule = cluster, rule
        self._names = [f"i{number}" for number in range(len(cluster.rates))]
        self._stores = {number: Store(cluster.room_bytes) for number in cluster.stores}
        self._seen = PrefixMap(capacity=1 << 20, lifetime_ns=1 << 62)
        self._works = [Work() for _ in cluster.rates]
        self._legs: list[int] = [0 for _ in cluster.rates]
        self._queues: list[deque[Leg]] = [deque() for _ in cluster.rates]
        self._is_busy = [False for _ in cluster.rates]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self.first_tokens_s: list[float] = []

    def run(self) -> float:
        """The mean time to the first token."""
        for talk in self._cluster.talks:
            self._at(talk.begin_s, lambda now_s, talk=talk: self._arrive(talk, 1, now_s))  # type: ignore[misc]
        while self._events:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        return fmean(self.first_tokens_s)

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, happen))

    def _arrive(self, talk: Talk, turn: int, now_s: float) -> None:
        now_ns, prints = int(now_s * 1e9), list(_prints(talk.segments[: turn + 1]))
        held = self._seen.holders(prints, now_ns)
        candidates = [self._candidate(engine, held, now_ns) for engine in range(len(self._names))]
        choice = self._rule(candidates, held, self._number)
        assert choice is not None
        engine = self._names.index(choice.name)
        leg = self._leg(talk, turn, candidates[engine], prints, held, now_s)
        had_bytes = candidates[engine].had_bytes(candidates[engine].compute_bytes_s)
        self._works[engine].began(leg, leg.prompt_bytes - had_bytes, now_ns)
        self._legs[engine] += 1
        self._at(now_s + leg.pulled_s, lambda now_s: self._line_up(leg, now_s))

    def _candidate(self, engine: int, held: dict[str, Held], now_ns: int) -> Candidate:
        store, own = self._cluster.stores[engine], 0
        for name, known in held.items():
            if self._store_of(name) == store:
                own = max(own, known.seen_bytes)
        far_bytes, far = self._far(store, held)
        work, all_pulls = self._works[engine], [each.pulls for each in self._stores.values()]
        return Candidate(
            name=self._names[engine],
            load=self._legs[engine],
            queued_bytes=work.queued_bytes(now_ns),
            compute_bytes_s=work.bytes_s,
            stored_bytes=own,
            pulled_bytes=far_bytes,
            pull_bytes_s=pull_bytes_s(far.pulls, all_pulls) if far is not None else 0.0,
        )

    def _leg(
        self, talk: Talk, turn: int, chosen: Candidate, prints: list[Print], held: dict[str, Held], now_s: float
    ) -> Leg:
        """What the engine really does: it pulls from the store that the router names, if that has more."""
        engine = self._names.index(chosen.name)
        store = self._stores[self._cluster.stores[engine]]
        _, source = self._far(self._cluster.stores[engine], held)
        own_bytes, pulled_bytes, pulled_s = store.hit(prints), 0, 0.0
        if source is not None and self._cluster.pull_bytes_s > self._cluster.rates[engine]:
            pulled_bytes = max(0, source.hit(prints) - own_bytes)
        if source is not None and pulled_bytes:
            begin_s = max(now_s, source.free_s, store.free_s)
            source.free_s = store.free_s = begin_s + PULL_S + pulled_bytes / self._cluster.pull_bytes_s
            pulled_s = store.free_s - now_s
        compute_bytes = prints[-1].end_bytes - own_bytes - pulled_bytes
        return Leg(talk, turn, engine, chosen, now_s, prints, compute_bytes, pulled_bytes, pulled_s, source)

    def _line_up(self, leg: Leg, now_s: float) -> None:
        self._queues[leg.engine].append(leg)
        self._compute(leg.engine, now_s)

    def _compute(self, engine: int, now_s: float) -> None:
        if not self._is_busy[engine] and self._queues[engine]:
            leg = self._queues[engine].popleft()
            self._is_busy[engine] = True
            takes_s = REQUEST_S + leg.compute_bytes / self._cluster.rates[engine]
            self._at(now_s + takes_s, lambda now_s: self._answer(leg, now_s))

    def _answer(self, leg: Leg, now_s: float) -> None:
        self._is_busy[leg.engine] = False
        self._legs[leg.engine] -= 1
        self.first_tokens_s.append(now_s - leg.begin_s)
        self._seen.learn(leg.prints, self._names[leg.engine], int(now_s * 1e9), proved=False)
        self._stores[self._cluster.stores[leg.engine]].keep(leg.prints)
        self._works[leg.engine].ended(leg, computed_bytes(leg.prompt_bytes, leg.half), int(now_s * 1e9))
        if leg.source is not None:
            is_missed = computed_instead(leg.chosen, leg.half, leg.prompt_bytes)
            leg.source.pulls.counted(leg.pulled_bytes, NOT_PULLED if is_missed else "")
            leg.source.pulls.measured(leg.half, leg.prompt_bytes)
        if leg.turn < len(leg.talk.pauses_s):
            pause_s = leg.talk.pauses_s[leg.turn - 1]
            self._at(now_s + pause_s, lambda now_s: self._arrive(leg.talk, leg.turn + 1, now_s))
        self._compute(leg.engine, now_s)

    def _far(self, store: int, held: dict[str, Held]) -> tuple[int, Store | None]:
        """The other store that has seen most of a prompt."""
        best_bytes, best = 0, None
        for name, known in held.items():
            other = self._store_of(name)
            if other != store and known.seen_bytes > best_bytes:
                best_bytes, best = known.seen_bytes, self._stores[other]
        return best_bytes, best

    def _store_of(self, name: str) -> int:
        return self._cluster.stores[self._names.index(name)]


def _prints(segments: list[Segment]) -> Iterator[Print]:
    end, names = 0, ""
    for name, size_bytes in segments:
        end, names = end + size_bytes, f"{names}/{name}"
        yield Print(end, names.encode())
