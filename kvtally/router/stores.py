"""The stores behind the instances: how other stores reach each, who has a prompt, and what was pulled from where.

    held (who has seen a prompt) ─▶ Stores.source ─▶ the address that a leg's store may pull from
    the address in a hand-off ─▶ Stores.is_known ─▶ decode is told of it only if it is a configured store's
    receipts ─▶ Pulls ─▶ how fast a store's KV is pulled ─▶ Stores.candidate ─▶ core.routing.cheapest

The router moves no bytes. It names stores to each other, and none that is not configured, so that no engine can make a
store connect wherever it likes. Several instances may share one store: two that told the router the same name are one,
even where they are configured by different addresses. Nothing here waits. Neighbours: `receipts` (the connections),
`prefill` and `proxy` (name sources), `app` and `metrics` (show what is known).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median

from kvtally.config.instances import Instance
from kvtally.core.receipts import Half
from kvtally.core.routing import Candidate, Held
from kvtally.core.speed import Batch, typical
from kvtally.router.fleet import Fleet, Member
from kvtally.router.receipts import Answer, ReceiptReader
from kvtally.wire.messages import MissReason

logger = logging.getLogger(__name__)

SHORTEST_PULL_MS, LONGEST_PULL_MS = 0.001, 3_600_000.0  # anything else is no time that a pull takes
MEASURED_PULLS = 16  # the last ones from each store make its rate
HALF_WAIT_MS = 100  # for prefill's half of a receipt, which only says how fast a pull was
MOST_NAMED = 16  # unknown addresses that are logged, so that no engine can fill the log
NOT_PULLED = "not_pulled"  # prefill was chosen because it could pull, and computed instead
# Reasons that tell of pulling, and not of what was saved. The first three may also end a pull that brought something.
BROKEN = frozenset({MissReason.PEER_LOST, MissReason.UNASKED, MissReason.CHECKSUM})
FAILED = BROKEN | {MissReason.SLOW_TIER, MissReason.STAGING_FAILED, MissReason.LIMIT, NOT_PULLED}


class Pulls:
    """What was pulled from one store, as the receipts of those that pulled tell it."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self.failures: Counter[str] = Counter()
        self.last_failure = ""  # empty once a pull has succeeded again
        self._measured: deque[Batch] = deque(maxlen=MEASURED_PULLS)

    @property
    def bytes_s(self) -> float:
        """Bytes of prompts for each second; 0: not known."""
        return typical(self._measured) if self._measured else 0.0

    def counted(self, tokens: int, reason: str) -> None:
        """So many tokens were pulled for one leg, and for this reason no more."""
        if tokens > 0:
            self.count += 1
            self.tokens += tokens
            self.last_failure = ""
        if reason in (BROKEN if tokens > 0 else FAILED):
            self.failures[reason] += 1
            self.last_failure = reason

    def measured(self, half: Half, prompt_bytes: int) -> None:
        """How long the pull of one leg took. That the store had other parts to read meanwhile makes it look slower."""
        pulled_bytes = _part_bytes(prompt_bytes, half.tokens_peer, half.prompt_tokens)
        took_ms = half.wait_ms + half.load_ms
        if pulled_bytes and SHORTEST_PULL_MS <= took_ms <= LONGEST_PULL_MS:
            self._measured.append(Batch(1, pulled_bytes, int(took_ms * 1e6)))


