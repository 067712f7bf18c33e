"""Settings: the one schema, and the only reader of settings files and of the environment.

    defaults < file (--config, else $KVTALLY_CONFIG, else ./kvtally.yaml) < KVTALLY_STORE__MEMORY=8GiB < --memory 8GiB

`load` collects what was given and where; `Settings.store`, `connector` and `router` read and check it. Everything wrong
is a `ConfigError` that names the setting, where it was given and what would be right. Which settings there are, and
their descriptions, is the table in `settings`; bounds of the protocol are not settings, they live in `wire.limits`.
Neighbours: `cli` (left), `store.server` (right). No state, no threads.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtally.config.directories import runtime_directory, state_directory
from kvtally.config.instances import Instance, parse_instance
from kvtally.config.sizes import available_memory_bytes, disk_total_bytes, disk_usable_bytes
from kvtally.config.table import FLAVOURS, SECTIONS, SETTINGS, SHORTEST_TOKEN
from kvtally.config.units import human_size, is_loopback, parse_size, split_address
from kvtally.config.yaml_file import read_text, read_yaml
from kvtally.errors import ConfigError
from kvtally.wire.limits import KIB, MIB

SMALLEST_BYTES = 16 * MIB  # of an arena or a disk tier: below that not one object of a large model fits
SMALLEST_READ_BYTES_S = 64 * KIB
SMALLEST_BODY_BYTES = 1024
LONGEST_SOCKET_PATH_BYTES = 107  # sockaddr_un holds 108, with the closing zero
DEFAULT_FILE = "kvtally.yaml"
FILE_VARIABLE = "KVTALLY_CONFIG"
HIDDEN = "(hidden)"
EXTRA = "kv_connector_extra_config"
CURRENT = Path()  # the current directory, asked for only where a path is relative: it may be gone


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store runs with: every path absolute, every size in bytes, every check passed. Empty text: none."""

    socket: str
    memory_bytes: int
    disk: str = ""
    disk_bytes: int = 0
    disk_read_bytes_s: int = 0  # 0: no limit
    verify_reads: bool = True
    tcp: str = ""
    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    admin: str = ""

    def __repr__(self) -> str:
        shown = {**msgspec.structs.asdict(self), "token": HIDDEN if self.token else ""}
        return f"StoreConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the connector inside an engine runs with."""

    store: str
    autostart: bool = True
    wait_ms: int = 2000
    prefetch: bool = True
    always_load: bool = False
    on_unsupported: str = "refuse"
    allow_untested: bool = False
    model_identity: str = ""
    on_reset: str = "part"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router runs with."""

    listen: str = "127.0.0.1:8080"
    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    flavour: str = "plain"
    strict: bool = False
    prefill_from_tokens: int = 64
    receipt_wait_ms: int = 1_000
    timeout_s: int = 300
    max_body_bytes: int = 32 * MIB
    tenant_header: str = ""
    salt_file: str = ""
    store_ca: str = ""
    token: str = ""  # store.token: opens TCP stores, and the router's calls that change something

    def __repr__(self) -> str:
        return f"RouterConfig({self.flavour}, {len(self.prefill)} prefill, {len(self.decode)} decode, {self.listen})"


class Origin(StrEnum):
    """Where a value comes from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    FLAG = "flag"


class Given(NamedTuple):
    """A value as somebody wrote it, unread."""

    raw: object
    origin: Origin
    where: str  # for messages: the file, the variable or the flag
    base: Path  # what a relative path is relative to: the file's directory, else the current one


class Shown(NamedTuple):
    """One line of `kvtally config show`."""

    key: str
    value: str | int | bool
    origin: Origin
    where: str


