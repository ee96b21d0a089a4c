"""Retention: how long cached pages are worth keeping. Priorities and times to live per token range.

A page that nobody said anything about has the default priority. What a row claims for its pages counts from the moment
it gives one of them back. Where several rows claim the same page, the highest priority and the latest end hold, and a
page never ranks below one that continues it: what is kept can be reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache.eviction import DEFAULT_LEVEL, Pages
from pagedkv.cache.journal import Journal
from pagedkv.cache.table import PageTable
from pagedkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedkv.cache.resizing import Moves

_UNSAID = -1
_FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Retention:
    """How the pages with the tokens [start, end) of a sequence rank once nobody owns them.

    Attributes:
        start: first token of the range.
        end: token after the last one; None for the end of the sequence, whatever is appended to it.
        priority: 0 to 100; pages of lower priority are evicted first. Without any Retention a page has 35.
        ttl: for how long after the sequence has given it back a page keeps a priority above 35, in the unit of the
            clock that `tick` is told; None for ever.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_LEVEL
    ttl: float | None = None


class Retentions:
    """Priority and end of life of each page, as arrays that are only there once a row has asked for a retention.

    Attributes:
        priority: int8 [num_pages + 1], -1 where no owner has given the page back yet.
        ends: float64 [num_pages + 1], when a priority above the default ends; -inf for others.
        now: what the clock said last.
        next_end: no cached page's priority ends before this.
        of_row: what each row asked for.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.active = False
        self.priority = np.zeros(0, np.int8)
        self.ends = np.zeros(0, np.float64)
        self.now = -math.inf
        self.next_end = math.inf
        self.of_row: dict[int, tuple[Retention, ...]] = {}

    def ask(self, row: int, ranges: tuple[Retention, ...], indexed: NDArray[np.bool_]) -> None:
        """The row's pages shall rank so; `indexed` bool [num_pages + 1] are the pages that have a rank already."""
        if not ranges:
            return
        if not self.active:
            self.journal.keep(self, "active", "priority", "ends")
            self.priority = np.where(indexed, DEFAULT_LEVEL, _UNSAID).astype(np.int8)
            self.ends = np.full(indexed.size, -math.inf)
            self.active = True
        self.journal.entry(self.of_row, row)
        self.of_row[row] = ranges

    def take_after(self, rows: Iterable[int], parents: Iterable[int]) -> None:
        """Let rows[i] ask for what parents[i] asks for now."""
        if not self.of_row:
            return
        asked = [self.of_row.get(parent, ()) for parent in parents]
        for row, ranges in zip(rows, asked, strict=True):
            self.close(row)
            if ranges:
                self.journal.entry(self.of_row, row)
                self.of_row[row] = ranges

    def close(self, row: int) -> None:
        """The row asks for nothing any more."""
        if row in self.of_row:
            self.journal.entry(self.of_row, row)
            del self.of_row[row]

    def resize(self, moves: Moves) -> None:
        """Pages have moved."""
        if self.active:
            self.journal.keep(self, "priority", "ends")
            self.priority = moves.indexed_by_page(self.priority, _UNSAID)
            self.ends = moves.indexed_by_page(self.ends, -math.inf)

    def fresh(self, pages: Pages) -> None:
        """These pages were handed out just now."""
        if self.active:
            self.journal.put(self.priority, pages, _UNSAID)
            self.journal.put(self.ends, pages, -math.inf)

    def claim(self, table: PageTable, rows: NDArray[np.int64], indexed: NDArray[np.bool_]) -> None:
        """Rank the indexed pages of rows that are about to give some back. Costs a pass over each row's pages."""
        if self.active:
            for row in rows.tolist():
                pages = table.table[row, : table.pages[row]]
                self._claim_pages(row, pages[indexed.take(pages)], table.page_size)

    def _claim_pages(self, row: int, pages: Pages, page_size: int) -> None:
        """`pages` are the first ones of the row."""
        priority, ends = self._asked(row, pages.size, page_size)
        had, had_end = self.priority.take(pages), self.ends.take(pages)
        over = had_end <= self.now
        had[over] = np.minimum(had[over], DEFAULT_LEVEL)
        had_end[over] = -math.inf
        for values, old in ((priority, had), (ends, had_end)):
            np.maximum(values, old, out=values)
            values[:] = np.maximum.accumulate(values[::-1])[::-1]  # a page ranks at least as those that continue it
        self.journal.put(self.priority, pages, priority)
        self.journal.put(self.ends, pages, ends)

    def _asked(self, row: int, pages: int, page_size: int) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
        """What the row asks for each of its pages."""
        priority, ends = np.full(pages, _UNSAID, np.int8), np.full(pages, -math.inf)
        for wish in self.of_row.get(row, ()):
            end = pages if wish.end is None else pages_for_tokens(wish.end, page_size)
            columns = slice(wish.start // page_size, min(end, pages))
            priority[columns] = np.maximum(priority[columns], wish.priority)
            if wish.priority > DEFAULT_LEVEL:
                until = _FOREVER if wish.ttl is None else self.now + wish.ttl
                ends[columns] = np.maximum(ends[columns], until)
        priority[priority == _UNSAID] = DEFAULT_LEVEL
        return priority, ends

    def levels(self, pages: Pages) -> NDArray[np.int8]:
        """At which level of the eviction queue each page stands now: int8 [n]. Notes when the first of them ends."""
        priority, ends = self.priority.take(pages), self.ends.take(pages)
        levels = np.where(ends > self.now, priority, np.minimum(priority, DEFAULT_LEVEL)).astype(np.int8)
        first = ends[levels > DEFAULT_LEVEL].min(initial=math.inf)
        if first < self.next_end:
            self.journal.keep(self, "next_end")
            self.next_end = float(first)
        return levels

    def tick(self, now: float) -> bool:
        """The clock says `now`; an earlier time than it said before is ignored. Has some page's time run out?"""
        if now > self.now:
            self.journal.keep(self, "now")
            self.now = now
        return self.now >= self.next_end

    def ended(self, cached: Pages, levels: NDArray[np.int8]) -> Pages:
        """Of these cached pages with their levels, those whose time has run out, in the order given."""
        above = levels > DEFAULT_LEVEL
        ends = np.where(above, self.ends.take(cached), math.inf)
        over = ends <= self.now
        self.journal.keep(self, "next_end")
        self.next_end = float(ends[~over].min(initial=math.inf))
        return cached[over]


def check_retention(ranges: Iterable[Retention]) -> tuple[Retention, ...]:
    """The ranges; raises InvalidRequestError unless every range, priority and time to live can be meant."""
    wishes = tuple(ranges)
    for wish in wishes:
        if not isinstance(wish, Retention):
            raise InvalidRequestError(f"retention is a sequence of Retention; got {wish!r}")
        if wish.start < 0 or (wish.end is not None and wish.end <= wish.start):
            raise InvalidRequestError(f"a retention of tokens {wish.start} to {wish.end} has no token")
        if not 0 <= wish.priority <= 100:
            raise InvalidRequestError(f"priority is {wish.priority}; it must be 0 to 100")
        if wish.ttl is not None and not 0 < wish.ttl < math.inf:
            raise InvalidRequestError(f"ttl is {wish.ttl}; it must be positive and finite, or None")
    return wishes
