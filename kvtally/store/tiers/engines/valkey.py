"""Valkey and Redis, one server or a cluster, by valkey-glide.

A value is cut into parts of 2 MiB, `NAME/0`, `NAME/1`, …: a server that answers one request after the other would keep
everybody waiting behind a larger one. Parts are asked for one at a time on a connection, never pipelined, and spread
over a cluster by their names. Small things are asked for by one MGET, which the library splits for a cluster.

Each thread has two connections of its own: one for small things, with a short deadline, one for values. A connection
that failed is dropped; the next call makes a new one, with the password that the file has then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import glide_sync as glide

from kvtally.config.remote import Remote
from kvtally.errors import ConfigError, IntegrityError, TierError
from kvtally.store.tiers.engines.base import (
    CONNECT_S,
    PROGRESS_S,
    SMALL_S,
    Condition,
    Credentials,
    DeniedError,
    Landed,
    Listed,
    Stored,
    absent,
    cut,
    length_of,
    scatter,
    wrong_length,
)

PART_BYTES = 2 * 1024 * 1024
NAMES_AT_ONCE = 1_000  # in one pipeline of small commands
_DENIED = (
    "NOAUTH",
    "NOPERM",
    "WRONGPASS",
    "PermissionDenied",
    "AuthenticationFailed",
    "Password authentication failed",
)
_NOT_WRITABLE = ("MISCONF", "READONLY", "NOREPLICAS")


class ValkeyEngine:
    """An `Engine` on a Valkey or Redis server."""

    name = "valkey"
    readers = 2
    writers = 2
    is_charged = False

    def __init__(self, remote: Remote, credentials: Credentials) -> None:
        self._remote = remote
        self._credentials = credentials
        self._ca = _read_ca(remote.ca)
        self._own = threading.local()  # each thread's clients
        self._lock = threading.Lock()
        self._clients: list[Any] = []  # of all threads, to be closed
        self._is_closed = False
        with suppress(glide.LoggerError):  # somebody has set it already
            glide.Logger.set_logger_config(glide.LogLevel.OFF)  # what fails is told by us

    # ---- the contract

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        with self._client("small") as client:
            found: list[bytes | None] = client.mget(list(names))
            return found

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        self._pipeline(items.items(), lambda batch, item: batch.set(*item, expiry=_expiry(ttl_s)))

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        for number, views in enumerate(cut(target, PART_BYTES)):
            part_bytes = length_of(views)
            # The library fills one piece of memory. A part that lies in several is read beside and copied.
            memory = views[0] if len(views) == 1 else memoryview(bytearray(part_bytes))
            with self._client("values") as client:
                got = client.get(f"{name}/{number}", buffer=memory)
            if got is None:
                raise absent(name)
            if int(got) != part_bytes:
                raise wrong_length(name, None, length_of(target))
            if len(views) == 1:
                landed(memory)
            else:
                scatter(memory, views, landed)

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        for number, views in enumerate(cut(source, PART_BYTES)):
            part = views[0] if len(views) == 1 else b"".join(views)
            with self._client("values") as client:
                client.set(f"{name}/{number}", part, expiry=_expiry(ttl_s))

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        if ttl_s:
            self._pipeline(_parts(names), lambda batch, name: batch.expire(name, ttl_s))
        else:
            self._pipeline(_parts(names), lambda batch, name: batch.touch([name]))

    def remove(self, names: Sequence[Stored]) -> None:
        self._pipeline(_parts(names), lambda batch, name: batch.unlink([name]))

    def register(self, memory: memoryview) -> None:
        """Nothing to prepare: sockets are read into any memory."""

    def names(self, prefix: str) -> Iterator[Listed]:
        for found in self._scan(prefix):
            sizes = self._pipeline(found, lambda batch, name: batch.strlen(name))
            lefts = self._pipeline(found, lambda batch, name: batch.ttl(name))
            for name, size, left_s in zip(found, sizes, lefts, strict=True):
                age_s = self._remote.ttl_s - left_s if 0 <= left_s <= self._remote.ttl_s else None
                yield Listed(name, size, age_s)

    def condition(self) -> Condition:
        with self._client("small") as client:
            sections = [glide.InfoSection.SERVER, glide.InfoSection.MEMORY, glide.InfoSection.PERSISTENCE]
            said = client.info(sections, glide.AllPrimaries()) if self._remote.is_cluster else client.info(sections)
        nodes = [_fields(text) for text in (said.values() if isinstance(said, dict) else [said])]
        first = nodes[0]
        kind = "valkey" if "valkey_version" in first else "redis"
        limits = [int(node.get("maxmemory", 0)) for node in nodes]
        return Condition(
            server=f"{kind} {first.get('valkey_version') or first.get('redis_version', '?')}",
            used_bytes=sum(int(node.get("used_memory", 0)) for node in nodes),
            capacity_bytes=sum(limits) if all(limits) else None,
            eviction=first.get("maxmemory_policy", ""),
            nodes=len(nodes),
            warnings=tuple(_warnings(first, all(limits), is_tls=self._remote.is_tls)),
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    # ---- connections

    @contextmanager
    def _client(self, purpose: str) -> Iterator[Any]:
        """This thread's connection for a purpose. Whatever the library raises becomes an error of ours."""
        client = getattr(self._own, purpose, None)
        try:
            if client is None:
                client = self._connect(SMALL_S if purpose == "small" else PROGRESS_S)
                setattr(self._own, purpose, client)
            yield client
        except (glide.TimeoutError, glide.ConnectionError, glide.ClosingError) as error:
            self._drop_own()
            raise self._error(str(error)) from error
        except glide.GlideError as error:
            raise self._error(str(error)) from error

    def _connect(self, timeout_s: float) -> Any:
        remote = self._remote
        password = self._credentials.password()
        credentials = glide.ServerCredentials(password, self._credentials.user or None) if password else None
        tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=self._ca) if self._ca else None
        common = {
            "addresses": [glide.NodeAddress(remote.host, remote.port)],
            "use_tls": remote.is_tls,
            "credentials": credentials,
            "request_timeout": int(timeout_s * 1000),
            "client_name": "kvtally",
        }
        connect_ms = int(CONNECT_S * 1000)
        if remote.is_cluster:
            advanced = glide.AdvancedGlideClusterClientConfiguration(connect_ms, tls)
            client = glide.GlideClusterClient.create(
                glide.GlideClusterClientConfiguration(**common, advanced_config=advanced)
            )
        else:
            client = glide.GlideClient.create(
                glide.GlideClientConfiguration(
                    **common,
                    database_id=remote.database,
                    advanced_config=glide.AdvancedGlideClientConfiguration(connect_ms, tls),
                )
            )
        with self._lock:
            if not self._is_closed:
                self._clients.append(client)
                return client
        client.close()
        raise glide.ClosingError("the pool is closed")

    def _drop_own(self) -> None:
        """Close this thread's connections: what one of them met, the other one will meet, too."""
        own = [client for client in vars(self._own).values() if client is not None]
        vars(self._own).clear()
        with self._lock:
            mine = [client for client in own if client in self._clients]
            self._clients = [client for client in self._clients if client not in mine]
        for client in mine:
            client.close()

    def _error(self, said: str) -> TierError | IntegrityError:
        """What the server or the library said, as an error of ours."""
        where, said = str(self._remote), said.strip()
        if any(word in said for word in _DENIED):
            remedy = "Check store.remote_user and store.remote_password_file against the server's ACL."
            return DeniedError(f"{where} refuses this user: {said}", remedy=remedy)
        if said.startswith("OOM"):
            remedy = "Give it more memory (maxmemory), or let it evict: maxmemory-policy allkeys-lru."
            return TierError(f"{where} is full", remedy=remedy, code="KV-601")
        if "exceeds buffer" in said or said.startswith("WRONGTYPE"):
            what = f"{where} holds something of another length or type under a value's name"
            return IntegrityError(what, remedy="It is dropped and computed anew.", code="KV-402")
        if said.startswith(_NOT_WRITABLE):
            return TierError(f"{where} cannot be written: {said}", remedy="See the server's log.", code="KV-602")
        remedy = "Nothing is lost but time; see whether it runs and can be reached from here."
        return TierError(f"{where} did not answer: {said}", remedy=remedy)

    # ---- many at once

    def _pipeline(self, items: Any, add: Callable[[Any, Any], object]) -> list[Any]:
        """One small command for each item, many in one go."""
        answers: list[Any] = []
        todo = list(items)
        for start in range(0, len(todo), NAMES_AT_ONCE):
            batch = (glide.ClusterBatch if self._remote.is_cluster else glide.Batch)(is_atomic=False)
            for item in todo[start : start + NAMES_AT_ONCE]:
                add(batch, item)
            with self._client("small") as client:
                answers += client.exec(batch, raise_on_error=True)
        return answers

    def _scan(self, prefix: str) -> Iterator[list[str]]:
        cursor: Any = glide.ClusterScanCursor() if self._remote.is_cluster else b"0"
        is_over = False
        while not is_over:
            with self._client("small") as client:
                cursor, found = client.scan(cursor, match=f"{prefix}*", count=NAMES_AT_ONCE)
            is_over = cursor.is_finished() if self._remote.is_cluster else cursor == b"0"
            yield [name.decode(errors="replace") for name in found]


