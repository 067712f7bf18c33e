"""Prefetch: who is staged next, how much at once, and whether loading is worth it.

A *wish* is a lease that is to be granted: all that its hit needs is held in the arena, what is not there is read first.

    join ─▶ queue of its lane ──admit: room in the lane──▶ admitted ──ask──▶ queue of a tier ──start──▶ read
                 ▲ want: the engine has come to it            └─ leave: read, cancelled or expired

*Lanes.* A wish stands in the lane of the lowest tier it reads from (0: everything is in the arena already). Lanes share
nothing, neither room nor order: wishes that wait for a slow tier take nothing from the others.

*Order.* Wishes that are wanted now come before early ones. Then `queue_number` decides: the order of arrival, moved
back by the requests that are ahead in the engine's queue, and moved by priority. Both moves are bounded, so each wish
is overtaken only so many times. The first wish in a lane that does not fit stops the lane: small ones cannot overtake
it for ever.

*Budgets.* The distinct bytes held for a lane's admitted wishes stay within its share; early wishes may use three
quarters of it, so that those wanted now find room. Reads in flight stay within a tier's share, and within what the tier
delivers in a moment, so that an urgent read does not wait behind a long queue inside the tier. A wish or a read that is
larger than a whole share goes alone.

No clock, no I/O: times are arguments. Neighbours: `store.staging` (carries it out), `hits` (what a hit needs).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

MOST_AHEAD = 1 << 16
MOST_PRIORITY = 16
LEVEL_PLACES = 1_024  # what one level of priority is worth, in places of the queue
MOMENT_S = 0.1  # how much a tier is given to do at once
FEWEST_READS = 3  # in flight however slow a tier is, so that its reader threads do not wait for one another
KEPT = 0.97  # the weight that each measurement leaves to those before it

Part = TypeVar("Part", bound=Hashable)


class Place(NamedTuple):
    """A wish's place in a queue; the smallest is next. No two are equal."""

    is_early: bool
    number: int
    wish: int


def queue_number(arrival: int, *, ahead: int, priority: int) -> int:
    """Arrivals count up by one. As in vLLM a smaller priority goes first."""
    level = max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
    return arrival + max(0, min(ahead, MOST_AHEAD)) + LEVEL_PLACES * level


@dataclass(slots=True)
class Lane(Generic[Part]):
    waiting: dict[int, Place] = field(default_factory=dict)
    order: list[Place] = field(default_factory=list)  # a heap; entries that `waiting` does not know are stale
    admitted: dict[int, Mapping[Part, int]] = field(default_factory=dict)
    # How many admitted wishes need a part, and its size when it was counted. An object that is lost and saved again
    # while it is held may have another length.
    holders: dict[Part, tuple[int, int]] = field(default_factory=dict)
    held_bytes: int = 0

    def push(self, place: Place) -> None:
        self.waiting[place.wish] = place
        heapq.heappush(self.order, place)
        if len(self.order) > 2 * len(self.waiting) + 64:
            self.order = sorted(self.waiting.values())

    def hold(self, wish: int, sizes: Mapping[Part, int]) -> None:
        self.admitted[wish] = sizes
        for part, size in sizes.items():
            count, counted_bytes = self.holders.get(part, (0, size))
            self.held_bytes += 0 if count else size
            self.holders[part] = count + 1, counted_bytes

    def let_go(self, wish: int) -> None:
        for part in self.admitted.pop(wish):
            count, counted_bytes = self.holders.pop(part)
            if count > 1:
                self.holders[part] = count - 1, counted_bytes
            else:
                self.held_bytes -= counted_bytes


@dataclass(slots=True)
class TierQueue(Generic[Part]):
    waiting: dict[Part, tuple[Place, int]] = field(default_factory=dict)  # place and size
    order: list[tuple[Place, int, Part]] = field(default_factory=list)  # a heap, as in Lane; a number orders parts
    in_flight: dict[Part, int] = field(default_factory=dict)
    in_flight_bytes: int = 0


