"""KVCacheManager: admits prompts, extends and releases sequences, and shares the pages of common prefixes.

Pages in arrays, arrays out: knows nothing about tensors, models, requests, threads or clocks. Every verb either does
all it was asked or refuses and has changed nothing; its cost grows with the pages that change hands.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import branching
from pagedkv.cache.checks import (
    check_lengths,
    check_sizes,
    check_token_count,
    checked_counts,
    checked_ids,
    checked_prompt,
)
from pagedkv.cache.hashing import ChainHash, Keys
from pagedkv.cache.indexing import NEVER, index_pages
from pagedkv.cache.outcomes import NO_COPIES, Admitted, Extended, Forked, Never, Sequence, Usage, Wait
from pagedkv.cache.pool import PagePool, Pages
from pagedkv.cache.prefix import NO_KEYS, NOTHING_FOUND, Namespaces, PrefixIndex
from pagedkv.cache.ragged import ragged
from pagedkv.cache.reservations import Reservations
from pagedkv.cache.retention import (
    EVERY_NAMESPACE,
    Pinned,
    Pins,
    ResetResult,
    free_unowned,
    pages_under,
    retire_or_free,
)
from pagedkv.cache.table import PageTable, Rows


class KVCacheManager:
    """Who owns which page.

    ::

        admit(prompt) -> row     match the longest cached prefix and pin it, take fresh pages for the rest
        extend(rows, tokens)     one more place per token; a page only where a row crosses a page's end
        commit(rows, counts)     keys and values of the next `counts` tokens are in place: index the full pages
        release(sequences)       pages without another owner become cached (if indexed) or free
        fork, reorder, trim      rows that share pages, and give back their tails; a first write copies what is shared
        pin(tokens), unpin       keep a cached prefix from eviction
        reset()                  forget what is cached; no later prompt shares it

    Args:
        num_pages: usable pages; ids run from 1 to num_pages, page 0 is the null page.
        page_size: tokens per page.
        max_rows: most sequences at once.
        max_seq_len: most tokens of one sequence.
        prefix_caching: share and keep the pages of common prefixes.
        partial_reuse: where a prompt diverges inside a cached page, copy the part that matches; see `Admitted.copies`.
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
        partial_reuse: bool = False,
        hasher: ChainHash | None = None,
    ) -> None:
        check_sizes(num_pages, page_size, max_rows, max_seq_len)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.prefix_caching = prefix_caching
        self.partial_reuse = partial_reuse and prefix_caching
        self.pool = PagePool(num_pages)
        self.table = PageTable(max_rows, pages_for_tokens(max_seq_len, page_size), page_size)
        self.index = PrefixIndex(num_pages, page_size, hasher or ChainHash())
        self.namespaces = Namespaces()
        self.pins = Pins(self.pool, self.index)
        self.reservations = Reservations(max_rows)
        self.root = np.zeros(max_rows, np.int32)
        self.indexed = np.zeros(max_rows, np.int32)  # leading pages of the row that the index holds
        self.index_at = np.zeros(max_rows, np.int32)  # computed tokens from which on the row has a page to index
        self.chain_sum = np.zeros(max_rows, np.uint64)  # hash sum of the row's indexed pages
        self.shares_tail = np.zeros(max_rows, np.bool_)  # the last page is partly filled and not the row's to write
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
        refusal = self._refusal(prompt.size, whole, matched, headroom, keys if share_pending else NO_KEYS)
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
        free = self.pool.available - self.reservations.promised - idle
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
        shared = matched.size * self.page_size
        source, part = self._part(prompt, matched, root)
        self.pool.acquire(matched)
        own = self._take(pages_for_tokens(prompt.size, self.page_size) - matched.size)
        row = self.table.open(np.concatenate((matched, own)), prompt.size, shared + part, owner)
        self.root[row] = root
        self.indexed[row] = matched.size
        self.index_at[row] = shared + self.page_size
        self.reservations.open(row, whole, matched.size + own.size)
        if self.prefix_caching:
            self.index.store_tokens(own, prompt[shared:])
            self.chain_sum[row] = sums[matched.size - 1] if matched.size else self.index.hasher.root_sum(root)
            if keys.size > matched.size:
                self._pending[row] = keys
        copies = np.array([(source, own[0])], np.int32) if part else NO_COPIES
        return Admitted(Sequence(row, int(self.table.generation[row])), shared + part, copies)

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
        if _is_one(counts) and not (self.shares_tail.any() and self.shares_tail[at].any()):
            return self._extend_by_one(at, ids)
        count = checked_counts(counts, at.size)
        check_token_count(ids, count)
        before = self.table.length[at].astype(np.int64)
        after = before + count
        check_lengths(at, after, self.max_seq_len)
        need = -(-after // self.page_size) - self.table.pages[at]
        copying = branching.writers_that_copy(self, at, before, count)
        total = int(need.sum()) + copying.size
        copies = NO_COPIES
        if total:
            drawn = need + np.bincount(copying, minlength=at.size)
            refusal = self._shortage(at, need, drawn)
            if refusal is not None:
                return refusal
            fresh = self._take_for(at, drawn)
            self.table.append_pages(at, need, fresh[copying.size :])
            copies = branching.copy_tails(self, at[copying], before[copying], fresh[: copying.size])
        self.table.length[at] = after
        settled = at[self.shares_tail[at] & (count > 0)]
        self.shares_tail[settled] = False
        branching.settle(self, settled)
        slots = self.table.slots_unchecked(at, before, count)
        if self.prefix_caching:
            self.index.tokens.reshape(-1)[slots] = ids
        return Extended(slots, copies)

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
            refusal = self._draw(rows[growing], np.ones(growing.size, np.int64))
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
            index_pages(self, at[ready], computed[ready].astype(np.int64) // self.page_size)
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
        retire_or_free(self.pool, self.index, self.pool.drop(self.table.owned(at)))
        self.reservations.close(at)
        self.shares_tail[at] = False
        self.table.close(at)
        for row in at.tolist():
            self.namespaces.let_go(int(self.root[row]))
            self._pending.pop(row, None)

    def fork(self, row: int, branches: int = 1, *, reserve: int = 0) -> Forked | Wait:
        """Open `branches` more rows that continue `row`, sharing every page of it; no page is taken.

        A branch that first writes into a shared, partly filled page gets a copy of it then: see `Extended.copies`.

        Args:
            reserve: tokens that will be appended to each branch and whose pages, the copy included, are set aside now.

        Raises:
            StaleSequenceError, InvalidRequestError: no such row, tokens of it not committed, or more than max_seq_len.
        """
        return branching.fork(self, row, branches, reserve)

    def reorder(self, rows: ArrayLike, parents: ArrayLike) -> None:
        """Let each rows[i] continue what parents[i] holds now, all at once: the reordering step of a beam search.

        Args:
            rows: int [n], all different. parents: int [n], may repeat, and may be rows of the same call.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or tokens of a parent are not committed.
        """
        branching.reorder(self, rows, parents)

    def trim(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Keep the first lengths[i] >= 1 tokens of rows[i] and give back the pages behind them.

        Rejected speculative tokens, or a stop string found late. Pages that were indexed stay cached.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or a length is not 1 to the row's length.
        """
        branching.trim(self, rows, lengths)

    def drop_pending(self, row: int, pages: int = 0) -> None:
        """Stop announcing prompt pages of a row beyond its first `pages`."""
        keys = self._pending.pop(row, NO_KEYS)[:pages]
        if keys.size * self.page_size >= self.index_at[row]:
            self._pending[row] = keys

    def match(self, tokens: ArrayLike, namespace: Hashable = None) -> int:
        """Tokens of this prompt that `admit` would find cached now."""
        prompt = checked_prompt(tokens, 0, 0, self.max_seq_len)
        root = self.namespaces.find(namespace)
        matched = self._match(prompt, root)[0]
        return matched.size * self.page_size + self._part(prompt, matched, root)[1]

    def pin(self, tokens: ArrayLike, namespace: Hashable = None) -> Pinned | Wait:
        """Keep the longest cached prefix of `tokens`, in whole pages, from eviction until `unpin`.

        Pinned pages count as used, and prompts that fit into the pool only without them wait. If nothing is cached,
        the handle says 0 tokens. Wait is the answer where promised pages would no longer be covered.

        Raises:
            InvalidRequestError: no tokens, negative ids, or more than max_seq_len of them.
        """
        prompt = checked_prompt(tokens, 0, 0, self.max_seq_len)
        one_more = np.append(prompt, np.int32(0))  # a match always leaves a token to compute; here it is not theirs
        return self.pins.add(self._match(one_more, self.namespaces.find(namespace))[0], self.reservations.promised)

    def unpin(self, pinned: Pinned) -> None:
        """Give back what `pin` held; a second time does nothing.

        Raises:
            StaleSequenceError: a handle that this manager never handed out.
        """
        self.pins.remove(pinned)

    def reset(self, *, namespace: Hashable = EVERY_NAMESPACE) -> ResetResult:
        """Forget all cached content, or one namespace's (None is one): the weights have changed, a tenant has left.

        No later prompt shares a page that was indexed before. Live rows and pins keep theirs; what those rows have
        computed or will compute is not indexed any more, since it attends to what was forgotten.

        Raises:
            InvalidRequestError: the namespace cannot be hashed.
        """
        root = None if namespace is EVERY_NAMESPACE else self.namespaces.find(namespace)
        pages = pages_under(self.index, root)
        rows = np.flatnonzero(self.table.live if root is None else self.table.live & (self.root == root))
        self.indexed[rows] = 0
        self.index_at[rows] = NEVER
        for row in rows.tolist():
            self._pending.pop(row, None)
        self._forget(pages)
        return free_unowned(self.pool, pages)

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row that nobody else owns: what releasing that row alone would bring."""
        at = self.table.checked(rows)
        counts = self.table.pages[at].astype(np.int64)
        group, offset = ragged(counts)
        alone = self.pool.refcount[self.table.table[at[group], offset]] == 1
        return np.bincount(group[alone], minlength=at.size)

    def usage(self) -> Usage:
        """Where the pages are now. Costs one pass over the reference counts."""
        alone = self.pins.alone  # full pages that no row counts
        owned = int(self.table.pages.sum()) + alone
        used = self.pool.used
        if self.shares_tail.any():
            tokens = branching.tokens_held(self) + alone * self.page_size
        else:  # shared pages are full ones
            tokens = int(self.table.length.sum()) + (alone - owned + used) * self.page_size
        return Usage(
            self.num_pages,
            used,
            self.pool.cached,
            self.pool.free,
            self.reservations.promised,
            owned,
            tokens,
            self.page_size,
        )

    def _match(self, prompt: NDArray[np.int32], root: int) -> tuple[Pages, Keys, Keys]:
        """Cached pages the prompt may share, keys of all its full pages, and the hash sums behind the keys."""
        return self.index.lookup(prompt, root) if self.prefix_caching else NOTHING_FOUND

    def _part(self, prompt: NDArray[np.int32], matched: Pages, root: int) -> tuple[int, int]:
        """A cached page that begins like the prompt's first page that did not match, and for how many tokens.

        It need not be pinned: if this very admission evicts it, the copy still reads it before anything is written.
        """
        return self.index.lookup_part(prompt, matched, root) if self.partial_reuse else (0, 0)

    def _is_pending(self, keys: Keys, matched: int, length: int) -> bool:
        """Is the first page that did not match just being computed by another row?"""
        if matched >= (length - 1) // self.page_size or matched >= keys.size:
            return False
        return any(others.size > matched and others[matched] == keys[matched] for others in self._pending.values())

    def _draw(self, rows: Rows, need: NDArray[np.int64]) -> Wait | Never | None:
        """Append need[i] pages to rows[i], or say why not."""
        refusal = self._shortage(rows, need, need)
        if refusal is None:
            self.table.append_pages(rows, need, self._take_for(rows, need))
        return refusal

    def _shortage(self, rows: Rows, growth: NDArray[np.int64], drawn: NDArray[np.int64]) -> Wait | Never | None:
        """Why rows[i] cannot draw drawn[i] pages, by growth[i] of which it becomes longer."""
        whole = int((self.table.pages[rows] + growth).max())
        if whole > self.num_pages:
            return Never(whole, self.num_pages)
        return self.reservations.shortage(rows, drawn, self.pool.available)

    def _take_for(self, rows: Rows, drawn: NDArray[np.int64]) -> Pages:
        """Hand out drawn[i] pages to each row, from what was set aside for it as far as that reaches."""
        pages = self._take(int(drawn.sum()))
        self.reservations.draw(rows, drawn)
        return pages

    def _take(self, count: int) -> Pages:
        """Hand out pages, evicting the oldest cached ones if the free ones do not suffice."""
        if count > self.pool.free:
            evicted = self.pool.oldest(count - self.pool.free)
            self._forget(evicted)
            self.pool.give_back(evicted)
        return self.pool.take(count)

    def _forget(self, pages: Pages) -> None:
        """Take pages out of the index; those directly under a root let go of its name."""
        self.index.remove(pages)
        parents = self.index.parent[pages]
        for root in parents[parents < 0].tolist():
            self.namespaces.let_go(root)


def _is_one(counts: ArrayLike) -> bool:
    """Is this the decode step's count: one token for every row?"""
    return type(counts) is int and counts == 1
