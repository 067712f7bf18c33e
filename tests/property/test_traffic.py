"""Prefill instances chosen by cost, under simulated traffic: the first token comes sooner, and never much later.

Each case is a cluster drawn from a seed: rates, stores, links, how much prompts have in common, load. Both rules see
the same arrivals, and with both the store that has a prompt is named, so that it can be pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean

import pytest

from kvtally.core.routing import Candidate, Choice, Held, cheapest, choose
from tests.property.traffic import REQUEST_S, Rule, Traffic, drawn

CASES, RUNS, REQUESTS = 32, 4, 500  # the times of one run are chance to a tenth and more


def by_requests(candidates: Sequence[Candidate], held: dict[str, Held], turn: int) -> Choice | None:
    return choose(candidates, held, turn=turn)


def by_cost(candidates: Sequence[Candidate], held: dict[str, Held], turn: int) -> Choice | None:
    return cheapest(candidates, held, turn=turn)


def by_cost_unmeasured(candidates: Sequence[Candidate], held: dict[str, Held], turn: int) -> Choice | None:
    return cheapest([replace(item, compute_bytes_s=0.0) for item in candidates], held, turn=turn)


def by_load_alone(candidates: Sequence[Candidate], held: dict[str, Held], turn: int) -> Choice | None:
    return choose(candidates, {}, turn=turn)


def ratios(rule: Rule, cases: int) -> list[float]:
    """For each case the mean time to the first token, in times of what it is by the number of requests."""
    found = []
    for case in range(cases):
        clusters = [drawn(case, run, REQUESTS) for run in range(RUNS)]
        theirs, ours = (fmean(Traffic(each, of).run() for each in clusters) for of in (by_requests, rule))
        found.append(ours / theirs)
    return found


def test_by_cost_the_first_token_comes_sooner_and_never_much_later() -> None:
    found = ratios(by_cost, CASES)
    assert geometric_mean(found) < 0.9
    assert max(found) <= 1.05


def test_a_rule_that_forgets_who_has_a_prompt_is_found_out() -> None:
    found = ratios(by_load_alone, 8)
    assert geometric_mean(found) > 1.05
    assert max(found) > 2


def test_without_measurements_nothing_changes() -> None:
    assert ratios(by_cost_unmeasured, 4) == [1.0] * 4


def test_one_conversation_alone_takes_what_its_prompts_take() -> None:
    """The simulation itself: nothing is computed twice where nobody else is, and nothing waits."""
    for case in range(8):
        cluster = drawn(case, 0, 20)
        text, *messages = cluster.talks[0].segments
        rates = [1_000.0 for _ in cluster.rates]
        traffic = Traffic(replace(cluster, talks=cluster.talks[:1], room_bytes=1e18, rates=rates), by_cost)
        traffic.run()
        first, *later = messages
        sizes = [text[1] + first[1], *(size for _, size in later)]
        assert traffic.first_tokens_s == [pytest.approx(REQUEST_S + size / 1_000.0) for size in sizes]