class Stores:
    """All stores of a fleet. Without readers (a flavour without receipts) nothing is known, and nothing is named."""

    def __init__(self, fleet: Fleet, readers: Mapping[str, ReceiptReader]) -> None:
        self.readers = readers  # by the configured address
        self.pulls = {address: Pulls() for address in readers}
        self.foreign = 0  # hand-offs whose address is no configured store's
        self._fleet = fleet
        self._named: set[str] = set()

    def address(self, store: str) -> str:
        """How other stores reach the store that is configured by this address, as it told itself. Empty if they cannot,
        and if the router cannot: then it is probably down."""
        reader = self.readers.get(store)
        return "" if reader is None or reader.problem else _told(reader)

    def is_known(self, address: str) -> bool:
        """Whether it is the address of a configured store. What is not is counted, and logged once."""
        if self._at(address):
            return True
        self.foreign += 1
        if address not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(address)
            logger.warning(
                "a hand-off names the store %r, which is no configured instance's: decode is not told of it. Name the "
                "store of each instance, as in --prefill URL,store=ADDRESS",
                address,
            )
        return False

    def source(self, held: Mapping[str, Held], to: Instance, prompt_bytes: int) -> str:
        """The address of the store that has more of the prompt than any other, and more than this instance's own."""
        found = self._other(held, to, prompt_bytes)
        return self.address(found.store) if found is not None else ""

    def deliver(self, prefill: Instance, decode: Instance) -> str:
        """The address of decode's store, if it can pull from prefill's while that is being saved."""
        if len(self.readers) < 2 or self._key(prefill.store) == self._key(decode.store):
            return ""
        return self.address(decode.store) if self.address(prefill.store) else ""

    def candidate(self, member: Member, held: Mapping[str, Held], prompt_bytes: int, now_ns: int) -> Candidate:
        """What is known of an instance that might compute this prompt."""
        own, key = member.instance, self._key(member.instance.store)
        stored = [
            known.seen_bytes
            for name, known in held.items()
            if name == member.name or (self.readers and self._key(self._fleet.members[name].instance.store) == key)
        ]
        other = self._other(held, own, prompt_bytes) if self.address(own.store) else None
        return Candidate(
            name=member.name,
            load=member.legs,
            queued_bytes=member.work.queued_bytes(now_ns),
            compute_bytes_s=member.work.bytes_s,
            stored_bytes=max(stored, default=0),
            pulled_bytes=held[other.name].seen_bytes if other is not None else 0,
            pull_bytes_s=pull_bytes_s(self.pulls[other.store], self.pulls.values()) if other is not None else 0.0,
        )

    def pulled(self, source: str, half: Half, prompt_bytes: int, *, is_timed: bool) -> None:
        """What decode pulled from the store that was named to it, by its address or as it is configured. Its half says
        how long that took if it `is_timed`."""
        pulls = self.pulls.get(source) or self.pulls.get(self._at(source))
        if pulls is not None:
            pulls.counted(half.tokens_peer, half.reason)
            if is_timed:
                pulls.measured(half, prompt_bytes)

    def prefilled(self, source: str, half: Half, prompt_bytes: int, by: Candidate, own: Instance) -> None:
        """The same for prefill. Its hand-off says neither why it pulled nothing nor how long a pull took; the half in
        its own store does."""
        pulls, reader = self.pulls.get(self._at(source)), self.readers.get(own.store)
        if pulls is None or reader is None:
            return
        pulls.counted(half.tokens_peer, NOT_PULLED if computed_instead(by, half, prompt_bytes) else "")
        if half.tokens_peer:
            asked = reader.ask(half.request, HALF_WAIT_MS)
            asked.add_done_callback(partial(_read, pulls, prompt_bytes))

    def tree(self) -> dict[str, object]:
        """For `/instances`: by configured address, whether receipts are read, what the store told, what was pulled."""
        return {store: self._row(store) for store in self.readers}

    def _row(self, store: str) -> dict[str, object]:
        reader, pulls = self.readers[store], self.pulls[store]
        return {
            "receipts": reader.problem or "ok",
            "version": reader.greeting.version if reader.greeting is not None else "",
            # As it told last. Of one that told nothing yet only this is known.
            "address": _told(reader) if reader.greeting is not None or not reader.endpoint.host else store,
            "pulls": {
                "count": pulls.count,
                "tokens": pulls.tokens,
                "prompt_bytes_s": round(pulls.bytes_s),
                "failures": dict(pulls.failures),
                "last_failure": pulls.last_failure,
            },
        }

    def _other(self, held: Mapping[str, Held], to: Instance, prompt_bytes: int) -> Instance | None:
        """The instance whose store has more of the prompt than any other's, and more than this instance's own.

        Of two that have seen as much of a prompt, but not all, the decode instance has more: the answer, with which the
        prompt goes on."""
        if len(self.readers) < 2:
            return None
        key, best, own_rank, best_rank = self._key(to.store), None, (0, False), (0, False)
        for name, known in held.items():
            member = self._fleet.members[name]
            is_longer = known.seen_bytes < prompt_bytes and member in self._fleet.decode.members
            rank = known.seen_bytes, is_longer
            if self._key(member.instance.store) == key:
                own_rank = max(own_rank, rank)
            elif rank > best_rank and self.address(member.instance.store):
                best, best_rank = member.instance, rank
        return best if best_rank > own_rank else None

    def _key(self, store: str) -> str:
        """What tells stores apart: the name that each told, or the configured address of one that told none yet."""
        reader = self.readers.get(store)
        return reader.greeting.store if reader is not None and reader.greeting is not None else store

    def _at(self, address: str) -> str:
        """The store that others reach by this address, as it is configured; empty if there is none."""
        for store, reader in self.readers.items():
            if address and (address == _told(reader) or (address == store and reader.endpoint.host)):
                return store
        return ""


def pull_bytes_s(source: Pulls, every: Iterable[Pulls]) -> float:
    """How fast others pull from a store; as long as nobody has, as fast as they pull from any. 0 if that is not known
    either, and if the last attempt brought nothing."""
    if source.last_failure:
        return 0.0
    return source.bytes_s or median([each.bytes_s for each in every if each.bytes_s] or [0.0])


def computed_instead(by: Candidate, half: Half, prompt_bytes: int) -> bool:
    """Whether an instance that was chosen because it could pull a part of the prompt computed that part instead."""
    pulled_bytes = by.had_bytes(by.compute_bytes_s) - by.stored_bytes
    if not pulled_bytes or half.tokens_peer:
        return False
    expected_bytes = prompt_bytes - by.stored_bytes - pulled_bytes
    return _part_bytes(prompt_bytes, half.computed_tokens, half.prompt_tokens) > expected_bytes + pulled_bytes // 2


def computed_bytes(prompt_bytes: int, half: Half | None) -> int:
    """How much of a prompt prefill computed, to measure how fast it does. 0 where most of it was reused: such a prompt
    measures loading, and what each request takes however short it is."""
    if half is None or 2 * half.computed_tokens < half.prompt_tokens:
        return 0
    return _part_bytes(prompt_bytes, half.computed_tokens, half.prompt_tokens)


def _part_bytes(prompt_bytes: int, tokens: int, prompt_tokens: int) -> int:
    return prompt_bytes * max(0, min(tokens, prompt_tokens)) // max(prompt_tokens, 1)


def _read(pulls: Pulls, prompt_bytes: int, asked: asyncio.Future[Answer]) -> None:
    receipt = asked.result().receipt
    if receipt is not None and receipt.prefill is not None:
        pulls.measured(receipt.prefill, prompt_bytes)


def _told(reader: ReceiptReader) -> str:
    return reader.greeting.address if reader.greeting is not None else ""
