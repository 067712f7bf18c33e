"""Other stores that this one may pull from and that may pull from it: an allow-list of addresses, names and networks.

Owns the one reader of that list, and who is on it. Pure. Whom to ask comes with each request, from clients and routers:
without this list, everybody who can send a request could have the store connect to any address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from kvtally.config.units import split_address

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Host = ipaddress.IPv4Address | ipaddress.IPv6Address
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE)
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)", re.IGNORECASE)
LONGEST_NAME = 253
SCHEME = "tcp://"


class PeerList:
    """Which stores are peers. `own` is this store's address: it never asks itself."""

    def __init__(self, entries: Iterable[str] = (), *, own: str = "") -> None:
        """Raises ValueError, which says what is wrong."""
        self.names: set[str] = set()
        self._networks: list[_Network] = []
        self._own = own
        for entry in entries:
            network = parse_peer(entry)
            if isinstance(network, str):
                self.names.add(network)
            else:
                self._networks.append(network)

    def __bool__(self) -> bool:
        return bool(self.names or self._networks)

    def may_ask(self, address: str) -> bool:
        """Whether to connect to this address, `tcp://host:port`, when a request names it."""
        if not address.startswith(SCHEME) or address == self._own:
            return False
        try:
            host, port = split_address(address.removeprefix(SCHEME))
        except ValueError:
            return False
        return port > 0 and (_name(host) in self.names or self.has(host))

    def has(self, host: str) -> bool:
        """Whether a numeric address lies in one of the networks, and is one machine's."""
        try:
            found = _host(host)
        except ValueError:
            return False
        if found.is_unspecified or found.is_multicast:
            return False
        return any(found in network for network in self._networks)


def parse_peer(text: str) -> _Network | str:
    """A network (of one address, perhaps), or a host's name. Raises ValueError, which says what is wrong."""
    try:
        return ipaddress.ip_network(_host(text))
    except ValueError:
        pass
    if "/" in text:
        try:
            return ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not a network: {error}") from error
    name = _name(text)
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME or _ENDS_IN_A_NUMBER.fullmatch(name):
        raise ValueError(f"{text!r} is neither an address, nor a network, nor a host's name (a port does not belong)")
    return name


def plain_host(host: str) -> str:
    """A numeric address as it is usually written. A socket for both versions writes IPv4 ones as IPv6."""
    try:
        return str(_host(host))
    except ValueError:
        return host


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of this machine: others cannot connect to it."""
    try:
        return _host(host).is_unspecified
    except ValueError:
        return False


def _host(text: str) -> _Host:
    host = ipaddress.ip_address(text)
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        return host.ipv4_mapped  # how a socket for both versions sees an IPv4 peer
    return host


def _name(host: str) -> str:
    return host.lower().removesuffix(".")
