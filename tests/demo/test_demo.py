"""The demonstration on a small workload: both allocators really run, and what is shown is what was measured."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from pagedkv.cache import ContiguousManager, KVCacheManager
from pagedkv.config import EngineConfig
from pagedkv.demo.demo import run_demo
from pagedkv.monitor.poolmap import CACHED, EMPTY, FREE, SHARED, USED, draw, legend, page_states


def test_the_state_of_every_page_of_a_paged_pool() -> None:
    manager = KVCacheManager(8, 4, max_rows=4, max_seq_len=32)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9, 9, 9, 9, 9]):
        row = manager.admit(prompt).sequence.row  # type: ignore[union-attr]
        manager.commit([row], manager.table.length[row] - manager.table.computed[row])
    manager.release([(2, 0)])  # type: ignore[list-item]
    assert page_states(manager).tolist() == [SHARED, USED, USED, CACHED, FREE, FREE, FREE, FREE]


def test_reserved_pages_without_tokens_are_shown_as_such() -> None:
    manager = ContiguousManager(6, 4, max_rows=4, max_seq_len=12)
    manager.admit(range(5))
    assert page_states(manager).tolist() == [USED, USED, EMPTY, FREE, FREE, FREE]


@pytest.mark.parametrize(("pages", "width", "height"), [(5, 20, 3), (727, 40, 5), (100_000, 40, 12)])
def test_the_map_fits_its_place_and_shows_the_most_noteworthy_page_of_each_cell(pages, width, height) -> None:
    states = np.zeros(pages, np.uint8)
    states[-1] = SHARED
    lines = draw(states, width, height).plain.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1][-1] == "▒"
    assert f"shared {1}" in legend(states).plain


@pytest.mark.model
def test_both_allocators_run_and_the_comparison_says_what_they_did() -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=120)
    config = EngineConfig(max_seq_len=768, kv_cache_config={"max_tokens": 1600})
    result = run_demo(console, config, requests=6, seed=3)
    assert len(result.paged.finished) == len(result.contiguous.finished) == 6
    assert not result.paged.errors + result.contiguous.errors
    assert result.contiguous.stats.peak_running == 2  # type: ignore[union-attr]
    assert result.paged.stats.peak_running > 2  # type: ignore[union-attr]
    assert result.paged.waste < result.contiguous.waste
    assert result.paged.most_saved > 0 == result.contiguous.most_saved
    text = printed.getvalue()
    assert f"{result.contiguous.waste:.1%}" in text
    assert text.count("\n> ") == 3  # answers
