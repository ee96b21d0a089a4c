"""A plan's bytes are those that the store allocates, and its most requests those that the manager admits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from pagedkv.attention.interface import AttentionBackend
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.cache import Admitted, GroupedManager, KVCacheManager, LayerGroup
from pagedkv.plan.catalog import Model, find_model
from pagedkv.plan.hardware import Device
from pagedkv.plan.planner import KV_DTYPES, RUNTIME_BYTES, Plan, Settings, activation_bytes, make_plan
from pagedkv.plan.weights import Weights
from pagedkv.store.pages import PageStore

MODELS = (
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3.2-1b",
    "llama-3.1-405b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "mistral-7b-v0.1",
    "mistral-nemo-12b",
    "gemma-2-9b",
    "gemma-3-1b",
    "gemma-3-27b",
    "phi-2",
    "phi-3-mini-4k",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "smollm2-135m",
)
ROOM = 4 * 1024**3
STEP = 512
LENGTH = 700


@cache
def model_of(name: str) -> Model:
    return find_model(name)


def planned(name: str, kv_dtype: str) -> Plan:
    """A plan for a device that leaves 4 GiB for keys and values."""
    model = model_of(name)
    settings = Settings(kv_dtype=kv_dtype, avg_seq_len=LENGTH, fraction=1.0, max_num_tokens=STEP, max_seq_len=2048)
    memory = ROOM + activation_bytes(model, settings) + RUNTIME_BYTES
    return make_plan(model, Device("test", memory), Weights(0, 0, 0, 0, 0, "none"), settings)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_the_stores(name: str, kv_dtype: str) -> None:
    plan = planned(name, kv_dtype)
    backend: AttentionBackend = ReferenceBackend()
    dtype = getattr(torch, KV_DTYPES[kv_dtype])
    with torch.device("meta"):
        stores = [PageStore(group.spec, backend, group.pages, 16, dtype) for group in plan.groups]
    for store, group in zip(stores, plan.groups, strict=True):
        assert store.nbytes == (group.pages + 1) * group.page_bytes
    assert ROOM - plan.groups[0].page_bytes < sum(store.nbytes for store in stores) <= ROOM


def admitted(plan: Plan, tokens: int) -> int:
    """How many requests of so many tokens a manager of the plan's pages takes, until one has to wait."""
    rows = plan.requests(tokens) + 2
    manager: KVCacheManager | GroupedManager
    if len(plan.groups) == 1 and plan.groups[0].window is None:
        manager = KVCacheManager(plan.pages, 16, max_rows=rows, max_seq_len=plan.max_seq_len)
    else:
        groups = [LayerGroup(str(g.window), g.pages, g.page_bytes, g.window) for g in plan.groups]
        manager = GroupedManager(groups, 16, max_rows=rows, max_seq_len=plan.max_seq_len, step=STEP)
    count = 0
    while isinstance(manager.admit(np.arange(count, count + tokens, dtype=np.int32)), Admitted):
        count += 1
    return count


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_most_requests_are_what_the_manager_admits(name: str, kv_dtype: str) -> None:
    plan = planned(name, kv_dtype)
    assert plan.requests(LENGTH) >= 1
    assert admitted(plan, LENGTH) == plan.requests(LENGTH)
    assert admitted(plan, 2048) == plan.requests(2048)
