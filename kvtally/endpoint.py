"""Where a store is, and whether it is one to talk to: addresses, the owner of its socket, its greeting.

Addresses are `unix:/path`, a plain path, or `tcp://host:port`. A host name is resolved once, when the address is read:
resolving can block, and nothing after that may. Connects to nothing: `client.transport` and, from an event loop,
`dialling` do that.
"""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass, field

from kvtally import __version__
from kvtally.config import LONGEST_SOCKET_PATH_BYTES
from kvtally.config.units import split_address
from kvtally.errors import ConfigError, IncompatibleError
from kvtally.shm import peer_uid
from kvtally.wire.auth import proof
from kvtally.wire.messages import PROTOCOL_VERSION, Greeting

Targets = tuple[tuple[socket.AddressFamily, str | tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a store is, and what it takes to be let in."""

    address: str  # as it was given, for people
    targets: Targets
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    host: str = ""  # empty: on this machine, by its socket's path
    port: int = 0
    source: str = ""  # numeric address to connect from; empty: the system chooses one

    @property
    def shares_memory(self) -> bool:
        return not self.host


def endpoint(address: str, *, token: str = "", ca_file: str = "", must_resolve: bool = True) -> Endpoint:
    """Read an address. Raises ConfigError KV-102 if it cannot work.

    A host name that cannot be resolved is refused, too, unless the caller resolves it again later
    (`must_resolve=False`): the endpoint then has no targets.
    """
    if not address.startswith("tcp://"):
        path = address.removeprefix("unix:")
        if not path or "://" in path or "\0" in path:
            raise _bad_address(address, "it is neither a path nor tcp://host:port")
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH_BYTES:
            raise _bad_address(address, f"a socket's path has at most {LONGEST_SOCKET_PATH_BYTES} bytes")
        return Endpoint(address=address, targets=((socket.AF_UNIX, path),))
    targets: Targets = ()
    try:
        host, port = split_address(address.removeprefix("tcp://"))
        tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        targets = tuple((family, target) for family, _, _, _, target in found)
    except socket.gaierror as error:
        if must_resolve:
            raise _bad_address(address, str(error)) from error
    except (ValueError, OSError) as error:  # malformed, or an authority file that cannot be read
        raise _bad_address(address, str(error)) from error
    return Endpoint(address=address, targets=targets, token=token, tls=tls, host=host, port=port)


def check_owner(connection: socket.socket, address: str, *, remedy: str) -> None:
    """Raise IncompatibleError unless this user, or root, owns the store. It gives us the bytes that an engine reads,
    and says what was reused."""
    uid = peer_uid(connection)
    if uid not in (0, os.geteuid()):
        raise IncompatibleError(f"the store at {address} belongs to user {uid}", remedy=remedy, code="KV-205")


def answer_greeting(endpoint: Endpoint, greeting: Greeting, *, token_remedy: str) -> bytes:
    """The proof that a Hello answers this greeting with. Raises IncompatibleError where the two do not fit."""
    if greeting.protocol != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"the store (kvtally {greeting.version}) speaks protocol {greeting.protocol}, "
            f"this client (kvtally {__version__}) {PROTOCOL_VERSION}",
            remedy="Install the same version on both sides, and restart the older one.",
            code="KV-201",
        )
    if greeting.nonce and not endpoint.token:
        raise IncompatibleError(f"the store at {endpoint.address} asks for a token", remedy=token_remedy, code="KV-205")
    return proof(endpoint.token, greeting.nonce) if greeting.nonce else b""


def _bad_address(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"the store's address {address!r} cannot be used: {why}",
        remedy="Give unix:/path/to/store.sock or tcp://host:port.",
        code="KV-102",
    )
