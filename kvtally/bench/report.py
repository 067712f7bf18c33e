"""One report for all benches: rows of figures, each beside its limit and its target; for programs and for people.

A bench's own report module owns its figures (what `--json` prints), the targets, and a pure function from figures to
rows. This module turns rows into verdicts and tables. It measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtally import __version__


class Run(msgspec.Struct, kw_only=True):
    """What the figures of every bench say about the run itself."""

    version: str = __version__
    elapsed_s: float = 0.0


class EngineRun(Run, kw_only=True):
    """The same, of a bench that runs vLLM on whatever processor this machine has."""

    engine: str = ""
    model: str = ""
    cpus: int = 0
    load_at_start: float = 0.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. A `limit` is what this machine does without us, or a peer, in the same run; `ratio` is the value over
    it. `target` is empty if nothing is promised. With a target, `ok` is None if this run cannot tell."""

    key: str  # the figure it shows
    name: str = ""
    value: float
    unit: str = ""
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    cpu_ratio: float | None = None  # the same for processor time alone, which neighbours disturb less
    target: str = ""
    ok: bool | None = None

    @property
    def measured(self) -> float:
        """What a target is about: the ratio if there is a limit, else the value."""
        return self.value if self.ratio is None else self.ratio

    def beside(self, limit: float, name: str) -> Self:
        return msgspec.structs.replace(self, limit=limit, limit_name=name, ratio=self.value / limit if limit else 0.0)

    def at_most(self, bound: float, shown: str = "") -> Self:
        return self.judged(f"≤ {shown or self._shown(bound)}", self.measured <= bound)

    def at_least(self, bound: float, shown: str = "") -> Self:
        return self.judged(f"≥ {shown or self._shown(bound)}", self.measured >= bound)

    def judged(self, target: str, ok: bool | None) -> Self:
        return msgspec.structs.replace(self, target=target, ok=ok)

    def _shown(self, bound: float) -> str:
        return f"{bound:g} ×" if self.ratio is not None or self.unit == "×" else f"{bound:g}"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A row with a target, as most benches print it in JSON."""

    key: str
    value: float
    target: str
    ok: bool | None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> list[Self]:
        return [cls(key=row.key, value=row.measured, target=row.target, ok=row.ok) for row in rows if row.target]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# ---- for people


def page(run: Run, about: Sequence[str], *parts: RenderableType, notes: Iterable[str] = ()) -> RenderableType:
    """A headline, the parts with space between them, and the notes. `about`: what the headline says beside version and
    time; empty words are left out."""
    headline = " · ".join([f"kvtally {run.version}", *filter(None, about), f"{run.elapsed_s:.0f} s"])
    spaced = [item for part in parts for item in (Text(), part)]
    return Group(Text(headline, style="bold"), *spaced, Text(), *map(Text, notes))


def rows_table(rows: Sequence[Row], title: str = "what") -> Table:
    """Columns that no row uses are left out; the widest fits 80 characters."""
    columns: list[tuple[str, list[str | Text]]] = [
        (title, [row.name or row.key for row in rows]),
        (">value", [number(row.value) for row in rows]),
        ("", [row.unit for row in rows]),
        (">limit", ["" if row.limit is None else number(row.limit) for row in rows]),
        ("", [row.limit_name for row in rows]),
        (">ratio", ["" if row.ratio is None else f"{row.ratio:.2f}" for row in rows]),
        (">CPU", ["" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}" for row in rows]),
        (">target", [row.target for row in rows]),
        ("", [verdict([row]) for row in rows]),
    ]
    used = [(name, cells) for name, cells in columns if any(map(str, cells))]
    table = plain_table(*(name for name, _ in used))
    for row in zip(*(cells for _, cells in used), strict=True):
        table.add_row(*row)
    return table


def plain_table(*columns: str) -> Table:
    """A column whose name begins with > is flush right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify)
    return table


def verdict(rows: Sequence[Row]) -> Text:
    """The verdict on all of them together; empty if nothing was promised."""
    promised = [row.ok for row in rows if row.target]
    if False in promised:
        return Text("miss", "bold red")
    return Text("not judged" if None in promised else "ok" if promised else "", "green" if all(promised) else "")


def number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