class Planner(Generic[Part]):
    """The plan of one store with `tiers` lower tiers. The caller says what parts are; each is read from one tier."""

    def __init__(self, *, tiers: int, arena_bytes: int, in_flight_bytes: int) -> None:
        self.share_bytes = arena_bytes // (tiers + 1)
        self.early_bytes = self.share_bytes * 3 // 4
        self.in_flight_share_bytes = in_flight_bytes // max(1, tiers)
        self._lanes: list[Lane[Part]] = [Lane() for _ in range(tiers + 1)]
        self._tiers: list[TierQueue[Part]] = [TierQueue() for _ in range(tiers + 1)]  # the arena's stays empty
        self._lane_of: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        self._arrivals = 0
        self._asked = 0

    # ---- wishes

    def join(self, wish: int, lane: int, *, ahead: int = 0, priority: int = 0, is_early: bool = False) -> None:
        self._arrivals += 1
        place = Place(is_early, queue_number(self._arrivals, ahead=ahead, priority=priority), wish)
        self._lane_of[wish], self._places[wish] = lane, place
        self._lanes[lane].push(place)

    def want(self, wish: int) -> None:
        """The engine has come to this request. The caller asks again for the parts that it has asked for already."""
        place = self._places[wish]._replace(is_early=False)
        self._places[wish] = place
        lane = self._lanes[self._lane_of[wish]]
        if wish in lane.waiting:
            lane.push(place)

    def next(self, lane: int) -> int | None:
        """The first wish in a lane's queue."""
        queue = self._lanes[lane]
        while queue.order:
            place = queue.order[0]
            if queue.waiting.get(place.wish) == place:
                return place.wish
            heapq.heappop(queue.order)
        return None

    def admit(self, wish: int, sizes: Mapping[Part, int]) -> bool:
        """Hold everything that a wish needs, if there is room. Also for an admitted wish that now needs other parts."""
        lane = self._lanes[self._lane_of[wish]]
        was_admitted = lane.admitted.get(wish)
        if was_admitted is not None:
            lane.let_go(wish)
        limit = self.early_bytes if self._places[wish].is_early else self.share_bytes
        new_bytes = sum(size for part, size in sizes.items() if part not in lane.holders)
        fits = not lane.admitted or lane.held_bytes + new_bytes <= limit
        if fits:
            lane.waiting.pop(wish, None)
            lane.hold(wish, sizes)
        elif was_admitted is not None:
            lane.hold(wish, was_admitted)
        return fits

    def leave(self, wish: int) -> None:
        """A wish is over, waiting or admitted. Unknown wishes are ignored."""
        number = self._lane_of.pop(wish, None)
        if number is None:
            return
        del self._places[wish]
        lane = self._lanes[number]
        if lane.waiting.pop(wish, None) is None:
            lane.let_go(wish)

    def is_known(self, wish: int) -> bool:
        return wish in self._lane_of

    # ---- reads

    def ask(self, tier: int, part: Part, size_bytes: int, wish: int) -> None:
        """An admitted wish needs this part from a lower tier. If several ask for it, the first in order counts."""
        queue, place = self._tiers[tier], self._places[wish]
        if part in queue.in_flight or (part in queue.waiting and queue.waiting[part][0] <= place):
            return
        self._asked += 1
        queue.waiting[part] = (place, size_bytes)
        heapq.heappush(queue.order, (place, self._asked, part))

    def unask(self, tier: int, part: Part) -> None:
        """No wish needs this part any more. A read that has begun continues."""
        queue = self._tiers[tier]
        queue.waiting.pop(part, None)
        if len(queue.order) > 2 * len(queue.waiting) + 64:
            queue.order = [entry for entry in queue.order if queue.waiting.get(entry[2], (None,))[0] == entry[0]]
            heapq.heapify(queue.order)

    def start(self, tier: int, speed_bytes_s: float) -> Part | None:
        """Begin the next read, and return its part. None if the tier has enough to do, or nothing."""
        queue = self._tiers[tier]
        while queue.order:
            place, _, part = queue.order[0]
            known, size = queue.waiting.get(part, (None, 0))
            if known == place:
                if not self._has_room(queue, size, speed_bytes_s):
                    return None
                heapq.heappop(queue.order)
                del queue.waiting[part]
                queue.in_flight[part] = size
                queue.in_flight_bytes += size
                return part
            heapq.heappop(queue.order)
        return None

    def begin(self, tier: int, part: Part, size_bytes: int) -> bool:
        """Begin a read that no wish has asked for. False if the tier has enough to do."""
        queue = self._tiers[tier]
        if queue.in_flight and queue.in_flight_bytes + size_bytes > self.in_flight_share_bytes:
            return False
        queue.in_flight[part] = size_bytes
        queue.in_flight_bytes += size_bytes
        return True

    def ended(self, tier: int, part: Part) -> None:
        queue = self._tiers[tier]
        queue.in_flight_bytes -= queue.in_flight.pop(part)

    def _has_room(self, queue: TierQueue[Part], size_bytes: int, speed_bytes_s: float) -> bool:
        """Whether a read stays within the tier's share and, once its speed is known (not 0), within a moment's work."""
        if not queue.in_flight:
            return True
        after = queue.in_flight_bytes + size_bytes
        if after > self.in_flight_share_bytes:
            return False
        is_short = len(queue.in_flight) < FEWEST_READS or not speed_bytes_s
        return is_short or after <= speed_bytes_s * MOMENT_S

    def backlog_bytes(self, tier: int, wish: int) -> int:
        """The bytes that the tier reads before this wish's parts. Its own reads in flight are included."""
        queue, place = self._tiers[tier], self._places[wish]
        return queue.in_flight_bytes + sum(size for before, size in queue.waiting.values() if before < place)

    # ---- for people and for checks

    @property
    def in_flight_bytes(self) -> int:
        return sum(queue.in_flight_bytes for queue in self._tiers)

    def tier_in_flight_bytes(self, tier: int) -> int:
        return self._tiers[tier].in_flight_bytes

    @property
    def held_bytes(self) -> list[int]:
        """By lane."""
        return [lane.held_bytes for lane in self._lanes]

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes)

    def check_budgets(self) -> None:
        """Assert what must hold after every event. A few comparisons, so the store does it each time."""
        for lane in self._lanes:
            assert lane.held_bytes <= self.share_bytes or len(lane.admitted) == 1
        for queue in self._tiers:
            assert queue.in_flight_bytes <= self.in_flight_share_bytes or len(queue.in_flight) == 1

    def check(self) -> None:
        """Assert every invariant. Linear; for tests and simulation."""
        self.check_budgets()
        for lane in self._lanes:
            holders = Counter(part for sizes in lane.admitted.values() for part in sizes)
            assert holders == {part: count for part, (count, _) in lane.holders.items()}
            assert lane.held_bytes == sum(size for _, size in lane.holders.values())
            assert not lane.waiting.keys() & lane.admitted.keys()
        known = {wish for lane in self._lanes for wish in (*lane.waiting, *lane.admitted)}
        assert known == self._lane_of.keys() == self._places.keys()
        for queue in self._tiers:
            assert queue.in_flight_bytes == sum(queue.in_flight.values())
            assert not queue.in_flight.keys() & queue.waiting.keys()


class Rate:
    """Tokens that an engine computes in a second, over its latest steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._s = 0.0

    @property
    def tokens_s(self) -> float:
        """0: not known yet."""
        return self._tokens / self._s if self._s else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * KEPT + tokens
        self._s = self._s * KEPT + seconds


class Option(NamedTuple):
    """A boundary that could be promised, and how long it takes until everything below it is in the arena."""

    end_tokens: int
    load_s: float


class Choice(NamedTuple):
    """The boundary to promise. With it, how long it would take to load, or to compute, the longest option."""

    end_tokens: int
    load_s: float
    compute_s: float


def worth_loading(options: Sequence[Option], tokens_s: float) -> Choice:
    """The boundary with which the whole prompt is done soonest; the longest of equals.

    `options` rise, and begin with what is in the arena already, which takes no time. What is not loaded is computed at
    `tokens_s`.
    """
    ready, longest = options[0], options[-1]
    best = min(reversed(options), key=lambda option: option.load_s - option.end_tokens / tokens_s)
    return Choice(best.end_tokens, longest.load_s, (longest.end_tokens - ready.end_tokens) / tokens_s)
