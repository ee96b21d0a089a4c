"""Another number of pages at run time: nobody waits, nobody loses a page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_support import admitted, computed, pages, served, split, tiny

from pagedkv.cache import Never, Retention, check
from pagedkv.errors import ConfigError


def test_a_larger_pool_hands_out_more() -> None:
    manager = tiny(2)
    row = computed(manager, [1] * 8).sequence
    assert manager.extend([row.row], [1]) == Never(3, 2)
    answer = manager.resize(5)
    check(manager)
    assert (answer.num_pages, answer.held, answer.copies.shape) == (5, 0, (0, 2))
    assert split(manager) == (2, 0, 3)
    admitted(manager, [2] * 12)


def test_a_smaller_pool_evicts_first_what_would_be_evicted_first() -> None:
    manager = tiny(6)
    served(manager, [1] * 5)
    served(manager, [2] * 5)
    assert manager.resize(1).num_pages == 1
    check(manager)
    assert (manager.match([1] * 5), manager.match([2] * 5)) == (0, 4)


def test_pages_above_the_new_end_move_and_keep_what_they_mean() -> None:
    manager = tiny(6, partial_reuse=True)
    low = computed(manager, [1] * 8).sequence
    high = computed(manager, [2] * 7).sequence
    pinned = manager.pin([2] * 4)
    manager.release([low])
    before = pages(manager, high)
    answer = manager.resize(3)
    check(manager)
    assert answer.num_pages == 3
    assert answer.copies.tolist() == [[4, 2]]
    assert (before, pages(manager, high)) == ([3, 4], [3, 2])
    assert manager.match([2] * 8) == 4
    slots = manager.extend([high.row], [2]).slots  # type: ignore[union-attr]
    assert slots.tolist() == [pages(manager, high)[1] * 4 + 3]
    manager.release([high])
    manager.unpin(pinned)  # type: ignore[arg-type]
    check(manager)


def test_what_is_owned_or_promised_is_reported_not_waited_for() -> None:
    manager = tiny(8)
    row = computed(manager, [1] * 12, reserve=4).sequence
    answer = manager.resize(2)
    check(manager)
    assert (answer.num_pages, answer.held) == (4, 2), "3 pages owned, 1 promised"
    manager.release([row])
    answer = manager.resize(2)
    assert (answer.num_pages, answer.held) == (2, 0)
    check(manager)


def test_the_table_is_the_same_array_afterwards() -> None:
    """A kernel may hold on to it."""
    manager = tiny(6)
    computed(manager, [1] * 8)
    table = manager.table.table
    manager.resize(2)
    manager.resize(9)
    assert manager.table.table is table


def test_a_prompt_larger_than_the_smaller_pool_can_never_be_admitted() -> None:
    """FAILURES 37."""
    manager = tiny(6)
    manager.resize(2)
    assert manager.admit([1] * 9).capacity == 2  # type: ignore[union-attr]


def test_a_size_in_bytes_leaves_room_for_the_null_page() -> None:
    manager = tiny(6)
    assert manager.resize(num_bytes=10 * 64 + 63, page_bytes=64).num_pages == 9


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"num_pages": 1}, "the floors of the namespaces, 2 pages"),
        ({}, "a size is num_pages, or num_bytes"),
        ({"num_bytes": 100}, "needs page_bytes"),
        ({"num_pages": 3, "num_bytes": 100, "page_bytes": 10}, "and no num_pages"),
        ({"num_bytes": 100, "page_bytes": 64}, "100 bytes hold 0 pages of 64 bytes"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(size: dict[str, Any], message: str) -> None:
    manager = tiny(6)
    manager.set_limits("a", floor=2)
    with pytest.raises(ConfigError, match=message):
        manager.resize(**size)
    assert manager.num_pages == 6
    check(manager)
    with pytest.raises(ConfigError, match="a pool of 0 pages; it must hold at least 1 page"):
        tiny().resize(0)


def test_a_floor_holds_in_the_smaller_pool() -> None:
    manager = tiny(8)
    computed(manager, [1] * 12, namespace="b")
    manager.set_limits("a", floor=2)
    answer = manager.resize(3)
    assert (answer.num_pages, answer.held) == (5, 2)
    admitted(manager, [1] * 8, namespace="a")


def test_priorities_and_the_order_of_eviction_survive() -> None:
    manager = tiny(6)
    served(manager, [1] * 5, retention=[Retention(priority=90)])
    for token in (2, 3):
        served(manager, [token] * 5)
    order = manager.index.tokens[manager.pool.queue.queued()][:, 0].tolist()
    manager.resize(3)
    check(manager)
    assert manager.index.tokens[manager.pool.queue.queued()][:, 0].tolist() == order == [2, 3, 1]
    assert np.array_equal(manager.pool.queue.level[manager.pool.queue.queued()], [35, 35, 90])
