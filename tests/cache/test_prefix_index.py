"""PrefixIndex, ChainHash and Namespaces: (parent, tokens) -> page, exactly, whatever the keys do."""

from __future__ import annotations

import numpy as np
import pytest
from cache_support import NarrowHash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv.cache import ChainHash
from pagedkv.cache.journal import Journal
from pagedkv.cache.prefix import Namespaces, PrefixIndex

ROOT, OTHER_ROOT = -1, -2


def ids(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def keys(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def chain_keys(hasher: ChainHash, tokens: NDArray[np.int32], root: int = ROOT) -> NDArray[np.uint64]:
    sums = np.cumsum(hasher.page_sums(tokens, np.arange(len(tokens))), dtype=np.uint64) + hasher.root_sum(root)
    return hasher.finish(sums)


def index_of(*contents: list[int], all_keys: list[int]) -> PrefixIndex:
    """Pages 1, 2, ... of these contents as one chain from ROOT, under keys chosen by hand."""
    index = PrefixIndex(8, 2, ChainHash(1), Journal())
    pages = ids(*range(1, len(contents) + 1))
    index.tokens[pages] = contents
    index.insert(pages, keys(*all_keys), ids(ROOT, *pages[:-1]))
    return index


@pytest.mark.parametrize("all_keys", [[5, 6, 7], [5, 21, 37], [0, 16, 2**63]], ids=["apart", "one bucket", "zero"])
def test_pages_are_found_under_their_keys_and_nothing_under_others(all_keys: list[int]) -> None:
    index = index_of([1, 2], [3, 4], [5, 6], all_keys=all_keys)
    assert index.find(keys(*all_keys)).tolist() == [1, 2, 3]
    assert index.find(keys(53, 1)).tolist() == [0, 0]


@pytest.mark.parametrize("gone", [[1], [2], [3], [1, 2], [3, 1], [1, 2, 3]])
def test_removed_pages_are_not_found_and_the_rest_of_the_bucket_is(gone: list[int]) -> None:
    index = index_of([1, 2], [3, 4], [5, 6], all_keys=[5, 21, 37])
    index.remove(ids(*gone))
    expected = [0 if page in gone else page for page in (1, 2, 3)]
    assert index.find(keys(5, 21, 37)).tolist() == expected


def test_a_removed_page_can_be_indexed_under_another_key() -> None:
    index = index_of([1, 2], [3, 4], all_keys=[5, 21])
    index.remove(ids(2))
    index.insert(ids(2), keys(6), ids(ROOT))
    assert index.find(keys(5, 21, 6)).tolist() == [1, 0, 2]


def test_match_returns_the_longest_chain_of_equal_pages() -> None:
    index = index_of([1, 2], [3, 4], [5, 6], all_keys=[5, 6, 7])
    asked = np.array([[1, 2], [3, 4], [9, 9]], np.int32)
    assert index.match(asked, keys(5, 6, 99), ROOT).tolist() == [1, 2]


def test_match_of_nothing_is_nothing() -> None:
    index = index_of([1, 2], all_keys=[5])
    assert index.match(np.zeros((0, 2), np.int32), keys(), ROOT).tolist() == []


def test_a_hit_with_other_tokens_is_not_believed() -> None:
    index = index_of([1, 2], [3, 4], all_keys=[5, 6])
    assert index.match(np.array([[1, 2], [3, 5]], np.int32), keys(5, 6), ROOT).tolist() == [1]


def test_a_hit_with_another_parent_is_not_believed() -> None:
    index = index_of([1, 2], [3, 4], [1, 2], all_keys=[5, 6, 7])
    asked = np.array([[1, 2], [1, 2]], np.int32)
    assert index.match(asked, keys(5, 7), ROOT).tolist() == [1], "page 3 continues page 2, not page 1"


def test_a_hit_from_another_root_is_not_believed() -> None:
    index = index_of([1, 2], all_keys=[5])
    assert index.match(np.array([[1, 2]], np.int32), keys(5), OTHER_ROOT).tolist() == []


def resolve(index: PrefixIndex, own: NDArray[np.int32], of_keys: list[int], counts: list[int]) -> list[list[int]]:
    above = np.full(len(counts), ROOT, np.int32)
    target, parent, ok = index.resolve(own, keys(*of_keys), above, np.array(counts, np.int64))
    return [target.tolist(), parent.tolist(), ok.astype(int).tolist()]


def test_pages_with_new_content_are_indexed_as_they_are() -> None:
    index = PrefixIndex(8, 2, ChainHash(1), Journal())
    index.tokens[[4, 5]] = [[1, 2], [3, 4]]
    assert resolve(index, ids(4, 5), [5, 6], [2]) == [[4, 5], [ROOT, 4], [1, 1]]


def test_a_page_resolves_to_its_indexed_twin_and_the_next_continues_that() -> None:
    index = index_of([1, 2], all_keys=[5])
    index.tokens[[4, 5]] = [[1, 2], [3, 4]]
    assert resolve(index, ids(4, 5), [5, 6], [2]) == [[1, 5], [ROOT, 1], [1, 1]]


def test_twins_of_one_batch_resolve_to_the_first() -> None:
    index = PrefixIndex(8, 2, ChainHash(1), Journal())
    index.tokens[[3, 4, 5, 6]] = [[1, 2], [3, 4]] * 2
    assert resolve(index, ids(3, 4, 5, 6), [5, 6, 5, 6], [2, 2]) == [[3, 4, 3, 4], [ROOT, 3, ROOT, 3], [1, 1, 1, 1]]


def test_a_key_that_belongs_to_other_content_keeps_the_rest_of_the_row_out() -> None:
    index = index_of([1, 2], all_keys=[5])
    index.tokens[[3, 4, 5]] = [[7, 7], [8, 8], [9, 9]]
    assert resolve(index, ids(3, 4, 5), [6, 5, 7], [3])[2] == [1, 0, 0]


def test_a_collision_within_a_batch_keeps_followers_of_the_loser_out() -> None:
    index = PrefixIndex(8, 2, ChainHash(1), Journal())
    index.tokens[[1, 2, 3, 4, 5]] = [[1, 2], [3, 4], [7, 7], [5, 6], [5, 6]]
    # Row one is pages 1 and 2; row two is 3 and 4, whose page 3 collides with page 1; row three is page 5, a twin of 4.
    assert resolve(index, ids(1, 2, 3, 4, 5), [5, 6, 5, 8, 8], [2, 2, 1])[2] == [1, 1, 0, 0, 0]


def test_a_page_is_not_moved_to_a_twin_of_its_batch_that_stays_out_of_the_index() -> None:
    index = index_of([1, 2], all_keys=[5])
    index.tokens[[3, 4, 5, 6]] = [[7, 7], [5, 6], [1, 2], [5, 6]]
    # Row one's page 3 collides with page 1, so its page 4 stays out; row two's page 6 looks like a twin of page 4.
    assert resolve(index, ids(3, 4, 5, 6), [5, 6, 5, 6], [2, 2])[2] == [0, 0, 1, 0]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 40))))
