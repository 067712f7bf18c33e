"""`kvtally verify`: is a running router's reuse real? Prints the answer; `kvtally.verify` finds it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.cli.options import JsonOption, taking
from kvtally.cli.terminal import columns, wrapped
from kvtally.config import Flags, RouterConfig, load
from kvtally.config.units import printable
from kvtally.config.yaml_file import read_text
from kvtally.errors import ConfigError, KVTallyError, TransportError

if TYPE_CHECKING:  # too slow to import for `kvtally --help`
    from kvtally.verify.judge import Observation, Report
    from kvtally.wire.stats import StoreStats

CELLS = "{:<16} {:<5} {:>6}  {:<10} {:>7} {:>8}  "
INDENT = " " * 24  # before what does not fit beside the cells
LOOK_S = 2.0  # for a store to answer


@taking(["store.token_file", "router.store_ca"])
def verify(
    flags: Flags,
    url: Annotated[str, typer.Argument(help="Address of a router, as `kvtally up` prints it.", metavar="URL")],
    direct: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Engine to compare with. Default: the first decode instance that the router names.",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the API key to send. Default: none.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the random prompts. Default: a new one, so that no cache has seen them.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=86_400, help="Longest wait for an answer.")
    ] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Prove that a router's reuse is real, or say why it is not.

    Sends random prompts, compares the answers with those of an engine that reuses nothing, and reads the receipts and
    the engines' own counters. Exit code: 0 proved, 1 not proved, 2 nothing could be tested.
    """
    from kvtally.verify.http import Server
    from kvtally.verify.judge import Outcome
    from kvtally.verify.run import verify as run

    key = read_key(key_file)
    settings = load(flags=flags).router()

    def connect(address: str) -> Server:
        base = address.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given it with /v1
        return Server(base, key=key, timeout_s=timeout)

    seed = secrets.randbits(32) if seed is None else seed
    if not as_json:
        typer.echo(
            f"seed {seed}\n\n{CELLS.format('probe', 'turn', 'tokens', 'answer', 'reused', 'computed')}verdict, from"
        )
    report = run(
        connect(url),
        connect(direct) if direct else None,
        connect=connect,
        seed=seed,
        look=lambda address: _look(address, settings),
        seen=(lambda seen: None) if as_json else _print_observation,
    )
    if as_json:
        _print_json(report, seed)
    else:
        _print_words(report)
    raise typer.Exit(list(Outcome).index(report.outcome))


def _look(address: str, settings: RouterConfig) -> StoreStats | KVTallyError:
    """What a store says of itself, or why it cannot be asked."""
    from kvtally.cli.render import read_stats
    from kvtally.client import Miss, StoreClient

    try:
        with StoreClient(address, name="verify", token=settings.token, ca_file=settings.store_ca) as store:
            found = store.connect(LOOK_S)
            answer = found if isinstance(found, Miss) else store.stats(timeout_s=LOOK_S).wait()
            if not isinstance(answer, Miss):
                return read_stats(answer.stats)
            said, _, _ = answer.detail.partition(" [KV-")
            return store.refusal or TransportError(said, remedy="Start it, or correct the address.")
    except KVTallyError as error:  # an address that cannot work, a version with other stats
        return error


def read_key(path: Path | None) -> str:
    if path is None:
        return ""
    key = read_text(path, "the key file").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key file {path} holds characters that no header can carry",
            remedy="Put only the key into it, on one line.",
        )
    return key


def _print_observation(seen: Observation) -> None:
    told = seen.told
    answer = "failed" if seen.failure else "differs" if seen.comparison.problem else "equal"
    if seen.comparison.is_tie:
        answer = "equal, tie"
    verdict = f"{told.verdict}{f':{told.reason}' if told.reason else ''}" if told else "-"
    places = ", ".join(f"{place} {tokens:,}" for place, tokens in told.sources.items()) if told else ""
    reused, computed = (f"{told.reused_tokens:,}", f"{told.computed_tokens:,}") if told else ("-", "-")
    cells = CELLS.format(seen.case, seen.turn, f"{seen.prompt_tokens:,}", answer, reused, computed)
    rest = printable(", ".join(filter(None, [verdict, places])))
    if len(cells) + len(rest) <= columns():
        typer.echo(cells + rest)
    else:
        typer.echo(cells.rstrip())
        typer.echo(wrapped(INDENT + rest, columns(), INDENT))


def _print_words(report: Report) -> None:
    _say(f"\n{report.outcome.upper()}. {printable(report.summary)}")
    for finding in report.findings:
        _say(f"\n{'problem' if finding.is_problem else 'note'}: {printable(finding.what)}")
        if finding.requests:
            _say(f"  seen in: {'; '.join(finding.requests)}")
        _say(f"  remedy: {printable(finding.remedy)}")


def _say(text: str) -> None:
    typer.echo(wrapped(text, columns(), "  "))


def _print_json(report: Report, seed: int) -> None:
    import msgspec

    tree = {"seed": seed, **msgspec.to_builtins(report)}
    typer.echo(msgspec.json.format(msgspec.json.encode(tree), indent=2).decode())
