"""What the probe reads off a model, and which models it refuses, each with its reason."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCABULARY, config_of, tiny
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.hf import ATTENTION_NAME
from pagedkv.models.support import check_config, prepare
from pagedkv.spec import LayerSpec, ModelSpec

NO_MLA = [name for name in ARCHITECTURES if "mla" not in name]


@pytest.mark.parametrize("name", NO_MLA)
def test_the_probe_agrees_with_the_config(name):
    model_type, changes = ARCHITECTURES[name]
    model = tiny(model_type, **changes)
    spec, options = prepare(model, name)
    expected = ModelSpec.from_config(model.config.to_dict(), name)
    assert spec == expected
    assert [place for place, _ in options.values()] == [0, 1, 2]
    assert model.config._attn_implementation == ATTENTION_NAME


def test_latent_attention_is_read_expanded():
    """Keys carry the rotary part, values do not: the dims differ, and the config's head_dim names neither."""
    model_type, changes = ARCHITECTURES["deepseek_v3_mla"]
    spec, _ = prepare(tiny(model_type, **changes), "mla")
    assert set(spec.layers) == {LayerSpec(query_heads=4, kv_heads=4, key_dim=24, value_dim=16)}


def test_softcap_scale_and_sinks_are_read():
    model_type, changes = ARCHITECTURES["gemma2_softcap_window"]
    _, gemma = prepare(tiny(model_type, **changes), "gemma2")
    assert {(options.softcap, options.scale) for _, options in gemma.values()} == {(2.0, 0.5)}
    model_type, changes = ARCHITECTURES["gpt_oss_sinks"]
    model = tiny(model_type, **changes)
    _, sinks = prepare(model, "gpt_oss")
    for index, (_, options) in sinks.items():
        torch.testing.assert_close(options.sinks, model.model.layers[index].self_attn.sinks.detach())


def test_a_window_that_only_the_mask_knows_is_found(monkeypatch):
    """Some models limit a layer by its mask and never tell the attention function."""
    model = tiny("llama")
    model.config.sliding_window = 6
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    spec, options = prepare(model, "masked")
    assert {layer.window for layer in spec.layers} == {6}
    assert {option.window for _, option in options.values()} == {6}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 64),
        ({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}, 32),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_rope_that_would_change_under_the_cache_limits_the_length(rope, limit):
    """Its rotation depends on the longest sequence of the batch, so cached keys would go stale beyond this length."""
    spec, _ = prepare(tiny("llama", rope_parameters=rope), "rope")
    assert spec.max_seq_len == limit
    assert spec.vocab_size == VOCABULARY


def config_then_model(model_type: str, changes: dict) -> None:
    """As at load: the config alone may be enough to refuse, and then no weight is made."""
    check_config(config_of(model_type, **changes), "its-name")
    prepare(tiny(model_type, **changes), "its-name")


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("falcon", {}, "_supports_attention_backend is False"),
        ("bloom", {}, "_supports_attention_backend is False"),
        ("stablelm", {}, "_supports_attention_backend is False"),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}, "linear_attention layers"),
        ("falcon_h1", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}, "(recurrent state|hybrid layers)"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "it has conv layers"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "linear_attention"),
        ("llama4_text", {"attention_chunk_size": 8, "head_dim": 8}, "chunked attention"),
        ("bert", {"num_key_value_heads": 4}, r"in layer 0 \(BertSelfAttention\) tokens see later ones"),
        ("t5", {}, "encoder-decoder"),
        ("whisper", {}, "encoder-decoder"),
    ],
)
def test_refused_by_name_with_the_reason(model_type, changes, reason):
    with pytest.raises(UnsupportedModelError, match=f"^its-name cannot run on pages: .*{reason}"):
        config_then_model(model_type, changes)


def test_refuses_chunks_that_only_the_mask_knows(monkeypatch):
    model = tiny("llama")
    model.config.attention_chunk_size = 8
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_chunked_causal_mask)
    with pytest.raises(UnsupportedModelError, match=r"in layer 0 \(LlamaAttention\) tokens see chunks of 8 tokens"):
        prepare(model, "chunked")


def test_a_mask_that_no_layer_uses_is_no_reason_to_refuse():
    """Qwen2-MoE makes a mask of window 0 for windowed layers even where it has none."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "use_sliding_window": False}
    spec, _ = prepare(tiny("qwen2_moe", **changes), "qwen2_moe")
    assert {layer.window for layer in spec.layers} == {None}


def test_refuses_a_layer_that_attends_twice():
    model = tiny("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(LlamaAttention\) attends twice per forward"):
        prepare(model, "twice")


def test_refuses_a_layer_that_does_not_attend():
    class Elsewhere(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model = tiny("llama")
    model.model.layers[2].self_attn = Elsewhere()
    with pytest.raises(UnsupportedModelError, match="1 of its 3 layers, 2 the first, do not call"):
        prepare(model, "silent")


def test_refuses_a_mask_that_reaches_the_attention(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: torch.zeros(1, 1, 1, 1))
    with pytest.raises(UnsupportedModelError, match=r"a mask of its own making reaches layer 0"):
        prepare(tiny("llama"), "masked")


def test_refuses_attention_to_later_tokens(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="attends to later tokens"):
        prepare(model, "encoder")


def test_refuses_a_class_that_keeps_its_own_attention(monkeypatch):
    """transformers only logs a warning when a class does not take the attention that is set."""
    model = tiny("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_, **__: None)
    with pytest.raises(UnsupportedModelError, match=r"keeps its own attention \(eager\)"):
        prepare(model, "stubborn")


def test_refuses_a_model_whose_forward_fails(monkeypatch):
    model = tiny("llama")
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(5, 5)
    with pytest.raises(
        UnsupportedModelError, match=r"a forward over a flat batch without a cache fails \(RuntimeError"
    ):
        prepare(model, "broken")


def test_the_probe_leaves_nothing_in_transformers_tables():
    prepare(tiny("llama"), "tidy")
    assert not [name for name in AttentionInterface().valid_keys() if "probe" in name]
    assert not [name for name in AttentionMaskInterface().valid_keys() if "pagedkv" in name]
