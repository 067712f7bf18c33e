"""The benchmark: that it measures everything it promises and judges rightly. Never how fast anything is."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvtally.bench import route
from kvtally.bench.daemon import Daemon
from kvtally.bench.report import Row, Target, rows_table, verdict
from kvtally.bench.store import main
from kvtally.bench.store_report import Figures, Latency, page, rows
from kvtally.bench.tasks import OBJECT_BYTES, Allocate, Copy, RawRead, TaskWorker
from kvtally.errors import ConfigError, TransportError
from kvtally.processes import own_environment
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
RATES = (
    "memcpy_gbps",
    "memcpy_median_gbps",
    "memcpy_whole_gbps",
    "put_gbps",
    "put_first_touch_gbps",
    "put_first_touch_unmapped_gbps",
    "put_checksummed_gbps",
    "get_gbps",
    "get_verified_gbps",
    "disk_get_gbps",
    "disk_raw_gbps",
    "disk_get_warm_gbps",
    "disk_raw_warm_gbps",
    "disk_get_cold_gbps",
    "disk_raw_cold_gbps",
    "disk_get_copied_gbps",
    "disk_put_gbps",
    "disk_raw_put_gbps",
)
GOOD = Figures(
    memcpy_gbps=10.0,
    memcpy_median_gbps=9.5,
    put_gbps=9.1,
    put_first_touch_gbps=9.1,
    put_checksummed_gbps=6.1,
    get_gbps=9.1,
    get_verified_gbps=6.1,
    lookup_16k_ms=0.39,
    lookup_16k={"hit": Latency(quiet_ms=0.39, median_ms=0.4, p99_ms=0.5)},
    rtt_ms=0.09,
    disk_get_warm_gbps=4.1,
    disk_raw_warm_gbps=5.0,
    disk_get_cold_gbps=0.81,
    disk_raw_cold_gbps=1.0,
    clients_gbps={"1": 5.0},
    clients_memcpy_gbps={"1": 10.0},
    lookup_ms_by_objects={"10000": 0.2, "1000000": 0.39},
    resident_bytes_per_object={"dense": 590.0},
    idle_cpu_percent=0.2,
)


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtally", "bench", "store", "--quick", "--json", "--dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=10 * HANG_S, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert b"Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []
    figures = json.loads(ran.stdout)
    for name in RATES:
        assert isinstance(figures[name], float), name
        assert figures[name] > 0, name
    assert figures["quick"] is True
    assert figures["rtt_ms"] > 0
    assert figures["lookup_16k_ms"] > 0
    assert {"hit", "half", "miss", "hold", "round_trip", "hashing", "packing"} == figures["lookup_16k"].keys()
    for latency in (*figures["lookup_16k"].values(), figures["rtt"], *figures["lookup_by_objects"].values()):
        assert 0 < latency["quiet_ms"] <= latency["median_ms"] <= latency["p99_ms"]
    assert len(figures["lookup_ms_by_objects"]) == 2
    assert figures["clients_gbps"].keys() == figures["clients_memcpy_gbps"].keys() == {"1", "2"}
    assert figures["resident_bytes_per_object"].keys() == {"hybrid", "dense", "dense + disk"}
    assert figures["idle_cpu_percent"] >= 0
    assert figures["skipped"] == []
    assert all(ratio > 0 for ratio in figures["ratios"].values())
    assert figures["cpu_ratios"].keys() <= figures["ratios"].keys()
    assert all(0 < ratio < 2 for ratio in figures["cpu_ratios"].values())
    assert figures["ratios"]["put_gbps"] == pytest.approx(figures["put_gbps"] / figures["memcpy_gbps"])
    assert all(row["ok"] is None for row in figures["targets"])  # so short a look judges nothing


def verdicts(figures: Figures) -> dict[str, bool | None]:
    return {row.key: row.ok for row in rows(figures)}


def test_what_meets_its_target_is_ok() -> None:
    found = verdicts(GOOD)
    assert False not in found.values()
    assert found["put_gbps"]
    assert found["disk_get_cold_gbps"]
    assert found["lookup_ms_by_objects.1000000"]
    assert found["clients_gbps.1"] is None  # nothing was promised


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("put_gbps", {"put_gbps": 8.9}),
        ("put_first_touch_gbps", {"put_first_touch_gbps": 8.9}),
        ("put_checksummed_gbps", {"put_checksummed_gbps": 5.9}),
        ("get_gbps", {"get_gbps": 8.9}),
        ("get_verified_gbps", {"get_verified_gbps": 5.9}),
        ("lookup_16k_ms", {"lookup_16k_ms": 0.41}),
        ("rtt_ms", {"rtt_ms": 0.11}),
        ("disk_get_warm_gbps", {"disk_get_warm_gbps": 3.9}),
        ("disk_get_cold_gbps", {"disk_get_cold_gbps": 0.79}),
        ("lookup_ms_by_objects.1000000", {"lookup_ms_by_objects": {"10000": 0.2, "1000000": 0.41}}),
        ("resident_bytes_per_object.dense", {"resident_bytes_per_object": {"dense": 601.0}}),
        ("idle_cpu_percent", {"idle_cpu_percent": 1.1}),
    ],
)
def test_what_misses_its_target_is_a_miss(key: str, changed: dict[str, object]) -> None:
    worse = msgspec.structs.replace(GOOD, **changed)
    assert [row for row, ok in verdicts(worse).items() if ok is False] == [key]


def test_the_table_shows_each_row_and_says_when_the_machine_was_busy() -> None:
    figures = Figures(memcpy_gbps=10.0, memcpy_median_gbps=5.0, put_gbps=3.0, skipped=["something"])
    figures.targets = rows(figures)
    text = io.StringIO()
    Console(file=text, width=100).print(page(figures))
    assert "0.30" in text.getvalue()
    assert "miss" in text.getvalue()
    assert "busy" in text.getvalue()
    assert "Not measured: something" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--quick", "--memory", "1MiB"], "KV-102"),
        (["--quick", "--memory", "much"], "KV-102"),
        (["--quick", "--dir", "/dev/null/nowhere"], "KV-103"),
    ],
)
def test_impossible_options_are_refused(arguments: list[str], code: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main(arguments)
    assert refused.value.code == code


def test_a_worker_measures_and_reports_what_goes_wrong(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(OBJECT_BYTES // 2))
    with TaskWorker(tmp_path / "log") as worker:
        assert worker.run(Allocate(1)) == []
        assert [seconds > 0 for seconds in worker.run(Copy())] == [True, True]
        with pytest.raises(TransportError, match="instead of"):
            worker.run(RawRead(str(short), 0))
        assert worker.run(Copy())  # an error ends a task, not the worker


ORPHAN = """
import sys, time
from pathlib import Path
from kvtally.bench.daemon import Daemon
daemon = Daemon(Path(sys.argv[1]), "s", memory_bytes=16 << 20)
print(daemon.pid, flush=True)
time.sleep(600)
"""


def test_a_store_ends_with_the_bench_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    with subprocess.Popen(command, env=own_environment(), stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        end = os.pidfd_open(int(bench.stdout.readline()))
        try:
            bench.kill()
            assert select.select([end], [], [], HANG_S)[0]
        finally:
            os.close(end)


def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"error: store.memory = 1 .* below the smallest .*\nremedy: Write a size"):
        Daemon(tmp_path, "s", memory_bytes=1)


# ---- the report that all benches share


def test_a_row_is_judged_by_its_ratio_where_there_is_a_limit() -> None:
    row = Row(key="put", value=9.0, unit="GB/s")
    assert row.at_least(10).ok is False
    assert row.at_least(10).target == "≥ 10"
    beside = row.beside(10.0, "memcpy")
    assert (beside.at_least(0.9).ok, beside.at_least(0.9).target) == (True, "≥ 0.9 ×")
    assert beside.at_most(0.8).ok is False
    assert Target.of([beside, beside.at_most(0.8)]) == [Target(key="put", value=0.9, target="≤ 0.8 ×", ok=False)]


def test_a_verdict_is_that_of_the_worst_row() -> None:
    good, bad = (Row(key="a", value=value).at_most(1) for value in (1, 2))
    unknown, plain = good.judged("≤ 1", None), Row(key="b", value=5)
    cases = {"ok": [good, plain], "miss": [good, unknown, bad], "not judged": [good, unknown], "": [plain]}
    assert [str(verdict(rows)) for rows in cases.values()] == list(cases)


def test_columns_that_no_row_uses_are_left_out() -> None:
    plain = rows_table([Row(key="a", value=5)])
    assert [column.header for column in plain.columns] == ["what", "value"]
    beside = rows_table([Row(key="a", value=5, unit="ms").beside(4, "memcpy"), Row(key="b", value=1)], "copies")
    assert [column.header for column in beside.columns] == ["copies", "value", "", "limit", "", "ratio"]


@pytest.mark.parametrize(
    ("verdicts", "is_ok"), [({"local": 9, "proved": 90}, True), ({"missing": 5}, False), ({}, False)]
)
def test_a_router_whose_receipts_are_missing_is_not_the_one_to_measure(verdicts: dict[str, int], is_ok: bool) -> None:
    figures = route.Figures(version="", quick=False, cpus=1, verdicts=verdicts)
    assert {row.key: row.ok for row in route.rows(figures)}["requests without a receipt"] is is_ok
