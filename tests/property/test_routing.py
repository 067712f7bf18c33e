"""Routing: equal beginnings have equal prints, the map agrees with a plain list, and choices can be explained."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.routing import (
    BYTES_PER_TOKEN,
    LEAST_SILENCE_S,
    NEAR,
    NEAR_S,
    SEVERAL,
    SLACK,
    STEP_BYTES,
    Candidate,
    Held,
    Pace,
    PrefixMap,
    Print,
    Skip,
    Why,
    Work,
    cheapest,
    choose,
    prints_of,
    skip_prefill,
)

parts = st.lists(st.binary(max_size=3 * STEP_BYTES), max_size=6)
roots = st.binary(max_size=8)


@given(roots, parts)
def test_prints_ascend_and_end_with_the_whole_prompt(root: bytes, prompt: list[bytes]) -> None:
    prints = prints_of(root, prompt)
    ends = [item.end_bytes for item in prints]
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == sum(map(len, prompt))


@given(roots, parts, parts)
def test_a_longer_conversation_has_the_prints_of_its_beginning(
    root: bytes, prompt: list[bytes], more: list[bytes]
) -> None:
    assert set(prints_of(root, prompt)) <= set(prints_of(root, [*prompt, *more]))


@given(roots, parts, st.data())
def test_prints_differ_from_the_first_difference_on(root: bytes, prompt: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(prompt)
    if not whole:
        return
    place = data.draw(st.integers(0, len(whole) - 1))
    other = bytearray(whole)
    other[place] ^= 1
    changed, start = [], 0
    for part in prompt:
        changed.append(bytes(other[start : start + len(part)]))
        start += len(part)
    for ours, theirs in zip(prints_of(root, prompt), prints_of(root, changed), strict=True):
        assert (ours.digest == theirs.digest) == (ours.end_bytes <= place)


@given(roots, roots, parts)
def test_nothing_is_shared_under_another_root(root: bytes, other: bytes, prompt: list[bytes]) -> None:
    if root != other and sum(map(len, prompt)):
        ours = {item.digest for item in prints_of(root, prompt) if item.end_bytes}
        # Roots are made of parts that cannot run into one another (`router.body.root_of`); here they may.
        if not (root.startswith(other) or other.startswith(root)):
            assert not ours & {item.digest for item in prints_of(other, prompt)}


def test_boundaries_of_a_long_prompt_are_few() -> None:
    assert len(prints_of(b"", [b"x" * (1 << 20)])) < 80


names = st.sampled_from(["a", "b", "c"])
CAPACITY, LIFETIME_NS = 8, 10
steps = st.lists(st.tuples(names, st.integers(1, 4), st.booleans(), st.integers(0, 6)), max_size=20)


def chain(length: int) -> list[Print]:
    return [Print(end, bytes([end])) for end in range(1, length + 1)]


@given(steps)
def test_the_map_against_a_plain_list(history: list[tuple[str, int, bool, int]]) -> None:
    known = PrefixMap(capacity=CAPACITY, lifetime_ns=LIFETIME_NS)
    log: list[tuple[int, str, int, bool]] = []
    now = 0
    for name, length, proved, later in history:
        now += later
        known.learn(chain(length), name, now, proved=proved)
        log.append((now, name, length, proved))
        assert known.holders(chain(4), now) == expected(log, now)
        assert len(known) <= CAPACITY


def expected(log: list[tuple[int, str, int, bool]], now: int) -> dict[str, Held]:
    """By instance: the longest print that was last learned recently enough, and the longest of those ever proved."""
    found: dict[str, Held] = {}
    for name in sorted({name for _, name, _, _ in log}):
        fresh = [
            end
            for end in range(1, 5)
            if any(
                at == max(t for t, n, length, _ in log if n == name and length >= end) and now - at <= LIFETIME_NS
                for at, n, length, _ in log
                if n == name and length >= end
            )
        ]
        proved = [end for end in fresh if any(p and n == name and length >= end for _, n, length, p in log)]
        if fresh:
            found[name] = Held(max(fresh), max(proved, default=0))
    return found


def test_what_is_doubted_or_forgotten_is_not_held() -> None:
    known = PrefixMap(capacity=CAPACITY, lifetime_ns=LIFETIME_NS)
    known.learn(chain(3), "a", 0, proved=True)
    known.learn(chain(2), "b", 0, proved=True)
    known.doubt(chain(3), "a")
    assert known.holders(chain(3), 0) == {"a": Held(3, 0), "b": Held(2, 2)}
    known.forget("b")
    assert known.holders(chain(3), 0) == {"a": Held(3, 0)}
    known.forget("a")
    assert len(known) == 0


candidates = st.lists(st.integers(0, 12), min_size=1, max_size=5).map(
    lambda loads: [Candidate(f"i{number}", load) for number, load in enumerate(loads)]
)
holdings = st.dictionaries(st.sampled_from([f"i{n}" for n in range(7)]), st.integers(1, 9).map(lambda n: Held(n, 0)))


@given(candidates, holdings, st.integers(0, 20))
def test_a_choice_is_a_candidate_and_explains_itself(among: list[Candidate], held: dict[str, Held], turn: int) -> None:
    choice = choose(among, held, turn=turn)
    assert choice is not None
    loads = {candidate.name: candidate.load for candidate in among}
    least = min(loads.values())
    most = max((held[name].seen_bytes for name in loads if name in held), default=0)
    if choice.why is Why.AFFINITY:
        assert held[choice.name].seen_bytes == most
        assert loads[choice.name] - least <= SLACK
    else:
        assert loads[choice.name] == least
        assert (choice.why is Why.BUSY) == bool(most)
    assert choice == choose(among, held, turn=turn)


@given(candidates, st.integers(0, 20))
def test_with_nothing_known_the_least_loaded_take_turns(among: list[Candidate], turn: int) -> None:
    least = min(candidate.load for candidate in among)
    chosen = {choose(among, {}, turn=turn + step) for step in range(len(among))}
    assert {choice.name for choice in chosen if choice} == {item.name for item in among if item.load == least}


def test_nobody_is_chosen_of_none() -> None:
    assert choose([], {}, turn=1) is None


RATES = st.sampled_from([0.0, 500.0, 1_000.0, 4_000.0])


@st.composite
def weighed(draw: st.DrawFn) -> tuple[list[Candidate], dict[str, Held]]:
    """Candidates for a prompt of 10,000 bytes, some of them on one store, and what each has seen itself."""
    among, held = [], {}
    for number in range(draw(st.integers(1, 5))):
        stored = draw(st.integers(0, 10_000))
        among.append(
            Candidate(
                name=f"i{number}",
                load=draw(st.integers(0, 12)),
                queued_bytes=draw(st.floats(0, 50_000)),
                compute_bytes_s=draw(RATES),
                stored_bytes=stored,
                pulled_bytes=draw(st.integers(0, 10_000)),
                pull_bytes_s=draw(RATES),
            )
        )
        held[f"i{number}"] = Held(draw(st.integers(0, stored)), 0)
    return among, {name: known for name, known in held.items() if known.seen_bytes}


def takes_s(item: Candidate, usual: float) -> float:
    """By the definition: queued, then pulled or computed, whichever is faster."""
    rate = item.compute_bytes_s or usual
    computed_s = (10_000 - item.stored_bytes) / rate
    if item.pull_bytes_s and item.pulled_bytes > item.stored_bytes:
        pulled_s = (item.pulled_bytes - item.stored_bytes) / item.pull_bytes_s
        computed_s = min(computed_s, (10_000 - item.pulled_bytes) / rate + pulled_s)
    return item.queued_bytes / rate + computed_s


@given(weighed(), st.integers(0, 20))
def test_a_choice_by_cost_can_be_explained(drawn: tuple[list[Candidate], dict[str, Held]], turn: int) -> None:
    among, held = drawn
    choice = cheapest(among, held, turn=turn)
    assert choice is not None
    assert choice == cheapest(among, held, turn=turn)
    rates = sorted(item.compute_bytes_s for item in among if item.compute_bytes_s)
    if not rates:
        assert choice == choose(among, held, turn=turn)
        return
    seen = {item.name: held.get(item.name, Held(0, 0)).seen_bytes for item in among}
    most = max(seen.values())
    why = Why.LEAST_LOADED if not most else Why.AFFINITY if seen[choice.name] == most else Why.BUSY
    assert choice.why is why


@given(weighed(), st.integers(0, 20), st.sampled_from([500.0, 1_000.0, 4_000.0]))
def test_equally_fast_instances_are_chosen_by_when_they_are_done(
    drawn: tuple[list[Candidate], dict[str, Held]], turn: int, rate: float
) -> None:
    among, held = [replace(item, compute_bytes_s=rate) for item in drawn[0]], drawn[1]
    choice = cheapest(among, held, turn=turn)
    assert choice is not None
    done_s = {item.name: takes_s(item, rate) for item in among}
    everywhere_s = min((10_000 - item.had_bytes(rate)) / rate for item in among)  # whoever is chosen
    soonest_s = min(done_s.values()) - everywhere_s
    assert done_s[choice.name] - everywhere_s <= NEAR * soonest_s + NEAR_S + 1e-6


def test_a_prompt_is_pulled_from_a_busy_holder_and_not_from_an_idle_one() -> None:
    holder, other = Candidate("holder", 1, 0.0, 100.0, 1_000), Candidate("other", 0, 0.0, 100.0, 0, 1_000, 400.0)
    held = {"holder": Held(1_000, 0)}
    assert cheapest([holder, other], held, turn=0) == ("holder", Why.AFFINITY)
    busy = replace(holder, queued_bytes=1_000.0)  # ten seconds; pulling takes two and a half
    assert cheapest([busy, other], held, turn=0) == ("other", Why.BUSY)
    assert cheapest([busy, replace(other, pull_bytes_s=0.0)], held, turn=0) == ("holder", Why.AFFINITY)
    assert cheapest([replace(busy, queued_bytes=2_000.0), replace(other, pull_bytes_s=0.0)], held, turn=0) == (
        "other",
        Why.BUSY,
    )


@given(st.lists(st.floats(100.0, 10_000.0), min_size=2, max_size=5), st.integers(0, 20))
def test_new_prompts_go_to_all_that_are_idle_in_turn(rates: list[float], turn: int) -> None:
    """However fast each is: each store keeps its share of them."""
    among = [Candidate(f"i{number}", 0, 0.0, rate) for number, rate in enumerate(rates)]
    chosen = [cheapest(among, {}, turn=turn + step) for step in range(len(among))]
    assert {choice.name for choice in chosen if choice} == {item.name for item in among}


def test_an_instance_that_was_not_measured_counts_as_fast_as_the_others() -> None:
    known, new = Candidate("known", 1, 500.0, 100.0), Candidate("new", 1, 300.0, 0.0)
    assert cheapest([known, new], {}, turn=0) == ("new", Why.LEAST_LOADED)
    assert cheapest([known, replace(new, queued_bytes=700.0)], {}, turn=0) == ("known", Why.LEAST_LOADED)


def test_nobody_is_cheapest_of_none() -> None:
    assert cheapest([], {}, turn=1) is None


S = 1_000_000_000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10_000), st.integers(0, 5)), max_size=40))
def test_work_is_what_was_sent_and_not_answered_yet(steps: list[tuple[bool, int, int]]) -> None:
    """Nothing is measured here, so nothing is known to be done before it is over."""
    work, under_way, now = Work(), {}, 0
    for number, (is_new, size_bytes, place) in enumerate(steps):
        now += S
        if is_new or not under_way:
            under_way[number] = size_bytes
            work.began(number, size_bytes, now)
        else:
            leg = list(under_way)[place % len(under_way)]
            del under_way[leg]
            work.ended(leg, 0, now)
        assert work.queued_bytes(now + S) == sum(under_way.values())
        assert work.bytes_s == 0.0


def test_work_measures_how_fast_an_instance_computes_and_what_it_has_done_of_the_first() -> None:
    work = Work()
    for number in range(4):  # four at once, one after the other: each of them takes a second of the instance
        work.began(number, 1_000, 0)
    for number in range(4):
        assert work.queued_bytes(number * S) == 1_000 * (4 - number)
        work.ended(number, 1_000, (number + 1) * S)
    assert work.bytes_s == 1_000.0
    work.began("a", 2_000, 10 * S)
    work.began("b", 500, 10 * S)
    assert work.queued_bytes(10 * S) == 2_500.0
    assert work.queued_bytes(11 * S) == 1_500.0
    assert work.queued_bytes(99 * S) == 500.0  # the second has not begun, as long as the first is not over
    work.ended("a", 0, 99 * S)
    assert work.queued_bytes(99 * S) == 500.0
    assert work.bytes_s == 1_000.0  # what computed nothing measures nothing


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 1_000))
def test_prefill_is_skipped_where_little_is_left_to_compute(prompt: int, proved: int, from_tokens: int) -> None:
    skip = skip_prefill(prompt, min(proved, prompt), from_tokens=from_tokens)
    left = prompt - min(proved, prompt)
    assert (skip is not None) == (left < from_tokens * BYTES_PER_TOKEN)
    assert (skip is Skip.SHORT) == (prompt < from_tokens * BYTES_PER_TOKEN)


TAKES = st.floats(0.001, 20.0)


def answered(pace: Pace, size_bytes: int, took_s: float) -> None:
    pace.began("earlier", size_bytes, 0.0)
    pace.ended("earlier", took_s)


@given(st.integers(0, 1 << 25), TAKES)
def test_a_silent_prefill_is_given_up_after_several_times_the_usual(size_bytes: int, took_s: float) -> None:
    pace = Pace()
    answered(pace, size_bytes, took_s)
    patience_s = max(LEAST_SILENCE_S, SEVERAL * took_s)
    for leg in range(3):
        pace.began(leg, size_bytes, 100.0)
    assert pace.fell_silent(100.0 + patience_s - 0.001) == []
    assert not pace.is_silent
    assert pace.fell_silent(100.0 + patience_s + 0.001) == [0, 1, 2]
    assert pace.is_silent
    pace.heard(200.0)
    assert not pace.is_silent


@given(TAKES, st.lists(st.floats(0.0, 1.9), min_size=1, max_size=50))
def test_a_queue_is_not_silence(took_s: float, gaps_s: list[float]) -> None:
    """Somebody is answered before two seconds are over, again and again, while the last of the queue waits."""
    pace = Pace()
    answered(pace, 1_000, took_s)
    now_s = 0.0
    pace.began("last", 1_000, now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        assert pace.fell_silent(now_s) == []
        pace.heard(now_s)


@given(st.integers(0, 1 << 25), st.floats(0.0, 1e6))
def test_nobody_is_given_up_before_anything_is_known(size_bytes: int, now_s: float) -> None:
    pace = Pace()
    pace.began("first", size_bytes, 0.0)
    assert pace.fell_silent(now_s) == []


def test_a_longer_prompt_may_take_longer_and_a_shorter_one_as_long() -> None:
    pace = Pace()
    answered(pace, 1_000, 1.0)
    known = (1_000).bit_length()
    assert pace.usual_s(known + 3) == 8.0
    assert pace.usual_s(known - 3) == 1.0
    pace.began("short", 1_000, 0.0)
    pace.began("long", 8_000, 0.0)  # whoever waits behind it waits for it
    assert pace.fell_silent(8 * SEVERAL - 0.1) == []
    assert pace.fell_silent(8 * SEVERAL + 0.1) == ["short", "long"]


def test_what_was_taken_for_silence_once_is_allowed_more_time() -> None:
    """Prompts that were cached at prefill were fast; the first that is not must not be given up for ever."""
    pace = Pace()
    answered(pace, 1_000, 1.0)
    pace.began("first", 1_000, 0.0)
    assert pace.fell_silent(SEVERAL + 0.1) == ["first"]
    pace.ended("first", None)
    pace.began("second", 1_000, 10.0)
    assert pace.fell_silent(10.0 + SEVERAL + 0.1) == []
    usual_s = pace.usual_s((1_000).bit_length())
    assert usual_s == 2.0
    assert pace.fell_silent(10.0 + 2 * SEVERAL + 0.1) == ["second"]
    assert pace.usual_s((1_000).bit_length()) == usual_s  # known to be silent: nothing is learned from that


@given(st.lists(TAKES, min_size=1, max_size=100))
def test_one_slow_answer_at_most_doubles_what_is_usual(times_s: list[float]) -> None:
    pace = Pace()
    usual_s: float | None = None
    for took_s in times_s:
        answered(pace, 1_000, took_s)
        now_s = pace.usual_s((1_000).bit_length())
        assert now_s is not None
        assert min(times_s) <= now_s <= max(times_s)
        assert usual_s is None or now_s <= 2 * usual_s
        usual_s = now_s


def test_a_silent_prefill_is_left_alone_until_it_is_alive_and_then_tried_by_one() -> None:
    pace = Pace()
    answered(pace, 1_000, 1.0)
    pace.began("first", 1_000, 0.0)
    assert pace.fell_silent(SEVERAL + 0.1) == ["first"]
    pace.ended("first", None)
    assert pace.is_left_alone
    pace.checked()
    assert not pace.is_left_alone
    pace.began("second", 1_000, 10.0)
    assert pace.is_left_alone
    pace.heard(11.0)
    assert not pace.is_left_alone
