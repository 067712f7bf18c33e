"""What `kvtally bench gpu` found: every figure beside a limit or a peer of the same run; ratios and targets. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from operator import sub, truediv
from typing import Generic, TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally.bench import report
from kvtally.bench.repeat_report import View
from kvtally.bench.report import Row, Run, Target, median, ms, p99, plain_table, rows_table, verdict
from kvtally.config.units import human_size

GBPS_TARGET = 50.0
LIMIT_TARGET = 0.9
BOTH_TARGET = 0.8  # our own target; if one direction waited for the other, it would be 0.5
VERIFY_TARGET = 0.02
OFFLOAD_TARGET = 1.0
GPU_HIT_TARGET = 1.1
SPEED_UP_TARGETS = {"hybrid-27b": 7.5}  # cold over repeat
COLD_TARGET = 1.01
DISK_TARGET = 0.8
ITL_TARGET = 1.05
ENGINES = ("none", "offload", "kvtally")

A = TypeVar("A")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str = ""  # empty: none
    gpu_memory_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    vllm: str = ""
    cpus: int = 0


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    gbps: float  # of the best sample: neighbours only make it slower
    median_gbps: float


class CopyFigure(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    page_bytes: int
    object_bytes: int
    direction: str  # load, save, both
    verified: bool
    gbps: float
    median_gbps: float
    limit_gbps: float  # plain pinned copies, sampled in turn with these
    limit_median_gbps: float
    ratio: float
    verify_cost: float | None = None  # the share of the unverified rate that verification takes
    way: str = ""


class ByEngine(msgspec.Struct, Generic[A], kw_only=True):
    """One figure for each engine that was measured."""

    none: A | None = None
    offload: A | None = None
    kvtally: A | None = None

    @property
    def arms(self) -> dict[str, A]:
        arms = {engine: getattr(self, engine) for engine in ENGINES}
        return {engine: arm for engine, arm in arms.items() if arm is not None}

    def place(self, engine: str, arm: A) -> None:
        setattr(self, engine, arm)


class Arm(msgspec.Struct, kw_only=True):
    """One engine. Times are medians of `samples`, in seconds until the first token; counts are the lowest."""

    start_s: float = 0.0
    cold_s: float = 0.0
    cold_mean_s: float = 0.0
    repeat_s: float = 0.0  # the engine's own prefix cache emptied before
    gpu_hit_s: float = 0.0  # the same prompt once more
    best_repeat_s: float = 0.0  # the quietest sample
    best_gpu_hit_s: float = 0.0
    added_s: float | None = None  # a repeat minus the hit that followed it: what slows both cancels out
    cold_cached_tokens: int = 0
    repeat_cached_tokens: int = 0
    gpu_hit_cached_tokens: int = 0
    saved_bytes: int = 0  # of all fills and warm-up, by the store's count
    first_tokens: dict[str, list[int]] = {}  # by prompt, one for each time it was asked
    samples: dict[str, list[float]] = {}  # of cold, repeat, gpu_hit
    cached_tokens: dict[str, list[int]] = {}
    receipts: dict[str, View] = {}


class DiskArm(msgspec.Struct, kw_only=True):
    """Repeats after a restart of engine and store."""

    repeat_s: float
    cached_tokens: int
    moved_bytes: int  # of one repeat, by its receipt
    gbps: float  # those bytes over the whole time to the first token
    staged_gbps: float  # over the time until they were in the arena
    limit_gbps: float  # direct reads of the same disk, sampled in turn with these: the median
    ratio: float
    staged_ratio: float
    receipt: View
    samples: list[float] = []
    limit_samples: list[float] = []


class Repeat(ByEngine[Arm], kw_only=True):
    prompt_tokens: int = 0
    fills: int = 0
    disk: DiskArm | None = None
    ratios: dict[str, float] = {}
    outputs_equal: bool | None = None  # first tokens, in all engines; None: there is nothing to compare


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    mean_ms: float
    median_ms: float
    p99_ms: float
    max_ms: float
    samples: int


class BusyArm(msgspec.Struct, kw_only=True):
    """Keys: `alone` (nothing arrives), `own` (requests hit the GPU's own prefix cache), `bus` (the same, while plain
    copies of as many bytes as a load's go up), `repeats` (they do not hit it)."""

    itl: dict[str, Latency] = {}  # between tokens of running decodes, from the arrival on
    itl_rounds_ms: dict[str, list[float]] = {}  # the mean of each round
    ttft: dict[str, Latency] = {}  # of the requests that arrive
    cached_tokens: dict[str, int] = {}  # of the request that had the fewest


class Busy(ByEngine[BusyArm], kw_only=True):
    requests: int = 0
    prompt_tokens: int = 0
    decodes: int = 0
    ratios: dict[str, float] = {}


class Figures(Run, kw_only=True):
    """Everything that was measured. A part that failed is in `failures`, with the end of its log."""

    commit: str = ""
    quick: bool = False
    graphs: bool = False  # engines with CUDA graphs
    machine: Machine = Machine()
    limits: dict[str, Rate] = {}
    copies: list[CopyFigure] = []
    repeat: dict[str, Repeat] = {}
    busy: dict[str, Busy] = {}
    failures: dict[str, str] = {}
    targets: list[Target] = []


# ---- from samples to figures


def latency(seconds: Sequence[float]) -> Latency:
    return Latency(
        mean_ms=statistics.fmean(seconds) * 1e3,
        median_ms=median(seconds) * 1e3,
        p99_ms=p99(seconds) * 1e3,
        max_ms=max(seconds) * 1e3,
        samples=len(seconds),
    )


def complete(figures: Figures) -> None:
    """Derive ratios, equality and targets from what was measured so far."""
    for repeat in figures.repeat.values():
        for arm in repeat.arms.values():
            _summarise(arm)
        repeat.ratios = repeat_ratios(repeat)
        repeat.outputs_equal = outputs_equal(list(repeat.arms.values()))
    for busy in figures.busy.values():
        busy.ratios = busy_ratios(busy)
    figures.targets = Target.of(rows(figures))


def _summarise(arm: Arm) -> None:
    colds, repeats, hits = (arm.samples.get(way, []) for way in ("cold", "repeat", "gpu_hit"))
    arm.cold_s, arm.repeat_s, arm.gpu_hit_s = median(colds), median(repeats), median(hits)
    arm.best_repeat_s, arm.best_gpu_hit_s = min(repeats, default=0.0), min(hits, default=0.0)
    is_paired = len(repeats) == len(hits) > 0
    arm.added_s = statistics.median(map(sub, repeats, hits)) if is_paired else None
    arm.cold_mean_s = statistics.fmean(colds) if colds else 0.0
    lowest = {way: min(counts) for way, counts in arm.cached_tokens.items() if counts}
    arm.cold_cached_tokens = lowest.get("cold", 0)
    arm.repeat_cached_tokens = lowest.get("repeat", 0)
    arm.gpu_hit_cached_tokens = lowest.get("gpu_hit", 0)


def repeat_ratios(repeat: Repeat) -> dict[str, float]:
    none, offload, ours = repeat.none, repeat.offload, repeat.kvtally
    pairs: dict[str, tuple[float, float]] = {}
    if ours is not None:
        pairs["repeat_over_own_gpu_hit"] = ours.repeat_s, ours.gpu_hit_s
        pairs["cold_over_repeat"] = ours.cold_s, ours.repeat_s
    if ours is not None and offload is not None:
        pairs["repeat_over_offload"] = ours.repeat_s, offload.repeat_s
        pairs["best_repeat_over_offload"] = ours.best_repeat_s, offload.best_repeat_s
    if ours is not None and none is not None:
        pairs["repeat_over_gpu_hit"] = ours.repeat_s, none.gpu_hit_s
        pairs["best_repeat_over_gpu_hit"] = ours.best_repeat_s, none.best_gpu_hit_s
        pairs["cold_over_none"] = ours.cold_s, none.cold_s
        pairs["cold_mean_over_none"] = ours.cold_mean_s, none.cold_mean_s
    if offload is not None:
        pairs["offload_cold_over_repeat"] = offload.cold_s, offload.repeat_s
    if offload is not None and none is not None:
        pairs["offload_repeat_over_gpu_hit"] = offload.repeat_s, none.gpu_hit_s
        pairs["offload_cold_over_none"] = offload.cold_s, none.cold_s
    ratios = {key: value / base for key, (value, base) in pairs.items() if value > 0 and base > 0}
    # Prompt by prompt: within a row each takes longer than the one before, with and without saves.
    cold = {name: arm.samples.get("cold", []) for name, arm in repeat.arms.items()}
    for key, engine in (("cold_pairs_over_none", "kvtally"), ("offload_cold_pairs_over_none", "offload")):
        if len(cold.get(engine, [])) == len(cold.get("none", [])) > 0:
            ratios[key] = statistics.median(map(truediv, cold[engine], cold["none"]))
    if repeat.disk is not None:
        ratios["disk_over_limit"] = repeat.disk.ratio
        ratios["disk_staged_over_limit"] = repeat.disk.staged_ratio
    return ratios


def busy_ratios(busy: Busy) -> dict[str, float]:
    """What loading adds to the latency between tokens: the same requests, served by a connector and by the GPU's own
    cache."""
    ratios = {}
    for engine, arm in busy.arms.items():
        itl, ttft = arm.itl, arm.ttft
        for against in ("own", "bus", "alone"):
            if "repeats" in itl and against in itl:
                ratios[f"{engine}_itl_over_{against}"] = itl["repeats"].mean_ms / itl[against].mean_ms
                ratios[f"{engine}_itl_median_over_{against}"] = itl["repeats"].median_ms / itl[against].median_ms
                ratios[f"{engine}_itl_p99_over_{against}"] = itl["repeats"].p99_ms / itl[against].p99_ms
        if arm.itl_rounds_ms.get("repeats") and arm.itl_rounds_ms.get("own"):  # the quietest round of each
            ratios[f"{engine}_itl_best_over_own"] = min(arm.itl_rounds_ms["repeats"]) / min(arm.itl_rounds_ms["own"])
        if "bus" in itl and "own" in itl:  # the least that any load can cost
            ratios[f"{engine}_bus_itl_over_own"] = itl["bus"].mean_ms / itl["own"].mean_ms
            ratios[f"{engine}_bus_itl_median_over_own"] = itl["bus"].median_ms / itl["own"].median_ms
        if "repeats" in ttft and "own" in ttft:
            ratios[f"{engine}_ttft_over_own"] = ttft["repeats"].mean_ms / ttft["own"].mean_ms
    ours, peer, none = busy.kvtally, busy.offload, busy.none
    if ours is not None and none is not None and "repeats" in ours.itl and "own" in none.itl:
        # With kvtally, even a hit in the GPU's own cache loads a tail from the store. This one compares with no load at
        # all.
        ratios["kvtally_itl_over_none_own"] = ours.itl["repeats"].mean_ms / none.itl["own"].mean_ms
    if ours is not None and peer is not None and "repeats" in ours.ttft and "repeats" in peer.ttft:
        ratios["ttft_over_offload"] = ours.ttft["repeats"].mean_ms / peer.ttft["repeats"].mean_ms
        ratios["itl_over_offload"] = ours.itl["repeats"].mean_ms / peer.itl["repeats"].mean_ms
    return ratios


def outputs_equal(arms: Sequence[Arm]) -> bool | None:
    """Whether each prompt's answer began with the same token in every engine, every time."""
    tokens: dict[str, set[int]] = {}
    for arm in arms:
        for prompt, firsts in arm.first_tokens.items():
            tokens.setdefault(prompt, set()).update(firsts)
    return all(len(each) == 1 for each in tokens.values()) if tokens else None


# ---- targets


def rows(figures: Figures) -> list[Row]:
    """Every promise that this run can say something about."""
    found = [row for figure in figures.copies for row in _copy_rows(figure)]
    for shape, repeat in figures.repeat.items():
        found += _repeat_rows(shape, repeat)
    for shape, busy in figures.busy.items():
        for against in ("over_own", "median_over_own", "best_over_own", "over_none_own"):
            if (key := f"kvtally_itl_{against}") in busy.ratios:
                found.append(Row(key=f"busy.{shape}.{key}", value=busy.ratios[key], unit="×").at_most(ITL_TARGET))
    return found


def _copy_rows(figure: CopyFigure) -> Iterator[Row]:
    key = f"copies.{figure.page_bytes}.{figure.direction}{'.verified' if figure.verified else ''}"
    ratio = Row(key=f"{key}.ratio", value=figure.ratio, unit="×")
    if figure.direction == "both":
        yield ratio.at_least(BOTH_TARGET)
        return
    yield Row(key=f"{key}.gbps", value=figure.gbps, unit="GB/s").at_least(GBPS_TARGET, f"{GBPS_TARGET:g} GB/s")
    yield ratio.at_least(LIMIT_TARGET)
    if figure.verify_cost is not None:
        cost = Row(key=f"{key}.verify_cost", value=figure.verify_cost)
        yield cost.at_most(VERIFY_TARGET, f"{VERIFY_TARGET:.0%}")


def _repeat_rows(shape: str, repeat: Repeat) -> Iterator[Row]:
    at_most = {
        "repeat_over_offload": OFFLOAD_TARGET,
        "repeat_over_gpu_hit": GPU_HIT_TARGET,
        "repeat_over_own_gpu_hit": GPU_HIT_TARGET,
        "cold_over_none": COLD_TARGET,
        "cold_pairs_over_none": COLD_TARGET,
    }
    at_least = {"disk_over_limit": DISK_TARGET}
    if shape in SPEED_UP_TARGETS:
        at_least["cold_over_repeat"] = SPEED_UP_TARGETS[shape]
    for key in (*at_most, *at_least):
        if key in repeat.ratios:
            row = Row(key=f"repeat.{shape}.{key}", value=repeat.ratios[key], unit="×")
            yield row.at_most(at_most[key]) if key in at_most else row.at_least(at_least[key])
    if repeat.outputs_equal is not None:
        ok = repeat.outputs_equal
        yield Row(key=f"repeat.{shape}.outputs_equal", value=float(ok)).judged("yes", ok)


# ---- for people


def page(figures: Figures) -> RenderableType:
    parts: list[RenderableType] = []
    if figures.limits:
        parts.append(_limits_table(figures.limits))
    if figures.copies:
        parts.append(_copies_table(figures.copies))
    parts += [_repeat_part(shape, repeat) for shape, repeat in figures.repeat.items()]
    parts += [_busy_part(shape, busy) for shape, busy in figures.busy.items()]
    if judged := rows(figures):
        parts.append(rows_table(judged, f"targets: {sum(row.ok is True for row in judged)} of {len(judged)} met"))
    parts += [Text(f"{part} FAILED: {why.strip()}", style="bold red") for part, why in figures.failures.items()]
    return report.page(figures, _about(figures), *parts)


def _about(figures: Figures) -> list[str]:
    machine = figures.machine
    return [
        figures.commit and f"commit {figures.commit}",
        f"{machine.gpu} ({human_size(machine.gpu_memory_bytes)})",
        f"driver {machine.driver}",
        f"torch {machine.torch}",
        machine.vllm,
        f"{machine.cpus} cores",
        "CUDA graphs" if figures.graphs else "",
        "quick: rough figures" if figures.quick else "",
    ]


def _limits_table(limits: dict[str, Rate]) -> Table:
    table = plain_table("limit", ">best GB/s", ">median")
    for name, rate in limits.items():
        table.add_row(name.replace("_", " "), f"{rate.gbps:.1f}", f"{rate.median_gbps:.1f}")
    return table


def _copies_table(copies: Sequence[CopyFigure]) -> Table:
    table = plain_table(
        "copies", ">page", "direction", "verified", ">GB/s", ">median", ">limit", ">ratio", ">verify costs", ""
    )
    for figure in copies:
        table.add_row(
            figure.case,
            f"{figure.page_bytes:,}",
            figure.direction,
            "yes" if figure.verified else "no",
            f"{figure.gbps:.1f}",
            f"{figure.median_gbps:.1f}",
            f"{figure.limit_gbps:.1f}",
            f"{figure.ratio:.2f}",
            f"{figure.verify_cost:.1%}" if figure.verify_cost is not None else "",
            verdict(list(_copy_rows(figure))),
        )
    return table


def _repeat_part(shape: str, repeat: Repeat) -> RenderableType:
    table = plain_table(f"first token, {shape}", ">cold", ">repeat", ">GPU hit", ">added", ">cached", ">start")
    for name, arm in repeat.arms.items():
        times = [ms(arm.cold_s), ms(arm.repeat_s), ms(arm.gpu_hit_s)]
        times.append(ms(arm.added_s) if arm.added_s is not None else "")
        table.add_row(name, *times, f"{arm.repeat_cached_tokens:,}", f"{arm.start_s:.0f} s")
    notes = [f"{repeat.fills} prompts of {repeat.prompt_tokens:,} tokens; {_ratios(repeat.ratios)}"]
    if repeat.outputs_equal is False:
        notes.append("First tokens are NOT equal in all engines.")
    if repeat.disk is not None:
        disk = repeat.disk
        notes.append(
            f"After a restart, from disk: {ms(disk.repeat_s)}, {disk.cached_tokens:,} tokens, "
            f"{human_size(disk.moved_bytes)} at {disk.gbps:.2f} GB/s; direct reads: {disk.limit_gbps:.2f} GB/s."
        )
    return Group(table, *map(Text, notes))


def _busy_part(shape: str, busy: Busy) -> RenderableType:
    table = plain_table(
        f"{busy.decodes} decodes, {busy.requests} requests arrive ({shape})",
        "served from",
        *(">TTFT mean", ">p50", ">p99", ">ITL mean", ">p50", ">p99", ">max", ">cached"),
    )
    sources = {
        "alone": "nothing arrives",
        "own": "GPU's own cache",
        "bus": "the same, busy bus",
        "repeats": "connector",
    }
    for name, arm in busy.arms.items():
        for key, itl in arm.itl.items():
            source = "computed again" if name == "none" and key == "repeats" else sources[key]
            first = arm.ttft.get(key)
            times = (first.mean_ms, first.median_ms, first.p99_ms) if first is not None else (None, None, None)
            gaps = (itl.mean_ms, itl.median_ms, itl.p99_ms, itl.max_ms)
            cells = ["" if value is None else f"{value:,.1f} ms" for value in (*times, *gaps)]
            cached = f"{arm.cached_tokens[key]:,}" if key in arm.cached_tokens else ""
            table.add_row(name, source, *cells, cached)
    return Group(table, Text(_ratios(busy.ratios)))


def _ratios(ratios: dict[str, float]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in ratios.items())
