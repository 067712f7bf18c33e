"""How a store's stats and receipts look to people. Data in, rich renderables out; asks nobody and knows no clock.

The structs name the part of the stats tree that is shown; what a newer store adds is ignored, what an older one lacks
shows as zero.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally.core.receipts import Half, Receipt, Verdict
from kvtally.errors import IncompatibleError
from kvtally.units import human_size, printable

NO_EDGE = 10_000  # columns


class Arena(msgspec.Struct, frozen=True):
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    evicted: int = 0
    limbo_bytes: int = 0


class Tier(msgspec.Struct, frozen=True):
    name: str
    state: str = "ok"
    capacity_bytes: int | None = None
    used_bytes: int = 0
    objects: int = 0
    evicted: int = 0
    queued_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    write_bytes: int = 0
    dropped: int = 0
    postponed: int = 0
    errors: dict[str, int] = {}


class Lookups(msgspec.Struct, frozen=True):
    total: int = 0
    hits: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    misses: dict[str, int] = {}


class Puts(msgspec.Struct, frozen=True):
    begun: int = 0
    committed: int = 0
    aborted: int = 0
    expired: int = 0
    rejected: int = 0
    bytes: int = 0


class Leases(msgspec.Struct, frozen=True):
    open: int = 0
    expired: int = 0


class Client(msgspec.Struct, frozen=True):
    session: int
    client: str = ""
    namespace: str = ""
    leases: int = 0
    puts: int = 0


class KnownNamespace(msgspec.Struct, frozen=True):
    digest: str
    model: str = ""
    objects: int = 0
    chunk_tokens: int = 0


class Quarantined(msgspec.Struct, frozen=True):
    count: dict[str, int] = {}


class Stats(msgspec.Struct, frozen=True):
    store: str = ""
    version: str = ""
    uptime_s: float = 0.0
    verify_reads: bool = True
    arena: Arena = Arena()
    tiers: list[Tier] = []
    lookups: Lookups = Lookups()
    puts: Puts = Puts()
    leases: Leases = Leases()
    clients: list[Client] = []
    namespaces: list[KnownNamespace] = []
    quarantined: Quarantined = Quarantined()


def read_stats(tree: object) -> Stats:
    try:
        return msgspec.convert(tree, Stats)
    except msgspec.ValidationError as error:
        raise IncompatibleError(
            f"the store's stats have a form this version does not know: {error}",
            remedy="Use the kvtally of the store's version, or --json, which prints them as they are.",
            code="KV-201",
        ) from error


def console() -> Console:
    """Markup is off: what peers call themselves is printed as it is. In a pipe or a file, where there is no edge, lines
    are as long as they have to be."""
    plain = Console(markup=False, highlight=False)
    if not plain.is_terminal and "COLUMNS" not in os.environ:
        plain.width = NO_EDGE
    return plain


def empty_table(title: str, *columns: str) -> Table:
    """A table of the one look we have. A column whose name begins with > is set flush right. Nothing is cut off where
    the terminal is narrow: half a ticket, or half a path, is of no use."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    return made


def stats_page(now: Stats, before: Stats | None = None) -> RenderableType:
    """One page. Rates are those since `before`, or, without it, averages since the store started."""
    parts: list[RenderableType] = [_headline(now), _tier_table(now), _reuse_table(now), _rate_table(now, before)]
    if now.clients:
        parts.append(_client_table(now.clients))
    if now.namespaces:
        parts.append(_namespace_table(now.namespaces))
    return Group(*(line for part in parts for line in (part, Text())))


def receipts_table(receipts: Sequence[Receipt]) -> RenderableType:
    head = ("ticket", "verdict", ">promised", ">reused", ">computed", ">load ms", "from", "reason")
    table = empty_table("receipts", *head)
    for receipt in receipts:
        decode = receipt.decode
        table.add_row(
            printable(receipt.ticket),
            Text(receipt.verdict, style=_VERDICT_STYLE[receipt.verdict]),
            f"{receipt.prefill.saved_tokens:,}" if receipt.prefill else "-",
            f"{decode.reused_tokens:,}" if decode else "-",
            f"{decode.computed_tokens:,}" if decode else "-",
            f"{decode.load_ms:.1f}" if decode else "-",
            _sources(decode) if decode else "-",
            printable(decode.reason if decode else "") or "-",
        )
    return table


_VERDICT_STYLE = {
    Verdict.PROVED: "green",
    Verdict.LOCAL: "green",
    Verdict.SHORT: "yellow",
    Verdict.RECOMPUTED: "red",
    Verdict.MISSING: "red",
}


def _headline(now: Stats) -> Text:
    checked = "reads verified" if now.verify_reads else "reads not verified"
    return Text(f"store {now.store[:12]} · kvtally {now.version} · up {_duration(now.uptime_s)} · {checked}", "bold")


