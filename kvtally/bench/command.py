"""What every bench is as a command: a workplace that goes away, a progress bar, JSON or a page, an exit code.

Measures nothing. Neighbours: the five benches, which call `measure`, and `cli.main`, which runs them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtally.bench.report import Run
from kvtally.config.units import parse_size
from kvtally.errors import ConfigError
from kvtally.processes import workplace

F = TypeVar("F", bound=Run)
T = TypeVar("T")


def command_line(name: str, description: str) -> argparse.ArgumentParser:
    """The command `kvtally bench NAME`, so far with the option that every bench has."""
    parser = argparse.ArgumentParser(prog=f"kvtally bench {name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def measure(options: argparse.Namespace, run: Callable[[Path], F], page: Callable[[F], RenderableType]) -> F:
    """Run a bench in a workplace of its own, and print its figures."""
    begun = time.monotonic()
    with workplace() as directory:
        figures = run(directory)
    figures.elapsed_s = time.monotonic() - begun
    if options.json:
        sys.stdout.write(as_json(figures))
    else:
        Console(highlight=False).print(page(figures))
    return figures


def as_json(figures: object) -> str:
    return msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"


def size_of(text: str) -> int:
    """The value of --memory, in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}", remedy="Write it like 2GiB.", code="KV-102") from error


def disk_directory(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    """A directory on the disk that --dir names."""
    try:
        return tempfile.TemporaryDirectory(prefix="kvtally-bench-", dir=parent)
    except OSError as error:
        what = f"--dir {parent} cannot be used: {error}"
        raise ConfigError(what, remedy="Give a directory that you can write to.", code="KV-103") from error


def in_turn(number: int, arms: Sequence[T]) -> Sequence[T]:
    """The arms of round `number`, in the order in which they are measured: each comes first equally often."""
    return arms[::-1] if number % 2 else arms


class Meter:
    """The progress bar on stderr. `total` is the sum of all phases' weights, roughly in seconds."""

    def __init__(self, total: float) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    @contextmanager
    def phase(self, name: str, weight: float) -> Iterator[None]:
        self._bar.update(self._task, description=name)
        yield
        self._bar.advance(self._task, weight)
