"""The estimate of a tier's speed: right for steady tiers, deaf to a few slow reads, follows a lasting change."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvtally.core.speed import (
    BATCH_READS,
    LATEST_PROBE_NS,
    MOST_READS,
    NEW_PATIENCE_NS,
    SOONEST_PROBE_NS,
    Batch,
    Speed,
    typical,
)

MIB = 1 << 20
SECOND_NS = 1_000_000_000
rates = st.floats(1e3, 1e11)
sizes = st.integers(4096, 64 * MIB)
batches = st.builds(Batch, reads=st.integers(1, 7), bytes=sizes, ns=st.integers(1, 10**12))


class Tier:
    """Reads in rounds: so many at once, each round as long as the rate says."""

    def __init__(self) -> None:
        self.speed = Speed()
        self.now_ns = 0

    def round(self, count: int, size_bytes: int, bytes_s: float, *, starved_ns: int = 0) -> None:
        for _ in range(count):
            self.speed.began(self.now_ns)
        self.now_ns += max(1, int(count * size_bytes / bytes_s * 1e9)) + starved_ns
        for _ in range(count):
            self.speed.ended(size_bytes, self.now_ns)

    def is_near(self, bytes_s: float) -> bool:
        return abs(self.speed.bytes_s / bytes_s - 1) < 0.01


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=30))
def test_it_lies_between_the_slowest_and_the_fastest_read(reads: list[tuple[int, int]]) -> None:
    speed, now_ns = Speed(), 0
    assert speed.bytes_s == 0
    for size_bytes, duration_ns in reads:
        speed.began(now_ns)
        now_ns += duration_ns
        speed.ended(size_bytes, now_ns)
        now_ns += 10_000  # idle: nobody's time
    each = [size_bytes / duration_ns * 1e9 for size_bytes, duration_ns in reads]
    assert min(each) * 0.999 <= speed.bytes_s <= max(each) * 1.001


def test_readers_at_the_same_time_add_up() -> None:
    speed = Speed()
    for _ in range(3):
        speed.began(0)
    for _ in range(3):
        speed.ended(100, SECOND_NS)
    assert speed.bytes_s == 300


@given(rounds=st.lists(st.integers(1, BATCH_READS), min_size=1, max_size=40), size=sizes, bytes_s=st.floats(1e6, 1e10))
def test_a_steady_tier_is_measured_exactly_however_many_reads_are_under_way(
    rounds: list[int], size: int, bytes_s: float
) -> None:
    tier = Tier()
    for count in rounds:
        tier.round(count, size, bytes_s)
        assert tier.is_near(bytes_s)


@given(bytes_s=st.floats(1e6, 1e10))
def test_reads_that_never_let_the_tier_rest_are_measured_too(bytes_s: float) -> None:
    """Four threads in lock step, with more in the queue."""
    speed, now_ns, size = Speed(), 0, 2 * MIB
    for _ in range(4):
        speed.began(now_ns)
    for number in range(40):
        now_ns += int(4 * size / bytes_s * 1e9) if number % 4 == 0 else 1
        speed.began(now_ns)
        speed.ended(size, now_ns)
    assert abs(speed.bytes_s / bytes_s - 1) < 0.01


@given(others=st.lists(batches, min_size=1, max_size=12), odd=batches)
def test_one_slow_batch_of_any_size_moves_nothing_beyond_the_others(others: list[Batch], odd: Batch) -> None:
    assume(odd.bytes_s < min(batch.bytes_s for batch in others))
    assert min(batch.bytes_s for batch in others) <= typical([*others, odd]) <= max(batch.bytes_s for batch in others)


@given(found=st.lists(batches, min_size=1, max_size=12), factor=st.integers(2, 9))
def test_it_scales_with_the_bytes_and_knows_no_order(found: list[Batch], factor: int) -> None:
    plain = typical(found)
    assert plain in [batch.bytes_s for batch in found]
    assert typical(found[::-1]) == plain
    larger = [batch._replace(bytes=batch.bytes * factor) for batch in found]
    assert abs(typical(larger) / plain / factor - 1) < 1e-9


@given(
    before=st.integers(1, 20),
    count=st.integers(1, BATCH_READS),
    starved_ns=st.integers(1, 60 * SECOND_NS),
    bytes_s=st.floats(1e7, 1e10),
)
def test_one_starved_round_does_not_count(before: int, count: int, starved_ns: int, bytes_s: float) -> None:
    tier = Tier()
    for _ in range(before):
        tier.round(count, 2 * MIB, bytes_s)
    tier.round(count, 2 * MIB, bytes_s, starved_ns=starved_ns)
    assert tier.is_near(bytes_s)
    tier.round(count, 2 * MIB, bytes_s)
    assert tier.is_near(bytes_s)


@given(
    history=st.lists(st.tuples(st.integers(1, BATCH_READS), rates), max_size=30),
    count=st.integers(1, BATCH_READS),
    bytes_s=st.floats(1e6, 1e10),
)
def test_a_lasting_change_counts_after_a_few_reads(
    history: list[tuple[int, float]], count: int, bytes_s: float
) -> None:
    tier = Tier()
    for before, rate in history:
        tier.round(before, 2 * MIB, rate)
    reads = 0
    while reads < MOST_READS + BATCH_READS:
        tier.round(count, 2 * MIB, bytes_s)
        reads += count
    assert tier.is_near(bytes_s)


def test_a_tier_that_was_starved_from_the_start_recovers_with_the_first_probe() -> None:
    tier = Tier()
    tier.round(3, 2 * MIB, 500e6, starved_ns=3 * SECOND_NS)
    assert tier.speed.bytes_s < 3e6
    assert not tier.speed.is_due(tier.now_ns)
    tier.now_ns += LATEST_PROBE_NS
    assert tier.speed.is_due(tier.now_ns)
    tier.round(3, 2 * MIB, 500e6)
    assert tier.is_near(500e6)


@given(starved=st.integers(1, 30))
def test_after_any_time_of_starving_it_recovers_within_seconds(starved: int) -> None:
    tier = Tier()
    for _ in range(starved):
        tier.round(4, 2 * MIB, 500e6, starved_ns=3 * SECOND_NS)
    ended_ns = tier.now_ns
    while not tier.is_near(500e6):
        tier.now_ns += SECOND_NS // 10
        if tier.speed.is_due(tier.now_ns):
            tier.round(3, 2 * MIB, 500e6)
        assert tier.now_ns - ended_ns < LATEST_PROBE_NS + 5 * SOONEST_PROBE_NS


def test_a_slow_tier_spends_a_quarter_of_its_time_on_measurements_at_most() -> None:
    tier = Tier()
    tier.round(3, 2 * MIB, 2e6)
    tier.round(3, 2 * MIB, 2e6)
    took_ns = int(3 * 2 * MIB / 2e6 * 1e9)
    tier.now_ns += 3 * took_ns - SECOND_NS // 10
    assert not tier.speed.is_due(tier.now_ns)
    tier.now_ns += SECOND_NS // 5
    assert tier.speed.is_due(tier.now_ns)


def test_a_tier_that_delivers_nothing_is_stuck_until_it_does() -> None:
    speed = Speed()
    speed.began(0)
    assert not speed.is_stuck(NEW_PATIENCE_NS - 1)
    assert speed.is_stuck(NEW_PATIENCE_NS)
    speed.ended(0, NEW_PATIENCE_NS)
    assert speed.bytes_s == 0
    assert not speed.is_stuck(1 << 60)
