"""Peers: other nodes' stores, asked what they have of a prompt.

    lookup names a source ─▶ ask ──Lookup(hold)──▶ peer ─▶ Found, Staged, Slots ─▶ beliefs, with a loan ─▶ answered
    beliefs end ─▶ the loan is given back: Release               (the bytes are pulled by `staging` and `mover`)
    a peer offers a prompt, or is offered one: Offer (`offers` takes it up on the other side)

A peer that cannot be reached, or does not answer in time, is left alone for a while: of many lookups that name it, one
pays for that. Each peer has its own health, so that one that is gone costs nothing where others are asked.

After a reset, nothing is taken from a peer that has not carried out the same reset: it may have what was forgotten. A
reset that a peer has asked for is passed on in the same way, under its name. Otherwise what was forgotten would come
back from a third store. A store that knows the name has carried it out, and only says so.

Owns the questions, the peers' health and the loans. Neighbours: `lookups` (left: asks, and takes the answers by
`take_answers`), `beliefs` (right: what was said), the shell (sends messages and reports what came). No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from msgspec import structs

from kvtally.core.keys import CHAIN_BYTES
from kvtally.core.residency import Family
from kvtally.store.alarms import Alarm
from kvtally.store.beliefs import LOAN_NS, Beliefs, Claim, Loan
from kvtally.store.context import Context
from kvtally.store.jobs import PeerLink
from kvtally.store.lookup_view import boundary_at
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import (
    ALL_RANKS,
    Found,
    Lookup,
    MissReason,
    Offer,
    Refused,
    Release,
    Reply,
    Request,
    Reset,
    ResetDone,
    Slot,
    Slots,
    SlotsGet,
    Staged,
)
from kvtally.wire.stats import PeerStats

ASK_NS = 900_000_000  # how long a peer may take to answer, beyond the time that it was asked to wait
DENIED_NS = 1 * SECOND_NS  # how long "I have no more than that" is believed
FIRST_PAUSE_NS = 1 * SECOND_NS
LONGEST_PAUSE_NS = 10 * SECOND_NS
MOST_PEERS = 256  # whose health is remembered
MOST_ASKS = 1_024  # open at once, at one peer
MOST_DENIED = 65_536
MOST_RESETS = 4_096  # whose names are remembered
MOST_NAMES = 256  # of one namespace, that a peer may be asked for one after the other
REFUSALS = ("KV-200", "KV-201", "KV-202", "KV-204", "KV-205", "KV-206", "KV-210")  # trying again soon does not help


class Answer(NamedTuple):
    """What a peer said. What it has is in the beliefs by now."""

    ask: int
    reason: str = ""  # why it has no more, or could not be asked
    withdrawn: str = ""  # as in Found
    tails: tuple[int, ...] = ()  # where tails end that may continue the prompt, in tokens from its start


@dataclass(slots=True, eq=False)
class Ask:
    """One question to a peer."""

    id: int
    link: PeerLink
    family: Family
    request: Lookup  # as it is sent
    alarm: Alarm
    found: Found | None = None
    owes: bool = False  # the peer holds a lease for it that no belief has taken over


@dataclass(slots=True)
class Link:
    """What is known of one link. The shell connects it when something is to be sent."""

    resets: int = 0  # of its namespace, that the peer has carried out, by this store's count
    resetting: int = 0  # the Reset that was sent and not answered yet; 0: none
    held: list[Ask] = field(default_factory=list)  # questions that wait for that


@dataclass(slots=True)
class Peer:
    """One address: its health and counters."""

    counts: PeerStats
    paused_until_ns: int = 0
    pause_ns: int = FIRST_PAUSE_NS
    asks: int = 0  # open

    def failed(self, code: str, now_ns: int) -> None:
        self.counts.errors[code] += 1
        if now_ns >= self.paused_until_ns:
            pause_ns = LONGEST_PAUSE_NS if code in REFUSALS else self.pause_ns
            self.paused_until_ns = now_ns + pause_ns
            self.pause_ns = min(2 * self.pause_ns, LONGEST_PAUSE_NS)

    def answered(self) -> None:
        self.paused_until_ns, self.pause_ns = 0, FIRST_PAUSE_NS

    def state(self, now_ns: int) -> str:
        return "lost" if now_ns < self.paused_until_ns else "ok"


class Peers:
    """`tier` is the tier of peers in the index, 0 if this store has none. `address` is this store's own. `may_ask` says
    whether an address is on the list of peers."""

    def __init__(
        self, context: Context, beliefs: Beliefs, *, tier: int, address: str, may_ask: Callable[[str], bool]
    ) -> None:
        self._context = context
        self._beliefs = beliefs
        self._tier = tier
        self._address = address
        self._may_ask = may_ask
        self._peers: dict[str, Peer] = {}
        self._links: dict[PeerLink, Link] = {}
        self._asks: dict[int, Ask] = {}
        self._staging: dict[Loan, Ask] = {}  # found, and on its way into the peer's arena
        self._denied: dict[tuple[PeerLink, bytes], tuple[int, Answer]] = {}  # link, last chain -> until when
        self._resets: dict[bytes, list[str]] = {}  # namespace -> names of its resets, in the order of carrying them out
        self._carried_out: dict[tuple[bytes, str], None] = {}  # namespace and name of resets, the oldest first
        self._answers: list[Answer] = []
        self._outbox: list[tuple[PeerLink, Request]] = []

    # ---- asking

    def ask(self, family: Family, request: Lookup, have: Sequence[int], wait_ns: int, now_ns: int) -> int | Answer:
        """Ask the request's source. Returns the question's number, or at once what is known without asking."""
        address = request.source
        if not self._tier or not self._may_ask(address):
            return Answer(0, MissReason.FOREIGN_STORE if request.until_tokens else "")
        peer = self._peer(address)
        if now_ns < peer.paused_until_ns:
            return Answer(0, MissReason.PEER_LOST)
        link = PeerLink(address, family.namespace.digest)
        until_ns, denied = self._denied.get((link, request.chains[-CHAIN_BYTES:]), (0, Answer(0)))
        if now_ns < until_ns and not request.until_tokens:
            return denied
        if peer.asks >= MOST_ASKS:
            return Answer(0, MissReason.LIMIT)
        number = self._context.new_id()
        question = structs.replace(
            request,
            id=number,
            have=list(have),
            wait_ms=wait_ns // 1_000_000,
            hold=True,
            lease_ms=LOAN_NS // 1_000_000,
            ahead=0,
            early=False,
            slots=True,
            source="",
            deliver="",
        )
        alarm = self._context.alarms.set(now_ns + wait_ns + ASK_NS, partial(self._late, number))
        ask = self._asks[number] = Ask(number, link, family, question, alarm)
        peer.asks += 1
        peer.counts.asks += 1
        self._send_ask(ask)
        return number

    def is_here(self, address: str) -> bool:
        return bool(self._address) and address == self._address

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more. What it brings is given back when it comes."""
        ask = self._asks.get(number)
        if ask is not None:
            self._close(ask)

    def offer(self, family: Family, request: Lookup, now_ns: int) -> None:
        """Tell another store of a prompt that is computed here, if it is one that may ask for it."""
        address = request.deliver
        if not (self._tier and self._address and request.ends) or self.is_here(address):
            return
        if self._may_ask(address) and now_ns >= self._peer(address).paused_until_ns:
            link = PeerLink(address, family.namespace.digest)
            offer = Offer(self._context.new_id(), self._address, request.chains, request.ends, request.ticket)
            self._outbox.append((link, offer))

    def reset(self, digest: bytes, name: str) -> None:
        """A namespace was reset here: its peers must do the same before anything is taken from them."""
        names = self._resets.setdefault(digest, [])
        names.append(name)
        self._carried_out[digest, name] = None
        if len(names) > MOST_NAMES:  # a reset that nobody knows yet does what all of them did
            names[:] = [f"{self._address}.{self._context.new_id()}"]
            self._carried_out[digest, names[0]] = None
            for link, state in self._links.items():
                if link.namespace == digest:
                    state.resets = state.resetting = 0
        while len(self._carried_out) > MOST_RESETS:
            del self._carried_out[next(iter(self._carried_out))]
        for link in self._links:
            if link.namespace == digest:
                self._send_reset(link)

    def knows_reset(self, digest: bytes, name: str) -> bool:
        """Whether this reset was carried out here."""
        return (digest, name) in self._carried_out

    def _send_ask(self, ask: Ask) -> None:
        link = self._links.setdefault(ask.link, Link())
        if link.resets < len(self._resets.get(ask.link.namespace, ())):
            link.held.append(ask)
            self._send_reset(ask.link)
        else:
            self._outbox.append((ask.link, ask.request))

    def _send_reset(self, link: PeerLink) -> None:
        state = self._links[link]
        if not state.resetting:
            state.resetting = self._context.new_id()
            name = self._resets[link.namespace][state.resets]
            self._outbox.append((link, Reset(state.resetting, link.namespace, name)))

    # ---- what peers say

    def said(self, link: PeerLink, reply: Reply, now_ns: int) -> None:
        """A message has come on a link. One that answers nothing that was asked is ignored."""
        if isinstance(reply, Found):
            self._found(link, reply, now_ns)
        elif isinstance(reply, Staged):
            self._staged(link, reply, now_ns)
        elif isinstance(reply, Slots):
            ask = self._asked(link, reply.id)
            if ask is not None:
                self._take_in(ask, reply.slots, reply.reason, now_ns)
        elif isinstance(reply, ResetDone):
            self._reset_done(link, reply.id)
        elif isinstance(reply, Refused):
            self._refused(link, reply, now_ns)

    def _asked(self, link: PeerLink, number: int) -> Ask | None:
        ask = self._asks.get(number)
        return ask if ask is not None and ask.link == link else None

    def _found(self, link: PeerLink, found: Found, now_ns: int) -> None:
        ask = self._asked(link, found.id)
        if ask is None:
            if found.lease:  # the answer has come too late
                self._give_back(Loan(link, found.lease))
            return
        self._peers[link.address].answered()
        ask.found, ask.owes = found, bool(found.lease)
        if not found.lease:
            self._answer(ask, found.reason, now_ns)
        elif found.staging:
            self._staging[Loan(link, found.lease)] = ask
        elif found.slots:
            self._take_in(ask, found.slots, "", now_ns)
        else:
            self._outbox.append((link, SlotsGet(ask.id, found.lease, ALL_RANKS)))

    def _staged(self, link: PeerLink, staged: Staged, now_ns: int) -> None:
        ask = self._staging.pop(Loan(link, staged.lease), None)
        if ask is None or ask.found is None:
            return
        ask.found = structs.replace(ask.found, end_tokens=staged.end_tokens, reason=staged.reason or ask.found.reason)
        if staged.end_tokens:
            self._outbox.append((link, SlotsGet(ask.id, staged.lease, ALL_RANKS)))
        else:
            ask.owes = False  # the peer has dropped it
            self._answer(ask, staged.reason, now_ns)

    def _take_in(self, ask: Ask, slots: Sequence[Slot], reason: str, now_ns: int) -> None:
        """The peer holds these objects for us: believe it, and answer."""
        assert ask.found is not None
        if reason or ask.family.is_forgotten:  # lost between two messages, or reset here meanwhile
            self._answer(ask, reason or MissReason.ABSENT, now_ns)
            return
        ask.owes = False
        self._peers[ask.link.address].counts.hits += 1
        loan = Loan(ask.link, ask.found.lease)
        self._beliefs.take_in(self._tier, ask.family, _claims(ask.family, ask.request, slots), now_ns, loan=loan)
        self._answer(ask, ask.found.reason, now_ns)

    def _answer(self, ask: Ask, reason: str, now_ns: int) -> None:
        found = ask.found
        tails: Iterable[int] = ()
        if found is not None:
            tails = (found.end_tokens + length for length in found.tails)
        answer = Answer(ask.id, reason, found.withdrawn if found is not None else "", tuple(tails))
        self._answers.append(answer)
        if reason and found is not None and not ask.request.until_tokens:
            self._deny(ask, answer, now_ns)
        self._close(ask)

    def _deny(self, ask: Ask, answer: Answer, now_ns: int) -> None:
        """The peer has no more than this, and is not asked again at once."""
        self._denied[ask.link, ask.request.chains[-CHAIN_BYTES:]] = now_ns + DENIED_NS, answer._replace(ask=0)
        if len(self._denied) > MOST_DENIED:
            del self._denied[next(iter(self._denied))]

    def _close(self, ask: Ask) -> None:
        del self._asks[ask.id]
        self._context.alarms.cancel(ask.alarm)
        self._peers[ask.link.address].asks -= 1
        link = self._links[ask.link]
        if ask in link.held:
            link.held.remove(ask)
        if ask.owes and ask.found is not None:
            loan = Loan(ask.link, ask.found.lease)
            self._staging.pop(loan, None)
            self._give_back(loan)

    def _reset_done(self, link: PeerLink, number: int) -> None:
        state = self._links.get(link)
        if state is None or state.resetting != number:
            return
        state.resetting, state.resets = 0, state.resets + 1
        if state.resets < len(self._resets[link.namespace]):
            self._send_reset(link)
            return
        held, state.held = state.held, []
        for ask in held:
            self._send_ask(ask)

    def _refused(self, link: PeerLink, refused: Refused, now_ns: int) -> None:
        state, ask = self._links.get(link), self._asked(link, refused.id)
        if state is not None and refused.id and refused.id == state.resetting:
            state.resetting = 0  # asked again with the next question
            for held in list(state.held):
                self._answer(held, MissReason.UNASKED, now_ns)
        elif ask is not None:
            self._peers[link.address].failed(refused.code, now_ns)
            self._answer(ask, MissReason.LIMIT if refused.code.startswith("KV-3") else MissReason.REFUSED, now_ns)

    # ---- peers that are gone

    def lost(self, link: PeerLink, code: str, now_ns: int) -> None:
        """A link has ended, or could not be made. The peer has forgotten all leases of it."""
        self._peer(link.address).failed(code, now_ns)
        state = self._links.get(link)
        if state is not None:
            state.resetting = 0
        self._void(link.address, now_ns)
        self.give_back_ended()
        self._outbox = [(other, request) for other, request in self._outbox if other != link]

    def unreadable(self, address: str, now_ns: int) -> None:
        """Its bytes do not come any more."""
        self._peer(address).failed("KV-604", now_ns)
        self._void(address, now_ns)

    def _late(self, number: int, now_ns: int) -> None:
        """A peer has not answered in time: it is stopped, or the way to it is cut."""
        address = self._asks[number].link.address
        self._peer(address).failed("KV-501", now_ns)
        self._void(address, now_ns)

    def _void(self, address: str, now_ns: int) -> None:
        """Nothing more is expected of a peer: not its answers, and not what it was said to hold."""
        self._beliefs.lost(address)
        for ask in [ask for ask in self._asks.values() if ask.link.address == address]:
            self._answer(ask, MissReason.PEER_LOST, now_ns)

    # ---- what is to be done

    def give_back_ended(self) -> None:
        """Give back the loans of beliefs that have ended, and name what did not verify."""
        for belief in self._beliefs.take_ended():
            assert belief.loan is not None
            self._give_back(belief.loan, [(belief.loan.lease, *where) for where in belief.bad])

    def _give_back(self, loan: Loan, bad: Sequence[tuple[int, int, int, int]] = ()) -> None:
        self._outbox.append((loan.link, Release(self._context.new_id(), [loan.lease], list(bad))))

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take_outbox(self) -> list[tuple[PeerLink, Request]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= MOST_PEERS:
                self._forget_idle()
            peer = self._peers[address] = Peer(PeerStats(name=address))
        return peer

    def _forget_idle(self) -> None:
        """Forget the peer that has been known for longest and is not being asked."""
        address = next((address for address, peer in self._peers.items() if not peer.asks), None)
        if address is not None:
            del self._peers[address]
            for link in [link for link in self._links if link.address == address]:
                del self._links[link]

    def pulled(self, address: str, size_bytes: int) -> None:
        counts = self._peer(address).counts
        counts.objects += 1
        counts.bytes += size_bytes

    # ---- for stats and checks

    def stats(self, now_ns: int) -> list[PeerStats]:
        return [structs.replace(peer.counts, state=peer.state(now_ns)) for peer in self._peers.values()]

    @property
    def open(self) -> int:
        return len(self._asks)

    def check(self) -> None:
        for peer_address, peer in self._peers.items():
            assert peer.asks == sum(ask.link.address == peer_address for ask in self._asks.values())
        assert all(ask.id in self._asks for ask in self._staging.values())
        assert all(ask.id in self._asks for link in self._links.values() for ask in link.held)


def _claims(family: Family, request: Lookup, slots: Sequence[Slot]) -> Iterator[Claim]:
    """What a peer's slots say. Those that do not fit the question are left out."""
    ends, groups = request.ends, len(family.namespace.groups)
    for slot in slots:
        is_object = 0 <= slot.group < groups and 0 <= slot.rank < family.ranks
        if is_object and 0 <= slot.index < len(ends) and 0 <= slot.checksum < 1 << 64:
            boundary, bit = boundary_at(request, slot.index), family.bit(slot.group, slot.rank)
            yield Claim(boundary, bit, slot.length_bytes, slot.checksum, slot.index)
