"""Rules and dashboard: what they name exists, what is committed is what is described, and a real Prometheus fires."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from monitor_support import finish, greedy, watched
from test_figures_agree import samples

from pagedkv.monitor.alerts import ALERTS, PANELS, dashboard_text, rules, rules_text
from pagedkv.monitor.metrics import metrics_text

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERVE_TESTS = Path(__file__).resolve().parents[1] / "serve"
HTTP_SIDE = {"pagedkv_engine_up", "pagedkv_http_responses_total"}


def expressions() -> list[str]:
    alerts = [rule["expr"] for rule in rules()["groups"][0]["rules"]]
    return alerts + [query for panel in PANELS for query in panel.queries.values()]


def test_every_metric_that_is_named_exists() -> None:
    engine, monitor, _ = watched()
    engine.add_request("abc", greedy(2))
    finish(engine)
    known = {name for name, _ in samples(metrics_text(monitor))} | HTTP_SIDE
    for expression in expressions():
        for name in re.findall(r"\bpagedkv_\w+", expression):
            assert name in known, f"{expression}: no metric {name}"


def test_the_files_are_what_is_described() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    assert (DEPLOY / "prometheus-rules.yaml").read_text() == rules_text()
    assert (DEPLOY / "grafana-dashboard.json").read_text() == dashboard_text()
    titles = {panel["title"] for panel in json.loads(dashboard_text())["panels"]}
    assert titles == {panel.title for panel in PANELS}


def test_prometheus_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        ["promtool", "check", "rules", str(DEPLOY / "prometheus-rules.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SERVE_TESTS))
    monkeypatch.setenv("PYTHONPATH", str(SERVE_TESTS))
    from serve_support import serving

    with serving(pages=32, step_seconds=0.1, max_seq_len=512) as server:
        yield server


@pytest.fixture
def prometheus(tmp_path: Path, served: Any) -> Iterator[httpx.Client]:
    """A real one that scrapes the server every second, with rules that are quick to hold."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules(scale=0.02)))
    scrape = {"job_name": "pagedkv", "static_configs": [{"targets": [f"127.0.0.1:{served.port}"]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = served.port + 1
    arguments = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen(
        ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.PIPE
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            wait_for(lambda: ready(http), "Prometheus to be ready")
            yield http
    finally:
        process.terminate()
        print(process.communicate()[1].decode(), file=sys.stderr)


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


def found(http: httpx.Client, query: str) -> list[Any]:
    """What a query finds; an error in it fails the test."""
    answer = http.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def firing(http: httpx.Client) -> set[str]:
    alerts = http.get("/api/v1/alerts").json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def test_an_alert_fires_under_pressure_and_clears_after_it(prometheus: httpx.Client, served: Any) -> None:
    """Every rule and every query of the dashboard is evaluated without an error, too."""

    relief = threading.Event()

    def ask() -> None:
        while not relief.is_set():  # 30 of 32 pages from the first step on, for four seconds each time
            body = {"prompt": "x" * 470, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    wait_for(lambda: found(prometheus, "pagedkv_engine_up"), "a scrape")
    assert "PagedKVPoolNearlyFull" not in firing(prometheus)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait_for(lambda: "PagedKVPoolNearlyFull" in firing(prometheus), "the alert to fire")
    finally:
        relief.set()
        asking.join()
    wait_for(lambda: "PagedKVPoolNearlyFull" not in firing(prometheus), "the alert to clear")
    for rule in prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]:
        assert (rule["health"], rule.get("lastError")) == ("ok", None), rule
    for panel in PANELS:
        for query in panel.queries.values():
            assert found(prometheus, query), f"{query} finds nothing"
