"""Options that several commands share. Their help is the settings table's."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtally.config import DEFAULT_FILE, FILE_VARIABLE
from kvtally.config.table import SETTINGS


def setting_option(key: str, metavar: str) -> Any:
    """The option of one setting. Not given is None: `config.load` then looks elsewhere."""
    setting = SETTINGS[key]
    return typer.Option(setting.flag, help=setting.help, metavar=metavar, show_default=False)


SocketOption = Annotated[str | None, setting_option("store.socket", "PATH")]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        help=f"Settings file. Default: ${FILE_VARIABLE}, else {DEFAULT_FILE} in this directory if there is one.",
        metavar="FILE",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
