"""A link to one store: requests out, replies in, over a connection that is made again whenever it is lost.

Owns the calls in flight and their deadlines, the handshake, and reconnecting. Does not know what requests mean
(`client`), nor how bytes travel (`transport`). No threads, no event loop, and nothing blocks but `wait` and `step`:

    submit ──▶ queued (handshake under way) ──▶ sent ──▶ answered, or a Miss: deadline, connection lost, refused
                                    poll() moves all of them on, as far as that is possible at once

While the store cannot be reached, calls are answered at once with a Miss: a dead store must not cost every request its
deadline. Nor must one that is stopped or hangs: after a call has waited for it in vain, it is *silent* until it says
something, and whoever would ask it for more can know that (`is_silent`).

Threading: one thread at a time. After a fork the child's link starts anew, with nothing of its parent's.
"""

from __future__ import annotations

import os
import random
import select
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import structs

from kvtally.client.transport import Connection, hold_arena
from kvtally.endpoint import Endpoint, answer_greeting
from kvtally.errors import CapacityError, IncompatibleError, KVTallyError, TransportError
from kvtally.shm import Mapping
from kvtally.wire.frames import encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    PROTOCOL_VERSION,
    Greeting,
    Hello,
    MissReason,
    Refused,
    Reply,
    Request,
    Welcome,
)

FRAME_HEADER_BYTES = 4
MOST_CALLS = 1_024
MOST_UNSENT_BYTES = 16 * 1024 * 1024
HANDSHAKE_NS = 2_000_000_000
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5  # so that a store that comes back is soon used again; an attempt costs microseconds
LONGEST_WAIT_MS = 60_000.0  # in one system call; a longer wait takes several
NEVER_NS = 1 << 62
# How long a caller that waits for a reply stays awake for it. Most replies come sooner, and a processor that went to
# sleep takes its time to wake: with this an empty round trip takes 0.045 ms on two idle cores, without it 0.09 ms.
SPIN_NS = 200_000
SILENCE_NS = 500_000_000  # a store that said nothing for this long, while a call waited in vain, is silent
SILENT_NS = 5_000_000_000  # after that, a call may try again, in case the store says nothing by itself
REFUSED_PAUSE_S = 10.0  # a version, a token or a namespace must change first

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)  # callers only read a call's result

_links: weakref.WeakSet[Link] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is no answer. A value, not an exception: the caller recomputes."""

    reason: MissReason
    detail: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One connection's life. Leases and puts belong to it: when it is lost, the store has dropped them."""

    generation: int
    store: str
    limits: Limits
    verify_reads: bool
    mapping: Mapping | None  # None over TCP, and when the session is over; views that were handed out keep the memory
    address: str = ""  # by which other stores reach this one; empty: they cannot
    alive: bool = True


