"""Does the simulator foretell the real engine? The same trace on the embedded model, run and simulated.

The machine is measured first (as `pagedkv profile` does), then the trace is run in real time and simulated with what
was measured. Both use the same scheduler on the same allocator; what is compared is the model of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.models.load import load_model
from pagedkv.plan.measure import measure, run_trace
from pagedkv.plan.simulate import Setup, simulate
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


def predict(requests: int = 100, rate: float = 8.0, repeats: int = 2) -> dict[str, Prediction]:
    """Measure, run and simulate; throughput in output tokens/s and the 95th percentile of the time to first token."""
    trace = make_trace(
        Synthetic(requests, rate=rate, prompt="uniform:20:400", output="uniform:5:80", groups=4, prefix=64)
    )
    config = EngineConfig(**CONFIG)
    engine = Engine(load_model(), config)
    profile = measure(engine, repeats)
    engine = Engine(engine.model, config)
    engine.warm_up()
    real = run_trace(engine, trace)
    setup = Setup("paged", (engine.store.num_pages + 1) * 16 * profile.token_bytes, profile.token_bytes, config)
    foretold = simulate(trace, setup, profile.time)
    p95 = float(np.percentile(real.ttft, 95))
    figures = foretold.figures()
    return {
        "output tokens/s": Prediction(real.tokens_per_second, figures["output_tokens_per_second"]),
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
