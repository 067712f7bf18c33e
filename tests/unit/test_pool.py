"""The pool tier over an engine in memory: faults at every call, keys, limits, what operators ask. No server."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtally.cli import main as cli
from kvtally.config.remote import parse_remote
from kvtally.errors import ConfigError, IntegrityError, TierError
from kvtally.store.tiers import engines
from kvtally.store.tiers.base import SharedTier
from kvtally.store.tiers.engines import open_engine
from kvtally.store.tiers.engines.base import Credentials, DeniedError, Engine, cut, length_of
from kvtally.store.tiers.pool import PoolTier, opening, survey
from kvtally.store.tiers.pool.seal import SEGMENT_BYTES, ForeignKeyError, Seal, read_keys
from kvtally.testing.pool_engine import MemoryEngine
from tests.pool.kit import KEY, OTHER_KEY, contents, held, load, namespace_of, prompt, save, sealing
from tests.waiting import HANG_S

NAMESPACE = namespace_of(700)
BROKEN = TierError("broken on demand", remedy="None.")


def test_it_is_what_the_store_expects() -> None:
    tier = PoolTier(MemoryEngine())
    assert isinstance(tier, SharedTier)
    assert list(tier.recover()) == []
    tier.close()


# ---- faults


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("is_charged", [False, True])
def test_a_failure_at_any_call_is_a_tier_error_and_leaves_nothing_wrong(is_charged: bool, is_sealed: bool) -> None:
    """Each call to the engine fails once, in a run that does everything. Afterwards what is found verifies, and
    everything can be saved again."""
    saved, other = prompt(namespace_of(700, groups=2), 1, 3, 9), prompt(namespace_of(700, groups=2), 2, 3, of=1)

    def everything(tier: PoolTier, errors: list[str]) -> None:
        def attempt(call: Callable[[], object]) -> None:
            try:
                call()
            except TierError as error:
                errors.append(error.code)

        for each in (saved, other):
            for index in range(len(each.boundaries)):
                attempt(lambda each=each, index=index: save(tier, each, indexes=[index]))
            attempt(lambda each=each: tier.keep(each.namespace, each.boundaries))
            attempt(lambda each=each: load(tier, each))
        attempt(lambda: tier.remove([record.key for record, _ in other.records(2)]))
        attempt(lambda: tier.disown([record for record, _ in other.records(1)]))
        attempt(lambda: tier.forget(namespace_of(model="other").digest))

    count = MemoryEngine(is_charged=is_charged)
    everything(PoolTier(count, seal=sealing(KEY) if is_sealed else None), [])
    for failing in range(count.calls):
        engine = MemoryEngine(failing, is_charged=is_charged)
        at = [0]

        def fail(at: list[int] = at, failing: int = failing) -> None:
            at[0] += 1
            if at[0] == failing + 1:
                raise BROKEN

        engine.before = fail
        errors: list[str] = []
        everything(PoolTier(engine, seal=sealing(KEY) if is_sealed else None), errors)
        assert set(errors) <= {"KV-600", "KV-606"}
        engine.before = lambda: None
        fresh = PoolTier(engine, seal=sealing(KEY) if is_sealed else None)
        for each in (saved, other):
            loaded = load(fresh, each)
            assert loaded.data.items() <= contents(each).items()
            assert set(loaded.missed) <= {"KV-603"}  # disowned, and its row could not be struck
        fresh.keep(saved.namespace, saved.boundaries)  # whoever writes next does that
        save(fresh, saved)
        save(fresh, other)
        again = PoolTier(engine, seal=sealing(KEY) if is_sealed else None)
        for each in (saved, other):
            assert load(again, each) == (contents(each), [])
        assert fresh.counts().get("damaged", 0) == 0  # nobody was accused of anything


@pytest.mark.parametrize("seed", range(40))
def test_stores_share_an_engine_that_loses_flips_and_fails(seed: int) -> None:
    """Three stores with different bits for the same prompts, and an engine that does everything to them. Whatever is
    loaded is one of the variants; only what was flipped is ever deleted."""
    random = Random(seed)
    engine = MemoryEngine(seed, capacity_bytes=random.choice([None, 40_000]), is_charged=seed % 3 == 0)
    now = [0.0]
    flipped: set[str] = set()
    tiers = [PoolTier(engine, clock=lambda: now[0], wall_clock=lambda: now[0]) for _ in range(3)]
    prompts = [prompt(NAMESPACE, number, 4, number % 2 * 7, of=number % 3) for number in range(5)]
    used = 0
    for _ in range(250):
        now[0] += random.random() * 2
        index = random.randrange(3)
        tier, each = tiers[index], random.choice(prompts)
        fault = random.randrange(20)
        try:
            if fault == 0:
                engine.lose(random.randrange(1, 5))
            elif fault == 1 and len(engine.held) > 1:
                # Not the marker: who starts on one that cannot be read is refused.
                name = random.choice(sorted(engine.held.keys() - {"kvt1/format"}))
                engine.flip(name)
                flipped.add(name)
            elif fault == 2:
                engine.failure = None if engine.failure else BROKEN
            elif fault == 3:
                engine.replicate()
            elif fault == 4:
                engine.fail_over()
            elif fault == 5 and random.random() < 0.3:
                tier.forget(NAMESPACE.digest)
            elif fault == 6:
                tier.keep(NAMESPACE, each.boundaries)
            elif fault == 7:
                tiers[index] = PoolTier(engine, clock=lambda: now[0], wall_clock=lambda: now[0])
            elif fault < 13:
                save(tier, each, variant=index)
            else:
                loaded = load(tier, each)
                used += len(loaded.data)
                variants = [contents(each, variant) for variant in range(3)]
                assert all(any(variant[place] == data for variant in variants) for place, data in loaded.data.items())
        except TierError:
            pass
    engine.failure = None
    values = {name for name in engine.deleted if "/v/" in name}
    assert values <= flipped
    assert used


def test_what_is_unreachable_is_not_found_but_fails() -> None:
    """Nobody knows what a pool holds that cannot be asked: that is not the same as nothing."""
    engine = MemoryEngine()
    tier = PoolTier(engine)
    save(tier, prompt(NAMESPACE, 1, 1))
    engine.failure = BROKEN
    with pytest.raises(TierError):
        tier.ask(NAMESPACE, prompt(NAMESPACE, 1, 1).boundaries)
    engine.failure = None
    assert held(tier, prompt(NAMESPACE, 1, 1)) == 1


def test_a_reset_that_the_pool_did_not_hear_of_holds_here() -> None:
    engine = MemoryEngine()
    saved = prompt(NAMESPACE, 1, 2)
    tier, other = PoolTier(engine), PoolTier(engine)
    save(tier, saved)
    engine.failure = BROKEN
    with pytest.raises(TierError):
        tier.forget(NAMESPACE.digest)
    engine.failure = None
    assert held(tier, saved) == 0
    assert held(other, saved) == 2
    save(tier, prompt(NAMESPACE, 2, 1))  # the next write tells it
    assert held(other, saved) == 0


# ---- limits


def test_writes_keep_to_their_limit() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    tier = PoolTier(MemoryEngine(), write_bytes_s=1000, clock=lambda: now[0], sleep=sleep)
    saved = prompt(namespace_of(500), 1, 10)
    save(tier, saved)
    assert sum(slept) == pytest.approx(9 * 0.5)  # the first one need not wait
    save(tier, saved)  # what is there already costs nothing
    assert sum(slept) == pytest.approx(9 * 0.5)


def test_what_was_asked_a_moment_ago_is_not_asked_again() -> None:
    engine, now = MemoryEngine(), [0.0]
    tier = PoolTier(engine, clock=lambda: now[0])
    save(tier, prompt(namespace_of(700, groups=4), 1, 1))
    engine.requests = 0
    save(tier, prompt(namespace_of(700, groups=4), 1, 1))
    assert engine.requests == 0  # four objects that are there
    now[0] += 6.0
    save(tier, prompt(namespace_of(700, groups=4), 1, 1))
    assert engine.requests == 2  # the manifest, and the epoch with it


# ---- keys


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_key_files(tmp_path: Path) -> None:
    sealing(KEY)  # or skip
    seal = read_keys(key_file(tmp_path, f"# written by ops\n{KEY.hex()}\n{OTHER_KEY.hex().upper()}\n\n"))
    assert seal.open("n", memoryview(Seal([OTHER_KEY]).seal("n", [memoryview(b"x")]))) == b"x"
    assert Seal([KEY]).open("n", memoryview(seal.seal("n", [memoryview(b"y")]))) == b"y"


@pytest.mark.parametrize(
    "text", ["", "short", KEY.hex()[:-1], KEY.hex() + "0", f"{KEY.hex()}\n{KEY.hex()}", f"{'ab' * 32}\n" * 3, "xy" * 32]
)
def test_key_files_without_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(key_file(tmp_path, text))
    assert not text.strip() or text.splitlines()[0] not in str(caught.value)  # nor is one repeated in a message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o606, 0o777])
def test_key_files_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEY.hex(), mode)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_keys(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode  # it is refused, not mended


def test_key_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "absent"))


@given(st.binary(max_size=300), st.integers(0, 3 * SEGMENT_BYTES // 100), st.lists(st.integers(0, 10**7), max_size=4))
def test_what_is_sealed_opens_under_its_own_name_only(data: bytes, length: int, cuts: list[int]) -> None:
    seal = sealing(KEY)
    data = (data or b"x") * (1 + length // 3)
    bounds = sorted({0, len(data), *(each % (len(data) + 1) for each in cuts)})
    pieces = [memoryview(data)[start:end] for start, end in pairwise(bounds)]
    sealed = seal.seal("name", pieces)
    assert len(sealed) == seal.sealed_bytes(len(data))
    assert seal.open("name", memoryview(sealed)) == data
    with pytest.raises(IntegrityError):
        seal.open("nam", memoryview(sealed))
    with pytest.raises(IntegrityError):
        seal.open("name", memoryview(sealed)[:-1])
    flipped = bytearray(sealed)
    flipped[len(sealed) // 2] ^= 1
    with pytest.raises(IntegrityError):
        seal.open("name", memoryview(flipped))


def test_segments_cannot_be_rearranged() -> None:
    seal = sealing(KEY)
    data = Random(1).randbytes(3 * SEGMENT_BYTES)
    sealed = bytes(seal.seal("name", [memoryview(data)]))
    header, size = 21, SEGMENT_BYTES + 16
    first, second, third = (sealed[header + n * size : header + (n + 1) * size] for n in range(3))
    assert seal.open("name", memoryview(sealed[:header] + first + second + third)) == data
    for wrong in (second + first + third, first + third + second, first + first + third, first + second):
        with pytest.raises(IntegrityError):
            seal.open("name", memoryview(sealed[:header] + wrong))


def test_another_key_is_told_from_damage() -> None:
    ours, theirs = sealing(KEY), sealing(OTHER_KEY)
    with pytest.raises(ForeignKeyError):
        ours.open("n", memoryview(theirs.seal("n", [memoryview(b"x")])))
    assert sealing(KEY).seal("n", [memoryview(b"x")]) != sealing(KEY).seal("n", [memoryview(b"x")])  # never twice


def test_a_store_with_another_key_deletes_nothing_of_the_others() -> None:
    """The marker was evicted, so it was not refused at its start. It finds nothing, and takes nothing out."""
    engine = MemoryEngine()
    saved = prompt(NAMESPACE, 1, 3)
    right = PoolTier(engine, seal=sealing(KEY))
    save(right, saved)
    found = right.ask(NAMESPACE, saved.boundaries)
    del engine.held["kvt1/format"]
    stranger = PoolTier(engine, seal=sealing(OTHER_KEY))
    stranger.ask(NAMESPACE, saved.boundaries)
    assert load(stranger, saved, found).missed == ["KV-403"] * 3
    save(stranger, prompt(NAMESPACE, 2, 1))
    assert not [name for name in engine.deleted if "/v/" in name]


# ---- extras


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        *(("valkey://kv", "valkey"), ("rediss://kv", "valkey"), ("s3://bucket", "s3"), ("gs://bucket", "s3")),
        *(("az://bucket", "s3"), ("mooncake://m?insecure=1", "mooncake")),
    ],
)
def test_a_missing_extra_is_named(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        open_engine(parse_remote(url), Credentials())
    assert f"pip install 'kvtally[{extra}]'" in caught.value.remedy
    assert caught.value.code == "KV-106"


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engines.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1") as caught:
        open_engine(parse_remote("mooncake://m?insecure=1"), Credentials())
    assert "libibverbs1" in caught.value.remedy


def test_without_a_pool_none_of_the_libraries_is_imported() -> None:
    code = (
        "import sys, kvtally.store.server, kvtally.cli.main, kvtally.cli.pool, kvtally.store.tiers.pool.opening;"
        "print([m for m in ('glide_sync', 'obstore', 'mooncake', 'cryptography') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


# ---- operators


class Operator:
    """`kvtally pool` on an engine in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        self.engine = MemoryEngine()
        self._capsys, self._monkeypatch = capsys, monkeypatch
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(opening, "open_engine", self.open)
        self.credentials: list[Credentials] = []

    def open(self, remote: object, credentials: Credentials) -> Engine:
        self.credentials.append(credentials)
        return self.engine

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["kvtally", "pool", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(caught.value.code or 0), out, err


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Operator:
    return Operator(monkeypatch, capsys, tmp_path)


URL = "valkey://kv:6379"


def test_check(operator: Operator) -> None:
    code, out, err = operator("check", URL)
    assert (code, err) == (0, "")
    assert "memory" in out
    assert "fit to be used" in out
    assert set(operator.engine.held) == {"kvt1/format"}  # it has cleaned up
    code, out, _ = operator("check", URL, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["address"] == URL
    assert found["get_bytes_s"] > 0
    assert found["findings"] == []


def test_check_of_a_pool_that_fails_or_refuses(operator: Operator) -> None:
    operator.engine.failure = TierError("nobody is there", remedy="Start it.")
    assert operator("check", URL) == (1, "", "error: nobody is there [KV-600]\nremedy: Start it.\n")
    operator.engine.failure = DeniedError("the password is wrong", remedy="Mend it.")
    assert operator("check", URL) == (2, "", "error: the password is wrong [KV-100]\nremedy: Mend it.\n")
    operator.engine.failure = None
    operator.engine.fails_writes = DeniedError("read only", remedy="Mend it.")
    assert operator("check", URL)[0] == 2
    operator.engine.fails_writes = None
    operator.engine.held["kvt1/format"] = b"something else"
    code, _, err = operator("check", URL)
    assert (code, "KV-203" in err) == (2, True)
    assert set(operator.engine.held) == {"kvt1/format"}


def test_check_finds_a_pool_that_lies(operator: Operator) -> None:
    original = MemoryEngine.get_into

    def lie(self: MemoryEngine, name: str, target: list[memoryview], landed: Callable[[memoryview], None]) -> None:
        original(self, name, target, landed)
        target[0][7] ^= 1

    operator._monkeypatch.setattr(MemoryEngine, "get_into", lie)
    code, _, err = operator("check", URL)
    assert (code, "KV-401" in err) == (1, True)


def test_check_of_a_pool_that_does_not_delete(operator: Operator) -> None:
    operator._monkeypatch.setattr(MemoryEngine, "remove", lambda self, names: None)
    code, out, _ = operator("check", URL)
    assert code == 0
    assert "! what is removed stays there" in out


def test_stat(operator: Operator) -> None:
    assert operator("stat", URL) == (0, "valkey://kv:6379 holds nothing.\n", "")
    tier = PoolTier(operator.engine)
    large, small = namespace_of(900, groups=2, model="large model"), namespace_of(100, model="small model")
    save(tier, prompt(small, 1, 3))
    tier.forget(small.digest)
    save(tier, prompt(small, 1, 2))
    save(tier, prompt(large, 1, 4))
    operator.engine.held["kvt1/stranger"] = b"?"
    code, out, _ = operator("stat", URL)
    assert code == 0
    lines = [line for line in out.splitlines() if "model" in line]
    assert large.digest.hex()[:12] in lines[1]
    assert small.digest.hex()[:12] in lines[2]
    found = json.loads(operator("stat", URL, "--json")[1])["namespaces"]
    assert [(use["model"], use["boundaries"], use["objects"], use["bytes"], use["old_bytes"]) for use in found] == [
        ("large model", 4, 8, 7200, 0),
        ("small model", 2, 2, 200, 300),
    ]


def test_stat_of_an_encrypted_pool_needs_its_key(operator: Operator, tmp_path: Path) -> None:
    save(PoolTier(operator.engine, seal=sealing(KEY)), prompt(namespace_of(model="hidden"), 1, 1))
    code, _, err = operator("stat", URL)
    assert (code, "is encrypted" in err) == (2, True)
    keys = key_file(tmp_path, KEY.hex())
    code, out, _ = operator("stat", URL, "--key-file", keys)
    assert (code, "hidden" in out) == (0, True)
    assert operator("stat", URL, "--key-file", key_file(tmp_path, OTHER_KEY.hex()))[0] == 2
    assert operator("stat", URL, "--key-file", key_file(tmp_path, KEY.hex(), 0o644))[0] == 2


def test_forget(operator: Operator) -> None:
    tier, other = PoolTier(operator.engine), namespace_of(model="other")
    saved, kept = prompt(NAMESPACE, 1, 3), prompt(other, 1, 3)
    save(tier, saved)
    save(tier, kept)
    digest = NAMESPACE.digest.hex()
    for wrong in ([], ["--namespace", digest[:5]], ["--namespace", "f" * 64], ["--namespace", "zz"]):
        code, out, err = operator("forget", URL, *wrong, "--yes")
        assert (code, out) == (2, "")
        assert digest[:12] in err
    code, out, _ = operator("forget", URL, "--namespace", digest[:8], "--yes", "--json")
    assert code == 0
    assert json.loads(out)["removed"] == 6
    assert held(tier, saved) == 0
    assert held(tier, kept) == 3
    assert [use.namespace for use in survey.stat(tier) if use.bytes] == [other.digest.hex()]


def test_bad_input_is_refused_and_nothing_is_opened(operator: Operator) -> None:
    for arguments in (
        ("check",),
        ("check", "http://kv"),
        ("check", "valkey://me:S3CRET@kv"),
        ("check", URL, "--password-file", "/not/there"),
        ("check", URL, "--key-file", "/not/there"),
        ("stat", "valkey://kv?unknown=1"),
        ("forget", "mooncake://m", "--namespace", "abcdef12"),
    ):
        code, out, err = operator(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "remedy: " in err
        assert "S3CRET" not in err
    assert operator.credentials == []


def test_settings_name_the_pool(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    (tmp_path / "kvtally.yaml").write_text(
        f"store: {{remote: '{URL}', remote_user: me, remote_password_file: password}}"
    )
    assert operator("check", "--json")[0] == 0
    assert operator.credentials == [Credentials("me", str(tmp_path / "password"))]


# ---- small parts


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 60))
def test_cut(lengths: list[int], part_bytes: int) -> None:
    data = bytes(range(256)) * 2
    views, position = [], 0
    for length in lengths:
        views.append(memoryview(data)[position : position + length])
        position += length
    parts = list(cut(views, part_bytes))
    assert b"".join(view for part in parts for view in part) == data[:position]
    assert [length_of(part) for part in parts[:-1]] == [part_bytes] * max(0, len(parts) - 1)
    assert not parts or 0 < length_of(parts[-1]) <= part_bytes


def test_passwords_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("one two\n")
    credentials = Credentials("me", str(path))
    assert credentials.password() == "one two"
    path.write_text("three")
    assert credentials.password() == "three"
    assert "three" not in repr(credentials)
    path.unlink()
    with pytest.raises(DeniedError):
        credentials.password()
    assert Credentials().password() == ""
