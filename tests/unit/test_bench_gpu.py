"""`kvtally bench gpu` where there is no GPU: its plan, its arithmetic, its verdicts, and what it says without one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvtally.bench import gpu, gpu_arms, gpu_copies
from kvtally.bench.engine import Answer, Ask, Settle, Source, Watch, Watched, gaps_after
from kvtally.bench.gpu_arms import QUICK, Bench, Job, disk_arm
from kvtally.bench.gpu_copies import CASES, Bed, _together, direct_reads
from kvtally.bench.gpu_report import (
    Arm,
    Busy,
    BusyArm,
    CopyFigure,
    Figures,
    Latency,
    Machine,
    Rate,
    Repeat,
    complete,
    latency,
    outputs_equal,
    page,
)
from kvtally.bench.gpu_shapes import SHAPES, start_of
from kvtally.core.geometry import object_length, runs
from kvtally.core.receipts import Half, Role
from kvtally.device import Checksums, Steps
from kvtally.errors import ConfigError, TransportError
from kvtally.processes import Worker
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


# ---- the plan


def test_everything_is_measured_unless_told_otherwise() -> None:
    jobs = gpu.plan([], [], [])
    assert [job.part for job in jobs[:5]] == ["limits", *["copies"] * 4]
    assert [(job.shape, job.engine, job.repeat, job.busy) for job in jobs[5:]] == [
        ("hybrid-27b", "none", True, False),
        ("hybrid-27b", "offload", True, False),
        ("hybrid-27b", "kvtally", True, False),
        ("dense-8b", "none", True, True),
        ("dense-8b", "offload", True, True),
        ("dense-8b", "kvtally", True, True),
    ]
    assert len({job.name for job in jobs}) == len(jobs)  # failures are kept by name


def test_parts_and_shapes_can_be_chosen() -> None:
    assert [job.name for job in gpu.plan(["limits"], [], [])] == ["limits"]
    assert [job.case for job in gpu.plan(["copies"], [], [])] == list(CASES)
    repeats = gpu.plan(["repeat"], ["hybrid-27b"], ["kvtally"])
    assert [(job.name, job.repeat, job.busy) for job in repeats] == [("hybrid-27b, kvtally", True, False)]
    assert all(job.busy and not job.repeat and job.shape == "dense-8b" for job in gpu.plan(["busy"], [], []))
    assert {job.shape for job in gpu.plan(["busy"], ["hybrid-27b"], [])} == {"hybrid-27b"}
    assert not any(job.busy for job in gpu.plan([], ["hybrid-27b"], []))  # unless it is asked for


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "expected"),
    [
        (139, 128, ["none", "offload kvtally", "none offload kvtally"]),  # an H200
        (80, 512, ["none", "offload", "kvtally", "none", "offload", "kvtally"]),
        (81, 512, ["none", "offload", "kvtally", "none", "offload kvtally"]),
        (139, 64, ["none offload", "kvtally", "none offload", "kvtally"]),
        (139, 70, ["none offload", "kvtally", "none offload kvtally"]),
    ],
)
def test_engines_stand_side_by_side_where_there_is_room(gpu_gib: int, host_gib: int, expected: list[str]) -> None:
    groups = gpu.side_by_side(gpu.plan([], [], []), gpu_gib * GIB, host_gib * GIB)
    assert [[job.part for job in group] for group in groups[:5]] == [["limits"], *[["copies"]] * 4]
    assert [" ".join(job.engine for job in group) for group in groups[5:]] == expected


def test_engines_side_by_side_take_turns_and_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Engine:
        def __init__(self, bench: Bench, job: Job) -> None:
            self._job = job

        def run(self) -> Iterator[None]:
            try:
                for step in range(3):
                    taken.append(f"{self._job.engine} {step}")
                    if (self._job.engine, step) == ("offload", 1):
                        raise TransportError("it died", remedy="")
                    yield
            finally:
                taken.append(f"{self._job.engine} ends")

    monkeypatch.setattr(gpu, "EngineBench", Engine)
    this = bench(tmp_path, [])
    this.figures.machine = Machine(gpu="H200", gpu_memory_bytes=139 * GIB)
    monkeypatch.setattr(gpu, "available_memory_bytes", lambda: 128 * GIB)
    gpu.run(this, gpu.plan(["busy"], [], []))
    assert taken == [
        *("none 0", "offload 0", "kvtally 0"),
        *("none 1", "offload 1", "offload ends", "kvtally 1"),
        *("none 2", "kvtally 2", "none ends", "kvtally ends"),
    ]
    assert list(this.figures.failures) == ["dense-8b, offload"]


@pytest.mark.parametrize("arguments", [["--part", "nothing"], ["--shape", "70b"], ["--engine", "lmcache"]])
def test_unknown_choices_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        gpu.main(arguments)
    assert exited.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    """Whether torch is missing or finds no device, nothing is measured, and the exit code is that of a refusal."""
    command = [sys.executable, "-m", "kvtally", "bench", "gpu", "--part", "limits", "--out", str(tmp_path / "out.json")]
    result = subprocess.run(
        command, cwd=ROOT, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""}, capture_output=True, text=True, timeout=HANG_S
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "KV-106" in result.stderr
    assert "remedy: Run it on a machine with an NVIDIA GPU" in result.stderr


def test_a_directory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        gpu.main(["--dir", "/nowhere/at/all"])
    assert refused.value.code == "KV-103"


@pytest.mark.parametrize("module", ["gpu", "gpu_arms", "gpu_copies", "gpu_shapes", "gpu_report", "engine"])
def test_nothing_of_an_engine_is_imported_before_it_is_needed(module: str) -> None:
    code = f"import sys, kvtally.bench.{module}; print({{'torch', 'triton', 'vllm'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert result.stdout.strip() == "set()", result.stderr


def bench(directory: Path, told: list[str]) -> Bench:
    return Bench(
        scale=QUICK,
        figures=Figures(),
        directory=directory,
        disk=directory,
        logs=directory,
        reads_disk=None,
        tell=told.append,
        publish=lambda: None,
    )


def test_a_job_that_fails_leaves_the_others_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch a measuring process ends with a traceback, which is what the failure shows."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told: list[str] = []
    this = bench(tmp_path, told)
    this.figures.limits = {"h2d": Rate(gbps=55.0, median_gbps=54.0)}
    gpu.run(this, [Job("copies", CASES[0])])
    failure = this.figures.failures["copies, dense, 16-token pages"]
    assert "ended" in failure
    assert "Error" in failure
    assert "h2d" in this.figures.limits
    assert told[0] == "copies, dense, 16-token pages"
    assert "FAILED" in told[1]


class FakeEngine:
    """Answers like an engine's process: a prompt it knows takes a tenth of the time."""

    def __init__(self, name: str, asked: list[tuple[str, object]]) -> None:
        self._name, self._asked, self._known = name, asked, set[int]()

    def ask(self, message: object, reply: type, timeout_s: float) -> object:
        self._asked.append((self._name, message))
        if isinstance(message, Ask):
            is_known = message.seed in self._known and not (message.forget and self._name == "none")
            self._known.add(message.seed)
            return Answer(seconds=0.02 if is_known else 0.2, tokens=[message.seed], cached_tokens=100 * is_known)
        if isinstance(message, Watch):
            return Watched(gaps_s=[0.02, 0.03], firsts_s=[0.1], cached_tokens=[100])
        return Answer()


