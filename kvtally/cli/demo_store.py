"""`kvtally demo-store`: the store, shown with real processes and checked step by step.

    demo ──starts, kills, restarts──▶ store daemon ◀──unix socket, arena──▶ engine A, engine B (SyntheticEngine)

Owns the story, the processes and the table. An engine without a store first computes every prompt's output; all later
answers are compared with that. If a step does not prove what it should, the exit code is 1.

Nothing is left behind: children are stopped at the end, the kernel kills them if this process dies, and their files are
in one temporary directory. Threading: none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtally.cli.demos import Step, is_proved, parser, print_json
from kvtally.cli.render import read_stats
from kvtally.client import Miss
from kvtally.core.geometry import runs
from kvtally.core.receipts import Loaded, Role, Verdict
from kvtally.errors import TierError
from kvtally.processes import Child, Worker, serve, workplace
from kvtally.shm import address_of
from kvtally.testing.copying import CopyingClient
from kvtally.testing.engine import FULL, NAMESPACE, Answer, SyntheticEngine
from kvtally.wire.messages import MissReason
from kvtally.wire.stats import StoreStats

DEADLINE_S = 20.0  # for any single wait; the whole demo takes a few seconds
SIZE = "64MiB"
SHARED_TOKENS = 6 * NAMESPACE.chunk_tokens  # the beginning that two prompts have in common
NEXT_CHUNK = SHARED_TOKENS // NAMESPACE.chunk_tokens  # index of the first chunk after it
REMEDY = "If the machine is very busy, try again when it is not; otherwise report this."
NARROWEST_TABLE = 80  # columns; below that, rows become paragraphs

INTRODUCTION = (
    "A store daemon and two engine processes. The engines have a synthetic hybrid model: full attention, sliding "
    "window, recurrent state. Its output is a digest of the KV bytes it reads, so one wrong byte shows. Prompt P1 has "
    f"2,000 tokens, P2 has 30, P3 has 1,836, the first {SHARED_TOKENS:,} of them P1's, and P4 has 700."
)
SUMMARY = (
    "Two engines shared their KV cache through the store, across processes and across a restart. Two kill -9 and two "
    "flipped bytes cost some computing; none of them changed an output. Nothing of the demo is left behind.",
    "Next: `kvtally store --memory 4GiB --disk DIR` runs a store, `kvtally stat` looks into it, `make bench` measures "
    "it on this machine, `kvtally demo` shows real vLLM servers. docs/architecture.md follows one chunk through the "
    "code.",
)

Tokens = list[int]


def main(arguments: Sequence[str]) -> int:
    accepted = parser(
        "demo-store",
        "See the store work, in a few seconds and without vLLM: two engines, kill -9, a restart, flipped bytes.",
    )
    accepted.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)  # how the demo starts its engines
    options = accepted.parse_args(arguments)
    if options.engine:
        return _be_engine(*options.engine)
    begun = time.monotonic()
    table = None if options.json else Report()
    rows: list[Row] = []
    with workplace("kvtally-demo-") as directory, Stage(directory) as stage:
        for row in play(stage):
            rows.append(row)
            if table is not None:
                table.add(row)
    seconds = time.monotonic() - begun
    if table is None:
        print_json(rows, seconds)
    else:
        table.finish(rows, seconds)
    return 0 if is_proved(rows) else 1


# ---- the story


class Row(Step, frozen=True, kw_only=True):
    output_equal: bool
    reason: str  # why no more was reused: a MissReason, or empty


class Prompts:
    """The prompts, and the output that each must have, computed without a store."""

    def __init__(self) -> None:
        pick = random.Random(7)
        self.p1 = pick.choices(range(32_000), k=2_000)
        self.p2 = pick.choices(range(32_000), k=30)
        self.p3 = self.p1[:SHARED_TOKENS] + pick.choices(range(32_000), k=300)
        self.p4 = pick.choices(range(32_000), k=700)
        engine = SyntheticEngine(seed=0)
        self._expected = {tuple(prompt): engine.serve(prompt).output for prompt in (self.p1, self.p2, self.p3, self.p4)}

    def are_equal(self, asked: Sequence[Tokens], answers: Sequence[Answer]) -> bool:
        return [self._expected[tuple(prompt)] for prompt in asked] == [answer.output for answer in answers]


def play(stage: Stage) -> Iterator[Row]:
    """Run the steps, in order; each builds on the ones before."""
    prompts = Prompts()
    stage.start_store()
    first = stage.engine("engine A", Role.PREFILL)
    second = stage.engine("engine B", Role.DECODE)
    yield from _share(stage, prompts, first, second)
    yield _die_while_saving(stage, prompts, first, second)
    yield from _restart(stage, prompts, second)
    yield from _damage_disk(stage, prompts, second)
    yield from _damage_memory(stage, prompts, second)


def _share(stage: Stage, prompts: Prompts, first: Engine, second: Engine) -> Iterator[Row]:
    asked = [prompts.p1, prompts.p2]
    row = _row("engine A is asked for P1 and P2; it saves what it computed", prompts, asked, first.serve(asked))
    yield _judge(row, row.reused_tokens == 0, "the start: nothing was there to be reused")

    asked = [prompts.p3]
    row = _row("A is asked for P3, which begins like P1", prompts, asked, first.serve(asked))
    yield _judge(row, row.reused_tokens == SHARED_TOKENS, "a shared beginning is computed once")

    asked = [prompts.p1, prompts.p2, prompts.p3]
    row = _row("engine B, another process, is asked for all three", prompts, asked, second.serve(asked))
    proved = stage.verdicts().count(Verdict.PROVED)
    holds = row.computed_tokens == proved == len(asked)
    yield _judge(row, holds, f"every group comes back whole, all but the last tokens; {proved} receipts say `proved`")


def _die_while_saving(stage: Stage, prompts: Prompts, first: Engine, second: Engine) -> Row:
    written = first.serve([prompts.p4], commit=False)[0].saved_objects
    first.kill()
    stage.wait_for(lambda stats: all(client.client != first.name for client in stats.clients), "engine A's end")
    step = f"A writes {written} objects of P4 and is killed (kill -9) before it commits; B is asked for P4"
    row = _row(step, prompts, [prompts.p4], second.serve([prompts.p4]))
    holds = written > 0 and row.reused_tokens == 0 and row.reason == MissReason.ABSENT
    return _judge(row, holds, "what was not committed is never served")


def _restart(stage: Stage, prompts: Prompts, engine: Engine) -> Iterator[Row]:
    stage.wait_for(lambda stats: stats.arena.objects == stats.tiers[0].objects, "everything on disk")
    stage.kill_store()
    asked = [prompts.p1]
    answers = engine.serve(asked, patience_s=0.0)
    row = _row("the store is killed (kill -9); B is asked for P1", prompts, asked, answers)
    holds = row.reused_tokens == 0 and row.reason == MissReason.STORE_UNREACHABLE
    yield _judge(row, holds, "a dead store costs time, not answers")

    stage.start_store()
    row = _row("the store is started again; B is asked for P1", prompts, asked, engine.serve(asked))
    holds = row.computed_tokens == 1 and row.source == "disk"
    yield _judge(row, holds, "what was saved outlives the store; B reconnects by itself")


def _damage_disk(stage: Stage, prompts: Prompts, engine: Engine) -> Iterator[Row]:
    asked = [prompts.p3]
    stage.flip_on_disk(_object(prompts.p3, NEXT_CHUNK))
    step = f"one byte of P3 on disk is flipped, behind token {SHARED_TOKENS:,}; B is asked for P3"
    row = _row(step, prompts, asked, engine.serve(asked))
    stats = stage.stats()
    misses, caught = stats.lookups.misses.get(MissReason.CHECKSUM, 0), stats.quarantined.count.get("disk", 0)
    holds = misses == caught == 1 and row.reason == MissReason.CHECKSUM and row.reused_tokens == SHARED_TOKENS
    proves = f"found, not served: {misses} miss counted as `checksum`, {caught} object quarantined"
    yield _judge(row, holds, proves)

    row = _row("B is asked for P3 again", prompts, asked, engine.serve(asked))
    yield _judge(row, row.computed_tokens == 1, "what was computed again was saved again")


def _damage_memory(stage: Stage, prompts: Prompts, engine: Engine) -> Iterator[Row]:
    asked = [prompts.p1]
    stage.flip_in_memory(prompts.p1)
    careless = SyntheticEngine(seed=9, verify=False)
    step = "control: one byte of P1 in memory is flipped; an engine that does not check is asked for P1"
    row = _row(step, prompts, asked, [careless.serve(prompts.p1, stage.client)])
    proves = "every byte counts: without the check, the output would be wrong"
    yield _judge(row, row.computed_tokens == 1, proves, output_equal=False)

    row = _row("B, which checks, is asked for P1", prompts, asked, engine.serve(asked))
    caught = stage.stats().quarantined.count.get("arena", 0)
    holds = caught == 1 and row.reused_tokens == 0 and row.reason == MissReason.CHECKSUM
    yield _judge(row, holds, f"found after the copy and computed instead; {caught} object quarantined")


def _row(step: str, prompts: Prompts, asked: Sequence[Tokens], answers: Sequence[Answer]) -> Row:
    sources = Loaded(*(sum(counts) for counts in zip(*(answer.sources for answer in answers), strict=True)))
    places = ["memory" if place == "host" else place for place, tokens in sources._asdict().items() if tokens]
    return Row(
        step=step,
        reused_tokens=sum(answer.reused_tokens for answer in answers),
        computed_tokens=sum(a.computed_tokens for a in answers),
        source=", ".join(places),
        output_equal=prompts.are_equal(asked, answers),
        reason=answers[-1].reason,
    )


def _judge(row: Row, holds: bool, proves: str, *, output_equal: bool = True) -> Row:
    return msgspec.structs.replace(row, proves=proves, proved=holds and row.output_equal is output_equal)


def _object(prompt: Tokens, index: int) -> bytes:
    """The bytes of the prompt's full-attention object at this boundary, as a computing engine has them."""
    engine = SyntheticEngine(seed=5)
    request = engine.admit(prompt)
    engine.compute(request, request.ends[index])
    span = NAMESPACE.chunk_tokens // NAMESPACE.groups[FULL].block_tokens
    where = runs(engine.layouts[FULL], request.tables[FULL][index * span : (index + 1) * span])
    return b"".join(engine.memory[run.engine_offset : run.engine_offset + run.length].tobytes() for run in where)


