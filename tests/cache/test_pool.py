"""PagePool: free stack, owner counts, eviction order."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv.cache.eviction import Pages
from pagedkv.cache.journal import Journal
from pagedkv.cache.pool import PagePool


def ids(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def evicted(pool: PagePool, count: int) -> Pages:
    """Take the pages that are evicted first out of the queue."""
    pages = pool.queue.oldest(count)
    pool.uncache(pages)
    return pages


def retired(*order: int) -> PagePool:
    """A pool of 4 pages of which these are cached, the first oldest, and all others owned once."""
    pool = PagePool(4, Journal())
    pool.take(4)
    pool.drop(ids(*order))
    pool.retire(ids(*order))
    return pool


def test_all_pages_but_the_null_page_are_handed_out_once() -> None:
    pool = PagePool(4, Journal())
    assert sorted(pool.take(4).tolist()) == [1, 2, 3, 4]
    assert (pool.free, pool.used, pool.refcount[0]) == (0, 4, 0)


def test_a_page_has_one_owner_when_it_is_handed_out() -> None:
    pool = PagePool(1, Journal())
    assert pool.refcount[pool.take(1)].tolist() == [1]


def test_taking_no_page_changes_nothing() -> None:
    pool = PagePool(4, Journal())
    assert pool.take(0).size == 0
    assert evicted(pool, 0).size == 0
    assert pool.free == 4


def test_a_page_given_back_is_handed_out_next() -> None:
    pool = PagePool(4, Journal())
    taken = pool.take(2)
    pool.give_back(pool.drop(taken[:1]))
    assert pool.take(1).tolist() == taken[:1].tolist()


def test_of_several_pages_given_back_the_first_is_handed_out_last() -> None:
    pool = PagePool(3, Journal())
    pool.take(3)
    pool.give_back(pool.drop(ids(2, 3, 1)))
    assert pool.take(3).tolist() == [1, 3, 2]


def test_drop_names_a_page_only_when_its_last_owner_goes() -> None:
    pool = PagePool(2, Journal())
    page = pool.take(1)
    pool.acquire(page)
    assert pool.drop(page).tolist() == []
    assert pool.drop(page).tolist() == page.tolist()


def test_drop_names_a_page_once_even_if_two_owners_go_together() -> None:
    pool = PagePool(4, Journal())
    pool.take(4)
    pool.acquire(ids(2))
    assert pool.drop(ids(2, 3, 2)).tolist() == [3, 2], "in the order of the last occurrence"
    assert pool.refcount[1:].tolist() == [1, 0, 0, 1]


def test_cached_pages_leave_in_the_order_in_which_they_came() -> None:
    pool = retired(3, 1, 2)
    assert pool.cached == 3
    assert evicted(pool, 2).tolist() == [3, 1]
    assert evicted(pool, 1).tolist() == [2]
    assert pool.cached == 0


def test_a_cached_page_that_is_used_again_is_not_evictable() -> None:
    pool = retired(3, 1, 2)
    pool.acquire(ids(1))
    assert (pool.cached, pool.used, pool.available) == (2, 2, 2)
    assert pool.queue.queued().tolist() == [3, 2]


def test_a_page_that_was_used_again_is_the_youngest_when_it_is_retired() -> None:
    pool = retired(3, 1, 2)
    pool.acquire(ids(3))
    pool.retire(pool.drop(ids(3)))
    assert pool.queue.queued().tolist() == [1, 2, 3]


def test_a_cached_page_named_twice_in_one_call_is_revived_once() -> None:
    pool = retired(3, 1)
    pool.acquire(ids(3, 1, 3))
    assert (pool.cached, pool.used) == (0, 4)
    assert pool.refcount[[3, 1]].tolist() == [2, 1]


def test_the_queue_never_outgrows_its_array() -> None:
    pool = retired(1, 2, 3, 4)
    for turn in range(200):
        page = ids(1 + turn % 3)
        pool.acquire(page)
        pool.retire(pool.drop(page))
    assert pool.queue.queued().tolist() == [4, 3, 1, 2], "turns end with 197 -> 3, 198 -> 1, 199 -> 2"


def test_a_long_run_of_stale_entries_is_skipped() -> None:
    pool = PagePool(300, Journal())
    pages = pool.take(300)
    pool.retire(pool.drop(pages))
    pool.acquire(pages[:299])
    assert evicted(pool, 1).tolist() == pages[299:].tolist()


verbs = st.sampled_from(["takes", "drops", "hits", "evicts"])


@given(st.integers(1, 5), st.lists(st.tuples(verbs, st.integers(0, 4))))
def test_states_and_order_are_those_of_an_ordered_dictionary(num_pages: int, steps: list[tuple[str, int]]) -> None:
    pool, free, idle, used = PagePool(num_pages, Journal()), num_pages, OrderedDict[int, None](), dict[int, int]()
    for verb, which in steps:
        if verb == "takes" and free:
            (page,) = pool.take(1).tolist()
            assert page not in idle
            assert page not in used
            used[page], free = 1, free - 1
        elif verb == "drops" and used:
            page = sorted(used)[which % len(used)]
            pool.retire(pool.drop(ids(page)))
            used[page] -= 1
            if not used[page]:
                del used[page]
                idle[page] = None
        elif verb == "hits" and (used or idle):
            page = sorted([*used, *idle])[which % (len(used) + len(idle))]
            pool.acquire(ids(page))
            idle.pop(page, None)
            used[page] = used.get(page, 0) + 1
        elif verb == "evicts" and idle:
            pool.give_back(evicted(pool, 1))
            idle.popitem(last=False)
            free += 1
        assert pool.queue.queued().tolist() == list(idle)
        assert (pool.free, pool.cached, pool.used) == (free, len(idle), len(used))
        assert {page: int(count) for page, count in enumerate(pool.refcount) if count} == used
