"""How a store's stats and receipts look to people. Data in, rich renderables out; no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from kvtally.cli.terminal import NO_EDGE, columns, wrapped
from kvtally.config.units import human_size, printable
from kvtally.core.receipts import Half, Receipt, Verdict
from kvtally.errors import IncompatibleError
from kvtally.wire.stats import ClientStats, NamespaceStats, PeerStats, StoreStats, TierStats

HEAD_ROWS = 2
GAP = "  "  # between columns
EXACT = 10_000_000

T = TypeVar("T")
Cells = tuple[str, ...]  # of one row


def read_stats(tree: object) -> StoreStats:
    try:
        return msgspec.convert(tree, StoreStats)
    except msgspec.ValidationError as error:
        raise IncompatibleError(
            f"the store's stats have a form this version does not know: {error}",
            remedy="Use a kvtally of the store's version, or --json, which prints them unread.",
            code="KV-201",
        ) from error


def console() -> Console:
    """A console that prints names of peers literally (no markup) and neither cuts nor folds lines: the terminal wraps a
    line that is too long, and it can still be copied."""
    made = Console(markup=False, highlight=False, soft_wrap=True)
    if not made.is_terminal:  # a terminal may change its size
        made.width = columns()
    return made


class Table:
    """Rows of cells in columns. A column whose name begins with > is aligned right.

    Cells are never folded: half a ticket, or half a size, is useless. (On a narrow terminal, rich's own table breaks
    words.)
    """

    def __init__(self, *heads: str) -> None:
        self._is_right = [head.startswith(">") for head in heads]
        self._rows = [[Text(head.removeprefix(">"), "bold") for head in heads]]

    def add_row(self, *cells: str | Text) -> None:
        empty = [""] * (self.column_count - len(cells))
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in (*cells, *empty)])

    @property
    def row_count(self) -> int:
        """Without the heads."""
        return len(self._rows) - 1

    @property
    def column_count(self) -> int:
        return len(self._is_right)

    @property
    def width(self) -> int:
        widths = self._widths()
        return sum(widths) + len(GAP) * (len(widths) - 1)

    def _widths(self) -> list[int]:
        return [max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths()
        for row in self._rows:
            cells = [cell.copy() for cell in row]
            for cell, width, is_right in zip(cells, widths, self._is_right, strict=True):
                cell.align("right" if is_right else "left", width)
            line = Text(GAP).join(cells)
            line.rstrip()  # trailing blanks would wrap
            line.no_wrap, line.overflow = True, "ignore"
            yield line


class Fitting:
    """A table if it fits the terminal, else the same as paragraphs: a heading with the rest below it."""

    def __init__(self, title: str, table: Table, paragraphs: Sequence[tuple[str, str]]) -> None:
        self._title = title
        self._table = table
        self._paragraphs = paragraphs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._title, "bold")
        if self._table.width <= options.max_width:
            yield self._table
            return
        for head, rest in self._paragraphs:
            yield Text(head)
            if rest:
                yield Text("  " + wrapped(rest, options.max_width - 2, "  "))


class StatsPage:
    """What a store holds, reuses and serves. Rates are taken since `before`, or since the store started. Where a
    screen has too few rows, blank lines are dropped first, then the ends of the longest lists."""

    def __init__(self, now: StoreStats, before: StoreStats | None = None) -> None:
        self._now = now
        self._before = before

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now, rates = self._now, _Rates(self._now, self._before)
        tables = [_tier_table(now), _trouble_table(now), _work_table(now, rates)]
        if tables[-1].width > options.max_width:
            tables[-1:] = [_filled(_LEFT, _lookup_rows(now, rates)), _filled(_RIGHT, _save_rows(now))]
        tables = [table for table in tables if table.row_count]
        lists = [len(now.peers), len(now.clients), len(now.namespaces)]
        rows = NO_EDGE
        if console.is_alt_screen:  # nobody can scroll there
            rows = options.size.height - HEAD_ROWS - sum(map(_height, tables))
        has_blanks = sum(_list_height(count) + 1 for count in lists) + len(tables) + 1 <= rows
        peers, clients, namespaces = _shortened(lists, rows)
        tables += [_peer_table(now.peers, peers), _client_table(now.clients, clients)]
        tables += [_namespace_table(now.namespaces, namespaces)]
        yield _headline(now, rates)
        for table in (table for table in tables if table.row_count):
            if has_blanks:
                yield Text()
            yield table


def receipts_table(receipts: Sequence[Receipt]) -> RenderableType:
    head = ("ticket", "verdict", ">promised", ">reused", ">computed", ">load ms", "from", "reason")
    table = Table(*head)
    for receipt in receipts:
        decode = receipt.decode
        table.add_row(
            printable(receipt.ticket),
            Text(receipt.verdict, style=_VERDICT_STYLE[receipt.verdict]),
            f"{receipt.prefill.saved_tokens:,}" if receipt.prefill else "-",
            f"{decode.reused_tokens:,}" if decode else "-",
            f"{decode.computed_tokens:,}" if decode else "-",
            f"{decode.load_ms:,.1f}" if decode else "-",
            _sources(decode) if decode else "-",
            printable(decode.reason if decode else "") or "-",
        )
    return Fitting("receipts", table, [(printable(receipt.ticket), _sentence(receipt)) for receipt in receipts])


def _sentence(receipt: Receipt) -> str:
    """A receipt in one sentence, for a narrow terminal."""
    prefill, decode = receipt.prefill, receipt.decode
    figures = [f"promised {prefill.saved_tokens:,}"] if prefill else []
    if decode:
        sources = f" ({_sources(decode)})" if decode.reused_tokens else ""
        figures += [f"reused {decode.reused_tokens:,}{sources}", f"computed {decode.computed_tokens:,}"]
        figures += [f"loaded in {decode.load_ms:,.1f} ms"] if decode.load_ms else []
    reason = f" ({printable(decode.reason)})" if decode and decode.reason else ""
    return f"{receipt.verdict}{reason}: {', '.join(figures)}"


_VERDICT_STYLE = {
    Verdict.PROVED: "green",
    Verdict.LOCAL: "green",
    Verdict.SHORT: "yellow",
    Verdict.RECOMPUTED: "red",
    Verdict.MISSING: "red",
}


class _Rates:
    """Rates per second: between two looks, or since the store started."""

    def __init__(self, now: StoreStats, before: StoreStats | None) -> None:
        earlier = before or StoreStats()
        self.since = "just now" if before else "since the start"
        self._seconds = max(now.uptime_s - earlier.uptime_s, 1e-3)
        self.lookups = f"{(now.lookups.total - earlier.lookups.total) / self._seconds:,.1f}"
        self.tokens = f"{(now.lookups.hit_tokens - earlier.lookups.hit_tokens) / self._seconds:,.0f}"
        self.saved = self._size(now.puts.bytes - earlier.puts.bytes)
        self._tiers = {tier.name: tier for tier in earlier.tiers}

    def read(self, tier: TierStats) -> str:
        return self._size(tier.read_bytes - self._past(tier).read_bytes)

    def written(self, tier: TierStats) -> str:
        return self._size(tier.write_bytes - self._past(tier).write_bytes)

    def _past(self, tier: TierStats) -> TierStats:
        return self._tiers.get(tier.name, TierStats(name=tier.name))

    def _size(self, moved_bytes: int) -> str:
        return human_size(int(moved_bytes / self._seconds))


def _headline(now: StoreStats, rates: _Rates) -> Text:
    checked = "reads verified" if now.verify_reads else "reads not verified"
    first = f"store {now.store[:12]} · kvtally {now.version} · up {_duration(now.uptime_s)} · {checked}"
    return Text.assemble((first, "bold"), f"\n/s: a second, {rates.since}")


def _tier_table(now: StoreStats) -> Table:
    table = Table("tier", "state", ">used", ">of", ">full", ">objects", ">evicted")
    arena = now.arena
    own = TierStats(
        name="arena",
        capacity_bytes=arena.capacity_bytes,
        used_bytes=arena.used_bytes,
        objects=arena.objects,
        evicted=arena.evicted,
    )
    for tier in (own, *now.tiers):
        table.add_row(
            tier.name,
            Text(tier.state, style="green" if tier.state == "ok" else "red"),
            human_size(tier.used_bytes),
            "-" if tier.capacity_bytes is None else human_size(tier.capacity_bytes),
            _share(tier.used_bytes, tier.capacity_bytes or 0),
            f"{tier.objects:,}",
            f"{tier.evicted:,}",
        )
    return table


def _work_table(now: StoreStats, rates: _Rates) -> Table:
    """Lookups and bytes moved on the left, saves and leases on the right."""
    both = zip_longest(_lookup_rows(now, rates), _save_rows(now), fillvalue=())
    rows = [(*left, *[""] * (len(_LEFT) - len(left)), *right) for left, right in both]
    return _filled((*_LEFT, *_RIGHT), rows)


_LEFT = ("reuse and traffic", ">count", ">share", ">/s")
_RIGHT = ("saves, leases", ">count")


def _lookup_rows(now: StoreStats, rates: _Rates) -> list[Cells]:
    lookups = now.lookups
    cut = sorted(lookups.misses.items(), key=lambda item: -item[1])
    share = _share(lookups.hit_tokens, lookups.asked_tokens)
    return [
        ("lookups", _count(lookups.total), "", rates.lookups),
        ("with a hit", _count(lookups.hits), _share(lookups.hits, lookups.total)),
        *((f"cut short: {reason}", _count(count), _share(count, lookups.total)) for reason, count in cut),
        ("tokens asked for", _count(lookups.asked_tokens)),
        ("tokens reused", _count(lookups.hit_tokens), share, rates.tokens),
        ("saved", human_size(now.puts.bytes), "", rates.saved),
        *(row for tier in now.tiers for row in _traffic(tier, rates)),
    ]


def _traffic(tier: TierStats, rates: _Rates) -> list[Cells]:
    return [
        (f"{tier.name} read", human_size(tier.read_bytes), "", rates.read(tier)),
        (f"{tier.name} written", human_size(tier.write_bytes), "", rates.written(tier)),
    ]


def _save_rows(now: StoreStats) -> list[Cells]:
    puts = now.puts
    ends = {"committed": puts.committed, "aborted": puts.aborted, "expired": puts.expired, "rejected": puts.rejected}
    return [
        ("saves begun", _count(puts.begun)),
        *((f"  {name}", _count(count)) for name, count in ends.items()),
        ("leases open", _count(now.leases.open)),
        ("leases expired", _count(now.leases.expired)),
    ]


def _filled(heads: Sequence[str], rows: Iterable[Cells]) -> Table:
    table = Table(*heads)
    for cells in rows:
        table.add_row(*cells)
    return table


def _trouble_table(now: StoreStats) -> Table:
    """Counts that should be zero; only those that are not."""
    troubles = {f"quarantined: {reason}": count for reason, count in now.quarantined.count.items()}
    for tier in now.tiers:
        troubles |= {f"{tier.name} failed: {code}": count for code, count in tier.errors.items()}
        troubles |= {f"{tier.name} postponed": tier.postponed, f"{tier.name} dropped": tier.dropped}
    troubles["bytes in limbo, until their writer ends"] = now.arena.limbo_bytes
    table = Table("trouble", ">count")
    for name, count in troubles.items():
        if count:
            table.add_row(Text(name, style="red"), f"{count:,}")
    return table


def _peer_table(peers: Sequence[PeerStats], most: int) -> Table:
    """Other machines' stores, as this one knows them."""
    table = Table("state", ">asked", ">had it", ">pulled", "failed", "peer")
    for peer in _beginning(peers, most):
        failed = ", ".join(f"{code} {_count(count)}" for code, count in peer.errors.items())
        table.add_row(
            Text(peer.state, style="green" if peer.state == "ok" else "red"),
            _count(peer.asks),
            _count(peer.hits),
            human_size(peer.bytes),
            Text(failed or "-", style="red" if failed else ""),
            printable(peer.name),
        )
    _tell_more(table, len(peers))
    return table


