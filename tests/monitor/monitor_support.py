"""What tests of the monitor share: an engine without a model, watched by a clock that tests move."""

from __future__ import annotations

from fake_model import FakeModel

from pagedkv.config import EngineConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.monitor.monitor import Monitor


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(
    pages: int = 8, *, max_seq_len: int = 96, partial_reuse: bool = False, **settings
) -> tuple[Engine, Monitor, Clock]:
    """An engine and its monitor."""
    cache = {"max_tokens": pages * 16, "enable_partial_reuse": partial_reuse}
    config = EngineConfig(max_seq_len=max_seq_len, kv_cache_config=cache, **settings)
    engine, clock = Engine(FakeModel(), config), Clock()
    engine.watch.observer = monitor = Monitor(engine, clock)
    return engine, monitor, clock


def greedy(tokens: int = 4, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def finish(engine: Engine, clock: Clock | None = None, seconds: float = 0.0) -> None:
    """Step until nothing is left; each step takes so long by the clock."""
    while engine.has_unfinished:
        if clock is not None:
            clock.now += seconds
        engine.step()
    assert engine.watch.observer is not None, "the monitor has failed"
