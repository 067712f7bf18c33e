"""The file that `kvtally up` reads, as it is written: its names, their types, and the machines under `nodes`.

    model: Qwen/Qwen3-0.6B          the smallest one
    prefill: 1
    decode: 1

Owns the schema. What does not fit it is a `ConfigError` that names the place. What the parts mean together, and the
settings of `store`, `router` and `connector`, is for `file`. Pure, but for reading the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvtally.config import unknown
from kvtally.config.peers import is_wildcard, parse_peer
from kvtally.config.units import is_loopback
from kvtally.config.yaml_file import read_yaml
from kvtally.errors import ConfigError

EXAMPLE = "See examples/pd.yaml for the form."
NODES_EXAMPLE = "See examples/nodes.yaml for the form."
MOST_INSTANCES = 64
MOST_NODES = 64
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # it becomes part of a directory's name

Scalar = str | int | float | bool
Argument = Scalar | list[Scalar] | dict[str, object] | None
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_INSTANCES)]
T = TypeVar("T", bound=msgspec.Struct)


class Role(StrEnum):
    """What an engine is for. The value is its section's name."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one role on one machine. Its `args` and `env` override those of all engines."""

    count: Count = 1
    port: Port | None = None  # of the first; the others follow
    gpus: list[int | str | list[int | str]] = []  # for each engine: 0, or "0,1", or [0, 1]
    args: dict[str, Argument] = {}
    env: dict[str, Scalar] = {}


class Engines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one machine, and what they are started with."""

    prefill: Count | Pool = 0
    decode: Count | Pool = 0
    plain: Count | Pool = 0
    args: dict[str, Argument] = {}  # of every engine, by vLLM's own names: max_model_len: 8192
    env: dict[str, Scalar] = {}

    @property
    def pools(self) -> dict[Role, Pool]:
        """The engines of each role, without empty ones."""
        written = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.PLAIN: self.plain}
        pools = {role: Pool(count=pool) if isinstance(pool, int) else pool for role, pool in written.items()}
        return {role: pool for role, pool in pools.items() if pool.count}


class NodeSection(Engines, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine under `nodes`. What it says wins over the same name at the top of the file."""

    address: str  # by which the other machines reach it
    model: str = ""
    store: dict[str, object] = {}


class Document(Engines, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    model: str
    nodes: dict[str, NodeSection] = {}  # empty: everything runs on one machine
    store: str | dict[str, object] = {}  # settings of a store to start, or the socket of a running one
    router: dict[str, object] = {}
    connector: dict[str, object] = {}
    logs: str = ""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 1800.0


def read_document(path: Path) -> Document:
    """Read a file. Raises ConfigError."""
    return parse_document(read_yaml(path, EXAMPLE), path)


def parse_document(tree: object, path: Path) -> Document:
    """Like `read_document`, from the tree that was in the file at this path."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no `name: value` lines", remedy=EXAMPLE, code="KV-105")
    _check_names(tree, Document, str(path))
    _check_roles(tree, "", path)
    said = _said(tree)
    sections = said.pop("nodes", {})
    if said.get("model", "") == "":
        raise ConfigError(
            f"{path} names no model", remedy="Add a line `model: DIRECTORY` or `model: owner/name`.", code="KV-100"
        )
    written = _convert(said, Document, "", path, EXAMPLE)
    nodes = _nodes(sections, path)
    if nodes and (beside := next(iter(written.pools), None)):
        raise ConfigError(
            f"{path} asks for {beside} engines beside `nodes`: nobody knows on which machine they run",
            remedy=f"Write them under a node: nodes: {{NAME: {{address: HOST, {beside}: 1}}}}.",
        )
    return msgspec.structs.replace(written, nodes=nodes)


# ---- machines


def _nodes(sections: object, path: Path) -> dict[str, NodeSection]:
    if not isinstance(sections, dict):
        raise ConfigError(f"nodes in {path} is wrong: it holds no `name: ...` lines", remedy=NODES_EXAMPLE)
    if len(sections) > MOST_NODES:
        raise ConfigError(f"{path} has {len(sections)} nodes, more than {MOST_NODES}", remedy="Use several routers.")
    nodes = {_node_name(name, path): _node(f"nodes.{name}", section, path) for name, section in sections.items()}
    _check_addresses(nodes, path)
    return nodes


def _node_name(name: object, path: Path) -> str:
    if isinstance(name, str) and _NODE_NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"{name!r} under `nodes` in {path} is not a name",
        remedy="Use letters, digits, dots, dashes and underscores; put a number, or yes and no, in quotes.",
    )


def _node(place: str, section: object, path: Path) -> NodeSection:
    if not isinstance(section, dict):
        raise ConfigError(f"{place} in {path} says nothing about its machine", remedy=NODES_EXAMPLE)
    _check_names(section, NodeSection, f"section {place} of {path}")
    _check_roles(section, f"{place}.", path)
    node = _convert(_said(section), NodeSection, place, path, NODES_EXAMPLE)
    return msgspec.structs.replace(node, address=_address(place, node.address, path))


def _address(place: str, text: str, path: Path) -> str:
    """A machine's address in its usual form, without brackets; or its name."""
    try:
        found = parse_peer(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        found = ""
    address = found if isinstance(found, str) else str(found.network_address)
    if not address or "/" in text:
        raise ConfigError(
            f"{place}.address = {text} in {path} is not the address of a machine",
            remedy="Write it without a port, for example 10.0.0.7; ports are `store: {port: ...}` and those of roles.",
            code="KV-102",
        )
    if is_wildcard(address):
        raise ConfigError(
            f"{place}.address = {text} in {path} is not an address by which other machines reach this one",
            remedy="Write the address of one of its interfaces, for example 10.0.0.7.",
            code="KV-102",
        )
    return address


def _check_addresses(nodes: Mapping[str, NodeSection], path: Path) -> None:
    taken: dict[str, str] = {}
    for name, node in nodes.items():
        if (other := taken.setdefault(node.address, name)) != name:
            raise ConfigError(
                f"nodes {other} and {name} in {path} have one address, {node.address}",
                remedy="One machine is one node: write its engines under one name, or give the other its own address.",
                code="KV-102",
            )
    local = [name for name, node in nodes.items() if is_loopback(node.address)]
    if local and len(local) < len(nodes):
        raise ConfigError(
            f"node {local[0]} in {path} has an address that only its own machine can reach, {nodes[local[0]].address}",
            remedy="Give every node an address that the others can reach.",
            code="KV-102",
        )


# ---- names and types


def _said(section: Mapping[object, object]) -> dict[str, object]:
    return {str(name): value for name, value in section.items() if value is not None}  # `disk:` alone says nothing


def _check_roles(section: Mapping[object, object], place: str, path: Path) -> None:
    for role in Role:
        if isinstance(pool := section.get(role), dict):
            _check_names(pool, Pool, f"section {place}{role} of {path}")


def _check_names(section: Iterable[object], kind: type[msgspec.Struct], where: str) -> None:
    for name in section:
        if name not in kind.__struct_fields__:
            raise unknown(f"{name!r} in {where}", str(name), kind.__struct_fields__)


def _convert(said: Mapping[str, object], kind: type[T], place: str, path: Path, remedy: str) -> T:
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        inner = where.strip("`").removeprefix("$").removeprefix(".")
        full = ".".join(filter(None, [place, inner])) or "the file"
        raise ConfigError(f"{full} in {path} is wrong: {what.lower()}", remedy=remedy, code="KV-100") from error
