"""What every benchmark shares: the row of a result, fair timing in turns, and where results are written.

Knows nothing about what is measured. Absolute times of a shared machine mean little; a row therefore holds ours and
the peer's figure from the same run, and their ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "bench"
"""Where results go: build/bench/NAME.json."""

COLUMNS = ("work", "ours", "peer", "unit", "ratio", "target", "holds")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        work: what was done, in words ("decode step, 4096 rows").
        ours: our figure, in `unit`.
        peer: the peer's or floor's figure from the same run; None where there is none.
        peer_name: who the peer is, with its version.
        unit: of both figures ("ms", "tokens/s", "MiB").
        ratio: how many times better ours is than the peer's (see `ratio`): above 1 ours is better, whatever the unit.
        target: the ratio that is aimed at; None where nothing is promised.
        holds: whether the target is met; None without a ratio or a target.
    """

    work: str
    ours: float
    peer: float | None
    peer_name: str
    unit: str
    ratio: float | None
    target: float | None
    holds: bool | None


def ratio(ours: float, peer: float, *, better: Literal["lower", "higher"]) -> float:
    """How many times better ours is: peer / ours for costs ("lower"), ours / peer for yields ("higher").

    Above 1 ours is better, below 1 the peer's, whatever the unit.
    """
    for name, figure in (("ours", ours), ("peer", peer)):
        if figure <= 0:
            raise ValueError(f"{name} is {figure}; a ratio needs positive figures")
    return peer / ours if better == "lower" else ours / peer


def compare(
    work: str,
    ours: float,
    peer: float,
    peer_name: str,
    unit: str,
    *,
    better: Literal["lower", "higher"],
    target: float | None = None,
) -> Row:
    """A row with its ratio worked out and, where there is a target, whether it holds (ratio >= target)."""
    value = ratio(ours, peer, better=better)
    return Row(work, ours, peer, peer_name, unit, value, target, None if target is None else value >= target)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the fastest and of the middle call."""

    best: float
    median: float


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders in turns: a b c, b c a, ... so that noise and heat meet all of them alike.

    Each is called once untimed first (compilation, caches), then `repeats` times. Compare medians; the best is the
    steadier figure where a call is short.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    for function in functions.values():
        function()
    order = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(repeats):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            start = clock()
            functions[name]()
            seconds[name].append(clock() - start)
    return {name: Timing(min(spent), statistics.median(spent)) for name, spent in seconds.items()}


def write(name: str, rows: Sequence[Row], folder: Path = OUTPUT) -> Path:
    """Write build/bench/NAME.json, a list with one object per row, and print the rows as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print_table(name, rows)
    return path


def print_table(title: str, rows: Sequence[Row]) -> None:
    """An aligned table on standard output; drawn by rich where it is installed."""
    cells = [_cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, cells))
        return
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("ours", "peer", "ratio", "target") else "left")
    for line in cells:
        table.add_row(*line)
    Console(markup=False).print(table)


def plain_table(title: str, cells: Sequence[Sequence[str]]) -> str:
    """The same table in plain text, one line per row, columns padded to their widest cell."""
    lines = [COLUMNS, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    padded = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, *(line.rstrip() for line in padded)])


def _cells(row: Row) -> tuple[str, ...]:
    peer = f"{_figure(row.peer)} ({row.peer_name})" if row.peer is not None else "-"
    holds = {True: "yes", False: "no", None: "-"}[row.holds]
    times = [f"{_figure(value)}x" if value is not None else "-" for value in (row.ratio, row.target)]
    return (row.work, _figure(row.ours), peer, row.unit, *times, holds)


def _figure(value: float | None) -> str:
    """Three significant digits, never in scientific notation: 0.0123, 1.23, 12,345."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - _magnitude(value))
    return f"{value:.{digits}f}"


def _magnitude(value: float) -> int:
    return int(f"{value:e}".partition("e")[2]) if value else 0
