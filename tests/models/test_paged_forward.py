"""A model on pages computes what it computes by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_driver import paged_logits, pages_for
from tiny_models import ARCHITECTURES, VOCABULARY, tiny, tiny_tokenizer

from pagedkv.attention.interface import AttentionBatch
from pagedkv.models.hf import OutsideStepError
from pagedkv.models.loaded import adopt

LENGTH = 19
_generator = torch.Generator().manual_seed(3)
SEQUENCES = torch.randint(3, VOCABULARY, (3, LENGTH), generator=_generator).tolist()
SEQUENCES[1] = SEQUENCES[1][:11]


def own_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """The oracle: the model's own eager attention over one whole sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.fixture(params=ARCHITECTURES, scope="module")
def pair(request):
    """A model on pages, and what the same model computed for each sequence before it was put there."""
    model_type, changes = ARCHITECTURES[request.param]
    model = tiny(model_type, **changes)
    expected = [own_logits(model, tokens) for tokens in SEQUENCES]
    return adopt(model, tiny_tokenizer(), request.param), expected


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_whole_prefill_of_several_sequences_in_one_flat_batch(pair):
    model, expected = pair
    assert_same(paged_logits(model, SEQUENCES, [[19], [11], [19]]), expected)


def test_chunks_and_decode_mixed_in_the_same_steps(pair):
    """One sequence decodes token by token while the others are still prefilled in chunks that straddle pages."""
    model, expected = pair
    chunks = [[3] + [1] * 16, [0, 0, 5, 4, 2], [7, 6, 1, 1, 1, 1, 1, 1]]
    assert_same(paged_logits(model, SEQUENCES, chunks), expected)


def test_the_oracle_sees_attention():
    """Guards the tests above: in these models another early token changes the last logits."""
    model = tiny("llama")
    changed = [SEQUENCES[0][1], *SEQUENCES[0][1:]]
    assert (own_logits(model, SEQUENCES[0])[-1] - own_logits(model, changed)[-1]).abs().max() > 0.01


def test_only_the_wanted_rows_get_logits_and_none_is_allowed():
    model = adopt(tiny("llama"), tiny_tokenizer(), "tiny")
    store = pages_for(model, 2, 4)
    batch = AttentionBatch(
        query_start=np.array([0, 5], np.int32),
        kv_length=np.array([5], np.int32),
        rows=np.array([0], np.int32),
        table=np.array([[2, 1]], np.int32),
        slots=np.array([8, 9, 10, 11, 4], np.int64),
    )
    plan = store.backend.plan(batch)
    tokens, positions = torch.tensor(SEQUENCES[0][:5]), torch.arange(5)
    all_rows = model.forward(tokens, positions, torch.arange(5), store, plan)
    some = model.forward(tokens, positions, torch.tensor([4, 1]), store, plan)
    none = model.forward(tokens, positions, torch.tensor([], dtype=torch.int64), store, plan)
    assert all_rows.shape == (5, VOCABULARY)
    assert all_rows.dtype == torch.float32
    torch.testing.assert_close(some, all_rows[[4, 1]])
    assert none.shape == (0, VOCABULARY)


def test_a_model_on_pages_called_outside_a_step_says_so():
    model = adopt(tiny("llama"), tiny_tokenizer(), "tiny")
    with pytest.raises(OutsideStepError, match=r"layer 0 of LlamaAttention .* no step is set"):
        model.model(input_ids=torch.tensor([[3, 4]]), use_cache=False)


def test_no_step_is_left_behind_when_a_forward_fails():
    model = adopt(tiny("llama"), tiny_tokenizer(), "tiny")
    store = pages_for(model, 2, 4)
    with pytest.raises(AttributeError):
        model.forward(torch.tensor([3]), torch.tensor([0]), torch.tensor([0]), store, plan=None)
    with pytest.raises(OutsideStepError):
        model.model(input_ids=torch.tensor([[3]]), use_cache=False)


def test_bfloat16_weights_give_float32_logits():
    model = adopt(tiny("llama").to(torch.bfloat16), tiny_tokenizer(), "tiny")
    (logits,) = paged_logits(model, SEQUENCES[:1], [[19]])
    assert model.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
