"""The scheduler half's thread: everything that takes time or talks to the store, so that no engine step ever does.

    scheduler half ──ask / want / cancel / release / file / walk──▶ queue ──▶ this thread ──▶ store
    scheduler half ◀── inquiry.answer, set once ──────────┘

For each inquiry: chain values of the prompt, one lookup that leases and stages, if the store knows tails beyond the hit
one more for each that may fit until one does, then the wait until everything is in the arena. An inquiry that is early
has time until the scheduler comes to its request (`want`); from then on it has a deadline, by which an answer is set
whatever happens. An answer of 0 tokens has a reason. What a hand-off says is being saved is asked for again until it is
there, or prefill has withdrawn it: its answer may overtake its bytes. Owns the client, which only this thread touches.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtally.client import Call, Lease, Miss, StoreClient
from kvtally.core.handoff import Handoff
from kvtally.core.keys import chunk_ends
from kvtally.core.receipts import Half
from kvtally.vllm.path import Boundary, Path
from kvtally.wire.messages import Found, Lookup, MissReason, Receipts

log = logging.getLogger("kvtally.vllm")

IDLE_S = 0.05
TURN_S = 0.001  # how long one look at the socket may keep new commands waiting
EARLY_TURN_S = 0.002  # the same, while nobody waits: every look takes the interpreter from the engine
MOST_TRIES = 4  # of tails that may be another conversation's
AGAIN_NS = 3_000_000  # between the first two questions for what a hand-off promised; twice as long each time after
LONGEST_AGAIN_NS = 48_000_000  # so that many who wait long are no load for the store
RESET_PAUSE_S = 0.05  # between two requests to forget everything
LONGEST_WAIT_MS = 300  # that the store may take for such a question


class Answer(NamedTuple):
    """What may be promised: `end_tokens`, held by `lease` until it is released; boundaries at `ends`."""

    end_tokens: int
    ends: list[int]
    lease: Lease | None
    reason: str
    wait_s: float
    attention_tokens: int = 0  # the boundary up to which all full attention is there, with or without state
    ready_ns: int = 0  # when it was set
    left_tokens: int = 0  # found, and not worth loading; with the two estimates that this was decided by
    load_ms: float = 0.0
    compute_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Inquiry:
    """A question about one request. `answer` and `path` are set by the thread, each once. `deadline_ns` is moved up by
    the scheduler's thread, once, when it comes to a request that was asked about early."""

    tokens: Sequence[int]
    path: Path
    deadline_ns: int
    asked_ns: int
    full_groups: tuple[int, ...] = ()
    handoff: Handoff | None = None  # what prefill says it has saved of this prompt
    is_early: bool = False  # asked before the scheduler came to the request
    is_wanted: bool = False  # it has come to it
    priority: int = 0
    ahead: int = 0  # requests that arrived before and have not begun
    prefill_tokens_s: int = 0  # 0: load whatever it takes
    block_tokens: int = 1  # the engine keeps states at multiples of this
    answer: Answer | None = None
    is_cancelled: bool = False
    call: Call[Lease] | None = None
    lease: Lease | None = None
    ends: list[int] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)
    shorter: Lease | None = None  # a shorter hit, while a longer one is asked for
    tails: list[int] | None = None  # where else it may go on from, the longest last
    again_ns: int = 0  # when to ask again, while neither `call` nor `lease` is set
    pause_ns: int = AGAIN_NS  # how long that will be, the next time
    foreign: str = ""  # why the hand-off cannot be what this engine needs
    word: Call[Receipts] | None = None  # what prefill says by now
    path_ready: bool = False

    @property
    def limit_tokens(self) -> int:
        return len(self.tokens) - 1

    @property
    def promised_tokens(self) -> int:
        """What the hand-off says can be had, unless there is a reason to doubt it."""
        return self.handoff.saved_tokens if self.handoff is not None and not self.foreign else 0

    def walk(self) -> None:
        """Work out its boundaries, and their chain values."""
        chunk, limit = self.path.chunk_tokens, self.limit_tokens
        self.path.extend(self.tokens, limit)
        tail = self.path.tail(self.tokens, limit) if limit % chunk else None
        self.ends = chunk_ends(limit, chunk)
        self.chains = self.path.chains[: len(self.ends)]
        if tail is not None:
            self.ends.append(tail.end_tokens)
            self.chains.append(tail.chain)
        self.path_ready = True

    def attention_tokens(self, found: Found) -> int:
        """Whole chunks from the start that every full-attention group has, by the store's answer."""
        if not self.full_groups or not found.presence:
            return 0
        missing = 0
        for group in self.full_groups:
            missing |= ~int.from_bytes(found.presence[group], "little")
        chunks = (missing & -missing).bit_length() - 1
        return min(chunks, self.limit_tokens // self.path.chunk_tokens) * self.path.chunk_tokens


class Inquiries:
    """Start with `start()`. Every method may be called from the scheduler's thread; all but `wait` and `reset` return
    at once."""

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        self._connect = connect
        self._commands: queue.SimpleQueue[Callable[[StoreClient], None] | None] = queue.SimpleQueue()
        self._active: list[Inquiry] = []
        self._news = threading.Condition()  # told of every answer
        self._is_awaited = False  # the engine does nothing until there is one
        self.store = ""  # name of the store's process, once there is a connection
        self._thread = threading.Thread(target=self._run, name="kvtally-inquiry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, inquiry: Inquiry) -> None:
        self._commands.put(lambda client: self._begin(client, inquiry))

    def walk(self, inquiry: Inquiry) -> None:
        """Nothing is asked, but what is saved of the request needs its path."""
        self._commands.put(lambda client: inquiry.walk())

    def want(self, inquiry: Inquiry) -> None:
        """The scheduler has come to the request."""
        self._commands.put(lambda client: self._hasten(client, inquiry))

    def wait(self, inquiry: Inquiry, timeout_s: float) -> None:
        """Until it is answered, or the time is over."""
        with self._news:
            self._is_awaited = True
            self._news.wait_for(lambda: inquiry.answer is not None, timeout_s)
            self._is_awaited = False

    def cancel(self, inquiry: Inquiry) -> None:
        """The request is over before its answer was taken: whatever is held for it, or will be, is given back."""
        inquiry.is_cancelled = True
        self._commands.put(lambda client: self._give_back_answer(client, inquiry))

    def release(self, lease: Lease) -> None:
        self._commands.put(lambda client: self._give_back(client, lease))

    def file(self, ticket: str, half: Half) -> None:
        self._commands.put(lambda client: self._forget(client.file_receipt(ticket, half)))

    def reset(self, timeout_s: float) -> bool:
        """Have the store forget this engine's namespace. Waits, and no longer than this."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)

        def insist(client: StoreClient) -> None:
            """A store refuses where its disk has not removed everything in time: then it is asked again."""
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
                log.exception("an inquiry failed; its requests are computed")
                for inquiry in self._active:
                    if inquiry.answer is None:  # else this very turn has answered it, and somebody may have its lease
                        self._settle(client, inquiry, MissReason.STORE_UNREACHABLE)
                self._active.clear()
        client.close()

    def _turn(self, client: StoreClient) -> bool:
        """One round: new commands, then progress for everybody. False when asked to stop."""
        try:
            command = self._commands.get(timeout=0 if self._active else IDLE_S)
            while command is not None:
                command(client)
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            pass
        self.store = client.session.store if client.session is not None else self.store
        if self._active:
            is_wanted = any(inquiry.is_wanted for inquiry in self._active)
            client.step(TURN_S if is_wanted else EARLY_TURN_S, is_urgent=self._is_awaited)
            self._active = [inquiry for inquiry in self._active if not self._advance(client, inquiry)]
        else:
            client.poll()
        return True

    def _begin(self, client: StoreClient, inquiry: Inquiry) -> None:
        inquiry.walk()
        if not inquiry.ends:
            self._answer(inquiry, Answer(0, [], None, MissReason.NO_GAIN, 0.0))
            return
        if inquiry.handoff is not None:
            inquiry.foreign = self._doubt(client, inquiry, inquiry.handoff)
        inquiry.call = self._hold(client, inquiry)
        self._active.append(inquiry)

    @staticmethod
    def _doubt(client: StoreClient, inquiry: Inquiry, handoff: Handoff) -> str:
        """Why the hand-off is of no use here; what the store has is used all the same."""
        said = inquiry.word.result if inquiry.word is not None else None
        for receipt in said.receipts if isinstance(said, Receipts) else ():
            if receipt.prefill is not None and not receipt.prefill.saved_tokens:
                return receipt.prefill.reason or MissReason.REFUSED
        if handoff.namespace and handoff.namespace != client.digest.hex():
            return MissReason.FOREIGN_NAMESPACE
        if handoff.saved_tokens and (
            handoff.saved_tokens not in inquiry.ends
            or handoff.chain != inquiry.chains[inquiry.ends.index(handoff.saved_tokens)].hex()
        ):
            return MissReason.OTHER_TOKENS
        if handoff.store and client.session is not None and handoff.store != client.session.store:
            return MissReason.FOREIGN_STORE
        return ""

    @staticmethod
    def _hold(client: StoreClient, inquiry: Inquiry) -> Call[Lease]:
        left_s = max(0.001, (inquiry.deadline_ns - time.monotonic_ns()) / 1e9)
        # Short waits, one after the other: when time is up, the last answer is there to be used.
        wait_ms = min(int(left_s * 500), LONGEST_WAIT_MS) if inquiry.promised_tokens else 0
        question = Lookup(
            0,
            b"".join(inquiry.chains),
            inquiry.ends,
            inquiry.limit_tokens,
            wait_ms=wait_ms,
            hold=True,
            priority=inquiry.priority,
            ahead=inquiry.ahead,
            early=inquiry.is_early and not inquiry.is_wanted,
            prefill_tokens_s=inquiry.prefill_tokens_s,
            slots=True,  # what the worker of rank 0 would ask next
        )
        return client.hold(question, timeout_s=left_s)

    @staticmethod
    def _hasten(client: StoreClient, inquiry: Inquiry) -> None:
        for lease in (inquiry.lease, inquiry.shorter):
            if inquiry.answer is None and lease is not None and not lease.is_staged:
                Inquiries._forget(client.want(lease, prefill_tokens_s=inquiry.prefill_tokens_s))

    def _give_back_answer(self, client: StoreClient, inquiry: Inquiry) -> None:
        if inquiry.answer is not None:
            self._give_back(client, inquiry.answer.lease)

    def _advance(self, client: StoreClient, inquiry: Inquiry) -> bool:
        """One inquiry's progress; True when there is nothing more to do for it."""
        now_ns = time.monotonic_ns()
        if inquiry.is_cancelled or now_ns >= inquiry.deadline_ns:
            self._settle(client, inquiry, MissReason.DEADLINE)
            return True
        if inquiry.lease is None:
            if inquiry.call is None:
                if now_ns < inquiry.again_ns:
                    return False
                inquiry.call = self._hold(client, inquiry)
            result = inquiry.call.result
            if result is None:
                return False
            if isinstance(result, Miss):
                self._settle(client, inquiry, result.reason)
                return True
            inquiry.lease, inquiry.call = result, None
            if inquiry.is_early and inquiry.is_wanted and not result.is_staged:  # the scheduler came while it was asked
                self._hasten(client, inquiry)
            if self._is_to_come(client, inquiry, result):
                self._give_back(client, inquiry.shorter)
                inquiry.shorter, inquiry.lease = result, None
                inquiry.again_ns = now_ns + inquiry.pause_ns
                inquiry.pause_ns = min(2 * inquiry.pause_ns, LONGEST_AGAIN_NS)
                return False
            if (inquiry.shorter is None or inquiry.tails is not None) and self._ask_for_tail(client, inquiry, result):
                return False
        if not inquiry.lease.is_staged:
            return False
        self._settle(client, inquiry, inquiry.lease.reason)
        return True

    def _is_to_come(self, client: StoreClient, inquiry: Inquiry, lease: Lease) -> bool:
        """Whether prefill promised more than is there: then its writer has not begun yet."""
        if lease.found.end_tokens >= inquiry.promised_tokens:
            return False
        assert inquiry.handoff is not None
        inquiry.foreign = self._doubt(client, inquiry, inquiry.handoff)
        if inquiry.promised_tokens and (inquiry.word is None or inquiry.word.result is not None):
            inquiry.word = client.receipts(inquiry.handoff.prefill_ticket)
        return bool(inquiry.promised_tokens)

    def _ask_for_tail(self, client: StoreClient, inquiry: Inquiry, lease: Lease) -> bool:
        """Where an earlier request ended between two chunks, this one may go on from there. True if it is asked for.

        Only lengths are known: what ended there may have been another conversation, so a few are tried, the longest
        first. Always among them is where the engine keeps the last state of a prompt like this one.
        """
        if inquiry.tails is None:
            known = [lease.found.end_tokens + length for length in lease.found.tails]
            fitting = sorted(end for end in known if end <= inquiry.limit_tokens and end not in inquiry.ends)
            inquiry.tails = fitting[-MOST_TRIES:]
            own = inquiry.limit_tokens // inquiry.block_tokens * inquiry.block_tokens
            if own in fitting and own not in inquiry.tails:
                inquiry.tails[0] = own
        elif lease.found.end_tokens == inquiry.ends[-1]:
            return False
        if not inquiry.tails:
            return False
        if inquiry.shorter is None:
            inquiry.shorter = lease
        else:
            self._give_back(client, lease)
        inquiry.lease = None
        tail: Boundary = inquiry.path.tail(inquiry.tokens, inquiry.tails.pop())
        whole = chunk_ends(tail.start_tokens, inquiry.path.chunk_tokens)
        inquiry.ends = [*whole, tail.end_tokens]
        inquiry.chains = [*inquiry.path.chains[: len(whole)], tail.chain]
        inquiry.call = self._hold(client, inquiry)
        return True

    def _settle(self, client: StoreClient, inquiry: Inquiry, reason: str) -> None:
        """Set the answer: the longer of the two hits, with its lease. The other lease is given back."""
        best: Lease | None = None
        for lease in (inquiry.lease, inquiry.shorter):
            if lease is None or lease is best:
                continue
            usable = lease.is_staged and lease.end_tokens and not inquiry.is_cancelled
            if usable and (best is None or lease.end_tokens > best.end_tokens):
                self._give_back(client, best)
                best = lease
            else:
                self._give_back(client, lease)
        if inquiry.call is not None and inquiry.call.result is None:
            inquiry.call.cancel()
        elif inquiry.call is not None and isinstance(inquiry.call.result, Lease):  # came with the deadline
            self._give_back(client, inquiry.call.result)
        end = best.end_tokens if best is not None else 0
        wait_s = (time.monotonic_ns() - inquiry.asked_ns) / 1e9
        ends = [e for e in inquiry.ends if e <= end]
        if best is not None and best is inquiry.shorter:
            ends = chunk_ends(end, inquiry.path.chunk_tokens)
        first = inquiry.shorter or inquiry.lease
        attention = inquiry.attention_tokens(first.found) if first is not None else 0
        if inquiry.handoff is not None and end < inquiry.handoff.saved_tokens:
            reason = inquiry.foreign or reason
        answer = Answer(end, ends, best, reason, wait_s, attention, time.monotonic_ns())
        outcome = next((lease.outcome for lease in (best, inquiry.lease) if lease is not None and lease.outcome), None)
        if outcome is not None:
            weighed = outcome.left_tokens, outcome.load_ms, outcome.compute_ms
            answer = answer._replace(left_tokens=weighed[0], load_ms=weighed[1], compute_ms=weighed[2])
        self._answer(inquiry, answer)

    def _answer(self, inquiry: Inquiry, answer: Answer) -> None:
        with self._news:
            inquiry.answer = answer
            self._news.notify()

    def _give_back(self, client: StoreClient, lease: Lease | None) -> None:
        if lease is not None:
            self._forget(client.release([lease]))

    @staticmethod
    def _forget(call: Call[object]) -> None:
        """Nobody waits for this one; its failure is counted by the client."""
