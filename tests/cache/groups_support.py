"""What the tests of layer groups share: a tiny manager, and stores that keep what each page would hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.cache import Admitted, ChainHash, GroupedManager, LayerGroup, Placed, Sequence, audit_groups

POISON = -7


def grouped(full: int | None = 16, windowed: int = 16, window: int = 8, **changes: Any) -> GroupedManager:
    """Full attention and a window of 8, pages of 4 tokens, 4 tokens at once."""
    groups = [LayerGroup("window", windowed, 64, window)]
    if full:
        groups.insert(0, LayerGroup("full", full, 256))
    settings: dict[str, Any] = {"max_rows": 4, "max_seq_len": 64, "step": 4, "hasher": ChainHash(seed=1)}
    return GroupedManager(groups, 4, **(settings | changes))


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
