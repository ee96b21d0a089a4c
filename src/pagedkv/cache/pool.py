"""PagePool: which pages are free, how many owners each has, and in which order cached ones are evicted.

Knows page ids only: nothing about tokens, rows or the prefix index. Page ids run from 1 to num_pages; 0 is the null
page, which is never handed out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class PagePool:
    """Free list, reference counts and eviction order, as arrays.

    A page is in exactly one state::

        FREE    on the stack            refcount 0   position -1
        CACHED  in the eviction queue   refcount 0   position >= 0
        USED    owned                   refcount > 0 position -1

    The eviction queue is an append-only array of page ids read from its head. `position[page]` says where the page's
    valid entry is; a page that is used again just loses its position, which makes the old entry stale. That is exact
    LRU without a linked list, and every operation is a slice or a gather::

        queue      7   3   9   3   5          position[3] = 3, so entry 1 is stale
        index     [0] [1] [2] [3] [4]
                   ^ head              ^ tail
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refcount = np.zeros(num_pages + 1, np.int32)
        self.free = num_pages
        self.cached = 0
        self.stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.position = np.full(num_pages + 1, -1, np.int64)
        self.queue = np.zeros(2 * num_pages + 2, np.int32)
        self.head = 0
        self.tail = 0

    @property
    def available(self) -> int:
        """Pages that can be handed out: free ones, and cached ones after eviction."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.free - self.cached

    def take(self, count: int) -> Pages:
        """Hand out `count` free pages, each with one owner. The caller has made sure that so many are free."""
        self.free -= count
        pages = self.stack[self.free : self.free + count][::-1].copy()
        self.refcount[pages] = 1
        return pages

    def give_back(self, pages: Pages) -> None:
        """Put pages without owner or index entry back on the stack; the first of `pages` is handed out last."""
        self.stack[self.free : self.free + pages.size] = pages
        self.free += pages.size

    def acquire(self, pages: Pages) -> None:
        """Add one owner to each page; a page may occur several times. Cached ones leave the eviction queue."""
        waiting = self.position[pages] >= 0
        if waiting.any():
            revived = pages[waiting]
            self.cached -= int(np.count_nonzero(self._last_occurrence(revived)))
        np.add.at(self.refcount, pages, 1)

    def drop(self, pages: Pages) -> Pages:
        """Take one owner from each page; a page may occur several times.

        Returns:
            The pages that lost their last owner, each once, in the order of their last occurrence.
        """
        shared = self.refcount[pages] > 1
        if not shared.any():  # one owner each, so each occurs once
            self.refcount[pages] -= 1
            return pages
        np.subtract.at(self.refcount, pages, 1)
        orphaned = self.refcount[pages] == 0
        orphans = pages[orphaned]
        if not (shared & orphaned).any():
            return orphans
        return orphans[self._last_occurrence(orphans)]

    def retire(self, pages: Pages) -> None:
        """Put pages without owner at the young end of the eviction queue, the first of them oldest."""
        if self.tail + pages.size > self.queue.size:
            self._compact()
        self.queue[self.tail : self.tail + pages.size] = pages
        self.position[pages] = np.arange(self.tail, self.tail + pages.size)
        self.tail += pages.size
        self.cached += pages.size

    def oldest(self, count: int) -> Pages:
        """Take the `count` pages that were retired longest ago out of the queue; so many must be cached."""
        chunks: list[Pages] = []
        missing = count
        while missing:
            end = min(self.head + max(2 * missing, 64), self.tail)
            entries = self.queue[self.head : end]
            valid = np.flatnonzero(self.position[entries] == np.arange(self.head, end))[:missing]
            chunks.append(entries[valid])
            missing -= valid.size
            self.head = end if missing else self.head + int(valid[-1]) + 1
        pages = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
        self.position[pages] = -1
        self.cached -= count
        return pages

    def withdraw(self, pages: Pages) -> None:
        """Take these cached pages, all different, out of the eviction queue wherever they are in it."""
        self.position[pages] = -1
        self.cached -= pages.size

    def queued(self) -> Pages:
        """The cached pages, oldest first."""
        entries = self.queue[self.head : self.tail]
        return entries[self.position[entries] == np.arange(self.head, self.tail)]

    def _last_occurrence(self, pages: Pages) -> NDArray[np.bool_]:
        """Is this the last place where its page occurs? No sort: of numbers written to one place the last stays.

        `position` is the scratch space, so the pages have none afterwards.
        """
        order = np.arange(pages.size)
        self.position[pages] = order
        last = self.position[pages] == order
        self.position[pages] = -1
        return last

    def _compact(self) -> None:
        """Drop stale entries. At most num_pages are valid, so half of the queue is free afterwards."""
        pages = self.queued()
        self.queue[: pages.size] = pages
        self.position[pages] = np.arange(pages.size)
        self.head, self.tail = 0, pages.size
