"""How tests judge what something costs: by counting what is done, not by timing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def opcodes(action: Callable[[], object]) -> int:
    """How many instructions of the interpreter an action takes, with all that it calls: the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)
    return count


def occupied_s() -> float:
    """How long this thread has run, or was ready to run and had no processor: time in which it waited for nobody else.
    What another process works in such a time, nobody here was kept by."""
    ran_ns, ready_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran_ns) + int(ready_ns)) / 1e9
