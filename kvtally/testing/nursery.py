"""Starts runners fast: a process that has already imported vLLM forks them, so that none has to import it again.

    test ──Order, with stdin, stdout and log──▶ nursery ──fork──▶ runner
         ◀──its pid and pidfd───────────────────────┘

Importing vLLM takes ten seconds of processor time, as long as everything else an engine does before it is ready. The
nursery imports it for the first order and runs nothing of it, so a runner finds the state that its own import would
have left. Environment variables that vLLM reads while it is imported are those of the first order.

A nursery ends with the process that made it; runners end by themselves (see `runner`). It has only one thread, because
it forks. Neighbours: `engines` (left: orders), `runner` (right: what is forked).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import IO, NamedTuple

import msgspec

from kvtally.errors import TransportError
from kvtally.processes import python_path

START_S = 120.0
ORDER_BYTES = 1 << 17
# What a runner imports anyway, by its role.
IMPORTS = {
    "engine": ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "kvtally.vllm.connector"),
    "server": ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "kvtally.vllm.connector"),
}


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A runner's arguments, its role first, and the environment and directory it gets."""

    arguments: list[str]
    environment: dict[bytes, bytes]
    directory: str


class Forked(NamedTuple):
    """A runner that leads a process group. It is not a child of this process; `end` is its pidfd."""

    pid: int
    end: int
    stdin: IO[bytes]
    stdout: IO[bytes]


class Nursery:
    """Takes one order at a time; the first that needs vLLM takes a while. After an order has failed, the nursery is
    closed: a late reply would answer the next order."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        return self._orders.fileno() >= 0

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """The runner, once it leads its process group."""
        settings = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        order = msgspec.msgpack.encode(Order(list(arguments), settings, os.getcwd()))
        if len(order) > ORDER_BYTES:
            raise _broken(f"its environment and arguments have {len(order)} bytes, at most {ORDER_BYTES} are allowed")
        with self._lock, ExitStack() as stack:
            stack.callback(self._orders.close)
            stdin, ours_in, ours_out, stdout = pipes = [*os.pipe(), *os.pipe()]
            for end in pipes:
                stack.callback(os.close, end)
            try:
                socket.send_fds(self._orders, [order], [stdin, stdout, log.fileno()])
                pid, ends, _, _ = socket.recv_fds(self._orders, 32, 1)
            except OSError as error:
                raise _broken(str(error)) from error
            if not ends:
                raise _broken("the process that starts them has ended")
            stack.pop_all()
        for end in (stdin, stdout):
            os.close(end)
        return Forked(int(pid), ends[0], os.fdopen(ours_in, "wb", buffering=0), os.fdopen(ours_out, "rb", buffering=0))

    def close(self) -> None:
        self._orders.close()
        self._process.wait(START_S)


def _broken(why: str) -> TransportError:
    return TransportError(f"no engine can be started: {why}", remedy="See whether `import vllm` works.")


_nurseries: dict[int, Nursery] = {}
_making = threading.Lock()


def nursery(number: int) -> Nursery:
    """One of this process's nurseries. Runners from the same nursery share what an interpreter draws when it starts,
    such as the seed of `hash`."""
    with _making:
        known = _nurseries.get(number)
        if known is None or not known.is_open:
            known = _nurseries[number] = Nursery({**os.environ, "PYTHONPATH": python_path()})
        return known


# ---- the process


def main(arguments: list[str]) -> int:
    orders = socket.socket(fileno=int(arguments[0]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 3)
        if not data:
            return 0
        order = msgspec.msgpack.decode(data, type=Order)
        os.environb.clear()
        os.environb.update(order.environment)
        for name in IMPORTS.get(order.arguments[0], ()):
            with contextlib.suppress(ImportError):  # the runner will report it
                import_module(name)
        if not os.fork():
            _become(order, descriptors)
            socket.send_fds(orders, [b"%d" % os.getpid()], [os.pidfd_open(os.getpid())])
            orders.close()
            from kvtally.testing import runner

            return runner.main(order.arguments)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended since the last order
                pass


def _become(order: Order, descriptors: Sequence[int]) -> None:
    """Make this process look as if it had been started with these."""
    os.setsid()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(order.directory)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
