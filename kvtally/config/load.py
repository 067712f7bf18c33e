"""Collects settings from where they are given, and turns them into what a store, a connector or a router runs with.

    defaults < file (--config, else $KVTALLY_CONFIG, else ./kvtally.yaml) < KVTALLY_STORE__MEMORY=8GiB < --memory 8GiB

The only reader of settings files and of the environment. `load` collects what was given and where; `Settings.store`,
`connector` and `router` read it by the kinds in `setting`, and check what depends on other settings or on this machine.
Bounds of the protocol are not settings, they live in `wire.limits`. No state, no threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtally.config.directories import runtime_directory, state_directory
from kvtally.config.instances import Instance
from kvtally.config.peers import is_wildcard
from kvtally.config.remote import Remote, parse_remote
from kvtally.config.setting import HIDDEN, SMALLEST_BYTES, Given, Origin, type_name, unknown, unusable, wrong
from kvtally.config.sizes import available_memory_bytes, disk_total_bytes, disk_usable_bytes
from kvtally.config.table import FLAVOURS, SECTIONS, SETTINGS, SHORTEST_TOKEN
from kvtally.config.units import LAST_PORT, human_size, split_address
from kvtally.config.yaml_file import read_text, read_yaml
from kvtally.errors import ConfigError
from kvtally.wire.limits import MIB

LONGEST_SOCKET_PATH_BYTES = 107  # sockaddr_un holds 108, with the closing zero
DEFAULT_FILE = "kvtally.yaml"
FILE_VARIABLE = "KVTALLY_CONFIG"
EXTRA = "kv_connector_extra_config"
CURRENT = Path()  # the current directory; it may be gone, so it is resolved only for relative paths

Flags = Mapping[str, str | bool | None]  # by key (`store.memory`); None: not given


def _default(key: str) -> Any:
    return SETTINGS[key].kind.default


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store runs with: every path absolute, every size in bytes, every check passed. Empty text: none."""

    socket: str
    memory_bytes: int
    disk: str = ""
    disk_bytes: int = 0
    disk_read_bytes_s: int = _default("store.disk_read_limit")  # 0: no limit
    verify_reads: bool = _default("store.verify_reads")
    tcp: str = ""
    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    peers: tuple[str, ...] = ()
    advertise: str = ""  # with peers: where they find this store's TCP port; a port of 0 is the one that was bound
    bulk: str = ""  # with peers: host and port for KV bytes
    bulk_tls: bool = _default("store.bulk_tls")
    peers_ca: str = ""
    transport: str = _default("store.transport")
    remote: str = ""
    remote_user: str = ""
    remote_password_file: str = ""
    remote_key_file: str = ""
    remote_write_bytes_s: int = _default("store.remote_write_limit")  # 0: no limit
    admin: str = ""

    def __post_init__(self) -> None:
        """With peers, the two addresses that follow from `tcp` unless they are given."""
        if self.peers and self.tcp:
            msgspec.structs.force_setattr(self, "advertise", self.advertise or self.tcp)
            msgspec.structs.force_setattr(self, "bulk", self.bulk or _next_port(self.tcp))

    def __repr__(self) -> str:
        shown = {**msgspec.structs.asdict(self), "token": HIDDEN if self.token else ""}
        return f"StoreConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class PoolConfig(NamedTuple):
    """A pool, for whoever uses it."""

    remote: Remote
    user: str
    password_file: str
    key_file: str


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the connector inside an engine runs with."""

    store: str
    autostart: bool = _default("connector.autostart")
    wait_ms: int = _default("connector.wait_ms")
    prefetch: bool = _default("connector.prefetch")
    always_load: bool = _default("connector.always_load")
    on_unsupported: str = _default("connector.on_unsupported")
    allow_untested: bool = _default("connector.allow_untested")
    model_identity: str = ""
    on_reset: str = _default("connector.on_reset")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router runs with."""

    listen: str = _default("router.listen")
    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    flavour: str = "plain"
    strict: bool = _default("router.strict")
    prefill_from_tokens: int = _default("router.prefill_from")
    receipt_wait_ms: int = _default("router.receipt_wait")
    timeout_s: int = _default("router.timeout")
    max_body_bytes: int = _default("router.max_body")
    tenant_header: str = ""
    salt_file: str = ""
    store_ca: str = ""
    token: str = ""  # store.token: opens TCP stores, and the router's calls that change something

    def __repr__(self) -> str:
        return f"RouterConfig({self.flavour}, {len(self.prefill)} prefill, {len(self.decode)} decode, {self.listen})"


