"""Events: what happened to which page, in order, in a ring of preallocated arrays. Off until `start`.

From an empty pool, the stream tells all that is known about pages: who reads every event knows each page's owners, what
is indexed and what is free.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.journal import Journal
from pagedkv.errors import ConfigError


class EventKind(IntEnum):
    """What happened to a page, and what `other` says about it."""

    ALLOCATED = 1
    """Handed out, with one owner; other: the account (the negative number of the namespace's root)."""
    SHARED = 2
    """One owner more; other: 0."""
    RELEASED = 3
    """One owner fewer; without any it is cached if indexed and free otherwise; other: 0."""
    INDEXED = 4
    """Prompts can find it; other: the page that it continues, or the root as a negative number."""
    FORGOTTEN = 5
    """Prompts cannot find it any more, by a reset or an eviction that follows; without owner it is free; other: 0."""
    EVICTED = 6
    """It was cached and is free; other: 0."""
    COPIED = 7
    """Its content was copied; other: the page that it was copied to."""
    MOVED = 8
    """It has another number, since the pool was resized; other: that number."""


class EventBatch(NamedTuple):
    """Events in the order in which they happened, [n] each.

    Attributes:
        first: number of the first event of the batch; the next call asks for those from first + n on.
        kind: int8, an EventKind.
        page: int32.
        other: int32, see EventKind.
        lost: events asked for that had been overwritten already.
    """

    first: int
    kind: NDArray[np.int8]
    page: NDArray[np.int32]
    other: NDArray[np.int32]
    lost: int


class Events:
    """A ring; the newest events overwrite the oldest.

    Attributes:
        written: events so far.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.written = 0
        self._kind = np.zeros(0, np.int8)
        self._page = np.zeros(0, np.int32)
        self._other = np.zeros(0, np.int32)

    @property
    def on(self) -> bool:
        """Are events kept?"""
        return self._kind.size > 0

    def start(self, capacity: int) -> None:
        """Keep the last `capacity` events from now on, from number 0; a capacity of 0 stops it.

        Raises:
            ConfigError: the capacity is negative.
        """
        if capacity < 0:
            raise ConfigError(f"a capacity of {capacity} events is negative")
        self.written = 0
        self._kind = np.zeros(capacity, np.int8)
        self._page = np.zeros(capacity, np.int32)
        self._other = np.zeros(capacity, np.int32)

    def add(self, kind: EventKind, pages: NDArray[np.int32], others: ArrayLike = 0) -> None:
        """Note one event per page, in this order."""
        capacity = self._kind.size
        if not capacity or not pages.size:
            return
        end = self.written + pages.size
        kept = min(pages.size, capacity)
        at = np.arange(end - kept, end) % capacity
        for ring, values in ((self._kind, int(kind)), (self._page, pages), (self._other, others)):
            self.journal.put(ring, at, np.broadcast_to(values, pages.shape)[pages.size - kept :])
        self.journal.keep(self, "written")
        self.written = end

    def read(self, first: int = 0) -> EventBatch:
        """The events from number `first` on, as far as they have not been overwritten."""
        oldest = max(self.written - self._kind.size, 0)
        start = min(max(first, oldest), self.written)
        at = np.arange(start, self.written) % max(self._kind.size, 1)
        return EventBatch(start, self._kind[at], self._page[at], self._other[at], max(start - max(first, 0), 0))
