"""Indexing: the pages that a commit has filled enter the prefix index, and rows move to twins that are there already.

Part of KVCacheManager, whose arrays it works on; the manager decides which rows have pages to index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.hashing import Keys
from pagedkv.cache.ragged import ragged
from pagedkv.cache.table import Rows

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager

NEVER = np.iinfo(np.int32).max
"""`index_at` of a row that is indexed no further."""


def index_pages(manager: KVCacheManager, rows: Rows, full: NDArray[np.int64]) -> None:
    """Index the pages of `rows` up to page number `full`, and move rows to twins that are indexed already."""
    first = manager.indexed[rows].astype(np.int64)
    counts = full - first
    if (counts == 1).all() and _index_new(manager, rows, first):
        return
    group, offset = ragged(counts)
    column, owner = first[group] + offset, rows[group]
    own = manager.table.at(owner, column)
    sums = _sums(
        manager, rows, counts, group, manager.index.hasher.page_sums(manager.index.tokens.take(own, axis=0), column)
    )
    keys = manager.index.hasher.finish(sums)
    above = np.where(first > 0, manager.table.at(rows, np.maximum(first - 1, 0)), manager.root[rows])
    target, parent, ok = manager.index.resolve(own, keys, above, counts)
    fresh = target == own
    if not ok.all():
        fresh &= ok
        full = first + np.bincount(group[ok], minlength=rows.size)
    manager.index.insert(own[fresh], keys[fresh], parent[fresh])
    for root in parent[fresh & (parent < 0)].tolist():
        manager.namespaces.hold_root(root)
    moved = np.flatnonzero(ok & (target != own))
    if moved.size:
        manager.pool.acquire(target[moved])
        manager.table.table[owner[moved], column[moved]] = target[moved]
        manager.pool.give_back(manager.pool.drop(own[moved]))
    manager.chain_sum[rows] = sums[np.cumsum(counts) - 1]
    manager.indexed[rows] = full
    collided = full < first + counts  # a key was taken by other content: the row is indexed no further
    manager.index_at[rows] = np.where(collided, NEVER, (full + 1) * manager.page_size)


def _index_new(manager: KVCacheManager, rows: Rows, column: NDArray[np.int64]) -> bool:
    """`index_pages` for a decode step: page number column[i] of rows[i], if all content is new; else nothing."""
    own = manager.table.at(rows, column)
    tokens = manager.index.tokens.take(own, axis=0)
    sums = manager.chain_sum[rows] + manager.index.hasher.page_sums(tokens, column)
    keys = manager.index.hasher.finish(sums)
    if not manager.index.all_new(keys):
        return False
    parent = manager.table.at(rows, np.maximum(column - 1, 0))
    for place in np.flatnonzero(column == 0).tolist():
        root = int(manager.root[rows[place]])
        parent[place] = root
        manager.namespaces.hold_root(root)
    manager.index.insert(own, keys, parent)
    manager.chain_sum[rows] = sums
    manager.indexed[rows] = column + 1
    manager.index_at[rows] = (column + 2) * manager.page_size
    return True


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
