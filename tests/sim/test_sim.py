"""Seeded lives of a whole cluster. A failing seed replays alone: `python -m kvtally.testing.sim SEED`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvtally.core.residency import Family, Node
from kvtally.store.beliefs import Beliefs, Claim
from kvtally.store.mover import read_verified
from kvtally.store.peers import Peers
from kvtally.store.sends import Sends
from kvtally.store.tiers.base import ObjectRecord, Tier
from kvtally.testing import sim_node
from kvtally.testing.sim import run
from kvtally.testing.sim_client import WrongByte
from kvtally.wire.messages import Pull

FAST_SEEDS = 150
ALL_SEEDS = int(os.environ.get("KVTALLY_SIM_SEEDS", "10000"))
# What must have happened often enough in a batch for its success to mean anything.
COVERED = [
    *("verified", "staged", "rejected", "kill_store", "crash_client", "stop_client", "drop_connection"),
    *("wanted", "cancelled", "staged:slow_tier", "stop_store", "reset"),
    *("pulled", "from_peer", "probed", "cut", "half_open", "partition", "KV-604"),
    *("promised", "withdrawn", "decode:withdrawn", "receipt:proved", "receipt:short", "receipt:recomputed"),
]
ALSO_COVERED = [
    *("KV-401", "KV-601", "KV-602", "KV-603", "scribble", "bad", "flip_disk", "fail_disk", "staging_failed"),
    *("kill_machine", "send_failed", "miss:peer_lost", "staged:peer_lost", "miss:limit", "offered"),
]


def batch(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed)
    return seen


def test_some_hundred_lives() -> None:
    seen = batch(range(FAST_SEEDS))
    assert all(seen[event] >= 10 for event in COVERED), dict(seen)


@pytest.mark.slow
def test_thousands_of_lives() -> None:
    step = 100
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        seen = sum(pool.map(batch, [range(at, at + step) for at in range(0, ALL_SEEDS, step)]), Counter[str]())
    assert all(seen[event] >= ALL_SEEDS // 125 for event in COVERED + ALSO_COVERED), dict(seen)
    print(f"{ALL_SEEDS} lives: {dict(seen)}")


def test_one_seed_is_one_run() -> None:
    assert run(7) == run(7)


# ---- stores that are broken on purpose: each must be found within some hundred lives


def accepts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes up from disk is not verified."""

    def read(tier: Tier, record: ObjectRecord, target: Sequence[memoryview]) -> bool:
        return read_verified(tier, record, target) or True

    monkeypatch.setattr(sim_node, "read_verified", read)


def does_not_pin_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is being sent is held by nothing but its lease."""
    pull = Sends.pull

    def pull_unpinned(sends: Sends, connection: int, request: Pull, now_ns: int) -> None:
        pull(sends, connection, request, now_ns)
        while sends._sending:
            sends._residency.unpin(sends._sending.popitem()[1])

    monkeypatch.setattr(Sends, "pull", pull_unpinned)


def takes_other_bits_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer says is believed although this store knows the object with another checksum."""

    def add(beliefs: Beliefs, tier: int, family: Family, claim: Claim) -> Node | None:
        residency = beliefs._residency
        node = residency.ensure(family, *claim.boundary)
        if residency.tier_mask(node, tier) >> claim.bit & 1:
            residency.settle(node)
            return None
        residency.add(node, claim.bit, tier, claim.length_bytes, claim.checksum)
        return node

    monkeypatch.setattr(Beliefs, "_add", add)


def waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a peer has no deadline."""
    monkeypatch.setattr(Peers, "_late", lambda peers, number, now_ns: None)


def resets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are not told of a reset."""
    monkeypatch.setattr(Peers, "reset", lambda peers, digest, name: None)


def believes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beliefs, "_expire", lambda beliefs, number, now_ns: None)


@pytest.mark.parametrize(
    ("breaks", "error", "message"),
    [
        (accepts_anything, AssertionError, "did not verify although nobody scribbled"),
        (does_not_pin_sends, AssertionError, "not its own any more"),
        (takes_other_bits_for_its_own, AssertionError, "good bytes were quarantined"),
        (waits_for_ever, AssertionError, "has waited"),
        (resets_alone, WrongByte, "was served after the reset"),
        (believes_for_ever, AssertionError, "left behind"),
    ],
)
def test_a_broken_store_is_found(
    breaks: object, error: type[AssertionError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(breaks)
    breaks(monkeypatch)
    with pytest.raises(error, match=message):
        batch(range(500))
