"""What a process that we start needs: free ports, an environment, and an end when ours comes.

Neighbours: demo, benches and tests. What the machine has is in `config.sizes`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

LOCALHOST = "127.0.0.1"
FIRST_PORT = 10_000  # below, services have their own
MOST_TRIES = 100  # of ports that may be taken


def free_ports(count: int, proc: Path = Path("/proc")) -> list[int]:
    """TCP ports of this machine that nobody has. It may take an engine's start until they are listened to, so they are
    none of those that outgoing connections are given meanwhile. Raises OSError where there are too few."""
    outgoing: list[str] = []
    with suppress(OSError):
        outgoing = (proc / "sys" / "net" / "ipv4" / "ip_local_port_range").read_text(encoding="utf-8").split()
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
