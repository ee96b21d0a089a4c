"""KVCacheManager: admits prompts, extends and releases sequences, and shares the pages of common prefixes.

Pages in arrays, arrays out: knows nothing about tensors, models, requests, threads or clocks. Every verb either does
all it was asked or refuses and has changed nothing; its cost grows with the pages that change hands.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache.checks import (
    check_lengths,
    check_sizes,
    check_token_count,
    checked_counts,
    checked_ids,
    checked_prompt,
)
from pagedkv.cache.hashing import ChainHash, Keys
from pagedkv.cache.outcomes import Admitted, Extended, Never, Sequence, Usage, Wait
from pagedkv.cache.pool import PagePool, Pages
from pagedkv.cache.prefix import Namespaces, PrefixIndex
from pagedkv.cache.ragged import ragged
from pagedkv.cache.table import PageTable, Rows

_NO_PAGES: Pages = np.zeros(0, np.int32)
_NO_KEYS: Keys = np.zeros(0, np.uint64)
_NEVER = np.iinfo(np.int32).max


class KVCacheManager:
    """Who owns which page.

    ::

        admit(prompt) -> row     match the longest cached prefix and pin it, take fresh pages for the rest
        extend(rows, tokens)     one more place per token; a page only where a row crosses a page's end
        commit(rows, counts)     keys and values of the next `counts` tokens are in place: index the full pages
        release(sequences)       pages without another owner become cached (if indexed) or free

    Args:
        num_pages: usable pages; ids run from 1 to num_pages, page 0 is the null page.
        page_size: tokens per page.
        max_rows: most sequences at once.
        max_seq_len: most tokens of one sequence.
        prefix_caching: share and keep the pages of common prefixes.
        hasher: where keys come from; None for one with a seed of its own.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        max_rows: int,
        max_seq_len: int,
        prefix_caching: bool = True,
        hasher: ChainHash | None = None,
    ) -> None:
        check_sizes(num_pages, page_size, max_rows, max_seq_len)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.prefix_caching = prefix_caching
        self.pool = PagePool(num_pages)
        self.table = PageTable(max_rows, pages_for_tokens(max_seq_len, page_size), page_size)
        self.index = PrefixIndex(num_pages, page_size, hasher or ChainHash())
        self.namespaces = Namespaces()
        self.root = np.zeros(max_rows, np.int32)
        self.indexed = np.zeros(max_rows, np.int32)  # leading pages of the row that the index holds
        self.index_at = np.zeros(max_rows, np.int32)  # computed tokens from which on the row has a page to index
        self.chain_sum = np.zeros(max_rows, np.uint64)  # hash sum of the row's indexed pages
        self.promise = np.zeros(max_rows, np.int32)  # pages set aside for the row and not drawn yet
        self.promised = 0
        self._pending: dict[int, Keys] = {}  # keys of the full prompt pages of rows that are still computing them

    def admit(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        reserve: int = 0,
        headroom: int = 0,
        owner: str = "",
        share_pending: bool = False,
    ) -> Admitted | Wait | Never:
        """Give a prompt a row and all its pages; leading pages that are cached are shared instead of taken.

        At least one token is always left to compute.

        Args:
            tokens: the prompt's token ids, int32 [n], n >= 1.
            namespace: prompts share pages only within one namespace (a tenant's salt, an adapter); any hashable.
            reserve: tokens that will be appended later and whose pages shall be set aside now.
            headroom: pages that must stay available after admission; give 0 where nothing else runs, since a
                prompt waits for ever if it can only be admitted without.
            owner: name for messages and audits.
            share_pending: answer Wait(on="prefix") while another row is computing the next full page of this prompt.

        Raises:
            InvalidRequestError: empty prompt, negative token ids or arguments, or more than max_seq_len tokens.
        """
        prompt = checked_prompt(tokens, reserve, headroom, self.max_seq_len)
        whole = pages_for_tokens(prompt.size + reserve, self.page_size)
        if whole > self.num_pages:
            return Never(whole, self.num_pages)
        if not self.table.free_rows:
            return Wait(1, 0, on="rows")
        root = self.namespaces.hold(namespace)
        matched, keys, sums = self._match(prompt, root)
        refusal = self._refusal(prompt.size, whole, matched, headroom, keys if share_pending else _NO_KEYS)
        if refusal is not None:
            self.namespaces.let_go(root)
            return refusal
        return self._open(prompt, root, matched, keys, sums, whole, owner)

    def _refusal(self, length: int, whole: int, matched: Pages, headroom: int, keys: Keys) -> Wait | None:
        """Why a prompt of `length` tokens that needs `whole` pages in all cannot be admitted now."""
        if self._is_pending(keys, matched.size, length):
            return Wait(1, 0, on="prefix")
        needed = whole - matched.size + headroom
        idle = int(np.count_nonzero(self.pool.refcount[matched] == 0))  # would be pinned, so not available
        free = self.pool.available - self.promised - idle
        return Wait(needed, max(free, 0)) if needed > free else None

    def _open(
        self,
        prompt: NDArray[np.int32],
        root: int,
        matched: Pages,
        keys: Keys,
        sums: Keys,
        whole: int,
        owner: str,
    ) -> Admitted:
        """Carry out an admission that is known to succeed. The match is pinned before anything is evicted."""
        cached = matched.size * self.page_size
        self.pool.acquire(matched)
        own = self._take(pages_for_tokens(prompt.size, self.page_size) - matched.size)
        row = self.table.open(np.concatenate((matched, own)), prompt.size, cached, owner)
        self.root[row] = root
        self.indexed[row] = matched.size
        self.index_at[row] = cached + self.page_size
        self.promise[row] = whole - matched.size - own.size
        self.promised += int(self.promise[row])
        if self.prefix_caching:
            self.index.store_tokens(own, prompt[cached:])
            self.chain_sum[row] = sums[matched.size - 1] if matched.size else self.index.hasher.root_sum(root)
            if keys.size > matched.size:
                self._pending[row] = keys
        return Admitted(Sequence(row, int(self.table.generation[row])), cached)

    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Extended | Wait | Never:
        """Append tokens to rows: counts[i] of `tokens` to rows[i], for all rows or for none.

        Rows draw first on what was set aside for them at admission.

        Args:
            rows: rows of live sequences, int [n], all different.
            tokens: token ids, int32 [sum(counts)], row after row.
            counts: tokens per row, int [n] or one number for all.

        Raises:
            StaleSequenceError, InvalidRequestError: rows or tokens are wrong, or a row would exceed max_seq_len.
        """
        at, ids = self.table.checked(rows), checked_ids(tokens)
        if _is_one(counts):
            return self._extend_by_one(at, ids)
        count = checked_counts(counts, at.size)
        check_token_count(ids, count)
        before = self.table.length[at].astype(np.int64)
        after = before + count
        check_lengths(at, after, self.max_seq_len)
        need = -(-after // self.page_size) - self.table.pages[at]
        total = int(need.sum())
        if total:
            refusal = self._draw(at, need, total)
            if refusal is not None:
                return refusal
        self.table.length[at] = after
        slots = self.table.slots_unchecked(at, before, count)
        if self.prefix_caching:
            self.index.tokens.reshape(-1)[slots] = ids
        return Extended(slots)

    def _extend_by_one(self, rows: Rows, ids: NDArray[np.int32]) -> Extended | Wait | Never:
        """`extend` for a decode step: a row needs a page exactly when all its pages are full."""
        if ids.shape != rows.shape:
            check_token_count(ids, np.ones(rows.size, np.int64))
        before = self.table.length.take(rows)
        after = before + 1
        check_lengths(rows, after, self.max_seq_len)
        column = before // self.page_size
        offset = before - column * self.page_size
        growing = np.flatnonzero(offset == 0)
        if growing.size:
            refusal = self._draw(rows[growing], np.ones(growing.size, np.int64), growing.size)
            if refusal is not None:
                return refusal
        self.table.length[rows] = after
        slots = self.table.at(rows, column).astype(np.int64) * self.page_size + offset
        if self.prefix_caching:
            self.index.tokens.reshape(-1)[slots] = ids
        return Extended(slots)

    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Keys and values of the next counts[i] tokens of rows[i] are in place; pages that became full are indexed.

        A page whose content is indexed already is given back, and the row's table entry moved to its twin.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or more would be computed than the row's length.
        """
        at = self.table.checked(rows)
        computed = self.table.add_computed(at, 1 if _is_one(counts) else checked_counts(counts, at.size))
        if not self.prefix_caching:
            return
        ready = np.flatnonzero(computed >= self.index_at.take(at))
        if ready.size:
            self._index(at[ready], computed[ready].astype(np.int64) // self.page_size)
        done = [row for row, keys in self._pending.items() if self.index_at[row] > keys.size * self.page_size]
        for row in done:
            del self._pending[row]

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give back rows, pages and promises. Handles whose row has been given back before are ignored.

        Pages are retired tail first, so that a page is always evicted before the one it continues; the sequences given
        first are the oldest.

        Raises:
            StaleSequenceError: a handle that this manager never handed out; nothing is released.
        """
        at = self.table.still_open(sequences)
        if not at.size:
            return
        orphans = self.pool.drop(self.table.owned(at))
        kept = self.index.indexed[orphans]
        self.pool.retire(orphans[kept])
        self.pool.give_back(orphans[~kept])
        self.promised -= int(self.promise[at].sum())
        self.promise[at] = 0
        self.table.close(at)
        for row in at.tolist():
            self.namespaces.let_go(int(self.root[row]))
            self._pending.pop(row, None)

    def match(self, tokens: ArrayLike, namespace: Hashable = None) -> int:
        """Tokens of this prompt that `admit` would find cached now."""
        prompt = checked_prompt(tokens, 0, 0, self.max_seq_len)
        return int(self._match(prompt, self.namespaces.find(namespace))[0].size) * self.page_size

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row that nobody else owns: what releasing that row alone would bring."""
        at = self.table.checked(rows)
        counts = self.table.pages[at].astype(np.int64)
        group, offset = ragged(counts)
        alone = self.pool.refcount[self.table.table[at[group], offset]] == 1
        return np.bincount(group[alone], minlength=at.size)

    def usage(self) -> Usage:
        """Where the pages are now. Costs one pass over the reference counts."""
        owned = int(self.table.pages.sum())
        used = self.pool.used
        tokens = int(self.table.length.sum()) - (owned - used) * self.page_size
        return Usage(
            self.num_pages,
            used,
            self.pool.cached,
            self.pool.free,
            self.promised,
            owned,
            tokens,
            self.page_size,
        )

    def _match(self, prompt: NDArray[np.int32], root: int) -> tuple[Pages, Keys, Keys]:
        """Cached pages the prompt may share, keys of all its full pages, and the hash sums behind the keys."""
        full = prompt.size // self.page_size
        if not self.prefix_caching or not full or not root:
            return _NO_PAGES, _NO_KEYS, _NO_KEYS
        tokens = prompt[: full * self.page_size].reshape(full, self.page_size)
        sums = np.cumsum(self.index.hasher.page_sums(tokens, np.arange(full)), dtype=np.uint64)
        sums += self.index.hasher.root_sum(root)
        keys = self.index.hasher.finish(sums)
        usable = (prompt.size - 1) // self.page_size
        return self.index.match(tokens[:usable], keys[:usable], root), keys, sums

    def _is_pending(self, keys: Keys, matched: int, length: int) -> bool:
        """Is the first page that did not match just being computed by another row?"""
        if matched >= (length - 1) // self.page_size or matched >= keys.size:
            return False
        return any(others.size > matched and others[matched] == keys[matched] for others in self._pending.values())

    def _draw(self, rows: Rows, need: NDArray[np.int64], total: int) -> Wait | Never | None:
        """Append need[i] pages to rows[i], or say why not."""
        whole = int((self.table.pages[rows] + need).max())
        if whole > self.num_pages:
            return Never(whole, self.num_pages)
        kept = np.minimum(self.promise[rows], need)
        unpromised = total - int(kept.sum())
        free = self.pool.available - self.promised
        if unpromised > free:
            return Wait(unpromised, free)
        self.table.append_pages(rows, need, self._take(total))
        self.promise[rows] -= kept.astype(np.int32)
        self.promised -= int(kept.sum())
        return None

    def _take(self, count: int) -> Pages:
        """Hand out pages, evicting the oldest cached ones if the free ones do not suffice."""
        if count > self.pool.free:
            evicted = self.pool.oldest(count - self.pool.free)
            self.index.remove(evicted)
            for root in self.index.parent[evicted[self.index.parent[evicted] < 0]].tolist():
                self.namespaces.let_go(root)
            self.pool.give_back(evicted)
        return self.pool.take(count)

    def _index(self, rows: Rows, full: NDArray[np.int64]) -> None:
        """Index the pages of `rows` up to page number `full`, and move rows to twins that are indexed already."""
        first = self.indexed[rows].astype(np.int64)
        counts = full - first
        if (counts == 1).all() and self._index_new(rows, first):
            return
        group, offset = ragged(counts)
        column, owner = first[group] + offset, rows[group]
        own = self.table.at(owner, column)
        sums = self._sums(rows, counts, group, self.index.hasher.page_sums(self.index.tokens.take(own, axis=0), column))
        keys = self.index.hasher.finish(sums)
        above = np.where(first > 0, self.table.at(rows, np.maximum(first - 1, 0)), self.root[rows])
        target, parent, ok = self.index.resolve(own, keys, above, counts)
        fresh = target == own
        if not ok.all():
            fresh &= ok
            full = first + np.bincount(group[ok], minlength=rows.size)
        self.index.insert(own[fresh], keys[fresh], parent[fresh])
        for root in parent[fresh & (parent < 0)].tolist():
            self.namespaces.hold_root(root)
        moved = np.flatnonzero(ok & (target != own))
        if moved.size:
            self.pool.acquire(target[moved])
            self.table.table[owner[moved], column[moved]] = target[moved]
            self.pool.give_back(self.pool.drop(own[moved]))
        self.chain_sum[rows] = sums[np.cumsum(counts) - 1]
        self.indexed[rows] = full
        collided = full < first + counts  # a key was taken by other content: the row is indexed no further
        self.index_at[rows] = np.where(collided, _NEVER, (full + 1) * self.page_size)

    def _index_new(self, rows: Rows, column: NDArray[np.int64]) -> bool:
        """`_index` for a decode step: page number column[i] of rows[i], if all content is new; else nothing happens."""
        own = self.table.at(rows, column)
        sums = self.chain_sum[rows] + self.index.hasher.page_sums(self.index.tokens.take(own, axis=0), column)
        keys = self.index.hasher.finish(sums)
        if not self.index.all_new(keys):
            return False
        parent = self.table.at(rows, np.maximum(column - 1, 0))
        for place in np.flatnonzero(column == 0).tolist():
            root = int(self.root[rows[place]])
            parent[place] = root
            self.namespaces.hold_root(root)
        self.index.insert(own, keys, parent)
        self.chain_sum[rows] = sums
        self.indexed[rows] = column + 1
        self.index_at[rows] = (column + 2) * self.page_size
        return True

    def _sums(self, rows: Rows, counts: NDArray[np.int64], group: NDArray[np.int64], page_sums: Keys) -> Keys:
        """Hash sums at the end of each new page, from what each adds: a running sum per row, mod 2**64."""
        if group.size == rows.size:
            return self.chain_sum[rows] + page_sums
        running = np.cumsum(page_sums, dtype=np.uint64)
        starts = np.cumsum(counts) - counts
        before = running[starts] - page_sums[starts]
        return running + (self.chain_sum[rows] - before)[group]


def _is_one(counts: ArrayLike) -> bool:
    """Is this the decode step's count: one token for every row?"""
    return type(counts) is int and counts == 1
