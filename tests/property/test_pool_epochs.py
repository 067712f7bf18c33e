"""Epochs: whatever stores, resets and a forgetful pool do, nothing from before a reset is served after it."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtally.store.tiers.pool.epochs import Epochs
from kvtally.store.tiers.pool.format import Epoch

NAMESPACE = b"n" * 32
stores = st.integers(0, 2)


class EpochMachine(RuleBasedStateMachine):
    """Three stores and a pool that may forget, or go back to what it said before. A store writes and reads under its
    own epoch only. `time` counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.drawn = 0
        self.pool: Epoch | None = None
        self.history: list[Epoch | None] = [None]
        self.stores = [self.new_store() for _ in range(3)]
        self.reset_at = [0, 0, 0]  # when each store was told that its reset is done
        self.written: dict[Epoch, int] = {}  # epoch -> when it was first written in

    def new_store(self) -> Epochs:
        return Epochs(lambda: 0.0, self.random, lambda: float(self.time))

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(count, "big")

    def say(self, epoch: Epoch | None) -> None:
        self.pool = epoch
        self.history.append(epoch)

    @rule(store=stores)
    def ask(self, store: int) -> None:
        self.stores[store].heard(NAMESPACE, self.pool)

    @rule(store=stores)
    def tell(self, store: int) -> None:
        """As the ledger does: ask, then tell if the pool does not know."""
        epochs = self.stores[store]
        epochs.heard(NAMESPACE, self.pool)
        epoch = epochs.begin(NAMESPACE)
        if epochs.is_untold(NAMESPACE):
            self.say(epoch)
            epochs.told(NAMESPACE, epoch)

    @rule(store=stores)
    def write(self, store: int) -> None:
        self.tell(store)
        epoch = self.stores[store].get(NAMESPACE)
        assert epoch is not None
        self.time += 1
        self.written.setdefault(epoch, self.time)

    @rule(store=stores)
    def reset(self, store: int) -> None:
        self.stores[store].reset(NAMESPACE)
        self.tell(store)
        self.time += 1
        self.reset_at[store] = self.time

    @rule(store=stores)
    def reset_that_fails(self, store: int) -> None:
        """The pool cannot be reached: nothing old may be served all the same."""
        self.stores[store].reset(NAMESPACE)
        self.time += 1
        self.reset_at[store] = self.time

    @rule()
    def lose(self) -> None:
        self.say(None)

    @precondition(lambda self: len(self.history) > 1)
    @rule(data=st.data())
    def fail_over(self, data: st.DataObject) -> None:
        self.pool = data.draw(st.sampled_from(self.history))

    @rule(store=stores)
    def restart(self, store: int) -> None:
        self.stores[store] = self.new_store()
        self.reset_at[store] = 0  # it knows of no reset any more

    @invariant()
    def nothing_from_before_a_reset(self) -> None:
        for epochs, reset_at in zip(self.stores, self.reset_at, strict=True):
            epoch = epochs.get(NAMESPACE)
            if epoch in self.written:
                assert self.written[epoch] > reset_at


TestEpochs = EpochMachine.TestCase
TestEpochs.settings = settings(max_examples=300, stateful_step_count=40)


def new_epochs(drawn: Iterator[int]) -> Epochs:
    return Epochs(lambda: 0.0, lambda count: next(drawn).to_bytes(count, "big"), lambda: 0.0)


def test_stores_agree_again_after_two_resets_at_once() -> None:
    """Neither of two that were reset at the same moment gives way to the other's epoch; they meet in the next."""
    drawn = iter(range(1, 100))
    first, second = (new_epochs(drawn) for _ in range(2))
    pool: Epoch | None = None
    for epochs in (first, second):
        epochs.reset(NAMESPACE)
    for _ in range(3):
        for epochs in (first, second):
            epochs.heard(NAMESPACE, pool)
            epoch = epochs.begin(NAMESPACE)
            if epochs.is_untold(NAMESPACE):
                pool = epoch
                epochs.told(NAMESPACE, epoch)
    assert first.get(NAMESPACE) == second.get(NAMESPACE) == pool


def test_a_reset_by_a_store_that_knows_nothing_counts() -> None:
    """The pool has lost its epoch, and a new store is reset: others give way, however many resets they have made."""
    now = [1_000.0]
    drawn = iter(range(1, 100))
    old, fresh = (
        Epochs(lambda: 0.0, lambda count: next(drawn).to_bytes(count, "big"), lambda: now[0]) for _ in range(2)
    )
    for _ in range(5):
        old.reset(NAMESPACE)
        old.told(NAMESPACE, old.begin(NAMESPACE))
        now[0] += 10
    fresh.reset(NAMESPACE)
    made = fresh.begin(NAMESPACE)
    fresh.told(NAMESPACE, made)
    old.heard(NAMESPACE, made)
    assert old.get(NAMESPACE) == made
    assert old.untold() == []


def test_a_pool_that_was_emptied_begins_where_it_says() -> None:
    drawn = iter(range(1, 100))
    old, fresh = (new_epochs(drawn) for _ in range(2))
    old.heard(NAMESPACE, Epoch(1, b"zzzzz"))
    fresh.heard(NAMESPACE, None)
    pool = fresh.begin(NAMESPACE)  # a store that was just started is the first one to write
    fresh.told(NAMESPACE, pool)
    old.heard(NAMESPACE, pool)
    assert old.get(NAMESPACE) == pool
    assert old.untold() == []
