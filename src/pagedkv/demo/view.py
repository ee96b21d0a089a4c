"""What the demonstration shows: a live view of a run on a terminal, plain lines elsewhere, and the final comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagedkv.budget import format_bytes
from pagedkv.demo.run import Run
from pagedkv.engine.engine import Engine
from pagedkv.monitor.poolmap import draw, legend, page_states

_REDRAW_SECONDS = 0.15
_LINE_SECONDS = 5.0
_MAP_LINES = 12


class RunView:
    """Shows one run. As a context manager; call `update` after every step."""

    def __init__(self, console: Console, engine: Engine, title: str) -> None:
        self._console = console
        self._engine = engine
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = float("-inf")

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, run: Run) -> None:
        """Show the run as it is now, unless that was done a moment ago."""
        now = time.monotonic()
        every = _REDRAW_SECONDS if self._live is not None else _LINE_SECONDS
        if now - self._shown < every and len(run.finished) < run.total:
            return
        self._shown = now
        if self._live is not None:
            self._live.update(self._panel(run), refresh=True)
        else:
            self._console.print("  " + _counts(run), highlight=False, soft_wrap=True)

    def _panel(self, run: Run) -> Panel:
        states = page_states(self._engine.manager)
        width = max(20, self._console.width - 4)
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            ProgressBar(total=run.total, completed=len(run.finished), width=min(40, width // 2)),
            f"{len(run.finished)} of {run.total} chats answered",
        )
        body = Group(progress, Text(_counts(run)), Text(), draw(states, width, _MAP_LINES), legend(states))
        return Panel(body, title=self._title, title_align="left")


def _counts(run: Run) -> str:
    """One line of figures."""
    stats = run.stats
    if stats is None:
        return "starting"
    usage = stats.usage
    pages = f"pages used {usage.used} cached {usage.cached} free {usage.free}"
    return (
        f"{run.seconds:5.1f} s  done {len(run.finished)}/{run.total}  running {stats.running}  "
        f"waiting {stats.waiting}  {pages}  {run.tokens_per_second:.0f} tokens/s"
    )


def comparison(paged: Run, contiguous: Run) -> Table:
    """The two runs side by side."""
    table = Table(title="The same chats in the same memory", title_justify="left")
    table.add_column("")
    table.add_column("paged", justify="right", style="bold")
    table.add_column("contiguous", justify="right")
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("most requests running at once", lambda run: str(run.stats.peak_running if run.stats else 0)),
        ("reserved memory that held no token", lambda run: f"{run.waste:.1%}"),
        ("pages saved by sharing, at most", lambda run: str(run.most_saved)),
        ("bytes saved by sharing, at most", lambda run: format_bytes(run.most_saved * run.page_bytes)),
        ("prompt tokens found in the cache", _share),
        ("preemptions", lambda run: str(run.stats.preemptions if run.stats else 0)),
        ("output tokens per second", lambda run: f"{run.tokens_per_second:.0f}"),
        ("seconds", lambda run: f"{run.seconds:.1f}"),
    ]
    for name, figure in rows:
        table.add_row(name, figure(paged), figure(contiguous))
    return table


def _share(run: Run) -> str:
    if run.stats is None or not run.stats.prompt_tokens:
        return "0%"
    return f"{run.stats.cached_tokens / run.stats.prompt_tokens:.0%}"
