"""PagePool: which pages are free, and how many owners each has.

Knows page ids only: nothing about tokens, rows or the prefix index. Page ids run from 1 to num_pages; 0 is the null
page, which is never handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.accounts import Accounts
from pagedkv.cache.events import EventKind, Events
from pagedkv.cache.eviction import DEFAULT_LEVEL, EvictionQueue, Pages
from pagedkv.cache.journal import Journal

if TYPE_CHECKING:
    from pagedkv.cache.resizing import Moves


class PagePool:
    """Free list and reference counts, as arrays.

    A page is in exactly one state::

        FREE    on the stack            refcount 0
        CACHED  in the eviction queue   refcount 0
        USED    owned                   refcount > 0
    """

    def __init__(self, num_pages: int, journal: Journal, events: Events | None = None) -> None:
        self.num_pages = num_pages
        self.journal = journal
        self.refcount = np.zeros(num_pages + 1, np.int32)
        self.free = num_pages
        self.stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.queue = EvictionQueue(num_pages, journal)
        self.accounts = Accounts(num_pages, journal)
        self.events = events or Events(journal)

    @property
    def cached(self) -> int:
        """Pages without owner that the index still serves."""
        return self.queue.cached

    @property
    def available(self) -> int:
        """Pages that can be handed out: free ones, and cached ones after eviction."""
        return self.free + self.queue.cached

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.free - self.queue.cached

    def take(self, count: int, account: int | NDArray[np.integer] = 0) -> Pages:
        """Hand out `count` free pages, each with one owner and charged to `account`, or page i to account[i].

        The caller has made sure that so many are free.
        """
        left = self.free - count
        pages = self.stack[left : self.free][::-1].copy()
        self.journal.keep(self, "free")
        self.journal.replace(self.refcount, pages.astype(np.int64), 0, 1)
        self.free = left
        self.accounts.charge(pages, account)
        self.events.add(EventKind.ALLOCATED, pages, account)
        return pages

    def retire(self, pages: Pages, level: int = DEFAULT_LEVEL) -> None:
        """Pages without owner, the first of them oldest, stay cached at this level of the eviction queue."""
        self.queue.push(pages, level)
        self.accounts.count_cached(pages, 1)

    def uncache(self, pages: Pages) -> None:
        """Take cached pages, all different, out of the eviction queue."""
        self.queue.withdraw(pages)
        self.accounts.count_cached(pages, -1)

    def give_back(self, pages: Pages) -> None:
        """Put pages without owner or index entry back on the stack; the first of `pages` is handed out last."""
        if not pages.size:
            return
        self.journal.keep(self, "free")
        self.stack[self.free : self.free + pages.size] = pages
        self.free += pages.size

    def resize(self, moves: Moves) -> None:
        """Pages have moved, and the free ones are what is left: the lowest number is handed out first."""
        self.journal.keep(self, "num_pages", "refcount", "stack", "free")
        taken = moves.indexed_by_page((self.refcount > 0) | (self.queue.position >= 0))
        self.num_pages = moves.num_pages
        self.refcount = moves.indexed_by_page(self.refcount)
        free = np.flatnonzero(~taken[1:])[::-1] + 1
        self.stack = np.zeros(moves.num_pages, np.int32)
        self.stack[: free.size] = free
        self.free = int(free.size)

    def acquire(self, pages: Pages, *, distinct: bool = False) -> None:
        """Add one owner to each page; a page may occur several times, unless all are `distinct`.

        Cached ones leave the eviction queue.
        """
        if not pages.size:
            return
        at = pages.astype(np.int64)
        held = self.refcount.take(at)
        idle = held == 0
        if idle.any():
            revived = pages[idle] if distinct else pages[idle][self._last_occurrence(pages[idle])]
            self.uncache(revived)
            self.accounts.count_used(revived, 1)
        self.journal.replace(self.refcount, at, held, held + 1)
        if not distinct:
            self.refcount[at] = held
            np.add.at(self.refcount, pages, 1)
        self.events.add(EventKind.SHARED, pages)

    def drop(self, pages: Pages, *, distinct: bool = False) -> Pages:
        """Take one owner from each page; a page may occur several times, unless all are `distinct`.

        Returns:
            The pages that lost their last owner, each once, in the order of their last occurrence.
        """
        self.events.add(EventKind.RELEASED, pages)
        orphans = self._drop(pages, distinct)
        self.accounts.count_used(orphans, -1)
        return orphans

    def _drop(self, pages: Pages, distinct: bool) -> Pages:
        at = pages.astype(np.int64)  # the index type of NumPy: assignments are twice as fast
        held = self.refcount.take(at)
        if held.max(initial=0) <= 1:  # one owner each, so each occurs once
            self.journal.replace(self.refcount, at, 1, 0)
            return pages
        shared = held > 1
        if distinct:
            self.journal.replace(self.refcount, at, held, held - 1)
            return pages[~shared]
        self.journal.replace(self.refcount, at, held, held)
        np.subtract.at(self.refcount, pages, 1)
        orphaned = self.refcount.take(pages) == 0
        orphans = pages[orphaned]
        if not (shared & orphaned).any():
            return orphans
        return orphans[self._last_occurrence(orphans)]

    def _last_occurrence(self, pages: Pages) -> NDArray[np.bool_]:
        """Is this the last place where its page occurs? No sort: of numbers written to one place the last stays.

        The queue's `position` is the scratch space, so the pages have none afterwards.
        """
        order = np.arange(pages.size)
        self.journal.save(self.queue.position, pages)
        self.queue.position[pages] = order
        last: NDArray[np.bool_] = self.queue.position.take(pages) == order
        self.queue.position[pages] = -1
        return last
