"""The `kvtally` command: its sub-commands, and what an error looks like to the person who typed it.

Owns exit codes: 0 fine, 1 failed, 2 refused (a setting or a version is wrong), 130 interrupted. Whatever a command
needs beyond the settings is imported inside it, so that `kvtally --help` answers at once.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import kvtally
from kvtally.cli import doctor, inspect, pool, route, settings, store, up, verify
from kvtally.cli.terminal import columns, wrapped
from kvtally.errors import Disposition, KVTallyError

app = typer.Typer(
    name="kvtally",
    help="KV-cache reuse for vLLM that proves itself: a store per node, verified hits, a receipt for every request.",
    epilog="Begin with: kvtally demo-store (seconds, no vLLM) · then: kvtally demo · then: kvtally up FILE.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # rich's boxes leave options too narrow a column, and importing it takes a third of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show the settings that are in force.", no_args_is_help=True, rich_markup_mode=None)
pool_app = typer.Typer(
    help="The pool that several stores share.\n\n"
    "URL is the pool's address, as in store.remote; without one, the settings name it. See docs/pool.md.",
    epilog="Example: kvtally pool check valkey://10.0.0.9:6379 --password-file /etc/kvtally/pool-password",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    help="Measure each part on this machine, beside a limit or a peer of the same run.\n\n"
    "`store`, `peers` and `route` need nothing but kvtally; begin with `store --quick`. `repeat` and `prefetch` need "
    "vLLM, on a CPU or a GPU; `gpu` needs an NVIDIA GPU. Each prints a table: what was measured, its limit, and if it "
    "meets its target; --json prints all figures. Let nothing else run on the machine meanwhile.",
    epilog="Example: kvtally bench store --quick · then: kvtally bench COMMAND --help",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# The module that runs such a command reads its arguments itself, `--help` included.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    """Entry point: run the command; an error becomes one clear line and its remedy on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✔ must not end the command
    try:
        _run_whole()
    except KVTallyError as error:
        for line in (f"error: {error.message} [{error.code}]", f"remedy: {error.remedy}"):
            print(wrapped(line, columns(sys.stderr), "  "), file=sys.stderr)  # noqa: T201
        sys.exit(2 if error.disposition is Disposition.REFUSE else 1)
    except KeyboardInterrupt:  # before a command began; after that, typer handles it
        sys.exit(130)


def _run_whole() -> None:
    """Run the command and flush its output. Left to the interpreter's exit, output that cannot be written ends in a
    traceback."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `kvtally receipts | head`
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if _takes_output():
            raise
        _drop_output()
        raise KVTallyError(
            f"standard output cannot be written: {error.strerror}",
            remedy="Make room where it goes (`df` shows full file systems), or send it elsewhere.",
            code="KV-001",
        ) from error


def _takes_output() -> bool:
    """Whether standard output can be written to. Tries one more line."""
    try:
        typer.echo()
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """Discard what is left, so that the interpreter's exit does not try to write it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtally {kvtally.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# `kvtally --help` lists them in this order. Where a command's own first line is too long for that list, `short_help` is
# what it shows.


@app.command("demo-store", context_settings=_PASS_ON, epilog="Example: kvtally demo-store")
def _demo_store(context: typer.Context) -> None:
    """See the store work, in a few seconds and without vLLM.

    A store, two engines, a kill -9, a restart, and one corrupted byte that becomes a miss.
    """
    _run_module("kvtally.cli.demo_store", context.args)


@app.command("demo", context_settings=_PASS_ON, epilog="Example: kvtally demo")
def _demo(context: typer.Context) -> None:
    """See prefill and decode share a KV cache, without a GPU.

    Two real vLLM servers with a tiny hybrid model, a store, a router; a kill -9, a flipped byte; every receipt.
    """
    _run_module("kvtally.cli.demo", context.args)


