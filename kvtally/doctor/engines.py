"""From words to parts: what a command line starts (an engine, a server beside it, a router), and its connector. Pure.

Used by every reader in `readers`: however a file wraps it, in the end there is a command with options and variables.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence

import msgspec

from kvtally.doctor.model import Connector, Instance, Place, Role, Router, Service, Value, Where
from kvtally.doctor.shell import commands, options
from kvtally.doctor.tree import Node, embedded
from kvtally.errors import ConfigError

ENGINE_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "dynamo.vllm")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_SEPARATOR = re.compile(r"[\s,]+")


class Parts(msgspec.Struct):
    """What was found."""

    instances: list[Instance] = []
    routers: list[Router] = []
    services: list[Service] = []

    def add(self, other: Parts) -> None:
        self.instances += other.instances
        self.routers += other.routers
        self.services += other.services


class Setting(msgspec.Struct):
    """What is known of a command's surroundings before it is read."""

    name: str
    where: Where
    place: Place
    role: Role | None = None
    env: dict[str, Value] = {}
    image: Value | None = None
    has_shm: bool = False
    shares_host: bool = False
    mounts: dict[str, str] = {}
    unseen: list[Value] = []
    replicas: int = 1


def role_of(*names: str) -> Role | None:
    """The role that a name suggests; None if it suggests none, or both."""
    text = " ".join(names).lower()
    is_prefill = re.search(r"prefill|producer|\bp-?instance|sender", text) is not None
    is_decode = re.search(r"decod|consumer|\bd-?instance|receiver", text) is not None
    if is_prefill == is_decode:
        return None
    return Role.PREFILL if is_prefill else Role.DECODE


def run(words: Sequence[Value], around: Setting) -> Parts:
    """What a command starts. A shell script is read; a command that doctor does not know starts nothing."""
    words = list(words)
    while words and os.path.basename(words[0].text) in ("exec", "nohup", "sudo", "env", "time", "eval", "numactl"):
        words.pop(0)
    if not words:
        return Parts()
    program = os.path.basename(words[0].text)
    if program in _SHELLS:
        for index, word in enumerate(words):
            if re.fullmatch(r"-\w*c", word.text) and index + 1 < len(words):
                parts = script(words[index + 1], around)
                for instance in parts.instances:  # the words after the script are its arguments: "$@"
                    instance.flags |= options(words[index + 2 :])[0]
                return parts
        return Parts()
    if program == "docker" or program == "podman":
        return _container(words, around)
    return _known(words, around)


def script(text: Value, around: Setting) -> Parts:
    """What the commands of a script start."""
    found = Parts()
    for command in commands(text.text, text.place):
        mine = msgspec.structs.replace(
            around,
            env={**around.env, **command.env},
            role=around.role or role_of(command.comment),
            place=command.words[0].place,
        )
        found.add(run(command.words, mine))
    return found


def engine(arguments: Sequence[Value], around: Setting) -> Instance:
    """An engine that is given these arguments."""
    flags, rest = options(arguments)
    if rest and "model" not in flags:
        flags["model"] = rest[0]
    return engine_of(flags, around)


def engine_of(flags: dict[str, Value], around: Setting, connector: Connector | None = None) -> Instance:
    """An engine with these options by name."""
    if more := around.env.get("VLLM_ADDITIONAL_ARGS"):  # KServe's images add it to the command line
        for command in commands(more.text, more.place):
            flags |= options(command.words)[0]
    if connector is None and (written := flags.get("kv_transfer_config")):
        connector = connector_of(written)
    dotted = {name.removeprefix("kv_transfer_config."): value for name, value in flags.items() if "config." in name}
    if connector is None and "kv_connector" in dotted:
        connector = Connector(place=dotted["kv_connector"].place, fields=dotted)
    if connector is None and (size := flags.get("kv_offloading_size")):
        connector = _offloading(size, flags.get("kv_offloading_backend"))
    return Instance(
        name=around.name,
        place=around.place,
        role=around.role or _said_role(flags, connector) or Role.BOTH,
        where=around.where,
        replicas=around.replicas,
        flags=flags,
        env=around.env,
        unseen=around.unseen,
        image=around.image,
        has_shm=around.has_shm,
        shares_host=around.shares_host,
        mounts=around.mounts,
        connector=connector,
    )


def connector_of(written: Value, *, keeps_lines: bool = True) -> Connector:
    """A `kv-transfer-config` in JSON."""
    unread = Connector(place=written.place, text=written.text)
    try:
        if not isinstance(json.loads(written.text), dict):
            unread.problem = "it is not a JSON object"
            return unread
        connector = connector_at(embedded(written.text, written.place, keeps_lines=keeps_lines))
        connector.text = written.text
        return connector
    except (ValueError, RecursionError) as error:
        if not written.is_known:  # a template: its value is not known yet
            unread.fields = {"kv_connector": Value("${…}", written.place)}
        else:
            unread.problem = f"it is not JSON: {error}"
    except ConfigError as error:
        unread.problem = error.message
    return unread


def connector_at(node: Node) -> Connector:
    """A `kv-transfer-config` that was written as a mapping."""
    extra = node.get("kv_connector_extra_config")
    return Connector(
        place=node.place,
        fields={
            name: child.value for name, child in node.mapping.items() if not isinstance(child.content, dict | list)
        },
        extra={name: value for name, value in extra.leaves() if name and not name.startswith("connectors[")},
        children=[connector_at(child) for child in extra.get("connectors").items],
    )