def test_engines_side_by_side_are_asked_the_same_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(Bench, "start", lambda self, job, *_, **__: (FakeEngine(job.engine, asked), 1.0))
    monkeypatch.setattr(gpu, "available_memory_bytes", lambda: 128 * GIB)
    this = bench(tmp_path, [])
    this.figures.machine = Machine(gpu="H200", gpu_memory_bytes=139 * GIB)
    gpu.run(this, gpu.plan(["repeat", "busy"], ["dense-8b"], ["none", "offload"]))
    assert not this.figures.failures
    complete(this.figures)
    repeat, busy = this.figures.repeat["dense-8b"], this.figures.busy["dense-8b"]
    for arm in repeat.arms.values():
        assert {way: len(times) for way, times in arm.samples.items()} == {"cold": 3, "repeat": 2, "gpu_hit": 2}
        assert arm.added_s is not None
    assert repeat.ratios["offload_cold_over_repeat"] == pytest.approx(10)
    assert repeat.outputs_equal
    assert set(busy.arms) == {"none", "offload"}
    messages: dict[str, list[object]] = {name: [what for who, what in asked if who == name] for name in busy.arms}
    assert messages["none"] == messages["offload"]
    repeats = [who for who, what in asked if isinstance(what, Ask) and what.forget and what.seed >= 1000]
    assert repeats == ["none", "offload"] * 2
    watches = [(who, what) for who, what in asked if isinstance(what, Watch)]
    assert [who for who, _ in watches[:4]] == ["none", "offload"] * 2
    assert [what.source for who, what in watches if who == "none"][:4] == list(Source)
    assert {what.bus_bytes for _, what in watches} == {16 * 3_000 * 2 * 2 * 36 * 8 * 128}  # what loads would bring


