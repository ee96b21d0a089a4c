"""The auditor: recomputes every invariant of a KVCacheManager from nothing but its arrays.

It shares no code with the verbs it checks. Each violation is one sentence that names pages, rows and owners, so that a
leak points at its request. Costs a few passes over all pages and rows: for tests after every step, and for a server now
and then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.eviction import DEFAULT_LEVEL
from pagedkv.cache.manager import KVCacheManager
from pagedkv.errors import AuditError


def check(manager: KVCacheManager) -> None:
    """Raise AuditError with every violation that `audit` finds."""
    found = audit(manager)
    if found:
        raise AuditError("; ".join(found))


def audit(manager: KVCacheManager) -> list[str]:
    """Every violated invariant, as a sentence; empty if all hold."""
    return [
        *_owners(manager),
        *_pins(manager),
        *_states(manager),
        *_rows(manager),
        *_index(manager),
        *_chains(manager),
        *_keys(manager),
        *_reservations(manager),
        *_tails(manager),
        *_names(manager),
        *_accounts(manager),
        *_priorities(manager),
    ]


def _live(manager: KVCacheManager) -> list[int]:
    return np.flatnonzero(manager.table.live).tolist()


def _pages_of(manager: KVCacheManager, row: int) -> list[int]:
    return manager.table.table[row, : manager.table.pages[row]].tolist()


def _exists(manager: KVCacheManager, page: int) -> bool:
    return 1 <= page <= manager.num_pages


def _queue(manager: KVCacheManager) -> list[int]:
    """The cached pages in the order of eviction."""
    queue = manager.pool.queue
    entries = [
        (int(line.entries[at]), at, level)
        for level, line in sorted(queue.lines.items())
        for at in range(line.head, line.tail)
    ]
    return [
        page
        for page, at, level in entries
        if _exists(manager, page) and queue.position[page] == at and queue.level[page] == level
    ]


def _owners(manager: KVCacheManager) -> Iterator[str]:
    """A page's count equals the rows and pins that name it, and no row names a page twice or the null page."""
    owners: dict[int, list[str]] = {}
    for row in _live(manager):
        pages = _pages_of(manager, row)
        name = f"{manager.table.owners[row]!r} (row {row})"
        if len(set(pages)) != len(pages):
            yield f"{name} names a page twice: {pages}"
        for page in pages:
            owners.setdefault(page, []).append(name)
    for number, pages in manager.pins.by_number().items():
        for page in pages:
            owners.setdefault(page, []).append(f"pin {number}")
    for page in sorted(set(owners) | set(np.flatnonzero(manager.pool.refcount).tolist())):
        holders = owners.get(page, [])
        named = ", ".join(holders) or "nobody"
        if not _exists(manager, page):
            yield f"page {page} does not exist but has owners or is named by {named}"
        elif manager.pool.refcount[page] != len(holders):
            yield f"page {page} counts {manager.pool.refcount[page]} owners but is named by {named}"


def _pins(manager: KVCacheManager) -> Iterator[str]:
    """The pages of a pin that are indexed come first, as a chain from a root."""
    for number, pages in manager.pins.by_number().items():
        if not all(_exists(manager, page) for page in pages):
            yield f"pin {number} holds pages that do not exist: {pages}"
            continue
        indexed = [page for page in pages if manager.index.indexed[page]]
        if indexed != pages[: len(indexed)]:
            yield f"pin {number} holds pages {pages}, of which only {indexed} are indexed"
        parents = manager.index.parent[indexed].tolist()
        if indexed and (parents[0] >= 0 or parents[1:] != indexed[:-1]):
            yield f"pin {number} holds pages {indexed}, which continue {parents}: that is no chain from a root"


def _states(manager: KVCacheManager) -> Iterator[str]:
    """Every page is free, cached or used, never two of them, and the counters say how many."""
    pool = manager.pool
    free = pool.stack[: pool.free].tolist()
    queue = _queue(manager)
    used = np.flatnonzero(pool.refcount).tolist()
    if len(set(free)) != len(free):
        yield "the free stack holds a page twice"
    if len(queue) != pool.cached:
        yield f"{pool.cached} pages are counted as cached, {len(queue)} are in the eviction queue"
    if sorted(np.flatnonzero(pool.queue.position >= 0).tolist()) != sorted(queue):
        yield "a page has a position in the eviction queue but no valid entry there"
    if sorted(free + queue + used) != list(range(1, manager.num_pages + 1)):
        yield f"free {sorted(free)} + cached {sorted(queue)} + used {used} are not the pages 1 to {manager.num_pages}"
    for page in free:
        if _exists(manager, page) and manager.index.indexed[page]:
            yield f"page {page} is free but indexed"
    for page in queue:
        if not manager.index.indexed[page]:
            yield f"page {page} is cached but not indexed"


