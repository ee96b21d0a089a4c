"""Indexing: the pages that a commit has filled enter the prefix index, and rows move to twins that are there already.

Part of KVCacheManager, whose arrays it works on; the manager decides which rows have pages to index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.eviction import Pages
from pagedkv.cache.hashing import Keys
from pagedkv.cache.journal import Journal
from pagedkv.cache.prefix import PrefixIndex
from pagedkv.cache.ragged import prefix_all, ragged
from pagedkv.cache.table import Rows

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager

CHUNK = 2048
"""Rows that are worked on at once: their arrays stay in the processor's cache."""

NEVER = np.iinfo(np.int32).max
"""`index_at` of a row that is indexed no further."""


class RecentTokens:
    """Tokens of the last decode steps, not noted in the index yet.

    Steps of the same rows are written together, row after row: a page's tokens lie side by side, so this touches an
    eighth of the memory that writing each step on its own would. Whoever reads the index's tokens calls `store` first.
    """

    def __init__(self, index: PrefixIndex, journal: Journal) -> None:
        self.index = index
        self.journal = journal
        self.steps = 0
        self.rows: Rows = np.zeros(0, np.int64)
        self.slots = np.zeros((index.page_size, 0), np.int64)
        self.ids = np.zeros((index.page_size, 0), np.int32)

    def add(self, rows: Rows, slots: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Note ids[i] at slots[i], [n] each; `rows` says whose they are."""
        if rows is not self.rows or self.steps == self.index.page_size:
            self.store()
            if rows.size != self.rows.size:
                self.journal.keep(self, "slots", "ids")
                self.slots = np.zeros((self.index.page_size, rows.size), np.int64)
                self.ids = np.zeros((self.index.page_size, rows.size), np.int32)
            self.journal.keep(self, "rows")
            self.rows = rows
        self.journal.keep(self, "steps")
        self.slots[self.steps] = slots
        self.ids[self.steps] = ids
        self.steps += 1

    def store(self) -> None:
        """Write what was noted into the index's tokens; twice does no harm, and nobody sees what was there before."""
        if self.steps:
            flat = self.index.tokens.reshape(-1)
            for first in range(0, self.rows.size, CHUNK):
                part = (slice(self.steps), slice(first, first + CHUNK))
                flat[self.slots[part].T.ravel()] = self.ids[part].T.ravel()
            self.journal.keep(self, "steps")
            self.steps = 0


def index_ready(manager: KVCacheManager) -> None:
    """Index what is full and computed and not indexed yet, of all rows."""
    ready = np.flatnonzero(manager.table.computed >= manager.index_at)
    if ready.size == 1 and index_prompt(manager, int(ready[0])):
        return
    for first in range(0, ready.size, CHUNK):
        rows = ready[first : first + CHUNK]
        index_pages(manager, rows, manager.table.computed[rows].astype(np.int64) // manager.page_size)
    manager.pending.forget_indexed(ready, manager.index_at)


def index_pages(manager: KVCacheManager, rows: Rows, full: NDArray[np.int64]) -> None:
    """Index the pages of `rows` up to page number `full`, and move rows to twins that are indexed already."""
    first = manager.indexed.take(rows).astype(np.int64)
    counts = full - first
    group, offset = ragged(counts)
    column, owner = first[group] + offset, rows[group]
    own = manager.table.at(owner, column)
    page_sums = manager.index.hasher.page_sums(manager.index.tokens.take(own, axis=0), column)
    sums = _sums(manager, rows, counts, group, page_sums)
    keys = manager.index.hasher.finish(sums)
    above = manager.table.at(rows, np.maximum(first - 1, 0))
    roots = first == 0
    if roots.any():
        above[roots] = manager.root[rows[roots]]
    if own.size == rows.size and manager.index.all_new(keys):  # most decode steps: one page per row, no twin
        _insert(manager, own, keys, above)
        _advance(manager, rows, sums, full, (full + 1) * manager.page_size)
        return
    target, parent, ok = manager.index.resolve(own, keys, above, counts)
    held = ok & (target != own) & (manager.pool.refcount[own] > 1)  # something is under way with the row's own page
    if held.any():
        _index_others(manager, rows, first, full, group, prefix_all(~held, counts, group))
        return
    fresh = ok & (target == own)
    if not ok.all():
        full = first + np.bincount(group[ok], minlength=rows.size)
    _insert(manager, own[fresh], keys[fresh], parent[fresh])
    moved = np.flatnonzero(ok & (target != own))
    if moved.size:
        manager.pool.acquire(target[moved])
        manager.journal.put(manager.table.table, (owner[moved], column[moved]), target[moved])
        manager.journal.put(manager.tail_page, rows, manager.table.last_pages(rows))
        manager.pool.give_back(manager.pool.drop(own[moved]))
    collided = full < first + counts  # a key was taken by other content: the row is indexed no further
    index_at = np.where(collided, NEVER, (full + 1) * manager.page_size)
    _advance(manager, rows, sums[np.cumsum(counts) - 1], full, index_at)


def _index_others(
    manager: KVCacheManager,
    rows: Rows,
    first: NDArray[np.int64],
    full: NDArray[np.int64],
    group: NDArray[np.int64],
    free: NDArray[np.bool_],
) -> None:
    """`index_pages` up to each row's first page that is not `free` to be given up; such a row is indexed no further."""
    reach = first + np.bincount(group[free], minlength=rows.size)
    more = np.flatnonzero(reach > first)
    if more.size:
        index_pages(manager, rows[more], reach[more])
    manager.journal.put(manager.index_at, rows[reach < full], NEVER)


def index_prompt(manager: KVCacheManager, row: int) -> bool:
    """`index_pages` for a row all of whose new pages are full of its prompt, whose keys admission has computed.

    False, and nothing done, where that does not hold or something of it is indexed already.
    """
    keys = manager.pending.keys.get(row)
    first, full = int(manager.indexed[row]), int(manager.table.computed[row]) // manager.page_size
    if keys is None or full > keys.size or not manager.index.all_new(keys[first:full]):
        return False
    own = manager.table.table[row, first:full].copy()
    parents = np.empty_like(own)
    parents[0] = manager.table.table[row, first - 1] if first else manager.root[row]
    parents[1:] = own[:-1]
    manager.index.insert(own, keys[first:full], parents)
    if not first:
        manager.namespaces.hold_root(int(manager.root[row]))
    put = manager.journal.put
    put(manager.chain_sum, row, manager.pending.sums[row][full - 1])
    put(manager.indexed, row, full)
    put(manager.index_at, row, (full + 1) * manager.page_size)
    manager.pending.shorten(row, manager.index_at, keys.size)
    return True


def index_ends(manager: KVCacheManager, rows: Rows) -> None:
    """Index the partly filled last pages of rows that end, for prompts that begin like them.

    Unfilled places hold the token -1, which no prompt contains: such a page is never matched as a whole.
    """
    computed = manager.table.computed[rows].astype(np.int64)
    column, filled = np.divmod(computed, manager.page_size)
    reached = (filled > 0) & (manager.indexed[rows] == column) & (manager.index_at[rows] != NEVER)
    rows, column, filled = rows[reached], column[reached], filled[reached]
    pages = manager.table.at(rows, column)
    alone = (manager.pool.refcount[pages] == 1) & ~manager.index.indexed[pages]
    rows, column, filled, pages = rows[alone], column[alone], filled[alone], pages[alone]
    if not rows.size:
        return
    tokens = np.where(np.arange(manager.page_size) < filled[:, None], manager.index.tokens[pages], -1)
    manager.journal.put(manager.index.tokens, pages, tokens)
    sums = manager.chain_sum[rows] + manager.index.hasher.page_sums(manager.index.tokens[pages], column)
    keys, first = np.unique(manager.index.hasher.finish(sums), return_index=True)
    new = manager.index.find(keys) == 0
    keys, at = keys[new], first[new]
    above = np.where(column > 0, manager.table.at(rows, np.maximum(column - 1, 0)), manager.root[rows])
    _insert(manager, pages[at], keys, above[at])


def _advance(
    manager: KVCacheManager, rows: Rows, sums: Keys, full: NDArray[np.int64], index_at: NDArray[np.int64]
) -> None:
    """The rows' first full[i] pages are indexed, and sums[i] is the hash sum behind them."""
    manager.journal.put(manager.chain_sum, rows, sums)
    manager.journal.put(manager.indexed, rows, full)
    manager.journal.put(manager.index_at, rows, index_at)


def _insert(manager: KVCacheManager, pages: Pages, keys: Keys, parents: NDArray[np.int32]) -> None:
    """Index pages of new content; each directly under a root holds its name."""
    manager.index.insert(pages, keys, parents)
    for root in parents[parents < 0].tolist():
        manager.namespaces.hold_root(root)


def _sums(
    manager: KVCacheManager, rows: Rows, counts: NDArray[np.int64], group: NDArray[np.int64], page_sums: Keys
) -> Keys:
    """Hash sums at the end of each new page, from what each adds: a running sum per row, mod 2**64."""
    if group.size == rows.size:
        return manager.chain_sum[rows] + page_sums
    running = np.cumsum(page_sums, dtype=np.uint64)
    starts = np.cumsum(counts) - counts
    before = running[starts] - page_sums[starts]
    return running + (manager.chain_sum[rows] - before)[group]
