"""Sends: a peer pulls objects that its lease holds.

    Pull ─▶ the lease stands and holds the object ─▶ pinned, SendJob ─▶ sent, or the connection died ─▶ unpinned
                 └ it does not: SendJob without bytes

An object stays where it is from the decision to the outcome, whatever becomes of its lease meanwhile. Owns the sends
under way. Neighbours: `store` (left: what came on bulk connections), `leases` (right: what a peer holds), `bulk` (the
shell: carries SendJobs out). No I/O.
"""

from __future__ import annotations

from kvtally.core.residency import Node
from kvtally.store.context import Context
from kvtally.store.jobs import Outcome, SendJob
from kvtally.store.leases import Leases
from kvtally.wire.bulk import PullStatus
from kvtally.wire.messages import Pull

MOST_SENDS = 512  # at once


class Sends:
    def __init__(self, context: Context, leases: Leases) -> None:
        self._context = context
        self._residency = context.residency
        self._leases = leases
        self._sending: dict[int, Node] = {}  # SendJob -> the node that it reads
        self._jobs: list[SendJob] = []

    def pull(self, connection: int, request: Pull, now_ns: int) -> None:
        number = self._context.new_id()
        found = self._leases.pulled(request.lease, request.index, request.group, request.rank, now_ns)
        status = PullStatus.SENT
        if found is None:
            status = PullStatus.GONE
        elif len(self._sending) >= MOST_SENDS:
            status = PullStatus.BUSY
        if found is None or status is not PullStatus.SENT:
            self._context.counts.sends.refused[status.name.lower()] += 1
            self._jobs.append(SendJob(id=number, connection=connection, pull=request.id, status=status))
            return
        node, bit = found
        pieces, length, _ = self._residency.slot(node, bit)
        self._residency.pin(node)
        self._sending[number] = node
        self._jobs.append(
            SendJob(
                id=number, connection=connection, pull=request.id, status=status, pieces=pieces, length_bytes=length
            )
        )

    def sent(self, job: SendJob, outcome: Outcome) -> None:
        """A SendJob has ended: nobody reads the object's bytes for it any more."""
        node = self._sending.pop(job.id, None)
        if node is None:
            return
        counts = self._context.counts.sends
        if outcome.code:
            counts.failed += 1
        else:
            counts.objects += 1
            counts.bytes += job.length_bytes
        self._residency.unpin(node)

    def take_jobs(self) -> list[SendJob]:
        jobs, self._jobs = self._jobs, []
        return jobs

    @property
    def open(self) -> int:
        return len(self._sending)
