"""`kvtally bench peers`: what one store gets from another over the network stack, beside raw sockets in the same run.

    pull          64 × 2 MiB out of another store's arena, verified   │ the same bytes over as many plain sockets
    with TLS      the same, encrypted                                 │ the same
    lookups       16,384 tokens that nobody has: what asking adds     │ the same lookup without asking
    first contact one of them before the two stores have met
    staged        8,192 tokens (64 MiB), from the question to the last byte verified
    the loop      empty round trips to the pulling store while it pulls

Owns the plan and the figures. Two stores on two loopback addresses share nothing but the network stack. Samples of a
limit and of ours alternate, so that a noisy neighbour disturbs both. Both ends share this machine's processors: between
two machines each has its own.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import RenderableType

from kvtally.bench import report
from kvtally.bench.command import Meter, command_line, measure
from kvtally.bench.daemon import Daemon
from kvtally.bench.report import Row, Run, Target, median, p99
from kvtally.bench.tasks import (
    CHUNK_TOKENS,
    OBJECT_BYTES,
    Allocate,
    Connect,
    Get,
    Listen,
    Look,
    Part,
    Ping,
    Put,
    Receive,
    Send,
    Shape,
    TaskWorker,
    run_all,
)
from kvtally.processes import free_ports
from kvtally.store.tiers.base import READERS

HOSTS = ("127.0.0.2", "127.0.0.3")
STAGED_TOKENS = 8_192
STAGED_SETS = 3
STRANGERS = 2_000_000_000  # where the seeds of unknown prompts begin
PINGS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    objects: int = 64
    rounds: int = 12
    tls_rounds: int = 6
    lookups: int = 400

    @property
    def memory_bytes(self) -> int:
        """Of each store: everything that is pulled, each set once, and room to spare."""
        staged = STAGED_SETS * STAGED_TOKENS // CHUNK_TOKENS
        return (self.rounds * self.objects + staged) * OBJECT_BYTES * 3 // 2


QUICK = Scale(objects=8, rounds=2, tls_rounds=1, lookups=32)


class Figures(Run, kw_only=True):
    """What `--json` prints."""

    objects: int = 0
    connections: int = READERS
    pull_gbps: float = 0.0
    raw_gbps: float = 0.0
    pull_tls_gbps: float | None = None  # None: this machine has no `openssl` to make a certificate with
    lookup_ms: float = 0.0  # what asking the other store adds to a lookup
    lookup_here_ms: float = 0.0  # one that asks nobody else
    round_trip_ms: float = 0.0
    first_contact_ms: float = 0.0
    staged_ms_8192_tokens: float = 0.0
    event_loop_p99_ms: float = 0.0
    targets: list[Target] = []


def rows(figures: Figures) -> list[Row]:
    pull = Row(key="pull_gbps", name="pull, verified", value=figures.pull_gbps, unit="GB/s")
    found = [pull.beside(figures.raw_gbps, "raw sockets").at_least(0.8)]
    if figures.pull_tls_gbps is not None:
        tls = Row(key="pull_tls_gbps", name="pull, TLS", value=figures.pull_tls_gbps, unit="GB/s")
        found.append(tls.beside(figures.raw_gbps, "raw sockets"))
    found += [
        Row(key="lookup_ms", name="lookup at a peer", value=figures.lookup_ms, unit="ms").at_most(0.3),
        Row(key="lookup_here_ms", name="lookup in one's own store", value=figures.lookup_here_ms, unit="ms"),
        Row(key="round_trip_ms", name="empty round trip", value=figures.round_trip_ms, unit="ms"),
        Row(key="first_contact_ms", name="first contact", value=figures.first_contact_ms, unit="ms"),
        Row(key="staged_ms_8192_tokens", name="8,192 tokens staged", value=figures.staged_ms_8192_tokens, unit="ms"),
        Row(key="event_loop_p99_ms", name="loop, p99 while pulling", value=figures.event_loop_p99_ms, unit="ms"),
    ]
    return found


def page(figures: Figures) -> RenderableType:
    about = [f"{figures.objects} × 2 MiB", f"{figures.connections} connections"]
    notes = ["Sender and receiver share this machine's processors; between two machines each has its own."]
    if figures.pull_tls_gbps is None:
        notes.append("TLS was not measured: there is no `openssl` here to make a certificate with.")
    return report.page(figures, about, report.rows_table(rows(figures)), notes=notes)


class Pair:
    """Two stores that are peers, and a worker for each."""

    def __init__(self, stack: ExitStack, directory: Path, scale: Scale, *, tls: Sequence[str] = ()) -> None:
        name = "tls-" if tls else ""
        token = directory / f"{name}token"
        token.write_text(secrets.token_hex(16), encoding="utf-8")
        self.daemons, self.workers, self.addresses = [], [], []
        for host in HOSTS:
            port, bulk = free_ports(2)
            flags = ["--tcp", f"{host}:{port}", "--bulk", f"{host}:{bulk}", "--token-file", str(token), *tls]
            flags += [word for peer in HOSTS for word in ("--peers", peer)]
            where = name + host.replace(".", "-")
            daemon = Daemon(directory, where, memory_bytes=scale.memory_bytes, flags=flags)
            stack.callback(daemon.close)
            worker = stack.enter_context(TaskWorker(directory / f"{where}-worker.log"))
            worker.run(Connect("c", daemon.socket, Shape.BULK))
            worker.run(Connect("h", daemon.socket, Shape.HYBRID))
            worker.run(Allocate(scale.objects))
            self.addresses.append(f"tcp://{host}:{port}")
            self.daemons.append(daemon)
            self.workers.append(worker)
        for daemon in self.daemons:
            daemon.wait_populated()

    def save(self, numbers: range) -> None:
        for number in numbers:
            self.workers[0].run(Put("c", number, checksummed=True))

    def pull(self, number: int) -> float:
        """Seconds from the question until everything is in the arena, verified."""
        return self.workers[1].run(Get("c", number, verify=False, source=self.addresses[0]))[0]

    def look(self, seeds: Sequence[int], *, is_asked: bool = True) -> list[float]:
        """Lookups of prompts that nobody has, with or without a question to the other store."""
        return self.workers[1].run(Look("h", list(seeds), 0, Part.HOLD, source=self.addresses[0] if is_asked else ""))


def run(directory: Path, scale: Scale, *, is_quick: bool = False) -> Figures:
    figures = Figures(objects=scale.objects)
    set_bytes = scale.objects * OBJECT_BYTES
    with ExitStack() as stack, Meter(6) as meter:
        with meter.phase("two stores", 1):
            pair = Pair(stack, directory, scale)
            pinger = stack.enter_context(TaskWorker(directory / "pinger.log"))
            pinger.run(Connect("c", pair.daemons[1].socket, Shape.BULK))
        with meter.phase("first contact, lookups", 1):
            figures.first_contact_ms = pair.look([STRANGERS])[0] * 1e3
            seeds = range(STRANGERS + 1, STRANGERS + 1 + scale.lookups)
            asked, here = pair.look(seeds), pair.look(seeds, is_asked=False)
            figures.lookup_here_ms = median(here) * 1e3
            figures.lookup_ms = (median(asked) - median(here)) * 1e3
            figures.round_trip_ms = median(pinger.run(Ping("c", PINGS))) * 1e3
        with meter.phase("pulls and raw sockets in turn", 3):
            pair.save(range(scale.rounds))
            pulls, raws, pings = [], [], []
            for number in range(scale.rounds):
                raws.append(_raw(pair.workers))
                pinger.send(Ping("c", PINGS))
                pulls.append(pair.pull(number))
                pings += pinger.receive(list[float], 60.0)
        figures.raw_gbps, figures.pull_gbps = (set_bytes / median(times) / 1e9 for times in (raws, pulls))
        figures.event_loop_p99_ms = p99(pings) * 1e3
        with meter.phase("8,192 tokens", 1):
            for worker in pair.workers:
                worker.run(Allocate(STAGED_TOKENS // CHUNK_TOKENS))
            numbers = range(1_000, 1_000 + STAGED_SETS)
            pair.save(numbers)
            figures.staged_ms_8192_tokens = median([pair.pull(number) for number in numbers]) * 1e3
    tls = _certificate(directory)
    if tls:
        with ExitStack() as stack, Meter(1) as meter, meter.phase("pulls with TLS", 1):
            pair = Pair(stack, directory, scale, tls=tls)
            pair.save(range(scale.tls_rounds))
            figures.pull_tls_gbps = set_bytes / median([pair.pull(number) for number in range(scale.tls_rounds)]) / 1e9
    figures.targets = Target.of(rows(figures))
    if is_quick:  # sets so small meet or miss targets by chance
        figures.targets = [msgspec.structs.replace(target, ok=None) for target in figures.targets]
    return figures


def _raw(workers: Sequence[TaskWorker]) -> float:
    """Seconds for the same bytes over plain sockets, from the sending to the pulling worker."""
    sender, receiver = workers
    host = HOSTS[1]
    port = int(receiver.run(Listen(host))[0])
    (_, (seconds,)) = run_all((sender, receiver), (Send(host, port, READERS), Receive(READERS)))
    return seconds


def _certificate(directory: Path) -> list[str]:
    """Flags for TLS with a certificate that is its own authority; none if this machine cannot make one."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return []
    cert, key = directory / "cert.pem", directory / "key.pem"
    names = ",".join(f"IP:{host}" for host in HOSTS)
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=kvtally bench", "-addext", f"subjectAltName={names}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    return ["--tls-cert", str(cert), "--tls-key", str(key), "--peers-ca", str(cert)]


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether everything could be measured, not whether targets were met."""
    parser = command_line(
        "peers",
        "Measure what one store gets from another one over this machine's network stack. Each figure stands beside raw "
        "sockets, taken in the same run. Needs no vLLM. Takes about a minute; nothing else should run meanwhile.",
    )
    parser.add_argument("--quick", action="store_true", help="take a look in seconds; the figures are rough")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    measure(options, lambda directory: run(directory, scale, is_quick=options.quick), page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
