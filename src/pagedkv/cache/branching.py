"""Fork, reorder and trim: rows that share pages they have not filled, and the copies that keep their writes apart.

::

    fork(row 0) -> row 1         row 0  [ 7 | 3~ ]     page 3 is partly filled and has two owners
                                 row 1  [ 7 | 3~ ]

    extend(row 1)  copy (3, 9)   row 0  [ 7 | 3~ ]     the first of them to write takes a page of its own
                                 row 1  [ 7 | 9~ ]     the last one finds itself alone and keeps the old page

A row whose last page is partly filled and shared (or indexed, after a trim) is marked in `shares_tail` until it writes.
Pages are only ever written by their only owner, and never while the index serves them. Knows nothing about tensors: the
copies are pairs of page ids for the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import supply
from pagedkv.cache.checks import check_whole, checked_counts
from pagedkv.cache.events import EventKind
from pagedkv.cache.indexing import NEVER
from pagedkv.cache.outcomes import Forked, Sequence, Wait
from pagedkv.cache.pins import Pinned
from pagedkv.cache.ragged import ragged
from pagedkv.cache.table import Rows
from pagedkv.cache.tenants import Demand
from pagedkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedkv.cache.manager import KVCacheManager


def fork(manager: KVCacheManager, row: int, branches: int, reserve: int) -> Forked | Wait:
    """`KVCacheManager.fork`."""
    at = manager.table.checked([row])
    _check_computed(manager, at)
    check_whole(branches=branches, reserve=reserve)
    if not branches:
        raise InvalidRequestError("a fork into 0 branches; it must be at least 1")
    length, pages = int(manager.table.length[row]), int(manager.table.pages[row])
    if length + reserve > manager.max_seq_len:
        raise InvalidRequestError(f"{length} tokens and {reserve} reserved exceed max_seq_len {manager.max_seq_len}")
    if branches > manager.table.free_rows:
        return Wait(branches, manager.table.free_rows, on="rows")
    partial = length % manager.page_size > 0
    entitled = pages_for_tokens(length + reserve, manager.page_size) if reserve else 0
    needed = branches * (entitled - pages + partial) if reserve else 0
    needed += int(partial and manager.reservations.entitled[row] > 0 and not manager.shares_tail[row])
    refusal = supply.refusal(manager, -int(manager.root[row]), Demand(promised=needed))
    if refusal is not None:
        return refusal
    held = manager.table.table[row, :pages].copy()
    computed, owner = int(manager.table.computed[row]), manager.table.owners[row]
    manager.pool.acquire(np.tile(held, branches))
    rows = np.array(
        [manager.table.open(held, length, computed, f"{owner}/{number}") for number in range(1, branches + 1)], np.int64
    )
    manager.namespaces.hold_root(int(manager.root[row]), branches)
    _take_after(manager, rows, np.full(branches, row, np.int64))
    manager.reservations.entitle(rows, entitled)
    manager.share_tails(np.append(rows, row), partial)
    supply.settle(manager, np.append(rows, row))
    return Forked(tuple(Sequence(int(new), int(manager.table.generation[new])) for new in rows))


def hold(manager: KVCacheManager, row: int) -> Pinned | Wait:
    """`KVCacheManager.hold`."""
    at = manager.table.checked([row])
    root, partial = int(manager.root[row]), int(manager.table.length[row]) % manager.page_size > 0
    copies = partial and manager.reservations.entitled[row] > 0 and not manager.shares_tail[row]
    refusal = supply.refusal(manager, -root, Demand(promised=int(copies)))
    if refusal is not None:
        return refusal
    manager.namespaces.hold_root(root)
    early = int(manager.table.computed[row]) < int(manager.table.length[row])
    held = manager.pins.add(manager.table.owned(at)[::-1].copy(), int(manager.table.length[row]), root, early=early)
    manager.share_tails(at, partial)
    supply.settle(manager, at)
    return held


def reorder(manager: KVCacheManager, rows: ArrayLike, parents: ArrayLike) -> None:
    """`KVCacheManager.reorder`."""
    at = manager.table.checked(rows)
    above = np.atleast_1d(np.asarray(parents))
    if above.shape != at.shape:
        raise InvalidRequestError(f"{above.size} parents for {at.size} rows")
    everyone = manager.table.checked(np.unique(above))
    _check_computed(manager, everyone)
    changes = np.flatnonzero(at != above)
    at, above = at[changes], above[changes].astype(np.int64)
    if not at.size:
        return
    table = manager.table
    manager.retentions.claim(table, at, manager.index.indexed)
    old, old_roots = table.owned(at), manager.root[at].tolist()
    entries, pages = table.table[above], table.pages[above]
    length, computed = table.length[above], table.computed[above]
    manager.pool.acquire(table.owned(above))
    for root in manager.root[above].tolist():
        manager.namespaces.hold_root(root)
    _take_after(manager, at, above)
    put = manager.journal.put
    put(table.table, at, entries)
    for state, values in ((table.pages, pages), (table.length, length), (table.computed, computed)):
        put(state, at, values)
    supply.retire(manager, manager.pool.drop(old))
    for root, row in zip(old_roots, at.tolist(), strict=True):
        manager.namespaces.let_go(root)
        manager.pending.shorten(row, manager.index_at)
    both = np.union1d(at, above)
    mark_tails(manager, both)
    supply.settle(manager, both)


def trim(manager: KVCacheManager, rows: ArrayLike, lengths: ArrayLike) -> None:
    """`KVCacheManager.trim`."""
    table, size = manager.table, manager.page_size
    at = table.checked(rows)
    keep = checked_counts(lengths, at.size, "length")
    wrong = (keep < 1) | (keep > table.length[at])
    if wrong.any():
        row, asked = int(at[wrong][0]), int(keep[wrong][0])
        raise InvalidRequestError(
            f"row {row} cannot keep {asked} tokens; it has {table.length[row]}, and keeps at least 1"
        )
    manager.retentions.claim(table, at, manager.index.indexed)
    _forget_indexed(manager, at, keep // size)
    before = table.pages[at].astype(np.int64)
    after = -(-keep // size)
    group, offset = ragged(before - after)
    owner, column = at[group], before[group] - 1 - offset  # each row's last page first
    dropped = table.at(owner, column)
    put = manager.journal.put
    put(table.table, (owner, column), 0)
    put(table.pages, at, after)
    put(table.length, at, keep)
    put(table.computed, at, np.minimum(table.computed[at], keep))
    put(manager.tail_page, at, table.last_pages(at))
    supply.retire(manager, manager.pool.drop(dropped))
    for row in at.tolist():
        manager.pending.shorten(row, manager.index_at, int(table.length[row]) // size)
    mark_tails(manager, at)
    supply.settle(manager, at)


def writers_that_copy(
    manager: KVCacheManager, rows: Rows, before: NDArray[np.int64], counts: NDArray[np.int64]
) -> Rows:
    """Which of `rows` (as indices) must copy their last page before they append counts[i] tokens to before[i]."""
    marked = np.flatnonzero(manager.shares_tail[rows] & (counts > 0))
    tails = manager.tail_page[rows[marked]]
    page, first, writers = np.unique(tails, return_index=True, return_counts=True)
    copies = np.ones(marked.size, np.bool_)
    # Where all owners write in this very call, one of them keeps the page, unless the index serves it.
    copies[first[(writers == manager.pool.refcount[page]) & ~manager.index.indexed[page]]] = False
    return marked[copies]


def copy_tails(
    manager: KVCacheManager, rows: Rows, before: NDArray[np.int64], fresh: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Give rows[i] the page fresh[i] instead of its shared last one; returns int32 [rows, 2], (source, target)."""
    manager.retentions.claim(manager.table, rows, manager.index.indexed)
    column = before // manager.page_size
    source = manager.table.at(rows, column)
    manager.journal.put(manager.index.tokens, fresh, manager.index.tokens[source])
    manager.journal.put(manager.table.table, (rows, column), fresh)
    manager.journal.put(manager.tail_page, rows, manager.table.last_pages(rows))
    supply.retire(manager, manager.pool.drop(source))
    manager.events.add(EventKind.COPIED, source, fresh)
    return np.stack((source, fresh), axis=1)


