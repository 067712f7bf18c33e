"""The planner against a plain model of its rules, and load-or-recompute against trying everything."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtally.core.prefetch import (
    FEWEST_READS,
    LEVEL_PLACES,
    MOMENT_S,
    MOST_AHEAD,
    MOST_PRIORITY,
    Option,
    Planner,
    Rate,
    queue_number,
    worth_loading,
)

TIERS = 2
SHARE = 100


@dataclass
class Wished:
    """A wish as the model sees it."""

    lane: int
    place: tuple[bool, int, int]
    sizes: dict[int, int]
    is_admitted: bool = False
    unread: dict[int, int] = field(default_factory=dict)  # part -> tier


class Planned(RuleBasedStateMachine):
    """Wishes come, become wanted, are admitted, read and left in any order."""

    @initialize()
    def begin(self) -> None:
        self.planner: Planner[int] = Planner(tiers=TIERS, arena_bytes=SHARE * (TIERS + 1), in_flight_bytes=60 * TIERS)
        self.wishes: dict[int, Wished] = {}
        self.arrivals = 0
        self.in_flight: list[dict[int, int]] = [{} for _ in range(TIERS + 1)]

    def waiting(self, lane: int) -> list[int]:
        found = [
            (wish.place, number) for number, wish in self.wishes.items() if wish.lane == lane and not wish.is_admitted
        ]
        return [number for _, number in sorted(found)]

    def held(self, lane: int) -> dict[int, int]:
        parts: dict[int, int] = {}
        for wish in self.wishes.values():
            if wish.lane == lane and wish.is_admitted:
                parts.update(wish.sizes)
        return parts

    @rule(
        lane=st.integers(0, TIERS),
        ahead=st.integers(-1, 5),
        priority=st.integers(-2, 2),
        early=st.booleans(),
        parts=st.dictionaries(st.integers(0, 12), st.just(0), min_size=1, max_size=5),
    )
    def join(self, lane: int, ahead: int, priority: int, early: bool, parts: dict[int, int]) -> None:
        self.arrivals += 1
        sizes = {part: 7 + 3 * part for part in parts}
        place = (early, queue_number(self.arrivals, ahead=ahead, priority=priority), self.arrivals)
        self.wishes[self.arrivals] = Wished(lane, place, sizes)
        self.planner.join(self.arrivals, lane, ahead=ahead, priority=priority, is_early=early)

    @precondition(lambda self: self.wishes)
    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.wishes)))
        wish = self.wishes[number]
        wish.place = (False, *wish.place[1:])
        self.planner.want(number)

    @rule(lane=st.integers(0, TIERS))
    def admit(self, lane: int) -> None:
        """The first in the model's order is the planner's, and is admitted exactly if it fits or would be alone."""
        order = self.waiting(lane)
        assert self.planner.next(lane) == (order[0] if order else None)
        if not order:
            return
        wish, held = self.wishes[order[0]], self.held(lane)
        limit = SHARE * 3 // 4 if wish.place[0] else SHARE
        others = [other for other in self.wishes.values() if other.lane == lane and other.is_admitted]
        fits = not others or sum((held | wish.sizes).values()) <= limit
        assert self.planner.admit(order[0], wish.sizes) == fits
        wish.is_admitted = fits
        if fits and lane:
            for part, size in wish.sizes.items():
                wish.unread[part] = lane
                self.planner.ask(lane, part, size, order[0])

    @rule(tier=st.integers(1, TIERS), speed=st.sampled_from((0.0, 50.0, 1e9)))
    def start(self, tier: int, speed: float) -> None:
        flying = self.in_flight[tier]
        asked = [
            (wish.place, part)
            for wish in self.wishes.values()
            for part, where in wish.unread.items()
            if where == tier and part not in flying
        ]
        part = self.planner.start(tier, speed)
        if part is None:
            if asked:
                is_short = len(flying) < FEWEST_READS or not speed
                most = 60 if is_short else min(60, speed * MOMENT_S)
                assert flying
                assert sum(flying.values()) + max(7 + 3 * part for _, part in asked) > most
            return
        assert part in {part for _, part in asked}
        flying[part] = 7 + 3 * part

    @precondition(lambda self: any(self.in_flight))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from([tier for tier, flying in enumerate(self.in_flight) if flying]))
        part = data.draw(st.sampled_from(sorted(self.in_flight[tier])))
        del self.in_flight[tier][part]
        self.planner.ended(tier, part)
        for wish in self.wishes.values():
            if wish.unread.get(part) == tier:
                del wish.unread[part]

    @precondition(lambda self: self.wishes)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.wishes)))
        wish = self.wishes.pop(number)
        self.planner.leave(number)
        for part, tier in wish.unread.items():
            if not any(other.unread.get(part) == tier for other in self.wishes.values()):
                self.planner.unask(tier, part)

    @invariant()
    def keeps_its_budgets(self) -> None:
        self.planner.check()
        assert self.planner.held_bytes == [sum(self.held(lane).values()) for lane in range(TIERS + 1)]
        assert self.planner.in_flight_bytes == sum(sum(flying.values()) for flying in self.in_flight)
        assert self.planner.waiting == sum(not wish.is_admitted for wish in self.wishes.values())


TestPlanner = Planned.TestCase
TestPlanner.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(-3, 3), st.integers(1, 150), st.booleans()), min_size=1))
def test_nobody_starves(wishes: list[tuple[int, int, int, bool]]) -> None:
    """As long as those that were admitted leave, everybody is admitted, however large."""
    planner: Planner[int] = Planner(tiers=1, arena_bytes=2 * SHARE, in_flight_bytes=50)
    for number, (ahead, priority, _, early) in enumerate(wishes):
        planner.join(number, 1, ahead=ahead, priority=priority, is_early=early)
    admitted: list[int] = []
    for _ in range(2 * len(wishes)):
        number = planner.next(1)
        if number is None:
            break
        if planner.admit(number, {number: wishes[number][2]}):
            admitted.append(number)
        else:
            planner.leave(next(number for number in admitted if planner.is_known(number)))
        planner.check()
    assert sorted(admitted) == list(range(len(wishes)))


@given(
    st.lists(st.tuples(st.integers(0, MOST_AHEAD * 2), st.integers(-100, 100)), min_size=2, max_size=50),
)
def test_only_so_many_can_overtake(arrived: list[tuple[int, int]]) -> None:
    """Whoever comes long enough after somebody goes after them, whatever the queues and priorities."""
    most = MOST_AHEAD + 2 * MOST_PRIORITY * LEVEL_PLACES
    numbers = [
        queue_number(n * (most + 1), ahead=ahead, priority=priority) for n, (ahead, priority) in enumerate(arrived)
    ]
    assert numbers == sorted(numbers)


def test_a_smaller_priority_goes_first_and_the_engines_queue_decides_among_equals() -> None:
    planner: Planner[int] = Planner(tiers=1, arena_bytes=2, in_flight_bytes=1)
    planner.join(1, 1, ahead=30)
    planner.join(2, 1, ahead=2)
    planner.join(3, 1, ahead=40, priority=-1)
    planner.join(4, 1, is_early=True, priority=-9)
    order = []
    while (number := planner.next(1)) is not None:
        order.append(number)
        planner.leave(number)
    assert order == [3, 2, 1, 4]


def test_a_slow_tier_takes_nothing_from_the_others() -> None:
    planner: Planner[str] = Planner(tiers=2, arena_bytes=3 * SHARE, in_flight_bytes=20)
    for number in range(20):
        planner.join(number, 2)
        planner.admit(number, {f"slow {number}": 10})
    for number in range(10):
        planner.ask(2, f"slow {number}", 10, number)
    while planner.start(2, 1.0) is not None:
        pass
    planner.join(99, 1, ahead=1000, is_early=True)
    assert planner.next(1) == 99
    assert planner.admit(99, {"fast": 60})
    planner.ask(1, "fast", 60, 99)
    assert planner.start(1, 1e9) == "fast"


@given(
    ends=st.lists(st.integers(1, 10_000), min_size=1, max_size=12, unique=True),
    loads=st.lists(st.floats(0, 10), min_size=12, max_size=12),
    tokens_s=st.floats(1, 1e6),
    scale=st.floats(0.01, 1),
)
def test_loading_is_chosen_where_it_ends_sooner(
    ends: list[int], loads: list[float], tokens_s: float, scale: float
) -> None:
    rising = zip(sorted(ends), sorted(loads), strict=False)
    options = [Option(0, 0.0), *(Option(end, load) for end, load in rising)]
    choice = worth_loading(options, tokens_s)
    total = options[-1].end_tokens

    def done_s(option: Option) -> float:
        return option.load_s + (total - option.end_tokens) / tokens_s

    chosen = next(option for option in options if option.end_tokens == choice.end_tokens)
    assert done_s(chosen) <= min(map(done_s, options)) + 1e-6
    assert (choice.load_s, choice.compute_s) == (options[-1].load_s, total / tokens_s)
    faster = worth_loading([option._replace(load_s=option.load_s * scale) for option in options], tokens_s)
    assert faster.end_tokens >= choice.end_tokens or done_s(chosen) - done_s(options[-1]) < 1e-6


def test_what_is_in_the_arena_stays_and_what_costs_more_than_it_saves_is_left() -> None:
    options = [Option(512, 0.0), Option(1024, 0.1), Option(2048, 9.0)]
    assert worth_loading(options, tokens_s=1000) == (1024, 9.0, 1.536)
    assert worth_loading(options, tokens_s=1e9).end_tokens == 512
    assert worth_loading(options, tokens_s=10).end_tokens == 2048


def test_a_rate_follows_the_latest_steps() -> None:
    rate = Rate()
    assert rate.tokens_s == 0
    for _ in range(400):
        rate.add(512, 0.1)
    for _ in range(400):
        rate.add(512, 0.05)
    assert abs(rate.tokens_s - 10_240) < 10


def test_a_part_that_changes_its_size_while_it_is_held_is_counted_once() -> None:
    """An object may be lost and saved anew with another length: what was counted is what is given back."""
    planner: Planner[str] = Planner(tiers=1, arena_bytes=100, in_flight_bytes=100)
    for wish, size in ((1, 10), (2, 20)):
        planner.join(wish, 0)
        assert planner.admit(wish, {"part": size})
    planner.check()
    assert planner.held_bytes == [10, 0]
    planner.leave(1)
    planner.check()
    planner.leave(2)
    assert planner.held_bytes == [0, 0]
