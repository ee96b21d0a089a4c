"""Tune: settings that maximise throughput under a latency goal, found by simulating a trace many times.

The search is Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), seeded, and begins with the settings as
they are: what comes out is never worse than those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pagedkv.budget import pages_for_tokens
from pagedkv.config import EngineConfig, KVCacheConfig, SchedulerConfig
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.plan.results import Result
from pagedkv.plan.simulate import Setup, simulate
from pagedkv.plan.steptime import StepTime
from pagedkv.plan.traces import Trace

if TYPE_CHECKING:
    import optuna

_BATCHES = (1, 1024)
_TOKENS = (4, 256)  # in multiples of _UNIT
_UNIT = 32
_PAGE_SIZES = (16, 32, 64, 128)
_WATERMARK = 0.1
_POLICIES = ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")
_IMPOSSIBLE = -1e9


@dataclass(frozen=True, slots=True)
class Goal:
    """What must hold at the 95th percentile, in seconds; and the share of requests that may be refused for length.

    Attributes:
        ttft: time to first token. itl: time between tokens. None for no goal.
    """

    ttft: float | None = None
    itl: float | None = None
    refuse: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"the goal for {name} is {value} s; it must be above 0")
        if not 0 <= self.refuse < 1:
            raise ConfigError(
                f"the share of requests to refuse is {self.refuse}; it must be at least 0 and less than 1"
            )

    def excess(self, result: Result) -> float:
        """How many times the goals are exceeded, at worst; 1 or less where they are met."""
        figures = result.figures()
        pairs = ((self.ttft, figures["ttft_p95"]), (self.itl, figures["itl_p95"]))
        return max((value / goal for goal, value in pairs if goal is not None), default=0.0)

    def score(self, result: Result) -> float:
        """Output tokens per second, a hair more for less time to first token; below 0 where a goal is missed."""
        excess = self.excess(result)
        if excess > 1:
            return -excess
        figures = result.figures()
        return figures["output_tokens_per_second"] + 1e-3 / (1 + figures["ttft_p95"])


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best settings, and the runs before and after.

    Attributes:
        meets: whether the goals are met.
    """

    config: EngineConfig
    before: Result
    after: Result
    meets: bool


def shortest_limit(trace: Trace, refuse: float, most: int) -> int:
    """max_seq_len, a multiple of 16 and at most `most`, that refuses no more than this share of the requests."""
    totals = np.sort(trace.prompt.astype(np.int64) + trace.output)
    needed = int(totals[min(totals.size - 1, max(0, int(np.ceil((1 - refuse) * totals.size)) - 1))])
    return min(pages_for_tokens(needed, 16) * 16, most)


def tune(
    trace: Trace,
    setup: Setup,
    time: StepTime,
    goal: Goal,
    trials: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Tuned:
    """Search for the best settings of a paged pool of this budget; repeatable by its seed.

    Raises:
        ConfigError: Optuna is not installed, or trials is less than 1.
        OutOfMemoryBudgetError: the budget holds no page.
    """
    if trials < 1:
        raise ConfigError(f"trials is {trials}; it must be at least 1")
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError("tuning needs optuna; install it with: pip install 'pagedkv[plan]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    limit = shortest_limit(trace, goal.refuse, setup.config.max_seq_len or int(1e9))
    start = changed(setup, limit, setup.config.model_dump())
    before = simulate(trace, start, time)
    best: tuple[float, Setup, Result] = (goal.score(before), start, before)

    def objective(trial: optuna.Trial) -> float:
        nonlocal best
        candidate = changed(setup, limit, _suggested(trial))
        try:
            result = simulate(trace, candidate, time)
        except OutOfMemoryBudgetError:
            return _IMPOSSIBLE
        score = goal.score(result)
        if score > best[0]:
            best = (score, candidate, result)
        progress(trial.number + 1)
        return score

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    return Tuned(best[1].config, before, best[2], goal.excess(best[2]) <= 1)


def _suggested(trial: optuna.Trial) -> dict[str, Any]:
    """Settings to try."""
    return {
        "max_batch_size": trial.suggest_int("max_batch_size", *_BATCHES, log=True),
        "max_num_tokens": _UNIT * trial.suggest_int("max_num_tokens", *_TOKENS, log=True),
        "kv_cache_config": {"tokens_per_block": trial.suggest_categorical("tokens_per_block", _PAGE_SIZES)},
        "scheduler_config": {
            "watermark": round(trial.suggest_float("watermark", 0.0, _WATERMARK), 3),
            "capacity_scheduler_policy": trial.suggest_categorical("policy", _POLICIES),
        },
    }


def changed(setup: Setup, max_seq_len: int, values: dict[str, Any]) -> Setup:
    """The setup with other settings, on the same budget."""
    old = setup.config
    cache = {**old.kv_cache_config.model_dump(), **values["kv_cache_config"], "max_memory": setup.budget}
    scheduler = {**old.scheduler_config.model_dump(), **values["scheduler_config"]}
    config = old.model_copy(
        update={
            "max_seq_len": max_seq_len,
            "max_batch_size": values["max_batch_size"],
            "max_num_tokens": values["max_num_tokens"],
            "kv_cache_config": KVCacheConfig(**cache),
            "scheduler_config": SchedulerConfig(**scheduler),
        }
    )
    return Setup(
        "paged", setup.budget, setup.token_bytes, config, config.kv_cache_config.page_size, setup.prefix_caching
    )


def config_file(tuned: Tuned, about: str) -> str:
    """The settings as a YAML file, as `pagedkv serve --config` takes it."""
    config, cache = tuned.config, tuned.config.kv_cache_config
    tree = {
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": config.max_seq_len,
        "kv_cache_config": {
            "max_memory": cache.max_memory,
            "tokens_per_block": cache.tokens_per_block,
            "enable_block_reuse": cache.enable_block_reuse,
            "enable_partial_reuse": cache.enable_partial_reuse,
        },
        "scheduler_config": {
            "capacity_scheduler_policy": config.scheduler_config.capacity_scheduler_policy,
            "watermark": config.scheduler_config.watermark,
        },
    }
    return f"# Tuned for {about}.\n" + yaml.safe_dump(tree, sort_keys=False)


def write_config(path: Path, text: str) -> None:
    """Write the settings.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
