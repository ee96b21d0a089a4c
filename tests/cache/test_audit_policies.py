"""The auditor on limits, priorities and last pages: each invariant is broken by hand, and it must say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_support import assert_named, computed, served, tiny

from pagedkv.cache import KVCacheManager, Retention, audit, check
from pagedkv.cache.eviction import DEFAULT_LEVEL


def scene() -> KVCacheManager:
    """Namespace "a" has a ceiling of 4, one row and two cached pages; "b" has two cached pages of priority 80."""
    manager = tiny(8)
    manager.set_limits("a", floor=1, ceiling=4)
    manager.tick(10.0)
    served(manager, [1] * 9, namespace="a")
    served(manager, [2] * 9, namespace="b", retention=[Retention(priority=80, ttl=5.0)])
    computed(manager, [3] * 6, namespace="a", owner="alice")
    check(manager)
    return manager


def cached(manager: KVCacheManager, name: str) -> list[int]:
    account = -manager.namespaces.find(name)
    return [page for page in manager.pool.queue.queued().tolist() if manager.pool.accounts.of[page] == account]


def charged_to_another(manager: KVCacheManager) -> str:
    page = int(manager.table.table[0, 0])
    manager.pool.accounts.of[page] = 7
    return f"page {page} of row 0 is charged to 7, the row's is"


def used_miscounted(manager: KVCacheManager) -> str:
    manager.pool.accounts.used[-manager.namespaces.find("a")] += 1
    return "used pages, counted as"


def cached_miscounted(manager: KVCacheManager) -> str:
    manager.pool.accounts.cached[-manager.namespaces.find("b")] -= 1
    return "cached pages, counted as"


def above_its_ceiling(manager: KVCacheManager) -> str:
    account = -manager.namespaces.find("a")
    limit = manager.tenants.limits[account]
    manager.tenants.limits[account] = type(limit)(limit.name, 0, 3)
    return "'a' has 2 used and 2 cached pages; its ceiling is 3"


def ranks_below_its_descendant(manager: KVCacheManager) -> str:
    tail, head = cached(manager, "b")
    manager.retentions.priority[head] = 20
    return f"page {head} of priority 20 ranks below page {tail}, which continues it"


def ends_before_its_descendant(manager: KVCacheManager) -> str:
    tail, head = cached(manager, "b")
    manager.retentions.ends[head] = 12.0
    return f"ranks below page {tail}, which continues it"


def cached_too_high(manager: KVCacheManager) -> str:
    tail, _ = cached(manager, "b")
    manager.retentions.priority[tail] = 40
    return f"page {tail} of priority 40 is cached at level 80"


def cached_too_low(manager: KVCacheManager) -> str:
    page = cached(manager, "a")[0]
    assert manager.pool.queue.level[page] == DEFAULT_LEVEL
    manager.retentions.priority[page], manager.retentions.ends[page] = 80, 99.0
    return f"page {page} of priority 80 is cached at level 35"


def name_let_go(manager: KVCacheManager) -> str:
    manager.namespaces._users[manager.namespaces.find("a")] -= 1
    return "namespaces have users"


def last_page_unknown(manager: KVCacheManager) -> str:
    manager.tail_page[0] = 8
    return "not in 8"


BREAKAGES = [
    charged_to_another,
    used_miscounted,
    cached_miscounted,
    above_its_ceiling,
    ranks_below_its_descendant,
    ends_before_its_descendant,
    cached_too_high,
    cached_too_low,
    name_let_go,
    last_page_unknown,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_the_auditor_names_what_is_broken(breakage: Callable[[KVCacheManager], str]) -> None:
    manager = scene()
    sentence = breakage(manager)
    assert_named(audit(manager), sentence)