class FakeStore:
    """A store's process and its book, for an engine that answers at once."""

    socket = "a.sock"

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> FakeStore:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_populated(self) -> None:
        pass

    def wait_saved(self) -> int:
        return 5

    def next_half(self, prompt_tokens: int, *, timeout_s: float) -> Half:
        return Half(role=Role.DECODE, prompt_tokens=prompt_tokens, tokens_disk=100, moved_bytes=10**9, wait_ms=250.0)


def test_what_comes_from_disk_stands_beside_what_the_disk_does_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, object]] = []
    speeds = iter([2.0, 4.0])

    @contextmanager
    def reads(directory: Path) -> Iterator[Callable[[], float]]:
        def read() -> float:
            asked.append(("disk", None))
            return next(speeds)

        yield read

    monkeypatch.setattr(Bench, "start", lambda self, job, *_, **__: (FakeEngine(job.engine, asked), 1.0))
    monkeypatch.setattr(Bench, "store", lambda *_: FakeStore())
    monkeypatch.setattr(gpu_arms, "Ledger", FakeStore)
    monkeypatch.setattr(gpu_arms, "direct_reads", reads)
    monkeypatch.setattr(gpu_arms, "disk_usable_bytes", lambda _: 1 << 50)
    this = bench(tmp_path, [])
    this.figures.machine = Machine(gpu="H200", gpu_memory_bytes=139 * GIB)
    gpu.run(this, gpu.plan(["repeat"], ["dense-8b"], ["kvtally"]))
    assert not this.figures.failures
    disk = this.figures.repeat["dense-8b"].disk
    assert disk is not None
    assert (disk.limit_gbps, disk.limit_samples, len(disk.samples)) == (3.0, [2.0, 4.0], 2)
    assert disk.staged_ratio == pytest.approx(4 / 3)
    assert [who for who, _ in asked[-4:]] == ["disk", "kvtally"] * 2


def test_a_child_is_refused_what_comes_before_its_start(tmp_path: Path) -> None:
    with (
        Worker("kvtally.bench.engine", log=tmp_path / "log") as child,
        pytest.raises(TransportError, match="started before it is asked"),
    ):
        child.ask(Settle(), Answer, 30.0)


def test_disk_is_read_only_where_that_is_wanted_and_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("kvtally.bench.gpu_arms.disk_usable_bytes", lambda _: 1 << 50)
    assert bench(tmp_path, told).disk_of("hybrid-27b") is None
    assert bench(tmp_path, told).disk_of("dense-8b") == tmp_path / "dense-8b"
    monkeypatch.setattr("kvtally.bench.gpu_arms.disk_usable_bytes", lambda _: 1 << 20)
    assert told == []
    assert bench(tmp_path, told).disk_of("dense-8b") is None
    assert "no room" in told[0]


# ---- what is measured with


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bed_moves_what_it_says(case: gpu_copies.Case) -> None:
    bed = Bed.make(case, GIB)
    length = object_length(bed.layout, case.blocks_per_object)
    assert 0.95 * GIB <= bed.moved_bytes <= GIB
    assert bed.layout.buffer_bytes >= 4 * bed.moved_bytes
    assert bed.slot_bytes >= length
    assert bed.slot_bytes % 4096 == 0
    ids = [block for group in (*bed.saved, *bed.loaded) for block in group]
    assert len(set(ids)) == len(ids)
    assert sum(run.length for run in runs(bed.layout, bed.saved[0])) == length


