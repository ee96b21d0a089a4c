"""The page table in the forms of FlashInfer, flash-attn and vLLM, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_support import admitted, tiny
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cache import PagesCSR, PageTable, block_table, check_csr, check_page_size, csr, slot_mapping
from pagedkv.errors import InvalidRequestError, StaleSequenceError


@st.composite
def tables(draw: st.DrawFn) -> tuple[PageTable, list[int], list[int]]:
    """A table of some rows, the rows to show in some order, and how many tokens of each."""
    size = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 4 * size), min_size=1, max_size=5))
    table = PageTable(6, 4, size)
    ids = iter(draw(st.permutations(range(1, 21))))
    for length in lengths:
        table.open(np.array([next(ids) for _ in range(-(-length // size))], np.int32), length, 0, "")
    rows = draw(st.permutations(range(len(lengths))))
    return table, rows, [draw(st.integers(1, lengths[row])) for row in rows]


def plain_pages(table: PageTable, row: int, tokens: int) -> list[int]:
    return [int(table.table[row, at // table.page_size]) for at in range(0, tokens, table.page_size)]


@given(tables())
def test_csr_names_the_pages_that_a_loop_finds(drawn: tuple[PageTable, list[int], list[int]]) -> None:
    table, rows, seen = drawn
    arrays = csr(table, rows, seen)
    check_csr(arrays, table.page_size, 20)
    for i, (row, tokens) in enumerate(zip(rows, seen, strict=True)):
        pages = arrays.indices[arrays.indptr[i] : arrays.indptr[i + 1]].tolist()
        assert pages == plain_pages(table, row, tokens)
        assert (len(pages) - 1) * table.page_size + arrays.last_page_len[i] == tokens


@given(tables())
def test_a_block_table_ends_each_row_with_the_null_page(drawn: tuple[PageTable, list[int], list[int]]) -> None:
    table, rows, seen = drawn
    answer = block_table(table, rows, seen)
    assert (answer.table.dtype, answer.lengths.dtype) == (np.int32, np.int32)
    assert answer.lengths.tolist() == seen
    for i, (row, tokens) in enumerate(zip(rows, seen, strict=True)):
        pages = plain_pages(table, row, tokens)
        assert answer.table[i].tolist() == pages + [0] * (answer.table.shape[1] - len(pages))


@given(tables())
def test_slots_read_back_what_csr_points_at(drawn: tuple[PageTable, list[int], list[int]]) -> None:
    """A store written through the slot mapping and read through the CSR arrays gives each row its own tokens."""
    table, rows, seen = drawn
    store = np.full((21, table.page_size), -1)
    written = [[100 * row + at for at in range(tokens)] for row, tokens in zip(rows, seen, strict=True)]
    store.reshape(-1)[slot_mapping(table, rows, [0] * len(rows), seen)] = np.concatenate(written)
    arrays = csr(table, rows, seen)
    for i, tokens in enumerate(written):
        pages = store[arrays.indices[arrays.indptr[i] : arrays.indptr[i + 1]]].reshape(-1)
        rest = table.page_size - arrays.last_page_len[i]
        assert pages[: pages.size - rest].tolist() == tokens


def test_tokens_in_the_last_page() -> None:
    """FAILURES 53: exact multiples fill their last page; no length gives 0."""
    manager = tiny(num_pages=32, max_rows=9)
    rows = [admitted(manager, [length] * length).sequence.row for length in range(1, 10)]
    assert csr(manager.table, rows).last_page_len.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]


@pytest.mark.parametrize("lengths", [[0], [6], [-1], [1, 1]])
def test_lengths_that_a_row_does_not_have_are_refused(lengths: list[int]) -> None:
    manager = tiny()
    row = admitted(manager, [1, 2, 3, 4, 5]).sequence.row
    for form in (csr, block_table):
        with pytest.raises(InvalidRequestError):
            form(manager.table, [row], lengths)
    with pytest.raises(StaleSequenceError):
        csr(manager.table, [row + 1])


GOOD = PagesCSR(np.array([0, 2, 3], np.int32), np.array([1, 2, 3], np.int32), np.array([1, 4], np.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_page_len": np.array([0, 4], np.int32)}, "row 0 holds 0 tokens; it must hold 1 to 4"),
        ({"last_page_len": np.array([1, 5], np.int32)}, "row 1 holds 5 tokens; it must hold 1 to 4"),
        ({"last_page_len": np.array([1], np.int32)}, "3 entries for 1 rows"),
        ({"indices": np.array([1, 2, 0], np.int32)}, "pages 0 to 2 are named; they must be 1 to 3"),
        ({"indices": np.array([1, 2, 4], np.int32)}, "pages 1 to 4 are named"),
        ({"indices": np.array([1, 2, 3], np.int64)}, "indices is int64"),
        ({"indptr": np.array([0, 3, 3], np.int32)}, "row 1 has 0 pages by indptr"),
        ({"indptr": np.array([0, 4, 3], np.int32)}, "row 1 has -1 pages by indptr"),
        ({"indices": [1, 2, 3]}, "indices is a list; it must be an int32 array"),
        ({"indptr": np.array([1, 2, 3], np.int32)}, "runs from 1 to 3"),
        ({"indptr": np.array([0, 1, 2], np.int32)}, "runs from 0 to 2; it must run from 0 to 3"),
    ],
)
def test_arrays_that_flashinfer_would_misread_are_refused(changes: dict[str, Any], message: str) -> None:
    """FAILURES 58: a last page of 0 or page_size + 1 tokens is an error, not other output."""
    check_csr(GOOD, 4, 3)
    with pytest.raises(InvalidRequestError, match=message):
        check_csr(GOOD._replace(**changes), 4, 3)


def test_an_indptr_whose_fall_overflows_int32_is_refused() -> None:
    falling = np.array([0, 2**31 - 1, -(2**31), -1, 3], np.int32)
    arrays = PagesCSR(falling, np.array([1, 2, 3], np.int32), np.ones(4, np.int32))
    with pytest.raises(InvalidRequestError, match=f"row 1 has {-(2**32) + 1} pages"):
        check_csr(arrays, 4, 3)


def test_more_pages_than_int32_counts_are_refused() -> None:
    table = PageTable(2, 1, 1)
    for _ in range(2):
        table.length[table.open(np.array([1], np.int32), 1, 0, "")] = 2**31 - 1
    with pytest.raises(InvalidRequestError, match="have 4294967294 pages"):
        csr(table, [0, 1])


@pytest.mark.parametrize(("page_size", "num_pages"), [(0, 3), (4, 0)])
def test_a_pool_without_room_is_refused_even_for_no_rows(page_size: int, num_pages: int) -> None:
    nothing = PagesCSR(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    check_csr(nothing, 4, 3)
    with pytest.raises(InvalidRequestError, match="both must be at least 1"):
        check_csr(nothing, page_size, num_pages)


def test_two_rows_of_one_token_are_alike() -> None:
    """FAILURES 58: sequences shorter than a page, twice in one batch."""
    manager = tiny(page_size=2)
    rows = [admitted(manager, [5]).sequence.row for _ in range(2)]
    assert csr(manager.table, rows).last_page_len.tolist() == [1, 1]
    assert csr(manager.table, rows).indptr.tolist() == [0, 1, 2]


def test_page_sizes_that_a_kernel_cannot_read_are_refused() -> None:
    for kernel, size in (("flash-attn 2", 256), ("vllm triton", 48), ("vllm cpu", 96), ("trtllm", 64)):
        check_page_size(kernel, size)
    for kernel, size in (("flash-attn 2", 16), ("vllm triton", 8), ("vllm cpu", 16), ("trtllm", 128), ("trtllm", 0)):
        with pytest.raises(InvalidRequestError, match=f"these have {size}"):
            check_page_size(kernel, size)
    with pytest.raises(InvalidRequestError, match="known: flash-attn 2"):
        check_page_size("other", 16)
