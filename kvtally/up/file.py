"""The file that `kvtally up` reads: its schema and its checks. Anything wrong in it is a `ConfigError`.

    model: Qwen/Qwen3-0.6B          the smallest one
    prefill: 1
    decode: 1

The sections `store`, `router` and `connector` take the settings of `config.table`, with the same names and checks.
Whether the model, the ports and the GPUs exist is `host`'s question. Neighbour: `plan` (turns a Deployment into
processes). No state, no threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from kvtally.config import Settings, load, unknown
from kvtally.config.setting import PathOf
from kvtally.config.table import SETTINGS
from kvtally.config.units import split_address
from kvtally.config.yaml_file import read_yaml
from kvtally.errors import ConfigError

EXAMPLE = "See examples/pd.yaml for the form."
MOST_INSTANCES = 64
# Decided by `up` for all parts. An engine's own arguments must not contradict it.
OURS = {
    "host": "Engines listen on the loopback interface; the way in is the router: router: {listen: ...}.",
    "port": "Write a role's first port beside `args`: decode: {port: 8200}.",
    "model": "Write it at the top of the file.",
    "kv_transfer_config": "It is made for you; settings of the connector go into the section `connector`.",
}
# Settings that are not for this file, and what to do instead.
NOT_HERE = {
    "store.token": "A command line is public on its machine: write the token into a file and give token_file.",
    "connector.store": "Engines use the store of this file: store: {socket: ...}.",
    "connector.autostart": "The store of this file is started before the engines.",
    "router.prefill": "`kvtally up` gives the router the engines of this file.",
    "router.decode": "`kvtally up` gives the router the engines of this file.",
    "router.flavour": "The engines of this file hand over through their store.",
}
PATHS = {setting.name for setting in SETTINGS.values() if isinstance(setting.kind, PathOf)}
SOMEWHERE = "http://127.0.0.1:1"  # a placeholder for the engines while the router's settings are checked

Scalar = str | int | float | bool
Argument = Scalar | list[Scalar] | dict[str, object] | None
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_INSTANCES)]
Flags = dict[str, str | bool]  # values of settings by name, as flags carry them


class Role(StrEnum):
    """What an engine is for. The value is its section's name."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one role. Its `args` and `env` override those of all engines."""

    count: Count = 1
    port: Port | None = None  # of the first; the others follow
    gpus: list[int | str | list[int | str]] = []  # for each engine: 0, or "0,1", or [0, 1]
    args: dict[str, Argument] = {}
    env: dict[str, Scalar] = {}


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as it is written."""

    model: str
    prefill: Count | Pool = 0
    decode: Count | Pool = 0
    plain: Count | Pool = 0
    args: dict[str, Argument] = {}  # of every engine, by vLLM's own names: max_model_len: 8192
    env: dict[str, Scalar] = {}
    store: str | dict[str, object] = {}  # settings of a store to start, or the socket of a running one
    router: dict[str, object] = {}
    connector: dict[str, object] = {}
    logs: str = ""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 1800.0


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a file asks for: checked, with absolute paths."""

    model: str
    pools: dict[Role, Pool]  # without empty ones
    args: dict[str, Argument]
    env: dict[str, Scalar]
    starts_store: bool
    socket: str
    store: Flags  # beside the socket
    listen: str
    router: Flags  # beside the address it listens on
    connector: dict[str, object]
    logs: str
    start_timeout_s: float


def read(path: Path, environ: Mapping[str, str], *, is_for_here: bool = True) -> Deployment:
    """Read the deployment that a file describes, for this machine or another. Raises ConfigError."""
    return parse(read_yaml(path, EXAMPLE), path.absolute(), environ, is_for_here=is_for_here)


def parse(tree: object, path: Path, environ: Mapping[str, str], *, is_for_here: bool = True) -> Deployment:
    """Like `read`, from the tree that was in the file at this path."""
    document = _document(tree, path)
    pools = _pools(document)
    _check_engines(document, pools)
    runs_elsewhere = isinstance(document.store, str)
    given = {"socket": document.store} if isinstance(document.store, str) else document.store
    store = _settings("store", given, path)
    router = _settings("router", _with_listen(document.router), path)
    _refuse_ours("connector", document.connector)
    load(extra=document.connector, environ=environ, place=str(path)).connector()  # checks it
    flags = _keyed(store, router, pools)
    settings = load(flags=flags, environ=environ, place=str(path), is_for_here=is_for_here)
    if not runs_elsewhere:
        settings.store()
    return Deployment(
        model=_model(document.model, path.parent),
        pools=pools,
        args=document.args,
        env=document.env,
        starts_store=not runs_elsewhere,
        socket=settings.socket(),
        store={name: value for name, value in store.items() if name != "socket"},
        listen=_listen(settings),
        router={name: value for name, value in router.items() if name != "listen"},
        connector=document.connector,
        logs=_path(document.logs, path.parent) if document.logs else "",
        start_timeout_s=document.start_timeout_s,
    )