def load(
    *,
    file: str | None = None,
    flags: Mapping[str, str | bool | None] | None = None,
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    place: str = "",
    is_for_here: bool = True,
) -> Settings:
    """Collect what file, environment, an engine's `kv_connector_extra_config` (`extra`) and flags give.

    `flags` go by key (`store.memory`); None means not given. `place` is where `extra` and `flags` really stand. Unless
    the settings are for here, nobody asks what this machine has: memory, room on disk, files.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Given] = {}
    path = _find_file(file, environ)
    if path is not None:
        given |= _from_file(path)
    given |= _from_environment(environ)
    for name, value in (extra or {}).items():
        if f"connector.{name}" not in SETTINGS:
            raise unknown(f"setting {name!r} in {place or EXTRA}", name, _names("connector"))
        given[f"connector.{name}"] = Given(value, Origin.ENGINE, place or EXTRA, CURRENT)
    for key, raw in (flags or {}).items():
        if raw is not None:
            flag = SETTINGS[key].flag.replace("--", "--no-" if raw is False else "--", 1)
            given[key] = Given(raw, Origin.FLAG, place or flag, CURRENT)
    return Settings(given, environ, path, is_for_here)


class Settings:
    """What was given, by key, and the readers that turn it into values.

    A reader runs only when its value is asked for: `kvtally stat` finds its socket where the rest would not work.
    """

    def __init__(
        self, given: Mapping[str, Given], environ: Mapping[str, str], file: Path | None, is_for_here: bool
    ) -> None:
        self._given = given
        self._environ = environ
        self._is_for_here = is_for_here
        self.file = file

    def store(self) -> StoreConfig:
        memory_bytes = self._memory_bytes()
        disk = self._path("store.disk")
        config = StoreConfig(
            socket=self.socket(),
            memory_bytes=memory_bytes,
            disk=disk,
            disk_bytes=self._disk_bytes(disk, memory_bytes),
            disk_read_bytes_s=self._disk_read_bytes_s(),
            verify_reads=self._switch("store.verify_reads", default=True),
            tcp=self._address("store.tcp"),
            token=self._token(),
            tls_cert=self._readable_path("store.tls_cert"),
            tls_key=self._readable_path("store.tls_key"),
            admin=self._admin(),
        )
        if config.tcp and not config.token:
            raise _wrong(
                f"store.tcp = {config.tcp} has no token: anybody on the network could use the store",
                f"Write a secret of {SHORTEST_TOKEN} characters or more into a file of mode 0600 and give it as "
                "--token-file FILE, or leave tcp out.",
            )
        if bool(config.tls_cert) != bool(config.tls_key):
            raise _wrong("only one of store.tls_cert and store.tls_key is given", "Give both, or neither.")
        return config

    def connector(self) -> ConnectorConfig:
        return ConnectorConfig(
            store=self._socket_path("connector.store") or self.socket(),
            autostart=self._switch("connector.autostart", default=True),
            wait_ms=self._number("connector.wait_ms", default=2000, most=600_000),
            prefetch=self._switch("connector.prefetch", default=True),
            always_load=self._switch("connector.always_load", default=False),
            on_unsupported=self._choice("connector.on_unsupported", ("refuse", "serve")),
            allow_untested=self._switch("connector.allow_untested", default=False),
            model_identity=self._plain("connector.model_identity"),
            on_reset=self._choice("connector.on_reset", ("part", "keep", "forget")),
        )

    def router(self) -> RouterConfig:
        prefill = self._instances("router.prefill")
        config = RouterConfig(
            listen=self._address("router.listen") or "127.0.0.1:8080",
            prefill=prefill,
            decode=self._instances("router.decode"),
            flavour=self._flavour(has_prefill=bool(prefill)),
            strict=self._switch("router.strict", default=False),
            prefill_from_tokens=self._number("router.prefill_from", default=64, most=1 << 30),
            receipt_wait_ms=self._number("router.receipt_wait", default=1_000, most=60_000),
            timeout_s=self._number("router.timeout", default=300, least=1, most=86_400),
            max_body_bytes=self._body_bytes(),
            tenant_header=self._header("router.tenant_header"),
            salt_file=self._path("router.salt_file") or str(state_directory(self._environ) / "salt"),
            store_ca=self._readable_path("router.store_ca"),
            token=self._token(),
        )
        if config.strict and config.flavour not in ("kvtally", "plain"):
            raise _wrong(
                f"router.strict cannot be kept with the flavour {config.flavour}, which gives no proof of reuse",
                "Use the flavour kvtally, or leave strict out: responses then say `missing`.",
            )
        return config

    def socket(self) -> str:
        path = self._socket_path("store.socket") or _default_socket(self._environ)
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH_BYTES:
            raise _unusable(
                f"the socket path {path} is longer than the {LONGEST_SOCKET_PATH_BYTES} bytes the system allows",
                "Choose a shorter one, for example --socket /run/kvtally/store.sock.",
            )
        return path

    def shown(self) -> list[Shown]:
        """Every setting with its value and origin, secrets hidden."""
        sections = {"store": self.store(), "connector": self.connector(), "router": self.router()}
        values = {name: msgspec.structs.asdict(section) for name, section in sections.items()}
        rows = []
        for key, setting in SETTINGS.items():
            given = self._given.get(key)
            value = values[setting.section][setting.field or setting.name]
            if key == "store.token_file":
                value = self._path(key)
            elif key == "store.token":
                value = HIDDEN if given else ""
            elif isinstance(value, tuple):
                value = " ".join(map(str, value))
            rows.append(Shown(key, value, given.origin if given else Origin.DEFAULT, given.where if given else ""))
        return rows

    def _memory_bytes(self) -> int:
        limit_bytes = available_memory_bytes()
        given = self._given.get("store.memory")
        if given is None:
            return max(limit_bytes // 4 // MIB * MIB, SMALLEST_BYTES)
        size_bytes = _size("store.memory", given)
        if self._is_for_here and size_bytes > limit_bytes:
            raise _unusable(
                f"{_told('store.memory', given)} is more than the {human_size(limit_bytes)} of memory here",
                f"Leave the engines their share: a quarter, --memory {human_size(limit_bytes // 4)}, is the default.",
            )
        return size_bytes

    def _disk_bytes(self, disk: str, memory_bytes: int) -> int:
        given = self._given.get("store.disk_size")
        if not disk:
            if given:
                raise _wrong(
                    f"{_told('store.disk_size', given)} is given without store.disk",
                    "Name the directory: --disk DIR.",
                )
            return 0
        if not self._is_for_here:
            return _size("store.disk_size", given) if given else 0
        directory = Path(disk)
        try:
            total_bytes = disk_total_bytes(directory)
            usable_bytes = disk_usable_bytes(directory) if given is None else total_bytes
        except OSError as error:
            raise ConfigError(
                f"the disk directory {disk} cannot be used: {error.strerror}",
                remedy="Give a directory that this user may write to: --disk DIR.",
                code="KV-103",
            ) from error
        if given is None:
            return _default_disk_bytes(disk, memory_bytes, usable_bytes)
        size_bytes = _size("store.disk_size", given)
        if size_bytes > total_bytes:
            raise _unusable(
                f"{_told('store.disk_size', given)} is more than {disk} can ever hold, {human_size(total_bytes)}",
                "Give a size that fits, or leave it out: the default looks at the free space.",
            )
        return size_bytes

    def _disk_read_bytes_s(self) -> int:
        given = self._given.get("store.disk_read_limit")
        return _size("store.disk_read_limit", given, least_bytes=SMALLEST_READ_BYTES_S) if given is not None else 0

    def _token(self) -> str:
        from_file, plain = self._given.get("store.token_file"), self._given.get("store.token")
        if from_file and plain and from_file.origin is plain.origin:
            raise _wrong("both store.token_file and store.token are given", "Give one: token_file is the safer one.")
        order = list(Origin)
        if plain and (not from_file or order.index(plain.origin) > order.index(from_file.origin)):
            token = _text("store.token", plain)
            if not token:
                return ""
        elif path := self._readable_path("store.token_file"):
            if not self._is_for_here:
                return HIDDEN
            token = read_text(Path(path), "the token file").strip()
        else:
            return ""
        if len(token) < SHORTEST_TOKEN:
            raise _wrong(
                f"the token has {len(token)} characters, too few to be safe",
                f"Use {SHORTEST_TOKEN} or more, for example from: openssl rand -hex 32.",
            )
        return token

    def _admin(self) -> str:
        address = self._address("store.admin")
        if address and not is_loopback(split_address(address).host):
            raise _unusable(
                f"{_told('store.admin', self._given['store.admin'])} is not a loopback address",
                "The admin server speaks plain HTTP: use 127.0.0.1:PORT, and SSH or a proxy from elsewhere.",
            )
        return address

    def _instances(self, key: str) -> tuple[Instance, ...]:
        given = self._given.get(key)
        if given is None:
            return ()
        words = given.raw if isinstance(given.raw, list) else _text(key, given).split()
        try:
            found = [parse_instance(str(word), default_store=self.socket()) for word in words]
        except ValueError as error:
            raise _unusable(
                f"{_told(key, given)} does not name instances: {error}", f"For example {SETTINGS[key].example}."
            ) from error
        if len({instance.url for instance in found}) < len(found):
            raise _wrong(f"{_told(key, given)} names an instance twice", "Name each once.")
        return tuple(found)

    def _flavour(self, *, has_prefill: bool) -> str:
        flavour = self._plain("router.flavour") or ("kvtally" if has_prefill else "plain")
        if flavour not in FLAVOURS:
            raise unknown(f"flavour {flavour!r} (from {self._given['router.flavour'].where})", flavour, FLAVOURS)
        if has_prefill and flavour == "plain":
            raise _wrong("the flavour plain has no prefill, but there are prefill instances", "Leave one of them out.")
        if not has_prefill and flavour != "plain":
            raise _wrong(f"the flavour {flavour} needs prefill instances", "Name them: --prefill URL.")
        return flavour

    def _body_bytes(self) -> int:
        given = self._given.get("router.max_body")
        return 32 * MIB if given is None else _size("router.max_body", given, least_bytes=SMALLEST_BODY_BYTES)

    def _address(self, key: str) -> str:
        given = self._given.get(key)
        text = _text(key, given) if given else ""
        if given and text:
            try:
                split_address(text)
            except ValueError as error:
                raise _unusable(
                    f"{_told(key, given)} is not an address: {error}",
                    f"Write host:port, for example {SETTINGS[key].example}.",
                ) from error
        return text

    def _path(self, key: str, scheme: str = "") -> str:
        given = self._given.get(key)
        text = _text(key, given).removeprefix(scheme) if given else ""
        return os.path.abspath(given.base / os.path.expanduser(text)) if given and text else ""

    def _socket_path(self, key: str) -> str:
        """Engines use shared memory: their store's socket is a path, with or without `unix:`."""
        text = self._plain(key)
        if "://" in text or text.startswith("tcp:"):
            remedy = "Engines share memory with a store on their own machine: give its socket, unix:/path or /path."
            raise _wrong(f"{_told(key, self._given[key])} is not a path", remedy)
        return self._path(key, scheme="unix:")

    def _readable_path(self, key: str) -> str:
        path = self._path(key)
        if path and self._is_for_here and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise _wrong(
                f"{_told(key, self._given[key])} is not a file that can be read",
                "Check the path, its owner and its mode.",
            )
        return path

    def _plain(self, key: str) -> str:
        given = self._given.get(key)
        return _text(key, given) if given else ""

    def _header(self, key: str) -> str:
        """A header's name. Nothing else would ever match, and tenants would share what they must not."""
        name = self._plain(key)
        if name and not _HEADER.fullmatch(name):
            raise _wrong(f"{_told(key, self._given[key])} is not the name of a header", "Write it like X-Tenant.")
        return name

    def _choice(self, key: str, words: tuple[str, ...]) -> str:
        """One of these words; the first is the default."""
        word = self._plain(key) or words[0]
        if word not in words:
            raise _wrong(f"{_told(key, self._given[key])} is not known", f"Write {' or '.join(words)}.")
        return word

    def _number(self, key: str, *, default: int, least: int = 0, most: int) -> int:
        given = self._given.get(key)
        if given is None:
            return default
        text = str(given.raw)
        is_short = text.isdecimal() and len(text) <= len(str(most))  # Python does not read thousands of digits
        if isinstance(given.raw, bool) or not is_short or not least <= int(text) <= most:
            what = f"a whole number from {least} to {most}"
            raise _unusable(f"{_told(key, given)} is not {what}", f"For example {default}.")
        return int(text)

    def _switch(self, key: str, *, default: bool) -> bool:
        given = self._given.get(key)
        if given is None:
            return default
        word = str(given.raw).lower()
        if word not in _SWITCH:
            raise _wrong(f"{_told(key, given)} is neither true nor false", "Write true or false.")
        return _SWITCH[word]


