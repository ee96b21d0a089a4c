"""What must not change even a result's last bit: how rows are batched, cut, split, threaded, paged and placed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BACKEND, Case, poison_unused, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention.cpu import plan as planning
from pagedkv.attention.cpu.kernel import CHUNK
from pagedkv.spec import LayerSpec

LAYER = LayerSpec(6, 2, 64, 48)
KINDS = [torch.bfloat16, torch.float32]
OPTIONS = [{}, {"window": 37}, {"softcap": 4.0, "sinks": torch.linspace(-1, 1, 6)}]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("chosen", OPTIONS, ids=["plain", "window", "softcap-sinks"])
def test_whole_prefill_equals_chunks_equals_token_by_token(dtype: torch.dtype, chosen: dict[str, object]) -> None:
    """Failure 107 (vllm-project/vllm#40896): the same request must not depend on how its prefill was cut."""
    whole = Case(LAYER, ((90, 90),), dtype=dtype)
    expected = whole.attend(**chosen)
    for cut in (1, 15, 16, 17, 40):
        parts = []
        for begin in range(0, 90, cut):
            end = min(begin + cut, 90)
            step = replace(whole, lengths=((end - begin, end),))
            pages, plan = whole.filled(BACKEND), BACKEND.plan(replace(step.batch(), table=whole.table()))
            parts.append(BACKEND.attend(pages, whole.query()[begin:end], plan, whole.options(**chosen)))
        assert same_bits(torch.cat(parts), expected), f"chunks of {cut}"


def test_a_sequence_does_not_notice_its_neighbours() -> None:
    lengths = ((1, 600), (70, 70), (3, 100), (1, 1), (33, 700))
    together = Case(LAYER, lengths, order="identity", spare=0)
    output, (query, key, value) = together.attend(), together.token_data()
    token = place = 0
    for queries, kv in lengths:
        alone = Case(LAYER, ((queries, kv),), order="identity", spare=0)
        pages = BACKEND.allocate(LAYER, alone.num_pages, 16, torch.bfloat16)
        part = slice(place, place + kv)
        BACKEND.write(pages, key[part].bfloat16(), value[part].bfloat16(), BACKEND.plan(alone.whole().batch()))
        got = BACKEND.attend(pages, query[part][-queries:], BACKEND.plan(alone.batch()), alone.options())
        assert same_bits(got, output[token : token + queries])
        token, place = token + queries, place + kv


def test_identical_one_token_sequences_give_equal_outputs() -> None:
    """Failure 58 (flashinfer-ai/flashinfer#320): sequences shorter than a page differed within one batch."""
    case = Case(LAYER, ((1, 1), (1, 1)))
    query, key, value = case.token_data()
    query[1], key[1], value[1] = query[0], key[0], value[0]
    pages = BACKEND.allocate(LAYER, case.num_pages, 16, torch.bfloat16)
    plan = BACKEND.plan(case.batch())
    BACKEND.write(pages, key.bfloat16(), value.bfloat16(), plan)
    output = BACKEND.attend(pages, query, plan, case.options())
    assert same_bits(output[0], output[1])
    assert torch.allclose(output[0], value[0].repeat_interleave(3, 0))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("page_size", [16, 32, 48])
def test_placement_does_not_matter(dtype: torch.dtype, page_size: int) -> None:
    case = Case(LAYER, ((1, 200), (50, 130)), page_size=page_size, dtype=dtype, order="identity")
    expected = case.attend()
    for order in ("reversed", "random"):
        assert same_bits(replace(case, order=order).attend(), expected), order


def test_page_size_does_not_matter() -> None:
    case = Case(LAYER, ((1, 200), (50, 130)))
    expected = case.attend()
    for page_size in (32, 48, 64, 256):
        assert same_bits(replace(case, page_size=page_size).attend(), expected), page_size


@given(
    kv=st.integers(1, 140),
    queries=st.integers(1, 30),
    page_size=st.sampled_from([16, 48]),
    dtype=st.sampled_from(KINDS),
    poison=st.sampled_from([float("nan"), float("inf"), -3e38]),
    window=st.one_of(st.none(), st.integers(1, 60)),
)
@settings(max_examples=40)
def test_what_lies_outside_the_sequences_is_never_used(
    kv: int, queries: int, page_size: int, dtype: torch.dtype, poison: float, window: int | None
) -> None:
    """Free pages and the slots behind the last token may hold anything, even NaN (0 * NaN is NaN)."""
    case = Case(LAYER, ((min(queries, kv), kv), (1, 17)), page_size=page_size, dtype=dtype)
    expected = case.attend(window=window)
    pages = case.filled(BACKEND)
    poison_unused(case, pages, poison)
    assert same_bits(case.attend(pages, window=window), expected)


@pytest.mark.parametrize("chosen", OPTIONS, ids=["plain", "window", "softcap-sinks"])
def test_number_of_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, object]) -> None:
    case = Case(LAYER, ((1, 3 * CHUNK + 5), (4, 2 * CHUNK), (40, 90)))
    results = []
    for threads in (1, 2, 5):
        plan = planning.make_plan(case.batch(), threads)
        results.append(BACKEND.attend(case.filled(BACKEND), case.query(), plan, case.options(**chosen)))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_keys_split_over_threads_give_what_one_thread_gives() -> None:
    case = Case(LayerSpec(4, 1, 32, 32), ((1, 5 * CHUNK + 100),))
    plan = planning.make_plan(case.batch(), 4)
    tasks = plan.tasks(1, 4, None)
    assert len(tasks.merges) == 1
    assert len(tasks.tasks) > 1, "the long sequence was not split"
    split = BACKEND.attend(case.filled(BACKEND), case.query(), plan, case.options())
    unsplit = BACKEND.attend(case.filled(BACKEND), case.query(), planning.make_plan(case.batch(), 1), case.options())
    assert same_bits(split, unsplit)
    assert float((split - case.expected()).abs().max()) <= case.tolerance()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4000)), min_size=1, max_size=6),
    group=st.integers(1, 9),
    threads=st.integers(1, 9),
    window=st.one_of(st.none(), st.integers(1, 3000)),
)
@settings(max_examples=80)
def test_tasks_cover_every_row_and_visible_key_once(
    lengths: list[tuple[int, int]], group: int, threads: int, window: int | None
) -> None:
    case = Case(LAYER, tuple((queries, queries + before) for queries, before in lengths))
    tasks = planning.make_tasks(case.batch(), 2, group, window, threads)
    seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for first_token, position, _, row, row_end, key, key_end, *_ in tasks.tasks.tolist():
        seen.setdefault((first_token, row, row_end), []).append((key, key_end))
        assert key < key_end <= position + (row_end - 1) // group + 1
    start = case.batch().query_start
    for sequence, (queries, before) in enumerate(lengths):
        kv = queries + before
        mine = sorted((row, end) for first, row, end in seen if first == start[sequence])
        assert [row for row, _ in mine] == [0, *[end for _, end in mine[:-1]]]
        assert mine[-1][1] == queries * group
        for row, end in mine:
            ranges = sorted(seen[int(start[sequence]), row, end])
            position = kv - queries
            first = 0 if window is None else max(0, position + row // group + 1 - window)
            assert [begin for begin, _ in ranges] == [first, *[stop for _, stop in ranges[:-1]]]
            assert ranges[-1][1] == position + (end - 1) // group + 1


def test_heavy_tasks_come_first() -> None:
    case = Case(LAYER, ((1, 30), (1, 500), (1, 200)))
    tasks = planning.make_tasks(case.batch(), 2, 3, None, 1)
    assert np.diff(tasks.tasks[:, 6]).tolist() == [-300, -170]
