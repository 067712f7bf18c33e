"""The scheduler half's thread: it does everything that takes time or talks to the store, so no engine step has to.

    scheduler half ──ask / want / cancel / release / file / walk──▶ queue ──▶ this thread ──▶ store
    scheduler half ◀── lookup.answer, set once ─────────────┘

For each lookup the thread works out the prompt's chain values and sends one question, which leases the hit and stages
it. If the store knows tails beyond the hit, a few of these are asked for, one after the other, until one fits. Then the
thread waits until everything is in the arena. Where a prompt has an adapter, its chain values have the adapter's
identity in them, and the lookup first waits until that is known.

An early lookup has time until the scheduler reaches its request (`want`). From then on it has a deadline, by which it
is answered whatever happens. An answer of 0 tokens has a reason.

A hand-off may arrive before the bytes that it promises. The question names the promised boundary, and the store answers
it when that is there, when prefill has withdrawn its promise, or when its time is up; then it is asked again. If the
bytes are promised by another machine's store, the question names that store, and our store pulls them from there.

Owns the client: only this thread touches it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from kvtally.client import Call, Lease, Miss, StoreClient
from kvtally.core.handoff import Handoff
from kvtally.core.keys import chunk_ends
from kvtally.core.namespace import GroupKind, Namespace
from kvtally.core.receipts import NOTHING, Half, Loaded, Role
from kvtally.vllm.boundaries import Boundaries, Boundary
from kvtally.wire.messages import Found, Lookup, MissReason, Staged

log = logging.getLogger("kvtally.vllm")

IDLE_S = 0.05
TURN_S = 0.001  # how long one look at the socket may keep new commands waiting
EARLY_TURN_S = 0.002  # the same while nobody waits: every look takes the interpreter from the engine
MOST_TRIES = 4  # how many tails are tried, each of which may be another conversation's
LONGEST_WAIT_MS = 300  # how long the store may wait for a promised boundary before it answers
# A store that answers sooner than that, without the boundary, does not wait: an older one, or one with too many lookups
# that wait already. It is asked again after this pause.
AGAIN_NS = 10_000_000
RESET_PAUSE_S = 0.05  # between two requests to forget everything
# What a store says where nothing more is to be expected of the store that promised.
FINAL = (MissReason.FOREIGN_STORE, MissReason.PEER_LOST, MissReason.CHECKSUM)


class LookupAnswer(NamedTuple):
    """How much of a prompt may be promised: `end_tokens`, which `lease` holds; its boundaries are `ends`."""

    end_tokens: int = 0
    ends: Sequence[int] = ()
    lease: Lease | None = None
    reason: str = ""
    wait_s: float = 0.0
    attention_tokens: int = 0  # all full attention is there up to this boundary, with or without a state
    ready_ns: int = 0  # when it was set
    weighed: Staged | None = None  # what staging came to, with the estimates that load or compute was decided by

    @property
    def left_tokens(self) -> int:
        """Found, but not worth loading."""
        return self.weighed.left_tokens if self.weighed is not None else 0

    @property
    def was_staged(self) -> bool:
        """Whether the store had to bring something into the arena for it."""
        return self.lease is not None and self.lease.outcome is not None and self.lease.outcome.staged_bytes > 0

    @property
    def sources(self) -> Loaded:
        """Where the store had the tokens that it promises."""
        return self.lease.sources if self.lease is not None else NOTHING


@dataclass(slots=True, eq=False)
class PromptLookup:
    """A question about one prompt.

    The thread sets `answer` and `is_walked`, each once. The scheduler's thread moves `deadline_ns` forward, once, when
    it reaches a request that was looked up early.
    """

    tokens: Sequence[int]
    boundaries: Boundaries
    deadline_ns: int
    asked_ns: int
    handoff: Handoff | None = None  # for decode: what prefill has saved; for prefill: what the router knows
    deliver: str = ""  # the address of a store that will want what is saved of this prompt
    is_early: bool = False  # asked before the scheduler reached the request
    is_wanted: bool = False  # the scheduler has reached it
    priority: int = 0
    ahead: int = 0  # requests that arrived before and have not begun
    prefill_tokens_s: int = 0  # how fast the engine computes; 0: load whatever it takes
    asks: bool = True  # False: only its boundaries are wanted
    answer: LookupAnswer | None = None
    is_walked: bool = False  # its boundaries are worked out
    is_cancelled: bool = False

    # the thread's own
    call: Call[Lease] | None = None
    lease: Lease | None = None
    ends: list[int] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)
    shorter: Lease | None = None  # a shorter hit, held while a longer one is asked for
    tails: list[int] | None = None  # where else the prompt may go on from, in the order of `list.pop`
    due_ns: int = 0  # when the store's wait for a promised boundary is over
    again_ns: int = 0  # when to ask again, while neither `call` nor `lease` is set
    doubt: str = ""  # why the hand-off is of no use to this engine

    @property
    def limit_tokens(self) -> int:
        return len(self.tokens) - 1

    @property
    def promised_tokens(self) -> int:
        """How much the hand-off promises, unless there is a reason to doubt it."""
        if self.handoff is None or self.handoff.role is not Role.DECODE or self.doubt:
            return 0
        return self.handoff.saved_tokens

    @property
    def state(self) -> str:
        """What is known of it, for a log."""
        lease = self.lease or self.shorter
        if lease is None:
            return "the store has not answered"
        found, ends = lease.found, range(len(self.ends))
        rows = [int.from_bytes(row, "little") for row in found.presence]
        present = " ".join("".join(str(row >> index & 1) for index in ends) for row in rows)
        staged = "" if lease.is_staged else ", not staged"
        return (
            f"the store has {found.end_tokens}{staged}, or {found.pending_tokens} with what is being saved; "
            f"boundaries {self.ends[-8:]}, present by group: {present}"
        )

    def walk(self) -> None:
        """Work out the prompt's boundaries and their chain values, up to the last one that is asked for. A prefill for
        another engine saves one that it cannot use itself: the end of its prompt."""
        chunk, last = self.boundaries.chunk_tokens, len(self.tokens) if self.deliver else self.limit_tokens
        self.boundaries.extend(self.tokens, last)
        tail = self.boundaries.tail(self.tokens, last) if last % chunk else None
        self.ends = chunk_ends(last, chunk)
        self.chains = self.boundaries.chains[: len(self.ends)]
        if tail is not None:
            self.ends.append(tail.end_tokens)
            self.chains.append(tail.chain)
        self.is_walked = True


class LookupThread:
    """Start it with `start()`. Every method may be called from the scheduler's thread; all but `wait` and `reset`
    return at once. `connect` makes the client, in the thread that uses it; `namespace` is the engine's."""

    def __init__(self, connect: Callable[[], StoreClient], namespace: Namespace) -> None:
        self._connect = connect
        self._full_groups = [g for g, spec in enumerate(namespace.groups) if spec.kind is GroupKind.FULL]
        self._block_tokens = lcm(*(spec.block_tokens for spec in namespace.groups))
        self._commands: queue.SimpleQueue[Callable[[StoreClient], None] | None] = queue.SimpleQueue()
        self._active: list[PromptLookup] = []
        self._news = threading.Condition()  # told of every answer
        self._is_awaited = False  # the engine does nothing until there is one
        self.store = ""  # the name of the store's process, once there is a connection
        self.address = ""  # by which other stores reach it
        self._thread = threading.Thread(target=self._run, name="kvtally-lookup", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, lookup: PromptLookup) -> None:
        self._commands.put(lambda client: self._begin(client, lookup))

    def walk(self, lookup: PromptLookup) -> None:
        """Work out the boundaries, without asking the store: the request is saved, and its objects need names."""
        lookup.asks = False
        self._commands.put(lambda client: self._begin(client, lookup))

    def want(self, lookup: PromptLookup) -> None:
        """The scheduler has reached the request."""
        self._commands.put(lambda client: self._hasten(client, lookup))

    def wait(self, lookup: PromptLookup, timeout_s: float) -> None:
        """Block until the lookup is answered, at most this long."""
        with self._news:
            self._is_awaited = True
            self._news.wait_for(lambda: lookup.answer is not None, timeout_s)
            self._is_awaited = False

    def cancel(self, lookup: PromptLookup) -> None:
        """Nobody takes the answer: everything that is held for it, or will be, is given back."""
        lookup.is_cancelled = True
        self._commands.put(lambda client: self._give_back_answer(client, lookup))

    def release(self, lease: Lease) -> None:
        self._commands.put(lambda client: self._give_back(client, lease))

    def file(self, ticket: str, half: Half) -> None:
        self._commands.put(lambda client: self._forget(client.file_receipt(ticket, half)))

    def reset(self, timeout_s: float) -> bool:
        """Have the store forget this engine's namespace. Waits at most this long; False if it is not done by then."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)

        def insist(client: StoreClient) -> None:
            """A store refuses if its disk has not removed everything in time. Then it is asked again."""
            result = client.reset(timeout_s=timeout_s).wait()
            while isinstance(result, Miss) and result.reason == MissReason.REFUSED:
                time.sleep(RESET_PAUSE_S)
                left_s = (deadline_ns - time.monotonic_ns()) / 1e9
                if left_s <= 0:
                    break
                result = client.reset(timeout_s=left_s).wait()
            done.put(not isinstance(result, Miss))

        self._commands.put(insist)
        try:
            return done.get(timeout=timeout_s)
        except queue.Empty:
            return False

    def stop(self, timeout_s: float = 2.0) -> None:
        self._commands.put(None)
        self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        client = self._connect()
        going = True
        while going:
            try:
                going = self._turn(client)
            except Exception:  # the supervisor's edge: one failed turn costs misses, never the engine
                log.exception("a lookup failed; its requests are computed")
                for lookup in self._active:
                    if lookup.answer is None:  # else this turn has answered it, and its lease may be in use
                        self._settle(client, lookup, MissReason.STORE_UNREACHABLE)
                self._active.clear()
        client.close()

    def _turn(self, client: StoreClient) -> bool:
        """One round: carry out new commands, then move every lookup on. False when asked to stop."""
        try:
            command = self._commands.get(timeout=0 if self._active else IDLE_S)
            while command is not None:
                command(client)
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            pass
        if client.session is not None:
            self.store, self.address = client.session.store, client.session.address
        if self._active:
            is_wanted = any(lookup.is_wanted for lookup in self._active)
            client.step(TURN_S if is_wanted else EARLY_TURN_S, is_urgent=self._is_awaited)
            self._active = [lookup for lookup in self._active if not self._advance(client, lookup)]
        else:
            client.poll()
        return True

    def _begin(self, client: StoreClient, lookup: PromptLookup) -> None:
        if lookup.boundaries.is_being_named or self._ask(client, lookup):
            self._active.append(lookup)

    def _ask(self, client: StoreClient, lookup: PromptLookup) -> bool:
        """Work out the boundaries, and ask about them. False if there is nothing to ask."""
        if not lookup.boundaries.is_named:
            self._answer(lookup, LookupAnswer(reason=MissReason.UNKNOWN_ADAPTER))
            return False
        lookup.walk()
        if not lookup.asks:
            if lookup.deliver:
                self._forget(client.lookup(_question(client, lookup)))  # asked for the sake of the other store
            self._answer(lookup, LookupAnswer(reason=MissReason.REFUSED))
            return False
        if not lookup.ends:
            self._answer(lookup, LookupAnswer(reason=MissReason.NO_GAIN))
            return False
        if lookup.handoff is not None:
            lookup.doubt = self._doubt(client, lookup, lookup.handoff)
        lookup.call = self._hold(client, lookup)
        return True

    @staticmethod
    def _doubt(client: StoreClient, lookup: PromptLookup, handoff: Handoff) -> str:
        """Why the hand-off is of no use here; empty if it is. Either way the store's own hit is used."""
        if handoff.namespace and handoff.namespace != client.digest.hex():
            return MissReason.FOREIGN_NAMESPACE
        if handoff.saved_tokens and (
            handoff.saved_tokens not in lookup.ends
            or handoff.chain != lookup.chains[lookup.ends.index(handoff.saved_tokens)].hex()
        ):
            return MissReason.OTHER_TOKENS
        session = client.session
        if handoff.store and session is not None and handoff.store != session.store:
            # With an address, our store asks that one, and says itself if it cannot. Our own address is no other
            # store's: then ours has been started again since.
            return "" if _elsewhere(client, handoff.address) else MissReason.FOREIGN_STORE
        return ""

    @staticmethod
    def _hold(client: StoreClient, lookup: PromptLookup) -> Call[Lease]:
        now_ns = time.monotonic_ns()
        left_s = max(0.001, (lookup.deadline_ns - now_ns) / 1e9)
        until = lookup.promised_tokens if client.session is not None and lookup.tails is None else 0
        # Several short waits instead of a long one: when the deadline comes, the last answer is there to be used.
        wait_ms = min(max(1, int(left_s * 500)), LONGEST_WAIT_MS) if until else 0
        lookup.due_ns = now_ns + wait_ms * 1_000_000
        return client.hold(_question(client, lookup, until_tokens=until, wait_ms=wait_ms), timeout_s=left_s)

    @staticmethod
    def _hasten(client: StoreClient, lookup: PromptLookup) -> None:
        """Tell the store that the engine waits now."""
        for lease in (lookup.lease, lookup.shorter):
            if lookup.answer is None and lease is not None and not lease.is_staged:
                LookupThread._forget(client.want(lease, prefill_tokens_s=lookup.prefill_tokens_s))

    def _give_back_answer(self, client: StoreClient, lookup: PromptLookup) -> None:
        if lookup.answer is not None:
            self._give_back(client, lookup.answer.lease)

    def _advance(self, client: StoreClient, lookup: PromptLookup) -> bool:
        """Move one lookup on. True when it is answered."""
        now_ns = time.monotonic_ns()
        if lookup.is_cancelled or now_ns >= lookup.deadline_ns:
            if lookup.promised_tokens and not lookup.is_cancelled:
                log.warning(
                    "kvtally: a hand-off of %d tokens did not come in time: %s", lookup.promised_tokens, lookup.state
                )
            self._settle(client, lookup, MissReason.DEADLINE if lookup.is_walked else MissReason.UNKNOWN_ADAPTER)
            return True
        if not lookup.is_walked:
            return not lookup.boundaries.is_being_named and not self._ask(client, lookup)
        if lookup.lease is None:
            if lookup.call is None and now_ns >= lookup.again_ns:
                lookup.call = self._hold(client, lookup)
            if lookup.call is None:
                return False
            result = lookup.call.result
            if result is None:
                return False
            if isinstance(result, Miss):
                self._settle(client, lookup, result.reason)
                return True
            lookup.lease, lookup.call = result, None
            if lookup.is_early and lookup.is_wanted and not result.is_staged:  # reached meanwhile
                self._hasten(client, lookup)
            if self._is_to_come(client, lookup, result):
                self._give_back(client, lookup.shorter)
                lookup.shorter, lookup.lease = result, None
                lookup.again_ns = min(lookup.due_ns, now_ns + AGAIN_NS)
                if now_ns >= lookup.again_ns:
                    lookup.call = self._hold(client, lookup)
                return False
            if (lookup.shorter is None or lookup.tails is not None) and self._ask_for_tail(client, lookup, result):
                return False
        if not lookup.lease.is_staged:
            return False
        last = lookup.lease
        if lookup.tails is not None and lookup.shorter is not None and last.end_tokens <= lookup.shorter.end_tokens:
            last = lookup.shorter  # no tail made the hit longer: why, the first answer says
        self._settle(client, lookup, last.reason)
        return True

    def _is_to_come(self, client: StoreClient, lookup: PromptLookup, lease: Lease) -> bool:
        """Whether more is promised than is there, and may still come. A question for a tail names other boundaries."""
        if lookup.tails is not None or lease.found.end_tokens >= lookup.promised_tokens:
            return False
        assert lookup.handoff is not None
        lookup.doubt = lease.found.withdrawn or self._doubt(client, lookup, lookup.handoff)
        return bool(lookup.promised_tokens) and lease.found.reason not in FINAL

    def _ask_for_tail(self, client: StoreClient, lookup: PromptLookup, lease: Lease) -> bool:
        """Ask for a hit that ends between two chunks, where an earlier request has ended. True if one is asked for.

        The store tells only lengths, and the request that ended there may have been another conversation. So a few are
        tried, the longest first. One of them is always the place at which the engine keeps a prompt's last state.
        """
        if lookup.tails is None:
            known = [lease.found.end_tokens + length for length in lease.found.tails]
            fitting = sorted(end for end in known if end <= lookup.limit_tokens and end not in lookup.ends)
            lookup.tails = fitting[-MOST_TRIES:]
            own = lookup.limit_tokens // self._block_tokens * self._block_tokens
            if own in fitting and own not in lookup.tails:
                lookup.tails[0] = own
        elif lease.found.end_tokens == lookup.ends[-1]:
            return False
        if not lookup.tails:
            return False
        if lookup.shorter is None:
            lookup.shorter = lease
        else:
            self._give_back(client, lease)
        lookup.lease = None
        tail: Boundary = lookup.boundaries.tail(lookup.tokens, lookup.tails.pop())
        whole = chunk_ends(tail.start_tokens, lookup.boundaries.chunk_tokens)
        lookup.ends = [*whole, tail.end_tokens]
        lookup.chains = [*lookup.boundaries.chains[: len(whole)], tail.chain]
        lookup.call = self._hold(client, lookup)
        return True

    def _settle(self, client: StoreClient, lookup: PromptLookup, reason: str) -> None:
        """Set the answer: the longer of the two hits, with its lease. The other lease is given back."""
        best: Lease | None = None
        for lease in (lookup.lease, lookup.shorter):
            if lease is None or lease is best:
                continue
            usable = lease.is_staged and lease.end_tokens and not lookup.is_cancelled
            if usable and (best is None or lease.end_tokens > best.end_tokens):
                self._give_back(client, best)
                best = lease
            else:
                self._give_back(client, lease)
        if lookup.call is not None and lookup.call.result is None:
            lookup.call.cancel()
        elif lookup.call is not None and isinstance(lookup.call.result, Lease):  # came with the deadline
            self._give_back(client, lookup.call.result)
        end = best.end_tokens if best is not None else 0
        wait_s = (time.monotonic_ns() - lookup.asked_ns) / 1e9
        ends = [e for e in lookup.ends if e <= end]
        if best is not None and best is lookup.shorter:
            ends = chunk_ends(end, lookup.boundaries.chunk_tokens)
        first = lookup.shorter or lookup.lease
        attention = self._attention_tokens(lookup, first.found) if first is not None else 0
        if lookup.handoff is not None and end < lookup.handoff.saved_tokens:
            reason = lookup.doubt or reason
        weighed = next((lease.outcome for lease in (best, lookup.lease) if lease is not None and lease.outcome), None)
        self._answer(lookup, LookupAnswer(end, ends, best, reason, wait_s, attention, time.monotonic_ns(), weighed))

    def _attention_tokens(self, lookup: PromptLookup, found: Found) -> int:
        """How many tokens, in whole chunks from the start, every full-attention group has, as the store says."""
        if not self._full_groups or not found.presence:
            return 0
        missing = 0
        for group in self._full_groups:
            missing |= ~int.from_bytes(found.presence[group], "little")
        chunks, chunk_tokens = (missing & -missing).bit_length() - 1, lookup.boundaries.chunk_tokens
        return min(chunks, lookup.limit_tokens // chunk_tokens) * chunk_tokens

    def _answer(self, lookup: PromptLookup, answer: LookupAnswer) -> None:
        with self._news:
            lookup.answer = answer
            self._news.notify()

    def _give_back(self, client: StoreClient, lease: Lease | None) -> None:
        if lease is not None:
            self._forget(client.release([lease]))

    @staticmethod
    def _forget(call: Call[object]) -> None:
        """Nobody waits for this call; the client counts its failure."""


def _question(client: StoreClient, lookup: PromptLookup, *, until_tokens: int = 0, wait_ms: int = 0) -> Lookup:
    handoff = lookup.handoff
    addresses = ("" if lookup.doubt else handoff.address, handoff.source) if handoff is not None else ()
    return Lookup(
        0,
        b"".join(lookup.chains),
        lookup.ends,
        lookup.limit_tokens,
        wait_ms=wait_ms,
        priority=lookup.priority,
        ahead=lookup.ahead,
        early=lookup.is_early and not lookup.is_wanted,
        prefill_tokens_s=lookup.prefill_tokens_s,
        slots=True,  # saves the worker of rank 0 its next question
        source=_elsewhere(client, *addresses),
        ticket=handoff.prefill_ticket if handoff is not None else "",
        until_tokens=until_tokens,
        deliver=_elsewhere(client, lookup.deliver) if lookup.tails is None else "",
    )


def _elsewhere(client: StoreClient, *addresses: str) -> str:
    """The first of these addresses that is not our own store's; empty if there is none."""
    own = client.session.address if client.session is not None else ""
    return next((address for address in addresses if address and address != own), "")
