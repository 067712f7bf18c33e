"""Which instance serves a request: how much of the prompt it has seen, how busy it is, and whether prefill is worth it.

The router has no tokenizer, so it knows a prompt by its bytes. `prints_of` makes digests of a prompt's beginnings,
`PrefixMap` remembers which instance has seen which of them, `choose` picks an instance by that and by its load,
`cheapest` by what a prompt would cost there, `skip_prefill` says when it is not worth asking prefill, `Work` says
how much an instance still has to compute, and `Pace` when one has been silent for too long. Pure: time is an
argument, and equal arguments give equal answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import NamedTuple

from blake3 import blake3

from kvtally.core.speed import Speed

STEP_BYTES = 512  # the first boundaries; later ones lie an eighth of their position apart
PARTS = 16  # the ends of this many last parts (messages) are boundaries, too
DIGEST_BYTES = 16
BYTES_PER_TOKEN = 4  # a rough estimate for text; the digests of token ids take 4 bytes for each
LEAST_SILENCE_S, SEVERAL = 2.0, 5  # prefill is silent after five times its usual time, and not before 2 s
SLACK = 4  # an instance that holds the prefix may have this many requests more than the least loaded one
# Costs this close to the lowest are equal. They are estimates, and among equals the instance that has seen most of the
# prompt is the better choice.
NEAR, NEAR_S = 1.3, 0.005


class Print(NamedTuple):
    """The first `end_bytes` of a prompt, by digest. Equal digests mean equal beginnings."""

    end_bytes: int
    digest: bytes


def prints_of(root: bytes, parts: Sequence[bytes | memoryview]) -> list[Print]:
    """Digests of a prompt's beginnings, ascending; the last is the whole prompt's.

    `root` is everything that must be equal before two prompts can share anything: tenant, model, tools. Boundaries
    depend only on positions and on where parts end, so a longer conversation has all boundaries of its beginning.
    """
    ends = list(accumulate(map(len, parts)))
    whole = parts[0] if len(parts) == 1 else b"".join(parts)  # a single part may be large: it is not copied
    hasher = blake3(root)
    prints, start = [], 0
    for end in sorted({*_steps(len(whole)), *ends[-PARTS:]}):
        hasher.update(whole[start:end])
        prints.append(Print(end, hasher.digest(DIGEST_BYTES)))
        start = end
    return prints


def _steps(total_bytes: int) -> Iterator[int]:
    position = STEP_BYTES
    while position <= total_bytes:
        yield position
        position += max(STEP_BYTES, position // 8 // STEP_BYTES * STEP_BYTES)


class Held(NamedTuple):
    """How many bytes of a prompt an instance has seen, and how many of those it was proved to hold."""

    seen_bytes: int
    proved_bytes: int


class PrefixMap:
    """Which instance has seen which beginnings. Keeps at most `capacity`, each for `lifetime_ns` after its last use."""

    def __init__(self, *, capacity: int, lifetime_ns: int) -> None:
        self._capacity = capacity
        self._lifetime_ns = lifetime_ns
        self._entries: OrderedDict[bytes, dict[str, tuple[int, bool]]] = OrderedDict()  # -> seen at, proved

    def __len__(self) -> int:
        return len(self._entries)

    def learn(self, prints: Sequence[Print], instance: str, now_ns: int, *, proved: bool) -> None:
        """The instance has computed or loaded this prompt. A proof counts until `doubt` takes it back."""
        for item in prints:
            seen = self._entries.setdefault(item.digest, {})
            seen[instance] = now_ns, proved or seen.get(instance, (0, False))[1]
            self._entries.move_to_end(item.digest)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def doubt(self, prints: Sequence[Print], instance: str) -> None:
        """The instance turned out not to hold this prompt."""
        for item in prints:
            seen = self._entries.get(item.digest)
            if seen is not None and instance in seen:
                seen[instance] = seen[instance][0], False

    def forget(self, instance: str) -> None:
        """The instance was restarted, so it holds nothing any more."""
        for digest, seen in list(self._entries.items()):
            seen.pop(instance, None)
            if not seen:
                del self._entries[digest]

    def holders(self, prints: Sequence[Print], now_ns: int) -> dict[str, Held]:
        """For each instance, the longest beginning that it has seen, and the longest that it was proved to hold."""
        found: dict[str, Held] = {}
        for item in reversed(prints):
            for instance, (seen_ns, is_proved) in self._entries.get(item.digest, {}).items():
                if now_ns - seen_ns <= self._lifetime_ns:
                    known = found.get(instance, Held(item.end_bytes, 0))
                    proved_bytes = known.proved_bytes or (item.end_bytes if is_proved else 0)
                    found[instance] = Held(known.seen_bytes, proved_bytes)
        return found


class Why(StrEnum):
    """Why an instance was chosen."""

    AFFINITY = "affinity"  # it has seen the longest beginning of the prompt
    LEAST_LOADED = "least_loaded"  # no instance has seen any of the prompt
    BUSY = "busy"  # the instance that has seen most of it is too busy


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that may be chosen, how many requests it has in flight, and what a prompt would cost there.

    Rates are bytes of prompts for each second; 0 means that nothing is known. All but the first two are for
    `cheapest`."""

    name: str
    load: int
    queued_bytes: float = 0.0  # what it still has to compute of other prompts
    compute_bytes_s: float = 0.0
    stored_bytes: int = 0  # of this prompt, in its own store or its own memory
    pulled_bytes: int = 0  # of this prompt, in the store that it would pull from
    pull_bytes_s: float = 0.0  # 0, too, if it cannot pull

    def had_bytes(self, compute_bytes_s: float) -> int:
        """What it would not compute of the prompt, if it computes at this rate. It pulls only what it would not have
        sooner by computing."""
        return max(self.stored_bytes, self.pulled_bytes) if self.pull_bytes_s > compute_bytes_s else self.stored_bytes

    def cost(self, compute_bytes_s: float, most_bytes: int) -> float:
        """Seconds: for what is queued there, for what it pulls, and for what it must compute beyond what must be
        computed even by the candidate that has `most_bytes`."""
        had_bytes = self.had_bytes(compute_bytes_s)
        pull_s = (had_bytes - self.stored_bytes) / self.pull_bytes_s if had_bytes > self.stored_bytes else 0.0
        return (self.queued_bytes + most_bytes - had_bytes) / compute_bytes_s + pull_s


