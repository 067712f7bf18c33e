"""One suite over the pool tier on every engine: a new engine is done when it passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from kvtally.core.keys import ROOT_CHAIN
from kvtally.errors import ConfigError, IncompatibleError, IntegrityError, KVTallyError, TierError
from kvtally.store.tiers.base import Boundary, Holding, SharedTier
from kvtally.store.tiers.engines.base import Stored
from kvtally.store.tiers.pool.format import parse
from kvtally.testing.pool_engine import MemoryEngine
from kvtally.wire.limits import MIB
from tests.pool.kit import (
    KEY,
    KINDS,
    OTHER_KEY,
    REAL,
    Kit,
    close_sites,
    code_of,
    content,
    contents,
    held,
    load,
    namespace_of,
    patient,
    prompt,
    save,
    sealing,
    site,
)
from tests.pool.servers import missing
from tests.waiting import HANG_S

NAMESPACE = namespace_of()


@pytest.fixture(scope="module", autouse=True)
def _sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    close_sites(tmp_path_factory)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


HERE = [kind for kind in KINDS if not missing(kind)]


@pytest.mark.parametrize("kind", REAL)
def test_real_servers_are_here(kind: str) -> None:
    """Says which are not: the tests below then run without them."""
    if why := missing(kind):
        pytest.skip(why)


@pytest.fixture(params=HERE)
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    yield from kit_of(request.param, tmp_path_factory)


@pytest.fixture(params=[kind for kind in HERE if kind.startswith("sealed")])
def sealed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    yield from kit_of(request.param, tmp_path_factory)


def kit_of(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    kit = Kit(site(kind, tmp_path_factory), is_sealed=kind.startswith("sealed"))
    yield kit
    kit.close()


# ---- writing, finding, reading


@pytest.mark.parametrize("length", [1, 4095, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB])
def test_what_one_store_saved_another_one_loads(kit: Kit, length: int) -> None:
    saved = prompt(namespace_of(length), 1, 2)
    save(kit.open(), saved)
    assert load(kit.open(), saved) == (contents(saved), [])


def test_the_largest_object(kit: Kit) -> None:
    saved = prompt(namespace_of(64 * MIB), 1, 1)
    save(kit.open(), saved)
    loaded = load(kit.open(), saved)
    assert loaded.missed == []
    assert loaded.data == contents(saved)


def test_source_and_target_may_be_cut_differently(kit: Kit) -> None:
    length = 4 * MIB + 77
    saved = prompt(namespace_of(length), 1, 1)
    ((record, data),) = saved.records(0)
    tier = kit.open()

    def pieces(data: bytes, cuts: list[int]) -> list[memoryview]:
        whole = memoryview(bytearray(data))
        bounds = [0, *cuts, len(data)]
        return [whole[start:end] for start, end in pairwise(bounds)]

    tier.write(record, pieces(data, [1, 4096, 4096, 2 * MIB, 3 * MIB + 5]))
    for cuts in ([], [MIB], [2 * MIB - 1, 2 * MIB + 1], [5, 6, 7, 4 * MIB]):
        target = pieces(bytes(length), cuts)
        landed: list[bytes] = []
        tier.read(record, target, lambda part, landed=landed: landed.append(bytes(part)))
        assert b"".join(target) == data
        assert b"".join(landed) == data  # each part once, in order, when it was filled


def test_groups_and_ranks_are_apart(kit: Kit) -> None:
    saved = prompt(namespace_of(3000, groups=3, ranks=4), 1, 3)
    save(kit.open(), saved)
    assert load(kit.open(), saved) == (contents(saved), [])


def test_namespaces_are_apart(kit: Kit) -> None:
    ours, theirs = prompt(NAMESPACE, 1, 2), prompt(namespace_of(model="other"), 1, 2)
    assert ours.boundaries == theirs.boundaries
    save(kit.open(), ours)
    assert held(kit.open(), theirs) == 0
    save(kit.open(), theirs, variant=1)
    assert load(kit.open(), ours).data == contents(ours)
    assert load(kit.open(), theirs).data == contents(theirs, variant=1)


def test_one_question_for_a_whole_prompt(kit: Kit) -> None:
    shared, longer = prompt(NAMESPACE, 0, 20), prompt(NAMESPACE, 7, 64, of=20)
    assert shared.boundaries == longer.boundaries[:20]
    save(kit.open(), shared)
    tier = kit.open()
    assert held(tier, shared) == 20
    assert held(tier, longer) == 20
    assert held(tier, prompt(NAMESPACE, 7, 64)) == 0
    assert tier.ask(NAMESPACE, []) == []
    assert tier.ask(NAMESPACE, longer.boundaries[5:8])[0] is not None  # from any boundary on


def test_a_manifest_speaks_of_its_boundary_only(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 2)
    tier = kit.open()
    save(tier, saved)
    chain, parent, start, end = saved.boundaries[1]
    for other in (
        Boundary(chain, saved.boundaries[1].chain, start, end),
        Boundary(chain, parent, start - 1, end),
        Boundary(chain, parent, start, end + 1),
    ):
        before = tier.counts().get("damaged", 0)
        assert tier.ask(NAMESPACE, [other]) == [None]
        assert tier.counts()["damaged"] == before + 1


def test_records_are_found_by_their_keys(kit: Kit) -> None:
    saved = prompt(namespace_of(5000, groups=2, ranks=2), 1, 2)
    tier = kit.open()
    save(tier, saved)
    records = [record for index in range(2) for record, _ in saved.records(index)]
    assert tier.find([record.key for record in records]) == records
    strangers = [records[0].key._replace(chain=b"?" * 32), records[0].key._replace(namespace=b"?" * 32)]
    assert tier.find(strangers) == [None, None]
    assert isinstance(tier, SharedTier)


# ---- tails


def test_tails_are_found_beneath_their_boundary(kit: Kit) -> None:
    tier = kit.open()
    for length in (10, 20, 10):
        save(tier, prompt(NAMESPACE, length, 3, length, of=3))
    boundaries = prompt(NAMESPACE, 0, 3).boundaries
    holdings = kit.open().ask(NAMESPACE, boundaries)
    assert holdings[-1] is not None
    assert holdings[-1].tails == (20, 10)
    assert all(holding is not None and not holding.tails for holding in holdings[:-1])


def test_tails_of_short_prompts_lie_beneath_the_root(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 3, 0, 30)
    tier = kit.open()
    root = Boundary(ROOT_CHAIN, ROOT_CHAIN, 0, 0)
    assert tier.ask(NAMESPACE, [root]) == [None]
    save(tier, saved)
    found = kit.open().ask(NAMESPACE, [root, *prompt(NAMESPACE, 4, 2).boundaries])
    assert found == [Holding((), (30,)), None, None]
    assert load(kit.open(), saved).data == contents(saved)


def test_only_the_last_tails_are_kept(kit: Kit) -> None:
    tier = kit.open()
    for length in range(1, 20):
        save(tier, prompt(NAMESPACE, length, 1, length, of=1))
    (holding,) = kit.open().ask(NAMESPACE, prompt(NAMESPACE, 0, 1).boundaries)
    assert holding is not None
    assert holding.tails == tuple(range(19, 3, -1))


# ---- several writers


def test_what_is_there_is_not_written_again(kit: Kit) -> None:
    """Two stores compute the same prompt, and get different bits. Neither harms the other."""
    saved = prompt(namespace_of(5000, groups=2), 1, 3)
    first, second = kit.open(), kit.open()
    save(first, saved)
    names = kit.names()
    save(second, saved, variant=1)
    assert kit.names() == names
    assert second.counts()["present"] == 6
    assert "written" not in second.counts()
    for tier in (first, second, kit.open()):
        assert load(tier, saved) == (contents(saved), [])


def test_two_variants_at_once_both_verify(kit: Kit) -> None:
    """Both have looked before either has written: the later manifest counts, and every checksum has its bytes."""
    saved = prompt(NAMESPACE, 1, 1)
    ((ours, our_data),), ((theirs, their_data),) = saved.records(0), saved.records(0, variant=1)
    first, second = kit.open(), kit.open()
    first.write(ours, [memoryview(our_data)])
    kit.engine.remove([Stored(name) for name in kit.names("/m/")])
    second.write(theirs, [memoryview(their_data)])
    for tier in (first, kit.open()):
        assert load(tier, saved) == (contents(saved, variant=1), [])
        target = bytearray(len(our_data))
        tier.read(ours, [memoryview(target)], lambda _: None)
        assert target == our_data


def test_orphans_are_dropped(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 4)
    tier = kit.open()
    save(tier, saved, indexes=[0])
    for index in (3, 2):
        assert code_of(lambda index=index: save(tier, saved, indexes=[index])) == "KV-606"
    assert tier.counts()["orphans"] == 2
    assert len(kit.names("/v/")) == 1
    save(tier, saved, indexes=[1, 2])  # and once the gap is filled, they are taken
    save(kit.open(), saved, indexes=[3])
    assert load(kit.open(), saved) == (contents(saved), [])


def test_several_threads_write_one_prompt(kit: Kit) -> None:
    """In the order of commits, as the mover gives them out: no row is lost, and no child is taken for an orphan."""
    saved = prompt(namespace_of(2000, groups=2, ranks=2), 1, 6, 9)
    tier = kit.open()
    todo = [item for index in range(len(saved.boundaries)) for item in saved.records(index)]
    taking = threading.Lock()
    failed: list[Exception] = []

    def write_all() -> None:
        while True:
            with taking:
                if not todo:
                    return
                record, data = todo.pop(0)
                begun = threading.Thread(target=write_one, args=(record, data))
                begun.start()
            begun.join(HANG_S)

    def write_one(record: object, data: bytes) -> None:
        try:
            tier.write(record, [memoryview(data)])
        except KVTallyError as error:
            failed.append(error)

    threads = [threading.Thread(target=write_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert failed == []
    assert load(kit.open(), saved) == (contents(saved), [])


def test_reads_while_writing(kit: Kit) -> None:
    steady = prompt(namespace_of(9000), 1, 4)
    tier = kit.open()
    save(tier, steady)
    wrong: list[object] = []
    stop = threading.Event()

    def read_all() -> None:
        while not stop.is_set():
            loaded = load(tier, steady)
            if loaded != (contents(steady), []):
                wrong.append(loaded.missed)

    readers = [threading.Thread(target=read_all) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(2, 12):
        save(tier, prompt(namespace_of(9000), number, 4, of=2))
    stop.set()
    for reader in readers:
        reader.join(HANG_S)
        assert not reader.is_alive()
    assert wrong == []


# ---- what the engine loses


def test_a_lost_value_is_a_miss_and_is_healed(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 3)
    save(kit.open(), saved)
    lost = kit.names("/v/")
    for name in lost:
        kit.engine.remove([Stored(name)])
    tier = kit.open()
    assert load(tier, saved) == ({}, ["KV-603"] * 3)
    tier.keep(NAMESPACE, saved.boundaries)
    save(tier, prompt(NAMESPACE, 2, 1))  # a writer strikes out what readers did not find
    assert tier.counts()["struck"] == 3
    assert held(kit.open(), saved) == 0
    save(kit.open(), saved, variant=1)
    assert load(kit.open(), saved) == (contents(saved, variant=1), [])


def test_a_lost_manifest_makes_the_hit_shorter(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 3)
    tier = kit.open()
    save(tier, saved)
    names = kit.names("/m/")
    kit.engine.remove([Stored(name) for name in names])
    assert held(kit.open(), saved) == 0
    save(kit.open(), saved)
    assert load(kit.open(), saved) == (contents(saved), [])


def test_a_row_of_another_variant_is_not_struck(kit: Kit) -> None:
    """A reader whose knowledge is old finds its value gone. Somebody has saved another variant since: that stays."""
    saved = prompt(NAMESPACE, 1, 1)
    ((old, _),) = saved.records(0)
    save(kit.open(), saved, variant=1)
    tier = kit.open()
    assert load(tier, saved).data == contents(saved, variant=1)
    assert code_of(lambda: tier.read(old, [memoryview(bytearray(old.length_bytes))], lambda _: None)) == "KV-603"
    tier.disown([old])
    assert tier.counts()["struck"] == 0
    assert load(kit.open(), saved) == (contents(saved, variant=1), [])


def test_removed(kit: Kit) -> None:
    saved = prompt(namespace_of(5000, groups=2), 1, 2)
    tier = kit.open()
    save(tier, saved)
    first, second = (record for record, _ in saved.records(1))
    tier.remove([first.key, first.key])
    kept = {place: data for place, data in contents(saved).items() if place != (1, 0)}
    assert load(kit.open(), saved) == (kept, [])
    tier.remove([second.key])
    tier.remove([])
    assert held(kit.open(), saved) == 1
    assert len(kit.names("/m/")) == 1


# ---- resets


def test_after_a_reset_nothing_is_found(kit: Kit) -> None:
    saved, other = prompt(NAMESPACE, 1, 2), prompt(namespace_of(model="other"), 1, 2)
    first, second = kit.open(), kit.open()
    save(first, saved)
    save(first, other)
    found = second.ask(NAMESPACE, saved.boundaries)
    assert load(second, saved, found).missed == []
    first.forget(NAMESPACE.digest)
    # A store that asks sees it, at the latest when what it knew of the epoch is old.
    fresh = kit.open()
    for tier in (first, fresh):
        assert held(tier, saved) == 0
        assert load(tier, saved, found) == ({}, ["KV-603"] * 2)  # nor is it read by who had found it before
    assert load(first, other).data == contents(other)
    save(fresh, saved, variant=1)
    assert load(first, saved) == (contents(saved, variant=1), [])
    assert load(kit.open(), saved) == (contents(saved, variant=1), [])


def test_another_store_hears_of_a_reset(kit: Kit) -> None:
    now = [0.0]
    saved = prompt(NAMESPACE, 1, 2)
    first, second = kit.open(), kit.open(clock=lambda: now[0])
    save(first, saved)
    assert held(second, saved) == 2
    first.forget(NAMESPACE.digest)
    now[0] += 5.0
    assert held(second, saved) == 0
    save(second, saved, variant=1)
    assert load(kit.open(), saved) == (contents(saved, variant=1), [])


def test_a_pool_that_has_lost_a_reset_is_told_again(kit: Kit) -> None:
    """A failover takes the last writes back. The store that was reset serves nothing from before, and says so."""
    saved = prompt(NAMESPACE, 1, 2)
    tier = kit.open()
    save(tier, saved)
    (epoch,) = kit.names("/e/")
    before = kit.get(epoch)
    tier.forget(NAMESPACE.digest)
    kit.put(epoch, before)
    assert held(kit.open(), saved) == 2  # who does not know better believes the pool
    tier.ask(NAMESPACE, saved.boundaries)
    assert held(tier, saved) == 0
    save(tier, prompt(NAMESPACE, 2, 1))
    assert held(tier, saved) == 0
    assert held(kit.open(), saved) == 0


def test_an_epoch_that_is_lost_brings_nothing_back(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 2)
    save(kit.open(), saved)
    tier = kit.open()
    tier.forget(NAMESPACE.digest)
    save(tier, saved, variant=1)
    kit.engine.remove([Stored(name) for name in kit.names("/e/")])
    fresh = kit.open()
    assert held(fresh, saved) == 0
    save(fresh, saved, variant=2)
    assert load(kit.open(), saved) == (contents(saved, variant=2), [])


# ---- what is not what it should be: 200 of each, every one a counted miss


def tamper(kit: Kit, random: Random, name: str, others: list[str]) -> None:
    """Flip, swap, cut or replay what lies under a name; never leave it as it was."""
    data = kit.get(name)
    kind = random.randrange(4)
    if kind == 0:
        changed = bytearray(data)
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        changed = bytearray(kit.get(random.choice([other for other in others if other != name])))
    elif kind == 2:
        changed = bytearray(data[: random.randrange(1, len(data))])
    else:
        changed = bytearray(data) + random.randbytes(random.randrange(1, 99))
    if bytes(changed) == data:
        changed[0] ^= 1
    kit.put(name, bytes(changed))


def test_200_values_that_were_tampered_with_are_200_misses(kit: Kit) -> None:
    random = Random(1)
    saved = prompt(namespace_of(600), 1, 200)
    save(kit.open(), saved)
    tier = kit.open()
    found = tier.ask(saved.namespace, saved.boundaries)
    values = kit.names("/v/")
    assert len(values) == 200
    for name in values:
        tamper(kit, random, name, values)
    loaded = load(tier, saved, found)
    assert loaded.data == {}
    assert len(loaded.missed) == 200
    assert set(loaded.missed) <= {"KV-401", "KV-402", "KV-403"}


def test_200_manifests_that_were_tampered_with_are_200_misses(kit: Kit) -> None:
    random = Random(2)
    saved = prompt(namespace_of(600), 1, 200)
    save(kit.open(), saved)
    manifests = kit.names("/m/")
    assert len(manifests) == 200
    for name in manifests:
        tamper(kit, random, name, manifests)
    tier = kit.open()
    for damaged, boundary in enumerate(saved.boundaries, 1):
        assert tier.ask(saved.namespace, [boundary]) == [None]
        assert tier.counts()["damaged"] + tier.counts().get("foreign", 0) == damaged


def test_200_things_from_before_a_reset_are_200_misses(kit: Kit) -> None:
    """Replayed: right bytes of an earlier epoch under the names of this one."""
    saved = prompt(namespace_of(600), 1, 100)
    tier = kit.open()
    save(tier, saved)
    before = {name: kit.get(name) for name in kit.names() if "/m/" in name or "/v/" in name}
    tier.forget(saved.namespace.digest)
    save(tier, saved, indexes=[])
    save(tier, prompt(saved.namespace, 2, 1))
    current = {parsed.epoch for name in kit.names("/m/") if (parsed := parse(kit.prefix, name))}
    old = {parsed.epoch for name in before if (parsed := parse(kit.prefix, name))}
    ((new,), (gone,)) = (current - old, old)
    assert len(before) == 200
    for name, data in before.items():
        kit.put(name.replace(f".{gone}/", f".{new}/"), data)
    fresh = kit.open()
    for boundary in saved.boundaries:
        assert fresh.ask(saved.namespace, [boundary]) == [None]
    assert fresh.counts()["damaged"] == 100
    if kit.seal is not None:  # and the values would not open either, had a manifest named them
        codes = [
            code_of(lambda record=record: fresh.read(record, [memoryview(bytearray(600))], lambda _: None))
            for index in range(100)
            for record, _ in saved.records(index)
        ]
        assert codes == ["KV-403"] * 100


def test_untouched_they_are_200_hits(kit: Kit) -> None:
    """The control of the tests above."""
    saved = prompt(namespace_of(600), 1, 200)
    save(kit.open(), saved)
    loaded = load(kit.open(), saved)
    assert len(loaded.data) == 200
    assert loaded == (contents(saved), [])


def test_what_did_not_verify_is_taken_out_and_saved_again(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 2)
    save(kit.open(), saved)
    for name in kit.names("/v/"):
        data = bytearray(kit.get(name))
        data[-1] ^= 1
        kit.put(name, bytes(data))
    tier = kit.open()
    code = "KV-401" if kit.seal is None else "KV-403"
    assert load(tier, saved) == ({}, [code] * 2)
    save(tier, prompt(NAMESPACE, 2, 1))
    save(kit.open(), saved)
    assert load(kit.open(), saved) == (contents(saved), [])


# ---- with a key


def test_200_forged_values_with_right_checksums_are_200_misses(sealed: Kit) -> None:
    """Whoever can write to the pool but has no key puts whole values under right names: none gets in."""
    saved = prompt(namespace_of(600), 1, 200)
    save(sealed.open(), saved)
    tier = sealed.open()
    found = tier.ask(saved.namespace, saved.boundaries)
    attacker = sealing(OTHER_KEY)
    for number, name in enumerate(sealed.names("/v/")):
        plain = content(next(saved.records(number))[0].key, 9, 600)
        forged = plain if number % 2 else bytes(attacker.seal(name, [memoryview(plain)]))
        if number % 3 == 0:  # with the key's own id, which everybody can read
            forged = sealed.get(name)[:21] + forged[21:]
        sealed.put(name, forged)
    loaded = load(tier, saved, found)
    assert loaded.data == {}
    assert len(loaded.missed) == 200
    assert set(loaded.missed) <= {"KV-402", "KV-403"}


def test_200_forged_manifests_are_200_misses(sealed: Kit) -> None:
    saved = prompt(namespace_of(600), 1, 200)
    save(sealed.open(), saved)
    victims = sealed.names("/m/")
    for is_sealed in (False, True):  # by somebody without a key, and with another one
        seal = sealing(OTHER_KEY) if is_sealed else None
        attacker = Kit(sealed.site)
        attacker.seal = seal
        attacker.prefix = sealed.prefix + f"x{is_sealed}"
        save(attacker.open(), saved, variant=9)
        for victim, theirs in zip(victims, attacker.names("/m/"), strict=True):
            sealed.put(victim, attacker.get(theirs))
        tier = sealed.open()
        assert all(tier.ask(saved.namespace, [boundary]) == [None] for boundary in saved.boundaries)
        counts = tier.counts()
        assert counts.get("damaged", 0) + counts.get("foreign", 0) == 200
        attacker.close()


def test_nothing_can_be_read_without_the_key(sealed: Kit) -> None:
    saved = prompt(namespace_of(4096, model="a secret model"), 1, 2)
    save(sealed.open(), saved)
    plain = [data[:32] for data in contents(saved).values()] + [b"secret", saved.boundaries[0].chain]
    for name in sealed.names():
        assert not any(piece in sealed.get(name) for piece in plain)


def test_keys_are_changed_while_stores_run(sealed: Kit) -> None:
    saved, later = prompt(NAMESPACE, 1, 2), prompt(NAMESPACE, 2, 2)
    save(sealed.open(), saved)
    both = sealed.open(seal=sealing(KEY, OTHER_KEY))  # first every store learns the new key
    save(both, later)
    assert load(sealed.open(), later).data == contents(later)
    new_first = sealed.open(seal=sealing(OTHER_KEY, KEY))  # then they write with it
    assert load(new_first, saved) == (contents(saved), [])
    third = prompt(NAMESPACE, 3, 2)
    save(new_first, third)
    assert load(both, third) == (contents(third), [])
    only_new = sealed.open(seal=sealing(OTHER_KEY))  # then the old one is gone
    assert load(only_new, third) == (contents(third), [])
    assert held(only_new, saved) == 0
    assert only_new.counts()["foreign"] > 0


# ---- refused at once, and nothing is touched


def test_a_wrong_key_a_missing_key_and_one_too_many_are_refused(kit: Kit) -> None:
    save(kit.open(), prompt(NAMESPACE, 1, 1))
    names = kit.names()
    marker = kit.get(f"{kit.prefix}/format")
    wrong = [sealing(OTHER_KEY), None if kit.seal is not None else sealing(KEY)]
    for seal in wrong:
        with pytest.raises(ConfigError):
            kit.open(seal=seal).contact()
    assert kit.names() == names
    assert kit.get(f"{kit.prefix}/format") == marker


@pytest.mark.parametrize("marker", [b'{"kvtally_pool": 2}', b"garbage", b"{}", b"[1]"])
def test_a_prefix_of_another_format_is_refused(kit: Kit, marker: bytes) -> None:
    kit.put(f"{kit.prefix}/format", marker)
    tier = kit.open()
    for call in (tier.contact, lambda: tier.ask(NAMESPACE, prompt(NAMESPACE, 1, 1).boundaries)):
        with pytest.raises(IncompatibleError) as caught:
            call()
        assert caught.value.code == "KV-203"
    assert kit.names() == [f"{kit.prefix}/format"]
    assert kit.get(f"{kit.prefix}/format") == marker


def test_lengths_that_do_not_fit(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 1)
    ((record, data),) = saved.records(0)
    tier = kit.open()
    assert code_of(lambda: tier.write(record, [memoryview(data[1:])])) == "KV-402"
    assert kit.names("/v/") == []
    tier.write(record, [memoryview(data)])
    for wanted in (len(data) - 1, len(data) + 1):
        with pytest.raises(IntegrityError):
            tier.read(record, [memoryview(bytearray(wanted))], lambda _: None)


def test_never_asked_never_read(kit: Kit) -> None:
    ((record, data),) = prompt(NAMESPACE, 1, 1).records(0)
    assert code_of(lambda: kit.open().read(record, [memoryview(bytearray(len(data)))], lambda _: None)) == "KV-603"


def test_names_are_those_of_the_format(kit: Kit) -> None:
    save(kit.open(), prompt(NAMESPACE, 1, 2, 5))
    kinds = {}
    for name in kit.names():
        if name != f"{kit.prefix}/format":
            parsed = parse(kit.prefix, name)
            assert parsed is not None, name
            assert parsed.namespace == NAMESPACE.digest
            kinds[parsed.kind] = kinds.get(parsed.kind, 0) + 1
    assert kinds == {"n": 1, "e": 1, "m": 3, "t": 1, "v": 3}


def test_kept_alive(kit: Kit) -> None:
    """Whatever refreshing means to an engine: it harms nothing, and happens no more often than it should."""
    now = [0.0]
    saved = prompt(NAMESPACE, 1, 3)
    tier = kit.open(ttl_s=1000, clock=lambda: now[0])
    save(tier, saved)
    for _ in range(3):
        tier.keep(NAMESPACE, saved.boundaries)
    is_charged = kit.engine.is_charged
    assert tier.counts().get("kept", 0) == (0 if is_charged else 3)
    now[0] += 250.0
    tier.keep(NAMESPACE, saved.boundaries)
    assert tier.counts().get("kept", 0) == (0 if is_charged else 6)
    assert load(kit.open(), saved) == (contents(saved), [])


def test_condition_and_close(kit: Kit) -> None:
    assert kit.engine.condition().server
    if not isinstance(kit.engine, MemoryEngine):
        engine = kit.site.new_engine()
        engine.get_small([f"{kit.prefix}/nothing"])
        engine.close()
        engine.close()
        with pytest.raises(TierError):
            engine.get_small([f"{kit.prefix}/nothing", f"{kit.prefix}/nothing else"])
