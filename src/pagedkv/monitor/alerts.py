"""Alerts and a dashboard, described once: Prometheus's rules and Grafana's dashboard are written from it.

    python -m pagedkv.monitor.alerts deploy      # prometheus-rules.yaml, grafana-dashboard.json

The dashboard needs grafana-foundation-sdk.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

WAITING = "sum without (reason) (pagedkv_requests_waiting)"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    Attributes:
        condition: in PromQL; {window} stands for the seconds that rates look back.
        window, hold: seconds that rates look back, and for which the condition must hold.
        summary: what an operator reads first. action: what helps.
    """

    name: str
    condition: str
    window: int
    hold: int
    severity: str
    summary: str
    action: str


ALERTS = (
    Alert(
        "PagedKVPoolNearlyFull",
        'pagedkv_pool_utilization_ratio{{state="used"}} > 0.9',
        0,
        120,
        "warning",
        "{{ $value | humanizePercentage }} of the pages are in use",
        "requests will wait or be preempted: give the pool more pages (POST /v1/pool/resize), or take fewer requests",
    ),
    Alert(
        "PagedKVPreemptions",
        "rate(pagedkv_preemptions_total[{window}s]) > 0.2",
        300,
        120,
        "warning",
        "{{ $value | humanize }} requests per second lose their pages and begin anew",
        "lower max_batch_size, raise the watermark, or use GUARANTEED_NO_EVICT",
    ),
    Alert(
        "PagedKVQueueGrowing",
        f"deriv(({WAITING})[{{window}}s:{{step}}s]) > 0 and {WAITING} > 10",
        300,
        120,
        "warning",
        "the queue grows by {{ $value | humanize }} requests per second",
        "more comes in than is served: add a replica; pagedkv_requests_waiting says what is waited for",
    ),
    Alert(
        "PagedKVLowHitRate",
        "rate(pagedkv_prefix_hit_tokens_total[{window}s]) / rate(pagedkv_prefix_query_tokens_total[{window}s]) < 0.05 "
        "and rate(pagedkv_prefix_query_tokens_total[{window}s]) > 100",
        900,
        900,
        "info",
        "only {{ $value | humanizePercentage }} of the prompt tokens are found in the cache",
        "pagedkv_prefix_miss_tokens_total says why; where it is evictions, a larger pool helps",
    ),
    Alert(
        "PagedKVFragmentation",
        'pagedkv_fragmentation_ratio > 0.5 and on() pagedkv_pool_utilization_ratio{{state="used"}} > 0.5',
        0,
        300,
        "info",
        "{{ $value | humanizePercentage }} of the slots in used pages hold no token",
        "answers are short for the size of a page: use smaller pages (--page-size 16)",
    ),
    Alert(
        "PagedKVEvictionsRegretted",
        'rate(pagedkv_eviction_regret_seconds_bucket{{le="60.0"}}[{window}s]) > 1',
        600,
        300,
        "info",
        "{{ $value | humanize }} pages per second are wanted again within a minute of their eviction",
        "the pool is too small for what is asked again: give it more pages",
    ),
    Alert(
        "PagedKVEngineDown",
        "pagedkv_engine_up == 0",
        0,
        30,
        "critical",
        "the engine's process does not serve",
        "it is restarted by itself; its standard error says why it ended",
    ),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: queries by what they are called, all of one unit (Grafana's name of it)."""

    title: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def _quantiles(metric: str) -> dict[str, str]:
    return {
        f"p{100 * q:g}": f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[5m])))" for q in (0.5, 0.95, 0.99)
    }


