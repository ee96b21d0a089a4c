"""PageFeed: what has happened to which page since it was asked last, from the manager's ring of events.

Owned by the engine's thread, and read between its verbs, so that the arrays of the index still hold what the events are
about.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import EventKind, KVCacheManager
from pagedkv.cache.eviction import Pages

CAPACITY = 1 << 17
"""Events kept at least; a step has fewer unless the pool is larger than that."""


class PageNews(NamedTuple):
    """What happened since the last drain.

    Attributes:
        pages: int32 [n], pages that something happened to, ascending, each once.
        kind, page: int8 and int32 [events], all events in order.
        resized: the pool has another size or pages have other numbers: whoever keeps arrays by page begins anew.
    """

    pages: Pages
    kind: NDArray[np.int8]
    page: Pages
    resized: bool


class PageFeed:
    """Reads a manager's events, counts them, and remembers when something happened to each page last.

    Attributes:
        counts: int64 [9], events so far by EventKind.
        since: float64 [num_pages + 1], when something happened to each page last, by the caller's clock.
    """

    def __init__(self, manager: KVCacheManager, now: float) -> None:
        self.manager = manager
        self.counts = np.zeros(len(EventKind) + 1, np.int64)
        self.since = np.full(manager.num_pages + 1, now)
        self._next = 0
        manager.events.start(max(CAPACITY, 8 * manager.num_pages))

    def drain(self, now: float) -> PageNews:
        """What is new."""
        batch = self.manager.events.read(self._next)
        self._next = batch.first + batch.kind.size
        self.counts += np.bincount(batch.kind, minlength=self.counts.size)
        resized = bool(batch.lost) or self.since.size != self.manager.num_pages + 1
        resized = resized or bool((batch.kind == EventKind.MOVED).any())
        if resized:
            pages = np.arange(1, self.manager.num_pages + 1, dtype=np.int32)
            self.since = np.full(self.manager.num_pages + 1, now)
        else:
            pages = np.unique(batch.page)
            self.since[pages] = now
        return PageNews(pages, batch.kind, batch.page, resized)

    def count(self, kind: EventKind) -> int:
        """Events of one kind so far."""
        return int(self.counts[kind])
