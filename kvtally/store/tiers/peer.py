"""Other machines' stores as a source of objects: their bytes, pulled straight into the arena.

    store ──ReadJob with a place──▶ mover ──pull──▶ PeerTier ──Pull──▶ the other store's bulk port ──bytes──▶ arena

Owns connections to bulk ports: made when needed, kept while nobody uses them, never more than there are reader threads
for each store. It writes, removes and finds nothing: what others hold is theirs, and is asked for over control links
(`store.dial`, which also knows where their bulk ports are).

With `transport: nixl` the other store says where the object lies, keeps it there, and `nixl` reads it.

A store that failed is left alone for a moment: reads of it that wait in the mover's queue fail at once, so a store that
was stopped costs one timeout, not one for each object.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import structs

from kvtally.dialling import check_proof, prepare
from kvtally.endpoint import Endpoint, answer_greeting
from kvtally.errors import IncompatibleError, TierError, TransportError
from kvtally.store.stream import PART_BYTES, Stream, parts_of
from kvtally.store.tiers.base import READERS, ObjectRecord, PeerPlace
from kvtally.store.tiers.nixl import Nixl
from kvtally.wire.auth import NONCE_BYTES
from kvtally.wire.bulk import HEADER_BYTES, MOST_PIECES_BYTES, Header, PullStatus, unpack_pieces
from kvtally.wire.frames import encode, reply_reader
from kvtally.wire.limits import Limits
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting, Hello, Pull, Pulled, Refused, Reply, Welcome

CONNECT_S = 0.5  # to reach the port, and again to agree on TLS
STALL_S = 1.0  # a store that sends nothing for this long is lost
PAUSE_S = 1.0  # how long a lost store is left alone
MOST_IDLE = 64  # connections that nobody uses, to all stores together


class PeerTier:
    """A `PeerSource`. `endpoint_of` knows the bulk port of a store to which there is a control link. With `nixl`, bytes
    are read by it and in no other way."""

    name = "peers"
    capacity_bytes: int | None = None
    readers = READERS

    def __init__(self, endpoint_of: Callable[[str], Endpoint | None], nixl: Nixl | None = None) -> None:
        self._endpoint_of = endpoint_of
        self._nixl = nixl
        self._idle: list[_Connection] = []  # the one used last comes last
        self._used: set[_Connection] = set()
        self._lost: dict[str, tuple[Endpoint, float]] = {}  # address -> what was lost, and until when it is left alone
        self._is_closed = False
        self._lock = threading.Lock()  # guards the four above

    def pull(
        self,
        place: PeerPlace,
        record: ObjectRecord,
        target: Sequence[memoryview],
        landed: Callable[[memoryview], None],
    ) -> None:
        endpoint = self._endpoint_of(place.address)
        if endpoint is None:
            raise _lost(place.address, "there is no connection to it")
        self._check_pause(endpoint)
        request = Pull(0, place.lease, place.index, record.group, record.rank)
        try:
            with self._connection(endpoint, request) as connection:
                connection.receive(record.length_bytes, target, landed)
        except TierError as error:
            if error.code == "KV-604":
                self._leave_alone(endpoint)
            raise
        except (OSError, TransportError, IncompatibleError) as error:
            self._leave_alone(endpoint)
            raise _lost(place.address, str(error)) from error

    def close(self) -> None:
        """Close every connection. A pull that is under way ends at once."""
        with self._lock:
            self._is_closed = True
            for connection in self._used:
                connection.stream.interrupt()
            for connection in self._idle:
                connection.stream.close()
            self._idle.clear()

    # ---- connections

    @contextmanager
    def _connection(self, endpoint: Endpoint, request: Pull) -> Iterator[_Connection]:
        """A connection on which this was asked for and answered. It is kept if all went well, and closed otherwise."""
        connection = self._asked(endpoint, request)
        is_whole = False
        try:
            yield connection
            is_whole = True
        except TierError as error:
            is_whole = error.code != "KV-604"  # the store said no, and nothing else
            raise
        finally:
            self._give_back(connection, is_whole)

    def _asked(self, endpoint: Endpoint, request: Pull) -> _Connection:
        """A kept connection may have been closed by the other end just now. That is no loss: there is a new one."""
        while (kept := self._take(endpoint)) is not None:
            try:
                kept.ask(request)
            except ConnectionError:
                self._give_back(kept, False)
                continue
            except OSError:
                self._give_back(kept, False)
                raise
            return kept
        fresh = self._connect(endpoint)
        try:
            fresh.shake_hands()
            fresh.ask(request)
        except (OSError, TransportError, IncompatibleError):
            self._give_back(fresh, False)
            raise
        return fresh

    def _take(self, endpoint: Endpoint) -> _Connection | None:
        with self._lock:
            for connection in reversed(self._idle):
                if connection.endpoint is endpoint:
                    self._idle.remove(connection)
                    if connection.stream.is_quiet():
                        self._used.add(connection)
                        return connection
                    connection.stream.close()
            return None

    def _connect(self, endpoint: Endpoint) -> _Connection:
        connection = _Connection(endpoint, self._nixl)
        with self._lock:
            if not self._is_closed:
                self._used.add(connection)
                return connection
        connection.stream.close()
        raise ConnectionAbortedError("this store is stopping")

    def _give_back(self, connection: _Connection, is_whole: bool) -> None:
        with self._lock:
            self._used.discard(connection)
            if not is_whole or self._is_closed:
                connection.stream.close()
                return
            self._idle.append(connection)
            stale = [each for each in self._idle if self._endpoint_of(each.endpoint.address) is not each.endpoint]
            for each in stale or self._idle[:-MOST_IDLE]:
                self._idle.remove(each)
                each.stream.close()

    # ---- stores that were lost

    def _check_pause(self, endpoint: Endpoint) -> None:
        with self._lock:
            lost, until_s = self._lost.get(endpoint.address, (None, 0.0))
            if lost is endpoint and time.monotonic() < until_s:
                raise _lost(endpoint.address, "it failed a moment ago")

    def _leave_alone(self, endpoint: Endpoint) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._lost = {address: known for address, known in self._lost.items() if known[1] > now_s}
            self._lost[endpoint.address] = endpoint, now_s + PAUSE_S


class _Connection:
    """A connection to a bulk port. After any error but a refused pull, close it."""

    def __init__(self, endpoint: Endpoint, nixl: Nixl | None) -> None:
        """Connect, and agree on TLS. Raises OSError."""
        self.endpoint = endpoint
        self._nixl = nixl
        self._card = b""
        self._last_id = 0
        self._header = Header(0, 0, 0)
        ((family, target),) = endpoint.targets
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            if isinstance(target, tuple):
                prepare(connection, endpoint.source, target)
            connection.connect(target)
            if endpoint.tls is not None:
                connection = endpoint.tls.wrap_socket(connection, server_hostname=endpoint.host)
            self.stream = Stream(connection)
        except OSError:
            connection.close()
            raise

    def shake_hands(self) -> None:
        """Prove the token, and have the store prove it. Raises OSError, TransportError or IncompatibleError."""
        reader = reply_reader(Limits().frame_bytes)
        buffer = memoryview(bytearray(PART_BYTES))

        def next_reply() -> Reply:
            while not (replies := reader.take(1)):
                count = self.stream.receive(buffer, STALL_S)
                if not count:
                    raise ConnectionResetError("it closed the connection during the handshake")
                reader.push(buffer[:count])
            if isinstance(replies[0], Refused):
                refused = replies[0]
                raise IncompatibleError(refused.message, remedy=refused.remedy, code=refused.code)
            return replies[0]

        greeting = next_reply()
        if not isinstance(greeting, Greeting):
            raise _unexpected(greeting)
        answer = answer_greeting(self.endpoint, greeting, token_remedy="Give both stores the same token file.")
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = Hello(1, PROTOCOL_VERSION, "store", proof=answer, peer=True, nonce=nonce)
        self.stream.send([encode(hello)], STALL_S)
        welcome = next_reply()
        if not isinstance(welcome, Welcome):
            raise _unexpected(welcome)
        check_proof(self.endpoint, hello, welcome)
        self._card = welcome.card
        if self._nixl is not None and not welcome.card:
            raise IncompatibleError(
                "it does not offer NIXL", remedy="Set transport: nixl for that store, too.", code="KV-200"
            )

    def ask(self, request: Pull) -> None:
        """Ask for an object, and wait for the header of the answer. Raises OSError."""
        self._last_id += 1
        pull = structs.replace(request, id=self._last_id, in_place=self._nixl is not None)
        self.stream.send([encode(pull)], STALL_S)
        self._header = self._next_header()

    def _next_header(self) -> Header:
        header = memoryview(bytearray(HEADER_BYTES))
        self.stream.fill(header, STALL_S)
        return Header.unpack(header)

    def receive(self, length_bytes: int, target: Sequence[memoryview], landed: Callable[[memoryview], None]) -> None:
        """Receive what was asked for. Raises TierError if the answer is another one, OSError if it breaks off."""
        address, header = self.endpoint.address, self._header
        if self._nixl is not None and header[1:] == (self._last_id & 0xFFFFFFFF, PullStatus.PLACED):
            self._read_in_place(self._nixl, header.length_bytes, target)
            for view in target:
                landed(view)
        elif self._nixl is None and header == Header(length_bytes, self._last_id & 0xFFFFFFFF, PullStatus.SENT):
            for view in target:
                for part in parts_of(view):
                    self.stream.fill(part, STALL_S)
                    landed(part)
        elif header == Header(0, self._last_id & 0xFFFFFFFF, PullStatus.GONE):
            raise TierError(
                f"the store at {address} no longer holds this object for us",
                remedy="Expected when its lease ended; the object is a miss.",
                code="KV-603",
            )
        elif header == Header(0, self._last_id & 0xFFFFFFFF, PullStatus.BUSY):
            raise TierError(
                f"the store at {address} has no room for one more send",
                remedy="Nothing is wrong; if it recurs, give that store more memory.",
                code="KV-605",
            )
        else:
            raise _lost(address, f"its answer to a pull of {length_bytes} bytes does not fit ({header})")

    def _read_in_place(self, nixl: Nixl, size_bytes: int, target: Sequence[memoryview]) -> None:
        """Read an object where the other store keeps it for us. Bytes count only if that store says afterwards that it
        has kept them: if it could not wait, other bytes may have come there."""
        if size_bytes > MOST_PIECES_BYTES:
            raise ConnectionError(f"{size_bytes} bytes are too many to say where an object lies")
        data = memoryview(bytearray(size_bytes))
        self.stream.fill(data, STALL_S)
        try:
            pieces = unpack_pieces(data)
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        nixl.read(self._card, pieces, target)
        self.stream.send([encode(Pulled(self._last_id))], STALL_S)
        header = self._next_header()
        if header != Header(0, self._last_id & 0xFFFFFFFF, PullStatus.SENT):
            raise ConnectionError(f"it did not keep an object where it was ({header})")


def _unexpected(reply: Reply) -> TransportError:
    return TransportError(
        f"{type(reply).__name__} came in the handshake",
        remedy="What answers there is no store's bulk port.",
        code="KV-503",
    )


def _lost(address: str, why: str) -> TierError:
    return TierError(
        f"the store at {address} is lost: {why}",
        remedy="Look at that store and at the network between the two; what it holds is computed meanwhile.",
        code="KV-604",
    )