# ---- where settings are given


def _find_file(explicit: str | None, environ: Mapping[str, str]) -> Path | None:
    name = explicit or environ.get(FILE_VARIABLE)
    if name:
        return Path(os.path.expanduser(name)).absolute()
    return Path(DEFAULT_FILE).absolute() if os.path.isfile(DEFAULT_FILE) else None


def _from_file(path: Path) -> dict[str, Given]:
    tree = read_yaml(path, "See examples/store.yaml for the form.")
    given: dict[str, Given] = {}
    for section, settings in _mapping(tree, str(path)).items():
        if section not in SECTIONS:
            raise unknown(f"section {section!r} in {path}", section, SECTIONS)
        for name, raw in _mapping(settings, f"section {section} of {path}").items():
            key = f"{section}.{name}"
            if key not in SETTINGS:
                raise unknown(f"setting {name!r} in section {section} of {path}", name, _names(section))
            if raw is not None:  # `disk:` with nothing behind it says nothing
                given[key] = Given(raw, Origin.FILE, str(path), path.parent)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Variables with a double underscore only: an orchestrator may set others (KVTALLY_PORT for a service so named)."""
    by_variable = {setting.variable: key for key, setting in SETTINGS.items()}
    given: dict[str, Given] = {}
    for variable, raw in environ.items():
        if variable.startswith("KVTALLY_") and "__" in variable:
            if variable not in by_variable:
                raise unknown(f"setting {variable} in the environment", variable, by_variable)
            given[by_variable[variable]] = Given(raw, Origin.ENVIRONMENT, variable, CURRENT)
    return given


def _mapping(tree: object, what: str) -> dict[str, object]:
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{what} holds {_kind(tree)} where settings should be",
            remedy="Write `name: value` lines; see examples/store.yaml.",
            code="KV-105",
        )
    return {str(key): value for key, value in tree.items()}


def _names(section: str) -> list[str]:
    return [setting.name for setting in SETTINGS.values() if setting.section == section]


# ---- readers of one value


_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _text(key: str, given: Given) -> str:
    if not isinstance(given.raw, str):
        raise _wrong(
            f"{_told(key, given)} is {_kind(given.raw)} where text is needed",
            f"Put it in quotes, for example {SETTINGS[key].name}: {SETTINGS[key].example}.",
        )
    return given.raw


def _size(key: str, given: Given, *, least_bytes: int = SMALLEST_BYTES) -> int:
    example = f"Write a size such as {SETTINGS[key].example}, 500 MB or a number of bytes."
    if isinstance(given.raw, bool) or not isinstance(given.raw, int | str):
        raise _unusable(f"{_told(key, given)} is {_kind(given.raw)}, not a size", example)
    try:
        size_bytes = parse_size(str(given.raw))
    except ValueError as error:
        raise _unusable(f"{_told(key, given)} is not a size", example) from error
    if size_bytes < least_bytes:
        raise _unusable(f"{_told(key, given)} is below the smallest that works, {human_size(least_bytes)}", example)
    return size_bytes


def _kind(value: object) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping", str: "text"}
    return kinds.get(type(value), "something else")


def _default_disk_bytes(disk: str, memory_bytes: int, usable_bytes: int) -> int:
    size_bytes = min(10 * memory_bytes, usable_bytes * 8 // 10) // MIB * MIB
    if size_bytes < SMALLEST_BYTES:
        raise _unusable(
            f"{disk} has only {human_size(usable_bytes)} free, too little for a disk tier",
            "Free some space, choose another directory with --disk, or leave the disk tier out.",
        )
    return size_bytes


def _default_socket(environ: Mapping[str, str]) -> str:
    try:
        return str(runtime_directory(environ) / "store.sock")
    except OSError as error:
        raise _unusable(f"a socket has no place by default: {error.strerror}", "Name one: --socket PATH.") from error


# ---- errors


def _told(key: str, given: Given) -> str:
    value = HIDDEN if key == "store.token" else given.raw
    return f"{key} = {value} (from {given.where})"


def _wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-100")


def _unusable(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-102")


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """For a name that is not known: says the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}."
    return ConfigError(f"unknown {what}", remedy=hint, code="KV-101")
