"""S3 on real servers: what a lookup costs, credentials, a volume server that dies, a gateway that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtally.config.remote import parse_remote
from kvtally.errors import ConfigError, TierError
from kvtally.store.tiers.engines import open_engine
from kvtally.store.tiers.engines.base import Credentials, Engine
from kvtally.store.tiers.pool import PoolTier
from kvtally.store.tiers.pool.opening import open_pool
from tests.pool.kit import (
    Kit,
    Site,
    close_sites,
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
from tests.pool.kit import site as site_of
from tests.pool.servers import BUCKET, READER_KEY, READER_SECRET, SeaweedFS
from tests.waiting import eventually

NAMESPACE = namespace_of()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield site_of("s3", tmp_path_factory)
    close_sites(tmp_path_factory)


@pytest.fixture
def kit(shared: Site) -> Iterator[Kit]:
    kit = Kit(shared)
    yield kit
    kit.close()


class Counting:
    """An engine that counts requests for small things."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests = 0

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        self.requests += len(names)
        return self._engine.get_small(names)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_a_cold_lookup_costs_at_most_two_requests(kit: Kit) -> None:
    saved = prompt(NAMESPACE, 1, 64)
    save(kit.open(), saved)
    now = [0.0]
    engine = Counting(kit.site.new_engine())
    tier = kit.open(engine=engine, clock=lambda: now[0])
    tier.contact()

    def cost(number: int, chunks: int) -> int:
        engine.requests = 0
        tier.ask(NAMESPACE, prompt(NAMESPACE, number, chunks).boundaries)
        return engine.requests

    assert cost(2, 64) == 2  # the first ever: the epoch, and one boundary
    assert cost(3, 64) == 1
    now[0] += 60.0
    assert cost(4, 512) == 2  # what was known of the epoch is old
    assert cost(1, 64) <= 64 + 2  # and what is there costs what must be read, and its tails
    engine.requests = 0
    tier.ask(namespace_of(model="never saved"), saved.boundaries)
    assert engine.requests == 1


def test_credentials_and_buckets_are_refused_at_start(kit: Kit, tmp_path: Path) -> None:
    server: SeaweedFS = kit.site.server
    wrong, reader = tmp_path / "wrong", tmp_path / "reader"
    wrong.write_text("wrong")
    reader.write_text(READER_SECRET)
    before = kit.names()
    for bucket, credentials in (
        (BUCKET, kit.site.credentials._replace(password_file=str(wrong))),
        (BUCKET, kit.site.credentials._replace(user="nobody")),
        (BUCKET, kit.site.credentials._replace(password_file=str(tmp_path / "absent"))),
        (BUCKET, Credentials(READER_KEY, str(reader))),  # may read, and not write
        ("not-there", kit.site.credentials),
    ):
        remote = parse_remote(f"s3://{bucket}/{kit.prefix}?endpoint={server.endpoint}")
        with pytest.raises(ConfigError) as caught:
            open_pool(remote, credentials)
        for secret in ("wrong", READER_SECRET, "tests-secret"):
            assert secret not in str(caught.value)
    assert kit.names() == before


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, kit: Kit) -> None:
    impatient(monkeypatch)
    engine = open_engine(parse_remote(f"s3://{BUCKET}?endpoint=http://127.0.0.1:9"), kit.site.credentials)
    assert code_of(PoolTier(engine).contact) == "KV-600"
    engine.close()


def test_objects_have_ages_and_sizes(kit: Kit) -> None:
    save(kit.open(), prompt(NAMESPACE, 1, 2))
    listed = list(kit.engine.names(kit.prefix + "/"))
    values = [item for item in listed if "/v/" in item.name]
    assert [item.length_bytes for item in values] == [5000, 5000]
    assert all(item.age_s is not None and item.age_s < 3600 for item in listed)
    assert list(kit.engine.names(kit.prefix + "/x")) == []


def test_a_gateway_that_hangs_and_a_volume_server_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("s3", tmp_path)
    kit = Kit(site)
    server: SeaweedFS = site.server
    prompts = [prompt(namespace_of(60_000), number, 6) for number in range(1, 9)]
    tier = kit.open()
    for each in prompts:
        save(tier, each)
    impatient(monkeypatch)
    hasty = kit.open()
    os.kill(server.gateway.pid, signal.SIGSTOP)
    ((record, data),) = prompts[0].records(0)
    hasty._ledger.epochs.heard(record.namespace.digest, tier._ledger.epochs.get(record.namespace.digest))
    assert code_of(lambda: hasty.ask(prompts[0].namespace, prompts[0].boundaries)) == "KV-600"
    assert code_of(lambda: hasty.read(record, [memoryview(bytearray(len(data)))], lambda _: None)) == "KV-600"
    assert code_of(lambda: save(hasty, prompt(NAMESPACE, 1, 1))) == "KV-600"
    os.kill(server.gateway.pid, signal.SIGCONT)
    patient(monkeypatch)
    eventually(lambda: held(tier, prompts[0]) == 6, "the gateway goes on")
    assert [load(tier, each) for each in prompts] == [(contents(each), []) for each in prompts]
    server.volumes[0].kill()
    impatient(monkeypatch)  # this server waits for its dead part as long as one waits for it
    fresh = kit.open()
    codes: set[str] = set()
    for each in prompts:
        try:
            loaded = load(fresh, each)
        except TierError as error:
            codes.add(error.code)
            continue
        assert loaded.data.items() <= contents(each).items()
        codes.update(loaded.missed)
    assert codes <= {"KV-600", "KV-603"}
    kit.close()
    site.close()
