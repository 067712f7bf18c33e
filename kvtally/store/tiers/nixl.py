"""NIXL: objects read straight out of other stores' arenas, by RDMA, instead of being sent.

    A: arena, registered ─▶ agent ──card, in A's Welcome──▶ B: agent ──READ of pieces──▶ B's arena, registered too

One agent for each store: others read this arena through it, and it reads theirs. A card is all that B needs: where A's
arena begins, and NIXL's own description of A's agent. Descriptors are made here, from numbers that were checked; NIXL
would pickle them, and nothing that comes from a peer is unpickled.

A READ cannot be called off: NIXL forgets it, and its bytes land all the same. So `read` ends only when NIXL says that
the READ has ended, however late; until then the target is the job's own. At A, the object is pinned meanwhile (`bulk`).

UCX, which moves the bytes, falls back to TCP where it finds no RDMA device. That is slower than sockets of our own, and
is refused unless it was asked for.

Owns the agent, its card and the endpoints to other agents. Neighbours: `peer` (asks where objects lie, and has them
read), `bulk` (hands the card out), `server` (opens and closes this). NIXL itself is imported only here, and only if it
is configured.

Threading: `read` runs in several threads at once. A thread of its own serves other agents that want to connect.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtally.config.units import human_size
from kvtally.core.space import Piece
from kvtally.errors import ConfigError
from kvtally.shm import address_of

logger = logging.getLogger("kvtally.store")

WHEELS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # one library, built for different GPUs; here it moves host memory
RDMA = "ib"  # UCX's word for all its RDMA transports: InfiniBand, RoCE, EFA
MOST_IDLE = 64  # endpoints that nobody uses: stores that are restarted leave theirs behind
_PROGRESS_S = 0.001  # NIXL's own progress thread spins: half a core for a store that does nothing
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 5e-3
_BASE = struct.Struct("<Q")  # how a card begins: the address of the arena, in its own process


class Run(NamedTuple):
    """Bytes that lie in one piece both there and here."""

    offset: int  # in the other store's arena
    address: int  # in this process
    length_bytes: int


@dataclass(slots=True, eq=False)
class _Endpoint:
    """The way to another store's agent."""

    card: bytes
    changed: threading.Condition = field(default_factory=threading.Condition)  # guards the rest
    name: Any = None  # NIXL's; None: not connected
    reads: int = 0  # under way
    is_lost: bool = False  # one of them failed: there are no new ones until all have ended


