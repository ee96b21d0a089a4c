"""Advice: the settings that a plan suggests, why, and how other engines are told the same."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from pagedkv.plan.planner import Plan

_PAGE_SIZES = (64, 32, 16)
_TOKENS_BOUNDS = (512, 8192)


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings, and what limits the device.

    Attributes:
        reasons: one sentence for each setting, by its name.
        limits: what runs out first, in a sentence.
    """

    page_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    reasons: dict[str, str]
    limits: str


def advise(plan: Plan) -> Advice:
    """Settings for requests of avg_seq_len tokens on this device."""
    usual = min(plan.settings.avg_seq_len, plan.max_seq_len)
    page_size = next((size for size in _PAGE_SIZES if size / 2 <= usual / 100), _PAGE_SIZES[-1])
    batch = max(1, plan.requests(usual))
    knee = knee_tokens(plan)
    tokens = _TOKENS_BOUNDS[1] if knee is None else 1 << max(0, 4 * knee - 1).bit_length()
    tokens = max(_TOKENS_BOUNDS[0], min(tokens, _TOKENS_BOUNDS[1]), min(batch, _TOKENS_BOUNDS[1]))
    tokens = -(-tokens // page_size) * page_size
    reasons = {
        "page_size": f"half a page, what a request wastes on average, is {page_size / 2 / usual:.1%} of {usual} tokens",
        "max_batch_size": f"so many requests of {usual} tokens fit at once",
        "max_num_tokens": "bounded only by the activations: the device's speed is not known"
        if knee is None
        else f"a step computes for longer than it reads weights from about {knee} tokens on; four times that keeps "
        "the device busy, and a step short",
        "max_seq_len": "the longest that the model was made for and the memory holds",
    }
    return Advice(page_size, batch, tokens, plan.max_seq_len, reasons, _limits(plan, batch, usual, knee))


def knee_tokens(plan: Plan) -> int | None:
    """Tokens of a step above which computing takes longer than reading the weights; None for unknown devices.

    The ridge of the roofline (Williams et al. 2009): 2 operations per parameter and token, against its bytes.
    """
    device, weights = plan.device, plan.weights
    if not device.flops or not device.bandwidth:
        return None
    seconds_per_token = 2 * weights.active / plan.settings.tp / device.flops
    return max(1, round(weights.active_bytes / device.bandwidth / seconds_per_token))


def _limits(plan: Plan, batch: int, usual: int, knee: int | None) -> str:
    if knee is None or batch < knee:
        more = "" if knee is None else f"; the device could compute about {knee} tokens per step in the same time"
        return f"memory: {batch} requests of {usual} tokens fill it{more}"
    return f"speed: memory holds {batch} requests of {usual} tokens, more than the {knee} that a step computes for free"


def tensorrt_llm_yaml(plan: Plan, advice: Advice) -> str:
    """The options of TensorRT-LLM's `--config` that say the same.

    Its fraction is of the memory that is free once the model is loaded.
    """
    free = plan.device.memory - plan.device.used - plan.weights.rank_bytes - plan.activations
    cache = {
        "tokens_per_block": advice.page_size,
        "free_gpu_memory_fraction": round(min(plan.room / free, 1.0), 3),
        "max_tokens": plan.tokens,
        "dtype": "fp8" if plan.settings.kv_dtype == "fp8" else "auto",
        "enable_block_reuse": True,
    }
    tree = {
        "max_batch_size": advice.max_batch_size,
        "max_num_tokens": advice.max_num_tokens,
        "max_seq_len": advice.max_seq_len,
        "tensor_parallel_size": plan.settings.tp,
        "kv_cache_config": cache,
    }
    return yaml.safe_dump(tree, sort_keys=False)


def vllm_flags(plan: Plan, advice: Advice) -> str:
    """The flags of `vllm serve` that say the same."""
    dtype = "fp8" if plan.settings.kv_dtype == "fp8" else "auto"
    flags = {
        "tensor-parallel-size": plan.settings.tp,
        "max-num-seqs": advice.max_batch_size,
        "max-num-batched-tokens": advice.max_num_tokens,
        "max-model-len": advice.max_seq_len,
        "block-size": advice.page_size,
        "gpu-memory-utilization": plan.settings.fraction,
        "kv-cache-memory-bytes": plan.room,
        "kv-cache-dtype": dtype,
    }
    return " ".join(f"--{name} {value}" for name, value in flags.items()) + " --enable-prefix-caching"
