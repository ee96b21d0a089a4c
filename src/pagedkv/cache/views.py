"""Views: what can be read off a manager without changing who owns what. Costs a pass over pages or rows each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.outcomes import Usage
from pagedkv.cache.ragged import ragged
from pagedkv.cache.tenants import NamespaceUsage

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


def usage(manager: KVCacheManager) -> Usage:
    """`KVCacheManager.usage`."""
    pool, table = manager.pool, manager.table
    alone, tokens = manager.pins.alone()  # pages that no row counts
    owned = int(table.pages.sum()) + alone
    if manager.tails_shared:
        tokens += _tokens_held(manager)
    else:  # shared pages are full ones
        tokens += int(table.length.sum()) - (owned - pool.used) * manager.page_size
    return Usage(
        manager.num_pages,
        pool.used,
        pool.cached,
        pool.free,
        manager.reservations.promised,
        owned,
        tokens,
        manager.page_size,
    )


def namespace_usage(manager: KVCacheManager, namespace: Hashable) -> NamespaceUsage:
    """`KVCacheManager.namespace_usage`."""
    root = manager.namespaces.find(namespace)
    if not root:
        return NamespaceUsage(0, 0, 0)
    mine = manager.pool.accounts.of == -root
    used = int(np.count_nonzero(mine & (manager.pool.refcount > 0)))
    cached = int(np.count_nonzero(mine[manager.pool.queue.queued()]))
    promised = int(manager.reservations.promise[manager.table.live & (manager.root == root)].sum())
    return NamespaceUsage(used, cached, promised, manager.tenants.floor(-root), manager.tenants.ceiling(-root))


def private_pages(manager: KVCacheManager, rows: ArrayLike) -> NDArray[np.int64]:
    """`KVCacheManager.private_pages`."""
    at = manager.table.checked(rows)
    group, column = ragged(manager.table.pages[at].astype(np.int64))
    alone = manager.pool.refcount[manager.table.at(at[group], column)] == 1
    return np.bincount(group[alone], minlength=at.size)


def _tokens_held(manager: KVCacheManager) -> int:
    """Tokens in the rows' pages, each page counted once, with as many tokens as the owner that sees most of it."""
    rows = np.flatnonzero(manager.table.live)
    group, column = ragged(manager.table.pages[rows].astype(np.int64))
    seen = np.minimum(manager.table.length[rows[group]] - column * manager.page_size, manager.page_size)
    filled = np.zeros(manager.num_pages + 1, np.int64)
    np.maximum.at(filled, manager.table.at(rows[group], column), seen)
    return int(filled.sum())
