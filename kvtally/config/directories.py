"""Where this user's files go: sockets, state, caches. Names directories, creates none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Where this user's sockets go. Raises OSError if no temporary directory can be written to."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvtally") if runtime else Path(tempfile.gettempdir(), f"kvtally-{os.getuid()}")


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG puts files that outlive a restart but that nobody backs up."""
    return Path(environ.get("XDG_STATE_HOME") or Path(_home(), ".local", "state"), "kvtally")


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where XDG puts files that can be computed again."""
    return Path(environ.get("XDG_CACHE_HOME") or Path(_home(), ".cache"), "kvtally")


def _home() -> Path:
    """The home directory. For a user without one, as in containers, `/`; never a directory named `~`."""
    return Path("/", os.path.expanduser("~").removeprefix("~"))
