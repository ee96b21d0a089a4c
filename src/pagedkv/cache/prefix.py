"""PrefixIndex: (parent page, tokens) -> page, exactly; and the names of the roots that chains start from.

Knows nothing about owners or eviction order. It keeps what each page holds, so that a hit can be compared with what was
asked, and it never holds two pages for the same content.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.events import EventKind, Events
from pagedkv.cache.eviction import Pages
from pagedkv.cache.hashing import ChainHash, Keys
from pagedkv.cache.journal import Journal
from pagedkv.cache.ragged import prefix_all, ragged
from pagedkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagedkv.cache.resizing import Moves

NO_KEYS: Keys = np.zeros(0, np.uint64)
NO_PAGES: Pages = np.zeros(0, np.int32)
NOTHING_FOUND: tuple[Pages, Keys, Keys] = (NO_PAGES, NO_KEYS, NO_KEYS)


class PrefixIndex:
    """A hash table in arrays: buckets of page ids, chained through `next`; 0, the null page, ends a chain.

    ::

        bucket[key & mask] -> page -> next[page] -> ... -> 0

    Attributes:
        tokens: int32 [num_pages + 1, page_size], token ids that each page holds.
        parent: int32 [num_pages + 1], the page before it in its chain, or the negative number of its namespace's root.
        key: uint64 [num_pages + 1], chain hash of each indexed page.
        indexed: bool [num_pages + 1]; true for the null page, so that walks need no special case.
    """

    def __init__(
        self, num_pages: int, page_size: int, hasher: ChainHash, journal: Journal, events: Events | None = None
    ) -> None:
        self.hasher = hasher
        self.journal = journal
        self.events = events or Events(journal)
        self.page_size = page_size
        self.tokens = np.zeros((num_pages + 1, page_size), np.int32)
        self.parent = np.zeros(num_pages + 1, np.int32)
        self.key = np.zeros(num_pages + 1, np.uint64)
        self.indexed = np.zeros(num_pages + 1, np.bool_)
        self.indexed[0] = True
        self.bucket, self._mask = _buckets(num_pages)
        self.next = np.zeros(num_pages + 1, np.int32)

    def store_tokens(self, pages: Pages, tokens: NDArray[np.int32]) -> None:
        """Note what `pages` hold: page_size tokens each, the last one perhaps fewer."""
        full = tokens.size // self.page_size
        self.journal.save(self.tokens, pages)
        self.tokens[pages[:full]] = tokens[: full * self.page_size].reshape(full, self.page_size)
        if full < pages.size:
            self.tokens[pages[full], : tokens.size - full * self.page_size] = tokens[full * self.page_size :]

    def find(self, keys: Keys) -> Pages:
        """The page indexed under each key, 0 where there is none. Says nothing about its content yet."""
        pages = self.bucket.take((keys & self._mask).view(np.int64))
        missed = self.key.take(pages) != keys
        if not missed.any():
            return pages
        searching = np.flatnonzero(missed & (pages != 0))
        while searching.size:
            step = self.next.take(pages[searching])
            pages[searching] = step
            searching = searching[(self.key.take(step) != keys[searching]) & (step != 0)]
        return pages

    def _known(self, key: np.uint64) -> bool:
        """Is a page indexed under this key?"""
        page = self.bucket[int(key & self._mask)]
        while page and self.key[page] != key:
            page = self.next[page]
        return bool(page)

    def lookup(self, prompt: NDArray[np.int32], root: int) -> tuple[Pages, Keys, Keys]:
        """Cached pages that a prompt may share; at least one of its tokens is left out.

        Args:
            prompt: int32 [n].
            root: number of the namespace's root; 0, for a name that nobody uses, finds nothing.

        Returns:
            Page ids int32 [m]; keys, and the hash sums behind them, of all full pages of the prompt, uint64 [full].
        """
        full = prompt.size // self.page_size
        if not full or not root:
            return NOTHING_FOUND
        tokens = prompt[: full * self.page_size].reshape(full, self.page_size)
        sums = np.cumsum(self.hasher.page_sums(tokens, np.arange(full)), dtype=np.uint64)
        sums += self.hasher.root_sum(root)
        keys = self.hasher.finish(sums)
        usable = (prompt.size - 1) // self.page_size
        return self.match(tokens[:usable], keys[:usable], root), keys, sums

    def lookup_part(self, prompt: NDArray[np.int32], matched: Pages, root: int) -> tuple[int, int]:
        """The page after `matched` that begins with most of the prompt's next tokens, and with how many of them.

        (0, 0) if there is none. At least one token of the prompt is left out. One comparison per page of the pool: a
        divergence within a page happens once per prompt.
        """
        shared = matched.size * self.page_size
        rest = prompt[shared : min(shared + self.page_size, prompt.size - 1)]
        parent = int(matched[-1]) if matched.size else root
        pages = np.flatnonzero((self.parent == parent) & self.indexed)
        if not parent or not rest.size or not pages.size:
            return 0, 0
        equal = self.tokens[pages, : rest.size] == rest
        lengths = np.where(equal.all(axis=1), rest.size, equal.argmin(axis=1))
        best = int(lengths.argmax())
        return (int(pages[best]), int(lengths[best])) if lengths[best] else (0, 0)

    def match(self, tokens: NDArray[np.int32], keys: Keys, root: int) -> Pages:
        """The longest chain of indexed pages from `root` that holds exactly these tokens.

        Args:
            tokens: int32 [n, page_size].
            keys: uint64 [n], keys of these pages.
            root: negative number of the namespace's root.

        Returns:
            Page ids int32 [m], m <= n.
        """
        if not keys.size or not self._known(keys[0]):
            return NO_PAGES
        pages = self.find(keys)
        above = np.empty_like(pages)
        above[:1] = root
        above[1:] = pages[:-1]
        wrong = self.parent.take(pages) != above  # so is the first page 0: the one before it is another
        end = int(wrong.argmax()) if wrong.any() else pages.size
        different = (self.tokens.take(pages[:end], axis=0) != tokens[:end]).reshape(-1)
        return pages[: int(different.argmax()) // self.page_size if different.any() else end]

    def all_new(self, keys: Keys) -> bool:
        """Is nothing indexed under any of these keys, and are they all different?"""
        return not self.find(keys).any() and _all_different(keys)

    def resolve(
        self, own: Pages, keys: Keys, above_first: NDArray[np.int32], counts: NDArray[np.int64]
    ) -> tuple[Pages, NDArray[np.int32], NDArray[np.bool_]]:
        """For freshly computed pages of several rows: under which page each one's content is, or will be, indexed.

        Args:
            own: int32 [n], the rows' own pages, row after row, each row's in order.
            keys: uint64 [n], their keys.
            above_first: int32 [rows], parent of each row's first page.
            counts: int64 [rows], pages per row.

        Returns:
            (target, parent, ok), each [n]. `target` is an indexed twin, or the first page of this very batch with the
            same content (the page itself where it is alone). `ok` is false from the first page of a row on whose key
            collides with other content; such pages stay out of the index.
        """
        twin = self.find(keys)
        starts = np.cumsum(counts) - counts
        if not twin.any() and _all_different(keys):  # all content is new: the common case
            return own, _parents(own, starts, above_first), np.ones(own.size, np.bool_)
        leader = _first_occurrence(keys)
        target = np.where(twin != 0, twin, own[leader])
        parent = _parents(target, starts, above_first)
        group, _ = ragged(counts)
        ok = np.where(twin != 0, self.parent[twin], parent[leader]) == parent
        other = np.flatnonzero(target != own)
        ok[other] &= (self.tokens[target[other]] == self.tokens[own[other]]).all(axis=1)
        while not ok.all():
            before = ok
            ok = prefix_all(ok, counts, group)
            ok = ok & ((twin != 0) | ok[leader])
            if (ok == before).all():
                break
        return target, parent, ok

    def insert(self, pages: Pages, keys: Keys, parents: NDArray[np.int32]) -> None:
        """Index pages under keys that are all new and all different.

        None of them has been evicted by the same verb: what its undo would need to know of it is overwritten.
        """
        self.events.add(EventKind.INDEXED, pages, parents)
        self._enter(pages, keys, parents)

    def _enter(self, pages: Pages, keys: Keys, parents: NDArray[np.int32]) -> None:
        at = pages.astype(np.int64)
        self.key[at] = keys
        self.parent[at] = parents
        self.journal.replace(self.indexed, at, False, True)
        slots = (keys & self._mask).view(np.int64)
        self.journal.save(self.bucket, slots)
        while pages.size:
            heads = self.bucket.take(slots)
            self.bucket[slots] = pages
            placed = self.bucket.take(slots) == pages  # of several pages for one bucket, the last has won
            if placed.all():
                self.next[at] = heads
                return
            self.next[at[placed]] = heads[placed]
            pages, at, slots = pages[~placed], at[~placed], slots[~placed]

    def remove(self, pages: Pages) -> None:
        """Take pages out of the index."""
        self.events.add(EventKind.FORGOTTEN, pages)
        self.journal.replace(self.indexed, pages.astype(np.int64), True, False)
        slots = (self.key.take(pages) & self._mask).view(np.int64)
        before = self.bucket.take(slots)
        heads = self._skip_removed(before.copy())
        self.journal.replace(self.bucket, slots, before, heads)
        at = heads[self.next.take(heads) != 0]
        while at.size:
            after = self._skip_removed(self.next.take(at))
            self.journal.put(self.next, at, after)
            at = after[self.next.take(after) != 0]

    def resize(self, moves: Moves) -> None:
        """Pages have moved: every indexed one is entered anew."""
        self.journal.keep(self, "tokens", "parent", "key", "indexed", "next", "bucket", "_mask")
        self.tokens = moves.indexed_by_page(self.tokens)
        self.key = moves.indexed_by_page(self.key)
        self.indexed = moves.indexed_by_page(self.indexed)
        parent = np.where(self.indexed, moves.indexed_by_page(self.parent), 0)
        self.parent = np.where(parent > 0, moves.ids(parent.clip(0)), parent)
        self.next = np.zeros(moves.num_pages + 1, np.int32)
        self.bucket, self._mask = _buckets(moves.num_pages)
        pages = (np.flatnonzero(self.indexed[1:]) + 1).astype(np.int32)
        self._enter(pages, self.key[pages], self.parent[pages])

    def _skip_removed(self, pages: Pages) -> Pages:
        """Each page, or the first page after it in its chain that is still indexed (0 at the end)."""
        removed = np.flatnonzero(~self.indexed.take(pages))
        while removed.size:
            step = self.next.take(pages[removed])
            pages[removed] = step
            removed = removed[~self.indexed.take(step)]
        return pages


def _buckets(num_pages: int) -> tuple[NDArray[np.int32], np.uint64]:
    """Empty buckets, at least two per page and a power of two of them, and the mask that picks one."""
    buckets = 1 << (2 * num_pages - 1).bit_length()
    return np.zeros(buckets, np.int32), np.uint64(buckets - 1)


def _parents(pages: Pages, starts: NDArray[np.int64], above_first: NDArray[np.int32]) -> NDArray[np.int32]:
    """The page before each one; `above_first` for those at `starts`."""
    parents = np.empty_like(pages)
    parents[1:] = pages[:-1]
    parents[starts] = above_first
    return parents


def _all_different(keys: Keys) -> bool:
    ordered = np.sort(keys)
    return bool((ordered[1:] != ordered[:-1]).all())


def _first_occurrence(keys: Keys) -> NDArray[np.int64]:
    """For each key, where it occurs first: int64 [n]."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse]