def _said_role(flags: Mapping[str, Value], connector: Connector | None) -> Role | None:
    if mode := flags.get("disaggregation_mode"):  # of dynamo.vllm
        return role_of(mode.text)
    said = connector.fields.get("kv_role") if connector else None
    return role_of(said.text) if said else None


def _offloading(size: Value, backend: Value | None) -> Connector:
    """vLLM's short form of a connector."""
    name = "LMCacheMPConnector" if backend and backend.text == "lmcache" else "OffloadingConnector"
    role = Value("kv_both", size.place)
    return Connector(place=size.place, fields={"kv_connector": Value(name, size.place), "kv_role": role})


def _known(words: Sequence[Value], around: Setting) -> Parts:
    texts = [word.text for word in words]
    names = [os.path.basename(text) for text in texts]
    for index, name in enumerate(names):
        following = names[index + 1] if index + 1 < len(names) else ""
        rest = words[index + 2 :]
        if (name == "vllm" and following == "serve") or (name == "-m" and following in ENGINE_MODULES):
            return Parts(instances=[engine(rest, around)])
        if name in ("api_server.py", *ENGINE_MODULES):
            return Parts(instances=[engine(words[index + 1 :], around)])
        if name == "lmcache" and following == "server":
            return Parts(services=[_service("lmcache server", rest, around)])
        if name == "kvtally" and following == "store":
            return Parts(services=[_service("kvtally store", rest, around)])
        if name == "kvtally" and following == "route":
            return Parts(routers=[_router("kvtally", rest, around, "flavour", "kvtally")])
        if name == "vllm-router" or (name == "-m" and following.startswith("vllm_router")):
            return Parts(routers=[_router("production-stack", words[index:], around, "routing_logic", "roundrobin")])
        if name.endswith(".py") and ("proxy" in name or "disagg" in name):
            router = Router(kind="proxy", speaks=Value(name, words[index].place), place=around.place)
            _, sides = _sides(words[index + 1 :])
            router.sides = sides
            return Parts(routers=[router])
    if around.image is not None and re.search(r"sidecar|routing-proxy", around.image.text):
        flags, _ = options(words)
        speaks = flags.get("kv_connector") or flags.get("connector")
        if speaks:
            return Parts(routers=[Router(kind="llm-d", speaks=speaks, place=speaks.place)])
    return Parts()


def _service(kind: str, arguments: Sequence[Value], around: Setting) -> Service:
    return Service(kind=kind, flags=options(arguments)[0], where=around.where, place=around.place)


def _router(kind: str, arguments: Sequence[Value], around: Setting, option: str, default: str) -> Router:
    flags, sides = _sides(arguments)
    speaks = flags.get(option) or Value(default, around.place)
    return Router(kind=kind, speaks=speaks, place=around.place, sides=sides)


def _sides(arguments: Sequence[Value]) -> tuple[dict[str, Value], dict[str, Role]]:
    """A router's options, and the ports that they give to each role."""
    flags, _ = options(arguments)
    sides = {}
    for name, value in flags.items():
        role = role_of(name) if re.match(r"(prefill|decod)(er)?e?(_|$)", name) else None
        for part in _SEPARATOR.split(value.text) if role else ():
            if match := re.search(r"(\d{2,5})/?$", part):
                sides[match[1]] = role_of(name) or Role.BOTH
    return flags, sides


def _container(words: Sequence[Value], around: Setting) -> Parts:
    """`docker run [options] IMAGE [command]`."""
    texts = [word.text for word in words]
    if "run" not in texts:
        return Parts()
    env, mounts = dict(around.env), dict(around.mounts)
    has_shm, shares_host, where = False, False, Where(f"{around.place.file}:{around.place.line}", is_certain=False)
    index = texts.index("run") + 1
    flags_alone = {"-d", "-it", "-i", "-t", "--rm", "--privileged", "--init", "--detach", "-dit", "-itd", "-ti"}
    while index < len(words) and texts[index].startswith("-"):
        name, equals, value = texts[index].partition("=")
        if not equals and name not in flags_alone:
            index += 1
            value = texts[index] if index < len(words) else ""
        index += 1
        if name in ("-e", "--env") and "=" in value:
            key, _, text = value.partition("=")
            env[key] = Value(text, words[index - 1].place)
        elif name == "--shm-size":
            has_shm = True
        elif name == "--ipc":
            shares_host = value == "host"
        elif name in ("--network", "--net") and value == "host":
            where = around.where
        elif name in ("-v", "--volume") and ":" in value:
            source, _, target = value.partition(":")
            mounts[target.partition(":")[0]] = f"volume {source}"
    if index >= len(words):
        return Parts()
    mine = msgspec.structs.replace(
        around,
        env=env,
        mounts=mounts,
        has_shm=has_shm or shares_host,
        shares_host=shares_host,
        where=where,
        image=words[index],
    )
    return contained(words[index + 1 :], mine)


def contained(words: Sequence[Value], around: Setting) -> Parts:
    """What a container starts: its command, or the arguments of its image's own."""
    found = run(words, around)
    if found != Parts() or around.image is None:
        return found
    is_engine = re.search(r"vllm|llm-d-(cuda|xpu|cpu)", around.image.text.rpartition("/")[2])
    if is_engine and words and _are_arguments(words):
        return Parts(instances=[engine(words, around)])
    return found


def _are_arguments(words: Sequence[Value]) -> bool:
    """Whether these words are an engine's options, perhaps after a model's name, and not a program."""
    if words[0].text.startswith("-"):
        return True
    return os.path.basename(words[0].text) not in _SHELLS and len(words) > 1 and words[1].text.startswith("--")
