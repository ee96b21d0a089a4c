"""Compare: one trace on several setups, and how their figures are shown and written."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pagedkv.budget import format_bytes, pages_for_tokens
from pagedkv.config import EngineConfig, SchedulerConfig
from pagedkv.engine.allocators import ALLOCATORS, Allocator
from pagedkv.errors import ConfigError
from pagedkv.plan.results import Result
from pagedkv.plan.simulate import Setup, simulate
from pagedkv.plan.steptime import StepTime
from pagedkv.plan.synthetic import PREFIX, make_trace, parse_synthetic, read_synthetic
from pagedkv.plan.traces import Trace, read_trace

_SHOWN = (
    ("running", "running_mean", "{:.1f}"),
    ("waste", "waste", "{:.1%}"),
    ("queue", "queueing_mean", "seconds"),
    ("TTFT", "ttft_p50", "seconds"),
    ("p95", "ttft_p95", "seconds"),
    ("std", "ttft_std", "seconds"),
    ("ITL", "itl_mean", "{:.3f}"),
    ("tok/s", "output_tokens_per_second", "{:.0f}"),
    ("lost", "preemptions", "{:.0f}"),
    ("hits", "hit_rate", "{:.0%}"),
)
"""Columns of the table: heading, figure, format. Times in seconds; "TTFT" is the median, "lost" are preemptions."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What to compare: every combination of these.

    Attributes:
        allocators: of `ALLOCATORS`. page_sizes: of paged ones. prefix_caching: of paged ones, on, off, or both.
        policies: capacity_scheduler_policy. budgets: bytes for keys and values.
    """

    budgets: Sequence[int]
    allocators: Sequence[str] = ALLOCATORS
    page_sizes: Sequence[int] = (16,)
    prefix_caching: Sequence[bool] = (True,)
    policies: Sequence[str] = ("MAX_UTILIZATION",)


def open_trace(text: str, *, limit: int | None, skip_bad: bool, rate_scale: float, seed: int | None) -> Trace:
    """A trace from what a user calls it: a file, `synthetic:...`, or a YAML file of a synthetic one.

    Raises:
        TraceError, ConfigError: see `read_trace` and `Synthetic`; a limit or factor that is not positive.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit is {limit} requests; it must be at least 1")
    if not rate_scale > 0:
        raise ConfigError(f"the factor of the rate is {rate_scale}; it must be above 0")
    path = Path(text).expanduser()
    if text.startswith(PREFIX) or path.suffix in (".yaml", ".yml"):
        spec = parse_synthetic(text) if text.startswith(PREFIX) else read_synthetic(path)
        trace = make_trace(spec, seed)
        trace = trace if limit is None else trace.first(limit)
    else:
        trace = read_trace(path, limit=limit, skip_bad=skip_bad)
    return trace if rate_scale == 1 else trace.faster(rate_scale)


def longest_request(trace: Trace, page_size: int, most: int) -> int:
    """max_seq_len for a trace: its longest request in whole pages, at most `most`."""
    longest = int((trace.prompt.astype(np.int64) + trace.output).max())
    return min(pages_for_tokens(longest, page_size) * page_size, most)


def setups(choices: Choices, config: EngineConfig, token_bytes: int) -> list[Setup]:
    """Every combination that differs, in the order in which they are shown.

    Raises:
        ConfigError: an unknown allocator or policy, or a page size below 1.
    """
    found: dict[tuple[object, ...], Setup] = {}
    for budget, policy, allocator in product(choices.budgets, choices.policies, choices.allocators):
        scheduler = SchedulerConfig(**{**config.scheduler_config.model_dump(), "capacity_scheduler_policy": policy})
        chosen = config.model_copy(update={"scheduler_config": scheduler})
        for page_size, caching in product(choices.page_sizes, choices.prefix_caching):
            setup = make_setup(allocator, budget, token_bytes, chosen, page_size, caching)
            key = (budget, policy, allocator, *((page_size, caching) if allocator == "paged" else ()))
            found.setdefault(key, setup)
    return list(found.values())


