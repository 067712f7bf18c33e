"""`kvtally doctor`: what is wrong with a deployment's KV reuse, for people at 80 columns and for programs.

Thin: `kvtally.doctor` does it.
"""

from __future__ import annotations

import secrets
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.cli.options import JsonOption
from kvtally.cli.verify import read_key
from kvtally.config.units import printable
from kvtally.errors import ConfigError

if TYPE_CHECKING:  # `kvtally --help` need not pay for these
    from kvtally.doctor.examine import Report
    from kvtally.doctor.model import Value
    from kvtally.doctor.rules import Finding
    from kvtally.doctor.verdict import Diagnosis, Seen

WIDTH = 80
LONGEST_VALUE = 60
ROW = "{:<18} {:>6} {:>9} {:>9} {:>9} {:>10} {:>10}"
HEAD = ("prompt", "tokens", "prefilled", "computed", "reused", "1st tok ms", "alone ms")


def doctor(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Manifests, values, compose files, scripts with `vllm serve`, kv-transfer-config JSON, `up` files; "
            "- is stdin. Or the address of a running router.",
            metavar="FILE...|URL",
        ),
    ],
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With files: length of a typical prompt, in tokens.", show_default=False),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="With a URL: a prefill engine behind it. Repeatable.", show_default=False),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="With a URL: a decode engine behind it. Repeatable.", show_default=False),
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="The router's name for the model. Default: its first.", show_default=False),
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the API key to send. Default: none.", show_default=False),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=86_400, help="Longest wait for an answer.")
    ] = 120.0,
    max_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Most completions to ask for.")] = 60,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most prompt tokens to send.")] = 100_000,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Seed of the random prompts. Default: a new one.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what keeps KV reuse from happening in a deployment, or makes it wrong.

    Given files, it reads what the deployment is made of and contacts nothing. Given the URL of a running router, of any
    kind, it sends new prompts through it and reads the engines' own counters. Exit code: 0 nothing found but notes, or
    reuse is real; 1 something found, or reuse is not real; 2 nothing could be examined.
    """
    urls = [target for target in targets if target.startswith(("http://", "https://"))]
    if urls and len(targets) > 1:
        raise ConfigError("an address is examined alone", remedy="Give one URL, or files; not both at once.")
    if not urls and (prefill or decode):
        raise ConfigError("--prefill and --decode are for an address", remedy="Give the router's URL as well.")
    if not urls:
        from kvtally.doctor.examine import examine
        from kvtally.doctor.rules import Options

        report = examine([Path(target) for target in targets], Options(prompt_tokens=prompt_tokens))
        typer.echo(_json(report) if as_json else _page(report))
        raise typer.Exit(report.exit_code)

    from kvtally.doctor.live import Limits, Plan
    from kvtally.doctor.live import examine as examine_live
    from kvtally.verify.http import Server

    key = read_key(key_file)

    def connect(address: str) -> Server:
        return Server(address.rstrip("/").removesuffix("/v1"), key=key, timeout_s=timeout)

    def announce(plan: Plan) -> None:
        if not as_json:
            typer.echo(f"Asks for at most {plan.requests} completions of {plan.tokens:,} prompt tokens in all.\n")
            typer.echo(ROW.format(*HEAD))

    diagnosis = examine_live(
        connect(urls[0]),
        [connect(address) for address in prefill or []],
        [connect(address) for address in decode or []],
        seed=secrets.randbits(32) if seed is None else seed,
        limits=Limits(requests=max_requests, tokens=max_tokens),
        connect=connect,
        model=model,
        planned=announce,
        told=(lambda seen: None) if as_json else _print_row,
    )
    typer.echo(_json(diagnosis) if as_json else _diagnosis(diagnosis))
    raise typer.Exit(diagnosis.outcome.exit_code)


def _print_row(seen: Seen) -> None:
    if seen.failure or seen.busy or seen.is_elsewhere:
        why = seen.failure or seen.busy or "no decode engine that was named counted it"
        typer.echo(f"{seen.case:<18} {seen.prompt_tokens:>6}  {printable(why)[:50]}")
        return
    times = [
        f"{value * 1000:,.0f}" if value is not None else "-" for value in (seen.first_token_s, seen.alone_first_token_s)
    ]
    counts = (seen.prefill.total_tokens, seen.decode.computed_tokens, seen.reused_tokens)
    typer.echo(ROW.format(seen.case, seen.prompt_tokens, *counts, *times))


def _diagnosis(found: Diagnosis) -> str:
    lines = ["", *_wrapped(found.summary)]
    compared = [each for each in found.seen if each.is_compared]
    if compared:
        equal = sum(not each.comparison.problem for each in compared)
        lines.append(f"Answers: {equal} of {len(compared)} equal to those of decode alone.")
    for number, cause in enumerate(found.causes, start=1):
        lines += ["", *_wrapped(f"{number}. {cause.what}")]
        lines += _wrapped(f"seen    {cause.evidence}", "   ", "           ")
        lines += _wrapped(f"next    {cause.next_step}", "   ", "           ")
    lines += [""] if found.notes else []
    for note in found.notes:
        lines += _wrapped(f"note: {note}")
    lines += ["", f"{found.requests} completions, {found.tokens:,} prompt tokens."]
    return "\n".join(lines)


def _json(report: Report | Diagnosis) -> str:
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
    places = [_place(finding.evidence[0]).rpartition("/")[2] for finding in findings]  # whole below
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
        printable(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
    )
    return wrapped or [""]
