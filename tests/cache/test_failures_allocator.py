"""Public failures of paged caches that the allocator alone can show. Each test names its number and the report."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from cache_support import (
    NarrowHash,
    admitted,
    computed,
    held_tokens,
    pages,
    resident,
    served,
    snapshot,
    split,
    tiny,
)

from pagedkv.budget import kv_tokens, pages_for_tokens
from pagedkv.cache import Extended, Never, Sequence, Wait, check
from pagedkv.errors import StaleSequenceError

PROMPT_8, PROMPT_9 = list(range(1, 9)), list(range(1, 10))


# A. Page leaks


@pytest.mark.parametrize("chunk", range(13))
def test_a_request_released_between_chunks_leaves_nothing_behind(chunk: int) -> None:
    """Failure 3 (sgl-project/sglang-jax#984): abort between two chunks; the late result of the next one is dropped."""
    manager = tiny(8)
    handle = admitted(manager, range(12)).sequence
    manager.commit(handle.row, chunk)
    manager.release([handle])
    assert split(manager) == (0, chunk // 4, 8 - chunk // 4)
    before = snapshot(manager)
    with pytest.raises(StaleSequenceError, match=f"rows without a sequence: {handle.row}"):
        manager.commit(handle.row, 12 - chunk)
    assert snapshot(manager) == before
    assert manager.table.free_rows == 4


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_refused_growth_keeps_what_the_request_has(is_computed: bool) -> None:
    """Failure 4 (inference-sim/inference-sim#1061): rollback of a failed growth drops the pages already held."""
    manager = tiny(3)
    handle = (computed if is_computed else admitted)(manager, range(8)).sequence
    before = snapshot(manager)
    assert manager.extend(handle.row, range(8), 8) == Never(4, 3)
    other = admitted(manager, [9]).sequence
    assert manager.extend(handle.row, range(4), 4) == Wait(1, 0)
    manager.release([other])
    assert snapshot(manager)["pool"]["refcount"] == before["pool"]["refcount"]
    assert held_tokens(manager, handle.row) == list(range(8))
    manager.release([handle])
    used, cached, free = split(manager)
    assert (used, cached + free) == (0, 3)


def test_a_failed_admission_takes_no_row_and_keeps_no_name() -> None:
    """Failure 5 (sgl-project/sglang#16067): admission takes a second resource, fails on pages, and leaks the first."""
    manager = tiny(3, max_rows=2)
    running = admitted(manager, range(8)).sequence
    for attempt in range(100):
        assert manager.admit(range(20, 28), namespace=f"salt {attempt}") == Wait(2, 1)
        assert manager.table.free_rows == 1
        assert len(manager.namespaces) == 1
        check(manager)
    manager.release([running])
    admitted(manager, range(20, 28))


# B. Double free and reference counts


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_page_counts_its_owners_and_is_freed_once_in_any_order(order: tuple[int, ...]) -> None:
    """Failure 9 (vllm-project/vllm#1556): references taken per entry and dropped per sequence disagree."""
    manager = tiny(8)
    handles = [computed(manager, PROMPT_9).sequence for _ in range(3)]
    assert manager.pool.refcount[pages(manager, handles[0])].tolist() == [3, 3, 1]
    for turn, at in enumerate(order):
        manager.release([handles[at]])
        check(manager)
        assert split(manager)[0] == (4, 3, 0)[turn]
    assert split(manager) == (0, 2, 6)


def test_one_call_that_releases_a_page_several_times_frees_it_once() -> None:
    """Failure 10 (vllm-project/vllm#42571): one batched free with the same page twice underflows the count."""
    manager = tiny(8)
    a, b = computed(manager, PROMPT_9).sequence, computed(manager, PROMPT_9).sequence
    manager.release([a, b, a, b, b])
    check(manager)
    assert split(manager) == (0, 2, 6)
    assert manager.pool.refcount.min() == 0


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_a_page_that_was_used_once_can_be_used_for_ever(num_pages: int) -> None:
    """Failure 11 (Wenyueh/MinivLLM#84): a fresh page starts at count 0, its release makes -1, it never returns."""
    manager = tiny(num_pages)
    for turn in range(20):
        handle = admitted(manager, range(turn, turn + 4 * num_pages)).sequence
        assert (manager.pool.refcount[pages(manager, handle)] == 1).all()
        manager.release([handle])
        check(manager)
        assert manager.pool.refcount.min() == 0


@pytest.mark.parametrize("first", ["one by one", "together", "together, reversed"])
def test_a_request_never_reads_a_page_that_was_freed_as_a_duplicate(first: str) -> None:
    """Failure 12 (sgl-project/mini-sglang#142): duplicate pages are freed while the table still points at them."""
    manager = tiny(6)
    a, b = admitted(manager, PROMPT_8).sequence, admitted(manager, PROMPT_8).sequence
    if first == "one by one":
        manager.commit(a.row, 8)
        manager.commit(b.row, 8)
    else:
        manager.commit([a.row, b.row] if first == "together" else [b.row, a.row], 8)
    check(manager)
    c = admitted(manager, range(100, 108)).sequence
    assert not set(pages(manager, c)) & set(pages(manager, b) + pages(manager, a))
    for turn in range(4):
        assert isinstance(manager.extend([b.row], [50 + turn]), Extended)
        assert held_tokens(manager, b.row) == PROMPT_8 + list(range(50, 51 + turn))
        check(manager)
    manager.release([a])
    assert held_tokens(manager, b.row)[:8] == PROMPT_8


def test_a_matched_prefix_cannot_be_evicted_while_it_is_used() -> None:
    """Failure 13 (sgl-project/mini-sglang#52): the lock starts at the parent, the matched node itself is evicted."""
    manager = tiny(4)
    served(manager, PROMPT_9)
    holder = admitted(manager, PROMPT_9).sequence
    held = pages(manager, holder)
    other = admitted(manager, [99]).sequence
    assert manager.admit([98]) == Wait(1, 0)
    assert held_tokens(manager, holder.row) == PROMPT_9
    assert manager.pool.refcount[held].tolist() == [1, 1, 1]
    manager.release([other, holder])
    assert split(manager) == (0, 2, 2)
    admitted(manager, range(100, 116))
    assert resident(manager) == {}


# C. Wrong sharing: what the key must contain


@pytest.mark.parametrize("bits", [0, 2])
def test_equal_keys_of_different_tokens_do_not_hit(bits: int) -> None:
    """Failure 16 (CVE-2025-25183): a hash collision serves another prompt's pages."""
    manager = tiny(64, hasher=NarrowHash(bits), max_seq_len=256)
    for first in range(0, 400, 4):
        prompt = [first, first + 1, first + 2, first + 3]
        assert served(manager, [*prompt, 7]) == 0
        check(manager)


@pytest.mark.parametrize("bits", [0, 1, 2, 64])
def test_a_collision_costs_a_miss_and_nothing_else(bits: int) -> None:
    """Failure 16 (openvinotoolkit/openvino.genai#3722): what is hit is what was asked, under any hash."""
    manager = tiny(16, hasher=NarrowHash(bits))
    prompts = [[a, a, a, a, b, b, b, b, 9] for a in (1, 2) for b in (3, 4)]
    without_collisions = [0, 4, 0, 4, 8, 8, 8, 8]
    for prompt, most in zip(prompts * 2, without_collisions, strict=True):
        answer = computed(manager, prompt)
        assert answer.cached_tokens == most if bits == 64 else answer.cached_tokens <= most
        assert held_tokens(manager, answer.sequence.row) == prompt
        manager.release([answer.sequence])
        check(manager)


def test_each_adapter_has_a_cache_of_its_own() -> None:
    """Failure 18 (ggml-org/llama.cpp#26207, vllm-project/vllm#3264): the adapter is not part of the key."""
    manager = tiny(16)
    adapters = [None, "a", "b"]
    assert [served(manager, PROMPT_9, namespace=name) for name in adapters] == [0, 0, 0]
    assert [served(manager, PROMPT_9, namespace=name) for name in adapters] == [8, 8, 8]


def test_an_adapter_loaded_again_under_its_old_name_is_another_namespace() -> None:
    """Failure 19 (vllm-project/vllm#42125): a reloaded adapter reuses the old version's pages."""
    manager = tiny(16)
    assert served(manager, PROMPT_9, namespace=("a", 1)) == 0
    assert served(manager, PROMPT_9, namespace=("a", 2)) == 0
    assert served(manager, PROMPT_9, namespace=("a", 1)) == 8


def test_names_that_would_meet_if_they_were_joined_to_a_text_do_not() -> None:
    """Failure 18 (ggml-org/llama.cpp#26207): names are compared as values, whatever separator they contain."""
    manager = tiny(64, max_rows=8)
    names = [None, "", "None", "a|b", ("a", "b"), ("a|b",), ("a", ("b",)), b"a|b", "a\0b", "ä" * 1000]
    assert [served(manager, PROMPT_9, namespace=name) for name in names] == [0] * len(names)
    assert [served(manager, PROMPT_9, namespace=name) for name in names] == [8] * len(names)


def test_a_forgotten_name_s_number_brings_no_pages_to_the_next_name() -> None:
    """Failure 18 (ggml-org/llama.cpp#26207): roots are numbers that are used again, without their pages."""
    manager = tiny(4)
    for turn in range(50):
        assert served(manager, [*range(12), 1], namespace=turn) == 0
        check(manager)


def test_another_salt_sees_a_cold_cache() -> None:
    """Failure 24 (CVE-2025-46570): a shared prefix cache tells by its hits whose prompt is resident."""
    manager = tiny(16)
    served(manager, PROMPT_9, namespace="s1")
    assert manager.match(PROMPT_9, "s2") == 0
    assert served(manager, PROMPT_9, namespace="s2") == 0
    assert served(manager, PROMPT_9, namespace="s1") == 8


def test_another_salt_does_not_wait_for_the_first_one_s_prefix() -> None:
    """Failure 24 (CVE-2025-46570): waiting for a prefix in the making would show it just as a hit does."""
    manager = tiny(16)
    admitted(manager, PROMPT_9, namespace="s1")
    assert admitted(manager, PROMPT_9, namespace="s2", share_pending=True).cached_tokens == 0


# D. Wrong sharing: timing, partial pages, preemption, chunking


@pytest.mark.parametrize("num_pages", [2, 3, 4])
def test_a_recycled_page_does_not_serve_its_old_prefix(num_pages: int) -> None:
    """Failure 27 (GeeeekExplorer/nano-vllm#163): a recycled page keeps its old index entry."""
    manager = tiny(num_pages)
    assert served(manager, [1, 2, 3, 4]) == 0
    assert served(manager, range(5, 5 + 4 * num_pages)) == 0
    assert len(resident(manager)) <= num_pages
    assert manager.match([1, 2, 3, 4, 9]) == 0
    assert served(manager, [1, 2, 3, 4, 9]) == 0


def test_an_entry_is_gone_before_its_page_is_handed_out() -> None:
    """Failure 27 (vllm-project/vllm#4761): while the new content is only half there, the old prefix must not hit."""
    manager = tiny(2)
    served(manager, [1, 2, 3, 4])
    admitted(manager, range(5, 13))
    assert manager.match([1, 2, 3, 4, 9]) == 0
    assert manager.match(range(5, 13)) == 0


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_partly_filled_page_is_private(length: int) -> None:
    """Failure 28 (Avarok-Cybersecurity/atlas#1193): a partly filled last page is shared and both decoders write it."""
    manager = tiny(8)
    prompt = list(range(1, 1 + length))
    a, b = computed(manager, prompt).sequence, computed(manager, prompt).sequence
    assert pages(manager, a)[0] == pages(manager, b)[0]
    answer = manager.extend([a.row, b.row], [70, 80])
    assert isinstance(answer, Extended)
    assert answer.slots[0] != answer.slots[1]
    assert held_tokens(manager, a.row) == [*prompt, 70]
    assert held_tokens(manager, b.row) == [*prompt, 80]
    manager.commit([a.row, b.row], 1)
    check(manager)
    manager.release([a])
    manager.release([b])
    used, cached, free = split(manager)
    assert (used, cached + free) == (0, 8)


def test_a_page_full_of_different_tokens_stays_private_and_of_equal_ones_is_shared() -> None:
    """Failure 28 (Avarok-Cybersecurity/atlas#1193): the same after the pages have become full."""
    manager = tiny(8)
    rows = [computed(manager, [1, 2, 3, 4, 5, 6]).sequence.row for _ in range(3)]
    manager.extend(rows, [7, 8, 7, 9, 7, 8], 2)
    manager.commit(rows, 2)
    check(manager)
    a, b, c = (manager.table.table[row, 1] for row in rows)
    assert a == c != b
    assert [held_tokens(manager, row)[6:] for row in rows] == [[7, 8], [7, 9], [7, 8]]


@pytest.mark.parametrize("preempted", [False, True])
def test_cached_and_new_tokens_are_the_prompt_and_no_more(preempted: bool) -> None:
    """Failure 29 (GeeeekExplorer/nano-vllm#210): the range to compute is fixed before the lookup and overruns."""
    manager = tiny(8)
    prompt = list(range(10))
    served(manager, prompt if preempted else prompt[:4])
    answer = admitted(manager, prompt)
    assert answer.cached_tokens == (8 if preempted else 4)
    row, missing = answer.sequence.row, 10 - answer.cached_tokens
    slots = manager.table.slots(row, answer.cached_tokens, missing)
    expected = [pages(manager, answer.sequence)[at // 4] * 4 + at % 4 for at in range(answer.cached_tokens, 10)]
    assert slots.tolist() == expected
    manager.commit(row, missing)
    assert manager.table.computed[row] == manager.table.length[row] == 10


def test_a_match_is_pinned_before_its_own_admission_takes_pages() -> None:
    """Failure 32 (inference-sim/inference-sim#649): the matched pages are evicted by the same request's allocation."""
    manager = tiny(4)
    prompt = list(range(15))
    served(manager, prompt[:8])
    other = admitted(manager, [99]).sequence
    before = snapshot(manager)
    assert manager.admit(prompt) == Wait(2, 1)
    assert snapshot(manager) == before
    manager.release([other])
    answer = admitted(manager, prompt, reserve=1)
    assert answer.cached_tokens == 8
    assert held_tokens(manager, answer.sequence.row) == prompt


@pytest.mark.parametrize("length", range(2, 16))
def test_no_page_of_a_match_is_ever_evicted_for_it(length: int) -> None:
    """Failure 32 (vllm-project/vllm#42948): the same for every length of the match, on a pool without a spare page."""
    manager = tiny(4)
    served(manager, range(length))
    cached = manager.match(range(16))
    answer = admitted(manager, range(16))
    assert answer.cached_tokens == cached == length // 4 * 4
    assert held_tokens(manager, answer.sequence.row) == list(range(16))


def test_a_resumed_request_has_the_keys_of_a_fresh_one() -> None:
    """Failure 35 (LMCache/LMCache#1361): on resume the whole token list is appended to what the tracker had."""
    resumed, fresh = tiny(8), tiny(8)
    handle = computed(resumed, range(8)).sequence
    for token in (8, 9):
        resumed.extend(handle.row, [token])
        resumed.commit(handle.row, 1)
    resumed.release([handle])
    again = computed(resumed, range(10)).sequence
    assert resumed.table.length[again.row] == 10
    new = computed(fresh, range(10)).sequence
    for manager, row in ((resumed, again.row), (fresh, new.row)):
        manager.extend(row, [10, 11], 2)
        manager.commit(row, 2)
        check(manager)
    keys = [manager.index.key[manager.index.indexed][1:] for manager in (resumed, fresh)]
    assert sorted(keys[0].tolist()) == sorted(keys[1].tolist())
    assert len(set(keys[0].tolist())) == 3


# E. Deadlock and livelock


def test_a_request_larger_than_the_pool_is_never_and_blocks_nobody() -> None:
    """Failure 37 (vllm-project/vllm#39734): within the model's limit but larger than the pool, it waits for ever."""
    manager = tiny(4)
    assert manager.admit(range(20)) == Never(needed=5, capacity=4)
    admitted(manager, range(4))
    assert manager.admit(range(20)) == Never(needed=5, capacity=4), "and not Wait, whoever holds pages"


@pytest.mark.parametrize("length", range(1, 30))
def test_never_is_said_exactly_when_an_empty_pool_could_not(length: int) -> None:
    """Failure 37 (vllm-project/vllm#35570): 'not now' and 'never' are different answers."""
    manager = tiny(4)
    blocker = admitted(manager, range(16)).sequence
    answer = manager.admit(range(100, 100 + length))
    assert isinstance(answer, Never) == (length > 16)
    manager.release([blocker])
    assert isinstance(manager.admit(range(100, 100 + length)), Never) == (length > 16)


def test_prompt_and_output_that_cannot_fit_are_refused_at_once_or_at_the_wall() -> None:
    """Failure 38 (vllm-project/vllm#52530): alone in the pool, a request preempts itself at the wall for ever."""
    manager = tiny(4)
    stored = kv_tokens(14, 8)
    assert manager.admit(range(14), reserve=stored - 14) == Never(needed=6, capacity=4)
    row = computed(manager, range(14)).sequence.row
    manager.extend(row, [1, 2], 2)
    before = snapshot(manager)
    assert manager.extend(row, [3]) == Never(needed=5, capacity=4)
    assert snapshot(manager) == before


def test_reserved_growth_cannot_be_taken_by_another_admission() -> None:
    """Failure 40 (vllm-project/vllm#57104): two requests fill the pool and each needs one more page to start."""
    manager = tiny(7)
    a = admitted(manager, range(16), reserve=1).sequence
    assert manager.admit(range(100, 112), reserve=1) == Wait(needed=4, free=2)
    assert isinstance(manager.extend(a.row, [1]), Extended)
    manager.release([a])
    b = admitted(manager, range(100, 112), reserve=1).sequence
    assert isinstance(manager.extend(b.row, [1]), Extended)


@pytest.mark.parametrize("num_pages", [3, 5, 8, 13])
def test_whoever_was_admitted_with_a_reservation_can_reach_its_end(num_pages: int) -> None:
    """Failure 40 (vllm-project/vllm#40968): growth in turns, in the worst order, never waits within reservations."""
    rng = np.random.default_rng(num_pages)
    for _ in range(20):
        manager = tiny(num_pages)
        left: dict[Sequence, int] = {}
        for _ in range(4):
            length, reserve = rng.integers(1, 10, 2).tolist()
            answer = manager.admit(rng.integers(0, 2, length), reserve=reserve)
            if not isinstance(answer, Wait | Never):
                left[answer.sequence] = reserve
        while left:
            handles = list(left)
            answer = manager.extend([handle.row for handle in handles], [1] * len(handles))
            assert isinstance(answer, Extended)
            check(manager)
            left = {handle: more - 1 for handle, more in left.items() if more > 1}


# G. Page boundaries


@pytest.mark.parametrize("length", range(1, 14))
def test_a_cached_prompt_always_leaves_a_token_to_compute(length: int) -> None:
    """Failure 51 (vllm-project/vllm#11186): a multiple of the page size, wholly cached: nothing to do."""
    manager = tiny(8)
    served(manager, range(length))
    assert served(manager, range(length)) == (length - 1) // 4 * 4
    longer = served(manager, [*range(length), 50, 51, 52, 53])
    assert longer == length // 4 * 4, "the chain is not broken"


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("prefix", range(0, 13, 4))
def test_the_estimate_of_pages_is_what_admission_and_first_decode_draw(length: int, prefix: int) -> None:
    """Failure 52 (NVIDIA/TensorRT-LLM#12404): the estimate credits one reusable page too many at a boundary."""
    manager = tiny(16)
    holder = computed(manager, [*range(prefix), 99]).sequence
    refusal = manager.admit(range(length), reserve=1, headroom=100)
    assert isinstance(refusal, Wait)
    estimate = refusal.needed - 100
    assert estimate == pages_for_tokens(length + 1, 4) - manager.match(range(length)) // 4
    before = manager.usage()
    row = admitted(manager, range(length), reserve=1).sequence.row
    middle = manager.usage()
    assert middle.used + middle.promised - before.used == estimate
    manager.extend(row, [1])
    assert manager.usage().used - before.used == estimate
    assert manager.usage().promised == 0
    manager.release([holder])


@pytest.mark.parametrize(("length", "expected"), list(enumerate([1, 2, 3, 4, 1, 2, 3, 4, 1], start=1)))
def test_the_last_page_holds_one_to_page_size_tokens(length: int, expected: int) -> None:
    """Failure 53 (Wenyueh/MinivLLM#87): tokens in the last page come out as 0 for exact multiples."""
    manager = tiny()
    handle = admitted(manager, range(length)).sequence
    slot = int(manager.table.slots(handle.row, length - 1, 1)[0])
    assert (slot // 4, slot % 4 + 1) == (pages(manager, handle)[-1], expected)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_page_is_drawn_exactly_when_its_first_token_is_about_to_be_written(prompt: int, in_batch: bool) -> None:
    """Failure 54 (GeeeekExplorer/nano-vllm#71): the growth test looks before or after the append inconsistently."""
    manager = tiny(3)
    row = admitted(manager, range(prompt)).sequence.row
    for position in range(prompt, 12):
        free = split(manager)[2]
        answer = manager.extend([row], [position], [1]) if in_batch else manager.extend(row, [position])
        assert isinstance(answer, Extended)
        assert free - split(manager)[2] == (position % 4 == 0), position
        assert answer.slots[0] % 4 == position % 4


@pytest.mark.parametrize("prompt", [3, 4, 5, 8])
def test_without_a_free_page_growth_waits_before_the_write(prompt: int) -> None:
    """Failure 54 (GeeeekExplorer/nano-vllm#66): with 0 free pages the refusal comes before the write, not after."""
    manager = tiny(pages_for_tokens(prompt, 4) + 1)
    blocker = admitted(manager, [99]).sequence
    row = admitted(manager, range(prompt)).sequence.row
    for position in range(prompt, 4 * pages_for_tokens(prompt, 4)):
        assert isinstance(manager.extend(row, [position]), Extended)
    before = snapshot(manager)
    assert manager.extend(row, [77]) == Wait(needed=1, free=0)
    assert snapshot(manager) == before
    manager.release([blocker])
    assert isinstance(manager.extend(row, [77]), Extended)


@pytest.mark.parametrize("more", range(1, 9))
def test_every_token_is_either_cached_or_computed(more: int) -> None:
    """Failure 56 (waybarrios/vllm-mlx#311): the stored prefix is one short; a token is lost in between."""
    manager = tiny(8)
    served(manager, PROMPT_8)
    prompt = PROMPT_8 + list(range(50, 50 + more))
    answer = admitted(manager, prompt)
    row = answer.sequence.row
    assert answer.cached_tokens == manager.table.computed[row] == 8
    slots = manager.table.slots(row, 0, len(prompt))
    assert (slots % 4).tolist() == [at % 4 for at in range(len(prompt))]
    manager.commit(row, more)
    assert manager.table.computed[row] == len(prompt)


def test_prompts_shorter_than_a_page_leave_no_entry() -> None:
    """Failure 57 (sgl-project/sglang#10637): a key truncated to whole pages becomes empty and is inserted anyway."""
    manager = tiny(4)
    assert [served(manager, [1, 2, 3]) for _ in range(2)] == [0, 0]
    assert split(manager) == (0, 0, 4)
    assert resident(manager) == {}
    assert [served(manager, range(1, 1 + n)) for n in (5, 9)] == [0, 4]
    assert split(manager) == (0, 2, 2)
    manager.release([admitted(manager, range(100, 116)).sequence])
    assert split(manager) == (0, 0, 4)
    assert resident(manager) == {}


# H. Metrics


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_shared_pages_are_counted_once_in_every_state(order: tuple[int, int]) -> None:
    """Failure 62 (sgl-project/sglang#35270): evictable counts shared nodes twice, available exceeds the pool."""
    manager = tiny(8)
    prompts = [PROMPT_9, [1, 2, 3, 4, 9, 9, 9, 9, 9]]
    for prompt in prompts:
        served(manager, prompt)
    assert split(manager) == (0, 3, 5)
    handles = [admitted(manager, prompts[at]).sequence for at in order]
    assert split(manager) == (5, 0, 3)
    manager.release([handles[0]])
    assert split(manager) == (3, 1, 4)
    manager.release([handles[1]])
    assert split(manager) == (0, 3, 5)
    manager.release([admitted(manager, range(100, 132)).sequence])
    assert split(manager) == (0, 0, 8)


# Q. Eviction order


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """Failure 133 (llm-d/llm-d-inference-sim#704): the first page may be evicted, the rest stays, unreachable."""
    manager = tiny(3)
    served(manager, range(12))
    served(manager, [99])
    assert manager.match([*range(12), 50]) == 8
    assert sorted(tokens for _, tokens in resident(manager).values()) == [tuple(range(4)), tuple(range(8))]


def run_and_report(seed: int) -> list[list[tuple[int, ...]]]:
    """What is resident after each of many prompts of a random tree, in the order of eviction."""
    rng, manager = np.random.default_rng(seed), tiny(6)
    story = []
    for _ in range(60):
        prompt = np.repeat(rng.integers(0, 2, rng.integers(1, 5)), 4)
        served(manager, [*prompt, 1])
        story.append([resident(manager)[page][1] for page in manager.pool.queue.queued().tolist()])
    return story


@pytest.mark.parametrize("seed", range(5))
def test_no_page_outlives_the_page_it_continues_and_runs_repeat(seed: int) -> None:
    """Failure 133 (NVIDIA/Megatron-LM#5822): the order differs from run to run, and orphans stay resident."""
    story = run_and_report(seed)
    for chains in story:
        assert all(len(tokens) == 4 or tokens[:-4] in chains for tokens in chains)
    assert run_and_report(seed) == story
