"""Reordering weights in memory changes neither their values nor what the model computes."""

from __future__ import annotations

import torch
from tiny_models import tiny

from pagedkv.models.weights import order_for_small_steps


def test_values_and_outputs_stay_and_linear_weights_run_along_their_outputs():
    model, untouched = tiny("llama"), tiny("llama")
    order_for_small_steps(model)
    tokens = torch.tensor([[3, 9, 27, 4]])
    torch.testing.assert_close(model(input_ids=tokens).logits, untouched(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    for name, weight in untouched.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.model.layers[0].mlp.up_proj.weight.stride() == (1, 48)
    assert model.model.embed_tokens.weight.stride() == (32, 1)


def test_a_head_tied_to_the_embedding_keeps_the_rows_that_the_embedding_reads():
    model = tiny("llama", tie_word_embeddings=True)
    order_for_small_steps(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


def test_bfloat16_weights_are_left_alone():
    model = tiny("llama").to(torch.bfloat16)
    order_for_small_steps(model)
    assert model.model.layers[0].mlp.up_proj.weight.is_contiguous()
