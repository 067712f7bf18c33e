"""What `kvtally up` shows while it runs: a line for each event and, in a terminal, a table below them.

Owns the terminal and the signal handlers; `supervise` does the work. Threading: one event loop, in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtally.up.host import answers
from kvtally.up.plan import Process
from kvtally.up.supervise import Row, State, Supervisor

REFRESH_S = 0.5
AWAIT_S = 1.0  # between two looks at engines on other machines
_STYLE = {State.READY: "green", State.STARTING: "yellow", State.PAUSING: "yellow", State.FAILED: "red"}


async def keep(processes: Sequence[Process], logs: Path, *, router_node: str = "") -> None:
    """Run the processes until a signal. Raises TransportError if one fails for good. `router_node` is where the router
    is, if another machine has it."""
    console = Console(markup=False, highlight=False)
    supervisor = Supervisor(processes, logs, tell=lambda line: _say(console, line))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under `nohup` it stays ignored
            loop.add_signal_handler(number, supervisor.stop)
    shows = [asyncio.create_task(_greet(console, supervisor, processes[-1], router_node))]
    if console.is_terminal:
        shows.append(asyncio.create_task(_show(console, supervisor)))
    try:
        await supervisor.run()
    finally:
        for task in shows:
            task.cancel()
        await asyncio.wait(shows)


async def _greet(console: Console, supervisor: Supervisor, last: Process, router_node: str) -> None:
    await supervisor.ready.wait()
    if router_node:
        _say(console, f"ready: this node's part; the way in is the router, on node {router_node} · stop: Ctrl-C")
        return
    await _others(console, last.awaits)
    _say(console, f"ready: {last.url}/v1 · prove it: kvtally verify {last.url} · stop: Ctrl-C")


async def _others(console: Console, awaits: Mapping[str, str]) -> None:
    """Wait for the engines of other machines, and say which are still missing whenever that changes. The router serves
    meanwhile, with those that are there."""
    told: list[str] = []
    while True:
        answered = await asyncio.gather(*(asyncio.to_thread(answers, health) for health in awaits.values()))
        missing = [f"{name} ({health})" for (name, health), ok in zip(awaits.items(), answered, strict=True) if not ok]
        if not missing:
            return
        if missing != told:
            _say(
                console, f"router: waits for {', '.join(missing)}; start those nodes, too: kvtally up FILE --node NAME"
            )
        told = missing
        await asyncio.sleep(AWAIT_S)


async def _show(console: Console, supervisor: Supervisor) -> None:
    """Keep the table at the bottom of the terminal; event lines scroll above it."""
    with Live(
        get_renderable=lambda: _table(supervisor.rows()), console=console, auto_refresh=False, transient=True
    ) as live:
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(OSError, SystemExit):
                live.refresh()


def _say(console: Console, line: str) -> None:
    # The terminal may be gone (rich turns a broken pipe into SystemExit). The processes must not suffer for it.
    with contextlib.suppress(OSError, SystemExit):
        console.print(line, soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "pid", "uptime", "port", "restarts"):
        table.add_column(column, justify="left" if column in ("process", "state") else "right")
    for row in rows:
        uptime = str(timedelta(seconds=int(row.uptime_s)))
        cells = [str(row.pid) if row.pid else "-", uptime if row.pid else "-", str(row.port) if row.port else "-"]
        table.add_row(row.name, Text(row.state, style=_STYLE.get(row.state, "")), *cells, str(row.restarts))
    return table