# ---- the processes


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is asked; it replies with an `Answer`."""

    tokens: Tokens
    ticket: str
    patience_s: float = DEADLINE_S  # how long to wait for a store that is not there
    commit: bool = True  # False: write objects and count them, but never commit


def _be_engine(name: str, role: str, socket: str) -> int:
    """An engine process: serves orders until its standard input ends."""
    engine = SyntheticEngine(seed=os.getpid(), role=Role(role))

    def handle(line: bytes) -> Answer:
        order = msgspec.json.decode(line, type=Order)
        client.connect(order.patience_s)
        if order.commit:
            return engine.serve(order.tokens, client, ticket=order.ticket)
        request = engine.admit(order.tokens)
        engine.compute(request, len(order.tokens) - 1)
        written = engine.write(request, client)
        return Answer(output="", prompt_tokens=0, reused_tokens=0, computed_tokens=0, saved_objects=len(written))

    with CopyingClient(socket, namespace=NAMESPACE, name=name) as client:
        serve(handle)
    return 0


class Engine(Worker):
    """An engine process, which this module also is."""

    def __init__(self, directory: Path, name: str, role: Role, socket: Path) -> None:
        arguments = ("--engine", name, role, str(socket))
        super().__init__("kvtally.cli.demo_store", *arguments, log=directory / f"{name}.log", name=name, remedy=REMEDY)

    def serve(self, asked: Sequence[Tokens], *, patience_s: float = DEADLINE_S, commit: bool = True) -> list[Answer]:
        orders = [
            Order(tokens=tokens, ticket=_ticket(tokens), patience_s=patience_s, commit=commit) for tokens in asked
        ]
        return [self.ask(order, Answer, 2 * DEADLINE_S) for order in orders]


class Stage:
    """The store, the engines and the directory they live in. Leaving it ends them all."""

    def __init__(self, directory: Path) -> None:
        self.client: CopyingClient
        self._directory = directory
        self._socket = directory / "store.sock"
        self._stack = contextlib.ExitStack()
        self._store: Child

    def __enter__(self) -> Stage:
        self.client = self._stack.enter_context(CopyingClient(str(self._socket), namespace=NAMESPACE, name="demo"))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start_store(self) -> None:
        place = ["--socket", str(self._socket), "--disk", str(self._directory / "disk")]
        sizes = ["--memory", SIZE, "--disk-size", SIZE]
        command = [sys.executable, "-m", "kvtally", "store", *place, *sizes]
        log = self._directory / "store.log"
        self._store = Child(command, log, name="the store", remedy=REMEDY, directory=self._directory)
        self._stack.callback(self._store.kill)
        self._store.wait_for(self._is_connected, "the store did not start", DEADLINE_S)

    def _is_connected(self) -> bool:
        return not isinstance(self.client.connect(0.2), Miss)

    def kill_store(self) -> None:
        self._store.kill()

    def engine(self, name: str, role: Role) -> Engine:
        engine = Engine(self._directory, name, role, self._socket)
        self._stack.callback(engine.kill)
        return engine

    def stats(self) -> StoreStats:
        answer = self.client.stats().wait()
        if isinstance(answer, Miss):
            raise self._store.broken("the store did not answer")
        return read_stats(answer.stats)

    def wait_for(self, condition: Callable[[StoreStats], bool], what: str) -> None:
        self._store.wait_for(lambda: condition(self.stats()), f"the store did not see {what} in time", DEADLINE_S)

    def verdicts(self) -> list[Verdict]:
        """The store's verdicts on the last requests with a decode half."""
        found = self.client.receipts(last=100).wait()
        if isinstance(found, Miss):
            raise self._store.broken("the store gave no receipts")
        return [receipt.verdict for receipt in found.receipts if receipt.decode is not None]

    def flip_on_disk(self, content: bytes) -> None:
        """Change one byte of the object with this content behind the store's back, as a bad sector would."""
        with (self._directory / "disk" / "data").open("r+b") as file:
            at = file.read().find(content[:4096])  # its first granule lies in one piece
            if at < 0:
                raise TierError("the object is not on disk", remedy="Run the demo again, and report this.")
            file.seek(at + 100)
            file.write(bytes([content[100] ^ 1]))

    def flip_in_memory(self, prompt: Tokens) -> None:
        """Change one byte of the prompt's first object in the arena, as a stray write of some process would."""
        request = SyntheticEngine().admit(prompt)
        lease = self.client.hold(SyntheticEngine.question(request)).wait()
        slots = lease if isinstance(lease, Miss) else self.client.slots(lease).wait()
        arena = self.client.arena
        if isinstance(lease, Miss) or isinstance(slots, Miss) or arena is None:
            raise self._store.broken("the store does not hold the prompt any more")
        piece = next(slot.pieces[0] for slot in slots if slot.key.group == FULL)
        at = address_of(piece) - arena.address
        arena.view(at + 100, 1)[0] ^= 1
        self.client.release([lease]).wait()


