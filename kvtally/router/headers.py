"""Headers: which pass through the router, in either direction, and those that it adds. Pure."""

from __future__ import annotations

from multidict import CIMultiDict, MultiMapping

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
# Headers by which clients of one or another router choose an instance or a rank.
CHOOSING = frozenset(
    {
        *("x-data-parallel-rank", "x-prefiller-url", "x-prefiller-host-port", "x-decoder-host-port"),
        *("x-gateway-destination-endpoint", "x-prefill-instance", "x-decode-instance"),
    }
)
# The router speaks for itself in these: the body is written anew, and no engine's answer needs to be unpacked.
_OWN = frozenset({"host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id"})
_DROPPED = HOP_BY_HOP | CHOOSING | _OWN
PREFIX = "x-kvtally-"


def for_engine(headers: MultiMapping[str], *, ticket: str, tenant_header: str) -> CIMultiDict[str]:
    """What an engine gets of a client's headers."""
    named = _named_by_connection(headers)
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower not in _DROPPED and lower not in named and not lower.startswith(PREFIX):
            passed.add(name, value)
    if tenant_header:
        passed.popall(tenant_header, None)
    passed["X-Request-Id"] = ticket
    passed["Accept-Encoding"] = "identity"
    return passed


def choosing(headers: MultiMapping[str]) -> list[str]:
    """The headers by which a client tries to choose instances."""
    return [name for name in headers if name.lower() in CHOOSING or name.lower().startswith(PREFIX)]


def for_client(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """What a client gets of an engine's headers."""
    named = _named_by_connection(headers)
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower not in HOP_BY_HOP and lower not in named and not lower.startswith(PREFIX):
            passed.add(name, value)
    return passed


def _named_by_connection(headers: MultiMapping[str]) -> frozenset[str]:
    if "Connection" not in headers:
        return frozenset()
    return frozenset(name.strip().lower() for value in headers.getall("Connection") for name in value.split(","))
