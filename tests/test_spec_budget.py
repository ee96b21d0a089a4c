"""spec.py and budget.py: what a token, a page and a request cost. The sums are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.budget import (
    bytes_per_token,
    format_bytes,
    kv_tokens,
    page_bytes,
    pages_for_tokens,
    pages_in_budget,
    parse_bytes,
    requests_in_pages,
)
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.spec import LayerSpec, ModelSpec

TINY = ModelSpec("tiny", (LayerSpec(4, 2, 8, 8),) * 3, max_seq_len=64, vocab_size=100)
"""3 layers x 2 KV heads x (8 + 8) = 96 elements a token."""


def llama(**changes: Any) -> dict[str, Any]:
    """A small transformers config with some entries changed; None takes an entry out."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 8192,
        "vocab_size": 1000,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def test_grouped_heads_count_kv_heads_not_query_heads() -> None:
    """Failure 68 (jranaraki/vllm-fit#2): KV size taken from query heads or hidden size."""
    spec = ModelSpec.from_config(llama(head_dim=128))
    assert bytes_per_token(spec, "bfloat16") == 131_072


def test_a_stated_head_dim_beats_hidden_over_heads() -> None:
    """Failure 69 (LMCache/LMCache#688): head size derived although the model states another."""
    spec = ModelSpec.from_config(llama(num_hidden_layers=36, hidden_size=2560, head_dim=128))
    assert bytes_per_token(spec, "bfloat16") == 147_456


def test_layers_without_keys_and_values_cost_nothing() -> None:
    """Failure 79 (jundot/omlx#2725): all layers counted although only some keep KV."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 16
    spec = ModelSpec.from_config(llama(num_hidden_layers=64, num_key_value_heads=4, head_dim=256, layer_types=kinds))
    assert len(spec.layers) == 16
    assert page_bytes(spec, 64, "bfloat16") == 4 * 1024**2


@pytest.mark.parametrize("window", [-1, 0, None])
def test_a_window_of_nothing_means_full_attention(window: int | None) -> None:
    """Failure 73 (manjunathshiva/turboquant-mlx#52): window -1, 0 or null made the plan smaller."""
    config = llama() | {"sliding_window": window}
    assert ModelSpec.from_config(config) == ModelSpec.from_config(llama())


def test_layer_types_say_which_layers_have_the_window() -> None:
    kinds = ["sliding_attention", "full_attention"]
    spec = ModelSpec.from_config(llama(num_hidden_layers=2, sliding_window=8, layer_types=kinds))
    assert [layer.window for layer in spec.layers] == [8, None]


def test_a_window_without_layer_types_is_every_layers() -> None:
    spec = ModelSpec.from_config(llama(num_hidden_layers=2, sliding_window=8))
    assert [layer.window for layer in spec.layers] == [8, 8]


@pytest.mark.parametrize(("use", "windows"), [(False, [None] * 3), (True, [None, None, 8])])
def test_qwen_style_windows(use: bool, windows: list[int | None]) -> None:
    config = llama(num_hidden_layers=3, sliding_window=8, use_sliding_window=use, max_window_layers=2)
    assert [layer.window for layer in ModelSpec.from_config(config).layers] == windows


def test_latent_attention_is_counted_expanded() -> None:
    spec = ModelSpec.from_config(
        llama(
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        )
    )
    assert spec.layers == (LayerSpec(4, 4, 192, 128),)


def test_the_text_part_of_a_multimodal_config_is_read() -> None:
    spec = ModelSpec.from_config({"model_type": "vlm", "text_config": llama()})
    assert spec == ModelSpec.from_config(llama(), name="vlm")


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_size_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        ModelSpec.from_config(llama(**{missing: None}))


def test_layer_types_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="names 2 layers; the model has 32"):
        ModelSpec.from_config(llama(layer_types=["full_attention"] * 2))


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layer that keeps"):
        ModelSpec.from_config(llama(layer_types=["linear_attention"] * 32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 8, 8), "query_heads is 0"),
        ((4, 3, 8, 8), "4 query heads do not divide into 3"),
        ((4, 2, 8, 0), "value_dim is 0"),
        ((4, 2, 8, 8, 0), "window is 0"),
    ],
)
def test_an_impossible_layer_is_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSpec(*sizes)


@given(tokens=st.integers(0, 10**6), page_size=st.integers(1, 1024))
def test_pages_hold_the_tokens_and_not_one_page_more(tokens: int, page_size: int) -> None:
    pages = pages_for_tokens(tokens, page_size)
    assert pages * page_size >= tokens > (pages - 1) * page_size


def test_the_last_sampled_token_is_never_stored() -> None:
    assert kv_tokens(prompt=8, max_tokens=1) == 8
    assert kv_tokens(prompt=8, max_tokens=9) == 16


def test_bytes_follow_the_dtype() -> None:
    assert [bytes_per_token(TINY, dtype) for dtype in ("float32", "bfloat16")] == [384, 192]
    with pytest.raises(ConfigError, match="'int3' is not one of float32"):
        bytes_per_token(TINY, "int3")


@pytest.mark.parametrize("budget_pages", [-1, 0, 1, 4])
def test_a_budget_too_small_for_one_request_says_what_it_needs(budget_pages: int) -> None:
    """Failure 74 (InternLM/lmdeploy#4552): too few pages met a bare assertion.

    The request needs 4 pages, and the null page makes 5.
    """
    size = page_bytes(TINY, 16, "float32")
    with pytest.raises(OutOfMemoryBudgetError) as error:
        pages_in_budget(budget_pages * size, TINY, 16, "float32", min_tokens=64)
    assert str(budget_pages * size) in str(error.value)
    assert str(5 * size) in str(error.value)


def test_the_null_page_is_set_aside_and_the_rest_of_a_page_is_not_used() -> None:
    size = page_bytes(TINY, 16, "float32")
    assert pages_in_budget(5 * size, TINY, 16, "float32", min_tokens=64) == 4
    assert pages_in_budget(6 * size - 1, TINY, 16, "float32", min_tokens=64) == 4


@given(budget=st.integers(0, 10**7), page_size=st.sampled_from([16, 32, 64]))
def test_the_pool_never_exceeds_its_budget(budget: int, page_size: int) -> None:
    size = page_bytes(TINY, page_size, "bfloat16")
    if budget >= 2 * size:
        pages = pages_in_budget(budget, TINY, page_size, "bfloat16")
        assert (pages + 1) * size <= budget < (pages + 2) * size


def test_requests_in_pages_rounds_each_request_up() -> None:
    assert requests_in_pages(10, tokens_per_request=17, page_size=16) == 5
    assert requests_in_pages(9, tokens_per_request=17, page_size=16) == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("268435456", 268_435_456),
        ("256MiB", 268_435_456),
        ("0.5 GiB", 536_870_912),
        ("2G", 2_000_000_000),
        ("2gb", 2_000_000_000),
        (" 1 KiB ", 1024),
        ("1.5TiB", 1_649_267_441_664),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.1", "-1", "ten", "1e9", "5 apples", "3i", "3 iB", True])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@given(st.integers(1, 10**18))
def test_a_number_of_bytes_is_read_exactly(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == size


@pytest.mark.parametrize(("size", "text"), [(1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**4, "3.0 TiB")])
def test_sizes_are_written_and_can_be_read_again(size: int, text: str) -> None:
    assert format_bytes(size) == text
    assert parse_bytes(text) == size
