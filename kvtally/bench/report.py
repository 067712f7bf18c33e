"""What a measurement means: each figure beside its limit and the target it has to meet, for programs and for people.

Owns the targets and the table. Takes figures as `bench.store` collected them; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally.config.units import human_size


class Latency(msgspec.Struct, frozen=True):
    quiet_ms: float  # median of the quietest block of samples
    median_ms: float  # of all samples
    p99_ms: float


class Figures(msgspec.Struct, kw_only=True):
    """Everything that was measured. Throughput is that of the best of several rounds, latency the median of the
    quietest of several blocks: neighbours only ever take away, and they take from limits and from ours alike."""

    version: str = ""
    quick: bool = False
    elapsed_s: float = 0.0
    cpus: int = 0
    arena_bytes: int = 0
    huge_pages: bool = False

    memcpy_gbps: float = 0.0
    memcpy_median_gbps: float = 0.0  # how far it is below the best says how busy the machine was
    memcpy_whole_gbps: float = 0.0
    put_gbps: float = 0.0
    put_first_touch_gbps: float = 0.0
    put_first_touch_unmapped_gbps: float = 0.0  # by a client that has not mapped the arena's pages before
    put_checksummed_gbps: float = 0.0
    get_gbps: float = 0.0
    get_verified_gbps: float = 0.0

    lookup_16k_ms: float = 0.0  # the slowest of hit, half and miss
    lookup_16k: dict[str, Latency] = {}
    rtt_ms: float = 0.0
    rtt: Latency | None = None

    disk_get_gbps: float = 0.0  # whichever of warm and cold comes less close to its limit
    disk_raw_gbps: float = 0.0
    disk_get_warm_gbps: float = 0.0
    disk_raw_warm_gbps: float = 0.0
    disk_get_cold_gbps: float = 0.0
    disk_raw_cold_gbps: float = 0.0
    disk_get_copied_gbps: float = 0.0  # from the lookup until the engine has its own verified copy; page cache warm
    disk_put_gbps: float = 0.0
    disk_raw_put_gbps: float = 0.0

    clients_gbps: dict[str, float] = {}
    clients_memcpy_gbps: dict[str, float] = {}

    lookup_ms_by_objects: dict[str, float] = {}
    lookup_by_objects: dict[str, Latency] = {}
    resident_bytes_per_object: dict[str, float] = {}
    idle_cpu_percent: float = 0.0

    ratios: dict[str, float] = {}
    cpu_ratios: dict[
        str, float
    ] = {}  # the same of processor time, without the store's: what a busy machine cannot spoil
    skipped: list[str] = []
    targets: list[Row] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure for the table. `ok` is None where nothing was promised."""

    key: str  # of the figure it shows
    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    cpu_ratio: float | None = None
    target: str = ""
    ok: bool | None = None


_PARTS = {
    "hit": "  hit",
    "half": "  half a hit",
    "miss": "  miss",
    "hold": "  hit, leased",
    "round_trip": "  hit: round trip",
    "hashing": "  hit: hashing",
    "packing": "  packing a list",
}


def judge(figures: Figures) -> list[Row]:
    """Every figure that has a limit or a target, in the order in which people read them."""
    return [
        *_memory(figures),
        _at_most("lookup_16k_ms", "lookup, 16,384 tokens", figures.lookup_16k_ms, "ms", 0.4),
        *(
            Row(key=f"lookup_16k.{part}", name=_PARTS[part], value=latency.quiet_ms, unit="ms")
            for part, latency in figures.lookup_16k.items()
        ),
        _at_most("rtt_ms", "empty round trip", figures.rtt_ms, "ms", 0.1),
        *_disk(figures),
        *(
            _share(
                f"clients_gbps.{count}", f"{count} × put and get", rate, figures.clients_memcpy_gbps[count], "memcpy"
            )
            for count, rate in figures.clients_gbps.items()
        ),
        *_scale(figures),
        _at_most("idle_cpu_percent", "idle store", figures.idle_cpu_percent, "% CPU", 1.0),
    ]


def _memory(figures: Figures) -> list[Row]:
    limit = figures.memcpy_gbps
    rows = [
        ("put_gbps", "put", figures.put_gbps, 0.9),
        ("put_first_touch_gbps", "put, first touch", figures.put_first_touch_gbps, 0.9),
        ("put_first_touch_unmapped_gbps", "  by a new client", figures.put_first_touch_unmapped_gbps, None),
        ("put_checksummed_gbps", "put, checksummed", figures.put_checksummed_gbps, 0.6),
        ("get_gbps", "get", figures.get_gbps, 0.9),
        ("get_verified_gbps", "get, verified", figures.get_verified_gbps, 0.6),
        ("memcpy_whole_gbps", "memcpy of all at once", figures.memcpy_whole_gbps, None),
    ]
    shares = [_share(key, name, rate, limit, "memcpy", target) for key, name, rate, target in rows]
    return [msgspec.structs.replace(row, cpu_ratio=figures.cpu_ratios.get(row.key)) for row in shares]


