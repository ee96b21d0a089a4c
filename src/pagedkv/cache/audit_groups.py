"""The auditor of layer groups: recomputes who holds which page of a window from nothing but the arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagedkv.cache.audit import audit
from pagedkv.cache.groups import GroupedManager
from pagedkv.cache.windowed import WindowedGroup


def audit_groups(manager: GroupedManager) -> list[str]:
    """Every violated invariant of a GroupedManager, of its leader and of each group, as a sentence."""
    found = audit(manager.leader)
    for name, group in manager.windowed.items():
        faults = (*_rows(manager, group), *_states(group), *_attachments(manager, group))
        found += [f"{name}: {fault}" for fault in faults]
    return found


def _rows(manager: GroupedManager, group: WindowedGroup) -> Iterator[str]:
    """A row holds the columns from front to back, all that its next query sees, and pages count their rows."""
    table = manager.leader.table
    holders = np.zeros(group.num_pages + 1, np.int64)
    for row in range(table.max_rows):
        front, back = int(group.front[row]), int(group.back[row])
        held = group.table[row, front:back]
        np.add.at(holders, held, 1)
        if (held == 0).any() or group.table[row, :front].any() or group.table[row, back:].any():
            yield f"row {row} holds {group.table[row].tolist()}, not columns {front} to {back}"
        seen = max(int(table.computed[row]) - group.window + 1, 0) // group.page_size
        if front > seen:
            yield f"row {row} has lost column {seen}, which its next query sees"
        if table.live[row] and back * group.page_size < table.computed[row]:
            yield f"row {row} has computed {table.computed[row]} tokens, placed {back} pages"
        if not table.live[row] and (front or back or group.reservations.promise[row]):
            yield f"row {row} is closed but holds pages or a promise"
    if holders.tolist() != group.pool.refcount.tolist():
        yield f"pages count {group.pool.refcount.tolist()} owners, rows hold {holders.tolist()}"


def _states(group: WindowedGroup) -> Iterator[str]:
    """Every page is free, cached or used, and promises are covered."""
    pool, promises = group.pool, group.reservations
    free, queue = pool.stack[: pool.free].tolist(), pool.queue.queued().tolist()
    used = np.flatnonzero(pool.refcount).tolist()
    if sorted(free + queue + used) != list(range(1, group.num_pages + 1)):
        yield f"free {free} + cached {queue} + used {used} are not the pages 1 to {group.num_pages}"
    if promises.promised != promises.promise.sum() or promises.promised > pool.available:
        yield f"{promises.promised} promised, rows have {promises.promise.tolist()}; {pool.available} are there"


def _attachments(manager: GroupedManager, group: WindowedGroup) -> Iterator[str]:
    """A page and the leader's page that it stands for know each other; what is cached can be found by prompts."""
    pool = group.pool
    free, queue = set(pool.stack[: pool.free].tolist()), set(pool.queue.queued().tolist())
    for page in range(1, group.num_pages + 1):
        of = int(group.page_of[page])
        if of and group.attached[of] != page:
            yield f"page {page} stands for {of}, which knows page {group.attached[of]}"
        if page in free and of:
            yield f"page {page} is free but stands for {of}"
        if page in queue and not (of and manager.leader.index.indexed[of]):
            yield f"page {page} is cached but stands for nothing that prompts find"
    if np.count_nonzero(group.attached) != np.count_nonzero(group.page_of):
        yield "a page of the leader's is attached to a page that does not know it"