def test_transfers_take_turns() -> None:
    order: list[str] = []

    def work(name: str, turns: int) -> Steps:
        for _ in range(turns):
            order.append(name)
            yield 0.0
        done: Checksums = []
        return done

    _together(work("load", 3), work("save", 1))
    assert order == ["load", "save", "load", "load"]


def test_the_disk_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    with direct_reads(tmp_path, 32 << 20) as read:
        assert read() > 0
        assert read() > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("connector", ["none", "offload", "kvtally"])
@pytest.mark.parametrize("shape", SHAPES)
def test_engines_differ_in_their_connector_only(tmp_path: Path, shape: str, connector: str) -> None:
    plain = start_of(shape, "none", tmp_path).arguments
    arguments = start_of(shape, connector, tmp_path, "a.sock").arguments
    transfer = arguments.pop("kv_transfer_config", {})
    assert arguments == plain
    assert transfer.get("kv_connector") == {"offload": "OffloadingConnector", "kvtally": "KVTallyConnector"}.get(
        connector
    )
    config = json.loads((Path(plain["model"]) / "config.json").read_text())
    assert config["num_hidden_layers"] == {"hybrid-27b": 64, "dense-8b": 36}[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_are_for_all_engines_alike(tmp_path: Path, shape: str) -> None:
    eager = start_of(shape, "kvtally", tmp_path, "a.sock").arguments
    graphs = start_of(shape, "kvtally", tmp_path, "a.sock", graphs=True).arguments
    sizes = graphs.pop("compilation_config")["cudagraph_capture_sizes"]
    assert max(sizes) <= graphs["max_num_batched_tokens"]
    assert (eager.pop("enforce_eager"), graphs.pop("enforce_eager")) == (True, False)
    assert graphs == eager


def test_what_arrives_at_once_fits_beside_the_decodes() -> None:
    """Or it could not hit the GPU's own cache, with which loads are compared."""
    shape = SHAPES["dense-8b"]
    token_bytes = 2 * 2 * 36 * 8 * 128
    tokens = shape.busy_requests * shape.busy_prompt_tokens + 4 * 1_000
    assert tokens * token_bytes < shape.arguments["kv_cache_memory_bytes"]
    assert 2_000 <= shape.busy_prompt_tokens <= 4_000


def test_gaps_are_those_after_the_arrival() -> None:
    times = [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]
    assert gaps_after(times, 2.5, 2) == [2.0, 1.0]
    assert gaps_after(times, 2.5, 10) == [2.0, 1.0, 1.0]
    assert gaps_after(times, 7.0, 10) == []


# ---- what it means


def copy_figure(**changes: object) -> CopyFigure:
    good = CopyFigure(
        case="dense",
        page_bytes=65_536,
        object_bytes=1 << 25,
        direction="load",
        verified=True,
        gbps=51.0,
        median_gbps=50.5,
        limit_gbps=55.0,
        limit_median_gbps=54.0,
        ratio=51 / 55,
        verify_cost=0.015,
    )
    return msgspec.structs.replace(good, **changes)


def test_what_a_repeat_adds_is_seen_whatever_slows_the_machine() -> None:
    slowing = Arm(samples={"repeat": [0.12, 0.17, 0.22], "gpu_hit": [0.10, 0.15, 0.20]})
    computed_once = Arm(samples={"repeat": [1.2], "gpu_hit": [0.10, 0.15, 0.20]})
    figures = Figures(repeat={"hybrid-27b": Repeat(none=computed_once, kvtally=slowing)})
    complete(figures)
    assert slowing.added_s == pytest.approx(0.02)
    assert computed_once.added_s is None


def arm(cold: float, repeat: float, hit: float, token: int = 7) -> Arm:
    return Arm(
        samples={"cold": [cold, cold, cold + 0.3], "repeat": [repeat, repeat, 9.0], "gpu_hit": [hit]},
        cached_tokens={"cold": [0], "repeat": [10_800, 10_400], "gpu_hit": [10_800]},
        first_tokens={"1000": [token, token]},
    )


def busy_arm(alone: float, own: float, repeats: float) -> BusyArm:
    def each(milliseconds: float) -> Latency:
        return latency([milliseconds / 1e3] * 4)

    return BusyArm(
        itl={"alone": each(alone), "own": each(own), "bus": each(1.1 * own), "repeats": each(repeats)},
        itl_rounds_ms={"own": [own, own + 10], "repeats": [repeats + 10, repeats]},
        ttft={"own": each(20), "repeats": each(60)},
        cached_tokens={"own": 2_992, "repeats": 2_992},
    )


@pytest.fixture
def figures() -> Figures:
    found = Figures(
        version="1",
        machine=Machine(gpu="H200", gpu_memory_bytes=139 * GIB, cpus=16),
        limits={"h2d": Rate(gbps=55.0, median_gbps=54.0)},
        copies=[copy_figure(), copy_figure(direction="both", gbps=80.0, ratio=0.81)],
        repeat={
            "hybrid-27b": Repeat(
                none=arm(1.2, 1.2, 0.15), offload=arm(1.23, 0.15, 0.15), kvtally=arm(1.205, 0.14, 0.14)
            )
        },
        busy={
            "dense-8b": Busy(none=busy_arm(10, 11, 40), offload=busy_arm(10, 11, 14), kvtally=busy_arm(10, 11, 11.5))
        },
    )
    complete(found)
    return found


def missed(figures: Figures) -> list[str]:
    complete(figures)
    return [target.key for target in figures.targets if not target.ok]


def test_a_good_run_meets_every_target(figures: Figures) -> None:
    assert missed(figures) == []
    keys = [target.key for target in figures.targets]
    assert "copies.65536.load.verified.gbps" in keys
    assert [key for key in keys if "both" in key] == ["copies.65536.both.verified.ratio"]
    assert "repeat.hybrid-27b.cold_over_repeat" in keys


def test_times_are_medians_and_counts_the_lowest(figures: Figures) -> None:
    ours = figures.repeat["hybrid-27b"].kvtally
    assert ours is not None
    assert (ours.cold_s, ours.repeat_s, ours.gpu_hit_s) == (1.205, 0.14, 0.14)
    assert (ours.best_repeat_s, ours.best_gpu_hit_s) == (0.14, 0.14)
    assert ours.cold_mean_s == pytest.approx(1.305)
    assert (ours.repeat_cached_tokens, ours.gpu_hit_cached_tokens) == (10_400, 10_800)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gbps": 49.0}, "copies.65536.load.verified.gbps"),
        ({"ratio": 0.89}, "copies.65536.load.verified.ratio"),
        ({"verify_cost": 0.021}, "copies.65536.load.verified.verify_cost"),
        ({"direction": "both", "ratio": 0.79}, "copies.65536.both.verified.ratio"),
    ],
)
def test_a_slow_copy_is_a_miss(figures: Figures, changes: dict[str, float | str], key: str) -> None:
    figures.copies = [copy_figure(**changes)]
    assert missed(figures) == [key]


