"""Sliding windows: a query sees itself and the window - 1 tokens before it, on every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BACKEND, Case, same_bits

from pagedkv.attention.cpu.layout import from_logical, to_logical
from pagedkv.attention.interface import LayerPages
from pagedkv.spec import LayerSpec

LAYER = LayerSpec(2, 1, 32, 32)


def overwrite(case: Case, pages: LayerPages, tokens: range, poison: float) -> None:
    """Overwrite keys and values of tokens of the first sequence."""
    key, value = to_logical(pages)
    slots = torch.from_numpy(case.whole().batch().slots[list(tokens)])
    for tensor in (key, value):
        tensor.flatten(0, 1)[slots] = poison
    from_logical(pages, key, value)


@pytest.mark.parametrize("length", [8, 9])
def test_a_full_window_loses_nothing_and_one_more_loses_one(length: int) -> None:
    """Failure 84 (huggingface/transformers#37574): the window moved on one step early when the length equalled it."""
    case = Case(LAYER, ((1, length),), dtype=torch.float32)
    got = case.attend(window=8)
    full = case.attend()
    assert same_bits(got, full) == (length == 8)
    query, key, value = (tensor.double() for tensor in case.token_data())
    weights = torch.einsum("hd,sd->hs", query[-1], key[-8:, 0] * 32**-0.5).softmax(-1)
    assert torch.allclose(got[0].double(), weights @ value[-8:, 0], atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3, 8], ids=["decode", "chunk", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_window_holds_on_every_path(queries: int, dtype: torch.dtype) -> None:
    """Failure 87 (sgl-project/sglang#31501): window 4, length 8; the key at 2 must not reach the query at 7."""
    case = Case(LAYER, ((queries, 8),), dtype=dtype)
    expected = case.attend(window=4)
    pages = case.filled(BACKEND)
    overwrite(case, pages, range(2, 3), 1e4)
    assert same_bits(case.attend(pages, window=4)[-1], expected[-1])


def test_a_decode_reads_nothing_before_its_window_not_even_nan() -> None:
    case = Case(LAYER, ((1, 100),))
    expected = case.attend(window=30)
    pages = case.filled(BACKEND)
    overwrite(case, pages, range(70), float("nan"))
    assert same_bits(case.attend(pages, window=30), expected)


def test_pages_before_the_window_may_be_gone() -> None:
    """Failure 80 (sgl-project/sglang#8649): pages leave when no query sees them; the table may name anything there."""
    case = Case(LAYER, ((4, 140),))
    expected, batch = case.attend(window=24), case.batch()
    table = batch.table.copy()
    # The first query, at 136, sees tokens 113 to 136: columns 0 to 6 are free, three of them in its tile of 64 tokens.
    for gone in (0, -1, 1 << 30):
        table[1, :7] = gone
        plan = BACKEND.plan(replace(batch, table=table))
        got = BACKEND.attend(case.filled(BACKEND), case.query(), plan, case.options(window=24))
        assert same_bits(got, expected)


def test_a_window_of_one_sees_only_itself() -> None:
    case = Case(LAYER, ((20, 40),), dtype=torch.float32)
    value = case.token_data()[2]
    assert torch.allclose(case.attend(window=1), value[-20:].repeat_interleave(2, 1), rtol=1e-6)


def test_a_window_longer_than_the_sequence_is_no_window() -> None:
    case = Case(LAYER, ((5, 60), (1, 20)))
    assert same_bits(case.attend(window=60), case.attend())
    assert same_bits(case.attend(window=int(np.iinfo(np.int32).max) // 2), case.attend())
