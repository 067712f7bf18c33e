"""How much memory and disk space this machine has, or the container we run in. Reads the system, changes nothing.

Neighbours: `load` (defaults and limits of sizes), `store.arena`, the benches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The most memory this process could ever use: the machine's, or the tightest limit of its control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_cgroup_limits(proc / "self" / "cgroup", cgroups)])


def _cgroup_limits(membership: Path, root: Path) -> Iterator[int]:
    """The memory limit of every control group from this process's own up to the root, in either version."""
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inside = Path(group.lstrip("/"))
        # In a container this may be a path on the host. Then only the root exists here: the container's own group.
        for directory in (inside, *inside.parents):
            limit = _read(base / directory / name).strip()
            if limit.isdigit():  # "max": no limit
                yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def disk_total_bytes(directory: Path) -> int:
    """The size of the file system that holds this directory, or would hold it. Raises OSError."""
    system = os.statvfs(_existing(directory))
    return system.f_blocks * system.f_frsize


def disk_usable_bytes(directory: Path) -> int:
    """The free space, plus what the directory already holds, so a restart finds the same room. Raises OSError."""
    existing = _existing(directory)
    system = os.statvfs(existing)
    held_bytes = sum(_allocated_bytes(directory)) if existing == directory else 0
    return system.f_bavail * system.f_frsize + held_bytes


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _allocated_bytes(directory: Path) -> Iterator[int]:
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a running store replaces files
                yield os.lstat(os.path.join(parent, name)).st_blocks * 512
