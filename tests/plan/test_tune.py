"""Tuning: better than before or the same, within the goal, repeatable, and written as a file that `serve` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plan_command import run
from test_simulate import setup_of, trace_of

from pagedkv.config import EngineConfig
from pagedkv.errors import ConfigError
from pagedkv.plan.steptime import Fitted
from pagedkv.plan.synthetic import Synthetic, make_trace
from pagedkv.plan.tune import Goal, shortest_limit, tune

TRACE = make_trace(Synthetic(60, rate=20, prompt="uniform:4:60", output="uniform:2:20"))
TIME = Fitted((0.01, 1e-4, 1e-4, 1e-6, 0, 0))


def start() -> object:
    return setup_of(200, max_seq_len=96, max_batch_size=1, page_size=16)


def test_one_request_at_a_time_is_improved_upon() -> None:
    tuned = tune(TRACE, start(), TIME, Goal(), trials=10)
    before, after = tuned.before.figures(), tuned.after.figures()
    assert after["output_tokens_per_second"] > 2 * before["output_tokens_per_second"]
    assert tuned.config.max_batch_size > 1
    assert tuned.meets


def test_a_goal_goes_before_throughput() -> None:
    free = tune(TRACE, start(), TIME, Goal(), trials=15).after.figures()["itl_p95"]
    bound = free * 0.8
    tuned = tune(TRACE, start(), TIME, Goal(itl=bound), trials=15)
    assert tuned.meets
    assert tuned.after.figures()["itl_p95"] <= bound


def test_an_unreachable_goal_is_said_to_be_missed() -> None:
    assert not tune(TRACE, start(), TIME, Goal(ttft=1e-6), trials=2).meets


def test_the_same_seed_finds_the_same_settings() -> None:
    one, two = (tune(TRACE, start(), TIME, Goal(), trials=5, seed=3).config for _ in range(2))
    assert one == two


def test_the_limit_of_length_refuses_no_more_than_it_may() -> None:
    trace = trace_of(*[(0.0, 10 * n, 1) for n in range(1, 11)])  # 11, 21, ... 101 tokens
    assert [shortest_limit(trace, share, 10**6) for share in (0.0, 0.1, 0.25)] == [112, 96, 96]
    assert shortest_limit(trace, 0.0, 64) == 64


@pytest.mark.parametrize(("values", "message"), [({"ttft": 0}, "above 0"), ({"refuse": 1}, "less than 1")])
def test_a_wrong_goal_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Goal(**values)


def test_no_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="trials is 0"):
        tune(TRACE, start(), TIME, Goal(), trials=0)


def test_the_command_writes_what_the_server_reads(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    trace = "synthetic:requests=40,rate=50,prompt=uniform:8:100,output=uniform:1:20"
    code, out, err = run(f"tune {trace} --trials 3 --kv-memory 200MiB --ttft 5 --output {path}")
    assert code == 0, err
    config = EngineConfig.load(path)
    assert config.kv_cache_config.max_memory == 200 * 1024**2
    assert f"max_batch_size: {config.max_batch_size}" in out
    assert config.kv_cache_config.enable_block_reuse
    code, _, err = run(f"tune {trace} --trials 1 --ttft 1e-9")
    assert code == 1
    assert "no settings tried meet the goal" in err
