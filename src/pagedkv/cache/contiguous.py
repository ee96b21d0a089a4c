"""The traditional allocators, behind the same verbs, to compare with: each request in one stretch of pages, first fit.

The room is cut into pages only so that the same kernels and engine can run on it; nothing is shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from pagedkv.cache.fragmentation import Fragmentation, fragmentation_of
from pagedkv.cache.holes import Holes, Stretch
from pagedkv.cache.journal import Journal, atomic
from pagedkv.cache.outcomes import NO_COPIES, Admitted, Extended, Never, Sequence, Usage, Wait
from pagedkv.cache.table import PageTable, Rows


class StretchManager(ABC):
    """What contiguous allocators have in common: all verbs but growth. Arguments as for KVCacheManager."""

    nested = False

    def __init__(self, num_pages: int, page_size: int, *, max_rows: int, max_seq_len: int) -> None:
        check_sizes(num_pages, page_size, max_rows, max_seq_len)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.journal = Journal()
        self.table = PageTable(max_rows, pages_for_tokens(max_seq_len, page_size), page_size, self.journal)
        self.holes = Holes(num_pages)

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
    ) -> Admitted | Wait | Never:
        """Give a prompt one stretch of pages; nothing of it is cached."""
        prompt = checked_prompt(tokens, reserve, headroom, self.max_seq_len)
        pages, kept_free = self._room(prompt.size + reserve, headroom)
        if pages > self.num_pages:
            return Never(pages, self.num_pages)
        if not self.table.free_rows:
            return Wait(1, 0, on="rows")
        if kept_free and pages + kept_free > self.holes.free:
            return Wait(pages + kept_free, self.holes.free)
        self.journal.keep(self.holes, "stretches")
        first = self.holes.take(pages)
        if first is None:
            return Wait(pages, self.holes.largest)
        row = self.table.open(np.arange(first, first + pages, dtype=np.int32), prompt.size, 0, owner)
        return Admitted(Sequence(row, int(self.table.generation[row])), 0)

    @abstractmethod
    def _room(self, tokens: int, headroom: int) -> tuple[int, int]:
        """Pages of the stretch of a request that wants room for so many tokens, and pages that must stay free."""

    @atomic
    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Extended | Wait | Never:
        """Append tokens, for all rows or none; `copies` say what had to move."""
        at = self.table.checked(rows)
        count = checked_counts(counts, at.size)
        check_token_count(checked_ids(tokens), count)
        before = self.table.length[at].astype(np.int64)
        check_lengths(at, before + count, self.max_seq_len)
        copies = self._grow(at, -(-(before + count) // self.page_size))
        if not isinstance(copies, np.ndarray):
            return copies
        self.journal.put(self.table.length, at, before + count)
        return Extended(self.table.slots_unchecked(at, before, count), copies)

    @abstractmethod
    def _grow(self, rows: Rows, pages: NDArray[np.int64]) -> NDArray[np.int32] | Wait | Never:
        """Make rows[i] hold at least pages[i] pages; the copies this takes, or why it cannot be."""

    @atomic
    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Count tokens as computed."""
        at = self.table.checked(rows)
        self.table.add_computed(at, checked_counts(counts, at.size))

    @atomic
    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give back rows and their stretches. Handles whose row has been given back before are ignored.

        Raises:
            StaleSequenceError: a handle that this manager never handed out; nothing is released.
        """
        at = self.table.still_open(sequences)
        stretches = list(zip(self.table.table[at, 0].tolist(), self.table.pages[at].tolist(), strict=True))
        self.journal.keep(self.holes, "stretches")
        self.table.close(at)
        self.holes.give_back(stretches)

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row: all of its stretch."""
        return self.table.pages[self.table.checked(rows)].astype(np.int64)

    def fragmentation(self) -> Fragmentation:
        """Where room is lost now."""
        return fragmentation_of(self.table, self.holes)

    def usage(self) -> Usage:
        """Where the pages are now."""
        used = int(self.table.pages.sum())
        return Usage(
            total=self.num_pages,
            used=used,
            cached=0,
            free=self.num_pages - used,
            promised=0,
            owned=used,
            tokens=int(self.table.length.sum()),
            page_size=self.page_size,
        )


class ContiguousManager(StretchManager):
    """Reserves room for max_seq_len tokens at admission, and keeps all of it until the request ends.

    `headroom` keeps nothing back: a reservation never grows.
    """

    def _room(self, tokens: int, headroom: int) -> tuple[int, int]:
        return self.table.columns, 0

    def _grow(self, rows: Rows, pages: NDArray[np.int64]) -> NDArray[np.int32]:
        return NO_COPIES


class GrowingContiguousManager(StretchManager):
    """Takes room for what a request has now, and moves it elsewhere when it cannot grow where it is.

    No reservation, but holes that nobody fits into, and copies of whole sequences. `headroom` pages must stay free
    after an admission, in whatever holes. `Wait` of `extend` names the pages of the row that found no hole, and the
    largest hole that there was for it, its own stretch counted as free.

    Attributes:
        moved_pages: pages copied so far because a request could not grow where it was.
    """

    def __init__(self, num_pages: int, page_size: int, *, max_rows: int, max_seq_len: int) -> None:
        super().__init__(num_pages, page_size, max_rows=max_rows, max_seq_len=max_seq_len)
        self.moved_pages = 0

    def _room(self, tokens: int, headroom: int) -> tuple[int, int]:
        return pages_for_tokens(tokens, self.page_size), headroom

    def _grow(self, rows: Rows, pages: NDArray[np.int64]) -> NDArray[np.int32] | Wait | Never:
        if pages.max(initial=0) > self.num_pages:
            return Never(int(pages.max()), self.num_pages)
        self.journal.keep(self.holes, "stretches")
        self.journal.keep(self, "moved_pages")
        before = self.holes.stretches
        places: dict[int, Stretch] = {}
        copies = [NO_COPIES]
        for at in np.flatnonzero(pages > self.table.pages[rows]).tolist():
            row, wanted = int(rows[at]), int(pages[at])
            first, held = int(self.table.table[row, 0]), int(self.table.pages[row])
            if self.holes.take_at(first + held, wanted - held) is None:
                self.holes.give_back([(first, held)])  # a row may slide within its own room
                new = self.holes.take(wanted)
                if new is None:
                    largest, self.holes.stretches = self.holes.largest, before
                    return Wait(wanted, largest)
                filled = pages_for_tokens(int(self.table.length[row]), self.page_size)
                source = np.arange(first, first + filled, dtype=np.int32)
                copies.append(np.stack((source, source + np.int32(new - first)), axis=1))
                first = new
            places[row] = (first, wanted)
        for row, (first, wanted) in places.items():
            self.journal.put(self.table.table, (row, slice(wanted)), np.arange(first, first + wanted))
            self.journal.put(self.table.pages, row, wanted)
        pairs = np.concatenate(copies)
        self.moved_pages += len(pairs)
        return pairs
