"""`longest_hit` against an oracle that thinks in single tokens.

The oracle does not know spans, indices or runs: it puts down, token by token, which of a group's tokens an engine would
hold after loading, and asks whether the next token could be computed from that.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import assume, given
from hypothesis import strategies as st

from kvtally.core.hits import NO_HIT, Hit, longest_hit, needed
from kvtally.core.namespace import GroupKind, GroupSpec


class Case(NamedTuple):
    groups: tuple[GroupSpec, ...]
    ends: tuple[int, ...]
    present: tuple[tuple[bool, ...], ...]
    have: tuple[int, ...]
    limit: int
    alignment: int

    def hit(self) -> Hit:
        return longest_hit(
            self.groups,
            self.ends,
            self.present,
            limit_tokens=self.limit,
            alignment_tokens=self.alignment,
            have=self.have,
        )

    def with_object(self, group: int, index: int, is_present: bool) -> Case:
        rows = [list(row) for row in self.present]
        rows[group][index] = is_present
        return self._replace(present=tuple(tuple(row) for row in rows))


def group_spec(kind: GroupKind, window: int) -> GroupSpec:
    window = window if kind is GroupKind.SLIDING else 0
    return GroupSpec(kind=kind, block_tokens=1, page_bytes=((1,),), window_tokens=window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chunks of one size and a tail, or any boundaries at all; presence mostly good, so that hits are found."""
    if draw(st.booleans()):
        chunk = draw(st.integers(1, 6))
        ends = [chunk * (i + 1) for i in range(draw(st.integers(0, 6)))]
        ends += draw(st.lists(st.integers(1, chunk).map(lambda tail: (ends[-1] if ends else 0) + tail), max_size=1))
    else:
        ends = sorted(draw(st.sets(st.integers(1, 30), max_size=7)))
    kinds = draw(st.lists(st.sampled_from(GroupKind), min_size=1, max_size=4))
    groups = tuple(group_spec(kind, draw(st.integers(1, 40))) for kind in kinds)
    mostly = st.sampled_from([True, True, True, False])
    present = tuple(tuple(draw(mostly) for _ in ends) for _ in groups)
    held = st.sampled_from([0, *ends]) | st.integers(0, 35)
    have = tuple(draw(held) for _ in groups) if draw(st.booleans()) else ()
    return Case(groups, tuple(ends), present, have, draw(st.integers(0, 40)), draw(st.integers(1, 4)))


def can_compute(spec: GroupSpec, boundary: int, tokens: set[int], states: set[int]) -> bool:
    """Could an engine compute the token at `boundary` from these keys and values, and these states?"""
    if spec.kind is GroupKind.RECURRENT:
        return boundary in states
    visible = range(boundary) if spec.kind is GroupKind.FULL else range(boundary - spec.window_tokens + 1, boundary)
    return all(token in tokens for token in visible if token >= 0)


def servable(case: Case, boundary: int) -> bool:
    for group, spec in enumerate(case.groups):
        have = case.have[group] if case.have else 0
        tokens, states = set(range(have)), {have}
        for present, (start, end) in zip(case.present[group], pairwise((0, *case.ends)), strict=True):
            if present:
                tokens |= set(range(start, end))
                states.add(end)
        if not can_compute(spec, boundary, tokens, states):
            return False
    return True


def oracle(case: Case) -> int:
    fitting = (end for end in case.ends if end <= case.limit and end % case.alignment == 0)
    return max((end for end in fitting if servable(case, end)), default=0)


@given(cases())
def test_the_hit_is_the_one_the_oracle_finds(case: Case) -> None:
    hit = case.hit()
    assert hit.end_tokens == oracle(case)
    assert hit == NO_HIT or case.ends[hit.boundaries - 1] == hit.end_tokens


@given(cases())
def test_a_hit_is_aligned_and_within_its_limit(case: Case) -> None:
    hit = case.hit()
    assert hit.end_tokens <= case.limit
    assert hit.end_tokens % case.alignment == 0
    assert case.hit() == hit


@given(cases(), st.data())
def test_one_more_object_never_shortens_a_hit(case: Case, data: st.DataObject) -> None:
    assume(case.ends)
    group = data.draw(st.integers(0, len(case.groups) - 1))
    index = data.draw(st.integers(0, len(case.ends) - 1))
    assert (
        case.with_object(group, index, True).hit().end_tokens >= case.with_object(group, index, False).hit().end_tokens
    )


@given(cases())
def test_a_lower_limit_never_gains(case: Case) -> None:
    shorter = [case._replace(limit=limit).hit().end_tokens for limit in range(case.limit + 1)]
    assert shorter == sorted(shorter)


@given(cases())
def test_a_hit_at_the_limit_stays_when_the_limit_is_that_hit(case: Case) -> None:
    hit = case.hit()
    assert case._replace(limit=hit.end_tokens).hit() == hit


@given(cases())
def test_needed_is_exactly_what_a_boundary_cannot_do_without(case: Case) -> None:
    """With everything present every boundary is servable; taking one object away breaks just those that need it."""
    full = case._replace(present=tuple(tuple(True for _ in case.ends) for _ in case.groups))
    for index, end in enumerate(case.ends):
        assert servable(full, end)
        for group, spec in enumerate(case.groups):
            have = case.have[group] if case.have else 0
            wanted = {
                other for other in range(len(case.ends)) if not servable(full.with_object(group, other, False), end)
            }
            assert set(needed(spec, case.ends, index, have)) == wanted


@given(cases())
def test_what_a_hit_needs_is_present_and_enough(case: Case) -> None:
    hit = case.hit()
    assume(hit != NO_HIT)
    rows = []
    for group, spec in enumerate(case.groups):
        wanted = needed(spec, case.ends, hit.boundaries - 1, case.have[group] if case.have else 0)
        assert all(case.present[group][index] for index in wanted)
        rows.append(tuple(index in wanted for index in range(len(case.ends))))
    assert servable(case._replace(present=tuple(rows)), hit.end_tokens)


def test_a_prompt_without_boundaries_has_no_hit() -> None:
    spec = group_spec(GroupKind.FULL, 0)
    assert longest_hit([spec], [], [[]], limit_tokens=100) == NO_HIT


def test_a_window_of_one_token_needs_nothing() -> None:
    """The next token then sees itself only."""
    spec = group_spec(GroupKind.SLIDING, 1)
    assert longest_hit([spec], [4, 8], [[False, False]], limit_tokens=8) == Hit(2, 8)
    assert len(needed(spec, [4, 8], 1)) == 0


def test_a_window_may_end_inside_an_object() -> None:
    """Window 6 at boundary 8 sees tokens 3..7: token 3 lies in the first object."""
    spec = group_spec(GroupKind.SLIDING, 6)
    assert needed(spec, [4, 8], 1) == range(2)
    assert needed(group_spec(GroupKind.SLIDING, 5), [4, 8], 1) == range(1, 2)


def test_a_state_is_no_use_at_any_other_boundary() -> None:
    spec = group_spec(GroupKind.RECURRENT, 0)
    assert longest_hit([spec], [4, 8], [[True, False]], limit_tokens=8) == Hit(1, 4)
    assert longest_hit([spec], [4, 8], [[False, False]], limit_tokens=8, have=[8]) == Hit(2, 8)
    assert longest_hit([spec], [4, 8], [[False, False]], limit_tokens=8, have=[7]) == NO_HIT
