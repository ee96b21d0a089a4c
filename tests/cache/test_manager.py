"""KVCacheManager: what each verb does, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_support import admitted, computed, held_tokens, pages, resident, served, snapshot, split, tiny

from pagedkv.cache import Admitted, ContiguousManager, Extended, KVCacheManager, Never, Sequence, Wait, audit, check
from pagedkv.errors import ConfigError, InvalidRequestError, StaleSequenceError

PROMPT = list(range(1, 10))
"""9 tokens: two full pages and one token."""


# admit


@pytest.mark.parametrize(("length", "drawn"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 4)])
def test_a_prompt_draws_just_the_pages_it_needs(length: int, drawn: int) -> None:
    manager = tiny()
    admitted(manager, range(length))
    assert split(manager) == (drawn, 0, 4 - drawn)


def test_the_prompt_is_noted_and_nothing_counts_as_computed() -> None:
    manager = tiny()
    row = admitted(manager, PROMPT).sequence.row
    assert held_tokens(manager, row) == PROMPT
    assert (manager.table.length[row], manager.table.computed[row]) == (9, 0)


def test_a_cold_prompt_has_no_cached_tokens() -> None:
    assert admitted(tiny(), PROMPT).cached_tokens == 0


def test_a_warm_prompt_shares_the_full_pages_before_its_last_token() -> None:
    manager = tiny()
    first = computed(manager, PROMPT)
    second = admitted(manager, [*PROMPT[:8], 99])
    assert second.cached_tokens == 8
    assert pages(manager, second.sequence)[:2] == pages(manager, first.sequence)[:2]
    assert pages(manager, second.sequence)[2] != pages(manager, first.sequence)[2]
    assert manager.usage().saved == 2


def test_a_shared_prefix_counts_as_computed() -> None:
    manager = tiny()
    computed(manager, PROMPT)
    row = admitted(manager, PROMPT).sequence.row
    assert manager.table.computed[row] == 8


def test_a_prompt_that_differs_in_the_middle_shares_what_is_before() -> None:
    manager = tiny(8)
    computed(manager, PROMPT)
    assert admitted(manager, [*PROMPT[:5], 99, *PROMPT[6:]]).cached_tokens == 4


def test_pages_that_are_not_computed_are_not_shared() -> None:
    manager = tiny(8)
    row = admitted(manager, PROMPT).sequence.row
    manager.commit(row, 7)
    assert admitted(manager, PROMPT).cached_tokens == 4


def test_match_says_what_admit_would_share_and_changes_nothing() -> None:
    manager = tiny()
    served(manager, PROMPT)
    before = snapshot(manager)
    assert [manager.match(PROMPT[:n]) for n in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]
    assert manager.match(PROMPT, namespace="other") == 0
    assert snapshot(manager) == before


def test_namespaces_do_not_share() -> None:
    manager = tiny(8)
    computed(manager, PROMPT, namespace="a")
    assert admitted(manager, PROMPT, namespace="b").cached_tokens == 0
    assert admitted(manager, PROMPT, namespace="a").cached_tokens == 8


def test_a_namespace_is_forgotten_with_its_last_row_and_page() -> None:
    manager = tiny()
    for salt in range(100):
        served(manager, PROMPT, namespace=f"salt {salt}")
    assert len(manager.namespaces) == 2, "16 tokens of pages hold two prompts' full pages"


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = tiny(8, prefix_caching=False)
    first = computed(manager, PROMPT)
    assert admitted(manager, PROMPT).cached_tokens == 0
    assert manager.match(PROMPT) == 0
    manager.release([first.sequence])
    assert split(manager) == (3, 0, 5)


def test_a_prompt_waits_for_pages_and_says_how_many() -> None:
    manager = tiny()
    admitted(manager, range(9))
    assert manager.admit(range(20, 28)) == Wait(needed=2, free=1)


def test_shared_pages_are_not_waited_for() -> None:
    manager = tiny()
    computed(manager, PROMPT)
    assert manager.admit([*PROMPT[:8], *range(20, 25)]) == Wait(needed=2, free=1)
    assert admitted(manager, [*PROMPT[:8], 20]).cached_tokens == 8


def test_cached_pages_of_the_match_do_not_count_as_free() -> None:
    manager = tiny()
    served(manager, PROMPT)
    admitted(manager, [30])
    assert split(manager) == (1, 2, 1)
    assert manager.admit([*PROMPT[:8], *range(20, 28)]) == Wait(needed=2, free=1)


def test_a_prompt_waits_for_a_row() -> None:
    manager = tiny(max_rows=1)
    handle = admitted(manager, [1]).sequence
    assert manager.admit([2]) == Wait(needed=1, free=0, on="rows")
    manager.release([handle])
    admitted(manager, [2])


def test_a_prompt_larger_than_the_pool_never_fits() -> None:
    assert tiny().admit(range(17)) == Never(needed=5, capacity=4)


def test_never_is_said_even_if_no_row_is_free() -> None:
    manager = tiny(max_rows=1)
    admitted(manager, [1])
    assert manager.admit(range(17)) == Never(needed=5, capacity=4)


def test_a_reservation_is_part_of_what_must_fit() -> None:
    assert tiny().admit(range(14), reserve=3) == Never(needed=5, capacity=4)


def test_headroom_stays_available_after_admission() -> None:
    manager = tiny()
    assert manager.admit(range(9), headroom=2) == Wait(needed=5, free=4)
    admitted(manager, range(9), headroom=1)
    assert split(manager) == (3, 0, 1)


def test_cached_pages_serve_as_headroom() -> None:
    manager = tiny()
    served(manager, PROMPT)
    admitted(manager, range(20, 28), headroom=2)
    assert split(manager) == (2, 2, 0)


def test_a_prompt_whose_next_page_is_being_computed_can_wait_for_it() -> None:
    manager = tiny(8)
    row = admitted(manager, PROMPT).sequence.row
    assert manager.admit(PROMPT, share_pending=True) == Wait(1, 0, on="prefix")
    manager.commit(row, 4)
    assert manager.admit(PROMPT, share_pending=True) == Wait(1, 0, on="prefix")
    manager.commit(row, 4)
    assert admitted(manager, PROMPT, share_pending=True).cached_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (PROMPT, {}),
        (PROMPT, {"share_pending": True, "namespace": "other"}),
        ([1, 2, 3, 99, 5], {"share_pending": True}),
        (PROMPT[:4], {"share_pending": True}),
    ],
    ids=["not asked to", "another namespace", "another page", "nothing to share"],
)
def test_a_prompt_does_not_wait_for_pages_it_could_not_share(prompt: list[int], options: dict[str, Any]) -> None:
    manager = tiny(8)
    admitted(manager, PROMPT)
    admitted(manager, prompt, **options)


def test_nobody_waits_for_a_row_that_was_released() -> None:
    manager = tiny(8)
    manager.release([admitted(manager, PROMPT).sequence])
    admitted(manager, PROMPT, share_pending=True)


# reservations


def test_a_reservation_is_promised_and_not_drawn() -> None:
    manager = tiny()
    admitted(manager, range(4), reserve=5)
    usage = manager.usage()
    assert (usage.used, usage.free, usage.promised) == (1, 3, 2)


def test_promised_pages_are_not_given_to_others() -> None:
    manager = tiny()
    admitted(manager, range(4), reserve=8)
    assert manager.admit(range(20, 28)) == Wait(needed=2, free=1)
    other = admitted(manager, range(20, 24)).sequence
    assert manager.extend(other.row, [1]) == Wait(needed=1, free=0)


def test_a_row_draws_first_on_its_own_promise() -> None:
    manager = tiny()
    row = admitted(manager, range(4), reserve=4).sequence.row
    other = admitted(manager, range(20, 28)).sequence.row
    assert isinstance(manager.extend([other, row], [1], [0, 1]), Extended)
    assert manager.usage().promised == 0
    assert manager.extend([row, other], list(range(5)), [4, 1]) == Wait(needed=2, free=0)


def test_release_takes_the_rest_of_a_promise_back() -> None:
    manager = tiny()
    handle = admitted(manager, range(4), reserve=12).sequence
    manager.extend(handle.row, [1])
    manager.release([handle])
    assert manager.usage().promised == 0
    admitted(manager, range(16))


def test_a_reservation_within_the_last_page_promises_nothing() -> None:
    manager = tiny()
    admitted(manager, range(2), reserve=2)
    assert manager.usage().promised == 0


# extend


def test_extend_gives_the_slots_of_the_new_tokens() -> None:
    manager = tiny()
    handle = admitted(manager, range(3)).sequence
    answer = manager.extend(handle.row, [7, 8], 2)
    assert isinstance(answer, Extended)
    first, second = pages(manager, handle)
    assert answer.slots.tolist() == [first * 4 + 3, second * 4]
    assert held_tokens(manager, handle.row) == [0, 1, 2, 7, 8]


def test_rows_may_come_in_any_order_with_different_counts() -> None:
    manager = tiny()
    a, b = admitted(manager, [1]).sequence, admitted(manager, [2]).sequence
    answer = manager.extend([b.row, a.row], [10, 11, 12, 13, 20], [4, 1])
    assert isinstance(answer, Extended)
    assert held_tokens(manager, b.row) == [2, 10, 11, 12, 13]
    assert held_tokens(manager, a.row) == [1, 20]
    assert answer.slots.tolist() == manager.table.slots([b.row, a.row], [1, 1], [4, 1]).tolist()


def test_a_page_is_drawn_only_when_a_token_crosses_into_it() -> None:
    manager = tiny()
    row = admitted(manager, [0]).sequence.row
    used = []
    for token in range(8):
        manager.extend(row, [token])
        used.append(manager.usage().used)
    assert used == [1, 1, 1, 2, 2, 2, 2, 3]


def test_extending_no_row_or_by_nothing_changes_nothing() -> None:
    manager = tiny()
    row = admitted(manager, range(4)).sequence.row
    before = snapshot(manager)
    for rows, tokens, counts in (([], [], 1), ([], [], []), ([row], [], 0), (row, [], [0])):
        answer = manager.extend(rows, tokens, counts)
        assert isinstance(answer, Extended)
        assert (answer.slots.size, answer.slots.dtype) == (0, np.int64)
    assert snapshot(manager) == before


@pytest.mark.parametrize("counts", [1, np.int64(1), [1, 1], np.array([1, 1], np.int32), np.array([1, 1], np.uint64)])
def test_counts_may_be_a_number_or_one_per_row(counts: Any) -> None:
    manager = tiny()
    rows = [admitted(manager, range(n)).sequence.row for n in (3, 4)]
    answer = manager.extend(rows, [5, 6], counts)
    assert isinstance(answer, Extended)
    assert [held_tokens(manager, row)[-1] for row in rows] == [5, 6]
    assert answer.slots.dtype == np.int64


def test_all_rows_of_a_call_wait_if_one_page_is_missing() -> None:
    manager = tiny(2)
    rows = [admitted(manager, range(n)).sequence.row for n in (4, 3)]
    other = snapshot(manager)
    assert manager.extend(rows, [5, 6, 7], [1, 2]) == Wait(needed=2, free=0)
    assert snapshot(manager) == other


def test_a_row_that_outgrows_the_pool_never_fits() -> None:
    manager = tiny()
    row = admitted(manager, range(16)).sequence.row
    assert manager.extend(row, [1]) == Never(needed=5, capacity=4)
    assert manager.extend(row, range(9), 9) == Never(needed=7, capacity=4)


def test_extend_evicts_cached_pages_when_none_is_free() -> None:
    manager = tiny()
    served(manager, PROMPT)
    row = admitted(manager, range(20, 28)).sequence.row
    assert split(manager) == (2, 2, 0)
    assert isinstance(manager.extend(row, [1]), Extended)
    assert split(manager) == (3, 1, 0)


# commit


def test_pages_are_indexed_when_they_become_full() -> None:
    manager = tiny()
    row = admitted(manager, PROMPT).sequence.row
    known = []
    for _ in PROMPT:
        manager.commit(row, 1)
        known.append(len(resident(manager)))
    assert known == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_generated_tokens_are_shared_like_prompt_tokens() -> None:
    manager = tiny(8)
    row = computed(manager, [1, 2, 3]).sequence.row
    for token in (4, 5):
        manager.extend(row, [token])
        manager.commit(row, 1)
    assert admitted(manager, [1, 2, 3, 4, 5]).cached_tokens == 4


def test_a_row_moves_to_the_twin_of_a_page_it_computed_itself() -> None:
    manager = tiny(8)
    a, b = admitted(manager, PROMPT).sequence, admitted(manager, PROMPT).sequence
    manager.commit(a.row, 9)
    manager.commit(b.row, 9)
    assert pages(manager, a)[:2] == pages(manager, b)[:2]
    assert split(manager) == (4, 0, 4)
    check(manager)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1]])
def test_twins_that_are_committed_together_become_one(rows: list[int]) -> None:
    manager = tiny(9)
    for _ in range(3):
        admitted(manager, PROMPT)
    manager.commit(rows, [9, 9, 9])
    assert split(manager) == (5, 0, 4)
    assert (np.unique(manager.table.table[rows, :2], axis=0)).shape == (1, 2)
    check(manager)


def test_a_row_moves_to_a_twin_that_was_only_cached() -> None:
    manager = tiny()
    served(manager, PROMPT[:8])
    handle = admitted(manager, PROMPT[:8]).sequence
    assert split(manager) == (2, 1, 1)
    manager.commit(handle.row, 4)
    assert split(manager) == (2, 0, 2)
    check(manager)


def test_committing_nothing_changes_nothing() -> None:
    manager = tiny()
    row = admitted(manager, PROMPT).sequence.row
    before = snapshot(manager)
    manager.commit([], [])
    manager.commit(row, 0)
    assert snapshot(manager) == before


# release and eviction


def test_full_pages_stay_cached_and_the_rest_is_free() -> None:
    manager = tiny()
    assert served(manager, PROMPT) == 0
    assert split(manager) == (0, 2, 2)
    assert served(manager, PROMPT) == 8


def test_a_page_stays_used_while_one_owner_is_left() -> None:
    manager = tiny()
    first, second = computed(manager, PROMPT), computed(manager, PROMPT)
    manager.release([first.sequence])
    assert split(manager) == (3, 0, 1)
    assert held_tokens(manager, second.sequence.row) == PROMPT


def test_releasing_twice_or_in_one_call_twice_is_releasing_once() -> None:
    manager = tiny()
    handle = computed(manager, PROMPT).sequence
    manager.release([handle, handle])
    before = snapshot(manager)
    manager.release([handle])
    manager.release([])
    assert snapshot(manager) == before
    assert split(manager) == (0, 2, 2)


def test_an_old_handle_does_not_release_the_next_sequence_on_its_row() -> None:
    manager = tiny()
    old = admitted(manager, PROMPT).sequence
    manager.release([old])
    new = admitted(manager, PROMPT).sequence
    assert new.row == old.row
    manager.release([old])
    assert split(manager) == (3, 0, 1)


@pytest.mark.parametrize("handle", [Sequence(1, 0), Sequence(0, 1), Sequence(-4, 0), Sequence(99, 0)])
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_a_handle_of_another_manager_releases_nothing(kind: Any, handle: Sequence) -> None:
    manager = kind(16, 4, max_rows=4, max_seq_len=16)
    good = manager.admit(PROMPT)
    before = snapshot(manager)
    with pytest.raises(StaleSequenceError, match=f"row {handle.row}"):
        manager.release([good.sequence, handle])
    assert snapshot(manager) == before


def test_the_oldest_sequence_is_evicted_first_and_its_last_page_first() -> None:
    manager = tiny(5)
    served(manager, [1, 1, 1, 1, 2, 2, 2, 2, 9])
    served(manager, [3, 3, 3, 3, 4, 4, 4, 4, 9])
    left = []
    for extra in range(2, 6):
        manager.release([admitted(manager, range(100, 100 + 4 * extra)).sequence])
        left.append(sorted(tokens[::4] for _, tokens in resident(manager).values()))
    assert left == [[(1,), (3,), (3, 4)], [(3,), (3, 4)], [(3,)], []]


def test_sequences_released_together_age_in_the_order_given() -> None:
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        manager = tiny(3)
        handles = [computed(manager, [number] * 4).sequence for number in range(3)]
        manager.release([handles[at] for at in order])
        manager.release([admitted(manager, [99]).sequence])
        assert sorted(tokens[0] for _, tokens in resident(manager).values()) == sorted(order[1:])


def test_a_hit_makes_a_prefix_young_again() -> None:
    manager = tiny(5)
    old, young = [1] * 5, [2] * 5
    served(manager, old)
    served(manager, young)
    served(manager, old)
    admitted(manager, range(100, 113))
    assert (manager.match(old), manager.match(young)) == (4, 0)


# what it tells


def test_private_pages_are_those_that_releasing_the_row_would_bring() -> None:
    manager = tiny(8)
    a, b = computed(manager, PROMPT).sequence, computed(manager, [*PROMPT[:8], 7, 7, 7, 7, 7]).sequence
    assert manager.private_pages([b.row, a.row]).tolist() == [2, 1]
    assert manager.private_pages([]).tolist() == []
    before = manager.pool.available
    manager.release([b])
    assert manager.pool.available - before == 2


def test_usage_counts_shared_tokens_once_and_says_what_sharing_saves() -> None:
    manager = tiny(8)
    for _ in range(3):
        computed(manager, PROMPT)
    usage = manager.usage()
    assert (usage.used, usage.owned, usage.saved, usage.tokens) == (5, 9, 4, 11)
    assert usage.waste == pytest.approx(9 / 20)


def test_an_empty_pool_wastes_nothing() -> None:
    usage = tiny().usage()
    assert (usage.waste, usage.tokens, usage.total, usage.free) == (0.0, 0, 4, 4)


# bad input and refusals


def full() -> tuple[KVCacheManager, list[int]]:
    """Two rows on a full pool: 5 and 8 tokens, one computed page each."""
    manager = tiny()
    rows = [computed(manager, range(5)).sequence.row, computed(manager, range(20, 28)).sequence.row]
    return manager, rows


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], r"at least one token id; got shape \(0,\)"),
    ([[1, 2]], r"flat array of at least one token id; got shape \(1, 2\)"),
    (5, r"flat array of at least one token id; got shape \(\)"),
    ([3, -1], "token ids must lie in 0 to 2.*; got -1 to 3"),
    (np.array([3, -1], np.int32), "token ids must lie in 0 to 2.*; got -1 to 3"),
    ([2**31], "token ids must lie in 0 to 2.*; got 2147483648 to 2147483648"),
    (np.array([2**63], np.uint64), "token ids must lie in 0 to 2.*; got 9223372036854775808"),
    ([1.0, 2.0], "token ids must be integers; got dtype float64"),
    ([True], "token ids must be integers; got dtype bool"),
    ("text", "token ids must be integers; got dtype <U4"),
    (None, "token ids must be integers; got dtype object"),
    (range(65), "65 prompt tokens exceed max_seq_len 64"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_a_prompt_that_cannot_be_meant_is_refused_by_name(kind: Any, prompt: Any, message: str) -> None:
    manager = kind(32, 4, max_rows=4, max_seq_len=64)
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError, match=message):
        manager.admit(prompt)
    assert snapshot(manager) == before


@pytest.mark.parametrize("token", [0, 2**31 - 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, object])
def test_the_smallest_and_largest_token_id_are_kept_as_they_are(token: int, dtype: Any) -> None:
    manager = tiny()
    prompt = [token] * 5 if dtype is object else np.full(5, token, dtype)
    row = computed(manager, prompt).sequence.row
    assert held_tokens(manager, row) == [token] * 5
    assert manager.match(prompt) == 4


def test_the_prompt_array_belongs_to_the_caller_afterwards() -> None:
    manager, prompt = tiny(), np.arange(9, dtype=np.int32)
    row = admitted(manager, prompt).sequence.row
    prompt[:] = 5
    manager.commit(row, 9)
    assert manager.match(range(9)) == 8
    check(manager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reserve": 0.5}, "reserve is 0.5; it must be a whole number"),
        ({"namespace": ["a"]}, "a namespace of type list cannot be hashed"),
        ({"reserve": -1}, "reserve is -1; it must not be negative"),
        ({"headroom": -2}, "headroom is -2; it must not be negative"),
        ({"reserve": 60}, "5 prompt tokens and 60 reserved exceed max_seq_len 64"),
    ],
)
def test_reservations_that_cannot_be_meant_are_refused_by_name(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tiny().admit(range(5), **options)


BAD_EXTENSIONS: list[tuple[Any, Any, Any, str]] = [
    ([0, 1], [1], 1, r"1 token ids of shape \(1,\) for counts that sum to 2"),
    ([0, 1], [1, 2, 3], [1, 1], r"3 token ids of shape \(3,\) for counts that sum to 2"),
    ([0, 1], [[1, 2]], 1, r"2 token ids of shape \(1, 2\) for counts that sum to 2"),
    ([0, 1], [1], [2, -1], "a count of -1 tokens is negative"),
    ([0, 1], [1], -1, "a count of -1 tokens is negative"),
    ([0, 1], [1, 2], [1], r"counts of shape \(1,\) for 2 rows"),
    ([0, 1], [1, 2], [[1, 1]], r"counts of shape \(1, 2\) for 2 rows"),
    ([0, 1], [1, 2], [1.5, 1.5], "counts must be integers; got dtype float64"),
    ([0, 1], [], [2**62, 2**62], "a count of 4611686018427387904 tokens is more than"),
    ([0, 0], [1, 2], 1, "a row occurs twice in one call: 0, 0"),
    ([0, 1], [1, -2], 1, "token ids must lie in 0 to 2.*; got -2 to 1"),
    ([0, 1], [1, 2**31], 1, "token ids must lie in 0 to 2.*; got 1 to 2147483648"),
    ([0, 1], [1.0, 2.0], 1, "token ids must be integers; got dtype float64"),
    ([[0, 1]], [1, 2], 1, r"rows are a flat array of integers; got dtype int64 of shape \(1, 2\)"),
    ([True, True], [1, 2], 1, "rows are a flat array of integers; got dtype bool"),
    ([0, 1], range(58), [1, 57], "row 1 would have 65 tokens; max_seq_len is 64"),
]


@pytest.mark.parametrize(("rows", "tokens", "counts", "message"), BAD_EXTENSIONS)
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_an_extension_that_cannot_be_meant_changes_nothing(
    kind: Any, rows: Any, tokens: Any, counts: Any, message: str
) -> None:
    manager = kind(64, 4, max_rows=4, max_seq_len=64)
    for length in (5, 8):
        manager.admit(range(length))
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError, match=message):
        manager.extend(rows, tokens, counts)
    assert snapshot(manager) == before


def test_a_row_may_reach_max_seq_len_and_not_pass_it() -> None:
    manager = tiny(4, max_seq_len=6)
    row = admitted(manager, range(5)).sequence.row
    assert isinstance(manager.extend(row, [1]), Extended)
    with pytest.raises(InvalidRequestError, match="row 0 would have 7 tokens; max_seq_len is 6"):
        manager.extend(row, [1])


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([0, 1], [1, 9], "9 tokens of row 1 would be computed; it has 8"),
        ([0, 1], 6, "6 tokens of row 0 would be computed; it has 5"),
        ([0, 1], [0, -1], "a count of -1 tokens is negative"),
        ([0, 1], [1], r"counts of shape \(1,\) for 2 rows"),
        ([0, 1], [0.5, 0.5], "counts must be integers; got dtype float64"),
        ([0, 1], [0, 2**63 - 1], "a count of 9223372036854775807 tokens is more than"),
        ([1, 1], [4, 4], "a row occurs twice in one call: 1, 1"),
    ],
)
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_a_commit_that_cannot_be_meant_changes_nothing(kind: Any, rows: Any, counts: Any, message: str) -> None:
    manager = kind(64, 4, max_rows=4, max_seq_len=64)
    for length in (5, 8):
        manager.admit(range(length))
    before = snapshot(manager)
    with pytest.raises(InvalidRequestError, match=message):
        manager.commit(rows, counts)
    assert snapshot(manager) == before


@pytest.mark.parametrize("row", [1, 3, -1, 4])
@pytest.mark.parametrize(
    "call",
    [
        lambda manager, rows: manager.extend(rows, [1, 1]),
        lambda manager, rows: manager.extend(rows, [1, 1], [1, 1]),
        lambda manager, rows: manager.commit(rows, 1),
        lambda manager, rows: manager.private_pages(rows),
        lambda manager, rows: manager.table.slots(rows, 0, 1),
    ],
    ids=["extend", "extend by counts", "commit", "private_pages", "slots"],
)
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_a_dead_row_is_named_and_nothing_changes(kind: Any, call: Callable[[Any, list[int]], Any], row: int) -> None:
    manager = kind(64, 4, max_rows=4, max_seq_len=64)
    live, dead = manager.admit(range(5)), manager.admit(range(5))
    manager.release([dead.sequence])
    before = snapshot(manager)
    with pytest.raises(StaleSequenceError, match=rf"row.*{row}"):
        call(manager, [live.sequence.row, row])
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    "refused",
    [
        lambda manager, rows: manager.admit(range(40, 44)),
        lambda manager, rows: manager.admit(range(9)),
        lambda manager, rows: manager.admit(range(20, 29), namespace="new"),
        lambda manager, rows: manager.admit(range(17)),
        lambda manager, rows: manager.admit(range(4), reserve=13),
        lambda manager, rows: manager.admit([1], headroom=9),
        lambda manager, rows: manager.extend(rows[1], [1]),
        lambda manager, rows: manager.extend(rows, [1, 1]),
        lambda manager, rows: manager.extend(rows, range(9), [3, 6]),
        lambda manager, rows: manager.extend(rows[1], range(9), 9),
    ],
)
def test_a_refusal_changes_nothing(refused: Callable[[KVCacheManager, list[int]], Any]) -> None:
    manager, rows = full()
    before = snapshot(manager)
    assert isinstance(refused(manager, rows), Wait | Never)
    assert snapshot(manager) == before
    assert audit(manager) == []


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_rows", "max_seq_len"])
@pytest.mark.parametrize("kind", [KVCacheManager, ContiguousManager])
def test_sizes_must_be_positive(kind: Any, name: str) -> None:
    sizes = {"num_pages": 4, "page_size": 4, "max_rows": 4, "max_seq_len": 16}
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        kind(**(sizes | {name: 0}))


def test_the_smallest_manager_works() -> None:
    manager = tiny(1, page_size=1, max_rows=1, max_seq_len=1)
    for token in (1, 2, 1):
        assert isinstance(manager.admit([token]), Admitted)
        manager.commit(0, 1)
        manager.release([Sequence(0, int(manager.table.generation[0]))])
        check(manager)