def _expiry(ttl_s: int) -> Any:
    return glide.ExpirySet(glide.ExpiryType.SEC, ttl_s) if ttl_s else None


def _parts(names: Sequence[Stored]) -> Iterator[str]:
    """What really lies in the server under each name."""
    for name, length_bytes in names:
        if length_bytes:
            yield from (f"{name}/{number}" for number in range(-(-length_bytes // PART_BYTES)))
        else:
            yield name


def _read_ca(path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the pool's ca cannot be read: {error}", remedy="Check the path and its mode.") from error


def _fields(info: bytes) -> dict[str, str]:
    """The lines `name:value` of INFO."""
    lines = info.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _warnings(node: dict[str, str], is_limited: bool, *, is_tls: bool) -> Iterator[tuple[str, str]]:
    policy = node.get("maxmemory_policy", "")
    if not is_limited:
        yield "it has no memory limit, and will take all of its machine's", "Set maxmemory to what it may use."
    if policy == "noeviction":
        yield "it evicts nothing: when it is full, nothing more is saved", "Set maxmemory-policy to allkeys-lru."
    if node.get("aof_enabled") == "1":
        yield "it writes every change to disk (appendonly)", "Turn it off for a cache: appendonly no, save ''."
    if not is_tls:
        yield "prompts' KV crosses the network unencrypted", "Use valkeys://, or a key file, unless it is private."
