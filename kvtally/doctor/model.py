"""The neutral description of a deployment: what `readers` make of any kind of file, and what `rules` judge.

Every value keeps the place it was read from, so that a finding can name its evidence. Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

# Text that some other tool fills in: a Helm template, a shell or Kubernetes variable, "<your token>".
_PLACEHOLDER = re.compile(r"\{\{|\$\{|\$\(|\$[A-Za-z_]|<[A-Za-z][^<>]*>")
_TRUE = frozenset({"true", "1", "yes", "on"})


class Place(msgspec.Struct, frozen=True, order=True):
    """Where something stands. `path` names it inside the file: spec.template.containers[0].env[3]."""

    file: str
    line: int
    path: str = ""


class Value(msgspec.Struct, frozen=True):
    """A setting as it was written."""

    text: str
    place: Place

    @property
    def is_known(self) -> bool:
        """False if the text is filled in later: no rule may judge it."""
        return not _PLACEHOLDER.search(self.text)

    @property
    def number(self) -> int | None:
        return int(self.text) if re.fullmatch(r"-?\d{1,18}", self.text) else None

    @property
    def is_true(self) -> bool:
        return self.text.strip().lower() in _TRUE


Values = Mapping[str, Value]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # or the files do not say


class Where(msgspec.Struct, frozen=True):
    """What an instance shares with others: instances of the same `Where` share a loopback interface and its ports.

    `is_certain` is False for command lines: two scripts may run on one machine or on two.
    """

    name: str
    is_certain: bool = True

    def is_apart_from(self, other: Where) -> bool | None:
        """Whether two instances run in different places; None if the files do not say."""
        if self.name == other.name:
            return False
        return True if self.is_certain and other.is_certain else None


class Connector(msgspec.Struct, kw_only=True):
    """One `kv-transfer-config`, or one child of a MultiConnector."""

    place: Place
    fields: dict[str, Value] = {}  # the plain top-level fields: kv_connector, kv_role, ...
    extra: dict[str, Value] = {}  # kv_connector_extra_config, nested names joined with dots
    children: list[Connector] = []
    text: str = "kv-transfer-config"  # as it was written, if it was text
    problem: str = ""  # why it could not be read

    @property
    def name(self) -> str:
        found = self.fields.get("kv_connector")
        return found.text if found else ""

    @property
    def evidence(self) -> Value:
        """The line that names the connector."""
        return self.fields.get("kv_connector") or Value(self.text, self.place)

    def flat(self) -> Iterator[Connector]:
        """The connectors that move bytes: the children of a MultiConnector, or this one."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.flat()


class Instance(msgspec.Struct, kw_only=True):
    """One engine, or several replicas of it that are configured alike."""

    name: str
    place: Place
    role: Role = Role.BOTH
    where: Where
    replicas: int = 1
    flags: dict[str, Value] = {}  # by name with underscores; a bare flag is "true", --no-flag is "false"
    env: dict[str, Value] = {}
    unseen: list[Value] = []  # config maps, secrets and files that may set more variables or settings
    image: Value | None = None
    has_shm: bool = False  # /dev/shm is a volume, its size is set, or it is the machine's own
    shares_host: bool = False  # hostIPC, ipc: host
    mounts: dict[str, str] = {}  # mount path: what is mounted there, such as "pvc kv-cache"
    connector: Connector | None = None
    lmcache: dict[str, Value] = {}  # LMCache's settings, from every place where they may stand

    def connectors(self) -> list[Connector]:
        return list(self.connector.flat()) if self.connector else []


class Router(msgspec.Struct, kw_only=True):
    """What sends a request to prefill and then to decode. `speaks` is the protocol it was told to use."""

    kind: str  # kthena, llm-d, production-stack, kvtally, proxy
    speaks: Value
    place: Place
    is_derived: bool = False  # the controller makes it from the engines' connector
    timeout_s: Value | None = None
    sides: dict[str, Role] = {}  # the engines' ports, if it names them


class Service(msgspec.Struct, kw_only=True):
    """A process beside the engines: an LMCache server, a store."""

    kind: str
    flags: dict[str, Value]
    where: Where
    place: Place


class Deployment(msgspec.Struct, kw_only=True):
    """Engines that are meant to work together, and what stands in front of and beside them."""

    name: str
    kind: str  # as people call it: Kthena ModelBooster, compose file, ...
    place: Place
    instances: list[Instance] = []
    routers: list[Router] = []
    services: list[Service] = []
    left_out: int = 0  # engines beyond the most that are compared with one another

    def having(self, role: Role) -> list[Instance]:
        return [instance for instance in self.instances if instance.role in (role, Role.BOTH)]

    @property
    def is_disaggregated(self) -> bool:
        """Whether some engine is for prefill or decode alone."""
        return any(instance.role is not Role.BOTH for instance in self.instances)

    def pairs(self) -> Iterator[tuple[Instance, Instance]]:
        """Prefill beside decode; among engines that do both, each beside each later one."""
        if self.is_disaggregated:
            for prefill in self.having(Role.PREFILL):
                for decode in self.having(Role.DECODE):
                    if prefill is not decode:
                        yield prefill, decode
        else:
            for index, first in enumerate(self.instances):
                for second in self.instances[index + 1 :]:
                    yield first, second


class Skipped(msgspec.Struct, frozen=True):
    """Something that was not examined, and why."""

    place: Place
    why: str