def _rows(manager: KVCacheManager) -> Iterator[str]:
    """computed <= length <= capacity, with exactly as many pages as the length needs; closed rows hold nothing."""
    table = manager.table
    idle = table.max_rows - int(table.live.sum())
    if table.free_rows != idle:
        yield f"{table.free_rows} rows can be handed out, {idle} have no sequence"
    for row in range(table.max_rows):
        computed, length, pages = int(table.computed[row]), int(table.length[row]), int(table.pages[row])
        if not table.live[row]:
            if computed or length or pages or table.table[row].any() or row in table.owners:
                yield f"row {row} is closed but holds {length} tokens, {pages} pages {table.table[row].tolist()}"
            continue
        if not 0 <= computed <= length or not length:
            yield f"row {row} has {computed} computed of {length} tokens"
        if pages != (length + manager.page_size - 1) // manager.page_size:
            yield f"row {row} has {pages} pages for {length} tokens"
        if table.table[row, pages:].any():
            yield f"row {row} names pages past its end: {table.table[row].tolist()}"
        if manager.tail_page[row] != table.table[row, max(pages - 1, 0)]:
            yield f"row {row} ends in page {table.table[row, max(pages - 1, 0)]}, not in {manager.tail_page[row]}"
        if int(manager.indexed[row]) > computed // manager.page_size:
            yield f"row {row} has {manager.indexed[row]} indexed pages but {computed} computed tokens"


def _index(manager: KVCacheManager) -> Iterator[str]:
    """Every indexed page is found under its key, once; its parent is resident and evicted after it."""
    index, pool = manager.index, manager.pool
    rank = {page: place for place, page in enumerate(_queue(manager))}
    pages = [p for p in np.flatnonzero(index.indexed).tolist() if p]
    reached: list[int] = []
    for bucket in np.flatnonzero(index.bucket).tolist():
        page = int(index.bucket[bucket])
        while page and len(reached) <= manager.num_pages:
            reached.append(page)
            if not _exists(manager, page):
                break
            if int(index.key[page]) & (index.bucket.size - 1) != bucket:
                yield f"page {page} hangs in bucket {bucket}, which is not its key's"
            page = int(index.next[page])
    if sorted(reached) != pages:
        yield f"pages {pages} are indexed, pages {sorted(reached)} are in the buckets"
    if len({int(index.key[p]) for p in pages}) != len(pages):
        yield "two pages are indexed under one key"
    for page in pages:
        parent = int(index.parent[page])
        if parent >= 0 and not (_exists(manager, parent) and index.indexed[parent]):
            yield f"page {page} continues page {parent}, which is not resident"
        elif parent > 0 and pool.refcount[parent] == 0:
            if pool.refcount[page]:
                yield f"page {page} is used but page {parent}, which it continues, is not"
            elif rank.get(parent, -1) < rank.get(page, -1):
                yield f"page {parent} would be evicted before page {page}, which continues it"


def _chains(manager: KVCacheManager) -> Iterator[str]:
    """The indexed pages of a row are a chain from its root."""
    for row in _live(manager):
        parent = int(manager.root[row])
        for page in _pages_of(manager, row)[: int(manager.indexed[row])]:
            indexed = _exists(manager, page) and manager.index.indexed[page]
            if not indexed or int(manager.index.parent[page]) != parent:
                yield f"page {page} of {manager.table.owners[row]!r} (row {row}) is not indexed under {parent}"
            parent = page


def _keys(manager: KVCacheManager) -> Iterator[str]:
    """Every indexed page, owned or not, hangs on a root and has the key of the tokens it holds, level by level."""
    index = manager.index
    below: dict[int, list[int]] = {}
    for page in range(1, manager.num_pages + 1):
        if index.indexed[page]:
            below.setdefault(int(index.parent[page]), []).append(page)
    sums = {parent: int(index.hasher.root_sum(parent)) for parent in below if parent < 0}
    level = [page for parent in sums for page in below.pop(parent)]
    column = 0
    while level:
        own = index.hasher.page_sums(index.tokens[level], np.full(len(level), column, np.int64)).tolist()
        totals = {page: (sums[int(index.parent[page])] + more) % 2**64 for page, more in zip(level, own, strict=True)}
        keys: NDArray[np.uint64] = index.hasher.finish(np.array(list(totals.values()), np.uint64))
        for page, key in zip(level, keys.tolist(), strict=True):
            if key != int(index.key[page]):
                yield f"page {page} is indexed under a key that is not its tokens'"
        sums, column = totals, column + 1
        level = [page for parent in level for page in below.pop(parent, [])]
    for parent, pages in below.items():
        yield f"pages {pages} are indexed under page {parent}, which hangs on no root"


