"""`kvtally stat`, `receipts` and `reset`: looking into a running store, through the same client that engines use."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvtally.cli.options import ConfigOption, JsonOption, SocketOption
from kvtally.config import load
from kvtally.config.units import printable
from kvtally.errors import ConfigError, KVTallyError, TransportError

if TYPE_CHECKING:  # these take 0.1 s to import: too long for `kvtally --help`
    from rich.console import RenderableType

    from kvtally.client import Call, Miss
    from kvtally.core.receipts import Receipt
    from kvtally.wire.messages import ResetDone
    from kvtally.wire.stats import NamespaceStats

R = TypeVar("R")

WATCH_S = 1.0
RESET_S = 60.0  # a disk takes seconds to remove some 100,000 objects
UNREMOVED = "KV-600"  # a tier has not removed everything yet; if it cannot, the code is another
AGAIN_S = 0.1
_REFUSAL = re.compile(r"(.*) \[(KV-\d{3})\]\. (.*)", re.DOTALL)  # an error as text: `KVTallyError.__str__`
SHORTEST_PREFIX = 6  # of a digest, in hexadecimal digits


def stat(
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show what a store holds, reuses and serves.

    Tiers and how full they are, hits and misses by reason, throughput, leases, clients and namespaces.
    """
    with _Asker(socket, config) as store:
        if as_json:
            _stat_json(store, watch=watch)
        else:
            _stat_tables(store, watch=watch)


