"""ContiguousManager: the traditional allocator, behind the same verbs, to compare with.

Each request reserves room for max_seq_len tokens in one piece when it is admitted, first fit, and keeps all of it until
it ends. The room is cut into pages only so that the same kernels and engine can run on it; nothing is shared.
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


class ContiguousManager:
    """Reserves ceil(max_seq_len / page_size) consecutive pages per request. Arguments as for KVCacheManager."""

    def __init__(self, num_pages: int, page_size: int, *, max_rows: int, max_seq_len: int) -> None:
        check_sizes(num_pages, page_size, max_rows, max_seq_len)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.reserved = pages_for_tokens(max_seq_len, page_size)
        self.table = PageTable(max_rows, self.reserved, page_size)
        self.holes = Holes(num_pages)

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
        """Reserve a stretch for the prompt and all that may follow.

        `headroom` keeps no stretch back and nothing is shared: a reservation never grows.
        """
        prompt = checked_prompt(tokens, reserve, headroom, self.max_seq_len)
        if self.reserved > self.num_pages:
            return Never(self.reserved, self.num_pages)
        if not self.table.free_rows:
            return Wait(1, 0, on="rows")
        first = self.holes.take(self.reserved)
        if first is None:
            return Wait(self.reserved, self.holes.largest)
        row = self.table.open(np.arange(first, first + self.reserved, dtype=np.int32), prompt.size, 0, owner)
        return Admitted(Sequence(row, int(self.table.generation[row])), 0)

    def extend(self, rows: ArrayLike, tokens: ArrayLike, counts: ArrayLike = 1) -> Extended | Wait | Never:
        """Append tokens; the room was reserved at admission, so this never waits."""
        at = self.table.checked(rows)
        count = checked_counts(counts, at.size)
        check_token_count(checked_ids(tokens), count)
        before = self.table.length[at].astype(np.int64)
        check_lengths(at, before + count, self.max_seq_len)
        self.table.length[at] = before + count
        return Extended(self.table.slots_unchecked(at, before, count))

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
        stretches = [(int(first), self.reserved) for first in self.table.table[at, 0]]
        self.table.close(at)
        self.holes.give_back(stretches)

    def private_pages(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Pages of each row: all of its reservation."""
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