def _disk(figures: Figures) -> list[Row]:
    warm, cold, put = figures.disk_raw_warm_gbps, figures.disk_raw_cold_gbps, figures.disk_raw_put_gbps
    return [
        _share("disk_get_warm_gbps", "from disk, warm cache", figures.disk_get_warm_gbps, warm, "preadv", 0.8),
        _share("disk_get_copied_gbps", "  to the engine", figures.disk_get_copied_gbps, warm, "preadv"),
        _share("disk_get_cold_gbps", "from disk, cold cache", figures.disk_get_cold_gbps, cold, "preadv", 0.8),
        _share("disk_put_gbps", "to disk", figures.disk_put_gbps, put, "pwritev"),
    ]


def _scale(figures: Figures) -> list[Row]:
    """An index may grow a hundredfold, and lookups take twice as long at most."""
    rows = []
    smallest: tuple[str, float] | None = None
    for count, milliseconds in figures.lookup_ms_by_objects.items():
        row = Row(
            key=f"lookup_ms_by_objects.{count}", name=f"among {int(count):,} objects", value=milliseconds, unit="ms"
        )
        if smallest is None:
            smallest = count, milliseconds
        else:
            ratio = milliseconds / smallest[1]
            row = msgspec.structs.replace(
                row, limit=smallest[1], limit_name=f"{int(smallest[0]):,}", ratio=ratio, target="≤ 2 ×", ok=ratio <= 2
            )
        rows.append(row)
    return rows + [
        _at_most(f"resident_bytes_per_object.{shape}", f"object, {shape}", size, "bytes", 600)
        for shape, size in figures.resident_bytes_per_object.items()
    ]


def _share(key: str, name: str, value: float, limit: float, limit_name: str, target: float | None = None) -> Row:
    """A throughput beside the greatest there could be."""
    ratio = value / limit if limit else 0.0
    row = Row(key=key, name=name, value=value, unit="GB/s", limit=limit, limit_name=limit_name, ratio=ratio)
    return row if target is None else msgspec.structs.replace(row, target=f"≥ {target:g} ×", ok=ratio >= target)


def _at_most(key: str, name: str, value: float, unit: str, target: float) -> Row:
    return Row(key=key, name=name, value=value, unit=unit, target=f"≤ {target:g}", ok=value <= target)


_VERDICTS: Mapping[bool | None, tuple[str, str]] = {
    True: ("ok", "green"),
    False: ("miss", "bold red"),
    None: ("", ""),
}


def page(figures: Figures) -> RenderableType:
    """The table for people."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns wide
    for column in ("what", ">value", "", ">limit", "", ">ratio", ">CPU", ">target", ""):
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in figures.targets:
        verdict, style = _VERDICTS[row.ok]
        table.add_row(
            row.name,
            _number(row.value),
            row.unit,
            _number(row.limit) if row.limit is not None else "",
            row.limit_name,
            f"{row.ratio:.2f}" if row.ratio is not None else "",
            f"{row.cpu_ratio:.2f}" if row.cpu_ratio is not None else "",
            row.target,
            Text(verdict, style=style),
        )
    return Group(Text(_headline(figures), style="bold"), Text(), table, Text(), *map(Text, _notes(figures)))


def _headline(figures: Figures) -> str:
    pages = "huge pages" if figures.huge_pages else "4 KiB pages"
    return (
        f"kvtally {figures.version} · {figures.cpus} cores · arena of {human_size(figures.arena_bytes)}, {pages}"
        f" · {figures.elapsed_s:.0f} s{' · quick: rough figures, not judged' if figures.quick else ''}"
    )


def _notes(figures: Figures) -> list[str]:
    notes = [
        "Throughput is the best of several rounds, latency the median of the quietest block.",
        "CPU: the ratio of processor time alone, which neighbours disturb less.",
    ]
    quiet = figures.memcpy_median_gbps / figures.memcpy_gbps if figures.memcpy_gbps else 1.0
    if quiet < 0.8:
        notes.append(
            f"This machine was busy with something else: at the median, memcpy reached {quiet:.0%} of its best."
        )
    return notes + [f"Not measured: {what}." for what in figures.skipped]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 1 else f"{value:.2f}"
