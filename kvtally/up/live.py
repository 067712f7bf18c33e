"""What `kvtally up` shows while it runs: a line for each event and, in a terminal, a table below them.

Owns the terminal and the signal handlers; `supervise` does the work. Threading: one event loop, in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtally.up.plan import Process
from kvtally.up.supervise import Row, State, Supervisor

REFRESH_S = 0.5
_STYLE = {State.READY: "green", State.STARTING: "yellow", State.PAUSING: "yellow", State.FAILED: "red"}


async def keep(processes: Sequence[Process], logs: Path) -> None:
    """Run the processes until a signal. Raises TransportError if one fails for good."""
    console = Console(markup=False, highlight=False)
    supervisor = Supervisor(processes, logs, tell=lambda line: _say(console, line))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under `nohup` it stays ignored
            loop.add_signal_handler(number, supervisor.stop)
    shows = [asyncio.create_task(_greet(console, supervisor, processes[-1].url))]
    if console.is_terminal:
        shows.append(asyncio.create_task(_show(console, supervisor)))
    try:
        await supervisor.run()
    finally:
        for task in shows:
            task.cancel()
        await asyncio.wait(shows)


async def _greet(console: Console, supervisor: Supervisor, url: str) -> None:
    await supervisor.ready.wait()
    _say(console, f"ready: {url}/v1 · prove it: kvtally verify {url} · stop: Ctrl-C")


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