@pytest.mark.parametrize(
    ("ours", "keys"),
    [
        (arm(1.25, 0.14, 0.14), ["cold_over_none", "cold_pairs_over_none"]),
        (arm(1.205, 0.155, 0.15), ["repeat_over_offload"]),
        (arm(1.205, 0.15, 0.13), ["repeat_over_own_gpu_hit"]),
        (arm(1.0, 0.14, 0.14), ["cold_over_repeat"]),
        (arm(1.205, 0.14, 0.14, token=8), ["outputs_equal"]),
    ],
)
def test_a_slow_or_wrong_repeat_is_a_miss(figures: Figures, ours: Arm, keys: list[str]) -> None:
    figures.repeat["hybrid-27b"].kvtally = ours
    assert missed(figures) == [f"repeat.hybrid-27b.{key}" for key in keys]


def test_cold_prompts_are_compared_one_by_one_too(figures: Figures) -> None:
    none, ours = Arm(samples={"cold": [1.0, 1.1, 1.3]}), Arm(samples={"cold": [1.1, 1.0, 1.56]})
    figures.repeat["hybrid-27b"] = Repeat(none=none, kvtally=ours)
    complete(figures)
    ratios = figures.repeat["hybrid-27b"].ratios
    assert ratios["cold_over_none"] == pytest.approx(1.0)
    assert ratios["cold_pairs_over_none"] == pytest.approx(1.1)
    ours.samples["cold"].pop()  # a run that was cut off: nothing to compare one by one
    complete(figures)
    assert "cold_pairs_over_none" not in figures.repeat["hybrid-27b"].ratios


