"""What `kvtally demo` and `kvtally demo-store` share: a step and whether it proved what it should, and the result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as it went. `source`: where reused tokens came from."""

    step: str
    reused_tokens: int
    computed_tokens: int
    source: str
    proves: str = ""
    proved: bool = False


def parser(name: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"kvtally {name}", description=description)
    made.add_argument("--json", action="store_true", help="print JSON, for programs")
    return made


def is_proved(steps: Sequence[Step]) -> bool:
    return bool(steps) and all(step.proved for step in steps)


def print_json(steps: Sequence[Step], seconds: float) -> None:
    tree = {"proved": is_proved(steps), "seconds": round(seconds, 2), "steps": steps}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(tree), indent=2).decode() + "\n")
