"""`kvtally demo`: prefill and decode in two real vLLM servers, a store, a router, and what each receipt proves.

    demo ──▶ tiny hybrid model, made on the spot ──▶ kvtally up ──▶ store, prefill, decode, router
      └────▶ requests through the router; kill -9; a flipped byte ──▶ one row each: receipt, answer, what it proves

With `--nodes 2` prefill and decode have a store each, as on two machines: `kvtally up --node a` and `--node b`.

Each answer is compared with what decode's engine says when it reuses nothing, computed by the same arithmetic (for a
prompt that was handed over, the engine's own continuation; see `testing.deployment`). If a step does not prove what it
should, the exit code is 1. Nothing is left behind: `kvtally up` ends with this process, and all files are in one
temporary directory. Only the logs of a failed demo are kept. Threading: none, but for a request during which something
happens to a store.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtally.cli.demos import Step, is_proved, parser, print_json
from kvtally.cli.render import read_stats
from kvtally.client import Miss
from kvtally.core.receipts import Verdict
from kvtally.errors import ConfigError, TransportError
from kvtally.processes import workplace
from kvtally.testing.deployment import Answer, Deployment, TwoNodes
from kvtally.testing.models import GDN, tiny_models

PROMPT_TOKENS = 1_500
TRIES = 5

ENGINES = (
    "Two real vLLM servers on this machine's CPU, one for prefill and one for decode, with a tiny hybrid model (gated "
    "delta-net states beside attention) made on the spot from random weights; "
)
COMPARED = " Every answer is compared, token by token, with what decode's engine says when it reuses nothing."
INTRODUCTION = {
    1: f"{ENGINES}a store and a router.{COMPARED}",
    2: f"{ENGINES}each with a store of its own, on 127.0.0.2 and 127.0.0.3; a router. The stores share nothing: as on "
    f"two machines, decode's pulls from prefill's over TCP.{COMPARED}",
}
SUMMARY = {
    1: "Prefill computed each prompt once; decode computed one token of it and went on, with the answer it would have "
    "given alone. Every response said so, and said why where it was not so.",
    2: "Prefill computed each prompt once; decode's store pulled it from prefill's, and decode computed one token. "
    "What could not be pulled, or was not what it should be, decode computed itself. Each answer is the one it would "
    "have given alone, and each response says where the prompt came from.",
}
NEXT = (
    "Next: `kvtally up FILE.yaml` runs your own model (see examples/), `kvtally verify URL` puts a running deployment "
    "through this, `kvtally receipts` lists what was reused. docs/router.md explains verdicts."
)
LAST = {
    1: "The same across two stores, as on two machines: kvtally demo --nodes 2",
    2: "On two machines: kvtally up nodes.yaml --node NAME (see examples/nodes.yaml)",
}


class Row(Step, frozen=True, kw_only=True):
    verdict: str
    answer_equal: bool
    seconds: float


def main(arguments: Sequence[str]) -> int:
    command = parser(
        "demo",
        "See prefill and decode share a KV cache on this machine, without a GPU: two vLLM servers, a store, a router, "
        "and what each receipt proves. Two to five minutes.",
    )
    command.add_argument(
        "--nodes",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: prefill and decode have a store each and share nothing, as on two machines (default: 1)",
    )
    options = command.parse_args(arguments)
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed beside this kvtally",
            remedy="Run `make setup`; without vLLM, `kvtally demo-store` shows the store alone.",
            code="KV-106",
        )
    console = Console(stderr=options.json)
    console.print(INTRODUCTION[options.nodes], highlight=False)
    begun = time.monotonic()
    with workplace("kvtally-demo-") as directory:
        try:
            rows = _show(directory, console, options.nodes)
        except (TransportError, OSError, HTTPException) as error:
            what = error.message if isinstance(error, TransportError) else f"the demo broke off: {error!r}"
            raise TransportError(what, remedy=_kept_logs(directory)) from error
        kept = "" if is_proved(rows) else _kept_logs(directory)
    seconds = time.monotonic() - begun
    if options.json:
        print_json(rows, seconds)
    else:
        console.print()
        console.print(_table(rows))
        good = (SUMMARY[options.nodes], NEXT)
        for paragraph in good if is_proved(rows) else ("Not every step proved what it should.",):
            console.print(Text(paragraph), highlight=False)
        console.print(f"[dim]{seconds:.0f} s[/dim]")
        console.print(LAST[options.nodes], highlight=False)
    if kept:
        console.print(kept, highlight=False, soft_wrap=True)
    return 0 if is_proved(rows) else 1


def _kept_logs(directory: Path) -> str:
    """Save the logs from the directory that is about to be removed, and say where they are."""
    kept = tempfile.mkdtemp(prefix="kvtally-demo-logs-")
    for log in directory.rglob("*.log*"):
        shutil.copy(log, kept)
    return f"The logs are kept in {kept}."


def _show(directory: Path, console: Console, nodes: int) -> list[Row]:
    with console.status("making the model"):
        [model] = tiny_models(directory / "models", [(GDN, 0)])
    disk = {"disk": str(directory / "disk"), "disk_size": "1GiB"}
    up = TwoNodes(model, directory) if nodes == 2 else Deployment(model, directory, store=disk)
    try:
        with console.status("") as status:
            up.wait_ready(on_line=lambda line: status.update(f"starting: {line}"))
            rows = []
            for row in _story(up, lambda what: status.update(what)):
                rows.append(row)
                mark = "[green]✓[/green]" if row.proved else "[red]✗[/red]"
                console.print(f"{mark} {row.step}: [bold]{row.verdict}[/bold], {row.source}", highlight=False)
        return rows
    finally:
        up.close()


def _story(up: Deployment, doing: Callable[[str], None]) -> Iterator[Row]:
    return play_nodes(up, doing) if isinstance(up, TwoNodes) else play(up, doing)


# ---- the story on one machine


def play(up: Deployment, doing: Callable[[str], None]) -> Iterator[Row]:
    """Run the steps, in order."""
    tokens = _dice()
    doing("asking decode alone, for what the answer must be")
    prompt, alone = up.continued(tokens(PROMPT_TOKENS - 1))
    computed = up.computed(prompt)
    doing("prefill, then decode")
    first = _Asked(up, prompt, alone)
    yield first.row(
        "prefill → decode",
        "prefill computed the prompt, decode loaded it and computed one token",
        verdict=Verdict.PROVED,
        is_proved=first.computed == 1,
    )
    short, alone_short = up.continued(tokens(39))
    streamed = _Asked(up, short, alone_short, stream=True)
    yield streamed.row(
        "40 tokens, streamed",
        "a prompt shorter than a block is handed over too, and streams carry the receipt",
        verdict=Verdict.PROVED,
        is_proved=streamed.computed == 1,
    )
    again = _Asked(up, prompt, alone)
    yield again.row(
        "the same again",
        "decode holds it: prefill is not asked",
        verdict=Verdict.LOCAL,
        is_proved=again.computed == 1 and again.told["prefill"] == "skipped:held",
    )
    turn = [*prompt, *first.answer.tokens, *tokens(60)]
    following = _Asked(up, turn, None)
    yield following.row(
        "next turn",
        "the conversation goes on from where its last answer ended",
        verdict=None,
        is_proved=following.reused >= len(prompt),
    )
    other, alone_other = up.continued([*prompt[:1_000], *tokens(499)])
    shared = _Asked(up, other, alone_other)
    yield shared.row(
        "another prompt, 1,000 tokens shared",
        "decode kept its attention of the shared part and took only the rest and the state",
        verdict=Verdict.PROVED,
        is_proved=shared.computed == 1 and shared.source.startswith("gpu:"),
    )
    doing("kill -9 of store and decode; kvtally up brings them back")
    _kill(up, "store", "decode-0")
    restarted = _Asked(up, prompt, alone)
    yield restarted.row(
        "after kill -9 of store and decode",
        "what was saved is on disk, and verified when it comes back",
        verdict=None,
        is_proved=restarted.computed == 1 and "disk:" in restarted.source,
    )
    doing("flipping bytes in the store's memory")
    up.forget(up.decode)
    _flip(up, up.socket)
    tampered = _Asked(up, prompt, computed)
    yield tampered.row(
        "a flipped byte",
        "bytes that are not what they should be are not used: decode computes them again, and says why",
        verdict=Verdict.RECOMPUTED,
        is_proved=tampered.told["verdict"] == "recomputed:checksum",
    )


# ---- the story on two


def play_nodes(up: TwoNodes, doing: Callable[[str], None]) -> Iterator[Row]:
    """Run the steps, in order."""
    tokens = _dice()

    def hand_over() -> _Asked:
        return _Asked(up, *up.continued(tokens(PROMPT_TOKENS - 1)))

    def go_on() -> _Asked:
        return _Asked(up, [*first.prompt, *first.answer.tokens, *tokens(60)], None)

    def tamper() -> _Asked:
        prompt = tokens(PROMPT_TOKENS)
        return _asked_while(up, prompt, up.computed(prompt), lambda: _flip(up, up.prefill_socket))

    doing("prefill, then decode")
    first = _patiently(up, hand_over)
    yield first.row(
        "prefill → decode",
        "decode's store pulled the prompt from prefill's, and decode computed one token",
        verdict=Verdict.PROVED,
        is_proved=first.computed == 1 and first.source == f"peer:{len(first.prompt) - 1}",
    )
    following = _patiently(up, go_on)
    yield following.row(
        "next turn",
        "decode and its store kept what they held: only the new end came from prefill's store",
        verdict=Verdict.PROVED,
        is_proved=following.computed == 1 and "peer:" in following.source,
    )
    doing("flipping bytes in the memory of prefill's store, before decode's pulls")
    tampered = _patiently(up, tamper)
    yield tampered.row(
        "a flipped byte",
        "what arrives is verified before it is used: decode computes the prompt, and says why",
        verdict=Verdict.RECOMPUTED,
        is_proved=tampered.told["verdict"] == "recomputed:checksum",
    )
    doing("kill -9 of prefill's store, before decode's pulls")
    prompt = tokens(PROMPT_TOKENS)
    alone = up.computed(prompt)
    try:
        lost = _asked_while(up, prompt, alone, lambda: _kill_prefill_store(up))
    finally:
        os.kill(up.pid, signal.SIGCONT)
    yield lost.row(
        "kill -9 of prefill's store",
        "nobody waits for a store that is gone: decode computes the prompt, and says why",
        verdict=Verdict.RECOMPUTED,
        is_proved=lost.told["verdict"] == "recomputed:peer_lost",
    )


def _patiently(up: TwoNodes, ask: Callable[[], _Asked]) -> _Asked:
    """Ask, and ask anew with other tokens if prefill's store was taken for lost: it has a second to answer, which on a
    busy machine may be too little."""
    for _ in range(TRIES):
        up.wait(up.is_linked, "decode's store does not ask prefill's")
        asked = ask()
        if not asked.told.get("verdict", "").endswith("peer_lost"):
            break
    return asked


def _asked_while(up: TwoNodes, prompt: list[int], alone: Answer, happens: Callable[[], None]) -> _Asked:
    return up.meanwhile(lambda: _Asked(up, prompt, alone), happens)


def _kill_prefill_store(up: TwoNodes) -> None:
    """Kill it for as long as `kvtally up` is stopped, which would start it again."""
    os.kill(up.pid, signal.SIGSTOP)
    store = up.pid_of("store")
    os.kill(store, signal.SIGKILL)
    up.wait(lambda: not Path("/proc", str(store)).exists(), "prefill's store does not end")


# ---- one request


def _dice() -> Callable[[int], list[int]]:
    """Random tokens, always the same ones."""
    pick = random.Random(7)
    return lambda count: [pick.randrange(10, 900) for _ in range(count)]


class _Asked:
    """One request through the router, and its receipt."""

    def __init__(self, up: Deployment, prompt: list[int], alone: Answer | None, *, stream: bool = False) -> None:
        self.prompt = prompt
        begun = time.monotonic()
        self.answer = up.complete(prompt, stream=stream)
        self._seconds = time.monotonic() - begun
        # Prefill may have computed the prompt in other steps than the reference, with other rounding: compare tokens.
        self._is_equal = alone is None or self.answer.tokens == alone.tokens
        self.told = self.answer.told
        self.reused, self.computed = (_number(self.told.get(f"{what}-tokens", "")) for what in ("reused", "computed"))
        self.source = self.told.get("source", "unknown")

    def row(self, step: str, proves: str, *, verdict: Verdict | None, is_proved: bool) -> Row:
        told = self.told.get("verdict", "no receipt")
        return Row(
            step=step,
            verdict=told,
            reused_tokens=self.reused,
            computed_tokens=self.computed,
            source=self.source,
            answer_equal=self._is_equal,
            seconds=round(self._seconds, 2),
            proves=proves,
            proved=is_proved and self._is_equal and (verdict is None or told.split(":")[0] == verdict),
        )


def _kill(up: Deployment, *names: str) -> None:
    """Kill -9 these processes once everything saved is on disk, and wait until they are back."""
    with up.store() as client:

        def is_written() -> bool:
            stats = client.stats().wait()
            return not isinstance(stats, Miss) and not any(tier.queued_bytes for tier in read_stats(stats.stats).tiers)

        up.wait(is_written, "the store does not write its disk", 30)
    for name in names:
        os.kill(up.pid_of(name), signal.SIGKILL)
    up.wait(lambda: not up.is_ready(), "the router does not notice", 30)
    up.wait_ready()


def _flip(up: Deployment, socket: str) -> None:
    """Change a byte of every object in a store's memory."""
    with up.store(socket) as client:
        if client.arena is not None:
            memory = np.frombuffer(client.arena.view(0, client.arena.size_bytes), dtype=np.uint8)
            memory[::4096] ^= 1
            del memory


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _table(rows: Sequence[Row]) -> Table:
    """Fits 80 columns: below each step's name stands what it proves."""
    table = Table(box=SIMPLE, padding=(0, 1), show_edge=False)
    table.add_column("step, and what it proves", ratio=1)
    table.add_column("verdict", no_wrap=True)
    for heading in ("reused", "computed"):
        table.add_column(heading, justify="right")
    table.add_column("from", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    for row in rows:
        proves = (row.proves, "dim") if row.proved else ("NOT PROVED", "red")
        table.add_row(
            Text.assemble((f"{row.step}\n", "bold"), proves),
            row.verdict.replace(":", ":\n"),
            f"{row.reused_tokens:,}",
            f"{row.computed_tokens:,}",
            row.source.replace(",", "\n"),
            "equal" if row.answer_equal else "DIFFERS",
        )
    return table
