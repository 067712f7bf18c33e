"""A measuring process: carries out one task after another, as an engine's process would, and says what came of each.

    store (the plan) ──task, one JSON line──▶ stdin │ worker │ stdout ──answer, one JSON line──▶ store

Owns the loop; what can be asked for is `tasks`. Threading: none.
"""

from __future__ import annotations

import sys

import msgspec

from kvtally.bench.tasks import AnyTask, Bench
from kvtally.errors import KVTallyError


class Answer(msgspec.Struct, frozen=True):
    """How a task ended: its numbers, or what is wrong."""

    numbers: list[float] = []
    error: str = ""
    remedy: str = ""


def main() -> None:
    bench = Bench()
    decoder = msgspec.json.Decoder(AnyTask)
    for line in sys.stdin.buffer:
        try:
            answer = Answer(decoder.decode(line).run(bench))
        except KVTallyError as error:
            answer = Answer(error=error.message, remedy=error.remedy)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
