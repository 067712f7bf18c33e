"""Offers: another store computes a prompt that will be wanted here, so its chunks are pulled as they are committed.

    Offer ─▶ look up a boundary a few chunks on, waiting at the source until it is committed ─▶ staged ─▶ further on
          ─▶ the end of the prompt, or nothing new for too long

Each offer is a client of the store itself: it asks `lookups` and takes its replies from its session's inbox, so that
asking, staging and verifying are what they are for engines. What was staged is given back at once, and stays in the
arena like everything else that was used just now. When decode's own lookup comes, only the last step's chunks are
missing.
Recurrent states are not followed: they exist at few boundaries, and decode needs only the last one.

Owns the offers that are being followed. Neighbours: `lookups` and `leases` (right), `store` (left). No I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

from kvtally.core.keys import CHAIN_BYTES
from kvtally.core.namespace import GroupKind
from kvtally.core.residency import Family
from kvtally.store.alarms import Alarm
from kvtally.store.context import Context, Session
from kvtally.store.leases import Leases
from kvtally.store.lookups import Lookups
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import Done, Found, Lookup, MissReason, Offer, Refused, Release, Reply, Staged

MOST_OFFERS = 256  # followed at once
WAIT_MS = 2_000  # for a boundary, each time
IDLE_NS = 30 * SECOND_NS  # a prompt of which nothing new comes for so long is not followed any further
AGAIN_NS = SECOND_NS // 10  # until it is asked for again after an answer that brought nothing
MOST_STEPS = 8  # boundaries that are waited for at once: fewer questions than chunks
COMING = ("", MissReason.ABSENT, MissReason.STATE_ABSENT, MissReason.PENDING)  # more may come


@dataclass(slots=True, eq=False)
class Followed:
    """One offer."""

    id: int
    session: Session
    offer: Offer
    alarm: Alarm  # when to give it up
    boundaries: int = 0  # of the prompt, that have been in the arena
    steps: int = 1  # how many more are waited for
    lease: int = 0  # waits to be staged
    reason: str = ""  # why that lease holds no more
    again: Alarm | None = None  # when to ask again
    is_over: bool = False


class Offers:
    def __init__(self, context: Context, lookups: Lookups, leases: Leases) -> None:
        self._context = context
        self._lookups = lookups
        self._leases = leases
        self._followed: dict[int, Followed] = {}

    def take(self, session: Session, family: Family, offer: Offer, now_ns: int) -> None:
        """A peer offers a prompt."""
        ends = offer.ends
        is_sound = bool(ends) and len(ends) <= self._context.limits.chains_per_lookup
        is_sound &= (
            len(offer.chains) == CHAIN_BYTES * len(ends) and len(offer.ticket) <= self._context.limits.ticket_bytes
        )
        if is_sound and len(self._followed) < MOST_OFFERS:
            number = self._context.new_id()
            own = Session(-number, shared_memory=True, family=family, client="an offer", inbox=[])
            alarm = self._context.alarms.set(now_ns + IDLE_NS, partial(self._end, number))
            followed = self._followed[number] = Followed(number, own, offer, alarm)
            self._ask(followed, now_ns)
        self._context.send(session, Done(offer.id))

    def advance(self, now_ns: int) -> bool:
        """Take the replies that have come. True if anything was done."""
        busy = [followed for followed in self._followed.values() if followed.session.inbox]
        for followed in busy:
            inbox, followed.session.inbox = followed.session.inbox, []
            for reply in inbox or ():
                if not followed.is_over:
                    self._take_reply(followed, reply, now_ns)
        return bool(busy)

    def _ask(self, followed: Followed, now_ns: int) -> None:
        offer, family = followed.offer, followed.session.family
        assert family is not None
        count = min(followed.boundaries + followed.steps, len(offer.ends))
        end = offer.ends[count - 1]
        question = Lookup(
            1,
            offer.chains[: count * CHAIN_BYTES],
            offer.ends[:count],
            end,
            have=[end if spec.kind is GroupKind.RECURRENT else 0 for spec in family.namespace.groups],
            wait_ms=WAIT_MS,
            hold=True,
            early=True,
            source=offer.source,
            ticket=offer.ticket,
            until_tokens=end,
        )
        self._lookups.lookup(followed.session, question, now_ns)

    def _take_reply(self, followed: Followed, reply: Reply, now_ns: int) -> None:
        if isinstance(reply, Found) and reply.staging:
            followed.lease, followed.reason = reply.lease, reply.withdrawn or reply.reason
        elif isinstance(reply, Found):
            self._reached(followed, reply.end_tokens, reply.lease, reply.withdrawn or reply.reason, now_ns)
        elif isinstance(reply, Staged) and reply.lease == followed.lease:
            lease = reply.lease if reply.end_tokens else 0  # one that holds nothing is over
            self._reached(followed, reply.end_tokens, lease, reply.reason or followed.reason, now_ns)
        elif isinstance(reply, Refused):  # the offer makes no sense
            self._end(followed.id, now_ns)

    def _reached(self, followed: Followed, end_tokens: int, lease: int, reason: str, now_ns: int) -> None:
        """So much of the prompt is in the arena now."""
        followed.lease = 0
        if lease:
            self._leases.release(followed.session, Release(2, [lease]), now_ns)
        reached = bisect_right(followed.offer.ends, end_tokens)
        is_new = reached > followed.boundaries
        if is_new:
            followed.boundaries, followed.steps = reached, min(2 * followed.steps, MOST_STEPS)
            self._context.alarms.cancel(followed.alarm)
            followed.alarm = self._context.alarms.set(now_ns + IDLE_NS, partial(self._end, followed.id))
        else:
            followed.steps = 1
        family = followed.session.family
        is_forgotten = family is not None and family.is_forgotten  # a reset does not reach this session
        if followed.boundaries == len(followed.offer.ends) or reason not in COMING or is_forgotten:
            self._end(followed.id, now_ns)
        elif is_new:
            self._ask(followed, now_ns)
        else:  # its source has waited already, or could not: asking at once might go on for ever
            followed.again = self._context.alarms.set(now_ns + AGAIN_NS, partial(self._again, followed))

    def _again(self, followed: Followed, now_ns: int) -> None:
        followed.again = None
        self._ask(followed, now_ns)

    def _end(self, number: int, now_ns: int) -> None:
        followed = self._followed.pop(number)
        followed.is_over = True
        if followed.again is not None:
            self._context.alarms.cancel(followed.again)
        self._context.alarms.cancel(followed.alarm)
        self._lookups.disconnect(followed.session)
        self._leases.disconnect(followed.session, now_ns)

    # ---- for checks

    @property
    def open(self) -> int:
        return len(self._followed)
