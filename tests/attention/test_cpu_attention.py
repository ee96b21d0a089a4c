"""The CPU kernel against the oracle, over drawn shapes and options."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BACKEND, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.attention.interface import AttentionOptions
from pagedkv.spec import LayerSpec

DIMS = st.integers(2, 16).map(lambda n: 16 * n)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    layer = LayerSpec(kv_heads * draw(st.integers(1, 8)), kv_heads, draw(DIMS), draw(DIMS))
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        kv = draw(st.one_of(st.integers(1, 70), st.integers(1, 600)))
        lengths.append((draw(st.one_of(st.just(1), st.integers(1, min(kv, 40)))), kv))
    return Case(
        layer,
        tuple(lengths),
        page_size=draw(st.sampled_from([16, 32, 48])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        seed=draw(st.integers(0, 1000)),
    )


@given(
    case=cases(),
    window=st.one_of(st.none(), st.integers(1, 100)),
    softcap=st.sampled_from([None, 3.0, 50.0]),
    with_sinks=st.booleans(),
)
@settings(max_examples=40)
def test_agrees_with_the_oracle(case: Case, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.linspace(-2.0, 3.0, case.layer.query_heads) if with_sinks else None
    chosen = {"window": window, "softcap": softcap, "sinks": sinks}
    error = (case.attend(**chosen) - case.expected(**chosen)).abs().max()
    assert float(error) <= case.tolerance()


def test_bf16_queries_give_the_rounded_output_of_the_same_fp32_queries() -> None:
    case = Case(LayerSpec(6, 2, 64, 48), ((1, 50), (20, 33)))
    pages, plan = case.filled(BACKEND), BACKEND.plan(case.batch())
    wide = BACKEND.attend(pages, case.query(), plan, case.options())
    narrow = BACKEND.attend(pages, case.query().bfloat16(), plan, case.options())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


def test_queries_may_be_transposed_views_as_transformers_gives_them() -> None:
    case = Case(LayerSpec(6, 2, 64, 64), ((7, 30),))
    plain = case.attend()
    strided = case.query().transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(BACKEND.attend(case.filled(BACKEND), strided, BACKEND.plan(case.batch()), case.options()), plain)


def test_queries_whose_elements_are_apart_are_copied_first() -> None:
    case = Case(LayerSpec(6, 2, 64, 64), ((7, 30),))
    apart = case.query().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert apart.stride(-1) != 1
    assert torch.equal(
        BACKEND.attend(case.filled(BACKEND), apart, BACKEND.plan(case.batch()), case.options()), case.attend()
    )


def test_a_sink_far_above_all_scores_takes_all_the_weight() -> None:
    case = Case(LayerSpec(2, 1, 32, 32), ((1, 20),), dtype=torch.float32)
    assert float(case.attend(sinks=torch.tensor([300.0, -300.0]))[0, 0].abs().max()) < 1e-30
    without = case.attend()
    assert torch.equal(case.attend(sinks=torch.tensor([300.0, -300.0]))[0, 1], without[0, 1])


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_small_and_large_scores(magnitude: float) -> None:
    case = Case(LayerSpec(4, 2, 64, 64), ((3, 200),), dtype=torch.float32)
    options = AttentionOptions(scale=magnitude)
    got = BACKEND.attend(case.filled(BACKEND), case.query(), BACKEND.plan(case.batch()), options)
    query, key, value = (tensor.double() for tensor in case.token_data())
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("thd,shd->hts", query[-3:], key) * magnitude
    mask = torch.ones(3, 200, dtype=torch.bool).tril(197)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    # A score of magnitude * 40 is rounded to 24 bits before it is exponentiated.
    assert torch.allclose(got.double(), torch.einsum("hts,shd->thd", weights, value), atol=1e-6 + magnitude * 1e-4)
