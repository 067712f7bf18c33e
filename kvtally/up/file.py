"""What a file asks of one machine: a `Deployment`. Anything wrong in the file is a `ConfigError`.

The sections `store`, `router` and `connector` take the settings of `config.table`, with the same names and checks.
Where the file names several machines (`nodes`), each gets the same file and runs its own part of it. Whether the
model, the ports and the GPUs exist is `host`'s question. Neighbours: `document` (the file as it is written), `plan`
(turns a Deployment into processes). No state, no threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kvtally.config import Settings, load, unknown
from kvtally.config.setting import PathOf, Several
from kvtally.config.table import SETTINGS
from kvtally.config.units import is_loopback, split_address
from kvtally.errors import ConfigError
from kvtally.up.document import (
    EXAMPLE,
    Argument,
    Document,
    Engines,
    NodeSection,
    Pool,
    Role,
    Scalar,
    parse_document,
    read_document,
)

LOOPBACK = "127.0.0.1"
LOOPBACK_NETWORK = "127.0.0.0/8"
STORE_PORT = 7400  # of a store that other machines reach; its bytes travel on the next one
# Decided by `up` for all parts. An engine's own arguments must not contradict it.
OURS = {
    "host": "Engines listen on the loopback interface, or on their node's address; the way in is the router.",
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
    "router.flavour": "The engines of this file hand over through their stores.",
}
# Settings that are not for a file with nodes.
NOT_WITH_NODES = {
    "tcp": "Each store listens on its node's address; write its port: store: {port: 7400}.",
    "advertise": "Each store is reached by its node's address: nodes: {NAME: {address: ...}}.",
}
PATHS = {setting.name for setting in SETTINGS.values() if isinstance(setting.kind, PathOf)}
SOMEWHERE = "http://127.0.0.1:1"  # a placeholder for the engines while the router's settings are checked

Flags = dict[str, str | bool]  # values of settings by name, as flags carry them


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, and what the router must know of it."""

    name: str = ""  # empty: the file names no nodes
    address: str = LOOPBACK  # where its engines listen
    pools: dict[Role, Pool]  # without empty ones
    store: str  # address of its store, as the router is given it

    @property
    def host(self) -> str:
        """The address as it stands in URLs."""
        return bracketed(self.address)


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a file asks of one machine: checked, with absolute paths."""

    model: str
    node: Node  # this machine
    nodes: list[Node]  # all of them, this one included
    router_node: str
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

    @property
    def pools(self) -> dict[Role, Pool]:
        return self.node.pools

    @property
    def runs_router(self) -> bool:
        return self.node.name == self.router_node


def read(path: Path, environ: Mapping[str, str], *, node: str = "", is_for_here: bool = True) -> Deployment:
    """Read what a file asks of a node, for this machine or another. Raises ConfigError."""
    return deployment(read_document(path), path.absolute(), environ, node=node, is_for_here=is_for_here)


def parse(
    tree: object, path: Path, environ: Mapping[str, str], *, node: str = "", is_for_here: bool = True
) -> Deployment:
    """Like `read`, from the tree that was in the file at this path."""
    return deployment(parse_document(tree, path), path, environ, node=node, is_for_here=is_for_here)


def deployment(
    document: Document, path: Path, environ: Mapping[str, str], *, node: str = "", is_for_here: bool = True
) -> Deployment:
    """What a file asks of a node. A file without nodes asks the same of any machine. Raises ConfigError."""
    check_node(document, node, path)
    _check_engines(document)
    router, router_node = _router_settings(document, path)
    _refuse_ours("connector", document.connector)
    load(extra=document.connector, environ=environ, place=str(path)).connector()  # checks it

    stores = {name: _store_settings(document, name, path) for name in document.nodes or [""]}
    settings = {
        name: load(
            flags=_keyed(store, router, document),
            environ=environ,
            place=str(path),
            is_for_here=is_for_here and name == node,
        )
        for name, store in stores.items()
    }
    if isinstance(document.store, dict):
        for own in settings.values():
            own.store()  # checks it
    _check_tls(document, stores, router)
    nodes = {
        name: _node(document, name, f"tcp://{store['tcp']}" if name else settings[name].socket())
        for name, store in stores.items()
    }
    section = document.nodes.get(node) or NodeSection(address=LOOPBACK)
    return Deployment(
        model=_model(section.model or document.model, path.parent),
        node=nodes[node],
        nodes=list(nodes.values()),
        router_node=router_node,
        args={**document.args, **section.args},
        env={**document.env, **section.env},
        starts_store=isinstance(document.store, dict) and bool(nodes[node].pools),
        socket=settings[node].socket(),
        store={name: value for name, value in stores[node].items() if name != "socket"},
        listen=_listen(settings[router_node]),
        router={name: value for name, value in router.items() if name != "listen"},
        connector=document.connector,
        logs=_path(document.logs, path.parent) if document.logs else "",
        start_timeout_s=document.start_timeout_s,
    )


def check_node(document: Document, node: str, path: Path) -> None:
    """Raise ConfigError for a node that the file does not name, or none where it names some."""
    if node and not document.nodes:
        raise ConfigError(
            f"{path} names no nodes, so none can be chosen: {node}",
            remedy="Leave --node out, or write the machines under `nodes`: see examples/nodes.yaml.",
        )
    if node not in (document.nodes or [""]):
        raise unknown(f"node {node!r} in {path}", node, document.nodes)


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# ---- engines


def _node(document: Document, name: str, store: str) -> Node:
    section = document.nodes.get(name)
    if section is None:
        return Node(pools=document.pools, store=store)
    return Node(name=name, address=section.address, pools=section.pools, store=store)


def _sections(document: Document) -> Iterator[tuple[str, Engines]]:
    """The engines of every machine, and how messages name their place in the file."""
    if not document.nodes:
        yield "", document
    for name, section in document.nodes.items():
        yield f"nodes.{name}.", section


def _check_engines(document: Document) -> None:
    counts: dict[Role, int] = {}
    for _, section in _sections(document):
        for role, pool in section.pools.items():
            counts[role] = counts.get(role, 0) + pool.count
    if not counts:
        raise ConfigError(
            "the file asks for no engine",
            remedy="Add `prefill: 1` and `decode: 1`, or `plain: 1` for engines that do both.",
        )
    if (Role.PREFILL in counts) != (Role.DECODE in counts):
        alone = Role.PREFILL if Role.PREFILL in counts else Role.DECODE
        other = Role.DECODE if alone is Role.PREFILL else Role.PREFILL
        raise ConfigError(
            f"the file asks for {alone} engines and for no {other} engine: nothing could be handed over",
            remedy=f"Add `{other}: 1`, or write `plain: {counts[alone]}` for engines that do both.",
        )
    if Role.PLAIN in counts and len(counts) > 1:
        raise ConfigError(
            "the file asks for plain engines beside prefill and decode engines: a router serves one kind",
            remedy="Leave `plain` out, or `prefill` and `decode`.",
        )
    for place, section in [("", document), *_sections(document)]:
        _check_pools(place, section)


def _check_pools(place: str, section: Engines) -> None:
    arguments = [("args", section.args), *((f"{role}.args", pool.args) for role, pool in section.pools.items())]
    for where, given in arguments:
        for name in given:
            if (plain := name.lstrip("-").replace("-", "_")) in OURS:
                raise ConfigError(f"{place}{where} sets {name}, which `kvtally up` decides", remedy=OURS[plain])
    for role, pool in section.pools.items():
        if pool.gpus and len(pool.gpus) != pool.count:
            raise ConfigError(
                f"{place}{role}.gpus has {len(pool.gpus)} entries for {pool.count} engines",
                remedy='Write one for each engine: gpus: [0, 1]; several for one engine as "0,1"; or leave it out.',
            )


# ---- settings


def _store_settings(document: Document, name: str, path: Path) -> Flags:
    """What the store of a node is started with."""
    if isinstance(document.store, str):
        if name:
            raise ConfigError(
                f"store in {path} names a store that runs already, but every node starts its own",
                remedy="Write its settings instead: store: {memory: ..., token_file: ...}.",
            )
        return _settings("store", {"socket": document.store}, path)
    if not name:
        return _settings("store", document.store, path)
    node = document.nodes[name]
    given = {**document.store, **node.store}
    for setting, remedy in NOT_WITH_NODES.items():
        if setting in given:
            raise ConfigError(f"store.{setting} is not for a file with nodes", remedy=remedy)
    if not given.get("token_file"):
        raise ConfigError(
            f"node {name} in {path} has no token: anybody on the network could use its store",
            remedy="Write one secret of 16 characters or more into a file of mode 0600 on every machine, and name it: "
            "store: {token_file: /etc/kvtally/token}.",
        )
    address = f"{bracketed(node.address)}:{_store_port(name, given.pop('port', None), path)}"
    others = [other.address for other in document.nodes.values() if other is not node and other.pools]
    if others and is_loopback(node.address):
        others = [LOOPBACK_NETWORK]  # from there, the kernel chooses by which address the others see a connection come
    return _settings("store", {"tcp": address, **({"peers": others} if others else {}), **given}, path)


def _store_port(name: str, port: object, path: Path) -> int:
    if port is None:
        return STORE_PORT
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65_535:
        raise ConfigError(
            f"store.port = {port} for node {name} in {path} is not a port", remedy="For example 7400.", code="KV-102"
        )
    return port


def _check_tls(document: Document, stores: Mapping[str, Flags], router: Flags) -> None:
    """Stores of nodes are reached over TCP, by one another and by the router."""
    if document.nodes and any("tls_cert" in store for store in stores.values()) and "store_ca" not in router:
        raise ConfigError(
            "the stores of this file speak TLS, but the router has no authority to check them against",
            remedy="Name the one that signed their certificates: router: {store_ca: FILE}.",
        )


def _router_settings(document: Document, path: Path) -> tuple[Flags, str]:
    """What the router is started with, and on which node."""
    given = dict(document.router)
    node = given.pop("node", None) if document.nodes else ""
    if node is None:
        node = next(iter(document.nodes))
    if node not in (document.nodes or [""]):
        raise unknown(f"node {node!r} in section router of {path}", str(node), document.nodes)
    for name, section in document.nodes.items():
        if not section.pools and name != node:
            raise ConfigError(
                f"node {name} in {path} runs neither engines nor the router",
                remedy=f"Give it engines (prefill, decode or plain), or the router (router: {{node: {name}}}), or "
                "leave it out.",
            )
    return _settings("router", _with_listen(given), path), str(node)


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
        if isinstance(value, list) and isinstance(SETTINGS[f"{section}.{name}"].kind, Several):
            value = " ".join(map(str, value))  # as the environment has it
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


def _keyed(store: Flags, router: Flags, document: Document) -> dict[str, str | bool | None]:
    """In the form that `config.load` takes flags."""
    roles = {role for _, section in _sections(document) for role in section.pools}
    return {
        **{f"store.{name}": value for name, value in store.items()},
        **{f"router.{name}": value for name, value in router.items()},
        **{f"router.{role}": SOMEWHERE for role in (Role.PREFILL, Role.DECODE) if role in roles},
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