def test_loads_that_hold_up_decodes_are_a_miss(figures: Figures) -> None:
    figures.busy["dense-8b"].kvtally = busy_arm(10, 11, 12)
    keys = (
        "kvtally_itl_over_own",
        "kvtally_itl_median_over_own",
        "kvtally_itl_best_over_own",
        "kvtally_itl_over_none_own",
    )
    assert missed(figures) == [f"busy.dense-8b.{key}" for key in keys]
    assert figures.busy["dense-8b"].ratios["offload_itl_over_own"] == pytest.approx(14 / 11)
    assert figures.busy["dense-8b"].ratios["kvtally_bus_itl_over_own"] == pytest.approx(1.1)
    assert figures.busy["dense-8b"].ratios["kvtally_itl_over_bus"] == pytest.approx(12 / 12.1)


def test_what_was_not_measured_is_not_judged() -> None:
    lonely = Figures(repeat={"dense-8b": Repeat(kvtally=Arm(samples={"cold": [1.0]}))}, busy={"dense-8b": Busy()})
    complete(lonely)
    assert lonely.targets == []
    assert lonely.repeat["dense-8b"].ratios == {}
    assert outputs_equal([]) is None


def test_disk_is_held_against_its_own_speed(figures: Figures) -> None:
    half = Half(role=Role.DECODE, tokens_disk=8_000, moved_bytes=2 * 10**9, wait_ms=1_000.0)
    disk = disk_arm([1.0, 1.25, 5.0], [half] * 3, [2.0, 0.5, 9.0])
    assert (disk.gbps, disk.staged_gbps, disk.ratio) == (pytest.approx(1.6), pytest.approx(2.0), pytest.approx(0.8))
    assert disk.staged_ratio == pytest.approx(1.0)
    assert disk.cached_tokens == 8_000
    figures.repeat["hybrid-27b"].disk = disk
    assert missed(figures) == []
    figures.repeat["hybrid-27b"].disk = disk_arm([1.3], [half], [2.0])
    assert missed(figures) == ["repeat.hybrid-27b.disk_over_limit"]


def test_latency_of_one_sample() -> None:
    assert latency([0.002]) == Latency(mean_ms=2.0, median_ms=2.0, p99_ms=2.0, max_ms=2.0, samples=1)
    assert latency([n / 1e3 for n in range(1, 201)]).p99_ms == pytest.approx(199.0)


def shown(figures: Figures) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(page(figures))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_shows_figures_misses_and_failures(figures: Figures) -> None:
    assert "miss" not in shown(figures)
    figures.copies = [copy_figure(gbps=40.0)]
    figures.failures = {"dense-8b, offload": "an engine ended:\nRuntimeError: out of memory"}
    complete(figures)
    text = shown(figures)
    for part in ("H200", "h2d", "40.0", "hybrid-27b", "10,400", "computed again", "connector", "miss"):
        assert part in text
    assert "dense-8b, offload FAILED" in text
    assert "out of memory" in text


def test_an_empty_run_has_a_page() -> None:
    assert "kvtally" in shown(Figures())


def test_json_has_the_form_that_is_documented(figures: Figures, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    gpu._write(out, figures)
    found = json.loads(out.read_text())
    assert {"limits", "copies", "repeat", "busy", "machine", "commit", "targets", "failures"} <= set(found)
    assert {"page_bytes", "direction", "verified", "gbps", "limit_gbps", "ratio", "verify_cost"} <= set(
        found["copies"][0]
    )
    assert {"none", "offload", "kvtally", "ratios"} <= set(found["repeat"]["hybrid-27b"])
    assert {"none", "offload", "kvtally", "ratios"} <= set(found["busy"]["dense-8b"])
    assert found["targets"][0].keys() == {"key", "value", "target", "ok"}
    assert msgspec.json.decode(out.read_bytes(), type=Figures) == figures
    assert list(tmp_path.iterdir()) == [out]
