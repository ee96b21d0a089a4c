"""Admission: give a prompt its row and pages, or say why not; and which prompts' pages are just being computed.

Part of KVCacheManager, whose arrays it works on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import supply
from pagedkv.cache.events import EventKind
from pagedkv.cache.eviction import Pages
from pagedkv.cache.hashing import Keys
from pagedkv.cache.journal import Journal
from pagedkv.cache.outcomes import NO_COPIES, Admitted, Never, Sequence, Wait
from pagedkv.cache.prefix import NO_KEYS, NO_PAGES
from pagedkv.cache.retention import Retention
from pagedkv.cache.table import Rows
from pagedkv.cache.tenants import Demand

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


class Pending:
    """Keys of the full prompt pages of rows that are still computing them, so that a twin may wait for them."""

    def __init__(self, page_size: int, journal: Journal) -> None:
        self.page_size = page_size
        self.journal = journal
        self.keys: dict[int, Keys] = {}
        self.sums: dict[int, Keys] = {}

    def announce(self, row: int, keys: Keys, sums: Keys) -> None:
        """The row will index pages under these keys, those of its prompt from the first page on.

        `sums` are the hash sums behind the keys.
        """
        self.journal.entry(self.keys, row)
        self.journal.entry(self.sums, row)
        self.keys[row], self.sums[row] = keys, sums

    def shorten(self, row: int, index_at: NDArray[np.int32], pages: int = 0) -> None:
        """Announce nothing beyond the row's first `pages`, nor what it has indexed."""
        if row in self.keys:
            keys, sums = self.keys[row][:pages], self.sums[row]
            self._forget(row)
            if keys.size * self.page_size >= index_at[row]:
                self.keys[row], self.sums[row] = keys, sums

    def forget_indexed(self, rows: Rows, index_at: NDArray[np.int32]) -> None:
        """Drop those of the rows that have indexed all they announced."""
        if self.keys:
            for row in rows.tolist():
                if row in self.keys and index_at[row] > self.keys[row].size * self.page_size:
                    self._forget(row)

    def _forget(self, row: int) -> None:
        self.journal.entry(self.keys, row)
        self.journal.entry(self.sums, row)
        del self.keys[row], self.sums[row]

    def covers(self, keys: Keys, matched: int, length: int) -> bool:
        """Is page number `matched` of a prompt with these keys and `length` tokens just being computed?"""
        if matched >= (length - 1) // self.page_size or matched >= keys.size:
            return False
        return any(others.size > matched and others[matched] == keys[matched] for others in self.keys.values())


def admit(
    manager: KVCacheManager,
    prompt: NDArray[np.int32],
    namespace: Hashable,
    reserve: int,
    headroom: int,
    owner: str,
    share_pending: bool,
    reuse: bool,
    retention: tuple[Retention, ...],
) -> Admitted | Wait | Never:
    """`KVCacheManager.admit` for a checked prompt."""
    whole = pages_for_tokens(prompt.size + reserve, manager.page_size)
    if whole > manager.num_pages:
        return Never(whole, manager.num_pages)
    if not manager.table.free_rows:
        return Wait(1, 0, on="rows")
    root = manager.namespaces.hold(namespace)
    matched, keys, sums = manager.find_cached(prompt, root)
    matched = matched if reuse else NO_PAGES
    refusal = _refusal(manager, prompt.size, root, whole, matched, headroom, keys if share_pending else NO_KEYS)
    if refusal is not None:
        manager.namespaces.let_go(root)
        return refusal
    answer = _open(manager, prompt, root, matched, keys, sums, reserve, owner, reuse)
    manager.retentions.ask(answer.sequence.row, retention, manager.index.indexed)
    return answer


def _refusal(
    manager: KVCacheManager, length: int, root: int, whole: int, matched: Pages, headroom: int, keys: Keys
) -> Wait | Never | None:
    """Why a prompt of `length` tokens that needs `whole` pages in all cannot be admitted now."""
    if manager.pending.covers(keys, matched.size, length):
        return Wait(1, 0, on="prefix")
    ceiling = manager.tenants.ceiling(-root)
    if ceiling is not None and whole > ceiling:
        return Never(whole, ceiling)
    idle = int(np.count_nonzero(manager.pool.refcount.take(matched) == 0))  # would be pinned, so not available
    own = pages_for_tokens(length, manager.page_size) - matched.size
    return supply.refusal(manager, -root, Demand(own, idle, whole - matched.size - own), headroom)


def _open(
    manager: KVCacheManager,
    prompt: NDArray[np.int32],
    root: int,
    matched: Pages,
    keys: Keys,
    sums: Keys,
    reserve: int,
    owner: str,
    reuse: bool,
) -> Admitted:
    """Carry out an admission that is known to succeed. The match is pinned before anything is evicted."""
    size, put = manager.page_size, manager.journal.put
    whole = pages_for_tokens(prompt.size + reserve, size)
    shared = matched.size * size
    source, part = manager.find_part(prompt, matched, root) if reuse else (0, 0)
    manager.pool.acquire(matched, distinct=True)
    own = supply.take(manager, pages_for_tokens(prompt.size, size) - matched.size, -root)
    pages = np.concatenate((matched, own)) if matched.size else own
    row = manager.table.open(pages, prompt.size, shared + part, owner)
    put(manager.root, row, root)
    put(manager.indexed, row, matched.size)
    put(manager.tail_page, row, pages[-1])
    if reserve:
        manager.reservations.open(row, whole, pages.size)
    if manager.prefix_caching:
        put(manager.index_at, row, shared + size)
        manager.index.store_tokens(own, prompt[shared:])
        put(manager.chain_sum, row, sums[matched.size - 1] if matched.size else manager.index.hasher.root_sum(root))
        if keys.size > matched.size:
            manager.pending.announce(row, keys, sums)
    copies = np.array([(source, own[0])], np.int32) if part else NO_COPIES
    manager.events.add(EventKind.COPIED, copies[:, 0], copies[:, 1])
    return Admitted(Sequence(row, int(manager.table.generation[row])), shared + part, copies)