def mark_tails(manager: KVCacheManager, rows: Rows) -> None:
    """Note which rows' last page is partly filled and not theirs alone to write."""
    length = manager.table.length[rows].astype(np.int64)
    tail = manager.tail_page[rows]
    common = (manager.pool.refcount[tail] > 1) | manager.index.indexed[tail]
    manager.share_tails(rows, common & (length % manager.page_size > 0))


def _take_after(manager: KVCacheManager, rows: Rows, parents: Rows) -> None:
    """Let rows[i] stand in the index where parents[i] stands."""
    for state in (manager.root, manager.indexed, manager.index_at, manager.chain_sum, manager.tail_page):
        manager.journal.put(state, rows, state[parents])
    manager.retentions.take_after(rows.tolist(), parents.tolist())


def _check_computed(manager: KVCacheManager, rows: Rows) -> None:
    """Raise InvalidRequestError if a row has tokens that two branches would both have to compute."""
    missing = manager.table.length[rows] - manager.table.computed[rows]
    if missing.any():
        row = int(rows[missing > 0][0])
        raise InvalidRequestError(
            f"row {row} has {manager.table.length[row]} tokens of which {manager.table.computed[row]} are computed; "
            "commit all of them before it branches"
        )


def _forget_indexed(manager: KVCacheManager, rows: Rows, full: NDArray[np.int64]) -> None:
    """Take back the rows' place in the index to their first full[i] pages; the index keeps the pages themselves."""
    first = np.minimum(manager.indexed[rows], full)
    counts = (manager.indexed[rows] - first).astype(np.int64)
    if not counts.any():
        return
    group, offset = ragged(counts)
    column = first[group] + offset
    pages = manager.table.at(rows[group], column)
    sums = manager.index.hasher.page_sums(manager.index.tokens[pages], column)
    taken = np.zeros(rows.size, np.uint64)
    np.add.at(taken, group, sums)
    put = manager.journal.put
    put(manager.chain_sum, rows, manager.chain_sum[rows] - taken)
    put(manager.indexed, rows, first)
    back = (counts > 0) & (manager.index_at[rows] != NEVER)
    put(manager.index_at, rows[back], (first[back] + 1) * manager.page_size)
