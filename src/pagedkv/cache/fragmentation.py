"""Fragmentation: where the room of a contiguously allocated pool is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.cache.holes import Holes
from pagedkv.cache.table import PageTable


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Slots that hold no token, by reason (Kwon et al. 2023, "Efficient Memory Management for LLM Serving").

    Attributes:
        internal: slots behind the last token in the last page of each row that holds one.
        reserved: slots of pages that rows hold and no token has reached.
        external: slots of free pages outside the largest hole: free, but not for a request as large as the free room.
        largest_hole: pages of the largest hole.
        holes: how many holes there are.
    """

    internal: int
    reserved: int
    external: int
    largest_hole: int
    holes: int


def fragmentation_of(table: PageTable, holes: Holes) -> Fragmentation:
    """The figures of a pool whose rows hold contiguous stretches and whose free pages are `holes`."""
    filled = -(-table.length.astype(np.int64) // table.page_size)
    return Fragmentation(
        internal=int((filled * table.page_size - table.length).sum()),
        reserved=int((table.pages - filled).sum()) * table.page_size,
        external=(holes.free - holes.largest) * table.page_size,
        largest_hole=holes.largest,
        holes=len(holes.stretches),
    )
