"""Measure: how long an engine's steps take on this machine, and how it really fares on a trace."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.step import Step
from pagedkv.errors import ConfigError
from pagedkv.plan.profiles import Measured, Profile, fit
from pagedkv.plan.steptime import Work, features
from pagedkv.plan.traces import Trace

_READ_BYTES = 256 * 1024**2
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (24, 100, 250, 500, 1000)
_DECODES = 10  # steps of decoding after each prefill


class StepClock:
    """An engine's observer that keeps the work and the seconds of every step."""

    def __init__(self) -> None:
        self.steps: list[Measured] = []
        self._work: Work | None = None

    def queued(self, request: object) -> None:
        """A request has come."""

    def scheduled(self, step: Step) -> None:
        """A step has been chosen."""
        self._work = Work(step.starts.copy(), step.counts.copy())

    def stepped(self, step: Step) -> None:
        """It has been computed."""

    def ended(self, request: object) -> None:
        """A request has ended."""

    def step(self, engine: Engine) -> None:
        """Let the engine take a step, and keep it unless it was empty."""
        begin = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin
        if self._work is not None and self._work.counts.size:
            self.steps.append(Measured(tuple(map(float, features(self._work))), seconds))


def read_bandwidth() -> float:
    """Bytes per second of a plain read of memory that no cache holds, at best of five."""
    data = np.ones(_READ_BYTES // 8)
    best = min(_timed(data.sum) for _ in range(5))
    return _READ_BYTES / best


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(engine: Engine, repeats: int = 3, progress: Callable[[float], None] = lambda share: None) -> Profile:
    """Step times of an engine, from batches of 1 to 64 requests with up to 1000 tokens in context.

    Every batch is run `repeats` times; equal steps count once, with their median.

    Raises:
        ConfigError: the pool or the batch is too small for any of them, or repeats is less than 1.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; it must be at least 1")
    runs = [(batch, context) for batch, context in _grid(engine) for _ in range(repeats)]
    if not runs:
        raise ConfigError(
            f"a pool of {engine.manager.num_pages} pages and a max_seq_len of {engine.manager.max_seq_len} are too "
            f"small to measure in: the smallest batch has {_CONTEXTS[0] + _DECODES} tokens, and a page to spare"
        )
    engine.warm_up()
    clock = StepClock()
    engine.watch.observer = clock
    for number, (batch, context) in enumerate(runs):
        _run_batch(engine, clock, batch, context, number)
        progress((number + 1) / len(runs))
    engine.watch.observer = None
    by_amounts: dict[tuple[float, ...], list[float]] = {}
    for amounts, seconds in clock.steps:
        by_amounts.setdefault(amounts, []).append(seconds)
    steps = tuple(Measured(amounts, statistics.median(seconds)) for amounts, seconds in by_amounts.items())
    bandwidth = read_bandwidth()
    coefficients, error = fit(steps, bandwidth)
    store = engine.store
    return Profile(
        model=engine.model.name,
        machine=f"{platform.node() or 'this machine'}, {platform.processor() or platform.machine()}",
        token_bytes=store.nbytes // (store.num_pages + 1) // store.page_size,
        max_seq_len=engine.manager.max_seq_len,
        bandwidth=bandwidth,
        steps=steps,
        coefficients=coefficients,
        error=error,
    )


def _grid(engine: Engine) -> Iterator[tuple[int, int]]:
    """Batches and contexts that fit without anybody waiting."""
    room = engine.manager.num_pages * engine.manager.page_size * 0.9
    for batch in _BATCHES:
        for context in _CONTEXTS:
            tokens = context + _DECODES + engine.manager.page_size
            fits = tokens <= engine.manager.max_seq_len and batch * tokens <= min(room, 16_000)
            if fits and batch <= engine.config.max_batch_size:
                yield batch, context


def _run_batch(engine: Engine, clock: StepClock, batch: int, context: int, seed: int) -> None:
    """Prefill `batch` prompts that share nothing, and decode a few tokens of each."""
    random = np.random.default_rng(seed)
    for prompt in random.integers(0, engine.model.spec.vocab_size, (batch, context)):
        engine.add_request(prompt.tolist(), _greedy(_DECODES))
    while engine.has_unfinished:
        clock.step(engine)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class RealRun:
    """What an engine made of a trace.

    Attributes:
        ttft: float64 [n], seconds from a request's arrival in the trace to its first token.
        seconds: of the whole run. output_tokens: sampled. most_running: requests at once.
        outputs: the token ids of each answer.
    """

    ttft: NDArray[np.float64]
    seconds: float
    output_tokens: int
    most_running: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


def run_trace(engine: Engine, trace: Trace) -> RealRun:
    """Run a trace on an engine in real time: each request is submitted when its time has come."""
    first = np.full(len(trace), np.nan)
    outputs: list[tuple[int, ...]] = [()] * len(trace)
    index_of: dict[str, int] = {}
    submitted = tokens = most = 0
    begin = time.perf_counter()
    while submitted < len(trace) or engine.has_unfinished:
        now = time.perf_counter() - begin
        while submitted < len(trace) and trace.arrival[submitted] <= now:
            prompt = trace.prompt_tokens(submitted) % engine.model.spec.vocab_size
            name = engine.add_request(prompt.tolist(), _greedy(int(trace.output[submitted])))
            index_of[name] = submitted
            submitted += 1
        if not engine.has_unfinished:
            time.sleep(max(0.0, trace.arrival[submitted] - now))
            continue
        for piece in engine.step():
            index = index_of[piece.request_id]
            tokens += len(piece.token_ids)
            if np.isnan(first[index]) and piece.token_ids:
                first[index] = time.perf_counter() - begin
            if piece.result is not None:
                outputs[index] = tuple(piece.result.outputs[0].token_ids)
        most = max(most, len(engine.scheduler.running))
    return RealRun(first - trace.arrival, time.perf_counter() - begin, tokens, most, tuple(outputs))