class Nixl:
    """This store's agent. `arena` must outlive it. Raises ConfigError KV-106 where NIXL cannot work.

    With `may_use_tcp`, UCX uses whatever it finds, or what UCX_TLS says.
    """

    def __init__(self, name: str, arena: memoryview, *, may_use_tcp: bool = False) -> None:
        self.may_use_tcp = may_use_tcp
        library = _load(may_use_tcp)
        errors = [error for word, error in vars(library._bindings).items() if word.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = (*errors, RuntimeError)  # they have no base class of their own
        settings = library.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        base = address_of(arena)
        try:
            self._agent: Any = library.nixl_agent(name, settings)
            self._agent.create_backend("UCX")
        except self._errors as error:
            what = "network" if may_use_tcp else "RDMA device"
            remedy = "" if may_use_tcp else " transport: nixl-tcp lets NIXL do without."
            raise _unusable(
                f"UCX finds no {what} that it can use ({error}; see above)",
                f"Use transport: tcp, which is faster than NIXL without RDMA.{remedy}",
            ) from error
        try:
            self._arena = self._agent.register_memory([(base, len(arena), 0, "")], "DRAM")
        except self._errors as error:
            raise _unusable(
                f"the arena of {human_size(len(arena))} cannot be registered with the network ({error}; see above)",
                "Let the store lock that much memory (ulimit -l unlimited), or use transport: tcp.",
            ) from error
        self.card = _BASE.pack(base) + self._agent.get_agent_metadata()
        self._endpoints: dict[bytes, _Endpoint] = {}  # by card; the one used last comes last
        self._lock = threading.Lock()  # guards it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl", daemon=True)
        self._thread.start()

    def read(self, card: bytes, pieces: Sequence[Piece], target: Sequence[memoryview]) -> None:
        """Fill `target` from these pieces of another arena. Returns or raises when nothing writes to it any more.

        Raises ConnectionError when the other store cannot be read.
        """
        runs = runs_of(pieces, target)
        endpoint = self._begin(card)
        state = ""
        try:
            state = self._read(endpoint, runs)
        except self._errors as error:
            state = str(error)
        finally:
            self._end(endpoint, state == "DONE")
        if state != "DONE":
            raise ConnectionError(f"a READ failed ({state})")

    def close(self) -> None:
        """Begin no more READs and let go of the arena; with a READ under way, only the end of the process can do that.
        Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with self._lock:
            is_busy = False
            for endpoint in self._endpoints.values():
                with endpoint.changed:
                    is_busy |= not self._disconnect(endpoint)
        if not is_busy:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(self._arena)

    def _serve(self) -> None:
        """Other agents connect to this one, and where there is no RDMA read from it, only while somebody calls it."""
        while not self._closing.wait(_PROGRESS_S):
            self._agent.get_new_notifs()

    def _begin(self, card: bytes) -> _Endpoint:
        """Count one more READ through an endpoint, which is connected if need be."""
        endpoint = self._endpoint(card)
        with endpoint.changed:
            if self._closing.is_set():
                raise ConnectionAbortedError("this store is stopping")
            if endpoint.is_lost:
                raise ConnectionAbortedError("another READ failed, and not all have ended")
            if endpoint.name is None:
                try:
                    endpoint.name = self._agent.add_remote_agent(card[_BASE.size :])
                except self._errors as error:
                    raise ConnectionError(f"NIXL cannot connect ({error})") from error
            endpoint.reads += 1
        return endpoint

    def _endpoint(self, card: bytes) -> _Endpoint:
        with self._lock:
            endpoint = self._endpoints[card] = self._endpoints.pop(card, _Endpoint(card))
            for old in list(self._endpoints.values())[:-MOST_IDLE]:
                with old.changed:
                    if self._disconnect(old):
                        del self._endpoints[old.card]
            return endpoint

    def _end(self, endpoint: _Endpoint, is_done: bool) -> None:
        """A READ has ended. If it failed, so has its endpoint. Only when that is closed can nothing land any more, and
        it cannot be closed while other READs use it."""
        with endpoint.changed:
            endpoint.reads -= 1
            endpoint.is_lost |= not is_done
            if endpoint.is_lost and self._disconnect(endpoint):
                endpoint.is_lost = False
                endpoint.changed.notify_all()
            elif not is_done:
                endpoint.changed.wait_for(lambda: not endpoint.is_lost)

    def _disconnect(self, endpoint: _Endpoint) -> bool:
        """Close it. False, and nothing changes, while READs use it."""
        if endpoint.reads:
            return False
        if endpoint.name is not None:
            with contextlib.suppress(*self._errors):  # NIXL may have forgotten it by itself
                self._agent.remove_remote_agent(endpoint.name)
            endpoint.name = None
        return True

    def _read(self, endpoint: _Endpoint, runs: Sequence[Run]) -> str:
        """One READ, until NIXL says how it ended."""
        agent, (base,) = self._agent, _BASE.unpack_from(endpoint.card)
        there = agent.get_xfer_descs([(base + run.offset, run.length_bytes, 0) for run in runs], "DRAM")
        here = agent.get_xfer_descs([(run.address, run.length_bytes, 0) for run in runs], "DRAM")
        transfer = agent.initialize_xfer("READ", here, there, endpoint.name)
        try:
            state: str = agent.transfer(transfer)
            begun_s = time.perf_counter()
            while state == "PROC":
                waited_s = time.perf_counter() - begun_s
                time.sleep(min(max(waited_s / 16, _SHORTEST_NAP_S), _LONGEST_NAP_S))
                state = agent.check_xfer_state(transfer)
        finally:
            agent.release_xfer_handle(transfer)
        return state


def runs_of(pieces: Sequence[Piece], target: Sequence[memoryview]) -> list[Run]:
    """What is to be read. Raises ConnectionError unless the pieces have exactly as many bytes as the target."""
    views = [(address_of(view), len(view)) for view in reversed(target)]
    if any(length <= 0 for _, length in pieces) or sum(size for _, size in pieces) != sum(size for _, size in views):
        raise ConnectionError(f"its pieces of an object are {pieces}")
    runs: list[Run] = []
    for offset, left in pieces:
        while left:
            address, room = views.pop()
            length = min(left, room)
            runs.append(Run(offset, address, length))
            offset, left = offset + length, left - length
            if room > length:
                views.append((address + length, room - length))
    return runs


def _load(may_use_tcp: bool) -> Any:
    """The library. UCX reads its environment while it is loaded."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # otherwise it logs to stdout
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")  # it would take over the handling of SIGSEGV and others
    if not may_use_tcp:
        if os.environ.get("UCX_TLS", RDMA) != RDMA:
            logger.warning(
                "UCX_TLS=%s is not used: it might mean TCP; with transport: nixl-tcp it is", os.environ["UCX_TLS"]
            )
        os.environ["UCX_TLS"] = RDMA
    reasons = []
    for wheel in WHEELS:
        try:
            library = importlib.import_module(wheel)
        except ImportError as error:
            reasons.append(str(error))
            continue
        log = logging.getLogger("nixl")
        log.handlers.clear()  # it would print to stdout
        log.propagate = True
        return library
    raise _unusable(f"it is not installed ({reasons[0]})", "pip install 'kvtally[nixl]', or use transport: tcp.")


def _unusable(why: str, remedy: str) -> ConfigError:
    return ConfigError(f"NIXL cannot be used here: {why}", remedy=remedy, code="KV-106")
