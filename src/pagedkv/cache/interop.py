"""A page table in the forms that others' kernels read: FlashInfer's CSR arrays, block tables, slot mappings.

Reads a PageTable and builds arrays without a Python loop over rows; knows nothing about tensors or kernels' packages.
What is handed out satisfies what those kernels document, and `check_csr` says so of arrays from anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.cache.checks import checked_counts
from pagedkv.cache.ragged import ragged
from pagedkv.cache.table import PageTable, Rows
from pagedkv.errors import InvalidRequestError

KERNEL_PAGE_SIZES = {
    "flash-attn 2": (256, None),
    "vllm triton": (16, None),
    "vllm cpu": (32, None),
    "trtllm": (16, (16, 32, 64)),
}
"""Per kernel: the number that a page size must be a multiple of, and the only sizes taken (None: any multiple)."""


class PagesCSR(NamedTuple):
    """FlashInfer's arrays: row i's pages are indices[indptr[i] : indptr[i + 1]].

    Attributes:
        indptr: int32 [rows + 1] (kv_indptr).
        indices: int32 [pages of all rows] (kv_indices), page ids.
        last_page_len: int32 [rows] (kv_last_page_len), tokens in each row's last page, 1 to page_size.
    """

    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


class BlockTable(NamedTuple):
    """What flash-attn and vLLM read: row i's pages from the left, the null page 0 behind them.

    Attributes:
        table: int32 [rows, most pages of a row].
        lengths: int32 [rows], tokens of each row (cache_seqlens, seq_lens).
    """

    table: NDArray[np.int32]
    lengths: NDArray[np.int32]


def csr(table: PageTable, rows: ArrayLike, lengths: ArrayLike | None = None) -> PagesCSR:
    """The pages of `rows` for FlashInfer.

    Args:
        lengths: tokens of each row that the kernel shall see, int [n], 1 to the row's length; None for all of them.

    Raises:
        StaleSequenceError, InvalidRequestError: rows or lengths are wrong, or the rows have 2**31 pages or more.
    """
    at, seen, pages = _seen(table, rows, lengths)
    if pages.sum() > np.iinfo(np.int32).max:
        raise InvalidRequestError(f"the rows have {pages.sum()} pages; int32 arrays name at most 2**31 - 1")
    group, column = ragged(pages)
    indptr = np.zeros(at.size + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    last = (seen - (pages - 1) * table.page_size).astype(np.int32)
    return PagesCSR(indptr, table.at(at[group], column), last)


def block_table(table: PageTable, rows: ArrayLike, lengths: ArrayLike | None = None) -> BlockTable:
    """The pages of `rows` as a block table of its own; `table.table` itself serves kernels that take row numbers.

    Arguments and errors as for `csr`.
    """
    at, seen, pages = _seen(table, rows, lengths)
    width = int(pages.max(initial=0))
    held = np.where(np.arange(width) < pages[:, None], table.table[at, :width], 0).astype(np.int32)
    return BlockTable(held, seen.astype(np.int32))


def slot_mapping(table: PageTable, rows: ArrayLike, starts: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
    """Where tokens starts[i] to starts[i] + counts[i] - 1 of each row are written: int64 [sum(counts)].

    slot = page * page_size + offset, as vLLM's `reshape_and_cache_flash` takes it. Errors as for `PageTable.slots`.
    """
    return table.slots(rows, starts, counts)


def check_csr(arrays: PagesCSR, page_size: int, num_pages: int) -> None:
    """Check the arrays against what FlashInfer documents.

    Raises:
        InvalidRequestError: something is not a flat int32 array; indptr does not rise from 0 to the number of indices
            with every row; a page is outside 1 to num_pages; or a last page holds fewer than 1 or more than page_size
            tokens. Also where page_size or num_pages is below 1.
    """
    if page_size < 1 or num_pages < 1:
        raise InvalidRequestError(f"page_size is {page_size} and num_pages {num_pages}; both must be at least 1")
    for name, array in arrays._asdict().items():
        if not isinstance(array, np.ndarray):
            raise InvalidRequestError(f"{name} is a {type(array).__name__}; it must be an int32 array")
        if array.dtype != np.int32 or array.ndim != 1:
            raise InvalidRequestError(f"{name} is {array.dtype} of shape {array.shape}; it must be int32 and flat")
    indptr, indices, last = arrays
    if indptr.size != last.size + 1:
        raise InvalidRequestError(f"indptr has {indptr.size} entries for {last.size} rows; it must have one more")
    if indptr[0] != 0 or indptr[-1] != indices.size:
        raise InvalidRequestError(f"indptr runs from {indptr[0]} to {indptr[-1]}; it must run from 0 to {indices.size}")
    pages = np.diff(indptr.astype(np.int64))  # in int32 a fall of 2**31 or more would look like a rise
    if (pages < 1).any():
        row = int(np.argmax(pages < 1))
        raise InvalidRequestError(f"row {row} has {pages[row]} pages by indptr; it must have at least 1")
    if indices.size and (indices.min() < 1 or indices.max() > num_pages):
        raise InvalidRequestError(f"pages {indices.min()} to {indices.max()} are named; they must be 1 to {num_pages}")
    wrong = np.flatnonzero((last < 1) | (last > page_size))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidRequestError(f"last page of row {row} holds {last[row]} tokens; it must hold 1 to {page_size}")


def check_page_size(kernel: str, page_size: int) -> None:
    """Raise InvalidRequestError if pages of `page_size` tokens cannot be read by a kernel of KERNEL_PAGE_SIZES."""
    if kernel not in KERNEL_PAGE_SIZES:
        raise InvalidRequestError(
            f"no page sizes are known for kernel {kernel!r}; known: {', '.join(KERNEL_PAGE_SIZES)}"
        )
    multiple, only = KERNEL_PAGE_SIZES[kernel]
    if page_size < 1 or page_size % multiple or (only and page_size not in only):
        allowed = " or ".join(map(str, only)) if only else f"a multiple of {multiple}"
        raise InvalidRequestError(f"{kernel} reads pages of {allowed} tokens; these have {page_size}")


def _seen(
    table: PageTable, rows: ArrayLike, lengths: ArrayLike | None
) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
    """Checked rows, the tokens of each that shall be seen, and the pages that hold them."""
    at = table.checked(rows)
    held = table.length[at].astype(np.int64)
    seen = held if lengths is None else checked_counts(lengths, at.size, "length")
    wrong = np.flatnonzero((seen < 1) | (seen > held))
    if wrong.size:
        first = int(wrong[0])
        raise InvalidRequestError(f"{seen[first]} tokens asked of row {at[first]}; it can show 1 to {held[first]}")
    return at, seen, -(-seen // table.page_size)
