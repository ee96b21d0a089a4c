"""WindowedGroup: pages of layers that see only the last `window` tokens, in a pool and a table of their own.

Its rows are the rows of a KVCacheManager, column by column::

    table of the manager    [ 7 | 3 | 9 | 4 | 0 ]       page numbers of the prefix index, and of full attention
    table of the group      [ 0 | 0 | 5 | 2 | 0 ]       0 where the page fell out of the window, or is not placed yet
                                   ^ front   ^ back

A page of the group stands for the same tokens as the manager's page that it is attached to, and serves prompts for as
long as that page is indexed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import window_pages
from pagedkv.cache.eviction import Pages
from pagedkv.cache.journal import Journal
from pagedkv.cache.pool import PagePool
from pagedkv.cache.ragged import ragged
from pagedkv.cache.reservations import Reservations
from pagedkv.cache.table import PageTable, Rows


class WindowedGroup:
    """Who holds which page of one group.

    Attributes:
        window: tokens that a query sees, itself included.
        most: most pages that a row takes for itself at once: its window and one step's tokens.
        table: int32 [max_rows, columns], the block table of these layers.
        front: int64 [max_rows], first column that the row holds. back: int64, column after its last one.
        taken: int64 [max_rows], first column that the row took itself; those before were shared with it.
        whole: int64 [max_rows], columns that the row was admitted for.
        attached: int32 [pages of the manager + 1], the group's page for it. page_of: the same backwards.
    """

    def __init__(self, num_pages: int, window: int, step: int, leader: PageTable, pages: int, journal: Journal) -> None:
        self.num_pages = num_pages
        self.window = window
        self.journal = journal
        self.page_size = leader.page_size
        self.most = window_pages(window, step, leader.page_size)
        self.pool = PagePool(num_pages, journal)
        self.leader = leader
        self.reservations = Reservations(leader.max_rows, journal)
        self.table = np.zeros_like(leader.table)
        self.front = np.zeros(leader.max_rows, np.int64)
        self.back = np.zeros(leader.max_rows, np.int64)
        self.taken = np.zeros(leader.max_rows, np.int64)
        self.whole = np.zeros(leader.max_rows, np.int64)
        self.attached = np.zeros(pages + 1, np.int32)
        self.page_of = np.zeros(num_pages + 1, np.int32)

    def first_column(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first column that a query after so many tokens still sees."""
        return np.maximum(tokens - self.window + 1, 0) // self.page_size

    def usable(self, matched: Pages) -> int:
        """With how many of these pages of a chain a prompt can begin, so that all it sees is held here."""
        pages = np.arange(1, matched.size + 1)
        there = self.attached.take(matched) > 0
        gap = np.maximum.accumulate(np.where(there, 0, pages))  # columns up to the last one that is missing
        good = np.flatnonzero(gap <= self.first_column(pages * self.page_size))
        return int(good[-1]) + 1 if good.size else 0

    def demand(self, matched: int, whole: int) -> int:
        """Pages to set aside for a row of `whole` columns, the first `matched` of which are shared."""
        return min(self.most, whole - matched)

    def idle(self, pages: Pages) -> int:
        """How many of the group's pages under these would be owned again by a prompt that begins with them."""
        return int(np.count_nonzero(self.pool.refcount[self._seen(pages)] == 0))

    def _seen(self, pages: Pages) -> Pages:
        first = int(self.first_column(np.array([pages.size * self.page_size]))[0])
        return self.attached.take(pages[first:])

    def open(self, row: int, matched: Pages, whole: int) -> None:
        """A row starts with these pages of the manager's, shared as far as it can see."""
        put = self.journal.put
        shared = self._seen(matched)
        self.pool.acquire(shared, distinct=True)
        put(self.table, (row, slice(matched.size - shared.size, matched.size)), shared)
        for state, value in ((self.front, matched.size - shared.size), (self.back, matched.size)):
            put(state, row, value)
        put(self.taken, row, matched.size)
        put(self.whole, row, whole)
        self.settle(np.array([row]))

    def settle(self, rows: Rows) -> None:
        """Set aside what each row may still need at once, as far as pages are there."""
        own = self.back[rows] - np.maximum(self.front[rows], self.taken[rows])
        goal = np.clip(np.minimum(self.most - own, self.whole[rows] - self.back[rows]), 0, None)
        self.reservations.aim(rows, goal, self.pool.available)

    def place(self, rows: Rows, columns: NDArray[np.int64]) -> None:
        """Take a page for each column from `back` to columns[i]; the caller has asked for them."""
        need = np.maximum(columns - self.back[rows], 0)
        if not need.any():
            return
        group, offset = ragged(need)
        at, column = rows[group], self.back[rows][group] + offset
        fresh = self.take(at.size)
        self.reservations.draw(rows, need)
        self.journal.put(self.table, (at, column), fresh)
        self.journal.put(self.back, rows, self.back[rows] + need)
        self._attach(self.leader.at(at, column), fresh)

    def copy(self, rows: Rows, columns: NDArray[np.int64], indexed: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Give rows[i] a page of its own for columns[i] instead of the shared one; int32 [n, 2], (source, target)."""
        source, fresh = self.table[rows, columns], self.take(rows.size)
        self.reservations.draw(rows, np.ones(rows.size, np.int64))
        self.journal.put(self.table, (rows, columns), fresh)
        self._attach(self.leader.at(rows, columns), fresh)
        self.retire(self.pool.drop(source), indexed)
        return np.stack((source, fresh), axis=1)

    def take(self, count: int) -> Pages:
        """Hand out pages, evicting cached ones if need be; prompts that would have needed those find less."""
        if count > self.pool.free:
            self._free(self.pool.queue.oldest(count - self.pool.free))
        return self.pool.take(count)

    def advance(self, rows: Rows, computed: NDArray[np.int64], indexed: NDArray[np.bool_]) -> None:
        """Give back what the next query of each row does not see any more."""
        front = np.minimum(self.first_column(computed), self.back[rows])
        gone = np.maximum(front - self.front[rows], 0)
        if gone.any():
            self._let_go(rows, self.front[rows], gone, indexed)
            self.journal.put(self.front, rows, np.maximum(front, self.front[rows]))
            self.settle(rows)

    def cut(self, rows: Rows, columns: NDArray[np.int64], indexed: NDArray[np.bool_]) -> None:
        """Give back the columns from columns[i] on, the last one first."""
        gone = np.maximum(self.back[rows] - columns, 0)
        self._let_go(rows, self.back[rows] - gone, gone, indexed)
        self.journal.put(self.back, rows, self.back[rows] - gone)
        self.journal.put(self.taken, rows, np.minimum(self.taken[rows], self.back[rows]))
        self.settle(rows)

    def close(self, rows: Rows, indexed: NDArray[np.bool_]) -> None:
        """The rows have ended."""
        self.journal.put(self.whole, rows, 0)
        self.cut(rows, self.front[rows], indexed)
        for state in (self.front, self.back, self.taken):
            self.journal.put(state, rows, 0)

    def follow(self, rows: Rows, parents: Rows, indexed: NDArray[np.bool_]) -> None:
        """rows[i] share what parents[i] hold now, instead of what they hold, all at once."""
        old, new, entries = self._held(rows), self._held(parents), self.table[parents]
        self.pool.acquire(new)
        self.journal.put(self.table, rows, entries)
        for state in (self.front, self.back):
            self.journal.put(state, rows, state[parents])
        self.journal.put(self.taken, rows, self.back[rows])
        self.retire(self.pool.drop(old), indexed)
        self.settle(rows)

    def _held(self, rows: Rows) -> Pages:
        """The pages of these rows, each row's last one first."""
        group, offset = ragged(self.back[rows] - self.front[rows])
        return self.table[rows[group], self.back[rows][group] - 1 - offset]

    def reattach(self) -> None:
        """Rows have moved to twins among the manager's pages: let the group's pages stand for those, if none does."""
        held = np.nonzero((self.table > 0) & (self.page_of[self.table] != self.leader.table))
        own, pages = self.table[held], self.leader.table[held]
        bare = np.flatnonzero(self.attached.take(pages) == 0)
        for ids in (pages, own):
            bare = bare[np.unique(ids[bare], return_index=True)[1]]
        self._attach(pages[bare], own[bare])

    def forget(self, pages: Pages) -> bool:
        """The manager's pages do not stand for anything any more, or prompts do not find them.

        Does a row still hold one of the group's under them, so that its own page may be another now?
        """
        own = self.attached.take(pages)
        own = own[own > 0]
        idle = self.pool.refcount.take(own) == 0
        self._free(own[idle])
        self._detach(own[~idle])
        return not idle.all()

    def _let_go(
        self, rows: Rows, start: NDArray[np.int64], counts: NDArray[np.int64], indexed: NDArray[np.bool_]
    ) -> None:
        group, offset = ragged(counts)
        at, column = rows[group], start[group] + counts[group] - 1 - offset
        pages = self.table[at, column]
        self.journal.put(self.table, (at, column), 0)
        self.retire(self.pool.drop(pages), indexed)

    def retire(self, orphans: Pages, indexed: NDArray[np.bool_]) -> None:
        """Pages that nobody holds any more serve prompts if theirs is indexed, and are free otherwise."""
        of = self.page_of.take(orphans)
        kept = (of > 0) & indexed.take(of)
        self.pool.retire(orphans[kept])
        self._detach(orphans[~kept])
        self.pool.give_back(orphans[~kept])

    def _free(self, cached: Pages) -> None:
        if cached.size:
            self.pool.uncache(cached)
            self._detach(cached)
            self.pool.give_back(cached)

    def _attach(self, pages: Pages, own: Pages) -> None:
        before = self.attached.take(pages)
        self._detach(np.append(before[before > 0], own))
        self.journal.put(self.attached, pages, own)
        self.journal.put(self.page_of, own, pages)

    def _detach(self, own: Pages) -> None:
        of = self.page_of.take(own)
        self.journal.put(self.attached, of[of > 0], 0)
        self.journal.put(self.page_of, own, 0)
