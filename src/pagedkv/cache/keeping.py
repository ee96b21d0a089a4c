"""Keeping: what stays cached whoever owns it, and what leaves though somebody does: pins, limits, resets, recording.

Part of KVCacheManager, whose arrays it works on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import supply
from pagedkv.cache.indexing import NEVER
from pagedkv.cache.outcomes import Wait
from pagedkv.cache.pins import EVERY_NAMESPACE, Pinned, ResetResult, free_unowned, pages_under
from pagedkv.cache.recording import Recording
from pagedkv.cache.tenants import Demand
from pagedkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


def pin(manager: KVCacheManager, prompt: NDArray[np.int32], namespace: Hashable) -> Pinned | Wait:
    """`KVCacheManager.pin` for checked tokens."""
    one_more = np.append(prompt, np.int32(0))  # a match always leaves a token to compute; here it is not theirs
    root = manager.namespaces.find(namespace)
    pages = manager.find_cached(one_more, root)[0]
    idle = int(np.count_nonzero(manager.pool.refcount[pages] == 0))
    refusal = supply.refusal(manager, -root, Demand(idle))
    if refusal is not None:
        return refusal
    if pages.size:
        manager.namespaces.hold_root(root)
    return manager.pins.add(pages, pages.size * manager.page_size, root)


def unpin(manager: KVCacheManager, pinned: Pinned) -> None:
    """`KVCacheManager.unpin`."""
    orphans, root = manager.pins.remove(pinned)
    if root:
        supply.retire(manager, orphans)
        manager.namespaces.let_go(root)


def set_limits(manager: KVCacheManager, namespace: Hashable, floor: int, ceiling: int | None) -> None:
    """`KVCacheManager.set_limits`. A namespace with limits keeps its name."""
    root = manager.namespaces.hold(namespace)
    had = -root in manager.tenants.limits
    manager.tenants.limit(-root, namespace, floor, ceiling, manager.num_pages)
    if not manager.pool.accounts.counting:
        manager.pool.accounts.start(manager.pool.refcount > 0, manager.pool.queue.queued())
    has = -root in manager.tenants.limits
    manager.namespaces.let_go(root, int(had) + int(not has))
    supply.keep_ceilings(manager)


def reset(manager: KVCacheManager, namespace: Hashable) -> ResetResult:
    """`KVCacheManager.reset`."""
    table = manager.table
    root = None if namespace is EVERY_NAMESPACE else manager.namespaces.find(namespace)
    pages = pages_under(manager.index, root)
    rows = np.flatnonzero(table.live if root is None else table.live & (manager.root == root))
    manager.journal.put(manager.indexed, rows, 0)
    manager.journal.put(manager.index_at, rows, NEVER)
    for row in rows.tolist():
        manager.pending.shorten(row, manager.index_at)
    supply.forget(manager, pages)
    return free_unowned(manager.pool, pages)


def record(manager: KVCacheManager) -> Recording:
    """`KVCacheManager.record`."""
    if manager.journal.verbs:
        raise InvalidRequestError(f"{manager.journal.verbs} calls have been made; record a manager from its first one")
    manager.journal.calls = []
    settings: dict[str, int | bool] = {
        name: getattr(manager, name)
        for name in ("num_pages", "page_size", "max_seq_len", "prefix_caching", "partial_reuse")
    }
    settings["max_rows"] = manager.table.max_rows
    return Recording(settings, int(manager.index.hasher.seed), manager.journal.calls)