class Namespaces:
    """Names of roots. A namespace (tenant's salt, adapter) is any hashable; chains of different roots never meet.

    A root is a negative number that stands as the parent of a chain's first page. It lives as long as it has users:
    rows, and indexed pages directly under it. Then its name is forgotten, so that salts do not pile up for ever.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._users: dict[int, int] = {}
        self._spare: dict[int, int] = {}  # a stack of numbers without a name, by position
        self._spares = 0

    def __len__(self) -> int:
        return len(self._roots)

    @property
    def numbers(self) -> int:
        """How many numbers roots have had so far; the lowest is the negative of it."""
        return len(self._roots) + self._spares

    def find(self, name: Hashable) -> int:
        """The root of this name; 0, which is nobody's parent, if it has none. Names compare as dictionary keys do.

        Raises:
            InvalidRequestError: the name cannot be hashed.
        """
        try:
            return self._roots.get(name, 0)
        except TypeError:
            raise InvalidRequestError(f"a namespace of type {type(name).__name__} cannot be hashed") from None

    def name(self, root: int) -> Hashable:
        """The name of a root that has users."""
        return self._names[root]

    def hold(self, name: Hashable) -> int:
        """Count one more user of the name and return its root."""
        root = self.find(name)
        if not root:
            root = self._spare[self._spares - 1] if self._spares else -1 - len(self._roots)
            self._remember(name, root)
            self._spares = max(self._spares - 1, 0)
            self._roots[name], self._names[root], self._users[root] = root, name, 0
        self.hold_root(root)
        return root

    def hold_root(self, root: int, users: int = 1) -> None:
        """Count more users of a root that has some."""
        self.journal.entry(self._users, root)
        self._users[root] += users

    def let_go(self, root: int, users: int = 1) -> None:
        """Count fewer users; the last one takes the name along."""
        self.journal.entry(self._users, root)
        self._users[root] -= users
        if self._users[root] == 0:
            name = self._names[root]
            self._remember(name, root)
            del self._users[root], self._names[root], self._roots[name]
            self.journal.entry(self._spare, self._spares)
            self._spare[self._spares] = root
            self._spares += 1

    def users(self) -> dict[int, int]:
        """Users of each root, for the audit."""
        return dict(self._users)

    def _remember(self, name: Hashable, root: int) -> None:
        self.journal.entry(self._roots, name)
        self.journal.keep(self, "_spares")
        for mapping in (self._names, self._users):
            self.journal.entry(mapping, root)
