"""GrowingContiguousManager: each request in one piece that grows, and moves elsewhere when it cannot.

The second traditional allocator to compare with: no reservation, but holes that nobody fits into, and copies of whole
sequences. Behind the same verbs as the others; nothing is shared.
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
from pagedkv.cache.fragmentation import Fragmentation, fragmentation_of
from pagedkv.cache.holes import Holes
from pagedkv.cache.outcomes import Admitted, Extended, Never, Sequence, Usage, Wait
from pagedkv.cache.table import PageTable


class GrowingContiguousManager:
    """First fit for what a request has now; arguments as for KVCacheManager.

    Attributes:
        moved_pages: pages copied so far because a request could not grow where it was.
    """

    def __init__(self, num_pages: int, page_size: int, *, max_rows: int, max_seq_len: int) -> None:
        check_sizes(num_pages, page_size, max_rows, max_seq_len)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.table = PageTable(max_rows, pages_for_tokens(max_seq_len, page_size), page_size)
        self.holes = Holes(num_pages)
        self.moved_pages = 0

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
        """One stretch for the prompt and `reserve` more tokens. `headroom` pages must stay free, in whatever holes."""
        prompt = checked_prompt(tokens, reserve, headroom, self.max_seq_len)
        pages = pages_for_tokens(prompt.size + reserve, self.page_size)
        if pages > self.num_pages:
            return Never(pages, self.num_pages)
        if not self.table.free_rows:
            return Wait(1, 0, on="rows")
        if pages + headroom > self.holes.free:
            return Wait(pages + headroom, self.holes.free)
        first = self.holes.take(pages)
        if first is None:
            return Wait(pages, self.holes.largest)
        row = self.table.open(np.arange(first, first + pages, dtype=np.int32), prompt.size, 0, owner)
        return Admitted(Sequence(row, int(self.table.generation[row])), 0)

    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Extended | Wait | Never:
        """Append tokens, for all rows or none; rows that cannot grow in place move, and `copies` say from where.

        Wait names the pages of the row that found no hole, and the largest hole that there was for it.
        """
        at = self.table.checked(rows)
        count = checked_counts(counts, at.size)
        check_token_count(checked_ids(tokens), count)
        before = self.table.length[at].astype(np.int64)
        check_lengths(at, before + count, self.max_seq_len)
        pages = np.maximum(-(-(before + count) // self.page_size), self.table.pages[at])
        if pages.max(initial=0) > self.num_pages:
            return Never(int(pages.max()), self.num_pages)
        holes, copies = list(self.holes.stretches), []
        places: dict[int, tuple[int, int]] = {}
        for row, wanted in zip(at.tolist(), pages.tolist(), strict=True):
            held, first = int(self.table.pages[row]), int(self.table.table[row, 0])
            if wanted == held:
                continue
            if self.holes.take_at(first + held, wanted - held) is None:
                new = self.holes.take(wanted)
                if new is None:
                    largest, self.holes.stretches = self.holes.largest, holes
                    return Wait(wanted, largest)
                self.holes.give_back([(first, held)])
                copies.append(np.stack((np.arange(first, first + held), np.arange(new, new + held)), axis=1))
                first = new
            places[row] = (first, wanted)
        for row, (first, wanted) in places.items():
            self.table.table[row, :wanted] = np.arange(first, first + wanted)
            self.table.pages[row] = wanted
        self.table.length[at] = before + count
        pairs = np.concatenate([np.zeros((0, 2), np.int64), *copies]).astype(np.int32)
        self.moved_pages += len(pairs)
        return Extended(self.table.slots_unchecked(at, before, count), pairs)

    def commit(self, rows: ArrayLike, counts: ArrayLike) -> None:
        """Count tokens as computed."""
        at = self.table.checked(rows)
        self.table.add_computed(at, checked_counts(counts, at.size))

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give back rows and their stretches. Handles whose row has been given back before are ignored.

        Raises:
            StaleSequenceError: a handle that this manager never handed out; nothing is released.
        """
        at = self.table.still_open(sequences)
        stretches = list(zip(self.table.table[at, 0].tolist(), self.table.pages[at].tolist(), strict=True))
        self.table.close(at)
        self.holes.give_back(stretches)

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row: all that it holds."""
        return self.table.pages[self.table.checked(rows)].astype(np.int64)

    def fragmentation(self) -> Fragmentation:
        """Where room is lost now."""
        return fragmentation_of(self.table, self.holes)

    def usage(self) -> Usage:
        """Where the pages are now."""
        used = int(self.table.pages.sum())
        tokens = int(self.table.length.sum())
        return Usage(self.num_pages, used, 0, self.num_pages - used, 0, used, tokens, self.page_size)
