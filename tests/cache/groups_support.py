"""What the tests of layer groups share: an audit of the groups, and stores that keep what each page would hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.cache import Admitted, ChainHash, GroupedManager, LayerGroup, Placed, Sequence, audit
from pagedkv.cache.windowed import WindowedGroup

POISON = -7


def grouped(full: int | None = 16, windowed: int = 16, window: int = 8, **changes: Any) -> GroupedManager:
    """Full attention and a window of 8, pages of 4 tokens, 4 tokens at once."""
    groups = [LayerGroup("window", windowed, 64, window)]
    if full:
        groups.insert(0, LayerGroup("full", full, 256))
    settings: dict[str, Any] = {"max_rows": 4, "max_seq_len": 64, "step": 4, "hasher": ChainHash(seed=1)}
    return GroupedManager(groups, 4, **(settings | changes))


def audit_groups(manager: GroupedManager) -> list[str]:
    """Every broken invariant, of the leader and of each group."""
    found = audit(manager.leader)
    for name, group in manager.windowed.items():
        found += [f"{name}: {fault}" for fault in _faults(manager, group)]
    return found


def _faults(manager: GroupedManager, group: WindowedGroup) -> list[str]:
    found, pool, table = [], group.pool, manager.leader.table
    holders = np.zeros(group.num_pages + 1, int)
    for row in range(table.max_rows):
        front, back = int(group.front[row]), int(group.back[row])
        held = group.table[row, front:back]
        np.add.at(holders, held, 1)
        if (held == 0).any() or group.table[row, :front].any() or group.table[row, back:].any():
            found.append(f"row {row} holds {group.table[row].tolist()}, not columns {front} to {back}")
        seen = max(int(table.computed[row]) - group.window + 1, 0) // group.page_size
        if front > seen:
            found.append(f"row {row} has lost column {seen}, which its next query sees")
        if table.live[row] and back * group.page_size < table.computed[row]:
            found.append(f"row {row} has computed {table.computed[row]} tokens, placed {back} pages")
        if not table.live[row] and (front or back or group.reservations.promise[row]):
            found.append(f"row {row} is closed but holds pages or a promise")
    free, queue = pool.stack[: pool.free].tolist(), pool.queue.queued().tolist()
    used = np.flatnonzero(pool.refcount).tolist()
    if sorted(free + queue + used) != list(range(1, group.num_pages + 1)):
        found.append(f"free {free} + cached {queue} + used {used} are not all pages")
    if holders.tolist() != pool.refcount.tolist():
        found.append(f"pages count {pool.refcount.tolist()} owners, rows hold {holders.tolist()}")
    for page in range(1, group.num_pages + 1):
        of = int(group.page_of[page])
        if of and group.attached[of] != page:
            found.append(f"page {page} stands for {of}, which knows page {group.attached[of]}")
        if page in free and of:
            found.append(f"page {page} is free but stands for {of}")
        if page in queue and not (of and manager.leader.index.indexed[of]):
            found.append(f"page {page} is cached but stands for nothing that prompts find")
    if np.count_nonzero(group.attached) != np.count_nonzero(group.page_of):
        found.append("a page of the leader's is attached to a page that does not know it")
    if group.reservations.promised != group.reservations.promise.sum():
        found.append("promises do not add up")
    if group.reservations.promised > pool.available:
        found.append(f"{group.reservations.promised} pages are promised, {pool.available} available")
    return found


class Sequences:
    """Drives a manager, writes each token into every group's store, and reads what the next query would see."""

    def __init__(self, manager: GroupedManager) -> None:
        self.manager = manager
        self.tokens: dict[int, list[int]] = {}
        self.handles: dict[int, Sequence] = {}
        self.stores = {
            name: np.full((max(group.num_pages, manager.leader.num_pages) + 1) * manager.page_size, POISON)
            for name, group in manager.groups.items()
        }

    def admit(self, tokens: list[int], **options: Any) -> Any:
        answer = self.manager.admit(tokens, **options)
        if isinstance(answer, Admitted):
            self.tokens[answer.sequence.row] = list(tokens)
            self.handles[answer.sequence.row] = answer.sequence
        self.check()
        return answer

    def compute(self, rows: list[int], counts: list[int]) -> Any:
        """Place, write and commit; the answer of `place`."""
        start = self.manager.leader.table.computed[rows].tolist()
        answer = self.manager.place(rows, counts)
        if isinstance(answer, Placed):
            new = [self.tokens[row][at : at + n] for row, at, n in zip(rows, start, counts, strict=True)]
            self.write(answer, [token for part in new for token in part])
            self.check(committed=False)
            self.manager.commit(rows, counts)
        self.check()
        return answer

    def prefill(self, row: int) -> Any:
        """All of a prompt, step by step; stops at the first Wait."""
        table = self.manager.leader.table
        while left := int(table.length[row] - table.computed[row]):
            answer = self.compute([row], [min(left, self.manager.step)])
            if not isinstance(answer, Placed):
                return answer
        return None

    def extend(self, rows: list[int], tokens: list[int]) -> Any:
        """A decode step, one token each."""
        answer = self.manager.extend(rows, tokens)
        if isinstance(answer, Placed):
            self.write(answer, tokens)
            for row, token in zip(rows, tokens, strict=True):
                self.tokens[row].append(token)
            self.manager.commit(rows, 1)
        self.check()
        return answer

    def release(self, rows: list[int]) -> None:
        self.manager.release([self.handles.pop(row) for row in rows])
        for row in rows:
            del self.tokens[row]
        self.check()

    def write(self, placed: Placed, tokens: list[int]) -> None:
        size = self.manager.page_size
        for name, store in self.stores.items():
            pages = store.reshape(-1, size)
            source, target = placed.copies[name].T
            pages[target] = pages[source]
            store[placed.slots[name]] = tokens

    def check(self, committed: bool = True) -> None:
        """Nothing is broken, free pages are poisoned, and each row's next query sees its own tokens in every group."""
        if committed:
            assert audit_groups(self.manager) == []
        for name, group in self.manager.groups.items():
            pool = self.manager.windowed[name].pool if name in self.manager.windowed else self.manager.leader.pool
            self.stores[name].reshape(-1, self.manager.page_size)[pool.stack[: pool.free]] = POISON
            table = self.manager.tables[name]
            for row, tokens in self.tokens.items():
                computed = int(self.manager.leader.table.computed[row])
                first = 0 if group.window is None else max(computed - group.window + 1, 0)
                read = self.stores[name].reshape(-1, self.manager.page_size)[table[row]].reshape(-1)
                assert read[first:computed].tolist() == tokens[first:computed], (name, row)
