"""What `kvtally bench store` found, and what it means: each figure beside its limit and its target. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import RenderableType

from kvtally.bench import report
from kvtally.bench.report import Row, Run, rows_table
from kvtally.config.units import human_size


class Latency(msgspec.Struct, frozen=True):
    quiet_ms: float  # median of the quietest block of samples
    median_ms: float  # of all samples
    p99_ms: float


class Figures(Run, kw_only=True):
    """Everything that was measured. Throughput is the best of several rounds, latency the median of the quietest
    of several blocks: neighbours only make things slower, our figures and the limits alike."""

    quick: bool = False
    cpus: int = 0
    arena_bytes: int = 0
    huge_pages: bool = False

    memcpy_gbps: float = 0.0
    memcpy_median_gbps: float = 0.0  # far below the best means that the machine was busy
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

    disk_get_gbps: float = 0.0  # warm or cold, whichever is further below its limit
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
    cpu_ratios: dict[str, float] = {}  # the same for processor time, without the store's: neighbours hardly disturb it
    skipped: list[str] = []
    targets: list[Row] = []


_PARTS = {
    "hit": "  hit",
    "half": "  half a hit",
    "miss": "  miss",
    "hold": "  hit, leased",
    "round_trip": "  hit: round trip",
    "hashing": "  hit: hashing",
    "packing": "  packing a list",
}


def rows(figures: Figures) -> list[Row]:
    """Every figure that has a limit or a target, in the order in which people read them."""
    return [
        *_memory(figures),
        Row(key="lookup_16k_ms", name="lookup, 16,384 tokens", value=figures.lookup_16k_ms, unit="ms").at_most(0.4),
        *(
            Row(key=f"lookup_16k.{part}", name=_PARTS[part], value=latency.quiet_ms, unit="ms")
            for part, latency in figures.lookup_16k.items()
        ),
        Row(key="rtt_ms", name="empty round trip", value=figures.rtt_ms, unit="ms").at_most(0.1),
        *_disk(figures),
        *(
            Row(key=f"clients_gbps.{count}", name=f"{count} × put and get", value=rate, unit="GB/s").beside(
                figures.clients_memcpy_gbps[count], "memcpy"
            )
            for count, rate in figures.clients_gbps.items()
        ),
        *_scale(figures),
        Row(key="idle_cpu_percent", name="idle store", value=figures.idle_cpu_percent, unit="% CPU").at_most(1.0),
    ]


def _memory(figures: Figures) -> Iterator[Row]:
    for key, name, target in (
        ("put_gbps", "put", 0.9),
        ("put_first_touch_gbps", "put, first touch", 0.9),
        ("put_first_touch_unmapped_gbps", "  by a new client", None),
        ("put_checksummed_gbps", "put, checksummed", 0.6),
        ("get_gbps", "get", 0.9),
        ("get_verified_gbps", "get, verified", 0.6),
        ("memcpy_whole_gbps", "memcpy of all at once", None),
    ):
        yield _throughput(figures, key, name, figures.memcpy_gbps, "memcpy", target)


def _disk(figures: Figures) -> Iterator[Row]:
    warm, cold, put = figures.disk_raw_warm_gbps, figures.disk_raw_cold_gbps, figures.disk_raw_put_gbps
    yield _throughput(figures, "disk_get_warm_gbps", "from disk, warm cache", warm, "preadv", 0.8)
    yield _throughput(figures, "disk_get_copied_gbps", "  to the engine", warm, "preadv")
    yield _throughput(figures, "disk_get_cold_gbps", "from disk, cold cache", cold, "preadv", 0.8)
    yield _throughput(figures, "disk_put_gbps", "to disk", put, "pwritev")


def _throughput(
    figures: Figures, key: str, name: str, limit: float, limit_name: str, target: float | None = None
) -> Row:
    row = Row(key=key, name=name, value=getattr(figures, key), unit="GB/s", cpu_ratio=figures.cpu_ratios.get(key))
    row = row.beside(limit, limit_name)
    return row if target is None else row.at_least(target)


def _scale(figures: Figures) -> Iterator[Row]:
    """An index may grow a hundredfold while lookups take twice as long at most."""
    smallest = next(iter(figures.lookup_ms_by_objects), "")
    for count, milliseconds in figures.lookup_ms_by_objects.items():
        name = f"among {int(count):,} objects"
        row = Row(key=f"lookup_ms_by_objects.{count}", name=name, value=milliseconds, unit="ms")
        if count != smallest:
            row = row.beside(figures.lookup_ms_by_objects[smallest], f"{int(smallest):,}").at_most(2)
        yield row
    for shape, size in figures.resident_bytes_per_object.items():
        key, name = f"resident_bytes_per_object.{shape}", f"object, {shape}"
        yield Row(key=key, name=name, value=size, unit="bytes").at_most(600)


def page(figures: Figures) -> RenderableType:
    """For people."""
    pages = "huge pages" if figures.huge_pages else "4 KiB pages"
    about = [
        f"{figures.cpus} cores",
        f"arena of {human_size(figures.arena_bytes)}, {pages}",
        "quick: rough figures, not judged" if figures.quick else "",
    ]
    return report.page(figures, about, rows_table(figures.targets), notes=_notes(figures))


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
