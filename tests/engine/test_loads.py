"""The worker half's loads, on a real store: what a lease covers lands where it should, and nothing less is a load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtally.client import Lease, Miss
from kvtally.core.geometry import GroupLayout, LayerView
from kvtally.device import cpu
from kvtally.testing.copying import CopyingClient
from kvtally.vllm.boundaries import Boundaries, Extras
from kvtally.wire.messages import Lookup, PutObject, PutStatus
from tests.unit.early_kit import CHUNK, DENSE, PROMPT, store
from tests.unit.shell import Bench, Running
from tests.waiting import HANG_S, HOUR_S, eventually

__all__ = ["store"]  # a fixture
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCKS = 40
CHUNKS = len(PROMPT) // CHUNK
ENDS = [CHUNK * (index + 1) for index in range(CHUNKS)]
OBJECT_BYTES = 256
LAYOUT = GroupLayout(DENSE.groups[0], (LayerView(0, 64, 64),), BLOCKS, 64 * BLOCKS)
TABLE = list(range(7, 7 + 4 * CHUNKS))


class Scene:
    """A prompt in the store, a scheduler's client that leases it, and a worker half with memory of its own."""

    def __init__(self, path: str) -> None:
        from kvtally.vllm.layout import EngineLayout
        from kvtally.vllm.worker import WorkerHalf

        self.memory = np.zeros(64 * BLOCKS, dtype=np.uint8)
        self.clients: list[CopyingClient] = []
        self.scheduler = CopyingClient(path, namespace=DENSE)
        self.content = np.random.default_rng(3).integers(1, 256, (CHUNKS, OBJECT_BYTES), np.uint8)
        tokens = Boundaries(CHUNK, Extras())
        tokens.extend(PROMPT, len(PROMPT))
        self.chains = b"".join(tokens.chains)
        chunks = [PutObject(*tokens.chunk(index), 0, 0, OBJECT_BYTES) for index in range(CHUNKS)]
        put = self.scheduler.put(
            list(zip(chunks, map(np.ndarray.tobytes, self.content), strict=True)), timeout_s=HANG_S
        )
        assert put == [PutStatus.WRITE] * CHUNKS
        layout = EngineLayout(namespace=DENSE, group_ids=(0,), layer_names=(("l",),), block_tokens=16)

        def connect() -> CopyingClient:
            self.clients.append(CopyingClient(path, namespace=DENSE))
            return self.clients[-1]

        self.worker = WorkerHalf(layout, 0, connect)
        self.worker.register([LAYOUT], self.memory, cpu)  # type: ignore[arg-type]
        eventually(lambda: bool(self.clients) and self.clients[0].session is not None)

    def lease(self, chunks: int = CHUNKS, *, told: bool = False) -> Lease:
        question = Lookup(0, self.chains[: 32 * chunks], ENDS[:chunks], ENDS[chunks - 1], slots=told)
        lease = self.scheduler.hold(question, timeout_s=HANG_S).wait()
        assert not isinstance(lease, Miss)
        assert lease.end_tokens == ENDS[chunks - 1]
        return lease

    def load(self, lease: Lease, *, have: int = 0) -> Any:
        self.begin(lease, have=have)
        return self.end()

    def begin(self, lease: Lease, *, have: int = 0) -> None:
        from kvtally.vllm.step_jobs import LoadJob

        self.worker.load([LoadJob("r", lease.share(), ENDS, ENDS[-1], have, [TABLE])])

    def end(self) -> Any:
        collected: list[Any] = []

        def has_ended() -> bool:
            collected.append(self.worker.collect(0.05))
            return bool(collected[-1].finished)

        eventually(has_ended, "the load ended")
        results = collected[-1]
        assert results.finished == {"r"}
        assert (results.failed == {"r"}) == bool(results.loads["r"].reason)
        return results.loads["r"]

    @property
    def landed(self) -> Any:
        return self.memory[64 * TABLE[0] : 64 * (TABLE[-1] + 1)]

    def close(self) -> None:
        self.worker.stop()
        self.scheduler.close()


@pytest.fixture
def scene(bench: Bench, store: Running) -> Iterator[Scene]:
    scene = Scene(str(bench.path))
    yield scene
    scene.close()


