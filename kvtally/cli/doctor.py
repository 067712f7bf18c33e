"""`kvtally doctor`: what is wrong with a deployment's KV reuse, for people at 80 columns and for programs.

Thin: `kvtally.doctor` does it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.cli.options import JsonOption
from kvtally.config.units import printable

if TYPE_CHECKING:  # `kvtally --help` need not pay for these
    from kvtally.doctor.examine import Report
    from kvtally.doctor.model import Value
    from kvtally.doctor.rules import Finding

WIDTH = 80
LONGEST_VALUE = 60


def doctor(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Manifests, values, compose files, scripts with `vllm serve`, kv-transfer-config JSON, `up` files. "
            "- is stdin.",
            metavar="FILE...",
        ),
    ],
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of a typical prompt, where you know them.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what would keep KV reuse from happening in a deployment, or make it wrong.

    Reads files and asks nobody. Each finding has its evidence, why it matters, a remedy, and how sure we are. Exit
    code: 0 nothing found but notes, 1 findings, 2 nothing could be examined.
    """
    from kvtally.doctor.examine import examine
    from kvtally.doctor.rules import Options

    report = examine(files, Options(prompt_tokens=prompt_tokens))
    typer.echo(_json(report) if as_json else _page(report))
    raise typer.Exit(report.exit_code)


def _json(report: Report) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _page(report: Report) -> str:
    lines = [*_wrapped(report.summary), ""]
    for each in report.deployments:
        counts = {"prefill": each.prefill, "decode": each.decode, "engines": each.both}
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines += _wrapped(f"{each.kind} {each.name}: {said}; {', '.join(each.connectors) or 'no connector'}")
        lines += [f"  router {router}" for router in map(printable, each.routers)]
    lines += _table(report.findings)
    for number, finding in enumerate(report.findings, start=1):
        lines += ["", *_details(number, finding)]
    if report.skipped or report.unreadable:
        lines += ["", "Not examined:"]
    for unread in report.unreadable:
        lines += _wrapped(f"{unread.what}. {unread.remedy}", "  ")
    for skipped in report.skipped:
        lines += _wrapped(f"{skipped.place.file}:{skipped.place.line}: {skipped.why}", "  ")
    return "\n".join(lines)


def _table(findings: list[Finding]) -> list[str]:
    if not findings:
        return []
    places = [_place(finding.evidence[0]) for finding in findings]
    room = WIDTH - 4 - 9 - 10 - 2
    rows = ["", f"{'#':>2}  {'level':<8} {'sure':<9} finding"]
    for number, (finding, place) in enumerate(zip(findings, places, strict=True), start=1):
        first, *more = textwrap.wrap(printable(f"{finding.title} ({place})"), room, break_on_hyphens=False)
        rows.append(f"{number:>2}  {finding.level:<8} {finding.sure:<9} {first}")
        rows += [" " * 23 + line for line in more]
    return rows


def _details(number: int, finding: Finding) -> list[str]:
    lines = _wrapped(f"{number}. {finding.title}: {finding.what}")
    for value in finding.evidence:
        text = " ".join(value.text.split())
        shown = text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
        path = f" {value.place.path}" if value.place.path else ""
        lines += _wrapped(f"seen    {_place(value)}{path}: {shown}", "   ", "           ")
    lines += _wrapped(f"why     {finding.why}", "   ", "           ")
    lines += _wrapped(f"remedy  {finding.remedy}", "   ", "           ")
    lines += _wrapped(f"source  {finding.source}", "   ", "           ")
    return lines


def _place(value: Value) -> str:
    return f"{value.place.file}:{value.place.line}"


def _wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    later = first if rest is None else rest
    wrapped = textwrap.wrap(
        printable(text), WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
    return wrapped or [""]
