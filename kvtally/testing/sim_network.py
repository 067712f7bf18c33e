"""The network between simulated stores: connections that carry messages in order, and pulls that carry bytes.

A `Link` is what `store.dial` keeps: a control connection to another store, made when there is something to say. It can
be cut (both ends hear), be half-open (one end hears nothing until its timeout), or lie across a partition (messages
wait until it heals, or until the connection times out). A `Transfer` is one pull: half of the bytes are copied when the
send begins, half when it ends, out of the sender's arena as it is then. So a slot that is reused in between is found
twice, by its owners and by the checksum. Owns what lies between two machines; what happens inside one is `sim_node`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtally.core.checksum import object_checksum
from kvtally.core.space import Piece
from kvtally.errors import CapacityError
from kvtally.store.jobs import Outcome, PeerLink, ReadJob, SendJob
from kvtally.testing.sim_clock import Clock
from kvtally.wire.bulk import PullStatus
from kvtally.wire.limits import SECOND_NS
from kvtally.wire.messages import PROTOCOL_VERSION, Hello, Pull, Refused, Reply, Request

if TYPE_CHECKING:
    from kvtally.testing.sim import Faults
    from kvtally.testing.sim_node import Node

CONNECT_NS = 2 * SECOND_NS  # until a connection that is not answered is given up
SILENT_NS = 5 * SECOND_NS  # until a connection is given up whose other end cannot be reached
PROGRESS_NS = SECOND_NS  # until a pull is given up that gets no bytes
SEND_NS = 2 * SECOND_NS  # until a send is given up that gets rid of none
OF_STATUS = {PullStatus.GONE: "KV-603", PullStatus.BUSY: "KV-605"}


class Network:
    """Who can reach whom, and what is on its way."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: dict[str, Node] = {}  # by address
        self.faults: Faults
        self._links: dict[tuple[str, PeerLink], Link] = {}  # by the address of who dialled
        self._transfers: dict[int, Transfer] = {}  # by connection
        self._apart: dict[frozenset[str], int] = {}  # pairs of addresses -> until when
        self._connections = 0
        self.messages = 0  # carried so far

    # ---- who can reach whom

    def apart_ns(self, one: Node, other: Node) -> int:
        """How much longer these two cannot reach one another; 0 if they can."""
        return max(0, self._apart.get(frozenset((one.address, other.address)), 0) - self.clock.now_ns)

    def disturb(self, link: Link) -> None:
        """Something travels: perhaps a fault strikes. It does so in an event of its own, not inside a store's step."""
        clock, pick, faults = self.clock, self.clock.random, self.faults
        if clock.strikes(faults.cut):
            clock.at(clock.soon() // 10, link.cut)
        if clock.strikes(faults.half_open):
            clock.at(clock.soon() // 10, link.half_open)
        if clock.strikes(faults.partition):
            span_ns = pick.choice((SECOND_NS // 5, 3 * SECOND_NS, 12 * SECOND_NS))
            clock.at(clock.soon() // 10, lambda: self.part(link.here, link.there, span_ns))
        self.strike_stores(link.here, link.there)

    def strike_stores(self, *nodes: Node) -> None:
        """A store may die, or be stopped, in the middle of what it does with another one."""
        clock, pick = self.clock, self.clock.random
        for node in nodes:
            if clock.strikes(self.faults.kill_store // 2):
                clock.at(clock.soon() // 10, node.kill_store)
            if clock.strikes(self.faults.stop_store // 2):
                clock.at(clock.soon() // 10, partial(node.stop_store, pick.choice((SECOND_NS // 10, 3 * SECOND_NS))))

    def part(self, one: Node, other: Node, span_ns: int) -> None:
        clock = self.clock
        if self.apart_ns(one, other):
            return
        clock.note(f"{one.name} and {other.name} cannot reach one another for {span_ns / 1e9} s")
        clock.seen["partition"] += 1
        self._apart[frozenset((one.address, other.address))] = clock.now_ns + span_ns
        if span_ns > SILENT_NS:
            for link in list(self._links.values()):
                if {link.here, link.there} == {one, other}:
                    clock.at(SILENT_NS, link.time_out)

    def heal(self) -> None:
        self._apart.clear()

    def died(self, node: Node, *, is_heard: bool) -> None:
        """A store process is gone. The other ends of its connections hear of it, unless its machine went with it."""
        for link in list(self._links.values()):
            if link.here is node or link.there is node:
                link.died(node, is_heard=is_heard)
        for transfer in list(self._transfers.values()):
            if transfer.here is node or transfer.there is node:
                transfer.died(node, is_heard=is_heard)

    def is_linked(self, here: Node, there: Node) -> bool:
        """Whether a control connection stands, as far as the one knows who dialled it."""
        return any(link.stands for link in self._links.values() if link.here is here and link.there is there)

    # ---- control connections

    def send(self, here: Node, key: PeerLink, request: Request) -> None:
        """A store has something to say to another one. Connects if there is no connection."""
        link = self._links.get((here.address, key))
        if link is None:
            there = self.nodes.get(key.address)
            if there is None:  # nobody listens at this address
                here.at(self.clock.soon(), lambda: here.store.peer_lost(key, "KV-500", self.clock.now_ns))
                return
            link = self._links[here.address, key] = Link(self, here, there, key)
            link.dial()
        link.say(request)

    def forget(self, link: Link) -> None:
        if self._links.get((link.here.address, link.key)) is link:
            del self._links[link.here.address, link.key]

    # ---- bytes

    def pull(self, here: Node, job: ReadJob) -> None:
        """A reader thread of `here` begins a read from another store."""
        assert job.place is not None
        self._connections += 1
        there = self.nodes.get(job.place.address)
        transfer = Transfer(self, here, there, job, self._connections)
        self._transfers[self._connections] = transfer
        transfer.ask()

    def send_bytes(self, there: Node, job: SendJob) -> None:
        """A sender thread of `there` begins to answer a pull."""
        self._transfers[job.connection].send(job)

    def ended(self, transfer: Transfer) -> None:
        self._transfers.pop(transfer.connection, None)


class Link:
    """One control connection, from the store that dialled (`here`) to the one that listens (`there`)."""

    def __init__(self, network: Network, here: Node, there: Node, key: PeerLink) -> None:
        self.network, self.clock, self.here, self.there, self.key = network, network.clock, here, there, key
        self.session = 0  # at `there`
        self._is_open = False  # welcomed
        self._is_deaf = False  # half-open: nothing that is sent arrives
        self._is_closed = {here: False, there: False}
        self._unsaid: list[Request] = []  # until it is open
        self._travelling: dict[Node, deque[Callable[[], None]]] = {here: deque(), there: deque()}  # by destination
        self._generations = {here: here.generation, there: 0}

    @property
    def stands(self) -> bool:
        return self._is_open and not self._is_closed[self.here]

    # ---- what is said

    def dial(self) -> None:
        self.here.at(CONNECT_NS, lambda: None if self._is_open else self._close(self.here, "KV-501"))
        self.clock.at(self.clock.soon() // 10, self._knock)

    def _knock(self) -> None:
        if self.network.apart_ns(self.here, self.there):
            return  # until the dialler gives up
        if not self.there.is_up:
            self.clock.at(self.clock.soon() // 10, lambda: self._hear(self.here, "KV-500"))
            return
        self._generations[self.there] = self.there.generation
        self.there.in_store(self._accept)

    def _accept(self) -> None:
        if self._is_closed[self.here]:  # it was given up before anybody accepted it
            return
        try:
            self.session = self.there.store.connect(shared_memory=False, now_ns=self.clock.now_ns, is_peer=True)
        except CapacityError as error:
            self._is_closed[self.there] = True
            self.carry(self.here, partial(self._close, self.here, error.code))
            return
        self.there.peers[self.session] = self
        self.carry(self.here, self._greet)  # the greeting

    def _greet(self) -> None:
        description = self.here.store.description(self.key.namespace)
        self._tell(Hello(0, PROTOCOL_VERSION, self.here.name, description, peer=True))

    def say(self, request: Request) -> None:
        if self._is_open:
            self._tell(request)
        else:
            self._unsaid.append(request)

    def _tell(self, request: Request) -> None:
        self._note(self.here, self.there, request)
        self.carry(self.there, lambda: self.there.store.handle(self.session, request, self.clock.now_ns))

    def answer(self, reply: Reply) -> None:
        """`there` answers, or says something unasked."""
        self._note(self.there, self.here, reply)
        self.carry(self.here, lambda: self._answered(reply))

    def _answered(self, reply: Reply) -> None:
        if self._is_open:
            self.here.store.peer_said(self.key, reply, self.clock.now_ns)
        elif isinstance(reply, Refused):
            self._close(self.here, reply.code)
        else:
            self._is_open = True
            unsaid, self._unsaid = self._unsaid, []
            for request in unsaid:
                self._tell(request)

    def _note(self, sender: Node, receiver: Node, message: Request | Reply) -> None:
        if self.clock.is_verbose:
            self.clock.note(f"{sender.name} to {receiver.name}: {_without_bytes(message)}")

    def carry(self, to: Node, action: Callable[[], None]) -> None:
        """Let something happen at one end, after all that was sent there before."""
        self.network.disturb(self)
        self.network.messages += 1
        queue = self._travelling[to]
        queue.append(action)
        if len(queue) == 1:
            self.clock.at(self.clock.soon() // 10, partial(self._arrive, to))

    def _arrive(self, to: Node) -> None:
        queue = self._travelling[to]
        apart_ns = self.network.apart_ns(self.here, self.there)
        if self._is_deaf:
            queue.clear()
        elif to.generation != self._generations[to]:
            queue.clear()
            if to.is_up:  # the new process does not know this connection
                self._notify(self._other(to))
        elif apart_ns:  # sent again when they can reach one another
            self.clock.at(apart_ns + self.clock.soon(), partial(self._arrive, to))
        else:
            to.in_store(partial(self._at, to, queue.popleft()))
            if queue:
                self.clock.at(self.clock.soon() // 10, partial(self._arrive, to))

    def _at(self, end: Node, action: Callable[[], None]) -> None:
        if not self._is_closed[end]:
            action()

    # ---- how it ends

    def _close(self, end: Node, code: str) -> None:
        """One end is done with the connection, in its own store process. The other one hears of it if it can."""
        if self._is_closed[end] or end.generation != self._generations[end]:
            return
        self._is_closed[end] = True
        if end is self.here:
            self.network.forget(self)
            end.store.peer_lost(self.key, code, self.clock.now_ns)
        else:
            end.peers.pop(self.session, None)
            if self.session:
                end.store.disconnect(self.session, self.clock.now_ns)
        self._notify(self._other(end))

    def _other(self, end: Node) -> Node:
        return self.there if end is self.here else self.here

    def _notify(self, end: Node) -> None:
        """The other end has closed the connection. Nobody hears of that through a partition."""
        is_cut_off = self._is_deaf or self.network.apart_ns(self.here, self.there) > 0
        delay_ns = SILENT_NS if is_cut_off else self.clock.soon() // 10
        self.clock.at(delay_ns, lambda: self._hear(end, "KV-502"))

    def _hear(self, end: Node, code: str) -> None:
        if end.generation == self._generations[end]:
            end.in_store(lambda: self._close(end, code))

    def died(self, node: Node, *, is_heard: bool) -> None:
        self._is_closed[node] = True
        if node is self.here:
            self.network.forget(self)
        if is_heard and (node is self.here or self._generations[node]):
            self._notify(self._other(node))
        elif not is_heard:
            self.clock.at(SILENT_NS, lambda: self._hear(self._other(node), "KV-502"))

    def cut(self) -> None:
        if not any(self._is_closed.values()):
            self.clock.seen["cut"] += 1
            self._hear(self.here, "KV-502")
            self._hear(self.there, "KV-502")

    def half_open(self) -> None:
        """One end is told that the connection is gone; the other one hears nothing, until it times out."""
        if self.session and not any(self._is_closed.values()):
            self.clock.seen["half_open"] += 1
            self._is_deaf = True
            self._hear(self.clock.random.choice((self.here, self.there)), "KV-502")

    def time_out(self) -> None:
        if self.network.apart_ns(self.here, self.there):
            self._hear(self.here, "KV-501")
            self._hear(self.there, "KV-501")


@dataclass(eq=False)
class Transfer:
    """One pull: a ReadJob of `here`, answered by a SendJob of `there`."""

    network: Network
    here: Node
    there: Node | None  # None: nobody listens at this address
    job: ReadJob
    connection: int
    is_ended: bool = False  # the read has its outcome, or its store is dead
    is_asked: bool = False  # the pull has reached the other store
    heard_ns: int = 0  # when `here` got something for the last time
    data: bytearray = field(default_factory=bytearray)
    lands_ns: int = 0  # when the bytes that were sent last are there

    @property
    def clock(self) -> Clock:
        return self.network.clock

    @property
    def _is_cut_off(self) -> bool:
        return self.there is not None and self.network.apart_ns(self.here, self.there) > 0

    # ---- the reader

    def ask(self) -> None:
        self.heard_ns = self.clock.now_ns
        self.here.at(PROGRESS_NS, self._watch)
        self.clock.at(self.clock.soon() // 10, self._knock)

    def _watch(self) -> None:
        if self.is_ended:
            return
        left_ns = self.heard_ns + PROGRESS_NS - self.clock.now_ns
        if left_ns > 0:
            self.here.at(left_ns, self._watch)
        else:
            self._end("KV-604")

    def _knock(self) -> None:
        there, place = self.there, self.job.place
        assert place is not None
        if there is None or not there.is_up or not self.network.is_linked(self.here, there):
            self._fail_soon("KV-604")
        elif not self._is_cut_off:
            self.is_asked = True
            record = self.job.record
            pull = Pull(self.connection, place.lease, place.index, record.group, record.rank)
            there.in_store(lambda: there.store.pull(self.connection, pull, self.clock.now_ns))

    def _fail_soon(self, code: str) -> None:
        """The answer is on its way that nothing will come."""
        if not self._is_cut_off:
            self.here.at(self.clock.soon() // 10, lambda: self._end(code))

    def _end(self, code: str) -> None:
        if self.is_ended:
            return
        if self.clock.is_verbose:
            self.clock.note(f"{self.here.name}: pull {self.job.place} ended {code or 'well'}")
        self.is_ended = True
        self.clock.seen["pulled"] += not code
        self.clock.seen[code] += bool(code)
        self.here.store.job_done(self.job, Outcome(code=code), self.clock.now_ns)

    def _land(self, part: slice) -> None:
        """Bytes land in the reader's arena. Its slot is its own until the read has ended."""
        if self.is_ended:
            return
        self.heard_ns = self.clock.now_ns
        _assert_owned(self.job.pieces, self.here.store._leases.staging.pieces(), "a read writes to")
        position = 0
        for view in self.here.views(self.job.pieces):
            begin, end = max(position, part.start), min(position + len(view), part.stop)
            if begin < end:
                view[begin - position : end - position] = self.data[begin:end]
            position += len(view)
        if part.stop == len(self.data) == self.job.record.length_bytes:
            landed = self.here.views(self.job.pieces)
            record = self.job.record
            is_right = object_checksum(record.key, record.length_bytes, landed) == record.checksum
            self._end("" if is_right else "KV-401")

    # ---- the sender

    def send(self, job: SendJob) -> None:
        there = self.there
        assert there is not None and job.pull == self.connection
        self.network.strike_stores(self.here, there)
        if job.status != PullStatus.SENT:
            self._fail_soon(OF_STATUS[job.status])
            there.at(self.clock.soon() // 10, lambda: self._sent(job, ""))
            return
        there.at(self.clock.soon(), lambda: self._send_part(job, 0, job.length_bytes // 2))

    def _send_part(self, job: SendJob, begin: int, end: int) -> None:
        there = self.there
        assert there is not None
        if self.is_ended:  # the reader has closed the connection
            self._sent(job, "KV-604")
            return
        if self._is_cut_off or (not self.here.is_running and self.clock.random.random() < 0.5):
            there.at(SEND_NS, lambda: self._sent(job, "KV-604"))  # its socket takes no more
            return
        _assert_owned(job.pieces, there.store._residency.owned_pieces(), "a send reads from")
        sent = b"".join(there.views(job.pieces))
        self.data[begin:end] = sent[begin:end]
        self.lands_ns = max(self.lands_ns, self.clock.now_ns + self.clock.soon() // 10)
        self.here.at(self.lands_ns - self.clock.now_ns, partial(self._land, slice(begin, end)))
        if end < job.length_bytes:
            there.at(self.clock.soon(), lambda: self._send_part(job, end, job.length_bytes))
        else:
            self._sent(job, "")

    def _sent(self, job: SendJob, code: str) -> None:
        assert self.there is not None
        self.clock.seen["sent" if not code else "send_failed"] += job.status == PullStatus.SENT
        self.there.store.sent(job, Outcome(code=code), self.clock.now_ns)
        self.network.ended(self)

    def died(self, node: Node, *, is_heard: bool) -> None:
        """One of the two stores is gone. A pull that has not reached it, or of which nothing has come, is sent to the
        process that listens there next: the reader takes its connection for one that was merely kept for too long."""
        if node is self.here:
            self.is_ended = True
        elif self.is_asked and is_heard and not self.data and self.clock.random.random() < 0.5:
            self.is_asked = False
            self.clock.at(self.clock.soon() // 10, self._knock)
        elif self.is_asked and is_heard:
            self._fail_soon("KV-604")


def _without_bytes(message: Request | Reply) -> str:
    """A message as a person wants to read it."""
    values = ((name, getattr(message, name)) for name in message.__struct_fields__)
    shown = [f"{name}={value}" for name, value in values if value and not isinstance(value, bytes)]
    return f"{type(message).__name__}({', '.join(shown)})"[:300]


def _assert_owned(pieces: tuple[Piece, ...], owned: list[Piece], what: str) -> None:
    free = set(pieces) - set(owned)
    assert not free, f"{what} {len(free)} pieces that are not its own any more"
