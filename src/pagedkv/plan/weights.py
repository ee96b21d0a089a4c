"""Weights: how many bytes a model's parameters take on each device, from its config alone.

The model is instantiated on torch's meta device, which has shapes and no bytes: ties, biases and experts count as the
architecture has them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import ConfigError, UnsupportedModelError
from pagedkv.plan.catalog import Model
from pagedkv.spec import rank_heads

_PLAIN = {"bfloat16": 2, "float16": 2, "float32": 4}
WEIGHT_DTYPES = ("auto", *_PLAIN, "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a model are stored: `bits` each, and `scale_bits` for every `group` of them in a row.

    Attributes:
        block: rows that share a scale (DeepSeek's fp8 scales blocks of 128 x 128).
        spared: patterns of module names that are not quantised.
    """

    bits: float
    scale_bits: float = 0.0
    group: int = 0  # 0: one scale per row
    block: int = 1
    spared: tuple[str, ...] = ()

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix, or a stack of them, [..., rows, columns], with its scales."""
        *stack, rows, columns = shape
        groups = math.ceil(rows / self.block) * (math.ceil(columns / self.group) if self.group else 1)
        return math.ceil(math.prod(stack) * (rows * columns * self.bits + groups * self.scale_bits) / 8)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's parameters.

    Attributes:
        parameters: in all; tied ones once.
        active: those that one token is multiplied with: without the embedding table, and of the experts its own.
        nbytes: of all of them, as stored.
        rank_bytes: what one tensor-parallel rank holds of them.
        active_bytes: what a rank reads of them for one token.
        expert_bytes: what a rank holds in routed experts. expert_share: the share of these that one token meets.
        dtype: how they are stored, in words.
    """

    parameters: int
    active: int
    nbytes: int
    rank_bytes: int
    active_bytes: int
    dtype: str
    expert_bytes: int = 0
    expert_share: float = 1.0


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    matrix: bool  # may be quantised
    expert: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def count_weights(model: Model, dtype: str = "auto", tp: int = 1) -> Weights:
    """Bytes of the weights in this dtype; "auto" is what the config says, or bfloat16.

    On a rank: matrices and embeddings are cut in `tp`, keys' and values' by their heads (fewer heads than ranks are
    replicated); vectors, routers and the down projections of latent attention are on every rank, as in vLLM.

    Raises:
        ConfigError: an unknown dtype, or heads that do not divide among the ranks.
        UnsupportedModelError: transformers does not know the architecture.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"weight dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    scheme, plain, words = _storage(model, dtype)
    share = _expert_share(model.config)
    total = active = nbytes = rank_bytes = active_bytes = expert_bytes = 0
    tied = bool(model.config.get("tie_word_embeddings"))
    for one in _parameters(model):
        quantised = scheme is not None and one.matrix and not _spared(one.name, scheme)
        size = scheme.nbytes(one.shape) if quantised and scheme else one.numel * plain
        mine = math.ceil(size * _rank_share(one, model, tp))
        used = share if one.expert else 0.0 if "embed" in one.name and not tied else 1.0
        total += one.numel
        nbytes += size
        rank_bytes += mine
        active += round(one.numel * used)
        active_bytes += round(mine * used)
        expert_bytes += mine if one.expert else 0
    return Weights(total, active, nbytes, rank_bytes, active_bytes, words, expert_bytes, share)


def given_weights(nbytes: int, tp: int = 1) -> Weights:
    """Weights of which only the bytes are known: taken for bfloat16 and cut evenly."""
    parameters, mine = nbytes // 2, math.ceil(nbytes / tp)
    return Weights(parameters, parameters, nbytes, mine, mine, "given")


def _storage(model: Model, dtype: str) -> tuple[Scheme | None, int, str]:
    """The scheme of matrices, bytes of everything else, and both in words."""
    if dtype in _PLAIN:
        return None, _PLAIN[dtype], dtype
    if dtype != "auto":
        scheme = {"fp8": Scheme(8, 32), "int8": Scheme(8, 32), "int4": Scheme(4, 20, 128)}[dtype]
        return scheme, 2, f"{dtype}, the rest bfloat16"
    own = model.config.get("dtype") or model.config.get("torch_dtype") or "bfloat16"
    name = str(own).removeprefix("torch.")
    plain = _PLAIN.get(name, 2)
    if not model.quantization:
        return None, plain, name
    return _scheme(model.quantization, model.name), plain, f"{model.quantization.get('quant_method')}, the rest {name}"


def _scheme(config: Mapping[str, Any], name: str) -> Scheme:
    """What a `quantization_config` means in bits."""
    method = config.get("quant_method") or ("bitsandbytes" if config.get("load_in_4bit") else None)
    spared = tuple(config.get("modules_to_not_convert") or config.get("ignore") or ())
    group = max(int(config.get("group_size") or 128), 0)
    bits = int(config.get("bits") or 4)
    if method == "fp8" and config.get("weight_block_size"):
        rows, columns = config["weight_block_size"]
        return Scheme(8, 32, columns, rows, spared)
    schemes = {
        "fp8": Scheme(8, 32, spared=spared),
        "fbgemm_fp8": Scheme(8, 32, spared=spared),
        "mxfp4": Scheme(4, 8, 32, spared=spared),
        "awq": Scheme(bits, 16 + bits, group, spared=spared),
        "gptq": Scheme(bits, 16 + bits, group, spared=spared),
        "bitsandbytes": Scheme(4, 32, 64, spared=spared) if config.get("load_in_4bit") else Scheme(8, 32),
    }
    if method not in schemes:
        raise ConfigError(
            f"{name} is quantised by {method!r}, of which the planner knows no size; "
            f"known are {', '.join(schemes)}; say --dtype or --weight-bytes"
        )
    return schemes[method]


def _parameters(model: Model) -> Iterator[_Parameter]:
    """Every stored parameter once, tied ones under their first name."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"counting weights needs {missing.name!r}: pip install 'pagedkv[engine]'; or say --weight-bytes"
        ) from None
    config = {key: value for key, value in model.config.items() if key != "dtype"}
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            module = auto.from_config(AutoConfig.for_model(**config))
    except (ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(f"{model.name}: {reason}; say --weight-bytes to plan all the same") from None
    linear = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        stacked = tensor.ndim >= 3 and "expert" in name
        is_head = "lm_head" in name or "embed" in name
        expert = "expert" in name and "shared" not in name and tensor.ndim >= 2
        yield _Parameter(name, tuple(tensor.shape), (name in linear and not is_head) or stacked, expert)


def _spared(name: str, scheme: Scheme) -> bool:
    """Does a pattern of names ("model.layers.*.self_attn", "lm_head") say that this parameter is not quantised?"""
    return any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in scheme.spared)


def _expert_share(config: Mapping[str, Any]) -> float:
    """The share of the routed experts that one token uses."""
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if config.get(key):
            return min(1.0, int(config.get("num_experts_per_tok") or 1) / int(config[key]))
    return 1.0


def _rank_share(one: _Parameter, model: Model, tp: int) -> float:
    """The share of a parameter that one rank holds."""
    module = one.name.rsplit(".", 2)[-2] if "." in one.name else one.name
    if tp == 1 or len(one.shape) < 2 or module in ("gate", "router", "q_a_proj", "kv_a_proj_with_mqa"):
        return 1.0
    heads = model.size("num_attention_heads")
    kv_heads = model.size("num_key_value_heads", heads)
    kept = len(rank_heads(kv_heads, tp, 0))
    if module in ("k_proj", "v_proj"):
        return kept / kv_heads
    if module == "qkv_proj":
        return (heads / tp + 2 * kept) / (heads + 2 * kv_heads)
    return 1.0 / tp
