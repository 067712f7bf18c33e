"""An engine behind the router, as people write it: `http://10.0.0.7:8000,store=tcp://10.0.0.7:7400`. Pure.

Owns the one reader of that text. `router.fleet` decides what to do with an instance.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec

BOOTSTRAP_PORT = 8998  # where vLLM's MooncakeConnector answers on a prefill instance, unless told otherwise


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server: where it answers, and the store its connector uses."""

    url: str  # without a trailing slash
    store: str  # address, as `connection.endpoint` reads it
    bootstrap: str  # URL of a Mooncake prefill instance's bootstrap server; other flavours do not use it

    @property
    def name(self) -> str:
        """Host, port and path: how people, headers and metrics name it."""
        return self.url.partition("://")[2]

    def __str__(self) -> str:
        """The form that `parse_instance` reads. Names the bootstrap server only if it is not the usual one."""
        is_usual = self.bootstrap == _bootstrap_beside(_split_url(self.url))
        return f"{self.url},store={self.store}{'' if is_usual else f',bootstrap={self.bootstrap}'}"


def parse_instance(text: str, *, default_store: str) -> Instance:
    """Read `URL[,store=ADDRESS][,bootstrap=URL]`. Raises ValueError, which says what is wrong."""
    url, *options = text.split(",")
    parts = _split_url(url)
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("store", "bootstrap") or not equals or not value or name in given:
            raise ValueError(f"{option!r} is not store=ADDRESS or bootstrap=URL")
        given[name] = value
    bootstrap = given.get("bootstrap", _bootstrap_beside(parts))
    _split_url(bootstrap)
    return Instance(url=url.rstrip("/"), store=given.get("store", default_store), bootstrap=bootstrap.rstrip("/"))


def _bootstrap_beside(parts: SplitResult) -> str:
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"http://{host}:{BOOTSTRAP_PORT}"


def _split_url(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    if parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r} has more than scheme, host, port and path")
    parts.port  # noqa: B018 - raises ValueError if the port is not a number
    return parts
