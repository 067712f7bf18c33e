"""What `kvtally bench gpu` found: every figure beside its limit or peer of the same run, for programs and for people.

Owns the figures' form, the ratios, the targets and the tables. Measures nothing (`bench.gpu_copies` and
`bench.gpu_engine` do) and starts nothing (`bench.gpu` does). Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import sub, truediv
from typing import Generic, TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally.bench.repeat_report import Target, View
from kvtally.config.units import human_size

GBPS_TARGET = 50.0
LIMIT_TARGET = 0.9
BOTH_TARGET = 0.8  # our own: where one direction waits for the other, it is 0.5
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
    gbps: float  # of the best sample: neighbours only ever take away
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
        arms = {"none": self.none, "offload": self.offload, "kvtally": self.kvtally}
        return {name: arm for name, arm in arms.items() if arm is not None}

    def place(self, engine: str, arm: A) -> None:
        if engine == "none":
            self.none = arm
        elif engine == "offload":
            self.offload = arm
        else:
            self.kvtally = arm


class Arm(msgspec.Struct, kw_only=True):
    """One engine. Times are medians of `samples`, in seconds until the first token; counts are the lowest."""

    start_s: float = 0.0
    cold_s: float = 0.0
    cold_mean_s: float = 0.0
    repeat_s: float = 0.0  # the engine's own prefix cache emptied before
    gpu_hit_s: float = 0.0  # the same prompt once more
    best_repeat_s: float = 0.0  # the quietest sample
    best_gpu_hit_s: float = 0.0
    added_s: float | None = None  # by a repeat to the hit that followed it: whatever slows both cancels out
    cold_cached_tokens: int = 0
    repeat_cached_tokens: int = 0
    gpu_hit_cached_tokens: int = 0
    saved_bytes: int = 0  # of all fills and warm-up, by the store's count
    first_tokens: dict[str, list[int]] = {}  # by prompt: of each time it was asked
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
    cached_tokens: dict[str, int] = {}  # of a request, median


class Busy(ByEngine[BusyArm], kw_only=True):
    requests: int = 0
    prompt_tokens: int = 0
    decodes: int = 0
    ratios: dict[str, float] = {}


class Figures(msgspec.Struct, kw_only=True):
    """Everything that was measured. A part that failed is in `failures`, with the end of its log."""

    version: str = ""
    commit: str = ""
    quick: bool = False
    graphs: bool = False  # engines with CUDA graphs
    elapsed_s: float = 0.0
    machine: Machine = Machine()
    limits: dict[str, Rate] = {}
    copies: list[CopyFigure] = []
    repeat: dict[str, Repeat] = {}
    busy: dict[str, Busy] = {}
    failures: dict[str, str] = {}
    targets: list[Target] = []


# ---- from samples to figures


def latency(seconds: Sequence[float]) -> Latency:
    ordered = sorted(seconds)
    return Latency(
        mean_ms=statistics.fmean(ordered) * 1e3,
        median_ms=statistics.median(ordered) * 1e3,
        p99_ms=ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)] * 1e3,
        max_ms=ordered[-1] * 1e3,
        samples=len(ordered),
    )


def complete(figures: Figures) -> None:
    """Fill in what follows from what was measured: ratios, equality, targets. May be called again and again."""
    for repeat in figures.repeat.values():
        for arm in repeat.arms.values():
            _summarise(arm)
        repeat.ratios = repeat_ratios(repeat)
        repeat.outputs_equal = outputs_equal(list(repeat.arms.values()))
    for busy in figures.busy.values():
        busy.ratios = busy_ratios(busy)
    figures.targets = judge(figures)


def _summarise(arm: Arm) -> None:
    def median(way: str) -> float:
        return statistics.median(arm.samples[way]) if arm.samples.get(way) else 0.0

    arm.cold_s, arm.repeat_s, arm.gpu_hit_s = median("cold"), median("repeat"), median("gpu_hit")
    repeats, hits = arm.samples.get("repeat", []), arm.samples.get("gpu_hit", [])
    arm.best_repeat_s, arm.best_gpu_hit_s = min(repeats, default=0.0), min(hits, default=0.0)
    is_paired = len(repeats) == len(hits) > 0
    arm.added_s = statistics.median(map(sub, repeats, hits)) if is_paired else None
    arm.cold_mean_s = statistics.fmean(arm.samples["cold"]) if arm.samples.get("cold") else 0.0
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
    """What loading adds to the latency between tokens: the same requests, from a connector and from the GPU itself."""
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
        if "bus" in itl and "own" in itl:  # no load can cost less while it uses the bus
            ratios[f"{engine}_bus_itl_over_own"] = itl["bus"].mean_ms / itl["own"].mean_ms
            ratios[f"{engine}_bus_itl_median_over_own"] = itl["bus"].median_ms / itl["own"].median_ms
        if "repeats" in ttft and "own" in ttft:
            ratios[f"{engine}_ttft_over_own"] = ttft["repeats"].mean_ms / ttft["own"].mean_ms
    ours, peer, none = busy.kvtally, busy.offload, busy.none
    if ours is not None and none is not None and "repeats" in ours.itl and "own" in none.itl:
        # vLLM's own hit ends at a block, ours goes on with a tail from the store: here is one without such a load.
        ratios["kvtally_itl_over_none_own"] = ours.itl["repeats"].mean_ms / none.itl["own"].mean_ms
    if ours is not None and peer is not None and "repeats" in ours.ttft and "repeats" in peer.ttft:
        ratios["ttft_over_offload"] = ours.ttft["repeats"].mean_ms / peer.ttft["repeats"].mean_ms
        ratios["itl_over_offload"] = ours.itl["repeats"].mean_ms / peer.itl["repeats"].mean_ms
    return ratios


def outputs_equal(arms: Sequence[Arm]) -> bool | None:
    """Whether each prompt began its answer with one and the same token, wherever and whenever it was asked."""
    tokens: dict[str, set[int]] = {}
    for arm in arms:
        for prompt, firsts in arm.first_tokens.items():
            tokens.setdefault(prompt, set()).update(firsts)
    return all(len(each) == 1 for each in tokens.values()) if tokens else None


# ---- targets


def judge(figures: Figures) -> list[Target]:
    """Every promise that this run can say something about."""
    found = list(_copy_targets(figures.copies))
    for shape, repeat in figures.repeat.items():
        found += _repeat_targets(shape, repeat)
    for shape, busy in figures.busy.items():
        for against in ("over_own", "median_over_own", "best_over_own", "over_none_own"):
            if (key := f"kvtally_itl_{against}") in busy.ratios:
                found.append(_at_most(f"busy.{shape}.{key}", busy.ratios[key], ITL_TARGET))
    return found


def _copy_targets(copies: Sequence[CopyFigure]) -> Iterator[Target]:
    for figure in copies:
        key = copy_key(figure)
        if figure.direction == "both":
            yield _at_least(f"{key}.ratio", figure.ratio, BOTH_TARGET)
            continue
        yield _at_least(f"{key}.gbps", figure.gbps, GBPS_TARGET, " GB/s")
        yield _at_least(f"{key}.ratio", figure.ratio, LIMIT_TARGET)
        if figure.verify_cost is not None:
            ok = figure.verify_cost <= VERIFY_TARGET
            yield Target(key=f"{key}.verify_cost", value=figure.verify_cost, target=f"≤ {VERIFY_TARGET:.0%}", ok=ok)


def copy_key(figure: CopyFigure) -> str:
    return f"copies.{figure.page_bytes}.{figure.direction}{'.verified' if figure.verified else ''}"


def _repeat_targets(shape: str, repeat: Repeat) -> Iterator[Target]:
    promised: dict[str, tuple[Callable[[str, float, float], Target], float]] = {
        "repeat_over_offload": (_at_most, OFFLOAD_TARGET),
        "repeat_over_gpu_hit": (_at_most, GPU_HIT_TARGET),
        "repeat_over_own_gpu_hit": (_at_most, GPU_HIT_TARGET),
        "cold_over_none": (_at_most, COLD_TARGET),
        "cold_pairs_over_none": (_at_most, COLD_TARGET),
        "disk_over_limit": (_at_least, DISK_TARGET),
    }
    if shape in SPEED_UP_TARGETS:
        promised["cold_over_repeat"] = _at_least, SPEED_UP_TARGETS[shape]
    for key, (compare, target) in promised.items():
        if key in repeat.ratios:
            yield compare(f"repeat.{shape}.{key}", repeat.ratios[key], target)
    if repeat.outputs_equal is not None:
        ok = repeat.outputs_equal
        yield Target(key=f"repeat.{shape}.outputs_equal", value=float(ok), target="yes", ok=ok)


def _at_most(key: str, value: float, target: float) -> Target:
    return Target(key=key, value=value, target=f"≤ {target:g} ×", ok=value <= target)


def _at_least(key: str, value: float, target: float, unit: str = " ×") -> Target:
    return Target(key=key, value=value, target=f"≥ {target:g}{unit}", ok=value >= target)


# ---- for people


def page(figures: Figures) -> RenderableType:
    parts: list[RenderableType] = [Text(_headline(figures), style="bold")]
    if figures.limits:
        parts += [Text(), _limits_table(figures.limits)]
    if figures.copies:
        parts += [Text(), _copies_table(figures)]
    for shape, repeat in figures.repeat.items():
        parts += [Text(), *_repeat_part(shape, repeat)]
    for shape, busy in figures.busy.items():
        parts += [Text(), *_busy_part(shape, busy)]
    if figures.targets:
        parts += [Text(), _targets_table(figures.targets)]
    for part, why in figures.failures.items():
        parts += [Text(), Text(f"{part} FAILED: {why.strip()}", style="bold red")]
    return Group(*parts)


def _headline(figures: Figures) -> str:
    machine = figures.machine
    software = f"driver {machine.driver} · torch {machine.torch}" + (f" · {machine.vllm}" if machine.vllm else "")
    where = f"{machine.gpu} ({human_size(machine.gpu_memory_bytes)}) · {software} · {machine.cpus} cores"
    how = " · CUDA graphs" if figures.graphs else ""
    how += " · quick: rough figures" if figures.quick else ""
    commit = f" ({figures.commit})" if figures.commit else ""
    return f"kvtally {figures.version}{commit} · {where} · {figures.elapsed_s:.0f} s{how}"


def _table(*columns: str) -> Table:
    """A column's name begins with `>` if its cells are numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _limits_table(limits: dict[str, Rate]) -> Table:
    table = _table("limit", ">best GB/s", ">median")
    for name, rate in limits.items():
        table.add_row(name.replace("_", " "), f"{rate.gbps:.1f}", f"{rate.median_gbps:.1f}")
    return table


