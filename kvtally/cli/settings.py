"""`kvtally config show`: every setting, its value, and where it was set."""

from __future__ import annotations

import json

import typer

from kvtally.cli.options import ConfigOption, JsonOption
from kvtally.config import Settings, Shown, load
from kvtally.config.table import SETTINGS
from kvtally.config.units import human_size


def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value, and where it was set.

    A flag wins over the environment, the environment over the file, the file over the default."""
    settings = load(file=config)
    if as_json:
        typer.echo(json.dumps(_tree(settings), indent=2))
        return

    from kvtally.cli.render import Fitting, Table, console

    rows = settings.shown()
    table = Table("setting", "value", "origin", "given in")
    for row in rows:
        table.add_row(row.key, _for_people(row), row.origin, row.where)
    paragraphs = [
        (f"{row.key} = {_for_people(row)}", f"{row.origin}: {row.where}" if row.where else "") for row in rows
    ]
    console().print(Fitting(f"file: {settings.file or 'none'}", table, paragraphs))


def _tree(settings: Settings) -> dict[str, object]:
    return {
        "file": str(settings.file) if settings.file else None,
        "settings": {
            row.key: {"value": row.value, "origin": row.origin, "where": row.where} for row in settings.shown()
        },
    }


def _for_people(row: Shown) -> str:
    if isinstance(row.value, bool):
        return str(row.value).lower()
    if isinstance(row.value, int):
        is_size = SETTINGS[row.key].field.endswith("_bytes")
        return human_size(row.value) if is_size and row.value else str(row.value)
    return row.value or "-"
