"""What benches that start vLLM have in common as commands: options, a directory, how they end, what they print.

Measures nothing. Neighbours: `repeat` and `prefetch` (left; `gpu` ends the same way), `cli.main` (which runs them).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
from rich.console import Console, RenderableType

from kvtally.config import LONGEST_SOCKET_PATH_BYTES
from kvtally.errors import ConfigError

SOCKET_NAME_BYTES = len("/kvtally-demo-12345678/index-1000000.sock")  # the longest that is made there


class Measured(Protocol):
    """What every bench's figures say of the run itself."""

    cpus: int
    load_at_start: float
    elapsed_s: float
    outputs_equal: bool


M = TypeVar("M", bound=Measured)


def engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", default="", help="model to serve (default: a tiny hybrid, made now)")
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=2000, help="length of a prompt (2000)")
    parser.add_argument(
        "--python", metavar="PYTHON", default=sys.executable, help="the Python that has vLLM (default: this one)"
    )
    parser.add_argument(
        "--engine", metavar="JSON", default="{}", help='more arguments for vllm.LLM, like {"block_size": 256}'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Those of `--engine`."""
    try:
        return msgspec.json.decode(options.engine, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--engine: {error}", remedy="Write it like '{\"block_size\": 256}'.") from error


def measure(options: argparse.Namespace, run: Callable[[Path], M], page: Callable[[M], RenderableType]) -> int:
    """The exit code says whether it could be measured and outputs were equal, not whether targets were met."""
    begun, load = time.monotonic(), os.getloadavg()[0]
    with leaving(), tempfile.TemporaryDirectory(prefix="kvtally-", dir=place()) as directory:
        figures = run(Path(directory))
    figures.cpus, figures.load_at_start = len(os.sched_getaffinity(0)), load
    figures.elapsed_s = time.monotonic() - begun
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n")
    else:
        Console(highlight=False).print(page(figures))
    return 0 if figures.outputs_equal else 1


def place() -> str:
    """Where the directory of a bench or a demo goes: the usual place, unless a socket's path beneath it would be too
    long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + SOCKET_NAME_BYTES <= LONGEST_SOCKET_PATH_BYTES else "/tmp"


@contextmanager
def leaving() -> Iterator[None]:
    """Who is told to end meanwhile leaves nothing behind. A hang-up that was to be ignored (`nohup`) still is."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
