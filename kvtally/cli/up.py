"""`kvtally up`: a store, engines and a router on this machine, from one file. `kvtally.up` does the work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.config.directories import state_directory

if TYPE_CHECKING:  # too slow to import for `kvtally --help`
    from kvtally.up.file import Deployment
    from kvtally.up.plan import Process


def up(
    file: Annotated[Path, typer.Argument(help="What to start; examples/pd.yaml is one.", metavar="FILE.yaml")],
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the exact commands, one for each process, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and start nothing.")] = False,
) -> None:
    """Start a store, engines and a router on this machine, and keep them running.

    Restarts a process that dies. Ctrl-C stops everything, in order; a second Ctrl-C at once. Nothing is left behind.
    """
    from kvtally.up.file import read
    from kvtally.up.host import check, this_host
    from kvtally.up.plan import plan

    deployment = read(file, os.environ, is_for_here=not (as_json or only_print))
    processes = plan(deployment, this_host(os.environ))
    if as_json:
        _print_json(processes)
    elif only_print:
        _print_commands(processes)
    else:
        check(deployment, processes, os.environ)

        import asyncio

        from kvtally.up.live import keep

        asyncio.run(keep(processes, _logs(deployment, processes)))


def _print_json(processes: Sequence[Process]) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode({"processes": processes}), indent=2).decode())


def _print_commands(processes: Sequence[Process]) -> None:
    from kvtally.up.plan import shell_command

    for process in processes:
        typer.echo(f"# {process.name}: stage {process.stage}, ready when {process.health} answers")
        typer.echo(shell_command(process) + "\n")


def _logs(deployment: Deployment, processes: Sequence[Process]) -> Path:
    """Each router has its own directory."""
    return Path(deployment.logs or state_directory(os.environ) / f"up-{processes[-1].port}")
