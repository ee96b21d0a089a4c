"""Every causal LM that transformers knows, as far as a tiny one can be built from its config: the same, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_driver import paged_logits
from tiny_models import VOCABULARY, tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.loaded import adopt

_LARGEST = 30_000_000
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Tried in this order: latent attention wants as many KV heads as heads, and head_dim to be its rotary part.
_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 8})


def build(model_type: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A tiny model with one layer of each kind, in turn; raises what the model's own code raises."""
    config_class = CONFIG_MAPPING[model_type]
    plain = config_class()
    known = {**plain.to_dict(), **dict.fromkeys(config_class.attribute_map)}
    chosen = {name: value for name, value in sizes.items() if name in known}
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(plain, name, None):
            chosen[name] = (list(dict.fromkeys(kinds)) * 3)[:3]
    config = config_class(**chosen)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        count = sum(weight.numel() for weight in make(config).parameters())
    if count > _LARGEST:
        raise ValueError(f"{count} weights")
    torch.manual_seed(1)
    model: PreTrainedModel = make(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_same_logits_as_its_own_attention_or_refused(model_type):
    sequences = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(3)).tolist()
    for sizes in _VARIANTS:
        try:
            model = build(model_type, {**_SMALL, **sizes})
            with torch.inference_mode():
                expected = [model(input_ids=torch.tensor([one]), use_cache=False).logits[0] for one in sequences]
            break
        except Exception as error:  # the config wants sizes of its own
            reason = error
    else:
        pytest.skip(f"no tiny {model_type}: {type(reason).__name__}")
    try:
        loaded = adopt(model, tiny_tokenizer(), model_type)
    except UnsupportedModelError:
        return  # with which reason: test_support.py
    actual = paged_logits(loaded, sequences, [[5, 1, 1, 4, 2], [0, 9, 1, 1, 1, 1]])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
