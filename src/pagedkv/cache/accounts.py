"""Accounts: to whom pages are charged, and how many each has. An account is the number of a namespace's root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.eviction import Pages
from pagedkv.cache.journal import Journal

if TYPE_CHECKING:
    from pagedkv.cache.resizing import Moves


class Accounts:
    """A page is charged to the namespace it was taken for; nobody else ever shares it.

    Attributes:
        of: int32 [num_pages + 1], the account of each page that is used or cached: the negative of its root's number.
        counting: whether `used` and `cached` are kept; they are from the first limit on, since only limits need them.
        used: int64 [accounts], pages with an owner.
        cached: int64 [accounts], pages without one that the index serves.
    """

    def __init__(self, num_pages: int, journal: Journal) -> None:
        self.journal = journal
        self.of = np.zeros(num_pages + 1, np.int32)
        self.counting = False
        self.used = np.zeros(0, np.int64)
        self.cached = np.zeros(0, np.int64)

    def start(self, used: NDArray[np.bool_], cached: Pages) -> None:
        """Count from now on: pages that are used, bool [num_pages + 1], and cached ones."""
        self.journal.keep(self, "counting", "used", "cached")
        accounts = int(self.of.max()) + 1
        self.used = np.bincount(self.of[used], minlength=accounts)
        self.cached = np.bincount(self.of[cached], minlength=accounts)
        self.counting = True

    def charge(self, pages: Pages, account: int | NDArray[np.integer]) -> None:
        """These pages, handed out just now, are used by `account`, or by account[i]."""
        self.journal.put(self.of, pages.astype(np.int64), account)
        if self.counting:
            self._reach(int(np.max(account)))
            self.count_used(pages, 1)

    def count_used(self, pages: Pages, change: int) -> None:
        """One page more or fewer is used for each of these."""
        if self.counting:
            self._count(self.used, pages, change)

    def count_cached(self, pages: Pages, change: int) -> None:
        """One page more or fewer is cached for each of these."""
        if self.counting:
            self._count(self.cached, pages, change)

    def resize(self, moves: Moves) -> None:
        """Pages have moved."""
        self.journal.keep(self, "of")
        self.of = moves.indexed_by_page(self.of)

    def _count(self, counters: NDArray[np.int64], pages: Pages, change: int) -> None:
        accounts = self.of.take(pages)
        self.journal.save(counters, accounts)
        np.add.at(counters, accounts, change)

    def _reach(self, account: int) -> None:
        """Have counters up to this account."""
        if account >= self.used.size:
            self.journal.keep(self, "used", "cached")
            missing = (0, 2 * account + 2 - self.used.size)
            self.used, self.cached = np.pad(self.used, missing), np.pad(self.cached, missing)