def receipts(
    ticket: Annotated[
        str | None,
        typer.Argument(metavar="TICKET", help="Ticket of one request. Default: the most recent receipts."),
    ] = None,
    last: Annotated[
        int,
        typer.Option("--last", metavar="N", min=1, max=1000, help="How many of the most recent receipts to show."),
    ] = 20,
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was promised and what was really reused.

    A receipt has two halves: what prefill saved and what decode loaded. Matching them gives the verdict.
    """
    with _Asker(socket, config) as store:
        client = store.client
        found = store.answer(client.receipts(ticket) if ticket else client.receipts(last=last)).receipts
    if as_json:
        typer.echo(json.dumps([_receipt_tree(receipt) for receipt in found], indent=2))
    elif found:
        from kvtally.cli.render import console, receipts_table

        console().print(receipts_table(found))
    else:
        what = f"No receipt of {printable(ticket)}" if ticket else "No receipts"
        typer.echo(f"{what}: none was filed in the last minutes.", err=True)
    if ticket and not found:
        raise typer.Exit(1)


def reset(
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="HEX",
            help="Digest of the namespace to forget, or its first digits; kvtally stat shows it. Default: all of them.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a store forget what it holds, on every tier.

    Engines keep running and compute again. Objects that an engine is reading stay until it has finished.
    """
    from kvtally.cli.render import read_stats

    with _Asker(socket, config) as store:
        known = read_stats(store.stats()).namespaces
        chosen = known if namespace is None else [_only(namespace, known)]
        if not chosen:
            typer.echo("Nothing to forget: the store knows no namespace.")
            return
        for item in chosen:
            typer.echo(f"{item.digest[:12]}  {printable(item.model)}  {item.objects:,} objects")
        if not yes:
            typer.confirm("Forget these?", abort=True)
        deadline = time.monotonic() + RESET_S
        calls = [store.reset(item.digest) for item in chosen]  # send all before one can fail
        for item, call in zip(chosen, calls, strict=True):
            store.see_removed(item.digest, call, deadline)
    typer.echo(f"Forgot {sum(item.objects for item in chosen):,} objects.")


def _stat_json(store: _Asker, *, watch: bool) -> None:
    """Print one tree; with `watch`, a whole tree on one line each second."""
    while True:
        typer.echo(json.dumps(store.stats(), indent=None if watch else 2))
        if not watch:
            return
        time.sleep(WATCH_S)


def _stat_tables(store: _Asker, *, watch: bool) -> None:
    from rich.live import Live

    from kvtally.cli.render import console

    pages, screen = _pages(store), console()
    if watch and screen.is_terminal and not screen.is_dumb_terminal:
        with Live(next(pages), console=screen, screen=True, auto_refresh=False) as live:
            for page in pages:
                live.update(page, refresh=True)
    for page in pages if watch else (next(pages),):
        screen.print(page)


def _pages(store: _Asker) -> Iterator[RenderableType]:
    """Yield a page at once, then one each second."""
    from rich.text import Text

    from kvtally.cli.render import StatsPage, read_stats

    now = read_stats(store.stats())
    yield StatsPage(now)
    while True:
        time.sleep(WATCH_S)
        try:
            before, now = now, read_stats(store.stats())
        except TransportError as error:  # it may only be restarting
            yield Text(f"{error.message}; waiting for it")
        else:
            yield StatsPage(now, before if before.store == now.store else None)


class _Asker:
    """A client for people: where an engine would count a miss and go on, this raises an error."""

    def __init__(self, socket: str | None, config: str | None) -> None:
        from kvtally.client import StoreClient

        self.address = load(file=config, flags={"store.socket": socket}).socket()
        self.client = StoreClient(self.address, name="kvtally command")

    def __enter__(self) -> _Asker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()

    def stats(self) -> dict[str, object]:
        return self.answer(self.client.stats()).stats

    def reset(self, digest: str) -> Call[ResetDone]:
        return self.client.reset(bytes.fromhex(digest), timeout_s=RESET_S)

    def see_removed(self, digest: str, call: Call[ResetDone], deadline: float) -> None:
        """Wait until every tier has removed the objects, so that no restart brings them back. The store itself has
        forgotten them already; each further reset waits a moment for a tier that is not done."""
        while True:
            try:
                self.answer(call)
                return
            except TransportError as error:
                if error.code != UNREMOVED or time.monotonic() >= deadline:
                    raise
            time.sleep(AGAIN_S)
            call = self.reset(digest)

    def answer(self, call: Call[R]) -> R:
        from kvtally.client import Miss

        result = call.wait()
        if isinstance(result, Miss):
            raise self.client.refusal or self._failure(result)
        return result

    def _failure(self, miss: Miss) -> KVTallyError:
        from kvtally.wire.messages import MissReason

        if miss.reason is MissReason.STORE_UNREACHABLE:
            return TransportError(
                f"no store answers at {self.address}",
                remedy="Start one with `kvtally store`, or name a running one of your own user: --socket PATH.",
            )
        if miss.reason is MissReason.DEADLINE:
            return TransportError(
                f"the store at {self.address} did not answer in time",
                remedy="It is overloaded or stopped. Look at its log and its CPU time, then try again.",
                code="KV-501",
            )
        if told := _REFUSAL.fullmatch(miss.detail):
            message, code, remedy = told.groups()
            return TransportError(f"the store said no: {message}", remedy=remedy, code=code)
        return TransportError(f"the store said no: {miss.detail or miss.reason}", remedy="See its log.")


def _only(prefix: str, known: list[NamespaceStats]) -> NamespaceStats:
    """The one namespace whose digest begins with this prefix."""
    matching = [item for item in known if item.digest.startswith(prefix.lower())]
    if len(prefix) < SHORTEST_PREFIX or len(matching) != 1:
        names = ", ".join(item.digest[:12] for item in known) or "none"
        raise ConfigError(
            f"--namespace {prefix} does not name exactly one namespace of this store",
            remedy=f"Give {SHORTEST_PREFIX} or more digits of one of: {names}.",
        )
    return matching[0]


def _receipt_tree(receipt: Receipt) -> dict[str, object]:
    import msgspec

    halves = {"prefill": receipt.prefill, "decode": receipt.decode}
    return {
        "ticket": receipt.ticket,
        "verdict": receipt.verdict,
        **{
            name: {**msgspec.structs.asdict(half), "chain": half.chain.hex()} if half else None
            for name, half in halves.items()
        },
    }