def test_insert_find_and_remove_are_those_of_a_dictionary(steps: list[tuple[bool, int, int]]) -> None:
    index, expected = PrefixIndex(6, 1, ChainHash(1), Journal()), dict[int, int]()
    for insert, page, key in steps:
        if insert and page not in expected.values() and key not in expected:
            index.insert(ids(page), keys(key), ids(ROOT))
            expected[key] = page
        elif not insert and page in expected.values():
            index.remove(ids(page))
            expected = {key: other for key, other in expected.items() if other != page}
        assert index.find(keys(*range(41))).tolist() == [expected.get(key, 0) for key in range(41)]


@given(st.lists(st.integers(0, 63), min_size=6, max_size=6, unique=True), st.sets(st.integers(1, 6)).map(sorted))
def test_batches_are_inserted_and_removed_as_one_by_one(of_keys: list[int], gone: list[int]) -> None:
    index = PrefixIndex(6, 1, ChainHash(1), Journal())
    index.insert(ids(1, 2, 3, 4, 5, 6), keys(*of_keys), ids(*[ROOT] * 6))
    index.remove(ids(*gone))
    assert index.find(keys(*of_keys)).tolist() == [0 if page in gone else page for page in range(1, 7)]


token_pages = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3), min_size=n, max_size=n)
)


@given(token_pages, st.integers(0, 5), st.integers(0, 2))
def test_a_key_depends_on_every_token_up_to_its_page_and_on_none_after(
    tokens: list[list[int]], column: int, offset: int
) -> None:
    hasher, column = ChainHash(seed=5), column % len(tokens)
    before = np.array(tokens, np.int32)
    after = before.copy()
    after[column, offset] ^= 1
    same = chain_keys(hasher, before) == chain_keys(hasher, after)
    assert same.tolist() == [page < column for page in range(len(tokens))]


def test_equal_pages_at_different_places_have_different_keys() -> None:
    found = chain_keys(ChainHash(5), np.full((50, 4), 7, np.int32))
    assert len(set(found.tolist())) == 50


def test_keys_differ_between_roots_and_between_seeds() -> None:
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    found = [*chain_keys(ChainHash(5), tokens), *chain_keys(ChainHash(5), tokens, OTHER_ROOT)]
    found += [*chain_keys(ChainHash(6), tokens)]
    assert len(set(found)) == 6


def test_keys_without_a_given_seed_cannot_be_foreseen() -> None:
    assert ChainHash().seed != ChainHash().seed


def test_page_sums_are_the_same_from_the_middle_of_a_chain_and_in_any_order() -> None:
    hasher, tokens = ChainHash(5), np.arange(24, dtype=np.int32).reshape(6, 4)
    whole = hasher.page_sums(tokens, np.arange(6))
    for columns in ([3, 4], [5, 0, 2], [1, 1]):
        assert ChainHash(5).page_sums(tokens[columns], np.array(columns)).tolist() == whole[columns].tolist()


def test_the_narrow_hash_of_these_tests_does_collide() -> None:
    found = chain_keys(NarrowHash(bits=2), np.arange(400, dtype=np.int32).reshape(100, 4))
    assert set(found.tolist()) == {0, 1, 2, 3}


def test_a_name_without_users_is_forgotten_and_its_number_used_again() -> None:
    names = Namespaces(Journal())
    first = names.hold("a")
    names.hold("a")
    names.let_go(first)
    assert names.find("a") == first
    names.let_go(first)
    assert (len(names), names.find("a"), names.users()) == (0, 0, {})
    assert names.hold("b") == first


def test_every_name_has_a_root_of_its_own() -> None:
    names = Namespaces(Journal())
    roots = [names.hold(name) for name in (None, "", "None", ("a", 1), ("a", 2), 0, b"")]
    assert len(set(roots)) == 7
    assert max(roots) < 0
    assert [names.find(name) for name in (None, "", "None")] == roots[:3]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"))))
def test_users_are_counted_per_name(steps: list[tuple[bool, str]]) -> None:
    names, expected = Namespaces(Journal()), dict[str, int]()
    for hold, name in steps:
        if hold:
            names.hold(name)
            expected[name] = expected.get(name, 0) + 1
        elif expected.get(name):
            names.let_go(names.find(name))
            expected[name] -= 1
        alive = {name: users for name, users in expected.items() if users}
        assert {name: names.users()[names.find(name)] for name in alive} == alive
        assert len(names) == len(alive)