class Choice(NamedTuple):
    name: str
    why: Why


def choose(candidates: Sequence[Candidate], held: Mapping[str, Held], *, turn: int) -> Choice | None:
    """The instance that holds most of the prompt, unless it is much busier than the least loaded one.

    None if there are no candidates. `turn` decides between equals: if it grows with each call, they take turns.
    """
    if not candidates:
        return None
    ordered = _in_turn(candidates, turn)
    idle = min(ordered, key=lambda candidate: candidate.load)
    holder = max(ordered, key=lambda candidate: (_seen(held, candidate), -candidate.load))
    if not _seen(held, holder):
        return Choice(idle.name, Why.LEAST_LOADED)
    if holder.load - idle.load > SLACK:
        return Choice(idle.name, Why.BUSY)
    return Choice(holder.name, Why.AFFINITY)


def cheapest(candidates: Sequence[Candidate], held: Mapping[str, Held], *, turn: int) -> Choice | None:
    """The instance where the prompt costs least, in seconds: what is queued there, and what is missing there, pulled or
    computed. As long as no rate is known, the one that `choose` names.

    What even the best of them must compute costs nothing anywhere. Otherwise an instance that is a little faster would
    get all new prompts, and its store would have to drop them while others have room. An instance that has not been
    measured counts as fast as the others usually are.
    """
    rates = sorted(item.compute_bytes_s for item in candidates if item.compute_bytes_s)
    if not rates:
        return choose(candidates, held, turn=turn)
    ordered = _in_turn(candidates, turn)
    paired = [(item, item.compute_bytes_s or rates[len(rates) // 2]) for item in ordered]
    most_bytes = max(item.had_bytes(rate) for item, rate in paired)
    costs = [item.cost(rate, most_bytes) for item, rate in paired]
    limit = NEAR * min(costs) + NEAR_S
    near = [item for item, cost in zip(ordered, costs, strict=True) if cost <= limit]
    best = max(near, key=lambda item: (_seen(held, item), -item.load))
    longest = max(_seen(held, item) for item in candidates)
    if not longest:
        return Choice(best.name, Why.LEAST_LOADED)
    return Choice(best.name, Why.AFFINITY if _seen(held, best) == longest else Why.BUSY)


def _in_turn(candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
    first = turn % len(candidates)
    return [*candidates[first:], *candidates[:first]]


def _seen(held: Mapping[str, Held], candidate: Candidate) -> int:
    known = held.get(candidate.name)
    return known.seen_bytes if known else 0


class Work:
    """What one prefill instance has under way, and how fast it computes, in bytes of prompts.

    An engine computes prompts in the order in which they came. So of those under way only the first can be partly
    done, and it has been computed since it began or since the one before it ended.
    """

    def __init__(self) -> None:
        self._speed = Speed()
        self._legs: dict[Hashable, int] = {}  # bytes to compute, in the order of their arrival
        self._total_bytes = 0
        self._front_ns = 0  # when the first of them became the first

    @property
    def bytes_s(self) -> float:
        """How fast it computes; 0 until a prompt was measured."""
        return self._speed.bytes_s

    def began(self, leg: Hashable, compute_bytes: int, now_ns: int) -> None:
        if not self._legs:
            self._front_ns = now_ns
        self._legs[leg] = compute_bytes
        self._total_bytes += compute_bytes
        self._speed.began(now_ns)

    def ended(self, leg: Hashable, computed_bytes: int, now_ns: int) -> None:
        """A leg is over. It measures the instance's speed, unless it computed nothing."""
        is_first = next(iter(self._legs)) == leg
        self._total_bytes -= self._legs.pop(leg)
        if is_first:
            self._front_ns = now_ns
        self._speed.ended(computed_bytes, now_ns)

    def queued_bytes(self, now_ns: int) -> float:
        """What it still has to compute."""
        if not self._legs:
            return 0.0
        done = self.bytes_s * (now_ns - self._front_ns) / 1e9
        return self._total_bytes - min(done, next(iter(self._legs.values())))


class Skip(StrEnum):
    """Why prefill is not asked. The first two depend on the prompt's length, the others on what the request asks."""

    SHORT = "short"  # computing the prompt is cheaper than moving it
    HELD = "held"  # decode was proved to hold the prompt, but for a short rest
    BATCH = "batch"  # several prompts in one request
    PROMPT_LOGPROBS = "prompt_logprobs"  # the engine computes the whole prompt for these, whatever is cached
    SEVERAL = "several"  # n > 1, where the flavour hands over to one reader only


def skip_prefill(prompt_bytes: int, proved_bytes: int, *, from_tokens: int) -> Skip | None:
    """Skip prefill if decode has fewer than `from_tokens` to compute. With 0, prefill is never skipped."""
    from_bytes = from_tokens * BYTES_PER_TOKEN
    if prompt_bytes < from_bytes:
        return Skip.SHORT
    if prompt_bytes - proved_bytes < from_bytes:
        return Skip.HELD
    return None


class Pace:
    """How long one prefill instance usually takes for a prompt, and whether it has fallen silent.

    Silent means: for several times as long as the longest prompt under way usually takes, the instance has answered
    nobody. A queue is not silence, because those at its front are answered. A silent instance is left alone until a
    health check succeeds; then it gets one request at a time until it answers one. Prompts are told apart by how many
    bytes of them the instance has to compute, in powers of two. `now_s` is any clock that only grows.
    """

    def __init__(self) -> None:
        self.is_silent = False  # from the moment it was found silent until it answers
        self._usual_s: dict[int, float] = {}  # by size class
        self._under_way: dict[Hashable, tuple[int, float]] = {}  # by leg: size class, begin
        self._heard_s = 0.0
        self._is_alive = True  # a health check has succeeded since it fell silent

    @property
    def is_left_alone(self) -> bool:
        return self.is_silent and (not self._is_alive or bool(self._under_way))

    def began(self, leg: Hashable, compute_bytes: int, now_s: float) -> None:
        self._under_way[leg] = compute_bytes.bit_length(), now_s

    def ended(self, leg: Hashable, took_s: float | None) -> None:
        """A leg is over; `took_s` is None where the instance did not answer it."""
        size, _ = self._under_way.pop(leg)
        if took_s is not None:
            self._learn(size, took_s)

    def heard(self, now_s: float) -> None:
        """The instance answered a request."""
        self._heard_s, self.is_silent = now_s, False

    def checked(self) -> None:
        """The instance answered a health check, which does not say that it answers requests."""
        self._is_alive = True

    def usual_s(self, size: int) -> float | None:
        """What a prompt of this size class usually takes. Of a class never seen: what the next larger one takes, or
        in proportion to the largest one seen. None where no prompt was ever answered."""
        larger = [known for known in self._usual_s if known >= size]
        if larger:
            return self._usual_s[min(larger)]
        largest = max(self._usual_s, default=None)
        return None if largest is None else self._usual_s[largest] * 2.0 ** (size - largest)

    def fell_silent(self, now_s: float) -> list[Hashable]:
        """The legs to give up: all of them, or none."""
        if not self._under_way:
            return []
        usual_s = [self.usual_s(size) or inf for size, _ in self._under_way.values()]
        begun_s = min(begin_s for _, begin_s in self._under_way.values())
        silence_s = now_s - max(begun_s, self._heard_s)
        if silence_s <= max(LEAST_SILENCE_S, SEVERAL * max(usual_s)):
            return []
        if not self.is_silent:  # perhaps this prompt just takes longer than earlier ones: give the next one more time
            self._learn(max(size for size, _ in self._under_way.values()), silence_s)
        self.is_silent, self._is_alive = True, False
        return list(self._under_way)

    def _learn(self, size: int, took_s: float) -> None:
        """A slow answer counts more than a fast one, whose prompt may have been cached. But a single answer at most
        doubles what is usual."""
        known_s = self._usual_s.get(size, took_s)
        self._usual_s[size] = min(took_s, 2 * known_s) if took_s > known_s else known_s + (took_s - known_s) / 16
