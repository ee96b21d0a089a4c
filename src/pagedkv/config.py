"""The settings: one tree with TensorRT-LLM's YAML names; an unknown key is an error.

    cfg = EngineConfig.load("engine.yaml", {"max_batch_size": 64}, os.environ)
    cfg.kv_cache_config.page_size, cfg.source_of("max_batch_size")           # 16, "flag"

A flag beats the environment, which beats the file, which beats the default. Only options that are implemented
exist; an option of TensorRT-LLM that is not is refused by name, so that no setting is accepted and then ignored.
Knows nothing about devices or the loaded model, and how the sources are written down is config_sources.py's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from pagedkv.budget import pages_for_tokens, pages_in_budget, parse_bytes
from pagedkv.config_sources import Found, read_environment, read_file, read_flags
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.spec import ModelSpec

DEFAULT_MAX_MEMORY = 1024**3
"""Budget of the page pool in bytes when neither `max_memory` nor `max_tokens` is given: 1 GiB."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})

_ALIASES = MappingProxyType(
    {
        "kv_cache_config.max_gpu_total_bytes": "kv_cache_config.max_memory",
        "kv_cache_config.page_size": "kv_cache_config.tokens_per_block",
    }
)

_NOT_IMPLEMENTED = MappingProxyType(
    {
        "cuda_graph_config": "there is no CUDA graph to configure",
        "enable_chunked_prefill": "prefill is always chunked; max_num_tokens bounds a step",
        "lora_config": "adapters are not served",
        "max_beam_width": "beam search is not served",
        "max_input_len": "only prompt and answer together are bounded, by max_seq_len",
        "pipeline_parallel_size": "a model runs on one device",
        "quant_config": "weights are used as the model stores them",
        "speculative_config": "speculative decoding is not served",
        "tensor_parallel_size": "a model runs on one device",
        "kv_cache_config.avg_seq_len": "the pool is not split by an expected length",
        "kv_cache_config.copy_on_partial_reuse": "a part of a page is always copied, never moved",
        "kv_cache_config.event_buffer_max_size": "buffer_steps of `pagedkv serve --kv-events-config` bounds them",
        "kv_cache_config.free_gpu_memory_fraction": "the budget is absolute: max_memory or max_tokens",
        "kv_cache_config.host_cache_size": "there is no second tier of memory",
        "kv_cache_config.iteration_stats_interval": "statistics are kept for every step",
        "kv_cache_config.kv_events_config": "`pagedkv serve` takes it as --kv-events-config",
        "kv_cache_config.max_attention_window": "windows are the model's own",
        "kv_cache_config.max_util_for_resume": "scheduler_config.watermark holds pages back",
        "kv_cache_config.pool_ratio": "the pool is not split by an expected length",
        "kv_cache_config.secondary_offload_min_priority": "there is no second tier of memory",
        "scheduler_config.context_chunking_policy": "first come, first chunked",
        "scheduler_config.dynamic_batch_config": "the batch follows demand by itself",
    }
)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("it must be a number")  # YAML's `true` would pass for 1
    return value


def _whole_pages(value: int) -> int:
    if value % 16:
        raise ValueError("it must be a multiple of 16")
    return value


def _not_static(value: Any) -> Any:
    if value == "STATIC_BATCH":
        raise ValueError("it is a TensorRT-LLM policy that pagedkv does not implement: batches are never static")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Whole, Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class _SettingsError(ConfigError):
    """The faults of one tree: (dotted key, what is wrong). A section raises it, and the tree adds its own."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"{key} {text}" for key, text in faults))


def _faults(error: ValidationError) -> Iterator[tuple[str, str]]:
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        inner = fault.get("ctx", {}).get("error")
        if isinstance(inner, _SettingsError):
            yield from ((f"{key}.{name}" if key else name, text) for name, text in inner.faults)
        else:
            yield key, f"is {fault['input']!r}; {_limit(fault)}"


def _limit(fault: Any) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    bounds = {
        "greater_than_equal": "it must be at least {ge}",
        "less_than_equal": "it must be at most {le}",
        "less_than": "it must be less than {lt}",
        "literal_error": "it must be {expected}",
        "value_error": "{error}",
        "int_parsing": "it must be a whole number",
        "int_from_float": "it must be a whole number",
        "int_type": "it must be a whole number",
        "float_parsing": "it must be a number",
        "float_type": "it must be a number",
        "bool_parsing": "it must be true or false",
        "bool_type": "it must be true or false",
        "string_type": "it must be a text",
        "extra_forbidden": "there is no such setting",
    }
    return bounds[kind].format(**context) if kind in bounds else str(fault["msg"])


class _Settings(BaseModel):
    """Frozen settings whose errors are ConfigError, whichever way they are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _SettingsError(list(_faults(error))) from None


