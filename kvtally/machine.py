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
    """Free TCP ports on this machine. An engine may take minutes until it listens on one, so they lie outside the range
    from which the kernel serves outgoing connections. Raises OSError if there are too few."""
    outgoing: list[str] = []
    with suppress(OSError):
        outgoing = (proc / "sys" / "net" / "ipv4" / "ip_local_port_range").read_text(encoding="utf-8").split()
    span = range(FIRST_PORT, int(outgoing[0]) if outgoing else FIRST_PORT)
    tried = random.SystemRandom().sample(span, min(len(span), MOST_TRIES))
    ports: list[int] = []
    with ExitStack() as probes:
        for port in [*tried, *[0] * count]:  # 0: let the system choose
            with suppress(OSError):
                ports.append(probes.enter_context(socket.create_server((LOCALHOST, port))).getsockname()[1])
            if len(ports) == count:
                return ports
    raise OSError(f"{count} ports are wanted, {len(ports)} are free")


def python_path() -> str:
    """The PYTHONPATH with which a process imports this very package, wherever ours came from."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def ending_with_us(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command, wrapped so that the kernel sends it this signal when our process ends, however it ends.

    The new process asks for the signal itself, just before it runs the command: code of ours between fork and exec is
    unsafe beside threads. Start it from a thread that lives as long as our process: the kernel watches that thread."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(int(number)), str(os.getpid()), *command]


_TIE = """
import ctypes, os, sys
number, parent = map(int, sys.argv[1:3])
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG; it outlives exec
if os.getppid() != parent:
    sys.exit(127)  # the parent ended before we asked
os.execv(sys.argv[3], sys.argv[3:])
"""


def own_environment() -> dict[str, str]:
    """Our environment for a process that we start: with this package on its path, and without KVTALLY_ settings, which
    were meant for us."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTALLY_")}
    return {**kept, "PYTHONPATH": python_path()}
