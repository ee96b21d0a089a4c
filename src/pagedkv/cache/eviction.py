"""EvictionQueue: in which order pages without owner are evicted. Lower levels first; within one, oldest first.

Knows page ids and levels only; what a level stands for is retention.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.journal import Journal

if TYPE_CHECKING:
    from pagedkv.cache.resizing import Moves

Pages = NDArray[np.int32]

DEFAULT_LEVEL = 35
"""Level of pages that nobody said anything about; TensorRT-LLM's default priority."""


class _Line:
    """Pages of one level, oldest first: an append-only array read from its head. Some entries are stale."""

    def __init__(self, size: int) -> None:
        self.entries = np.zeros(size, np.int32)
        self.head = 0
        self.tail = 0


class EvictionQueue:
    """Cached pages in the order of eviction, as arrays.

    `position[page]` says where the page's valid entry is; a page that is used again just loses its position, which
    makes the old entry stale. That is exact LRU without a linked list, and every operation is a slice or a gather::

        entries     7   3   9   3   5          position[3] = 3, so entry 1 is stale
        index      [0] [1] [2] [3] [4]
                    ^ head              ^ tail

    Attributes:
        position: int64 [num_pages + 1], index of the page's entry in the line of its level; -1 for a page not cached.
        level: int8 [num_pages + 1], the level that the page is or was last cached at.
        cached: pages in the queue.
    """

    def __init__(self, num_pages: int, journal: Journal) -> None:
        self.num_pages = num_pages
        self.journal = journal
        self.position = np.full(num_pages + 1, -1, np.int64)
        self.level = np.full(num_pages + 1, DEFAULT_LEVEL, np.int8)
        self.cached = 0
        self.lines = {DEFAULT_LEVEL: _Line(2 * num_pages + 2)}

    def push(self, pages: Pages, level: int = DEFAULT_LEVEL) -> None:
        """Put pages, none of them cached, at the young end of a level, the first of them oldest."""
        if not pages.size:
            return
        line = self._line(level)
        if line.tail + pages.size > line.entries.size:
            self._compact(line, level)
        journal, end = self.journal, line.tail + pages.size
        journal.keep(line, "tail")
        journal.keep(self, "cached")
        line.entries[line.tail : end] = pages
        journal.replace(self.position, pages.astype(np.int64), -1, np.arange(line.tail, end))
        if len(self.lines) > 1:
            journal.put(self.level, pages, level)
        line.tail = end
        self.cached += pages.size

    def oldest(self, count: int) -> Pages:
        """The `count` pages that are evicted first; so many must be cached. They are to be withdrawn next."""
        chunks: list[Pages] = []
        missing = count
        for level, line in self._in_order():
            while missing and line.head < line.tail:
                self.journal.keep(line, "head")
                end = min(line.head + max(2 * missing, 64), line.tail)
                valid = self._valid(line, level, line.head, end)[:missing]
                chunks.append(line.entries[valid])
                missing -= valid.size
                line.head = end if missing else int(valid[-1]) + 1
        return np.concatenate(chunks) if chunks else np.zeros(0, np.int32)

    def withdraw(self, pages: Pages) -> None:
        """Take these cached pages, all different, out of the queue wherever they are in it."""
        self.journal.keep(self, "cached")
        self.journal.put(self.position, pages.astype(np.int64), -1)
        self.cached -= pages.size

    def queued(self) -> Pages:
        """The cached pages in the order of eviction."""
        return np.concatenate([self._pages(line, level) for level, line in self._in_order()])

    def resize(self, moves: Moves) -> None:
        """Pages have moved; the lines are written anew, without stale entries."""
        self.journal.keep(self, "num_pages", "position", "level")
        pages = {level: self._pages(line, level) for level, line in self.lines.items()}
        self.num_pages = moves.num_pages
        self.position = moves.indexed_by_page(self.position, -1)
        self.level = moves.indexed_by_page(self.level, DEFAULT_LEVEL)
        for level, line in self.lines.items():
            self._write(line, moves.ids(pages[level]))

    def _in_order(self) -> Iterator[tuple[int, _Line]]:
        yield from sorted(self.lines.items())

    def _pages(self, line: _Line, level: int) -> Pages:
        """The pages of one level, oldest first."""
        return line.entries[self._valid(line, level, line.head, line.tail)]

    def _valid(self, line: _Line, level: int, start: int, end: int) -> NDArray[np.int64]:
        """Indices of the entries from start to end that are not stale."""
        entries = line.entries[start:end]
        valid = self.position.take(entries) == np.arange(start, end)
        if len(self.lines) > 1:
            valid &= self.level[entries] == level
        return np.flatnonzero(valid) + start

    def _line(self, level: int) -> _Line:
        if level not in self.lines:
            self.journal.entry(self.lines, level)
            self.lines[level] = _Line(64)
        return self.lines[level]

    def _compact(self, line: _Line, level: int) -> None:
        """Drop stale entries, in an array with room for as many pages more as there can be."""
        self._write(line, self._pages(line, level))

    def _write(self, line: _Line, pages: Pages) -> None:
        """Let the line hold these pages only."""
        self.journal.keep(line, "entries", "head", "tail")
        self.journal.put(self.position, pages, np.arange(pages.size))
        entries = np.zeros(2 * self.num_pages + 2, np.int32)
        entries[: pages.size] = pages
        line.entries, line.head, line.tail = entries, 0, pages.size
