"""What the server shows, and to whom; and the commands that look at it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_support import Served, serving

from pagedkv.serve.app import ServeOptions

PAGEDKV = str(Path(sys.executable).parent / "pagedkv")


def figures(served: Served, path: str = "/metrics") -> dict[str, float]:
    with served.http() as http:
        answer = http.get(path)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f"/{value}" for key, value in sample.labels.items() if key != "model_name"): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def complete(served: Served, prompt: str, tokens: int = 2) -> None:
    with served.http() as http:
        assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens}).status_code == 200


def test_metrics_count_what_was_served() -> None:
    with serving() as served:
        assert figures(served)["pagedkv_generated_tokens_total"] == 0  # warming up is counted nowhere
        for _ in range(2):
            complete(served, "x" * 40)
        with served.http() as http:
            assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        found = figures(served, "/v1/metrics")
        assert (found["pagedkv_prefix_query_tokens_total"], found["pagedkv_prefix_hit_tokens_total"]) == (80, 32)
        assert found["pagedkv_time_to_first_token_seconds_count"] == 2
        assert found["pagedkv_http_responses_total/400"] == 1
        assert found["vllm:prefix_cache_hits_total"] == 32
        assert found["pagedkv_engine_up"] == 1
        with served.http() as http:
            (iteration,) = http.get("/v1/iteration-stats").json()
            assert iteration["kvCacheStats"]["maxNumBlocks"] == 64
            assert http.get("/v1/pool/pages/0").status_code == 400
            assert http.get("/ui/../app.py").status_code == 404
            assert http.get("/ui/nothing.js").status_code == 404


def test_metrics_say_that_the_engine_is_away() -> None:
    with serving() as served:
        process = served.client._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while (found := figures(served))["pagedkv_engine_up"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert "pagedkv_pool_pages/used" not in found
        end = time.monotonic() + 60
        while not figures(served)["pagedkv_engine_up"]:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert figures(served)["pagedkv_engine_restarts"] == 1


def test_the_snapshot_of_kv_events_needs_kv_events() -> None:
    with serving() as served, served.http() as http:
        answer = http.get("/v1/kv-events/snapshot")
        assert answer.status_code == 400
        assert "--kv-events-config turns them on" in answer.json()["error"]["message"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with serving(ServeOptions(kv_events={"endpoint": endpoint})) as served, served.http() as http:
        complete(served, "x" * 40)
        snapshot = http.get("/v1/kv-events/snapshot").json()
        assert snapshot["events"][0]["token_ids"] == [ord("x")] * 32


def test_top_prints_once_where_there_is_no_terminal() -> None:
    with serving(step_seconds=0.02) as served:
        complete(served, "x" * 40)
        done = subprocess.run([PAGEDKV, "top", served.url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for part in ("live", "64 pages of 16 tokens", "cached 2", "running 0"):
            assert part in done.stdout


def test_top_says_why_it_shows_nothing() -> None:
    with serving(ServeOptions(admin_key="root")) as served:
        refused = subprocess.run([PAGEDKV, "top", served.url], capture_output=True, text=True, timeout=60)
        assert (refused.returncode, refused.stderr) == (
            1,
            "error: this needs the admin key: Authorization: Bearer KEY\n",
        )
        environment = {**os.environ, "PAGEDKV_ADMIN_KEY": "root"}
        allowed = subprocess.run([PAGEDKV, "top", served.url], capture_output=True, env=environment, timeout=60)
        assert allowed.returncode == 0
    gone = subprocess.run([PAGEDKV, "top", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60)
    assert gone.returncode == 1
    assert gone.stderr.startswith("error: http://127.0.0.1:9 does not answer")


def test_a_record_is_kept_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.pkv"
    for name in ("a.pkv", "a-2.pkv"):
        with serving(ServeOptions(record=path)) as served, served.http() as http:
            answer = http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 2}).json()
        command = [PAGEDKV, "explain", str(tmp_path / name), "--request", answer["id"]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "ended by length with 2 tokens" in done.stdout, done.stderr


@pytest.mark.model
def test_a_record_that_cannot_be_written_is_said_before_serving(tmp_path: Path) -> None:
    command = [PAGEDKV, "serve", "--record", str(tmp_path / "no" / "a.pkv"), "--max-seq-len", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "a.pkv: No such file or directory" in done.stderr


@pytest.mark.parametrize("settings", ["{", json.dumps({"endpont": "tcp://*:1"})])
def test_wrong_settings_of_kv_events_are_said_at_once(settings: str) -> None:
    done = subprocess.run(
        [PAGEDKV, "serve", "--kv-events-config", settings], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: kv_events_config: ")