def _ticket(tokens: Tokens) -> str:
    return f"demo-{len(tokens)}"


# ---- the table


class Report:
    """Rows as they come, in columns that fit the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False)
        self._width = min(self._console.width, 120)
        self._say(INTRODUCTION)
        if self._width >= NARROWEST_TABLE:
            self._console.print()
            heads = ("", "step", "reused", "computed", "from", "output", "what it proves")
            self._print(*(Text(head, style="bold") for head in heads))

    def add(self, row: Row) -> None:
        self._console.print()
        mark = Text("✔", style="green") if row.proved else Text("✘", style="bold red")
        reused, computed = f"{row.reused_tokens:,}", f"{row.computed_tokens:,}"
        output = Text("equal", style="green") if row.output_equal else Text("differs", style="yellow")
        proves = Text(row.proves) if row.proved else Text(f"NOT proved ({row.reason}): {row.proves}", style="bold red")
        if self._width >= NARROWEST_TABLE:
            source = Text(row.source.replace(", ", ",\n") or "-")
            self._print(mark, Text(row.step), Text(reused), Text(computed), source, output, proves)
        else:
            figures = f"reused {reused}, computed {computed}, from {row.source or '-'}, output "
            for paragraph in (Text.assemble(mark, " ", row.step), Text.assemble(figures, output), proves):
                self._console.print(paragraph)

    def finish(self, rows: Sequence[Row], seconds: float) -> None:
        self._console.print()
        if not is_proved(rows):
            failed = sum(not row.proved for row in rows)
            self._say(f"{failed} of {len(rows)} steps did not prove what they should. Please report this.", "bold red")
            return
        self._say(f"All {len(rows)} steps proved what they should, in {seconds:.1f} s.", "bold green")
        for paragraph in SUMMARY:
            self._console.print()
            self._say(paragraph)

    def _say(self, paragraph: str, style: str = "") -> None:
        self._console.print(Text(paragraph, style=style), width=self._width)

    def _print(self, *cells: Text) -> None:
        texts = self._width - 1 - 6 - 8 - 7 - 7 - 6 * 2
        table = Table.grid(padding=(0, 2, 0, 0))
        for column, width in enumerate((1, texts // 2, 6, 8, 7, 7, texts - texts // 2)):
            table.add_column(justify="right" if column in (2, 3) else "left", width=width)
        table.add_row(*cells)
        self._console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
