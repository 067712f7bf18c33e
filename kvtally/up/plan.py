"""Turns a deployment into processes: their commands and their order. Pure: a file and a host in, data out.

    stage 0  store                      stage 1  engines, all at once                      stage 2  router

Where the file names several machines, this is the part of one of them; the router is on one, with the engines of all.
Owns commands, ports, the sharing of GPUs (or of cores and memory, where there are none) and the pace of restarts.
Neighbours: `file` (what was asked for), `supervise` (carries it out), `cli.up` (prints it).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import NamedTuple

import msgspec

from kvtally.config.units import split_address
from kvtally.errors import ConfigError
from kvtally.up.document import Argument, Pool, Role, Scalar
from kvtally.up.file import LOOPBACK, Deployment, Node, bracketed

FIRST_PORT = {Role.PREFILL: 8100, Role.DECODE: 8200, Role.PLAIN: 8300}
STORE_START_S, ROUTER_START_S = 300.0, 60.0  # a store first reads its disk's journal
# What `vllm serve` runs; that command itself needs a distribution named vllm.
ENGINE_MODULE = "vllm.entrypoints.openai.api_server"
GIB = 1 << 30
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_KV_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")  # vLLM's; on a CPU they mean RAM

MOST_RESTARTS = 5
GOOD_LIFE_S = 15.0  # a process that was ready this long works, whatever killed it: deaths before it do not count
LONGEST_PAUSE_S = 30.0


class Part(StrEnum):
    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"
    ROUTER = "router"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs to know about its machine."""

    python: str
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    has_accelerator: bool = False  # another kind, which we do not share out
    cores: int = 1
    memory_bytes: int = 0
    environ: Mapping[str, str] = {}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process to keep running. `env` is added to the environment of `up`."""

    name: str
    part: Part
    stage: int  # started when every process of the stages before it is ready
    argv: list[str]
    env: dict[str, str] = {}
    host: str = ""  # as it stands in a URL
    port: int = 0  # 0: none
    bulk_port: int = 0  # of a store that others pull from; 0: none
    awaits: dict[str, str] = {}  # of a router: the health addresses of engines on other machines, by name
    health: str  # ready when this answers: an HTTP address, or the socket of a store
    start_timeout_s: float

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def ports(self) -> list[int]:
        return [port for port in (self.port, self.bulk_port) if port]


def plan(deployment: Deployment, host: Host) -> list[Process]:
    """The processes of one machine, in the order they start. Raises ConfigError if this cannot work on a machine like
    this."""
    store = [_store(deployment, host)] if deployment.starts_store else []
    router = [_router(deployment, host)] if deployment.runs_router else []
    processes = [*store, *_engines(deployment, host), *router]
    _check_ports(processes)
    return processes


def shell_command(process: Process) -> str:
    """The process as one line for a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    return " ".join([*settings, shlex.join(process.argv)])


def counted(lives_s: Sequence[float]) -> list[float]:
    """The lives that count: from the last good one on."""
    last_good = max((number for number, life_s in enumerate(lives_s) if life_s >= GOOD_LIFE_S), default=0)
    return list(lives_s[last_good:])


def pause_s(lives_s: Sequence[float]) -> float | None:
    """How long to wait before starting a process again, given how long each of its lives was. None: it died too often.

    Deaths are counted, not timed: an engine may take minutes to start and then die at once.
    """
    deaths = len(counted(lives_s))
    return min(2.0 ** (deaths - 1), LONGEST_PAUSE_S) if deaths <= MOST_RESTARTS else None


# ---- the processes


def _store(deployment: Deployment, host: Host) -> Process:
    port, bulk_port = _store_ports(deployment.store) if deployment.node.name else (0, 0)
    return Process(
        name="store",
        part=Part.STORE,
        stage=0,
        argv=[
            *(host.python, "-m", "kvtally", "store", "--socket", deployment.socket),
            *_flags(deployment.store),
        ],
        host=deployment.node.host if deployment.node.name else "",
        port=port,
        bulk_port=bulk_port,
        health=deployment.socket,
        start_timeout_s=STORE_START_S,
    )


def _store_ports(store: Mapping[str, str | bool]) -> tuple[int, int]:
    """Where the store of a node listens: for messages and, if it has peers, for bytes."""
    port = split_address(str(store["tcp"])).port
    if "bulk" in store:
        return port, split_address(str(store["bulk"])).port
    return port, port + 1 if "peers" in store else 0


def _engines(deployment: Deployment, host: Host) -> list[Process]:
    gpus = _share_gpus(deployment, host)
    count = sum(pool.count for pool in deployment.pools.values())
    node = deployment.node
    processes = []
    for role, pool in deployment.pools.items():
        arguments = _arguments(deployment, pool)
        own = {name: _text(value) for name, value in {**deployment.env, **pool.env}.items()}
        for name, port in _numbered(role, pool):
            given = {"CUDA_VISIBLE_DEVICES": gpus[name]} if name in gpus else _cpu_share(host, count, arguments)
            processes.append(
                Process(
                    name=name,
                    part=Part(role),
                    stage=1,
                    argv=[
                        *(host.python, "-m", ENGINE_MODULE, "--model", deployment.model),
                        *("--host", node.address, "--port", str(port)),
                        *("--kv-transfer-config", _transfer(deployment)),
                        *_flags(arguments),
                    ],
                    env={**given, **own},
                    host=node.host,
                    port=port,
                    health=f"http://{node.host}:{port}/health",
                    start_timeout_s=deployment.start_timeout_s,
                )
            )
    return processes