@pytest.mark.parametrize("told", [False, True], ids=["asked by the worker", "told with the answer"])
def test_what_is_leased_lands_where_it_should(scene: Scene, told: bool) -> None:
    lease = scene.lease(told=told)
    assert bool(lease.share().slots) == told
    report = scene.load(lease)
    assert (report.reason, report.verified, report.moved_bytes) == ("", True, CHUNKS * OBJECT_BYTES)
    assert scene.landed.tobytes() == scene.content.tobytes()
    assert not scene.memory[: 64 * TABLE[0]].any()
    assert not scene.memory[64 * (TABLE[-1] + 1) :].any()


def test_what_the_engine_has_is_not_touched(scene: Scene) -> None:
    report = scene.load(scene.lease(), have=CHUNK + 16)
    assert (report.reason, report.moved_bytes) == ("", CHUNKS * OBJECT_BYTES - OBJECT_BYTES - 64)
    assert not scene.landed[: OBJECT_BYTES + 64].any()
    assert scene.landed[OBJECT_BYTES + 64 :].tobytes() == scene.content.tobytes()[OBJECT_BYTES + 64 :]


@pytest.mark.parametrize("told", [False, True], ids=["asked by the worker", "told with the answer"])
def test_a_lease_that_covers_less_than_was_promised_is_no_load(scene: Scene, told: bool) -> None:
    lease = scene.lease(CHUNKS - 1, told=told)
    assert scene.load(lease).reason == "absent"
    assert scene.load(scene.lease()).reason == ""


def test_slots_of_a_lease_that_is_gone_are_a_miss(scene: Scene) -> None:
    lease = scene.lease()
    shared = lease.share()
    scene.scheduler.release([lease]).wait()
    assert scene.load(scene.scheduler.adopt(shared)).reason == "lease_expired"