def _document(tree: object, path: Path) -> Document:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no `name: value` lines", remedy=EXAMPLE, code="KV-105")
    _check_names(tree, Document, str(path))
    for role in Role:
        if isinstance(section := tree.get(role), dict):
            _check_names(section, Pool, f"section {role} of {path}")
    said = {name: value for name, value in tree.items() if value is not None}  # `disk:` alone says nothing
    if said.get("model", "") == "":
        raise ConfigError(
            f"{path} names no model", remedy="Add a line `model: DIRECTORY` or `model: owner/name`.", code="KV-100"
        )
    try:
        return msgspec.convert(said, Document)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        place = where.strip("`").removeprefix("$.") or "the file"
        raise ConfigError(f"{place} in {path} is wrong: {what.lower()}", remedy=EXAMPLE, code="KV-100") from error


def _check_names(tree: Mapping[object, object], kind: type[msgspec.Struct], where: str) -> None:
    for name in tree:
        if name not in kind.__struct_fields__:
            raise unknown(f"{name!r} in {where}", str(name), kind.__struct_fields__)


def _pools(document: Document) -> dict[Role, Pool]:
    written = {Role.PREFILL: document.prefill, Role.DECODE: document.decode, Role.PLAIN: document.plain}
    pools = {role: Pool(count=pool) if isinstance(pool, int) else pool for role, pool in written.items()}
    return {role: pool for role, pool in pools.items() if pool.count}


def _check_engines(document: Document, pools: Mapping[Role, Pool]) -> None:
    if not pools:
        raise ConfigError(
            "the file asks for no engine",
            remedy="Add `prefill: 1` and `decode: 1`, or `plain: 1` for engines that do both.",
        )
    if (Role.PREFILL in pools) != (Role.DECODE in pools):
        alone = Role.PREFILL if Role.PREFILL in pools else Role.DECODE
        other = Role.DECODE if alone is Role.PREFILL else Role.PREFILL
        raise ConfigError(
            f"the file asks for {alone} engines and for no {other} engine: nothing could be handed over",
            remedy=f"Add `{other}: 1`, or write `plain: {pools[alone].count}` for engines that do both.",
        )
    if Role.PLAIN in pools and len(pools) > 1:
        raise ConfigError(
            "the file asks for plain engines beside prefill and decode engines: a router serves one kind",
            remedy="Leave `plain` out, or `prefill` and `decode`.",
        )
    for where, arguments in [("args", document.args), *((f"{role}.args", pool.args) for role, pool in pools.items())]:
        for name in arguments:
            if (plain := name.lstrip("-").replace("-", "_")) in OURS:
                raise ConfigError(f"{where} sets {name}, which `kvtally up` decides", remedy=OURS[plain])
    for role, pool in pools.items():
        if pool.gpus and len(pool.gpus) != pool.count:
            raise ConfigError(
                f"{role}.gpus has {len(pool.gpus)} entries for {pool.count} engines",
                remedy='Write one for each engine: gpus: [0, 1]; several for one engine as "0,1"; or leave it out.',
            )


def _settings(section: str, given: Mapping[str, object], path: Path) -> Flags:
    """A section of settings in the form of flags: known names, plain values, paths relative to the file."""
    _refuse_ours(section, given)
    names = [setting.name for setting in SETTINGS.values() if setting.section == section and setting.has_flag]
    flags: Flags = {}
    for name, value in given.items():
        if name not in names:
            raise unknown(f"{name!r} in section {section} of {path}", name, names)
        if value is None:
            continue
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{section}.{name} in {path} is not a plain value", remedy=EXAMPLE)
        if isinstance(value, bool):
            flags[name] = value
        else:
            flags[name] = _path(str(value), path.parent) if name in PATHS else str(value)
    return flags


def _with_listen(router: Mapping[str, object]) -> dict[str, object]:
    """`port: 8000` is short for an address on this machine."""
    settings = dict(router)
    port = settings.pop("port", None)
    if port is None:
        return settings
    if "listen" in settings:
        raise ConfigError("router.port and router.listen are both given", remedy="Write the port into `listen`.")
    return {**settings, "listen": f"127.0.0.1:{port}"}


def _listen(settings: Settings) -> str:
    """Where the router listens. Port 0 (any free port) is refused: neither `up` nor clients would learn which one."""
    listen = settings.router().listen
    if not split_address(listen).port:
        raise ConfigError(
            f"router.listen = {listen} leaves the port open: nobody would know where the router is",
            remedy="Write one: router: {port: 8080}.",
            code="KV-102",
        )
    return listen


def _keyed(store: Flags, router: Flags, pools: Mapping[Role, Pool]) -> dict[str, str | bool | None]:
    """In the form that `config.load` takes flags."""
    return {
        **{f"store.{name}": value for name, value in store.items()},
        **{f"router.{name}": value for name, value in router.items()},
        **{f"router.{role}": SOMEWHERE for role in (Role.PREFILL, Role.DECODE) if role in pools},
    }


def _refuse_ours(section: str, given: Mapping[str, object]) -> None:
    for name in given:
        if remedy := NOT_HERE.get(f"{section}.{name}"):
            raise ConfigError(f"{section}.{name} is not for this file", remedy=remedy)


def _model(text: str, base: Path) -> str:
    """The absolute path of a directory; any other name belongs to the model hub."""
    local = base / os.path.expanduser(text)
    return str(local.absolute()) if text.startswith((".", "~", "/")) or os.path.isdir(local) else text


def _path(text: str, base: Path) -> str:
    return os.path.abspath(base / os.path.expanduser(text))
