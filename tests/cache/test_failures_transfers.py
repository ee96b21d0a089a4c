"""Public failures where something is under way with pages, and where prompts hold more than text. Numbers: FAILURES."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_support import admitted, computed, pages, served, split, tiny

from pagedkv.cache import (
    Admitted,
    ContentIds,
    Extended,
    KVCacheManager,
    Pinned,
    Sequence,
    Wait,
    check,
    content_of,
)
from pagedkv.cache.content import FIRST_STAND_IN
from pagedkv.errors import InvalidRequestError, StaleSequenceError


def held(manager: KVCacheManager, sequence: Sequence) -> Pinned:
    answer = manager.hold(sequence.row)
    assert isinstance(answer, Pinned), answer
    check(manager)
    return answer


def test_pages_that_are_being_loaded_outlive_their_request_until_the_load_is_given_up() -> None:
    """FAILURES 1: withheld until the deadline, free after it, and a completion that comes later is ignored."""
    manager = tiny(num_pages=8)
    loading = admitted(manager, [1] * 16).sequence
    load = held(manager, loading)
    withheld = set(pages(manager, loading))
    manager.release([loading])
    check(manager)
    assert split(manager) == (4, 0, 4)
    other = admitted(manager, [2] * 16).sequence
    assert not withheld & set(pages(manager, other))
    assert manager.admit([3] * 4) == Wait(1, 0)
    manager.release([other])
    manager.unpin(load)  # the deadline
    assert split(manager) == (0, 0, 8)
    manager.unpin(load)  # the completion, too late
    check(manager)
    assert split(manager) == (0, 0, 8)


def test_a_completion_frees_by_transfer_not_by_request() -> None:
    """FAILURES 2: the request is long gone when its load completes."""
    manager = tiny(num_pages=8)
    loading = admitted(manager, [1] * 16).sequence
    load = held(manager, loading)
    manager.release([loading])
    manager.release([loading])  # aborted twice
    manager.unpin(load)
    assert split(manager) == (0, 0, 8)


@pytest.mark.parametrize("jobs", [0, 1, 3])
def test_pages_are_free_after_the_last_of_several_jobs(jobs: int) -> None:
    """FAILURES 6: done, failed or cancelled alike, each job gives back what it held."""
    manager = tiny(num_pages=8, prefix_caching=False)
    row = computed(manager, [1] * 13).sequence
    stores = [held(manager, row) for _ in range(jobs)]
    manager.release([row])
    for store in stores:
        assert split(manager)[2] == 4
        manager.unpin(store)
        check(manager)
    assert split(manager) == (0, 0, 8)


def test_every_lookup_gives_back_its_own_pin() -> None:
    """FAILURES 7: two lookups of one request, neither of which led to a load."""
    manager = tiny(num_pages=2)
    served(manager, [1] * 8)
    first, second = (manager.pin([1] * 8) for _ in range(2))
    assert isinstance(manager.admit([2] * 8), Wait)
    manager.unpin(first)  # type: ignore[arg-type]
    assert isinstance(manager.admit([2] * 8), Wait)
    manager.unpin(second)  # type: ignore[arg-type]
    admitted(manager, [2] * 8)


def test_a_page_that_leaves_the_index_keeps_its_bytes_for_its_reader() -> None:
    """FAILURES 15: eviction drops its own claim only; the page is handed out once the reader is done, once."""
    manager = tiny(num_pages=2)
    row = computed(manager, [1] * 4).sequence
    reader = held(manager, row)
    manager.release([row])
    result = manager.reset()
    assert (result.dropped, result.held) == (0, 1)
    other = admitted(manager, [2] * 4).sequence
    assert manager.admit([3] * 4) == Wait(1, 0)
    manager.unpin(reader)
    check(manager)
    assert split(manager) == (1, 0, 1)
    manager.release([other])


def test_the_last_page_of_a_row_is_copied_while_it_is_read() -> None:
    """FAILURES 95, 96: a reader sees the bytes that were there when it began."""
    manager = tiny(num_pages=4)
    row = computed(manager, [1] * 6).sequence
    before = pages(manager, row)
    reader = held(manager, row)
    answer = manager.extend([row.row], [2])
    assert isinstance(answer, Extended)
    assert answer.copies.tolist() == [[before[1], pages(manager, row)[1]]]
    manager.unpin(reader)
    check(manager)


def test_a_held_page_is_not_exchanged_for_its_twin() -> None:
    manager = tiny(num_pages=8)
    one, two = (admitted(manager, [1] * 9).sequence for _ in range(2))
    loading = held(manager, two)
    before = pages(manager, two)
    manager.commit([one.row], 9)
    manager.commit([two.row], 9)
    check(manager)
    assert pages(manager, two) == before
    manager.release([one, two])
    manager.unpin(loading)
    check(manager)
    assert manager.match([1] * 9) == 8


def test_what_is_in_flight_brings_nothing_when_its_row_is_released() -> None:
    """FAILURES 41: who preempts can see that the victim's pages are not usable yet."""
    manager = tiny(num_pages=6)
    rows = [computed(manager, [token] * 7).sequence for token in (1, 2, 3)]
    assert manager.private_pages([row.row for row in rows]).tolist() == [2, 2, 2]
    held(manager, rows[2])
    assert manager.private_pages([row.row for row in rows]).tolist() == [2, 2, 0]