def test_copies_keep_out_while_a_step_is_prepared(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtally.vllm.worker.QUIET_S", HOUR_S)
    scene.worker.prepare()
    scene.begin(scene.lease())
    time.sleep(0.1)  # for what should not happen
    assert not scene.landed.any()
    scene.end()  # it asks for results: the step is launched
    assert scene.landed.tobytes() == scene.content.tobytes()


def test_a_step_that_takes_long_does_not_keep_copies_waiting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtally.vllm.worker.QUIET_S", 0.05)
    scene.worker.prepare()
    scene.begin(scene.lease())
    eventually(lambda: scene.landed.tobytes() == scene.content.tobytes())


class Standing:
    """The worker's time: whoever sleeps in it wakes when `passes` is set."""

    def __init__(self) -> None:
        self.is_asleep, self.passes = threading.Event(), threading.Event()
        self._slept_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._slept_s

    def sleep(self, seconds: float) -> None:
        self.is_asleep.set()
        assert self.passes.wait(HANG_S)
        self._slept_s += seconds


def test_copies_keep_out_while_the_next_tokens_are_chosen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtally.vllm.worker.QUIET_S", HOUR_S)
    time_of_worker = Standing()
    monkeypatch.setattr("kvtally.vllm.worker.time", time_of_worker)
    scene.worker.prepare()
    scene.begin(scene.lease())
    scene.worker.collect()
    assert time_of_worker.is_asleep.wait(HANG_S)
    assert not scene.landed.any()
    time_of_worker.passes.set()
    eventually(lambda: scene.landed.tobytes() == scene.content.tobytes())


def test_steps_without_a_pause_between_them_do_not_keep_copies_waiting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtally.vllm.worker.QUIET_S", 0.05)
    monkeypatch.setattr("kvtally.vllm.worker.SAMPLING_S", 0.05)
    scene.begin(scene.lease())

    def has_landed() -> bool:
        scene.worker.prepare()
        scene.worker.collect()
        return bool(scene.landed.tobytes() == scene.content.tobytes())

    eventually(has_landed)


def test_an_idle_engine_goes_on_when_its_load_is_under_way(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtally.vllm.step_jobs import LoadJob

    monkeypatch.setattr("kvtally.vllm.worker.BEGIN_S", HOUR_S)
    scene.worker.load_first([LoadJob("r", scene.lease().share(), ENDS, ENDS[-1], 0, [TABLE])])
    assert scene.end().reason == ""
    scene.worker.load_first([])  # nothing to wait for


def test_an_idle_engine_does_not_wait_for_a_thread_that_does_nothing(scene: Scene) -> None:
    from kvtally.vllm.step_jobs import LoadJob

    assert scene.worker.is_running
    scene.worker.stop()
    assert not scene.worker.is_running  # so an in-process scheduler half does not wait for its saves either
    scene.worker.load_first([LoadJob("r", scene.lease().share(), ENDS, ENDS[-1], 0, [TABLE])])


def test_an_idle_engine_hears_of_a_load_before_it_waits_for_what_else_is_under_way(scene: Scene) -> None:
    scene.worker._unfinished += 1  # a save that takes its time
    assert scene.load(scene.lease()).reason == ""
    assert not scene.worker.collect(HOUR_S).finished  # it does not wait now
    begun = time.monotonic()
    scene.worker.collect(0.2)
    assert time.monotonic() - begun > 0.1  # but now


# ---- saves


class Failing:
    """A device whose saves fail, once they have begun."""

    pin, fence, load = staticmethod(cpu.pin), staticmethod(cpu.fence), staticmethod(cpu.load)
    is_well = False

    def save(self, memory: Any, moves: Any, after: Any) -> Any:
        yield 0.0
        if not self.is_well:
            raise RuntimeError("the bus is on fire")
        return (yield from cpu.save(memory, moves, after))


def test_slots_of_a_save_that_failed_are_given_back(scene: Scene) -> None:
    from kvtally.vllm.step_jobs import SaveItem, SaveJob

    device: Any = Failing()
    scene.worker._device = device

    def save(number: int) -> Any:
        item = SaveItem(bytes([number]) * 32, bytes(32), 0, CHUNK, 0, TABLE[:4])
        scene.worker.save([SaveJob(number, [item])])
        for _ in range(200):
            results = scene.worker.collect(0.05)
            if results.saved:
                return results
        raise AssertionError("a save did not end")

    assert save(1).lost
    device.is_well = True
    assert save(2).stored
    stats = scene.scheduler.stats().wait()
    assert not isinstance(stats, Miss)
    writes = stats.stats["puts"]
    assert isinstance(writes, dict)
    assert writes["aborted"] == 1


def test_what_the_store_refuses_is_said_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    from kvtally.vllm.step_jobs import SaveItem, SaveJob

    item = SaveItem(bytes(31), bytes(32), 0, CHUNK, 0, TABLE[:4])  # no chain value
    for number in (1, 2):
        scene.worker.save([SaveJob(number, [item])])
        eventually(lambda: bool(scene.worker.collect(0.05).saved))
    said = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert len(said) == 1
    assert "malformed boundary" in said[0]


@pytest.mark.parametrize("verify_reads", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("loses", [False, True], ids=["lease stands", "lease lost"])
def test_a_lease_that_is_lost_during_the_copy_is_no_load(bench: Bench, verify_reads: bool, loses: bool) -> None:
    """The scheduler's connection goes, its lease with it, and other bytes take the slots before the copy."""
    running = bench.start(verify_reads=verify_reads, memory_bytes=1024 * 1024)
    scene = Scene(str(bench.path))

    class Held:
        """The processor's copies, with something happening between the store's answer and the first of them."""

        def __getattr__(self, name: str) -> Any:
            return getattr(cpu, name)

        def load(self, *arguments: Any) -> Any:
            if loses:
                scene.scheduler.close()
                eventually(lambda: running.stats("leases", "open") == 0)
                overwrite(str(bench.path))
            return (yield from cpu.load(*arguments))

    scene.worker._device = Held()  # type: ignore[assignment]
    try:
        report = scene.load(scene.lease())
        is_right = scene.landed.tobytes() == scene.content.tobytes()
        assert is_right != loses  # bytes moved; the wrong ones, if the lease was lost
        assert (report.reason == "lease_expired", report.verified) == (
            (True, False) if loses and not verify_reads else (False, verify_reads and not loses)
        )
        assert bool(report.reason) == loses
    finally:
        scene.close()


def overwrite(path: str) -> None:
    """Fill a store of 1 MiB with other bytes, twice over."""
    with CopyingClient(path, namespace=DENSE) as other:
        for number in range(8):
            tokens = Boundaries(CHUNK, Extras())
            tokens.extend([1000 + number] * CHUNK, CHUNK)
            item = PutObject(*tokens.chunk(0), 0, 0, 256 * 1024)
            assert other.put([(item, bytes([255]) * 256 * 1024)], timeout_s=30) == [PutStatus.WRITE]
