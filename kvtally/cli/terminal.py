"""The terminal that a command writes to: how wide it is, and text that fits into it without a broken word.

A pipe or a file has no edge, so lines stay whole there; for standard output, COLUMNS gives it one. No state; imports
nothing heavy, because errors are printed through it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

NO_EDGE = 10_000  # columns
USUAL = 80  # columns of a terminal that does not know its own size


def columns(stream: TextIO | None = None) -> int:
    """The width of the terminal behind a stream (standard output unless given), NO_EDGE if there is none."""
    wanted = os.environ.get("COLUMNS", "") if stream is None else ""
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    stream = stream or sys.stdout
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL
    except (AttributeError, OSError):  # no stream at all, one in memory, or no terminal
        return NO_EDGE


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Text in lines of at most this width, broken at spaces only: a path or a ticket can still be copied.

    `indent` goes before every line but the first of each paragraph.
    """
    fill = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fill.fill(line) if len(line) > width else line for line in text.splitlines())
