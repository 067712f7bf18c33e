"""Headers: which ones pass through the router in either direction, and which ones it adds. Pure."""

from __future__ import annotations

from multidict import CIMultiDict, MultiMapping

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
# Headers with which clients of various routers choose an instance or a rank.
CHOOSING = frozenset(
    {
        *("x-data-parallel-rank", "x-prefiller-url", "x-prefiller-host-port", "x-decoder-host-port"),
        *("x-gateway-destination-endpoint", "x-prefill-instance", "x-decode-instance"),
    }
)
# The router sets these itself: it writes the body anew, and wants answers that it need not unpack.
_OWN = frozenset({"host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id"})
_DROPPED = HOP_BY_HOP | CHOOSING | _OWN
PREFIX = "x-kvtally-"


def for_engine(headers: MultiMapping[str], *, ticket: str, tenant_header: str) -> CIMultiDict[str]:
    """The headers that an engine gets."""
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
    """The names of headers with which this client tries to choose instances."""
    return [name for name in headers if name.lower() in CHOOSING or name.lower().startswith(PREFIX)]


def for_client(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """The engine's headers that a client gets."""
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
