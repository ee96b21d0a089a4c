"""PageTable: rows of page ids and the lengths of each row.

`table` is the block table itself, the very array a kernel reads. Knows nothing about who else owns a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.checks import checked_counts
from pagedkv.cache.journal import Journal
from pagedkv.cache.ragged import ragged
from pagedkv.errors import InvalidRequestError, StaleSequenceError

Rows = NDArray[np.int64]


class _Checked(NamedTuple):
    """The rows that were found right last, and where each begins in the flat table."""

    said: bytes
    rows: Rows
    first: Rows


class PageTable:
    """Rows of sequences, as arrays. ::

        table[row]   [ 7 | 3 | 9 | 0 | 0 | 0 ]     page ids; 0 is the null page, past the row's end
                      <---------->                 pages[row] = 3, capacity = pages * page_size tokens
                      =========~~                  computed[row] <= length[row] <= capacity

    Attributes:
        table: int32 [max_rows, columns].
        pages: int32 [max_rows], pages the row holds.
        length: int32 [max_rows], tokens the row has places for and ids of.
        computed: int32 [max_rows], tokens whose keys and values have been written.
        live: bool [max_rows], whether the row belongs to a sequence.
        generation: int64 [max_rows], how often the row has been given back.
        owners: what the caller named each live row, for messages and audits.
        free_rows: rows that no sequence holds.
    """

    def __init__(self, max_rows: int, columns: int, page_size: int, journal: Journal | None = None) -> None:
        self.max_rows = max_rows
        self.columns = columns
        self.page_size = page_size
        self.journal = journal or Journal()
        self.table = np.zeros((max_rows, columns), np.int32)
        self.pages = np.zeros(max_rows, np.int32)
        self.length = np.zeros(max_rows, np.int32)
        self.computed = np.zeros(max_rows, np.int32)
        self.live = np.zeros(max_rows, np.bool_)
        self.generation = np.zeros(max_rows, np.int64)
        self.owners: dict[int, str] = {}
        self.free_rows = max_rows
        self._stack = np.arange(max_rows - 1, -1, -1)
        self._checked = _Checked(b"", np.zeros(0, np.int64), np.zeros(0, np.int64))

    def open(self, pages: NDArray[np.int32], length: int, computed: int, owner: str) -> int:
        """Start a row on these pages. The caller has made sure that a row is free."""
        row = int(self._stack[self.free_rows - 1])
        self.journal.keep(self, "free_rows")
        self.journal.entry(self.owners, row)
        self._save(row, pages.size)
        self.free_rows -= 1
        self.table[row, : pages.size] = pages
        self.pages[row] = pages.size
        self.length[row] = length
        self.computed[row] = computed
        self.live[row] = True
        self.owners[row] = owner
        return row

    def close(self, rows: Rows) -> None:
        """Give rows back; their page ids are wiped so that nothing names a page it does not own."""
        at = int(rows[0]) if rows.size == 1 else rows
        widest = int(self.pages[rows].max(initial=0))
        self.journal.keep(self, "free_rows")
        self.journal.save(self._stack, slice(self.free_rows, self.free_rows + rows.size))
        self._save(at, widest)
        for row in rows.tolist():
            self.journal.entry(self.owners, row)
        self._checked = _Checked(b"", rows[:0], rows[:0])
        self.table[at, :widest] = 0
        self.pages[at] = self.length[at] = self.computed[at] = 0
        self.live[at] = False
        self.generation[at] += 1
        for row in rows.tolist():
            del self.owners[row]
        self._stack[self.free_rows : self.free_rows + rows.size] = rows
        self.free_rows += rows.size

    def _save(self, rows: Rows | int, widest: int) -> None:
        """Remember everything about these rows, whose entries are in the first `widest` columns."""
        self.journal.save(self.table, (rows, slice(widest)))
        for state in (self.pages, self.length, self.computed, self.live, self.generation):
            self.journal.save(state, rows)

    def checked(self, rows: ArrayLike) -> Rows:
        """`rows` as int64 [n], all live and all different.

        Raises:
            StaleSequenceError: a row is outside the table or belongs to no sequence.
            InvalidRequestError: a row occurs twice, or rows are not a flat array of integers (a mask is not).
        """
        said = b""
        if isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1:
            said = rows.tobytes()
            if said and said == self._checked.said:  # a decode step names the rows of the last one
                return self._checked.rows
        given = np.atleast_1d(np.asarray(rows))
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"rows are a flat array of integers; got dtype {given.dtype} of shape {given.shape}"
            )
        checked = given.astype(np.int64, copy=False)
        if not checked.size:
            return checked
        ascending = bool((checked[1:] > checked[:-1]).all())  # the cheap case: then all differ, and the ends bound all
        low, high = (checked[0], checked[-1]) if ascending else (checked.min(), checked.max())
        if low < 0 or high >= self.max_rows:
            raise StaleSequenceError(f"row outside the table's 0 to {self.max_rows - 1}: {_some(checked)}")
        if not self.live.take(checked).all():
            raise StaleSequenceError(f"rows without a sequence: {_some(checked[~self.live[checked]])}")
        if not ascending and np.unique(checked).size < checked.size:
            raise InvalidRequestError(f"a row occurs twice in one call: {_some(np.sort(checked))}")
        if said:
            own = checked.copy()
            self._checked = _Checked(said, own, own * self.columns)
            return own
        return checked

    def still_open(self, sequences: Iterable[tuple[int, int]]) -> Rows:
        """Rows of those (row, generation) handles that have not been given back, each once, in the order given.

        Raises:
            StaleSequenceError: a handle was never handed out by this table.
        """
        rows: dict[int, None] = {}
        for row, generation in sequences:
            if not 0 <= row < self.max_rows or generation > self.generation[row]:
                raise StaleSequenceError(f"no sequence of this table ever had row {row}, generation {generation}")
            if generation == self.generation[row]:
                if not self.live[row]:
                    raise StaleSequenceError(f"row {row} has had no sequence of generation {generation} yet")
                rows[row] = None
        return np.array(list(rows), np.int64)

    def add_computed(self, rows: Rows, counts: NDArray[np.int64] | int) -> NDArray[np.integer]:
        """Count more tokens as computed; returns the new numbers, [n].

        Raises:
            InvalidRequestError: if more would be computed than the row holds.
        """
        before = self.computed.take(rows)
        computed = before + counts
        over = computed - self.length.take(rows)
        if over.size and over.max() > 0:
            worst = int(over.argmax())
            raise InvalidRequestError(
                f"{computed[worst]} tokens of row {rows[worst]} would be computed; it has {self.length[rows[worst]]}"
            )
        self.journal.replace(self.computed, rows, before, computed)
        return computed

    def append_pages(self, rows: Rows, counts: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
        """Put counts[i] of `pages` at the end of rows[i]."""
        held = self.pages.take(rows)
        group, offset = ragged(counts)
        self.journal.put(self.table, (rows[group], held[group] + offset), pages)
        self.journal.replace(self.pages, rows, held, held + counts)

    def append_page(self, rows: Rows, pages: NDArray[np.int32]) -> None:
        """Put pages[i] at the end of rows[i]."""
        held = self.pages.take(rows)
        self.journal.put(self.table.reshape(-1), rows * self.columns + held, pages)
        self.journal.replace(self.pages, rows, held, held + 1)

    def last_pages(self, rows: Rows) -> NDArray[np.int32]:
        """The last page of each row, int32 [n]; 0 for a row without pages."""
        return self.at(rows, np.maximum(self.pages.take(rows) - 1, 0))

    def at(self, rows: Rows, columns: NDArray[np.integer]) -> NDArray[np.int32]:
        """Page ids at (rows[i], columns[i]); a flat `take` is twice as fast as indexing with two arrays."""
        first = self._checked.first if rows is self._checked.rows else rows * self.columns
        return self.table.reshape(-1).take(first + columns)

    def owned(self, rows: Rows) -> NDArray[np.int32]:
        """Page ids of the rows, each row's last page first, row after row."""
        if rows.size == 1:
            return self.table[rows[0], : self.pages[rows[0]]][::-1].copy()
        counts = self.pages[rows].astype(np.int64)
        group, offset = ragged(counts)
        return self.at(rows[group], counts[group] - 1 - offset)

    def slots(self, rows: ArrayLike, starts: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
        """Slots of tokens starts[i] ... starts[i] + counts[i] - 1 of each row, int64 [sum(counts)], row after row.

        Raises:
            InvalidRequestError: if a range reaches past the row's length.
        """
        checked = self.checked(rows)
        first = checked_counts(starts, checked.size, "start")
        count = checked_counts(counts, checked.size)
        over = first + count - self.length[checked]
        if over.size and over.max() > 0:
            worst = int(over.argmax())
            raise InvalidRequestError(
                f"tokens {first[worst]} to {first[worst] + count[worst]} asked of row {checked[worst]}, "
                f"which has {self.length[checked[worst]]}"
            )
        return self.slots_unchecked(checked, first, count)

    def slots_unchecked(self, rows: Rows, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """`slots` for arguments known to be right."""
        group, offset = ragged(counts)
        owner, index = rows[group], starts[group] + offset
        column = index // self.page_size
        return self.at(owner, column).astype(np.int64) * self.page_size + (index - column * self.page_size)


def _some(rows: Rows, limit: int = 8) -> str:
    """The first few rows, for a message."""
    text = ", ".join(map(str, rows[:limit].tolist()))
    return text + (", ..." if rows.size > limit else "")
