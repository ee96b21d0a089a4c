"""What a model's KV cache is made of: heads, dims and window of each layer that keeps keys and values.

Knows nothing about bytes, pages or budgets (see budget.py), and nothing about torch: a spec is built either from a
transformers-style config (`ModelSpec.from_config`) or, exactly, from a probe of the loaded model (models/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    Attributes:
        query_heads: number of query heads; a multiple of `kv_heads`.
        kv_heads: number of key/value heads (1 for multi-query attention).
        key_dim: elements per key head.
        value_dim: elements per value head (differs from `key_dim` in expanded MLA).
        window: tokens a query sees, itself included; None for full attention.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ConfigError(f"{self.query_heads} query heads do not divide into {self.kv_heads} KV heads")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}; it must be at least 1, or None for full attention")

    @property
    def elements_per_token(self) -> int:
        """Key and value elements that one token adds to this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def on_rank(self, tp: int) -> LayerSpec:
        """What each of `tp` tensor-parallel ranks keeps of this layer; see `rank_heads`.

        Raises:
            ConfigError: the heads do not divide among the ranks.
        """
        if tp < 1 or self.query_heads % tp:
            raise ConfigError(f"{self.query_heads} query heads do not divide among {tp} ranks")
        return replace(self, query_heads=self.query_heads // tp, kv_heads=len(rank_heads(self.kv_heads, tp, 0)))


def rank_heads(kv_heads: int, tp: int, rank: int) -> range:
    """The KV heads that a tensor-parallel rank keeps. With fewer heads than ranks, neighbours keep the same one.

    ::

        8 heads, 4 ranks    0 1 | 2 3 | 4 5 | 6 7
        2 heads, 4 ranks     0  |  0  |  1  |  1        replicated twice; the model still has 2

    Raises:
        ConfigError: neither number divides the other.
    """
    if tp < 1 or (kv_heads % tp and tp % kv_heads):
        raise ConfigError(f"{kv_heads} KV heads do not divide among {tp} ranks, nor ranks among heads")
    first = rank * kv_heads // tp
    return range(first, first + max(1, kv_heads // tp))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The attention layers of a model, in order, and the longest sequence it was made for."""

    name: str
    layers: tuple[LayerSpec, ...]
    max_seq_len: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name!r} has no layer that keeps keys and values")

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return sum(layer.elements_per_token for layer in self.layers)

    def on_rank(self, tp: int) -> ModelSpec:
        """What each of `tp` tensor-parallel ranks keeps: its heads of every layer; a single head is kept by all.

        Raises:
            ConfigError: the heads of a layer do not divide among the ranks.
        """
        return replace(self, layers=tuple(layer.on_rank(tp) for layer in self.layers))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "", *, latent: bool = False) -> ModelSpec:
        """Read a transformers config (as a mapping: `config.to_dict()` or config.json).

        A config that nests its language model under `text_config` is read there. `head_dim` is taken from the config
        where it is stated, and from hidden_size / heads only where it is not. A window of -1, 0 or null means full
        attention. Latent attention (`kv_lora_rank`) is counted expanded, which is how the engine stores it; with
        `latent`, as GPU kernels store it (FlashInfer's ckv and kpe): one KV head for all query heads, whose "key" is
        the latent vector and whose "value" is the rotary part of the key.
        `layer_types`, where present, says which layers keep a window, and which keep no keys and values at all
        (linear attention, convolutions): those are left out.

        Raises:
            ConfigError: if a size is missing, or no layer keeps keys and values.
        """
        name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
        config = config.get("text_config") or config
        try:
            depth, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            if config.get("kv_lora_rank") and latent:
                kv_heads, key_dim, value_dim = 1, int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
            elif config.get("kv_lora_rank"):
                key_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
                value_dim = int(config["v_head_dim"])
            else:
                key_dim = value_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        except KeyError as missing:
            raise ConfigError(f"config of {name} has no {missing}") from None
        return cls(
            name=name,
            layers=tuple(LayerSpec(heads, kv_heads, key_dim, value_dim, window) for window in _windows(config, depth)),
            max_seq_len=int(config.get("max_position_embeddings") or 2048),
            vocab_size=int(config.get("vocab_size") or 0),
        )


_STATELESS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"})
"""Kinds of layer, as `layer_types` calls them, that keep no keys and values."""


def _windows(config: Mapping[str, Any], depth: int) -> list[int | None]:
    """The window of each layer that keeps keys and values; None where the layer attends to everything."""
    size = config.get("sliding_window")
    window = int(size) if isinstance(size, int) and size > 0 else None
    if config.get("use_sliding_window") is False:
        window = None
    kinds = config.get("layer_types")
    if not kinds:
        # Qwen2's rule: with `use_sliding_window`, the first `max_window_layers` layers still see everything.
        full = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else 0
        return [None if layer < full else window for layer in range(depth)]
    if len(kinds) != depth:
        raise ConfigError(f"layer_types names {len(kinds)} layers; the model has {depth}")
    return [window if kind == "sliding_attention" else None for kind in kinds if kind not in _STATELESS]
