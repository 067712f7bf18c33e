"""Stores of the fleet: by which address other stores reach each, and which of them has seen most of a prompt.

The router moves no bytes. It names stores to each other: the *source* that a prompt's beginning can be pulled from, and
the store to which a prefill is to be delivered. It passes on only addresses of stores that are configured here, so that
no engine can make another one's store connect wherever it likes.

Neighbours: `prefill` and `proxy` (left), `receipts` (what each store has told about itself). No state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtally.core.routing import Held
from kvtally.router.fleet import Fleet, Member
from kvtally.router.receipts import ReceiptReader


class Stores:
    def __init__(self, fleet: Fleet, readers: Mapping[str, ReceiptReader]) -> None:
        self._fleet = fleet
        self._readers = readers

    def address(self, member: Member) -> str:
        """By which other stores reach this instance's store; empty if they cannot."""
        configured = member.instance.store
        reader = self._readers.get(configured)
        told = reader.greeting.address if reader is not None and reader.greeting is not None else ""
        return told or (configured if configured.startswith("tcp://") else "")

    def is_known(self, address: str) -> bool:
        """Whether it is the address of a store that is configured here."""
        members = self._fleet.members.values()
        return bool(address) and any(address in (member.instance.store, self.address(member)) for member in members)

    def beside(self, member: Member, other: Member) -> str:
        """The address of the other instance's store, unless the two share one."""
        address = self.address(other)
        return address if address and address != self.address(member) else ""

    def source(self, member: Member, *held: Mapping[str, Held]) -> str:
        """The store that has seen most of a prompt, if that is more than this instance's own store has seen."""
        seen: dict[str, int] = {}  # by address
        for known in held:
            for name, bytes_held in known.items():
                holder = self._fleet.members.get(name)
                address = self.address(holder) if holder is not None and holder.is_up else ""
                if address:
                    seen[address] = max(seen.get(address, 0), bytes_held.seen_bytes)
        own = self.address(member)
        best = max(seen, key=lambda address: seen[address], default="")
        return best if best and seen[best] > seen.get(own, 0) else ""
