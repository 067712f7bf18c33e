"""A client that copies, too: for the synthetic engine, demos, benches and tests.

An engine copies with its device (`kvtally.device`), in a thread of its own, and judges the copy with
`StoreClient.accept` or `confirm`. Here one thread does everything, one object after the other:

    hold ─▶ wait_staged ─▶ slots ─▶ read ─▶ release          or `get`
    put_begin ─▶ write ─▶ put_end                            or `put`
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtally.client import Lease, Miss, Put, ReadSlot, StoreClient
from kvtally.client.handles import reason_of
from kvtally.core.geometry import Runs
from kvtally.device import cpu
from kvtally.wire.messages import Lookup, MissReason, PutObject, PutStatus


class CopyingClient(StoreClient):
    def wait_staged(self, lease: Lease, *, timeout_s: float | None = None) -> Lease | Miss:
        """Wait until everything leased is in the arena. A Miss if that failed or took too long."""
        deadline_ns = self._deadline_ns(timeout_s)
        while not lease.is_staged:
            if time.monotonic_ns() >= deadline_ns:
                return self._count(Miss(MissReason.DEADLINE, "staging did not end in time"))
            self.step(_left_s(deadline_ns))
        if lease.end_tokens:
            return lease
        return self._count(Miss(reason_of(lease.reason, MissReason.ABSENT)))

    def read(
        self, slot: ReadSlot, memory: cpu.Memory, runs: Runs | None = None, *, verify: bool | None = None
    ) -> int | Miss:
        """Copy an object to the start of `memory`, or to where `runs` say: its length, or a Miss with garbage there.

        Verified as the store says, unless `verify` says otherwise.
        """
        lease = slot.lease
        if not lease.is_live:
            return self._count(Miss(MissReason.LEASE_EXPIRED))
        if verify is None:
            verify = lease.session.verify_reads
        checksum = cpu.load_object(slot.pieces, memory, runs, slot.seed if verify else None)
        return self._judge(slot, checksum) or slot.length_bytes

    def read_all(
        self, slots: Sequence[ReadSlot], memories: Sequence[cpu.Memory], *, verify: bool | None = None
    ) -> int | Miss:
        """`read` for many whole objects of one lease, each into a buffer of its size. The number of bytes.

        Unverified objects are copied in as few pieces as possible, and the lease is confirmed once, after the last.
        """
        if not slots:
            return 0
        if slots[0].lease.session.verify_reads if verify is None else verify:
            for slot, memory in zip(slots, memories, strict=True):
                outcome = self.read(slot, memory, verify=True)
                if isinstance(outcome, Miss):
                    return outcome
        else:
            if not slots[0].lease.is_live:
                return self._count(Miss(MissReason.LEASE_EXPIRED))
            whole = [(memory, slot.pieces) for slot, memory in zip(slots, memories, strict=True)]
            cpu.move_all(whole, into_slots=False)
            missed = self._judge(slots[-1], None)
            if missed is not None:
                return missed
        return sum(slot.length_bytes for slot in slots)

    def get(
        self, question: Lookup, *, rank: int = 0, timeout_s: float | None = None
    ) -> dict[tuple[int, int], bytearray] | Miss:
        """One-shot: look up, hold, stage, read. The bytes of everything the hit needs, by (boundary index, group)."""
        deadline_ns = self._deadline_ns(timeout_s, question.wait_ms)
        lease = self.hold(question, timeout_s=_left_s(deadline_ns)).wait()
        if isinstance(lease, Miss):
            return lease
        try:
            staged = self.wait_staged(lease, timeout_s=_left_s(deadline_ns))
            if isinstance(staged, Miss):
                return staged
            slots = self.slots(lease, rank=rank, timeout_s=_left_s(deadline_ns)).wait()
            if isinstance(slots, Miss):
                return slots
            found: dict[tuple[int, int], bytearray] = {}
            for slot in slots:
                target = bytearray(slot.length_bytes)
                outcome = self.read(slot, target)
                if isinstance(outcome, Miss):
                    return outcome
                found[slot.index, slot.key.group] = target
            return found
        finally:
            self.release([lease])

    def write(self, put: Put, memory: cpu.Memory, runs: Runs | None = None) -> int | Miss:
        """Copy an object into its slot, from the start of `memory` or from where `runs` say: its checksum."""
        if put.status is not PutStatus.WRITE:
            raise ValueError(f"the store gave no slot to write to: {put.status.name}")
        if not put.session.alive:
            return self._count(Miss(MissReason.LEASE_EXPIRED))
        checksum = cpu.save_object(memory, runs, put.pieces, put.seed)
        assert checksum is not None
        return checksum

    def write_all(
        self, puts: Sequence[Put], memories: Sequence[cpu.Memory], *, hashed: bool = True
    ) -> list[tuple[Put, int]] | Miss:
        """`write` for many whole objects, as `put_end` takes them. Unhashed objects get the checksum 0, so verified
        reads reject them; a benchmark uses them to time the copies alone."""
        if hashed:
            written: list[tuple[Put, int]] = []
            for put, memory in zip(puts, memories, strict=True):
                checksum = self.write(put, memory)
                if isinstance(checksum, Miss):
                    return checksum
                written.append((put, checksum))
            return written
        if any(put.status is not PutStatus.WRITE for put in puts):
            raise ValueError(f"the store gave no slot to write to: {[put.status.name for put in puts]}")
        if not all(put.session.alive for put in puts):
            return self._count(Miss(MissReason.LEASE_EXPIRED))
        whole = [(memory, put.pieces) for put, memory in zip(puts, memories, strict=True)]
        cpu.move_all(whole, into_slots=True)
        return [(put, 0) for put in puts]

    def put(
        self, objects: Sequence[tuple[PutObject, cpu.Memory]], *, timeout_s: float | None = None
    ) -> list[PutStatus] | Miss:
        """One-shot: begin, write, commit. For each object WRITE (saved now), PRESENT, PENDING or FULL."""
        deadline_ns = self._deadline_ns(timeout_s)
        for item, data in objects:
            if cpu.size_bytes(data) != item.length_bytes:
                raise ValueError(f"{cpu.size_bytes(data)} bytes were given for an object of {item.length_bytes}")
        puts = self.put_begin([item for item, _ in objects], timeout_s=_left_s(deadline_ns)).wait()
        if isinstance(puts, Miss):
            return puts
        given = [(put, data) for put, (_, data) in zip(puts, objects, strict=True) if put.status is PutStatus.WRITE]
        commits = self.write_all([put for put, _ in given], [data for _, data in given])
        if isinstance(commits, Miss):
            return commits
        if commits:
            ended = self.put_end(commits, timeout_s=_left_s(deadline_ns)).wait()
            if isinstance(ended, Miss):
                return ended
            if ended.rejected:
                return self._count(Miss(MissReason.LEASE_EXPIRED, f"{len(ended.rejected)} puts had expired"))
        return [put.status for put in puts]

    def _judge(self, slot: ReadSlot, checksum: int | None) -> Miss | None:
        """If the copy was hashed, `accept` it; if not, ask the store whether the lease still stands."""
        if checksum is not None:
            return self.accept(slot, checksum)
        standing = self.confirm(slot.lease).wait()
        return standing if isinstance(standing, Miss) else None


def _left_s(deadline_ns: int) -> float:
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
