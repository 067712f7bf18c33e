"""The JSON of every bench, key by key. Programs read it, and figures of different versions are compared by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtally.bench import gpu_report, peers, prefetch_report, repeat_report, route, store_report
from kvtally.bench.gpu_arms import disk_arm
from kvtally.core.receipts import Half, Role

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "bench_keys.json").read_text())
LATENCY = store_report.Latency(quiet_ms=1.0, median_ms=1.0, p99_ms=1.0)


def keys(info: Any, at: str = "") -> Iterator[str]:
    """Every key that a value of this type has in JSON, as a path: `a.b`, `a[].b` in a list, `a.*.b` in a dict."""
    if isinstance(info, msgspec.inspect.StructType):
        for field in info.fields:
            path = f"{at}.{field.encode_name}" if at else field.encode_name
            yield path
            yield from keys(field.type, path)
    elif isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from keys(member, at)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from keys(info.item_type, f"{at}[]")
    elif isinstance(info, msgspec.inspect.DictType):
        yield from keys(info.value_type, f"{at}.*")


@pytest.mark.parametrize(
    ("bench", "figures"),
    [
        ("store", store_report.Figures),
        ("peers", peers.Figures),
        ("repeat", repeat_report.Figures),
        ("prefetch", prefetch_report.Figures),
        ("route", route.Figures),
        ("gpu", gpu_report.Figures),
    ],
)
def test_the_keys_of_a_bench_stay_as_they_are(bench: str, figures: type) -> None:
    assert sorted(set(keys(msgspec.inspect.type_info(figures)))) == GOLDEN["keys"][bench]


def targets(figures: Any) -> list[str]:
    """What each row of `targets` in the JSON is called."""
    tree = json.loads(msgspec.json.encode(figures.targets))
    return [row["key"] if "key" in row else row["name"] for row in tree]


def test_the_targets_of_a_store_stay_as_they_are() -> None:
    parts = ("hit", "half", "miss", "hold", "round_trip", "hashing", "packing")
    figures = store_report.Figures(
        lookup_16k=dict.fromkeys(parts, LATENCY),
        clients_gbps={"1": 1.0},
        clients_memcpy_gbps={"1": 1.0},
        lookup_ms_by_objects={"10000": 0.2, "1000000": 0.3},
        resident_bytes_per_object={"hybrid": 500.0, "dense": 500.0, "dense + disk": 500.0},
    )
    figures.targets = store_report.rows(figures)
    assert targets(figures) == GOLDEN["targets"]["store"]


def test_the_targets_of_repeats_stay_as_they_are() -> None:
    figures = repeat_report.Figures()
    figures.targets = repeat_report.judge(figures)
    assert targets(figures) == GOLDEN["targets"]["repeat"]


def test_the_targets_of_prefetch_stay_as_they_are() -> None:
    times = prefetch_report.times([1.0], cpu_s=[1.0])
    figures = prefetch_report.Figures(
        speeds=[prefetch_report.Speed(name="fast", disk_bytes_s=0, arms={})],
        nothing={"on": times, "off": times},
        single={"no_store": times},
    )
    figures.targets = prefetch_report.judge(figures)
    assert targets(figures) == GOLDEN["targets"]["prefetch"]


def test_the_targets_of_a_router_stay_as_they_are() -> None:
    figures = route.Figures(quick=False, cpus=1)
    figures.targets = route.Target.of(route.rows(figures))
    assert targets(figures) == GOLDEN["targets"]["route"]


def test_the_targets_and_ratios_of_a_gpu_stay_as_they_are() -> None:
    def arm() -> gpu_report.Arm:
        samples = {way: [1.0] for way in ("cold", "repeat", "gpu_hit")}
        return gpu_report.Arm(samples=samples, first_tokens={"1000": [7]})

    def busy() -> gpu_report.BusyArm:
        each = gpu_report.latency([0.01])
        rounds = {"own": [1.0], "repeats": [1.0]}
        itl = dict.fromkeys(("alone", "own", "bus", "repeats"), each)
        return gpu_report.BusyArm(itl=itl, itl_rounds_ms=rounds, ttft={"own": each, "repeats": each})

    half = Half(role=Role.DECODE, tokens_disk=8_000, moved_bytes=10**9, wait_ms=1_000.0)
    copies = [
        gpu_report.CopyFigure(
            case="dense",
            page_bytes=65_536,
            object_bytes=1 << 25,
            direction=direction,
            verified=verified,
            gbps=50.0,
            median_gbps=50.0,
            limit_gbps=55.0,
            limit_median_gbps=55.0,
            ratio=0.9,
            verify_cost=0.01 if verified else None,
        )
        for direction in ("load", "save", "both")
        for verified in (False, True)
    ]
    repeat = gpu_report.Repeat(none=arm(), offload=arm(), kvtally=arm(), disk=disk_arm([1.0], [half], [2.0]))
    figures = gpu_report.Figures(
        copies=copies,
        repeat={"hybrid-27b": repeat},
        busy={"dense-8b": gpu_report.Busy(none=busy(), offload=busy(), kvtally=busy())},
    )
    gpu_report.complete(figures)
    assert targets(figures) == GOLDEN["targets"]["gpu"]
    assert sorted(figures.repeat["hybrid-27b"].ratios) == GOLDEN["ratios"]["repeat"]
    assert sorted(figures.busy["dense-8b"].ratios) == GOLDEN["ratios"]["busy"]
