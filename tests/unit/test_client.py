"""What a client makes of a store: saved and restored bytes, handles, and what becomes of them when things end."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from kvtally.client import Miss
from kvtally.client import link as link_module
from kvtally.core.geometry import Runs
from kvtally.core.namespace import canonical
from kvtally.core.receipts import Half, Receipt, Role
from kvtally.wire.frames import encode
from kvtally.wire.messages import (
    Done,
    Found,
    Hello,
    Lookup,
    MissReason,
    Ping,
    PutBegin,
    PutEnd,
    PutEnded,
    PutSlot,
    PutSlots,
    PutStatus,
    ReceiptFile,
    Receipts,
    Release,
    ResetDone,
    Slot,
    Slots,
    SlotsGet,
    Staged,
    Stats,
)
from tests.unit.fake_store import (
    ARENA_BYTES,
    NAMESPACE,
    OBJECT_BYTES,
    QUESTION,
    World,
    got,
    held,
    is_closed,
    missed,
    objects,
    offset_of,
    puts_of,
    slots_of,
    until,
)
from tests.waiting import HANG_S, HOUR_S, Clock


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


# ---- the good days


def test_saves_and_restores(world: World) -> None:
    world.store()
    client = world.client(f"unix:{world.path}")
    made = objects()
    missed(client.get(QUESTION), MissReason.ABSENT)
    assert client.put(made) == [PutStatus.WRITE, PutStatus.WRITE]
    assert client.put(made) == [PutStatus.PRESENT, PutStatus.PRESENT]
    assert got(client) == [data for _, data in made]
    found = client.lookup(QUESTION).wait()
    assert isinstance(found, Found)
    assert (found.end_tokens, found.lease) == (512, 0)


def test_another_client_reads_what_was_saved(world: World) -> None:
    world.store()
    writer, reader = world.client(), world.client()
    assert writer.put(objects()) == [PutStatus.WRITE, PutStatus.WRITE]
    assert got(reader) == [data for _, data in objects()]


def test_every_request_gets_its_kind_of_reply(world: World) -> None:
    store = world.store()
    client = world.client()
    half = Half(role=Role.DECODE)
    assert isinstance(client.ping().wait(), Done)
    assert isinstance(client.file_receipt("t", half).wait(), Done)
    assert client.stats().wait() == Stats(3 + 1, {"store": "store-1"})  # one id went to the hello
    receipts = client.receipts("t", wait_ms=5).wait()
    assert isinstance(receipts, Receipts)
    assert receipts.receipts == [Receipt(ticket="t")]
    reset = client.reset(b"d").wait()
    assert isinstance(reset, ResetDone)
    assert reset.objects == 7
    filed = store.take(ReceiptFile)
    assert filed.half == half
    assert client.misses == {}


def test_hello_says_who_we_are(world: World) -> None:
    store = world.store()
    client = world.client(name="worker 3", expect=NAMESPACE.digest)
    client.connect()
    hello = store.take(Hello)
    assert (hello.client, hello.namespace, hello.expect) == ("worker 3", canonical(NAMESPACE), NAMESPACE.digest)


def test_calls_are_answered_by_poll_alone(world: World) -> None:
    world.store()
    client = world.client()
    calls = [client.ping() for _ in range(50)]  # the first ones before there is a connection
    until(client, lambda: all(call.result is not None for call in calls))
    assert all(isinstance(call.result, Done) for call in calls)


def test_reading_into_runs_and_writing_from_them(world: World) -> None:
    world.store()
    client = world.client()
    (item, data), *_ = objects(1)
    (put,) = puts_of(client)
    assert put.key.chain == item.chain
    checksum = client.write(put, data)
    assert isinstance(checksum, int)
    assert isinstance(client.put_end([(put, checksum)]).wait(), PutEnded)
    (slot,) = slots_of(client, held(client))
    memory = bytearray(OBJECT_BYTES + 5)
    assert client.read(slot, memory) == OBJECT_BYTES
    assert memory == data + bytes(5)


def test_reading_nothing_still_verifies_everything(world: World) -> None:
    """A pipeline stage may have no layers of a group; no runs do not mean the whole object."""
    store = world.store()
    client = world.client()
    client.put(objects(1))
    (slot,) = slots_of(client, held(client))
    nothing = Runs(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    target = bytearray(OBJECT_BYTES)
    assert client.read(slot, target, nothing) == OBJECT_BYTES
    assert target == bytes(OBJECT_BYTES)
    os.pwrite(store.arena, b"\0\1\2", offset_of(store, slot) + 77)
    missed(client.read(slot, target, nothing), MissReason.CHECKSUM)


def test_a_put_that_expired_was_not_saved(world: World) -> None:
    store = world.store()
    client = world.client()
    store.on[PutEnd] = lambda request: [PutEnded(request.id, 0, [number for number, _ in request.commit])]
    assert "1 puts" in missed(client.put(objects(1)), MissReason.LEASE_EXPIRED)


def test_writing_without_a_slot_is_a_mistake_of_the_caller(world: World) -> None:
    world.store()
    client = world.client()
    client.put(objects(1))
    (put,) = puts_of(client)
    with pytest.raises(ValueError, match="PRESENT"):
        client.write(put, bytes(OBJECT_BYTES))
    with pytest.raises(ValueError, match="3 bytes were given"):
        client.put([(objects(1)[0][0], b"abc")])


# ---- wrong bytes


def test_bytes_that_do_not_verify_are_a_miss_and_reported(world: World) -> None:
    store = world.store()
    client = world.client()
    client.put(objects())
    lease = held(client)
    first, second = slots_of(client, lease)
    os.pwrite(store.arena, b"\0\1\2", offset_of(store, first) + 77)
    target = bytearray(OBJECT_BYTES)
    missed(client.read(first, target), MissReason.CHECKSUM)
    assert client.read(second, target) == OBJECT_BYTES
    client.release([lease]).wait()
    release = store.take(Release)
    assert (release.leases, release.bad) == ([lease.id], [(lease.id, 0, 0, 0)])
    assert client.misses == {MissReason.CHECKSUM: 1}


def test_verification_follows_the_store_unless_told_otherwise(world: World) -> None:
    store = world.store()
    store.verify_reads = False
    client = world.client()
    client.put(objects(1))
    (slot,) = slots_of(client, held(client))
    os.pwrite(store.arena, b"\0\1\2", offset_of(store, slot) + 77)
    target = bytearray(OBJECT_BYTES)
    assert client.read(slot, target) == OBJECT_BYTES
    missed(client.read(slot, target, verify=True), MissReason.CHECKSUM)


def test_many_objects_at_once(world: World) -> None:
    """Hashed or not, verified or not, the bytes are the same; unhashed ones satisfy nobody who verifies."""
    store = world.store()
    client = world.client()
    made = objects()
    contents = [data for _, data in made]
    puts = puts_of(client, 2)
    unhashed = client.write_all(puts, contents, hashed=False)
    assert not isinstance(unhashed, Miss)
    client.put_end(unhashed).wait()
    slots = slots_of(client, held(client))
    targets = [bytearray(OBJECT_BYTES) for _ in slots]
    assert client.read_all(slots, targets, verify=False) == 2 * OBJECT_BYTES
    assert targets == contents
    missed(client.read_all(slots, targets), MissReason.CHECKSUM)
    assert client.read_all([], []) == 0
    store.stop()
    until(client, lambda: not slots[0].lease.is_live)
    missed(client.read_all(slots, targets, verify=False), MissReason.LEASE_EXPIRED)
    missed(client.write_all(puts, contents, hashed=False), MissReason.LEASE_EXPIRED)


def test_right_bytes_under_another_name_do_not_verify(world: World) -> None:
    """A store that mixes up two intact objects is found out: the checksum is bound to the key."""
    store = world.store()
    client = world.client()
    client.put(objects())
    first, second = (store._objects[item.chain] for item, _ in objects())
    store._objects[objects()[0][0].chain], store._objects[objects()[1][0].chain] = second, first
    missed(client.get(QUESTION), MissReason.CHECKSUM)


def test_unverified_bytes_count_only_while_the_lease_stands(world: World, clock: Clock) -> None:
    world.store()
    client = world.client()
    client.put(objects(1))
    lease = held(client)
    (slot,) = slots_of(client, lease)
    assert client.confirm(lease).wait() is lease
    clock.forward(HOUR_S)
    assert not lease.is_live
    missed(client.confirm(lease).wait(), MissReason.LEASE_EXPIRED)
    missed(client.accept(slot, slot.checksum + 1), MissReason.LEASE_EXPIRED)  # and nobody is blamed
    assert lease.bad == []
    assert client.accept(slot, slot.checksum) is None  # what verified is right, lease or not
    missed(client.read(slot, bytearray(OBJECT_BYTES)), MissReason.LEASE_EXPIRED)


@pytest.mark.parametrize(
    "pieces",
    [
        [ARENA_BYTES - 5_000, OBJECT_BYTES],
        [-4096, OBJECT_BYTES],
        [0, OBJECT_BYTES - 1],
        [0, 0, 0, OBJECT_BYTES],
        [0, -1, 0, OBJECT_BYTES + 1],
        [0, OBJECT_BYTES, 7],
        [1 << 63, OBJECT_BYTES],
        [],
    ],
)
def test_memory_outside_the_arena_is_never_touched(world: World, pieces: list[int]) -> None:
    store = world.store()
    client = world.client()
    client.put(objects(1))
    lease = held(client)
    store.on[SlotsGet] = lambda request: [Slots(request.id, [Slot(0, 0, OBJECT_BYTES, 0, pieces)])]
    store.on[PutBegin] = lambda request: [PutSlots(request.id, [PutSlot(PutStatus.WRITE, 9, pieces)])]
    missed(client.slots(lease).wait(), MissReason.STORE_UNREACHABLE)
    assert isinstance(client.connect(), link_module.Session)
    missed(client.put_begin([objects(1)[0][0]]).wait(), MissReason.STORE_UNREACHABLE)


@pytest.mark.parametrize("slot", [Slot(2, 0, 8, 0, [0, 8]), Slot(-1, 0, 8, 0, [0, 8]), Slot(0, -1, 8, 0, [0, 8])])
def test_a_slot_of_no_object_is_not_believed(world: World, slot: Slot) -> None:
    store = world.store()
    client = world.client()
    client.put(objects(1))
    lease = held(client)
    store.on[SlotsGet] = lambda request: [Slots(request.id, [slot])]
    missed(client.slots(lease).wait(), MissReason.STORE_UNREACHABLE)


@pytest.mark.parametrize("slots", [[], [PutSlot(9)], [PutSlot(PutStatus.PRESENT)] * 2])
def test_an_answer_for_other_objects_is_not_believed(world: World, slots: list[PutSlot]) -> None:
    store = world.store()
    client = world.client()
    store.on[PutBegin] = lambda request: [PutSlots(request.id, slots)]
    missed(client.put_begin([objects(1)[0][0]]).wait(), MissReason.STORE_UNREACHABLE)


# ---- staging


def test_a_lease_is_promised_when_it_is_staged(world: World) -> None:
    store = world.store()
    client = world.client()
    store.on[Lookup] = lambda request: [Found(request.id, 512, 5, 2)]
    lease = held(client)
    assert (lease.is_staged, lease.end_tokens, lease.found.end_tokens) == (False, 0, 512)
    missed(client.wait_staged(lease, timeout_s=0.05), MissReason.DEADLINE)
    peer = store.peers.get(timeout=HANG_S)
    peer.sendall(encode(Staged(0, 5, 256, MissReason.STAGING_FAILED, 256)))
    assert client.wait_staged(lease) is lease
    assert (lease.is_staged, lease.end_tokens, lease.reason) == (True, 256, MissReason.STAGING_FAILED)


def test_staged_may_come_with_the_answer(world: World) -> None:
    store = world.store()
    client = world.client()
    store.on[Lookup] = lambda request: [Found(request.id, 512, 5, 2), Staged(0, 5, 512)]
    lease = held(client)
    assert client.wait_staged(lease) is lease
    assert lease.end_tokens == 512


@pytest.mark.parametrize("reason", [MissReason.STAGING_FAILED, "a reason of the future"])
def test_staging_that_brought_nothing_is_a_miss(world: World, reason: str) -> None:
    store = world.store()
    client = world.client()
    store.on[Lookup] = lambda request: [Found(request.id, 512, 5, 2), Staged(0, 5, 0, reason)]
    expected = MissReason.STAGING_FAILED if reason == MissReason.STAGING_FAILED else MissReason.ABSENT
    missed(client.wait_staged(held(client)), expected)


def test_losing_the_store_ends_staging(world: World) -> None:
    store = world.store()
    client = world.client()
    store.on[Lookup] = lambda request: [Found(request.id, 512, 5, 2)]
    lease = held(client)
    store.peers.get(timeout=HANG_S).shutdown(socket.SHUT_RDWR)
    missed(client.wait_staged(lease), MissReason.LEASE_EXPIRED)
    assert lease.is_staged
    assert lease.end_tokens == 0


def test_news_of_another_stores_lease_is_not_ours(world: World) -> None:
    old = world.store()
    client = world.client()
    old.on[Lookup] = lambda request: [Found(request.id, 512, 5, 2)]
    lease = held(client)
    old.stop()
    new = world.store("store-2")
    until(client, lambda: client.generation == 2 and client.session is not None)
    new.peers.get(timeout=HANG_S).sendall(encode(Staged(0, 5, 512)))
    assert isinstance(client.ping().wait(), Done)
    assert (lease.outcome, lease.end_tokens) == (None, 0)


# ---- a lease in two processes


def test_a_worker_reads_through_its_schedulers_lease(world: World) -> None:
    store = world.store()
    scheduler, worker = world.client(), world.client()
    scheduler.put(objects(1))
    worker.connect()
    shared = held(scheduler).share()
    adopted = worker.adopt(shared)
    (slot,) = slots_of(worker, adopted)
    target = bytearray(OBJECT_BYTES)
    assert worker.read(slot, target) == OBJECT_BYTES
    os.pwrite(store.arena, b"\0\1\2", offset_of(store, slot) + 77)
    missed(worker.read(slot, target), MissReason.CHECKSUM)
    worker.release([adopted]).wait()
    release = store.take(Release)
    assert (release.leases, release.bad) == ([], [(shared.id, 0, 0, 0)])  # the scheduler's to release, ours to report


def test_slots_that_came_with_the_answer_are_not_asked_for(world: World) -> None:
    store = world.store()
    scheduler, worker = world.client(), world.client()
    scheduler.put(objects(1))
    worker.connect()
    lease = held(scheduler, structs.replace(QUESTION, slots=True))
    (slot,) = slots_of(worker, worker.adopt(lease.share()))
    assert worker.read(slot, bytearray(OBJECT_BYTES)) == OBJECT_BYTES
    assert not store.saw(SlotsGet)
    worker.slots(worker.adopt(lease.share()), rank=1).wait()  # they are rank 0's
    assert store.take(SlotsGet).rank == 1
    beyond = structs.replace(lease.found.slots[0], pieces=[1 << 40, OBJECT_BYTES])
    lease.found = structs.replace(lease.found, slots=[beyond])
    assert len(slots_of(worker, worker.adopt(lease.share()))) == 1  # what cannot be is asked for
    assert store.take(SlotsGet).rank == 0


def test_without_verification_slots_are_asked_for(world: World) -> None:
    """The scheduler's lease may have ended without the worker's knowledge, and another's bytes lie there now: only the
    store knows, or a checksum."""
    store = world.store()
    store.verify_reads = False
    scheduler, worker = world.client(), world.client()
    scheduler.put(objects(1))
    worker.connect()
    lease = held(scheduler, structs.replace(QUESTION, slots=True))
    assert lease.found.slots
    worker.slots(worker.adopt(lease.share())).wait()
    assert store.take(SlotsGet).lease == lease.id


def test_an_adopted_lease_that_ended_during_an_unverified_copy_is_a_miss(world: World) -> None:
    """The scheduler lost its connection, and its lease with it. Its worker does not hear of that, so it asks."""
    store = world.store()
    store.verify_reads = False
    scheduler, worker = world.client(), world.client()
    scheduler.put(objects(1))
    worker.connect()
    shared = held(scheduler).share()
    adopted = worker.adopt(shared)
    (slot,) = slots_of(worker, adopted)
    target = bytearray(OBJECT_BYTES)
    assert worker.read(slot, target) == OBJECT_BYTES
    assert worker.confirm(adopted).wait() is adopted
    del store._lookups[shared.id]
    assert adopted.is_live  # as far as the worker knows
    missed(worker.read(slot, target), MissReason.LEASE_EXPIRED)
    missed(worker.read_all([slot], [target]), MissReason.LEASE_EXPIRED)
    missed(worker.confirm(adopted).wait(), MissReason.LEASE_EXPIRED)
    assert worker.read(slot, target, verify=True) == OBJECT_BYTES  # what verifies is right, lease or not
    store.on[SlotsGet] = lambda request: [Done(request.id)]  # which answers no such question
    missed(worker.confirm(adopted).wait(), MissReason.STORE_UNREACHABLE)


def test_a_lease_of_another_store_is_not_adopted(world: World) -> None:
    store = world.store()
    scheduler, worker = world.client(), world.client()
    scheduler.put(objects(1))
    worker.connect()
    shared = held(scheduler).share()
    missed(worker.slots(worker.adopt(shared._replace(store="store-0"))).wait(), MissReason.LEASE_EXPIRED)
    assert not store.saw(SlotsGet)


# ---- restarts


def test_a_new_store_voids_everything(world: World) -> None:
    old = world.store()
    client = world.client()
    client.put(objects(1))
    lease, (put,) = held(client), puts_of(client)
    client.put_end(abort=[put])
    (slot,) = slots_of(client, lease)
    put = client.put_begin([objects(2)[1][0]]).wait()[0]  # type: ignore[index]
    old.on[Ping] = lambda _: []
    in_flight = client.ping()
    old.take(Ping)
    old_pipe = old.liveness.get(timeout=HANG_S)
    old.stop()
    missed(in_flight.wait(), MissReason.STORE_UNREACHABLE)

    new = world.store("store-2")
    session = client.connect()
    assert isinstance(session, link_module.Session)
    assert (session.store, session.generation, client.generation) == ("store-2", 2, 2)
    missed(client.slots(lease).wait(), MissReason.LEASE_EXPIRED)
    missed(client.read(slot, bytearray(OBJECT_BYTES)), MissReason.LEASE_EXPIRED)
    missed(client.write(put, bytes(OBJECT_BYTES)), MissReason.LEASE_EXPIRED)
    missed(client.put_end([(put, 1)]).wait(), MissReason.LEASE_EXPIRED)
    assert isinstance(client.release([lease]).wait(), Done)
    assert not any(new.saw(kind) for kind in (SlotsGet, PutEnd, Release))

    # A copy that is under way may go on: the memory is there as long as anybody can reach it.
    put.pieces[0][:4] = b"late"
    assert bytes(slot.pieces[0]) == objects(1)[0][1][: OBJECT_BYTES // 2]
    assert not is_closed(old_pipe)
    piece = put.pieces[1]
    del put, slot
    assert not is_closed(old_pipe)
    piece[:4] = b"last"
    del piece
    assert is_closed(old_pipe)
    os.close(old_pipe)


def test_the_same_store_after_a_lost_connection_voids_everything_too(world: World) -> None:
    store = world.store()
    client = world.client()
    client.put(objects(1))
    lease = held(client)
    store.peers.get(timeout=HANG_S).shutdown(socket.SHUT_RDWR)
    until(client, lambda: client.generation == 2 and client.session is not None)
    missed(client.slots(lease).wait(), MissReason.LEASE_EXPIRED)
    assert lease.end_tokens == 0
    assert got(client) == [objects(1)[0][1]]


def test_closing_lets_go_of_the_arena(world: World) -> None:
    store = world.store()
    client = world.client()
    (put,) = puts_of(client)
    pipe = store.liveness.get(timeout=HANG_S)
    call = client.ping()
    client.close()
    client.close()
    missed(call.wait(), MissReason.STORE_UNREACHABLE)
    missed(client.ping().wait(), MissReason.STORE_UNREACHABLE)
    missed(client.connect(0.0), MissReason.STORE_UNREACHABLE)
    assert not is_closed(pipe)
    del put
    assert is_closed(pipe)
    os.close(pipe)


# ---- fork


def in_child(work: Callable[[], bool]) -> bool:
    """Fork; whether `work` was true in the child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this test process has threads; the child needs none
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_is_a_client_of_its_own(world: World) -> None:
    store = world.store()
    client = world.client()
    client.put(objects(1))
    lease = held(client)
    session = client.session

    def child() -> bool:
        void = client.slots(lease).wait()
        works = got(client) == [objects(1)[0][1]]
        return works and isinstance(void, Miss) and client.session is not session and client.generation == 2

    assert in_child(child)
    assert store.peers.qsize() == 2
    assert (client.session, client.generation) == (session, 1)
    assert isinstance(client.ping().wait(), Done)
    assert len(slots_of(client, lease)) == 1


def test_a_forked_child_does_not_keep_its_parents_arena(world: World) -> None:
    """The child lives on, the parent lets go: the store must learn of it."""
    store = world.store()
    client = world.client()
    client.connect()
    pipe = store.liveness.get(timeout=HANG_S)
    to_child, from_parent = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        os.read(to_child, 1)
        os._exit(0)
    try:
        client.close()
        assert is_closed(pipe, HANG_S)
    finally:
        os.close(from_parent)
        os.waitpid(pid, 0)
        os.close(to_child)
        os.close(pipe)


def test_views_dropped_in_a_child_unmap_nothing_of_its_own(world: World) -> None:
    """The child's memory may lie where the parent's arena was; freeing the dead mapping must not tear it out."""
    import mmap

    world.store()
    client = world.client()
    handles = [puts_of(client)]
    arena = client.arena
    assert arena is not None
    address, size = arena.address, arena.size_bytes
    del arena

    def child() -> bool:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
            return False
        handles.clear()
        client.close()
        return ctypes.string_at(address, 8) == bytes(8)  # dies here if it was unmapped

    assert in_child(child)
