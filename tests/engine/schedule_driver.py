"""Drives a Scheduler without a model: the next token is a function of the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedkv.cache import CacheManager, KVCacheManager, check
from pagedkv.config import EngineConfig, SchedulerConfig
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import FinishReason, Request, Status
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.step import Step

MAX_STEPS = 2000


def next_token(known: Sequence[int]) -> int:
    """What the pretended model says after these tokens."""
    return (31 * sum(known) + len(known)) % 97


class Driver:
    """A scheduler over a tiny pool, audited after every step."""

    def __init__(
        self,
        pages: int,
        page_size: int = 4,
        *,
        max_seq_len: int = 1000,
        manager: CacheManager | None = None,
        scheduler: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        config = EngineConfig(scheduler_config=SchedulerConfig(**{"watermark": 0.0, **(scheduler or {})}), **settings)
        self.manager = manager or KVCacheManager(
            pages, page_size, max_rows=config.max_batch_size, max_seq_len=max_seq_len
        )
        self.scheduler = Scheduler(self.manager, config)
        self.written: dict[int, dict[int, int]] = {}  # page -> offset -> token whose KV was written there

    def request(
        self,
        name: str,
        prompt: Sequence[int] | int,
        max_tokens: int = 4,
        priority: int = 0,
        namespace: str | None = None,
    ) -> Request:
        """A request whose prompt is given, or made of so many tokens that no other request has."""
        if isinstance(prompt, int):
            base = 1000 * (1 + sum(map(ord, name)))
            prompt = list(range(base, base + prompt))
        return Request(name, np.array(prompt, np.int32), SamplingParams(max_tokens=max_tokens), namespace, priority)

    def submit(self, *args: Any, **options: Any) -> Request:
        """Make and queue a request; arguments as for `request`."""
        request = self.request(*args, **options)
        self.scheduler.submit(request)
        return request

    def step(self) -> Step:
        """One step: compute, commit, sample, finish; every invariant is checked."""
        step = self.scheduler.schedule()
        assert step.counts.sum() <= self.scheduler.config.max_num_tokens
        assert len(self.scheduler.running) <= self.scheduler.config.max_batch_size
        assert all(request.status is Status.RUNNING for request in step.requests)
        assert len(set(map(id, step.requests))) == len(step.requests)
        self._compute(step)
        self.scheduler.commit(step)
        for request, samples in zip(step.requests, step.samples.tolist(), strict=True):
            if samples:
                request.sampled.append(next_token(request.known().tolist()))
                if len(request.sampled) == request.params.max_tokens:
                    self.scheduler.finish(request, FinishReason.LENGTH)
        if isinstance(self.manager, KVCacheManager):
            check(self.manager)
        return step

    def run(self) -> int:
        """Step until nothing is left; returns the number of steps."""
        steps = 0
        while self.scheduler.running or len(self.scheduler.waiting):
            self.step()
            steps += 1
            assert steps < MAX_STEPS, "no progress"
        return steps

    def _compute(self, step: Step) -> None:
        """Copy pages, write each token's KV to its slot, and read back what attention sees: just the tokens before."""
        table, size = self.manager.table, self.manager.page_size
        held = {target: dict(self.written.get(source, {})) for source, target in step.copies.tolist()}
        assert len(held) == len(step.copies), "a page is the target of two copies"
        self.written.update(held)
        slots = table.slots(step.rows, step.starts, step.counts)
        for slot, token in zip(slots.tolist(), step.tokens.tolist(), strict=True):
            self.written.setdefault(slot // size, {})[slot % size] = token
        for request, row, start, count in zip(
            step.requests, step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        ):
            seen = [self.written[int(table.table[row, i // size])][i % size] for i in range(start + count)]
            assert seen == request.known().tolist()[: start + count]


def expected_output(request: Request) -> list[int]:
    """What the pretended model answers when nothing interferes."""
    known = request.prompt.tolist()
    for _ in range(request.params.max_tokens):
        known.append(next_token(known))
    return known[request.prompt.size :]
