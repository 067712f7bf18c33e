"""Routing: equal beginnings have equal prints, the map agrees with a plain list, and choices can be explained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtally.core.routing import (
    BYTES_PER_TOKEN,
    SLACK,
    STEP_BYTES,
    Candidate,
    Held,
    PrefixMap,
    Print,
    Skip,
    Why,
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


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 1_000))
def test_prefill_is_skipped_where_little_is_left_to_compute(prompt: int, proved: int, from_tokens: int) -> None:
    skip = skip_prefill(prompt, min(proved, prompt), from_tokens=from_tokens)
    left = prompt - min(proved, prompt)
    assert (skip is not None) == (left < from_tokens * BYTES_PER_TOKEN)
    assert (skip is Skip.SHORT) == (prompt < from_tokens * BYTES_PER_TOKEN)
