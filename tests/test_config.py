"""config.py: which value wins, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.budget import page_bytes
from pagedkv.config import DEFAULT_MAX_MEMORY, EngineConfig, KVCacheConfig, SchedulerConfig
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.spec import LayerSpec, ModelSpec

TINY = ModelSpec("tiny", (LayerSpec(1, 1, 8, 8),), max_seq_len=64, vocab_size=100)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "engine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refusal(path: Path | None = None, overrides: dict | None = None, environ: dict | None = None) -> str:
    """The message with which `load` refuses."""
    with pytest.raises(ConfigError) as error:
        EngineConfig.load(path, overrides or {}, environ or {})
    return str(error.value)


# Who wins


def test_defaults() -> None:
    config = EngineConfig.load()
    assert config == EngineConfig()
    assert (config.max_batch_size, config.max_num_tokens, config.max_queue_size) == (256, 512, 4096)
    assert config.kv_cache_config.page_size == 16
    assert config.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION"
    assert {setting.place for setting in config.settings()} == {"default"}


@given(given_by=st.sets(st.sampled_from(["flag", "environment", "file"])))
def test_flag_beats_environment_beats_file_beats_default(
    tmp_path_factory: pytest.TempPathFactory, given_by: set[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "precedence.yaml"
    path.write_text("max_batch_size: 3" if "file" in given_by else "")
    config = EngineConfig.load(
        path,
        {"max_batch_size": 1 if "flag" in given_by else None},
        {"PAGEDKV_MAX_BATCH_SIZE": "2"} if "environment" in given_by else {},
    )
    winner = next((name for name in ("flag", "environment", "file") if name in given_by), "default")
    assert config.source_of("max_batch_size") == winner
    assert config.max_batch_size == {"flag": 1, "environment": 2, "file": 3, "default": 256}[winner]


def test_sources_win_key_by_key_inside_a_section(write: Write) -> None:
    path = write("kv_cache_config:\n  max_memory: 1MiB\n  dtype: float32\n")
    config = EngineConfig.load(
        path, {"kv_cache_config": {"max_tokens": 64}}, {"PAGEDKV_KV_CACHE_CONFIG__MAX_MEMORY": "2MiB"}
    )
    cache = config.kv_cache_config
    assert (cache.max_memory, cache.dtype, cache.max_tokens) == (2 * 1024**2, "float32", 64)
    sources = [config.source_of(f"kv_cache_config.{name}") for name in ("max_memory", "dtype", "max_tokens")]
    assert sources == ["environment", "file", "flag"]


def test_settings_show_each_value_and_its_place(write: Write) -> None:
    path = write("max_batch_size: 8\nscheduler_config:\n  watermark: 0.1\n")
    config = EngineConfig.load(path, {"max_num_tokens": 64}, {"PAGEDKV_MODEL": "some/model"})
    shown = {setting.key: (setting.value, setting.place) for setting in config.settings()}
    assert shown["max_batch_size"] == (8, f"{path}:1")
    assert shown["scheduler_config.watermark"] == (0.1, f"{path}:3")
    assert shown["max_num_tokens"] == (64, "flag")
    assert shown["model"] == ("some/model", "environment PAGEDKV_MODEL")
    assert shown["dtype"] == ("auto", "default")


@pytest.mark.parametrize("section", ["", "kv_cache_config:", "scheduler_config: {}", "# only a comment"])
def test_an_empty_file_or_section_sets_nothing(write: Write, section: str) -> None:
    assert EngineConfig.load(write(section)) == EngineConfig()


def test_an_empty_variable_is_not_set_and_null_means_none(write: Write) -> None:
    path = write("max_seq_len: 100\nmax_batch_size: 8")
    config = EngineConfig.load(path, {}, {"PAGEDKV_MAX_SEQ_LEN": "null", "PAGEDKV_MAX_BATCH_SIZE": ""})
    assert (config.max_seq_len, config.max_batch_size) == (None, 8)


def test_what_kubernetes_injects_for_a_service_of_our_name_is_no_setting() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    environ = {f"PAGEDKV_{name}": "tcp://10.0.0.1:8000" for name in names}
    assert EngineConfig.load(None, {}, {**environ, "HOME": "/"}) == EngineConfig()


def test_the_variable_of_the_model_cache_is_no_setting() -> None:
    assert EngineConfig.load(None, {}, {"PAGEDKV_CACHE": "/somewhere"}) == EngineConfig()


# Names


@pytest.mark.parametrize(("alias", "name"), [("page_size", "tokens_per_block"), ("max_gpu_total_bytes", "max_memory")])
def test_both_names_of_a_setting_are_one_setting(write: Write, alias: str, name: str) -> None:
    config = EngineConfig.load(write(f"kv_cache_config: {{{name}: 32}}"), {f"kv_cache_config.{alias}": 64})
    assert getattr(config.kv_cache_config, name) == 64
    assert config.source_of(f"kv_cache_config.{alias}") == config.source_of(f"kv_cache_config.{name}") == "flag"
    assert getattr(KVCacheConfig(**{alias: 64}), name) == getattr(KVCacheConfig(**{name: 64}), name) == 64


def test_both_names_in_one_source_are_refused(write: Write) -> None:
    path = write("kv_cache_config:\n  page_size: 32\n  tokens_per_block: 32\n")
    expected = f"{path}:3: kv_cache_config.tokens_per_block sets what kv_cache_config.page_size ({path}:2) has set"
    assert expected in refusal(path)


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known(write: Write) -> None:
    path = write("max_batch_size: 8\nkv_cache_config:\n  max_memroy: 1GiB\n")
    message = f"{path}:3: kv_cache_config.max_memroy is not a setting; did you mean kv_cache_config.max_memory"
    assert message in refusal(path)


def test_an_unknown_variable_is_refused() -> None:
    message = "environment PAGEDKV_MAX_BATCHSIZE: max_batchsize is not a setting; did you mean max_batch_size"
    assert message in refusal(environ={"PAGEDKV_MAX_BATCHSIZE": "8"})


def test_a_key_in_the_wrong_section_is_told_the_right_one() -> None:
    assert refusal(overrides={"page_size": 32}).endswith("did you mean kv_cache_config.page_size?")


def test_a_key_like_no_other_is_told_all_known_names() -> None:
    assert "known are model, dtype, max_batch_size" in refusal(overrides={"zzz": 1})


@pytest.mark.parametrize(
    "key", ["tensor_parallel_size", "kv_cache_config.host_cache_size", "kv_cache_config.free_gpu_memory_fraction"]
)
def test_a_tensorrt_llm_option_without_implementation_is_refused_by_name(key: str) -> None:
    assert f"flag: {key} is a TensorRT-LLM option that pagedkv does not implement" in refusal(overrides={key: 1})


def test_static_batch_is_refused_by_name() -> None:
    message = refusal(overrides={"scheduler_config.capacity_scheduler_policy": "STATIC_BATCH"})
    assert "'STATIC_BATCH'" in message
    assert "does not implement" in message


def test_source_of_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean max_batch_size"):
        EngineConfig().source_of("max_bach_size")


# Values


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("max_batch_size", 0, "at least 1"),
        ("max_batch_size", True, "a number"),
        ("max_batch_size", 2.5, "a whole number"),
        ("max_batch_size", "many", "a whole number"),
        ("max_num_tokens", 1, "at least 2"),
        ("max_seq_len", 0, "at least 1"),
        ("max_queue_size", 0, "at least 1"),
        ("model", 3, "a text"),
        ("dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
        ("kv_cache_config.tokens_per_block", 8, "at least 16"),
        ("kv_cache_config.tokens_per_block", 24, "a multiple of 16"),
        ("kv_cache_config.tokens_per_block", 1040, "at most 1024"),
        ("kv_cache_config.max_memory", "10 apples", "not a size in bytes"),
        ("kv_cache_config.max_tokens", -1, "at least 1"),
        ("kv_cache_config.dtype", "fp8", "'auto', 'float32' or 'bfloat16'"),
        ("kv_cache_config.enable_block_reuse", "maybe", "true or false"),
        ("scheduler_config.waiting_queue_policy", "LIFO", "'FCFS' or 'PRIORITY'"),
        ("scheduler_config.watermark", 1.0, "less than 1"),
        ("scheduler_config.watermark", -0.1, "at least 0"),
        ("scheduler_config.watermark", "nan", "it must be"),
        ("scheduler_config.max_preemptions", -1, "at least 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_key_and_limit(key: str, value: object, limit: str) -> None:
    message = refusal(overrides={key: value})
    assert message.startswith(f"flag: {key} is {value!r}; ")
    assert limit in message
    assert "\n" not in message


def test_every_fault_is_told_with_its_own_place(write: Write) -> None:
    path = write("max_batch_size: 0\nscheduler_config:\n  watermark: 2\n")
    lines = refusal(path, environ={"PAGEDKV_MAX_SEQ_LEN": "long"}).splitlines()
    assert sorted(lines) == [
        f"{path}:1: max_batch_size is 0; it must be at least 1",
        f"{path}:3: scheduler_config.watermark is 2; it must be less than 1.0",
        "environment PAGEDKV_MAX_SEQ_LEN: max_seq_len is 'long'; it must be a whole number",
    ]


def test_a_config_made_by_hand_raises_config_errors_too() -> None:
    with pytest.raises(ConfigError, match=r"^max_batch_size is 0; it must be at least 1$"):
        EngineConfig(max_batch_size=0)
    with pytest.raises(ConfigError, match=r"^watermark is 1; "):
        SchedulerConfig(watermark=1)
    with pytest.raises(ConfigError, match=r"^kv_cache_config.tokens_per_block is 17; "):
        EngineConfig(kv_cache_config={"tokens_per_block": 17})


def test_a_loaded_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig.load().max_batch_size = 3


# Files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 8\n\tx: 3", ":2: not valid YAML"),
        ("max_batch_size: 8\nx: [", ":2: not valid YAML"),
        ("max_batch_size: 8\n---\nmax_batch_size: 9", ":2: not valid YAML"),
        ("- 1", ":1: the file must be a mapping"),
        ("kv_cache_config: 3", ":1: kv_cache_config must be a mapping"),
        ("max_seq_len: 2026-99-99", ":1: '2026-99-99' cannot be read"),
        ("max_seq_len: &a [*a]", "not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []", ":1: not valid YAML"),
        ("model: a\0b", "cannot be read"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(write: Write, text: str, message: str) -> None:
    path = write(text)
    assert f"{path}" in refusal(path)
    assert message in refusal(path)


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 8\nmax_batch_size: 9",
        "kv_cache_config: {dtype: auto}\nkv_cache_config: {max_tokens: 9}",
        "kv_cache_config: {dtype: auto,\n dtype: float32}",
    ],
)
def test_a_repeated_key_is_refused(write: Write, text: str) -> None:
    path = write(text)
    message = refusal(path)
    assert message.startswith(f"{path}:2: ")
    assert f"a second time, first at {path}:1" in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read" in refusal(tmp_path / "none.yaml")


def test_keys_of_the_server_are_not_settings_of_an_engine() -> None:
    EngineConfig.load(None, {}, {"PAGEDKV_API_KEY": "a", "PAGEDKV_ADMIN_KEY": "b", "PAGEDKV_CACHE": "/c"})


def test_nim_names_are_understood_and_ours_go_before_them() -> None:
    environ = {"NIM_MAX_MODEL_LEN": "512", "NIM_ENABLE_KV_CACHE_REUSE": "0", "NIM_NUM_KV_CACHE_SEQ_LENS": "3"}
    config = EngineConfig.load(None, {}, environ)
    assert (config.max_seq_len, config.kv_cache_config.enable_block_reuse) == (512, False)
    assert config.kv_cache_config.num_full_sequences == 3
    shown = {setting.key: setting.place for setting in config.settings()}
    assert shown["max_seq_len"] == "environment NIM_MAX_MODEL_LEN"
    assert EngineConfig.load(None, {}, environ | {"PAGEDKV_MAX_SEQ_LEN": "64"}).max_seq_len == 64


def test_a_fraction_of_a_gpu_is_refused_by_nims_name_too() -> None:
    message = refusal(environ={"NIM_KVCACHE_PERCENT": "0.9"})
    assert message.startswith("environment NIM_KVCACHE_PERCENT: kv_cache_config.free_gpu_memory_fraction is a")


# The pool


def test_a_budget_of_full_sequences_is_that_many_times_the_longest() -> None:
    assert KVCacheConfig(num_full_sequences=3).num_pages(TINY, "float32", min_tokens=33) == 9
    assert KVCacheConfig(num_full_sequences=3, max_tokens=64).num_pages(TINY, "float32", min_tokens=33) == 4


def test_with_both_budgets_the_smaller_pool_is_made() -> None:
    size = page_bytes(TINY, 16, "float32")
    by_memory = KVCacheConfig(max_memory=5 * size, max_tokens=1600)
    by_tokens = KVCacheConfig(max_memory=500 * size, max_tokens=160)
    assert by_memory.num_pages(TINY, "float32") == 4
    assert by_tokens.num_pages(TINY, "float32") == 10


def test_a_budget_in_tokens_alone_is_what_it_says() -> None:
    """Failure 74 (vllm-project/vllm#31418): an explicit count was overwritten by what memory would allow."""
    assert KVCacheConfig(max_tokens=161).num_pages(TINY, "float32") == 11


def test_without_a_budget_the_pool_is_the_default_size() -> None:
    pages = KVCacheConfig().num_pages(TINY, "float32")
    assert pages + 1 == DEFAULT_MAX_MEMORY // page_bytes(TINY, 16, "float32")


@pytest.mark.parametrize("budget", [{"max_tokens": 16}, {"max_memory": 16 * 64 * 2}])
def test_a_pool_too_small_for_one_request_is_refused(budget: dict[str, int]) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match="one request of 17 tokens needs 2 pages"):
        KVCacheConfig(**budget).num_pages(TINY, "float32", min_tokens=17)
