"""Resizing: another number of pages at run time. Cached pages make room, and pages above the new end move down.

::

    resize(4)      before   1  2  3  4 | 5  6      page 2 is free, 3 is cached, the others are owned
                   after    1  6' 5' 4 |           copies = [(5, 2), (6, 3)]; 3 was evicted

Nothing waits and nobody loses a page: what is owned or promised keeps the pool larger than asked, and a later call
shrinks it further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache import supply
from pagedkv.cache.events import EventKind
from pagedkv.cache.eviction import Pages
from pagedkv.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Resized:
    """What a resize did.

    Attributes:
        num_pages: usable pages now.
        held: pages beyond the number asked for, which rows, pins, promises and floors still need.
        copies: int32 [pairs, 2], (source, target) pages whose keys and values the store must copy before it gives up
            what lies above num_pages. No page is in both columns.
    """

    num_pages: int
    held: int
    copies: NDArray[np.int32]


class Moves:
    """From which page to which, and how arrays that are indexed by page or hold page ids follow.

    Attributes:
        num_pages: pages afterwards.
        sources: int32 [n], all above num_pages. targets: int32 [n], all free.
    """

    def __init__(self, before: int, num_pages: int, sources: Pages, targets: Pages) -> None:
        self.num_pages = num_pages
        self.sources = sources
        self.targets = targets
        self._to = np.arange(before + 1, dtype=np.int32)
        self._to[sources] = targets

    def indexed_by_page(self, array: NDArray[Any], fill: object = 0) -> NDArray[Any]:
        """The array [pages + 1, ...] with as many places as pages are wanted; `fill` in new ones."""
        moved = np.full((self.num_pages + 1, *array.shape[1:]), fill, array.dtype)
        kept = min(moved.shape[0], array.shape[0])
        moved[:kept] = array[:kept]
        moved[self.targets] = array[self.sources]
        return moved

    def ids(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where these pages are now."""
        return self._to.take(pages)


def resize(manager: KVCacheManager, wanted: int) -> Resized:
    """`KVCacheManager.resize`."""
    tenants, pool = manager.tenants, manager.pool
    if wanted < max(tenants.floors, 1):
        least = f"the floors of the namespaces, {tenants.floors} pages" if tenants.floors else "1 page"
        raise ConfigError(f"a pool of {wanted} pages; it must hold at least {least}")
    owed = pool.used + tenants.obliged(supply.promised(manager))
    num_pages = max(wanted, min(owed, manager.num_pages))
    excess = pool.used + pool.cached - num_pages
    if excess > 0:
        supply.evict(manager, tenants.victims(pool.queue.queued(), excess, {}))
    free = np.sort(pool.stack[: pool.free])
    taken = np.ones(manager.num_pages + 1, np.bool_)
    taken[free] = False
    sources = (np.flatnonzero(taken[num_pages + 1 :]) + num_pages + 1).astype(np.int32)
    moves = Moves(manager.num_pages, num_pages, sources, free[: sources.size])
    _apply(manager, moves)
    return Resized(num_pages, num_pages - wanted, np.stack((moves.sources, moves.targets), axis=1))


def _apply(manager: KVCacheManager, moves: Moves) -> None:
    """Let every part of the manager follow."""
    table, journal = manager.table.table, manager.journal
    journal.keep(manager, "num_pages")
    manager.num_pages = moves.num_pages
    if moves.sources.size:
        journal.put(table, slice(None), moves.ids(table))
        journal.put(manager.tail_page, slice(None), moves.ids(manager.tail_page))
    for part in (manager.pool, manager.pool.queue, manager.pool.accounts, manager.index, manager.retentions):
        part.resize(moves)
    manager.pins.move(moves.ids)
    manager.events.add(EventKind.MOVED, moves.sources, moves.targets)
