"""What a batch must satisfy before any backend touches memory for it: vectorised checks that name the numbers.

Knows nothing about how attention is computed.
"""

from __future__ import annotations

import numpy as np

from pagedkv.attention.interface import AttentionBatch
from pagedkv.errors import InvalidRequestError


def check_batch(batch: AttentionBatch) -> None:
    """Check all that can be checked without knowing the page tensors.

    Raises:
        InvalidRequestError: if query_start does not rise from 0 to the number of slots, a sequence's kv_length is
            shorter than its queries, a row is outside the table, or array sizes contradict each other.
    """
    start, length, rows, table = batch.query_start, batch.kv_length, batch.rows, batch.table
    if start.ndim != 1 or len(length) != len(start) - 1 or len(rows) != len(length):
        raise InvalidRequestError(
            f"query_start has shape {start.shape}, kv_length {length.shape}, rows {rows.shape}; "
            f"[B + 1], [B] and [B] are needed"
        )
    if table.ndim != 2:
        raise InvalidRequestError(f"the block table has {table.ndim} dimensions; it must have 2")
    counts = np.diff(start)
    if start[0] != 0 or (counts < 1).any():
        at = int(np.argmax(counts < 1)) if start[0] == 0 else 0
        raise InvalidRequestError(
            f"query_start must rise from 0 by at least 1: it is {int(start[0])} at 0"
            + (f" and goes from {int(start[at])} to {int(start[at + 1])} at sequence {at}" if len(counts) else "")
        )
    if int(start[-1]) != len(batch.slots):
        raise InvalidRequestError(f"{len(batch.slots)} slots for {int(start[-1])} query tokens")
    if (length < counts).any():
        at = int(np.argmax(length < counts))
        raise InvalidRequestError(
            f"sequence {at} has kv_length {int(length[at])}, which is less than its {int(counts[at])} query tokens"
        )
    if len(rows) and (rows.min() < 0 or rows.max() >= table.shape[0]):
        at = int(np.argmax((rows < 0) | (rows >= table.shape[0])))
        raise InvalidRequestError(f"sequence {at} is in row {int(rows[at])} of a table of {table.shape[0]} rows")


def check_slots(batch: AttentionBatch, num_pages: int, page_size: int) -> None:
    """Check that every slot is -1 or lies in a usable page.

    Raises:
        InvalidRequestError: if one does not.
    """
    slots = batch.slots
    wrong = (slots != -1) & ((slots < page_size) | (slots >= num_pages * page_size))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidRequestError(
            f"slot {int(slots[at])} of token {at} is not -1 and not in pages 1 to {num_pages - 1} "
            f"of {page_size} tokens (slots {page_size} to {num_pages * page_size - 1})"
        )


def check_pages(batch: AttentionBatch, num_pages: int, page_size: int, window: int | None) -> None:
    """Check that the table names a usable page wherever a query of the batch sees a token.

    Columns past the last page, and those before the first query's window, are not looked at: their pages may be gone.

    Raises:
        InvalidRequestError: if a sequence needs more columns than the table has, or a page is not among
            1 ... num_pages - 1.
    """
    columns = batch.table.shape[1]
    end = (batch.kv_length.astype(np.int64) - 1) // page_size + 1  # one past the column of the last token
    if len(end) and end.max() > columns:
        at = int(np.argmax(end))
        raise InvalidRequestError(
            f"sequence {at} with kv_length {int(batch.kv_length[at])} needs {int(end[at])} pages "
            f"of {page_size} tokens; the table has {columns} columns"
        )
    first = np.zeros_like(end)
    if window is not None:
        seen = batch.kv_length - np.diff(batch.query_start) - window + 1
        first = np.maximum(seen, 0) // page_size
    counts = end - first
    rows = np.repeat(batch.rows, counts)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    pages = batch.table[rows, column]
    wrong = (pages < 1) | (pages >= num_pages)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidRequestError(
            f"page {int(pages[at])} in row {int(rows[at])}, column {int(column[at])} "
            f"is not one of the pages 1 to {num_pages - 1}"
        )