class Shown(NamedTuple):
    """One line of `kvtally config show`."""

    key: str
    value: str | int | bool
    origin: Origin
    where: str


def load(
    *,
    file: str | None = None,
    flags: Flags | None = None,
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    place: str = "",
    is_for_here: bool = True,
) -> Settings:
    """Collect settings from the file, the environment, an engine's `kv_connector_extra_config` (`extra`) and flags.

    `place` is where `extra` and `flags` were really written. Settings that are not for this machine (`is_for_here`) are
    not checked against its memory, disk and files.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Given] = {}
    path = _find_file(file, environ)
    if path is not None:
        given |= _from_file(path)
    given |= _from_environment(environ)
    for name, value in (extra or {}).items():
        key = f"connector.{name}"
        if key not in SETTINGS:
            raise unknown(f"setting {name!r} in {place or EXTRA}", name, _names("connector"))
        given[key] = Given(SETTINGS[key], value, Origin.ENGINE, place or EXTRA, CURRENT)
    for key, raw in (flags or {}).items():
        if raw is not None:
            flag = SETTINGS[key].flag.replace("--", "--no-" if raw is False else "--", 1)
            given[key] = Given(SETTINGS[key], raw, Origin.FLAG, place or flag, CURRENT)
    return Settings(given, environ, path, is_for_here)


class Settings:
    """Settings as they were given, by key, and the configs made from them.

    A value is read only when somebody asks for it: `kvtally stat` finds its socket even if other settings are wrong.
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
        disk = self._read("store.disk")
        config = StoreConfig(
            socket=self.socket(),
            memory_bytes=memory_bytes,
            disk=disk,
            disk_bytes=self._disk_bytes(disk, memory_bytes),
            token=self._token(),
            **self._values("store", besides=("socket", "memory", "disk", "disk_size", "token", "token_file")),
        )
        check_network(config)
        self.pool()
        return config

    def pool(self) -> PoolConfig | None:
        """Where the pool is, and who this store is to it; None if there is none."""
        remote: str = self._read("store.remote")
        values = {name: self._read(f"store.remote_{name}") for name in ("user", "password_file", "key_file")}
        if remote:
            return PoolConfig(remote=parse_remote(remote), **values)
        for name in (*values, "write_limit"):
            if given := self._given.get(f"store.remote_{name}"):
                raise wrong(f"{given} is given without store.remote", "Name the pool: --remote URL.")
        return None

    def connector(self) -> ConnectorConfig:
        store = self._read("connector.store") or self.socket()
        return ConnectorConfig(store=store, **self._values("connector", besides=("store",)))

    def router(self) -> RouterConfig:
        prefill = self._instances("router.prefill")
        config = RouterConfig(
            prefill=prefill,
            decode=self._instances("router.decode"),
            flavour=self._flavour(has_prefill=bool(prefill)),
            salt_file=self._read("router.salt_file") or str(state_directory(self._environ) / "salt"),
            token=self._token(),
            **self._values("router", besides=("prefill", "decode", "flavour", "salt_file")),
        )
        if config.strict and config.flavour not in ("kvtally", "plain"):
            raise wrong(
                f"router.strict cannot be kept with the flavour {config.flavour}, which gives no proof of reuse",
                "Use the flavour kvtally, or leave strict out: responses then say `missing`.",
            )
        return config

    def socket(self) -> str:
        path: str = self._read("store.socket") or _default_socket(self._environ)
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH_BYTES:
            raise unusable(
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
                value = self._read(key)
            elif setting.is_secret:
                value = HIDDEN if given else ""
            elif isinstance(value, tuple):
                value = " ".join(map(str, value))
            rows.append(Shown(key, value, given.origin if given else Origin.DEFAULT, given.where if given else ""))
        return rows

    # ---- values that depend on nothing else

    def _read(self, key: str) -> Any:
        given, kind = self._given.get(key), SETTINGS[key].kind
        return kind.default if given is None else kind.read(given, is_for_here=self._is_for_here)

    def _values(self, section: str, *, besides: tuple[str, ...]) -> dict[str, Any]:
        """The other settings of a section, by their fields."""
        return {
            setting.field or setting.name: self._read(key)
            for key, setting in SETTINGS.items()
            if setting.section == section and setting.name not in besides
        }

    # ---- values that depend on others, or on this machine

    def _memory_bytes(self) -> int:
        limit_bytes = available_memory_bytes()
        size_bytes: int = self._read("store.memory") or max(limit_bytes // 4 // MIB * MIB, SMALLEST_BYTES)
        given = self._given.get("store.memory")
        if given and self._is_for_here and size_bytes > limit_bytes:
            raise unusable(
                f"{given} is more than the {human_size(limit_bytes)} of memory here",
                f"Leave the engines their share: a quarter, --memory {human_size(limit_bytes // 4)}, is the default.",
            )
        return size_bytes

    def _disk_bytes(self, disk: str, memory_bytes: int) -> int:
        given = self._given.get("store.disk_size")
        if not disk:
            if given:
                raise wrong(f"{given} is given without store.disk", "Name the directory: --disk DIR.")
            return 0
        if not self._is_for_here:
            return int(self._read("store.disk_size"))
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
        size_bytes = int(self._read("store.disk_size"))
        if size_bytes > total_bytes:
            raise unusable(
                f"{given} is more than {disk} can ever hold, {human_size(total_bytes)}",
                "Give a size that fits, or leave it out: the default looks at the free space.",
            )
        return size_bytes

    def _token(self) -> str:
        from_file, plain = self._given.get("store.token_file"), self._given.get("store.token")
        if from_file and plain and from_file.origin is plain.origin:
            raise wrong("both store.token_file and store.token are given", "Give one: token_file is the safer one.")
        order = list(Origin)
        if plain and (not from_file or order.index(plain.origin) > order.index(from_file.origin)):
            token = plain.text()
            if not token:
                return ""
        elif path := self._read("store.token_file"):
            if not self._is_for_here:
                return HIDDEN
            token = read_text(Path(path), "the token file").strip()
        else:
            return ""
        if len(token) < SHORTEST_TOKEN:
            raise wrong(
                f"the token has {len(token)} characters, too few to be safe",
                f"Use {SHORTEST_TOKEN} or more, for example from: openssl rand -hex 32.",
            )
        return token

    def _instances(self, key: str) -> tuple[Instance, ...]:
        """An instance that names no store uses the user's own."""
        found: tuple[Instance, ...] = self._read(key)
        return tuple(
            instance if instance.store else msgspec.structs.replace(instance, store=self.socket()) for instance in found
        )

    def _flavour(self, *, has_prefill: bool) -> str:
        flavour: str = self._read("router.flavour") or ("kvtally" if has_prefill else "plain")
        if flavour not in FLAVOURS:
            raise unknown(f"flavour {flavour!r} (from {self._given['router.flavour'].where})", flavour, FLAVOURS)
        if has_prefill and flavour == "plain":
            raise wrong("the flavour plain has no prefill, but there are prefill instances", "Leave one of them out.")
        if not has_prefill and flavour != "plain":
            raise wrong(f"the flavour {flavour} needs prefill instances", "Name them: --prefill URL.")
        return flavour


# ---- where settings are given


def check_network(config: StoreConfig) -> None:
    """Raise ConfigError for a TCP port that everybody could use, and for peers that could not find one another."""
    if config.tcp and not config.token:
        raise wrong(
            f"store.tcp = {config.tcp} has no token: anybody on the network could use the store",
            f"Write a secret of {SHORTEST_TOKEN} characters or more into a file of mode 0600 and give it as "
            "--token-file FILE, or leave tcp out.",
        )
    if bool(config.tls_cert) != bool(config.tls_key):
        raise wrong("only one of store.tls_cert and store.tls_key is given", "Give both, or neither.")
    if config.peers:
        _check_peers(config)
        return
    for name in ("advertise", "bulk", "peers_ca"):
        if value := getattr(config, name):
            raise wrong(f"store.{name} = {value} is given without store.peers", "Name the peers: --peers NETWORK.")
    if config.transport != "tcp":
        raise wrong(f"store.transport = {config.transport} is given without store.peers", "Name the peers: --peers.")


def _check_peers(config: StoreConfig) -> None:
    if not config.tcp:
        raise wrong(
            f"store.peers = {' '.join(config.peers)} is given without store.tcp: no peer could connect",
            "Name the address that peers connect to: --tcp HOST:PORT.",
        )
    if is_wildcard(split_address(config.advertise).host):
        raise wrong(
            f"peers cannot connect to {config.advertise}, which stands for every address of this machine",
            "Name the address by which they reach this store: --advertise HOST:PORT.",
        )
    if not config.bulk:
        raise wrong(f"there is no port after that of store.tcp = {config.tcp}", "Name one for KV bytes: --bulk.")
    if split_address(config.bulk).port == split_address(config.tcp).port != 0:
        raise wrong(
            f"store.bulk = {config.bulk} has the port of store.tcp", "Give KV bytes a port of their own: --bulk."
        )
    if bool(config.tls_cert) != bool(config.peers_ca):
        given, missing = ("tls_cert", "peers_ca") if config.tls_cert else ("peers_ca", "tls_cert")
        raise wrong(
            f"store.{given} is given without store.{missing}: between peers TLS must cover both directions",
            "Give every store its certificate (tls_cert, tls_key) and the authority of the others' (peers_ca).",
        )
    if config.transport != "tcp" and config.tls_cert and config.bulk_tls:
        raise wrong(
            f"store.transport = {config.transport} does not encrypt KV bytes, which store.bulk_tls asks for",
            "Use transport: tcp, or say that the network is private: bulk_tls: false.",
        )


def _next_port(address: str) -> str:
    """The address of the port after this one, if there is one; of any free port if this is any free port."""
    host, _, port = address.rpartition(":")
    number = int(port) + 1 if int(port) else 0
    return f"{host}:{number}" if number <= LAST_PORT else ""


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
            if raw is not None:  # `disk:` without a value means nothing
                given[key] = Given(SETTINGS[key], raw, Origin.FILE, str(path), path.parent)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Only variables with a double underscore: an orchestrator may set others (KVTALLY_PORT for a service named so)."""
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    given: dict[str, Given] = {}
    for variable, raw in environ.items():
        if variable.startswith("KVTALLY_") and "__" in variable:
            if variable not in by_variable:
                raise unknown(f"setting {variable} in the environment", variable, by_variable)
            setting = by_variable[variable]
            given[setting.key] = Given(setting, raw, Origin.ENVIRONMENT, variable, CURRENT)
    return given


def _mapping(tree: object, what: str) -> dict[str, object]:
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{what} holds {type_name(tree)} where settings should be",
            remedy="Write `name: value` lines; see examples/store.yaml.",
            code="KV-105",
        )
    return {str(key): value for key, value in tree.items()}


def _names(section: str) -> list[str]:
    return [setting.name for setting in SETTINGS.values() if setting.section == section]


# ---- defaults that the machine decides


def _default_disk_bytes(disk: str, memory_bytes: int, usable_bytes: int) -> int:
    size_bytes = min(10 * memory_bytes, usable_bytes * 8 // 10) // MIB * MIB
    if size_bytes < SMALLEST_BYTES:
        raise unusable(
            f"{disk} has only {human_size(usable_bytes)} free, too little for a disk tier",
            "Free some space, choose another directory with --disk, or leave the disk tier out.",
        )
    return size_bytes


def _default_socket(environ: Mapping[str, str]) -> str:
    try:
        return str(runtime_directory(environ) / "store.sock")
    except OSError as error:
        raise unusable(
            f"there is no default place for a socket: {error.strerror}", "Name one: --socket PATH."
        ) from error