def _client_table(clients: Sequence[ClientStats], most: int) -> Table:
    """Names come last, so that a long one does not push other columns out of line."""
    table = Table(">session", "namespace", ">leases", ">open saves", "client")
    for client in _beginning(clients, most):
        name, digest = printable(client.client), client.namespace[:12] or "-"
        table.add_row(str(client.session), digest, f"{client.leases:,}", f"{client.puts:,}", name)
    _tell_more(table, len(clients))
    return table


def _namespace_table(namespaces: Sequence[NamespaceStats], most: int) -> Table:
    table = Table("namespace", ">objects", ">chunk tokens", "model")
    for known in _beginning(namespaces, most):
        table.add_row(known.digest[:12], f"{known.objects:,}", f"{known.chunk_tokens:,}", printable(known.model))
    _tell_more(table, len(namespaces))
    return table


def _beginning(items: Sequence[T], most: int) -> Sequence[T]:
    """All items if they fit into `most` lines, else as many as leave a line for "… more"."""
    return items if len(items) <= most else items[: most - 1]


def _tell_more(table: Table, count: int) -> None:
    if table.row_count < count:
        empty = [""] * (table.column_count - 1)
        table.add_row(*empty, f"… {count - table.row_count} more: see kvtally stat")


def _shortened(counts: Sequence[int], rows: int) -> list[int]:
    """How many lines each list gets so that all fit into these rows. The longest is cut first; each keeps one line."""
    lines = list(counts)
    while sum(map(_list_height, lines)) > rows and max(lines) > 1:
        lines[lines.index(max(lines))] -= 1
    return lines


def _height(table: Table) -> int:
    return table.row_count + 1


def _list_height(lines: int) -> int:
    return lines + 1 if lines else 0  # with its heading


def _count(number: int) -> str:
    """Exact up to ten million, then in millions: nine characters at most, so that a page fits 80 columns."""
    return f"{number:,}" if number < EXACT else f"{number / 1e6:,.0f}M"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _sources(half: Half) -> str:
    return ", ".join(f"{place} {tokens:,}" for place, tokens in half.sources.items()) or "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    shown = [f"{count}{unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0s"
