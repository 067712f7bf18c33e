"""`kvtally bench gpu`: what the GPU data plane reaches, each figure beside a limit or a peer of the same run.

    limits   plain pinned copies, small blocks one by one, memcpy, disk
    copies   saves and loads through `device.cuda`, for pages of several sizes, with and without verification
    repeat   vLLM without a connector, with its OffloadingConnector, with kvtally: cold, repeat, GPU prefix hit
    busy     the same engines: many repeats arrive while others decode

Owns the plan and the command. Whatever needs the GPU runs in a process of its own (`gpu_copies`, `engine`), one at a
time; engines of one shape take turns. A part that fails is reported, and the others go on. What is known so far goes to
--out after every step. `gpu_arms` drives engines, `gpu_report` says what the figures mean. Threading: none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.console import Console

from kvtally.bench.command import as_json, command_line, disk_directory, measure
from kvtally.bench.gpu_arms import QUICK, Bench, EngineBench, Job, Scale
from kvtally.bench.gpu_copies import CASES, MeasureCopies, Measured, MeasureLimits, Probe
from kvtally.bench.gpu_report import ENGINES, Figures, Machine, complete, page
from kvtally.bench.gpu_shapes import SHAPES
from kvtally.config.sizes import available_memory_bytes
from kvtally.errors import ConfigError, KVTallyError
from kvtally.processes import Worker

PARTS = ("limits", "copies", "repeat", "busy")
BUSY_SHAPES = ("dense-8b",)
PROBE_S = 120.0
COPIES_S = 240.0
HOST_SHARE = 0.75  # of the memory, for connectors; engines need some too
MACHINE_REMEDY = "Run it on a machine with an NVIDIA GPU, in the Python that has vLLM with CUDA."
SHAPES_REMEDY = "Leave out --shape, or add --part repeat."


def plan(parts: Sequence[str], shapes: Sequence[str], engines: Sequence[str]) -> list[Job]:
    """What to do, in this order. If nothing is chosen, everything; but only a small model then gets many requests at
    once."""
    wanted = set(parts or PARTS)
    busy_shapes = set(shapes) if shapes and "busy" in parts else set(BUSY_SHAPES)
    jobs = [Job("limits")] if "limits" in wanted else []
    if "copies" in wanted:
        jobs += [Job("copies", case) for case in CASES]
    for shape in [name for name in SHAPES if not shapes or name in shapes]:
        repeat, busy = "repeat" in wanted, "busy" in wanted and shape in busy_shapes
        if repeat or busy:
            chosen = [name for name in ENGINES if not engines or name in engines]
            jobs += [Job("engine", None, shape, engine, repeat, busy) for engine in chosen]
    return jobs


def side_by_side(jobs: Sequence[Job], gpu_bytes: int, host_bytes: int) -> list[list[Job]]:
    """Put engines of one shape together, as many as there is room for. Without room for all, the last ones: these are
    compared."""
    groups: list[list[Job]] = []
    for job in reversed(jobs):
        mates = groups[0] if groups else []
        if (
            job.part == "engine"
            and mates
            and mates[0].shape == job.shape
            and _fit([job, *mates], gpu_bytes, host_bytes)
        ):
            mates.insert(0, job)
        else:
            groups.insert(0, [job])
    return groups


def _fit(jobs: Sequence[Job], gpu_bytes: int, host_bytes: int) -> bool:
    shape = SHAPES[jobs[0].shape]
    connectors = sum(job.engine != "none" for job in jobs)
    return len(jobs) * shape.gpu_bytes < gpu_bytes and connectors * shape.host_bytes < host_bytes * HOST_SHARE


def run(bench: Bench, jobs: Sequence[Job]) -> None:
    """Jobs side by side take turns, step by step. A job that fails costs only its own figures."""
    for group in side_by_side(jobs, bench.figures.machine.gpu_memory_bytes, available_memory_bytes()):
        with ExitStack() as stack:
            under_way = [(job, stack.enter_context(closing(_steps(bench, job)))) for job in group]
            while under_way:
                under_way = [(job, steps) for job, steps in under_way if _goes_on(bench, job, steps)]


def _goes_on(bench: Bench, job: Job, steps: Iterator[None]) -> bool:
    """Take one step; False if it was the last."""
    try:
        next(steps)
        return True
    except StopIteration:
        pass
    except (KVTallyError, OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        bench.figures.failures[job.name] = str(error)
        bench.tell(f"{job.name} FAILED: {error}")
    bench.publish()
    return False


def _steps(bench: Bench, job: Job) -> Generator[None, None, None]:
    if job.part == "engine":
        yield from EngineBench(bench, job).run()
    else:
        _copies(bench, job)


def _copies(bench: Bench, job: Job) -> None:
    scale = bench.scale
    bench.tell(job.name)
    with Worker("kvtally.bench.gpu_copies", log=bench.log(job.part)) as child:
        if job.case is None:
            asked = MeasureLimits(directory=str(bench.disk), sample_bytes=scale.sample_bytes, samples=scale.samples)
            bench.figures.limits = child.ask(asked, Measured, COPIES_S).limits
        else:
            wanted = MeasureCopies(case=job.case, sample_bytes=scale.sample_bytes, samples=scale.samples)
            bench.figures.copies += child.ask(wanted, Measured, COPIES_S).copies


# ---- the command


def main(arguments: Sequence[str]) -> int:
    """The exit code says whether everything could be measured and outputs were equal, not whether targets were met."""
    options = _parser().parse_args(arguments)
    jobs = plan(options.part, options.shape, options.engine)
    if not jobs:
        raise ConfigError(
            "nothing to measure: these parts, shapes and engines have nothing in common", remedy=SHAPES_REMEDY
        )
    figures = measure(options, lambda directory: _measured(options, jobs, directory), page)
    is_equal = all(repeat.outputs_equal is not False for repeat in figures.repeat.values())
    return 0 if is_equal and not figures.failures else 1


def _measured(options: argparse.Namespace, jobs: Sequence[Job], directory: Path) -> Figures:
    begun = time.monotonic()
    console = Console(stderr=True, highlight=False)
    figures = Figures(commit=_commit(), quick=options.quick, graphs=options.graphs)

    def publish() -> None:
        figures.elapsed_s = time.monotonic() - begun
        complete(figures)
        if options.out:
            _write(Path(options.out), figures)

    with disk_directory(options.dir) as disk:
        figures.machine = _machine(directory, needs_vllm=any(job.part == "engine" for job in jobs))
        publish()
        bench = Bench(
            scale=QUICK if options.quick else Scale(),
            figures=figures,
            directory=directory,
            disk=Path(disk),
            logs=_made(Path(options.logs)) if options.logs else directory,
            reads_disk=options.disk,
            tell=lambda what: console.print(f"{time.monotonic() - begun:6.0f} s  {what}", markup=False),
            publish=publish,
        )
        run(bench, jobs)
    publish()
    return figures


def _machine(directory: Path, *, needs_vllm: bool) -> Machine:
    """This machine. Raises ConfigError if the bench cannot run on it."""
    for module in ("torch", *(["vllm"] if needs_vllm else [])):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed for this Python", remedy=MACHINE_REMEDY, code="KV-106")
    with Worker("kvtally.bench.gpu_copies", log=directory / "probe.log") as child:
        machine = child.ask(Probe(), Machine, PROBE_S)
    if not machine.gpu:
        what = f"torch {machine.torch} finds no CUDA device"
        raise ConfigError(what, remedy=MACHINE_REMEDY, code="KV-106")
    return machine


def _commit() -> str:
    """The commit of the source that runs, if it is a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _write(path: Path, figures: Figures) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(as_json(figures), encoding="utf-8")
    beside.replace(path)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "gpu",
        "Measure the GPU data plane: copies of pages, repeated prompts in vLLM, and many repeats at once. "
        "Each figure stands beside a limit or a peer of the same run: plain pinned copies, vLLM without a connector, "
        "vLLM's own OffloadingConnector. Needs an NVIDIA GPU and, for all but --part limits and copies, vLLM.",
    )
    option = parser.add_argument
    option("--part", action="append", choices=PARTS, default=[], help="measure only this part; may be repeated")
    option(
        "--shape",
        action="append",
        choices=list(SHAPES),
        default=[],
        help="measure only a model of this shape; may be repeated",
    )
    option(
        "--engine",
        action="append",
        choices=ENGINES,
        default=[],
        help="measure only this engine, without ratios to the others; may be repeated",
    )
    option(
        "--disk",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also repeat from disk, after a restart (default: only for dense-8b)",
    )
    option(
        "--graphs",
        action="store_true",
        help="run engines with CUDA graphs; without them, one host thread limits short steps",
    )
    option("--dir", metavar="DIR", help="a directory on the disk to measure (default: the temporary directory)")
    option("--out", metavar="FILE", help="write all figures so far to this file, as JSON, after every step")
    option("--logs", metavar="DIR", help="keep the engines' logs in this directory")
    option("--quick", action="store_true", help="take few samples; the figures are rough")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
