"""Supply: whether pages can be had, where they come from, and where they go when their last owner leaves.

What the verbs of KVCacheManager share; works on the manager's arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.events import EventKind
from pagedkv.cache.eviction import Pages
from pagedkv.cache.indexing import NEVER, index_ends
from pagedkv.cache.outcomes import Wait
from pagedkv.cache.table import Rows
from pagedkv.cache.tenants import Demand

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


def refusal(manager: KVCacheManager, account: int, demand: Demand, headroom: int = 0) -> Wait | None:
    """Why the demand of one account cannot be met now, with `headroom` pages left over."""
    needed = demand.taken + demand.promised + headroom
    free = manager.pool.available - manager.reservations.promised - demand.revived
    if needed > free:
        return Wait(needed, max(free, 0))
    if manager.tenants.limits:
        return manager.tenants.refusal({account: demand}, manager.pool.available, promised(manager), headroom)
    return None


def shortage(manager: KVCacheManager, rows: Rows, drawn: NDArray[np.int64]) -> Wait | None:
    """Why rows[i] cannot draw drawn[i] pages, its own promise first."""
    answer = manager.reservations.shortage(rows, drawn, manager.pool.available)
    if answer is not None or not manager.tenants.limits:
        return answer
    accounts = -manager.root[rows]
    kept = np.minimum(manager.reservations.promise[rows], drawn)
    demands = {
        account: Demand(int(drawn[accounts == account].sum()), 0, -int(kept[accounts == account].sum()))
        for account in dict.fromkeys(accounts[drawn > 0].tolist())
    }
    return manager.tenants.refusal(demands, manager.pool.available, promised(manager))


def promised(manager: KVCacheManager) -> NDArray[np.int64]:
    """Pages promised to each account's rows: int64, indexed by account."""
    rows = np.flatnonzero(manager.reservations.promise)
    accounts = manager.namespaces.numbers + 1
    counted = np.bincount(-manager.root[rows], manager.reservations.promise[rows], minlength=accounts)
    return counted.astype(np.int64)


def take(manager: KVCacheManager, count: int, account: int | NDArray[np.integer]) -> Pages:
    """Hand out pages to an account, or page i to account[i], evicting cached ones if the free ones do not suffice."""
    if manager.tenants.limits:
        _make_room(manager, count, account)
    elif count > manager.pool.free:
        evict(manager, manager.pool.queue.oldest(count - manager.pool.free))
    pages = manager.pool.take(count, account)
    manager.retentions.fresh(pages)
    return pages


def _make_room(manager: KVCacheManager, count: int, account: int | NDArray[np.integer]) -> None:
    """Evict as floors and ceilings want it, if anything must go. Costs a pass over the cached pages then."""
    numbers, taken = np.unique(np.broadcast_to(account, (count,)), return_counts=True)
    takers = dict(zip(numbers.tolist(), taken.tolist(), strict=True))
    missing = count - manager.pool.free
    if missing > 0 or manager.tenants.exceeded(takers):
        evict(manager, manager.tenants.victims(manager.pool.queue.queued(), missing, takers))


def evict(manager: KVCacheManager, pages: Pages) -> None:
    """Cached pages become free."""
    if pages.size:
        manager.pool.uncache(pages)
        forget(manager, pages)
        manager.events.add(EventKind.EVICTED, pages)
        manager.pool.give_back(pages)


def forget(manager: KVCacheManager, pages: Pages) -> None:
    """Take pages out of the index; those directly under a root let go of its name."""
    manager.index.remove(pages)
    parents = manager.index.parent.take(pages)
    for root in parents[parents < 0].tolist():
        manager.namespaces.let_go(root)


def retire(manager: KVCacheManager, orphans: Pages) -> None:
    """Pages that lost their last owner, the first of them oldest, become cached if indexed and free otherwise."""
    kept = manager.index.indexed.take(orphans)
    if not kept.all():
        manager.pool.give_back(orphans[~kept])
        orphans = orphans[kept]
    if manager.retentions.active:
        levels = manager.retentions.levels(orphans)
        for level in np.unique(levels).tolist():
            manager.pool.retire(orphans[levels == level], level)
    else:
        manager.pool.retire(orphans)
    if manager.tenants.limits:
        keep_ceilings(manager)


def release(manager: KVCacheManager, rows: Rows) -> None:
    """`KVCacheManager.release` for open rows whose full pages are indexed."""
    if manager.partial_reuse:
        index_ends(manager, rows)
    manager.retentions.claim(manager.table, rows, manager.index.indexed)
    retire(manager, manager.pool.drop(manager.table.owned(rows), distinct=rows.size == 1))
    manager.reservations.close(rows)
    at = int(rows[0]) if rows.size == 1 else rows
    manager.journal.put(manager.index_at, at, NEVER)
    manager.journal.put(manager.tail_page, at, 0)
    manager.share_tails(rows, False)
    manager.table.close(rows)
    for row in rows.tolist():
        manager.namespaces.let_go(int(manager.root[row]))
        manager.pending.shorten(row, manager.index_at)
        manager.retentions.close(row)


def keep_ceilings(manager: KVCacheManager) -> None:
    """Evict the cached pages with which namespaces exceed their ceilings."""
    exceeded = manager.tenants.exceeded(dict.fromkeys(manager.tenants.limits, 0))
    if exceeded:
        evict(manager, manager.tenants.victims(manager.pool.queue.queued(), 0, exceeded))


def demote(manager: KVCacheManager) -> int:
    """Cached pages whose time has run out go down to the default level, in the order of eviction; says how many."""
    queued = manager.pool.queue.queued()
    over = manager.retentions.ended(queued, manager.pool.queue.level[queued])
    if over.size:
        manager.pool.queue.withdraw(over)
        manager.pool.queue.push(over)
    return int(over.size)


def settle(manager: KVCacheManager, rows: Rows) -> None:
    """Adjust the promises of these rows to the pages they hold and the copies they may need."""
    reservations, pool = manager.reservations, manager.pool
    if not reservations.entitled.take(rows).any():
        return
    held, copies = manager.table.pages[rows], manager.shares_tail[rows]
    if not manager.tenants.limits:
        reservations.settle(rows, held, copies, pool.available)
        return
    reservations.settle(rows, held, copies, 0)  # first give back what is promised in excess
    for at in range(rows.size):
        one, account = slice(at, at + 1), -int(manager.root[rows[at]])
        room = manager.tenants.promisable(account, pool.available, promised(manager))
        reservations.settle(rows[one], held[one], copies[one], reservations.promised + room)
