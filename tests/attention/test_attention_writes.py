"""Writing keys and values by slot, copying pages, and the physical order behind both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BACKEND, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention.cpu.layout import from_logical, to_logical
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.spec import LayerSpec

DTYPES = [torch.bfloat16, torch.float32]


@given(
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(2, 6).map(lambda n: 16 * n),
    value_dim=st.integers(2, 6).map(lambda n: 16 * n),
    page_size=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from(DTYPES),
    kv=st.integers(1, 120),
)
@settings(max_examples=30)
def test_tokens_land_where_the_oracle_puts_them(
    kv_heads: int, key_dim: int, value_dim: int, page_size: int, dtype: torch.dtype, kv: int
) -> None:
    case = Case(LayerSpec(kv_heads, kv_heads, key_dim, value_dim), ((kv, kv),), page_size, dtype)
    expected = case.filled(ReferenceBackend())
    key, value = to_logical(case.filled(BACKEND))
    assert torch.equal(key, expected.key)
    assert torch.equal(value, expected.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slot_minus_one_writes_nothing(dtype: torch.dtype) -> None:
    case = Case(LayerSpec(2, 2, 32, 32), ((20, 20),), dtype=dtype)
    batch, (_, key, value) = case.batch(), case.token_data()
    slots = batch.slots.copy()
    slots[::3] = -1
    pages = BACKEND.allocate(case.layer, case.num_pages, 16, dtype)
    BACKEND.write(pages, key.to(dtype), value.to(dtype), BACKEND.plan(replace(batch, slots=slots)))
    stored, _ = to_logical(pages)
    flat = stored.flatten(0, 1)
    assert torch.equal(flat[batch.slots[1::3]], key[1::3].to(dtype))
    assert not flat[batch.slots[::3]].any()
    assert not stored[0].any(), "the null page was written"


def test_keys_may_be_transposed_views_and_of_another_dtype() -> None:
    case = Case(LayerSpec(4, 2, 64, 32), ((9, 9),))
    _, key, value = case.token_data()
    pages, plan = BACKEND.allocate(case.layer, case.num_pages, 16, torch.bfloat16), BACKEND.plan(case.batch())
    BACKEND.write(pages, key.transpose(0, 1).contiguous().transpose(0, 1), value, plan)
    for got, expected in zip(to_logical(pages), to_logical(case.filled(BACKEND)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logical_order_round_trip(dtype: torch.dtype) -> None:
    pages = BACKEND.allocate(LayerSpec(4, 2, 48, 32), 5, 32, dtype)
    key, value = torch.randn(5, 32, 2, 48).to(dtype), torch.randn(5, 32, 2, 32).to(dtype)
    from_logical(pages, key, value)
    assert torch.equal(to_logical(pages)[0], key)
    assert torch.equal(to_logical(pages)[1], value)


def test_bf16_pages_have_the_documented_shape() -> None:
    pages = BACKEND.allocate(LayerSpec(4, 2, 64, 48), 7, 32, torch.bfloat16)
    assert pages.key.shape == (7, 2, 2, 32, 16, 2)
    assert pages.value.shape == (7, 2, 16, 3, 16, 2)


def test_copied_pages_are_equal_and_the_rest_is_untouched() -> None:
    pages = BACKEND.allocate(LayerSpec(2, 1, 32, 32), 6, 16, torch.bfloat16)
    pages.key.normal_()
    pages.value.normal_()
    before = to_logical(pages)
    BACKEND.copy_pages(pages, np.array([1, 2], dtype=np.int32), np.array([2, 5], dtype=np.int32))
    for old, new in zip(before, to_logical(pages), strict=True):
        assert torch.equal(new[2], old[1])
        assert torch.equal(new[5], old[2]), "source 2 was overwritten before it was read"
        assert torch.equal(new[[0, 1, 3, 4]], old[[0, 1, 3, 4]])
