"""Pins and resets: what shall stay in the cache whoever owns it, and what shall leave it though somebody does.

Knows the pool and the index; nothing about rows or namespaces' names, which are the manager's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from pagedkv.cache.eviction import Pages
from pagedkv.cache.journal import Journal
from pagedkv.cache.pool import PagePool
from pagedkv.cache.prefix import NO_PAGES, PrefixIndex
from pagedkv.errors import StaleSequenceError


class _EveryNamespace(Enum):
    """The type of EVERY_NAMESPACE, which no caller's namespace is equal to; None is a namespace like others."""

    EVERY_NAMESPACE = "every namespace"

    def __repr__(self) -> str:
        return "EVERY_NAMESPACE"


EVERY_NAMESPACE: Final = _EveryNamespace.EVERY_NAMESPACE


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What a reset did. No page of its scope is found by a later prompt.

    Attributes:
        dropped: pages that nobody owned; they are free now.
        held: pages that rows or pins own; they are out of the index, and free when the last owner gives them back.
    """

    dropped: int
    held: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A handle on pages that are kept until `unpin`: the first `tokens` tokens of what was given."""

    number: int
    tokens: int


class Pins:
    """Which pages each pin owns. A pin counts as one owner of each of its pages, which are one chain from a root.

    Attributes:
        roots: root of each pin's pages; the manager keeps its name for as long as the pin is there.
        early: pins of pages that were not computed yet.
    """

    def __init__(self, pool: PagePool, page_size: int, journal: Journal) -> None:
        self.journal = journal
        self.roots: dict[int, int] = {}
        self.early: dict[int, None] = {}
        self._pool = pool
        self._page_size = page_size
        self._pages: dict[int, Pages] = {}
        self._tokens: dict[int, int] = {}
        self._next = 0

    def add(self, pages: Pages, tokens: int, root: int, *, early: bool = False) -> Pinned:
        """Own these pages, which hold so many tokens; the caller has made sure that they may be owned."""
        self._pool.acquire(pages, distinct=True)
        self.journal.keep(self, "_next")
        pinned = Pinned(self._next, tokens)
        self._next += 1
        if pages.size:
            for mapping in (self._pages, self._tokens, self.roots):
                self.journal.entry(mapping, pinned.number)
            self._pages[pinned.number], self.roots[pinned.number] = pages, root
            self._tokens[pinned.number] = tokens
        if early:
            self.journal.entry(self.early, pinned.number)
            self.early[pinned.number] = None
        return pinned

    def remove(self, pinned: Pinned) -> tuple[Pages, int]:
        """Own them no longer; a handle that was given back before is ignored.

        Returns:
            The pages that nobody owns any more, tail first, and their root; 0 if there was nothing to remove.

        Raises:
            StaleSequenceError: a handle that was never handed out here.
        """
        if not 0 <= pinned.number < self._next:
            raise StaleSequenceError(f"no pin {pinned.number} was ever handed out; {self._next} have been so far")
        for mapping in (self._pages, self._tokens, self.roots, self.early):
            self.journal.entry(mapping, pinned.number)
        self._tokens.pop(pinned.number, None)
        self.early.pop(pinned.number, None)
        pages = self._pages.pop(pinned.number, NO_PAGES)
        return self._pool.drop(pages[::-1], distinct=True), self.roots.pop(pinned.number, 0)

    def move(self, ids: Callable[[Pages], Pages]) -> None:
        """Pages have other numbers now: ids(pages)."""
        for number, pages in self._pages.items():
            self.journal.entry(self._pages, number)
            self._pages[number] = ids(pages)

    @property
    def held(self) -> int:
        """Pages with at least one pin."""
        return len({page for pages in self._pages.values() for page in pages.tolist()})

    def alone(self) -> tuple[int, int]:
        """Pages that pins own and nobody else, and the tokens in them."""
        if not self._pages:
            return 0, 0
        owners = np.zeros(self._pool.refcount.size, np.int64)
        filled = np.zeros(self._pool.refcount.size, np.int64)
        for number, pages in self._pages.items():
            owners[pages] += 1
            ends = np.minimum(self._tokens[number] - np.arange(pages.size) * self._page_size, self._page_size)
            filled[pages] = np.maximum(filled[pages], ends)
        alone = (owners > 0) & (owners == self._pool.refcount)
        return int(np.count_nonzero(alone)), int(filled[alone].sum())

    def by_number(self) -> dict[int, list[int]]:
        """Page ids of each pin, for the audit."""
        return {number: pages.tolist() for number, pages in self._pages.items()}


def pages_under(index: PrefixIndex, root: int | None) -> Pages:
    """Every indexed page whose chain starts from `root`, or from any root: int32 [n], in no particular order."""
    pages = (np.flatnonzero(index.indexed[1:]) + 1).astype(np.int32)
    if root is None:
        return pages
    start = index.parent[pages]
    climbing = np.flatnonzero(start > 0)
    while climbing.size:
        start[climbing] = index.parent[start[climbing]]
        climbing = climbing[start[climbing] > 0]
    return pages[start == root]


def free_unowned(pool: PagePool, pages: Pages) -> ResetResult:
    """Free those of the pages, all just taken out of the index, that nobody owns."""
    dropped = pages[pool.refcount[pages] == 0]
    pool.uncache(dropped)
    pool.give_back(dropped)
    return ResetResult(int(dropped.size), int(pages.size - dropped.size))
