"""Fork, reorder and trim: who shares which page, who copies it, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_support import admitted, computed, held_tokens, pages, snapshot, split, tiny

from pagedkv.cache import Extended, Forked, KVCacheManager, Sequence, Wait, check
from pagedkv.errors import InvalidRequestError, StaleSequenceError


def forked(manager: KVCacheManager, row: int, branches: int = 1, reserve: int = 0) -> tuple[Sequence, ...]:
    answer = manager.fork(row, branches, reserve=reserve)
    assert isinstance(answer, Forked), answer
    check(manager)
    return answer.sequences


def appended(manager: KVCacheManager, rows: list[int], tokens: list[int]) -> list[tuple[int, int]]:
    """Append and compute one token per row; the copies it took."""
    answer = manager.extend(rows, tokens)
    assert isinstance(answer, Extended), answer
    check(manager)
    manager.commit(rows, 1)
    check(manager)
    return [(int(source), int(target)) for source, target in answer.copies]


def test_a_fork_shares_every_page_and_takes_none() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    b, c = forked(manager, a.row, 2)
    assert pages(manager, a) == pages(manager, b) == pages(manager, c)
    assert split(manager) == (2, 0, 2)
    assert manager.usage().tokens == 6


def test_beams_that_split_do_not_write_to_the_same_slots() -> None:
    """FAILURES 91, 28: the first write copies the shared tail; the full prompt page stays shared."""
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    (b,) = forked(manager, a.row)
    tail = pages(manager, a)[1]
    copies = appended(manager, [a.row, b.row], [7, 8])
    assert len(copies) == 1
    assert copies[0][0] == tail
    assert held_tokens(manager, a.row) == [1, 2, 3, 4, 5, 6, 7]
    assert held_tokens(manager, b.row) == [1, 2, 3, 4, 5, 6, 8]
    assert pages(manager, a)[0] == pages(manager, b)[0]
    assert manager.pool.refcount[pages(manager, a)[0]] == 2
    manager.release([a, b])
    assert split(manager) == (0, 1, 3)


def test_the_last_owner_of_a_tail_writes_without_a_copy() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    (b,) = forked(manager, a.row)
    assert len(appended(manager, [a.row], [7])) == 1
    assert appended(manager, [b.row], [8]) == []
    manager.release([b])
    assert appended(manager, [a.row], [9]) == []


def test_a_fork_at_a_page_boundary_needs_no_copy() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4]).sequence
    (b,) = forked(manager, a.row)
    assert appended(manager, [a.row, b.row], [7, 8]) == []
    assert pages(manager, a)[1] != pages(manager, b)[1]


def test_branches_that_write_the_same_share_again_once_the_page_is_full() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3]).sequence
    (b,) = forked(manager, a.row)
    appended(manager, [a.row, b.row], [4, 4])
    assert manager.usage().saved == 1, "looking indexes what decode steps have filled"
    assert pages(manager, a) == pages(manager, b)
    assert split(manager) == (1, 0, 3)


def test_a_copy_that_finds_no_page_is_refused_and_changes_nothing() -> None:
    manager = tiny(num_pages=2)
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    forked(manager, a.row)
    before = snapshot(manager)
    assert manager.extend([a.row], [7]) == Wait(1, 0)
    assert snapshot(manager) == before


def test_a_fork_sets_the_pages_of_a_reservation_aside_with_the_copy() -> None:
    manager = tiny(num_pages=6)
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    assert manager.fork(a.row, 3, reserve=4) == Wait(6, 4)
    (b,) = forked(manager, a.row, 1, reserve=4)
    assert manager.usage().promised == 2
    admitted(manager, [9] * 8)
    assert manager.admit([9]) == Wait(1, 0)
    for token in (7, 8, 9, 10):
        appended(manager, [b.row], [token])
    assert manager.usage().promised == 0


@pytest.mark.parametrize(("branches", "reserve"), [(0, 0), (-1, 0), (1.5, 0), (1, -1), (1, 0.5), (1, 59)])
def test_a_fork_that_cannot_be_meant_is_refused(branches: Any, reserve: Any) -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError):
        manager.fork(a.row, branches, reserve=reserve)
    assert snapshot(manager) == before


def test_a_fork_before_the_prompt_is_computed_is_refused() -> None:
    manager = tiny()
    a = admitted(manager, [1, 2, 3, 4, 5, 6]).sequence
    with pytest.raises(InvalidRequestError, match="6 tokens of which 0 are computed"):
        manager.fork(a.row)


def test_a_fork_waits_for_rows() -> None:
    manager = tiny()
    a = computed(manager, [1, 2]).sequence
    assert manager.fork(a.row, 4) == Wait(4, 3, on="rows")


def test_beams_are_reordered_in_one_call_even_where_they_swap() -> None:
    manager = tiny(num_pages=8)
    a = computed(manager, [1, 2, 3, 4, 5]).sequence
    b, c = forked(manager, a.row, 2)
    appended(manager, [a.row, b.row, c.row], [6, 7, 8])
    manager.reorder([a.row, b.row, c.row], [b.row, a.row, a.row])
    check(manager)
    assert [held_tokens(manager, row)[-1] for row in (a.row, b.row, c.row)] == [7, 6, 6]
    assert split(manager) == (3, 0, 5)  # the page of the beam that nobody continues is free at once
    assert len(appended(manager, [a.row, b.row, c.row], [9, 9, 8])) == 1
    assert [held_tokens(manager, row)[-2:] for row in (a.row, b.row, c.row)] == [[7, 9], [6, 9], [6, 8]]


def test_reorder_refuses_what_cannot_be_meant() -> None:
    manager = tiny()
    a = computed(manager, [1, 2]).sequence
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError, match="2 parents for 1 rows"):
        manager.reorder([a.row], [a.row, a.row])
    with pytest.raises(StaleSequenceError):
        manager.reorder([a.row], [3])
    assert snapshot(manager) == before


def test_trim_gives_back_rejected_speculative_tokens_at_once() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5]).sequence
    manager.extend([a.row], [6, 7, 8, 9], 4)
    assert split(manager) == (3, 0, 1)
    manager.trim([a.row], [6])
    check(manager)
    assert split(manager) == (2, 0, 2)
    appended(manager, [a.row], [10])
    assert held_tokens(manager, a.row) == [1, 2, 3, 4, 5, 6, 10]


def test_trim_into_an_indexed_page_leaves_it_to_the_index_and_the_next_write_copies_it() -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]).sequence
    manager.trim([a.row], [6])
    check(manager)
    old = pages(manager, a)[1]
    copies = appended(manager, [a.row], [10])
    assert [source for source, _ in copies] == [old]
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    for token in (11, 12):
        appended(manager, [a.row], [token])
    assert manager.match([1, 2, 3, 4, 5, 6, 10, 11, 12]) == 8


def test_trim_into_a_shared_page_leaves_the_sharer_alone() -> None:
    manager = tiny(prefix_caching=False)
    a = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8]).sequence
    (b,) = forked(manager, a.row)
    manager.trim([a.row], [7])
    check(manager)
    assert len(appended(manager, [a.row], [9])) == 1
    assert pages(manager, a)[1] != pages(manager, b)[1]


def test_trim_gives_a_reservation_back_what_it_had_drawn() -> None:
    manager = tiny()
    a = admitted(manager, [1, 2, 3], reserve=9).sequence
    manager.commit([a.row], 3)
    manager.extend([a.row], [4, 5, 6, 7, 8], 5)
    assert manager.usage().promised == 1
    manager.trim([a.row], [3])
    check(manager)
    assert manager.usage().promised == 2


@pytest.mark.parametrize("length", [0, 6, -1])
def test_trim_to_a_length_the_row_cannot_have_is_refused(length: int) -> None:
    manager = tiny()
    a = computed(manager, [1, 2, 3, 4, 5]).sequence
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError):
        manager.trim([a.row], [length])
    assert snapshot(manager) == before


def test_aborting_every_branch_frees_every_page() -> None:
    """FAILURES 90: one branch ends, then all others are dropped together."""
    manager = tiny(num_pages=8, prefix_caching=False)
    a = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    branches = forked(manager, a.row, 2)
    appended(manager, [a.row, *(b.row for b in branches)], [7, 8, 9])
    manager.release([branches[0]])
    check(manager)
    manager.release([a, *branches])
    check(manager)
    assert split(manager) == (0, 0, 8)


def test_a_store_that_performs_the_copies_gives_each_branch_its_own_tokens() -> None:
    manager = tiny()
    store = np.zeros((5, 4), np.int64)
    a = computed(manager, [1, 2, 3]).sequence
    store[pages(manager, a)[0], :3] = [1, 2, 3]
    (b,) = forked(manager, a.row)
    answer = manager.extend([a.row, b.row], [4, 5])
    assert isinstance(answer, Extended)
    assert (answer.copies.shape, answer.copies.dtype) == ((1, 2), np.int32)
    store[answer.copies[:, 1]] = store[answer.copies[:, 0]]
    store.reshape(-1)[answer.slots] = [4, 5]
    assert [store[pages(manager, row)[0]].tolist() for row in (a, b)] == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_a_row_that_waits_on_a_shared_tail_leaves_the_step_of_others_alone() -> None:
    manager = tiny(num_pages=8)
    a, other = computed(manager, [1, 2, 3]).sequence, computed(manager, [9, 9]).sequence
    forked(manager, a.row)
    assert appended(manager, [other.row], [8]) == []
    assert manager.shares_tail[a.row]
    assert len(appended(manager, [other.row, a.row], [7, 4])) == 1


def test_nobody_waits_for_prompt_pages_that_a_trim_took_away() -> None:
    manager = tiny(num_pages=8)
    a = admitted(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]).sequence
    manager.trim([a.row], [5])
    manager.commit([a.row], 5)
    assert admitted(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9], share_pending=True).cached_tokens == 4


def test_nobody_waits_for_prompt_pages_of_a_row_that_continues_another() -> None:
    manager = tiny(num_pages=8)
    a = computed(manager, [7, 7]).sequence
    b = admitted(manager, [1, 2, 3, 4, 5]).sequence
    manager.reorder([b.row], [a.row])
    check(manager)
    admitted(manager, [1, 2, 3, 4, 5], share_pending=True)