def _reservations(manager: KVCacheManager) -> Iterator[str]:
    """Promises add up, are covered by pages, and no row is promised more than it may still need."""
    promise, promised = manager.reservations.promise, manager.reservations.promised
    if promised != int(promise.sum()) or (promise < 0).any():
        yield f"{promised} pages are promised, the rows' promises are {promise.tolist()}"
    if promised > manager.pool.available:
        yield f"{promised} pages are promised, {manager.pool.available} are available"
    for row in range(manager.table.max_rows):
        entitled, pages = int(manager.reservations.entitled[row]), int(manager.table.pages[row])
        if promise[row] > (max(entitled - pages, 0) + manager.shares_tail[row] if entitled else 0):
            yield f"row {row} is promised {promise[row]} pages; it has {pages} of {entitled}"
        if entitled and not manager.table.live[row]:
            yield f"row {row} is closed but entitled to {entitled} pages"


def _tails(manager: KVCacheManager) -> Iterator[str]:
    """A partly filled last page is its row's alone to write, or the row is marked."""
    for row in range(manager.table.max_rows):
        filled = int(manager.table.length[row]) % manager.page_size
        marked = bool(manager.shares_tail[row])
        if marked and not filled:
            yield f"row {row} is marked as sharing its last page, of which it has filled {filled} tokens"
        page = int(manager.table.table[row, manager.table.pages[row] - 1]) if filled else 0
        common = _exists(manager, page) and (manager.pool.refcount[page] > 1 or manager.index.indexed[page])
        if common and not marked:
            yield f"page {page}, partly filled by row {row}, is shared or indexed but the row is not marked"


def _names(manager: KVCacheManager) -> Iterator[str]:
    """Names are kept for as long as something uses them."""
    users: dict[int, int] = {}
    for root in [*manager.pins.roots.values(), *(-account for account in manager.tenants.limits)]:
        users[root] = users.get(root, 0) + 1
    for row in _live(manager):
        users[int(manager.root[row])] = users.get(int(manager.root[row]), 0) + 1
    for page in np.flatnonzero(manager.index.indexed).tolist():
        parent = int(manager.index.parent[page])
        if page and parent < 0:
            users[parent] = users.get(parent, 0) + 1
    if users != manager.namespaces.users():
        yield f"namespaces have users {manager.namespaces.users()}, counted {users}"


def _accounts(manager: KVCacheManager) -> Iterator[str]:
    """Pages are charged to the namespace that uses them, the counts are right, and caching exceeds no ceiling."""
    accounts, queue = manager.pool.accounts, _queue(manager)
    for row in _live(manager):
        for page in _pages_of(manager, row):
            if _exists(manager, page) and accounts.of[page] != -manager.root[row]:
                yield f"page {page} of row {row} is charged to {accounts.of[page]}, the row's is {-manager.root[row]}"
    if not accounts.counting:
        return
    size = accounts.used.size
    for kind, pages, counted in (
        ("used", np.flatnonzero(manager.pool.refcount).tolist(), accounts.used.tolist()),
        ("cached", queue, accounts.cached.tolist()),
    ):
        found = np.bincount(accounts.of[pages], minlength=size).tolist()
        if found != counted:
            yield f"accounts have {found} {kind} pages, counted as {counted}"
    for account, limit in manager.tenants.limits.items():
        used, cached = (int(pages[account]) if account < size else 0 for pages in (accounts.used, accounts.cached))
        if limit.ceiling is not None and cached and used + cached > limit.ceiling:
            yield f"{limit.name!r} has {used} used and {cached} cached pages; its ceiling is {limit.ceiling}"


def _priorities(manager: KVCacheManager) -> Iterator[str]:
    """A page ranks at least as a cached one that continues it, which stands in the queue where its priority says."""
    retentions = manager.retentions
    if not retentions.active:
        return
    for page in _queue(manager):
        priority, end = int(retentions.priority[page]), float(retentions.ends[page])
        level = int(manager.pool.queue.level[page])
        if level > priority or (end > retentions.now and level != priority):
            yield f"page {page} of priority {priority} is cached at level {level}"
        if end <= retentions.now:
            priority, end = min(priority, DEFAULT_LEVEL), -math.inf
        parent = int(manager.index.parent[page])
        if parent > 0 and (retentions.priority[parent] < priority or retentions.ends[parent] < end):
            yield f"page {parent} of priority {retentions.priority[parent]} ranks below page {page}, which continues it"