def _tier_table(now: Stats) -> Table:
    counts = (">objects", ">evicted", ">read", ">written", ">postponed", ">dropped")
    table = empty_table("tiers", "tier", "state", ">used", ">of", ">full", *counts)
    table.collapse_padding = True  # so that it fits 80 columns
    arena = Tier(
        name="arena",
        capacity_bytes=now.arena.capacity_bytes,
        used_bytes=now.arena.used_bytes,
        objects=now.arena.objects,
        evicted=now.arena.evicted,
        write_bytes=now.puts.bytes,
    )
    for tier in (arena, *now.tiers):
        table.add_row(
            tier.name,
            Text(tier.state, style="green" if tier.state == "ok" else "red"),
            human_size(tier.used_bytes),
            "-" if tier.capacity_bytes is None else human_size(tier.capacity_bytes),
            _share(tier.used_bytes, tier.capacity_bytes or 0),
            f"{tier.objects:,}",
            f"{tier.evicted:,}",
            "-" if tier is arena else human_size(tier.read_bytes),  # engines read it without asking
            human_size(tier.write_bytes),
            f"{tier.postponed:,}",
            f"{tier.dropped:,}",
        )
    return table


def _reuse_table(now: Stats) -> Table:
    lookups, puts = now.lookups, now.puts
    table = empty_table("reuse", "what", ">count", ">share")
    table.add_row("lookups", f"{lookups.total:,}", "")
    table.add_row("  with a hit", f"{lookups.hits:,}", _share(lookups.hits, lookups.total))
    for reason, count in sorted(lookups.misses.items(), key=lambda item: -item[1]):
        table.add_row(f"  cut short: {reason}", f"{count:,}", _share(count, lookups.total))
    table.add_row("tokens asked for", f"{lookups.asked_tokens:,}", "")
    table.add_row("  reused", f"{lookups.hit_tokens:,}", _share(lookups.hit_tokens, lookups.asked_tokens))
    table.add_row("saves begun", f"{puts.begun:,}", "")
    ends = {"committed": puts.committed, "aborted": puts.aborted, "expired": puts.expired, "rejected": puts.rejected}
    for name, count in ends.items():
        table.add_row(f"  {name}", f"{count:,}", _share(count, puts.begun))
    table.add_row("leases open", f"{now.leases.open:,}", "")
    table.add_row("leases expired", f"{now.leases.expired:,}", "")
    for name, count in _troubles(now).items():
        table.add_row(Text(name, style="red"), f"{count:,}", "")
    return table


def _troubles(now: Stats) -> dict[str, int]:
    """What ought to be nothing, and is shown only where it is something."""
    troubles = {f"quarantined: {reason}": count for reason, count in now.quarantined.count.items()}
    for tier in now.tiers:
        troubles |= {f"{tier.name} failed: {code}": count for code, count in tier.errors.items()}
    troubles["bytes in limbo, for want of their writer's end"] = now.arena.limbo_bytes
    return {name: count for name, count in troubles.items() if count}


def _rate_table(now: Stats, before: Stats | None) -> Table:
    earlier = before or Stats()
    seconds = max(now.uptime_s - earlier.uptime_s, 1e-3)
    table = empty_table("throughput", "what", ">a second, " + ("just now" if before else "since the start"))
    table.add_row("lookups", f"{(now.lookups.total - earlier.lookups.total) / seconds:,.1f}")
    table.add_row("tokens reused", f"{(now.lookups.hit_tokens - earlier.lookups.hit_tokens) / seconds:,.0f}")
    table.add_row("saved", human_size(int((now.puts.bytes - earlier.puts.bytes) / seconds)))
    earlier_tiers = {tier.name: tier for tier in earlier.tiers}
    for tier in now.tiers:
        past = earlier_tiers.get(tier.name, Tier(name=tier.name))
        table.add_row(f"{tier.name} read", human_size(int((tier.read_bytes - past.read_bytes) / seconds)))
        table.add_row(f"{tier.name} written", human_size(int((tier.write_bytes - past.write_bytes) / seconds)))
    return table


def _client_table(clients: Sequence[Client]) -> Table:
    table = empty_table("clients", ">session", "client", "namespace", ">leases", ">open saves")
    for client in clients:
        table.add_row(
            str(client.session),
            printable(client.client),
            client.namespace[:12] or "-",
            f"{client.leases:,}",
            f"{client.puts:,}",
        )
    return table


def _namespace_table(namespaces: Sequence[KnownNamespace]) -> Table:
    table = empty_table("namespaces", "digest", "model", ">objects", ">chunk tokens")
    for known in namespaces:
        table.add_row(known.digest[:12], printable(known.model), f"{known.objects:,}", f"{known.chunk_tokens:,}")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _sources(half: Half) -> str:
    places = {"gpu": half.tokens_gpu, "host": half.tokens_host, "disk": half.tokens_disk, "remote": half.tokens_remote}
    return ", ".join(f"{place} {tokens:,}" for place, tokens in places.items() if tokens) or "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    shown = [f"{count}{unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0s"
