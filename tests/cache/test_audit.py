"""The auditor: each invariant is broken by hand, and the auditor must say so and name page, row and owner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_support import admitted, assert_named, computed, pages, served, snapshot, tiny

from pagedkv.cache import KVCacheManager, Sequence, audit, check
from pagedkv.cache.eviction import DEFAULT_LEVEL, _Line
from pagedkv.errors import AuditError


def scene() -> KVCacheManager:
    """7 pages: rows 1 ("alice") and 2 ("bob") share two and have one each, two are cached, one is free."""
    manager = tiny(7)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    cached = admitted(manager, range(20, 28), namespace="other").sequence
    computed(manager, [*shared, 9], owner="alice")
    computed(manager, [*shared, 10, 11], owner="bob")
    manager.commit(cached.row, 8)
    manager.release([cached])
    assert manager.table.owners == {1: "alice", 2: "bob"}
    check(manager)
    return manager


def shared_pages(manager: KVCacheManager) -> list[int]:
    return manager.table.table[1, :2].tolist()


def private_page(manager: KVCacheManager, owner: str) -> int:
    return int(manager.table.table[["alice", "bob"].index(owner) + 1, 2])


def line(manager: KVCacheManager) -> _Line:
    """The eviction line of pages that nobody said anything about."""
    return manager.pool.queue.lines[DEFAULT_LEVEL]


def cached_pages(manager: KVCacheManager) -> list[int]:
    """Oldest first: the second page of the cached prompt, then its first."""
    return manager.pool.queue.queued().tolist()


def free_page(manager: KVCacheManager) -> int:
    return int(manager.pool.stack[0])


# Each breaks one thing and returns what the auditor must say about it.


def count_too_high(manager: KVCacheManager) -> str:
    page = private_page(manager, "alice")
    manager.pool.refcount[page] += 1
    return f"page {page} counts 2 owners but is named by 'alice' (row 1)"


def count_too_low(manager: KVCacheManager) -> str:
    page = shared_pages(manager)[0]
    manager.pool.refcount[page] -= 1
    return f"page {page} counts 1 owners but is named by 'alice' (row 1), 'bob' (row 2)"


def leak(manager: KVCacheManager) -> str:
    page = manager.pool.take(1)[0]
    return f"page {page} counts 1 owners but is named by nobody"


def negative_count(manager: KVCacheManager) -> str:
    page = free_page(manager)
    manager.pool.refcount[page] = -1
    return f"page {page} counts -1 owners but is named by nobody"


def page_named_twice(manager: KVCacheManager) -> str:
    first, second = shared_pages(manager)
    manager.table.table[2, 2] = first
    return f"'bob' (row 2) names a page twice: [{first}, {second}, {first}]"


def page_outside_the_pool(manager: KVCacheManager) -> str:
    manager.table.table[2, 0] = 99
    return "page 99 does not exist but has owners or is named by 'bob' (row 2)"


def null_page_named(manager: KVCacheManager) -> str:
    manager.table.table[1, 2] = 0
    return "page 0 does not exist but has owners or is named by 'alice' (row 1)"


def null_page_owned(manager: KVCacheManager) -> str:
    manager.pool.refcount[0] = 1
    return "page 0 does not exist but has owners or is named by nobody"


def free_twice(manager: KVCacheManager) -> str:
    manager.pool.stack[1] = manager.pool.stack[0]
    manager.pool.free += 1
    return "the free stack holds a page twice"


def free_and_used(manager: KVCacheManager) -> str:
    page, others = private_page(manager, "bob"), manager.pool.stack[1 : manager.pool.free].tolist()
    manager.pool.stack[0] = page
    return f"free {sorted([page, *others])} + cached {sorted(cached_pages(manager))} + used ["


def free_outside_the_pool(manager: KVCacheManager) -> str:
    manager.pool.stack[0] = 99
    return "free [99] + cached"


def lost_page(manager: KVCacheManager) -> str:
    manager.pool.free -= 1
    return f"free [] + cached {sorted(cached_pages(manager))} + used ["


def cached_counter(manager: KVCacheManager) -> str:
    manager.pool.queue.cached += 1
    return "3 pages are counted as cached, 2 are in the eviction queue"


def position_without_entry(manager: KVCacheManager) -> str:
    manager.pool.queue.position[private_page(manager, "bob")] = line(manager).head
    return "a page has a position in the eviction queue but no valid entry there"


def entry_outside_the_pool(manager: KVCacheManager) -> str:
    line(manager).entries[line(manager).head] = 99
    return "2 pages are counted as cached, 1 are in the eviction queue"


def free_but_indexed(manager: KVCacheManager) -> str:
    page = free_page(manager)
    manager.index.indexed[page] = True
    return f"page {page} is free but indexed"


def cached_but_not_indexed(manager: KVCacheManager) -> str:
    page = cached_pages(manager)[0]
    manager.index.indexed[page] = False
    return f"page {page} is cached but not indexed"


def leaked_row(manager: KVCacheManager) -> str:
    manager.table.free_rows -= 1
    return "1 rows can be handed out, 2 have no sequence"


def closed_row_with_pages(manager: KVCacheManager) -> str:
    manager.table.table[3, 0] = 5
    return "row 3 is closed but holds 0 tokens, 0 pages [5, 0"


def closed_row_with_tokens(manager: KVCacheManager) -> str:
    manager.table.length[3] = 6
    return "row 3 is closed but holds 6 tokens, 0 pages [0"


def closed_row_with_owner(manager: KVCacheManager) -> str:
    manager.table.owners[3] = "carol"
    return "row 3 is closed but holds 0 tokens"


def more_computed_than_there_is(manager: KVCacheManager) -> str:
    manager.table.computed[1] = 10
    return "row 1 has 10 computed of 9 tokens"


def empty_row(manager: KVCacheManager) -> str:
    manager.table.length[1] = manager.table.computed[1] = 0
    return "row 1 has 0 computed of 0 tokens"


def too_few_pages(manager: KVCacheManager) -> str:
    manager.table.length[1] = 13
    return "row 1 has 3 pages for 13 tokens"


def too_many_pages(manager: KVCacheManager) -> str:
    manager.table.length[1] = manager.table.computed[1] = 8
    return "row 1 has 3 pages for 8 tokens"


def page_past_the_end(manager: KVCacheManager) -> str:
    manager.table.table[1, 3] = free_page(manager)
    return "row 1 names pages past its end: ["


def indexed_before_computed(manager: KVCacheManager) -> str:
    manager.table.computed[1] = 7
    return "row 1 has 2 indexed pages but 7 computed tokens"


def wrong_bucket(manager: KVCacheManager) -> str:
    page, index = cached_pages(manager)[1], manager.index
    bucket = (int(index.key[page]) + 1) % index.bucket.size
    while index.bucket[bucket]:
        bucket = (bucket + 1) % index.bucket.size
    index.bucket[bucket] = page
    return f"page {page} hangs in bucket {bucket}, which is not its key's"


def bucket_lost(manager: KVCacheManager) -> str:
    manager.index.bucket[:] = 0
    everything = sorted(shared_pages(manager) + cached_pages(manager))
    return f"pages {everything} are indexed, pages [] are in the buckets"


def bucket_outside_the_pool(manager: KVCacheManager) -> str:
    manager.index.bucket[np.flatnonzero(manager.index.bucket == 0)[0]] = 99
    return ", 99] are in the buckets"


def bucket_in_a_circle(manager: KVCacheManager) -> str:
    page = cached_pages(manager)[0]
    manager.index.next[page] = page
    return "are in the buckets"


def one_key_twice(manager: KVCacheManager) -> str:
    old, young = cached_pages(manager)
    manager.index.key[old] = manager.index.key[young]
    return "two pages are indexed under one key"


def parent_not_resident(manager: KVCacheManager) -> str:
    page, parent = cached_pages(manager)[0], free_page(manager)
    manager.index.parent[page] = parent
    return f"page {page} continues page {parent}, which is not resident"


def parent_is_the_null_page(manager: KVCacheManager) -> str:
    page = cached_pages(manager)[0]
    manager.index.parent[page] = 0
    return f"page {page} continues page 0, which is not resident"


def parent_outside_the_pool(manager: KVCacheManager) -> str:
    page = cached_pages(manager)[0]
    manager.index.parent[page] = 99
    return f"page {page} continues page 99, which is not resident"


def used_below_unused(manager: KVCacheManager) -> str:
    page, parent = shared_pages(manager)[0], cached_pages(manager)[1]
    manager.index.parent[page] = parent
    return f"page {page} is used but page {parent}, which it continues, is not"


def parent_evicted_first(manager: KVCacheManager) -> str:
    child, parent = cached_pages(manager)
    pool, head = manager.pool, line(manager).head
    line(manager).entries[head : line(manager).tail] = [parent, child]
    pool.queue.position[parent], pool.queue.position[child] = head, head + 1
    return f"page {parent} would be evicted before page {child}, which continues it"


def row_off_its_chain(manager: KVCacheManager) -> str:
    first, second = shared_pages(manager)
    manager.table.table[1, :2] = second, first
    return f"page {second} of 'alice' (row 1) is not indexed under {manager.root[1]}"


def row_of_another_root(manager: KVCacheManager) -> str:
    first = shared_pages(manager)[0]
    manager.root[1] = -9
    return f"page {first} of 'alice' (row 1) is not indexed under -9"


def tokens_overwritten(manager: KVCacheManager) -> str:
    page = shared_pages(manager)[1]
    manager.index.tokens[page, 3] += 1
    return f"page {page} is indexed under a key that is not its tokens'"


def tokens_of_a_cached_page_overwritten(manager: KVCacheManager) -> str:
    page = cached_pages(manager)[1]
    manager.index.tokens[page, 0] += 1
    return f"page {page} is indexed under a key that is not its tokens'"


def chain_in_a_circle(manager: KVCacheManager) -> str:
    child, parent = cached_pages(manager)
    manager.index.parent[parent] = child
    return f"pages [{child}] are indexed under page {parent}, which hangs on no root"


def promise_unaccounted(manager: KVCacheManager) -> str:
    manager.reservations.promised = 1
    return "1 pages are promised, the rows' promises are [0, 0, 0, 0]"


def promise_negative(manager: KVCacheManager) -> str:
    manager.reservations.promise[1:3] = -1, 1
    return "0 pages are promised, the rows' promises are [0, -1, 1, 0]"


def promise_without_pages(manager: KVCacheManager) -> str:
    manager.reservations.promise[1] = manager.reservations.promised = 4
    return "4 pages are promised, 3 are available"


def promise_beyond_the_reservation(manager: KVCacheManager) -> str:
    manager.reservations.promise[1] = manager.reservations.promised = 1
    return "row 1 is promised 1 pages; it has 3 of 0"


def closed_row_entitled(manager: KVCacheManager) -> str:
    manager.reservations.entitled[3] = 2
    return "row 3 is closed but entitled to 2 pages"


def shared_tail_unmarked(manager: KVCacheManager) -> str:
    manager.fork(1)
    manager.shares_tail[1] = False
    return (
        f"page {private_page(manager, 'alice')}, partly filled by row 1, is shared or indexed but the row is not marked"
    )


def indexed_tail_unmarked(manager: KVCacheManager) -> str:
    manager.trim([1], [6])
    manager.shares_tail[1] = False
    return f"page {shared_pages(manager)[1]}, partly filled by row 1, is shared or indexed but the row is not marked"


def closed_row_marked(manager: KVCacheManager) -> str:
    manager.shares_tail[3] = True
    return "row 3 is marked as sharing its last page, of which it has filled 0 tokens"


def name_without_user(manager: KVCacheManager) -> str:
    manager.namespaces.hold("forgotten")
    return "namespaces have users {"


BREAKAGES: list[Callable[[KVCacheManager], str]] = [
    count_too_high,
    count_too_low,
    leak,
    negative_count,
    page_named_twice,
    page_outside_the_pool,
    null_page_named,
    null_page_owned,
    free_twice,
    free_and_used,
    free_outside_the_pool,
    lost_page,
    cached_counter,
    position_without_entry,
    entry_outside_the_pool,
    free_but_indexed,
    cached_but_not_indexed,
    leaked_row,
    closed_row_with_pages,
    closed_row_with_tokens,
    closed_row_with_owner,
    more_computed_than_there_is,
    empty_row,
    too_few_pages,
    too_many_pages,
    page_past_the_end,
    indexed_before_computed,
    wrong_bucket,
    bucket_lost,
    bucket_outside_the_pool,
    bucket_in_a_circle,
    one_key_twice,
    parent_not_resident,
    parent_is_the_null_page,
    parent_outside_the_pool,
    used_below_unused,
    parent_evicted_first,
    row_off_its_chain,
    row_of_another_root,
    tokens_overwritten,
    tokens_of_a_cached_page_overwritten,
    chain_in_a_circle,
    promise_unaccounted,
    promise_negative,
    promise_without_pages,
    promise_beyond_the_reservation,
    closed_row_entitled,
    shared_tail_unmarked,
    indexed_tail_unmarked,
    closed_row_marked,
    name_without_user,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_the_auditor_names_what_is_broken(breakage: Callable[[KVCacheManager], str]) -> None:
    manager = scene()
    sentence = breakage(manager)
    assert_named(audit(manager), sentence)


def test_the_auditor_only_looks() -> None:
    manager = scene()
    before = snapshot(manager)
    assert audit(manager) == []
    assert snapshot(manager) == before


def test_check_raises_with_every_violation() -> None:
    manager = scene()
    manager.reservations.promised = 9
    with pytest.raises(AuditError, match=r"9 pages are promised, the rows' promises .*; 9 pages are promised, 3 are"):
        check(manager)


def test_a_leak_names_its_request() -> None:
    manager = tiny()
    handle = admitted(manager, range(5), owner="request 17").sequence
    manager.pool.refcount[pages(manager, handle)[1]] += 1
    assert "named by 'request 17' (row 0)" in audit(manager)[0]


def test_an_untouched_and_a_drained_manager_are_clean() -> None:
    manager = tiny()
    assert audit(manager) == []
    served(manager, range(9))
    assert audit(manager) == []
    manager.release([Sequence(0, 0)])
    assert audit(manager) == []
