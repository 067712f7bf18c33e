"""Where this user's files go: sockets, state, caches. Names directories, makes none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Where this user's sockets go. Raises OSError where nothing can be written to."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvtally") if runtime else Path(tempfile.gettempdir(), f"kvtally-{os.getuid()}")


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG wants what should outlive a restart but matters to nobody else."""
    return Path(environ.get("XDG_STATE_HOME") or Path(_home(), ".local", "state"), "kvtally")


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG wants what can be computed again."""
    return Path(environ.get("XDG_CACHE_HOME") or Path(_home(), ".cache"), "kvtally")


def _home() -> Path:
    """Of a user without one it is `/`, as containers have it, and never a directory named `~`."""
    return Path("/", os.path.expanduser("~").removeprefix("~"))