PANELS = (
    Panel("Pages", "short", {"{{state}}": "pagedkv_pool_pages"}, stacked=True),
    Panel("Utilisation", "percentunit", {"{{state}}": "pagedkv_pool_utilization_ratio"}),
    Panel(
        "Pages per second",
        "short",
        {
            "allocated": "rate(pagedkv_page_allocations_total[1m])",
            "evicted": "rate(pagedkv_page_evictions_total[1m])",
            "copied": "rate(pagedkv_page_copies_total[1m])",
        },
    ),
    Panel("Requests", "short", {"running": "pagedkv_requests_running", "waiting": WAITING}),
    Panel("Waiting, by reason", "short", {"{{reason}}": "pagedkv_requests_waiting"}, stacked=True),
    Panel("Time to the first token", "s", _quantiles("pagedkv_time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("pagedkv_inter_token_latency_seconds")),
    Panel("Time in the queue", "s", _quantiles("pagedkv_queue_time_seconds")),
    Panel(
        "Prompt tokens found in the cache",
        "percentunit",
        {"hits": "rate(pagedkv_prefix_hit_tokens_total[5m]) / rate(pagedkv_prefix_query_tokens_total[5m])"},
    ),
    Panel("Prompt tokens not found, by reason", "short", {"{{reason}}": "rate(pagedkv_prefix_miss_tokens_total[5m])"}),
    Panel("Fragmentation", "percentunit", {"slots without a token": "pagedkv_fragmentation_ratio"}),
    Panel("Saved by sharing", "bytes", {"bytes": "pagedkv_shared_savings_bytes"}),
    Panel("Tokens per second", "short", {"generated": "rate(pagedkv_generated_tokens_total[1m])"}),
    Panel(
        "Lost to preemptions",
        "short",
        {
            "requests per second": "rate(pagedkv_preemptions_total[5m])",
            "tokens per second": "rate(pagedkv_preempted_tokens_total[5m]) - rate(pagedkv_recovered_tokens_total[5m])",
        },
    ),
    Panel("Pages by tenant", "short", {"{{tenant}}, {{state}}": "pagedkv_tenant_pages"}, stacked=True),
    Panel("HTTP answers per second", "short", {"{{status}}": "rate(pagedkv_http_responses_total[1m])"}),
)


def rules(*, scale: float = 1.0) -> dict[str, Any]:
    """Prometheus's rules as a tree; a scale below 1 makes all times shorter, for tests."""
    return {
        "groups": [
            {
                "name": "pagedkv",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": _expression(alert, scale),
                        "for": f"{int(alert.hold * scale)}s",
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.action},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def _expression(alert: Alert, scale: float) -> str:
    window = max(int(alert.window * scale), 5)
    return alert.condition.format(window=window, step=max(window // 20, 1))


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard as a tree."""
    from grafana_foundation_sdk.builders import common, prometheus, timeseries
    from grafana_foundation_sdk.builders import dashboard as grafana
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.common import StackingMode
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    board = grafana.Dashboard("pagedkv").uid("pagedkv").tags(["pagedkv", "llm"]).refresh("10s").time("now-1h", "now")
    board = board.with_variable(grafana.DatasourceVariable("datasource").type("prometheus"))
    for panel in PANELS:
        chart = timeseries.Panel().title(panel.title).unit(panel.unit).span(8).height(8).min(0).datasource(source)
        if panel.stacked:
            chart = chart.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        for number, (name, query) in enumerate(panel.queries.items()):
            target = prometheus.Dataquery().expr(query).legend_format(name).ref_id(chr(ord("A") + number))
            chart = chart.with_target(target)
        board = board.with_panel(chart)
    tree: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(board.build()))
    return tree


def rules_text() -> str:
    """The file of the rules."""
    return f"# Written by python -m pagedkv.monitor.alerts\n{yaml.safe_dump(rules(), sort_keys=False, width=110)}"


def dashboard_text() -> str:
    """The file of the dashboard."""
    return json.dumps(dashboard(), indent=1, sort_keys=True) + "\n"


def main(folder: Path) -> None:
    """Write both files."""
    folder.mkdir(exist_ok=True)
    (folder / "prometheus-rules.yaml").write_text(rules_text(), encoding="utf-8")
    (folder / "grafana-dashboard.json").write_text(dashboard_text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
