"""What tests of the pool share: kinds of pools, prompts, saving and finding them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from kvtally.config.remote import Remote, parse_remote
from kvtally.core.checksum import object_checksum
from kvtally.core.keys import ROOT_CHAIN, ObjectKey, chain_values, token_bytes
from kvtally.core.namespace import GroupKind, GroupSpec, Namespace
from kvtally.errors import IntegrityError, KVTallyError, TierError
from kvtally.store.mover import read_verified
from kvtally.store.tiers.base import Boundary, Holding, ObjectRecord
from kvtally.store.tiers.engines import open_engine
from kvtally.store.tiers.engines.base import Credentials, Engine, Stored
from kvtally.store.tiers.pool import PoolTier
from kvtally.store.tiers.pool.seal import Seal
from kvtally.testing.pool_engine import MemoryEngine
from tests.pool.servers import ACCESS_KEY, Mooncake, SeaweedFS, Valkey, ValkeyCluster, free_ports, missing, need
from tests.waiting import HANG_S

CHUNK = 256
REAL = ("valkey", "valkey cluster", "s3", "mooncake")
# Mooncake's library reads its timeouts from the environment, once.
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "10000")
os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "10")
os.environ.setdefault("MC_STORE_TRANSFER_TIMEOUT", "20")
KINDS = ("memory", "charged memory", "sealed memory", *REAL, "sealed valkey", "sealed mooncake")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32

_prefixes = count()


class Site:
    """One kind of pool that lives as long as the session; each test has a prefix of its own in it."""

    def __init__(self, kind: str, directory: Path, **options: Any) -> None:
        self.kind = kind
        self._exits = ExitStack()
        self.server: Any = None
        self._shared: Engine | None = None
        credentials = Credentials()
        if why := missing(kind):
            pytest.skip(why)
        if kind == "valkey":
            self.server = Valkey(directory, free_ports(1)[0])
            credentials = Credentials("", str(self.server.password_file))
        elif kind == "valkey cluster":
            self.server = ValkeyCluster(directory)
            credentials = Credentials("", str(self.server.password_file))
        elif kind == "s3":
            self.server = SeaweedFS(directory)
            credentials = Credentials(ACCESS_KEY, str(self.server.secret_file))
        elif kind == "mooncake":
            self.server = Mooncake(directory, **options)
        self.credentials = credentials
        if self.server is not None:
            self._exits.callback(self.server.close)

    def engine(self) -> Engine:
        """A connection to the pool: a new one where they cost little."""
        if self.kind == "mooncake" or self.server is None:
            self._shared = self._shared or self.new_engine()
            return self._shared
        return self.new_engine()

    def new_engine(self, **changed: Any) -> Engine:
        if self.server is None:
            return MemoryEngine(is_charged=self.kind.startswith("charged"))
        engine = open_engine(self.remote, Credentials(**{**self.credentials._asdict(), **changed}))
        self._exits.callback(engine.close)
        return engine

    @property
    def remote(self) -> Remote:
        return parse_remote(self.server.url)

    def close(self) -> None:
        self._exits.close()


class Kit:
    """What one test has of a pool. `open` is another store each time: it shares nothing with those before but the
    server."""

    def __init__(self, site: Site, *, is_sealed: bool = False) -> None:
        self.site = site
        self.prefix = f"test{next(_prefixes)}"
        self.seal = sealing(KEY) if is_sealed else None
        self.engine = site.engine()
        self._exits = ExitStack()

    def open(self, **settings: Any) -> PoolTier:
        engine = settings.pop("engine", None) or self.site.engine()
        tier = PoolTier(engine, **{"prefix": self.prefix, "seal": self.seal, **settings})
        if engine is not self.engine:
            self._exits.callback(tier.close)
        return tier

    def names(self, containing: str = "") -> list[str]:
        """Every name under this test's prefix."""
        listed = sorted(item.name for item in self.engine.names(self.prefix + "/"))
        return [name for name in listed if containing in name]

    def get(self, name: str) -> bytes:
        """What really lies under a name."""
        (data,) = self.engine.get_small([name])
        assert data is not None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Put something there, whatever was there."""
        self.engine.remove([Stored(name)])
        self.engine.put_small({name: data}, 0)

    def close(self) -> None:
        self._exits.close()


@cache
def _sites(directory: str) -> dict[str, Site]:
    return {}


def site(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site of a kind, started by the first test that wants it."""
    plain = kind.removeprefix("sealed ")
    sites = _sites(str(tmp_path_factory.getbasetemp()))
    if plain not in sites or (sites[plain].server is None):
        sites[plain] = Site(plain, tmp_path_factory.mktemp(plain.replace(" ", "-")))
    return sites[plain]


def close_sites(tmp_path_factory: pytest.TempPathFactory) -> None:
    sites = _sites(str(tmp_path_factory.getbasetemp()))
    while sites:
        sites.popitem()[1].close()


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are made or connected from now on wait for a server as tests do."""
    _wait(monkeypatch, HANG_S, ("SMALL_S", "VALUE_S", "PROGRESS_S", "CONNECT_S"))


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opposite, for a server that will never answer."""
    _wait(monkeypatch, 0.5, ("SMALL_S", "VALUE_S", "PROGRESS_S", "CONNECT_S"))


def _wait(monkeypatch: pytest.MonkeyPatch, seconds: float, constants: Sequence[str]) -> None:
    for name in ("valkey", "s3"):
        try:
            module = importlib.import_module(f"kvtally.store.tiers.engines.{name}")
        except ImportError:
            continue
        for constant in constants:
            if hasattr(module, constant):
                monkeypatch.setattr(module, constant, seconds)


