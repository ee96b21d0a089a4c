"""Extension: places for the next tokens of rows, and the pages that this takes, for all rows or for none.

Part of KVCacheManager, whose arrays it works on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import branching, supply
from pagedkv.cache.checks import check_lengths, check_token_count
from pagedkv.cache.eviction import Pages
from pagedkv.cache.outcomes import NO_COPIES, Extended, Never, Wait
from pagedkv.cache.table import Rows

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


def extend(
    manager: KVCacheManager, rows: Rows, ids: NDArray[np.int32], counts: NDArray[np.int64]
) -> Extended | Wait | Never:
    """`KVCacheManager.extend` for checked arguments."""
    check_token_count(ids, counts)
    manager.recent.store()
    table, size = manager.table, manager.page_size
    before = table.length.take(rows).astype(np.int64)
    after = before + counts
    check_lengths(rows, after, manager.max_seq_len)
    need = -(-after // size) - table.pages.take(rows)
    copying = branching.writers_that_copy(manager, rows, before, counts)
    copies = NO_COPIES
    if copying.size or need.any():
        drawn = need + np.bincount(copying, minlength=rows.size)
        refusal = _shortage(manager, rows, need, drawn)
        if refusal is not None:
            return refusal
        fresh = _draw(manager, rows, drawn, np.append(rows[copying], np.repeat(rows, need)))
        table.append_pages(rows, need, fresh[copying.size :])
        manager.journal.put(manager.tail_page, rows, table.last_pages(rows))
        copies = branching.copy_tails(manager, rows[copying], before[copying], fresh[: copying.size])
    manager.journal.put(table.length, rows, after)
    settled = rows[manager.shares_tail.take(rows) & (counts > 0)]
    manager.share_tails(settled, False)
    supply.settle(manager, settled)
    slots = table.slots_unchecked(rows, before, counts)
    if manager.prefix_caching:
        manager.journal.put(manager.index.tokens.reshape(-1), slots, ids)
    return Extended(slots, copies)


def extend_by_one(manager: KVCacheManager, rows: Rows, ids: NDArray[np.int32]) -> Extended | Wait | Never:
    """`extend` by one token for rows that share no partly filled page: a page is needed where all pages are full."""
    if ids.shape != rows.shape:
        check_token_count(ids, np.ones(rows.size, np.int64))
    table, size = manager.table, manager.page_size
    before = table.length.take(rows)
    after = before + 1
    check_lengths(rows, after, manager.max_seq_len)
    offset = before % size if size & (size - 1) else before & (size - 1)
    growing = (offset == 0).nonzero()[0]
    if growing.size:
        refusal = _grow_by_one(manager, rows[growing])
        if refusal is not None:
            return refusal
    manager.journal.replace(table.length, rows, before, after)
    slots = np.multiply(manager.tail_page.take(rows), size, dtype=np.int64)
    slots += offset
    if manager.prefix_caching:
        manager.recent.add(rows, slots, ids)
    return Extended(slots)


def _grow_by_one(manager: KVCacheManager, rows: Rows) -> Wait | Never | None:
    """Append a page to each row, or say why not."""
    if manager.tenants.limits or rows.size > manager.pool.free - manager.reservations.promised:
        one = np.ones(rows.size, np.int64)
        refusal = _shortage(manager, rows, one, one)
        if refusal is not None:
            return refusal
    fresh = supply.take(manager, rows.size, -manager.root[rows])
    if manager.reservations.promised:
        manager.reservations.draw(rows, np.ones(rows.size, np.int64))
    manager.table.append_page(rows, fresh)
    manager.journal.put(manager.tail_page, rows, fresh)
    return None


def _shortage(
    manager: KVCacheManager, rows: Rows, growth: NDArray[np.int64], drawn: NDArray[np.int64]
) -> Wait | Never | None:
    """Why rows[i] cannot draw drawn[i] pages, by growth[i] of which it becomes longer."""
    whole = manager.table.pages.take(rows) + growth
    if int(whole.max()) > manager.num_pages:
        return Never(int(whole.max()), manager.num_pages)
    for at in range(rows.size if manager.tenants.limits else 0):
        ceiling = manager.tenants.ceiling(-int(manager.root[rows[at]]))
        if ceiling is not None and growth[at] and whole[at] > ceiling:
            return Never(int(whole[at]), ceiling)
    if int(drawn.sum()) > manager.pool.free:
        manager.index_filled()  # twins found by it give pages back, and change what may be evicted
    return supply.shortage(manager, rows, drawn)


def _draw(manager: KVCacheManager, rows: Rows, drawn: NDArray[np.int64], takers: Rows) -> Pages:
    """Hand out drawn[i] pages to each row, what was set aside for it first; page j goes to takers[j]."""
    pages = supply.take(manager, takers.size, -manager.root[takers])
    manager.reservations.draw(rows, drawn)
    return pages