def test_a_result_that_comes_after_the_preemption_changes_nothing() -> None:
    """FAILURES 36: the row of a step that was launched before is closed, and may be somebody else's by its handle."""
    manager = tiny(num_pages=4)
    row = computed(manager, [1] * 5).sequence
    step = held(manager, row)
    manager.release([row])
    with pytest.raises(StaleSequenceError):
        manager.commit([row.row], 1)
    again = admitted(manager, [1] * 5).sequence
    assert again.row == row.row
    assert again != row, "the handle tells them apart"
    manager.release([row])
    assert manager.table.live[again.row]
    manager.unpin(step)
    check(manager)


def test_who_holds_pages_goes_on_though_another_cannot_be_placed() -> None:
    """FAILURES 39: a failed placement takes nothing from a row that has its pages."""
    manager = tiny(num_pages=8)
    loaded = admitted(manager, [1] * 18).sequence
    assert manager.admit([2] * 24) == Wait(6, 3)
    manager.commit([loaded.row], 18)
    assert isinstance(manager.extend([loaded.row], [1]), Extended)
    manager.release([loaded])
    assert isinstance(manager.admit([2] * 24), Admitted)


def media(table: ContentIds, content: Any) -> list[int]:
    """4 text tokens, 4 placeholders, 1 text token."""
    return [5, 6, 7, 8, *table.ids(content, 4).tolist(), 9]


def test_prompts_with_different_images_share_the_text_before_them() -> None:
    """FAILURES 20: hits 0, then the text page only, then all."""
    manager, table = tiny(num_pages=8), ContentIds()
    hits = [served(manager, media(table, content)) for content in ("one", "two", "one")]
    assert hits == [0, 4, 8]


def test_contents_that_agree_in_part_of_their_hash_do_not_hit() -> None:
    """FAILURES 21: nothing is cut off."""
    manager, table = tiny(num_pages=8), ContentIds()
    served(manager, media(table, 0x1_0000_ABCD))
    assert manager.match(media(table, 0x2_0000_ABCD)) == 4
    assert manager.match(media(table, 0x1_0000_ABCD)) == 8


@pytest.mark.parametrize("other", [((6, 2), "u1", ""), ((2, 6), "i1", ""), ((2, 6), "u1", "L")])
def test_equal_bytes_of_another_shape_dtype_or_mode_are_other_content(other: tuple[Any, str, str]) -> None:
    """FAILURES 22."""
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 6)
    shape, dtype, mode = other
    manager, table = tiny(num_pages=8), ContentIds()
    served(manager, media(table, content_of(pixels)))
    assert manager.match(media(table, content_of(pixels.copy()))) == 8
    assert manager.match(media(table, content_of(pixels.view(dtype).reshape(shape), mode))) == 4


def test_every_part_of_a_key_matters() -> None:
    """FAILURES 23: namespace, content, place in the content, text: a change of one is a miss."""
    manager, table = tiny(num_pages=8), ContentIds()
    prompt = media(table, "one")
    served(manager, prompt, namespace=("salt", "adapter"))
    assert manager.match(prompt, ("salt", "adapter")) == 8
    for name in (None, ("salt",), ("other salt", "adapter"), ("salt", "other adapter")):
        assert manager.match(prompt, name) == 0
    shifted = [*prompt[:4], prompt[5], prompt[4], *prompt[6:]]
    assert manager.match(shifted, ("salt", "adapter")) == 4
    assert manager.match([4, *prompt[1:]], ("salt", "adapter")) == 0


def test_stand_ins_are_no_token_of_a_vocabulary_and_end_with_an_error() -> None:
    table = ContentIds()
    assert table.ids("a", 3).tolist() == [FIRST_STAND_IN, FIRST_STAND_IN + 1, FIRST_STAND_IN + 2]
    assert table.ids("b", 1).tolist() == [FIRST_STAND_IN + 3]
    assert table.ids("a", 3).dtype == np.int32
    table._next = (1 << 31) - 2
    with pytest.raises(InvalidRequestError, match="3 more stand-ins exceed 1073741824"):
        table.ids("c", 3)
    assert table.ids("d", 2)[-1] == np.iinfo(np.int32).max
    with pytest.raises(InvalidRequestError, match="content in 0 places"):
        table.ids("e", 0)
    with pytest.raises(InvalidRequestError, match="content of type list"):
        table.ids([], 1)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_from_its_start() -> None:
    """FAILURES 33: treated as a miss, but what it computes is not kept twice."""
    manager = tiny(num_pages=8)
    first = computed(manager, [1] * 9).sequence
    second = computed(manager, [1] * 9, reuse=False)
    assert second.cached_tokens == 0
    assert pages(manager, second.sequence)[:2] == pages(manager, first)[:2], "moved to the twins when committed"
    assert split(manager) == (4, 0, 4)