class KVCacheConfig(_Settings):
    """The page pool.

    Attributes:
        max_memory: bytes for keys and values, or a text such as "256MiB"; alias `max_gpu_total_bytes`.
        max_tokens: the budget in tokens instead. With both, the smaller pool is made, as in TensorRT-LLM;
            with neither (nor num_full_sequences), 1 GiB.
        num_full_sequences: the budget as so many sequences of max_seq_len tokens, as NIM_NUM_KV_CACHE_SEQ_LENS says it.
        tokens_per_block: tokens of a page, a multiple of 16 in 16..1024; alias `page_size`. 16 where TensorRT-LLM
            has 32: prefixes are shared in whole pages, so a smaller page shares more and wastes less (half a
            page per request on average), and 16 tokens are what the CPU kernel's vector holds.
        dtype: element type of keys and values; "auto" is bfloat16, half the bytes of float32.
        enable_block_reuse: share the pages of equal prefixes between requests.
        enable_partial_reuse: where a prompt diverges inside a cached page, copy the part that matches.
    """

    max_memory: Bytes | None = Field(default=None, validation_alias=AliasChoices("max_memory", "max_gpu_total_bytes"))
    max_tokens: Count | None = None
    num_full_sequences: Count | None = None
    tokens_per_block: Annotated[Whole, AfterValidator(_whole_pages)] = Field(
        default=16, ge=16, le=1024, validation_alias=AliasChoices("tokens_per_block", "page_size")
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.tokens_per_block

    def num_pages(self, spec: ModelSpec, kv_dtype: str, min_tokens: int = 1) -> int:
        """Usable pages of the pool that this budget makes for a model; `min_tokens` is what its longest request stores.

        Raises:
            OutOfMemoryBudgetError: if a request that stores `min_tokens` tokens would not fit.
        """
        choices = []
        if self.max_tokens is not None:
            pages, needed = (pages_for_tokens(tokens, self.page_size) for tokens in (self.max_tokens, min_tokens))
            if pages < needed:
                raise OutOfMemoryBudgetError(
                    f"kv_cache_config.max_tokens is {self.max_tokens}: {pages} pages of {self.page_size}; "
                    f"one request of {min_tokens} tokens needs {needed} pages"
                )
            choices.append(pages)
        if self.num_full_sequences is not None:
            choices.append(self.num_full_sequences * pages_for_tokens(min_tokens, self.page_size))
        if self.max_memory is not None or not choices:
            memory = self.max_memory or DEFAULT_MAX_MEMORY
            choices.append(pages_in_budget(memory, spec, self.page_size, kv_dtype, min_tokens))
        return min(choices)


class SchedulerConfig(_Settings):
    """Who gets pages, and what happens when none are left.

    Attributes:
        capacity_scheduler_policy: MAX_UTILIZATION takes pages step by step and preempts when they run out;
            GUARANTEED_NO_EVICT reserves prompt + max_tokens at admission and never preempts. The default
            differs from TensorRT-LLM's: to hand out pages on demand is what pages are for.
        waiting_queue_policy: FCFS, or PRIORITY (then FCFS among equals).
        watermark: share of the pages kept free when a new request is admitted, in [0, 1).
        max_preemptions: after so many, a request is readmitted only with its whole reservation, so that it is
            never preempted again.
    """

    capacity_scheduler_policy: Annotated[
        Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"], BeforeValidator(_not_static)
    ] = "MAX_UTILIZATION"
    waiting_queue_policy: Literal["FCFS", "PRIORITY"] = "FCFS"
    watermark: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_no_bool)] = 0.01
    max_preemptions: Annotated[Whole, Field(ge=0)] = 3


class Setting(NamedTuple):
    """A key, its value, and who set it: "flag", "environment PAGEDKV_...", "engine.yaml:7" or "default"."""

    key: str
    value: Any
    place: str


