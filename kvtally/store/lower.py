"""Lower tiers: what they hold, what is copied down to them, and what is taken out.

    committed in the arena ─▶ write_behind ──WriteJob──▶ written: the tier holds it
                                   └ the tier is slow or fails: postponed, and tried again by `catch_up`
    evicted, forgotten, replaced, unreadable ─▶ remove ──RemoveJob──▶ removed

Owns the jobs that write and remove, what waits for a tier, and what a failed removal has left behind there. Every
tier's health and counters are in its `TierState`. Neighbours: `puts` and `staging` (left), `mover` (right: carries the
jobs out), `core.residency` (which objects a tier holds). No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvtally.core.keys import ObjectKey
from kvtally.core.residency import ChainConflict, Family, Node
from kvtally.core.space import round_up
from kvtally.store.beliefs import Beliefs, Claim
from kvtally.store.context import Context
from kvtally.store.jobs import Outcome, RemoveJob, WriteJob
from kvtally.store.tier_state import FIRST_PAUSE_NS, TierKind, TierState
from kvtally.store.tiers.base import Boundary, ObjectRecord

MOST_ATTEMPTS = 5  # to write an object for which a tier has no room; each evicts twice as much as the last
MOST_FAILURES = 5  # of the device with one object, until it is given up


class LowerTiers:
    def __init__(self, context: Context, beliefs: Beliefs) -> None:
        self._context = context
        self._residency = context.residency
        self._beliefs = beliefs
        self._writing: dict[int, tuple[Node, int, int]] = {}  # WriteJob -> what it copies, and to which tier
        self._newest: dict[tuple[int, ObjectKey], int] = {}  # tier, key -> the last WriteJob that is not done

    # ---- what they hold

    def recover(self, number: int, record: ObjectRecord) -> None:
        """Before serving: a tier holds this object. If the index cannot take it in, it is removed there: it would take
        up room for ever."""
        if not self.learn(number, record):
            self._context.tiers[number - 1].unremoved[record.key] = None

    def learn(self, number: int, record: ObjectRecord) -> bool:
        """Add an object that a tier holds to the index. False if it contradicts what the index knows."""
        namespace = record.namespace
        family = self._residency.families.get(namespace.digest)
        if family is None:
            if not self._context.has_place_for(namespace):
                return False
            family = self._residency.register(namespace)
        try:
            node = self._residency.ensure(family, record.chain, record.parent, record.start_tokens, record.end_tokens)
        except ChainConflict:
            self._context.counts.quarantined[self._context.tiers[number - 1].info.name] += 1
            return False
        bit = family.bit(record.group, record.rank)
        is_foreign = bit >= family.width or record.rank >= family.ranks
        if is_foreign or self._residency.differs(node, bit, record.length_bytes, record.checksum):
            self._residency.settle(node)
            return False
        self._residency.add(node, bit, number, record.length_bytes, record.checksum)
        if not node.used:  # in the order of writing. Only ends of chains matter, so nothing walks up to the root
            self._residency.touch((node,))
        return True

    def drop(self, node: Node, bit: int) -> None:
        """The object was saved again with other bytes: take the old copies out of every tier that is this store's own.
        Others' copies stay where they are: they are as good as ours."""
        for number in range(1, self._residency.tiers):
            self.drop_from(number, node, bit)

    def drop_from(self, number: int, node: Node, bit: int) -> None:
        """Take an object out of one tier, or believe no longer that the tier has it."""
        if not self._context.is_owned(number):
            self._beliefs.forget(number, node, bit)
        elif self._residency.tier_mask(node, number) >> bit & 1:
            self._residency.drop(node, bit, number)
            self.remove(number, [node.family.key(node, bit)])

    # ---- copies and removals

    def write_behind(self, node: Node, bit: int, now_ns: int) -> None:
        """Queue the object for every lower tier. A tier that cannot keep up gets it later, if it is still in the arena
        then: only queued objects are held there, and nobody waits."""
        for number, tier in enumerate(self._context.tiers, 1):
            if tier.info.kind is TierKind.PEERS or self._residency.tier_mask(node, number) >> bit & 1:
                continue
            if self._must_wait(tier, node, bit):
                tier.postpone(node, bit)
            else:
                self._queue_write(number, node, bit, now_ns)

    def _is_in_arena(self, node: Node, bit: int) -> bool:
        """Whether the object is still there: jobs and queues may remember it after the index has dropped it."""
        is_known = node.family.nodes.get(node.chain) is node
        return is_known and not node.family.is_forgotten and bool(self._residency.arena_mask(node) >> bit & 1)

    def _must_wait(self, tier: TierState, node: Node, bit: int) -> bool:
        """Whether the tier has enough to write already, or must first remove what a reset has forgotten."""
        if self._residency.is_sweeping(node.family.namespace):
            return True
        size = round_up(self._residency.length_bytes(node, bit))
        # Queued objects are held in the arena, and a disk that hangs must not hold all of it.
        most = min(self._context.limits.write_behind_bytes, self._residency.space.capacity_bytes // 4)
        return tier.queued_bytes > 0 and tier.queued_bytes + size > most

    def _queue_write(
        self, number: int, node: Node, bit: int, now_ns: int, *, attempt: int = 0, failures: int = 0
    ) -> None:
        tier = self._context.tiers[number - 1]
        size = round_up(self._residency.length_bytes(node, bit))
        if not tier.writable(now_ns):
            tier.postpone(node, bit, failures)
            return
        if not self._make_room(number, size):
            tier.counts.dropped += 1
            return
        record = self.record(node, bit)
        if tier.unremoved:
            self.remove(number, ())
        tier.queued_bytes += size
        tier.write_speed.began(now_ns)
        self._residency.pin(node)
        job = self._context.new_id()
        self._writing[job] = (node, bit, number)
        self._newest[number, record.key] = job
        pieces = self._residency.pieces(node, bit)
        self._context.jobs.append(
            WriteJob(id=job, tier=number, record=record, pieces=pieces, attempt=attempt, failures=failures)
        )

    def catch_up_all(self, now_ns: int) -> None:
        """A sweep is over: write what waited for it."""
        for number in range(1, self._residency.tiers):
            self._catch_up(number, now_ns)

    def _catch_up(self, number: int, now_ns: int) -> None:
        """A tier has room in its queue, or may be tried again: write what had to wait."""
        tier = self._context.tiers[number - 1]
        while tier.postponed and tier.writable(now_ns):
            node, bit = next(iter(tier.postponed))
            is_there = self._is_in_arena(node, bit)
            if is_there and self._must_wait(tier, node, bit):
                return
            failures = tier.postponed.pop((node, bit))
            if not is_there:
                tier.counts.dropped += 1
            elif not self._residency.tier_mask(node, number) >> bit & 1:
                self._queue_write(number, node, bit, now_ns, failures=failures)

    def _make_room(self, number: int, size_bytes: int) -> bool:
        """Evict from a lower tier until the object fits, together with everything that is on its way there."""
        tier = self._context.tiers[number - 1]
        capacity_bytes = tier.info.capacity_bytes
        if capacity_bytes is None:
            return True
        if tier.queued_bytes + size_bytes > capacity_bytes:
            return False  # evicting everything would not help
        while self._residency.lower_bytes[number] + tier.queued_bytes + size_bytes > capacity_bytes:
            keys = self._residency.evict(number)
            if not keys:
                return False
            self.remove(number, keys)
        return True

    def _write_again(self, job: WriteJob, node: Node, bit: int, now_ns: int) -> bool:
        """The tier's free bytes lie in too many pieces for this object: evict more and try again. This ends, because
        attempts are counted and each one evicts something."""
        if job.attempt + 1 >= MOST_ATTEMPTS or not self._is_current(job, node, bit):
            return False
        wanted_bytes = round_up(job.record.length_bytes) << job.attempt
        least_bytes = self._residency.lower_bytes[job.tier] - wanted_bytes
        evicted: list[ObjectKey] = []
        while self._residency.lower_bytes[job.tier] > least_bytes:
            keys = self._residency.evict(job.tier)
            if not keys:
                break
            evicted += keys
        if evicted:
            self.remove(job.tier, evicted)
            self._queue_write(job.tier, node, bit, now_ns, attempt=job.attempt + 1)
        return bool(evicted)

    def _write_failed(self, job: WriteJob, code: str, node: Node, bit: int, now_ns: int) -> None:
        """Leave the tier alone for a while, then try again what is still in the arena: the device may be back.

        Only the job that finds the device failing counts the failure against its object; other jobs fail with it. So an
        object that can never be written is given up in the end, instead of stopping the tier again and again.
        """
        tier = self._context.tiers[job.tier - 1]
        tier.counts.errors[code] += 1
        failures = job.failures
        if tier.writable(now_ns):
            failures += 1
            tier.write_failed(now_ns)
            self._context.alarms.set(tier.write_paused_until_ns, partial(self._catch_up, job.tier))
        if failures < MOST_FAILURES and self._is_current(job, node, bit):
            tier.postpone(node, bit, failures)
        else:
            tier.counts.dropped += 1

    def _is_current(self, job: WriteJob, node: Node, bit: int) -> bool:
        """Whether the arena still holds the bytes that a job copies. They may be forgotten, or saved again, since."""
        record = job.record
        return self._is_in_arena(node, bit) and not self._residency.differs(
            node, bit, record.length_bytes, record.checksum
        )

    def remove(self, number: int, keys: Iterable[ObjectKey], *, is_last: bool = True) -> int:
        """Take objects out of a lower tier. Returns the job's id.

        The last of several removals (`is_last`) also takes out what earlier removals failed to. Objects that are being
        written again are left out: if that write fails, their old copies must still be removed.
        """
        tier = self._context.tiers[number - 1]
        again = [key for key in tier.unremoved if (number, key) not in self._newest] if is_last else []
        for key in again:
            del tier.unremoved[key]
        job = RemoveJob(id=self._context.new_id(), tier=number, keys=(*again, *keys))
        tier.removing += 1
        if again:
            tier.retrying.add(job.id)
        self._context.jobs.append(job)
        return job.id

    def removed(self, job: RemoveJob, outcome: Outcome) -> None:
        tier = self._context.tiers[job.tier - 1]
        tier.removing -= 1
        tier.retrying.discard(job.id)
        if outcome.code:
            tier.counts.errors[outcome.code] += 1
            tier.unremoved.update(dict.fromkeys(job.keys))
        elif tier.unremoved:
            for key in job.keys:
                tier.unremoved.pop(key, None)

    def record(self, node: Node, bit: int) -> ObjectRecord:
        assert node.parent is not None
        family = node.family
        return ObjectRecord(
            namespace=family.namespace,
            chain=node.chain,
            parent=node.parent.chain,
            start_tokens=node.start,
            end_tokens=node.end,
            group=bit // family.ranks,
            rank=bit % family.ranks,
            length_bytes=self._residency.length_bytes(node, bit),
            checksum=self._residency.checksum(node, bit),
        )

    def on_their_way(self, family: Family, number: int) -> list[ObjectKey]:
        """Objects of a family that are being written to a lower tier."""
        writes = self._writing.values()
        return [family.key(node, bit) for node, bit, tier in writes if tier == number and node.family is family]

    def written(self, job: WriteJob, outcome: Outcome, now_ns: int) -> None:
        node, bit, _ = self._writing.pop(job.id)
        place = (job.tier, job.record.key)
        if self._newest[place] == job.id:
            del self._newest[place]
        tier = self._context.tiers[job.tier - 1]
        length = job.record.length_bytes
        tier.queued_bytes -= round_up(length)
        tier.write_speed.ended(0 if outcome.code else length, now_ns)
        # Objects that could not be removed may take up the room. Then the device fails, and evicting does not help.
        if outcome.is_crowded and not tier.unremoved:
            tier.counts.dropped += not self._write_again(job, node, bit, now_ns)
        elif outcome.code:
            self._write_failed(job, outcome.code, node, bit, now_ns)
        else:
            tier.counts.writes += 1
            tier.counts.write_bytes += length
            tier.counts.write_seconds += outcome.seconds
            tier.write_pause_ns = FIRST_PAUSE_NS
            tier.unremoved.pop(job.record.key, None)  # this write replaced what a removal had failed to take out
            if not self._context.is_owned(job.tier):
                self._believe(job, node, bit, now_ns)
            elif self._is_current(job, node, bit):
                self._residency.add(node, bit, job.tier, length, job.record.checksum)
            elif place not in self._newest:  # otherwise a newer copy is on its way and replaces this one
                self.remove(job.tier, [job.record.key])
        self._residency.unpin(node)
        self._catch_up(job.tier, now_ns)

    def _believe(self, job: WriteJob, node: Node, bit: int, now_ns: int) -> None:
        """A tier that others change has taken the object, and may lose it at any time."""
        record = job.record
        if self._is_current(job, node, bit):
            boundary = Boundary(record.chain, record.parent, record.start_tokens, record.end_tokens)
            claim = Claim(boundary, bit, record.length_bytes, record.checksum)
            self._beliefs.take_in(job.tier, node.family, [claim], now_ns)
