"""Measuring an engine, and running a trace on it: with a tiny model, and the embedded one against the simulator."""

from __future__ import annotations

import fake_model
import pytest
from benchmarks.prediction import TOLERANCE, predict

from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.errors import ConfigError
from pagedkv.plan.measure import measure, run_trace
from pagedkv.plan.synthetic import Synthetic, make_trace


def engine_of(max_seq_len: int = 96) -> Engine:
    cache = {"max_tokens": 64 * 16}
    return Engine(
        fake_model.FakeModel(), EngineConfig(max_seq_len=max_seq_len, max_batch_size=4, kv_cache_config=cache)
    )


def test_steps_are_measured_and_the_engine_is_left_empty() -> None:
    engine = engine_of()
    profile = measure(engine, repeats=1)
    assert len(profile.steps) >= 6
    assert all(step.seconds > 0 for step in profile.steps)
    assert profile.bandwidth > 1e8
    assert (profile.max_seq_len, engine.manager.usage().used) == (96, 0)
    assert profile.token_bytes * 16 * (engine.store.num_pages + 1) == engine.store.nbytes


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="repeats is 0; it must be at least 1"):
        measure(engine_of(), repeats=0)
    with pytest.raises(ConfigError, match="a max_seq_len of 40 are too small"):
        measure(engine_of(max_seq_len=40))


def test_a_trace_runs_in_real_time() -> None:
    trace = make_trace(Synthetic(6, rate=20, prompt="uniform:3:30", output="uniform:1:9"))
    run = run_trace(engine_of(), trace)
    assert [len(tokens) for tokens in run.outputs] == trace.output.tolist()
    assert run.output_tokens == trace.output.sum()
    assert run.seconds >= trace.arrival[-1]
    assert (run.ttft > 0).all()
    assert 1 <= run.most_running <= 4


@pytest.mark.slow
@pytest.mark.model
def test_prediction_of_a_real_run() -> None:
    """Throughput and p95 time to first token of the embedded model, on this machine as it is now."""
    for name, found in predict().items():
        assert abs(found.off) <= TOLERANCE, (name, found)
