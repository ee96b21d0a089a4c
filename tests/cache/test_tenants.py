"""Floors and ceilings of namespaces, in admission and eviction."""

from __future__ import annotations

import pytest
from cache_support import admitted, computed, served, tiny

from pagedkv.cache import Admitted, Extended, KVCacheManager, NamespaceUsage, Never, Wait, check
from pagedkv.errors import ConfigError


def limited(num_pages: int = 6, **limits: tuple[int, int | None]) -> KVCacheManager:
    manager = tiny(num_pages)
    for name, (floor, ceiling) in limits.items():
        manager.set_limits(name, floor=floor, ceiling=ceiling)
    return manager


def test_others_leave_what_a_floor_needs() -> None:
    manager = limited(a=(2, None))
    assert manager.admit([1] * 20, namespace="b") == Wait(5, 4)
    admitted(manager, [1] * 16, namespace="b")
    assert isinstance(manager.admit([1] * 8, namespace="a"), Admitted), "the floor was kept for it"


def test_a_floor_counts_what_its_namespace_uses_already() -> None:
    manager = limited(a=(2, None))
    admitted(manager, [1] * 8, namespace="a")
    admitted(manager, [1] * 16, namespace="b")
    check(manager)


def test_a_promise_counts_for_the_floor() -> None:
    manager = limited(a=(3, None))
    admitted(manager, [1] * 4, namespace="a", reserve=4)
    assert manager.admit([1] * 16, namespace="b") == Wait(4, 3)
    admitted(manager, [1] * 12, namespace="b")
    assert manager.namespace_usage("a") == NamespaceUsage(1, 0, 1, 3, None)


def test_others_do_not_evict_what_a_floor_keeps() -> None:
    manager = limited(4, a=(2, None))
    served(manager, [1] * 9, namespace="a")
    served(manager, [2] * 5, namespace="b")
    served(manager, [3] * 7, namespace="b")
    assert manager.match([1] * 9, "a") == 8, "b's younger page went before a's"
    served(manager, [4] * 5, namespace="a")
    assert manager.match([1] * 9, "a") == 4, "its own prompts may evict it"


def test_a_ceiling_bounds_what_is_used() -> None:
    manager = limited(a=(0, 2))
    row = computed(manager, [1] * 8, namespace="a").sequence.row
    answer = manager.extend([row], [1])
    assert answer == Never(3, 2)
    assert manager.admit([1] * 12, namespace="a") == Never(3, 2)
    assert manager.admit([2] * 4, namespace="a") == Wait(1, 0, on="ceiling", namespace="a")
    admitted(manager, [2] * 16, namespace="b")


def test_a_row_at_the_ceiling_waits_for_its_neighbour() -> None:
    manager = limited(a=(0, 3))
    one, two = (computed(manager, [n] * 4, namespace="a").sequence for n in (1, 2))
    assert isinstance(manager.extend([one.row], [1]), Extended)
    assert manager.extend([two.row], [1]) == Wait(1, 0, on="ceiling", namespace="a")
    manager.release([one])
    assert isinstance(manager.extend([two.row], [1]), Extended)


def test_cached_pages_make_room_below_the_ceiling() -> None:
    manager = limited(a=(0, 2))
    served(manager, [1] * 8, namespace="a")
    assert manager.namespace_usage("a") == NamespaceUsage(0, 2, 0, 0, 2)
    admitted(manager, [2] * 4, namespace="a")
    assert manager.namespace_usage("a") == NamespaceUsage(1, 1, 0, 0, 2)
    assert manager.usage().free == 4, "though there were free pages"


def test_sharing_counts_a_page_once() -> None:
    manager = limited(a=(0, 3))
    computed(manager, [1] * 9, namespace="a")
    assert manager.namespace_usage("a").used == 3
    assert manager.admit([1] * 8, namespace="a") == Wait(1, 0, on="ceiling", namespace="a")
    manager.set_limits("a", ceiling=4)
    assert isinstance(manager.admit([1] * 8, namespace="a"), Admitted)
    assert manager.namespace_usage("a").used == 4


def test_a_ceiling_below_what_is_used_holds_once_pages_come_back() -> None:
    manager = tiny(6)
    row = computed(manager, [1] * 13, namespace="a").sequence
    manager.set_limits("a", ceiling=2)
    check(manager)
    assert manager.namespace_usage("a").used == 4
    manager.release([row])
    check(manager)
    assert manager.namespace_usage("a") == NamespaceUsage(0, 2, 0, 0, 2)


def test_a_floor_that_comes_too_late_is_reached_as_pages_come_back() -> None:
    manager = tiny(4)
    row = computed(manager, [1] * 16, namespace="b").sequence
    manager.set_limits("a", floor=2)
    assert manager.admit([1] * 4, namespace="a") == Wait(1, 0)
    manager.trim([row.row], [8])
    assert manager.admit([2] * 4, namespace="b") == Wait(1, 0), "the first pages are for the floor"
    assert isinstance(manager.admit([1] * 4, namespace="a"), Admitted)


def test_limits_outlive_their_namespace() -> None:
    manager = limited(a=(2, 3))
    served(manager, [1] * 5, namespace="a")
    manager.reset()
    check(manager)
    assert manager.namespace_usage("a") == NamespaceUsage(0, 0, 0, 2, 3)
    manager.set_limits("a")
    check(manager)
    assert len(manager.namespaces) == 0
    assert manager.namespace_usage("a") == NamespaceUsage(0, 0, 0)


def test_a_pinned_page_is_its_namespaces_even_after_a_reset() -> None:
    """The name's number must not go to another namespace while a pin still holds pages of it."""
    manager = limited(b=(0, 2))
    served(manager, [1] * 5, namespace="a")
    pinned = manager.pin([1] * 5, "a")
    manager.reset()
    check(manager)
    assert manager.namespace_usage("a").used == 1
    manager.unpin(pinned)  # type: ignore[arg-type]
    check(manager)


@pytest.mark.parametrize(
    ("floor", "ceiling", "message"),
    [
        (-1, None, "floor of -1"),
        (0, 0, "ceiling of 0"),
        (3, 2, "floor of 3 and a ceiling of 2"),
        (5, None, "5 pages beside 2 of other namespaces exceeds 6 pages"),
    ],
)
def test_limits_that_cannot_hold_are_refused(floor: int, ceiling: int | None, message: str) -> None:
    manager = limited(b=(2, None))
    with pytest.raises(ConfigError, match=message):
        manager.set_limits("a", floor=floor, ceiling=ceiling)
    assert manager.namespace_usage("a") == NamespaceUsage(0, 0, 0)
    check(manager)
