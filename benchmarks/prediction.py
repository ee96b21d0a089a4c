"""Does the simulator foretell the real engine? The same trace on the embedded model, run and simulated.

The machine is measured as `pagedkv profile` does it, and the trace run in real time, in turns; then it is simulated
with what was measured. Both use the same scheduler on the same allocator; what is compared is the model of time.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.models.load import load_model
from pagedkv.plan.measure import measure, run_trace
from pagedkv.plan.profiles import fit
from pagedkv.plan.simulate import Setup, simulate
from pagedkv.plan.steptime import Fitted
from pagedkv.plan.synthetic import Synthetic, make_trace

TOLERANCE = 0.15
CONFIG = {"max_seq_len": 1024, "max_batch_size": 32, "kv_cache_config": {"max_memory": "128MiB"}}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure of the real run, and the same of the simulated one."""

    real: float
    simulated: float

    @property
    def off(self) -> float:
        """simulated / real - 1."""
        return self.simulated / self.real - 1


def predict(requests: int = 100, rate: float = 30.0, rounds: int = 3) -> dict[str, Prediction]:
    """Measure and run in turns, and simulate: output tokens/s, and the 95th percentile of the time to first token.

    A shared machine is faster in one minute than in the next, so all rounds are fitted together, and the real run is
    the median of as many. Requests come faster than they are served: near capacity, waiting is the small difference of
    two large times, and a few per cent of speed become half of it; far below, stalls that no model of medians has
    make the tail.
    """
    trace = make_trace(
        Synthetic(requests, rate=rate, prompt="uniform:20:400", output="uniform:5:80", groups=4, prefix=64)
    )
    config = EngineConfig(**CONFIG)
    model = load_model()
    profiles, runs = [], []
    for _ in range(rounds):
        profiles.append(measure(Engine(model, config), repeats=1))
        engine = Engine(model, config)
        engine.warm_up()
        runs.append(run_trace(engine, trace))
    coefficients, _ = fit([step for profile in profiles for step in profile.steps], profiles[0].bandwidth)
    size = profiles[0].token_bytes
    setup = Setup("paged", (engine.store.num_pages + 1) * 16 * size, size, config)
    figures = simulate(trace, setup, Fitted(coefficients)).figures()
    speed = statistics.median(run.tokens_per_second for run in runs)
    p95 = statistics.median(float(np.percentile(run.ttft, 95)) for run in runs)
    return {
        "output tokens/s": Prediction(speed, figures["output_tokens_per_second"]),
        "p95 time to first token, s": Prediction(p95, figures["ttft_p95"]),
    }


def run() -> list[Row]:
    """Both figures; the ratio is simulated to real, or its inverse if that is below 1."""
    rows = []
    for name, found in predict().items():
        nearer = min(found.real / found.simulated, found.simulated / found.real)
        target = 1 / (1 + TOLERANCE)
        rows.append(Row(name, found.simulated, found.real, "real engine", "", nearer, target, nearer >= target))
    return rows
