"""KVCacheManager: admits prompts, extends and releases sequences, and shares the pages of common prefixes.

Pages in arrays, arrays out: knows nothing about tensors, models, requests, threads or clocks. Every verb either does
all it was asked or refuses and has changed nothing; its cost grows with the pages that change hands.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.budget import pages_for_tokens
from pagedkv.cache import admission, branching, extension, keeping, resizing, supply, views
from pagedkv.cache.admission import Pending
from pagedkv.cache.checks import check_sizes, checked_counts, checked_ids, checked_prompt, checked_size
from pagedkv.cache.events import Events
from pagedkv.cache.eviction import Pages
from pagedkv.cache.hashing import ChainHash, Keys
from pagedkv.cache.indexing import NEVER, RecentTokens, index_ready
from pagedkv.cache.journal import Journal, atomic
from pagedkv.cache.outcomes import Admitted, Extended, Forked, Never, Sequence, Usage, Wait
from pagedkv.cache.pins import EVERY_NAMESPACE, Pinned, Pins, ResetResult
from pagedkv.cache.pool import PagePool
from pagedkv.cache.prefix import NOTHING_FOUND, Namespaces, PrefixIndex
from pagedkv.cache.recording import Recording, snapshot
from pagedkv.cache.reservations import Reservations
from pagedkv.cache.resizing import Resized
from pagedkv.cache.retention import Retention, Retentions, check_retention
from pagedkv.cache.table import PageTable, Rows
from pagedkv.cache.tenants import NamespaceUsage, Tenants
from pagedkv.errors import InvalidRequestError


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
        partial_reuse: where a prompt diverges inside a cached page, copy the part that matches (see `Admitted.copies`);
            and keep the partly filled last pages of sequences that have ended, for the same use.
        hasher: where keys come from; None for one with a seed of its own.
    """

    nested = False  # whether another manager calls the verbs, and undoes them

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
        self.journal = Journal()
        self.events = Events(self.journal)
        self.pool = PagePool(num_pages, self.journal, self.events)
        self.table = PageTable(max_rows, pages_for_tokens(max_seq_len, page_size), page_size, self.journal)
        self.index = PrefixIndex(num_pages, page_size, hasher or ChainHash(), self.journal, self.events)
        self.namespaces = Namespaces(self.journal)
        self.pins = Pins(self.pool, page_size, self.journal)
        self.retentions = Retentions(self.journal)
        self.tenants = Tenants(self.pool.accounts, self.journal)
        self.reservations = Reservations(max_rows, self.journal)
        self.pending = Pending(page_size, self.journal)
        self.root = np.zeros(max_rows, np.int32)
        self.indexed = np.zeros(max_rows, np.int32)  # leading pages of the row that the index holds
        self.index_at = np.full(max_rows, NEVER, np.int32)  # computed tokens from which on the row has a page to index
        self.chain_sum = np.zeros(max_rows, np.uint64)  # hash sum of the row's indexed pages
        self.shares_tail = np.zeros(max_rows, np.bool_)  # the last page is partly filled and not the row's to write
        self.tail_page = np.zeros(max_rows, np.int32)  # the row's last page
        self.recent = RecentTokens(self.index, self.journal)
        self.tails_shared = False  # some row's is
        self._unindexed = 0  # commits since pages were indexed last

    @atomic
    def admit(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        reserve: int = 0,
        headroom: int = 0,
        owner: str = "",
        share_pending: bool = False,
        reuse: bool = True,
        retention: Iterable[Retention] = (),
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
            reuse: False computes the whole prompt, as its log-probabilities need; it is cached all the same.
            retention: how the sequence's pages rank once nobody owns them, per range of tokens.

        Raises:
            InvalidRequestError: empty prompt, negative token ids or arguments, or more than max_seq_len tokens.
        """
        prompt = checked_prompt(tokens, reserve, headroom, self.max_seq_len)
        wishes = check_retention(retention)
        self.index_filled()
        return admission.admit(self, prompt, namespace, reserve, headroom, owner, share_pending, reuse, wishes)

    @atomic
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
        if _is_one(counts) and not (self.tails_shared and self.shares_tail.take(at).any()):
            return extension.extend_by_one(self, at, ids)
        return extension.extend(self, at, ids, checked_counts(counts, at.size))

    @atomic
    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Keys and values of the next counts[i] tokens of rows[i] are in place; pages that became full are indexed.

        A page whose content is indexed already is given back, and the row's table entry moved to its twin.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or more would be computed than the row's length.
        """
        at = self.table.checked(rows)
        one = _is_one(counts)
        self.table.add_computed(at, 1 if one else checked_counts(counts, at.size))
        if self.prefix_caching:
            self.journal.keep(self, "_unindexed")
            self._unindexed += 1
            if not one or self._unindexed >= self.page_size or self.pins.early:  # whose twins depend on the order
                self.index_filled()

    def index_filled(self) -> None:
        """Index the pages that commits have filled: in one go for several decode steps, before anybody looks."""
        self.recent.store()
        if self._unindexed:
            self.journal.keep(self, "_unindexed")
            self._unindexed = 0
            index_ready(self)

    @atomic
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
        self.index_filled()
        supply.release(self, at)

    @atomic
    def fork(self, row: int, branches: int = 1, *, reserve: int = 0) -> Forked | Wait:
        """Open `branches` more rows that continue `row`, sharing every page of it; no page is taken.

        A branch that first writes into a shared, partly filled page gets a copy of it then: see `Extended.copies`.

        Args:
            reserve: tokens that will be appended to each branch and whose pages, the copy included, are set aside now.

        Raises:
            StaleSequenceError, InvalidRequestError: no such row, tokens of it not committed, or more than max_seq_len.
        """
        self.index_filled()
        return branching.fork(self, row, branches, reserve)

    @atomic
    def reorder(self, rows: ArrayLike, parents: ArrayLike) -> None:
        """Let each rows[i] continue what parents[i] holds now, all at once: the reordering step of a beam search.

        Args:
            rows: int [n], all different. parents: int [n], may repeat, and may be rows of the same call.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or tokens of a parent are not committed.
        """
        self.index_filled()
        branching.reorder(self, rows, parents)

    @atomic
    def trim(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Keep the first lengths[i] >= 1 tokens of rows[i] and give back the pages behind them.

        Rejected speculative tokens, or a stop string found late. Pages that were indexed stay cached.

        Raises:
            StaleSequenceError, InvalidRequestError: rows are wrong, or a length is not 1 to the row's length.
        """
        self.index_filled()
        branching.trim(self, rows, lengths)

    @atomic
    def match(self, tokens: ArrayLike, namespace: Hashable = None) -> int:
        """Tokens of this prompt that `admit` would find cached now."""
        prompt = checked_prompt(tokens, 0, 0, self.max_seq_len)
        self.index_filled()
        root = self.namespaces.find(namespace)
        matched = self.find_cached(prompt, root)[0]
        return matched.size * self.page_size + self.find_part(prompt, matched, root)[1]

    @atomic
    def pin(self, tokens: ArrayLike, namespace: Hashable = None) -> Pinned | Wait:
        """Keep the longest cached prefix of `tokens`, in whole pages, from eviction until `unpin`.

        Pinned pages count as used, and prompts that fit into the pool only without them wait. If nothing is cached,
        the handle says 0 tokens. Wait is the answer where promised pages would no longer be covered.

        Raises:
            InvalidRequestError: no tokens, negative ids, or more than max_seq_len of them.
        """
        prompt = checked_prompt(tokens, 0, 0, self.max_seq_len)
        self.index_filled()
        return keeping.pin(self, prompt, namespace)

    @atomic
    def hold(self, row: int) -> Pinned | Wait:
        """Own all pages of a row, until `unpin`: a copy, a load or a step that works on them is under way.

        Whatever becomes of the row, the pages are not handed out, nor written: the row copies its last page if it
        goes on in it. While a page is held, its row does not move to a twin, but is indexed no further.

        Raises:
            StaleSequenceError: no such row.
        """
        self.index_filled()
        return branching.hold(self, row)

    @atomic
    def unpin(self, pinned: Pinned) -> None:
        """Give back what `pin` held; a second time does nothing.

        Raises:
            StaleSequenceError: a handle that this manager never handed out.
        """
        keeping.unpin(self, pinned)

    @atomic
    def set_limits(self, namespace: Hashable, *, floor: int = 0, ceiling: int | None = None) -> None:
        """How many pages a namespace is sure of, and how many it may use at most. (0, None) takes the limits away.

        Others leave enough pages available that it can come up to the floor, and do not evict what it has cached up to
        there. What it uses and was promised stays within the ceiling, and its own cached pages make room for that
        first. A ceiling below what it uses now holds once it has given pages back.

        Raises:
            ConfigError: a limit is negative, the ceiling is below the floor, or all floors together exceed the pool.
            InvalidRequestError: the namespace cannot be hashed.
        """
        self.index_filled()
        keeping.set_limits(self, namespace, floor, ceiling)

    def capacity(self, namespace: Hashable) -> int:
        """Most pages that rows of this namespace can ever have, given its ceiling and the floors of others."""
        return self.tenants.capacity(-self.namespaces.find(namespace), self.num_pages)

    def owed(self, namespace: Hashable) -> int:
        """Pages that this namespace lacks to its floor: it can have them, whoever else waits."""
        account = -self.namespaces.find(namespace)
        if not self.tenants.floor(account):
            return 0
        return self.tenants.lack(account, int(supply.promised(self)[account]))

    @atomic
    def namespace_usage(self, namespace: Hashable) -> NamespaceUsage:
        """Where the pages of one namespace are, and its limits. Costs one pass over the pages."""
        self.index_filled()
        return views.namespace_usage(self, namespace)

    @atomic
    def resize(
        self, num_pages: int | None = None, *, num_bytes: int | None = None, page_bytes: int | None = None
    ) -> Resized:
        """Grow or shrink the pool to `num_pages`, or to as many (and the null page) as fit into `num_bytes`.

        Cached pages are evicted for it, and pages above the new end move below it. What is owned, promised or kept by
        floors stays: then the pool is larger than asked, and `Resized.held` says by how many pages.

        Args:
            page_bytes: bytes of one page over all layers; needed with `num_bytes`.

        Raises:
            ConfigError: no or contradicting sizes, fewer pages than 1 or than all floors, or bytes for none.
        """
        self.index_filled()
        return resizing.resize(self, checked_size(num_pages, num_bytes, page_bytes))

    @atomic
    def tick(self, now: float) -> int:
        """Tell the time, in the unit of `Retention.ttl`; an earlier time than told before is ignored.

        Returns:
            How many cached pages have lost their priority, since their time to live has run out.

        Raises:
            InvalidRequestError: `now` is not a finite number.
        """
        if not math.isfinite(now):
            raise InvalidRequestError(f"the time is {now}; it must be finite")
        return supply.demote(self) if self.retentions.tick(now) else 0

    @atomic
    def reset(self, *, namespace: Hashable = EVERY_NAMESPACE) -> ResetResult:
        """Forget all cached content, or one namespace's (None is one): the weights have changed, a tenant has left.

        No later prompt shares a page that was indexed before. Live rows and pins keep theirs; what those rows have
        computed or will compute is not indexed any more, since it attends to what was forgotten.

        Raises:
            InvalidRequestError: the namespace cannot be hashed.
        """
        self.index_filled()
        return keeping.reset(self, namespace)

    def record(self) -> Recording:
        """Note every call from now on, so that it can be replayed. The manager must not have been used before.

        Raises:
            InvalidRequestError: it has answered calls already.
        """
        return keeping.record(self)

    @atomic
    def snapshot(self) -> dict[str, NDArray[np.generic]]:
        """The whole state as arrays, copied: `page_*` [num_pages + 1], `row_*` [max_rows], pins, names and orders.

        `page_state` is 0 for free, 1 for cached, 2 for used; the null page is free.
        """
        self.index_filled()
        return snapshot(self)

    @atomic
    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row that nobody else owns: what releasing that row alone would bring."""
        self.index_filled()
        return views.private_pages(self, rows)

    @atomic
    def usage(self) -> Usage:
        """Where the pages are now. Costs one pass over the reference counts."""
        self.index_filled()
        return views.usage(self)

    # What the files of this package share; not for callers.

    def find_cached(self, prompt: NDArray[np.int32], root: int) -> tuple[Pages, Keys, Keys]:
        """Cached pages the prompt may share, keys of all its full pages, and the hash sums behind the keys."""
        return self.index.lookup(prompt, root) if self.prefix_caching else NOTHING_FOUND

    def find_part(self, prompt: NDArray[np.int32], matched: Pages, root: int) -> tuple[int, int]:
        """A cached page that begins like the prompt's first page that did not match, and for how many tokens.

        It need not be pinned: if this very admission evicts it, the copy still reads it before anything is written.
        """
        return self.index.lookup_part(prompt, matched, root) if self.partial_reuse else (0, 0)

    def share_tails(self, rows: Rows, shared: bool | NDArray[np.bool_]) -> None:
        """Mark the rows whose last page is partly filled and not theirs alone to write."""
        if self.tails_shared or (shared is not False and np.any(shared)):
            self.journal.keep(self, "tails_shared")
            self.journal.put(self.shares_tail, rows, shared)
            self.tails_shared = bool(self.shares_tail.any())


def _is_one(counts: ArrayLike) -> bool:
    """Is this the decode step's count: one token for every row?"""
    return type(counts) is int and counts == 1