def make_setup(
    allocator: str, budget: int, token_bytes: int, config: EngineConfig, page_size: int, caching: bool
) -> Setup:
    """One setup; raises ConfigError for an unknown allocator or a page size below 1."""
    known: dict[str, Allocator] = {name: name for name in ALLOCATORS}
    if allocator not in known:
        raise ConfigError(f"allocator {allocator!r} is not one of {', '.join(known)}")
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; it must be at least 1")
    paged = allocator == "paged"
    return Setup(known[allocator], budget, token_bytes, config, page_size, caching and paged)


def run_all(console: Console, trace: Trace, chosen: Sequence[Setup], time: StepTime) -> list[Result]:
    """Run the trace on each setup, with a bar on the console.

    Raises:
        OutOfMemoryBudgetError: a budget holds no page, or not one reservation; nothing is run.
    """
    for setup in chosen:
        _ = setup.num_pages
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as bar:
        for setup in chosen:
            task = bar.add_task(title(setup, chosen), total=len(trace))

            def update(done: int, task: object = task) -> None:
                bar.update(task, completed=done)  # type: ignore[arg-type]

            results.append(simulate(trace, setup, time, _seldom(update, len(trace))))
            bar.remove_task(task)
    return results


def _seldom(update: Callable[[int], None], total: int) -> Callable[[int], None]:
    """Call `update` about every thousandth part of the way."""
    last = -1

    def maybe(done: int) -> None:
        nonlocal last
        if done * 1000 // total != last:
            last = done * 1000 // total
            update(done)

    return maybe


def title(setup: Setup, among: Iterable[Setup]) -> str:
    """A setup's name, with its budget and policy where others have another."""
    others = list(among)
    words = [setup.name]
    if len({other.budget for other in others}) > 1:
        words.append(format_bytes(setup.budget))
    policies = {other.config.scheduler_config.capacity_scheduler_policy for other in others}
    if len(policies) > 1:
        words.append(setup.config.scheduler_config.capacity_scheduler_policy)
    return ", ".join(words)


def figures_table(titles: Sequence[str], results: Sequence[Result]) -> Table:
    """The figures that decide, one line for each setup; 80 columns hold it."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name, _, _ in _SHOWN:
        table.add_column(name, justify="right", no_wrap=True)
    for name, result in zip(titles, results, strict=True):
        figures = result.figures()
        table.add_row(name, *(_shown(figures[key], form) for _, key, form in _SHOWN))
    return table


def _shown(value: float, form: str) -> str:
    """A figure in its format; seconds with three digits."""
    if form == "seconds":
        form = "{:.2f}" if value < 10 else "{:.1f}" if value < 100 else "{:.0f}"
    return form.format(value)


def as_json(titles: Sequence[str], results: Sequence[Result]) -> str:
    """All figures, for programs."""
    rows = [
        {"name": name, "setup": dict(result.setup), "refused": dict(result.refused), "figures": result.figures()}
        for name, result in zip(titles, results, strict=True)
    ]
    return json.dumps(rows, indent=2)


def write_csv(folder: Path, titles: Sequence[str], results: Sequence[Result]) -> None:
    """figures.csv with a line for each setup, and requests-N.csv with a line for each of its requests.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "figures.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            for name, result in zip(titles, results, strict=True):
                figures = result.figures()
                if file.tell() == 0:
                    writer.writerow(["name", *result.setup, *figures])
                writer.writerow([name, *result.setup.values(), *figures.values()])
        for number, result in enumerate(results, 1):
            columns = ("arrival", "prompt", "output", "admitted", "first", "last", "cached", "preempted")
            with (folder / f"requests-{number}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(zip(*(getattr(result, name).tolist() for name in columns), strict=True))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from None
