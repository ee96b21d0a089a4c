"""Monitor: watches one engine, and tells what it sees to whoever asks or listens.

::

    engine.watch.observer = monitor = Monitor(engine)
    monitor.figures(), monitor.metrics_text()                 # ask, at any time between two steps
    monitor.listeners.append(RecordWriter(...))               # be told, step by step

Belongs to the engine's thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagedkv.cache import EventKind
from pagedkv.engine.request import Request
from pagedkv.engine.step import Step
from pagedkv.monitor.figures import Figures, figures
from pagedkv.monitor.misses import Misses
from pagedkv.monitor.page_feed import PageFeed, PageNews
from pagedkv.monitor.timings import Timings, Track

if TYPE_CHECKING:
    from pagedkv.engine.engine import Engine  # brings torch, which whoever only reads records does without

MOST_LOOKED_AT = 64
"""Waiting requests whose reasons are followed, from the head of the queue."""


class Listener:
    """Told of pages and requests as it happens; times are the monitor's. Each takes note of what it cares for."""

    def pages(self, news: PageNews, now: float) -> None:
        """Something happened to pages."""

    def happened(self, request: Request, what: str, now: float, **details: Any) -> None:
        """Something happened to a request: "queued", "waits", "admitted", "preempted" or "ended"."""

    def step_over(self, now: float) -> None:
        """A step has ended, or what was asked for between two of them has been done."""


class Monitor:
    """Everything that is known about what an engine does.

    Args:
        engine: with a paged allocator.
        clock: seconds; whose zero does not matter.

    Attributes:
        started: time of the clock when the monitor was made.
        last_step: what the engine has scheduled last.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self.started = clock()
        self.feed = PageFeed(engine.paged, self.started)
        self.misses = Misses(engine.paged)
        self.timings = Timings()
        self.listeners: list[Listener] = []
        self.last_step = Step()

    def queued(self, request: Request) -> None:
        """See `Observer`."""
        now = self.clock()
        self.timings.start(request, now)
        self._tell(request, "queued", now, prompt=request.prompt.size, most=request.params.max_tokens)

    def scheduled(self, step: Step) -> None:
        """See `Observer`."""
        now = self.clock()
        self.last_step = step
        self._drain(now)
        for request in step.preempted:
            self._tell(request, "preempted", now, times=request.preemptions)
        for request in step.requests:
            track = self.timings.admit(request, now)
            if track is not None:
                self._admitted(request, track, now)
        if self.listeners:
            self._follow_waiting(now)

    def _admitted(self, request: Request, track: Track, now: float) -> None:
        cached = request.cached_tokens or 0
        if not request.index:
            track.reason = self.misses.admitted(request.prompt, cached, request.namespace, now)
        waited = now - track.queued
        self._tell(request, "admitted", now, row=request.row, cached=cached, missed=track.reason, waited=waited)

    def stepped(self, step: Step) -> None:
        """See `Observer`."""
        now = self.clock()
        self.timings.tokens(step.requests, now)
        self._drain(now)
        self._notify("step_over", now)

    def ended(self, request: Request) -> None:
        """See `Observer`."""
        now = self.clock()
        computed = request.known()[: request.computed]
        self.misses.ended(computed, request.namespace)
        track = self.timings.end(request, now) or Track(queued=now)
        self._tell(request, "ended", now, track=track)

    def refresh(self) -> float:
        """Take note of what has happened outside of steps: aborts, resets, another size. Returns the time."""
        now = self.clock()
        self.engine.paged.index_filled()
        if self._drain(now):
            self._notify("step_over", now)
        return now

    def figures(self) -> Figures:
        """Where the pages are now, and who runs."""
        return figures(self.engine)

    def counters(self) -> dict[str, Any]:
        """The figures as plain values, and beside them counters whose differences are rates."""
        timings, feed, scheduler = self.timings, self.feed, self.engine.scheduler
        return {
            "t": self.clock() - self.started,
            **asdict(self.figures()),
            "generated_tokens": self.engine.stats().generated_tokens,
            "prompt_tokens": scheduler.prompt_tokens,
            "cached_tokens": scheduler.cached_tokens,
            "preemptions": scheduler.preemptions,
            "allocations": feed.count(EventKind.ALLOCATED),
            "evictions": feed.count(EventKind.EVICTED),
            "ended": sum(timings.ended.values()),
            "first_token": [timings.first_token.sum, timings.first_token.count],
            "inter_token": [timings.inter_token.sum, timings.inter_token.count],
        }

    def _drain(self, now: float) -> bool:
        news = self.feed.drain(now)
        if not news.pages.size:
            return False
        evicted = news.page[news.kind == EventKind.EVICTED]
        if evicted.size and not news.resized:
            self.misses.evicted(evicted, now)
        self._notify("pages", news, now)
        return True

    def _follow_waiting(self, now: float) -> None:
        """Tell of waiting requests whose reason has changed."""
        for request, _ in zip(self.engine.scheduler.waiting, range(MOST_LOOKED_AT), strict=False):
            track = self.timings.tracks.get(request)
            if track is not None and request.wait is not None and request.waits_on != track.waits_on:
                track.waits_on = request.waits_on
                self._tell(
                    request, "waits", now, on=request.wait.on, needed=request.wait.needed, free=request.wait.free
                )

    def _tell(self, request: Request, what: str, now: float, **details: Any) -> None:
        self._notify("happened", request, what, now, **details)

    def _notify(self, method: str, *about: Any, **details: Any) -> None:
        """Tell all listeners. One that fails is reported and told nothing more; the others, and the engine, go on."""
        for listener in list(self.listeners):
            if not _tells(listener, method, *about, **details):
                self.listeners.remove(listener)


def _tells(listener: Listener, method: str, *about: Any, **details: Any) -> bool:
    try:
        getattr(listener, method)(*about, **details)
    except Exception as error:
        print(f"{type(listener).__name__} has ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    return True
