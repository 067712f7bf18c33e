"""Options of commands. Those for settings are derived from the table: their names, help and placeholders."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kvtally.config import DEFAULT_FILE, FILE_VARIABLE
from kvtally.config.setting import Setting, Several, Switch
from kvtally.config.table import SETTINGS
from kvtally.log import LogFormat


def _option(setting: Setting) -> Any:
    """The annotated type of a setting's option. None means not given: `config.load` then looks elsewhere."""
    if isinstance(setting.kind, Switch):
        both = f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}"
        return Annotated[bool | None, typer.Option(both, help=setting.help, show_default=False)]
    value = list[str] if isinstance(setting.kind, Several) else str
    metavar = setting.kind.metavar
    return Annotated[value | None, typer.Option(setting.flag, help=setting.help, metavar=metavar, show_default=False)]


SocketOption = Annotated[
    str | None,
    typer.Option("--socket", help=SETTINGS["store.socket"].help, metavar="PATH", show_default=False),
]
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
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="How log lines look.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]


def section(name: str) -> list[str]:
    """The keys of a section's settings that have an option."""
    return [key for key, setting in SETTINGS.items() if setting.section == name and setting.has_flag]


def taking(keys: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each of these settings. It gets what was given as `flags`, by key."""
    names = {SETTINGS[key].name: key for key in keys}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            flags = {key: _joined(given.pop(name)) for name, key in names.items()}
            command(flags=flags, **given)

        own = inspect.signature(command, eval_str=True).parameters
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(SETTINGS[key]))
            for name, key in names.items()
        ]
        kept = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in own.items() if name != "flags"]
        run.__signature__ = inspect.Signature([*options, *kept])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*options, *kept)}
        return run

    return decorate


def _joined(value: Any) -> Any:
    """Join repeated flags with spaces, which is how the environment writes them."""
    return (" ".join(value) or None) if isinstance(value, list) else value
