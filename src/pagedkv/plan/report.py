"""Report: one HTML file with tables and plots of simulated runs, which needs no network to be looked at."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ConfigError
from pagedkv.plan.results import Result
from pagedkv.plan.traces import Trace

_POINTS = 1500  # of a line; more cannot be seen
_COLORS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00", "#8b5a2b", "#555")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pagedkv: {title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }} p {{ max-width: 46rem; }}
</style></head><body><h1>{title}</h1><p>{about}</p>{table}{figures}</body></html>
"""

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("completed", "completed", "{:.0f}"),
    ("refused", "refused", "{:.0f}"),
    ("running_mean", "running, mean", "{:.1f}"),
    ("running_max", "most", "{:.0f}"),
    ("waste", "waste", "{:.1%}"),
    ("queueing_mean", "queueing, mean s", "{:.2f}"),
    ("ttft_p50", "TTFT p50 s", "{:.3f}"),
    ("ttft_p95", "p95", "{:.3f}"),
    ("ttft_std", "std", "{:.3f}"),
    ("itl_mean", "inter-token, mean s", "{:.4f}"),
    ("itl_p95", "p95", "{:.4f}"),
    ("output_tokens_per_second", "output tokens/s", "{:,.0f}"),
    ("requests_per_second", "requests/s", "{:.2f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("hit_rate", "hit rate", "{:.1%}"),
)


def write_report(path: Path, trace: Trace, about: str, titles: Sequence[str], results: Sequence[Result]) -> None:
    """Write the report.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    try:
        import plotly.io as pio
    except ModuleNotFoundError:
        raise ConfigError("a report needs plotly; install it with: pip install 'pagedkv[plan]'") from None
    figures = [*_over_time(titles, results), *_distributions(titles, results), *_sweep(results), _lengths(trace)]
    parts = [
        pio.to_html(figure, full_html=False, include_plotlyjs="inline" if not number else False)
        for number, figure in enumerate(figures)
    ]
    text = _PAGE.format(
        title=html.escape(trace.name), about=html.escape(about), table=_table(titles, results), figures="".join(parts)
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def _table(titles: Sequence[str], results: Sequence[Result]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("setup", *(name for _, name, _ in _COLUMNS)))
    rows = []
    for name, result in zip(titles, results, strict=True):
        figures = result.figures()
        cells = "".join(f"<td>{form.format(figures[key])}</td>" for key, _, form in _COLUMNS)
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _figure(title: str, x: str, y: str, **axes: Any) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="plotly_white", colorway=_COLORS, height=420, **axes
    )
    return figure


def _thinned(values: NDArray[Any]) -> NDArray[np.int64]:
    """Places of at most `_POINTS` values, evenly spread, with the last one."""
    return np.unique(np.linspace(0, values.size - 1, min(values.size, _POINTS)).astype(np.int64))


def _over_time(titles: Sequence[str], results: Sequence[Result]) -> list[Any]:
    """Requests running and waiting, and the share of the reserved slots that holds tokens."""
    running = _figure("Requests running", "seconds", "requests")
    waiting = _figure("Requests waiting", "seconds", "requests")
    held = _figure(
        "Reserved slots that hold a token", "seconds", "share", yaxis_tickformat=".0%", yaxis_range=[0, 1.02]
    )
    for name, result in zip(titles, results, strict=True):
        series = result.series
        at = _thinned(series["seconds"]) if series["seconds"].size else np.zeros(0, np.int64)
        seconds = series["seconds"][at]
        slots = np.maximum(series["used_slots"][at], 1)
        running.add_scatter(x=seconds, y=series["running"][at], name=name, mode="lines")
        waiting.add_scatter(x=seconds, y=series["waiting"][at], name=name, mode="lines")
        held.add_scatter(x=seconds, y=1 - series["empty_slots"][at] / slots, name=name, mode="lines")
    return [running, waiting, held]


def _distributions(titles: Sequence[str], results: Sequence[Result]) -> list[Any]:
    """How large a share of requests had their first token, and of tokens came, within so many seconds."""
    share = {"yaxis_tickformat": ".0%", "xaxis_type": "log"}
    first = _figure("Time to first token", "seconds", "share of requests", **share)
    between = _figure("Time between tokens", "seconds", "share of tokens", **share)
    for name, result in zip(titles, results, strict=True):
        for figure, values in ((first, result.ttft), (between, result.gaps)):
            ordered = np.sort(values)
            at = _thinned(ordered) if ordered.size else np.zeros(0, np.int64)
            figure.add_scatter(x=ordered[at], y=(at + 1) / max(ordered.size, 1), name=name, mode="lines")
    return [first, between]


def _sweep(results: Sequence[Result]) -> list[Any]:
    """Waste and throughput against the page size, where paged runs differ in it."""
    paged = sorted((r for r in results if r.setup["allocator"] == "paged"), key=lambda r: int(r.setup["page_size"]))
    if len({result.setup["page_size"] for result in paged}) < 2:
        return []
    figure = _figure("Page size", "tokens per page", "waste", xaxis_type="log", yaxis_tickformat=".1%")
    sizes = [result.setup["page_size"] for result in paged]
    figure.add_scatter(x=sizes, y=[result.waste for result in paged], name="waste", mode="lines+markers")
    speed = [result.figures()["output_tokens_per_second"] for result in paged]
    figure.add_scatter(x=sizes, y=speed, name="output tokens/s", mode="lines+markers", yaxis="y2")
    figure.update_layout(yaxis2={"overlaying": "y", "side": "right", "title": "output tokens/s", "rangemode": "tozero"})
    figure.update_xaxes(tickvals=sizes)
    return [figure]


def _lengths(trace: Trace) -> Any:
    """The trace's own prompts and answers."""
    figure = _figure("Lengths in the trace", "tokens", "share of requests", xaxis_type="log", yaxis_tickformat=".0%")
    for name, values in (("prompts", trace.prompt), ("answers", trace.output)):
        ordered = np.sort(values)
        at = _thinned(ordered)
        figure.add_scatter(x=ordered[at], y=(at + 1) / ordered.size, name=name, mode="lines")
    return figure
