"""Receipts at the store: halves are filed, and fetched at once or waited for.

    ReceiptFile ─▶ book ─▶ whoever waits for that ticket is answered, if decode's half is there
    ReceiptGet  ─▶ found: answered; else it waits for its ticket, until its deadline

Owns the book and the fetches that wait. Each fetch has a number of its own, so that ending one costs the same however
many wait for the same ticket. Neighbours: `core.receipts` (the book), `store` (left). No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvtally.core.receipts import Receipt, ReceiptBook
from kvtally.store.alarms import Alarm
from kvtally.store.context import Context, Session
from kvtally.wire.messages import Done, MissReason, ReceiptFile, ReceiptGet, Receipts

HALF_TEXT_BYTES = 1_024  # for all texts of a half: a thousand receipts must fit into one frame
MOST_LISTED = 1_000


@dataclass(slots=True)
class Fetch:
    """A ReceiptGet that waits."""

    session: Session
    request: int
    ticket: str
    alarm: Alarm


class ReceiptDesk:
    def __init__(self, context: Context) -> None:
        self._context = context
        limits = context.limits
        self._book = ReceiptBook(capacity=limits.receipts, lifetime_ns=limits.receipt_ns)
        self._fetches: dict[int, Fetch] = {}
        self._waiting_for: dict[str, dict[int, None]] = {}  # ticket -> fetches, in the order of their arrival
        self._of_session: dict[int, set[int]] = {}  # session -> fetches
        self._withdrawn: list[str] = []  # tickets whose prefill has said that it saved nothing

    def __len__(self) -> int:
        return len(self._book)

    def file(self, session: Session, request: ReceiptFile, now_ns: int) -> None:
        half, longest = request.half, self._context.limits.ticket_bytes
        text_bytes = len(half.request.encode()) + len(half.reason.encode()) + len(half.chain)
        if not 0 < len(request.ticket) <= longest or text_bytes > HALF_TEXT_BYTES:
            message = f"a ticket of {len(request.ticket)} characters, with a half whose texts have {text_bytes} bytes"
            remedy = f"Tickets have 1 to {longest} characters, the texts of a half at most {HALF_TEXT_BYTES} bytes."
            self._context.refuse(session, request.id, "KV-503", message, remedy)
            return
        receipt = self._book.file(request.ticket, request.half, now_ns)
        if receipt.decode is not None:
            for number in list(self._waiting_for.get(request.ticket, ())):
                self._answer(self._end(number), receipt)
        if withdrawal(receipt):
            self._withdrawn.append(request.ticket)
        self._context.send(session, Done(request.id))

    def withdrawn(self, ticket: str, now_ns: int) -> str:
        """Why the prefill of this ticket has saved nothing; empty if it has, or has not said so."""
        receipt = self._book.find(ticket, now_ns) if ticket else None
        return withdrawal(receipt) if receipt is not None else ""

    def take_withdrawn(self) -> list[str]:
        """The tickets whose promise was withdrawn since the last call."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def get(self, session: Session, request: ReceiptGet, now_ns: int) -> None:
        if not request.ticket:
            newest = self._book.last(max(0, min(request.last, MOST_LISTED)), now_ns)
            self._context.send(session, Receipts(request.id, newest))
            return
        receipt = self._book.find(request.ticket, now_ns)
        is_final = receipt is not None and receipt.decode is not None
        is_final |= len(request.ticket) > self._context.limits.ticket_bytes  # no such ticket can be filed
        if is_final or request.wait_ms <= 0 or session.waiting >= self._context.limits.waiting_per_client:
            self._context.send(session, Receipts(request.id, [receipt] if receipt is not None else []))
            return
        number = self._context.new_id()
        wait_ns = min(request.wait_ms * 1_000_000, self._context.limits.wait_ns)
        alarm = self._context.alarms.set(now_ns + wait_ns, partial(self._late, number))
        self._fetches[number] = Fetch(session, request.id, request.ticket, alarm)
        self._waiting_for.setdefault(request.ticket, {})[number] = None
        self._of_session.setdefault(session.id, set()).add(number)
        session.waiting += 1

    def disconnect(self, session: Session) -> None:
        for number in list(self._of_session.get(session.id, ())):
            self._end(number)

    def _late(self, number: int, now_ns: int) -> None:
        fetch = self._end(number)
        self._answer(fetch, self._book.find(fetch.ticket, now_ns))

    def _answer(self, fetch: Fetch, receipt: Receipt | None) -> None:
        self._context.send(fetch.session, Receipts(fetch.request, [receipt] if receipt is not None else []))

    def _end(self, number: int) -> Fetch:
        """It waits no longer."""
        fetch = self._fetches.pop(number)
        self._context.alarms.cancel(fetch.alarm)
        fetch.session.waiting -= 1
        waiting = self._waiting_for[fetch.ticket]
        del waiting[number]
        if not waiting:
            del self._waiting_for[fetch.ticket]
        own = self._of_session[fetch.session.id]
        own.discard(number)
        if not own:
            del self._of_session[fetch.session.id]
        return fetch


def withdrawal(receipt: Receipt) -> str:
    """Why prefill has saved nothing, by its own half; empty if it has, or has filed none."""
    half = receipt.prefill
    return half.reason or MissReason.REFUSED if half is not None and not half.saved_tokens else ""
