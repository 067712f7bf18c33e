"""Sizes and addresses as people write them, and text from peers made safe to print. Pure; used everywhere."""

from __future__ import annotations

import ipaddress
import re
from fractions import Fraction
from typing import NamedTuple

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
LAST_PORT = 65_535
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read `8GiB` or `8G` (1024-based), `500 MB` (1000-based) or a number of bytes. Raises ValueError for the rest."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size")
    return int(Fraction(match[1]) * factor)  # exact: a float would round a large count of bytes


def human_size(size_bytes: int) -> str:
    """The shortest form with one decimal that `parse_size` reads: 8GiB, 1.5GiB, 512B."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f}".removesuffix(".0") + units[0]


def printable(text: str) -> str:
    """Text from a peer, with control characters replaced: no escape sequence may reach the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


class Address(NamedTuple):
    host: str
    port: int


def split_address(text: str) -> Address:
    """Split `127.0.0.1:7400`, `name:7400` or `[::1]:7400`. Raises ValueError, which says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError("it needs a host and a port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host goes in brackets")
    if not (port.isascii() and port.isdigit() and int(port) <= LAST_PORT):
        raise ValueError(f"{port!r} is not a port")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
