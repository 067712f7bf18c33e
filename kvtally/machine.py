"""What this machine, or the container we run in, can give: memory, room on disk, a port, places for files, and what a
process of ours is started with. Reads the system, changes nothing.

Neighbours: `config` (defaults and limits of sizes), `store.arena`; demo, benches and tests (ports, processes).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

LOCALHOST = "127.0.0.1"
FIRST_PORT = 10_000  # below, services have their own
MOST_TRIES = 100  # of ports that may be taken


def free_ports(count: int, proc: Path = Path("/proc")) -> list[int]:
    """TCP ports of this machine that nobody has. It may take an engine's start until they are listened to, so they are
    none of those that outgoing connections are given meanwhile. Raises OSError where there are too few."""
    outgoing = _read(proc / "sys" / "net" / "ipv4" / "ip_local_port_range").split()
    span = range(FIRST_PORT, int(outgoing[0]) if outgoing else FIRST_PORT)
    tried = random.SystemRandom().sample(span, min(len(span), MOST_TRIES))
    ports: list[int] = []
    with ExitStack() as probes:
        for port in [*tried, *[0] * count]:  # 0: whatever the system gives
            with suppress(OSError):
                ports.append(probes.enter_context(socket.create_server((LOCALHOST, port))).getsockname()[1])
            if len(ports) == count:
                return ports
    raise OSError(f"{count} ports are wanted, {len(ports)} are free")


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The most memory this process could ever use: the machine's, or the tightest limit of its control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_cgroup_limits(proc / "self" / "cgroup", cgroups)])


def _cgroup_limits(membership: Path, root: Path) -> Iterator[int]:
    """Memory limits of every control group from the process's own up to the root, both versions."""
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inside = Path(group.lstrip("/"))
        # In a container the path may be the host's: then only the root, which is the container's own group, exists.
        for directory in (inside, *inside.parents):
            limit = _read(base / directory / name).strip()
            if limit.isdigit():  # "max": no limit
                yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def disk_total_bytes(directory: Path) -> int:
    """Size of the file system that holds, or would hold, this directory. Raises OSError."""
    system = os.statvfs(_existing(directory))
    return system.f_blocks * system.f_frsize


def disk_usable_bytes(directory: Path) -> int:
    """What is free there, and what the directory holds already: so a restart finds the same room. Raises OSError."""
    existing = _existing(directory)
    system = os.statvfs(existing)
    held_bytes = sum(_allocated_bytes(directory)) if existing == directory else 0
    return system.f_bavail * system.f_frsize + held_bytes


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _allocated_bytes(directory: Path) -> Iterator[int]:
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a store that runs there replaces files
                yield os.lstat(os.path.join(parent, name)).st_blocks * 512


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Where this user's sockets go. Raises OSError where nothing can be written to."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvtally") if runtime else Path(tempfile.gettempdir(), f"kvtally-{os.getuid()}")


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG wants what should outlive a restart but matters to nobody else."""
    return Path(environ.get("XDG_STATE_HOME") or Path(_home(), ".local", "state"), "kvtally")


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG wants what can be computed again."""
    return Path(environ.get("XDG_CACHE_HOME") or Path(_home(), ".cache"), "kvtally")


def _home() -> Path:
    """Of a user without one it is `/`, as containers have it, and never a directory named `~`."""
    return Path("/", os.path.expanduser("~").removeprefix("~"))


def python_path() -> str:
    """PYTHONPATH of a process that is to import this very package, wherever it was imported from."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def ending_with_us(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command, to be sent this signal by the kernel when we are gone, however we ended. The process asks for that
    itself, before it becomes what it is to be: nothing of ours runs between fork and exec, where threads are in the
    way. To be started by a thread that lives as long as we do."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(int(number)), str(os.getpid()), *command]


_TIE = """
import ctypes, os, sys
number, parent = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG; it outlives exec
if os.getppid() != parent:
    sys.exit(127)  # it was gone before we asked to be told
os.execv(sys.argv[3], sys.argv[3:])
"""


def own_environment() -> dict[str, str]:
    """Ours without settings, which would make what is started another thing, and with this package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTALLY_")}
    return {**kept, "PYTHONPATH": python_path()}