class EngineConfig(_Settings):
    """All settings of an engine.

    Attributes:
        model: a Hugging Face id or a local folder; None for the embedded default model.
        dtype: element type of the weights; "auto" is the model's own.
        max_batch_size: requests computed at once.
        max_num_tokens: tokens of one step, decodes and prefill chunks together. TensorRT-LLM's 8192 suits a large
            GPU; on a few CPU cores such a step would take up to a minute, in which no running request gets a
            token. 512 keeps a step short and is still wide enough for matrix products at full speed. At least 2, so
            that decodes and prompts can share a step.
        max_seq_len: longest prompt and answer together, in tokens; None for the model's own limit.
        max_queue_size: requests that may wait; one more is refused (QueueFullError).
        max_queue_tokens: tokens that the prompts of waiting requests may come to; None for no limit. Where nothing
            waits, a prompt of any length may.
    """

    model: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_batch_size: Count = 256
    max_num_tokens: Annotated[Whole, Field(ge=2)] = 512
    max_seq_len: Count | None = None
    max_queue_size: Count = 4096
    max_queue_tokens: Count | None = None
    kv_cache_config: KVCacheConfig = KVCacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()

    _sources: dict[str, tuple[str, str]] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        overrides: Mapping[str, Any] = _NOTHING,
        environ: Mapping[str, str] = _NOTHING,
    ) -> EngineConfig:
        """The settings of a YAML file, the environment and flags, the last one winning.

        Args:
            path: a YAML file, or None.
            overrides: values of flags, nested or by dotted key ("kv_cache_config.max_memory"); None means that the
                flag was not given.
            environ: the environment (`os.environ`): PAGEDKV_MAX_BATCH_SIZE, PAGEDKV_KV_CACHE_CONFIG__MAX_MEMORY
                and so on, and NIM's names for some of them. An empty variable counts as not set; the text `null`
                means None.

        Raises:
            ConfigError: for an unreadable file, an unknown or unimplemented key, or values out of range; the
                message says where each stands (file and line, variable, or flag), its value and the limit.
        """
        sources = [
            ("file", read_file(Path(path), _SECTIONS) if path is not None else {}),
            ("environment", read_environment(environ)),
            ("flag", read_flags(overrides)),
        ]
        values: dict[str, Any] = {}
        origin: dict[str, tuple[str, str]] = {}
        for source, found in sources:
            for key, (value, place) in _canonical(found).items():
                values[key], origin[key] = value, (source, place)
        tree: dict[str, Any] = {}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = value
        places = {key: place for key, (_, place) in origin.items()}
        try:
            loaded = cls(**tree)
        except _SettingsError as error:
            lines = [f"{places.get(key, 'settings')}: {key} {text}" for key, text in error.faults]
            raise ConfigError("\n".join(lines)) from None
        loaded._sources.update(origin)
        return loaded

    def source_of(self, key: str) -> str:
        """Which source set a key ("kv_cache_config.max_memory"): flag, environment, file or default."""
        return self._sources.get(_known_key(key, "source_of"), ("default", ""))[0]

    def settings(self) -> Iterator[Setting]:
        """Every setting with its value and place, in the order of the tree."""
        for key in _known_keys():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, name)
            yield Setting(key, value, self._sources.get(key, ("", "default"))[1])


_SECTIONS: Mapping[str, type[_Settings]] = MappingProxyType(
    {"kv_cache_config": KVCacheConfig, "scheduler_config": SchedulerConfig}
)


def _known_keys() -> list[str]:
    """Dotted names of all settings, in the order of the tree."""
    keys = [name for name in EngineConfig.model_fields if name not in _SECTIONS]
    return keys + [f"{section}.{name}" for section, kind in _SECTIONS.items() for name in kind.model_fields]


def _known_key(key: str, place: str) -> str:
    """The canonical name of a key; ConfigError, with the nearest known names, where there is none."""
    key = _ALIASES.get(key, key)
    known = _known_keys()
    if key in known:
        return key
    if reason := _NOT_IMPLEMENTED.get(key):
        raise ConfigError(f"{place}: {key} is a TensorRT-LLM option that pagedkv does not implement: {reason}")
    if key in _SECTIONS:
        raise ConfigError(f"{place}: {key} must be a mapping of names to values")
    names = [*known, *_ALIASES]
    last = key.rpartition(".")[2]
    moved = [name for name in names if name.rpartition(".")[2] == last]  # the right name in the wrong section
    nearest = moved or difflib.get_close_matches(key, names, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known are {', '.join(known)}"
    raise ConfigError(f"{place}: {key} is not a setting; {hint}")


def _canonical(found: Found) -> Found:
    """The values of one source under their canonical names; two names for one setting are refused."""
    result: Found = {}
    given: dict[str, str] = {}
    for key, (value, place) in found.items():
        name = _known_key(key, place)
        if name in result:
            raise ConfigError(f"{place}: {key} sets what {given[name]} ({result[name][1]}) has set already")
        result[name], given[name] = (value, place), key
    return result
