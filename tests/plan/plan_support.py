"""Tiny models and devices to plan for."""

from __future__ import annotations

from typing import Any

from pagedkv.plan.catalog import Model
from pagedkv.plan.hardware import Device
from pagedkv.plan.planner import RUNTIME_BYTES, Plan, Settings, activation_bytes, make_plan
from pagedkv.plan.weights import Weights
from pagedkv.spec import LayerSpec, ModelSpec


def tiny_model(*windows: int | None, kv_heads: int = 2, max_seq_len: int = 64) -> Model:
    """A model with one layer for each window; a token takes kv_heads x 16 elements in each."""
    layers = tuple(LayerSpec(4, kv_heads, 8, 8, window) for window in windows or (None,))
    config: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return Model("tiny", "tiny", config, ModelSpec("tiny", layers, max_seq_len, 100), None)


def tiny_plan(room: int, model: Model | None = None, weights: int = 1000, **settings: Any) -> Plan:
    """A plan on a device that leaves just so many bytes for keys and values."""
    model = model or tiny_model()
    chosen = Settings(**{"page_size": 4, "fraction": 1.0, "max_num_tokens": 8, "max_batch_size": 2, **settings})
    memory = room + weights + activation_bytes(model, chosen) + RUNTIME_BYTES
    return make_plan(model, Device("tiny", memory), Weights(0, 0, weights, weights, weights, "given"), chosen)