def _copies_table(figures: Figures) -> Table:
    table = _table(
        "copies", ">page", "direction", "verified", ">GB/s", ">median", ">limit", ">ratio", ">verify costs", ""
    )
    targets = {target.key: target for target in figures.targets}
    for figure in figures.copies:
        key = copy_key(figure)
        judged = [targets[name] for name in (f"{key}.gbps", f"{key}.ratio", f"{key}.verify_cost") if name in targets]
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
            _verdict(judged),
        )
    return table


def _repeat_part(shape: str, repeat: Repeat) -> list[RenderableType]:
    table = _table(f"first token, {shape}", ">cold", ">repeat", ">GPU hit", ">added", ">cached", ">start")
    for name, arm in repeat.arms.items():
        times = [_ms(arm.cold_s), _ms(arm.repeat_s), _ms(arm.gpu_hit_s)]
        times.append(_ms(arm.added_s) if arm.added_s is not None else "")
        table.add_row(name, *times, f"{arm.repeat_cached_tokens:,}", f"{arm.start_s:.0f} s")
    notes = [f"{repeat.fills} prompts of {repeat.prompt_tokens:,} tokens; {_ratios(repeat.ratios)}"]
    if repeat.outputs_equal is False:
        notes.append("First tokens are NOT equal in all engines.")
    if repeat.disk is not None:
        disk = repeat.disk
        notes.append(
            f"After a restart, from disk: {_ms(disk.repeat_s)}, {disk.cached_tokens:,} tokens, "
            f"{human_size(disk.moved_bytes)} at {disk.gbps:.2f} GB/s; direct reads: {disk.limit_gbps:.2f} GB/s."
        )
    return [table, *map(Text, notes)]


