"""Priorities and times to live of cached pages, and the reuse of last pages that are not full."""

from __future__ import annotations

import math
from typing import Any

import pytest
from cache_support import admitted, computed, pages, served, tiny

from pagedkv.cache import KVCacheManager, Retention, check
from pagedkv.errors import InvalidRequestError

A, B, C = [1] * 5, [2] * 5, [3] * 5  # one full page each, and one token of the next


def evict(manager: KVCacheManager, count: int) -> None:
    """Have `count` cached pages evicted, from a pool without free ones."""
    answer = admitted(manager, [9] * (4 * count))
    manager.release([answer.sequence])
    check(manager)


def full_of(**retentions: Any) -> KVCacheManager:
    """Three cached pages, of the prompts A, B and C in this order, and one free page."""
    manager = tiny(num_pages=4)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        served(manager, prompt, retention=retentions.get(name, ()))
    return manager


def still_cached(manager: KVCacheManager) -> list[str]:
    return [name for name, prompt in (("a", A), ("b", B), ("c", C)) if manager.match(prompt)]


def test_without_a_word_the_oldest_goes_first() -> None:
    manager = full_of()
    evict(manager, 2)
    assert still_cached(manager) == ["b", "c"]


def test_a_higher_priority_outlasts_younger_pages() -> None:
    manager = full_of(a=[Retention(priority=90)])
    evict(manager, 3)
    assert still_cached(manager) == ["a"]


def test_a_lower_priority_goes_before_older_pages() -> None:
    manager = full_of(c=[Retention(priority=0)])
    evict(manager, 2)
    assert still_cached(manager) == ["a", "b"]


def test_a_priority_ends_with_its_time_to_live() -> None:
    manager = tiny(num_pages=4)
    manager.tick(100.0)
    for prompt in (A, B, C):
        served(manager, prompt, retention=[Retention(priority=90, ttl=5.0)] if prompt is A else ())
    assert manager.tick(104.0) == 0
    assert manager.tick(105.0) == 1
    check(manager)
    assert manager.tick(106.0) == 0
    evict(manager, 3)
    assert still_cached(manager) == ["a"], "it went down to the young end: b and c are older there"


def test_a_clock_that_goes_back_is_ignored() -> None:
    manager = tiny(num_pages=4)
    manager.tick(100.0)
    served(manager, A, retention=[Retention(priority=90, ttl=5.0)])
    assert manager.tick(3.0) == 0
    assert manager.tick(105.0) == 1


def test_a_page_that_is_used_again_gets_a_new_time_to_live() -> None:
    manager = tiny(num_pages=4)
    manager.tick(0.0)
    for now in (0.0, 4.0):
        manager.tick(now)
        served(manager, A, retention=[Retention(priority=90, ttl=5.0)])
    assert manager.tick(8.0) == 0
    assert manager.tick(9.0) == 1


def test_a_range_ranks_the_pages_that_it_touches() -> None:
    manager = tiny(num_pages=8)
    prompt = list(range(1, 14))
    served(manager, prompt, retention=[Retention(0, 5, 80), Retention(8, 12, 10)])
    levels = manager.pool.queue.level[manager.pool.queue.queued()].tolist()
    assert levels == [10, 80, 80], "tokens 0 to 4 lie in two pages"


def test_a_page_never_ranks_below_one_that_continues_it() -> None:
    manager = tiny(num_pages=8)
    served(manager, list(range(1, 14)), retention=[Retention(8, 12, 80)])
    assert manager.pool.queue.level[manager.pool.queue.queued()].tolist() == [80, 80, 80]
    served(manager, [1, 2, 3, 4, 9], retention=[Retention(0, None, 0)])
    assert manager.match(list(range(1, 14))) == 12
    check(manager)


def test_an_open_range_reaches_what_is_appended_later() -> None:
    manager = tiny(num_pages=8)
    row = computed(manager, [1, 2, 3], retention=[Retention(4, None, 70)]).sequence
    manager.extend([row.row], [4, 5, 6, 7, 8], 5)
    manager.commit([row.row], 5)
    manager.release([row])
    assert manager.pool.queue.level[manager.pool.queue.queued()].tolist() == [70, 70]


def test_branches_ask_for_what_their_row_asked_for() -> None:
    manager = tiny(num_pages=8)
    row = computed(manager, A, retention=[Retention(priority=70)]).sequence
    (branch,) = manager.fork(row.row).sequences  # type: ignore[union-attr]
    other = computed(manager, B).sequence
    manager.reorder([other.row], [branch.row])
    manager.release([row, branch])
    manager.release([other])
    check(manager)
    assert manager.pool.queue.level[manager.pool.queue.queued()].tolist() == [35, 70], "B's page, then A's"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Retention(priority=101), "priority is 101"),
        (Retention(priority=-1), "priority is -1"),
        (Retention(-1), "tokens -1 to None"),
        (Retention(4, 4), "tokens 4 to 4"),
        (Retention(ttl=0.0), "ttl is 0.0"),
        (Retention(ttl=math.inf), "ttl is inf"),
        (Retention(ttl=math.nan), "ttl is nan"),
        ("high", "got 'high'"),
    ],
)
def test_a_retention_that_cannot_be_meant_is_refused(wish: Any, message: str) -> None:
    manager = tiny()
    with pytest.raises(InvalidRequestError, match=message):
        manager.admit(A, retention=[wish])
    assert not manager.retentions.active


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the time is nan"):
        tiny().tick(math.nan)


def test_a_last_page_that_is_not_full_serves_the_next_turn() -> None:
    """A chat goes on: its next prompt holds all of the last turn, whose last page was not full."""
    manager = tiny(num_pages=8, partial_reuse=True)
    first = computed(manager, [1, 2, 3, 4, 5, 6]).sequence
    source = pages(manager, first)[1]
    manager.release([first])
    check(manager)
    second = admitted(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert second.cached_tokens == 6
    assert second.copies.tolist() == [[source, pages(manager, second.sequence)[1]]]


def test_a_last_page_serves_only_as_far_as_it_was_computed() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    row = computed(manager, [1, 2, 3, 4, 5]).sequence
    manager.extend([row.row], [6])  # its keys and values never came
    manager.release([row])
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) == 5


def test_a_last_page_that_another_row_still_owns_is_not_indexed() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    row = computed(manager, [1, 2, 3, 4, 5]).sequence
    (branch,) = manager.fork(row.row).sequences  # type: ignore[union-attr]
    manager.release([row])
    assert manager.match([1, 2, 3, 4, 5, 6]) == 4
    manager.extend([branch.row], [7])
    manager.commit([branch.row], 1)
    manager.release([branch])
    check(manager)
    assert manager.match([1, 2, 3, 4, 5, 7, 8]) == 6


def test_equal_last_pages_are_kept_once() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    a, b = (computed(manager, [1, 2, 3]).sequence for _ in range(2))
    manager.release([a, b])
    check(manager)
    assert manager.usage().cached == 1


def test_after_a_reset_a_last_page_is_not_indexed() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    row = computed(manager, [1, 2, 3]).sequence
    manager.reset()
    manager.release([row])
    assert manager.usage().cached == 0
