"""Scene: the model, device and settings that a trace is simulated with, from what a command was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.budget import bytes_per_token, format_bytes, parse_bytes
from pagedkv.config import EngineConfig
from pagedkv.errors import ConfigError
from pagedkv.plan.catalog import find_model
from pagedkv.plan.compare import longest_request
from pagedkv.plan.planner import KV_DTYPES, Settings, plan_for
from pagedkv.plan.profiles import read_profile
from pagedkv.plan.steptime import StepTime, roofline
from pagedkv.plan.traces import Trace

_DEFAULTS = {"max_batch_size": 512, "max_num_tokens": 2048, "max_queue_size": 10**9}
"""Of a large GPU, where a file or flag says nothing; nobody is refused for the length of the queue."""

ConfigSources = tuple[Path | None, Mapping[str, Any], Mapping[str, str]]
"""File, flags and environment, as `EngineConfig.load` takes them."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a trace plays.

    Attributes:
        config: the scheduler's settings, with max_seq_len set.
        time: how long steps take. token_bytes: keys and values of a token, over all layers and on one rank.
        room: bytes for keys and values that the device has left; None if only --kv-memory can say.
        about: the scene in a sentence.
    """

    config: EngineConfig
    time: StepTime
    token_bytes: int
    room: int | None
    about: str

    @property
    def page_size(self) -> int:
        """Tokens of a page, as the settings have it."""
        return self.config.kv_cache_config.page_size

    @property
    def prefix_caching(self) -> bool:
        """Whether the settings let equal prefixes share pages."""
        return self.config.kv_cache_config.enable_block_reuse

    @classmethod
    def make(
        cls,
        trace: Trace,
        model: str,
        gpu: str,
        tp: int,
        dtype: str,
        kv_dtype: str,
        fraction: float,
        profile: Path | None,
        sources: ConfigSources,
    ) -> Scene:
        """A scene for a trace; max_seq_len is the trace's longest request, if nobody says another.

        Raises:
            ConfigError, ModelNotFoundError, OutOfMemoryBudgetError: see `EngineConfig.load` and `plan_for`.
        """
        config = EngineConfig.load(*sources)
        silent = {key: value for key, value in _DEFAULTS.items() if config.source_of(key) == "default"}
        page_size = config.kv_cache_config.page_size
        if profile is not None:
            measured = read_profile(profile)
            longest = config.max_seq_len or longest_request(trace, page_size, measured.max_seq_len)
            config = config.model_copy(update={**silent, "max_seq_len": longest})
            about = f"{trace.name}: {len(trace)} requests; {measured.model} as measured on {measured.machine}"
            return cls(config, measured.time, measured.token_bytes, None, about)
        spec = find_model(model).spec
        longest = config.max_seq_len or longest_request(trace, page_size, spec.max_seq_len)
        config = config.model_copy(update={**silent, "max_seq_len": longest})
        settings = Settings(
            tp, kv_dtype, page_size, longest, longest, fraction, config.max_batch_size, config.max_num_tokens
        )
        plan = plan_for(model, gpu, settings, dtype)
        about = (
            f"{trace.name}: {len(trace)} requests; {model} on {tp if tp > 1 else 'one'} {plan.device.name}, "
            f"{format_bytes(plan.room)} for keys and values; step times from the data sheet"
        )
        return cls(config, roofline(plan), bytes_per_token(spec.on_rank(tp), KV_DTYPES[kv_dtype]), plan.room, about)

    def budgets(self, given: Sequence[str] | None) -> list[int]:
        """Bytes for keys and values: those given, the settings', or the device's room.

        Raises:
            ConfigError: none of these is known.
        """
        if given:
            return [parse_bytes(text) for text in given]
        if self.config.kv_cache_config.max_memory is not None:
            return [self.config.kv_cache_config.max_memory]
        if self.room is None:
            raise ConfigError("a profile does not say how much memory there is; give --kv-memory")
        return [self.room]


def on_or_off(text: str) -> tuple[bool, ...]:
    """What --prefix-caching means."""
    choices = {"on": (True,), "off": (False,), "both": (True, False)}
    if text not in choices:
        raise ConfigError(f"--prefix-caching is {text!r}; it must be on, off or both")
    return choices[text]
