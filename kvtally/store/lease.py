"""One lease: everything that a hit needs, held for a client, and the states that it goes through.

    WAITING ──there is room──▶ GRANTED ──nothing more is on its way──▶ ANNOUNCED ──released, expired──▶ ENDED
       └───────────────────────────┴── given back, expired ──────────────────────────────────────────────▲

`leases` owns it and moves it on; `staging` brings up what it awaits; `load_estimates` says how long that takes. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtally.core.residency import Family, Node
from kvtally.store.alarms import Alarm
from kvtally.store.context import Session
from kvtally.wire.messages import Lookup

Part = tuple[Node, int]  # one object: its node and its bit there
Need = tuple[int, Node, int]  # boundary index of the lookup, node, mask of objects


class LeaseState(Enum):
    WAITING = "waiting"  # for room: it holds nothing
    GRANTED = "granted"  # all that it needs is pinned, and some of that is still on its way up
    ANNOUNCED = "announced"  # all that is promised is in the arena, and the client was told (`Found` or `Staged`)
    ENDED = "ended"  # given back, or expired


_NEXT = {
    LeaseState.WAITING: {LeaseState.GRANTED, LeaseState.ENDED},
    LeaseState.GRANTED: {LeaseState.ANNOUNCED, LeaseState.ENDED},
    LeaseState.ANNOUNCED: {LeaseState.ENDED},
    LeaseState.ENDED: set[LeaseState](),
}


@dataclass(slots=True, eq=False)
class Lease:
    id: int
    session: Session
    family: Family
    request: Lookup
    path: list[Node | None]
    end_tokens: int  # of the hit that it holds, or waits for
    needs: list[Need]  # boundary indices rise
    alarm: Alarm
    started_ns: int
    found_reason: str  # why the hit that was found is not longer
    span_ns: int  # how long it lasts
    peer_bytes: int = 0  # of a peer's lease: all that it holds
    state: LeaseState = LeaseState.WAITING
    # Of its request.
    wanted_ns: int | None = None  # when the engine came to it; None: not yet
    tokens_s: int = 0  # what the engine computes meanwhile; 0: load whatever it takes
    is_read: bool = False  # somebody asked where its objects lie
    # Of its staging.
    tier: int = 0  # the lowest that it stages from
    awaited: set[Part] = field(default_factory=set)  # objects still on their way up
    staged: dict[Node, int] = field(default_factory=dict)  # boundary of which something was staged -> lowest tier
    staged_bytes: int = 0
    staged_ns: int | None = None  # when it was announced
    reason: str = ""  # why less than was found is promised
    may_aim_lower: bool = False  # something that was to be staged has left the index
    # Of the last weighing.
    load_s: float = 0.0
    compute_s: float = 0.0
    left_tokens: int = 0  # found, and not worth loading

    def enter(self, state: LeaseState) -> None:
        assert state in _NEXT[self.state], f"a lease that is {self.state.value} cannot become {state.value}"
        self.state = state

    @property
    def is_held(self) -> bool:
        """Whether what it needs is pinned."""
        return self.state in (LeaseState.GRANTED, LeaseState.ANNOUNCED)

    @property
    def is_announced(self) -> bool:
        return self.state is LeaseState.ANNOUNCED