def _numbered(role: Role, pool: Pool) -> Iterator[tuple[str, int]]:
    """The name and the port of each engine of a role."""
    for index in range(pool.count):
        yield f"{role}-{index}", (pool.port or FIRST_PORT[role]) + index


class _Instance(NamedTuple):
    """An engine as the router sees it."""

    role: Role
    name: str
    url: str
    store: str


def _instances(nodes: Sequence[Node]) -> Iterator[_Instance]:
    for node in nodes:
        for role, pool in node.pools.items():
            for name, port in _numbered(role, pool):
                yield _Instance(role, f"{name} of node {node.name}", f"http://{node.host}:{port}", node.store)


def _router(deployment: Deployment, host: Host) -> Process:
    listen, port = split_address(deployment.listen)
    reached = bracketed({"0.0.0.0": LOOPBACK, "::": "::1"}.get(listen, listen))
    instances = [
        word
        for each in _instances(deployment.nodes)
        # To a router, engines that do both are decode engines without prefill.
        for word in ("--prefill" if each.role is Role.PREFILL else "--decode", f"{each.url},store={each.store}")
    ]
    others = [node for node in deployment.nodes if node is not deployment.node]
    return Process(
        name="router",
        part=Part.ROUTER,
        stage=2,
        argv=[
            *(host.python, "-m", "kvtally", "route", "--listen", deployment.listen),
            *instances,
            *_flags(deployment.router),
            *_flags({name: deployment.store[name] for name in ("token_file",) if name in deployment.store}),
        ],
        host=reached,
        port=port,
        awaits={each.name: f"{each.url}/health" for each in _instances(others)},
        # Not /health, which fails while engines are down: `up` would kill a router that only waits for them.
        health=f"http://{reached}:{port}/instances",
        start_timeout_s=ROUTER_START_S,
    )


def _transfer(deployment: Deployment) -> str:
    extra = {"store": deployment.socket, "autostart": False, **deployment.connector}
    config = {"kv_connector": "KVTally", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return msgspec.json.encode(config).decode()


def _arguments(deployment: Deployment, pool: Pool) -> dict[str, Argument]:
    """The arguments of one role's engines, by vLLM's names. A null removes what was set for all engines."""
    merged: dict[str, Argument] = {}
    for arguments in (deployment.args, pool.args):
        merged |= {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _flags(arguments: Mapping[str, Argument]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif value is False:
            yield flag.replace("--", "--no-", 1)
        elif isinstance(value, list):
            yield from (flag, *map(_text, value))
        elif isinstance(value, dict):
            yield from (flag, msgspec.json.encode(value).decode())
        else:
            yield from (flag, str(value))


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_ports(processes: Sequence[Process]) -> None:
    taken: dict[int, str] = {}
    for process in processes:
        for port in process.ports:
            if port > 65_535:
                raise _unusable(f"{process.name} would have port {port}", "Choose a lower first port.")
            if (other := taken.setdefault(port, process.name)) != process.name:
                raise _unusable(
                    f"{other} and {process.name} would both have port {port}",
                    "Choose other ports: router: {listen: ...}, prefill: {port: ...}, decode: {port: ...}.",
                )


# ---- what the engines share


def _share_gpus(deployment: Deployment, host: Host) -> dict[str, str]:
    """The GPUs of each engine: those the file names, else the next free ones."""
    named = {
        f"{role}-{index}": ",".join(map(str, entry)) if isinstance(entry, list) else str(entry)
        for role, pool in deployment.pools.items()
        for index, entry in enumerate(pool.gpus)
    }
    if not host.gpus:
        return named
    claimed = {gpu.strip() for gpus in named.values() for gpu in gpus.split(",")}
    free = [gpu for gpu in host.gpus if gpu not in claimed]
    for role, pool in deployment.pools.items():
        sizes = [_arguments(deployment, pool).get(name, 1) for name in _PARALLEL]
        needed = prod(size for size in sizes if isinstance(size, int))
        for index in range(0 if pool.gpus else pool.count):
            if len(free) < needed:
                raise _unusable(
                    f"{role}-{index} needs {needed} GPU(s); {len(free)} of {len(host.gpus)} here are left for it",
                    "Ask for fewer engines, or let them share: gpus: [0, 0] with args: {gpu_memory_utilization: 0.45}.",
                )
            named[f"{role}-{index}"], free = ",".join(free[:needed]), free[needed:]
    return named


def _cpu_share(host: Host, engines: int, arguments: Mapping[str, Argument]) -> dict[str, str]:
    """What each engine gets on a machine without an accelerator, where vLLM by default takes all cores and memory."""
    if host.gpus or host.has_accelerator:
        return {}
    share: dict[str, str] = {}
    if engines > 1:
        threads = str(max(1, host.cores // engines))
        share |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if not any(name in arguments for name in _KV_SIZES):
        share["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, host.memory_bytes // GIB // 4 // engines))
    return {name: value for name, value in share.items() if name not in host.environ}


def _unusable(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code="KV-102")
