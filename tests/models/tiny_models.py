"""Tiny random models of real architectures, and a tokenizer, all made from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# name: (model_type, what differs from _SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_multi_query": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "gemma2_softcap_window": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gemma3_window": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "layer_types": _ALTERNATING}),
    "gpt_oss_sinks": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "olmo2": ("olmo2", {}),
    "opt": ("opt", {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "deepseek_v3_mla": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
}


def config_of(model_type: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[model_type](**{**_SIZES, **changes})


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    """A float32 model with weights wide enough that attention is far from uniform."""
    torch.manual_seed(11)
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = build(config_of(model_type, **changes), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or "sinks" in name:
                weight.normal_(0.0, 0.3)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
