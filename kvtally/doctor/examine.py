"""Files in, a report out: opens them, has them read and judged. The only part of `doctor` that does I/O.

A file that cannot be read is reported, and the others are examined anyway. `Report.exit_code`: 0 nothing found, 1
something found, 2 nothing could be examined.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvtally.doctor.model import Deployment, Place, Role, Skipped
from kvtally.doctor.readers import Found, assemble, read
from kvtally.doctor.rules import Finding, Level, Options, judge
from kvtally.doctor.tree import MOST_BYTES, decode
from kvtally.errors import ConfigError

MOST_FILES = 200
STDIN = "-"


class Examined(msgspec.Struct, kw_only=True):
    """One deployment, in short."""

    name: str
    kind: str
    place: Place
    prefill: int
    decode: int
    both: int
    connectors: list[str]
    routers: list[str]


class Unreadable(msgspec.Struct, kw_only=True):
    file: str
    what: str
    remedy: str


class Report(msgspec.Struct, kw_only=True):
    summary: str
    deployments: list[Examined]
    findings: list[Finding]
    skipped: list[Skipped]
    unreadable: list[Unreadable]

    @property
    def exit_code(self) -> int:
        if not self.deployments:
            return 2
        is_clean = all(finding.level is Level.NOTE for finding in self.findings) and not self.unreadable
        return 0 if is_clean else 1


def examine(paths: Sequence[Path], asked: Options) -> Report:
    """Everything that the files say about reuse."""
    found: list[Found] = []
    unreadable: list[Unreadable] = []
    for path in paths[:MOST_FILES]:
        try:
            found.append(read(_read(path), "stdin" if str(path) == STDIN else str(path)))
        except ConfigError as error:
            unreadable.append(Unreadable(file=str(path), what=error.message, remedy=error.remedy))
    if len(paths) > MOST_FILES:
        what = f"{len(paths)} files were given; only the first {MOST_FILES} are examined"
        unreadable.append(Unreadable(file=str(paths[MOST_FILES]), what=what, remedy="Give fewer files."))
    deployments = assemble(found)
    skipped = [each for one in found for each in one.skipped]
    if not deployments:
        skipped += [
            Skipped(router.place, f"a router ({router.kind}), and no engines: give the engines' files, too")
            for one in found
            for router in one.parts.routers
        ]
    skipped += [each for deployment in deployments for each in _unjudged(deployment)]
    findings = [finding for deployment in deployments for finding in judge(deployment, asked)]
    return Report(
        summary=_summary(deployments, findings),
        deployments=[_short(deployment) for deployment in deployments],
        findings=findings,
        skipped=skipped,
        unreadable=unreadable,
    )


def _read(path: Path) -> str:
    if str(path) == STDIN:
        return decode(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a file", remedy="Give files, one by one.", code="KV-105")
        with path.open("rb") as file:
            return decode(file.read(MOST_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", remedy="Check the path, its owner and its mode.", code="KV-105"
        ) from error


def _short(deployment: Deployment) -> Examined:
    def count(role: Role) -> int:
        return sum(instance.replicas for instance in deployment.instances if instance.role is role)

    names = [connector.name for instance in deployment.instances for connector in instance.connectors()]
    return Examined(
        name=deployment.name,
        kind=deployment.kind,
        place=deployment.place,
        prefill=count(Role.PREFILL),
        decode=count(Role.DECODE),
        both=count(Role.BOTH),
        connectors=sorted({name for name in names if name}),
        routers=[f"{router.kind}: {router.speaks.text}" for router in deployment.routers],
    )


def _unjudged(deployment: Deployment) -> Iterator[Skipped]:
    """Engines beyond the limit; values that decide much, and that some other tool fills in later."""
    if deployment.left_out:
        yield Skipped(deployment.place, f"{deployment.left_out} more engines of {deployment.name} were not judged")
    for instance in deployment.instances:
        fields = instance.connector.fields if instance.connector else {}
        values = {"kv_connector": fields.get("kv_connector"), "kv_role": fields.get("kv_role"), "image": instance.image}
        values |= {name: instance.flags.get(name) for name in ("model", "tensor_parallel_size")}
        for name, value in values.items():
            if value is not None and not value.is_known:
                yield Skipped(value.place, f"{name} of {instance.name} is filled in later, so it was not judged")


def _summary(deployments: Sequence[Deployment], findings: Sequence[Finding]) -> str:
    """One sentence for somebody who reads no further."""
    if not deployments:
        return "Nothing could be examined: no file describes an engine."
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if problems:
        first = problems[0]
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        return f"Reuse will not work as it is configured: {first.title}{more}."
    if counts[Level.RISK]:
        return f"Nothing keeps reuse from happening; {counts[Level.RISK]} risk(s) are worth mending."
    return "Nothing was found that would keep reuse from happening."
