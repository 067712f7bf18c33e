"""Can this machine run the plan? Asked before anything is started, so that a wrong file costs a second, not minutes.

Owns the questions to the system: which node this is, GPUs, vLLM, the model's files, ports, the store's socket; and the
probe that tells whether a process is ready. Neighbours: `plan` (gets a Host), `supervise` (asks `answers`). Blocking,
with deadlines.
"""

from __future__ import annotations

import errno
import http.client
import importlib.util
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtally.client import Miss, StoreClient
from kvtally.config.sizes import available_memory_bytes
from kvtally.errors import ConfigError
from kvtally.up.document import Document
from kvtally.up.file import Deployment, check_node
from kvtally.up.plan import Host, Process

PROBE_S = 2.0
OWN_ADDRESSES = "`hostname -I` shows this one's"
_OFFLINE = ("1", "on", "yes", "true")
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback interface


def this_host(environ: Mapping[str, str], root: Path = Path("/")) -> Host:
    """What `plan` needs to know about this machine."""
    # A container shows the devices it may use. On a bare machine they may not exist yet, but the driver knows them.
    count = len(list(root.glob("dev/nvidia[0-9]*"))) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(count)] if visible is None else [gpu for gpu in visible.split(",") if gpu]
    return Host(
        python=sys.executable,
        gpus=tuple(gpus) if count else (),
        has_accelerator=(root / "dev" / "kfd").exists(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_memory_bytes(),
        environ=environ,
    )


def this_node(document: Document, named: str | None, path: Path) -> str:
    """Which node this machine is: the named one, else the only one with an address of this machine; empty if the file
    names none. Raises ConfigError if that cannot be."""
    mine = [name for name, node in document.nodes.items() if is_here(node.address)]
    if named is not None:
        check_node(document, named, path)
        if named and named not in mine:
            hint = f"this machine has that of node {mine[0]}: --node {mine[0]}" if mine else OWN_ADDRESSES
            raise ConfigError(
                f"node {named}'s address, {document.nodes[named].address}, is not one of this machine's",
                remedy=f"Start node {named} on the machine that has it; {hint}.",
                code="KV-102",
            )
        return named
    if len(mine) == 1 or not document.nodes:
        return "".join(mine)
    if mine:
        raise ConfigError(
            f"the addresses of several nodes are this machine's: {', '.join(mine)}",
            remedy=f"Name the one to run: --node {mine[0]}.",
            code="KV-102",
        )
    there = ", ".join(f"{name} {node.address}" for name, node in document.nodes.items())
    raise ConfigError(
        f"this machine has the address of none of the file's nodes: {there}",
        remedy=f"Run this on one of them, or correct `address` in the file; {OWN_ADDRESSES}.",
        code="KV-102",
    )


def is_here(address: str) -> bool:
    """Whether an address, or what a name stands for, is one of this machine's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_listen(family, target) for family, _, _, _, target in found)


def _can_listen(family: socket.AddressFamily, target: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(target)
        except OSError:
            return False
    return True


def check(deployment: Deployment, processes: Sequence[Process], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for anything that would fail later. Starts nothing, changes nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed beside this kvtally ({sys.executable})",
            remedy="Install vLLM 0.32 into the same environment. To run elsewhere, --print shows the commands.",
            code="KV-106",
        )
    _check_model(deployment.model, environ)
    for process in processes:
        for port in process.ports:
            _check_port(process, port)
    is_there = answers(deployment.socket, 0.3)
    if deployment.starts_store and is_there:
        raise ConfigError(
            f"a store already serves {deployment.socket}",
            remedy=f"Use it: `store: {deployment.socket}`; or stop it; or choose another: `store: {{socket: ...}}`.",
            code="KV-104",
        )
    if deployment.pools and not deployment.starts_store and not is_there:
        raise ConfigError(
            f"no store answers at {deployment.socket}, which the file names",
            remedy="Start it, or write `store: {socket: ...}` to have one started.",
            code="KV-106",
        )


def answers(address: str, timeout_s: float = PROBE_S) -> bool:
    """Whether the process at this address is ready: HTTP answers 200, a store's socket accepts a client."""
    if not address.startswith(("http://", "https://")):
        with StoreClient(address, name="kvtally up") as client:
            return not isinstance(client.connect(timeout_s), Miss)
    try:
        with direct.open(address, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _check_model(model: str, environ: Mapping[str, str]) -> None:
    if model.startswith("/"):
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise ConfigError(
                f"there is no model in {model}: it has no config.json",
                remedy="Name a directory with a model in it, or a model hub's owner/name.",
                code="KV-106",
            )
        return
    if model.count("/") > 1:
        raise ConfigError(
            f"{model} is neither a directory here nor a model hub's owner/name",
            remedy="A relative path is relative to the file; write ./ before it.",
            code="KV-106",
        )
    is_offline = any(environ.get(name, "").lower() in _OFFLINE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    cache = Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or _default_cache(environ), "hub"))
    if is_offline and not os.path.isdir(cache / f"models--{model.replace('/', '--')}"):
        raise ConfigError(
            f"the model {model} is not in {cache}, and HF_HUB_OFFLINE forbids fetching it",
            remedy="Fetch it while online, or name the directory it lies in.",
            code="KV-106",
        )


def _default_cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")


def _check_port(process: Process, port: int) -> None:
    try:
        with socket.create_server((process.host.strip("[]"), port), family=_family(process.host)):
            return
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"port {port} on {process.host}, for {process.name}, {reason}",
            remedy=f"Stop the process that uses it, or choose another in the file: `{process.part}: {{port: ...}}`.",
            code="KV-102",
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
