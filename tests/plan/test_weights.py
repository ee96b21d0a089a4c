"""Parameters and bytes of models, against what their publishers state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import ConfigError, UnsupportedModelError
from pagedkv.plan.catalog import find_model
from pagedkv.plan.weights import count_weights


def config_file(folder: Path, **changes: Any) -> str:
    """A llama of one layer, hidden size 8 and a vocabulary of 1000, as a config.json."""
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_tied_output_matrix_counts_once(tmp_path: Path) -> None:
    """Failure 77 (jranaraki/vllm-fit#27): counted twice when tied, or not at all when untied."""
    sizes = [
        count_weights(find_model(config_file(tmp_path, tie_word_embeddings=tied))).parameters for tied in (True, False)
    ]
    assert sizes[1] - sizes[0] == 8000
    rest = (8 * 8 + 2 * 8 * 4 + 8 * 8) + 3 * 8 * 16 + 3 * 8  # attention, MLP, norms
    assert [size - rest for size in sizes] == [8000, 16000]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("phi-4", 14_659_507_200),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    """As the model cards and safetensors indices state them."""
    assert count_weights(find_model(name)).parameters == parameters


def test_four_bit_experts_take_the_bytes_of_the_published_checkpoint() -> None:
    """model.safetensors.index.json of openai/gpt-oss-20b: total_size 13761264768."""
    assert count_weights(find_model("gpt-oss-20b")).nbytes == 13_761_264_768


def test_block_scales_count(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    path = config_file(tmp_path, tie_word_embeddings=True, quantization_config=quantization)
    matrices = [(8, 8), (4, 8), (4, 8), (8, 8), (16, 8), (16, 8), (8, 16)]
    scaled = sum(rows * columns + rows // 4 * (columns // 4) * 4 for rows, columns in matrices)
    assert count_weights(find_model(path)).nbytes == scaled + 2 * (8000 + 24)


def test_active_parameters_are_those_a_token_meets() -> None:
    """DeepSeek states 37 billion activated for V3, Qwen 3 (non-embedding 3.0) for the 30B-A3B."""
    assert count_weights(find_model("deepseek-v3")).active / 1e9 == pytest.approx(37, abs=0.5)
    assert count_weights(find_model("qwen3-30b-a3b")).active / 1e9 == pytest.approx(3.0, abs=0.1)


def test_ranks_share_matrices_and_repeat_vectors(tmp_path: Path) -> None:
    model = find_model(config_file(tmp_path, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    whole, half, quarter = (count_weights(model, tp=tp).rank_bytes for tp in (1, 2, 4))
    vectors, keys_and_values = 2 * 24, 2 * 2 * 8 * 4
    assert half == (whole - vectors) // 2 + vectors
    assert quarter == (whole - vectors - keys_and_values) // 4 + keys_and_values // 2 + vectors


def test_dtypes(tmp_path: Path) -> None:
    model = find_model("llama-3.2-1b")
    plain, single, eight, four = (count_weights(model, d).nbytes for d in ("bfloat16", "float32", "fp8", "int4"))
    assert (single, plain) == (2 * plain, 2 * 1_235_814_400)
    assert plain > eight > four
    with pytest.raises(ConfigError, match="weight dtype 'int3' is not one of auto"):
        count_weights(model, "int3")


def test_an_unknown_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    path = config_file(tmp_path, quantization_config={"quant_method": "magic"})
    with pytest.raises(ConfigError, match=r"quantised by 'magic'.*known are fp8"):
        count_weights(find_model(path))


def test_an_architecture_that_nobody_knows_can_be_planned_by_bytes(tmp_path: Path) -> None:
    model = find_model(config_file(tmp_path, model_type="never-heard-of"))
    assert model.spec.elements_per_token == 2 * 4
    with pytest.raises(UnsupportedModelError, match="--weight-bytes"):
        count_weights(model)
