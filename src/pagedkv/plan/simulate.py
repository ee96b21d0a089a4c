"""Simulate: a trace through the very scheduler and manager that serve, in simulated time.

Nothing is computed: a step takes as long as a model of time says, and each answer's tokens are those of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import pages_in_bytes
from pagedkv.cache import CacheManager
from pagedkv.config import EngineConfig
from pagedkv.engine.allocators import Allocator, make_manager
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import FinishReason, Request
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.step import Step
from pagedkv.errors import ConfigError, NeverFitsError, QueueFullError
from pagedkv.plan.results import Result, Samples
from pagedkv.plan.steptime import StepTime, Work
from pagedkv.plan.traces import Trace


@dataclass(frozen=True, slots=True)
class Setup:
    """What a trace is run on.

    Attributes:
        allocator: paged; contiguous, which reserves max_seq_len tokens for each request; or growing, contiguous room
            for what there is, moved when it cannot grow.
        budget: bytes for keys and values. token_bytes: what a token takes.
        page_size: tokens per page; the contiguous ones round to it.
        prefix_caching: share the pages of equal prefixes.
        config: the scheduler's settings, with max_seq_len set.
    """

    allocator: Allocator
    budget: int
    token_bytes: int
    config: EngineConfig
    page_size: int = 16
    prefix_caching: bool = True

    @property
    def num_pages(self) -> int:
        """Usable pages; one is the null page.

        Raises:
            OutOfMemoryBudgetError: the budget holds no page, or not one reservation of max_seq_len tokens.
        """
        least = self.longest if self.allocator == "contiguous" else 1
        return pages_in_bytes(self.budget, self.token_bytes * self.page_size, self.page_size, least)

    @property
    def longest(self) -> int:
        """max_seq_len."""
        if self.config.max_seq_len is None:
            raise ConfigError("max_seq_len is not set; a simulation needs it")
        return self.config.max_seq_len

    @property
    def name(self) -> str:
        """In few words, for tables."""
        if self.allocator != "paged":
            return {"contiguous": "contiguous longest", "growing": "contiguous growing"}[self.allocator]
        return f"paged {self.page_size}" + ("" if self.prefix_caching else ", no reuse")

    def manager(self) -> CacheManager:
        """The allocator, empty; raises as `num_pages` and `longest` do."""
        return make_manager(
            self.allocator,
            self.num_pages,
            self.config,
            self.longest,
            page_size=self.page_size,
            prefix_caching=self.prefix_caching,
        )


class _Times(NamedTuple):
    """By request, seconds after the beginning; NaN where it has not come to that."""

    admitted: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]


class Simulation:
    """One trace on one setup, step by step.

    Attributes:
        now: simulated seconds since the first arrival.
        done: requests that have ended or were refused.
    """

    def __init__(self, trace: Trace, setup: Setup, time: StepTime) -> None:
        self.trace = trace
        self.setup = setup
        self.time = time
        self.manager = setup.manager()
        self.scheduler = Scheduler(self.manager, setup.config)
        self.now = 0.0
        self.done = 0
        self._next = 0
        count = len(trace)
        self._answers: dict[Request, list[int]] = {}
        self._times = _Times(*(np.full(count, np.nan) for _ in range(3)))
        self._gaps = np.zeros(int(trace.output.sum()), np.float32)
        self._gap_count = 0
        self._refused = {"too long": 0, "queue full": 0}
        self._preempted = np.zeros(count, np.int32)
        self._cached = np.zeros(count, np.int64)
        self._samples = Samples()
        self._copied_bytes = 0

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Result:
        """Run to the end; `progress` is told how many requests are done, after every step."""
        while self.done < len(self.trace):
            self.step()
            progress(self.done)
        return self.result()

    def step(self) -> None:
        """Submit what has arrived, and compute one step; if nothing can run, wait for the next arrival."""
        self._submit()
        scheduler = self.scheduler
        if not scheduler.running and not len(scheduler.waiting):
            if self._next < len(self.trace):
                self.now = float(self.trace.arrival[self._next])
            return
        step = scheduler.schedule()
        copied = len(step.copies) * self.setup.page_size * self.setup.token_bytes
        self._copied_bytes += copied
        for request in step.requests:
            if not request.sampled and np.isnan(self._times.admitted[request.index]):
                self._times.admitted[request.index] = self.now
        self.now += self.time.seconds(Work(step.starts, step.counts, copied))
        scheduler.commit(step)
        self._sample(step)
        self._samples.add(self.now, len(scheduler.running), len(scheduler.waiting), self.manager.usage())

    def _submit(self) -> None:
        """Queue the requests that have arrived by now."""
        trace = self.trace
        while self._next < len(trace) and trace.arrival[self._next] <= self.now:
            index = self._next
            self._next += 1
            params = SamplingParams(max_tokens=int(trace.output[index]))
            request = Request(f"r{index}", trace.prompt_tokens(index), params, index=index)
            try:
                self.scheduler.submit(request)
            except NeverFitsError:
                self._refused["too long"] += 1
                self.done += 1
            except QueueFullError:
                self._refused["queue full"] += 1
                self.done += 1

    def _sample(self, step: Step) -> None:
        """Give every request that has computed all it knows its next token; end those that have their last one."""
        now, (_, first, last), answers = self.now, self._times, self._answers
        ended = []
        for request, samples in zip(step.requests, step.samples.tolist(), strict=True):
            if not samples:
                continue
            at, sampled = request.index, request.sampled
            if sampled:
                self._gaps[self._gap_count] = now - last[at]
                self._gap_count += 1
            else:
                first[at] = now
                answers[request] = self.trace.answer_tokens(at)
            last[at] = now
            answer = answers[request]
            sampled.append(answer[len(sampled)])
            if len(sampled) == len(answer):
                ended.append(request)
        for request in ended:
            del answers[request]
            self._preempted[request.index] = request.preemptions
            self._cached[request.index] = request.cached_tokens or 0
            self.scheduler.finish(request, FinishReason.LENGTH)
        self.done += len(ended)

    def result(self) -> Result:
        """What the run has come to."""
        return Result(
            name=self.setup.name,
            setup={
                "allocator": self.setup.allocator,
                "page_size": self.setup.page_size,
                "prefix_caching": self.setup.prefix_caching,
                "budget_bytes": self.setup.budget,
                "num_pages": self.setup.num_pages,
                "max_batch_size": self.setup.config.max_batch_size,
                "max_num_tokens": self.setup.config.max_num_tokens,
                "max_seq_len": self.setup.config.max_seq_len,
                "policy": self.setup.config.scheduler_config.capacity_scheduler_policy,
                "watermark": self.setup.config.scheduler_config.watermark,
            },
            arrival=self.trace.arrival,
            prompt=self.trace.prompt,
            output=self.trace.output,
            admitted=self._times.admitted,
            first=self._times.first,
            last=self._times.last,
            cached=self._cached,
            preempted=self._preempted,
            gaps=self._gaps[: self._gap_count],
            refused=dict(self._refused),
            series=self._samples.arrays(),
            seconds=self.now,
            preemptions=self.scheduler.preemptions,
            copied_bytes=self._copied_bytes,
        )


def simulate(trace: Trace, setup: Setup, time: StepTime, progress: Callable[[int], None] = lambda done: None) -> Result:
    """Run a trace on a setup.

    Raises:
        OutOfMemoryBudgetError: the budget holds no page, or not one reservation.
    """
    return Simulation(trace, setup, time).run(progress)
