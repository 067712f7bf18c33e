"""The address of a pool: which server, and how it is used. Read from `store.remote` and by `kvtally pool`. Pure.

    valkey://kv.internal:6379/0?ttl=2d            also redis://; valkeys:// and rediss:// with TLS; ?cluster=1
    s3://kv-cache/prod?endpoint=https://minio:9000   also gs://BUCKET/PREFIX, az://CONTAINER/PREFIX
    mooncake://10.0.0.2:50051?protocol=rdma&insecure=1

No secret is ever part of it: addresses stand in process lists, logs and `kvtally config show`. So messages here name
what is wrong and never repeat what was written, which may hold a secret by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from kvtally.config.units import parse_size
from kvtally.errors import ConfigError

T = TypeVar("T")

_DURATION = re.compile(r"(\d{1,9})([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
DEFAULT_PREFIX = "kvt1"


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's address, taken apart and checked."""

    kind: str  # valkey, s3, gs, az, mooncake: which engine
    host: str = ""
    port: int = 0
    bucket: str = ""
    database: int = 0
    prefix: str = DEFAULT_PREFIX
    is_tls: bool = False
    is_cluster: bool = False
    ttl_s: int = 86_400
    ca: str = ""  # file with the certificate authority of the server
    endpoint: str = ""
    region: str = ""
    account: str = ""  # of Azure
    protocol: str = "tcp"  # of Mooncake
    device: str = ""  # of Mooncake: RDMA devices
    advertise: str = ""  # of Mooncake: this machine's address there
    segment_bytes: int = 0  # of Mooncake: memory that this store adds to the pool
    metrics_port: int = 9003  # of Mooncake: the master's HTTP port

    def __str__(self) -> str:
        """For messages: enough to recognise it."""
        if self.bucket:
            return f"{self.kind}://{self.bucket}/{self.prefix}"
        scheme = "valkeys" if self.kind == "valkey" and self.is_tls else self.kind
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