class Call(Generic[R_co]):
    """One request under way. `result` is None until it is answered, fails or expires."""

    __slots__ = ("_link", "deadline_ns", "due_ns", "finish", "id", "result")

    def __init__(
        self, link: Link, number: int, finish: Callable[[Reply], R_co | Miss | None], deadline_ns: int, wait_ns: int = 0
    ) -> None:
        self._link = link
        self.id = number
        self.finish = finish
        self.due_ns = time.monotonic_ns() + wait_ns  # until then the store may wait before it answers
        self.deadline_ns = deadline_ns
        self.result: R_co | Miss | None = None

    def wait(self) -> R_co | Miss:
        """The result, at the latest when the deadline has passed."""
        awake_until_ns = time.monotonic_ns() + SPIN_NS
        while self.result is None:
            self._link.step(self.deadline_ns, awake_until_ns)
        return self.result

    def cancel(self) -> None:
        """Stop waiting. What the store grants in a late answer is given back."""
        self._link.forget(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What the client says of itself in its Hello."""

    client: str
    namespace: bytes = b""
    expect: bytes = b""


class Link:
    """`unasked` gets every message that answers no call in flight: `Staged`, and replies that came too late."""

    def __init__(
        self,
        endpoint: Endpoint,
        introduction: Introduction,
        unasked: Callable[[Reply], None],
        *,
        jitter: random.Random | None = None,
    ) -> None:
        self.session: Session | None = None  # set while requests can be sent
        self.generation = 1
        self.error: KVTallyError | None = None  # why the last connection was lost or not made; None while all is well
        self.misses: Counter[MissReason] = Counter()
        self._endpoint = endpoint
        self._introduction = introduction
        self._unasked = unasked
        self._jitter = jitter or random.Random()
        self._calls: dict[int, Call[object]] = {}
        self._last_id = 0
        self._next_expiry_ns = NEVER_NS  # no call expires before this; it may be early, never late
        self._queue: list[tuple[Call[object], bytes]] = []  # to be sent after the handshake
        self._connection: Connection | None = None
        self._greeted: Session | None = None  # the handshake's session, until the store says welcome
        self._wake_ns = 0  # without a session: when to try again, or give up the handshake
        self._pause_s = FIRST_PAUSE_S
        self._heard_ns = 0  # when the store last said anything
        self._silent_until_ns = 0
        self._closed = False
        _links.add(self)

    @property
    def is_silent(self) -> bool:
        """Whether the store left a call unanswered, and has said nothing since."""
        return bool(self._silent_until_ns) and time.monotonic_ns() < self._silent_until_ns

    # ---- calls

    def submit(
        self,
        request: Request,
        finish: Callable[[Reply], R | Miss | None],
        deadline_ns: int,
        *,
        wait_ns: int = 0,
        gives_back: bool = False,
    ) -> Call[R]:
        """Send a request, now if possible. `finish` makes the result from the reply, or None if that does not fit.
        `wait_ns`: how long the store may wait for others before it answers.

        A request that gives something back is sent however many calls wait: otherwise the store would keep it reserved.
        """
        self._last_id += 1
        call: Call[R] = Call(self, self._last_id, finish, deadline_ns, wait_ns)
        if self.session is None:
            self.poll()
        if self._connection is None:
            return self._settle(call, miss_of(self.error))
        frame = encode(structs.replace(request, id=call.id))
        problem = self._obstacle(self._connection, len(frame), gives_back=gives_back)
        if problem is not None:
            return self._settle(call, problem)
        self._calls[call.id] = call
        self._next_expiry_ns = min(self._next_expiry_ns, deadline_ns)
        if self.session is None:
            self._queue.append((call, frame))
        else:
            self._connection.send(frame)
        return call

    def answered(self, result: R | Miss) -> Call[R]:
        """A call whose answer is known without asking."""
        call: Call[R] = Call(self, 0, _never, 0)
        return self._settle(call, result)

    def forget(self, call: Call[R]) -> None:
        if call.result is None:
            self._calls.pop(call.id, None)
            self._note_silence(call, time.monotonic_ns())
            call.result = Miss(MissReason.DEADLINE, "cancelled")

    def _settle(self, call: Call[R], result: R | Miss) -> Call[R]:
        call.result = result
        if isinstance(result, Miss):
            self.misses[result.reason] += 1
        return call

    def _obstacle(self, connection: Connection, frame_bytes: int, *, gives_back: bool) -> Miss | None:
        limits = self.session.limits if self.session is not None else Limits()
        if frame_bytes - FRAME_HEADER_BYTES > limits.frame_bytes:
            return Miss(MissReason.LIMIT, f"a message of {frame_bytes} bytes is over the limit of {limits.frame_bytes}")
        if len(self._calls) >= MOST_CALLS and not gives_back:
            return Miss(MissReason.LIMIT, f"{MOST_CALLS} calls are in flight already")
        waiting_bytes = len(connection.unsent)
        if self._queue:
            waiting_bytes += sum(len(frame) for _, frame in self._queue)
        if waiting_bytes + frame_bytes > MOST_UNSENT_BYTES:
            return Miss(MissReason.LIMIT, f"{waiting_bytes} bytes wait to be sent: the store does not read them")
        return None

    def _expire(self, now_ns: int) -> None:
        for call in [call for call in self._calls.values() if call.deadline_ns <= now_ns]:
            del self._calls[call.id]
            self._settle(call, Miss(MissReason.DEADLINE, "no answer within the deadline [KV-501]"))
            self._note_silence(call, now_ns)
        self._next_expiry_ns = min((call.deadline_ns for call in self._calls.values()), default=NEVER_NS)

    def _note_silence(self, given_up: Call[R], now_ns: int) -> None:
        if self.session is not None and now_ns - max(given_up.due_ns, self._heard_ns) >= SILENCE_NS:
            self._silent_until_ns = now_ns + SILENT_NS

    # ---- progress

    def poll(self) -> None:
        """Make all the progress that is possible without waiting."""
        now_ns = time.monotonic_ns()
        if self._connection is None and now_ns >= self._wake_ns and not self._closed:
            self._connect(now_ns)
        if self._connection is not None:
            self._exchange(self._connection, now_ns)
        if now_ns >= self._next_expiry_ns:
            self._expire(now_ns)

    def step(self, deadline_ns: int, awake_until_ns: int = 0) -> None:
        """Wait until there may be progress, at most until the deadline; then poll."""
        until_ns = deadline_ns if self.session is not None else min(deadline_ns, self._wake_ns)
        poller = select.poll()
        if self._connection is not None:
            poller.register(self._connection.fd, self._connection.events)
            while time.monotonic_ns() < min(until_ns, awake_until_ns) and not poller.poll(0):
                pass
        wait_ms = (until_ns - time.monotonic_ns()) / 1e6
        poller.poll(min(max(wait_ms, 0.0), LONGEST_WAIT_MS))
        self.poll()

    def close(self) -> None:
        """Let go of the store. Memory that is still viewed stays mapped until the last view is gone. Idempotent."""
        self._closed = True
        self._lose(TransportError("this client was closed", remedy="Make a new one.", code="KV-502"))

    def _connect(self, now_ns: int) -> None:
        self._wake_ns = now_ns + HANDSHAKE_NS
        try:
            self._connection = Connection(self._endpoint)
        except OSError as error:
            self._lose(self._unreachable(str(error)))

    def _exchange(self, connection: Connection, now_ns: int) -> None:
        try:
            messages = connection.exchange()
            if messages:
                self._heard_ns, self._silent_until_ns = now_ns, 0
            for message in messages:
                if self.session is None:
                    self._shake_hands(connection, message)
                else:
                    self._take(message)
            if self.session is None and now_ns >= self._wake_ns:
                raise self._unreachable("it accepted the connection, but did not complete the handshake in time")
        except OSError as error:
            self._lose(self._unreachable(str(error)))
        except KVTallyError as error:
            self._lose(error)

    def _take(self, message: Reply) -> None:
        if isinstance(message, Greeting | Welcome):
            raise _violation(f"{type(message).__name__} in the middle of a connection")
        call = self._calls.get(message.id)
        if call is not None:
            result = miss_of(_refusal(message)) if isinstance(message, Refused) else call.finish(message)
            if result is None:
                raise _violation(f"{type(message).__name__} does not fit the request that it answers")
            del self._calls[call.id]
            self._settle(call, result)
        elif isinstance(message, Refused) and message.id == 0:
            raise TransportError(message.message, remedy=message.remedy, code=message.code)
        else:
            self._unasked(message)

    # ---- the connection's life

    def _shake_hands(self, connection: Connection, message: Reply) -> None:
        if isinstance(message, Refused):
            raise _refusal(message)
        if isinstance(message, Greeting) and self._greeted is None:
            self._greeted = self._answer(connection, message)
        elif isinstance(message, Welcome) and self._greeted is not None:
            self._begin(connection, self._greeted)
        else:
            raise _violation(f"{type(message).__name__} in the handshake")

    def _answer(self, connection: Connection, greeting: Greeting) -> Session:
        proof = answer_greeting(
            self._endpoint, greeting, token_remedy="Give this client the token that the store was started with."
        )
        mapping = hold_arena(connection, greeting.arena_bytes) if self._endpoint.shares_memory else None
        connection.greeted(greeting.limits.frame_bytes)
        self._last_id += 1
        about = self._introduction
        hello = Hello(self._last_id, PROTOCOL_VERSION, about.client, about.namespace, about.expect, proof)
        connection.send(encode(hello))
        return Session(
            generation=self.generation,
            store=greeting.store,
            limits=greeting.limits,
            verify_reads=greeting.verify_reads,
            mapping=mapping,
            address=greeting.address,
        )

    def _begin(self, connection: Connection, session: Session) -> None:
        """The store said welcome: send the requests that waited for that."""
        self.session, self._greeted = session, None
        self.error, self._pause_s = None, FIRST_PAUSE_S
        queue, self._queue = self._queue, []
        for call, frame in queue:
            if call.result is not None:
                continue  # expired or cancelled
            if len(frame) - FRAME_HEADER_BYTES > session.limits.frame_bytes:
                del self._calls[call.id]
                self._settle(call, Miss(MissReason.LIMIT, f"a message of {len(frame)} bytes is over the store's limit"))
            else:
                connection.send(frame)

    def _lose(self, error: KVTallyError) -> None:
        """The connection is gone, and with it the session, its leases and its puts."""
        if self._connection is not None:
            self._connection.close()
        for session in (self.session, self._greeted):
            if session is not None:
                session.alive, session.mapping = False, None
                self.generation += 1
        self.session = self._greeted = self._connection = None
        self._silent_until_ns = 0
        self.error = error
        pause_s = REFUSED_PAUSE_S if isinstance(error, IncompatibleError) else self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._wake_ns = time.monotonic_ns() + int(pause_s * self._jitter.uniform(0.5, 1.0) * 1e9)
        calls, self._calls, self._queue = self._calls, {}, []
        for call in calls.values():
            self._settle(call, miss_of(error))

    def _unreachable(self, why: str) -> TransportError:
        return TransportError(
            f"the store at {self._endpoint.address} cannot be reached: {why}",
            remedy="Start it with `kvtally store`, or correct the address.",
        )

    def restart_in_child(self) -> None:
        """After a fork: the parent keeps its connection, and the child makes its own when it needs one."""
        self._lose(TransportError("this process was forked", remedy="Call again: the child reconnects.", code="KV-502"))
        self._wake_ns, self._pause_s = 0, FIRST_PAUSE_S


def _never(_: Reply) -> None:
    return None


def _refusal(message: Refused) -> KVTallyError:
    kind = CapacityError if message.code.startswith("KV-3") else IncompatibleError
    return kind(message.message, remedy=message.remedy, code=message.code)


def miss_of(error: KVTallyError | None) -> Miss:
    reason = MissReason.STORE_UNREACHABLE
    if isinstance(error, CapacityError):
        reason = MissReason.LIMIT
    elif isinstance(error, IncompatibleError):
        reason = MissReason.REFUSED
    return Miss(reason, str(error))


def _violation(what: str) -> TransportError:
    return TransportError(
        f"the store broke the protocol: {what}",
        remedy="Client and store must be of the same version; if they are, report this.",
        code="KV-503",
    )


def _restart_links() -> None:
    for link in list(_links):
        link.restart_in_child()


os.register_at_fork(after_in_child=_restart_links)
