"""A million random and damaged frames crash nothing: not the readers, not the store, not the client, not the daemon.

The fast tests take 200,000, the slow ones a million. Everything follows from seeds; what fails names its seed.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtally.client import Miss
from kvtally.errors import TransportError
from kvtally.wire.frames import FrameReader, encode
from kvtally.wire.limits import Limits
from kvtally.wire.messages import (
    Done,
    Found,
    Greeting,
    MissReason,
    PutEnded,
    PutSlot,
    PutSlots,
    Refused,
    Reply,
    Request,
    Slot,
    Slots,
    Staged,
    Stats,
    Welcome,
)
from tests.chaos.processes import Process, StoreProcess
from tests.chaos.single import NAMESPACE, asked, item, load, right_bytes
from tests.fuzz.hostile import Dice, Hostile, damaged, noise
from tests.fuzz.rig import live
from tests.fuzz.talk import talk
from tests.waiting import eventually

READER_FRAMES = 20_000  # of one batch
LIFE_FRAMES = 2_000
TALK_STEPS = 200
# What must have happened in a batch of lives for its success to mean anything.
COVERED = ("Lookup", "PutEnded", "Slots", "Staged", "ReadJob", "ReadJob KV-401", "WriteJob", "FindJob", "cut off")
ALSO_COVERED = ("Refused KV-200", "Refused KV-204", "Refused KV-302", "Refused KV-503", "ResetDone", "Receipts")

# Made once: making one takes longer than reading a frame.
DECODERS = (msgspec.msgpack.Decoder(Reply), msgspec.msgpack.Decoder(Request))
REPLIES = (
    Greeting(1, "0", "s", 1 << 20, True, Limits(), b"n" * 32),
    Welcome(1, 2, b"d" * 32),
    Refused(0, "KV-503", "m", "r"),
    Found(1, 64, 3, 1, 64, [b"\1", b"\2"], [16, 32], "pending", 64),
    Staged(0, 3, 64, "checksum", 64, 4096, 5),
    Slots(1, [Slot(0, 1, 4096, 77, [0, 4096])]),
    Done(1),
    PutSlots(1, [PutSlot(0, 7, [0, 4096]), PutSlot(2)]),
    PutEnded(1, 1, [5]),
    Stats(1, {"a": {"b": [1, 2.5, None, "x"]}}),
)


def read_frames(seed: int) -> Counter[str]:
    """Both readers take a batch of frames: messages, more to come, or an error of ours; never another exception."""
    random = Dice(seed)
    hostile = Hostile(random)
    sound = [encode(hostile.request()) for _ in range(300)] + [encode(reply) for reply in REPLIES] * 10
    seen: Counter[str] = Counter()
    for number in range(READER_FRAMES):
        frame = random.choice(sound)
        match number % 4:
            case 0:
                frame = noise(random)
            case 1:
                frame = damaged(random, frame)
            case _:
                payload = damaged(random, frame[4:])
                frame = struct.pack("<I", len(payload)) + payload
        reader: FrameReader[Request | Reply] = FrameReader(DECODERS[number >> 3 & 1], 1 << 20)
        try:
            seen["messages" if reader.feed(frame) else "unfinished"] += 1
        except TransportError:
            seen["refused"] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, frame {number}: {frame!r}")
            raise
    return seen


def test_readers_take_any_bytes() -> None:
    seen = sum(map(read_frames, range(8)), Counter[str]())
    assert min(seen.values()) > 1000, dict(seen)


def test_the_store_takes_any_request() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen += live(seed, LIFE_FRAMES)
    assert all(seen[event] for event in COVERED + ALSO_COVERED), dict(seen)


def test_one_seed_is_one_life() -> None:
    assert live(7, 500) == live(7, 500)


def test_the_client_takes_any_reply() -> None:
    before = len(os.listdir("/proc/self/fd"))
    seen: Counter[str] = Counter()
    for seed in itertools.count():  # where nobody is quick enough to answer before a call is given up, more of them
        seen += talk(seed, TALK_STEPS)
        if seed >= 12 and seen["replies"] > 500:
            break
    assert len(os.listdir("/proc/self/fd")) == before


def in_parallel(batch: Callable[[int], Counter[str]], seeds: range) -> Counter[str]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(batch, seeds), Counter[str]())


def one_life(seed: int) -> Counter[str]:
    return live(seed, LIFE_FRAMES)


def one_talk(seed: int) -> Counter[str]:
    return talk(seed, TALK_STEPS)


@pytest.mark.slow
def test_six_hundred_thousand_frames_for_the_readers() -> None:
    seen = in_parallel(read_frames, range(1000, 1030))
    assert seen.total() == 600_000
    print(dict(seen))


@pytest.mark.slow
def test_three_hundred_thousand_frames_for_the_store() -> None:
    seen = in_parallel(one_life, range(1000, 1150))
    assert all(seen[event] > 20 for event in COVERED + ALSO_COVERED), dict(seen)
    print(dict(sorted(seen.items())))


@pytest.mark.slow
def test_twenty_thousand_replies_for_the_client() -> None:
    seen = Counter[str]()
    for seeds in (range(at, at + 50) for at in itertools.count(1000, 50)):
        seen += in_parallel(one_talk, seeds)
        if seen["replies"] >= 20_000:
            break
    print(dict(sorted(seen.items())))


@pytest.mark.slow
def test_eighty_thousand_frames_for_a_live_store_that_serves_on(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token that the attackers do not know")
    options = ("--memory", "64MiB", "--disk-size", "64MiB", "--tcp", "127.0.0.1:0", "--token-file", "token")
    store = StoreProcess(tmp_path, *options, namespace=NAMESPACE)
    port = store.log.read_text().partition("serving on TCP port ")[2].partition(",")[0]
    attackers = []
    try:
        descriptors, memory_bytes = store.process.descriptors(), store.process.anonymous_bytes()
        session = store.probe.session
        for seed in (1, 2):
            arguments = ["-m", "tests.fuzz.attack", str(store.socket), port, str(seed), "40000"]
            attackers.append(Process(arguments, tmp_path / f"attacker-{seed}.log"))
        round_trips, served = 0, 0
        while any(attacker.child.poll() is None for attacker in attackers) or served < 100:
            served += is_served(store, round_trips % 500)
            round_trips += 1
        assert [attacker.child.returncode for attacker in attackers] == [0, 0]
        sent = sum(int((tmp_path / f"attacker-{seed}.log").read_text()) for seed in (1, 2))
        print(f"{sent} frames; {served} of {round_trips} objects found")
        assert (sent >= 80_000, store.probe.session is session) == (True, True)
        left_well(store, descriptors, memory_bytes)
    finally:
        for attacker in attackers:
            attacker.kill()
        store.close()


def is_served(store: StoreProcess, number: int) -> bool:
    """Whether the object was found, and verified. Attackers may have had it evicted; nothing else may go wrong."""
    missed = load(store.probe, number)
    if missed is None:
        return True
    assert missed.reason is MissReason.ABSENT, missed
    saved = store.probe.put([(item(number), right_bytes(number))])
    assert not isinstance(saved, Miss), saved
    missed = load(store.probe, number)
    assert missed is None or missed.reason is MissReason.ABSENT, missed
    return missed is None


def left_well(store: StoreProcess, descriptors: int, memory_bytes: int) -> None:
    eventually(lambda: len(store.stats("clients")) == 1, "the attackers' sessions ended")
    eventually(lambda: store.stats("server", "strangers") == 0, "strangers were sent away")
    eventually(lambda: store.process.descriptors() <= descriptors + 2, "their descriptors were closed")
    for path in (("leases", "open"), ("arena", "limbo_bytes"), ("arena", "staging_bytes"), ("lookups", "waiting")):
        eventually(lambda path=path: store.stats(*path) == 0, f"nothing was left of {' '.join(path)}")  # type: ignore[misc]
    ended = store.stats("server", "ended")
    assert isinstance(ended, dict)
    assert ended["KV-503"] > 100, "frames that are no messages ended connections"
    assert ended["KV-300"] == 2, "who did not read was cut off"
    assert ended["KV-205"] > 10, "who did not know the token was not let in"
    assert store.process.anonymous_bytes() < memory_bytes + 150 * 1024 * 1024
    assert not isinstance(store.probe.lookup(asked(1)).wait(), Miss)
    assert store.process.end() == 0
    assert "Traceback" not in store.log.read_text(), store.log.read_text()[-5000:]
