"""Machines for tests that need several: network namespaces of this one, joined by links that a test can break.

    a ───── b        the stores of a and b talk over this link, and only over it
     \\     /
      ─ r ─          the router and the tests; what breaks between a and b does not touch how r reaches them

Each has one address, which exists only in these namespaces; there is no way from them to anywhere else. They have no
names: when the last process in them has ended, however that came about, the kernel removes them and their links.

Making them needs root and iproute2. Where these are missing, tests use loopback addresses (`hosts`) and skip what
needs a link of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

from kvtally.testing.deployment import LOOPBACK, Hosts, TwoNodes
from tests.waiting import HANG_S

CLONE_NEWNET = 0x40000000
NOWHERE = "02:00:00:00:00:01"  # a hardware address that nobody has
_OWN = "/proc/thread-self/ns/net"
_libc = ctypes.CDLL(None, use_errno=True)


class Namespaces(Hosts):
    """One network namespace for each node. `close` when the processes in them have ended."""

    addresses = {"a": "10.77.0.1", "b": "10.77.0.2", "r": "10.77.0.3"}
    router = "r"

    def __init__(self) -> None:
        self._home = os.open(_OWN, os.O_RDONLY)
        self._of: dict[str, int] = {}
        for node, address in self.addresses.items():
            self._of[node] = self._make()
            self._ip(node, f"address add {address}/32 dev lo")
            self._ip(node, "link set lo up")
        for one, other in combinations(self.addresses, 2):
            there = f"/proc/{os.getpid()}/fd/{self._of[other]}"
            self._ip(one, f"link add to-{other} type veth peer name to-{one} netns {there}")
            self._join(one, other)
            self._join(other, one)

    def close(self) -> None:
        for descriptor in (self._home, *self._of.values()):
            os.close(descriptor)

    @contextmanager
    def on(self, node: str) -> Iterator[None]:
        before = os.open(_OWN, os.O_RDONLY)
        try:
            _enter(self._of[node])
            yield
        finally:
            _enter(before)
            os.close(before)

    # ---- what happens to the link between two nodes, and `heal`, which undoes all of it

    def blackhole(self, one: str, other: str) -> None:
        """`one` has no way to `other` any more: it cannot connect, and what it answers goes nowhere."""
        self._ip(one, f"route replace blackhole {self.addresses[other]}/32")

    def mute(self, one: str, other: str) -> None:
        """Nothing that `one` sends reaches `other`, and nobody is told. The other direction works."""
        self._ip(one, f"neighbour replace {self.addresses[other]} lladdr {NOWHERE} nud permanent dev to-{other}")

    def unplug(self, one: str, other: str) -> None:
        self._ip(one, f"link set to-{other} down")

    def slow(self, one: str, other: str) -> None:
        """100 Mbit/s from `one` to `other`."""
        with self.on(one):
            _run(f"tc qdisc replace dev to-{other} root tbf rate 100mbit burst 32kb latency 50ms")

    def heal(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            address = self.addresses[there]
            with self.on(here):
                for what in (f"tc qdisc delete dev to-{there} root", f"ip neighbour delete {address} dev to-{there}"):
                    _run(what, check=False)  # there may be none
            self._join(here, there)

    # ---- making them

    def _make(self) -> int:
        """A new namespace; a descriptor of it."""
        _checked(_libc.unshare(CLONE_NEWNET))
        try:
            return os.open(_OWN, os.O_RDONLY)
        finally:
            _enter(self._home)

    def _join(self, here: str, there: str) -> None:
        """Make the way from one node to another."""
        self._ip(here, f"link set to-{there} up")
        self._ip(here, f"route replace {self.addresses[there]}/32 dev to-{there} src {self.addresses[here]}")

    def _ip(self, node: str, command: str) -> None:
        with self.on(node):
            _run(f"ip {command}")


@functools.cache
def obstacle() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [command for command in ("ip", "tc") if shutil.which(command) is None]:
        return f"network namespaces need iproute2: {' and '.join(missing)}"
    failed: list[OSError] = []

    def attempt() -> None:  # in a thread of its own, with which the namespace goes away
        try:
            _checked(_libc.unshare(CLONE_NEWNET))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(HANG_S)
    return f"network namespaces cannot be made here: {failed[0].strerror}" if failed else ""


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Namespaces if this process may make them, with the calling thread in that of the router; else loopback
    addresses."""
    if obstacle():
        yield LOOPBACK
        return
    namespaces = Namespaces()
    try:
        with namespaces.on(namespaces.router):
            yield namespaces
    finally:
        namespaces.close()


def leftovers(up: TwoNodes) -> dict[str, object]:
    """What the stores of both nodes hold for somebody, or believe of one another; nothing when they are at rest."""
    found: dict[str, object] = {}
    for name, address in zip("ab", up.sockets, strict=True):
        told = up.stats(address)
        arena, leases = told.arena, told.leases
        held = {
            "leases": leases.open + leases.waiting,
            "lookups": told.lookups.waiting,
            "beliefs": told.beliefs,
            "sends": told.sends.open,
            "bytes in limbo": arena.limbo_bytes,
            "bytes on their way": arena.staging_bytes,
            "bytes held": arena.held_bytes,
            "puts": sum(client.puts for client in told.clients),
            "lost peers": [peer.name for peer in told.peers if peer.state != "ok"],
        }
        found |= {f"{what} at {name}": count for what, count in held.items() if count}
    return found


def _enter(namespace: int) -> None:
    """This thread only; threads and processes that it starts are where it is."""
    _checked(_libc.setns(namespace, CLONE_NEWNET))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(command: str, *, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=HANG_S, check=False)
    if check and done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
