"""What a pool holds of a prompt: one question for all its boundaries.

Where names cost nothing to ask for, all manifests and tails are asked for at once, with the epoch. Where each is a
request (`Engine.is_charged`), the end is searched for (`search`), and tails are asked for there alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtally.core.keys import ROOT_CHAIN
from kvtally.core.namespace import Namespace
from kvtally.store.tiers.base import Boundary, Holding
from kvtally.store.tiers.pool.format import EpochNames
from kvtally.store.tiers.pool.ledger import FRESH_S, Ledger
from kvtally.store.tiers.pool.search import Rounds, search

TURNS = 3  # how often a prompt is asked for again because a reset came in between

Holdings = list[Holding | None]


def find(ledger: Ledger, namespace: Namespace, boundaries: Sequence[Boundary]) -> Holdings:
    """What is held at each boundary. One with the root's chain stands for the beginning of every prompt: it has tails
    and no objects."""
    digest = namespace.digest
    for _ in range(TURNS):
        names = ledger.names_of(digest)
        if names is None:
            ledger.ask_epoch(digest)
            if ledger.names_of(digest) is None:
                break  # nobody has ever written here
            continue
        found = (_search if ledger.engine.is_charged else _ask_all)(ledger, namespace, names, boundaries)
        if ledger.names_of(digest) == names:
            return found
    return [None] * len(boundaries)


def _ask_all(ledger: Ledger, namespace: Namespace, names: EpochNames, boundaries: Sequence[Boundary]) -> Holdings:
    count = len(boundaries)
    wanted = [names.manifest(b.chain) for b in boundaries] + [names.tails(b.chain) for b in boundaries]
    held = ledger.ask(namespace.digest, wanted)
    found: Holdings = []
    for index, boundary in enumerate(boundaries):
        rows = _rows(ledger, namespace, wanted[index], boundary, held[index])
        found.append(_of(rows, ledger.tails(wanted[count + index], held[count + index])))
    # Writers must not think that it is there.
    ledger.unremember([name for name, data in zip(wanted[:count], held, strict=False) if data is None])
    return found


def _search(ledger: Ledger, namespace: Namespace, names: EpochNames, boundaries: Sequence[Boundary]) -> Holdings:
    digest = namespace.digest
    holdings: Holdings = [None] * len(boundaries)
    first = int(boundaries[0].chain == ROOT_CHAIN)  # it has tails only
    is_fresh = ledger.epochs.age_s(digest) < FRESH_S
    rounds = search(len(boundaries) - first)
    indexes = _next_round(rounds, None)
    while indexes is not None:
        wanted = [names.manifest(boundaries[first + index].chain) for index in indexes]
        held = ledger.engine.get_small(wanted) if is_fresh else ledger.ask(digest, wanted)
        if ledger.names_of(digest) != names:
            return holdings  # the caller asks again
        is_fresh = True
        for index, name, manifest in zip(indexes, wanted, held, strict=True):
            rows = _rows(ledger, namespace, name, boundaries[first + index], manifest)
            holdings[first + index] = _of(rows, ())
        indexes = _next_round(rounds, [holdings[first + index] is not None for index in indexes])
    last = max((index for index, holding in enumerate(holdings) if holding is not None), default=first - 1)
    if last >= 0:
        name = names.tails(boundaries[last].chain)
        tails = ledger.tails(name, ledger.engine.get_small([name])[0])
        holding = holdings[last]
        holdings[last] = _of(holding.rows if holding is not None else (), tails)
    return holdings


def _next_round(rounds: Rounds, answers: list[bool] | None) -> list[int] | None:
    """The next questions of a search; None when it is over."""
    try:
        return next(rounds) if answers is None else rounds.send(answers)
    except StopIteration:
        return None


def _rows(
    ledger: Ledger, namespace: Namespace, name: str, boundary: Boundary, data: bytes | None
) -> tuple[tuple[int, int], ...]:
    """What a manifest says of a boundary, if it speaks of that one."""
    manifest = ledger.manifest(namespace, name, boundary.chain, data)
    if manifest is None:
        return ()
    if manifest.boundary != boundary:
        ledger.count("damaged")
        return ()
    return tuple(sorted(manifest.rows.items()))


def _of(rows: tuple[tuple[int, int], ...], tails: tuple[int, ...]) -> Holding | None:
    return Holding(rows, tails) if rows or tails else None
