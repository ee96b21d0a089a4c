"""Partial-page reuse: a prompt that diverges inside a cached page takes the matching part by copy."""

from __future__ import annotations

import pytest
from cache_support import admitted, computed, pages, served, split, tiny


def test_a_prompt_that_diverges_inside_a_page_copies_the_part_that_matches() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    a = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8]).sequence
    b = admitted(manager, [1, 2, 3, 4, 5, 6, 9, 9])
    assert b.cached_tokens == 6
    assert b.copies.tolist() == [[pages(manager, a)[1], pages(manager, b.sequence)[1]]]


@pytest.mark.parametrize(("length", "hit"), [(4, 3), (7, 6), (8, 7), (9, 8)])
def test_a_prompt_that_is_wholly_cached_leaves_one_token_to_compute(length: int, hit: int) -> None:
    """FAILURES 51: token-wise the second run of a prompt hits all but its last token, never all."""
    manager = tiny(num_pages=8, partial_reuse=True)
    computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert manager.match(list(range(1, length + 1))) == hit
    assert admitted(manager, list(range(1, length + 1))).cached_tokens == hit


def test_the_longest_part_wins() -> None:
    manager = tiny(num_pages=8, partial_reuse=True)
    served(manager, [1, 2, 9, 9])
    served(manager, [1, 2, 3, 9])
    served(manager, [1, 9, 9, 9])
    assert manager.match([1, 2, 3, 4, 5]) == 3


def test_parts_are_not_taken_from_another_namespace() -> None:
    """FAILURES 18, 24."""
    manager = tiny(num_pages=8, partial_reuse=True)
    served(manager, [1, 2, 3, 4], namespace="a")
    assert admitted(manager, [1, 2, 3, 9], namespace="b").cached_tokens == 0
    assert manager.match([1, 2, 3, 9]) == 0


def test_a_part_whose_page_the_same_admission_evicts_is_copied_before_it_is_overwritten() -> None:
    """FAILURES 32: the source may be handed to the very row that copies it, even as the target itself."""
    manager = tiny(num_pages=2, partial_reuse=True)
    served(manager, [1, 2, 3, 4])
    b = admitted(manager, [1, 2, 3, 9, 9])
    assert b.cached_tokens == 3
    assert b.copies.shape == (1, 2)
    assert split(manager) == (2, 0, 0)


def test_without_the_option_hits_are_whole_pages() -> None:
    manager = tiny(num_pages=8)
    served(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    answer = admitted(manager, [1, 2, 3, 4, 5, 6, 9, 9])
    assert (answer.cached_tokens, answer.copies.shape) == (4, (0, 2))