def _busy_part(shape: str, busy: Busy) -> list[RenderableType]:
    table = _table(
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
            first = arm.ttft.get(key)
            source = "computed again" if name == "none" and key == "repeats" else sources[key]
            table.add_row(
                name,
                source,
                *([_unit(first.mean_ms), _unit(first.median_ms), _unit(first.p99_ms)] if first else ["", "", ""]),
                *(_unit(itl.mean_ms), _unit(itl.median_ms), _unit(itl.p99_ms), _unit(itl.max_ms)),
                f"{arm.cached_tokens[key]:,}" if key in arm.cached_tokens else "",
            )
    return [table, Text(_ratios(busy.ratios))]


def _targets_table(targets: Sequence[Target]) -> Table:
    met = sum(target.ok for target in targets)
    table = _table(f"targets: {met} of {len(targets)} met", ">value", ">target", "")
    for target in targets:
        value = f"{target.value:.1f}" if target.key.endswith("gbps") else f"{target.value:.3f}"
        table.add_row(target.key, value, target.target, _verdict([target]))
    return table


def _ratios(ratios: dict[str, float]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in ratios.items())


def _verdict(targets: Sequence[Target]) -> Text:
    if not targets:
        return Text("")
    return Text("ok", "green") if all(target.ok for target in targets) else Text("miss", "bold red")


def _ms(seconds: float) -> str:
    return _unit(seconds * 1e3)


def _unit(milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms"
