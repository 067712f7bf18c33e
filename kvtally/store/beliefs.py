"""Beliefs: what tiers that others change are said to hold.

    said to hold ─▶ in the index, as that tier's ─▶ read: verified, or not ─┐
                                  └ a few seconds later ────────────────────┴─▶ out of the index

Others may change or lose what they hold at any time. So what they say is never an entry that lives for ever: it counts
as present for `BELIEF_NS`, or while somebody waits for it. It is verified on arrival. Forgetting a belief takes nothing
out of the tier, and two copies of one object with different bytes do not accuse each other: KV that is computed again
is rarely the same to the bit.

Owns all beliefs and their bound. Neighbours: `peers` and `lookups` (left: they hear what is held), `staging` and
`lower` (left: they read and replace it), `core.residency` (right: the index). No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtally.core.residency import ChainConflict, Family, Node
from kvtally.store.alarms import Alarm
from kvtally.store.context import Context
from kvtally.store.jobs import PeerLink, PeerPlace
from kvtally.store.lease import Part
from kvtally.store.tiers.base import Boundary
from kvtally.wire.limits import SECOND_NS

BELIEF_NS = 5 * SECOND_NS
LOAN_NS = 10 * SECOND_NS  # how long a peer holds what it has found for us, after the last pull
MOST_BOUNDARIES = 65_536  # in all beliefs; beyond that, the oldest go


class Loan(NamedTuple):
    """A lease at another store."""

    link: PeerLink
    lease: int


class Claim(NamedTuple):
    """One object that a tier is said to hold."""

    boundary: Boundary
    bit: int
    length_bytes: int
    checksum: int
    at: int = 0  # the index of its boundary, in the question that was asked


@dataclass(slots=True, eq=False)
class Belief:
    """Everything that one answer has said."""

    id: int
    tier: int
    loan: Loan | None  # from a peer
    ends_ns: int  # not believed any longer than this, even if somebody waits for it
    alarm: Alarm
    parts: dict[Part, int] = field(default_factory=dict)  # object -> index of its boundary
    boundaries: int = 0
    bad: list[tuple[int, int, int]] = field(default_factory=list)  # did not verify: index, group, rank


class Beliefs:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._residency = context.residency
        self._beliefs: dict[int, Belief] = {}  # the oldest first
        self._of: dict[tuple[int, Node, int], Belief] = {}  # tier and object -> the belief that it belongs to
        self._boundaries = 0
        self._ended: list[Belief] = []  # loans to be given back

    def __len__(self) -> int:
        return len(self._beliefs)

    def take_in(
        self, tier: int, family: Family, claims: Iterable[Claim], now_ns: int, *, loan: Loan | None = None
    ) -> None:
        """Believe that a tier holds these objects. What contradicts the index is left out."""
        number = self._context.new_id()
        alarm = self._context.alarms.set(now_ns + BELIEF_NS, partial(self._expire, number))
        belief = Belief(number, tier, loan, now_ns + (LOAN_NS if loan is not None else BELIEF_NS), alarm)
        nodes: set[Node] = set()
        for claim in claims:
            node = self._add(tier, family, claim)
            if node is not None:
                belief.parts[node, claim.bit] = claim.at
                self._of[tier, node, claim.bit] = belief
                nodes.add(node)
        belief.boundaries = len(nodes)
        self._boundaries += belief.boundaries
        self._beliefs[number] = belief
        if not belief.parts:
            self._end(belief)
        while self._boundaries > MOST_BOUNDARIES:
            self._end(next(iter(self._beliefs.values())))

    def _add(self, tier: int, family: Family, claim: Claim) -> Node | None:
        """Add one object to the index; None if it contradicts the index, or is believed already."""
        residency, boundary = self._residency, claim.boundary
        if not 0 <= claim.bit < family.width or not 0 < claim.length_bytes <= self._context.limits.object_bytes:
            return None
        try:
            node = residency.ensure(family, *boundary)
        except ChainConflict:
            return None
        is_known = residency.tier_mask(node, tier) >> claim.bit & 1
        if is_known or residency.differs(node, claim.bit, claim.length_bytes, claim.checksum):
            residency.settle(node)
            return None
        residency.add(node, claim.bit, tier, claim.length_bytes, claim.checksum)
        return node

    # ---- what becomes of them

    def place(self, tier: int, node: Node, bit: int) -> PeerPlace | None:
        """Where a peer has this object; None if it is not believed (any more)."""
        belief = self._of.get((tier, node, bit))
        if belief is None or belief.loan is None:
            return None
        return PeerPlace(belief.loan.link.address, belief.loan.lease, belief.parts[node, bit])

    def arrived(self, tier: int, node: Node, bit: int, now_ns: int) -> None:
        """The object was read and verified. Its peer need not hold it any longer, and holds the rest for longer now."""
        belief = self._of.get((tier, node, bit))
        if belief is not None and belief.loan is not None:
            belief.ends_ns = now_ns + LOAN_NS
            self.forget(tier, node, bit)

    def accuse(self, tier: int, node: Node, bit: int) -> None:
        """The object did not verify. Its peer is told."""
        belief = self._of.get((tier, node, bit))
        if belief is not None:
            ranks = node.family.ranks
            belief.bad.append((belief.parts[node, bit], bit // ranks, bit % ranks))
            self.forget(tier, node, bit)

    def forget(self, tier: int, node: Node, bit: int) -> None:
        """Believe it no longer. Unknown ones are ignored."""
        belief = self._of.get((tier, node, bit))
        if belief is not None:
            self._forget(belief, (node, bit))
            if not belief.parts:
                self._end(belief)

    def lost(self, address: str) -> None:
        """A peer is gone: nothing that it was said to hold can be had."""
        for belief in [b for b in self._beliefs.values() if b.loan is not None and b.loan.link.address == address]:
            self._end(belief)

    def reset(self, family: Family) -> None:
        """A namespace is forgotten."""
        for belief in [b for b in self._beliefs.values() if any(node.family is family for node, _ in b.parts)]:
            self._end(belief)

    def take_ended(self) -> list[Belief]:
        """Beliefs with a loan that have ended since the last call: the loans are to be given back."""
        ended, self._ended = self._ended, []
        return ended

    def _forget(self, belief: Belief, part: Part) -> None:
        del belief.parts[part]
        del self._of[belief.tier, *part]
        self._residency.drop(*part, belief.tier)

    def _end(self, belief: Belief) -> None:
        del self._beliefs[belief.id]
        self._context.alarms.cancel(belief.alarm)
        self._boundaries -= belief.boundaries
        for part in list(belief.parts):
            self._forget(belief, part)
        if belief.loan is not None:
            self._ended.append(belief)

    def _expire(self, number: int, now_ns: int) -> None:
        """Its time is over, unless somebody waits for what it says."""
        belief = self._beliefs[number]
        if now_ns < belief.ends_ns and any(node.pins for node, _ in belief.parts):
            next_ns = min(now_ns + BELIEF_NS, belief.ends_ns)
            belief.alarm = self._context.alarms.set(next_ns, partial(self._expire, number))
        else:
            self._end(belief)

    # ---- for checks

    def check(self) -> None:
        assert self._boundaries == sum(belief.boundaries for belief in self._beliefs.values())
        assert len(self._of) == sum(len(belief.parts) for belief in self._beliefs.values())
        for (tier, node, bit), belief in self._of.items():
            assert belief.tier == tier and (node, bit) in belief.parts and belief.parts
            assert self._residency.tier_mask(node, tier) >> bit & 1
