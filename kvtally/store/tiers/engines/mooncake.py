"""Mooncake Store: values go between the arena and the memory of Mooncake's nodes without a copy, by RDMA or TCP.

The arena is registered once; each value is one transfer from or into its pieces. Whatever lies elsewhere (an encrypted
value, a test) goes through a buffer of the library. Mooncake has no authentication and no encryption, which is why an
address must say `insecure=1`; it evicts by itself and knows no time to live.

Its own timeouts are 30 to 60 s. They are lowered here, by environment variables, because the library offers nothing
else; who sets them for the process keeps what was set. A call that was cut off has been seen to write nothing later
into its target (TCP; RDMA could not be tried).
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtally.config.remote import Remote
from kvtally.errors import TierError
from kvtally.shm import address_of
from kvtally.store.tiers.engines.base import (
    CONNECT_S,
    PROGRESS_S,
    Condition,
    Credentials,
    Landed,
    Listed,
    Stored,
    absent,
    length_of,
    wrong_length,
)

TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": str(int(PROGRESS_S * 1000)),
    "MC_RPC_CONNECT_TIMEOUT_MS": str(int(CONNECT_S * 1000)),
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_TRANSFER_TIMEOUT": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_SLICE_TIMEOUT": "2",
    "GLOG_minloglevel": "3",  # its errors are told by us
}
for _name, _value in TIMEOUTS.items():
    os.environ.setdefault(_name, _value)

from mooncake.store import MooncakeDistributedStore  # noqa: E402 (it reads the environment when it is loaded)

BUFFER_BYTES = 128 * 1024 * 1024  # the library's own, for what is not in the arena
NAMES_AT_ONCE = 256
LIST_S = 10.0
_ABSENT = (-704, -703)  # no such object; not complete yet
_FULL = -200


class MooncakeEngine:
    """An `Engine` on a Mooncake cluster."""

    name = "mooncake"
    readers = 2
    writers = 2
    is_charged = False

    def __init__(self, remote: Remote, credentials: Credentials) -> None:
        self._remote = remote
        self._lock = threading.Lock()
        self._store: Any = None
        self._arena = (0, 0)  # address and length of what is registered
        self._arena_view: memoryview | None = None  # keeps it mapped
        self._is_closed = False

    # ---- the contract

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        store, found = self._connected(), []
        for start in range(0, len(names), NAMES_AT_ONCE):
            some = list(names[start : start + NAMES_AT_ONCE])
            # The library says the same of what is not there and of what it could not get. So it is asked first.
            there = store.batch_is_exist(some)
            if any(code < 0 for code in there):
                raise self._error(min(there))
            wanted = [name for name, code in zip(some, there, strict=True) if code]
            data = dict(zip(wanted, store.get_batch(wanted) if wanted else [], strict=True))
            found += [data.get(name) or None for name in some]
        return found

    def put_small(self, items: Mapping[str, bytes], ttl_s: int) -> None:
        code = self._connected().upsert_batch(list(items), list(items.values())) if items else 0
        if code:
            raise self._error(code)

    def get_into(self, name: str, target: Sequence[memoryview], landed: Landed) -> None:
        store, wanted_bytes = self._connected(), length_of(target)
        views = [view for view in target if len(view)]
        if all(map(self._is_registered, views)):
            (code,) = store.batch_get_into_multi_buffers([name], [[address_of(v) for v in views]], [[*map(len, views)]])
            self._check_got(store, name, code, wanted_bytes)
        else:
            self._get_beside(store, name, views, wanted_bytes)
        for view in target:
            landed(view)

    def put_from(self, name: str, source: Sequence[memoryview], ttl_s: int) -> None:
        store = self._connected()
        views = [view for view in source if len(view)]
        if all(map(self._is_registered, views)):
            (code,) = store.batch_put_from_multi_buffers([name], [[address_of(v) for v in views]], [[*map(len, views)]])
        else:
            code = store.put_parts(name, *views)
        if code:
            raise self._error(code)

    def touch(self, names: Sequence[Stored], ttl_s: int) -> None:
        """Asking for something counts as using it."""
        store = self._connected()
        for start in range(0, len(names), NAMES_AT_ONCE):
            store.batch_is_exist([name for name, _ in names[start : start + NAMES_AT_ONCE]])

    def remove(self, names: Sequence[Stored]) -> None:
        store = self._connected()
        for start in range(0, len(names), NAMES_AT_ONCE):
            some = [name for name, _ in names[start : start + NAMES_AT_ONCE]]
            codes = store.batch_remove(some, True)  # also what somebody reads: what they get is verified
            failed = [code for code in codes if code and code not in _ABSENT]
            if failed:
                raise self._error(failed[0])

    def register(self, memory: memoryview) -> None:
        with self._lock:
            self._arena = (address_of(memory), len(memory))
            self._arena_view = memory
            if self._store is not None:
                self._register(self._store)

    def names(self, prefix: str) -> Iterator[Listed]:
        store = self._connected()
        for name in self._ask_master("get_all_keys").splitlines():
            if name.startswith(prefix):
                yield Listed(name, max(0, store.get_size(name)), None)

    def condition(self) -> Condition:
        self._connected()
        warnings = [
            (
                "it has no authentication: whoever reaches it can read and change everything",
                "Keep its network private.",
            ),
            ("prompts' KV lies and travels unencrypted", "Give a key file (store.remote_key_file)."),
        ]
        if self._remote.protocol == "tcp":
            warnings.append(("it is used over TCP, which it is not made for", "Use ?protocol=rdma where there is any."))
        try:
            summary = self._ask_master("metrics/summary").split("|")[0].partition("{")[2].strip()
        except TierError as error:
            summary = ""
            warnings.append((error.message, "Name the master's metrics port: ?metrics=PORT."))
        return Condition(server=f"mooncake {summary}".strip(), eviction="lru", warnings=tuple(warnings))

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            self._is_closed = True
            self._arena_view = None
        if store is not None:
            if self._arena[1]:
                store.unregister_buffer(self._arena[0])
            store.close()

    # ---- the client

    def _connected(self) -> Any:
        """The client, connected by the first call that needs it."""
        store = self._store
        if store is not None:
            return store
        with self._lock:
            if self._is_closed:
                raise TierError("the pool is closed", remedy="Nothing to do.")
            if self._store is None:
                remote, store = self._remote, MooncakeDistributedStore()
                master = f"{remote.host}:{remote.port}"
                code = store.setup(
                    remote.advertise or _own_address(remote),
                    "P2PHANDSHAKE",
                    remote.segment_bytes,
                    BUFFER_BYTES,
                    remote.protocol,
                    remote.device,
                    master,
                )
                if code:
                    raise self._error(code)
                self._register(store)
                self._store = store
            return self._store

    def _register(self, store: Any) -> None:
        address, length_bytes = self._arena
        if length_bytes and (code := store.register_buffer(address, length_bytes)):
            self._arena = (0, 0)
            raise self._error(code)

    def _is_registered(self, view: memoryview) -> bool:
        address, length_bytes = self._arena
        return (
            length_bytes > 0 and address <= address_of(view) and address_of(view) + len(view) <= address + length_bytes
        )

    def _get_beside(self, store: Any, name: str, views: Sequence[memoryview], wanted_bytes: int) -> None:
        """Read through the library's buffer."""
        held = store.get_buffer(name)
        if held is None:
            self._check_got(store, name, store.get_size(name), wanted_bytes)
            raise self._error(-1)
        if held.size() != wanted_bytes:
            raise wrong_length(name, held.size(), wanted_bytes)
        address = held.ptr()
        for view in views:
            view[:] = memoryview((ctypes.c_ubyte * len(view)).from_address(address)).cast("B")
            address += len(view)

    def _check_got(self, store: Any, name: str, code: int, wanted_bytes: int) -> None:
        if code == wanted_bytes:
            return
        if code in _ABSENT:
            raise absent(name)
        held_bytes = code if code >= 0 else store.get_size(name)
        if held_bytes >= 0 and held_bytes != wanted_bytes:
            raise wrong_length(name, held_bytes, wanted_bytes)
        raise absent(name) if held_bytes in _ABSENT else self._error(code)

    def _error(self, code: int) -> TierError:
        if code == _FULL:
            remedy = "Add memory to its nodes; what is read within ten seconds is not evicted."
            return TierError(f"{self._remote} is full", remedy=remedy, code="KV-601")
        remedy = "Nothing is lost but time; see whether its master and nodes run and can be reached from here."
        return TierError(f"{self._remote} did not answer (Mooncake's error {code})", remedy=remedy)

    def _ask_master(self, path: str) -> str:
        """The master's HTTP port, which knows what its protocol does not tell."""
        url = f"http://{self._remote.host}:{self._remote.metrics_port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=LIST_S) as answer:
                text: str = answer.read().decode(errors="replace")
                return text
        except (OSError, urllib.error.URLError) as error:
            remedy = "Name the master's metrics port: ?metrics=PORT."
            raise TierError(f"the master does not say what it holds at {url}: {error}", remedy=remedy) from error


def _own_address(remote: Remote) -> str:
    """This machine's address as the master sees it. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((remote.host, remote.port))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        remedy = "Give this machine's address: ?advertise=ADDRESS."
        raise TierError(f"{remote} cannot be reached from here: {error}", remedy=remedy) from error