def sealing(*keys: bytes) -> Seal:
    need("cryptography")
    return Seal(keys)


# ---- prompts


def namespace_of(length_bytes: int = 5000, *, model: str = "model", groups: int = 1, ranks: int = 1) -> Namespace:
    """One whose chunks have objects of this length."""
    group = GroupSpec(kind=GroupKind.FULL, block_tokens=CHUNK, page_bytes=((length_bytes,),))
    return Namespace(
        model=model, groups=(group,) * groups, chunk_tokens=CHUNK, alignment_tokens=1, tensor_parallel=ranks
    )


class Prompt(NamedTuple):
    """A prompt of `chunks` chunks, and perhaps a tail. What it says follows from `number`."""

    namespace: Namespace
    boundaries: tuple[Boundary, ...]

    def records(self, index: int, variant: int = 0) -> Iterator[tuple[ObjectRecord, bytes]]:
        """The objects at one boundary. Engines that compute the same prompt get different bits: the variant."""
        namespace, (chain, parent, start, end) = self.namespace, self.boundaries[index]
        for group in range(len(namespace.groups)):
            for rank in range(namespace.ranks):
                key = ObjectKey(namespace.digest, chain, group, rank)
                length = namespace.object_bytes(group, rank, end - start)
                data = content(key, variant, length)
                yield (
                    ObjectRecord(
                        namespace=namespace,
                        chain=chain,
                        parent=parent,
                        start_tokens=start,
                        end_tokens=end,
                        group=group,
                        rank=rank,
                        length_bytes=length,
                        checksum=object_checksum(key, length, [memoryview(data)]),
                    ),
                    data,
                )


def prompt(namespace: Namespace, number: int, chunks: int, tail: int = 0, *, of: int = 0) -> Prompt:
    """`of`: so many chunks of it are those of the prompt with number 0."""
    ends = [CHUNK * (index + 1) for index in range(chunks)] + ([CHUNK * chunks + tail] if tail else [])
    tokens = [(number if position >= of * CHUNK else 0) * 1000 + position for position in range(ends[-1])]
    chains = chain_values(token_bytes(tokens), ends)
    spans = pairwise([0, *ends])
    parents = [ROOT_CHAIN, *chains[:-1]]
    boundaries = [Boundary(c, p, start, end) for c, p, (start, end) in zip(chains, parents, spans, strict=True)]
    return Prompt(namespace, tuple(boundaries))


def content(key: ObjectKey, variant: int, length: int) -> bytes:
    seed = Random(key.chain + bytes([key.group, key.rank % 256, variant])).randbytes(min(length, 65_536 + 7))
    return (seed * (length // len(seed) + 1))[:length]


def save(tier: PoolTier, saved: Prompt, variant: int = 0, indexes: Sequence[int] | None = None) -> None:
    """Save a prompt, or some boundaries of it, as a store would."""
    for index in range(len(saved.boundaries)) if indexes is None else indexes:
        for record, data in saved.records(index, variant):
            tier.write(record, [memoryview(data)])


def held(tier: PoolTier, wanted: Prompt) -> int:
    """How many boundaries from the first on are held whole."""
    width = len(wanted.namespace.groups) * wanted.namespace.ranks
    found = tier.ask(wanted.namespace, wanted.boundaries)
    return next((i for i, holding in enumerate(found) if holding is None or len(holding.rows) < width), len(found))


def record_of(wanted: Prompt, index: int, bit: int, checksum: int) -> ObjectRecord:
    """The record that a store makes of what it was told."""
    namespace, (chain, parent, start, end) = wanted.namespace, wanted.boundaries[index]
    group, rank = divmod(bit, namespace.ranks)
    return ObjectRecord(
        namespace=namespace,
        chain=chain,
        parent=parent,
        start_tokens=start,
        end_tokens=end,
        group=group,
        rank=rank,
        length_bytes=namespace.object_bytes(group, rank, end - start),
        checksum=checksum,
    )


class Loaded(NamedTuple):
    """What a store could use of a prompt, and what it could not."""

    data: dict[tuple[int, int], bytes]  # boundary and bit -> bytes that verified
    missed: list[str]  # codes


def load(tier: PoolTier, wanted: Prompt, found: Sequence[Holding | None] | None = None) -> Loaded:
    """Find and read a prompt, as a store would: only what verifies is used; whatever happens is a code."""
    found = tier.ask(wanted.namespace, wanted.boundaries) if found is None else found
    loaded = Loaded({}, [])
    for index, holding in enumerate(found):
        for bit, checksum in holding.rows if holding is not None else ():
            record = record_of(wanted, index, bit, checksum)
            target = bytearray(record.length_bytes)
            try:
                is_right = read_verified(tier, record, [memoryview(target)])
            except (TierError, IntegrityError) as error:
                loaded.missed.append(error.code)
                continue
            if is_right:
                loaded.data[index, bit] = bytes(target)
            else:
                loaded.missed.append("KV-401")
                tier.disown([record])
    return loaded


def contents(wanted: Prompt, variant: int = 0) -> dict[tuple[int, int], bytes]:
    """What a prompt's objects hold, as `Loaded.data` has it."""
    return {
        (index, bit): data
        for index in range(len(wanted.boundaries))
        for bit, (_, data) in enumerate(wanted.records(index, variant))
    }


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(KVTallyError) as caught:
        call()
    return caught.value.code
