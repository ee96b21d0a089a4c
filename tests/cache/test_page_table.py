"""PageTable: rows, lengths, handles and slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.cache.table import PageTable
from pagedkv.errors import InvalidRequestError, StaleSequenceError


def table_of(*rows: tuple[list[int], int]) -> PageTable:
    """A table of 4 rows of 4 columns, pages of 4 tokens, with these (pages, length) opened in order."""
    table = PageTable(4, 4, 4)
    for pages, length in rows:
        table.open(np.array(pages, np.int32), length, 0, "someone")
    return table


def test_rows_are_opened_from_zero_up() -> None:
    table = table_of(([7, 3], 6), ([2], 1))
    assert table.table[:2].tolist() == [[7, 3, 0, 0], [2, 0, 0, 0]]
    assert table.length.tolist() == [6, 1, 0, 0]
    assert table.live.tolist() == [True, True, False, False]
    assert table.free_rows == 2


def test_a_closed_row_names_no_page_and_has_a_new_generation() -> None:
    table = table_of(([7, 3], 6), ([2], 1))
    table.close(np.array([0]))
    assert not table.table[0].any()
    assert (table.length[0], table.pages[0], table.live[0], table.generation[0]) == (0, 0, False, 1)
    assert table.table[1].tolist() == [2, 0, 0, 0], "the other row is untouched"
    assert table.free_rows == 3


@pytest.mark.parametrize("length", range(1, 10))
def test_slots_are_page_times_size_plus_offset(length: int) -> None:
    table = table_of(([7, 3, 9], length))
    expected = [[7, 3, 9][at // 4] * 4 + at % 4 for at in range(length)]
    for start in range(length + 1):
        assert table.slots(0, start, length - start).tolist() == expected[start:]


def test_slots_of_several_rows_follow_each_other() -> None:
    table = table_of(([7, 3], 6), ([2], 3), ([9], 2))
    assert table.slots([2, 0, 1], [1, 3, 0], [1, 3, 0]).tolist() == [37, 31, 12, 13]


def test_slots_are_int64_even_for_pages_whose_slots_leave_int32() -> None:
    table = table_of(([2**30], 4))
    slots = table.slots(0, 3, 1)
    assert (slots.dtype, slots.tolist()) == (np.int64, [2**32 + 3])


@pytest.mark.parametrize(
    ("starts", "counts", "message"),
    [
        ([0, 0], [7, 1], "tokens 0 to 7 asked of row 0, which has 6"),
        ([0, 3], [6, 1], "tokens 3 to 4 asked of row 1, which has 3"),
        ([-1, 0], [1, 3], "a start of -1 tokens is negative"),
        ([0, 0], [1, -1], "a count of -1 tokens is negative"),
        ([0, 2**62], [1, 2**62], "a start of 4611686018427387904 tokens is more than"),
    ],
)
def test_slots_past_the_end_are_refused_with_the_row(starts: list[int], counts: list[int], message: str) -> None:
    table = table_of(([7, 3], 6), ([2], 3))
    with pytest.raises(InvalidRequestError, match=message):
        table.slots([0, 1], starts, counts)


@pytest.mark.parametrize("rows", [[1, 0], [0, 1], 1, np.array([1], np.uint8), np.array(0), []])
def test_live_rows_come_back_as_they_were_given(rows: Any) -> None:
    checked = table_of(([7], 1), ([2], 1)).checked(rows)
    assert (checked.dtype, checked.tolist()) == (np.int64, np.atleast_1d(rows).tolist())


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 0], InvalidRequestError, "a row occurs twice in one call: 0, 0"),
        ([1, 0, 1], InvalidRequestError, "a row occurs twice in one call: 0, 1, 1"),
        ([0, 2], StaleSequenceError, "rows without a sequence: 2"),
        ([4], StaleSequenceError, "row outside the table's 0 to 3: 4"),
        ([0, -1], StaleSequenceError, "row outside the table's 0 to 3: 0, -1"),
        ([2**40], StaleSequenceError, "row outside the table's 0 to 3: 1099511627776"),
        ([[0, 1]], InvalidRequestError, r"a flat array of integers; got dtype int64 of shape \(1, 2\)"),
        ([0.0], InvalidRequestError, "a flat array of integers; got dtype float64"),
        ([True, False], InvalidRequestError, "a flat array of integers; got dtype bool"),
        (["0"], InvalidRequestError, "a flat array of integers; got dtype <U1"),
    ],
)
def test_wrong_rows_are_refused_by_name(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table_of(([7], 1), ([2], 1)).checked(rows)


def test_the_message_about_many_rows_stays_short() -> None:
    with pytest.raises(StaleSequenceError, match=r"7, 8, \.\.\.$"):
        PageTable(20, 4, 4).checked(list(range(1, 20)))


def test_computed_tokens_may_reach_the_length_and_not_pass_it() -> None:
    table = table_of(([7, 3], 6), ([2], 3))
    assert table.add_computed(np.array([1, 0]), np.array([3, 4])).tolist() == [3, 4]
    with pytest.raises(InvalidRequestError, match="7 tokens of row 0 would be computed; it has 6"):
        table.add_computed(np.array([1, 0]), np.array([0, 3]))
    assert table.computed.tolist() == [4, 3, 0, 0], "nothing was counted"


def test_pages_are_appended_to_each_row() -> None:
    table = table_of(([7, 3], 6), ([2], 3), ([9], 4))
    table.append_pages(np.array([2, 1, 0]), np.array([2, 0, 1]), np.array([4, 5, 6], np.int32))
    assert table.table[:3].tolist() == [[7, 3, 6, 0], [2, 0, 0, 0], [9, 4, 5, 0]]
    assert table.pages.tolist() == [3, 1, 3, 0]


def test_owned_pages_come_last_page_first() -> None:
    assert table_of(([7, 3], 6), ([2], 3)).owned(np.array([1, 0])).tolist() == [2, 3, 7]


def test_handles_given_back_are_skipped_and_repeated_ones_count_once() -> None:
    table = table_of(([7], 1), ([2], 1))
    table.close(np.array([0]))
    assert table.still_open([(1, 0), (0, 0), (1, 0)]).tolist() == [1]


def test_open_handles_keep_their_order() -> None:
    assert table_of(([7], 1), ([2], 1), ([3], 1)).still_open([(2, 0), (0, 0), (1, 0)]).tolist() == [2, 0, 1]


@pytest.mark.parametrize("handle", [(3, 0), (0, 1), (1, 1), (-1, 0), (4, 0)])
def test_handles_that_were_never_handed_out_are_refused(handle: tuple[int, int]) -> None:
    table = table_of(([7], 1), ([2], 1))
    table.close(np.array([1]))
    with pytest.raises(StaleSequenceError, match=f"row {handle[0]}"):
        table.still_open([(0, 0), handle])
