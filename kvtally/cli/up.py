"""`kvtally up`: a store, engines and a router on this machine, from one file. `kvtally.up` does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.config.directories import state_directory
from kvtally.config.units import split_address

if TYPE_CHECKING:  # too slow to import for `kvtally --help`
    from kvtally.up.document import Document
    from kvtally.up.file import Deployment
    from kvtally.up.plan import Process


def up(
    file: Annotated[Path, typer.Argument(help="What to start; examples/pd.yaml is one.", metavar="FILE.yaml")],
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the exact commands, one for each process, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and start nothing.")] = False,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which of the file's nodes this machine is. Default: the one whose address is this machine's; with "
            "--print and --json, all of them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a store, engines and a router on this machine, and keep them running.

    Restarts a process that dies. Ctrl-C stops everything, in order; a second Ctrl-C at once. Nothing is left behind. A
    file with `nodes` is run on each of them: each starts its own part.
    """
    from kvtally.up.document import read_document

    document = read_document(file)
    if as_json:
        plans = _plans(document, file, node)
        _print_json({"nodes": plans} if document.nodes and node is None else {"processes": next(iter(plans.values()))})
    elif only_print:
        _print_commands(_plans(document, file, node))
    else:
        _run(document, file, node)


def _plans(document: Document, file: Path, node: str | None) -> dict[str, list[Process]]:
    """What each node runs, or only the named one. They may be other machines."""
    from kvtally.up.file import deployment
    from kvtally.up.host import this_host
    from kvtally.up.plan import plan

    names = list(document.nodes or [""]) if node is None else [node]
    host = this_host(os.environ)
    return {
        name: plan(deployment(document, file.absolute(), os.environ, node=name, is_for_here=False), host)
        for name in names
    }


def _run(document: Document, file: Path, node: str | None) -> None:
    from kvtally.up.file import deployment
    from kvtally.up.host import check, this_host, this_node
    from kvtally.up.plan import plan

    name = this_node(document, node, file)
    if name and node is None:
        typer.echo(f"this machine is node {name}: it has the address {document.nodes[name].address}")
    wanted = deployment(document, file.absolute(), os.environ, node=name)
    processes = plan(wanted, this_host(os.environ))
    check(wanted, processes, os.environ)

    import asyncio

    from kvtally.up.live import keep

    elsewhere = "" if wanted.runs_router else wanted.router_node
    asyncio.run(keep(processes, _logs(wanted), router_node=elsewhere))


def _print_json(tree: Mapping[str, object]) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(tree), indent=2).decode())


def _print_commands(plans: Mapping[str, Sequence[Process]]) -> None:
    from kvtally.up.plan import shell_command

    for node, processes in plans.items():
        if node:
            typer.echo(f"# ---- on node {node}\n")
        for process in processes:
            typer.echo(f"# {process.name}: stage {process.stage}, ready when {process.health} answers")
            typer.echo(shell_command(process) + "\n")


def _logs(deployment: Deployment) -> Path:
    """Each router has its own directory, and in it each node: homes may be shared between machines."""
    port = split_address(deployment.listen).port
    directory = Path(deployment.logs or state_directory(os.environ) / f"up-{port}")
    return directory / deployment.node.name
