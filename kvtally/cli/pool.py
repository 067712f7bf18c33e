"""`kvtally pool check`, `stat` and `forget`: the pool that stores share, for those who run it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvtally.cli.options import ConfigOption, JsonOption
from kvtally.config import load
from kvtally.config.units import human_size, printable
from kvtally.errors import ConfigError

if TYPE_CHECKING:  # these take 0.1 s to import: too long for `kvtally --help`
    from kvtally.store.tiers.pool import PoolTier
    from kvtally.store.tiers.pool.survey import Checked, Use

SHORTEST_PREFIX = 6  # of a digest, in hexadecimal digits

UrlArgument = Annotated[
    str | None,
    typer.Argument(metavar="[URL]", help="Address of the pool. Default: store.remote.", show_default=False),
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", help="User, or access key. Default: store.remote_user.", metavar="NAME", show_default=False),
]
PasswordOption = Annotated[
    str | None,
    typer.Option(
        "--password-file",
        help="File with the password or secret key. Default: store.remote_password_file.",
        metavar="FILE",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key-file",
        help="File with the keys of an encrypted pool. Default: store.remote_key_file.",
        metavar="FILE",
        show_default=False,
    ),
]


def check(
    url: UrlArgument = None,
    user: UserOption = None,
    password_file: PasswordOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """See whether a pool is fit to be used.

    Is it reached, may it be read, written and deleted from, how fast is it, how much room has it, what does it do when
    it is full. Writes 32 MiB of its own and removes them.
    """
    from kvtally.store.tiers.pool import survey

    with _opened(url, user, password_file, key_file, config) as (address, tier):
        found = survey.check(tier)
    if as_json:
        typer.echo(json.dumps({"address": address, **_tree(found)}, indent=2))
        return
    condition = found.condition
    room = f"{human_size(condition.used_bytes)} used" if condition.used_bytes is not None else "unknown"
    if condition.capacity_bytes is not None:
        room += f" of {human_size(condition.capacity_bytes)}"
    nodes = f", {condition.nodes} nodes" if condition.nodes > 1 else ""
    lines = [
        ("pool", address),
        ("server", f"{printable(condition.server)}{nodes}"),
        ("room", room),
        ("when full", printable(condition.eviction) or "unknown"),
        ("lookup", f"{found.lookup_ms:.2f} ms for a prompt of 16k tokens, {found.slowest_ms:.2f} ms at worst"),
        ("write", f"{found.put_bytes_s / 1e9:.2f} GB/s by one thread"),
        ("read", f"{found.get_bytes_s / 1e9:.2f} GB/s by one thread"),
    ]
    for name, value in lines:
        typer.echo(f"{name:<10}{value}")
    for finding in found.findings:
        typer.echo(f"! {printable(finding.what)}. {printable(finding.remedy)}")
    typer.echo("fit to be used" + ("; mind what is marked with !" if found.findings else ""))


def stat(
    url: UrlArgument = None,
    user: UserOption = None,
    password_file: PasswordOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a pool holds, by namespace.

    Lists every name in it: on a large pool that takes minutes, and on S3 a request for each thousand of them.
    """
    from kvtally.store.tiers.pool import survey

    with _opened(url, user, password_file, key_file, config) as (address, tier):
        uses = survey.stat(tier)
    if as_json:
        typer.echo(json.dumps({"address": address, "namespaces": [_tree(use) for use in uses]}, indent=2))
        return

    from kvtally.cli.render import Fitting, Table, console

    if not uses:
        typer.echo(f"{address} holds nothing.")
        return
    heads = ("namespace", "model", "boundaries", "objects", "size", "old", "ages")
    rows = [
        (
            use.namespace[:12],
            printable(use.model) or "?",
            f"{use.boundaries:,}",
            f"{use.objects:,}",
            human_size(use.bytes),
            human_size(use.old_bytes),
            _ages(use),
        )
        for use in uses
    ]
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    paragraphs = [
        (f"{row[0]} {row[1]}", ", ".join(f"{head} {cell}" for head, cell in zip(heads[2:], row[2:], strict=True)))
        for row in rows
    ]
    console().print(Fitting(address, table, paragraphs))


def forget(
    url: UrlArgument = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="HEX",
            help="Digest of the namespace to forget, or its first digits; kvtally pool stat shows it.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    user: UserOption = None,
    password_file: PasswordOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a pool forget a namespace, for all stores that share it.

    Stores find nothing of it from then on, at the latest after five seconds. What they hold themselves stays: that is
    kvtally reset.
    """
    from kvtally.store.tiers.pool import survey

    with _opened(url, user, password_file, key_file, config) as (address, tier):
        known = survey.namespaces(tier)
        digest = _only(namespace, known)
        if not yes:
            typer.echo(f"{digest.hex()[:12]}  {printable(known[digest]) or '?'}  in {address}")
            typer.confirm("Forget it?", abort=True)
        removed = survey.forget(tier, digest)
    if as_json:
        typer.echo(json.dumps({"address": address, "namespace": digest.hex(), "removed": removed}, indent=2))
    else:
        typer.echo(f"Forgotten; {removed:,} names were deleted.")


@contextmanager
def _opened(
    url: str | None, user: str | None, password_file: str | None, key_file: str | None, config: str | None
) -> Iterator[tuple[str, PoolTier]]:
    """The pool that the arguments or the settings name, checked and within reach."""
    from kvtally.store.tiers.engines.base import Credentials
    from kvtally.store.tiers.pool.opening import open_pool

    flags = {"remote": url, "remote_user": user, "remote_password_file": password_file, "remote_key_file": key_file}
    pool = load(file=config, flags={f"store.{name}": value for name, value in flags.items()}).pool()
    if pool is None:
        raise ConfigError(
            "no pool is named", remedy="Give its address, for example valkey://HOST:6379, or set store.remote."
        )
    tier, error = open_pool(pool.remote, Credentials(pool.user, pool.password_file), key_file=pool.key_file)
    try:
        if error is not None:
            raise error
        yield str(pool.remote), tier
    finally:
        tier.close()


def _only(prefix: str | None, known: dict[bytes, str]) -> bytes:
    """The one namespace whose digest begins so."""
    matching = [digest for digest in known if prefix and digest.hex().startswith(prefix.lower())]
    if prefix is None or len(prefix) < SHORTEST_PREFIX or len(matching) != 1:
        names = ", ".join(sorted(digest.hex()[:12] for digest in known)) or "none"
        what = f"--namespace {printable(prefix)} does not name" if prefix else "no --namespace is given: name"
        raise ConfigError(
            f"{what} exactly one namespace of this pool",
            remedy=f"Give {SHORTEST_PREFIX} or more digits of one of: {names}.",
        )
    return matching[0]


def _tree(found: Checked | Use) -> dict[str, object]:
    import msgspec

    tree: dict[str, object] = msgspec.to_builtins(found)
    return tree


def _ages(use: Use) -> str:
    if use.newest_s is None or use.oldest_s is None:
        return "?"
    return f"{_age(use.newest_s)} to {_age(use.oldest_s)}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