class _Scheme(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    is_tls: bool = False
    port: int = 0  # 0: names a bucket, no host
    options: tuple[str, ...]


_VALKEY = ("cluster", "ttl", "prefix", "ca")
_S3 = ("endpoint", "region", "ca")
SCHEMES = {
    "valkey": _Scheme(kind="valkey", port=6379, options=_VALKEY),
    "redis": _Scheme(kind="valkey", port=6379, options=_VALKEY),
    "valkeys": _Scheme(kind="valkey", port=6379, is_tls=True, options=_VALKEY),
    "rediss": _Scheme(kind="valkey", port=6379, is_tls=True, options=_VALKEY),
    "s3": _Scheme(kind="s3", options=_S3),
    "gs": _Scheme(kind="gs", options=()),
    "az": _Scheme(kind="az", options=("account", "endpoint", "ca")),
    "mooncake": _Scheme(
        kind="mooncake",
        port=50051,
        options=("protocol", "device", "advertise", "segment", "metrics", "prefix", "insecure"),
    ),
}


def parse_remote(text: str, where: str = "store.remote") -> Remote:
    """Read a pool's address. Raises ConfigError; `where` says in its message where the address stands."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise _wrong(f"{where} is not a URL", "Write it like valkey://HOST:6379 or s3://BUCKET/PREFIX.") from error
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        named = f"the scheme {parts.scheme}" if parts.scheme.isalnum() and "://" in text else "no scheme that is known"
        raise _wrong(f"{where} has {named}, which is no pool", f"Known: {', '.join(f'{name}://' for name in SCHEMES)}.")
    if "@" in parts.netloc:
        raise _wrong(
            f"{where} has a user or password in it, where everybody on this machine could read them",
            "Give store.remote_user and store.remote_password_file (kvtally pool: --user, --password-file) instead.",
        )
    if parts.fragment:
        raise _wrong(f"{where} has a # in it", "Leave out the # and what follows it.")
    options: dict[str, str] = {}
    for name, value in given:
        if name not in scheme.options:
            known = ", ".join(scheme.options) or "none"
            raise _wrong(
                f"{where} has an unknown parameter {name[:40]!r}", f"Parameters of {parts.scheme}://: {known}."
            )
        if name in options:
            raise _wrong(f"{where} has the parameter {name} twice", "Leave one of them out.")
        options[name] = value
    if not host:
        raise _wrong(f"{where} names no {'host' if scheme.port else 'bucket'}", "Write it after the //.")
    if scheme.port:
        return _server(scheme, host, port, parts.path, options, where)
    return _bucket(scheme, parts.netloc, parts.path, options, where)


def _server(scheme: _Scheme, host: str, port: int | None, path: str, options: dict[str, str], where: str) -> Remote:
    read = _Options(options, where)
    database = path.strip("/")
    if database and (scheme.kind != "valkey" or not database.isdecimal() or int(database) > 1_000_000):
        what = "its database is not a number" if scheme.kind == "valkey" else "nothing may follow the port"
        raise _wrong(f"{where} has a path that means nothing: {what}", "Leave it out, or choose ?prefix=NAME.")
    is_cluster = read.switch("cluster")
    if is_cluster and int(database or 0):
        raise _wrong(f"{where} names a database of a cluster, which has only 0", "Leave the database out.")
    if scheme.kind == "mooncake" and not read.switch("insecure"):
        raise _wrong(
            f"{where}: Mooncake has no authentication and no encryption; whoever reaches it can read and change it",
            "If its network is private, say so with ?insecure=1; and encrypt with store.remote_key_file.",
        )
    return Remote(
        kind=scheme.kind,
        host=host,
        port=port or scheme.port,
        database=int(database or 0),
        prefix=read.prefix(options.get("prefix", DEFAULT_PREFIX)),
        is_tls=scheme.is_tls,
        is_cluster=is_cluster,
        ttl_s=read.ttl(),
        ca=options.get("ca", ""),
        protocol=read.choice("protocol", ("tcp", "rdma")),
        device=options.get("device", ""),
        advertise=options.get("advertise", ""),
        segment_bytes=read.size("segment"),
        metrics_port=read.port("metrics", "9003"),
    )


def _bucket(scheme: _Scheme, netloc: str, path: str, options: dict[str, str], where: str) -> Remote:
    if not _BUCKET.fullmatch(netloc):
        raise _wrong(
            f"{where} does not begin with the name of a bucket",
            f"Write {scheme.kind}://BUCKET/PREFIX; a server's address goes into ?endpoint=https://HOST:PORT.",
        )
    read = _Options(options, where)
    inner = unquote(path).strip("/")
    return Remote(
        kind=scheme.kind,
        bucket=netloc,
        prefix=read.prefix(inner or DEFAULT_PREFIX),
        ttl_s=0,
        ca=options.get("ca", ""),
        endpoint=read.endpoint(),
        region=options.get("region", ""),
        account=options.get("account", ""),
    )


class _Options:
    """Parameters of an address, read by kind."""

    def __init__(self, options: dict[str, str], where: str) -> None:
        self._options = options
        self._where = where

    def switch(self, name: str) -> bool:
        return self._read(name, "0", {"0": False, "1": True}.get, "Write 0 or 1.")

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        known = {word: word for word in among}
        return self._read(name, among[0], known.get, f"Write {' or '.join(among)}.")

    def size(self, name: str) -> int:
        return self._read(name, "0", _size, "Write a size such as 4GiB.")

    def port(self, name: str, default: str) -> int:
        return self._read(name, default, _port, "Write a port, from 1 to 65535.")

    def ttl(self) -> int:
        return self._read("ttl", "1d", _duration, "Write a time such as 12h or 2d; 0: until the server evicts.")

    def endpoint(self) -> str:
        return self._read("endpoint", "", _endpoint, "Write http://HOST:PORT or https://HOST:PORT.")

    def prefix(self, text: str) -> str:
        if len(text) > 100 or not _PREFIX.fullmatch(text) or ".." in text:
            raise _wrong(f"{self._where} has a prefix that is no name", "Use letters, digits, - _ . and /.")
        return text

    def _read(self, name: str, default: str, read: Callable[[str], T | None], remedy: str) -> T:
        value = read(self._options.get(name, default))
        if value is None:
            raise _wrong(f"{self._where} has a parameter {name} that cannot be read", remedy)
        return value


def _size(text: str) -> int | None:
    try:
        return parse_size(text)
    except ValueError:
        return None


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65_535 else None


def _duration(text: str) -> int | None:
    match = _DURATION.fullmatch(text)
    return int(match[1]) * _SECONDS[match[2]] if match else None


def _endpoint(text: str) -> str | None:
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and not parts.query
        return text.rstrip("/") if is_usable and parts.port != 0 else None
    except ValueError:
        return None


def _wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-102")