app.command(
    short_help="Start a store, engines and a router from one file.",
    epilog="Example: kvtally up examples/pd.yaml · to run the parts yourself: kvtally up FILE.yaml --print",
)(up.up)
app.command(epilog="Example: kvtally store --memory 16GiB --disk /var/lib/kvtally --disk-size 200GiB")(store.store)
app.command(
    short_help="Serve an OpenAI-compatible API from prefill and decode.",
    epilog="Example: kvtally route --prefill http://10.0.0.7:8000 --decode http://10.0.0.8:8000 --strict",
)(route.route)
app.command(epilog="Example: kvtally verify http://127.0.0.1:8080")(verify.verify)
app.command(
    short_help="Find what keeps KV reuse from happening, or makes it wrong.",
    epilog="Example: kvtally doctor prefill.sh decode.sh · kvtally doctor http://router:8080 --prefill … --decode …",
)(doctor.doctor)
app.command(epilog="Example: kvtally stat --watch")(inspect.stat)
app.command(epilog="Example: kvtally receipts --last 5 · or, for one request: kvtally receipts req-7f3a")(
    inspect.receipts
)
app.command(epilog="Example: kvtally reset --namespace 9c1f…")(inspect.reset)
app.add_typer(config_app, name="config")
app.add_typer(pool_app, name="pool")
app.add_typer(bench_app, name="bench", short_help="Measure each part on this machine.")
pool_app.command(epilog="Example: kvtally pool check s3://kv-cache/prod --json")(pool.check)
pool_app.command(epilog="Example: kvtally pool stat valkey://10.0.0.9:6379")(pool.stat)
pool_app.command(epilog="Example: kvtally pool forget valkey://10.0.0.9:6379 --namespace 9c1f03")(pool.forget)
config_app.command("show", epilog="Example: KVTALLY_STORE__MEMORY=8GiB kvtally config show")(settings.show)


@bench_app.command("store", context_settings=_PASS_ON, epilog="Example: kvtally bench store --json")
def _bench_store(context: typer.Context) -> None:
    """A store: puts, gets, lookups, the disk.

    Each beside its limit: memcpy, or plain reads and writes of the same bytes.
    """
    _run_module("kvtally.bench.store", context.args)


@bench_app.command("peers", context_settings=_PASS_ON, epilog="Example: kvtally bench peers --json")
def _bench_peers(context: typer.Context) -> None:
    """Two stores: what one pulls from the other.

    Bytes beside raw sockets, with TLS too; lookups, and what the pulling store's own clients notice of it.
    """
    _run_module("kvtally.bench.peers", context.args)


@bench_app.command("repeat", context_settings=_PASS_ON, epilog="Example: kvtally bench repeat --json")
def _bench_repeat(context: typer.Context) -> None:
    """vLLM: what a repeated prompt costs.

    Time to the first token: cold, from the arena, from disk, from the engine's own prefix cache, without a connector.
    """
    _run_module("kvtally.bench.repeat", context.args)


@bench_app.command("gpu", context_settings=_PASS_ON, epilog="Example: kvtally bench gpu --part copies --json")
def _bench_gpu(context: typer.Context) -> None:
    """A GPU: copies, repeats, busy engines.

    Beside plain pinned copies, vLLM without a connector, and vLLM's own OffloadingConnector.
    """
    _run_module("kvtally.bench.gpu", context.args)


@bench_app.command("prefetch", context_settings=_PASS_ON, epilog="Example: kvtally bench prefetch --json")
def _bench_prefetch(context: typer.Context) -> None:
    """vLLM: what early prefetch is worth.

    Time to the first token of prompts that lie on a slow disk, behind a full queue: prefetch on, prefetch off, all KV
    in the arena, no store.
    """
    _run_module("kvtally.bench.prefetch", context.args)


@bench_app.command("route", context_settings=_PASS_ON, epilog="Example: kvtally bench route --json")
def _bench_route(context: typer.Context) -> None:
    """The router: what it adds to a request.

    Beside an engine that is asked directly, and a proxy that does nothing else.
    """
    _run_module("kvtally.bench.route", context.args)


def _run_module(name: str, arguments: list[str]) -> None:
    """Run a module's `main(arguments: Sequence[str]) -> int` and exit with its code."""
    entry: Callable[[list[str]], int] = importlib.import_module(name).main
    raise typer.Exit(entry(arguments))
